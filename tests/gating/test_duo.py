"""Retrieval heads by optimisation."""

import json
from dataclasses import replace

import pytest
import torch
from recording import PROMPT, tiny
from token_texts import byte_level

from kvsim import KvsimError
from kvsim.gating.attention import plain_write_gated
from kvsim.gating.data import order
from kvsim.gating.duo import Passage, _Mixed, find_heads, passages
from kvsim.gating.duo_settings import DuoSettings
from kvsim.gating.watcher import frozen, hidden_states, shape_of
from kvsim.live.attention import Call
from kvsim.retrieval_heads import save_heads

SMALL = DuoSettings(sink=2, window=4, steps=20, samples=2, length=900, task="niah_single_1", learning_rate=0.1)


@pytest.fixture(scope="module")
def model():
    return tiny("llama-gqa3", num_hidden_layers=2)


def prompts():
    return [Passage(PROMPT, 15), Passage(PROMPT[::-1], 12)]


def mixed(model, alphas, settings=SMALL):
    shape = shape_of(model)
    watcher = _Mixed(torch.nn.Parameter(torch.tensor(alphas)), shape, plain_write_gated, settings)
    with frozen(model, watcher):
        return hidden_states(model, torch.tensor([PROMPT]), watcher)


def test_heads_are_mixed_from_full_and_streaming_attention(model):
    torch.manual_seed(0)
    q, (k, v) = torch.randn(1, 6, 12, 8), torch.randn(2, 1, 2, 12, 8)
    i = torch.arange(12)
    causal = i[:, None] >= i
    streaming = causal & ((i[:, None] - i < 4) | (i < 2))
    full, short = (
        torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
        for mask in (causal, streaming)
    )
    alphas = torch.nn.Parameter(torch.tensor([[0.25, 1.0], [0.0, 0.0]]))
    watcher = _Mixed(alphas, shape_of(model), plain_write_gated, SMALL)
    layer = model.get_decoder().layers[0].self_attn
    found = watcher.attend(Call(layer, q, k, v, None, 0.3, None, None, None))
    weight = torch.tensor([0.25] * 3 + [1.0] * 3)[:, None, None]
    torch.testing.assert_close(found.transpose(1, 2), weight * full + (1 - weight) * short)


def test_a_model_of_retrieval_heads_is_itself(model):
    with torch.no_grad():
        full = hidden_states(model, torch.tensor([PROMPT]))
    ones, noughts = (mixed(model, [[alpha, alpha]] * 2).detach() for alpha in (1.0, 0.0))
    torch.testing.assert_close(ones, full, rtol=1e-4, atol=1e-4)
    assert float((noughts - full).abs().max()) > 1e-2
    torch.testing.assert_close(noughts[:, :4], full[:, :4], rtol=1e-4, atol=1e-4)


def test_heads_that_need_nothing_far_lose_their_alphas(model):
    found = find_heads(model, prompts(), replace(SMALL, window=len(PROMPT)))
    assert found["scores"] == [[0.0, 0.0], [0.0, 0.0]]
    assert found["training"]["distill"][-1] < 1e-6


def test_the_penalty_decides(model):
    kept = find_heads(model, prompts(), replace(SMALL, penalty=0.0))
    torch.testing.assert_close(torch.tensor(kept["scores"]), torch.ones(2, 2), rtol=0, atol=0.05)
    lost = find_heads(model, prompts(), replace(SMALL, penalty=1e6))
    assert lost["scores"] == [[0.0, 0.0], [0.0, 0.0]]
    between = find_heads(model, prompts(), replace(SMALL, penalty=1.0, steps=60))
    scores = [score for row in between["scores"] for score in row]
    assert 0 <= min(scores) < max(scores) <= 1


def test_passages_of_one_length_tell_the_same_heads_apart(model):
    """All are as long as the longest: what follows a passage changes nothing, here by one that is drawn only later."""
    settings = replace(SMALL, penalty=1.0, steps=3)
    alone = find_heads(model, [Passage(PROMPT, 15)] * 4, settings)
    together = [Passage(PROMPT, 15)] * 4
    together[order(4, 3, 1, settings.seed)[0]] = Passage([*PROMPT, 5, 1, 40, 7, 8], 20)
    seen = []
    handle = model.get_decoder().register_forward_pre_hook(
        lambda _, __, given: seen.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    padded = find_heads(model, together, settings)
    handle.remove()
    assert seen[-6:] == [len(PROMPT) + 5] * 6
    torch.testing.assert_close(torch.tensor(padded["scores"]), torch.tensor(alone["scores"]), rtol=0, atol=1e-5)
    losses = (torch.tensor(found["training"]["distill"]) for found in (padded, alone))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)
    assert alone["training"]["distill"][2] > 1e-3


