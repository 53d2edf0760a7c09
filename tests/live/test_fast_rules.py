"""Rules that are no recurrence of attention: windows, pooling, batches on overflow, scores of keys."""

import fast_cases as fc
import numpy as np
import pytest
import torch

import kvsim
from kvsim.live import decode, prefill
from kvsim.live.fast import decode_fast
from kvsim.live.fast.states import WindowSums, independent_scores, pooled
from kvsim.scoring import pooled as pooled_reference

pytestmark = pytest.mark.usefixtures("quiet_infinities")

STEPS = 8
# No token comes twice: keys of one token are equally long wherever they stand, up to rounding.
PROMPTS = [[(17 * i + 5) % 61 for i in range(14)], [(23 * i + 2) % 61 for i in range(9)]]
FORCED = [token for token in range(61) if not any(token in prompt for prompt in PROMPTS)][:STEPS]
WINDOWS = [
    "snapkv:3/when=every",
    "window:3",
    "window:2,pool=3/group=layer/refresh=2",
    "window:3,pool=99/score=entropy",
    "window:2,pool=3/score=knorm/group=shared",
]
KEYS = [
    "keydiff",
    "knorm",
    "single/score=knorm:sign=plus/group=shared/refresh=3",
    "ema:0.8/score=keydiff/group=layer/refresh=3",
    "ema:0.8,over=layer/score=keydiff",
    "keydiff/when=prefill",
]
BATCHES = [
    "ema:0.8/when=overflow:30%",
    "ema:0.8/when=overflow:50%/group=head/refresh=2",
    "ema:0.8/score=vnorm/when=overflow:30%",
    "snapkv:2/when=overflow:40%",
    "keydiff/when=overflow",
]


@pytest.fixture(scope="module")
def prefixes(llama):
    return [prefill(llama, prompt) for prompt in PROMPTS]


def both(model, prefixes, policy, budgets, steps=STEPS, **options):
    """Run the plain form, and the fast one with a budget for each row."""
    policies = [kvsim.parse(policy).with_budget(kvsim.Budget(budget)) for budget in budgets]
    plain = [
        decode(model, [prefix], one, steps=steps, force=FORCED[:steps], keep_logits=True)[0]
        for prefix, one in zip(prefixes, policies, strict=True)
    ]
    options = {"steps": steps, "forced": FORCED[:steps], "keep_logits": True} | options
    return decode_fast(model, prefixes, policies, **options), plain


def slow_after(count, policies):
    """Mark all but the first few as slow."""
    return [pytest.param(one, marks=pytest.mark.slow if i >= count else ()) for i, one in enumerate(policies)]


@pytest.mark.parametrize("policy", [*slow_after(1, WINDOWS), *slow_after(2, KEYS), *slow_after(2, BATCHES)])
def test_rows_of_unequal_length_are_the_plain_forms(llama, prefixes, policy):
    fast, plain = both(llama, prefixes, policy, (6, 6))
    assert sum(run.evictions for run in plain) > 20
    for one, other in zip(fast, plain, strict=True):
        # Pooling makes ties that both forms break alike.
        assert (one.evicted_at == other.evicted_at).all()
        fc.assert_same(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["snapkv:3/when=every", "keydiff", "ema:0.8/when=overflow:30%"])
@pytest.mark.parametrize("budgets", [(5, 12), (100, 9)])
def test_rows_may_differ_in_budget_and_fill_up_first(llama, prefixes, policy, budgets):
    for one, other in zip(*both(llama, prefixes, policy, budgets), strict=True):
        assert (one.evicted_at == other.evicted_at).all()
        fc.assert_same(one, other)


@pytest.mark.parametrize("fused", [True, False])
def test_a_batch_leaves_at_once_and_the_next_ones_fill_its_place(llama, prefixes, fused):
    (run, short), _ = both(llama, prefixes, "ema:0.8/when=overflow:50%", (10, 10), fused=fused)
    when, count = np.unique(run.evicted_at[run.evicted_at > 0], return_counts=True)
    # 15, and then 11, are more than 10: 8, and then 6, stay.
    assert (when.tolist(), count.tolist()) == ([1, 4], [7, 5])
    assert np.unique(short.evicted_at[short.evicted_at > 0]).tolist() == [2, 7]


