"""The prompt, read once: keys and values of every layer, and what policies want to know about its queries."""

from collections.abc import Sequence as Items
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
from kvsim.live.admitted import Admitted, admitted_attention
from kvsim.live.attention import Call, watched
from kvsim.live.gatekeeper import Decision, Gatekeeper

__all__ = [
    "Floats",
    "PrefillWatcher",
    "Prefix",
    "PrefixLayer",
    "cache_argument",
    "check_numbers",
    "check_prefix",
    "left_padding",
    "prefill",
    "prefix_of_trace",
    "run_prompt",
    "run_watched",
    "to_numpy",
]

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
    keeper : Gatekeeper or None
        Whose admission the prompt was read under; None for a full cache.
    admitted : Admitted or None
        What it decided.
    """

    tokens: list[int]
    layers: list[PrefixLayer]
    logits: torch.Tensor | None = field(repr=False)
    config: dict[str, Any] = field(repr=False)
    trace: Trace | None = None
    keeper: Gatekeeper | None = field(default=None, repr=False)
    admitted: Admitted | None = field(default=None, repr=False)

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
    """Keeps what the prefill's attention is called with.

    The model's own attention runs, but for eligible layers under admission, whose queries see what was admitted.

    Parameters
    ----------
    model : PreTrainedModel
    keepers : sequence of Gatekeeper or None
        For each row of the batch, or one for all.
    """

    def __init__(self, model: Any, keepers: Items[Gatekeeper | None] = (None,)) -> None:
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        self.calls: list[tuple[Call, LayerInfo]] = []
        self.keepers = list(keepers)
        self._starts: list[int] = []
        self._decided: list[list[Decision | None]] = []

    def attend(self, call: Call) -> torch.Tensor | None:
        """See `Watcher.attend`."""
        info = layer_info(
            AttentionCall(
                call.module, call.query[0], call.key[0], call.value[0], call.scaling, call.softcap,
                call.sliding_window, call.sink_logits,
            ),
            call.layer,
            self.config,
        )  # fmt: skip
        self.calls.append((self._kept(call), info))
        if any(keeper is not None and call.layer in keeper.layers for keeper in self.keepers):
            return self._admit(call, info)
        return None

    def starts(self) -> list[int]:
        """Give each row's first column that is not padding."""
        if not self._starts:
            call = self.calls[0][0]
            self._starts = left_padding(call.mask, call.query.shape[0], call.query.shape[2])
        return self._starts

    def keeper(self, row: int) -> Gatekeeper | None:
        """Give who decides about a row."""
        return self.keepers[row if len(self.keepers) > 1 else 0]

    def admitted(self, row: int) -> Admitted | None:
        """Give what was decided about a row's prompt, None without admission."""
        keeper = self.keeper(row)
        if keeper is None:
            return None
        found = [own for of_layer in self._decided if (own := of_layer[row]) is not None]
        scores = [part for _, part in found if part is not None]
        return Admitted(
            keeper.name,
            keeper.window,
            torch.cat([marks.cpu() for marks, _ in found]).numpy(),
            torch.cat([part.cpu() for part in scores]).numpy() if scores else None,
        )

    def _admit(self, call: Call, info: LayerInfo) -> torch.Tensor:
        batch, kv_heads, length, _ = call.key.shape
        if call.query.shape[2] != length:
            raise KvsimError("the prefill is one piece; its queries and keys must be equally many")
        if len(self.keepers) == 1:
            self.keepers = self.keepers * batch
        if len(self.keepers) != batch:
            raise KvsimError(f"{len(self.keepers)} policies for a batch of {batch}; give one, or one for each")
        place = {"device": call.key.device}
        marks = torch.ones(batch, kv_heads, length, dtype=torch.bool, **place)
        decided: list[Decision | None] = []
        for row, (keeper, start) in enumerate(zip(self.keepers, self.starts(), strict=True)):
            own = None
            if keeper is not None and call.layer in keeper.layers:
                own = keeper.decide(call.layer, call.key[row, :, start:], 0)
                marks[row, :, start:] = own[0]
            decided.append(own)
        self._decided.append(decided)
        return self._attended(call, info, marks, decided)

    def _kept(self, call: Call) -> Call:
        """Give what is to be remembered of a call."""
        return call

    def _attended(
        self, call: Call, info: LayerInfo, marks: torch.Tensor, decided: list[Decision | None]
    ) -> torch.Tensor:
        place = {"device": call.key.device}
        windows = torch.tensor([1 if keeper is None else keeper.window for keeper in self.keepers], **place)
        return admitted_attention(call, info, marks, windows, torch.tensor(self.starts(), **place))

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
    model: Any,
    tokens: list[int],
    *,
    eligible: str | tuple[int, ...] = "full",
    trace: Trace | None = None,
    keeper: Gatekeeper | None = None,
) -> Prefix:
    """Run a model's own attention over a prompt, or under admission.

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
    keeper : Gatekeeper, optional
        See `kvsim.live.keepers.keeper_of`: what may be seen of the prompt outside a query's local window.

    Raises
    ------
    KvsimError
        If a token is outside the vocabulary, the model's layers are not standard attention, or it gives NaN.
    """
    outputs, watcher = run_prompt(model, tokens, keeper)
    check_numbers(outputs.logits[0, -1], "prompt")
    layers = watcher.layers(0, 0, eligible)
    return Prefix(
        [int(token) for token in tokens], layers, outputs.logits[0, -1].float(), config_of(model), trace,
        keeper, watcher.admitted(0),
    )  # fmt: skip


