"""Charts and tables with what belongs to them: a text alternative, and files to take away."""

import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import streamlit as st

from kvsim.charts.files import can_draw

if TYPE_CHECKING:
    import altair as alt
    import polars as pl

    Drawn = alt.Chart | alt.LayerChart | alt.HConcatChart | alt.VConcatChart

__all__ = ["frame_of", "show_chart", "show_table", "table_files"]

PICTURE_SCALE = 2

_INK = {"labelColor": "#1a1a1a", "titleColor": "#1a1a1a"}
PAPER: dict[str, Any] = {
    "background": "#ffffff",
    "title": {"color": "#1a1a1a"},
    "axis": _INK,
    "legend": _INK,
    "header": _INK,
}
"""Colours that a chart would otherwise take from the theme around it: in the dark one, white on its white paper."""


def show_chart(
    chart: "Drawn",
    name: str,
    summary: str,
    table: "pl.DataFrame | None" = None,
    *,
    on_select: Callable[[], None] | None = None,
    key: str | None = None,
) -> None:
    """Show a chart on paper, its text alternative, and files of it.

    Parameters
    ----------
    chart : altair chart
        The chart.
    name : str
        Stem of the files, and key of the widgets.
    summary : str
        What the chart shows, in a sentence or two, with its numbers: for those who do not see it.
    table : DataFrame, optional
        The numbers behind it, whole.
    on_select : callable, optional
        Called when something is selected in a chart of a single view.
    key : str, optional
        Where the session's state holds what is selected, ``chart NAME`` by default. Under a new key a chart forgets it.
    """
    with st.container(key=f"paper {name}", horizontal_alignment="left"):
        chosen: Any = on_select or "ignore"
        st.altair_chart(
            _on_paper(chart), theme=None, width="content", alt=summary, key=key or f"chart {name}", on_select=chosen
        )
    st.caption(summary)
    with st.container(horizontal=True, key=f"files {name}"):
        if can_draw():
            for kind, mime in (("png", "image/png"), ("svg", "image/svg+xml")):
                st.download_button(
                    kind.upper(),
                    partial(_picture, chart, kind),
                    f"{name}.{kind}",
                    mime,
                    key=f"{kind} {name}",
                    on_click="ignore",
                )
        if table is not None:
            table_files(table, name)
    if table is not None:
        with st.expander("The numbers"):
            st.dataframe(table, key=f"table {name}")


def _on_paper(chart: "Drawn") -> "Drawn":
    """Draw as in a file: the same colours in both themes, and the plot alone of the size that it asks for."""
    import altair as alt

    drawn: Drawn = chart.configure(**PAPER)
    return drawn.properties(autosize="pad") if isinstance(drawn, alt.Chart | alt.LayerChart) else drawn


def show_table(table: "pl.DataFrame", name: str, **options: Any) -> None:
    """Show a table, and files of it."""
    st.dataframe(table, key=f"table {name}", hide_index=True, **options)
    with st.container(horizontal=True, key=f"files {name}"):
        table_files(table, name)


def frame_of(rows: Sequence[dict[str, Any]]) -> "pl.DataFrame":
    """Make a frame of rows whose values are plain."""
    import polars as pl

    return pl.DataFrame(list(rows), infer_schema_length=None)


def table_files(table: "pl.DataFrame", name: str) -> None:
    """Offer a table as files."""
    csv, parquet = f"csv {name}", f"parquet {name}"
    st.download_button("CSV", table.write_csv, f"{name}.csv", "text/csv", key=csv, on_click="ignore")
    st.download_button(
        "Parquet",
        partial(_parquet, table),
        f"{name}.parquet",
        "application/vnd.apache.parquet",
        key=parquet,
        on_click="ignore",
    )


def _parquet(table: "pl.DataFrame") -> bytes:
    file = io.BytesIO()
    table.write_parquet(file)
    return file.getvalue()


def _picture(chart: "Drawn", kind: str) -> bytes:
    import vl_convert

    spec = json.dumps(chart.to_dict())
    if kind == "svg":
        return str(vl_convert.vegalite_to_svg(spec)).encode()
    return bytes(vl_convert.vegalite_to_png(spec, scale=PICTURE_SCALE))
