"""RULER's tasks keep their definitions, fill the length, and can be made again."""

import json
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from kvsim.cli import app
from kvsim.errors import KvsimError
from kvsim.tasks import RULER, TASKS, Sample, count_words, find_task
from kvsim.tasks.counting import CommonWords, FrequentWords
from kvsim.tasks.niah import DEPTHS, NOISE
from kvsim.tasks.task import fill
from kvsim.tasks.vt import VariableTracking
from kvsim.tasks.words import distinct, prose, single_words

NIAH = [name for name in RULER if name.startswith("niah")]
LENGTHS = [256, 512, 1024, 4096]
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\.")
KINDS = {
    "words": r"[a-z]+-[a-z]+",
    "numbers": r"[1-9]\d{6}",
    "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
}


def subwords(text):
    """Stand in for a tokenizer: pieces of at most four letters or digits, and every other character."""
    return len(re.findall(r"[A-Za-z]{1,4}|\d{1,2}|[^\sA-Za-z\d]", text))


def squad(paragraphs=40, articles=5):
    """A file of SQuAD's form: articles with paragraphs, some of whose questions have no answer."""
    data = []
    for number in range(articles):
        entries = []
        for place in range(paragraphs // articles):
            name = f"{number}x{place}"
            context = (
                f"Article {number}, paragraph {place}. " + f"Filler about {name}. " * 8 + f"The seat is T{name} town."
            )
            answers = [
                {"text": text, "answer_start": context.index(text)}
                for text in (f"T{name} town", f"T{name} town", f"T{name}")
            ]
            qas = [
                {"question": f"Unanswerable {name}?", "answers": [], "is_impossible": True},
                {"question": f"What is the seat of {name}?", "answers": answers, "is_impossible": False},
            ]
            entries.append({"context": context, "qas": qas})
        data.append({"title": str(number), "paragraphs": entries})
    return {"version": "v2.0", "data": data}


def hotpot(questions=6):
    """A file of HotpotQA's form: ten documents a question, two of which support it."""
    data = []
    for number in range(questions):
        context = [[f"Page {number}-{place}", [f"Filler of page {place}.", " More of it."]] for place in range(10)]
        context[0][1].append(f" Nothing was built in {1900 + number}.")
        context[3][1].append(f" The bridge is Bridge {number}.")
        context[7][1].append(f" It was built in {1900 + number}, yes, in {1900 + number}.")
        facts = [[f"Page {number}-3", 2], [f"Page {number}-7", 2]]
        answer = "yes" if number == 1 else str(1900 + number)
        data.append({"question": f"When {number}?", "answer": answer, "context": context, "supporting_facts": facts})
    return data


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    for name, data in (("qa_1", squad()), ("qa_2", hotpot())):
        (folder / f"{name}.json").write_text(json.dumps(data))
    return {name: folder / f"{name}.json" for name in ("qa_1", "qa_2")}


def needles(sample):
    """Kind, name and value of every needle in the context."""
    return NEEDLE.findall(sample.input)


def test_the_thirteen_tasks_and_the_grid_are_there():
    assert len(RULER) == 13
    assert list(TASKS) == [*RULER, "needle"]
    assert all(task.name == name for name, task in TASKS.items())


@pytest.mark.parametrize("count", [count_words, subwords])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", [*NIAH, "vt", "fwe", "needle"])
def test_the_length_is_nearly_reached_and_never_exceeded(name, length, count):
    task = TASKS[name]
    # What one unit adds at most: a line of noise or a needle, else a word; of coded words, ten while ties are avoided.
    key, value = ("1a" * 18, "1a" * 18) if name == "niah_multikey_3" else ("sarcastic-photograph", "1234567")
    needle = f"One of the special magic numbers for {key} is: {value}."
    units = {
        "niah_single_1": NOISE,
        "vt": NOISE,
        "niah_multikey_2": needle,
        "niah_multikey_3": needle,
        "fwe": "abcdef " * 11,
    }
    made = 0
    for index in range(4):
        try:
            sample = task.sample(index, length, count)
        except KvsimError:
            assert (length, count) == (256, subwords)
            continue
        made += 1
        assert sample.length == count(sample.input + sample.prefix) + sample.answer_tokens
        assert length - count(units.get(name, "waistcoat-pocket,")) <= sample.length <= length, index
    assert made or name in (
        "vt",
        "niah_single_1",
        "niah_multikey_1",
        "niah_multikey_3",
        "niah_multivalue",
        "niah_multiquery",
    )


@pytest.mark.parametrize("name", RULER)
def test_the_least_length_works_and_one_less_does_not(name, files):
    task = find_task(name, files.get(name))
    for count in (count_words, subwords):
        with pytest.raises(KvsimError, match=f"{name}: length 40 is too small") as caught:
            task.sample(1, 40, count)
        least = int(re.search(r"needs at least (\d+) tokens", str(caught.value))[1])
        assert task.sample(1, least, count).length <= least
        with pytest.raises(KvsimError, match=f"at least {least} tokens, {task.answer_tokens} of them for the answer"):
            task.sample(1, least - 1, count)


@pytest.mark.parametrize("name", [*RULER, "needle"])
def test_a_sample_can_be_made_again_and_differs_from_others(name, files):
    task = find_task(name, files.get(name))
    first = task.sample(0, 1024, seed=5)
    state = random.getstate()
    random.seed(9)
    assert task.sample(0, 1024, seed=5) == first
    random.setstate(state)
    others = [task.sample(1, 1024, seed=5), task.sample(0, 1024, seed=6)]
    assert len({sample.input for sample in [first, *others]}) == 3
    assert (first.task, first.index, first.seed) == (name, 0, 5)
    assert json.loads(json.dumps(first.to_dict()))["input"] == first.input


def test_draws_stay_what_they_were():
    assert TASKS["niah_single_1"].sample(0, 512).outputs == ("7893072",)
    assert TASKS["vt"].sample(0, 512).outputs == ("AXXSR", "TRSUL", "MKWAL", "HWIZZ", "QEYDE")
    assert TASKS["cwe"].sample(0, 1024).outputs[:3] == ("arrive", "tasty", "playful")


def test_a_longer_sample_asks_for_the_same():
    for name in ("niah_multikey_1", "vt", "fwe", "needle"):
        samples = [TASKS[name].sample(4, length) for length in (512, 1024, 4096)]
        assert len({sample.outputs for sample in samples}) == 1


@pytest.mark.parametrize(
    ("name", "names", "values", "asked", "keys", "kind"),
    [
        ("niah_single_1", 1, 1, 1, "words", "numbers"),
        ("niah_single_2", 1, 1, 1, "words", "numbers"),
        ("niah_single_3", 1, 1, 1, "words", "uuids"),
        ("niah_multikey_1", 4, 1, 1, "words", "numbers"),
        ("niah_multikey_2", None, 1, 1, "words", "numbers"),
        ("niah_multikey_3", None, 1, 1, "uuids", "uuids"),
        ("niah_multivalue", 1, 4, 4, "words", "numbers"),
        ("niah_multiquery", 4, 1, 4, "words", "numbers"),
    ],
)
def test_needles(name, names, values, asked, keys, kind):
    for index in range(20):
        sample = TASKS[name].sample(index, 700)
        found = needles(sample)
        per_name = Counter(key for _, key, _ in found)
        assert set(per_name.values()) == {values}
        assert len(per_name) == names or (names is None and len(per_name) > 20)
        assert len({value for *_, value in found}) == len(found)
        assert all(re.fullmatch(KINDS[keys], key) for key in per_name)
        assert all(re.fullmatch(KINDS[kind], value) and word == kind for word, _, value in found)
        question = sample.input.splitlines()[-1]
        assert len(sample.outputs) == asked
        assert [value for _, key, value in found if f" {key} " in re.sub("[,]", " ", question)]
        assert {value for _, key, value in found if key in re.split(r"[ ,]+", question)} == set(sample.outputs)
        assert sample.input.count(sample.outputs[0]) == 1
        assert ("What are all the" in question) == (asked > 1)
        assert sample.input.startswith("Some special" if asked > 1 else f"A special magic {kind[:-1]} is hidden")
        assert sample.prefix.endswith("provided text " + ("are" if asked > 1 else "is"))
        spelled = [sample.input[start:end] for start, end in sample.needle_spans]
        assert sorted(spelled) == sorted(sample.outputs)
        others = {sample.input[start:end] for start, end in sample.distractor_spans}
        assert others == {value for *_, value in found} - set(sample.outputs)


def test_all_four_queries_are_named_in_the_order_of_the_answers():
    sample = TASKS["niah_multiquery"].sample(3, 512)
    where = {key: value for _, key, value in needles(sample)}
    named = re.search(r"magic numbers for (.*) mentioned", sample.input.splitlines()[-1])[1]
    first, second, third, fourth = re.fullmatch(r"(\S+), (\S+), (\S+), and (\S+)", named).groups()
    assert [where[key] for key in (first, second, third, fourth)] == list(sample.outputs)
    assert named in sample.prefix


def test_the_haystacks():
    noise = TASKS["niah_single_1"].sample(2, 1024)
    lines = noise.input.splitlines()[1:-1]
    assert Counter(lines)[NOISE] == len(lines) - 1
    place = next(number for number, line in enumerate(lines) if NEEDLE.fullmatch(line))
    assert noise.depth == pytest.approx(100 * place / (len(lines) - 1))
    only = TASKS["niah_multikey_3"].sample(2, 1024)
    assert all(NEEDLE.fullmatch(line) for line in only.input.splitlines()[1:-1])
    essay = TASKS["niah_multikey_1"].sample(2, 1024)
    context = essay.input.splitlines()[1]
    bare = re.sub(r" {2,}", " ", NEEDLE.sub("", context)).strip().split()
    assert bare == " ".join(prose(len(bare))).split()


def test_a_needle_in_prose_lies_between_sentences_at_its_depth():
    assert len(DEPTHS) == 40
    assert (DEPTHS[0], DEPTHS[1], DEPTHS[-1]) == (0, 3, 100)
    seen = set()
    for index in range(30):
        sample = TASKS["niah_single_2"].sample(index, 2000)
        before, after = re.split(r" ?One of the special [^.]*\. ?", sample.input.splitlines()[1])
        whole = prose(len(before.split()) + len(after.split()))
        assert " ".join(whole[: int(len(whole) * sample.depth / 100)]) == before
        assert sample.depth in DEPTHS
        seen.add(sample.depth)
    assert len(seen) > 10


def test_prose_is_alice_and_starts_again_at_its_end():
    assert prose(18)[-1] == "Alice was beginning to get very tired of sitting by her sister on"[: len(prose(18)[-1])]
    whole = " ".join(prose(100_000)).split()
    assert len(whole) == 100_000
    size = whole.index("CHAPTER", 25_000)
    while whole[size + 1] != "I.":
        size = whole.index("CHAPTER", size + 1)
    assert 26_000 < size < 27_000
    assert whole[size : 2 * size] == whole[:size]
    assert sum(len(sentence.split()) for sentence in prose(777)) == 777
    assert prose(0) == []


def test_names_and_values_never_repeat():
    for kind, pattern in KINDS.items():
        source = distinct(kind, random.Random(1))
        drawn = [next(source) for _ in range(5000)]
        assert len(set(drawn)) == 5000
        assert all(re.fullmatch(pattern, value) for value in drawn)
    assert len(single_words()) == len(set(single_words())) > 1900


@pytest.mark.parametrize("length", [290, 1500])
@pytest.mark.parametrize(("chains", "hops"), [(1, 4), (1, 2), (3, 3)])
def test_variables_are_handed_down(length, chains, hops):
    task = VariableTracking("vt", num_chains=chains, num_hops=hops)
    for index in range(10):
        sample = task.sample(index, length)
        example, text = sample.input.split("\n\nMemorize and track")
        assert example.startswith("Memorize and track")
        values = {}
        for name, source in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+) ?$", text, flags=re.MULTILINE):
            assert name not in values
            values[name] = source if source.isdigit() else values[source]
        assert len(values) == chains * (hops + 1)
        assert all(re.fullmatch("[A-Z]{5}", name) for name in values)
        value = re.search(r"assigned the value (\d{5}) in the text above", text)[1]
        assert [name for name, got in values.items() if got == value] == list(sample.outputs)
        assert [sample.input[start:end] for start, end in sample.needle_spans] == list(sample.outputs)
        assert len(sample.distractor_spans) == (chains - 1) * (hops + 1)
        assert f"{hops + 1} variables are assigned the value {value}" in sample.prefix
        noise = [line for line in text.splitlines() if line == NOISE]
        assert len(noise) > (20 if length == 1500 else 0)


