"""Closed-loop replay: the sets of token-by-token decoding, set for set, in a few passes and with a certificate."""

import json

import numpy as np
import pytest
import torch
from cases import POLICIES
from kvsim_traces import CaptureError, record
from living import ListPolicy, eager_live
from recording import PROMPT, VOCAB, eager_run, tiny
from token_texts import byte_level

from kvsim.bilinear import BilinearScorer, save_scorer
from kvsim.errors import KvsimError, PolicyError
from kvsim.live import closed_loop as closed_loop_module
from kvsim.live import decode, prefill, prefix_of_trace
from kvsim.live import masked_pass as masked_pass_module
from kvsim.live.closed_loop import closed_loop
from kvsim.live.masked_pass import NEVER
from kvsim.live.sequence import Sequence
from kvsim.policy import parse
from kvsim.replay import choose_budget

L0 = len(PROMPT)
STEPS = 12
FORCED = [(5 * i * i + 11) % VOCAB for i in range(STEPS)]
# Equal tokens have equal keys where a layer has no RoPE, and are tied.
DISTINCT = [(17 * i + 5) % VOCAB for i in range(L0)]
BUDGET = 8
LIVE = [policy for policy in POLICIES if not policy.startswith("oracle") and "kvzip" not in policy]
FEW = ["ema:0.8", "single/group=head", "cumulative/group=layer", "ema:0.8/refresh=4", "snapkv:4", "full"]


def model_of(name, **changes):
    return tiny(name, "eager" if name == "gpt-oss" else "sdpa", **changes)


@pytest.fixture(scope="module")
def llama():
    return model_of("llama-gqa3")


@pytest.fixture(scope="module")
def prefix(llama):
    return prefill(llama, PROMPT)


def live(model, prefix, policies, tokens=FORCED, budget=BUDGET):
    return decode(model, [prefix] * len(policies), policies, steps=len(tokens), force=tokens, budget=budget)


def certified(loop, steps=STEPS):
    """Every pass made a step more exact; the last one changed nothing, and proves it."""
    assert loop.exact
    assert len(loop.passes) <= steps
    assert loop.passes[-1].changed == 0
    assert loop.passes[-1].jaccard == 1
    exact = [one.exact_steps for one in loop.passes]
    assert exact[-1] == steps
    assert all(later > earlier for earlier, later in zip([0, *exact], exact, strict=False))
    # A step that is final is not run again; one pass runs everything.
    assert loop.passes[0].steps == steps
    assert all(one.steps <= steps - done for one, done in zip(loop.passes[1:], exact, strict=False))


def same(loop, run):
    certified(loop, len(run.tokens))
    assert loop.policy == run.policy
    assert np.array_equal(loop.result.evicted_at, run.evicted_at)
    assert loop.evictions == run.evictions
    assert loop.near_ties == run.near_ties


# Equal to live


def test_every_policy_is_what_live_decoding_does(llama, prefix):
    loops = closed_loop(llama, prefix, FORCED, LIVE, budget=BUDGET)
    runs = live(llama, prefix, LIVE)
    for loop, run in zip(loops, runs, strict=True):
        same(loop, run)
        measured = run.result()
        assert loop.result.loop == "closed"
        for name, column in measured.outcome.metrics.items():
            np.testing.assert_allclose(loop.result.outcome.metrics[name], column, rtol=1e-4, atol=1e-5, err_msg=name)
        for t in range(1, STEPS + 1):
            ours, theirs = loop.trace, run.sequence.trace
            np.testing.assert_allclose(ours.queries(t), theirs.queries(t), rtol=0, atol=1e-4)
            np.testing.assert_allclose(ours.attention_rows(t), theirs.attention_rows(t), rtol=0, atol=1e-4)
    assert sum(loop.evictions for loop in loops) > 1000
    assert len({len(loop.passes) for loop in loops}) > 2


def test_the_learned_scorer(llama, prefix, tmp_path):
    rng = np.random.default_rng(0)
    file = tmp_path / "scorer.safetensors"
    save_scorer(BilinearScorer(rng.normal(size=(8, 6 * 16)), rng.normal(size=(8, 2 * 16)), 6, 2, 16), file)
    policies = [f"ema:0.8/score=learned:{file}", f"single/score=learned:{file}/group=layer/refresh=2"]
    for loop, run in zip(
        closed_loop(llama, prefix, FORCED, policies, budget=BUDGET), live(llama, prefix, policies), strict=True
    ):
        same(loop, run)
        assert (run.result().evicted_at == run.evicted_at).all()


