"""What tests of kernels share: where they run, in which types, and how errors are measured."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's products of bfloat16 are wrong.
TYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def normal(*shape, seed=0, dtype=torch.float32):
    """Draw standard normal numbers, the same ones on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def ints(*numbers, dtype=torch.int32):
    """Put integers on the device."""
    return torch.tensor(numbers, device=DEVICE, dtype=dtype)


def error(found, exact):
    """Relative error in the Euclidean norm, against a float64 reference."""
    assert exact.dtype == torch.float64
    assert found.shape == exact.shape
    size = exact.norm()
    return float((found.double() - exact).norm() / (size if size else 1))
