"""The page of heads: the numbers of the library, flat maps said to be flat, and the view from the URL."""

import pytest
from exploring import LONG, MULTI, errors, open_page, said
from kvsim_explorer.pages.heads import examples
from making import Recording

import kvsim
from kvsim.heads import by_head

UNEQUAL = "nonuniform/score=knorm/group=head"


def found(policies, trace=MULTI, shadow=False):
    results = kvsim.replay_many(trace, policies, budget="10%", shadow=shadow, shadow_churn=False)
    return by_head(results, kvsim.open_trace(trace))


@pytest.mark.parametrize("shadow", [False, True])
def test_the_tables_are_the_librarys(shadow):
    app = open_page(
        "heads", trace=MULTI, policy=UNEQUAL, others="tova", one_step="true", heads_step="7", shadow=str(shadow)
    )
    assert not errors(app)
    assert app.slider(key="heads_step").value == 7
    want = found([UNEQUAL, "tova"], shadow=shadow)
    kept, parts = app.dataframe[0].value, app.dataframe[1].value
    assert kept["kept_fraction"].tolist() == [row["kept_fraction"] for row in want.rows(7)]
    assert kept["kept_mass"].tolist() == [row["kept_mass"] for row in want.rows(7)]
    assert parts["attention"].tolist() == [row["attention"] for row in want.part_rows(7)]
    assert "--step 7" in app.code[0].value
    app.toggle(key="one_step").set_value(False).run()
    assert app.dataframe[0].value["kept_mass"].tolist() == [row["kept_mass"] for row in want.rows()]
    assert "--step" not in app.code[0].value


def test_flat_maps_are_said_to_be_and_others_are_offered():
    app = open_page("heads", trace=MULTI, policy="ema:0.8", others="tova")
    (note,) = [one.value for one in app.info]
    assert note.startswith("`ema:0.8`, `tova` keep as much in every layer and head")
    app.button(key=f"add {UNEQUAL}").click().run()
    assert not errors(app)
    assert app.text_area(key="others").value == f"tova\n{UNEQUAL}"
    assert app.info[0].value.startswith("`ema:0.8`, `tova` keep")
    assert {UNEQUAL + "/budget=10%"} < set(app.dataframe[0].value["policy"])
    alone = open_page("heads", trace=MULTI, policy=UNEQUAL, others="")
    assert not alone.info


def test_a_policy_that_cannot_run_is_named_and_the_others_shown():
    app = open_page("heads", trace=LONG, policy="h2o", others="tova")
    (message,) = errors(app)
    assert message.startswith("h2o is left out: ")
    assert "scores" in message
    assert set(app.dataframe[0].value["policy"]) == {"tova/budget=10%"}
    assert app.info[0].value.startswith("This recording holds head means")
    assert any("first 4 positions" in text for text in said(app))


@pytest.mark.parametrize("capture", ["heads", "scores", "qk"])
def test_every_policy_that_is_offered_runs(tmp_path, capture):
    trace = kvsim.open_trace(Recording(prompt=40).write(tmp_path / "t", capture))
    bare = kvsim.open_trace(Recording(prompt=40).write(tmp_path / "bare", capture, []))
    for one in (trace, bare):
        offered = examples(one, 8)
        assert offered
        for result in kvsim.replay_many(one, offered, budget=8, shadow_churn=False):
            assert len(set(result.plan.budgets.tolist())) > 1, result.policy
