"""Closed-loop replay of many policies at once, where the model is: `kvsim.live.closed_loop` for linear rules.

The passes and their certificate are the same. Rows are kept for one pass only, the policies are replayed on them by one
kernel, or in batched PyTorch operations, and the host sees a few numbers after each pass.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import torch

from kvsim.errors import KvsimError
from kvsim.live.closed_loop import NARROWEST, Pass, check_closed, open_loop_guess
from kvsim.live.decode import check_forced
from kvsim.live.device.masked import Lanes, Window, masked_pass
from kvsim.live.device.replayer import Replayer, Seen, replayer_of
from kvsim.live.device.stepper import Rules
from kvsim.live.masked_pass import NEVER, IntArray
from kvsim.live.prefix import Prefix, check_prefix
from kvsim.live.sequence import Sequence, live_policy
from kvsim.plan import Groups
from kvsim.policy import Policy, parse
from kvsim.replay import choose_budget

__all__ = ["DeviceLoop", "closed_loop_on_device"]


MOST_TOGETHER = 32
"""Policies that run together, by default, if memory holds the rows of so many."""


@dataclass(frozen=True)
class DeviceLoop:
    """A policy in closed loop.

    Attributes
    ----------
    policy : str
        Canonical policy string with its budget.
    passes : list of Pass
        In order; the last one proves that every step is final.
    evicted_at : array of int32
        [G, L0 + T]; see `kvsim.Result.evicted_at`.
    evictions, near_ties : int
        As in `kvsim.live.closed_loop.ClosedLoop`.
    kept_mass : float
        Mean over the steps of the attention on what was visible.
    """

    policy: str
    passes: list[Pass]
    evicted_at: IntArray
    evictions: int
    near_ties: int
    kept_mass: float


def closed_loop_on_device(
    model: Any,
    prefix: Prefix,
    tokens: Items[int],
    policies: Items[Policy | str],
    *,
    compression_ratio: float | str | Decimal | None = None,
    budget: int | str | None = None,
    batch: int | None = None,
    engine: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[DeviceLoop]:
    """Replay policies in closed loop on one run of tokens, with rows and states on the model's device.

    Parameters
    ----------
    model, prefix, tokens, policies, compression_ratio, budget, progress
        As for `kvsim.live.closed_loop.closed_loop`. Policies are linear rules over attention (`Rules`).
    batch : int, optional
        The most policies that run together; those of one kind of groups do. The first pass takes 4 bytes for each
        policy, eligible layer, query head, step and position; by default at most 32 whose rows take half of the GPU's
        free memory.
    engine : {"triton", "torch"}, optional
        What replays the policies on a pass's rows: a kernel over all steps at once (`kvsim_kernels.replay.window`), or
        operations of PyTorch, step by step. By default the kernel, where there is a GPU and positions are few enough.

    Returns
    -------
    list of DeviceLoop
        In the order of `policies`.

    Raises
    ------
    KvsimError
        On a prompt that has not been read, a policy that this form does not run, a token outside the vocabulary, a
        batch below 1, an engine that is unknown or cannot run here, attention that is not a number, or if memory runs
        out.
    """
    check_prefix(prefix)
    forced = check_forced(tokens, model)
    if batch is None:
        batch = _fitting(prefix, len(forced))
    if batch < 1:
        raise KvsimError(f"batch must be at least 1, got {batch}")
    replayer = replayer_of(engine, prefix.layers[0].keys.device, prefix.length + len(forced))
    chosen = choose_budget(compression_ratio, budget)
    parsed = [live_policy((parse(one) if isinstance(one, str) else one).with_budget(chosen)) for one in policies]
    for policy in parsed:
        check_closed(policy)
    sequences = [Sequence(policy, prefix, len(forced)) for policy in parsed]
    kinds: dict[str, list[int]] = {}
    for place, sequence in enumerate(sequences):
        kinds.setdefault(sequence.plan.groups.kind, []).append(place)
    found: dict[int, DeviceLoop] = {}
    for places in kinds.values():
        for start in range(0, len(places), batch):
            own = places[start : start + batch]
            loops = _run(model, prefix, forced, [sequences[place] for place in own], replayer)
            found.update(zip(own, loops, strict=True))
            if progress is not None:
                progress(len(found), len(parsed))
    return [found[place] for place in range(len(parsed))]


def _fitting(prefix: Prefix, steps: int) -> int:
    """Give how many policies' rows of all steps half of the device's free memory takes, from 1 to `MOST_TOGETHER`."""
    device = prefix.layers[0].keys.device
    if device.type != "cuda":
        return MOST_TOGETHER
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + held
    each = 4 * len(prefix.eligible) * prefix.num_heads * steps * (prefix.length + steps)
    return int(max(1, min(MOST_TOGETHER, free // 2 // each)))


def _run(
    model: Any, prefix: Prefix, forced: list[int], sequences: list[Sequence], replayer: Replayer
) -> list[DeviceLoop]:
    try:
        with torch.inference_mode():
            return _Batch(model, prefix, forced, sequences, replayer).run()
    except torch.OutOfMemoryError as error:
        failure = str(error).splitlines()[0]
    # Raised out here, so that no traceback holds the rows.
    raise KvsimError(
        f"out of memory in a closed loop over {len(forced)} steps with a batch of {len(sequences)}: {failure}; "
        "take a smaller batch or fewer steps"
    )


class _Batch:
    """Policies of one kind of groups on their way to the fixed point."""

    def __init__(
        self, model: Any, prefix: Prefix, forced: list[int], sequences: list[Sequence], replayer: Replayer
    ) -> None:
        self.model, self.sequences, self.steps, self.replayer = model, sequences, len(forced), replayer
        self.plans = [sequence.plan for sequence in sequences]
        self.groups: Groups = self.plans[0].groups
        self.lanes = Lanes(prefix, forced, len(sequences))
        device, count = self.lanes.device, len(sequences)
        self.rules = Rules(self.plans, prefix.length, self.lanes.positions, device)
        self.state = self.rules.start()
        first = np.stack([sequence.evicted_at for sequence in sequences])
        guesses = [open_loop_guess(prefix, sequence.policy, forced) for sequence in sequences]
        guess = [
            at if own is None else np.where(at == 0, 0, np.where(own == 0, -1, own))
            for at, own in zip(first, guesses, strict=True)
        ]
        self.state.evicted_at.copy_(torch.from_numpy(first))
        self.state.retained.copy_(torch.from_numpy(np.stack([sequence.retained for sequence in sequences])))
        gone = torch.from_numpy(np.stack(guess)).int().to(device)
        self.gone = torch.where(gone < 0, NEVER, gone)
        self.final = torch.zeros(count, dtype=torch.int64, device=device)
        self.near = torch.zeros(count, dtype=torch.int64, device=device)
        self.kept_mass = torch.zeros(count, self.steps, dtype=torch.float64, device=device)
        self.passes: list[list[Pass]] = [[] for _ in sequences]

    def run(self) -> list[DeviceLoop]:
        """Run passes until every step of every policy is final."""
        finals, widths = [0] * len(self.plans), [self.steps] * len(self.plans)
        apart = all(plan.layers_are_apart for plan in self.plans)
        active = list(range(len(self.plans)))
        while active:
            own = torch.tensor(active, device=self.lanes.device)
            width = max(widths[row] for row in active)
            gone = self._per_head(self.gone[own])
            window = Window(self.lanes, own, self.final[own], width, gone.clone())
            rows = masked_pass(self.model, window, self._decide if apart and not self.passes[0] else None)
            if apart and not self.passes[0]:
                self.gone = window.gone.reshape(self.gone.shape)
            self._replay(window, rows, active, finals, widths)
            active = [row for row in active if finals[row] < self.steps]
        return self._finished()

    def _per_head(self, of_groups: torch.Tensor) -> torch.Tensor:
        """Spread [A, G, n] over eligible layers and KV heads, [A, K or 1, Hk or 1, n]."""
        heads = self.groups.num_kv_heads if self.groups.kind == "head" else 1
        return of_groups.view(of_groups.shape[0], -1, heads, of_groups.shape[-1])

    def _decide(self, place: int, rows: torch.Tensor) -> torch.Tensor:
        """Replay an eligible layer of all policies on its rows of all steps, [A, Hk or 1, n]."""
        heads = self.groups.count // len(self.groups.layers)
        groups = slice(place * heads, (place + 1) * heads)
        evicted_at = self.replayer.decide(self.rules.of_groups(groups), self.state.of_groups(groups), rows.unsqueeze(2))
        return torch.where(evicted_at < 0, NEVER, evicted_at)

    def _replay(
        self, window: Window, rows: torch.Tensor, active: list[int], finals: list[int], widths: list[int]
    ) -> None:
        """Replay the policies on what a pass saw, from the first step that was not final."""
        own, first, stop = window.own, window.final, window.start + window.width
        ran, is_fresh = self.gone[own], window.is_fresh.view(len(active), -1)
        seen = self.replayer.replay(self.rules, self.state, Seen(own, first, window.start, window.width, rows, ran))
        later = torch.where(ran > stop.view(-1, 1, 1), ran, NEVER)
        self.gone[own] = torch.where(seen.evicted_at < 0, later, seen.evicted_at)
        self.final[own] = seen.final
        self.near[own] += torch.where(window.steps < seen.final.unsqueeze(1), seen.near * is_fresh, 0).sum(1)
        at = own.unsqueeze(1), window.steps
        self.kept_mass[at] = torch.where(is_fresh, seen.kept_mass, self.kept_mass[at])
        changed = (seen.differs & is_fresh).sum(1)
        jaccard, mass = (torch.where(is_fresh, part, 0).sum(1) for part in (seen.jaccard, seen.kept_mass))
        numbers = torch.stack([seen.final.double(), (stop - first).double(), changed.double(), jaccard, mass]).tolist()
        if not np.isfinite(numbers[-1]).all():
            raise KvsimError("model: its attention is not a number (NaN); its weights or its type are at fault")
        for row, now, ran_steps, differ, total in zip(active, *numbers[:-1], strict=True):
            before, finals[row] = finals[row], int(now)
            widths[row] = min(self.steps - finals[row], max(NARROWEST, 4 * (finals[row] - before)))
            self.passes[row].append(Pass(int(ran_steps), int(differ), finals[row], total / ran_steps))

    def _finished(self) -> list[DeviceLoop]:
        evicted_at = self.state.evicted_at.cpu().numpy()
        near, mass = self.near.tolist(), self.kept_mass.mean(1).tolist()
        return [
            DeviceLoop(
                policy=str(sequence.policy),
                passes=passes,
                evicted_at=at,
                evictions=int((at >= 0).sum()),
                near_ties=ties,
                kept_mass=kept,
            )
            for sequence, passes, at, ties, kept in zip(
                self.sequences, self.passes, evicted_at, near, mass, strict=True
            )
        ]