@pytest.mark.parametrize("name", ["llama-gqa1", "qwen2", "qwen3", "mistral", "gemma3", "gpt-oss", "llama4"])
def test_every_family(name):
    model = model_of(name)
    prefix = prefill(model, DISTINCT)
    policies = [*FEW, "keydiff", "ema:0.5/score=vnorm", "h2o"]
    for loop, run in zip(
        closed_loop(model, prefix, FORCED, policies, budget=BUDGET), live(model, prefix, policies), strict=True
    ):
        same(loop, run)
    _, rows, _ = eager_run(model, DISTINCT + FORCED, L0)
    (full,) = closed_loop(model, prefix, FORCED, ["full"])
    for t in range(1, STEPS + 1):
        found = full.trace.attention_rows(t, prefix.eligible)
        np.testing.assert_allclose(found, rows[t - 1][prefix.eligible], rtol=0, atol=1e-4)


def test_sliding_layers_that_are_made_eligible():
    model = model_of("mistral-sliding")
    prefix = prefill(model, PROMPT, eligible="all")
    for loop, run in zip(closed_loop(model, prefix, FORCED, FEW, budget=BUDGET), live(model, prefix, FEW), strict=True):
        same(loop, run)


@pytest.mark.parametrize("group", ["shared", "layer", "head"])
def test_the_sets_are_those_of_plain_lists_on_eager_attention(llama, prefix, group):
    (loop,) = closed_loop(llama, prefix, FORCED, [f"ema:0.9,over=step/group={group}"], budget=BUDGET)
    policy = ListPolicy(L0, BUDGET, layers=range(3), heads=6, kv_heads=2, group=group, alpha=0.9, over="step")
    eager_live(llama, PROMPT, policy, steps=STEPS, force=FORCED)
    for row, gone in zip(loop.result.evicted_at, policy.gone.values(), strict=True):
        assert {i: int(t) for i, t in enumerate(row) if t >= 0} == gone


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_number_types_reach_a_fixed_point(dtype):
    model = tiny("llama-gqa3", dtype=dtype)
    prefix = prefill(model, PROMPT)
    loops = closed_loop(model, prefix, FORCED, FEW, budget=BUDGET)
    for loop, run in zip(loops, live(model, prefix, FEW), strict=True):
        certified(loop)
        if dtype == torch.float64:
            same(loop, run)


def test_a_prompt_and_a_run_of_one_token(llama):
    prefix = prefill(llama, [3])
    for loop, run in zip(
        closed_loop(llama, prefix, [7], ["ema:0.8", "tova"], budget=1),
        live(llama, prefix, ["ema:0.8", "tova"], [7], budget=1),
        strict=True,
    ):
        same(loop, run)
        assert len(loop.passes) == 1


def test_a_long_run_of_few_tokens_kept():
    model = model_of("llama-gqa3")
    tokens = [(7 * i * i + i + 3) % VOCAB for i in range(70)]
    prefix = prefill(model, PROMPT)
    policies = ["single", "ema:0.8,over=step", "cumulative/group=head", "ema:0.8/when=overflow"]
    loops = closed_loop(model, prefix, tokens, policies, budget=5)
    for loop, run in zip(loops, live(model, prefix, policies, tokens, budget=5), strict=True):
        same(loop, run)


def test_a_budget_that_is_reached_while_decoding(llama, prefix):
    policies = ["rescue:0.8,30", "ema:0.8", "single/group=head", "window:3", "ema:0.8/when=overflow"]
    for loop, run in zip(
        closed_loop(llama, prefix, FORCED, policies, budget=L0 + 3),
        live(llama, prefix, policies, budget=L0 + 3),
        strict=True,
    ):
        same(loop, run)
        assert run.evictions > 0
        assert run.evicted_at[run.evicted_at > 0].min() > 3


# Passes


def test_what_goes_before_the_first_step_takes_one_pass(llama, prefix):
    for loop in closed_loop(llama, prefix, FORCED, ["snapkv:4", "knorm/when=prefill", "full"], budget=BUDGET):
        assert [one.changed for one in loop.passes] == [0]


def test_policies_together_are_policies_one_by_one(llama, prefix):
    together = closed_loop(llama, prefix, FORCED, FEW, budget=BUDGET)
    alone = [closed_loop(llama, prefix, FORCED, [policy], budget=BUDGET)[0] for policy in FEW]
    pairs = closed_loop(llama, prefix, FORCED, FEW, budget=BUDGET, batch=2)
    assert len({len(loop.passes) for loop in alone}) > 1
    for one, two, three in zip(together, alone, pairs, strict=True):
        assert np.array_equal(one.result.evicted_at, two.result.evicted_at)
        assert np.array_equal(one.result.evicted_at, three.result.evicted_at)
        certified(two)


APART = ["tova", "h2o", "scissorhands:4", "ema:0.8/group=head/refresh=3", "window:3,pool=3/group=layer"]


