"""Charts and tables with what belongs to them: a text alternative, and files to take away."""

import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import streamlit as st

from kvsim.charts.files import can_draw
from kvsim_explorer.literal import literal
from kvsim_explorer.paper import is_narrow, on_paper
from kvsim_explorer.view import View

if TYPE_CHECKING:
    import altair as alt
    import polars as pl

    Drawn = alt.Chart | alt.LayerChart | alt.HConcatChart | alt.VConcatChart

__all__ = ["frame_of", "show_chart", "show_table", "table_files"]

PICTURE_SCALE = 2


def show_chart(
    chart: "Drawn",
    name: str,
    summary: str,
    table: "pl.DataFrame | Callable[[], pl.DataFrame] | None" = None,
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
    table : DataFrame, or a function that makes one, optional
        The numbers behind it, whole; made for the files alone where it is a function.
    on_select : callable, optional
        Called when something is selected in a chart of a single view.
    key : str, optional
        Where the session's state holds what is selected, ``chart NAME`` by default. Under a new key a chart forgets it.
    """
    with st.container(key=f"paper {name}", horizontal_alignment="left"):
        chosen: Any = on_select or "ignore"
        spec = on_paper(chart.to_dict(validate=False), narrow=is_narrow())
        width: Any = "stretch" if spec.get("width") == "container" else "content"
        box = key or f"chart {name}"
        # The summary is the text alternative here.
        spec.pop("description", None)
        st.vega_lite_chart(spec, theme=None, width=width, alt=summary, key=box, on_select=chosen)
    st.caption(literal(summary))
    with st.container(horizontal=True, key=f"files {name}"):
        if can_draw():
            for kind, mime in (("png", "image/png"), ("svg", "image/svg+xml")):
                st.download_button(
                    kind.upper(),
                    partial(_picture, chart, kind),
                    _file_name(name, kind),
                    mime,
                    key=f"{kind} {name}",
                    on_click="ignore",
                )
        if table is not None:
            table_files(table, name)
    if table is not None and not callable(table):
        with st.expander("The numbers"):
            st.dataframe(table, key=f"table {name}")


def show_table(table: "pl.DataFrame", name: str, **options: Any) -> None:
    """Show a table, and files of it."""
    st.dataframe(table, key=f"table {name}", hide_index=True, **options)
    with st.container(horizontal=True, key=f"files {name}"):
        table_files(table, name)


def frame_of(rows: Sequence[dict[str, Any]]) -> "pl.DataFrame":
    """Make a frame of rows whose values are plain."""
    import polars as pl

    return pl.DataFrame(list(rows), infer_schema_length=None)


def table_files(table: "pl.DataFrame | Callable[[], pl.DataFrame]", name: str) -> None:
    """Offer a table as files, which say of what recording and in what mode they are."""
    csv, parquet = f"csv {name}", f"parquet {name}"
    view = st.session_state.get("view")

    def written(as_bytes: "Callable[[pl.DataFrame], bytes]") -> bytes:
        return as_bytes(_labelled(table() if callable(table) else table, view))

    st.download_button(
        "CSV",
        partial(written, lambda own: own.write_csv().encode()),
        _file_name(name, "csv"),
        "text/csv",
        key=csv,
        on_click="ignore",
    )
    st.download_button(
        "Parquet",
        partial(written, _parquet),
        _file_name(name, "parquet"),
        "application/vnd.apache.parquet",
        key=parquet,
        on_click="ignore",
    )


def _labelled(table: "pl.DataFrame", view: View | None) -> "pl.DataFrame":
    import polars as pl

    if view is None:
        return table
    labels = {
        "trace": view.trace.path.name,
        "trace_hash": view.trace.hash,
        "mode": "shadow" if view.shadow else "irreversible",
    }
    return table.with_columns(pl.lit(value).alias(name) for name, value in labels.items() if name not in table.columns)


def _file_name(name: str, suffix: str) -> str:
    view = st.session_state.get("view")
    return f"{name}.{suffix}" if view is None else f"{view.trace.path.name}-{name}.{suffix}"


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
