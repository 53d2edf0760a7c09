"""``kvsim train-gate`` where typer is missing or old: ``python -m kvsim.train_gate``, with the same options."""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvsim_traces import TraceError
from kvsim_traces.loading import load_model

from kvsim.errors import KvsimError
from kvsim.gating.request import Request
from kvsim.gating.settings import Settings, numbers

__all__ = ["add_settings", "main", "settings_of"]


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Give a parser one option for each field of `Settings`."""
    for field in fields(Settings):
        name = f"--{field.name.replace('_', '-')}"
        options: dict[str, Any] = {"default": field.default, "dest": field.name}
        if field.name == "penalty":
            name = "--lambda"
        if field.name == "taus":
            options["default"] = ",".join(map(str, Settings.taus))
            parser.add_argument(name, metavar="TAU,…", **options)
        elif isinstance(field.default, bool):
            parser.add_argument(name, action="store_true", dest=field.name)
        else:
            kind = int if field.default is None else type(field.default)
            parser.add_argument(name, type=kind, **options)


def settings_of(options: argparse.Namespace) -> Settings:
    """Read `Settings` from what a parser with `add_settings` found."""
    given = {field.name: getattr(options, field.name) for field in fields(Settings)}
    return Settings(**given | {"taus": numbers(options.taus, "--taus")})


def main(arguments: list[str] | None = None) -> int:
    """Train, print and write."""
    parser = argparse.ArgumentParser(prog="python -m kvsim.train_gate", description="See 'kvsim train-gate'.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help=".txt, or .jsonl with a 'text' on each line")
    parser.add_argument("--out", type=Path, required=True, help="new safetensors file; with --sweep a new folder")
    parser.add_argument("--held-out-data", help="text to validate with")
    parser.add_argument("--sweep", metavar="LAMBDA,…", help="train a gate for each")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-q", "--quiet", action="store_true")
    try:
        add_settings(parser)
        options = parser.parse_args(arguments)
        penalties = None if options.sweep is None else numbers(options.sweep, "--sweep")
        settings = settings_of(options)
        request = Request(options.data, options.out, settings, options.held_out_data, penalties, options.resume)
        request.check()
        model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
        tell = None if options.quiet or options.json else lambda line: print(line, file=sys.stderr, flush=True)
        facts, told = request.run(model, tokenizer, tell)
    except (KvsimError, TraceError) as error:
        print(f"kvsim: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(facts, indent=2, allow_nan=False) if options.json else "\n".join(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
