"""Batches, sampling, `KVSimCache` in `model.generate`, and what live decoding refuses."""

import pytest
import torch
from recording import PROMPT, VOCAB, tiny
from transformers import BloomConfig, BloomForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from kvsim.errors import KvsimError, PolicyError
from kvsim.live import KVSimCache, decode, prefill
from kvsim.live.prefix import cache_argument, left_padding

L0 = len(PROMPT)
STEPS = 8
BUDGET = 7
PROMPTS = [PROMPT, PROMPT[4:17], PROMPT[:9] + PROMPT[2:14]]
POLICIES = ["ema:0.8", "tova", "keydiff/group=head", "snapkv:3", "full", "h2o"]


def model_of(name):
    return tiny(name, "eager" if name == "gpt-oss" else "sdpa")


@pytest.fixture(scope="module")
def llama():
    return model_of("llama-gqa3")


def same(ours, theirs, logits=True):
    assert ours.tokens == theirs.tokens
    assert (ours.evicted_at == theirs.evicted_at).all()
    if logits:
        for a, b in zip(ours.logits, theirs.logits, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


# Batches


@pytest.mark.parametrize("physical", [False, True])
@pytest.mark.parametrize("name", ["llama-gqa3", "gemma3", "qwen3", "gpt-oss", "llama4"])
def test_prompts_of_different_lengths_decode_as_each_does_alone(name, physical):
    model = model_of(name)
    prefixes = [prefill(model, prompt) for prompt in PROMPTS]
    policies = ["ema:0.8", "cumulative/group=layer", "single/group=head"]
    options = {"steps": STEPS, "budget": BUDGET, "physical": physical, "keep_logits": True}
    together = decode(model, prefixes, policies, **options)
    for prefix, policy, run in zip(prefixes, policies, together, strict=True):
        (alone,) = decode(model, [prefix], [policy], **options)
        same(run, alone)
        assert run.logical_bytes == alone.logical_bytes
        if physical and name in ("llama-gqa3", "qwen3"):
            # Padding goes with what is evicted.
            assert run.physical_bytes == run.logical_bytes
        if not physical:
            assert (run.result().evicted_at == run.evicted_at).all()


def test_many_policies_decode_from_one_prompt(llama):
    prefix = prefill(llama, PROMPT)
    together = decode(llama, [prefix] * len(POLICIES), POLICIES, steps=STEPS, budget=BUDGET, keep_logits=True)
    for policy, run in zip(POLICIES, together, strict=True):
        (alone,) = decode(llama, [prefix], [policy], steps=STEPS, budget=BUDGET, keep_logits=True)
        same(run, alone)


@pytest.mark.parametrize("physical", [False, True])
def test_rows_that_end_leave_the_others_alone(llama, physical):
    prefixes = [prefill(llama, prompt) for prompt in PROMPTS]
    free = decode(llama, prefixes, ["ema:0.8"] * 3, steps=STEPS, budget=BUDGET, physical=physical)
    stop = free[0].tokens[2]
    ended = decode(llama, prefixes, ["ema:0.8"] * 3, steps=STEPS, budget=BUDGET, physical=physical, stop=[stop])
    for before, after in zip(free, ended, strict=True):
        length = before.tokens.index(stop) + 1 if stop in before.tokens else STEPS
        assert after.tokens == before.tokens[:length]
        assert after.evicted_at.shape[1] == before.evicted_at.shape[1] - STEPS + length
    assert len(ended[0].tokens) == 3
    if not physical:
        for run in ended:
            result = run.result()
            assert result.num_steps == len(run.tokens)
            assert (result.evicted_at == run.evicted_at).all()


# Sampling


def test_sampling_follows_the_seed(llama):
    prefix = prefill(llama, PROMPT)

    def sampled(seed, temperature=3.0, rows=1):
        runs = decode(llama, [prefix] * rows, ["ema:0.8"] * rows, steps=STEPS, temperature=temperature, seed=seed)
        return [run.tokens for run in runs]

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)
    # A row's draws are its own: they do not depend on who else is in the batch.
    assert sampled(1, rows=2) == sampled(1) * 2
    assert sampled(3, temperature=1e-4) == sampled(0, temperature=0.0)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_temperatures_that_mean_nothing_are_refused(llama, temperature):
    with pytest.raises(KvsimError, match="temperature"):
        decode(llama, [prefill(llama, PROMPT)], ["full"], steps=2, temperature=temperature)


