"""Names of policy strings and the classes that they stand for."""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

__all__ = ["registrar"]


class Named(Protocol):
    """A class with the word that names it in a policy string."""

    name: ClassVar[Any]


NamedT = TypeVar("NamedT", bound=type[Named])


def registrar(known: dict[str, Any], kind: str) -> Callable[[NamedT], NamedT]:
    """Give the decorator that makes classes available under their `name`.

    Parameters
    ----------
    known : dict
        The classes by name; the decorator fills it.
    kind : str
        What they are, in the plural.
    """

    def register(cls: NamedT) -> NamedT:
        if cls.name in known:
            raise ValueError(f"two {kind} are named {cls.name!r}")
        known[cls.name] = cls
        return cls

    return register
