"""Turn observed attention calls into what a trace stores: one object watches the prefill, another each decode step."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from kvsim_kernels.attention_rows import attention_row, prompt_mass

from kvsim_traces.errors import TraceError
from kvsim_traces.hooks import AttentionCall
from kvsim_traces.layout import POSITION_ARRAYS, SCALE
from kvsim_traces.manifest import LayerInfo
from kvsim_traces.rotary import RotaryTap

NUMBER_TYPES = {"float16": torch.float16, "float32": torch.float32}


def layer_info(call: AttentionCall, index: int, config: Any) -> LayerInfo:
    """Describe a layer from its attention call and the decoder's config; eligibility is settled later.

    Parameters
    ----------
    call : AttentionCall
    index : int
        Which of the model's layers it is.
    config : PretrainedConfig
        The decoder's config, with `layer_types` where the model has them.
    """
    types = getattr(config, "layer_types", None) or []
    named = types[index] if 0 <= index < len(types) else None
    chunk = getattr(config, "attention_chunk_size", None)
    kind, window = "full_attention", None
    if (named is None and call.sliding_window is not None) or "sliding" in (named or ""):
        kind, window = "sliding_attention", call.sliding_window or getattr(config, "sliding_window", None)
    elif (named is None and chunk is not None) or "chunked" in (named or ""):
        kind, window = "chunked_attention", chunk
    if kind != "full_attention" and window is None:
        raise TraceError(f"model: layer {index} is {kind} but neither its call nor the config says how wide")
    return LayerInfo(type=kind, eligible=False, sliding_window=window, scaling=call.scaling, softcap=call.softcap)


def visible_keys(info: LayerInfo, position: int) -> int:
    """How many of the latest positions, itself included, a query at `position` may see in a layer."""
    if info.sliding_window is None:
        return position + 1
    if info.type == "chunked_attention":
        return position % info.sliding_window + 1
    return min(info.sliding_window, position + 1)


def to_numpy(tensor: torch.Tensor, what: str, number_type: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Copy queries, keys or values to the host as `number_type`.

    Raises
    ------
    TraceError
        When a finite value does not fit; float32 then does.
    """
    if tensor.device.type == "cpu":
        array: np.ndarray[Any, Any] = _fitting(tensor, tensor, what, number_type).numpy()
        return array
    # One head at a time: a copy of all of them would take the GPU's memory.
    found = torch.empty(tensor.shape, dtype=NUMBER_TYPES[number_type])
    for own, part in zip(found, tensor, strict=True):
        own.copy_(_fitting(part, tensor, what, number_type))
    stacked: np.ndarray[Any, Any] = found.numpy()
    return stacked


def _fitting(part: torch.Tensor, whole: torch.Tensor, what: str, number_type: str) -> torch.Tensor:
    converted = part.to(NUMBER_TYPES[number_type])
    if number_type == "float16" and bool((converted.isinf() & part.isfinite()).any()):
        raise TraceError(f"{what}: {float(whole.abs().max()):.6g} does not fit float16; record with qk_dtype='float32'")
    return converted


