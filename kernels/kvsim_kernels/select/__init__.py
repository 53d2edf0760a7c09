"""Which slots of a cache stay: all at once after the prompt, or one that leaves at each step."""

from kvsim_kernels.select.reference import Evicted, Survivors, select_evicted, select_survivors

__all__ = ["Evicted", "Survivors", "select_evicted", "select_survivors"]