def test_variable_tracking_shows_an_example_of_at_most_500_tokens():
    for length in (1000, 8000):
        sample = TASKS["vt"].sample(0, length)
        example, question = re.split(r"\n\n(?=Memorize)", sample.input)
        assert 450 < count_words(example) <= 500
        names = re.findall(r"^VAR (\w{3}) =", example, flags=re.MULTILINE)
        assert example.endswith("they are:  " + " ".join(names))
        assert not set(names) & set(re.findall(r"\w+", question))
    bare = replace(TASKS["vt"], num_fewshot=0).sample(0, 1000)
    assert bare.input.count("Memorize and track") == 1


@pytest.mark.parametrize(("length", "often", "rarely"), [(1000, 6, 1), (4095, 6, 1), (4096, 30, 3), (9000, 30, 3)])
def test_common_words_are_there_as_often_as_defined(length, often, rarely):
    sample = TASKS["cwe"].sample(0, length)
    example, lists = sample.input.split("Below is a numbered list")[1:]
    counts = []
    for text in (example, lists):
        numbers, words = zip(*re.findall(r"(\d+)\. (\S+)", text.split("Question:")[0]), strict=True)
        assert [int(number) for number in numbers] == list(range(1, len(words) + 1))
        counts.append(Counter(words))
    assert sorted(word for word, count in counts[1].items() if count == often) == sorted(sample.outputs)
    assert Counter(counts[1].values()) == {often: 10, rarely: len(counts[1]) - 10}
    assert len(counts[1]) > 100
    shown = (3, 1, 20) if length < 4096 else (10, 3, 40)
    assert Counter(counts[0].values()) == {shown[0]: 10, shown[1]: shown[2] - 10}
    answers = example.rsplit("are:", 1)[1]
    assert all(counts[0][word] == shown[0] for word in re.findall(r"\d+\. (\S+)", answers))
    assert length - 6 < sample.length <= length


