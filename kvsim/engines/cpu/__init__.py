"""The Numba engine: reads survivors only, from token-major float16 rows; equal to the reference in `evicted_at`."""

from kvsim.engines.cpu.engine import run, run_many

__all__ = ["run", "run_many"]