def run_prompt(
    model: Any, tokens: list[int], keeper: Gatekeeper | None, *, logits: int = 1
) -> tuple[Any, PrefillWatcher]:
    """Run a model over a prompt; give its outputs with the last `logits` logits or more, and its attention's watcher.

    Raises
    ------
    KvsimError
        As `prefill`.
    """
    watcher = PrefillWatcher(model, [keeper])
    return run_watched(model, tokens, watcher, logits=logits), watcher


def run_watched(model: Any, tokens: list[int], watcher: PrefillWatcher, *, logits: int = 1) -> Any:
    """Run a model over a prompt, its attention watched; give its outputs with the last `logits` logits or more.

    Raises
    ------
    KvsimError
        As `prefill`.
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
    device = model.get_input_embeddings().weight.device
    last = {"logits_to_keep": logits} if "logits_to_keep" in signature(model.forward).parameters else {}
    with torch.inference_mode(), watched(model, watcher):
        return model(input_ids=torch.tensor([tokens], device=device), use_cache=False, **last)


def check_prefix(prefix: object) -> None:
    """Raise KvsimError unless a prompt has been read."""
    if not isinstance(prefix, Prefix):
        raise KvsimError(f"prompts are what kvsim.live.prefill gives, got {type(prefix).__name__}")


def check_numbers(logits: torch.Tensor, where: str) -> None:
    """Look at a model's logits.

    Raises
    ------
    KvsimError
        If one is NaN.
    """
    if bool(torch.isnan(logits).any()):
        raise KvsimError(f"{where}: the model's logits are not numbers (NaN); its weights or its type are at fault")


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


def left_padding(mask: torch.Tensor | None, batch: int, length: int) -> list[int]:
    """Give each row's first column that is not padding, from what a layer's prefill was called with.

    Parameters
    ----------
    mask : Tensor or None
        [batch, length] as flash attention takes it, or [batch, 1, length, length], boolean or additive; None for no
        padding. A token that is no padding sees itself, also in a sliding window.
    batch, length : int
        Of the prefill.

    Raises
    ------
    KvsimError
        If padding follows a token.
    """
    if mask is None:
        return [0] * batch
    own = mask[:, 0].diagonal(dim1=-2, dim2=-1) if mask.ndim == 4 else mask
    tokens = own == 0 if mask.ndim == 4 and mask.is_floating_point() else own != 0
    tokens = tokens.expand(batch, -1)
    if bool((tokens[:, :-1] & ~tokens[:, 1:]).any()):
        raise KvsimError("a prompt is padded on the right; set the tokenizer's padding_side to 'left'")
    return [int(start) for start in length - tokens.sum(dim=1)]
