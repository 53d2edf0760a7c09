"""Files of evaluations, the paper's Table 3 from them, and the needle grid."""

import polars as pl
import pytest

from kvsim import charts, parse
from kvsim.errors import KvsimError
from kvsim.evaluations import (
    EVAL_KEY,
    cells,
    comparisons,
    full_refresh,
    key_of,
    read_evaluations,
    write_evaluations,
)
from kvsim.paired import against_baseline, paired
from kvsim.version import __version__

FULL, EMA, LAZY = "full", "ema:0.8/budget=10%", "ema:0.8/refresh=4/budget=10%"


def row(policy=FULL, score=100.0, *, task="niah_single_1", index=0, **changes):
    made = {
        "model_hash": "m",
        "task": task,
        "length": 512,
        "seed": 0,
        "index": index,
        "question_hash": f"{task} {index}",
        "policy": policy,
        "depth": 25.0,
        "answer_tokens": 8,
        "version": __version__,
        "chat": False,
        "score": score,
        "answer": "text",
        "prompt_length": 500,
        "steps": 8,
        "kept_mass": 0.5,
        "survival": None,
        "near_ties": 0,
    }
    return made | changes


def rows_of(scores, task="niah_single_1"):
    return [row(policy, s, task=task, index=i) for policy, own in scores.items() for i, s in enumerate(own)]


# Files


