"""Who replays policies on what a pass saw: operations of PyTorch, a step at a time, or a kernel over all steps."""

import importlib.util
from dataclasses import dataclass
from typing import Protocol

import torch

from kvsim.errors import KvsimError, unknown_name
from kvsim.live.device.stepper import Rules, State
from kvsim.live.fast.decode import check_machine

__all__ = ["ENGINES", "MOST", "Replayed", "Replayer", "Seen", "TorchReplayer", "replayer_of"]

ENGINES = ("triton", "torch")

MOST = 8192
"""Most positions whose states a program of the kernel holds in registers."""


@dataclass(frozen=True)
class Seen:
    """What a pass of A policies saw.

    Attributes
    ----------
    own : Tensor [A] int64
        Which of the plans.
    first, start : Tensor [A] int64
        Steps of each that are final, and steps before the first of the pass, which is not later.
    width : int
        Steps of the pass.
    rows : Tensor [A, width, K, H, L0 + T] float32
        Attention over the full cache, 0 for positions that do not exist yet.
    ran : Tensor [A, G, L0 + T] int32
        The last step, counted from 1, that saw each position.
    """

    own: torch.Tensor
    first: torch.Tensor
    start: torch.Tensor
    width: int
    rows: torch.Tensor
    ran: torch.Tensor


@dataclass(frozen=True)
class Replayed:
    """What the policies do on it. Columns are the pass's steps; those before the first that was not final mean nothing.

    Attributes
    ----------
    evicted_at : Tensor [A, G, L0 + T] int32
        After the pass's last step.
    final : Tensor [A] int64
        Steps before the first whose sets are not those that the pass had: what was seen until there is final.
    differs : Tensor [A, width] bool
        Whether a step's sets are not those that the pass had.
    jaccard : Tensor [A, width] float64
        Of the two, averaged over groups.
    near : Tensor [A, width] int64
        Cuts closer than rounding.
    kept_mass : Tensor [A, width] float64
        Attention on what was visible, averaged over heads, layers and groups.
    """

    evicted_at: torch.Tensor
    final: torch.Tensor
    differs: torch.Tensor
    jaccard: torch.Tensor
    near: torch.Tensor
    kept_mass: torch.Tensor


class Replayer(Protocol):
    """Replays plans."""

    def decide(self, rules: Rules, state: State, rows: torch.Tensor) -> torch.Tensor:
        """Replay all plans on rows of all steps [P, T, K, H, L0 + T], from the state before step 1, which is used up.

        Gives ``evicted_at`` [P, G, L0 + T].
        """

    def replay(self, rules: Rules, state: State, seen: Seen) -> Replayed:
        """Replay plans on what a pass saw; their `state` moves on to the steps that are final now."""


class TorchReplayer:
    """Replays in batched operations of PyTorch, some dozens of them for each step: the definition of the other form."""

    def decide(self, rules: Rules, state: State, rows: torch.Tensor) -> torch.Tensor:
        """See `Replayer`."""
        every = torch.arange(len(rows), device=rows.device)
        for t in range(1, rows.shape[1] + 1):
            state = rules.step(every, state, every * 0 + t, rows[:, t - 1]).state
        return state.evicted_at

    def replay(self, rules: Rules, state: State, seen: Seen) -> Replayed:
        """See `Replayer`."""
        ahead = kept = state.of(seen.own)
        is_final = torch.ones_like(seen.own, dtype=torch.bool)
        final, columns = seen.first.clone(), []
        for column in range(seen.width):
            t = seen.start + 1 + column
            runs = t > seen.first
            sees, had = rules.visible(ahead, t), seen.ran >= t.view(-1, 1, 1)
            had &= rules.where < rules.prompt + t.view(-1, 1, 1)
            both, either = (sees & had).sum(2), (sees | had).sum(2)
            # Up to a change the pass ran under the policy's own sets, and what it saw is final.
            differs = (both != either).any(1)
            is_final &= ~(runs & differs)
            done = rules.step(seen.own, ahead, t, seen.rows[:, column])
            ahead = done.state.where(runs, ahead)
            kept = done.state.where(runs & is_final, kept)
            final += runs & is_final
            columns.append((differs, (both.double() / either).mean(1), done.near, done.kept_mass))
        state.put(seen.own, kept)
        return Replayed(ahead.evicted_at, final, *(torch.stack(part, 1) for part in zip(*columns, strict=True)))


def replayer_of(engine: str | None, device: torch.device, positions: int) -> Replayer:
    """Give what replays on a device over L0 + T positions; without a name the kernel, where it can.

    Raises
    ------
    KvsimError
        On an unknown name, or if the kernel cannot run there.
    """
    if engine is None:
        fits = device.type == "cuda" and positions <= MOST and importlib.util.find_spec("triton") is not None
        engine = "triton" if fits else "torch"
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    if engine == "torch":
        return TorchReplayer()
    check_machine(device)
    if positions > MOST:
        raise KvsimError(f"engine 'triton' holds {MOST} positions of a closed loop, got {positions}; use 'torch'")
    from kvsim.live.device.kernel import KernelReplayer

    return KernelReplayer()
