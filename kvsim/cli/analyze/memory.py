"""``kvsim analyze memory``: how far back a linear rule remembers."""

from typing import Annotated

import typer
from kvsim_traces import open_trace
from rich.text import Text

from kvsim.cli.options import AsJson, find_traces
from kvsim.cli.output import narrow_table, print_json, print_table
from kvsim.errors import KvsimError
from kvsim.memory import Memory

__all__ = ["memory"]


def memory(
    policy: Annotated[
        list[str], typer.Option("--policy", metavar="POLICY", help="Linear rule such as ema:0.8; repeatable.")
    ],
    layers: Annotated[int | None, typer.Option(metavar="K", help="Layers of the model.")] = None,
    trace: Annotated[str | None, typer.Option(metavar="DIR", help="Recording to take layers and steps from.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say how far back a linear rule remembers: in steps, in layers, and its state's share of earlier steps.

    A horizon is the sum of the weights in the state over the largest of them.
    With K = 32 layers and alpha 0.8 the previous step's weight is 0.8^32 = 0.0008.

    Example: kvsim analyze memory --policy ema:0.8 --policy ema:0.8,over=step --layers 32
    """
    from kvsim.memory import memory as measure

    if (layers is None) == (trace is None):
        raise KvsimError("give either --layers K or --trace DIR")
    steps = None
    if trace is not None:
        locations = find_traces([trace])
        if len(locations) > 1:
            raise KvsimError(f"--trace {trace}: matches {len(locations)} recordings; name one")
        recording = open_trace(locations[0])
        layers, steps = len(recording.eligible_layers), recording.num_steps
        if not layers:
            raise KvsimError(f"{recording.path}: no recorded layer is eligible for eviction")
    assert layers is not None
    found = [measure(text, layers, steps=steps) for text in policy]
    if as_json:
        print_json({"results": [one.summary() for one in found]})
        return
    _print_memory(found, steps)


def _print_memory(found: list[Memory], steps: int | None) -> None:
    names = ["layers", "previous step's\nweight", "horizon,\nsteps", "horizon,\nlayers", "last layer's\nshare"]
    names += ["earlier steps'\nshare"] + [f"after\n{steps} steps"] * (steps is not None)
    table = narrow_table("policy")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for one in found:
        numbers = [one.step_decay, one.horizon_steps, one.horizon_layers, one.last_layer_share, one.earlier_share]
        cells = ["unbounded" if value is None else f"{value:.4g}" for value in numbers]
        if one.earlier_share_last is not None:
            cells.append(f"{one.earlier_share_last:.4g}")
        table.add_row(Text(one.policy), str(one.layers), *cells)
    print_table(table)
