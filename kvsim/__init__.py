"""Trace-driven simulator for the KV caches of language models.

>>> import kvsim
>>> trace = kvsim.open_trace("traces/samples/smollm2-needle-512")
>>> kvsim.replay(trace, "ema:0.9", compression_ratio=0.9).summary()["kept_mass"]  # doctest: +SKIP
"""

from kvsim_traces import Trace, TraceError, open_trace

from kvsim import oracle
from kvsim import policies as _policies  # noqa: F401  registers every policy
from kvsim.budget import Budget
from kvsim.errors import KvsimError, PolicyError
from kvsim.policy import Policy, parse
from kvsim.protect import Protect
from kvsim.replay import replay, replay_many
from kvsim.result import Result
from kvsim.sweep import sweep
from kvsim.version import __version__

__all__ = [
    "Budget",
    "KvsimError",
    "Policy",
    "PolicyError",
    "Protect",
    "Result",
    "Trace",
    "TraceError",
    "__version__",
    "open_trace",
    "oracle",
    "parse",
    "replay",
    "replay_many",
    "sweep",
]
