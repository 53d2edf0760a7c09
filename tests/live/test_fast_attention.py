"""Other libraries' attention in fast live decoding: the sets and logits of our own kernel, or a refusal by name."""

import sys
import types

import fast_cases as fc
import pytest
import torch

import kvsim
from kvsim.live import decode, prefill
from kvsim.live.fast import backends, decode_fast
from kvsim.live.fast.session import Session

pytestmark = pytest.mark.usefixtures("quiet_infinities")


OPTIONS = {"steps": fc.STEPS, "force": fc.FORCED, "budget": fc.BUDGET, "keep_logits": True, "engine": "triton"}


@pytest.mark.parametrize("policy", ["ema:0.8/refresh=2", "ema:0.8/group=head", "full", "adakv:expected"])
def test_sdpa_gives_the_sets_and_logits_of_our_kernel(llama, prefixes, policy):
    ours = decode(llama, prefixes, policy, **OPTIONS)
    theirs = decode(llama, prefixes, policy, attention="sdpa", **OPTIONS)
    for mine, other in zip(ours, theirs, strict=True):
        fc.assert_same(other, mine)
        assert (mine.attention, other.attention) == ("triton", "sdpa")


def test_sdpa_in_the_models_own_modules_and_its_rings():
    model = fc.small("gemma3")
    prefix = prefill(model, fc.PROMPT_LONG)
    (mine,) = decode(model, [prefix], "ema:0.8", **OPTIONS)
    (other,) = decode(model, [prefix], "ema:0.8", attention="sdpa", **OPTIONS)
    fc.assert_same(other, mine)


@pytest.mark.parametrize(("budgets", "masked"), [((6, 6), False), ((6, 4), True), ((100, 100), True)])
def test_slots_that_never_change_need_no_mask(llama, prefixes, budgets, masked, monkeypatch):
    seen = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(query, keys, values, attn_mask=None, **options):
        seen.append(attn_mask is not None)
        return attend(query, keys, values, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    policies = [kvsim.parse("ema:0.8").with_budget(kvsim.Budget(budget)) for budget in budgets]
    runs = decode_fast(llama, prefixes, policies, steps=3, forced=fc.FORCED[:3], attention="sdpa", graphs=False)
    # The first step sees whole prompts, which differ in length.
    assert seen == [True, True] + [masked] * 4
    for run, own, prefix in zip(runs, policies, prefixes, strict=True):
        (plain,) = decode(llama, [prefix], own, steps=3, force=fc.FORCED[:3])
        assert (run.evicted_at == plain.evicted_at).all()


def stand_in(q, k, v, *, seqused_k, max_seqlen_k, softmax_scale, softcap, learnable_sink, num_splits):
    """Compute what flash-attn-4 would, [batch, 1, H, d], from what it is given."""
    assert seqused_k.dtype == torch.int32
    assert max_seqlen_k == k.shape[1]
    assert softcap == 0.0
    assert learnable_sink is None
    assert num_splits == 1
    from kvsim_kernels.decode_attention import decode_attention

    found = decode_attention(q[:, 0], k.transpose(1, 2), v.transpose(1, 2), seqused_k, scaling=softmax_scale)
    return found.output.unsqueeze(1), None


def test_flash_attn_is_told_the_slots_in_use(llama, prefixes, monkeypatch):
    module = types.ModuleType("flash_attn.cute")
    module.flash_attn_varlen_func = stand_in
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with pytest.raises(kvsim.KvsimError, match=r"'flash_attn' has no kernel for torch.float32 \(layer 0\); use"):
        decode(llama, prefixes, "ema:0.8", attention="flash_attn", **OPTIONS)
    monkeypatch.setattr(backends, "_HALF", (torch.float32,))
    ours = decode(llama, prefixes, "ema:0.8/refresh=2", **OPTIONS)
    theirs = decode(llama, prefixes, "ema:0.8/refresh=2", attention="flash_attn", **OPTIONS)
    for mine, other in zip(ours, theirs, strict=True):
        fc.assert_same(other, mine)
    with pytest.raises(kvsim.KvsimError, match="has no mask for heads that hold unequal numbers"):
        decode(llama, prefixes, "adakv:expected", attention="flash_attn", **OPTIONS)


def test_what_a_library_cannot_do_is_refused_before_anything_runs(llama, prefixes, monkeypatch):
    monkeypatch.setattr(Session, "step", lambda self: pytest.fail("a step was taken"))
    monkeypatch.setattr(backends, "_HALF", (torch.float32,))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    with pytest.raises(kvsim.KvsimError, match=r"needs flash-attn-4 \(and with it nvidia-cutlass-dsl, .*: pip install"):
        decode(llama, prefixes, "ema:0.8", attention="flash_attn", **OPTIONS)
    with pytest.raises(kvsim.KvsimError, match="unknown attention 'sdqa'; did you mean 'sdpa'"):
        decode(llama, prefixes, "ema:0.8", attention="sdqa", **OPTIONS)
    with pytest.raises(kvsim.KvsimError, match="'sdpa' is a choice of engine 'triton'"):
        decode(llama, prefixes, "ema:0.8", steps=1, budget=5, attention="sdpa")
    oss = fc.small("gpt-oss")
    with pytest.raises(kvsim.KvsimError, match="'sdpa' has no attention sinks"):
        decode(oss, [prefill(oss, fc.PROMPTS[0])], "ema:0.8", attention="sdpa", **OPTIONS)
