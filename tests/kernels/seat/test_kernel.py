"""The end of an eviction step: the kernel against the reference, and what the reference does."""

import pytest
import torch
from kernel_cases import DEVICE, ints, normal
from kvsim_kernels.seat import seat as reference
from kvsim_kernels.seat.kernel import seat
from kvsim_kernels.select import select_evicted

STEP = 3


def inputs(batch, groups, slots, budget, n_sink=0, n_recent=0, *, used=None, close=0.0):
    state = normal(batch, groups, slots, seed=1).abs()
    if close:
        order = state.argsort(-1)
        lowest = state.gather(-1, order[..., :1])
        state = state.scatter(-1, order[..., 1:2], lowest * (1 + close))
    order = torch.stack([torch.randperm(slots, generator=torch.Generator().manual_seed(i)) for i in range(groups)])
    positions = order.expand(batch, groups, slots).clone().to(DEVICE, torch.int32)
    lengths = ints(*[slots if used is None else used] * batch)
    if used is not None:
        positions = torch.arange(slots, device=DEVICE, dtype=torch.int32).expand(batch, groups, slots).clone()
        positions[..., used:] = -1
    last = ints(*[int(lengths[0]) - 1] * batch)
    limits = ints(budget, n_sink, n_recent).expand(batch, groups, 3).clone()
    return state, positions, lengths, limits, last


def run(function, given):
    """Seat on copies; give positions, new slots, evicted_at, near."""
    state, positions, *rest = (x.clone() for x in given)
    evicted = select_evicted(state, positions, *rest)
    shape = state.shape[:2]
    outcome = {
        "new_slots": torch.full(shape, -7, dtype=torch.int32, device=DEVICE),
        "evicted_at": torch.full((*shape, state.shape[2] + 4), -1, dtype=torch.int32, device=DEVICE),
        "near": torch.zeros(*shape, STEP + 2, dtype=torch.int8, device=DEVICE),
    }
    function(state, positions, *rest, evicted, ints(STEP), **outcome, margin=1e-3)
    return [positions, *outcome.values()], evicted


@pytest.mark.parametrize(
    ("batch", "groups", "slots", "budget", "options"),
    [
        (1, 1, 40, 39, {}),
        (2, 3, 300, 299, {"n_sink": 4, "n_recent": 5}),
        (2, 1, 64, 63, {"close": 1e-4}),
        (1, 2, 64, 63, {"close": 1e-2}),
        (1, 2, 64, 70, {"used": 20}),
        (1, 1, 64, 70, {}),
        (1, 1, 5000, 4999, {}),
    ],
)
def test_against_the_reference(batch, groups, slots, budget, options):
    given = inputs(batch, groups, slots, budget, **options)
    for mine, theirs in zip(run(seat, given)[0], run(reference, given)[0], strict=True):
        assert torch.equal(mine, theirs)


def test_the_evicted_slot_is_the_next_ones():
    given = inputs(1, 2, 64, 63, close=1e-4)
    (positions, new_slots, evicted_at, near), evicted = run(reference, given)
    assert torch.equal(new_slots, evicted.slots)
    for group in range(2):
        slot, at = int(evicted.slots[0, group]), int(evicted.positions[0, group])
        assert int(positions[0, group, slot]) == 64
        assert torch.nonzero(evicted_at[0, group] >= 0).flatten().tolist() == [at]
        assert int(evicted_at[0, group, at]) == STEP
    assert near[0, :, STEP].tolist() == [1, 1]
    assert int(near.sum()) == 2
    assert not run(reference, inputs(1, 2, 64, 63, close=1e-2))[0][3].any()


def test_what_does_not_fit():
    state, positions, *rest = inputs(1, 1, 8, 7)
    evicted = select_evicted(state, positions, *rest)
    outcome = {
        "new_slots": ints(0).view(1, 1),
        "evicted_at": ints(*[0] * 9).view(1, 1, 9),
        "near": ints(0, 0, 0, 0, dtype=torch.int8).view(1, 1, 4),
    }
    for function in (seat, reference):
        with pytest.raises(ValueError, match="do not fit"):
            function(state, positions[:, :, :4], *rest, evicted, ints(1), **outcome, margin=0.1)
    with pytest.raises(ValueError, match="must be float32"):
        seat(state.double(), positions, *rest, evicted, ints(1), **outcome, margin=0.1)
