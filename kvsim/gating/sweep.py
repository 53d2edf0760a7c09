"""Several gates and the trade-off that they trace: WG-KV's Figure 11 (lambda, tau) and Figure 12 (no local window)."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvsim_traces.files import write_report, write_whole

from kvsim.errors import KvsimError
from kvsim.gating.data import Samples
from kvsim.gating.run import gate_facts, train_to
from kvsim.gating.settings import Settings
from kvsim.gating.train import Progress

__all__ = ["check_folder", "frontier_lines", "gate_name", "mark_frontier", "sweep"]

POINT = ("penalty", "window", "tau", "loss", "cache_size", "admitted", "on_frontier")


def gate_name(settings: Settings) -> str:
    """Name the file of a run's gate."""
    return f"gate-lambda{settings.penalty:g}-window{settings.window}.safetensors"


def mark_frontier(points: list[dict[str, Any]]) -> None:
    """Set ``on_frontier`` of points: no other one of the same window is at most as large and at most as lossy."""
    for point in points:
        own = point["cache_size"], point["loss"]
        rivals = [(one["cache_size"], one["loss"]) for one in points if one["window"] == point["window"]]
        point["on_frontier"] = not any(
            size <= own[0] and loss <= own[1] and (size, loss) != own for size, loss in rivals
        )


def check_folder(folder: Path) -> None:
    """Make sure that a sweep has a folder of its own.

    Raises
    ------
    KvsimError
        If something is there.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise KvsimError(f"--out {folder}: exists already; a sweep takes a new folder")


def sweep(
    folder: Path,
    model: Any,
    samples: Samples,
    held_out: Samples,
    settings: Settings,
    runs: Sequence[tuple[float, int]],
    *,
    progress: Callable[[Settings], Progress] | None = None,
) -> dict[str, Any]:
    """Train one gate for each (lambda, window), and write what they came to into a new folder.

    Parameters
    ----------
    folder : Path
        Gets the gates, ``frontier.json`` and ``frontier.csv``; both are written anew after each run.
    model, samples, held_out
        See `kvsim.gating.train.train`.
    settings : Settings
        Of all runs but for lambda and window.
    runs : sequence of (float, int)
    progress : callable, optional
        Gives the progress of a run.

    Returns
    -------
    dict
        ``points``, one for each run and threshold: `POINT`; ``windows``, for each window the rows ``local`` and
        ``full`` of the validation; ``runs``, what each came to.

    Raises
    ------
    KvsimError
        See `check_folder` and `kvsim.gating.train.train`.
    """
    check_folder(folder)
    points: list[dict[str, Any]] = []
    found: dict[str, Any] = {"points": points, "windows": {}, "runs": []}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KvsimError(f"--out {folder}: cannot be made ({error.strerror})") from None
    for penalty, window in dict.fromkeys(runs):
        own = replace(settings, penalty=penalty, window=window)
        out = folder / gate_name(own)
        gate, report = train_to(
            out, model, samples, held_out, own, progress=None if progress is None else progress(own)
        )
        points += [{"penalty": penalty, "window": window, **row} for row in report.validation["rows"]]
        mark_frontier(points)
        found["windows"][str(window)] = {name: report.validation[name] for name in ("local", "full")}
        found["runs"].append(gate_facts(gate, report, Path(out.name)))
        write_report(folder / "frontier.json", found)
        write_whole(folder / "frontier.csv", [_csv(points).encode()])
    return found


def frontier_lines(found: dict[str, Any]) -> list[str]:
    """Give the lines of a sweep; a star marks the frontier of its window."""
    lines = [f"{'lambda':>8} {'window':>6} {'tau':>6} {'loss':>10} {'cache size':>10} {'admitted':>9}"]
    for point in found["points"]:
        lines.append(
            f"{point['penalty']:8g} {point['window']:6} {point['tau']:6g} {point['loss']:10.6f} "
            f"{point['cache_size']:10.4f} {point['admitted']:9.4f}{' *' if point['on_frontier'] else ''}"
        )
    return lines


def _csv(points: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, POINT, lineterminator="\n")
    writer.writeheader()
    writer.writerows(points)
    return text.getvalue()