class PrefillCapture:
    """Observer of the prefill.

    Parameters
    ----------
    config : PretrainedConfig
        The decoder's.
    capture : str
        "heads", "scores", "qk" or "qkv".
    last_queries : int
        W; 0 for none.
    mass : bool
        Whether to keep the attention that each position received.
    qk_dtype : str
        "float16" or "float32".
    mass_of : callable
        Computes it; takes and gives what `kvsim_kernels.attention_rows.prompt_mass` does.
    rotary : RotaryTap, optional
        Around the model, to keep the keys before the rotary embedding.

    Attributes
    ----------
    layers : list of LayerInfo
        One for each attention call, in order.
    indices : list of int
        Which of the model's layers they are.
    shapes : list of (H, Hk, d, dv)
    sink_logits : bool
        Whether any layer's softmax has a sink.
    queries : list of ndarray [H, W, d]
        The last W queries; empty without them.
    mass : list of ndarray [H, L0]
        Float32; empty without it.
    keys, values, keys_pre : list of ndarray [Hk, L0, d]
        The whole prompt's, also in sliding layers; empty unless the capture stores them.
    """

    def __init__(
        self,
        config: Any,
        capture: str,
        last_queries: int,
        mass: bool,
        qk_dtype: str,
        mass_of: Callable[..., torch.Tensor] = prompt_mass,
        rotary: RotaryTap | None = None,
    ) -> None:
        self.layers: list[LayerInfo] = []
        self.indices: list[int] = []
        self.shapes: list[tuple[int, int, int, int]] = []
        self.sink_logits = False
        self.queries: list[np.ndarray[Any, Any]] = []
        self.mass: list[np.ndarray[Any, Any]] = []
        self.keys: list[np.ndarray[Any, Any]] = []
        self.values: list[np.ndarray[Any, Any]] = []
        self.keys_pre: list[np.ndarray[Any, Any]] = []
        self._rotary = rotary
        self._config = config
        self._capture = capture
        self._last_queries = last_queries
        self._mass = mass
        self._mass_of = mass_of
        self._qk_dtype = qk_dtype

    def __call__(self, call: AttentionCall) -> None:
        """Take what the trace needs from one layer's prefill."""
        ordinal = len(self.layers)
        own = getattr(call.module, "layer_idx", None)
        index = own if isinstance(own, int) else ordinal
        info = layer_info(call, index, self._config)
        if call.query.shape[1] != call.key.shape[1]:
            raise TraceError(
                f"model: layer {ordinal} sees {call.key.shape[1]} keys for a prompt of {call.query.shape[1]} tokens; "
                "only causal attention over the prompt itself can be recorded"
            )
        self.layers.append(info)
        self.indices.append(index)
        self.shapes.append((call.query.shape[0], call.key.shape[0], call.key.shape[-1], call.value.shape[-1]))
        self.sink_logits |= call.sink_logits is not None
        if self._last_queries:
            last = call.query[:, -self._last_queries :]
            self.queries.append(to_numpy(last, f"prompt_queries: layer {ordinal}", self._qk_dtype))
        if self._mass:
            chunked = info.type == "chunked_attention"
            received = self._mass_of(
                call.query,
                call.key,
                scaling=call.scaling,
                softcap=call.softcap,
                sliding_window=None if chunked else info.sliding_window,
                chunk_size=info.sliding_window if chunked else None,
                sink_logits=call.sink_logits,
            )
            self.mass.append(received.cpu().numpy())
        if self._capture in ("qk", "qkv"):
            self.keys.append(to_numpy(call.key, f"keys: layer {ordinal}", self._qk_dtype))
        if self._capture == "qkv":
            self.values.append(to_numpy(call.value, f"values: layer {ordinal}", self._qk_dtype))
        if self._rotary is not None:
            before = self._rotary.take(call, ordinal, compare=True)
            self.keys_pre.append(to_numpy(before, f"keys_pre: layer {ordinal}", self._qk_dtype))


