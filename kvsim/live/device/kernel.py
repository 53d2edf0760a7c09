"""Replay of policies on what a pass saw by one launch: a program for each of their groups, over all steps."""

# mypy: disable-error-code="import-untyped"

import torch
from kvsim_kernels.replay.kernel import replay_window

from kvsim.live.device.replayer import Replayed, Seen
from kvsim.live.device.stepper import Rules, State
from kvsim.live.sequence import NEAR

__all__ = ["KernelReplayer"]

TILE = 8192
"""Numbers that a program reads at a time: of several rows, if these are short."""


class KernelReplayer:
    """Replays with `kvsim_kernels.replay.window`; see `kvsim.live.device.replayer.Replayer`.

    Which steps are final depends on all groups of a policy and is known after the launch. A second launch then takes
    the state there; over all passes it runs each step once.
    """

    def decide(self, rules: Rules, state: State, rows: torch.Tensor) -> torch.Tensor:
        """See `kvsim.live.device.replayer.Replayer`."""
        every = torch.arange(len(rows), device=rows.device)
        nothing = torch.zeros_like(every)
        seen = Seen(every, nothing, nothing, rows.shape[1], rows, torch.zeros_like(state.evicted_at))
        _launch(rules, state, seen, nothing + rows.shape[1])
        return state.evicted_at

    def replay(self, rules: Rules, state: State, seen: Seen) -> Replayed:
        """See `kvsim.live.device.replayer.Replayer`."""
        ahead = state.of(seen.own)
        both, either, near, mass = _launch(rules, ahead, seen, seen.start + seen.width)
        steps = seen.start.unsqueeze(1) + torch.arange(seen.width, device=seen.rows.device)
        differs = (both != either).any(1)
        final = seen.start + (~differs | (steps < seen.first.unsqueeze(1))).long().cumprod(1).sum(1)
        kept = state.of(seen.own)
        _launch(rules, kept, seen, final)
        kept.retained.copy_((kept.evicted_at < 0) & (rules.where < rules.prompt + final.view(-1, 1, 1)))
        state.put(seen.own, kept)
        jaccard = (both.double() / either).mean(1)
        kept_mass = mass.mean(1) / (rules.depth * rules.heads)
        return Replayed(ahead.evicted_at, final, differs, jaccard, near.sum(1), kept_mass)


def _launch(
    rules: Rules, state: State, seen: Seen, stop: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take a state on from step `seen.first` to `stop`; give what the kernel counts in each step, [A, G, width]."""
    rows, device = seen.rows, seen.rows.device
    count, positions = len(seen.own), rules.where.numel()
    steps = positions - rules.prompt
    shape = count, rules.count, seen.width
    both, either, near = (torch.ones(shape, dtype=torch.int32, device=device) for _ in range(3))
    mass = torch.zeros(shape, dtype=torch.float64, device=device)
    block = max(16, _power(positions))
    tile = min(_power(rules.depth * rules.heads), max(1, TILE // block))
    replay_window[(count * rules.count,)](
        rows,
        rows.stride(0),
        rows.stride(1),
        rows.stride(3),
        seen.first,
        stop,
        seen.start,
        seen.own,
        rules.after,
        rules.weights,
        rules.scored.view(torch.uint8),
        rules.evicts.view(torch.uint8),
        rules.reset.view(torch.uint8),
        rules.budgets,
        rules.sinks,
        rules.recent,
        seen.ran,
        state.m,
        state.evicted_at,
        both,
        either,
        near,
        mass,
        torch.full((1,), NEAR, dtype=torch.float64, device=device),
        groups=rules.count,
        depth=rules.depth,
        heads=rules.heads,
        prompt=rules.prompt,
        steps=steps,
        width=seen.width,
        position_bits=positions.bit_length(),
        ROWS=tile,
        BLOCK=block,
        num_warps=min(16, max(1, tile * block // 512)),
        enable_fp_fusion=False,
    )
    return both, either, near, mass


def _power(number: int) -> int:
    """Give the smallest power of two that is not below a number."""
    return 1 << (number - 1).bit_length()
