"""The prompt, read once: keys and values of every layer, and what policies want to know about its queries."""

from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from kvsim_kernels.attention_rows import prompt_mass
from kvsim_traces import CaptureError, Trace
from kvsim_traces.capture import layer_info
from kvsim_traces.hooks import AttentionCall
from kvsim_traces.manifest import LayerInfo
from kvsim_traces.request import eligible_flags

from kvsim.errors import KvsimError
from kvsim.live.attention import Call, watched

__all__ = ["Floats", "Prefix", "PrefixLayer", "cache_argument", "prefill", "prefix_of_trace", "to_numpy"]

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PrefixLayer:
    """One layer after the prefill.

    Attributes
    ----------
    index : int
        Which of the model's layers it is.
    info : LayerInfo
        Kind, eligibility, window, scaling, softcap.
    keys, values : Tensor [Hk, L0, d]
        Post-RoPE.
    queries : Tensor [H, L0, d] or None
        Post-RoPE; None where they are not known.
    sink_logits : Tensor [H] or None
    """

    index: int
    info: LayerInfo
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor | None
    sink_logits: torch.Tensor | None

    def prompt_mass(self) -> torch.Tensor:
        """Compute what each position received during the prefill, summed over queries, [H, L0]."""
        assert self.queries is not None
        chunked = self.info.type == "chunked_attention"
        return prompt_mass(
            self.queries,
            self.keys,
            scaling=self.info.scaling,
            softcap=self.info.softcap,
            sliding_window=None if chunked else self.info.sliding_window,
            chunk_size=self.info.sliding_window if chunked else None,
            sink_logits=self.sink_logits,
        )


@dataclass(frozen=True)
class Prefix:
    """A prompt after its prefill; many policies may decode from one.

    Attributes
    ----------
    tokens : list of int
        The prompt, L0 tokens.
    layers : list of PrefixLayer
        The model's attention layers, in order.
    logits : Tensor [vocabulary] or None
        Of the token after the prompt; None where no model ran.
    config : dict
        The model's config.
    trace : Trace or None
        The recording of this prompt, if there is one.
    """

    tokens: list[int]
    layers: list[PrefixLayer]
    logits: torch.Tensor | None = field(repr=False)
    config: dict[str, Any] = field(repr=False)
    trace: Trace | None = None

    @property
    def length(self) -> int:
        """L0."""
        return len(self.tokens)

    @property
    def eligible(self) -> list[int]:
        """Which entries of `layers` policies score and evict."""
        return [index for index, layer in enumerate(self.layers) if layer.info.eligible]

    @property
    def num_heads(self) -> int:
        """H, the query heads."""
        queries = self.layers[0].queries
        return queries.shape[0] if queries is not None else self._recorded.num_heads

    @cached_property
    def prompt_mass(self) -> Floats:
        """Attention that each position received during the prefill, [K, H, L0]; zero for layers not eligible."""
        if self.layers[0].queries is None:
            return self._recorded.prompt_mass()
        mass = np.zeros((len(self.layers), self.num_heads, self.length), np.float32)
        for layer in self.eligible:
            mass[layer] = to_numpy(self.layers[layer].prompt_mass())
        return mass

    @cached_property
    def prompt_queries(self) -> Floats:
        """Queries of the whole prompt after a prefill, [K, H, L0, d]; else the last ones, as recorded."""
        found = [layer.queries for layer in self.layers]
        if found[0] is None:
            return self._recorded.prompt_queries()
        return np.stack([to_numpy(queries) for queries in found if queries is not None])

    def recording_of(self, tokens: list[int]) -> Trace | None:
        """Give the recording, if it is one of this prompt and the steps after it."""
        known = None if self.trace is None else self.trace.tokens
        return self.trace if known is not None and known.tolist() == tokens else None

    @property
    def _recorded(self) -> Trace:
        """The recording that stands for the prompt's queries, where no prefill gave them."""
        assert self.trace is not None
        return self.trace


