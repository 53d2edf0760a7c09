"""Admission in a running model: prefill, decode and one masked pass over the whole text are one thing."""

import copy

import numpy as np
import pytest
import torch
from gates import gate_for
from kvsim_traces.manifest import LayerInfo
from living import masked
from recording import PROMPT, VOCAB, tiny

import kvsim
from kvsim.errors import KvsimError
from kvsim.gating.attention import log_gates, plain_write_gated
from kvsim.live import KVSimCache, decode, prefill, prefill_under
from kvsim.live.admitted import admitted_attention
from kvsim.live.attention import Call
from kvsim.live.keepers import keeper_of
from kvsim.live.prefix import cache_argument, run_prompt
from kvsim.write_gate import load_gate

L0 = len(PROMPT)
STEPS = 9
FORCED = [(5 * i * i + 11) % VOCAB for i in range(STEPS)]
OPTIONS = {"steps": STEPS, "force": FORCED, "keep_logits": True}
ADMISSIONS = [
    "local:window=4,sink=2",
    "local:window=1,sink=0",
    "local:window=200,sink=0",
    "random:0.4,window=3",
    "random:0.4,window=1",
    "wgkv:GATE",
    "wgkv:GATE,window=1",
    "wgkv:GATE,window=7,tau=0.3",
    "wgkv:GATE,window=200",
    "wgkv:GATE,window=5,tau=0",
    "wgkv:GATE,window=5,tau=1.5",
]


@pytest.fixture(scope="module")
def llama():
    return tiny("llama-gqa3")


@pytest.fixture(scope="module")
def gate(llama, tmp_path_factory):
    return gate_for(prefill(llama, [0]), tmp_path_factory.mktemp("gate") / "gate.safetensors")


def assert_close(found, wanted):
    """Equal to 1e-5 of the largest logit."""
    found, wanted = (torch.stack(list(one)) for one in (found, wanted))
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def policy_of(text, gate, head="full"):
    return kvsim.parse(f"{head}/admit={text.replace('GATE', gate)}")


def whole_pass(model, tokens, policy):
    """Logits at every position of one masked pass, and what was admitted."""
    outputs, watcher = run_prompt(model, tokens, keeper_of(model, policy), logits=len(tokens))
    return outputs.logits[0].float(), watcher.admitted(0)


@pytest.mark.parametrize("text", ADMISSIONS)
def test_decode_after_prefill_equals_one_masked_pass(llama, gate, text):
    policy = policy_of(text, gate)
    (run,) = decode(llama, prefill_under(llama, PROMPT, [policy]), policy, **OPTIONS)
    logits, admitted = whole_pass(llama, PROMPT + FORCED, policy)
    assert_close(run.logits, logits[L0:])
    assert np.array_equal(run.sequence.plan.admission.admitted[:, : L0 + STEPS], admitted.admitted)
    window, marks = admitted.window, admitted.admitted
    for position in range(L0 + STEPS):
        leaves = max(0, position + window - L0)
        gone = np.where(marks[:, position] | (position + window > L0 + STEPS), -1, leaves)
        assert np.array_equal(run.evicted_at[:, position], gone), position


@pytest.mark.parametrize("name", ["llama-gqa3", "qwen3"])
def test_gates_are_those_of_the_keys_before_and_after_the_rotation(name, tmp_path):
    """Against the file's own NumPy form, on the keys that the model hands to its rotation, and against a replay."""
    model = tiny(name)
    file = gate_for(prefill(model, [0]), tmp_path / "gate.safetensors", tau=0.5, window=4)
    taken = []
    modules = [getattr(layer.self_attn, "k_norm", layer.self_attn.k_proj) for layer in model.model.layers]
    hooks = [module.register_forward_hook(lambda module, given, out: taken.append(out)) for module in modules]
    policy = policy_of("wgkv:GATE", file)
    prefix = prefill(model, PROMPT, keeper=keeper_of(model, policy))
    for hook in hooks:
        hook.remove()
    before = np.stack([out.view(L0, 2, 16).transpose(0, 1).numpy() for out in taken[-3:]])
    after = np.stack([layer.keys.numpy() for layer in prefix.layers])
    wanted = load_gate(file).score(before, after).reshape(6, L0)
    assert np.abs(prefix.admitted.scores - wanted).max() < 1e-5
    assert np.array_equal(prefix.admitted.admitted, wanted >= np.float32(0.5))
    (run,) = decode(model, [prefix], policy, **OPTIONS)
    replayed = policy.plan(run.sequence.trace).admission
    assert np.array_equal(replayed.admitted[:, : L0 + STEPS], run.sequence.plan.admission.admitted)
    assert np.abs(replayed.scores - run.sequence.plan.admission.scores).max() < 1e-5


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "llama-gqa1"])
def test_other_models(name, tmp_path):
    model = tiny(name)
    file = gate_for(prefill(model, [0]), tmp_path / "gate.safetensors")
    for text in ("random:0.4,window=3", "wgkv:GATE"):
        policy = policy_of(text, file)
        (run,) = decode(model, prefill_under(model, PROMPT, [policy]), policy, **OPTIONS)
        logits, _ = whole_pass(model, PROMPT + FORCED, policy)
        assert_close(run.logits, logits[L0:])


