"""What the commands share: consoles, errors, progress, JSON."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from kvsim_traces import Trace, TraceError
from kvsim_traces.files import os_reason, write_whole
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperGroup

from kvsim.cli.folding import PolicyText
from kvsim.errors import KvsimError
from kvsim.results_file import locked

__all__ = [
    "ErrorGroup",
    "console",
    "fail",
    "narrow_table",
    "new_file",
    "preview",
    "print_json",
    "print_table",
    "progress_bar",
    "say",
    "stderr",
    "write_json",
    "write_lines",
]

MOST_COLUMNS = 1000

# A table in a pipe or a file gets room for its columns; a terminal decides for itself.
console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)
stderr = Console(stderr=True)


class ErrorGroup(TyperGroup):
    """A command group that turns kvsim's own errors into one line on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """See `click.Group.invoke`."""
        try:
            return super().invoke(ctx)
        except (KvsimError, TraceError) as error:
            raise fail(str(error)) from None
        except BrokenPipeError:
            raise
        except OSError as error:
            where = "output" if error.filename is None else error.filename
            raise fail(f"{where}: {error.strerror}") from None


def fail(message: str) -> typer.Exit:
    """Print an error and give the exception that ends the command with exit code 2."""
    print(f"kvsim: error: {message}", file=sys.stderr)
    return typer.Exit(2)


def print_json(value: Any) -> None:
    """Print one JSON document to stdout."""
    print(json.dumps(value, indent=2, allow_nan=False))


@contextmanager
def new_file(out: Path) -> Iterator[None]:
    """Make sure, before anything long runs, that a new file can be written; it is held until the block ends.

    Raises
    ------
    KvsimError
        If there is such a file, nobody can write there, or another process is about to.
    """
    if out.exists():
        raise KvsimError(f"--out {out}: exists already; name a new file")
    with locked(out):
        yield


def write_json(value: Any, out: Path) -> None:
    """Write a JSON document to a new file, whole or not at all.

    Raises
    ------
    KvsimError
        If it cannot be written.
    """
    write_lines([json.dumps(value, indent=2, allow_nan=False).encode()], out)


def write_lines(lines: Sequence[bytes], out: Path) -> None:
    """Write a file, whole or not at all.

    Raises
    ------
    KvsimError
        If it cannot be written.
    """
    try:
        write_whole(out, lines)
    except OSError as error:
        raise KvsimError(f"{out}: cannot be written ({os_reason(error)})") from error


def say(line: str, *, to: Console = console, style: str | None = None) -> None:
    """Print a line as it is: no markup, no colours of its own, no wrapping."""
    to.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def narrow_table(first: str, *, gap: int = 2) -> Table:
    """Give an empty table, columns `gap` apart, whose first one, `first`, folds where the others need the room."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column(PolicyText(first), overflow="fold", min_width=16, vertical="bottom")
    return table


def print_table(table: Table) -> None:
    """Print a table, folding what may fold; one that is wider than the terminal all the same loses nothing."""
    needed = Measurement.get(console, console.options.update(width=MOST_COLUMNS), table).minimum
    console.print(table, highlight=False, width=max(console.width, needed), crop=False)


def preview(trace: Trace, length: int = 120) -> str:
    """Give the start of what was generated, on one line; nothing where the recording has no text."""
    if not trace.has("text"):
        return ""
    words = " ".join("".join(trace.texts()[trace.prompt_length :]).split())
    return words if len(words) <= length else words[: length - 1] + "…"


@contextmanager
def progress_bar(description: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr while the block runs; yields a function (done, total)."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=stderr, disable=quiet or not stderr.is_terminal, transient=True) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
