"""The page of scorers: the numbers of `kvsim.spectrum`, what is left out and why, and the view from the URL."""

from exploring import LONG, MULTI, errors, open_page, said

import kvsim
from kvsim.spectrum import spectrum


def test_the_table_is_the_librarys_overview():
    app = open_page("scorers", trace=MULTI, every="3", scorers=["keydiff", "knorm"], scorers_layer="4")
    assert not errors(app)
    steps = range(1, kvsim.open_trace(MULTI).num_steps + 1, 3)
    found = spectrum(MULTI, budget="10%", steps=steps)
    assert app.multiselect(key="scorers").options == list(dict.fromkeys(row["scorer"] for row in found.rows))
    assert app.multiselect(key="scorers").value == ["keydiff", "knorm"]
    table = app.dataframe[-1].value
    want = [row for row in found.overview(4) if row["scorer"] in ("keydiff", "knorm")]
    assert table["scorer"].tolist() == [row["scorer"] for row in want]
    assert table["rho, layer 4"].tolist() == [row["spearman_layer"] for row in want]
    assert table["Jaccard, layer mean"].tolist() == [row["top_jaccard_layer_mean"] for row in want]
    assert "--scorer keydiff --scorer knorm --every 3 --layer 4" in app.code[0].value


def test_scorers_that_a_recording_cannot_give_are_named_with_the_reason():
    app = open_page("scorers", trace=LONG)
    assert not errors(app)
    left = app.dataframe[0].value
    found = spectrum(LONG, budget="10%")
    assert dict(zip(left["scorer"], left["why"], strict=True)) == found.left_out
    assert any("over 30 layers" in text or "30 layers" in text for text in said(app))
    assert app.code[0].value.startswith("kvsim chart spectrum --trace ")
    app.multiselect(key="scorers").set_value([]).run()
    assert [one.value for one in app.info] == ["Choose at least one scorer."]
    assert not errors(app)
