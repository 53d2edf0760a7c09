"""Policies: a frozen dataclass, and the string that mirrors it.

::

    policy = head ("/" axis "=" value)*           each axis once, any order
    value  = part ("+" part)*     part = name [":" arg ("," arg)*]     positional first, then key=value

``str(policy)`` is canonical and keys every result; ``parse(str(policy)) == policy``.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kvsim_traces import CaptureError, Trace

from kvsim.admissions import ADMISSIONS, Admit
from kvsim.admitting import admit_into
from kvsim.budget import Budget
from kvsim.context import Context
from kvsim.errors import PolicyError, unknown_name
from kvsim.grammar import format_part, parse_part
from kvsim.head import HEADS, Head, Preset, Rule
from kvsim.plan import GROUP_KINDS, GroupKind, Groups, Plan
from kvsim.protect import Protect
from kvsim.scorers import SCORERS, Scorer
from kvsim.scorers.attention import Attention
from kvsim.selections import SELECTIONS, Select
from kvsim.when import When

__all__ = ["AXES", "Policy", "parse"]


DEFAULT_SCORE: Scorer = Attention()
DEFAULT_REFRESH = 1
DEFAULT_GROUP: GroupKind = "shared"
DEFAULT_WHEN = When()


@dataclass(frozen=True)
class Policy:
    """What a cache takes in, keeps and reads: a head and the axes that modify it.

    An axis that is None, or equal to what it would be anyway, takes the head's value and is left out of the string.

    Attributes
    ----------
    head : Head
        A rule (`single`, `cumulative`, `ema:0.8`, `full`) or a preset (`tova`, `h2o`, …).
    score : Scorer, optional
        What a token is worth to one step; attention by default.
    refresh : int or "first", optional
        Steps between two scorings (InertiaKV Eq. 6), or only the first step (Score-Free).
    group : {"shared", "layer", "head"}, optional
        Who shares a retained set.
    budget : Budget, optional
        Tokens kept; beats the command line's.
    protect : Protect, optional
        Positions that are not evicted while others remain.
    when : When, optional
        Evict after every step, once before the first and never again, or in batches on overflow.
    admit : Admit, optional
        Which positions stay when they leave the local window; all by default. It implies ``group="head"``.
    select : Select, optional
        Which of the visible positions a query reads; all by default.
    """

    head: Head
    score: Scorer | None = None
    refresh: int | Literal["first"] | None = None
    group: GroupKind | None = None
    budget: Budget | None = None
    protect: Protect | None = None
    when: When | None = None
    admit: Admit | None = None
    select: Select | None = None

    def __post_init__(self) -> None:
        for axis, (kinds, hint) in _TYPES.items():
            if getattr(self, axis) is not None and not isinstance(getattr(self, axis), kinds):
                raise PolicyError(f"{axis} must be {hint}, got {getattr(self, axis)!r}")
        whole = isinstance(self.refresh, int) and not isinstance(self.refresh, bool) and self.refresh >= 1
        if self.refresh is not None and self.refresh != "first" and not whole:
            raise PolicyError(f"refresh must be a number of steps of at least 1, or 'first', got {self.refresh!r}")
        if self.group is not None and self.group not in GROUP_KINDS:
            raise unknown_name("group", self.group, GROUP_KINDS)
        base = self._expanded_head() if isinstance(self.head, Preset) else None
        admits = self.admit is not None or (base is not None and base.admit is not None)
        if admits and self.group not in (None, "head"):
            raise PolicyError(f"admit= decides for each KV head and implies group=head, got group={self.group}")
        for axis, spec in AXES.items():
            inherited = getattr(base, axis) if base else None
            if axis == "group" and admits:
                inherited = "head"
            if getattr(self, axis) == (spec.default if inherited is None else inherited):
                object.__setattr__(self, axis, None)

    def _expanded_head(self) -> "Policy":
        assert isinstance(self.head, Preset)
        try:
            return self.head.expand()
        except PolicyError as error:
            raise PolicyError(f"{format_part(self.head)}: {error}") from None

    def expand(self) -> "Policy":
        """Replace a preset by the rule and axes it stands for; a rule stays as it is."""
        if not isinstance(self.head, Preset):
            return self
        base = self.head.expand()
        own = {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) is not None}
        if self.admit is not None:
            own["group"] = "head"
        return dataclasses.replace(base, **own).expand()

    def with_budget(self, budget: Budget) -> "Policy":
        """Give the policy with `budget` where it states none of its own; `full` takes none."""
        if self.budget is not None or self.head.name == "full":
            return self
        return dataclasses.replace(self, budget=budget)

    @property
    def group_kind(self) -> GroupKind:
        """Who shares a retained set, whoever says so."""
        policy = self.expand()
        return "head" if policy.admit is not None else policy.group or DEFAULT_GROUP

    @property
    def admits(self) -> bool:
        """Whether it decides what the cache takes in; such a policy has no shadow mode."""
        return self.expand().admit is not None

    @property
    def needs_future(self) -> bool:
        """Whether it reads what later queries attend to: it can be replayed, and never run live."""
        policy = self.expand()
        return policy.head.needs_future or (policy.admit is not None and policy.admit.needs_future)

    def plan(self, trace: Trace) -> Plan:
        """Spell the policy out on a trace.

        Parameters
        ----------
        trace : Trace
            The recording it shall run on.

        Raises
        ------
        PolicyError
            If the axes contradict each other or the trace.
        CaptureError
            If the trace lacks what the scorer or the rule reads.
        """
        try:
            return self._plan(trace)
        except (PolicyError, CaptureError) as error:
            policy = "" if str(self) in str(error) else f"{self}: "
            where = "" if str(trace.path) in str(error) else f" (on {trace.path})"
            raise type(error)(f"{policy}{error}{where}") from error

    def _plan(self, trace: Trace) -> Plan:
        expanded = self.expand()
        admit, select = expanded.admit, expanded.select
        group = self.group_kind
        if not trace.eligible_layers:
            raise PolicyError(f"{trace.path}: no recorded layer is eligible for eviction")
        axes = {"group=head": group == "head", "admit=": admit is not None, "select=": select is not None}
        if trace.capture == "scores" and (by_head := [axis for axis, used in axes.items() if used]):
            instead = "use group=shared or group=layer" if by_head == ["group=head"] else f"leave {by_head[-1]} out"
            raise PolicyError(
                f"{self}: {by_head[-1]} needs attention of single heads, but {trace.path} is a 'scores' capture "
                f"(head means); {instead}, or record with --capture heads or qk"
            )
        assert isinstance(expanded.head, Rule)
        context = Context(
            policy=str(self),
            trace=trace,
            groups=Groups(group, trace.eligible_layers, trace.num_heads, trace.num_kv_heads),
            score=expanded.score or DEFAULT_SCORE,
            refresh=expanded.refresh or DEFAULT_REFRESH,
            budget=expanded.budget,
            protect=expanded.protect or Protect(),
            when=expanded.when or DEFAULT_WHEN,
            admit=admit,
        )
        plan = expanded.head.plan(context)
        if admit is not None:
            plan = admit_into(plan, admit.admission(context))
        if select is None:
            return plan
        return dataclasses.replace(plan, selection=select.selection(context, plan.admission))

    def __str__(self) -> str:
        words = [format_part(self.head)]
        for axis, spec in AXES.items():
            value = getattr(self, axis)
            if value is not None:
                words.append(f"{axis}={spec.write(value)}")
        return "/".join(words)


_TYPES: dict[str, tuple[type, str]] = {
    "head": (Head, "a policy head such as Ema(0.8); kvsim.parse reads strings"),
    "score": (Scorer, "a scorer such as VNorm()"),
    "budget": (Budget, "a Budget, such as Budget(2048) or Budget.parse('10%')"),
    "protect": (Protect, "a Protect, such as Protect(sink=4, recent=32)"),
    "when": (When, "a When, such as When('prefill')"),
    "admit": (Admit, "an admission such as Local(window=256)"),
    "select": (Select, "a selection such as TopK(64)"),
}


@dataclass(frozen=True)
class Axis:
    """How the value of one axis is read and written.

    Attributes
    ----------
    read, write : callable
        From and to its text in a policy string.
    default : object
        The value where nobody sets it, None if there is none.
    values, example, doc : str
        For people: what it takes, one use of it, what it does.
    """

    read: Callable[[str], Any]
    write: Callable[[Any], str]
    default: Any
    values: str
    example: str
    doc: str


def _read_refresh(text: str) -> int | str:
    if text == "first":
        return text
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise PolicyError(f"refresh must be a number of steps of at least 1, or 'first', got {text!r}")
    return int(text)


AXES: dict[str, Axis] = {
    "score": Axis(
        lambda text: parse_part(text, SCORERS, "score"),
        format_part,
        DEFAULT_SCORE,
        "a scorer, see `kvsim policies`",
        "ema:0.8/score=vnorm",
        "What a token is worth to one step.",
    ),
    "refresh": Axis(
        _read_refresh,
        str,
        DEFAULT_REFRESH,
        "steps, or first",
        "ema:0.8/refresh=4",
        "Score every r-th step only, or only the first; other steps evict by the old state (InertiaKV Eq. 6).",
    ),
    "group": Axis(
        str,
        str,
        DEFAULT_GROUP,
        "shared, layer or head",
        "cumulative/group=head",
        "Who shares a retained set: the whole model, a layer, or a KV head of a layer.",
    ),
    "budget": Axis(
        Budget.parse,
        str,
        None,
        "tokens (2048), or a share of the prompt (10%)",
        "ema:0.8/budget=10%",
        "Tokens kept in each group; beats the command line's.",
    ),
    "protect": Axis(
        Protect.parse,
        str,
        Protect(),
        "sink:S, recent:R, recent:P% of the budget, joined by +",
        "cumulative/protect=sink:4+recent:50%",
        "Positions that are not evicted while others remain; they count within the budget.",
    ),
    "when": Axis(
        When.parse,
        str,
        DEFAULT_WHEN,
        "every, prefill, overflow or overflow:P%",
        "snapkv:16/when=every",
        "Evict after every step, once before the first, or P% (10) of the cache whenever it exceeds its budget.",
    ),
    "admit": Axis(
        lambda text: parse_part(text, ADMISSIONS, "admit"),
        format_part,
        None,
        "an admission, see `kvsim policies`",
        "full/admit=local:window=32,sink=4",
        "Which positions stay when they leave the local window, head by head; implies group=head.",
    ),
    "select": Axis(
        lambda text: parse_part(text, SELECTIONS, "select"),
        format_part,
        None,
        "a selection, see `kvsim policies`",
        "full/select=quest:64",
        "Which of the visible positions a query reads; what is retained stays as it is.",
    ),
}
"""The axes of a policy string by name."""

# A "/" starts an axis only before a word and "=", so that file paths need no quoting.
_AXIS_START = re.compile(r"/(?=[a-z_]+=)")


def parse(text: str) -> Policy:
    """Read a policy string such as ``ema:0.8/refresh=4/budget=10%``.

    Parameters
    ----------
    text : str
        The string; see the module's grammar.

    Returns
    -------
    Policy

    Raises
    ------
    PolicyError
        On anything unknown, repeated or malformed; the message lists what would be valid.
    """
    import kvsim.policies  # noqa: F401  fills HEADS; the heads themselves import this module

    head, *words = _AXIS_START.split(text.strip())
    if not head:
        raise PolicyError(f"a policy starts with a name (valid: {', '.join(sorted(HEADS))})")
    axes: dict[str, Any] = {}
    for word in words:
        axis, _, value = word.partition("=")
        if axis not in AXES:
            raise unknown_name("axis", axis, AXES)
        if axis in axes:
            raise PolicyError(f"{text}: axis {axis!r} is given twice")
        axes[axis] = AXES[axis].read(value)
    try:
        return Policy(parse_part(head, HEADS, "policy"), **axes)
    except PolicyError as error:
        raise PolicyError(f"{error}{_scorer_hint(head)}") from None


def _scorer_hint(head: str) -> str:
    """Point from a preset to the scorer of the same name, where that has the argument which the preset has not."""
    preset = HEADS.get(head.partition(":")[0])
    if preset is None or not issubclass(preset, Preset) or inspect.signature(preset).parameters:
        return ""
    try:
        scorer = parse_part(head, SCORERS, "score")
    except PolicyError:
        return ""
    return f"; its scorer does: {dataclasses.replace(preset().expand(), score=scorer)}"
