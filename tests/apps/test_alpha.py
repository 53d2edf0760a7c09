"""The page of alpha: the numbers of the library, the best alpha in words, and the view from the URL."""

from exploring import LONG, MULTI, errors, open_page, said

import kvsim
from kvsim.cli.analyze.best import EDGE, best_alpha
from kvsim.intervals import best_alphas, best_alphas_by
from kvsim.tradeoff import DEFAULT_POLICIES, PARTS, decompose


def test_the_page_says_what_the_library_says():
    app = open_page("alpha", trace=MULTI, budget="25%", alpha_metric="raw_top_evicted", h="4")
    assert not errors(app)
    assert app.selectbox(key="alpha_metric").value == "raw_top_evicted"
    rows = [one.summary() for one in kvsim.replay_many(MULTI, DEFAULT_POLICIES, budget="25%", shadow_churn=False)]
    least = min(row["raw_top_evicted"] for row in rows)
    text = "\n".join(said(app))
    assert f"Raw top-B that is not retained of 25 rules, from {least:.3f} " in text
    for best in best_alphas_by(rows, "raw_top_evicted"):
        name = best["policy"].replace("/budget=25%", "")
        assert f"- `{name}`: **{best_alpha(best['best'], best['alphas'])}**, with {best['value']:.3f}" in text
    assert "where less is better" in text
    losses = decompose(MULTI, DEFAULT_POLICIES, budget="25%", h=4)
    total = min(row.total for row in losses)
    assert f"the least total is {total:.4f}" in text
    table = next(one.value for one in app.dataframe if "layer" in one.value.columns and "h" not in one.value.columns)
    for best, (_, shown) in zip(best_alphas(losses), table.iterrows(), strict=True):
        assert [shown[part] for part in PARTS] == [best_alpha(best[part], best["alphas"]) for part in PARTS]
    assert EDGE in text


def test_a_metric_without_a_better_side_has_no_best_alpha():
    app = open_page("alpha", trace=LONG, alpha_metric="churn", shadow="true")
    assert not errors(app)
    assert any("Neither more nor less" in text for text in said(app))
    assert not any("Best alpha, where" in text for text in said(app))
    assert "--metric churn --shadow" in app.code[0].value
    app.selectbox(key="alpha_metric").set_value("kept_mass").run()
    assert any("Best alpha, where more is better" in text for text in said(app))
    assert "--metric kept_mass --shadow" in app.code[0].value