def test_a_last_step_that_fills_the_last_slot(llama, prefixes):
    """With as many positions as slots there is no next one to seat."""
    for one, other in zip(*both(llama, prefixes, "ema:0.8", (100, 3), steps=2), strict=True):
        assert (one.evicted_at == other.evicted_at).all()
        fc.assert_same(one, other)


@pytest.mark.skipif(fc.DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("policy", ["snapkv:3/when=every", "keydiff", "knorm/refresh=2", "ema:0.8/when=overflow:30%"])
def test_captured_steps_are_the_steps_themselves(llama, prefixes, policy):
    for fused in (True, False):
        runs = [both(llama, prefixes, policy, (6, 6), graphs=graphs, fused=fused)[0] for graphs in (True, False)]
        for captured, plain in zip(*runs, strict=True):
            assert (captured.evicted_at == plain.evicted_at).all()
            for ours, theirs in zip(captured.logits, plain.logits, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [3, 5, 41])
def test_pooling_goes_by_position_wherever_the_slots_are(size):
    generator = torch.Generator().manual_seed(size)
    state = torch.randn(2, 3, 10, generator=generator)
    positions = torch.stack([torch.randperm(50, generator=generator)[:10] for _ in range(6)]).view(2, 3, 10).int()
    lengths = torch.tensor([10, 6], dtype=torch.int32)
    found = pooled(state, positions, lengths, size)
    for row, group in np.ndindex(2, 3):
        used = slice(int(lengths[row]))
        order = positions[row, group, used].argsort()
        wanted = pooled_reference(state[row, group, used][order].double().numpy(), size)
        assert found[row, group, used][order].tolist() == pytest.approx(wanted.tolist())


def test_a_window_forgets_the_oldest_scores_and_who_sat_in_a_slot():
    window = WindowSums(torch.tensor([[[[1.0, 2, 3]]], [[[10.0, 20, 30]]]]))
    state = torch.zeros(1, 1, 3)
    window.seat(torch.tensor([[1]]))
    window.take(torch.tensor([[[100.0, 200, 300]]]), state)
    assert state.tolist() == [[[110, 200, 330]]]
    window.seat(torch.tensor([[-1]]))
    window.take(torch.tensor([[[1000.0, 2000, 3000]]]), state)
    assert state.tolist() == [[[1100, 2200, 3300]]]
    places = window.places
    window.keep(torch.tensor([[[2, 0]]]), torch.tensor([[[True, False]]]), 3)
    assert window.places is places
    assert places.tolist() == [[[[300, 0, 0]]], [[[3000, 0, 0]]]]
    window.keep(torch.tensor([[[0]]]), torch.tensor([[[True]]]), 2)
    assert window.places.tolist() == [[[[300, 0]]], [[[3000, 0]]]]


def test_scores_of_keys_are_shifted_only_where_states_remember(llama, prefixes):
    def rule(policy):
        from kvsim.live.fast.rules import draw_up

        return draw_up([kvsim.parse(policy).with_budget(kvsim.Budget(5))], prefixes[:1], 4)[0]

    given = torch.tensor([-3.0, -1, -9, 0]).view(1, 1, 1, 4)
    lengths = torch.tensor([3], dtype=torch.int32)
    shape = {"batch": 1, "by_layer": False, "groups": 1}
    assert independent_scores(rule("keydiff"), given, lengths, **shape).flatten().tolist() == [-3, -1, -9, 0]
    assert independent_scores(rule("ema:0.8/score=keydiff"), given, lengths, **shape).flatten().tolist() == [6, 8, 0, 0]
    assert independent_scores(rule("knorm"), -given, lengths, **shape).flatten().tolist() == [-3, -1, -9, 0]
    assert not rule("ema:0.8,over=layer/score=knorm").signed
    assert rule("window:2/score=knorm").signed
    assert not rule("keydiff").reads_attention
