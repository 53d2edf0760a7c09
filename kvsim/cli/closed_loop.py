"""``kvsim replay --closed-loop``: the model runs again under the policy's own masks until nothing changes."""

from typing import Literal

from kvsim_traces import Trace

from kvsim.budget import Budget
from kvsim.cli.folding import PolicyText
from kvsim.cli.models import load, need_torch
from kvsim.cli.options import budget_note
from kvsim.cli.output import narrow_table, print_json, print_table, progress_bar, say
from kvsim.policy import Policy
from kvsim.result import Result

__all__ = ["Start", "run_closed_loop"]

Start = Literal["prefill", "trace"]


def run_closed_loop(
    traces: list[Trace],
    policies: list[Policy],
    budget: Budget,
    *,
    model: str,
    start: Start,
    max_passes: int | None,
    device: str | None,
    dtype: str | None,
    as_json: bool,
    quiet: bool,
) -> list[Result]:
    """Run every policy on every recording in closed loop, print what came out, and give the results."""
    need_torch("a closed loop", "live")
    network, tokenizer = load(model, dtype=dtype or "float32", device=device, quiet=quiet or as_json)

    from kvsim.live.closed_loop import closed_loop
    from kvsim.live.match import check_model
    from kvsim.live.prefix import prefill, prefix_of_trace, recorded_tokens

    for trace in traces:
        check_model(trace, network, tokenizer)
    rows, results = [], []
    for trace in traces:
        tokens = recorded_tokens(trace)
        if start == "trace":
            prefix = prefix_of_trace(trace, network)
        else:
            prefix = prefill(network, tokens[: trace.prompt_length], eligible=trace.eligible_layers, trace=trace)
        with progress_bar(trace.path.name, quiet=quiet or as_json) as advance:
            found = closed_loop(
                network,
                prefix,
                tokens[trace.prompt_length :],
                [policy.with_budget(budget) for policy in policies],
                max_passes=max_passes,
                progress=advance,
            )
        results += [one.result for one in found]
        rows += [one.summary() for one in found]
        if not as_json:
            _print(trace, policies, [one.summary() for one in found], budget)
    if as_json:
        print_json({"results": rows})
    return results


def _print(trace: Trace, policies: list[Policy], rows: list[dict[str, object]], budget: Budget) -> None:
    say(f"{trace.path.name}: prompt {trace.prompt_length}, steps {trace.num_steps}, closed loop")
    table = narrow_table("policy", gap=1)
    for name in ("B", "kept\nmass", "raw\nagreem.", "exact", "near-\nties", "passes"):
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for name in ("changed steps,\npass by pass", "Jaccard with\nlast pass"):
        table.add_column(name, vertical="bottom")
    for policy, row in zip(policies, rows, strict=True):
        changed, jaccard = row["changed"], row["jaccard_with_last"]
        assert isinstance(changed, list)
        assert isinstance(jaccard, list)
        table.add_row(
            PolicyText(str(policy)),
            f"{row['budget']:.10g}",
            f"{row['kept_mass']:.3f}",
            f"{row['raw_agreement']:.3f}",
            "yes" if row["exact"] else "no",
            str(row["near_ties"]),
            str(row["passes"]),
            _shortened([str(one) for one in changed]),
            _shortened([f"{one:.2f}" for one in jaccard]),
        )
    print_table(table)
    notes = ["irreversible", "closed loop", budget_note(budget)]
    if any(row["near_ties"] for row in rows):
        notes.append("exact up to near-ties: cuts that rounding could turn")
    if not all(row["exact"] for row in rows):
        notes.append("no: the last pass still changed steps; allow more --max-passes")
    say("; ".join(notes))


def _shortened(column: list[str]) -> str:
    """Give the first and the last of what there is for each pass; --json has all of it."""
    return " ".join(column if len(column) <= 5 else [*column[:2], "…", *column[-2:]])
