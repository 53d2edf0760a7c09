"""Policy strings: canonical forms, round trips, and errors that say what would be valid."""

import dataclasses
import subprocess
from decimal import Decimal

import pytest
from cases import POLICIES, write_trace
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.budget import Budget
from kvsim.head import HEADS, Preset
from kvsim.policies.cumulative import Cumulative
from kvsim.policies.ema import Ema
from kvsim.policies.single import Single
from kvsim.policies.streaming import Streaming
from kvsim.protect import Protect
from kvsim.scorers import SCORERS
from kvsim.scorers.kvpress import KVPress
from kvsim.scorers.learned import Learned
from kvsim.scorers.random import RandomScore
from kvsim.when import When


@pytest.mark.parametrize("text", POLICIES)
def test_case_list_round_trips(text):
    policy = kvsim.parse(text)
    assert kvsim.parse(str(policy)) == policy
    assert str(kvsim.parse(str(policy))) == str(policy)


def test_every_head_and_scorer_is_in_the_case_list():
    heads = {text.partition("/")[0].partition(":")[0] for text in POLICIES}
    scores = {policy.score.name for text in POLICIES if (policy := kvsim.parse(text).expand()).score}
    assert heads == set(HEADS)
    assert scores | {"attention", "kvpress", "learned"} == set(SCORERS), "the others need more"


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("ema:0.80", "ema:0.8"),
        ("ema", "ema:0.8"),
        ("ema:alpha=0.5", "ema:0.5"),
        ("ema:0", "ema:0"),
        ("ema:0.8,over=both", "ema:0.8"),
        ("ema:0.8/group=shared/refresh=1/score=attention/when=every", "ema:0.8"),
        ("ema:0.8/budget=10.0%/refresh=4", "ema:0.8/refresh=4/budget=10%"),
        ("ema:0.8/protect=recent:32+sink:4", "ema:0.8/protect=sink:4+recent:32"),
        ("ema:0.8/protect=sink:0", "ema:0.8"),
        ("tova/group=layer", "tova"),
        ("tova/group=shared", "tova/group=shared"),
        ("h2o/protect=sink:0", "h2o/protect=sink:0"),
        ("random", "random:0"),
        ("ema:-0.0", "ema:0"),
        ("full/admit=random:-0.0", "full/admit=random:0"),
        ("h2o/protect=recent:050%", "h2o"),
        ("ema/protect=recent:0%", "ema:0.8"),
    ],
)
def test_canonical_form(text, canonical):
    assert str(kvsim.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "expansion"),
    [
        ("tova", "single/group=layer"),
        ("h2o", "cumulative:start=prompt/group=head/protect=recent:50%"),
        ("streaming:4", "single/score=recency/protect=sink:4"),
        ("keydiff", "single/score=keydiff/group=head"),
        ("knorm/group=layer", "single/score=knorm/group=layer"),
        ("random:7", "single/score=random:7"),
        ("inertiakv-lazy:4/budget=10%", "ema:0.8/refresh=4/budget=10%"),
        ("score-free", "ema:0.8/refresh=first"),
        ("tova/group=shared", "single"),
        ("h2o/protect=sink:0", "cumulative:start=prompt/group=head"),
    ],
)
def test_presets_expand(text, expansion):
    assert str(kvsim.parse(text).expand()) == expansion