def test_the_masked_pass_is_what_eager_attention_gives_under_that_mask(llama, gate):
    tokens = PROMPT + FORCED
    n, heads, kv_heads = len(tokens), 6, 2
    policy = policy_of("wgkv:GATE", gate)
    found, admitted = whole_pass(llama, tokens, policy)
    assert 0.1 < admitted.admitted.mean() < 0.9
    marks = admitted.admitted.reshape(3, kv_heads, n)
    eager = copy.deepcopy(llama)
    eager.set_attn_implementation("eager")
    masks = {}
    for layer in range(3):
        mask = torch.zeros(1, heads, n, n)
        for head in range(heads):
            for i in range(n):
                for j in range(i + 1):
                    if i - j >= 4 and not marks[layer, head // 3, j]:
                        mask[0, head, i, j] = torch.finfo(torch.float32).min
        masks[layer] = mask
    with torch.inference_mode(), masked(eager, masks):
        wanted = eager(torch.tensor([tokens]), attention_mask=torch.ones(1, n), use_cache=False).logits[0]
    assert_close(found, wanted)


def test_threshold_0_is_a_full_cache_and_above_1_is_local_attention(llama, gate):
    full = decode(llama, [prefill(llama, PROMPT)], "full", **OPTIONS)[0]
    everything, nothing, local = (
        decode(llama, prefill_under(llama, PROMPT, [policy]), policy, **OPTIONS)[0]
        for policy in (
            policy_of("wgkv:GATE,window=5,tau=0", gate),
            policy_of("wgkv:GATE,window=5,tau=1.5", gate),
            policy_of("local:window=5,sink=0", gate),
        )
    )
    assert_close(everything.logits, full.logits)
    assert everything.evictions == 0
    assert torch.equal(torch.stack(nothing.logits), torch.stack(local.logits))
    assert np.array_equal(nothing.evicted_at, local.evicted_at)
    wide = policy_of("local:window=100,sink=0", gate)
    (wide,) = decode(llama, prefill_under(llama, PROMPT, [wide]), wide, **OPTIONS)
    assert_close(wide.logits, full.logits)


def test_a_query_sees_exactly_the_last_window_tokens():
    """In one layer what is out of sight changes nothing: a token W - 1 back does, one W back does not."""
    model = tiny("llama-gqa3", num_hidden_layers=1)
    window = 4
    policy = kvsim.parse(f"full/admit=local:window={window},sink=0")
    keeper = keeper_of(model, policy)

    def logits(tokens, prompt):
        if prompt == len(tokens):
            return prefill(model, tokens, keeper=keeper).logits
        (run,) = decode(
            model, [prefill(model, tokens[:prompt], keeper=keeper)], policy,
            steps=20, force=tokens[prompt:], keep_logits=True, physical=True,
        )  # fmt: skip
        return run.logits[-1]

    tokens = PROMPT[:14]
    for prompt in (14, 13, 8, 2):
        before = logits(tokens, prompt)
        for back, changes in ((window - 1, True), (window, False), (window + 3, False)):
            planted = list(tokens)
            planted[13 - back] = (planted[13 - back] + 5) % VOCAB
            assert torch.equal(logits(planted, prompt), before) != changes, (prompt, back)


@pytest.mark.parametrize("window", [1, 2, 5, 40])
def test_training_sees_the_window_that_live_sees(llama, window):
    """Write-gated attention under a hard threshold is the prefill's attention."""
    rng = torch.Generator().manual_seed(window)
    query, key, value, gates = (
        torch.rand(*shape, generator=rng) for shape in ((2, 6, 21, 16), (2, 2, 21, 16), (2, 2, 21, 16), (2, 2, 21))
    )
    for tau in (0.5, 0.0, 2.0):
        trained = plain_write_gated(query, key, value, log_gates(gates, tau), window=window, scaling=0.3)
        call = Call(llama, query, key, value, None, 0.3, None, None, None)
        info = LayerInfo("full_attention", True, None, 0.3, None)
        live = admitted_attention(call, info, gates >= tau, torch.tensor([window] * 2), torch.tensor([0, 0]))
        assert torch.allclose(live, trained.transpose(1, 2), atol=1e-6)


@pytest.mark.parametrize("physical", [False, True])
def test_generate_with_left_padding_writes_what_decode_writes(llama, gate, physical):
    prompts = [PROMPT, PROMPT[3:16]]
    policies = [policy_of("wgkv:GATE", gate), policy_of("random:0.5,window=3", gate)]
    padded = [[0] * (L0 - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (L0 - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    cache = KVSimCache(policies, steps=5, physical=physical)
    with cache.attached(llama):
        found = llama.generate(
            torch.tensor(padded), attention_mask=torch.tensor(mask), max_new_tokens=5, do_sample=False,
            **{cache_argument(llama): cache},
        )  # fmt: skip
    for row, (prompt, policy) in enumerate(zip(prompts, policies, strict=True)):
        (run,) = decode(llama, prefill_under(llama, prompt, [policy]), policy, steps=5)
        # The last token that generate chooses is not fed to the model.
        assert found[row, L0:].tolist() == run.tokens
        own = cache.sequences[row].evicted_at[:, : len(prompt) + 4]
        wanted = run.evicted_at[:, : len(prompt) + 4]
        assert np.array_equal(own, np.where(wanted == 5, -1, wanted))


def test_a_batch_may_mix_admission_with_a_full_cache(llama, gate):
    policies = [kvsim.parse("ema:0.8"), policy_of("wgkv:GATE", gate), kvsim.parse("full")]
    together = decode(llama, prefill_under(llama, PROMPT, policies), policies, budget=8, **OPTIONS)
    for policy, run in zip(policies, together, strict=True):
        (alone,) = decode(llama, prefill_under(llama, PROMPT, [policy]), policy, budget=8, **OPTIONS)
        assert np.array_equal(run.evicted_at, alone.evicted_at)
        assert_close(run.logits, alone.logits)


@pytest.mark.parametrize(
    "head",
    [
        "ema:0.8",
        "h2o",
        "snapkv:6/when=every",
        "streaming:1",
        "cumulative/when=overflow:30%",
        "snapkv:6,heads=max,kernel=5/when=overflow:10%",
        "keydiff/when=every",
    ],
)
@pytest.mark.parametrize("text", ["wgkv:GATE,window=3", "random:0.6,window=2"])
def test_eviction_after_admission(llama, gate, head, text):
    policy = policy_of(text, gate, head)
    (masked_run,) = decode(llama, prefill_under(llama, PROMPT, [policy]), policy, budget=8, **OPTIONS)
    (physical,) = decode(llama, prefill_under(llama, PROMPT, [policy]), policy, budget=8, physical=True, **OPTIONS)
    assert np.array_equal(masked_run.evicted_at, physical.evicted_at)
    assert_close(masked_run.logits, physical.logits)
    assert physical.physical_bytes < physical.full_bytes
    # The definition, on the run's own attention, says the same.
    result = masked_run.result()
    assert np.array_equal(result.evicted_at, masked_run.evicted_at)
    held = masked_run.sequence.retained_per_head()[:, :, : L0 + STEPS].sum(axis=2)
    if "overflow" in head:
        assert held.sum() <= 8 * held.size
    else:
        assert held.max() <= 8
    assert masked_run.logical_bytes == int(held.sum()) * 16 * 2 * 4


def test_what_is_held_without_eviction_is_what_was_admitted_and_the_window(llama, gate):
    policy = policy_of("wgkv:GATE", gate)
    (run,) = decode(llama, prefill_under(llama, PROMPT, [policy]), policy, **OPTIONS)
    marks = run.sequence.plan.admission.admitted[:, : L0 + STEPS - 3]
    assert run.logical_bytes == (int(marks.sum()) + 6 * 3) * 2 * 16 * 4
    assert 0.5 < run.result().summary()["kept_mass"] < 1


def test_errors(llama, gate):
    plain = prefill(llama, PROMPT)
    with pytest.raises(KvsimError, match=r"prompt was read with admission of everything; .*prefill_under"):
        decode(llama, [plain], policy_of("random:0.5", gate), **OPTIONS)
    (under,) = prefill_under(llama, PROMPT, [policy_of("random:0.5", gate)])
    with pytest.raises(KvsimError, match=r"admits everything, but its prompt was read with admission of random:0\.5"):
        decode(llama, [under], "full", **OPTIONS)
    with pytest.raises(KvsimError, match="reads what later queries attend to"):
        prefill_under(llama, PROMPT, [policy_of("oracle:0.5", gate)])
    with pytest.raises(KvsimError, match="the gate is for 2 KV heads of dimension 16, the model has 6"):
        prefill_under(tiny("llama-gqa1"), PROMPT, [policy_of("wgkv:GATE", gate)])
    with pytest.raises(KvsimError, match="the gate is for a model with a layer 2, the model has 2 layers"):
        prefill_under(tiny("llama-gqa3", num_hidden_layers=2), PROMPT, [policy_of("wgkv:GATE", gate)])
    with pytest.raises(KvsimError, match="has no gate for layer 3"):
        prefill_under(tiny("llama-gqa3", num_hidden_layers=4), PROMPT, [policy_of("wgkv:GATE", gate)])


def test_prompts_are_read_under_policies_as_text(llama, gate):
    policies = [policy_of("local:window=4,sink=2", gate), kvsim.parse("ema:0.8")]
    texts = [str(policy) for policy in policies]
    runs = decode(llama, prefill_under(llama, PROMPT, texts), texts, budget=8, **OPTIONS)
    wanted = decode(llama, prefill_under(llama, PROMPT, policies), policies, budget=8, **OPTIONS)
    for own, other in zip(runs, wanted, strict=True):
        np.testing.assert_array_equal(own.evicted_at, other.evicted_at)