def test_a_file_gives_back_what_was_written(tmp_path):
    out = tmp_path / "rows.parquet"
    rows = [row(index=index, depth=depth) for index, depth in enumerate([None, 100 / 3])]
    write_evaluations(rows, out)
    assert read_evaluations(out) == rows
    assert read_evaluations(tmp_path / "none.parquet") == []
    assert [key_of(one) for one in rows] == [tuple(one[name] for name in EVAL_KEY) for one in rows]
    # columns of the reader's own survive
    more = [one | {"note": None, "mine": 3} for one in rows]
    write_evaluations(more, out)
    assert read_evaluations(out) == more


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path):
    out = tmp_path / "rows.parquet"
    write_evaluations([row()], out)
    (tmp_path / "file").write_text("")
    with pytest.raises(KvsimError, match="cannot be written"):
        write_evaluations([row()], tmp_path / "file" / "rows.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "rows.parquet"]


@pytest.mark.parametrize("name", row())
def test_every_column_is_needed_in_its_type(tmp_path, name):
    out = tmp_path / "rows.parquet"
    frame = pl.DataFrame([row(survival=0.5)])
    frame.drop(name).write_parquet(out)
    with pytest.raises(KvsimError, match=rf"^{out}: is not a file of kvsim evaluations: it has no column '{name}'"):
        read_evaluations(out)
    kind = pl.Int64 if frame.schema[name] == pl.String else pl.String
    frame.with_columns(pl.lit(None, kind).alias(name)).write_parquet(out)
    with pytest.raises(KvsimError, match=f"no column '{name}'"):
        read_evaluations(out)
    if name not in ("kept_mass", "survival", "depth"):
        frame.with_columns(pl.lit(None, frame.schema[name]).alias(name)).write_parquet(out)
        with pytest.raises(KvsimError, match=f"no column '{name}'"):
            read_evaluations(out)


def test_foreign_files(tmp_path):
    out = tmp_path / "rows.parquet"
    for content in (b"", b"PAR1 and more"):
        out.write_bytes(content)
        with pytest.raises(KvsimError, match="is not a whole Parquet file"):
            read_evaluations(out)
    with pytest.raises(KvsimError, match="cannot be read"):
        read_evaluations(tmp_path)
    for value in (float("nan"), float("inf")):
        pl.DataFrame([row(score=value, survival=0.5)]).write_parquet(out)
        with pytest.raises(KvsimError, match="'score' has a number that is none"):
            read_evaluations(out)


# The table


def test_full_refresh():
    for policy in (FULL, "tova", "ema:0.8", "ema:0.8/refresh=1", "snapkv:16"):
        assert full_refresh(parse(policy)) is None
    for policy in (LAZY, "ema:0.8/refresh=first/budget=10%", "inertiakv-lazy:4/budget=10%", "score-free/budget=10%"):
        assert str(full_refresh(parse(policy))) == EMA


def test_every_policy_beside_the_full_cache_and_full_refresh():
    scores = {FULL: [100, 100, 0, 100], EMA: [100, 0, 0, 100], LAZY: [0, 0, 0, 100]}
    full, ema, lazy = comparisons(rows_of(scores))
    assert [one["policy"] for one in (full, ema, lazy)] == [FULL, EMA, LAZY]
    assert [one["score"] for one in (full, ema, lazy)] == [75, 50, 25]
    assert {one["samples"] for one in (full, ema, lazy)} == {4}
    for line, name, baseline in ((ema, "full", FULL), (lazy, "full", FULL), (lazy, "refresh", EMA)):
        expected = paired(scores[line["policy"]], scores[baseline])
        for part in ("delta", "low", "high", "p", "test"):
            assert line[f"{name}_{part}"] == getattr(expected, part)
    assert lazy["refresh_delta"] == -25
    for line, name in ((full, "full"), (full, "refresh"), (ema, "refresh")):
        assert {line[f"{name}_{part}"] for part in ("delta", "low", "high", "p", "test")} == {None}


def test_samples_are_paired_whatever_the_order_of_the_rows():
    scores = {FULL: [100, 0, 100, 0], EMA: [100, 0, 100, 0]}
    rows = rows_of(scores)
    mixed = [rows[at] for at in (3, 4, 0, 7, 6, 1, 5, 2)]
    expected = {line["policy"]: line for line in comparisons(rows)}
    assert {line["policy"]: line for line in comparisons(mixed)} == expected
    assert expected[EMA]["full_delta"] == 0
    # all differences are zero, so there is no spread
    assert expected[EMA]["full_low"] is None


def test_tasks_and_their_average():
    one = {FULL: [100, 100], EMA: [100, 0]}
    two = {FULL: [80, 60, 40, 20], EMA: [80, 60, 40, 10]}
    rows = [*rows_of(one), *rows_of(two, "vt"), *(r | {"length": 1024} for r in rows_of(one))]
    table = comparisons(rows)
    assert [(line["length"], line["policy"], line["task"]) for line in table] == [
        *((512, policy, task) for policy in (FULL, EMA) for task in ("niah_single_1", "vt", "Avg")),
        *((1024, policy, "niah_single_1") for policy in (FULL, EMA)),
    ]
    average = table[5]
    assert average["samples"] == 6
    assert average["score"] == pytest.approx((50 + 47.5) / 2)
    assert average["full_delta"] == pytest.approx((-50 - 2.5) / 2)
    scores = {FULL: {"niah_single_1": one[FULL], "vt": two[FULL]}, EMA: {"niah_single_1": one[EMA], "vt": two[EMA]}}
    expected = against_baseline(scores, FULL)[-1]
    assert [average[f"full_{part}"] for part in ("low", "high", "p")] == [expected[p] for p in ("low", "high", "p")]
    assert average["refresh_delta"] is None


def test_means_leave_out_what_is_undefined():
    rows = [row(index=i, survival=value, kept_mass=i / 4) for i, value in enumerate([1.0, None, 0.5])]
    (line,) = comparisons(rows)
    assert (line["survival"], line["kept_mass"]) == (0.75, 0.25)
    assert comparisons([row()])[0]["survival"] is None
    assert comparisons([]) == []


def test_what_is_not_one_table():
    rows = rows_of({FULL: [100, 0], EMA: [0, 0]})
    for name, value in (("model_hash", "other"), ("version", "0.0.1"), ("chat", True)):
        with pytest.raises(KvsimError, match=f"of one {name} can be compared"):
            comparisons([*rows, row("tova", **{name: value})])
    with pytest.raises(KvsimError, match="full on niah_single_1: has sample 0 twice"):
        comparisons([*rows, row(score=0.0)])
    with pytest.raises(KvsimError, match=r"ema:0.8/budget=10% on niah_single_1: does not have the same samples"):
        comparisons(rows[:3])
    with pytest.raises(KvsimError, match=r"ema:0.8/budget=10% on vt: does not have"):
        comparisons([*rows, row(EMA, task="vt")])


# The grid


def test_cells_of_the_grid():
    rows = [
        row(FULL, score, index=index, length=length, depth=depth, task="needle")
        for length, depth, scores in ((512, 0.0, (100, 50)), (512, 100.0, (0, 20)), (900, 0.0, (10, 10)))
        for index, score in enumerate(scores)
    ] + [row(EMA, 40, depth=0.0, task="needle")]
    found = cells(rows)
    assert [tuple(cell.values()) for cell in found] == [
        (FULL, 512, 0.0, 2, 0.75),
        (FULL, 512, 100.0, 2, 0.1),
        (FULL, 900, 0.0, 2, 0.1),
        (EMA, 512, 0.0, 1, 0.4),
    ]
    for name in ("model_hash", "version", "chat", "answer_tokens"):
        with pytest.raises(KvsimError, match=f"of one {name} can be compared"):
            cells([*rows, row(**{name: "other"})])
    drawn = charts.needle_grid(found, "rouge_l_f").to_dict()
    assert len(drawn["vconcat"]) == 2
