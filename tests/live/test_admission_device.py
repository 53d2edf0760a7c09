"""The dual cache on the device against the plain form: tokens, visible sets and logits."""

import fast_cases as fc
import numpy as np
import pytest
import torch
from gates import gate_for

import kvsim
from kvsim.errors import KvsimError
from kvsim.live import decode, prefill, prefill_under
from kvsim.live.dual import DualSession, PoolFullError, prefill_pooled
from kvsim.live.dual.stage import Stage
from kvsim.live.fast import decode_fast
from kvsim.live.keepers import keeper_of

pytestmark = pytest.mark.usefixtures("quiet_infinities")

STEPS = 6
FORCED = [(5 * i * i + 11) % 61 for i in range(STEPS)]
OPTIONS = {"steps": STEPS, "force": FORCED, "keep_logits": True}
ADMISSIONS = [
    "wgkv:GATE,window=3",
    "wgkv:GATE,window=1",
    "wgkv:GATE,window=12",
    "wgkv:GATE,window=40",
    "wgkv:GATE,window=5,tau=0",
    "wgkv:GATE,window=5,tau=1.5",
    "random:0.5,window=2",
    "local:window=4,sink=1",
]


@pytest.fixture(scope="module")
def gate(llama, tmp_path_factory):
    return gate_for(prefill(llama, [0]), tmp_path_factory.mktemp("gate") / "gate.safetensors")


def policy_of(text, gate):
    return kvsim.parse(f"full/admit={text.replace('GATE', gate)}")


def read(model, policy):
    return [prefill_under(model, prompt, [policy])[0] for prompt in fc.PROMPTS]


def generic(model, prefixes, policy, **options):
    """Run through the model's own modules, which is quicker in the interpreter."""
    given = {"steps": STEPS, "forced": FORCED, "keep_logits": True, "fused": False} | options
    return decode_fast(model, prefixes, [policy] * len(prefixes), **given)


@pytest.mark.parametrize(
    "text", [*ADMISSIONS[:4], *(pytest.param(one, marks=pytest.mark.slow) for one in ADMISSIONS[4:])]
)
def test_rows_of_unequal_length_are_the_plain_forms(llama, gate, text):
    policy = policy_of(text, gate)
    prefixes = read(llama, policy)
    wanted = decode(llama, prefixes, policy, **OPTIONS)
    found = generic(llama, prefixes, policy)
    for fast, plain in zip(found, wanted, strict=True):
        fc.assert_same(fast, plain)
        assert fast.engine == "triton"
        assert np.array_equal(fast.sequence.retained, plain.sequence.retained)


