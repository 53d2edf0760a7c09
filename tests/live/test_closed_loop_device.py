"""Closed loops whose states stay on the device: the plain form's sets, passes and certificate."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE
from recording import PROMPT, VOCAB, tiny

from kvsim.errors import KvsimError, PolicyError
from kvsim.live import decode, prefill
from kvsim.live.closed_loop import closed_loop
from kvsim.live.device import closed_loop_on_device, loop
from kvsim.live.device.replayer import MOST, TorchReplayer, replayer_of
from kvsim.live.device.stepper import Rules
from kvsim.live.sequence import Sequence
from kvsim.policy import parse

STEPS = 40
FORCED = [(5 * i * i + 11) % VOCAB for i in range(STEPS)]
POLICIES = [
    "ema:0.8", "ema:0.9,over=step/protect=sink:2+recent:3", "single/group=head", "cumulative/group=layer", "full",
    "ema:0.8/refresh=3", "ema:0.8/refresh=first/group=layer", "h2o", "tova",
]  # fmt: skip
BUDGET = 8


@pytest.fixture(scope="module")
def model():
    return tiny("llama-gqa3", "sdpa")


@pytest.fixture(scope="module")
def prefix(model):
    return prefill(model, PROMPT)


@pytest.mark.parametrize("batch", [32, 2])
def test_sets_and_passes_are_those_of_the_plain_form(model, prefix, batch):
    plain = closed_loop(model, prefix, FORCED, POLICIES, budget=BUDGET, batch=1)
    seen = []
    ours = closed_loop_on_device(
        model, prefix, FORCED, POLICIES, budget=BUDGET, batch=batch, progress=lambda *now: seen.append(now)
    )
    assert seen[-1] == (len(POLICIES), len(POLICIES))
    live = decode(model, [prefix] * len(POLICIES), POLICIES, steps=STEPS, force=FORCED, budget=BUDGET)
    for want, run, found in zip(plain, live, ours, strict=True):
        assert found.policy == want.policy
        assert np.array_equal(found.evicted_at, run.evicted_at), found.policy
        assert (found.evictions, found.near_ties) == (want.evictions, want.near_ties)
        assert found.kept_mass == pytest.approx(want.result.summary()["kept_mass"], abs=1e-6)
        last = found.passes[-1]
        assert (last.changed, last.exact_steps, last.jaccard) == (0, STEPS, 1)
        assert all(one.exact_steps < two.exact_steps for one, two in zip(found.passes, found.passes[1:], strict=False))
        if batch == 32:
            assert (found.passes[0].changed, len(found.passes)) == (want.passes[0].changed, len(want.passes))
    assert max(len(loop.passes) for loop in ours) > 2


def test_layers_that_are_not_eligible_keep_everything(model):
    prefix = prefill(model, PROMPT, eligible=(1,))
    for policy in ("ema:0.8", "single/group=head"):
        (run,) = decode(model, [prefix], [policy], steps=STEPS, force=FORCED, budget=BUDGET)
        (found,) = closed_loop_on_device(model, prefix, FORCED, [policy], budget=BUDGET)
        assert np.array_equal(found.evicted_at, run.evicted_at)


def test_a_batch_takes_half_of_the_free_memory(model, prefix, monkeypatch):
    each = 4 * len(prefix.eligible) * prefix.num_heads * STEPS * (prefix.length + STEPS)
    assert loop._fitting(prefix, STEPS) == loop.MOST_TOGETHER
    on_gpu = SimpleNamespace(
        eligible=prefix.eligible,
        num_heads=prefix.num_heads,
        length=prefix.length,
        layers=[SimpleNamespace(keys=SimpleNamespace(device=torch.device("cuda")))],
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * each)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: each)
    for free, count in ((0, 1), (5 * each, 3), (10**15, loop.MOST_TOGETHER)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 0))
        assert loop._fitting(on_gpu, STEPS) == count


def test_faults_of_the_machine_and_the_model(model, prefix, monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "masked_pass", full)
        with pytest.raises(
            KvsimError, match=r"closed loop over 40 steps with a batch of 2: CUDA out .* 9 GiB.; take a sm"
        ):
            closed_loop_on_device(model, prefix, FORCED, ["ema:0.8", "single"], budget=BUDGET)
    broken = tiny("llama-gqa3", "sdpa")
    broken.model.layers[1].self_attn.q_proj.weight.data[0, 0] = torch.nan
    for policy in ("ema:0.8", "ema:0.8/group=head"):
        with pytest.raises(KvsimError, match=r"attention is not a number \(NaN\)"):
            closed_loop_on_device(broken, prefix, FORCED, [policy], budget=BUDGET)


def test_what_is_refused(model, prefix, monkeypatch):
    for policy, what in (
        ("snapkv:4", "a window of scored steps|pooled states"),
        ("ema:0.8/score=vnorm", "weights of the attention"),
        ("random:0", "scores of other things"),
        ("ema:0.8/when=overflow", "when=overflow"),
    ):
        with pytest.raises(PolicyError, match=f"the closed loop on the device does not run ({what})"):
            closed_loop_on_device(model, prefix, FORCED, [policy], budget=BUDGET)
    for axis in ("admit=local:window=3,sink=1", "select=topk:4"):
        with pytest.raises(PolicyError, match=f"a closed loop does not run {axis[:6]}"):
            closed_loop_on_device(model, prefix, FORCED, [f"ema:0.8/{axis}"], budget=BUDGET)
    for way in (closed_loop, closed_loop_on_device):
        with pytest.raises(KvsimError, match=r"prompts are what kvsim.live.prefill gives, got list"):
            way(model, PROMPT, FORCED, ["full"])
    with pytest.raises(KvsimError, match="batch must be at least 1"):
        closed_loop_on_device(model, prefix, FORCED, ["full"], batch=0)
    with pytest.raises(KvsimError, match=r"unknown engine 'tritn'.*torch, triton"):
        closed_loop_on_device(model, prefix, FORCED, ["full"], engine="tritn")
    with pytest.raises(KvsimError, match="holds 8192 positions of a closed loop, got 8193; use 'torch'"):
        replayer_of("triton", torch.device(DEVICE), MOST + 1)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KvsimError, match="engine 'triton' needs a CUDA GPU"):
        replayer_of("triton", torch.device("cpu"), MOST)
    assert isinstance(replayer_of(None, torch.device("cpu"), 10), TorchReplayer)
    assert isinstance(replayer_of(None, torch.device("cuda"), MOST + 1), TorchReplayer)
    plans = [Sequence(parse(text), prefix, 4).plan for text in ("ema:0.8/budget=8", "ema:0.8/group=head/budget=8")]
    with pytest.raises(PolicyError, match="must share a kind of groups, got head, shared"):
        Rules(plans, prefix.length, prefix.length + 4, prefix.layers[0].keys.device)
