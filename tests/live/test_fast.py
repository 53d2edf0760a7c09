"""Fast live decoding against the plain form: policies, batches, generation."""

import fast_cases as fc
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvsim
from kvsim.live import decode, prefill
from kvsim.live.fast import decode_fast
from kvsim.live.fast.generic import _experts_set
from kvsim.live.fast.session import Session

pytestmark = pytest.mark.usefixtures("quiet_infinities")

EVICTING = [
    "ema:0.8",
    "single/refresh=3",
    "ema:0.8/refresh=first/group=layer",
    "cumulative/refresh=3/group=head",
    "ema:0.8,over=step/group=layer/protect=sink:2+recent:1",
    "ema:0.8,over=layer/refresh=3/protect=recent:2",
    "ema:0.8/score=vnorm/refresh=3",
    "ema:0.8/score=vnorm/group=head",
    "ema:0.8/score=entropy/group=layer",
    "ema:0.8/score=attention:heads=max",
    "h2o",
    "streaming:2",
    "random:7/group=head/refresh=3",
]
GROWING = ["full", "snapkv:4", "adakv:expected", "pyramidkv:4"]


OPTIONS = {"steps": fc.STEPS, "force": fc.FORCED, "budget": fc.BUDGET, "keep_logits": True}


def slow_after(count, policies):
    """Mark all but the first few as slow."""
    return [pytest.param(one, marks=pytest.mark.slow if i >= count else ()) for i, one in enumerate(policies)]


@pytest.mark.parametrize("policy", [*slow_after(4, EVICTING), *slow_after(2, GROWING)])
def test_rows_of_unequal_length_are_the_plain_forms(llama, prefixes, policy):
    wanted = decode(llama, prefixes, policy, **OPTIONS)
    found = generic(llama, prefixes, policy, fc.BUDGET)
    for fast, plain in zip(found, wanted, strict=True):
        fc.assert_same(fast, plain)
        assert fast.engine == "triton"
        assert fast.policy == plain.policy
        if policy in EVICTING:
            assert fast.evictions


def generic(model, prefixes, policy, *budgets, **options):
    """Run through the model's own modules, one budget for all rows or one for each."""
    given = {"steps": fc.STEPS, "forced": fc.FORCED, "keep_logits": True, "fused": False} | options
    budgets = budgets if len(budgets) == len(prefixes) else budgets * len(prefixes)
    policies = [kvsim.parse(policy).with_budget(kvsim.Budget(budget)) for budget in budgets]
    return decode_fast(model, prefixes, policies, **given)


@pytest.mark.parametrize("budgets", [(4, 12), (12, 100), (100, 100), (13, 3)])
def test_rows_may_differ_in_budget_and_fill_up_before_they_evict(llama, prefixes, budgets):
    for row, run in enumerate(generic(llama, prefixes, "ema:0.8", *budgets)):
        (plain,) = decode(llama, [prefixes[row]], "ema:0.8", **OPTIONS | {"budget": budgets[row]})
        fc.assert_same(run, plain)


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "llama4"])
def test_windowed_layers_sinks_and_chunks(name):
    model = fc.small(name)
    prefix = prefill(model, fc.PROMPT_LONG)
    (plain,) = decode(model, [prefix], "ema:0.8/group=head", physical=True, **OPTIONS)
    (fast,) = generic(model, [prefix], "ema:0.8/group=head", fc.BUDGET)
    fc.assert_same(fast, plain)