def test_layers_that_decide_alone_take_one_pass(llama, prefix):
    for loop, run in zip(
        closed_loop(llama, prefix, FORCED, APART, budget=BUDGET), live(llama, prefix, APART), strict=True
    ):
        same(loop, run)
        assert loop.result.plan.layers_are_apart
        assert len(loop.passes) == 1


def test_a_wrong_decision_in_a_pass_is_found_out(llama, prefix, monkeypatch):
    def nothing_goes(run, place):
        return np.full_like(run.lane.gone[place], NEVER)

    monkeypatch.setattr(closed_loop_module._Run, "_decide_layer", nothing_goes)
    for loop, run in zip(
        closed_loop(llama, prefix, FORCED, APART, budget=BUDGET), live(llama, prefix, APART), strict=True
    ):
        same(loop, run)
        assert len(loop.passes) > 1


def test_passes_that_ignore_their_masks_are_no_live_decoding(llama, prefix, monkeypatch):
    attended = masked_pass_module.attended
    blind = lambda call, logits, visible: attended(call, logits, torch.ones_like(visible))  # noqa: E731
    monkeypatch.setattr(masked_pass_module, "attended", blind)
    loops = closed_loop(llama, prefix, FORCED, FEW, budget=BUDGET)
    differ = [
        not np.array_equal(loop.result.evicted_at, run.evicted_at)
        for loop, run in zip(loops, live(llama, prefix, FEW), strict=True)
    ]
    assert differ == [policy not in ("snapkv:4", "full") for policy in FEW]


def test_only_layers_that_are_apart_have_a_plan_of_their_own(llama, prefix):
    for policy in ("ema:0.8", "keydiff", "ema:0.8/score=vnorm/group=layer", "rkv:4", "adaptive/group=layer"):
        plan = parse(policy).with_budget(choose_budget(budget=BUDGET)).plan(Sequence(parse("full"), prefix, 3).trace)
        assert not plan.layers_are_apart
        with pytest.raises(ValueError, match="not decided by its own attention alone"):
            plan.of_layer(0)


def test_too_few_passes_are_not_exact(llama, prefix):
    (whole,) = closed_loop(llama, prefix, FORCED, ["single"], budget=BUDGET)
    assert len(whole.passes) > 2
    (short,) = closed_loop(llama, prefix, FORCED, ["single"], budget=BUDGET, max_passes=2)
    assert not short.exact
    assert [one.changed for one in short.passes] == [one.changed for one in whole.passes[:2]]
    assert short.passes[-1].changed > 0
    summary = short.summary()
    assert summary["exact"] is False
    assert summary["passes"] == 2
    assert summary["exact_steps"][-1] < STEPS
    (enough,) = closed_loop(llama, prefix, FORCED, ["single"], budget=BUDGET, max_passes=len(whole.passes))
    assert enough.exact


def test_progress_counts_policies(llama, prefix):
    seen = []
    closed_loop(llama, prefix, FORCED, FEW, budget=BUDGET, batch=2, progress=lambda *done: seen.append(done))
    assert seen[-1] == (len(FEW), len(FEW))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_models_attention_is_put_back(llama, prefix):
    closed_loop(llama, prefix, FORCED[:3], ["ema:0.8"], budget=BUDGET)
    assert llama.config._attn_implementation == "sdpa"


def test_summaries_are_json(llama, prefix):
    for loop in closed_loop(llama, prefix, FORCED, ["ema:0.8", "full"], budget=BUDGET):
        row = json.loads(json.dumps(loop.summary(), allow_nan=False))
        assert row["loop"] == "closed"
        assert row["exact"] is True
        assert row["passes"] == len(row["changed"]) == len(row["exact_steps"]) == len(row["jaccard_with_last"])


# From recordings


@pytest.fixture(scope="module")
def recordings(llama, tmp_path_factory):
    root = tmp_path_factory.mktemp("recordings")
    return {
        capture: record(
            llama,
            PROMPT,
            out=root / capture,
            steps=STEPS,
            capture=capture,
            force=FORCED,
            qk_dtype="float32",
            prompt_queries="all",
        )
        for capture in ("heads", "qk", "qkv", "scores")
    }


@pytest.mark.parametrize("capture", ["heads", "qk", "qkv", "scores"])
def test_starting_from_the_open_loop_ends_where_starting_from_a_full_cache_ends(llama, prefix, recordings, capture):
    trace = recordings[capture]
    policies = ["ema:0.8", "single/group=layer", "cumulative/group=head", "tova", "keydiff", "ema:0.8/score=vnorm"]
    full = closed_loop(llama, prefix, FORCED, policies, budget=BUDGET)
    known = prefill(llama, PROMPT, trace=trace)
    started = closed_loop(llama, known, FORCED, policies, budget=BUDGET)
    for one, two in zip(full, started, strict=True):
        certified(two)
        assert np.array_equal(one.result.evicted_at, two.result.evicted_at)
        assert two.result.trace_hash == trace.hash
        assert two.result.trace_name == capture
    fewer = sum(len(one.passes) for one in full) - sum(len(two.passes) for two in started)
    # Head means cannot be renormalised: too rough to start from.
    assert fewer == 0 if capture == "scores" else fewer > 0


