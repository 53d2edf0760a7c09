"""Scores as RULER's, ROUGE-L by hand, the needle grid, and paired comparisons."""

import itertools

import numpy as np
import pytest
import scipy.stats

from kvsim.errors import KvsimError
from kvsim.paired import against_baseline, paired
from kvsim.tasks import Sample, count_words, grid, grid_table, score, task_score
from kvsim.tasks.rouge import rouge_l
from kvsim.tasks.scoring import postprocess, string_match_all, string_match_part


def asked(*outputs, metric="all"):
    return Sample("question", " prefix", outputs, metric=metric)


def test_string_matches():
    assert string_match_all("It is ALPHA, then beta.", ["alpha", "Beta", "gamma", "delta"]) == 50
    assert string_match_all("1234567", ["234"]) == 100
    assert string_match_all("", ["a"]) == 0
    assert string_match_part("it is paris", ["London", "Paris"]) == 100
    assert string_match_part("it is rome", ["London", "Paris"]) == 0


def test_answers_are_cleaned_before_they_are_scored():
    assert postprocess("  a\x00b\tc\x1f \n") == "a\nb\nc"
    assert score("one\x07two", asked("onetwo")) == 0
    assert score(" 12\n34 ", asked("12", "34", "56")) == pytest.approx(200 / 3)
    assert score("the town of Ely", asked("ely", "Bath", metric="part")) == 100
    assert score("the cat sat", asked("the cat sat down", metric="rouge_l")) == pytest.approx(600 / 7)


def test_a_task_is_the_mean_rounded_to_two_decimals():
    assert task_score([100.0, 0.0, 0.0]) == 33.33
    assert task_score([50.0]) == 50.0
    with pytest.raises(KvsimError, match="no score"):
        task_score([])


@pytest.mark.parametrize(
    ("said", "wanted", "precision", "recall", "f"),
    [
        ("police kill the gunman", "police killed the gunman", 3 / 4, 3 / 4, 3 / 4),
        ("the gunman kill police", "police killed the gunman", 2 / 4, 2 / 4, 2 / 4),
        ("A b, C!", "a-b c d e f", 3 / 3, 3 / 6, 2 / 3),
        ("x a y b z c", "a b c", 3 / 6, 3 / 3, 2 / 3),
        ("c b a", "a b c", 1 / 3, 1 / 3, 1 / 3),
        ("nothing", "a b c", 0, 0, 0),
        ("", "a", 0, 0, 0),
        ("a", "", 0, 0, 0),
        ("Ärger über_alles", "ärger ÜBER alles", 1, 1, 1),
    ],
)
def test_rouge_l_by_hand(said, wanted, precision, recall, f):
    found = rouge_l(said, wanted)
    assert (found.precision, found.recall, found.f) == pytest.approx((precision, recall, f))


def common(a, b):
    """Length of the longest common subsequence, by trying all."""
    for size in range(min(len(a), len(b)), 0, -1):
        if set(itertools.combinations(a, size)) & set(itertools.combinations(b, size)):
            return size
    return 0


def test_rouge_l_against_all_subsequences():
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b = (list(rng.choice(list("abcd"), rng.integers(1, 9))) for _ in range(2))
        longest = common(a, b)
        found = rouge_l(" ".join(a), " ".join(b))
        assert (found.precision, found.recall) == pytest.approx((longest / len(a), longest / len(b)))


def test_a_grid_hides_the_same_needle_at_every_length_and_depth():
    depths = [0, 12.5, 50, 100]
    cells = list(grid([300, 600], depths, samples=3, seed=2))
    assert [(cell.length, cell.depth) for cell in cells] == [(n, d) for n in (300, 600) for d in depths]
    for cell in cells:
        assert [sample.outputs for sample in cell.samples] == [sample.outputs for sample in cells[0].samples]
        for sample in cell.samples:
            assert sample.depth == cell.depth
            assert cell.length - 2 <= sample.length <= cell.length
            ((start, end),) = sample.needle_spans
            assert sample.input[start:end] == sample.outputs[0]
            assert sample.input[start - len(sample.prefix) - 1 : start] in (
                sample.prefix + " ",
                f"\n{sample.prefix[1:]} ",
            )
            context = sample.input.splitlines()[1]
            before = count_words(context[: context.index(sample.prefix.strip())])
            assert 100 * before / count_words(context) == pytest.approx(cell.depth, abs=25)
    assert len({sample.outputs for sample in cells[0].samples}) == 3
    assert cells[0].samples[0].input.splitlines()[1].startswith("The best thing to do in")
    assert cells[3].samples[0].input.splitlines()[1].endswith("day.")