class Waiting(TorchDispatchMode):
    """Notes operations whose shapes or numbers the host waits for."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("nonzero", "_local_scalar_dense", "unique", "bincount"):
            self.found.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_a_step_of_mixed_experts_waits_for_nothing(experts, monkeypatch):
    model = fc.small("gpt-oss")
    model.set_experts_implementation(experts)
    prefix, own = prefill(model, fc.PROMPT_LONG), kvsim.parse("ema:0.8").with_budget(kvsim.Budget(6))
    session = Session(model, [prefix], [own], steps=2, forced=[1, 2], graphs=False)
    masks, attend = [], session.forward.attend
    monkeypatch.setattr(session.forward, "attend", lambda call: (masks.append(call.mask), attend(call))[1])
    with session.attached():
        session.step()
        with Waiting() as seen:
            session._forward(scored=True)
    assert seen.found == set()
    # That of eager attention copies a number from the host.
    assert masks == [None] * 6
    assert model.config._experts_implementation == experts
    if experts == "eager":
        with Waiting() as seen, torch.inference_mode():
            model(torch.tensor([[1, 2]], device=fc.DEVICE))
        assert "nonzero" in seen.found


def test_grouped_products_of_bfloat16_stay():
    model = fc.small("gpt-oss").bfloat16()
    model.set_experts_implementation("grouped_mm")
    with _experts_set(model):
        assert model.config._experts_implementation == "grouped_mm"
    with _experts_set(model.float()):
        assert model.config._experts_implementation == "batched_mm"
    with _experts_set(fc.small("llama-gqa3")):
        pass


def test_the_slots_of_a_layer_are_one_more_than_the_budget(llama, prefixes):
    (run,) = generic(llama, prefixes[:1], "ema:0.8", 31, steps=3, forced=fc.FORCED[:3])
    assert run.evictions == 0
    (run,) = generic(llama, [prefill(llama, fc.PROMPT_LONG)], "ema:0.8", 15, steps=3, forced=fc.FORCED[:3])
    a_slot = 2 * 2 * 2 * 16 * 4
    assert run.physical_bytes == 16 * a_slot
    assert run.logical_bytes == 15 * a_slot
    before, after = run.allocated_bytes
    if fc.DEVICE == "cpu":
        assert (before, after) == (32 * a_slot, 16 * a_slot)
    assert before > after
    with pytest.raises(kvsim.KvsimError, match="decode without removing keys"):
        run.result()


def test_greedy_and_sampled_generation_are_the_plain_forms(llama, prefixes):
    for options in ({}, {"temperature": 0.9, "seed": 3}):
        wanted = decode(llama, prefixes, "ema:0.8", steps=4, budget=fc.BUDGET, keep_logits=True, **options)
        found = generic(llama, prefixes, "ema:0.8", fc.BUDGET, steps=4, forced=None, **options)
        for fast, plain in zip(found, wanted, strict=True):
            fc.assert_same(fast, plain)


def test_rows_end_at_their_own_stop_token(llama, prefixes, monkeypatch):
    free = decode(llama, prefixes, "ema:0.8", steps=5, budget=fc.BUDGET)
    stop = [free[0].tokens[2], free[1].tokens[1]]
    monkeypatch.setattr("kvsim.live.fast.session.READ_BACK", 3)
    done = []
    wanted = decode(llama, prefixes, "ema:0.8", steps=5, budget=fc.BUDGET, stop=stop, keep_logits=True)
    found = generic(
        llama, prefixes, "ema:0.8", fc.BUDGET, forced=None, stop=stop, progress=lambda step, _: done.append(step)
    )
    for fast, plain in zip(found, wanted, strict=True):
        fc.assert_same(fast, plain)
    assert done == [1, 2, 3]
    # A row without such a token goes on, whatever was read back before.
    (wanted,) = decode(llama, prefixes[:1], "ema:0.8", steps=5, budget=fc.BUDGET, keep_logits=True)
    unheard = next(token for token in range(61) if token not in wanted.tokens)
    (fast,) = generic(llama, prefixes[:1], "ema:0.8", fc.BUDGET, steps=5, forced=None, stop=[unheard])
    fc.assert_same(fast, wanted)


@pytest.mark.skipif(fc.DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("policy", ["ema:0.8/refresh=3", "streaming:2", "full"])
def test_captured_steps_are_the_steps_themselves(llama, prefixes, policy):
    more = {"steps": 40, "forced": [(7 * i) % 61 for i in range(40)]}
    for fused in (True, False):
        runs = [
            generic(llama, prefixes, policy, fc.BUDGET, graphs=graphs, fused=fused, **more) for graphs in (True, False)
        ]
        for captured, plain in zip(*runs, strict=True):
            assert (captured.evicted_at == plain.evicted_at).all()
            for ours, theirs in zip(captured.logits, plain.logits, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