@pytest.mark.parametrize("name", ["gemma3", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_other_models(name, tmp_path):
    model = fc.small(name)
    policy = policy_of("wgkv:GATE,window=3", gate_for(prefill(model, [0]), tmp_path / "gate.safetensors"))
    prefixes = read(model, policy)
    wanted = decode(model, prefixes, policy, **OPTIONS)
    found = generic(model, prefixes, policy)
    for fast, plain in zip(found, wanted, strict=True):
        fc.assert_same(fast, plain)


def test_generation_by_our_own_kernels_is_the_plain_forms(llama, gate):
    policy = policy_of("wgkv:GATE,window=3", gate)
    prefixes = read(llama, policy)
    options = {"steps": 3, "keep_logits": True}
    wanted = decode(llama, prefixes, policy, **options)
    for fast, plain in zip(decode(llama, prefixes, policy, engine="triton", **options), wanted, strict=True):
        fc.assert_same(fast, plain)


@pytest.mark.parametrize("name", ["llama-gqa3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_full_pool_says_so_and_loses_nothing(name, tmp_path):
    model = fc.small(name)
    steps = 9
    forced = [(5 * i * i + 11) % 61 for i in range(steps)]
    policy = policy_of("random:0.95,window=3", "")
    prefixes = prefill_under(model, fc.PROMPTS[0], [policy])
    plain = decode(model, prefixes, policy, steps=steps, force=forced, keep_logits=True)
    free = DualSession(model, prefixes, [policy], steps=steps, forced=forced, fused=False)
    most, least = free.pool.pages, free.pool.used()
    free.close()
    with pytest.raises(PoolFullError, match="does not hold the prompt"):
        DualSession(model, prefixes, [policy], steps=steps, forced=forced, pool_pages=least - 1, fused=False)
    session = DualSession(model, prefixes, [policy], steps=steps, forced=forced, pool_pages=least + 1, fused=False)
    logits, failures = {}, []
    with session.attached():
        session.read_back = min(session.read_back, 4)
        while session.done < steps:
            session.step()
            logits[session.done] = session.logits.float().clone()
            if session.done % session.read_back == 0 or session.done == steps:
                try:
                    session.check()
                except PoolFullError as error:
                    failures.append(str(error))
                    assert f"after step {session.done} of {steps}; nothing is lost" in failures[-1]
                    with pytest.raises(PoolFullError, match="give it more pages"):
                        session.step()
                    with pytest.raises(KvsimError, match="a larger one has more than that"):
                        session.grow(session.pool.pages)
                    session.grow(session.pool.pages + 1)
        assert session.pool.pages <= most
        for row, run in enumerate(plain):
            for t in range(1, steps + 1):
                assert float((logits[t][row] - run.logits[t - 1]).abs().max()) < 1e-4, t
            session.adopt(row, steps)
            assert np.array_equal(session.sequences[row].evicted_at, run.sequence.evicted_at)
    # Gemma 3's one layer without a window has fewer rows to open pages for.
    assert len(failures) >= (1 if name == "gemma3" else 2)
    with pytest.raises(KvsimError, match=r"the pool of .* pages is full after step"):
        decode_fast(model, prefixes, [policy], steps=steps, forced=forced, pool_pages=least, fused=False)


def test_a_step_that_was_undone_can_be_taken_again(llama, gate):
    """What is compared when a step is captured in a graph is taken twice."""
    policy = policy_of("wgkv:GATE,window=3", gate)
    prefixes = read(llama, policy)
    wanted = decode(llama, prefixes, policy, **OPTIONS)
    session = DualSession(llama, prefixes, [policy] * 2, steps=STEPS, forced=FORCED, fused=False)
    with session.attached():
        for t in range(STEPS):
            undo = session._undo()
            session._forward(False)
            undo()
            session.step()
            for row, run in enumerate(wanted):
                assert float((session.logits[row] - run.logits[t]).abs().max()) < 1e-4


@pytest.mark.parametrize("text", ["wgkv:GATE,window=3", pytest.param("random:0.5,window=20", marks=pytest.mark.slow)])
@pytest.mark.parametrize("spare", [None, 3])
def test_a_prompt_read_into_the_pool_is_the_plain_forms(llama, gate, text, spare):
    policy = policy_of(text, gate)
    prefixes = read(llama, policy)
    wanted = decode(llama, prefixes, policy, **OPTIONS)
    pages = None if spare is None else DualSession(llama, prefixes, [policy] * 2, steps=STEPS).pool.pages + spare
    pooled = prefill_pooled(llama, fc.PROMPTS, keeper_of(llama, policy), steps=STEPS, pages=pages)
    for ours, plain in zip(pooled, prefixes, strict=True):
        assert float((ours.logits - plain.logits).abs().max()) < 1e-4
        assert np.array_equal(ours.admitted.admitted, plain.admitted.admitted)
        assert ours.layers[0].keys.numel() == 0
        assert ours.pool.pages == (pages or ours.pool.pages)
    for fast, plain in zip(generic(llama, pooled, policy), wanted, strict=True):
        fc.assert_same(fast, plain)
    with pytest.raises(KvsimError, match="this pool has been decoded in"):
        generic(llama, pooled, policy)
    with pytest.raises(KvsimError, match="decode it with engine 'triton'"):
        decode(llama, pooled, policy, **OPTIONS)


def test_errors(llama, gate):
    policy = policy_of("wgkv:GATE,window=3", gate)
    for text, what in (("ema:0.8", "evict"), ("full", "select")):
        own = kvsim.parse(f"{text}/admit=local:window=3" + ("/select=topk:3" if what == "select" else ""))
        with pytest.raises(KvsimError, match=rf"the dual cache on the device does not {what}; the plain engine can"):
            decode(llama, prefill_under(llama, fc.PROMPTS[0], [own]), own, budget=8, engine="triton", **OPTIONS)
    others = [policy, policy_of("local:window=3", gate)]
    prefixes = [prefill_under(llama, fc.PROMPTS[0], [one])[0] for one in others]
    with pytest.raises(KvsimError, match="the fast form runs one policy for all rows"):
        decode(llama, prefixes, others, engine="triton", **OPTIONS)
    assert torch.is_tensor(prefixes[0].layers[0].keys)


def test_what_is_read_into_a_pool_under_a_policy(llama):
    text = "full/admit=random:0.5,window=3"
    pooled = prefill_pooled(llama, fc.PROMPTS[:1], text, steps=2)
    (run,) = decode(llama, pooled, text, steps=2, force=[1, 2], engine="triton")
    (plain,) = decode(llama, prefill_under(llama, fc.PROMPTS[0], [text]), text, steps=2, force=[1, 2])
    assert np.array_equal(run.evicted_at, plain.evicted_at)
    for prompts, policy, message in (
        (fc.PROMPTS, "full", "full: admits everything; the dual cache is for admit="),
        (fc.PROMPTS[0], text, "prompts: must be a list of prompts"),
    ):
        with pytest.raises(KvsimError, match=message):
            prefill_pooled(llama, prompts, policy, steps=2)


def test_a_window_beyond_all_positions_takes_no_room():
    assert Stage(999, 1, steps=2, length=20).window == 22
    assert Stage(5, 1, steps=2, length=20).window == 5
