"""Decode steps captured on a GPU: a kernel writes rows as the trace stores them, and nothing waits for the host."""

from typing import Any

import torch
from kvsim_kernels.attention_rows import attention_row, prompt_mass

from kvsim_traces.capture import StepCapture
from kvsim_traces.hooks import AttentionCall
from kvsim_traces.layout import SCALE
from kvsim_traces.manifest import LayerInfo
from kvsim_traces.rotary import RotaryTap

__all__ = ["DeviceCapture", "device_prompt_mass", "write_rows"]

_HALF_TYPES = (torch.float16, torch.bfloat16)
_KERNEL_TYPES = (torch.float32, *_HALF_TYPES)


def _kernel() -> Any:
    """Return the attention rows kernel, or None where Triton is not installed."""
    try:
        from kvsim_kernels.attention_rows.kernel import attention_row as compiled
    except ImportError:
        return None
    return compiled


def _mass_kernel() -> Any:
    """Return the prompt mass kernel, or None where Triton is not installed."""
    try:
        from kvsim_kernels.prompt_mass.kernel import prompt_mass as compiled
    except ImportError:
        return None
    return compiled


def device_prompt_mass(queries: torch.Tensor, keys: torch.Tensor, **options: Any) -> torch.Tensor:
    """Compute a prompt's attention mass where it is: takes and gives what `prompt_mass` does, in little memory.

    A kernel does it in 16 bits. PyTorch multiplies wider numbers faster; it takes the heads of one KV head at a time.
    """
    compiled = _mass_kernel()
    contiguous = queries.stride(-1) == 1 and keys.stride(-1) == 1
    if compiled is not None and queries.dtype == keys.dtype and queries.dtype in _HALF_TYPES and contiguous:
        received: torch.Tensor = compiled(queries, keys, **options)
        return received
    group, sinks = queries.shape[0] // keys.shape[0], options.pop("sink_logits", None)
    parts = []
    for head in range(keys.shape[0]):
        own = slice(head * group, (head + 1) * group)
        sink = None if sinks is None else sinks[own]
        parts.append(prompt_mass(queries[own], keys[head : head + 1], sink_logits=sink, **options))
    return torch.cat(parts)


def write_rows(
    call: AttentionCall, visible: int, out: torch.Tensor, sums: torch.Tensor, *, mean: bool, scale: float, kernel: Any
) -> bool:
    """Compute the rows of a decode step's attention call where it ran.

    Parameters
    ----------
    call : AttentionCall
        With one query.
    visible : int
        Its query sees this many of the latest keys.
    out : Tensor [H, visible] or [visible]
        Where the rows, or with `mean` their mean, go, times `scale`, in its own type.
    sums : Tensor [H]
        Where the rows' float32 sums go.
    mean : bool
    scale : float
    kernel : callable or None
        `kvsim_kernels.attention_rows.kernel.attention_row`.

    Returns
    -------
    bool
        Whether the kernel did it. It has no 64-bit floats, no query and key of different types, and no vectors whose
        numbers lie apart; PyTorch computes those, on the same device.
    """
    query, keys = call.query[:, 0], call.key[:, -visible:]
    options: dict[str, Any] = {
        "scaling": call.scaling,
        "softcap": call.softcap,
        "sink_logits": call.sink_logits,
    }
    contiguous = query.stride(-1) == 1 and keys.stride(-1) == 1
    if kernel is not None and query.dtype == keys.dtype and query.dtype in _KERNEL_TYPES and contiguous:
        kernel(query, keys, **options, mean=mean, scale=scale, out=out, sums=sums)
        return True
    rows = attention_row(query, keys, **options)
    sums.copy_(rows.sum(dim=-1))
    out.copy_((rows.mean(dim=0) if mean else rows) * scale)
    return False


class DeviceCapture(StepCapture):
    """Observer of decode steps that writes a step's arrays into one buffer on their device.

    Call `begin` before each forward and `finish` after it. Row sums of queries and keys without sinks are 1, what the
    softmax's are but for rounding: rows are not computed for them.

    Attributes
    ----------
    plain : set of int
        Layers whose rows PyTorch computed because the kernel cannot.
    """

    def __init__(self, layers: list[LayerInfo], capture: str, qk_dtype: str, rotary: RotaryTap | None = None) -> None:
        super().__init__(layers, capture, qk_dtype, rotary)
        self.plain: set[int] = set()
        self._kernel = _kernel()
        self._into: dict[str, torch.Tensor] = {}
        self._count = 0

    def begin_into(self, into: dict[str, torch.Tensor], position: int, keep: bool = False) -> None:
        """Start the step whose query stands at `position`.

        Parameters
        ----------
        into : dict of Tensor
            Where its arrays go, from `StepLayout.views`.
        position : int
        keep : bool
            As in `begin`.
        """
        self.begin(position, keep)
        self._into, self._count = into, 0
        if self._capture in ("qk", "qkv"):
            into["row_sums"].fill_(1)

    def __call__(self, call: AttentionCall) -> None:
        """Take what the trace needs from one layer's attention call."""
        self._take(call, *self._accepted(call, self._count))
        self._count += 1

    def _take(self, call: AttentionCall, ordinal: int, visible: int) -> None:
        sums = self._into["row_sums"][ordinal]
        stored = self._into.get("attention", self._into.get("scores"))
        if stored is not None:
            row, hidden = stored[ordinal], self._position + 1 - visible
            if hidden:
                row[..., :hidden].zero_()
            self._rows_of(call, ordinal, visible, row[..., hidden:], sums, mean=row.ndim == 1, scale=SCALE)
        else:
            self._keep_vectors(call, ordinal)
            if call.sink_logits is not None:
                unused = torch.empty(visible, device=call.query.device)
                self._rows_of(call, ordinal, visible, unused, sums, mean=True, scale=1)
        if self._keep:
            rows = torch.empty(call.query.shape[0], visible, device=call.query.device)
            self._rows_of(call, ordinal, visible, rows, torch.empty_like(sums), mean=False, scale=1)
            self.exact.append(self._placed(rows))
            self.stored.append(
                self._recomputed(call, visible, sums) if stored is None else stored[ordinal].float() / SCALE
            )

    def _rows_of(
        self,
        call: AttentionCall,
        ordinal: int,
        visible: int,
        out: torch.Tensor,
        sums: torch.Tensor,
        *,
        mean: bool,
        scale: float,
    ) -> None:
        if not write_rows(call, visible, out, sums, mean=mean, scale=scale, kernel=self._kernel):
            self.plain.add(ordinal)

    def finish(self, token: torch.Tensor) -> None:
        """Complete the step's arrays.

        Parameters
        ----------
        token : Tensor of int64, [1]
            What was fed, on the same device.
        """
        self._check_layers(self._count)
        self._into["token"].copy_(token)
        for name, parts in self._vectors.items():
            if parts:
                self._into[name].copy_(torch.stack(parts))
        self._into = {}
        for kept in self._vectors.values():
            kept.clear()
