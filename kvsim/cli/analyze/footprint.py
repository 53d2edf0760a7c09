"""``kvsim analyze footprint``: what replays hold in a paged cache, and what reading it must cost."""

import csv
import io
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from kvsim_traces import Trace

from kvsim.cli.folding import PolicyText
from kvsim.cli.left_out import runnable, say_left_out
from kvsim.cli.options import (
    AsJson,
    BudgetText,
    CompressionRatio,
    EngineName,
    More,
    PolicyTexts,
    Quiet,
    Traces,
    budget_note,
    open_traces,
)
from kvsim.cli.output import narrow_table, new_file, print_json, print_table, progress_bar, say, stderr, write_lines
from kvsim.costs import HARDWARE, SHAPES, Hardware, Shape
from kvsim.engines import DEFAULT_ENGINE
from kvsim.errors import KvsimError, unknown_name
from kvsim.footprint import Footprint, costs_of
from kvsim.footprint import footprint as lay_out
from kvsim.paging import PAGE_SIZE, Layout
from kvsim.policy import parse
from kvsim.replay import choose_budget, replay_many

__all__ = ["footprint"]

SUFFIXES = (".parquet", ".csv")
MB = 1e6
Row = dict[str, Any]


def footprint(
    policy: PolicyTexts,
    trace: Traces = None,
    more: More = None,
    compression_ratio: CompressionRatio = None,
    budget: BudgetText = None,
    page: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Tokens of a page.")] = PAGE_SIZE,
    layout: Annotated[Layout, typer.Option(help="Tokens stay where they were written, or move into holes.")] = "append",
    dtype_bytes: Annotated[float, typer.Option(metavar="BYTES", help="Bytes of a number of the cache.")] = 2,
    hardware: Annotated[
        str, typer.Option(metavar="NAME|B,F", help=f"{', '.join(HARDWARE)}, or bytes and operations a second.")
    ] = "h200",
    shape: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"{', '.join(SHAPES)}; the recorded model's by default.")
    ] = None,
    engine: EngineName = DEFAULT_ENGINE,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="New .parquet or .csv file with a row a step.")
    ] = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    quiet: Quiet = False,
) -> None:
    """Lay replays out in pages: memory, fragmentation, attended pairs, eviction triggers, and the least a step costs.

    Pages belong to one layer and KV head. append: a page is free once all its tokens are gone; compact: survivors move.
    Times are floors: max(bytes / bandwidth, operations / rate) of weights and cache, nothing else.

    Example: kvsim analyze footprint --trace traces/samples/smollm2-needle-512 --policy h2o --policy full
    """
    if as_json and as_csv:
        raise KvsimError("print either --json or --csv")
    if out is not None and out.suffix not in SUFFIXES:
        raise unknown_name("suffix of --out", out.suffix or out.name, SUFFIXES)
    device, model = Hardware.read(hardware), None if shape is None else Shape.read(shape)
    chosen = choose_budget(compression_ratio, budget)
    policies = [parse(text) for text in policy]
    asked = [own.with_budget(chosen) for own in policies]
    traces = open_traces(trace, more)
    places, left_out = runnable(traces, asked) if len(traces) > 1 else ([list(range(len(asked)))], [])
    found: list[list[Row]] = []
    steps: list[Row] = []
    with nullcontext() if out is None else new_file(out):
        for recording, own in zip(traces, places, strict=True):
            rows: list[Row] = []
            with progress_bar(recording.path.name, quiet=quiet or as_json or as_csv) as advance:
                runs = [asked[place] for place in own]
                results = replay_many(recording, runs, shadow_churn=False, raw=False, engine=engine, progress=advance)
            for result in results:
                one = lay_out(result, page_size=page, dtype_bytes=dtype_bytes, layout=layout)
                rows.append({**one.summary(), **_costs(one, recording, device, model)})
                steps += one.rows() if out is not None else []
            found.append(rows)
        if out is not None:
            _write(steps, out)
    if as_json:
        about = {"hardware": asdict(device), "shape": None if model is None else asdict(model)}
        rows = [row for rows in found for row in rows]
        print_json({**about, "results": rows, "left_out": [asdict(one) for one in left_out]})
        return
    if as_csv:
        every = [row for rows in found for row in rows]
        flat = [{name: value for name, value in row.items() if not isinstance(value, list)} for row in every]
        typer.echo(_csv(flat), nl=False)
        say_left_out(left_out)
        return
    for recording, own, rows in zip(traces, places, found, strict=True):
        if own:
            _print(recording, [str(policies[place]) for place in own], rows)
    say_left_out(left_out)
    whose = "the recorded model" if model is None else f"{model.name}, each head reading the recording's mean"
    kept = {"append": "tokens stay where they were written", "compact": "survivors move into holes"}[layout]
    say(f"pages of {page} tokens: {kept}; {dtype_bytes:g} bytes a number; times: floors on {device.name} of {whose}")
    say(f"x: the full cache's over the policy's; irreversible; open loop; {budget_note(chosen)}")
    if out is not None:
        say(f"wrote {out}", to=stderr)


def _costs(one: Footprint, recording: Trace, device: Hardware, model: Shape | None) -> Row:
    facts = recording.manifest.model
    return dict(costs_of(one, device, model, config=None if facts is None else facts["config"]).summary())


def _print(recording: Trace, names: list[str], rows: list[Row]) -> None:
    first = rows[0]
    say(
        f"{recording.path.name}: prompt {recording.prompt_length}, steps {recording.num_steps}, "
        f"{len(recording.eligible_layers)} layers, {recording.num_kv_heads} KV heads; "
        f"full cache {first['full_bytes'] / MB:.2f} MB, {_ms(first['full_decode_ms'])} ms a step"
    )
    table = narrow_table("policy")
    columns = ["logical\nMB", "physical\nMB", "fragm.", "peak\nMB", "attended\npairs", "triggers"]
    apart = any(row["triggers_of_a_head"] != row["triggers"] for row in rows)
    columns += ["of a\nhead"] * apart
    columns += ["tokens\nmoved"] * (first["layout"] == "compact")
    # Eviction comes after the prefill, so only admission makes a difference to it.
    admits = any(row["window"] for row in rows)
    columns += ["decode\nms", "x"] + ["prefill\nms", "x"] * admits
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for name, row in zip(names, rows, strict=True):
        sizes = [f"{row[key] / MB:.2f}" for key in ("logical_bytes", "physical_bytes")]
        table.add_row(
            PolicyText(name),
            *sizes,
            f"{row['fragmentation']:.3f}",
            f"{row['peak_bytes'] / MB:.2f}",
            f"{row['attended_share']:.1%}",
            str(row["triggers"]),
            *([f"{row['triggers_of_a_head']:.1f}"] if apart else []),
            *([f"{row['moved_tokens']}"] if row["layout"] == "compact" else []),
            _ms(row["decode_ms"]),
            "-" if row["decode_ratio"] is None else f"{row['decode_ratio']:.2f}",
            *([_ms(row["prefill_ms"]), f"{row['prefill_ratio']:.2f}"] if admits else []),
        )
    print_table(table)


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _csv(rows: list[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _write(rows: list[Row], out: Path) -> None:
    if out.suffix == ".csv":
        write_lines([_csv(rows).encode()], out)
        return
    import polars as pl

    buffer = io.BytesIO()
    pl.DataFrame(rows, infer_schema_length=None).write_parquet(buffer)
    write_lines([buffer.getvalue()], out)
