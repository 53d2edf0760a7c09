"""Whether averaging over steps and layers helps other scorers than attention (InertiaKV Appendix D, Table 11).

The paper asks it in benchmark points; here the measures are those of an irreversible open-loop replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from kvsim_traces import CaptureError, Trace, open_trace

from kvsim.candidates import candidates, reason, require_heads
from kvsim.engines import DEFAULT_ENGINE
from kvsim.engines.outcome import Progress
from kvsim.errors import KvsimError, PolicyError, unknown_name
from kvsim.grammar import format_part
from kvsim.plan import GROUP_KINDS, GroupKind
from kvsim.policies.ema import Ema
from kvsim.policy import parse
from kvsim.replay import choose_budget, replay_many
from kvsim.result import Result
from kvsim.scorers import Scorer

__all__ = ["BASE", "DEFAULT_ALPHAS", "MEASURES", "Transfer", "rules", "transfer"]

DEFAULT_ALPHAS = (0.8,)
BASE = "single"
MEASURES = ("kept_mass", "shadow_churn", "raw_agreement", "newest_kept")


@dataclass(frozen=True)
class Transfer:
    """Every scorer under every aggregation rule, on one recording.

    Attributes
    ----------
    trace_name, trace_hash : str
        The recording.
    budget : int
        Tokens kept in a group.
    group : {"shared", "layer", "head"}
        The retention groups.
    approximate : bool
        True where scores could not be renormalised over what is visible (a ``scores`` capture).
    rows : list of dict
        ``trace``, ``scorer``, ``rule``, ``policy``, each of `MEASURES`, and ``<measure>_change``: its difference from
        the row of `BASE` with the same scorer, None there and where the measure is not defined.
    left_out : dict of str to str
        Scorers that this recording cannot give, and why.
    """

    trace_name: str
    trace_hash: str
    budget: int
    group: GroupKind
    approximate: bool
    rows: list[dict[str, Any]] = field(repr=False)
    left_out: dict[str, str] = field(repr=False)


def rules(alphas: Sequence[float] = DEFAULT_ALPHAS, group: GroupKind = "shared") -> list[str]:
    """Name the aggregation rules to compare: `single` first, `ema` in its two forms, `cumulative`.

    In groups of one layer both forms of `ema` are the same rule, which is then named once.

    Raises
    ------
    KvsimError
        If an alpha is out of range or there is none.
    """
    if not alphas:
        raise KvsimError("name at least one alpha")
    overs: tuple[Literal["both", "step"], ...] = ("both", "step") if group == "shared" else ("both",)
    averages = [Ema(float(alpha), over=over) for over in overs for alpha in dict.fromkeys(alphas)]
    return [BASE, *map(format_part, averages), "cumulative"]


def transfer(
    trace: Trace | str | Path,
    scorers: Sequence[Scorer | str] | None = None,
    *,
    alphas: Sequence[float] = DEFAULT_ALPHAS,
    group: GroupKind = "shared",
    compression_ratio: float | str | Decimal | None = None,
    budget: int | str | None = None,
    engine: str = DEFAULT_ENGINE,
    progress: Progress | None = None,
) -> Transfer:
    """Replay every scorer by its newest scores alone, under an EMA, and accumulated, with equal groups and budgets.

    Parameters
    ----------
    trace : Trace or path
        The recording.
    scorers : sequence of Scorer or str, optional
        As after ``score=``; by default all that the recording can give.
    alphas : sequence of float
        Coefficients of the EMA.
    group : {"shared", "layer", "head"}
        Retention groups. In a shared one `single` ranks by the last layer alone, so what an EMA changes there is
        mostly the layers' weights; in the others it is memory of steps.
    compression_ratio, budget, engine
        As for `kvsim.replay`.
    progress : callable, optional
        Called with (scorers done, scorers in all).

    Returns
    -------
    Transfer

    Notes
    -----
    A scorer that gives a position the same score at every step is not unaffected: positions start from m = 0, so under
    an EMA or a sum those that came later have had less time to grow, and the retained set freezes. `newest_kept`, the
    share of steps whose own position is retained, shows it.

    Raises
    ------
    KvsimError
        On a bad scorer, alpha, group or budget, or a named scorer that the recording cannot give.
    TraceError
        If the recording is damaged, or lacks what a named scorer reads.
    """
    if group not in GROUP_KINDS:
        raise unknown_name("group", group, GROUP_KINDS)
    chosen = choose_budget(compression_ratio, budget)
    trace = trace if isinstance(trace, Trace) else open_trace(trace)
    parse(f"{BASE}/group={group}").plan(trace)
    named = rules(alphas, group)
    found, left_out = candidates(scorers)
    table: list[dict[str, Any]] = []
    for done, label in enumerate(found, start=1):
        policies = [parse(f"{rule}/score={label}/group={group}").with_budget(chosen) for rule in named]
        try:
            results = replay_many(trace, policies, engine=engine)
            require_heads(trace, results[0].plan.score, str(policies[0]))
        except (PolicyError, CaptureError) as error:
            if scorers is not None:
                raise
            left_out[label] = reason(error, trace, str(policies[0]))
        else:
            table += _rows(trace, label, named, results)
        if progress is not None:
            progress(done, len(found))
    size, approximate = chosen.resolve(trace.prompt_length), trace.capture == "scores"
    return Transfer(trace.path.name, trace.hash, size, group, approximate, table, dict(sorted(left_out.items())))


def _rows(trace: Trace, label: str, named: list[str], results: list[Result]) -> list[dict[str, Any]]:
    measured = [{name: result.summary()[name] for name in MEASURES} for result in results]
    rows = []
    for rule, result, own in zip(named, results, measured, strict=True):
        row = {"trace": trace.path.name, "scorer": label, "rule": rule, "policy": result.policy, **own}
        for name in MEASURES:
            before, after = measured[0][name], own[name]
            known = rule != BASE and before is not None and after is not None
            row[f"{name}_change"] = after - before if known else None
        rows.append(row)
    return rows