def test_common_words_never_run_out():
    sample = CommonWords("cwe", num_fewshot=0).sample(0, 30_000)
    counts = Counter(re.findall(r"\d+\. (\S+)", sample.input))
    assert len(counts) > 4000
    assert Counter(counts.values()) == {30: 10, 3: len(counts) - 10}


@pytest.mark.parametrize("length", [*LENGTHS, 300, 333])
def test_frequencies_of_coded_words_follow_the_zeta_distribution(length):
    sample = TASKS["fwe"].sample(0, length)
    text = sample.input.split("coded words. ", 1)[1].split("\nQuestion")[0].split()
    counts = Counter(text)
    ranked = [word for word, _ in counts.most_common()]
    assert ranked[0] == "..."
    assert set(ranked[1:4]) == set(sample.outputs)
    assert all(re.fullmatch("[a-z]{6}", word) for word in ranked[1:])
    words = next(n for n in range(20, 10_000) if int(n / (3.141592653589793**2 / 6)) == counts["..."])
    sizes = {int(n * rank**-2 / 1.6449340668482264) for n in (words, words + 1) for rank in range(1, 2)}
    assert counts["..."] in sizes
    for rank, word in enumerate(sample.outputs, 2):
        assert counts[word] in {int(n * rank**-2 / 1.6449340668482264) for n in (words, words + 1)}
    assert len(ranked) <= max(4, (length - 50) // 50)


def test_the_three_most_frequent_words_are_never_in_doubt():
    fifth = set()
    for length in range(560, 1200, 7):
        sample = TASKS["fwe"].sample(0, length, len)
        counts = Counter(sample.input.split("coded words. ", 1)[1].split("\nQuestion")[0].split())
        ranked = counts.most_common()
        assert {word for word, _ in ranked[1:4]} == set(sample.outputs)
        fifth |= {count for _, count in ranked[4:5]}
        assert all(count > ranked[4][1] for _, count in ranked[1:4] if len(ranked) > 4)
    assert fifth >= {1, 2}


def test_frequent_words_have_another_distribution_on_request():
    sample = FrequentWords("fwe", alpha=1.5).sample(0, 2000)
    counts = Counter(sample.input.split("coded words. ", 1)[1].split("\nQuestion")[0].split())
    assert counts["..."] / counts[sample.outputs[0]] == pytest.approx(2**1.5, rel=0.05)


def documents(sample):
    found = re.findall(r"Document (\d+):\n(.*?)\n\n(?=Document|Answer)", sample.input, flags=re.DOTALL)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [text for _, text in found]


def test_squad_documents_of_the_article_come_first(files):
    task = find_task("qa_1", files["qa_1"])
    for index in (0, 9, 39):
        few, many = task.sample(index, 300), task.sample(index, 1000)
        number, place = divmod(index, 8)
        for sample in (few, many):
            assert sample.input.endswith(f"Question: What is the seat of {number}x{place}?")
            assert sample.outputs == (f"T{number}x{place} town", f"T{number}x{place}")
            assert {sample.input[a:b] for a, b in sample.needle_spans} == set(sample.outputs)
            held = documents(sample)
            assert sample.depth == 100 * held.index(next(d for d in held if sample.outputs[0] in d)) / len(held)
        assert 1 < len(documents(few)) <= 8
        assert all(text.startswith(f"Article {number},") for text in documents(few))
        assert sum(text.startswith(f"Article {number},") for text in documents(many)) == 8
        assert 1000 - 40 <= many.length <= 1000
    everything = task.sample(0, 100_000)
    assert len(documents(everything)) == 40
    assert everything.length < 3000
    places = [task.sample(index, 1000).depth for index in range(8)]
    assert len(set(places)) > 3


def test_hotpotqa_keeps_the_ten_documents_of_a_question(files):
    task = find_task("qa_2", files["qa_2"])
    for index in (0, 5):
        sample = task.sample(index, 300)
        held = documents(sample)
        assert len(held) > 10
        assert {f"Page {index}-{place}" for place in range(10)} <= {text.split("\n")[0] for text in held}
        assert sample.outputs == (str(1900 + index),)
        assert [sample.input[a:b] for a, b in sample.needle_spans] == [str(1900 + index)] * 2
    assert task.sample(1, 300).needle_spans == ()
    assert task.sample(1, 300).outputs == ("yes",)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qa_1", "{", "not JSON"),
        ("qa_1", "[]", "the file has no list 'data'"),
        ("qa_1", {"data": [{"paragraphs": 3}]}, r"data\[0\] has no list 'paragraphs'"),
        ("qa_1", {"data": [{"paragraphs": [{"qas": []}]}]}, r"data\[0\].paragraphs\[0\] has no text 'context'"),
        (
            "qa_1",
            {"data": [{"paragraphs": [{"context": "a", "qas": [{"question": "b", "answers": [{"text": "a"}]}]}]}]},
            r"data\[0\].paragraphs\[0\].qas\[0\].answers\[0\] has no number 'answer_start'",
        ),
        (
            "qa_1",
            {"data": [{"paragraphs": [{"context": "a", "qas": [{"question": "b", "answers": []}]}]}]},
            r"qas\[0\] has no answers",
        ),
        ("qa_1", {"data": []}, "has no question with an answer"),
        ("qa_2", {"data": []}, "the file has no list 'questions'"),
        ("qa_2", [7], r"questions\[0\] has no list 'context'"),
        ("qa_2", [{"context": [["a"]]}], r"questions\[0\].context\[0\] is not a title with a list of sentences"),
        ("qa_2", [{"context": [["a", ["b"]]], "question": "c"}], r"questions\[0\] has no text 'answer'"),
        (
            "qa_2",
            [{"context": [["a", ["b"]]], "question": "c", "answer": "b", "supporting_facts": [3]}],
            r"supporting_facts\[0\] does not start with a title",
        ),
    ],
)
def test_a_malformed_file_is_named_with_the_entry_at_fault(tmp_path, name, change, message):
    file = tmp_path / "questions.json"
    file.write_text(change if isinstance(change, str) else json.dumps(change))
    with pytest.raises(KvsimError, match=message) as caught:
        find_task(name, file).sample(0, 512)
    assert str(caught.value).startswith(str(file))


