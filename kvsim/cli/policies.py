"""``kvsim policies``."""

import dataclasses
import inspect
import itertools
import typing
from typing import Annotated, Any

import typer
from rich.table import Table

from kvsim.admissions import ADMISSIONS
from kvsim.cli.folding import PolicyText
from kvsim.cli.options import AsJson
from kvsim.cli.output import print_json, print_table, say
from kvsim.errors import unknown_name
from kvsim.grammar import format_part
from kvsim.head import HEADS, Preset
from kvsim.policy import AXES, parse
from kvsim.scorers import SCORERS
from kvsim.selections import SELECTIONS

__all__ = ["policies"]

REGISTRIES: dict[str, dict[str, Any]] = {
    "rule": HEADS,
    "scorer": SCORERS,
    "admission": ADMISSIONS,
    "selection": SELECTIONS,
}
"""What may be explained by its name, and what it is called; a preset is in the first one too."""


def policies(
    name: Annotated[
        str | None,
        typer.Argument(help="A policy, scorer, admission, selection, axis or argument, or a whole policy string."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List policies, scorers, admissions, selections and axes, or explain one.

    Its arguments, its source, and what a preset expands to.
    """
    if name is None:
        entries = [_entry(cls) for cls in _classes()]
        if as_json:
            print_json({"policies": entries, "axes": [_axis_entry(axis) for axis in AXES]})
        else:
            _print_list(entries)
        return
    entries = [_entry(registry[name]) for registry in REGISTRIES.values() if name in registry]
    if name in AXES:
        entries.append(_axis_entry(name))
    elif not entries and (":" in name or "/" in name):
        policy = parse(name)
        entries = [{**_entry(type(policy.head)), "canonical": str(policy), "expands_to": str(policy.expand())}]
    elif not entries:
        entries = _argument_entries(name)
    if not entries:
        known = {*AXES, *_arguments()}.union(*REGISTRIES.values())
        raise unknown_name("policy, scorer, admission, selection, axis or argument", name, known)
    if as_json:
        print_json(entries[0] if len(entries) == 1 else {"entries": entries})
        return
    for entry in entries:
        say(f"{entry['name']} ({entry['kind']})", style="bold")
        if entry["doc"]:
            say(entry["doc"])
        for key in ("values", "default", "example", "canonical", "expands_to"):
            if entry.get(key):
                say(f"{key.replace('_', ' ')}: {entry[key]}")


def _axis_entry(name: str) -> dict[str, Any]:
    axis = AXES[name]
    default = None if axis.default is None else axis.write(axis.default)
    facts = {"values": axis.values, "default": default, "example": axis.example}
    return {"name": name, "kind": "axis", "doc": axis.doc, **facts}


def _arguments() -> dict[str, list[type[Any]]]:
    """Give the policies, scorers, admissions and selections that have each argument."""
    owners: dict[str, list[type[Any]]] = {}
    for cls in _classes():
        for one in dataclasses.fields(cls):
            owners.setdefault(one.name, []).append(cls)
    return owners


def _argument_entries(name: str) -> list[dict[str, Any]]:
    """Explain an argument in the words of everything that has it."""
    entries = []
    for cls in _arguments().get(name, []):
        of = _entry(cls)
        (one,) = (field for field in dataclasses.fields(cls) if field.name == name)
        default = None if one.default in (dataclasses.MISSING, None) else str(one.default)
        own = {"name": name, "kind": f"argument of the {of['kind']} {of['name']}", "of": of["name"]}
        entries.append({**own, "doc": _about(of["doc"], name), "default": default})
    return entries


def _about(doc: str, name: str) -> str:
    """Cut the lines on one attribute out of a docstring."""
    lines = doc.splitlines()
    first = next((place for place, line in enumerate(lines) if line.partition(" : ")[0] == name), None)
    if first is None:
        return ""
    rest = itertools.takewhile(lambda line: line.startswith("    "), lines[first + 1 :])
    return "\n".join([lines[first], *rest])


def _classes() -> list[Any]:
    return [registry[name] for registry in REGISTRIES.values() for name in sorted(registry)]


def _entry(cls: type[Any]) -> dict[str, Any]:
    fields = dataclasses.fields(cls)
    required = [f.name for f in fields if f.default is dataclasses.MISSING]
    default = None if required else cls()
    is_preset = issubclass(cls, Preset)
    hints = typing.get_type_hints(cls)
    return {
        "name": cls.name,
        "kind": "preset" if is_preset else next(kind for kind, own in REGISTRIES.items() if cls in own.values()),
        "summary": (inspect.getdoc(cls) or "").partition("\n")[0],
        "doc": inspect.getdoc(cls) or "",
        "arguments": {f.name: str(getattr(hints[f.name], "__name__", hints[f.name])) for f in fields},
        "example": f"{cls.name}:{','.join(required).upper()}" if default is None else format_part(default),
        "expands_to": str(default.expand()) if is_preset and default is not None else None,
    }


def _print_list(entries: list[dict[str, Any]]) -> None:
    titles = {
        "rule": "rules",
        "preset": "presets",
        "scorer": "scorers (score=…)",
        "admission": "admissions (admit=…)",
        "selection": "selections (select=…)",
    }
    for kind, title in titles.items():
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        table.add_column("name", no_wrap=True)
        if kind == "preset":
            table.add_column("expands to", overflow="fold")
        table.add_column("what it does")
        for entry in (e for e in entries if e["kind"] == kind):
            middle = [PolicyText(entry["expands_to"])] if kind == "preset" else []
            table.add_row(entry["example"], *middle, entry["summary"])
        print_table(table)
    table = Table(title="axes", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("name", "values", "what it does"):
        table.add_column(column, overflow="fold")
    for name, axis in AXES.items():
        table.add_row(f"/{name}=", axis.values, axis.doc)
    print_table(table)
    say("kvsim policies NAME explains one of them")