class PrefillWatcher:
    """Keeps what the prefill's attention is called with, and lets the model's own attention run."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        self.calls: list[tuple[Call, LayerInfo]] = []

    def attend(self, call: Call) -> None:
        """See `Watcher.attend`."""
        info = layer_info(
            AttentionCall(
                call.module, call.query[0], call.key[0], call.value[0], call.scaling, call.softcap,
                call.sliding_window, call.sink_logits,
            ),
            call.layer,
            self.config,
        )  # fmt: skip
        self.calls.append((call, info))

    def layers(self, row: int, start: int, eligible: str | tuple[int, ...]) -> list[PrefixLayer]:
        """Give one batch row's layers, without its first `start` columns.

        Raises
        ------
        KvsimError
            If some of the model's layers are not standard attention, or not like the others.
        """
        self._accept()
        flags = eligible_flags(eligible, [info for _, info in self.calls])
        return [
            PrefixLayer(
                index=call.layer,
                info=LayerInfo(info.type, flag, info.sliding_window, info.scaling, info.softcap),
                keys=call.key[row, :, start:],
                values=call.value[row, :, start:],
                queries=call.query[row, :, start:],
                sink_logits=call.sink_logits,
            )
            for (call, info), flag in zip(self.calls, flags, strict=True)
        ]

    def _accept(self) -> None:
        kind, count = type(self.model).__name__, self.config.num_hidden_layers
        if not self.calls:
            raise KvsimError(
                f"model: {kind} has no attention hooks: none of its layers calls transformers' AttentionInterface"
            )
        if [call.layer for call, _ in self.calls] != list(range(count)):
            raise KvsimError(
                f"model: only {len(self.calls)} of the {count} layers of {kind} are standard attention; live decoding "
                "needs all of them to be"
            )
        shapes = {(call.query.shape[1], *call.key.shape[1::2], call.value.shape[-1]) for call, _ in self.calls}
        if len(shapes) != 1:
            raise KvsimError(f"model: the layers of {kind} differ in heads or head dimension {sorted(shapes)}")


def prefill(
    model: Any, tokens: list[int], *, eligible: str | tuple[int, ...] = "full", trace: Trace | None = None
) -> Prefix:
    """Run a model's own attention over a prompt.

    Parameters
    ----------
    model : PreTrainedModel
        A transformers causal language model with standard attention.
    tokens : list of int
        The prompt.
    eligible : {"full", "all"} or tuple of int
        Layers that policies score and evict; full-attention ones by default.
    trace : Trace, optional
        The recording of this prompt, which holds what a prefill does not give (kvzip's scores).

    Raises
    ------
    KvsimError
        If a token is outside the vocabulary, or the model's layers are not standard attention.
    """
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    if hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    if tokens and not all(isinstance(token, int) for token in tokens):
        raise KvsimError("prompt: must be one sequence of token ids, [L0]")
    if not tokens:
        raise KvsimError("prompt: is empty; at least one token is needed")
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise KvsimError(f"prompt: token {token} is outside the vocabulary of {vocabulary}")
    watcher = PrefillWatcher(model)
    last = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    device = model.get_input_embeddings().weight.device
    with torch.inference_mode(), watched(model, watcher):
        outputs = model(input_ids=torch.tensor([tokens], device=device), use_cache=False, **last)
    layers = watcher.layers(0, 0, eligible)
    return Prefix(list(tokens), layers, outputs.logits[0, -1].float(), config_of(model), trace)


def prefix_of_trace(trace: Trace, model: Any) -> Prefix:
    """Take the prompt's keys and values from a `qkv` recording instead of a prefill.

    Raises
    ------
    CaptureError
        If the recording holds no values.
    KvsimError
        If its softmax has a sink logit, which recordings do not keep, or it holds no tokens.
    """
    if trace.capture != "qkv":
        raise CaptureError(f"{trace.path}: capture {trace.capture} has no values; captures that have them: qkv")
    if trace.manifest.sink_logits:
        raise KvsimError(f"{trace.path}: has sink logits, which a recording does not keep; use the prefill")
    parameter = model.get_input_embeddings().weight
    prompt, count = trace.prompt_length, model.config.get_text_config(decoder=True).num_hidden_layers
    if len(trace.manifest.layers) != count:
        raise KvsimError(f"{trace.path}: recorded {len(trace.manifest.layers)} layers of a model that has {count}")
    place = {"device": parameter.device, "dtype": parameter.dtype}
    layers = [
        PrefixLayer(
            index=layer,
            info=info,
            keys=torch.as_tensor(trace.keys(layer)[:, :prompt].copy()).to(**place),
            values=torch.as_tensor(trace.values(layer)[:, :prompt].copy()).to(**place),
            queries=None,
            sink_logits=None,
        )
        for layer, info in enumerate(trace.manifest.layers)
    ]
    return Prefix(recorded_tokens(trace)[:prompt], layers, None, config_of(model), trace)


def recorded_tokens(trace: Trace) -> list[int]:
    """Give the token ids of a recording's prompt and steps.

    Raises
    ------
    KvsimError
        If it holds none.
    """
    if trace.tokens is None:
        raise KvsimError(f"{trace.path}: holds no token ids, so no model can run over it")
    return [int(token) for token in trace.tokens]


def cache_argument(model: Any) -> str:
    """Name the argument that takes a cache: `cache` since transformers 5.24, `past_key_values` before."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def config_of(model: Any) -> dict[str, Any]:
    """Give a model's config as a dict."""
    found: dict[str, Any] = model.config.to_dict()
    return found


def to_numpy(tensor: torch.Tensor) -> Floats:
    """Copy a tensor to the host in float32; one that is there already is shared."""
    array: Floats = tensor.detach().float().cpu().numpy()
    return array
