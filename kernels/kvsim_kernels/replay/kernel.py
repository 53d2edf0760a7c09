"""The two replay kernels by name."""

from kvsim_kernels.replay.common import FIELDS
from kvsim_kernels.replay.general import replay_general
from kvsim_kernels.replay.resident import replay_resident

__all__ = ["FIELDS", "replay_general", "replay_resident"]
