"""Decoding under a policy, against eager transformers with explicit masks and policies in plain lists."""

import numpy as np
import pytest
import torch
from living import ListPolicy, Schedule, eager_live
from recording import MODELS, PROMPT, VOCAB, WINDOW, eager_run, tiny

import kvsim
from kvsim.errors import KvsimError
from kvsim.live import decode, prefill
from kvsim.live.sequence import per_head

L0 = len(PROMPT)
STEPS = 9
FORCED = [(5 * i * i + 11) % VOCAB for i in range(STEPS)]
BUDGET = 8
# Llama 4's layers without RoPE give equal tokens equal keys, and so ties.
DISTINCT = [(17 * i + 5) % VOCAB for i in range(L0)]
FAMILIES = [name for name in MODELS if name != "mistral-sliding"]
RULES = {
    "single": {"rule": "single"},
    "cumulative": {"rule": "cumulative"},
    "ema:0.8": {},
    "ema:0.9,over=step": {"alpha": 0.9, "over": "step"},
    "ema:0.8,over=layer": {"over": "layer"},
    "ema:0.8/refresh=4": {"refresh": 4},
    "ema:0.8/refresh=first": {"refresh": "first"},
    "cumulative/protect=sink:2+recent:3": {"rule": "cumulative", "sink": 2, "recent": 3},
}
PRESETS = [
    "tova",
    "h2o",
    "streaming:4",
    "snapkv:6",
    "snapkv:4,kernel=3,heads=max/when=every",
    "pyramidkv:4",
    "adakv:snapkv,window_size=3,kernel=3",
    "adakv:expected",
    "expected",
    "cake:3",
    "scissorhands:4",
    "keydiff",
    "keydiff/when=prefill",
    "knorm",
    "ema:0.8/score=vnorm",
    "ema:0.8/score=entropy/group=layer",
    "cumulative/score=expected:n_future=9,n_sink=2,vnorm=false/refresh=3",
    "rkv:4",
    "rkv:3,kernel=1,mix=0.5/when=overflow:40%",
    "lagkv:4",
    "nonuniform/score=knorm/group=head/protect=sink:1+recent:20%/when=prefill",
    "random:7",
    "cumulative/when=overflow:30%/group=head",
    "ema:0.8/when=overflow",
    "inertiakv-aux",
    "rescue:0.6,40/protect=recent:1",
]


def model_of(name):
    return tiny(name, "eager" if name == "gpt-oss" else "sdpa")


@pytest.fixture(scope="module")
def llama():
    return model_of("llama-gqa3")


@pytest.fixture(scope="module")
def prefix(llama):
    return prefill(llama, PROMPT)


def greedy(model, steps, prompt=PROMPT):
    found = model.generate(torch.tensor([prompt]), max_new_tokens=steps, do_sample=False)
    return found[0, len(prompt) :].tolist()


def schedule_of(run):
    """The sets of a run, for the oracle."""
    plan = run.sequence.plan
    spread = per_head(plan, run.evicted_at)
    layers, kv_heads = plan.groups.layers, plan.groups.num_kv_heads
    return Schedule(L0, {(layer, kv): spread[i, kv] for i, layer in enumerate(layers) for kv in range(kv_heads)})


def close(logits, other, limit=1e-4):
    return max(float((a - b).abs().max()) for a, b in zip(logits, other, strict=True)) < limit


# Without eviction


