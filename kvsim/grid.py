"""Grids of policies: base policies, and the values that a sweep gives to their arguments and axes.

A setting is an argument of the policy's head (``alpha`` of ``ema``), an axis (``refresh``, ``group``, …) or
``compression_ratio``. Every setting applies to every base policy and replaces what the policy says itself.
"""

import dataclasses
import itertools
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from kvsim.budget import DEFAULT_COMPRESSION_RATIO, Budget
from kvsim.errors import KvsimError, PolicyError, unknown_name
from kvsim.grammar import format_float, parse_value
from kvsim.policy import AXES, Policy, parse

__all__ = ["expand_grid", "parse_settings", "setting_of"]

RATIO = "compression_ratio"


def parse_settings(texts: Sequence[str]) -> dict[str, list[str]]:
    """Read settings such as ``alpha=0,0.3,0.6``.

    Parameters
    ----------
    texts : sequence of str
        ``NAME=VALUE,VALUE,…``, each name once; a comma within a value is written ``%2C``.

    Returns
    -------
    dict of str to list of str
        The values of each name, spelled as in a policy string.

    Raises
    ------
    KvsimError
        If one is malformed or a name is repeated.
    """
    settings: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        split = values.split(",")
        if not (name and equals and all(split)):
            raise KvsimError(f"a setting is NAME=VALUE,VALUE,… as in alpha=0.6,0.8, got {text!r}")
        if name in settings:
            raise KvsimError(f"setting {name!r} is given twice; give all its values at once, as in {name}=V1,V2")
        # In an axis a comma separates arguments; one within an argument is escaped twice.
        settings[name] = [v.replace("%2C", ",").replace("%25", "%") for v in split] if name in AXES else split
    return settings


def expand_grid(policies: Sequence[Policy | str], grid: Mapping[str, Sequence[Any]]) -> list[Policy]:
    """Give every combination of the base policies and the values of the settings.

    Parameters
    ----------
    policies : sequence of Policy or str
        The base policies.
    grid : mapping of str to sequence
        The values of each setting: numbers, or text as in a policy string.

    Returns
    -------
    list of Policy
        Each with its budget, the last setting varying fastest; what is equal in canonical form occurs once.

    Raises
    ------
    PolicyError
        If a policy has no such setting (the message lists those it has), or a value is not valid.
    KvsimError
        If a setting has no values, or both ``budget`` and ``compression_ratio`` are set.
    """
    bases = [parse(policy) if isinstance(policy, str) else policy for policy in policies]
    if RATIO in grid and "budget" in grid:
        raise KvsimError("set compression_ratio or budget, not both")
    for name, values in grid.items():
        if isinstance(values, str) or not len(values):
            raise KvsimError(f"setting {name!r} needs a list of values, got {values!r}")
        for base in bases:
            valid = [*AXES, RATIO, *_arguments(base)]
            if name not in valid:
                raise PolicyError(f"policy {base}: {unknown_name('setting', name, valid)}")
    found: dict[str, Policy] = {}
    for base in bases:
        for values in itertools.product(*grid.values()):
            policy = _with_settings(base, dict(zip(grid, values, strict=True)))
            found.setdefault(str(policy), policy)
    return list(found.values())


def setting_of(policy: Policy, name: str) -> float | str | None:
    """Give the value that a policy has for a setting, whoever set it.

    Parameters
    ----------
    policy : Policy
        A policy with its budget.
    name : str
        The setting.

    Returns
    -------
    bool, int, float, str or None
        A number or text for an argument, a float for ``compression_ratio``, text as in a policy string for an axis;
        None where the policy has no such argument, or no such budget.
    """
    if name == RATIO:
        keep = policy.budget.keep_ratio if policy.budget else None
        return None if keep is None else float(1 - keep)
    if name in AXES:
        value = policy.group_kind if name == "group" else getattr(policy.expand(), name)
        value = AXES[name].default if value is None else value
        return None if value is None else AXES[name].write(value)
    argument: float | str | None = getattr(policy.head, name) if name in _arguments(policy) else None
    return argument


def _arguments(policy: Policy) -> list[str]:
    return [field.name for field in dataclasses.fields(typing.cast(Any, policy.head))]


def _with_settings(base: Policy, settings: dict[str, Any]) -> Policy:
    hints = typing.get_type_hints(type(base.head))
    budget: Budget | None = None
    axes: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for name, value in settings.items():
        if name == RATIO:
            budget = Budget.from_compression_ratio(value)
        elif name == "budget":
            budget = Budget.parse(_spelled(value))
        elif name in AXES:
            axes[name] = AXES[name].read(_spelled(value))
        else:
            arguments[name] = parse_value(_spelled(value), hints[name], f"{name} of {base.head.name!r}")
    head = dataclasses.replace(typing.cast(Any, base.head), **arguments)
    # All at once: an axis equal to what a preset implies is dropped, which depends on the preset's arguments.
    own = {axis: getattr(base, axis) for axis in AXES} | axes
    if budget is not None:
        own["budget"] = None
    return Policy(head, **own).with_budget(budget or Budget.from_compression_ratio(DEFAULT_COMPRESSION_RATIO))


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return format_float(value) if isinstance(value, float) else str(value)
