"""``kvsim compare``."""

import dataclasses
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from kvsim.cli.options import AsJson
from kvsim.cli.output import print_json, print_table, say
from kvsim.compare import DEFAULT_TOLERANCE, Comparison
from kvsim.compare import compare as compare_files

__all__ = ["compare"]

SHOWN = 10
"""Rows of a list that a terminal gets; --json holds all of them."""


def compare(
    a: Annotated[str, typer.Argument(metavar="A.parquet", help="File of a sweep, or what `kvsim replay --out` wrote.")],
    b: Annotated[str, typer.Argument(metavar="B.parquet", help="Another one.")],
    tolerance: Annotated[
        float, typer.Option(metavar="X", help="Largest absolute difference at which two values agree.")
    ] = DEFAULT_TOLERANCE,
    as_json: AsJson = False,
) -> None:
    """Compare the metrics of two files of results, for each trace, policy, mode and loop that both hold.

    Exit code 0 if all of them agree, 1 if not, 2 if the files cannot be compared.

    Example: kvsim compare exact.parquet fast.parquet --tolerance 1e-6
    """
    found = compare_files(a, b, tolerance=tolerance)
    if as_json:
        print_json(_as_json(a, b, tolerance, found))
    else:
        _print(a, b, tolerance, found)
    if not found.agree:
        raise typer.Exit(1)


def _as_json(a: str, b: str, tolerance: float, found: Comparison) -> dict[str, Any]:
    sides = {}
    for side, path in enumerate((a, b)):
        sides["ab"[side]] = {
            "path": path,
            **found.made_by[side],
            "only": found.only[side],
            "only_metrics": found.only_metrics[side],
        }
    return {
        **sides,
        "common": found.common,
        "tolerance": tolerance,
        "agree": found.agree,
        "metrics": {name: dataclasses.asdict(spread) for name, spread in found.metrics.items()},
        "differences": found.differences,
    }


def _print(a: str, b: str, tolerance: float, found: Comparison) -> None:
    for side, path in zip("AB", (a, b), strict=True):
        facts = found.made_by["AB".index(side)]
        say(f"{side}: {path}, {_rows(facts['rows'])}; {_makers(facts)}")
    for name, what in (("version", "versions"), ("engine", "engines"), ("engine_mode", "engine modes")):
        one, other = (facts[name] for facts in found.made_by)
        if one and other and one != other:
            say(f"different {what}: {', '.join(one)} in A, {', '.join(other)} in B")
    for side, only, metrics in zip("AB", found.only, found.only_metrics, strict=True):
        if metrics:
            say(f"metrics only in {side}: {', '.join(metrics)}")
        if only:
            say(f"only in {side}: {_rows(len(only))}")
            for key in only[:SHOWN]:
                say(f"  {key['policy']} on {key['trace']} ({key['mode']}, {key['loop']} loop)")
            _say_more(len(only))
    say(f"in both: {_rows(found.common)}")

    table = _table("metric", "rows", "largest |A - B|", "mean |A - B|", f"beyond {tolerance:g}")
    for name, spread in found.metrics.items():
        table.add_row(name, str(spread.rows), f"{spread.largest:.3g}", f"{spread.mean:.3g}", str(spread.beyond))
    print_table(table)
    if found.agree:
        say(f"all of them agree within {tolerance:g}")
        return
    table = _table("policy", "trace", "metric", "A", "B", "|A - B|")
    for row in found.differences[:SHOWN]:
        numbers = ["-" if row[name] is None else f"{row[name]:.10g}" for name in ("a", "b")]
        difference = "-" if row["difference"] is None else f"{row['difference']:.3g}"
        table.add_row(row["policy"], row["trace"], row["metric"], *numbers, difference)
    print_table(table)
    _say_more(len(found.differences))


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _makers(facts: dict[str, Any]) -> str:
    words = [f"kvsim {', '.join(facts['version'])}"]
    words += [f"{' and '.join(facts['engine'])} engine"] if facts["engine"] else []
    words += [f"{' and '.join(facts['engine_mode'])} mode"] if facts["engine_mode"] else []
    return ", ".join(words)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in columns:
        text = name in ("policy", "trace", "metric")
        table.add_column(name, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    return table


def _say_more(count: int) -> None:
    if count > SHOWN:
        say(f"  … and {count - SHOWN} more (--json lists them all)")
