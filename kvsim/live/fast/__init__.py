"""Live decoding by kernels, a CUDA graph a step: the plain form's answers, faster (needs triton)."""

from kvsim.live.fast.decode import decode_fast

__all__ = ["decode_fast"]
