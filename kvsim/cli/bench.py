"""``kvsim bench``: measure, never in a test."""

import dataclasses
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from kvsim_traces import open_trace
from kvsim_traces.bench import bench_trace
from rich import box
from rich.table import Table

from kvsim.bench import SMOKE, bench_large, bench_replay
from kvsim.bench_oracle import bench_oracle
from kvsim.cli.models import Device, ModelPath, load, need_torch
from kvsim.cli.options import AsJson, More, Quiet, Traces, find_traces, open_traces
from kvsim.cli.output import ErrorGroup, console, narrow_table, print_json, print_table, progress_bar, say, stderr
from kvsim.errors import KvsimError, unknown_name
from kvsim.policy import parse

__all__ = ["app"]

app = typer.Typer(cls=ErrorGroup, help="Measure kvsim on this machine.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    pass


@app.command()
def replay(
    directory: Annotated[Path | None, typer.Option(help="Where to write the scratch recordings.")] = None,
    large: Annotated[
        bool, typer.Option("--large", help="Instead, replay a 20 GB recording and report the peak memory.")
    ] = False,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="cuda: time the GPU engine on 1,000 policies beside two cores.")
    ] = "cpu",
    smoke: Annotated[bool, typer.Option("--smoke", help="A small size that only shows that it runs.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure policy-steps a second beside a plain read of the same bytes, on one core; or on a GPU.

    Example: kvsim bench replay --device cuda --json > replay_engine.json
    """
    if device not in ("cpu", "cuda"):
        raise unknown_name("device", device, ("cpu", "cuda"))
    if large and (smoke or device == "cuda"):
        raise KvsimError("--large is one measurement of its own: it takes neither --smoke nor --device cuda")
    if device == "cuda":
        _replay_on_gpu(directory, smoke=smoke, as_json=as_json, quiet=quiet)
        return
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1" and not large:
        # The number of BLAS threads is settled when NumPy is loaded, so start again with one.
        os.execve(
            sys.executable, [sys.executable, "-m", "kvsim", *sys.argv[1:]], os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        )
    with tempfile.TemporaryDirectory(dir=directory, prefix="kvsim-bench-") as scratch:
        if large:
            report = bench_large(scratch)
        else:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
            with progress_bar("measuring", quiet=quiet or as_json) as advance:
                size: dict[str, Any] = SMOKE if smoke else {}
                report = bench_replay(scratch, **size, progress=advance)
    if as_json:
        print_json(report)
        return
    if not large:
        table = Table(box=box.SIMPLE_HEAD)
        for name in report["rows"][0]:
            table.add_column(
                name.replace("_", " "), justify="left" if name in ("engine", "mode", "capture") else "right"
            )
        for row in report.pop("rows"):
            table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()))
        print_table(table)
    _print_facts(report)


def _replay_on_gpu(directory: Path | None, *, smoke: bool, as_json: bool, quiet: bool) -> None:
    from kvsim import bench_replay as gpu

    gpu.check_gpu(smoke=smoke)
    with tempfile.TemporaryDirectory(dir=directory, prefix="kvsim-bench-") as scratch:
        report = gpu.bench_replay_gpu(
            scratch,
            **(gpu.SMOKE if smoke else {}),
            progress=None if quiet or as_json else lambda line: say(line, to=stderr),
        )
    if as_json:
        print_json({"command": " ".join(["kvsim", *sys.argv[1:]]), **report})
    else:
        say("\n".join(gpu.lines(report)))


@app.command()
def trace(
    directory: Annotated[Path | None, typer.Option(help="Where to write the scratch recording.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Append to and read from a recording of [128, 30, 16, 4096] scores, beside a plain memory read."""
    scratch = tempfile.TemporaryDirectory(dir=directory, prefix="kvsim-bench-")
    with scratch as name, progress_bar("measuring", quiet=quiet or as_json) as advance:
        report = bench_trace(name, progress=advance)
    if as_json:
        print_json(report)
        return
    _print_facts(report)


@app.command()
def adaptive(
    trace: Traces = None,
    directory: Annotated[Path | None, typer.Option(help="Where to write the scratch recordings.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare adaptive alphas with fixed ones on 85 synthetic recordings, and on any others; takes minutes.

    Kept mass is less that of each regime's best fixed alpha, averaged over regimes.
    Shadow loss is over that of each regime's best fixed alpha, a geometric mean.
    Nothing is timed: every run gives the same numbers.

    Example: kvsim bench adaptive --trace 'traces/samples/*' --json > kvsim/benchmarks/adaptive.json
    """
    from kvsim.bench_adaptive import bench_adaptive

    recordings = [open_trace(location) for location in find_traces(trace)] if trace else []
    scratch = tempfile.TemporaryDirectory(dir=directory, prefix="kvsim-bench-")
    with scratch as name, progress_bar("comparing", quiet=quiet or as_json) as advance:
        report = bench_adaptive(name, recordings, progress=advance)
    if as_json:
        print_json(report)
        return
    table = narrow_table("rule")
    for heading in ("kept mass,\nof best", "shadow loss,\nof best"):
        table.add_column(heading, justify="right", vertical="bottom")
    for rule, row in report["summary"].items():
        table.add_row(rule, f"{row['kept_mass_of_best']:+.4f}", f"{row['shadow_loss_of_best']:.2f}")
    print_table(table)
    for signal, row in report["direction"].items():
        known = ", ".join(f"{mode} {'-' if rho is None else f'{rho:+.2f}'}" for mode, rho in row.items())
        say(f"rank correlation of {signal} with the best alpha: {known}")
    for row in report["eta"]:
        say(", ".join(f"{key} {value:.4g}" for key, value in row.items()))


@app.command()
def oracle(as_json: AsJson = False) -> None:
    """Measure how close the bound of oracle:bound comes in how much time, and its peak memory, on one core.

    Takes about a minute, and 670 MiB of memory.

    Example: kvsim bench oracle --json
    """
    report = bench_oracle()
    if as_json:
        print_json(report)
        return
    for row in report.pop("rows"):
        _print_facts({name: value for name, value in row.items() if name != "gap_over_time"})
        console.print()
    _print_facts(report)


@app.command()
def record(
    directory: Annotated[Path | None, typer.Option(help="Where to write the scratch recordings.")] = None,
    context: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 16384,
    steps: Annotated[int, typer.Option(help="Decode steps.")] = 32,
    long_context: Annotated[int, typer.Option(help="A longer prompt, for the peak memory; 0 for none.")] = 131072,
    seconds: Annotated[float | None, typer.Option(help="After these nothing new is started.")] = None,
    device: Device = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Record a random model of Llama-3.1-8B's shape beside the same steps unrecorded: time and memory on a GPU.

    Its weights take 16 GB of the GPU's memory, the longer prompt several times as much.

    Example: kvsim bench record --device cuda --json
    """
    need_torch("kvsim bench record", "live")
    from kvsim.bench_record import bench_record, table

    with progress_bar("recording", quiet=quiet or as_json) as advance:
        report = bench_record(
            directory or tempfile.gettempdir(),
            device=device or "cuda",
            context=context,
            steps=steps,
            long_context=long_context,
            seconds=seconds,
            progress=advance,
        )
    if as_json:
        print_json(report)
        return
    for line in table(report):
        say(line)


@app.command("closed-loop")
def closed_loop(
    model: ModelPath,
    trace: Traces = None,
    more: More = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", metavar="POLICY", help="Policy string; repeatable; six rules in every group if not given."
        ),
    ] = None,
    compression_ratio: Annotated[
        list[str] | None,
        typer.Option(metavar="RATIO", help="Fraction of the prompt REMOVED; repeatable; 0.5, 0.75, 0.9 and 0.95."),
    ] = None,
    alone: Annotated[bool, typer.Option("--alone", help="Also time each policy by itself, both ways.")] = False,
    device: Device = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare closed-loop replays with live decoding of the recorded tokens: the sets must be equal, and time is told.

    Example: kvsim bench closed-loop --model SmolLM2-135M-Instruct --trace 'traces/samples/*'
    """
    need_torch("kvsim bench closed-loop", "live")
    traces = open_traces(trace, more)
    network, tokenizer = load(model, dtype="float32", device=device, quiet=quiet or as_json)

    from kvsim.bench_closed_loop import RATIOS, bench_closed_loop
    from kvsim.live.match import check_model

    for recording in traces:
        check_model(recording, network, tokenizer)
    with progress_bar("comparing", quiet=quiet or as_json) as advance:
        report = bench_closed_loop(
            network, traces, policies=policy, ratios=compression_ratio or RATIOS, alone=alone, progress=advance
        )
    if as_json:
        print_json(report)
        return
    table = narrow_table("policy")
    for heading in ("cases", "passes,\nmedian", "most", "evictions", "swaps", "near-\nties", "closed / live,\ntime"):
        table.add_column(heading, justify="right", vertical="bottom")
    rows = report.pop("rows")
    for name in dict.fromkeys(_without_budget(row["policy"]) for row in rows):
        own = [row for row in rows if _without_budget(row["policy"]) == name]
        passes = [row["passes"] for row in own]
        sums = (str(sum(row[key] for row in own)) for key in ("evictions", "swaps", "near_ties"))
        ratio = f"{statistics.median(row['time_ratio'] for row in own):.2f}" if alone else "-"
        table.add_row(name, str(len(own)), f"{statistics.median(passes):g}", str(max(passes)), *sums, ratio)
    print_table(table)
    del report["batches"]
    _print_facts({name: value for name, value in report.items() if value is not None})


@app.command()
def live(
    model: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="llama-3.1-8b or qwen2.5-7b; repeatable; both.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(metavar="TOKENS", help="Prompt length; repeatable; 16384, 32768, 65536.")
    ] = None,
    attention: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="triton, sdpa or flash_attn; repeatable; triton.")
    ] = None,
    replays: Annotated[int, typer.Option(help="Steps timed in each setting.")] = 40,
    seconds: Annotated[float, typer.Option(help="No setting is started after this time.")] = 330.0,
    device: Annotated[str, typer.Option(help="A CUDA device.")] = "cuda",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Time fast live decoding on a GPU beside the floor that memory bandwidth sets, and transformers' own loop.

    Models have random weights and prompts random keys and values; nothing is downloaded. 90% of each prompt is removed.
    Fails if the fast form does not give the plain one's answers, or a step holds PyTorch's attention or a wait.

    Example: kvsim bench live --device cuda --json > live.json
    """
    need_torch("kvsim bench live", "live")

    from kvsim.bench_live import CONTEXTS, bench_live, lines
    from kvsim.bench_live_models import SHAPES

    for name in model or ():
        if name not in SHAPES:
            raise unknown_name("model", name, SHAPES)
    report = bench_live(
        models=model or tuple(SHAPES),
        contexts=context or CONTEXTS,
        attentions=attention or ("triton",),
        replays=replays,
        seconds=seconds,
        device=device,
        progress=None if quiet or as_json else lambda line: say(line, to=stderr),
    )
    if as_json:
        print_json(report)
    else:
        say("\n".join(lines(report)))
    if report["wrong"]:
        raise typer.Exit(1)


@app.command()
def admission(
    model: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="llama-3.1-8b or qwen3-4b; repeatable; both.")
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(metavar="TOKENS", help="Prompt length; repeatable; 100000, 200000, 400000.")
    ] = None,
    part: Annotated[list[str] | None, typer.Option(metavar="NAME", help="attention or run; repeatable; both.")] = None,
    whole: Annotated[
        list[int] | None, typer.Option(metavar="TOKENS", help="A length whose prefills are not composed; repeatable.")
    ] = None,
    sparsity: Annotated[float, typer.Option(help="Share of the positions that is not admitted.")] = 0.75,
    window: Annotated[int, typer.Option(help="Recent tokens that every query sees.")] = 256,
    tiling: Annotated[
        str | None, typer.Option(metavar="NAME=NUMBER,...", help="How vertical-slash attention cuts its work.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Nothing is started after this time.")] = 480.0,
    estimate: Annotated[bool, typer.Option("--estimate", help="Say how long it would take, and end.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny sizes on the CPU, in Triton's interpreter.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Time prefill and decode of whole models under admission beside full attention on a GPU, and their memory.

    Models have random weights; nothing is downloaded. Write gates run in full, and a random mask decides in their
    place. Lengths without --whole are composed: a layer's attention times the layers, all else as measured.

    Example: kvsim bench admission --model llama-3.1-8b --length 400000 --whole 400000 --json > admission.json
    """
    need_torch("kvsim bench admission", "live")

    from kvsim.bench_admission import bench as module

    report = module.from_options(
        models=model, lengths=length, parts=part, whole=whole, sparsity=sparsity, window=window, tiling=tiling,
        only_estimate=estimate, is_smoke=smoke, seconds=seconds,
        progress=(lambda line: None) if quiet or as_json else lambda line: say(line, to=stderr),
    )  # fmt: skip
    if report is None:
        return
    if as_json:
        print_json(report)
    else:
        say("\n".join(module.lines(report)))
    if report["wrong"]:
        raise typer.Exit(1)


def _without_budget(policy: str) -> str:
    return str(dataclasses.replace(parse(policy), budget=None))


def _print_facts(report: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in report.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items() if not isinstance(item, list))
        if value != "":
            table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    print_table(table)
