"""The replay kernels by name."""

from kvsim_kernels.replay.common import FIELDS
from kvsim_kernels.replay.general import replay_general
from kvsim_kernels.replay.resident import replay_resident
from kvsim_kernels.replay.window import replay_window

__all__ = ["FIELDS", "replay_general", "replay_resident", "replay_window"]
