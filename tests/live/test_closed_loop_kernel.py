"""The kernel of closed loops does what the PyTorch form does on the same rows, step by step."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, ints
from recording import PROMPT, VOCAB, tiny

from kvsim.live import prefill
from kvsim.live.device import closed_loop_on_device
from kvsim.live.device.kernel import KernelReplayer
from kvsim.live.device.replayer import Seen, TorchReplayer
from kvsim.live.device.stepper import Rules
from kvsim.live.masked_pass import NEVER
from kvsim.live.sequence import Sequence
from kvsim.policy import parse

STEPS = 14
FORCED = [(5 * i * i + 11) % VOCAB for i in range(STEPS)]
RULES = [
    "ema:0.8/budget=7", "ema:0.9,over=step/protect=sink:2+recent:3/budget=6", "cumulative/refresh=3/budget=9",
    "ema:0.7,over=layer/budget=6", "ema:0.5/refresh=first/budget=29",
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return tiny("llama-gqa3", "sdpa").to(DEVICE)


@pytest.fixture(scope="module")
def prefix(model):
    return prefill(model, PROMPT)


def rules_of(prefix, group):
    plans = [Sequence(parse(f"{rule}/group={group}"), prefix, STEPS).plan for rule in RULES]
    return Rules(plans, prefix.length, prefix.length + STEPS, torch.device(DEVICE))


def random_rows(prefix, lanes, start, width, seed=0):
    """Attention that sums up to one, but for some heads of some steps that see the first position alone, or nothing."""
    rng = torch.Generator().manual_seed(seed)
    layers, heads, positions = len(prefix.eligible), prefix.num_heads, prefix.length + STEPS
    rows = torch.rand(lanes, width, layers, heads, positions, generator=rng) ** 4
    newest = prefix.length + start.cpu()[:, None] + torch.arange(width)
    rows *= torch.arange(positions) <= newest[:, :, None, None, None]
    rows[:, 1, :, 0, 1:] = 0
    rows[:, 2, :, 1] = 0
    return (rows / rows.sum(-1, keepdim=True).clamp(min=1e-9)).to(DEVICE)


def assert_same(want, got, runs=None):
    """Compare answers or states, in the steps that were run."""
    for one in fields(want):
        ours, theirs = (torch.as_tensor(getattr(answer, one.name)) for answer in (got, want))
        if runs is not None and ours.shape == runs.shape:
            ours, theirs = ours[runs], theirs[runs]
        if ours.is_floating_point():
            torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(ours.long(), theirs.long()), one.name


@pytest.mark.parametrize(("group", "tile"), [("shared", 8192), ("shared", 256), ("layer", 8192), ("head", 8192)])
def test_a_pass_from_steps_in_the_middle(prefix, monkeypatch, group, tile):
    """Lanes of some of the plans, from different steps, whose pass had wrong sets from different steps on."""
    monkeypatch.setattr("kvsim.live.device.kernel.TILE", tile)
    rules = rules_of(prefix, group)
    own, first, start = (
        ints(*steps, dtype=torch.int64) for steps in ((3, 0, 1, 4, 2), (0, 3, 9, 2, 8), (0, 3, 8, 2, 8))
    )
    width = 6
    states = rules.start(), rules.start()
    every = torch.arange(len(RULES), device=DEVICE)
    before = random_rows(prefix, len(RULES), every * 0, STEPS, seed=1)
    for lane, plan in enumerate(own):
        for t in range(1, int(first[lane]) + 1):
            for state in states:
                one = plan.view(1)
                state.put(one, rules.step(one, state.of(one), ints(t, dtype=torch.int64), before[one, t - 1]).state)
    rows = random_rows(prefix, len(own), start, width)
    # The right sets, and then wrong ones.
    ran = torch.full((len(own), rules.count, rules.where.numel()), NEVER, dtype=torch.int32, device=DEVICE)
    seen = Seen(own, first, start, width, rows, ran)
    ahead = TorchReplayer().replay(rules, states[0].of(every), seen).evicted_at
    ran.copy_(torch.where(ahead < 0, NEVER, ahead))
    for lane, until in enumerate((2, 7, 13, 5, 0)):
        if until:
            ran[lane, -1, int((ran[lane, -1] > until).nonzero()[0])] = until
    want = TorchReplayer().replay(rules, states[0], seen)
    got = KernelReplayer().replay(rules, states[1], seen)
    assert_same(want, got, start[:, None] + torch.arange(width, device=DEVICE) >= first[:, None])
    assert_same(*states)
    assert want.final.tolist() == [2, 7, 13, 5, 14]


def test_all_steps_of_one_layer(prefix):
    """As before a layer's queries attend to anything: rows are a part of those of all layers."""
    rules = rules_of(prefix, "head")
    rows = random_rows(prefix, len(RULES), torch.zeros(len(RULES), dtype=torch.int64), STEPS)[:, :, 1:2]
    heads = rules.count // len(prefix.eligible)
    part = slice(heads, 2 * heads)
    want, got = (
        replayer().decide(rules.of_groups(part), rules.start().of_groups(part), rows)
        for replayer in (TorchReplayer, KernelReplayer)
    )
    assert torch.equal(want, got)
    assert (want > 0).any(2).all()


def test_close_cuts_are_counted_and_ties_keep_the_newest(prefix):
    rules = rules_of(prefix, "layer")
    lanes = torch.arange(len(RULES), device=DEVICE)
    rows = random_rows(prefix, len(RULES), lanes * 0, STEPS)
    rows[:] = (rows > 0) / (rows > 0).sum(-1, keepdim=True).clamp(min=1)
    rows[1:] *= 1 + 1e-6 * torch.rand(rows[1:].shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    ran = torch.full((len(lanes), rules.count, rules.where.numel()), NEVER, dtype=torch.int32, device=DEVICE)
    states = rules.start(), rules.start()
    seen = Seen(lanes, lanes * 0, lanes * 0, STEPS, rows, ran)
    want, got = (
        form().replay(rules, state, seen) for form, state in zip((TorchReplayer, KernelReplayer), states, strict=True)
    )
    assert_same(want, got)
    assert want.near[0].sum() > 0
    assert want.near[1:4].sum() > 0


def test_closed_loops_are_those_of_the_other_engine(model, prefix):
    policies = ["ema:0.8", "ema:0.9,over=step/protect=sink:2+recent:3", "single/group=head"]
    want, got = (
        closed_loop_on_device(model, prefix, FORCED, policies, budget=8, engine=engine)
        for engine in ("torch", "triton")
    )
    for one, other in zip(want, got, strict=True):
        assert np.array_equal(one.evicted_at, other.evicted_at)
        assert (one.passes, one.near_ties) == (other.passes, other.near_ties)
        assert one.kept_mass == pytest.approx(other.kept_mass, rel=1e-12)
    assert len(want[0].passes) > 1
