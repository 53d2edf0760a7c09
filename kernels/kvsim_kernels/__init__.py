"""Kernels of kvsim: one folder for each operation, a plain PyTorch reference beside every Triton kernel.

Nothing is imported here, so that ``import kvsim_kernels`` needs neither torch nor triton; import an operation by its
name, for example ``from kvsim_kernels.attention_rows import attention_row``.
"""