def test_the_first_loss_is_nought_and_that_of_answers_alone(model):
    found = find_heads(model, prompts(), replace(SMALL, steps=1))
    assert found["training"]["distill"][0] < 1e-6
    for settings in (SMALL, replace(SMALL, checkpointing=True)):
        assert find_heads(model, prompts(), settings)["scores"] == find_heads(model, prompts(), SMALL)["scores"]


def test_the_loss_is_the_squared_distance_at_what_predicts_the_answer(model):
    found = find_heads(model, [Passage(PROMPT, 15)], replace(SMALL, steps=2))
    # Nothing but the penalty has a gradient at first, and AdamW's first step is as long as its rate.
    with torch.no_grad():
        full, own = hidden_states(model, torch.tensor([PROMPT])), mixed(model, [[0.9, 0.9]] * 2)
    want = (own - full)[0, 15:-1].square().sum(dim=-1).mean()
    assert found["training"]["alphas"][0] == pytest.approx(0.9)
    assert found["training"]["distill"][1] == pytest.approx(float(want), rel=1e-3)


def test_layers_that_slide_have_no_alphas():
    found = find_heads(tiny("gemma3"), prompts(), replace(SMALL, steps=2))
    assert found["layers"] == [1]
    assert found["scores"][0] == found["scores"][2] == [0.0, 0.0]
    assert min(found["scores"][1]) > 0.5


def test_the_file(model, tmp_path):
    out = tmp_path / "new" / "heads.json"
    found = find_heads(model, prompts(), replace(SMALL, steps=2))
    save_heads(found, out)
    held = json.loads(out.read_text())
    assert held == json.loads(json.dumps(found))
    counts = {"num_layers", "num_kv_heads", "sink", "window"}
    assert held.keys() == {"format", "model", "layers", "scores", "threshold", "training"} | counts
    assert (held["format"], held["num_layers"], held["num_kv_heads"]) == (1, 2, 2)
    assert (held["sink"], held["window"], held["threshold"]) == (2, 4, 0.5)
    with pytest.raises(KvsimError, match="exists already"):
        save_heads(found, out)


def test_questions_end_with_their_answers():
    tokenizer = byte_level()
    found = passages(tokenizer, SMALL)
    assert len(found) == 2
    for passage in found:
        text = tokenizer.decode(passage.tokens)
        answer = tokenizer.decode(passage.tokens[passage.first + 1 :])
        assert len(passage.tokens) <= 900
        assert answer.startswith(" ")
        assert answer.strip().isdigit()
        assert f"is: {answer.strip()}." in text, "the answer is hidden in the text"
        assert text.endswith(f"mentioned in the provided text is{answer}")
    assert passages(tokenizer, SMALL) == found
    assert passages(tokenizer, replace(SMALL, seed=1)) != found
    with pytest.raises(KvsimError, match="task cwe: hides no values"):
        passages(tokenizer, replace(SMALL, task="cwe", length=7000))
    with pytest.raises(KvsimError, match="length 100 is too small"):
        passages(tokenizer, replace(SMALL, length=100))


def test_the_rate_rises_and_falls():
    settings = replace(SMALL, steps=10, learning_rate=1.0)
    assert [settings.rate(step) for step in range(10)] == [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.5]
    assert replace(settings, steps=1).rate(0) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"sink": -1}, "sink must be at least 0"),
        ({"window": SMALL.length - SMALL.sink}, f"see all of a sample of {SMALL.length} tokens"),
        ({"learning_rate": 0}, "learning_rate must be above 0"),
        ({"attention": "x"}, "attention must be one of auto, plain, flex"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(KvsimError, match=message):
        replace(SMALL, **changes)


def test_samples_are_no_longer_than_the_model_is_made_for(model):
    with pytest.raises(KvsimError, match="length 129: the model takes at most 128 tokens"):
        find_heads(model, [Passage([1] * 129, 100)], SMALL)
