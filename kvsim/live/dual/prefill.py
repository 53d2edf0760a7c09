"""The prompt read straight into a pool, by kernels: what is not admitted is never kept (WG-KV section 4.2)."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import torch
from kvsim_kernels.gather_admitted.kernel import gather_admitted
from kvsim_kernels.vertical_slash.kernel import vertical_slash
from kvsim_traces.manifest import LayerInfo

from kvsim.errors import KvsimError
from kvsim.live.attention import Call
from kvsim.live.dual.pool import Compact, Pool
from kvsim.live.dual.stage import Stage
from kvsim.live.fast.decode import check_machine
from kvsim.live.gatekeeper import Decision, Gatekeeper
from kvsim.live.keepers import keeper_of
from kvsim.live.prefix import PrefillWatcher, Prefix, config_of, run_watched
from kvsim.policy import Policy, parse

__all__ = ["PooledPrefix", "prefill_pooled"]


@dataclass(frozen=True)
class PooledPrefix(Prefix):
    """A prompt whose eligible layers lie in a pool; their `keys`, `values` and `queries` here are empty.

    It is decoded by `kvsim.live.decode` with engine ``triton``, once, together with the prompts of the same pool.

    Attributes
    ----------
    pool : Pool
    """

    pool: Pool | None = field(default=None, repr=False)


def prefill_pooled(
    model: Any, prompts: Items[list[int]], keeper: Gatekeeper | Policy | str, *, steps: int, pages: int | None = None
) -> list[PooledPrefix]:
    """Read prompts one after the other into one pool: gate, gather, vertical-slash attention, and on to the next layer.

    Parameters
    ----------
    model : PreTrainedModel
    prompts : sequence of lists of int
    keeper : Gatekeeper, Policy or str
        A policy that admits, or its keeper (`kvsim.live.keepers.keeper_of`).
    steps : int
        The most steps that will be decoded.
    pages : int, optional
        Pages of the pool, which is filled as layers come. By default it is made after the last one, as large as the
        prompts and the steps can need; until then what is admitted waits outside it.

    Raises
    ------
    KvsimError
        If there is no GPU, the policy admits everything, or the model or a prompt is not one that can be read.
    PoolFullError
        If `pages` do not hold the prompts.
    """
    if steps < 1:
        raise KvsimError(f"steps must be at least 1, got {steps}")
    if not prompts:
        raise KvsimError("there are no prompts")
    check_machine(next(model.parameters()).device)
    if isinstance(keeper, Policy | str):
        policy = parse(keeper) if isinstance(keeper, str) else keeper
        found = keeper_of(model, policy)
        if found is None:
            raise KvsimError(f"{policy}: admits everything; the dual cache is for admit=")
        keeper = found
    for prompt in prompts:
        if not hasattr(prompt, "__len__"):
            raise KvsimError("prompts: must be a list of prompts, each a list of token ids")
    longest = max(len(prompt) for prompt in prompts)
    stage = Stage(keeper.window, len(prompts), steps=steps, pages=pages, layers=len(keeper.layers), length=longest)
    read = []
    for row, prompt in enumerate(prompts):
        watcher = _PooledWatcher(model, keeper, stage, row)
        outputs = run_watched(model, prompt, watcher)
        # The eligible layers are those that the keeper decides about.
        layers = watcher.layers(0, 0, keeper.layers)
        read.append((prompt, layers, outputs.logits[0, -1].float(), watcher.admitted(0)))
    pool, config = stage.pool(), config_of(model)
    return [
        PooledPrefix(list(prompt), layers, logits, config, None, keeper, admitted, pool)
        for prompt, layers, logits, admitted in read
    ]


class _PooledWatcher(PrefillWatcher):
    """Answers the attention calls of eligible layers by kernels, and keeps of their keys what the pool takes."""

    def __init__(self, model: Any, keeper: Gatekeeper, stage: Stage, row: int) -> None:
        super().__init__(model, [keeper])
        self._stage, self._row, self._starts = stage, row, [0]

    def _kept(self, call: Call) -> Call:
        keeper = self.keepers[0]
        assert keeper is not None
        return call.without_vectors() if call.layer in keeper.layers else call

    def _attended(
        self, call: Call, info: LayerInfo, marks: torch.Tensor, decided: list[Decision | None]
    ) -> torch.Tensor:
        keeper, (own,) = self.keepers[0], decided
        assert keeper is not None
        assert own is not None
        if call.sink_logits is not None or info.sliding_window is not None:
            raise KvsimError(f"layer {call.layer}: the dual cache runs neither softmax sinks nor windowed layers")
        own_marks, scores = own
        query, key, value = (
            part[0] if part.stride(-1) == 1 else part[0].contiguous() for part in (call.query, call.key, call.value)
        )
        gathered = gather_admitted(key, value, own_marks)
        output = vertical_slash(
            query, key, value, gathered, window=keeper.window, scaling=call.scaling, softcap=call.softcap
        )
        assert isinstance(output, torch.Tensor)
        gates = own_marks.float() if scores is None else scores
        prompt = Compact.of(key, value, gates, own_marks, keeper.window)
        self._stage.take(keeper.layers.index(call.layer), self._row, prompt)
        return output.transpose(0, 1).unsqueeze(0)
