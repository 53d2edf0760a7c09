"""Selection: the kernels against the reference, and the reference against the engines' stepper."""

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, ints, normal
from kvsim_kernels.select import select_evicted as evicted_reference
from kvsim_kernels.select import select_survivors as survivors_reference
from kvsim_kernels.select.kernel import select_evicted, select_survivors


def inputs(
    batch, groups, slots, budget, n_sink=0, n_recent=0, *, kind="normal", holes=True, shuffled=True, shared=False
):
    """States, positions with holes, lengths, limits and last positions."""
    state = normal(batch, groups, slots, seed=1)
    if kind == "ties":
        state = (state * 2).round() / 2
    if kind == "equal":
        state = torch.zeros_like(state)
        state[..., ::2] *= -1
    if kind == "close":
        # Neighbouring float32 numbers: the last byte decides.
        state = (torch.tensor(0x3F800000, device=DEVICE, dtype=torch.int32) + (state * 90).int()).view(torch.float32)
    if kind == "tiny":
        state *= 1e-42
    rows = 1 if shared else groups
    positions = torch.stack(
        [
            torch.randperm(slots, generator=torch.Generator().manual_seed(seed)) if shuffled else torch.arange(slots)
            for seed in range(batch * rows)
        ]
    ).view(batch, rows, slots)
    # Positions beyond 16 bits, so that more than two bytes tell them apart.
    positions = (positions * 301).to(DEVICE, torch.int32)
    if holes:
        positions[positions % 7 == 2] = -1
    lengths = ints(*(slots - 5 * row for row in range(batch)))
    last = torch.stack([p[:, :length].max() for p, length in zip(positions, lengths.tolist(), strict=True)]).int()
    own = torch.tensor([budget, 301 * n_sink, 301 * n_recent], device=DEVICE, dtype=torch.int32)
    limits = own.expand(batch, groups, 3).clone()
    limits[..., 0] -= torch.arange(groups, device=DEVICE, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        state[row, :, length:] = -torch.inf
    return state, positions, lengths, limits, last


CASES = [
    {"slots": 40, "budget": 12},
    {"slots": 700, "budget": 70, "kind": "ties"},
    {"slots": 333, "budget": 100, "kind": "ties", "n_sink": 4, "n_recent": 20},
    {"slots": 300, "budget": 10, "kind": "equal", "n_sink": 2},
    {"slots": 300, "budget": 150, "kind": "close"},
    {"slots": 100, "budget": 30, "kind": "tiny"},
    {"slots": 64, "budget": 63, "holes": False},
    {"slots": 64, "budget": 100},
    {"slots": 50, "budget": 20, "n_sink": 10, "n_recent": 8, "shuffled": False},
    {"slots": 5000, "budget": 500, "kind": "ties"},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    "shape", [{"batch": 1, "groups": 1}, {"batch": 2, "groups": 3}, {"batch": 2, "groups": 2, "shared": True}], ids=str
)
def test_survivors(case, shape):
    given = inputs(**case, **shape)
    found = select_survivors(*given, width=case["budget"])
    expected = survivors_reference(*given, width=case["budget"])
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    if case.get("kind") in ("ties", "equal"):
        assert (found.ties > 1).any()


def test_survivors_of_slots_in_order():
    given = inputs(2, 2, 300, 40, 3, 5, kind="ties", shuffled=False)
    for mine, theirs in zip(
        select_survivors(*given, width=40, ordered=True), survivors_reference(*given, width=40), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("shape", [{"batch": 1, "groups": 1}, {"batch": 2, "groups": 3}], ids=str)
def test_evicted(case, shape):
    given = inputs(**case, **shape)
    found, expected = select_evicted(*given), evicted_reference(*given)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert (found.slots[0] >= 0).all() == (case["budget"] < 100 or case["slots"] > 100)


def test_nothing_but_protected_positions():
    given = inputs(1, 1, 20, 20, 20, holes=False, shuffled=False)
    given[3][..., 0] = 19
    assert select_evicted(*given).slots.item() == evicted_reference(*given).slots.item() == -1
    assert select_survivors(*given, width=20).counts.item() == 20
    # More than fit: nothing is written or read beyond the width.
    for select in (select_survivors, survivors_reference):
        found = select(*given, width=15)
        assert found.counts.item() == 15
        assert found.slots.flatten().tolist() == torch.argsort(given[1][0, 0])[:15].tolist()


@pytest.mark.parametrize(("n_sink", "n_recent"), [(0, 0), (2, 6)])
def test_reference_follows_the_stepper(n_sink, n_recent):
    """Cut a prompt, then one in and one out, and keep what the engines' definition keeps."""
    stepper = pytest.importorskip("kvsim.engines.stepper")
    plan = pytest.importorskip("kvsim.plan")
    prompt, steps, budget = 60, 12, 20
    random = np.random.default_rng(0)
    rows = random.dirichlet(np.ones(prompt + steps), size=(steps, 1, 2))
    a, b = np.full((steps, 1), 0.5), np.full((steps, 1), 0.5)
    made = plan.Plan(
        policy="test", groups=plan.Groups("shared", (0,), 2, 1), m0=np.zeros((1, prompt)), a=a, b=b, reset=False,
        scored=np.ones(steps, np.bool_), evicts=np.r_[False, np.ones(steps, np.bool_)],
        score=plan.ScoreSource("attention"), budgets=np.array([budget]), n_sink=np.array([n_sink]),
        n_recent=np.array([n_recent]),
    )  # fmt: skip
    engine = stepper.Stepper(made, prompt, prompt + steps)
    slots = torch.arange(prompt + 1)
    limits = ints(budget, n_sink, n_recent).view(1, 1, 3)
    for t in range(1, steps + 1):
        last = prompt + t - 1
        step = engine.step(t, rows[t - 1][:, :, : last + 1])
        state = torch.from_numpy(engine.state[0])[slots].float().view(1, 1, -1).to(DEVICE)
        given = state, slots.int().view(1, 1, -1).to(DEVICE), ints(slots.numel()), limits, ints(last)
        if t == 1:
            found = survivors_reference(*given, width=budget)
            kept = slots[found.slots[0, 0].long().cpu()]
            slots = torch.cat([kept, torch.tensor([prompt + 1])])
        else:
            found = evicted_reference(*given)
            kept = slots[slots != found.positions.item()]
            slots[found.slots.item()] = last + 1
        assert sorted(kept.tolist()) == np.flatnonzero(engine.retained[0]).tolist()
        assert found.ties.item() == step.ties[0]


def test_what_does_not_fit():
    state, positions, lengths, limits, last = inputs(1, 2, 20, 5)
    for select in (select_evicted, evicted_reference):
        with pytest.raises(ValueError, match="do not fit a state"):
            select(state, positions[:, :, :3], lengths, limits, last)
        with pytest.raises(ValueError, match="do not fit a state"):
            select(state, positions, lengths, limits[..., :2], last)
    with pytest.raises(ValueError, match="must be float32 and the rest int32"):
        select_evicted(state.double(), positions, lengths, limits, last)
    with pytest.raises(ValueError, match="must be contiguous"):
        select_evicted(state, positions.transpose(1, 2).contiguous().transpose(1, 2), lengths, limits, last)
