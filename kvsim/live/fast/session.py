"""A batch being decoded: slots, ranks and the forward, a step at a time; on a GPU each step is one CUDA graph."""

import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import Any, Literal

import torch
from kvsim_kernels.decode_attention.kernel import decode_attention, decode_logits
from kvsim_kernels.key_scores.kernel import key_scores

from kvsim.errors import KvsimError
from kvsim.live.fast.backends import attention_backend
from kvsim.live.fast.fused import FusedForward, why_not_fused
from kvsim.live.fast.generic import GenericForward
from kvsim.live.fast.ranks import Ranks
from kvsim.live.fast.rules import draw_up
from kvsim.live.fast.slots import Clock, Growth, Ring, Slots, evicting_slots, growing_slots, ring_slots
from kvsim.live.prefix import Prefix
from kvsim.policy import Policy

__all__ = ["Session", "alike"]

READ_BACK = 16
_CLOSE = 2e-2


class Session:
    """Prompts under a policy, decoded by kernels.

    The slots of a layer that evicts are one more than its budget once the first step has evicted what the prompt had
    too much: a new key and value take the place of those that left, so shapes stay as they are. Their number is rounded
    up to a multiple of 16.

    Parameters
    ----------
    model : PreTrainedModel
    prefixes : sequence of Prefix
    policies : sequence of Policy
        With their budgets, one for each row.
    steps : int
        The most steps there will be.
    forced : sequence of int, optional
        Tokens to feed; else the most likely one after each step is fed to the next.
    fused : bool, optional
        Whether to run our own sequence of kernels instead of the model's modules; where it can be, by default.
    graphs : bool, optional
        Whether to capture steps in CUDA graphs; on a GPU, by default.
    attention : {"triton", "sdpa", "flash_attn"}
        Who computes the output; see `kvsim.live.fast.backends.attention_backend`.

    Attributes
    ----------
    rule : FastRule
    sequences : list of Sequence
    tokens : Tensor [batch] int64
        What the next step feeds.
    logits : Tensor [batch, vocabulary]
        After the last step.
    history, tops : Tensor [steps + 1, batch]
        Tokens fed, and the highest logit after each step.
    done : int
        Steps taken.
    read_back : int
        Steps after which tokens, and what went wrong on the device, are looked at.
    attention : str

    Raises
    ------
    KvsimError
        If a policy or the model is not one that the fast form runs.
    """

    def __init__(
        self,
        model: Any,
        prefixes: Items[Prefix],
        policies: Items[Policy],
        *,
        steps: int,
        forced: Items[int] | None = None,
        fused: bool | None = None,
        graphs: bool | None = None,
        attention: str = "triton",
    ) -> None:
        self.read_back = READ_BACK
        self.rule, self.sequences = draw_up(policies, prefixes, steps)
        self.done = 0
        first = prefixes[0]
        device = _device(model, prefixes)
        batch, prompts = len(prefixes), [prefix.length for prefix in prefixes]
        reason = why_not_fused(model, batch)
        if fused and reason is not None:
            raise KvsimError(f"the fused step does not run this model: {reason}")
        self.fused = reason is None if fused is None else fused
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self._warm: dict[bool, int] = {}
        self.captures = device.type == "cuda" if graphs is None else graphs
        self.clock = Clock(prompts, device)
        self._movers: list[Growth | Ring] = []
        self.ranks: Ranks | None = None
        self._scored = False
        self.layers = self._seat(prefixes)
        self.attention, self._backend = attention, attention_backend(attention, self.layers)
        self.forward: FusedForward | GenericForward
        if self.fused:
            self.forward = FusedForward(
                model, self._attend, batch=batch,
                first_position=min(prompts), positions=max(prompts) + steps - min(prompts),
            )  # fmt: skip
        else:
            self.forward = GenericForward(model, self._attend)
        self._use()
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self._forced = None
        if forced is not None:
            # One more, which the last step prepares and nobody feeds.
            self._forced = torch.tensor([*forced, 0], dtype=torch.int64, device=device)
            self.tokens.fill_(forced[0])
        self.logits = torch.empty(batch, vocabulary, dtype=first.layers[0].keys.dtype, device=device)
        self.history = torch.zeros(steps + 1, batch, dtype=torch.int64, device=device)
        self.tops = torch.zeros(steps + 1, batch, device=device)
        self.device = device

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Take steps inside this block; the cache is let go at its end."""
        try:
            with torch.inference_mode(), self.forward.attached():
                yield
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the cache and of the captured graphs."""
        self._graphs.clear()
        self.layers, self._movers, self.ranks = [], [], None
        self.forward.close()

    def _undo(self) -> Callable[[], None]:
        """Give what undoes a forward that is going to be repeated; what slots take can be taken twice."""
        return lambda: None

    def check(self) -> None:
        """Read what went wrong on the device, now and then; nothing can, here."""

    def adopt(self, row: int, end: int) -> None:
        """Tell a row's sequence what has happened in its first `end` steps."""
        sequence = self.sequences[row]
        if self.ranks is None:
            sequence.adopt(end)
            return
        gone = self.ranks.of_sequence(row, self.ranks.evicted_at)
        near = self.ranks.of_sequence(row, self.ranks.near)
        sequence.adopt(end, gone, near_ties=int(near[:, : end + 1].sum()))

    @property
    def cache_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that PyTorch has allocated on the GPU, weights and all; elsewhere those of the slots."""
        if self.device.type == "cuda":
            return int(torch.cuda.memory_allocated(self.device))
        return self.cache_bytes

    def step(self) -> None:
        """Feed the tokens, score, evict, and choose the next tokens; nothing waits for the GPU.

        The first step evicts down to the budget. From the second of a kind, scored or not, a step is a graph, but for
        those at which positions leave in batches.
        """
        t = self.done + 1
        scored = self.rule.evicts and bool(self.rule.scored[t - 1])
        if self.ranks is not None:
            self.ranks.load_coefficients(t)
        if self.ranks is not None and t in self.ranks.cuts:
            self._forward(scored)
            self._cut(scored, t)
        elif scored in self._graphs:
            self._graphs[scored].replay()
        elif self.captures and self._warm.get(scored):
            self._capture(scored)
            if not self.captures:
                self._whole(scored)
        else:
            self._whole(scored)
            self._warm[scored] = 1
        self.done = t

    def _whole(self, scored: bool) -> None:
        self._forward(scored)
        if self.ranks is not None:
            self.ranks.update(scored=scored)
            self.ranks.evict()
        self._advance()

    def _forward(self, scored: bool) -> None:
        self._scored = scored and self.rule.reads_attention
        self.history.index_copy_(0, self.clock.at, self.tokens.unsqueeze(0))
        self.forward(self.tokens, self.clock.last, self.logits)
        if scored and self.rule.keys is not None:
            assert self.ranks is not None
            assert self.ranks.key_scores is not None
            kind: Literal["cosine", "norm"] = "cosine" if self.rule.keys == "cosine" else "norm"
            for layer in self.layers:
                if layer.ordinal is not None:
                    key_scores(layer.keys, layer.lengths, kind, out=self.ranks.key_scores[layer.ordinal])

    def _cut(self, scored: bool, t: int) -> None:
        """End a step that evicts many: move the rest into the slots that stay, fewer ones after the first step."""
        assert self.ranks is not None
        self.ranks.update(scored=scored)
        slots = self.ranks.cut(t)
        for layer in self.layers:
            if layer.ordinal is None:
                continue
            own = slots[self.ranks.of_layer(layer.ordinal)]
            if t == 1:
                layer.shrink(own, self.ranks.slots)
                layer.constant = self.ranks.constant
            else:
                layer.close_up(own)
        if t == 1:
            self._use()
        self._advance()

    def _advance(self) -> None:
        """Choose the next tokens, and move on."""
        tops, best = self.logits.max(dim=-1)
        self.tops.index_copy_(0, self.clock.at, tops.float().unsqueeze(0))
        self.tokens.copy_(best if self._forced is None else self._forced[self.clock.at].expand_as(best))
        self.clock.advance()
        for mover in self._movers:
            mover.advance()

    def _capture(self, scored: bool) -> None:
        """Capture a step and replay it, after comparing what a model's own modules give when they are replayed."""
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        try:
            with torch.cuda.graph(graph, pool=pool):
                self._whole(scored)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.fused:
                raise
            torch.cuda.synchronize(self.device)
            self.captures = False
            warnings.warn(
                f"this model's step cannot be captured in a CUDA graph and runs without: {str(error).splitlines()[0]}",
                stacklevel=2,
            )
            return
        if not self.fused:
            # The positions have moved on since the warm-up: a step that was made for one length shows here.
            undo = self._undo()
            self._forward(scored)
            wanted = self.logits.float().clone()
            undo()
            graph.replay()
            if not alike(self.logits.float(), wanted):
                raise KvsimError(
                    "model: a step captured in a CUDA graph does not give the logits of the model's own step; decode "
                    "with the plain engine (engine 'plain')"
                )
        else:
            graph.replay()
        self._graphs[scored] = graph

    def _attend(self, own: Slots, query: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        logits = lse = None
        if self._scored and own.ordinal is not None:
            assert self.ranks is not None
            assert self.ranks.logits is not None
            assert self.ranks.lse is not None
            logits, lse = self.ranks.logits[own.ordinal], self.ranks.lse[own.ordinal]
        info = own.info.info
        if self._backend is not None:
            if logits is not None:
                decode_logits(
                    query, own.keys, own.lengths, scaling=info.scaling, softcap=info.softcap, positions=own.positions,
                    logits=logits, lse=lse,
                )  # fmt: skip
            found = self._backend(own, query)
            return found if out is None else out.copy_(found)
        return decode_attention(
            query, own.keys, own.values, own.lengths,
            scaling=info.scaling, softcap=info.softcap, sink_logits=own.info.sink_logits, positions=own.positions,
            with_logits=logits is not None, out=out, logits=logits, lse=lse,
        ).output  # fmt: skip

    def _seat(self, prefixes: Items[Prefix]) -> list[Slots]:
        """Put the prompts into slots."""
        if self.sequences[0].plan.admission is not None:
            raise KvsimError("admission needs the dual cache: kvsim.live.dual.DualSession")
        steps, prompts = self.sequences[0].steps, [prefix.length for prefix in prefixes]
        device = prefixes[0].layers[0].keys.device
        if self.rule.evicts:
            self.ranks = Ranks(self.rule, self.sequences, device)
        growths: dict[tuple[int, ...], Growth] = {}
        rings: dict[tuple[int, bool], Ring] = {}
        found: list[Slots] = []
        for index, layer in enumerate(prefixes[0].layers):
            window, chunked = layer.info.sliding_window, layer.info.type == "chunked_attention"
            if window is not None:
                ring = rings.setdefault((window, chunked), Ring(self.clock, window, chunked=chunked))
                found.append(ring_slots(prefixes, index, ring, max(prompts) + steps))
            elif layer.info.eligible and self.ranks is not None:
                found.append(evicting_slots(prefixes, index, prefixes[0].eligible.index(index), self.ranks))
            else:
                found.append(growing_slots(prefixes, self.sequences, index, growths))
        self._movers = [*growths.values(), *rings.values()]
        return found

    def _use(self) -> None:
        norms = None if self.ranks is None else self.ranks.norms
        self.forward.use(
            self.layers,
            [None if norms is None or layer.ordinal is None else norms[layer.ordinal] for layer in self.layers],
            max(sequence.prefix.length for sequence in self.sequences),
        )


def alike(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Say whether logits are those of another run up to rounding; what is finite in neither agrees."""
    gaps = torch.where(found.isfinite() | wanted.isfinite(), (found - wanted).abs(), 0)
    size = torch.where(wanted.isfinite(), wanted.abs(), 0).max()
    return bool(gaps.max() <= _CLOSE * size)


def _device(model: Any, prefixes: Items[Prefix]) -> torch.device:
    """Give the one device of model and prompts.

    Raises
    ------
    KvsimError
        If there are several, or the layers are not ones that the kernels read.
    """
    first = prefixes[0].layers
    found = {layer.keys.device for prefix in prefixes for layer in prefix.layers}
    found |= {parameter.device for parameter in model.parameters()}
    if len(found) != 1:
        raise KvsimError("the fast form needs the model and its prompts on one device; the plain engine can split them")
    for layer in first:
        if layer.info.eligible and layer.info.sliding_window is not None:
            raise KvsimError(
                f"the fast form does not evict from layers whose queries see a window (layer {layer.index}); "
                "the plain engine can (engine 'plain')"
            )
        if layer.keys.shape[-1] != layer.values.shape[-1]:
            raise KvsimError("the fast form needs keys and values of equal dimension; the plain engine does not")
    return found.pop()