@pytest.mark.parametrize("name", FAMILIES)
def test_full_is_the_models_own_generation_token_for_token(name):
    model = model_of(name)
    own = greedy(model, STEPS)
    (free,) = decode(model, [prefill(model, PROMPT)], ["full"], steps=STEPS)
    assert free.tokens == own
    assert (free.evicted_at == -1).all()
    assert free.evictions == 0
    assert free.logical_bytes <= free.full_bytes
    _, rows, _ = eager_run(model, PROMPT + own, L0)
    for t in range(1, STEPS + 1):
        np.testing.assert_allclose(free.sequence.trace.attention_rows(t), rows[t - 1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("physical", [False, True])
def test_sliding_layers_alone(physical):
    model = model_of("mistral-sliding")
    prefix = prefill(model, PROMPT, eligible="all")
    (free,) = decode(model, [prefix], ["full"], steps=STEPS, physical=physical)
    assert free.tokens == greedy(model, STEPS)
    (run,) = decode(model, [prefix], ["ema:0.8"], steps=STEPS, force=FORCED, budget=BUDGET, keep_logits=True)
    _, logits = eager_live(model, PROMPT, schedule_of(run), steps=STEPS, force=FORCED)
    assert close(run.logits, logits)


# Against eager attention and plain lists


@pytest.mark.parametrize("group", ["shared", "layer", "head"])
@pytest.mark.parametrize("rule", RULES)
def test_sets_and_logits_are_those_of_the_oracle(llama, prefix, rule, group):
    (run,) = decode(
        llama, [prefix], [f"{rule}/group={group}"], steps=STEPS, force=FORCED, budget=BUDGET, keep_logits=True
    )
    policy = ListPolicy(L0, BUDGET, layers=range(3), heads=6, kv_heads=2, group=group, **RULES[rule])
    _, logits = eager_live(llama, PROMPT, policy, steps=STEPS, force=FORCED)
    assert close(run.logits, logits)
    for row, gone in zip(run.evicted_at, policy.gone.values(), strict=True):
        assert {i: int(t) for i, t in enumerate(row) if t >= 0} == gone
    assert run.evictions == sum(len(gone) for gone in policy.gone.values())


@pytest.mark.parametrize("group", ["shared", "head"])
@pytest.mark.parametrize("name", FAMILIES)
def test_free_generation_of_every_family_is_the_oracles(name, group):
    model = model_of(name)
    prefix = prefill(model, DISTINCT)
    config = model.config.get_text_config()
    (run,) = decode(model, [prefix], [f"ema:0.5/group={group}"], steps=STEPS, budget=BUDGET, keep_logits=True)
    layers = [layer.index for layer in prefix.layers if layer.info.eligible]
    heads = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads}
    policy = ListPolicy(L0, BUDGET, layers=layers, alpha=0.5, group=group, **heads)
    tokens, logits = eager_live(model, DISTINCT, policy, steps=STEPS)
    assert run.tokens == tokens
    assert close(run.logits, logits)
    for row, gone in zip(run.evicted_at, policy.gone.values(), strict=True):
        assert {i: int(t) for i, t in enumerate(row) if t >= 0} == gone


@pytest.mark.parametrize("policy", PRESETS)
def test_presets_decode_under_the_sets_they_report(llama, prefix, policy):
    (run,) = decode(llama, [prefix], [policy], steps=STEPS, force=FORCED, budget=BUDGET, keep_logits=True)
    assert run.evictions
    _, logits = eager_live(llama, PROMPT, schedule_of(run), steps=STEPS, force=FORCED)
    assert close(run.logits, logits)
    # Measured as a replay is, with all keys known from the start: the same sets.
    result = run.result()
    assert result.loop == "live"
    assert (result.evicted_at == run.evicted_at).all()


@pytest.mark.parametrize("fault", [{"hide": 0}, {"shift": 1}])
def test_the_comparison_notices_a_hidden_position_and_shifted_positions(llama, prefix, fault):
    (run,) = decode(
        llama, [prefix], ["ema:0.8/protect=sink:1"], steps=STEPS, force=FORCED, budget=BUDGET, keep_logits=True
    )
    _, right = eager_live(llama, PROMPT, schedule_of(run), steps=STEPS, force=FORCED)
    _, wrong = eager_live(llama, PROMPT, schedule_of(run), steps=STEPS, force=FORCED, **fault)
    assert close(run.logits, right)
    for ours, theirs in zip(run.logits, wrong, strict=True):
        assert float((ours - theirs).abs().max()) > 1e-3


# Removal from memory


@pytest.mark.parametrize("policy", [*RULES, *PRESETS, "ema:0.8/group=layer", "ema:0.8/group=head"])
def test_removing_keys_changes_nothing_but_memory(llama, prefix, policy):
    options = {"steps": STEPS, "budget": BUDGET, "keep_logits": True}
    (masked,) = decode(llama, [prefix], [policy], **options)
    (removed,) = decode(llama, [prefix], [policy], physical=True, **options)
    assert removed.tokens == masked.tokens
    assert (removed.evicted_at == masked.evicted_at).all()
    assert close(removed.logits, masked.logits)
    assert masked.physical_bytes == masked.full_bytes
    assert removed.logical_bytes == masked.logical_bytes
    # Heads of one layer are as wide in memory as the fullest of them.
    assert removed.logical_bytes <= removed.physical_bytes < removed.full_bytes
    if "group=head" not in str(kvsim.parse(policy).expand()):
        assert removed.physical_bytes == removed.logical_bytes
    with pytest.raises(KvsimError, match="decode without removing keys"):
        removed.result()


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "llama4"])
def test_windowed_layers_hold_what_is_still_seen(name):
    model = model_of(name)
    prefix = prefill(model, PROMPT)
    options = {"steps": STEPS, "force": FORCED, "budget": BUDGET, "keep_logits": True}
    (masked,) = decode(model, [prefix], ["ema:0.8"], **options)
    (removed,) = decode(model, [prefix], ["ema:0.8"], physical=True, **options)
    assert close(removed.logits, masked.logits)
    assert (removed.evicted_at == masked.evicted_at).all()
    full = sum(layer.info.eligible for layer in prefix.layers)
    windowed = len(prefix.layers) - full
    seen_again = (L0 + STEPS) % WINDOW if name == "llama4" else WINDOW - 1
    a_slot = 2 * 2 * 16 * 4
    assert removed.physical_bytes == removed.logical_bytes == a_slot * (full * BUDGET + windowed * seen_again)
    assert removed.full_bytes == a_slot * (full * (L0 + STEPS) + windowed * seen_again)


@pytest.mark.parametrize("options", [{"force": [1, 2, 3]}, {"temperature": 1.0}])
def test_logits_that_are_no_numbers_are_named_by_their_step(options):
    model = tiny("llama-gqa3")
    prefix = prefill(model, PROMPT)
    with torch.no_grad():
        model.get_input_embeddings().weight[torch.arange(VOCAB) != 1] = torch.nan
    step = 2 if "force" in options else 1
    with pytest.raises(KvsimError, match=f"step {step}: the model's logits are not numbers"):
        decode(model, [prefix], "ema:0.8", steps=3, budget=BUDGET, **options)
    with pytest.raises(KvsimError, match="prompt: the model's logits are not numbers"):
        prefill(model, PROMPT)
