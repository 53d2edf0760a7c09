"""Text form of the frozen dataclasses that policies are made of: ``name:arg,arg,key=value``.

Arguments come from the dataclass fields, so no policy writes a parser: ordinary fields are positional, keyword-only
fields are written ``key=value`` and left out while they hold their default. See `kvsim.policy` for whole policies.
"""

import dataclasses
import math
import re
import types
import typing
from typing import Any, TypeVar

from kvsim.errors import PolicyError, unknown_name

__all__ = ["format_float", "format_part", "parse_part", "parse_value"]

PartT = TypeVar("PartT")

_ESCAPES = {"%": "%25", ",": "%2C", "+": "%2B", "=": "%3D"}


def format_float(value: float) -> str:
    """Give the shortest text that parses back to `value`: 0.80 is ``0.8``, 1.0 is ``1``, -0.0 is ``0``."""
    text = repr(float(value) + 0.0)
    return text.removesuffix(".0")


def format_part(part: Any) -> str:
    """Write a part in its canonical form, such as ``ema:0.9,over=step``."""
    words = []
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.kw_only:
            if value != field.default:
                words.append(f"{field.name}={_format_value(value)}")
        else:
            words.append(_format_value(value))
    name: str = part.name
    return f"{name}:{','.join(words)}" if words else name


def parse_part(text: str, registry: dict[str, type[PartT]], what: str) -> PartT:
    """Read ``name[:arg,...]`` into an instance of the class registered under that name.

    Parameters
    ----------
    text : str
        The part as written, already cut out of the policy string.
    registry : dict
        Name to frozen dataclass.
    what : str
        How an error calls this kind of part.

    Raises
    ------
    PolicyError
        On an unknown name, an unknown, repeated, missing or superfluous argument, or a value of the wrong type.
    """
    name, colon, tail = text.partition(":")
    if name not in registry:
        raise unknown_name(what, name, registry)
    cls = registry[name]
    if colon and not tail:
        raise PolicyError(f"{what} {text!r} ends in ':' without an argument")
    fields = dataclasses.fields(typing.cast(Any, cls))
    positional = [f for f in fields if not f.kw_only]
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for index, word in enumerate(tail.split(",") if tail else []):
        key, equals, raw = word.partition("=")
        if not equals:
            if index >= len(positional) or len(values) > index:
                expected = ", ".join(f.name for f in positional) or "no positional argument"
                raise PolicyError(f"{what} {name!r} does not take {word!r} there (it takes {expected})")
            key, raw = positional[index].name, word
        if not fields:
            raise PolicyError(f"{what} {name!r} takes no arguments, got {word!r}")
        if key not in hints or key not in {f.name for f in fields}:
            raise unknown_name(f"argument of {name!r}", key, [f.name for f in fields])
        if key in values:
            raise PolicyError(f"argument {key!r} of {name!r} is given twice")
        values[key] = parse_value(raw, hints[key], f"{key} of {name!r}")
    missing = [
        f.name
        for f in fields
        if f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise PolicyError(f"{what} {name!r} needs {', '.join(missing)}, as in {name}:{missing[0].upper()}")
    return cls(**values)


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return format_float(value)
    return "".join(_ESCAPES.get(ch, ch) for ch in str(value))


def parse_value(raw: str, hint: Any, where: str) -> Any:
    """Read the value of one argument, written as in a policy string.

    Parameters
    ----------
    raw : str
        The value as written.
    hint : type
        The annotation of the argument's dataclass field.
    where : str
        How an error calls the argument.

    Raises
    ------
    PolicyError
        If the value is not of that type.
    """
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        if raw not in choices:
            raise unknown_name(where, raw, choices)
        return raw
    if typing.get_origin(hint) is types.UnionType:
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    try:
        if hint is bool:
            return {"true": True, "false": False}[raw]
        if hint is int:
            if not re.fullmatch(r"-?[0-9]{1,18}", raw):
                raise ValueError
            return int(raw)
        if hint is float:
            value = float(raw)
            if not math.isfinite(value):
                raise ValueError
            return value
    except (ValueError, KeyError):
        kind = {bool: "true or false", int: "a whole number of at most 18 digits", float: "a finite number"}[hint]
        raise PolicyError(f"{where} must be {kind}, got {raw!r}") from None
    for char, escape in reversed(_ESCAPES.items()):
        raw = raw.replace(escape, char)
    return raw
