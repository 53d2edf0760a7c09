"""Engines run plans on traces; all of them return what `kvsim.engines.reference` returns."""

from collections.abc import Callable

from kvsim.engines.outcome import Outcome
from kvsim.engines.reference import run as _reference
from kvsim.errors import unknown_name

__all__ = ["DEFAULT_ENGINE", "ENGINES", "Outcome", "get_engine"]

ENGINES: dict[str, Callable[..., Outcome]] = {"reference": _reference}

DEFAULT_ENGINE = "reference"


def get_engine(name: str) -> Callable[..., Outcome]:
    """Look an engine up by name.

    Raises
    ------
    PolicyError
        On an unknown name; the message lists the engines there are.
    """
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    return ENGINES[name]
