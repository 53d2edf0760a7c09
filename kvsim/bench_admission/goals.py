"""What the measurements are held against, how long they will take, and how they are printed."""

from collections.abc import Iterable, Sequence
from typing import Any

from kvsim.bench_admission.dense import BASE, dense_names
from kvsim.bench_admission.models import Setting
from kvsim.costs import Shape, causal_pairs

__all__ = ["GOAL_LENGTH", "OURS", "estimate_seconds", "goals", "lines"]

GOAL_LENGTH = 400_000
OURS = "vertical-slash"

_RATES = {BASE: 3.2e14, "cuDNN": 4.8e14, "flash-attn-4": 6.3e14, OURS: 4.6e14, "SDPA math": 1e14}
_PRODUCTS, _BYTES, _START, _MODEL = 5.5e14, 3.0e12, 60.0, 15.0
"""Operations and bytes a second of an H200 that `estimate_seconds` counts with; seconds to start, and for a model."""


def estimate_seconds(
    shapes: Iterable[Shape], lengths: Sequence[int], parts: Sequence[str], whole: Sequence[int], setting: Setting
) -> float:
    """Estimate the seconds on an H200 that a selection takes, checks and compilation included."""
    total = _START
    for shape in shapes:
        total += _MODEL
        for length in lengths:
            dense = 4 * shape.head_dim * shape.heads * causal_pairs(length)
            sparse = 4 * shape.head_dim * shape.heads * causal_pairs(length, setting.window, setting.admitted)
            layer = {name: dense / _RATES[name] for name in dense_names(on_gpu=True)}
            layer[OURS] = sparse / _RATES[OURS]
            if "run" in parts:
                attended = shape.layers if length in whole else 1
                total += attended * (layer[BASE] + layer[OURS])
                total += 2 * 2 * shape.layer_weights * length / _PRODUCTS
                cached = shape.cached(length) * 4 * shape.head_dim
                for times, share in ((2, 1.0), (1, setting.admitted)):
                    total += times * setting.all_steps * (2 * shape.read_weights + share * cached) / _BYTES
                # Plans of 256 rows and more, on the host; fewer than PROBED steps of an attention that splits nothing.
                total += 6 + 10 * cached / 3e11
            if "attention" in parts:
                known = (BASE, OURS) if "run" in parts and length in whole else ()
                total += setting.repeats * sum(seconds for name, seconds in layer.items() if name not in known)
    return total


def goals(rows: Iterable[dict[str, Any]], model: str, length: int = GOAL_LENGTH) -> list[dict[str, Any]]:
    """Hold rows of one model and length against the goals.

    Returns
    -------
    list of dict
        ``name``, ``value`` (None where it was not measured), ``goal`` and ``met`` (None likewise).
    """
    row = next((own for own in rows if own["model"] == model and own["length"] == length), {})
    ratios, attention = row.get("prefill_ratio", {}), row.get("attention_ratio", {})
    wanted = [
        (f"prefill beside {BASE}", ratios.get(BASE), 4.3),
        ("vertical-slash attention beside cuDNN", attention.get("cuDNN"), 3.7),
        (f"vertical-slash attention beside {BASE}", attention.get(BASE), 5.5),
        ("vertical-slash attention beside flash-attn-4", attention.get("flash-attn-4"), 2.8),
        ("decode, share of the ratio that bytes allow", row.get("decode", {}).get("of_allowed"), 0.9),
        ("peak memory, share that is saved", row.get("memory_saved"), 0.5),
    ]
    return [
        {
            "name": f"{model}, {length:,}: {name}", "value": value, "goal": f"at least {aim:g}",
            "met": None if value is None else bool(value >= aim),
        }
        for name, value, aim in wanted
    ]  # fmt: skip


def _said(aim: dict[str, Any]) -> str:
    if aim["value"] is None:
        return f"{aim['name']}: not measured (goal {aim['goal']})"
    return f"{aim['name']}: {aim['value']:.3f}, goal {aim['goal']}: {'met' if aim['met'] else 'NOT met'}"


def row_lines(row: dict[str, Any]) -> list[str]:
    """Give one model and length as lines for people."""
    said = [f"{row['model']}, {row['length']:,} tokens"]
    for name, found in row.get("attention", {}).items():
        ratio = row.get("attention_ratio", {}).get(name)
        beside = "" if ratio is None else f", {ratio:.2f} x {OURS}"
        said.append(
            f"  attention of a layer, {name}: " + (found if isinstance(found, str) else f"{found:.2f} ms{beside}")
        )
    for name, own in row.get("prefill", {}).items():
        how = "composed" if own["composed"] else "whole"
        ratio = row.get("prefill_ratio", {}).get(name)
        beside = "" if ratio is None else f", {ratio:.2f} x the dual cache"
        parts = ", ".join(f"{part} {ms / 1e3:.2f}" for part, ms in own["parts"].items())
        said.append(f"  prefill, {name} ({how}): {own['ms'] / 1e3:.2f} s{beside} [{parts}]")
    for name, run in row.get("runs", {}).items():
        if "error" in run:
            said.append(f"  {name} cache: {run['error']}")
            continue
        if "error" in run["decode"]:
            said.append(f"  decode, {name} cache: {run['decode']['error']}")
        else:
            kernels = ", ".join(f"{part} {ms:.2f}" for part, ms in run["decode"].get("kernels", {}).items())
            said.append(
                f"  decode, {name} cache: {run['decode']['ms']:.3f} ms a step ({run['decode']['attention']})"
                + (f" [{kernels}]" if kernels else "")
            )
        if run.get("peak_bytes") is not None:
            said.append(f"  peak memory, {name} cache: {run['peak_bytes'] / 1e9:.1f} GB, weights included")
    if "decode" in row:
        own = row["decode"]
        said.append(
            f"  decode: {own['ratio']:.2f} x, {own['of_allowed']:.1%} of the {own['allowed']:.2f} x that bytes allow"
        )
    if "memory_saved" in row:
        said.append(f"  peak memory: {row['memory_saved']:.1%} lower")
    said += [f"  {row[name]}" for name in ("error",) if name in row]
    return said


def lines(report: dict[str, Any]) -> list[str]:
    """Give a report as lines for people."""
    said = [f"{name}: {value}" for name, value in report["machine"].items()]
    said.append(
        f"window {report['window']}, {report['admitted']:.0%} admitted; composed: the attention of a layer times the "
        "layers, and everything else measured in all layers"
    )
    for row in report["rows"]:
        said += row_lines(row)
    return [*said, *(_said(aim) for aim in report["goals"]), *(f"WRONG: {word}" for word in report["wrong"])]