def test_random_state_of_torch_is_left_alone(llama):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    decode(llama, [prefill(llama, PROMPT)], ["ema:0.8"], steps=2, temperature=1.0)
    assert torch.equal(torch.rand(3), expected)


# model.generate


def padded(prompts):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("physical", [False, True])
@pytest.mark.parametrize("name", ["llama-gqa3", "qwen3", "mistral", "gemma3", "gpt-oss", "llama4"])
def test_generate_with_left_padding_writes_what_decode_writes(name, physical):
    model = model_of(name)
    policies = ["ema:0.8", "tova", "single/group=head"]
    cache = KVSimCache(policies, steps=STEPS, budget=BUDGET, physical=physical)
    with cache.attached(model):
        found = model.generate(
            **padded(PROMPTS), **{cache_argument(model): cache}, max_new_tokens=STEPS, do_sample=False, pad_token_id=0
        )
    runs = decode(
        model, [prefill(model, prompt) for prompt in PROMPTS], policies, steps=STEPS, budget=BUDGET, physical=physical
    )
    for row, (run, sequence) in enumerate(zip(runs, cache.sequences, strict=True)):
        assert found[row, -STEPS:].tolist() == run.tokens
        # generate does not feed the last token that it chooses
        ours, theirs = sequence.evicted_at[:, :-1], run.evicted_at[:, :-1]
        assert (ours == theirs * (theirs < STEPS) - (theirs == STEPS)).all()
    assert model.config._attn_implementation == ("eager" if name == "gpt-oss" else "sdpa")


def test_one_policy_serves_a_whole_batch(llama):
    cache = KVSimCache("ema:0.8", steps=STEPS, budget=BUDGET)
    with cache.attached(llama):
        llama.generate(
            **padded(PROMPTS), **{cache_argument(llama): cache}, max_new_tokens=STEPS, do_sample=False, pad_token_id=0
        )
    assert [sequence.trace.prompt_length for sequence in cache.sequences] == [len(prompt) for prompt in PROMPTS]
    assert all(sequence.result("live").budget == BUDGET for sequence in cache.sequences)


def test_padding_is_read_from_every_kind_of_mask():
    mask = padded(PROMPTS)["attention_mask"]
    four = torch.ones(21, 21).tril().bool() & mask[:, None, None, :].bool()
    sliding = four & torch.ones(21, 21).triu(-4).bool()
    additive = torch.zeros(four.shape).masked_fill(~four, torch.finfo(torch.float32).min)
    for given in (mask, mask.bool(), four, sliding, additive):
        assert left_padding(given, 3, 21) == [0, 8, 0]
    assert left_padding(four[:1], 3, 21) == [0, 0, 0]
    assert left_padding(None, 3, 21) == [0, 0, 0]


def test_padding_on_the_right_is_refused(llama):
    ids, mask = torch.tensor([[*PROMPT, 0, 0]]), torch.tensor([[1] * L0 + [0, 0]])
    cache = KVSimCache("ema:0.8", steps=STEPS)
    name = cache_argument(llama)
    with torch.inference_mode(), cache.attached(llama):
        llama(ids, attention_mask=mask, use_cache=True, **{name: cache})
        with pytest.raises(KvsimError, match="padded on the right"):
            llama(ids[:, :1], use_cache=True, **{name: cache})


# What is refused


def generate(model, cache, prompt=PROMPT, **options):
    with cache.attached(model):
        return model.generate(torch.tensor([prompt]), **{cache_argument(model): cache}, **options)


def test_more_tokens_than_planned(llama):
    with pytest.raises(KvsimError, match="planned for 3 steps"):
        generate(llama, KVSimCache("ema:0.8", steps=3), max_new_tokens=6, do_sample=False)


def test_a_prefill_in_two_pieces(llama):
    cache = KVSimCache("ema:0.8", steps=STEPS)
    name = cache_argument(llama)
    with torch.inference_mode(), cache.attached(llama):
        llama(torch.tensor([PROMPT[:10]]), use_cache=True, **{name: cache})
        with pytest.raises(KvsimError, match="the prefill is one piece"):
            llama(torch.tensor([PROMPT[10:]]), use_cache=True, **{name: cache})


