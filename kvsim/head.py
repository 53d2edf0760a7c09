"""Base classes of policy heads: a `Rule` draws up a plan, a `Preset` names a policy made of rules and axes."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, TypeVar

from kvsim.context import Context
from kvsim.plan import Plan

if TYPE_CHECKING:
    from kvsim.policy import Policy

__all__ = ["HEADS", "Head", "Preset", "Rule", "register"]


class Head(ABC):
    """The first word of a policy string; subclasses are frozen dataclasses whose fields are its arguments."""

    name: ClassVar[str]


class Rule(Head):
    """A head that turns scores into a ranking by itself."""

    @abstractmethod
    def plan(self, context: Context) -> Plan:
        """Draw up the plan for the trace and axes in `context`."""


class Preset(Head):
    """A published policy, as a name for a rule with axes."""

    @abstractmethod
    def expand(self) -> "Policy":
        """Give the policy that this name stands for."""


HEADS: dict[str, type[Head]] = {}

HeadT = TypeVar("HeadT", bound=type[Head])


def register(cls: HeadT) -> HeadT:
    """Make a head available in policy strings under its `name`."""
    if cls.name in HEADS:
        raise ValueError(f"two policies are named {cls.name!r}")
    HEADS[cls.name] = cls
    return cls
