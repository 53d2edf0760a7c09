"""Decode steps captured on a GPU: a kernel writes rows as the trace stores them, and nothing waits for the host."""

from dataclasses import dataclass
from typing import Any

import torch
from kvsim_kernels.attention_rows import layer_rows, prompt_mass

from kvsim_traces.capture import StepCapture
from kvsim_traces.hooks import AttentionCall
from kvsim_traces.layout import SCALE
from kvsim_traces.manifest import LayerInfo
from kvsim_traces.rotary import RotaryTap

__all__ = ["DeviceCapture", "device_prompt_mass"]

_HALF_TYPES = (torch.float16, torch.bfloat16)
_KERNEL_TYPES = (torch.float32, *_HALF_TYPES)


def _kernels() -> Any:
    """Return the module of the attention rows kernels, or None where Triton is not installed."""
    try:
        from kvsim_kernels.attention_rows import kernel
    except ImportError:
        return None
    return kernel


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


@dataclass(frozen=True)
class _Wanted:
    """Rows of one layer that are still to be written.

    Attributes
    ----------
    call : AttentionCall
        With one query.
    ordinal, visible : int
        The layer, and how many of the latest keys its query sees.
    """

    call: AttentionCall
    ordinal: int
    visible: int

    @property
    def keys(self) -> torch.Tensor:
        """The keys that the query sees, [Hk, visible, d]."""
        key = self.call.key
        return key if key.shape[1] == self.visible else key[:, -self.visible :]


class DeviceCapture(StepCapture):
    """Observer of decode steps that writes a step's arrays into one buffer on their device.

    Call `begin_into` before each forward and `finish` after it, which writes the rows of all layers at once: a layer's
    own launches would cost the host, which a decode step mostly waits for, more than the GPU. Row sums of queries and
    keys without sinks are 1, what the softmax's are but for rounding: rows are not computed for them.

    Attributes
    ----------
    plain : set of int
        Layers whose rows PyTorch computed because the kernel cannot.
    """

    def __init__(self, layers: list[LayerInfo], capture: str, qk_dtype: str, rotary: RotaryTap | None = None) -> None:
        super().__init__(layers, capture, qk_dtype, rotary)
        self.plain: set[int] = set()
        self._kernels = _kernels()
        self._into: dict[str, torch.Tensor] = {}
        self._wanted: list[_Wanted] = []
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
        self._wanted.clear()
        if self._capture in ("qk", "qkv"):
            into["row_sums"].fill_(1)

    def __call__(self, call: AttentionCall) -> None:
        """Take what the trace needs from one layer's attention call."""
        self._take(call, *self._accepted(call, self._count))
        self._count += 1

    def _take(self, call: AttentionCall, ordinal: int, visible: int) -> None:
        vectors = self._capture in ("qk", "qkv")
        if vectors:
            self._keep_vectors(call, ordinal)
        if not vectors or call.sink_logits is not None or self._keep:
            self._wanted.append(_Wanted(call, ordinal, visible))

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
        stored, sums = self._into.get("attention", self._into.get("scores")), self._into["row_sums"]
        if stored is not None:
            self._write(self._wanted, stored, sums, SCALE)
        elif with_sinks := [one for one in self._wanted if one.call.sink_logits is not None]:
            self._write(with_sinks, sums.new_empty(len(sums), self._position + 1), sums, 1)
        if self._keep:
            self._keep_rows(stored, sums)
        self._into = {}
        for kept in (self._wanted, *self._vectors.values()):
            kept.clear()

    def _write(self, wanted: list[_Wanted], out: torch.Tensor, sums: torch.Tensor, scale: float) -> None:
        """Compute rows where their attention ran.

        `out` [K, H, n] or [K, n] gets the layers' rows or their means, times `scale`, in its own type, and zeros before
        them where a layer's query sees fewer than n keys; `sums` [K, H] the rows' float32 sums. The kernels have no
        64-bit floats, no query and key of different types, and no keys whose numbers lie apart: PyTorch has.
        """
        alike: dict[Any, list[tuple[_Wanted, torch.Tensor]]] = {}
        for one in wanted:
            call, keys = one.call, one.keys
            if hidden := out.shape[-1] - one.visible:
                out[one.ordinal, ..., :hidden].zero_()
            fits = call.query.dtype == keys.dtype and keys.dtype in _KERNEL_TYPES and keys.stride(-1) == 1
            if self._kernels is None or not fits:
                self.plain.add(one.ordinal)
                kind: Any = (layer_rows, one.ordinal)
            else:
                layout = keys.shape, keys.stride(), keys.dtype
                kind = (self._kernels.layer_rows, layout, call.scaling, call.softcap, call.sink_logits is None)
            alike.setdefault(kind, []).append((one, keys))
        for (compute, *_), own in alike.items():
            first = own[0][0]
            compute(
                torch.stack([one.call.query for one, _ in own]).squeeze(2),
                [keys for _, keys in own],
                places=[one.ordinal for one, _ in own],
                out=out,
                sums=sums,
                scaling=first.call.scaling,
                softcap=first.call.softcap,
                sink_logits=None if first.call.sink_logits is None else [one.call.sink_logits for one, _ in own],
                scale=scale,
            )

    def release(self) -> None:
        """Let go of everything on the device; a step that failed may have left it."""
        super().release()
        self._into = {}
        self._wanted.clear()

    def _keep_rows(self, stored: torch.Tensor | None, sums: torch.Tensor) -> None:
        """Keep each layer's rows as they are computed, before they are rounded, and what a reader will get."""
        rows = torch.empty(*sums.shape, self._position + 1, device=sums.device)
        self._write(self._wanted, rows, torch.empty_like(sums), 1)
        for one in self._wanted:
            self.exact.append(rows[one.ordinal])
            self.stored.append(
                self._recomputed(one.call, one.visible, sums[one.ordinal])
                if stored is None
                else stored[one.ordinal].float() / SCALE
            )
