"""``kvsim train-scorer``."""

from pathlib import Path
from typing import Annotated

import typer
from kvsim_traces import open_trace
from rich import box
from rich.table import Table

from kvsim.bilinear import save_scorer
from kvsim.cli.options import AsJson, Quiet, find_traces
from kvsim.cli.output import print_json, print_table, progress_bar, say
from kvsim.distill import Settings, train
from kvsim.errors import KvsimError

__all__ = ["train_scorer"]

_DEFAULT = Settings()


def train_scorer(
    trace: Annotated[
        list[str], typer.Option(metavar="DIR|GLOB", help="Recording with queries and keys, or quoted glob; repeatable.")
    ],
    out: Annotated[Path, typer.Option(help="New safetensors file.")],
    more: Annotated[list[str] | None, typer.Argument(metavar="[TRACE]...", help="Further recordings.")] = None,
    steps: Annotated[int, typer.Option(help="Updates.")] = _DEFAULT.steps,
    batch: Annotated[int, typer.Option(help="Decode steps in an update.")] = _DEFAULT.batch,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = _DEFAULT.learning_rate,
    mix: Annotated[float, typer.Option(help="Weight of the KL divergence (lambda).")] = _DEFAULT.mix,
    temperature: Annotated[float, typer.Option(help="Temperature of the KL divergence (tau).")] = _DEFAULT.temperature,
    rank: Annotated[int, typer.Option(help="Dimensions that queries and keys are projected to.")] = _DEFAULT.rank,
    held_out: Annotated[
        float, typer.Option(help="Share of each recording's steps, its last ones, kept for the report.")
    ] = _DEFAULT.held_out,
    seed: Annotated[int, typer.Option(help="Seed of the matrices and of the draws.")] = _DEFAULT.seed,
    device: Annotated[str, typer.Option(help="Where torch computes: cpu, cuda, …")] = "cpu",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Learn a bilinear scorer from recorded attention, and report how it ranks the steps held out.

    Example: kvsim train-scorer --trace 'runs/*' --steps 2000 --out scorer.safetensors
    """
    settings = Settings(
        steps=steps,
        batch=batch,
        learning_rate=learning_rate,
        mix=mix,
        temperature=temperature,
        rank=rank,
        held_out=held_out,
        seed=seed,
    )
    if out.exists():
        raise KvsimError(f"--out {out}: exists already; name a new file")
    traces = [open_trace(location) for location in find_traces(trace + (more or []))]
    with progress_bar(f"training {out.name}", quiet=quiet or as_json) as advance:
        scorer, report = train(traces, settings, device=device, progress=advance)
    save_scorer(scorer, out)
    tenth = max(1, steps // 10)
    first, last = (sum(part) / len(part) for part in (report.losses[:tenth], report.losses[-tenth:]))
    facts = {"spearman": report.mean("spearman"), "top_jaccard": report.mean("top_jaccard")}
    if as_json:
        print_json(
            {
                "file": str(out),
                "parameters": scorer.num_parameters,
                "loss": {"first": first, "last": last},
                "held_out": {**facts, "layers": report.layers},
                "training": scorer.training,
            }
        )
        return
    table = Table(title="against attention on held-out steps", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("layer", "Spearman rho", "top-10% Jaccard"):
        table.add_column(column, justify="right")
    for row in report.layers:
        table.add_row(f"{row['layer']}", *(_cell(row[name]) for name in facts))
    table.add_row("mean", *(_cell(value) for value in facts.values()))
    print_table(table)
    say(f"wrote {out}: {scorer.num_parameters:,} parameters; loss {first:.4f} -> {last:.4f}")


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
