"""Dense causal attention by every library at hand, with one face: [H, L, d] and [Hk, L, d] in, [H, L, d] out."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvsim.errors import KvsimError

__all__ = ["BASE", "Attention", "dense_attention", "dense_names", "find_flash_4"]

BASE = "FlashAttention-2"
"""What whole prefills of the full cache run."""

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_BACKENDS = {BASE: SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION, "SDPA math": SDPBackend.MATH}


def dense_names(*, on_gpu: bool) -> tuple[str, ...]:
    """Name what is compared with; a CPU has only plain PyTorch."""
    return (BASE, "cuDNN", "flash-attn-4") if on_gpu else ("SDPA math",)


def dense_attention(name: str) -> Attention:
    """Give the causal attention of that name.

    ``FlashAttention-2`` and ``cuDNN`` are the backends of `torch.nn.functional.scaled_dot_product_attention`.
    ``flash-attn-4`` is the package of that name.

    Raises
    ------
    KvsimError
        If flash-attn-4 cannot be imported.
    """
    if name == "flash-attn-4":
        attend = find_flash_4().flash_attn_func

        def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            found: Any = attend(q, k, v, causal=True)
            output: torch.Tensor = (found[0] if isinstance(found, tuple) else found)[0].transpose(0, 1)
            return output

        return flash

    def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(_BACKENDS[name]):
            found = scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, enable_gqa=True)
        return found[0]

    return sdpa


def find_flash_4() -> Any:
    """Import flash-attn-4, whose compiler lies in a folder that Python does not search by itself.

    Raises
    ------
    KvsimError
        If it or something that it needs is not installed.
    """
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    folders: Sequence[str] = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        packages = str(Path(folder) / "dsl_packages")
        if packages not in sys.path:
            sys.path.append(packages)
    try:
        return importlib.import_module("flash_attn.cute")
    except (ImportError, AttributeError) as error:
        raise KvsimError(f"flash-attn-4 is not installed: {error}") from None