def test_beam_search(llama):
    with pytest.raises(KvsimError, match="beam search"):
        generate(llama, KVSimCache("ema:0.8", steps=STEPS), num_beams=2, max_new_tokens=4, do_sample=False)


def test_oracles_need_the_future(llama):
    for policy in ("oracle:future", "oracle:exact", "oracle:bound"):
        with pytest.raises(PolicyError, match="it can be replayed, not run live"):
            decode(llama, [prefill(llama, PROMPT)], [policy], steps=2)


def test_kvzip_needs_a_recording(llama):
    with pytest.raises(PolicyError, match="kvzip"):
        decode(llama, [prefill(llama, PROMPT)], ["kvzip"], steps=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"steps": 3, "force": []}, "force: is empty"),
        ({"steps": 3, "force": [1, VOCAB]}, f"token {VOCAB} is outside the vocabulary of {VOCAB}"),
        ({"steps": 3, "force": [-1]}, "token -1 is outside"),
        ({"steps": 3, "budget": 5, "compression_ratio": 0.5}, "not both"),
    ],
)
def test_bad_numbers(llama, options, message):
    with pytest.raises(KvsimError, match=message):
        decode(llama, [prefill(llama, PROMPT)], ["ema:0.8"], **options)


def test_lists_of_unequal_length(llama):
    with pytest.raises(KvsimError, match="1 prompts for 2 policies"):
        decode(llama, [prefill(llama, PROMPT)], ["ema:0.8", "tova"], steps=2)
    with pytest.raises(KvsimError, match="0 prompts"):
        decode(llama, [], [], steps=2)
    with pytest.raises(KvsimError, match="2 policies for a batch of 1"):
        generate(llama, KVSimCache(["ema:0.8", "tova"], steps=STEPS), max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize(("tokens", "message"), [([], "is empty"), ([1, VOCAB], "outside the vocabulary")])
def test_bad_prompts(llama, tokens, message):
    with pytest.raises(KvsimError, match=message):
        prefill(llama, tokens)


def test_layers_that_are_not_attention_are_named():
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = Qwen3NextConfig(
        **shape,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    with pytest.raises(KvsimError, match="layer 0 is 'linear_attention'; live decoding knows full_attention"):
        prefill(Qwen3NextForCausalLM(config).eval(), PROMPT)


def test_models_without_attention_hooks():
    model = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=2)).eval()
    with pytest.raises(KvsimError, match="BloomForCausalLM has no attention hooks"):
        prefill(model, PROMPT)


def test_generation_without_attention_hooks_does_not_pass_for_a_policy():
    model = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=2)).eval()
    with pytest.raises(KvsimError, match="no attention hooks"):
        generate(model, KVSimCache("ema:0.8", steps=STEPS), max_new_tokens=3, do_sample=False, pad_token_id=0)


def test_a_cache_that_nobody_asks_says_so():
    model = tiny("llama-gqa3")
    with pytest.raises(KvsimError, match="with cache"):
        model(torch.tensor([PROMPT]), **{cache_argument(model): KVSimCache("ema:0.8", steps=4)})


def test_a_used_cache_says_so():
    model = tiny("llama-gqa3")
    cache = KVSimCache("ema:0.8", steps=4, budget=8)
    words = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, cache_argument(model): cache}
    with cache.attached(model):
        model.generate(torch.tensor([PROMPT]), **words)
    assert repr(cache.sequences[0]).startswith("Sequence('ema:0.8/budget=8'")
    with pytest.raises(KvsimError, match="has been used"), cache.attached(model):
        pass


def test_what_is_no_prompt_says_so():
    model = tiny("llama-gqa3")
    prefix = prefill(model, torch.tensor(PROMPT))
    assert decode(model, [prefix], "ema:0.8", steps=2, budget=8)[0].policy == "ema:0.8/budget=8"
    with pytest.raises(KvsimError, match="one sequence of token ids"):
        prefill(model, torch.tensor([PROMPT]))
    with pytest.raises(KvsimError, match="gives, got list"):
        decode(model, [PROMPT], ["ema:0.8"], steps=2)