def test_a_grid_is_scored_by_rouge_l():
    cells = list(grid([300], [0, 100], samples=2))
    words = cells[0].samples[1].outputs[0].split()
    half = " ".join(words[: len(words) // 2])
    rows = grid_table(cells, [[cells[0].samples[0].outputs[0], half], ["?", ""]])
    recall = (len(words) // 2) / len(words)
    assert rows[0] == {
        "length": 300,
        "depth": 0.0,
        "samples": 2,
        "rouge_l_f": pytest.approx((1 + 2 * recall / (1 + recall)) / 2),
    }
    assert rows[1]["rouge_l_f"] == 0
    with pytest.raises(KvsimError, match="one prediction for each sample"):
        grid_table(cells, [["a", "b"], ["c"]])
    for lengths, depths in (([], [1]), ([300], [])):
        with pytest.raises(KvsimError, match="at least one"):
            list(grid(lengths, depths))
    with pytest.raises(KvsimError, match="from 0 to 100, got 101"):
        list(grid([300], [101]))
    with pytest.raises(KvsimError, match="too small"):
        list(grid([20], [50]))


def test_mcnemar_by_hand():
    baseline = [100.0] * 10 + [0.0] * 10
    scores = [0.0] + [100.0] * 9 + [100.0] * 7 + [0.0] * 3
    found = paired(scores, baseline)
    assert (found.better, found.worse, found.test) == (7, 1, "mcnemar")
    assert found.p == pytest.approx(2 * (1 + 8) / 2**8)
    assert (found.baseline, found.score, found.delta) == (50, 80, 30)
    assert found.low < 30 < found.high


def test_a_permutation_by_hand():
    found = paired([3.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    assert (found.test, found.p, found.delta) == ("permutation", 2 / 8, 2.0)
    # Signs of 2, 1, -1: sums 2, 0, 4, 2 and their negatives; six of eight are as large as the 2 observed.
    assert paired([3.0, 2.0, 0.0], [1.0, 1.0, 1.0]).p == 6 / 8
    # A tie adds nothing.
    assert paired([3.0, 2.0, 4.0, 7.0], [1.0, 1.0, 1.0, 7.0]).p == 2 / 8


def test_many_samples_are_drawn_and_agree_with_scipy():
    rng = np.random.default_rng(3)
    theirs = rng.uniform(0, 100, 60)
    ours = theirs + rng.normal(1, 5, 60)
    found = paired(ours, theirs)
    other = scipy.stats.permutation_test(
        (ours - theirs,), np.mean, permutation_type="samples", n_resamples=10_000, rng=np.random.default_rng(1)
    )
    assert found.p == pytest.approx(other.pvalue, abs=0.02)
    interval = scipy.stats.bootstrap(
        (ours - theirs,), np.mean, method="percentile", n_resamples=10_000, rng=np.random.default_rng(2)
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=0.1)
    assert paired(ours, theirs) == found
    assert paired(ours, theirs, seed=1) != found
    assert paired(theirs + 1e-3 * (ours - theirs), theirs).p == pytest.approx(found.p, abs=0.02)


def test_the_test_keeps_its_level():
    rng = np.random.default_rng(0)
    small = [paired(*rng.uniform(0, 100, (2, 12)), resamples=200).p <= 0.05 for _ in range(300)]
    assert 0.02 < np.mean(small) < 0.09


def test_one_sample_and_equal_scores_say_nothing():
    one = paired([100.0], [0.0])
    assert (one.delta, one.low, one.high, one.p) == (100, None, None, 1.0)
    same = paired([100.0, 0.0, 0.0], [100.0, 0.0, 0.0])
    assert (same.delta, same.low, same.high, same.p) == (0, None, None, 1.0)
    assert paired([40.0, 60.0], [40.0, 60.0]).p == 1.0
    every = paired([100.0] * 8, [0.0] * 8)
    assert (every.delta, every.low, every.p) == (100, None, 2 / 2**8)
    assert paired([1, 0, 1], [1, 1, 1], full=1).test == "mcnemar"


@pytest.mark.parametrize(
    ("scores", "baseline", "message"),
    [
        ([], [], "no samples"),
        ([1.0], [1.0, 2.0], "one length"),
        ([[1.0]], [[1.0]], "two lists"),
        ([float("nan")], [1.0], "finite"),
    ],
)
def test_scores_that_cannot_be_compared(scores, baseline, message):
    with pytest.raises(KvsimError, match=message):
        paired(scores, baseline)


def test_the_table_of_deltas():
    scores = {
        "full": {"vt": [100.0, 80.0, 60.0, 40.0], "qa_1": [0.0, 100.0]},
        "tova": {"vt": [90.0, 60.0, 60.0, 40.0], "qa_1": [0.0, 0.0]},
        "same": {"vt": [100.0, 80.0, 60.0, 40.0], "qa_1": [0.0, 100.0]},
    }
    rows = against_baseline(scores, "full")
    assert [(row["policy"], row["task"]) for row in rows] == [
        (policy, task) for policy in ("tova", "same") for task in ("vt", "qa_1", "Avg")
    ]
    assert [row["delta"] for row in rows[:3]] == [-7.5, -50.0, -28.75]
    assert [row["test"] for row in rows[:3]] == ["permutation", "mcnemar", "permutation"]
    assert rows[2]["low"] < -28.75 < rows[2]["high"] <= 0
    assert (rows[2]["samples"], rows[2]["p"]) == (6, 2 / 8)
    assert all((row["delta"], row["low"], row["high"], row["p"]) == (0, None, None, 1.0) for row in rows[3:])
    # Changes of 2, 2 and -5 in vt weigh half as much as in qa_1: signs of 2, 2, -5, 10 over 8.
    two = {"a": {"vt": [0.0] * 4, "qa_1": [0.0, 0.0]}, "b": {"vt": [2.0, 2.0, -5.0, 0.0], "qa_1": [5.0, 0.0]}}
    average = against_baseline(two, "a")[-1]
    assert average["delta"] == pytest.approx((-1 + 10) / 8)
    sums = [abs(a * 2 + b * 2 + c * 5 + d * 10) for a, b, c, d in itertools.product((1, -1), repeat=4)]
    assert average["p"] == np.mean([value >= 9 for value in sums])
    with pytest.raises(KvsimError, match=r"no scores of the baseline 'none' \(there are: full, tova, same\)"):
        against_baseline(scores, "none")
    with pytest.raises(KvsimError, match="same tasks"):
        against_baseline({"full": {"vt": [1.0]}, "tova": {"cwe": [1.0]}}, "full")
    with pytest.raises(KvsimError, match="tova on vt: paired scores must be two lists of one length"):
        against_baseline({"full": {"vt": [1.0]}, "tova": {"vt": [1.0, 2.0]}}, "full")
