"""Whether a trained write gate beats simpler admissions of equal cache size, and what eviction adds to it.

``python -m kvsim.admission_quality`` finds for each family and each mean cache size the parameter that gives it
(`kvsim.admission_quality.families`), and compares kept mass and output error on recordings and next-token loss in a
running model, with intervals paired by text (WG-KV Figs. 7 and 11); then admission and eviction, together and alone,
under a hard budget (appendix K). It needs numpy, numba and, for the running model, torch.

On recordings the attention of the full cache is renormalised: what admission does to prefill is not seen there.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.admission_quality.composition import BOTH, compositions
from kvsim.admission_quality.families import Families, SizeOf
from kvsim.admission_quality.recordings import Measured, Recordings
from kvsim.admission_quality.verdicts import HIGHER, Row, Verdict, verdict
from kvsim.budget import Budget
from kvsim.errors import KvsimError
from kvsim.policy import Policy
from kvsim.version import __version__
from kvsim.write_gate import load_gate

if TYPE_CHECKING:
    from kvsim.admission_quality.texts import LiveTexts

__all__ = ["OURS", "quality"]

OURS = "wgkv"
"""The family that is compared with the others."""

RowsOf = Callable[[Mapping[str, Policy]], list[Row]]


def quality(
    families: Families,
    sizes: Sequence[float | None],
    budgets: Sequence[Budget],
    *,
    recordings: Recordings | None = None,
    texts: "LiveTexts | None" = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
    save: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Compare admissions at equal sizes, and with eviction under hard budgets.

    Parameters
    ----------
    families : Families
    sizes : sequence of float or None
        Mean cache sizes, as shares of the full cache's; None for those that the gates have at their own thresholds.
    budgets : sequence of Budget
        Hard ones; compared on recordings, and in the model with the thresholds found on recordings.
    recordings : Recordings, optional
    texts : LiveTexts, optional
    seed : int
        Of the intervals.
    say : callable
        Takes progress, a line at a time.
    save : callable
        Takes the report after each section.

    Returns
    -------
    dict
        JSON data: ``equal_size`` and ``hard_budget``, lists of sections with ``where``, ``size`` or ``budget``,
        ``rows`` (``peak``: see `kvsim.admission_quality.recordings.Measured`), ``left_out`` (family:
        why) and ``verdicts``; and ``summary``, sentences.
    """
    report: dict[str, Any] = {
        "version": __version__,
        "gates": [{"name": Path(file).name, "hash": load_gate(file).hash} for file in families.gates],
        "window": families.window,
        "sink": families.sink,
        "tolerance": families.tolerance,
        "seed": seed,
        "equal_size": [],
        "hard_budget": [],
        "summary": [],
    }
    places: list[tuple[str, SizeOf, RowsOf]] = []
    if recordings is not None:
        places.append(("replay", recordings.size, lambda policies: _replayed(recordings, policies)))
    if texts is not None:
        places.append(("live", texts.size, lambda policies: _decoded(texts, policies)))

    def add(part: str, section: dict[str, Any]) -> None:
        report[part].append(section)
        report["summary"] = [*_summary(report["equal_size"], OURS), *_summary(report["hard_budget"], BOTH)]
        save(report)

    for where, size_of, rows_of in places:
        for target in _targets(sizes, families, size_of):
            say(f"{where}: cache size {target:g}")
            add("equal_size", _at_size(where, target, families, size_of, rows_of, seed))
    for budget in budgets if recordings is not None else ():
        assert recordings is not None
        for where, _, rows_of in places:
            say(f"{where}: budget {budget}")
            add("hard_budget", _under(where, budget, families, recordings, rows_of, seed))
    return report


def _targets(sizes: Sequence[float | None], families: Families, size_of: SizeOf) -> list[float]:
    own = sorted(size_of(families.gated(file)) for file in families.gates) if None in sizes else []
    return [target for size in sizes for target in (own if size is None else [size])]


def _at_size(
    where: str, target: float, families: Families, size_of: SizeOf, rows_of: RowsOf, seed: int
) -> dict[str, Any]:
    policies, left_out = {}, {}
    for name in families.names:
        try:
            policies[name] = families.match(name, target, size_of).policy
        except KvsimError as error:
            left_out[name] = str(error)
    rows = rows_of(policies) if policies else []
    verdicts = _verdicts(OURS, rows, f"{where} at {target:.0%}", seed, apart=2 * families.tolerance)
    return _section(where, rows, verdicts, left_out) | {"size": target}


def _under(
    where: str, budget: Budget, families: Families, recordings: Recordings, rows_of: RowsOf, seed: int
) -> dict[str, Any]:
    try:
        policies = compositions(families, recordings, budget)
    except KvsimError as error:
        return _section(where, [], [], {BOTH: str(error)}) | {"budget": str(budget)}
    rows = rows_of(policies)
    # What is equal is the budget; how much of it is used on average differs.
    verdicts = _verdicts(BOTH, rows, f"{where} within {budget}", seed, apart=None)
    return _section(where, rows, verdicts, {}) | {"budget": str(budget)}


def _verdicts(ours: str, rows: list[Row], where: str, seed: int, *, apart: float | None) -> list[Verdict]:
    known = {row.name: row for row in rows}
    if ours not in known:
        return []
    own = known.pop(ours)
    return [
        verdict(metric, own, rival, where, apart=apart, seed=seed)
        for rival in known.values()
        for metric in HIGHER
        if metric in own.values and metric in rival.values
    ]


def _section(where: str, rows: list[Row], verdicts: list[Verdict], left_out: dict[str, str]) -> dict[str, Any]:
    return {
        "where": where,
        "rows": [{**row.means(), "texts": row.values} for row in rows],
        "left_out": left_out,
        "verdicts": [one.to_dict() for one in verdicts],
    }


def _replayed(recordings: Recordings, policies: Mapping[str, Policy]) -> list[Row]:
    found = recordings.measure(list(policies.values()))
    return [_row(name, policy, own) for (name, policy), own in zip(policies.items(), found, strict=True)]


def _row(name: str, policy: Policy, found: Sequence[Measured]) -> Row:
    values: dict[str, list[float]] = {"peak": [one.peak for one in found]}
    for metric in ("kept_mass", "output_error"):
        known = [value for one in found if (value := getattr(one, metric)) is not None]
        if len(known) == len(found):
            values[metric] = known
    return Row(name, str(policy), sum(one.size for one in found) / len(found), values)


def _decoded(texts: "LiveTexts", policies: Mapping[str, Policy]) -> list[Row]:
    found = texts.measure(list(policies.values()))
    return [
        Row(
            name, str(policy), sum(one.cache_share for one in own) / len(own), {"loss": [one.loss for one in own]}
        )
        for (name, policy), own in zip(policies.items(), found, strict=True)
    ]  # fmt: skip


def _summary(sections: list[dict[str, Any]], ours: str) -> list[str]:
    """Say for each place and rival how many of the comparisons are won."""
    counts: dict[tuple[str, str], list[bool]] = {}
    for section in sections:
        for one in section["verdicts"]:
            counts.setdefault((section["where"], one["rival"]), []).append(one["beats"])
    lines = []
    for (where, rival), won in counts.items():
        beats = "beats" if all(won) else "does not beat"
        lines.append(f"{where}: {ours} {beats} {rival}: {sum(won)} of {len(won)} comparisons won")
    for section in sections:
        if section["left_out"]:
            what = f"size {section['size']:.0%}" if "size" in section else f"budget {section['budget']}"
            lines.append(f"{section['where']}, {what}: without {', '.join(section['left_out'])}")
    return lines
