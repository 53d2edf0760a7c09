"""Options that several commands have, and how what they name is found and told."""

import glob
import os
import re
from typing import Annotated

import typer
from kvsim_traces import Trace, open_trace

from kvsim.budget import Budget
from kvsim.engines import ENGINES
from kvsim.engines.outcome import Mode
from kvsim.errors import KvsimError
from kvsim.policy import Policy, parse
from kvsim.replay import choose_budget

__all__ = [
    "AsJson",
    "BudgetText",
    "CompressionRatio",
    "EngineMode",
    "EngineName",
    "More",
    "PolicyTexts",
    "Quiet",
    "Ratios",
    "Shadow",
    "Traces",
    "at_ratios",
    "budget_note",
    "budget_notes",
    "find_traces",
    "open_traces",
    "without_budget",
]

Traces = Annotated[
    list[str] | None, typer.Option(metavar="DIR|GLOB", help="Trace directory, quoted glob, or URL; repeatable.")
]
More = Annotated[list[str] | None, typer.Argument(metavar="[TRACE]...", help="Traces, as after --trace.")]
CompressionRatio = Annotated[
    str | None,
    typer.Option(metavar="RATIO", help="Fraction of the prompt REMOVED, in [0, 1); 0.9 unless --budget is given."),
]
PolicyTexts = Annotated[
    list[str], typer.Option("--policy", metavar="POLICY", help="Policy string such as ema:0.9; repeatable.")
]
Ratios = Annotated[
    list[str] | None,
    typer.Option(metavar="RATIO", help="Fraction of the prompt REMOVED, in [0, 1); repeatable; 0.9 by default."),
]
BudgetText = Annotated[
    str | None, typer.Option(metavar="TOKENS|PERCENT", help="Tokens to keep: 2048, or 10% of the prompt.")
]
EngineName = Annotated[str, typer.Option("--engine", metavar="ENGINE", help=f"One of: {', '.join(ENGINES)}.")]
EngineMode = Annotated[Mode, typer.Option(help="Keep the layer order of the definition, or collapse it.")]
Shadow = Annotated[bool, typer.Option("--shadow", help="Evict nothing; rank all positions at every step.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]


def find_traces(patterns: list[str]) -> list[str]:
    """Expand directories, globs and URLs into trace locations, in the order given and without repeats.

    Raises
    ------
    KvsimError
        If a pattern matches nothing, or only things that are not traces.
    """
    if not patterns:
        raise KvsimError("name a recording: --trace DIR")
    found: list[str] = []
    for pattern in patterns:
        if "://" in pattern or os.path.exists(pattern):
            found.append(pattern)
            continue
        matches = sorted(glob.glob(pattern))
        # Rows that replays keep beside a trace are no traces themselves.
        own = [match for match in matches if not match.rstrip("/").endswith((".rows", ".tokens"))]
        traces = [match for match in own if os.path.exists(os.path.join(match, "zarr.json"))]
        if not traces:
            state = "matches no trace directory" if matches else "no such trace directory"
            raise KvsimError(f"{pattern}: {state}")
        found += traces
    return list(dict.fromkeys(found))


def open_traces(trace: list[str] | None, more: list[str] | None) -> list[Trace]:
    """Open the recordings that `Traces` and `More` name; errors as for `find_traces`, and those of opening."""
    return [open_trace(location) for location in find_traces([*(trace or []), *(more or [])])]


def at_ratios(policies: list[str], ratios: list[str] | None) -> list[Policy]:
    """Give every policy at every compression ratio, each once; a budget of its own beats them."""
    budgets = _budgets(ratios)
    return list(dict.fromkeys(parse(text).with_budget(budget) for budget in budgets for text in policies))


def without_budget(policy: str, budget: Budget) -> str:
    """Leave a budget out of a policy string, or of one with ``alpha`` for a number, where `budget_note` tells it."""
    return re.sub(rf"/budget={re.escape(str(budget))}(?=/|$)", "", policy)


def budget_note(budget: Budget) -> str:
    """Say below a table what B is: a share of the prompt with its compression ratio, or a number of tokens."""
    if budget.keep_ratio is None:
        return f"B: {budget} tokens"
    return f"B: {budget} of the prompt (compression_ratio {1 - budget.keep_ratio})"


def budget_notes(ratios: list[str] | None) -> str:
    """Say the same of several compression ratios."""
    return "; ".join(map(budget_note, _budgets(ratios)))


def _budgets(ratios: list[str] | None) -> list[Budget]:
    return [choose_budget(ratio) for ratio in ratios] if ratios else [choose_budget()]