def test_a_preset_and_its_expansion_are_one_policy(tmp_path):
    trace = write_trace(tmp_path / "t")
    for policy in map(kvsim.parse, POLICIES):
        if isinstance(policy.head, Preset):
            got, want = (kvsim.replay(trace, p, shadow_churn=False) for p in (policy, policy.expand()))
            assert got.evicted_at.tolist() == want.evicted_at.tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("emma:0.9", r"unknown policy 'emma'; did you mean 'ema'\? \(valid: .*tova"),
        ("", "a policy starts with a name"),
        ("ema:0.9/refrehs=4", r"unknown axis 'refrehs'; did you mean 'refresh'\? \(valid: .*budget"),
        ("ema:0.9/refresh=4/refresh=2", "axis 'refresh' is given twice"),
        ("ema:0.9/refresh=0", "refresh must be"),
        ("ema:0.9/refresh=-1", "refresh must be"),
        ("ema:0.9/group=heads", r"unknown group 'heads'; did you mean 'head'"),
        ("ema:0.9/when=never", "unknown when 'never'"),
        ("ema:0.9/when=prefill:10%", "when takes every, prefill"),
        ("ema:0.9/when=overflow:0%", "1% to 100%"),
        ("window:0", "at least 1"),
        ("window:9223372036854775808", "at most 18 digits"),
        ("ema:0.9/budget=" + "9" * 5000, "must be a number of tokens"),
        ("ema:0.9/refresh=" + "9" * 5000, "refresh must be"),
        ("ema:0.9/protect=sink:" + "9" * 5000, "needs a number of tokens"),
        ("ema:0.9/refresh=٣", "refresh must be"),
        ("window:3,pool=2", "odd"),
        ("snapkv:4,kernel=4", "snapkv:4,kernel=4: .*odd"),
        ("ema/score=expected:n_future=1000000000000", "1 to 1048576"),
        ("ema/score=expected:epsilon=2", r"in \[0, 1\]"),
        ("cake:4,gamma=1e308", r"in \[0, 1e6\]"),
        ("ema:1", r"alpha of 'ema' must be in \[0, 1\), got 1"),
        ("ema:nan", "must be a finite number"),
        ("ema:fast", "alpha of 'ema' must be a finite number, got 'fast'"),
        ("ema:0.9,0.8", "does not take '0.8' there"),
        ("ema:0.9,alpha=0.8", "argument 'alpha' of 'ema' is given twice"),
        ("ema:0.9,ovre=step", r"unknown argument of 'ema' 'ovre'; did you mean 'over'"),
        ("ema:0.9,over=time", "unknown over of 'ema' 'time'"),
        ("ema:", "ends in ':'"),
        ("single:3", "does not take '3' there"),
        ("ema:0.9/score=atention", r"unknown score 'atention'; did you mean 'attention'"),
        ("ema:0.9/budget=0.1", "write 10%"),
        ("ema:0.9/budget=0", "at least 1 token"),
        ("ema:0.9/budget=0%", "more than 0%"),
        ("ema:0.9/budget=101%", "at most 100%"),
        ("ema:0.9/budget=-5", "must be a number of tokens"),
        ("ema:0.9/protect=snik:4", r"unknown protected part 'snik'; did you mean 'sink'"),
        ("ema:0.9/protect=sink", "needs a number of tokens"),
        ("ema:0.9/protect=sink:4+sink:5", "given twice"),
        ("ema:0.9/protect=recent:101%", "share of the budget"),
        ("random:-1", "0 or more"),
        ("random:1.5", "whole number"),
    ],
)
def test_bad_strings_are_refused_by_name(text, message):
    with pytest.raises(kvsim.PolicyError, match=message):
        kvsim.parse(text)


def test_errors_against_a_trace(tmp_path):
    trace = write_trace(tmp_path / "t", capture="scores")
    with pytest.raises(kvsim.PolicyError, match="protects 36 tokens, more than the budget of 20"):
        kvsim.replay(trace, "ema:0.8/protect=sink:4+recent:32", budget=20)
    with pytest.raises(kvsim.PolicyError, match="never evicts and takes no budget"):
        kvsim.replay(trace, "full/budget=10")
    with pytest.raises(kvsim.PolicyError, match="when=prefill needs scores before the first step"):
        kvsim.replay(trace, "ema:0.8/when=prefill")
    with pytest.raises(kvsim.TraceError, match="qkv"):
        kvsim.replay(trace, "ema:0.8/score=vnorm")
    with pytest.raises(kvsim.KvsimError, match="not both"):
        kvsim.replay(trace, "ema", budget=3, compression_ratio=0.5)
    with pytest.raises(kvsim.PolicyError, match="unknown engine 'numba'"):
        kvsim.replay(trace, "ema", engine="numba")
    for ratio in (1, -0.1, 1.5, float("nan"), "much"):
        with pytest.raises(kvsim.KvsimError, match="compression_ratio"):
            kvsim.replay(trace, "ema", compression_ratio=ratio)
    for budget in (0, -3, "0", "0.1"):
        with pytest.raises(kvsim.KvsimError, match="budget"):
            kvsim.replay(trace, "ema", budget=budget)


