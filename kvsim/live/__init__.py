"""Live decoding: the policy that replays a recording, run in a real model (needs torch and transformers)."""

from kvsim.live.cache import KVSimCache
from kvsim.live.decode import LiveRun, decode
from kvsim.live.keepers import prefill_under
from kvsim.live.prefix import Prefix, prefill, prefix_of_trace

__all__ = ["KVSimCache", "LiveRun", "Prefix", "decode", "prefill", "prefill_under", "prefix_of_trace"]
