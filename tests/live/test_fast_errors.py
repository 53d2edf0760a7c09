"""What the fast form refuses, and how it fails: by name, and without holding on to memory."""

import gc
import weakref

import fast_cases as fc
import pytest
import torch

import kvsim
from kvsim.live import decode, prefill, prefill_under
from kvsim.live.fast import decode_fast
from kvsim.live.fast.session import Session, alike

pytestmark = pytest.mark.usefixtures("quiet_infinities")


@pytest.fixture(scope="module")
def prefix(llama):
    return prefill(llama, fc.PROMPTS[0])


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("adaptive:noise", "coefficients that are chosen on the way"),
        ("single/score=lagkv/when=every", "scores that differ between layers"),
        ("inertiakv-aux", "a rescue"),
        ("ema:0.8/score=rkv", "redundancy"),
        ("scissorhands:3", "pivotal scores"),
        ("ema:0.8/admit=random:0.5,window=3/when=overflow", "the dual cache on the device does not evict"),
        ("ema:0.8/score=pivotal", "pivotal scores"),
    ],
)
def test_policies_that_only_the_plain_form_runs_are_refused_by_name(llama, prefix, policy, message):
    with pytest.raises(kvsim.PolicyError, match=rf"{message}; the plain engine can") as caught:
        decode(llama, [prefix], policy, steps=2, force=[1, 2], budget=5, engine="triton")
    assert str(caught.value).startswith(str(kvsim.parse(policy).with_budget(kvsim.Budget(5))))
    under = prefill_under(llama, fc.PROMPTS[0], [policy])
    assert decode(llama, under, policy, steps=2, force=[1, 2], budget=5)


def test_requests_that_make_no_sense(llama, prefix, monkeypatch):
    options = {"steps": 2, "force": [1, 2], "budget": 5, "engine": "triton"}
    with pytest.raises(kvsim.KvsimError, match="one policy for all rows"):
        decode(llama, [prefix] * 2, ["ema:0.8", "ema:0.9"], **options)
    with pytest.raises(kvsim.KvsimError, match="unknown engine 'tritn'; did you mean 'triton'"):
        decode(llama, [prefix], "ema:0.8", **options | {"engine": "tritn"})
    with pytest.raises(kvsim.KvsimError, match="steps must be at least 1"):
        decode(llama, [prefix], "ema:0.8", **options | {"steps": 0})
    with pytest.raises(kvsim.KvsimError, match="reads what later queries attend to"):
        decode(llama, [prefix], "oracle:future", **options)
    with pytest.raises(kvsim.KvsimError, match="is empty"):
        decode(llama, [prefill(llama, [])], "ema:0.8", **options)
    if fc.DEVICE == "cpu":
        monkeypatch.delenv("TRITON_INTERPRET")
        with pytest.raises(kvsim.KvsimError, match="needs a CUDA GPU, and this would run on cpu; use engine 'plain'"):
            decode(llama, [prefix], "ema:0.8", **options)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(kvsim.KvsimError, match="needs triton"):
        decode(llama, [prefix], "ema:0.8", **options)


def test_layers_that_the_fast_form_cannot_read(llama):
    model = fc.small("gemma3")
    prefix = prefill(model, fc.PROMPTS[0], eligible="all")
    with pytest.raises(kvsim.KvsimError, match="does not evict from layers whose queries see a window"):
        decode(model, [prefix], "ema:0.8", steps=1, force=[1], budget=5, engine="triton")
    linear = fc.small("llama-gqa3")
    linear.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(kvsim.KvsimError, match="layer 0 is 'linear_attention'"):
        prefill(linear, fc.PROMPTS[0])
    own = prefill(llama, fc.PROMPTS[0])
    with pytest.raises(kvsim.KvsimError, match="layer 0 is 'linear_attention'"):
        decode(linear, [own], "ema:0.8", steps=1, force=[1], budget=5, engine="triton")


def run(model, prefix):
    given = kvsim.parse("ema:0.8").with_budget(kvsim.Budget(5))
    return decode_fast(model, [prefix], [given], steps=3, forced=[1, 2, 3], fused=False)


def held_after(monkeypatch, model, prefix, error, message):
    """Run, see it fail, and count the layers' tensors that are still there."""
    seen = []
    first = Session.attached

    def attached(self):
        seen.extend(weakref.ref(layer.keys) for layer in self.layers)
        return first(self)

    monkeypatch.setattr(Session, "attached", attached)
    with pytest.raises(error, match=message):
        run(model, prefix)
    gc.collect()
    return sum(one() is not None for one in seen), len(seen)


def test_out_of_memory_lets_the_cache_go(llama, prefix, monkeypatch):
    def step(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr(Session, "step", step)
    message = r"out of memory while decoding: CUDA out of memory. Tried to allocate 2.00 GiB.; take fewer rows"
    assert held_after(monkeypatch, llama, prefix, kvsim.KvsimError, message) == (0, 2)


def test_logits_that_are_no_numbers_are_named_by_their_step(monkeypatch):
    model = fc.small("llama-gqa3")
    prefix = prefill(model, fc.PROMPTS[0])
    with torch.no_grad():
        model.get_input_embeddings().weight[2] = torch.nan
    held, layers = held_after(monkeypatch, model, prefix, kvsim.KvsimError, r"step 2: the model's logits are not num")
    assert (held, layers) == (0, 2)


def test_logits_of_a_captured_step_that_are_numbers_in_neither_run_are_alike():
    """Their step is named by whoever reads them; a graph that gives other numbers is a fault of its own."""
    nan, inf = torch.nan, torch.inf
    wanted = torch.tensor([[10.0, -3, 0], [1, 2, 3]])
    assert alike(wanted + 0.19, wanted)
    assert not alike(wanted + 0.21, wanted)
    assert alike(wanted * nan, wanted * nan)
    masked = wanted.masked_fill(wanted == 0, -inf)
    assert alike(masked + 0.1, masked)
    assert alike(torch.tensor([[1.0, inf]]), torch.tensor([[1.0, nan]]))
    assert not alike(torch.tensor([[2.0, nan]]), torch.tensor([[1.0, nan]]))
    for broken in (nan, inf):
        assert not alike(wanted.masked_fill(wanted == 2, broken), wanted)
        assert not alike(wanted, wanted.masked_fill(wanted == 2, broken))