arguments = {KVPress: ["KnormPress"], Learned: ["runs/a,b+50%/x=1/score=y.safetensors"]}
some_scorers = [cls(*arguments.get(cls, [])) for cls in SCORERS.values()]
alphas = st.floats(0, 1, exclude_max=True)
policies = st.builds(
    kvsim.Policy,
    st.one_of(
        st.builds(Ema, alphas, over=st.sampled_from(["both", "step", "layer"])),
        st.just(Single()),
        st.builds(Cumulative, start=st.sampled_from(["zero", "prompt"])),
        st.builds(Streaming, st.integers(0, 99)),
        *[st.just(cls()) for cls in HEADS.values()],
    ),
    score=st.one_of(
        st.none(), st.builds(RandomScore, st.integers(0, 2**40)), *[st.just(scorer) for scorer in some_scorers]
    ),
    refresh=st.one_of(st.none(), st.integers(1, 10**6), st.just("first")),
    group=st.sampled_from([None, "shared", "layer", "head"]),
    budget=st.one_of(
        st.none(),
        st.builds(Budget, st.integers(1, 10**9)),
        st.builds(lambda n: Budget(keep_ratio=Decimal(n) / 10000), st.integers(1, 10000)),
    ),
    protect=st.one_of(
        st.none(), st.builds(Protect, st.integers(0, 99), st.one_of(st.integers(0, 99), st.just("50%"), st.just("7%")))
    ),
    when=st.sampled_from([None, When(), When("prefill"), When("overflow"), When("overflow", 25)]),
)


@given(policies)
def test_parse_of_str_is_the_policy(policy):
    assert kvsim.parse(str(policy)) == policy
    assert hash(kvsim.parse(str(policy))) == hash(policy)


@given(policies)
def test_strings_survive_an_unquoted_shell(policy):
    assert not set(str(policy)) & set(" \t\n'\"\\$`*?[]{}()<>|&;!#~^")


def test_a_policy_word_is_one_unquoted_word_in_bash():
    text = "ema:0.8,over=step/score=vnorm/budget=10%/protect=sink:4+recent:50%"
    printed = subprocess.run(["bash", "-c", f"printf %s {text}"], capture_output=True, text=True, check=True).stdout
    assert printed == text


def test_values_of_the_wrong_type_are_refused_by_name():
    for options, message in [
        ({"refresh": 2.5}, "refresh must be"),
        ({"refresh": "foo"}, "refresh must be"),
        ({"refresh": True}, "refresh must be"),
        ({"score": "vnorm"}, "score must be a scorer"),
        ({"budget": 10}, "budget must be a Budget"),
        ({"protect": "sink:4"}, "protect must be a Protect"),
        ({"when": "prefill"}, "when must be a When"),
        ({"group": "heads"}, "unknown group"),
    ]:
        with pytest.raises(kvsim.PolicyError, match=message):
            kvsim.Policy(Ema(0.8), **options)
    with pytest.raises(kvsim.PolicyError, match=r"kvsim\.parse reads strings"):
        kvsim.Policy("ema:0.9")
    for tokens in (10.5, True, "3"):
        with pytest.raises(kvsim.PolicyError, match="whole number of tokens"):
            Budget(tokens)
    assert When("prefill", 20) == When("prefill")


def test_an_error_names_the_policy_and_the_recording(tmp_path):
    trace = write_trace(tmp_path / "t")
    with pytest.raises(kvsim.PolicyError, match=r"^streaming:4/budget=1: .*raise the budget.*\(on .*t\)$"):
        kvsim.replay(trace, "streaming:4", budget=1)


def test_numbers_far_beyond_the_recording_mean_all_of_it(tmp_path):
    trace = write_trace(tmp_path / "t")
    for policy, same in [
        ("window:99999999999", "window:12"),
        ("window:5,pool=999999999999999999", "window:5,pool=151"),
        ("ema:0.8/refresh=999999999999999999", "ema:0.8/refresh=first"),
        ("ema:0.8/budget=999999999999999999", "ema:0.8/budget=52"),
    ]:
        got, want = (kvsim.replay(trace, p, budget=12, shadow_churn=False) for p in (policy, same))
        assert got.evicted_at.tolist() == want.evicted_at.tolist()


def test_policies_are_frozen_and_dataclasses():
    policy = kvsim.parse("ema:0.9")
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.group = "layer"
    assert dataclasses.replace(policy, group="layer") == kvsim.parse("ema:0.9/group=layer")
