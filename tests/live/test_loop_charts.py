"""Charts of fidelity, prediction and the needle grid: their numbers, and from files on the command line."""

import json

import numpy as np
import pytest
from asking import run
from specs import checked, rows_of_chart, series

from kvsim import charts
from kvsim.errors import KvsimError
from kvsim.evaluations import write_evaluations
from kvsim.fidelity import read_fidelity
from kvsim.predictions import PREDICTORS


def result(policy="ema:0.8/budget=10%", **changes):
    made = {
        "trace": "a",
        "policy": policy,
        "loop": "closed",
        "budget": 51.0,
        "jaccard_steps": [1.0, 0.9, 0.8],
        "random_steps": [1.0, 0.7, 0.5],
        "oldest_steps": [1.0, 0.8, 0.4],
        "layers": [1, 3],
        "total_variation_by_layer": [0.1, 0.25],
    }
    return made | changes


def answer(policy="ema:0.8/budget=10%", score=100.0, *, index=0, task="vt", **changes):
    made = {"task": task, "length": 512, "seed": 0, "index": index, "policy": policy, "score": score}
    return made | dict.fromkeys(PREDICTORS, 0.5) | changes


# Fidelity


def test_fidelity_draws_the_three_lines_and_the_layers():
    rows = [result(), result("tova/budget=10%", jaccard_steps=[1, 1, 0.5])]
    chart = charts.fidelity(rows)
    checked(chart)
    lines = series(chart, "value")
    assert lines["open loop"] == [1, 0.9, 0.8, 1, 1, 0.5]
    assert lines["null: the oldest goes"] == [1, 0.8, 0.4] * 2
    assert lines["null: a random one goes"] == [1, 0.7, 0.5] * 2
    layers = [table for table in rows_of_chart(chart) if "layer" in table[0]]
    assert layers[0] == [{"layer": 1, "variation": 0.1}, {"layer": 3, "variation": 0.25}]
    spec = chart.to_dict()
    titles = [panel["hconcat"][0]["title"]["text"] for panel in spec["vconcat"]]
    assert titles == ["ema:0.8", "tova"]
    assert spec["title"]["subtitle"] == [
        "a",
        "open loop against closed loop; nulls start from the run's first eviction; B = 51 tokens",
    ]


def test_several_recordings_budgets_and_loops_are_named():
    spec = charts.fidelity([result(), result("ema:0.8/budget=20%", trace="b", loop="live", budget=102)]).to_dict()
    titles = [panel["hconcat"][0]["title"]["text"] for panel in spec["vconcat"]]
    assert titles == ["ema:0.8/budget=10%, a", "ema:0.8/budget=20%, b"]
    assert spec["title"]["subtitle"][0] == "2 recordings"
    assert spec["title"]["subtitle"][1].startswith("open loop against closed loop and token by token; ")
    assert spec["title"]["subtitle"][1].endswith("B = 51, 102 tokens")


def test_long_runs_are_thinned():
    steps = np.linspace(1, 0.5, 900).tolist()
    rows = [result(f"ema:0.{i}", jaccard_steps=steps, random_steps=steps, oldest_steps=steps) for i in range(1, 9)]
    checked(charts.fidelity(rows))
    with pytest.raises(KvsimError, match="a chart holds"):
        charts.fidelity(rows * 30)


# Prediction


def test_prediction_draws_the_means_of_both_loops():
    a, b = "ema:0.8/budget=10%", "tova/budget=10%"
    rows = [
        answer(a, 100, index=0, open_kept_mass=0.8, closed_kept_mass=0.9),
        answer(a, 0, index=1, open_kept_mass=0.6, closed_kept_mass=0.7),
        answer(b, 0, index=0, open_kept_mass=0.9, closed_kept_mass=0.5),
        answer(b, 0, index=1, open_kept_mass=0.9, closed_kept_mass=0.5),
    ]
    chart = charts.prediction(rows)
    checked(chart)
    opened, closed = rows_of_chart(chart)
    assert [(point["series"], point["x"], point["y"], point["samples"]) for point in opened] == [
        ("ema:0.8", 0.7, 50, 2),
        ("tova", 0.9, 0, 2),
    ]
    assert [point["x"] for point in closed] == [0.8, 0.5]
    (panel,) = chart.to_dict()["vconcat"]
    assert [one["title"]["text"] for one in panel["hconcat"]] == ["vt at 512, open loop", "vt at 512, closed loop"]
    assert [one["title"]["subtitle"] for one in panel["hconcat"]] == [
        ["B = 10%: rho -1.00, AUC 0.00"],
        ["B = 10%: rho 1.00, AUC 1.00"],
    ]


