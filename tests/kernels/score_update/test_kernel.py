"""Scores and their recurrence: the kernels against the reference in float64, and the reference against the engines'."""

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, error, ints, normal
from kvsim_kernels.score_update import score_update as reference
from kvsim_kernels.score_update import unscored_update as unscored_reference
from kvsim_kernels.score_update.kernel import score_update, unscored_update

# layers, batch, kv_heads, share, slots, groups
SHAPES = [
    (1, 1, 2, 1, 33, 1),
    (6, 1, 2, 3, 150, 1),
    (3, 2, 2, 4, 131, 2),
    (5, 1, 1, 7, 1100, 1),
    (2, 3, 4, 2, 65, 4),
    (1, 2, 3, 8, 40, 3),
]


def inputs(layers, batch, kv_heads, share, slots, groups, hidden=5):
    """Logits with empty slots and a tail that is not in use, and their log-sum-exp."""
    logits = normal(layers, batch, kv_heads * share, slots, seed=1) * 3
    # The heads of a group see the same slots, each group its own.
    empty = (torch.arange(slots)[None, None] + torch.arange(batch * groups).view(batch, groups, 1)) % hidden == 2
    logits.masked_fill_(empty.repeat_interleave(kv_heads * share // groups, 1).to(DEVICE), -torch.inf)
    lengths = ints(*(slots - 3 * row for row in range(batch)))
    for row, length in enumerate(lengths.tolist()):
        logits[:, row, :, length:] = torch.nan
    seen = torch.where(logits.isnan(), -torch.inf, logits.double())
    lse = torch.logsumexp(seen, -1)
    state = normal(batch, groups, slots, seed=2).abs()
    a = torch.linspace(0.5, 1, layers, device=DEVICE)
    return state, logits, lse.float(), lengths, a, 1 - a / 2


def both(given, **options):
    """Run kernel and reference; return the relative error of the states, having checked that the rest is untouched."""
    state, *rest = given
    exact = state.double()
    reference(exact, *rest, **options)
    found = state.clone()
    assert score_update(found, *rest, **options) is None
    changed = exact != state.double()
    assert torch.equal(found[~changed], state[~changed])
    return error(found[changed], exact[changed])


@pytest.mark.parametrize("heads", ["mean", "max"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape, heads):
    assert both(inputs(*shape), heads=heads) < 1e-6


@pytest.mark.parametrize("options", ["norms", "entropy", "norms+entropy", "reset", "new", "rows"])
@pytest.mark.parametrize("shape", SHAPES[1:5], ids=str)
def test_options(shape, options):
    layers, batch, kv_heads, _, slots, groups = shape
    state, logits, lse, lengths, a, b = inputs(*shape)
    chosen = {}
    if "norms" in options:
        chosen["value_norms"] = normal(layers, batch, kv_heads, slots, seed=3).abs()
    if "entropy" in options:
        chosen["entropy"] = True
    if options == "reset":
        state.fill_(torch.nan)
        chosen["reset"] = True
    if options == "new":
        new = torch.arange(batch * groups, device=DEVICE, dtype=torch.int32).view(batch, groups) + 3
        # What an evicted token left behind is not read.
        state.scatter_(2, new.unsqueeze(-1).long(), torch.nan)
        chosen["new_slots"] = new
        state[:, :, 2] = 0.25
    if options == "rows":
        a, b = (torch.stack([x / (1 + row) for row in range(batch)]) for x in (a, b))
    assert both((state.nan_to_num(1e30), logits, lse, lengths, a, b), **chosen) < 2e-6


def test_one_visible_slot_has_no_entropy_to_weigh_by_and_none_is_left_alone():
    logits = torch.full((2, 2, 2, 9), -torch.inf, device=DEVICE)
    logits[:, 0, :, 4] = 3.0
    lse = torch.logsumexp(logits, -1)
    state, half = torch.ones(2, 1, 9, device=DEVICE), torch.full((2,), 0.5, device=DEVICE)
    expected = state.clone()
    for update in (score_update, reference):
        found = state.clone()
        update(found, logits, lse, ints(9, 9), half, half, entropy=True)
        expected[0, 0, 4] = 1.0
        assert torch.equal(found, expected)


def test_layers_apart_go_into_the_batch():
    state, logits, lse, lengths, _, _ = inputs(3, 1, 2, 2, 50, 1)
    a, b = torch.tensor([0.7], device=DEVICE), torch.tensor([0.3], device=DEVICE)
    found = state.expand(3, 1, 50).contiguous()
    score_update(
        found,
        logits.transpose(0, 1).contiguous(),
        lse.transpose(0, 1).contiguous(),
        lengths.expand(3).contiguous(),
        a,
        b,
    )
    for layer in range(3):
        alone = state.clone()
        score_update(alone, logits[layer, None].contiguous(), lse[layer, None].contiguous(), lengths, a, b)
        assert torch.equal(found[layer], alone[0])


def test_same_bits_every_time():
    given = inputs(*SHAPES[3])
    norms = normal(5, 1, 1, 1100, seed=3).abs()
    states = [given[0].clone() for _ in range(2)]
    for state in states:
        score_update(state, *given[1:], value_norms=norms, entropy=True)
    assert torch.equal(*states)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("holes", [False, True])
def test_unscored(groups, holes):
    state = normal(2, groups, 1100).abs()
    new = torch.tensor([[7, 1000], [900, -1]], device=DEVICE, dtype=torch.int32)[:, :groups].contiguous()
    state.scatter_(2, new.clamp(min=0).unsqueeze(-1).long(), 1e30)
    positions = None
    if holes:
        positions = torch.arange(1100, device=DEVICE, dtype=torch.int32).expand(2, 1, 1100).clone()
        positions[:, :, 3::4] = -1
    exact, found = state.double(), state.clone()
    unscored_reference(exact, ints(1100, 950), new, positions=positions)
    unscored_update(found, ints(1100, 950), new, positions=positions)
    keep = torch.arange(1100, device=DEVICE) != new.unsqueeze(-1)
    assert torch.equal(found[keep], state[keep])
    assert error(found[~keep], exact[~keep]) < 2e-7
    assert float(found[0, 0, 7]) < 2


def test_unscored_alone_starts_at_zero():
    for update in (unscored_update, unscored_reference):
        state = torch.full((1, 1, 4), 5.0, device=DEVICE)
        update(state, ints(1), ints(0).view(1, 1))
        assert state.flatten().tolist() == [0, 5, 5, 5]


@pytest.mark.parametrize("kind", ["shared", "layer", "head"])
@pytest.mark.parametrize("heads", ["mean", "max"])
@pytest.mark.parametrize("weighting", ["", "norms", "entropy", "norms+entropy"])
def test_reference_is_the_definition(kind, heads, weighting):
    """Over the slots of a group, the torch reference gives what the engines' definition gives over positions."""
    scoring, plan = pytest.importorskip("kvsim.scoring"), pytest.importorskip("kvsim.plan")
    layers, kv_heads, share, slots = 3, 2, 3, 40
    groups = plan.Groups(kind, tuple(range(layers)), kv_heads * share, kv_heads)
    depth = groups.depth
    state, logits, _, lengths, _, _ = inputs(layers, 1, kv_heads, share, slots, 1, hidden=4)
    logits = logits.double()
    seen = np.flatnonzero((logits[0, 0, 0] > -torch.inf).cpu())
    rows = torch.softmax(logits, -1)[:, 0].cpu().numpy()
    # Mass on what is not visible, which the definition renormalises away.
    rows = np.where(np.isin(np.arange(slots), seen), rows * 0.7, 0.3 / (slots - seen.size))
    norms = normal(layers, 1, kv_heads, slots, seed=5).abs().double()
    source = plan.ScoreSource(
        "attention", weight=norms[:, 0].cpu().numpy() if "norms" in weighting else None, heads=heads,
        entropy="entropy" in weighting,
    )  # fmt: skip
    a, b = np.linspace(0.5, 1, depth), np.linspace(0.2, 0.6, depth)
    expected = []
    for group in range(groups.count):
        m = state[0, 0].double().cpu().numpy().copy()
        for own_a, own_b, s in zip(a, b, scoring.attention_scores(source, rows, groups, group, seen), strict=True):
            m[seen] = own_a * m[seen] + own_b * s
        expected.append(m)
    lse = torch.logsumexp(logits, -1)
    batch = 1 if kind == "shared" else layers
    if kind != "shared":
        logits, lse, norms = logits.transpose(0, 1), lse.transpose(0, 1), norms.transpose(0, 1)
    found = state.double().expand(batch, kv_heads if kind == "head" else 1, slots).clone()
    reference(
        found, logits, lse, lengths.expand(batch), torch.from_numpy(a).to(DEVICE), torch.from_numpy(b).to(DEVICE),
        heads=heads, value_norms=norms if "norms" in weighting else None, entropy="entropy" in weighting,
    )  # fmt: skip
    np.testing.assert_allclose(found.view(-1, slots).cpu().numpy(), expected, rtol=1e-12, atol=1e-15)


def test_what_does_not_fit():
    state, *rest = inputs(2, 1, 2, 2, 20, 2)
    norms = torch.ones(2, 1, 2, 20, device=DEVICE)
    for update in (score_update, reference):
        with pytest.raises(ValueError, match="do not fit a state"):
            update(state[:, :, :7], *rest)
        with pytest.raises(ValueError, match="'mean' or 'max'"):
            update(state, *rest, heads="median")
        with pytest.raises(ValueError, match="value_norms of shape"):
            update(state, *rest, value_norms=norms[:, :, :1])
    with pytest.raises(ValueError, match="state must be contiguous float32"):
        score_update(state.double(), *rest)
    with pytest.raises(ValueError, match="must be float32"):
        score_update(state, rest[0].half(), *rest[1:])