def test_errors_name_what_is_valid(tmp_path, files):
    with pytest.raises(
        KvsimError, match=r"unknown task 'niah_single'; did you mean 'niah_single_.*valid: cwe, fwe, needle"
    ):
        find_task("niah_single")
    with pytest.raises(KvsimError, match=r"vt takes no file of questions \(those that do: qa_1, qa_2\)"):
        find_task("vt", files["qa_1"])
    with pytest.raises(KvsimError, match=r"qa_2 needs questions: a JSON file of HotpotQA"):
        TASKS["qa_2"].sample(0, 1024)
    with pytest.raises(KvsimError, match=r"none.json: No such file"):
        find_task("qa_1", tmp_path / "none.json").sample(0, 1024)
    with pytest.raises(KvsimError, match="has 40 questions, so none with index 40"):
        find_task("qa_1", files["qa_1"]).sample(40, 1024)
    with pytest.raises(KvsimError, match="vt: the index of a sample is at least 0, got -1"):
        TASKS["vt"].sample(-1, 1024)
    with pytest.raises(KvsimError, match="count_tokens does not grow"):
        TASKS["niah_single_1"].sample(0, 256, lambda text: 1)


@pytest.mark.parametrize("each", [1, 3, 17])
def test_filling_finds_the_most_that_fits(each):
    asked = []

    def tokens(units):
        asked.append(units)
        return 10 + each * units + units % 2

    for limit in (12, 13, 14, 100, 5000, 123_456):
        asked.clear()
        best = fill(tokens, limit)
        if 10 + each + 1 > limit:
            assert best is None
        else:
            assert tokens(best) <= limit < tokens(best + 1)
            assert len(asked) < 30
    assert fill(tokens, 10**6, 1, 5) == 5
    assert fill(tokens, 10, 1, 5) is None


