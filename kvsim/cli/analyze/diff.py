"""``kvsim analyze diff``: which tokens one policy keeps and another does not."""

from typing import Annotated, Literal

import typer
from kvsim_traces import open_trace
from rich.text import Text

from kvsim.anatomy import Anatomy, Difference, dissect
from kvsim.cli.folding import PolicyText
from kvsim.cli.options import (
    AsJson,
    BudgetText,
    CompressionRatio,
    EngineName,
    Quiet,
    Shadow,
    Traces,
    budget_note,
    find_traces,
)
from kvsim.cli.output import narrow_table, print_json, print_table, progress_bar, say
from kvsim.engines import DEFAULT_ENGINE
from kvsim.errors import KvsimError
from kvsim.plan import GroupKind
from kvsim.policy import parse
from kvsim.replay import choose_budget, replay_many

__all__ = ["diff"]


def diff(
    policy: Annotated[list[str], typer.Argument(metavar="A B [C]...", help="Policies; every other beside the first.")],
    trace: Traces = None,
    compression_ratio: CompressionRatio = None,
    budget: BudgetText = None,
    shadow: Shadow = False,
    engine: EngineName = DEFAULT_ENGINE,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="Tokens shown for each pair of policies.")] = 10,
    by: Annotated[
        Literal["group", "token"] | None,
        typer.Option(help="A row for each group and token, or for each token; token where there are several groups."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Say which tokens one policy keeps and another does not, since when, and what they get later.

    mass after: attention that the full cache's rows give the token at all steps after the parting,
    averaged over the group's layers and heads.
    gained: the part of it that the keeper alone could see, by which tokens are sorted; its sum over
    all tokens is the difference in kept mass, over all steps.
    By token, mass after and gained are sums over the groups in which it parted the policies (in kept mass, their
    share is that over the number of groups), and groups says in how many who gained held it alone, and the other.
    Steps are equal where all policies retain the same sets. Compare policies with the same group=.

    Example: kvsim analyze diff ema:0.8 cumulative --trace traces/samples/smollm2-needle-512
    """
    if len(policy) < 2:
        raise KvsimError(f"name at least two policies to compare, got {policy[0]}")
    chosen = choose_budget(compression_ratio, budget)
    asked = [parse(text).with_budget(chosen) for text in policy]
    names = {str(own): str(parse(text)) for own, text in zip(asked, policy, strict=True)}
    found = []
    for recording in [open_trace(location) for location in find_traces(trace or [])]:
        with progress_bar(recording.path.name, quiet=quiet or as_json) as advance:
            results = replay_many(recording, asked, shadow=shadow, shadow_churn=False, raw=False, engine=engine)
            found.append(dissect(results, recording, progress=advance))
    share = sum(one.invariant for one in found) / len(found)
    if as_json:
        print_json({"invariant_traces": share, "results": [one.summary(limit) for one in found]})
        return
    for one in found:
        say(f"{one.trace_name}: all sets equal after {one.invariant_steps:.1%} of the steps")
        _print_pairs(one, names)
        for pair in one.pairs:
            if limit and pair.count:
                if by == "token" or (by is None and pair.groups.count > 1):
                    _print_tokens(pair, names, limit)
                else:
                    _print_partings(pair, names, limit, shadow=shadow)
    if len(found) > 1:
        say(f"recordings with all sets equal after every step: {sum(one.invariant for one in found)} of {len(found)}")
    say(f"{'shadow mode: nothing is evicted' if shadow else 'irreversible; open loop'}; {budget_note(chosen)}")


def _print_pairs(found: Anatomy, names: dict[str, str]) -> None:
    table = narrow_table(f"{names[found.policies[0]]} and")
    for name in ("equal\nsteps", "mean\nJaccard", "last\nJaccard", "tokens\nparted"):
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for pair in found.pairs:
        jaccard = f"{pair.jaccard.mean():.3f}", f"{pair.jaccard[-1]:.3f}"
        table.add_row(PolicyText(names[pair.b]), f"{pair.equal.mean():.1%}", *jaccard, f"{pair.count}")
    print_table(table)


def _print_tokens(pair: Difference, names: dict[str, str], limit: int) -> None:
    say(f"sums over {pair.groups.count} group{'s' * (pair.groups.count > 1)}, each of them {_each(pair.groups.kind)}")
    table = narrow_table("token")
    for name in ("position", "first\nparted", "groups:\ngainer's", "groups:\nother's", "mass\nafter", "gained"):
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    table.add_column("gained by", overflow="fold", vertical="bottom")
    for one in pair.tokens(limit):
        cells = [str(one.position), str(one.parted), str(one.groups_gained_by), str(one.groups_other)]
        cells += [f"{one.mass_after:.4f}", f"{one.mass_gained:.4f}"]
        token = Text("-" if one.token is None else repr(one.token))
        table.add_row(token, *cells, PolicyText(names[one.gained_by]))
    print_table(table)


def _each(kind: GroupKind) -> str:
    return {"shared": "all layers", "layer": "a layer", "head": "a KV head of a layer"}[kind]


def _print_partings(pair: Difference, names: dict[str, str], limit: int, *, shadow: bool) -> None:
    table = narrow_table("token")
    several = pair.groups.count > 1
    columns = ["position", "parted\nat step"] + ["lost by\nboth at"] * (not shadow) + ["mass\nafter", "gained"]
    if several:
        table.add_column("group", no_wrap=True, vertical="bottom")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    table.add_column("kept by", overflow="fold", vertical="bottom")
    for one in pair.worst(limit):
        cells = [one.group] * several + [str(one.position), str(one.parted)]
        cells += ["-" if one.held_until is None else str(one.held_until)] * (not shadow)
        cells += [f"{one.mass_after:.4f}", f"{one.mass_gained:.4f}"]
        token = Text("-" if one.token is None else repr(one.token))
        table.add_row(token, *map(Text, cells), PolicyText(names[one.kept_by]))
    print_table(table)
