"""Who computes a fast step's attention output: our kernel, PyTorch's SDPA or flash-attn-4."""

import importlib
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import torch
from kvsim_kernels.decode_attention.reference import visible_slots

from kvsim.errors import KvsimError, unknown_name
from kvsim.live.fast.slots import Slots

__all__ = ["ATTENTIONS", "Backend", "attention_backend"]

ATTENTIONS = ("triton", "sdpa", "flash_attn")
"""Names: `attention_backend` says what each one does."""

Backend = Callable[[Slots, torch.Tensor], torch.Tensor]
"""Attention of a layer's visible slots with queries [batch, H, d]; an output of that shape."""

_NEEDS = "flash-attn-4 (and with it nvidia-cutlass-dsl, quack-kernels, apache-tvm-ffi and torch-c-dlpack-ext)"
_HALF = (torch.float16, torch.bfloat16)


def attention_backend(name: str, layers: Items[Slots]) -> Backend | None:
    """Choose who attends.

    Parameters
    ----------
    name : {"triton", "sdpa", "flash_attn"}
        ``triton`` is `kvsim_kernels.decode_attention`, whose logits are a by-product. The others give the output only:
        where a step is scored its logits come from `decode_logits`, which reads the keys a second time. ``sdpa`` is
        `torch.nn.functional.scaled_dot_product_attention`; without a mask where the slots in use never change, else
        with one, for which PyTorch has no kernel that splits the keys. ``flash_attn`` is flash-attn-4, told the slots
        in use; on Hopper it does not split the keys, so that a batch of 1 keeps as many programs busy as there are KV
        heads.
    layers : sequence of Slots

    Returns
    -------
    callable or None
        None for ``triton``.

    Raises
    ------
    KvsimError
        If the name is unknown, its library is missing, or it cannot compute one of the layers.
    """
    if name not in ATTENTIONS:
        raise unknown_name("attention", name, ATTENTIONS)
    if name == "triton":
        return None
    for own in layers:
        what = _unable(name, own)
        if what is not None:
            raise KvsimError(f"attention {name!r} has no {what} (layer {own.info.index}); use attention 'triton'")
    return _sdpa if name == "sdpa" else _flash_attn(layers[0].keys.device)


def _unable(name: str, own: Slots) -> str | None:
    info = own.info.info
    if name == "sdpa":
        found = {"attention sinks": own.info.sink_logits is not None, "softcap": info.softcap is not None}
    else:
        found = {
            f"kernel for {own.keys.dtype}": own.keys.dtype not in _HALF,
            "mask for heads that hold unequal numbers": own.positions is not None,
        }
    return next((what for what, has in found.items() if has), None)


def _sdpa(own: Slots, query: torch.Tensor) -> torch.Tensor:
    """Attend by PyTorch: the query heads of a KV head are so many queries, and no head is repeated."""
    batch, heads, dim = query.shape
    keys, values, mask = own.keys, own.values, None
    kv_heads = keys.shape[1]
    if own.constant is not None:
        keys, values = keys[:, :, : own.constant], values[:, :, : own.constant]
    else:
        shape = batch, 1 if own.positions is None else kv_heads, keys.shape[2]
        seen = visible_slots(shape, own.lengths, own.positions)
        mask = seen.unsqueeze(2).expand(batch, kv_heads, heads // kv_heads, -1)
    found = torch.nn.functional.scaled_dot_product_attention(
        query.view(batch, kv_heads, -1, dim), keys, values, attn_mask=mask, scale=own.info.info.scaling
    )
    return found.reshape(batch, heads, dim)


def _flash_attn(device: torch.device) -> Backend:
    try:
        attend = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    except (ImportError, AttributeError) as error:
        raise KvsimError(f"attention 'flash_attn' needs {_NEEDS}: pip install flash-attn-4 ({error})") from None
    # Only Blackwell's kernels split the keys; the others refuse.
    splits = 0 if torch.cuda.get_device_capability(device)[0] in (10, 11) else 1

    def run(own: Slots, query: torch.Tensor) -> torch.Tensor:
        info = own.info.info
        found: Any = attend(
            query.unsqueeze(1), own.keys.transpose(1, 2), own.values.transpose(1, 2),
            seqused_k=own.lengths, max_seqlen_k=own.keys.shape[2], softmax_scale=info.scaling,
            softcap=info.softcap or 0.0, learnable_sink=own.info.sink_logits, num_splits=splits,
        )  # fmt: skip
        output: torch.Tensor = (found[0] if isinstance(found, tuple) else found).squeeze(1)
        return output

    return run
