"""``kvsim policies``."""

import dataclasses
import inspect
import typing
from typing import Annotated, Any

import typer
from rich.table import Table

from kvsim.cli.output import console, print_json
from kvsim.errors import unknown_name
from kvsim.grammar import format_part
from kvsim.head import HEADS, Preset
from kvsim.policy import AXES, parse
from kvsim.scorers import SCORERS

__all__ = ["policies"]


def policies(
    name: Annotated[str | None, typer.Argument(help="A policy or scorer name, or a whole policy string.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the policies and scorers, or explain one: its arguments, its source, and what a preset expands to."""
    if name is None:
        entries = [_entry(cls) for cls in [*_sorted(HEADS), *_sorted(SCORERS)]]
        if as_json:
            print_json({"policies": entries, "axes": list(AXES)})
        else:
            _print_list(entries)
        return
    if name in SCORERS and name not in HEADS:
        entry = _entry(SCORERS[name])
    elif name in HEADS:
        entry = _entry(HEADS[name])
    elif ":" in name or "/" in name:
        policy = parse(name)
        entry = {**_entry(type(policy.head)), "canonical": str(policy), "expands_to": str(policy.expand())}
    else:
        raise unknown_name("policy", name, [*HEADS, *SCORERS])
    if as_json:
        print_json(entry)
        return
    console.print(f"[bold]{entry['name']}[/bold] ({entry['kind']})", highlight=False)
    console.print(entry["doc"], highlight=False, markup=False)
    for label, key in (("canonical", "canonical"), ("expands to", "expands_to")):
        if entry.get(key):
            console.print(f"{label}: {entry[key]}", highlight=False, markup=False)


def _sorted(registry: dict[str, Any]) -> list[Any]:
    return [registry[name] for name in sorted(registry)]


def _entry(cls: type[Any]) -> dict[str, Any]:
    fields = dataclasses.fields(cls)
    required = [f.name for f in fields if f.default is dataclasses.MISSING]
    default = None if required else cls()
    is_preset = issubclass(cls, Preset)
    hints = typing.get_type_hints(cls)
    return {
        "name": cls.name,
        "kind": "preset" if is_preset else "scorer" if cls in SCORERS.values() else "rule",
        "summary": (inspect.getdoc(cls) or "").partition("\n")[0],
        "doc": inspect.getdoc(cls) or "",
        "arguments": {f.name: str(getattr(hints[f.name], "__name__", hints[f.name])) for f in fields},
        "example": cls.name if default is None else format_part(default),
        "expands_to": str(default.expand()) if is_preset and default is not None else None,
    }


def _print_list(entries: list[dict[str, Any]]) -> None:
    for kind, title in (("rule", "rules"), ("preset", "presets"), ("scorer", "scorers (score=…)")):
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        table.add_column("name", no_wrap=True)
        if kind == "preset":
            table.add_column("expands to", overflow="fold")
        table.add_column("what it does")
        for entry in (e for e in entries if e["kind"] == kind):
            middle = [entry["expands_to"]] if kind == "preset" else []
            table.add_row(entry["example"], *middle, entry["summary"])
        console.print(table)
    console.print(f"axes: {', '.join(f'{axis}=' for axis in AXES)}   (kvsim policies NAME explains one)", markup=False)
