"""``kvsim sweep``."""

import time
from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli.options import EngineMode, EngineName, Quiet, Shadow, find_traces
from kvsim.cli.output import print_json, progress_bar, say
from kvsim.engines import DEFAULT_ENGINE
from kvsim.grid import parse_settings
from kvsim.sweep import run_sweep

__all__ = ["sweep"]


def sweep(
    trace: Annotated[
        list[str], typer.Option(metavar="DIR|GLOB", help="Trace directory, quoted glob, or URL; repeatable.")
    ],
    policy: Annotated[
        list[str],
        typer.Option("--policy", metavar="POLICY", help="Policy to start from, such as ema or tova; repeatable."),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Parquet file; results that it holds already are not computed again.")
    ],
    more: Annotated[list[str] | None, typer.Argument(metavar="[TRACE]...", help="Further traces.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=V1,V2,…",
            help="Values of an argument of the policies (alpha), of an axis (refresh), or of compression_ratio; "
            "repeatable: every combination runs. A comma within a value is written %2C.",
        ),
    ] = None,
    engine: EngineName = DEFAULT_ENGINE,
    mode: EngineMode = "exact",
    shadow: Shadow = False,
    shadow_churn: Annotated[
        bool,
        typer.Option(
            "--shadow-churn",
            help="Measure the shadow churn too, as replay does; off by default because it costs dense passes.",
        ),
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Worker threads; one for each core by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows and counts as JSON.")] = False,
    quiet: Quiet = False,
) -> None:
    """Replay every combination of policies and settings on every recording, into one Parquet file.

    One row a result: its summary, engine_mode, and set_NAME for each setting.
    Run again, a stopped sweep goes on where it was; another sweep adds its rows.
    A setting replaces what a policy says itself, and every policy must have it.
    Without a budget or compression_ratio, 0.9 of the prompt is removed.

    Example: kvsim sweep --trace 'runs/*' --policy ema --set alpha=0.6,0.8 --set refresh=1,4,first --out s.parquet
    """
    grid = parse_settings(settings or [])
    traces = find_traces(trace + (more or []))
    start = time.perf_counter()
    with progress_bar(out.name, quiet=quiet or as_json) as advance:
        done = run_sweep(
            traces,
            policy,
            grid,
            out=out,
            shadow=shadow,
            shadow_churn=shadow_churn,
            engine=engine,
            mode=mode,
            jobs=jobs,
            progress=advance,
        )
    facts = {
        "out": str(out),
        "policies": done.num_policies,
        "traces": done.num_traces,
        "run": done.num_run,
        "found": done.num_found,
        "seconds": round(time.perf_counter() - start, 3),
    }
    if as_json:
        print_json({**facts, "results": done.rows})
        return
    say(
        f"wrote {out}: {done.num_policies} policies x {done.num_traces} traces, {done.num_run} replayed, "
        f"{done.num_found} found there, {facts['seconds']:.1f} s"
    )
