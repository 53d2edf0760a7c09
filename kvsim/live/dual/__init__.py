"""The dual cache of WG-KV section 4 on the device: a ring of recent tokens and admitted ones, in one pool of pages."""

from kvsim.live.dual.pool import Pool, PoolFullError
from kvsim.live.dual.prefill import PooledPrefix, prefill_pooled
from kvsim.live.dual.session import DualSession

__all__ = ["DualSession", "Pool", "PoolFullError", "PooledPrefix", "prefill_pooled"]
