"""The fused step of Llama-like models: the same logits and sets as through their own modules."""

import fast_cases as fc
import pytest
import torch

import kvsim
from kvsim.live import decode, prefill
from kvsim.live.fast import decode_fast
from kvsim.live.fast.fused import why_not_fused

pytestmark = pytest.mark.usefixtures("quiet_infinities")

STEPS = 3
OPTIONS = {"steps": STEPS, "force": fc.FORCED[:STEPS], "budget": fc.BUDGET, "keep_logits": True}
CASES = [
    ("llama-gqa3", "ema:0.8/refresh=2", 1, {}),
    ("llama-gqa3", "ema:0.8/score=vnorm/group=head", 2, {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", "ema:0.8/group=layer", 2, {}),
    ("qwen3", "full", 2, {"tie_word_embeddings": True}),
    ("mistral", "snapkv:4", 2, {}),
]


def fast(model, prefixes, policy, **options):
    given = kvsim.parse(policy).with_budget(kvsim.Budget(fc.BUDGET))
    return decode_fast(
        model, prefixes, [given] * len(prefixes), steps=STEPS, forced=fc.FORCED[:STEPS], keep_logits=True, **options
    )


@pytest.mark.parametrize(("name", "policy", "batch", "changes"), CASES)
def test_fused_and_generic_steps_are_the_plain_forms(name, policy, batch, changes):
    model = fc.small(name, **changes)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.1)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    prefixes = [prefill(model, prompt) for prompt in fc.PROMPTS[:batch]]
    assert why_not_fused(model, batch) is None
    wanted = decode(model, prefixes, policy, **OPTIONS)
    ways = [fast(model, prefixes, policy, fused=True), fast(model, prefixes, policy, fused=False)]
    for runs in ways:
        for run, plain in zip(runs, wanted, strict=True):
            fc.assert_same(run, plain)
    # The weights are stacked, and still the model's.
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, before[key])
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.weight.data_ptr() == attention.q_proj.weight.data_ptr() + attention.q_proj.weight.nbytes
    again = decode(model, prefixes[:1], policy, **OPTIONS)
    assert torch.equal(again[0].logits[-1], wanted[0].logits[-1]) or batch > 1


def test_what_the_fused_step_does_not_run():
    model = fc.small("llama-gqa3")
    assert "larger than 16" in why_not_fused(model, 17)
    assert "Gemma3ForCausalLM is not one of" in why_not_fused(fc.small("gemma3"), 1)
    handle = model.model.norm.register_forward_hook(lambda *_: None)
    assert "has hooks" in why_not_fused(model, 1)
    handle.remove()
    assert "activation" in why_not_fused(fc.small("llama-gqa3", hidden_act="gelu"), 1)
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert "'dynamic'" in why_not_fused(fc.small("llama-gqa3", rope_parameters=dynamic), 1)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    assert "lm_head is a Sequential" in why_not_fused(model, 1)
    with pytest.raises(kvsim.KvsimError, match="the fused step does not run this model: lm_head"):
        fast(model, [prefill(model, fc.PROMPTS[0])], "ema:0.8", fused=True)