def test_prediction_by_budget_task_and_measure():
    rows = [
        answer(f"ema:{alpha}/budget={budget}", 100 * (alpha > 0.5), task=task, open_survival=alpha)
        for task in ("vt", "fwe")
        for alpha in (0.2, 0.8)
        for budget in ("20%", "10%")
    ]
    chart = charts.prediction(rows, "survival")
    checked(chart)
    spec = chart.to_dict()
    assert len(spec["vconcat"]) == 2
    told = spec["vconcat"][1]["hconcat"][0]["title"]["subtitle"]
    assert told == ["B = 20%: rho 1.00, AUC 1.00", "B = 10%: rho 1.00, AUC 1.00"]
    assert [point["budget"] for point in rows_of_chart(chart)[0]] == ["20%", "10%"] * 2
    scale = spec["vconcat"][0]["hconcat"][0]["layer"][0]["encoding"]["size"]["scale"]
    assert scale == {"domain": ["10%", "20%"], "range": [45, 130]}
    rows = [row | {"closed_output_error": None} for row in rows]
    with pytest.raises(KvsimError, match="no row has a value"):
        charts.prediction(rows, "output_error")
    with pytest.raises(KvsimError, match="unknown measure 'mass'"):
        charts.prediction(rows, "mass")
    with pytest.raises(KvsimError, match="every sample must have a row of every policy"):
        charts.prediction([*rows, answer(index=1)])


# Files


def test_files_on_the_command_line(tmp_path):
    runs, answers, rows = tmp_path / "f.json", tmp_path / "p.jsonl", tmp_path / "e.parquet"
    runs.write_text(json.dumps({"results": [result()]}))
    answers.write_text("".join(json.dumps(answer(p)) + "\n" for p in ("tova/budget=10%", "h2o/budget=10%")))
    write_evaluations([evaluation(depth=depth, task=task) for depth in (0.0, 50.0) for task in ("needle", "vt")], rows)
    assert read_fidelity([runs, runs]) == [result()] * 2
    for kind, file, chart in (
        ("fidelity", runs, charts.fidelity([result()])),
        ("prediction", answers, charts.prediction([answer(p) for p in ("tova/budget=10%", "h2o/budget=10%")])),
        ("needle-grid", rows, None),
    ):
        printed = json.loads(run("chart", kind, file, "--json").stdout)
        assert chart is None or printed == chart.to_dict()
        out = tmp_path / f"{kind}.json"
        run("chart", kind, file, "--out", out)
        assert json.loads(out.read_text()) == printed
        assert "name one" in run("chart", kind, "--json", code=2).stderr
        assert "none.json" in run("chart", kind, tmp_path / "none.json", "--json", code=2).stderr
    cells = [row for table in printed["datasets"].values() for row in table]
    assert [(row["depth"], row["score"], row["samples"]) for row in cells] == [("0%", 0.5, 1), ("50%", 0.5, 1)]
    survival = json.loads(run("chart", "prediction", answers, "--metric", "survival", "--json").stdout)
    assert "held" in json.dumps(survival)
    assert "unknown metric 'churn'" in run("chart", "prediction", answers, "--metric", "churn", "--json", code=2).stderr


def evaluation(**changes):
    texts = dict.fromkeys(("model_hash", "question_hash", "version", "answer"), "x") | {"policy": "full"}
    numbers = dict.fromkeys(("length", "seed", "index", "answer_tokens", "prompt_length", "steps", "near_ties"), 1)
    return texts | numbers | {"score": 50.0, "kept_mass": 1.0, "survival": 1.0, "chat": False} | changes


BROKEN = {
    "is not JSON": "{",
    "it has no results": "[]",
    "has no results": json.dumps({"results": []}),
    "a result is no object": json.dumps({"results": [3]}),
    "no text 'policy'": json.dumps({"results": [result(policy=None)]}),
    "no numbers 'jaccard_steps'": json.dumps({"results": [result(jaccard_steps=[1, float("nan"), 1])]}),
    "no numbers 'layers'": json.dumps({"results": [result(layers=[])]}),
    "no numbers 'random_steps'": json.dumps({"results": [result(random_steps=["a", 1, 2])]}),
    "no numbers 'budget'": json.dumps({"results": [result(budget=None)]}),
    "are not of one length": json.dumps({"results": [result(oldest_steps=[1, 2])]}),
}


@pytest.mark.parametrize("what", BROKEN)
def test_foreign_files(tmp_path, what):
    file = tmp_path / "rows.json"
    file.write_text(BROKEN[what])
    with pytest.raises(KvsimError, match=f"^{file}: .*{what}"):
        read_fidelity([file])
    run("chart", "fidelity", file, "--json", code=2)