def test_the_base_prompt_is_input_and_prefix():
    sample = TASKS["niah_single_1"].sample(0, 512)
    assert isinstance(sample, Sample)
    assert sample.prompt == sample.input + sample.prefix
    assert sample.prefix.startswith(" The special magic number for ")


def test_the_tasks_need_no_model_library():
    code = "import sys, kvsim.tasks, kvsim.paired; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def run(*words, code=0):
    result = CliRunner().invoke(app, ["tasks", *(str(word) for word in words)])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


def test_the_command_lists_tasks_and_prints_samples(files, monkeypatch):
    listed = run().stdout
    assert all(name in listed for name in TASKS)
    assert max(map(len, listed.splitlines())) <= 100
    assert [entry["name"] for entry in json.loads(run("--json").stdout)["tasks"]] == list(TASKS)
    printed = run("niah_multikey_1", "--length", 512, "--seed", 3).stdout
    sample = TASKS["niah_multikey_1"].sample(0, 512, seed=3)
    assert sample.input in printed
    assert f"output: {sample.outputs[0]}" in printed
    assert "sample 0, seed 3: 512 of 512 words (no --tokenizer), 128 of them for the answer, depth" in printed
    read = json.loads(run("qa_1", "--file", files["qa_1"], "--index", 2, "--json").stdout)
    assert read["outputs"] == ["T0x2 town", "T0x2"]
    assert read["tokens"] == "words"
    assert "too small" in run("cwe", "--length", 256, code=2).stderr
    assert "valid: cwe" in run("nothing", code=2).stderr


def test_the_command_counts_with_a_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[A-Za-z]{1,4}|."), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    read = json.loads(run("niah_single_2", "--length", 700, "--tokenizer", tmp_path, "--json").stdout)
    pieces = len(re.findall(r"[A-Za-z]{1,4}|.|\n", read["input"] + read["prefix"]))
    assert read["length"] == pieces + 128
    assert 690 <= read["length"] <= 700
    assert "no such model directory" in run("vt", "--tokenizer", tmp_path / "none", code=2).stderr
