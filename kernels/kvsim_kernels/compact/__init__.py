"""Move what stays of a cache into a smaller one."""

from kvsim_kernels.compact.reference import compact

__all__ = ["compact"]
