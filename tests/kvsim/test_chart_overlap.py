"""How much of one policy's sets another has: the chart, and the oracles that a comparison needs."""

import numpy as np
import pytest
from cases import SAMPLES
from specs import checked, series

import kvsim
from kvsim import charts
from kvsim.anatomy import dissect
from kvsim.errors import KvsimError

MULTI, LONG = (SAMPLES / f"smollm2-{name}" for name in ("multineedle-256", "long-64"))
POLICIES = ["ema:0.8/group=layer", "tova", "ema:0.95/group=layer"]


def test_overlap_is_the_jaccard_index_of_the_sets():
    trace = kvsim.open_trace(MULTI)
    results = kvsim.replay_many(trace, POLICIES)
    chart = charts.jaccard(dissect(results, trace))
    checked(chart)
    drawn = series(chart, "value")
    assert list(drawn) == POLICIES[1:]
    for result in results[1:]:
        for step in (1, 11, trace.num_steps):
            pairs = [[set(one.retained(step, g).tolist()) for one in (results[0], result)] for g in range(30)]
            mean = np.mean([len(a & b) / len(a | b) for a, b in pairs])
            name = result.policy.replace("/budget=10%", "")
            assert drawn[name][step - 1] == pytest.approx(mean, rel=1e-5)
    title = chart.to_dict()["title"]
    assert title["text"] == "Overlap with ema:0.8/group=layer/budget=10%"
    assert title["subtitle"][1] == "irreversible; open loop; mean over retention groups; 1: the same sets"


def test_several_recordings_have_lines_of_their_own():
    def one(trace, *policies, shadow=False):
        return dissect(kvsim.replay_many(trace, policies, shadow=shadow), kvsim.open_trace(trace))

    both = [one(trace, "ema:0.8", "single", shadow=True) for trace in (MULTI, LONG)]
    chart = charts.jaccard(both)
    assert list(series(chart, "value")) == ["single, smollm2-multineedle-256", "single, smollm2-long-64"]
    assert chart.to_dict()["title"]["subtitle"][1].startswith("shadow mode: nothing is evicted; open loop")
    with pytest.raises(KvsimError, match="in one mode; these comparisons have several"):
        charts.jaccard([both[0], one(LONG, "ema:0.8", "single")])
    with pytest.raises(KvsimError, match="with one other"):
        charts.jaccard([both[0], one(LONG, "single", "ema:0.8", shadow=True)])
    with pytest.raises(KvsimError, match="no comparison of policies"):
        charts.jaccard([])
