"""Kernels run on a GPU where there is one, and in Triton's interpreter elsewhere."""

import os

import torch

# Triton reads this when it is first imported, which transformers does.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Triton 3.9 warns where this is not said.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