class StepCapture:
    """Observer of decode steps: computes the one row of attention of each layer and head.

    Call `begin` before each forward and `arrays` after it. Nothing is kept from one step to the next.

    Parameters
    ----------
    layers : list of LayerInfo
        From the prefill, in the same order.
    capture : str
        "heads", "scores", "qk" or "qkv".
    qk_dtype : str
        "float16" or "float32".
    rotary : RotaryTap, optional
        Around the model, to keep the keys before the rotary embedding.
    """

    def __init__(self, layers: list[LayerInfo], capture: str, qk_dtype: str, rotary: RotaryTap | None = None) -> None:
        self._layers = layers
        self._capture = capture
        self._qk_dtype = qk_dtype
        self._rotary = rotary
        self._position = 0
        self._keep = False
        self._rows: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self._vectors: dict[str, list[torch.Tensor]] = {name: [] for name in ("queries", *POSITION_ARRAYS)}
        self.exact: list[torch.Tensor] = []
        self.stored: list[torch.Tensor] = []

    def begin(self, position: int, keep: bool = False) -> None:
        """Start the step whose query stands at `position`; `keep` fills `exact` and `stored` for the check.

        `exact` holds each layer's float32 rows [H, position + 1], `stored` what a reader will get: rows of the same
        shape, or head means [position + 1] in a `scores` capture.
        """
        self._position, self._keep = position, keep
        for kept in (self._rows, self._sums, *self._vectors.values()):
            kept.clear()
        self.forget()

    def forget(self) -> None:
        """Let go of what was kept for the check."""
        self.exact.clear()
        self.stored.clear()

    def release(self) -> None:
        """Let go of everything; a step that failed may have left it."""
        self.begin(self._position)

    def __call__(self, call: AttentionCall) -> None:
        """Take what the trace needs from one layer's attention call."""
        self._take(call, *self._accepted(call, len(self._sums)))

    def _accepted(self, call: AttentionCall, ordinal: int) -> tuple[int, int]:
        """Return which layer it is and how many of its latest keys its query sees, or refuse it."""
        if ordinal >= len(self._layers):
            raise TraceError(
                f"model: a decode step ran more than the {len(self._layers)} attention layers of the prefill"
            )
        if call.query.shape[1] != 1:
            raise TraceError(f"model: layer {ordinal} ran {call.query.shape[1]} queries in a decode step instead of 1")
        visible = visible_keys(self._layers[ordinal], self._position)
        if not visible <= call.key.shape[1] <= self._position + 1:
            raise TraceError(
                f"model: layer {ordinal} sees {call.key.shape[1]} keys at position {self._position}, not {visible}"
            )
        return ordinal, visible

    def _take(self, call: AttentionCall, ordinal: int, visible: int) -> None:
        """Compute one layer's rows."""
        rows = self._placed(
            attention_row(
                call.query[:, 0],
                call.key[:, -visible:],
                scaling=call.scaling,
                softcap=call.softcap,
                sink_logits=call.sink_logits,
            )
        )
        self._sums.append(rows.sum(dim=-1))
        if self._capture == "heads":
            self._rows.append((rows * SCALE).half())
        elif self._capture == "scores":
            self._rows.append((rows.mean(dim=0) * SCALE).half())
        else:
            self._keep_vectors(call, ordinal)
        if self._keep:
            self.exact.append(rows)
            self.stored.append(
                self._rows[-1].float() / SCALE if self._rows else self._recomputed(call, visible, self._sums[-1])
            )

    def _keep_vectors(self, call: AttentionCall, ordinal: int) -> None:
        """Keep one layer's query, key and value, and its key before the rotary embedding."""
        self._vectors["queries"].append(call.query[:, 0])
        self._vectors["keys"].append(call.key[:, -1])
        if self._capture == "qkv":
            self._vectors["values"].append(call.value[:, -1])
        if self._rotary is not None:
            self._vectors["keys_pre"].append(self._rotary.take(call, ordinal)[:, -1])

    def _placed(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Rows over all positions: a windowed layer's keys are the latest ones, everything before them gets 0."""
        return torch.nn.functional.pad(probabilities, (self._position + 1 - probabilities.shape[-1], 0))

    def _recomputed(self, call: AttentionCall, visible: int, sums: torch.Tensor) -> torch.Tensor:
        """Rows as a reader computes them from stored queries and keys: a sink's share comes from the row sums."""
        number_type = NUMBER_TYPES[self._qk_dtype]
        rows = attention_row(
            call.query[:, 0].to(number_type),
            call.key[:, -visible:].to(number_type),
            scaling=call.scaling,
            softcap=call.softcap,
            dtype=torch.float64,
        ).float()
        return self._placed(rows if call.sink_logits is None else rows * sums[:, None])

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the step's arrays under the names the writer takes.

        Returns
        -------
        dict
            ``row_sums`` [K, H] float32; ``attention`` [K, H, n] or ``scores`` [K, n], float16 times 2^15; or
            ``queries`` [K, H, d], ``keys``, ``values`` and ``keys_pre`` [K, Hk, d].
        """
        self._check_layers(len(self._sums))
        found = {"row_sums": _stacked(self._sums).numpy()}
        if self._rows:
            found["attention" if self._capture == "heads" else "scores"] = _stacked(self._rows).numpy()
        for name, parts in self._vectors.items():
            if parts:
                found[name] = to_numpy(_stacked(parts), name, self._qk_dtype)
        return found

    def _check_layers(self, count: int) -> None:
        if count != len(self._layers):
            raise TraceError(f"model: a decode step ran {count} attention layers, the prefill {len(self._layers)}")


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """Stack one tensor a layer and copy to the host; layers may lie on several devices."""
    return torch.stack([part.to(parts[0].device) for part in parts]).cpu()