def test_the_prompts_keys_may_come_from_a_recording(llama, prefix, recordings):
    policies = ["ema:0.8", "h2o", "snapkv:4", "expected", "keydiff", "cake:3"]
    from_trace = prefix_of_trace(recordings["qkv"], llama)
    assert from_trace.logits is None
    for one, two in zip(
        closed_loop(llama, prefix, FORCED, policies, budget=BUDGET),
        closed_loop(llama, from_trace, FORCED, policies, budget=BUDGET),
        strict=True,
    ):
        certified(two)
        assert np.array_equal(one.result.evicted_at, two.result.evicted_at)
    (run,) = live(llama, from_trace, ["ema:0.8"])
    same(closed_loop(llama, from_trace, FORCED, ["ema:0.8"], budget=BUDGET)[0], run)
    with pytest.raises(KvsimError, match="has no logits; force its tokens"):
        decode(llama, [from_trace], ["ema:0.8"], steps=2)


def test_only_captures_with_values_hold_a_prompt(llama, recordings):
    for capture in ("heads", "qk", "scores"):
        with pytest.raises(CaptureError, match="captures that have them: qkv"):
            prefix_of_trace(recordings[capture], llama)


def test_sink_logits_are_not_recorded(tmp_path):
    model = model_of("gpt-oss")
    trace = record(model, PROMPT, out=tmp_path / "t", steps=4, capture="qkv")
    with pytest.raises(KvsimError, match="sink logits, which a recording does not keep; use the prefill"):
        prefix_of_trace(trace, model)


def test_kvzip_takes_its_scores_from_the_recording(tmp_path):
    model, tokenizer = model_of("llama-gqa3", vocab_size=300), byte_level()
    prompt = tokenizer("the three thin thieves").input_ids
    trace = record(model, prompt, out=tmp_path / "t", steps=6, tokenizer=tokenizer, kvzip=True, capture="qk")
    tokens = trace.tokens[len(prompt) :].tolist()
    policies = ["kvzip", "cumulative/score=kvzip"]
    prefix = prefill(model, prompt, trace=trace)
    for loop, run in zip(
        closed_loop(model, prefix, tokens, policies, budget=5), live(model, prefix, policies, tokens, 5), strict=True
    ):
        same(loop, run)
    with pytest.raises(PolicyError, match="record with --kvzip"):
        closed_loop(model, prefill(model, prompt), tokens, ["kvzip"], budget=5)


# Near-ties


def test_ties_are_counted_and_eviction_stays_the_definitions():
    model = model_of("llama-gqa3")
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    prefix = prefill(model, PROMPT)
    policies = ["single", "single/group=head"]
    loops = closed_loop(model, prefix, FORCED, policies, budget=BUDGET)
    for loop, run in zip(loops, live(model, prefix, policies), strict=True):
        # No query prefers a key: every cut is a tie, and the oldest go.
        same(loop, run)
        assert loop.near_ties == STEPS * loop.result.plan.groups.count
        assert loop.summary()["near_ties"] == loop.near_ties
        for group in range(loop.result.plan.groups.count):
            assert (loop.result.retained(STEPS, group) == np.arange(L0 + STEPS - BUDGET, L0 + STEPS)).all()


def test_clear_cuts_are_not_counted(llama, prefix):
    (loop,) = closed_loop(llama, prefix, FORCED, ["ema:0.8"], budget=BUDGET)
    assert loop.near_ties == 0


# What is refused


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([], {}, "is empty"),
        ([1, VOCAB], {}, "outside the vocabulary"),
        (FORCED, {"max_passes": 0}, "max_passes must be at least 1"),
        (FORCED, {"batch": 0}, "batch must be at least 1"),
        (FORCED, {"compression_ratio": 0.5}, "not both"),
    ],
)
def test_bad_requests(llama, prefix, tokens, options, message):
    with pytest.raises(KvsimError, match=message):
        closed_loop(llama, prefix, tokens, ["ema:0.8"], budget=BUDGET, **options)


def test_oracles_need_the_future(llama, prefix):
    with pytest.raises(PolicyError, match="not run live"):
        closed_loop(llama, prefix, FORCED, ["ema:0.8", "oracle:exact"], budget=BUDGET)
