"""Questions as tokens, where their needles stand, and answers under policies."""

import dataclasses
import itertools

import pytest
import torch
from asking import chatting, save_model
from kvsim_traces.loading import load_model
from token_texts import sentencepiece

from kvsim.errors import KvsimError
from kvsim.evaluate import evaluate, survival
from kvsim.evaluations import key_of
from kvsim.live import decode, prefill
from kvsim.questions import ask, chat_text, counter
from kvsim.tasks import TASKS, Sample, needle_at, score

LENGTH = 800
POLICIES = ["full", "ema:0.8", "single/refresh=first/group=layer"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(save_model(tmp_path_factory.mktemp("models") / "tiny"), device="cpu")


def sample_of(task, tokenizer, *, chat, length=LENGTH, index=0):
    return TASKS[task].sample(index, length, counter(tokenizer, chat=chat))


@pytest.mark.parametrize("make", [chatting, sentencepiece])
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("task", ["niah_single_1", "niah_multivalue", "vt", "needle"])
def test_needles_are_the_tokens_of_the_values(make, chat, task):
    tokenizer = make()
    tokenizer.chat_template = chatting().chat_template.replace("<|start|>", "<s>").replace("<|end|>", "</s>")
    sample = sample_of(task, tokenizer, chat=chat, length=4000)
    question = ask(tokenizer, sample, chat=chat)
    assert len(question.needles) == len(sample.needle_spans) > 0
    for (first, last), needle in zip(sample.needle_spans, question.needles, strict=True):
        value = sample.input[first:last]
        assert needle == list(range(needle[0], needle[-1] + 1))
        assert tokenizer.decode([question.tokens[at] for at in needle]).strip() == value
    assert question.needle_positions == sorted(itertools.chain(*question.needles))
    whole = tokenizer.decode(question.tokens)
    assert whole.endswith(sample.prefix)
    assert sample.input in whole
    assert ("assistant" in whole) == chat


def test_needles_hold_every_token_that_has_a_part_of_the_value():
    tokenizer = chatting()
    text = "the other é thing"
    for first in range(len(text)):
        for last in range(first + 1, len(text) + 1):
            sample = Sample(text, " x", ("y",), needle_spans=((first, last),))
            (needle,) = ask(tokenizer, sample, chat=False).needles
            spans = tokenizer(text, return_offsets_mapping=True).offset_mapping
            assert needle == [at for at, (a, b) in enumerate(spans) if set(range(a, b)) & set(range(first, last))]
    # "th" is one token, "é" two
    assert ask(tokenizer, Sample(text, "", ("y",), needle_spans=((1, 2),)), chat=False).needles == [[0]]
    assert ask(tokenizer, Sample(text, "", ("y",), needle_spans=((10, 11),)), chat=False).needles == [[8, 9]]


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_are_as_long_as_counted(chat):
    tokenizer = chatting()
    for task in ("niah_single_1", "niah_single_2", "vt"):
        sample = sample_of(task, tokenizer, chat=chat, length=1500)
        tokens = ask(tokenizer, sample, chat=chat).tokens
        assert len(tokens) + sample.answer_tokens == sample.length <= 1500
        assert sample.length > 1300


def test_a_template_that_follows_the_text_may_repeat_it():
    tokenizer = chatting()
    tokenizer.chat_template = "{{ messages[0].content }} is asked. <|start|>{{ messages[0].content }}<|end|>"
    sample = Sample("number 7", " x", ("7",), needle_spans=((7, 8),))
    question = ask(tokenizer, sample, chat=True)
    assert [at for at, token in enumerate(question.tokens) if token == ord("7")][-1:] == question.needles[0]


def test_tokenizers_that_will_not_do():
    tokenizer = chatting()
    sample = sample_of("niah_single_1", tokenizer, chat=False)
    tokenizer.chat_template = "{{ messages[0].content | upper }}"
    with pytest.raises(KvsimError, match="changes the text"):
        ask(tokenizer, sample, chat=True)
    tokenizer.chat_template = None
    for call in (lambda: ask(tokenizer, sample, chat=True), lambda: counter(tokenizer, chat=True)):
        with pytest.raises(KvsimError, match="no chat template"):
            call()
    with pytest.raises(KvsimError, match="no chat template"):
        chat_text(tokenizer, "a")

    class Slow:
        is_fast = False

    with pytest.raises(KvsimError, match="Slow does not say where its tokens come from"):
        ask(Slow(), sample, chat=False)


def test_a_hash_of_what_is_asked_and_what_is_right():
    tokenizer = chatting()
    sample = Sample("a question", " x", ("y",))
    found = ask(tokenizer, sample, chat=False).hash
    assert found == ask(tokenizer, dataclasses.replace(sample, index=3), chat=False).hash
    changes = ({"input": "another"}, {"prefix": ""}, {"outputs": ("z",)}, {"metric": "part"})
    others = [ask(tokenizer, dataclasses.replace(sample, **change), chat=False).hash for change in changes]
    others.append(ask(tokenizer, sample, chat=True).hash)
    assert len({found, *others}) == 6


# Answers


def test_answers_are_those_of_decoding(model):
    network, tokenizer = model
    (rows,) = evaluate(
        network, tokenizer, TASKS["niah_single_1"], POLICIES, length=LENGTH, indices=[1], answer_tokens=5
    )
    sample = sample_of("niah_single_1", tokenizer, chat=False, index=1)
    question = ask(tokenizer, sample, chat=False)
    prefix = prefill(network, question.tokens)
    for policy, row in zip(POLICIES, rows, strict=True):
        (run,) = decode(network, [prefix], [policy], steps=5)
        assert row["answer"] == tokenizer.decode(run.tokens, skip_special_tokens=True)
        assert row["score"] == score(row["answer"], sample)
        assert row["kept_mass"] == pytest.approx(run.result().summary()["kept_mass"])
        gone = run.evicted_at[:, question.needle_positions] >= 0
        assert row["survival"] == pytest.approx(1 - gone.mean())
        assert (row["task"], row["index"], row["depth"]) == ("niah_single_1", 1, sample.depth)
        assert row["question_hash"] == question.hash
        assert (row["steps"], row["answer_tokens"], row["prompt_length"]) == (5, 5, len(question.tokens))
        key_of(row)
    assert [row["policy"] for row in rows] == ["full", *(f"{policy}/budget=10%" for policy in POLICIES[1:])]
    full, ema, _ = rows
    assert (full["kept_mass"], full["survival"]) == pytest.approx((1, 1), abs=1e-6)
    assert ema["kept_mass"] < 1
    assert 0 <= ema["survival"] < 1


def test_a_right_answer_scores(model, monkeypatch):
    network, tokenizer = model
    sample = sample_of("niah_single_1", tokenizer, chat=False)
    wanted = tokenizer(f" {sample.outputs[0]}.").input_ids

    def forced(model, prefixes, policies, *, steps, stop):
        return decode(model, prefixes, policies, steps=steps, force=wanted)

    monkeypatch.setattr("kvsim.evaluate.decode", forced)
    task = TASKS["niah_single_1"]
    for steps, score_of in ((len(wanted), 100), (len(wanted) - 2, 0)):
        (rows,) = evaluate(network, tokenizer, task, ["full"], length=LENGTH, indices=[0], answer_tokens=steps)
        assert rows[0]["answer"] == f" {sample.outputs[0]}."[:steps]
        assert rows[0]["score"] == score_of


def test_an_answer_stops_at_end_of_sequence(model):
    network, tokenizer = model
    options = {"length": LENGTH, "indices": [0], "answer_tokens": 6}
    task = TASKS["niah_single_1"]
    (free,) = evaluate(network, tokenizer, task, ["full"], **options)
    prefix = prefill(network, ask(tokenizer, sample_of(task.name, tokenizer, chat=False), chat=False).tokens)
    (run,) = decode(network, [prefix], ["full"], steps=6)
    at = next(place for place in range(1, 6) if run.tokens[place] not in run.tokens[:place])
    network.generation_config.eos_token_id = run.tokens[at]
    try:
        (stopped,) = evaluate(network, tokenizer, task, ["full"], **options)
    finally:
        network.generation_config.eos_token_id = None
    assert (free[0]["steps"], stopped[0]["steps"]) == (6, at + 1)


def test_only_what_is_wanted_is_decoded(model, monkeypatch):
    network, tokenizer = model
    batches = []

    def counting(model, prefixes, policies, **options):
        batches.append(list(map(str, policies)))
        return decode(model, prefixes, policies, **options)

    monkeypatch.setattr("kvsim.evaluate.decode", counting)
    keys = []

    def wanted(key):
        keys.append(key)
        return key["index"] == 1 and key["policy"] != "full"

    options = {"length": LENGTH, "indices": [0, 1], "answer_tokens": 2, "model_hash": "abc", "wanted": wanted}
    rows = list(evaluate(network, tokenizer, TASKS["niah_single_1"], POLICIES, **options))
    assert [len(own) for own in rows] == [0, 2]
    assert batches == [[f"{policy}/budget=10%" for policy in POLICIES[1:]]]
    assert [key_of(row) for row in rows[1]] == [key_of(key) for key in keys[-2:]]
    assert {row["model_hash"] for row in rows[1]} == {"abc"}


def test_a_task_without_needles_has_no_survival(model):
    network, tokenizer = model
    (rows,) = evaluate(network, tokenizer, TASKS["fwe"], ["full"], length=700, indices=[0], answer_tokens=2)
    assert rows[0]["survival"] is None


def test_survival_by_hand():
    question = ask(chatting(), Sample("abcdef", "", ("c",), needle_spans=((1, 2), (1, 3), (5, 6))), chat=False)
    history = torch.tensor([[-1, 3, -1, -1, -1, -1], [0, -1, 2, 0, 0, 1]]).numpy()
    assert survival(history, question) == 3 / 6


def test_depths_of_the_grid(model):
    network, tokenizer = model
    for depth in (0, 100):
        (rows,) = evaluate(network, tokenizer, needle_at(depth), ["full"], length=900, indices=[0], answer_tokens=1)
        assert rows[0]["depth"] == depth
        assert rows[0]["task"] == "needle"
    with pytest.raises(KvsimError, match="from 0 to 100, got 101"):
        needle_at(101)
