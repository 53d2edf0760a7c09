"""What an engine runs: a `Plan` is plain data, so engines know no policy by name."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvsim.admission import Admission, Selection
from kvsim.control import Control
from kvsim.errors import PolicyError

__all__ = [
    "GROUP_KINDS",
    "Admission",
    "FloatArray",
    "GroupKind",
    "Groups",
    "Plan",
    "Redundancy",
    "ScoreSource",
    "Selection",
]

GroupKind = Literal["shared", "layer", "head"]
GROUP_KINDS: tuple[GroupKind, ...] = ("shared", "layer", "head")

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Groups:
    """The retention groups: which (layer, head) pairs share one retained set.

    Attributes
    ----------
    kind : {"shared", "layer", "head"}
        One group for the whole model, one per layer, or one per layer and KV head.
    layers : tuple of int
        Indices of the eligible layers among the recorded ones, in model order.
    num_heads, num_kv_heads : int
        Query heads H and KV heads Hk of a layer.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int

    @property
    def count(self) -> int:
        """Number of groups G."""
        return {"shared": 1, "layer": len(self.layers), "head": len(self.layers) * self.num_kv_heads}[self.kind]

    @property
    def depth(self) -> int:
        """Number of layers K that update one group's state in a step."""
        return len(self.layers) if self.kind == "shared" else 1

    def members(self, group: int) -> tuple[slice, slice, slice]:
        """Give a group's slices into the eligible layers, the query heads and the KV heads."""
        every_layer, every_head, every_kv = slice(None), slice(None), slice(None)
        if self.kind == "shared":
            return every_layer, every_head, every_kv
        if self.kind == "layer":
            return slice(group, group + 1), every_head, every_kv
        layer, kv = divmod(group, self.num_kv_heads)
        share = self.num_heads // self.num_kv_heads
        return slice(layer, layer + 1), slice(kv * share, (kv + 1) * share), slice(kv, kv + 1)

    def of_layer(self, layer: int) -> list[int]:
        """Give the group of each KV head of the `layer`-th eligible layer, [Hk]."""
        if self.kind == "shared":
            return [0] * self.num_kv_heads
        if self.kind == "layer":
            return [layer] * self.num_kv_heads
        return [layer * self.num_kv_heads + kv for kv in range(self.num_kv_heads)]

    def label(self, group: int) -> str:
        """Name a group for people: ``all layers``, ``layer 3`` or ``layer 3 head 1``."""
        if self.kind == "shared":
            return "all layers"
        if self.kind == "layer":
            return f"layer {self.layers[group]}"
        layer, kv = divmod(group, self.num_kv_heads)
        return f"layer {self.layers[layer]} head {kv}"


@dataclass(frozen=True)
class Redundancy:
    """A preference for tokens whose keys are unlike the other visible ones (R-KV).

    The cosine of every pair of visible keys; of those above `threshold` each key's most recent one is spared. A
    token's redundancy is the softmax over the visible set of the mean of its column, averaged over a group's layers and
    KV heads. Eviction ranks by ``mix`` times the state, over its sum without the protected positions, minus
    ``1 - mix`` times the redundancy.

    Attributes
    ----------
    units : array
        [K, Hk, L0+T, d] unit keys.
    mix : float
        Weight of the state, in [0, 1].
    threshold : float
        Cosine from which on two keys are similar.
    """

    units: FloatArray
    mix: float
    threshold: float


@dataclass(frozen=True)
class ScoreSource:
    """Where a step's scores s[t, l, i] come from.

    Attributes
    ----------
    kind : {"attention", "static", "cosine", "bilinear"}
        ``attention``: the attention row, renormalised over the visible set per head (InertiaKV Eq. 1).
        ``static``: `values`, the same at every step. ``cosine``: minus the cosine between each vector of `values`
        and the mean of the visible unit vectors. ``bilinear``: the product of a step's vector of `queries` with each
        vector of `values`.
    values : array or None
        ``static``: [K, Hk, L0+T]; ``cosine`` and ``bilinear``: [K, Hk, L0+T, d].
    queries : array or None
        ``bilinear``: [T, K, Hk, d].
    weight : array or None
        [K, Hk, L0+T]; multiplies the attention of a head, over its own mean over the visible set.
    heads : {"mean", "max"}
        How the heads of a group are combined.
    entropy : bool
        Multiply a layer's score by the entropy of its attention over log n.
    pivotal : bool
        1 where a layer's score is above its mean over the visible set, 0 elsewhere (ScissorHands).
    signed : bool
        Scores may be negative; they are shifted by their minimum over the visible set.
    redundancy : Redundancy or None
        What is taken off the state when positions are ranked.
    """

    kind: Literal["attention", "static", "cosine", "bilinear"]
    values: FloatArray | None = None
    queries: FloatArray | None = None
    weight: FloatArray | None = None
    heads: Literal["mean", "max"] = "mean"
    entropy: bool = False
    pivotal: bool = False
    signed: bool = False
    redundancy: Redundancy | None = None

    @property
    def needs_query(self) -> bool:
        """Whether the scores depend on the query of a step, so that there are none before step 1."""
        return self.kind in ("attention", "bilinear")


@dataclass(frozen=True)
class Plan:
    """A policy on one trace, spelled out: ``m <- a[t, l] * m + b[t, l] * s[t, l]``, then evict the lowest.

    Attributes
    ----------
    policy : str
        Canonical policy string with its budget; keys every result.
    groups : Groups
        Retention groups, G of them with K layers each.
    m0 : array
        [G, L0] state before step 1.
    a, b : array
        [T, K] coefficients of the recurrence.
    reset : bool
        m = 0 at the start of every scored step (``over=layer``).
    scored : array of bool
        [T]; steps that are not scored keep their state, and a new position gets the mean of the others.
    evicts : array of bool
        [T + 1]; whether the cache is cut to its budget after the prompt (index 0) and after each step.
    score : ScoreSource
        Where the scores come from.
    budgets, n_sink, n_recent : array of int
        [G] tokens kept, and how many of the first and of the last positions are protected.
    window : int
        If not 0, the state is the sum over the last `window` scored steps of the scores summed over layers.
    ring : array or None
        [G, window, L0] scores of the `window` queries before step 1, oldest first; zero if None.
    pool : int
        Rank by the maximum of the state over this many neighbours among the visible positions (odd; 1 for none).
    batch : float
        If not 0, eviction waits until the budget is exceeded and then takes this share of what is visible, lowest
        first, again and again until the budget holds (WG-KV K.1).
    rescue : array of int or None
        [G] unprotected positions that the first eviction after a step protects for good: those with the highest score
        of any single layer of the group at the last scored step.
    control : Control or None
        Chooses `a` and `b` of each scored step while the plan runs; those given here are where it starts.
    bound : float or None
        No schedule within the budgets has a higher kept mass; known to the plans of an oracle. Engines do not read it.
    admission : Admission or None
        What is promoted when it leaves the local window; everything if None.
    targets : array of int or None
        [G, T + 1] how many of the visible positions stay after the eviction of a step (of the prompt, at index 0),
        before the window moves on, where that depends on other groups (WG-KV K.1); it replaces `target`.
    selection : Selection or None
        Which of the visible positions a query reads; all if None. Engines do not read it.
    """

    policy: str
    groups: Groups
    m0: FloatArray
    a: FloatArray
    b: FloatArray
    reset: bool
    scored: npt.NDArray[np.bool_]
    evicts: npt.NDArray[np.bool_]
    score: ScoreSource
    budgets: npt.NDArray[np.int64]
    n_sink: npt.NDArray[np.int64]
    n_recent: npt.NDArray[np.int64]
    window: int = 0
    ring: FloatArray | None = None
    pool: int = 1
    batch: float = 0.0
    rescue: npt.NDArray[np.int64] | None = None
    control: Control | None = None
    bound: float | None = None
    admission: Admission | None = None
    targets: npt.NDArray[np.int64] | None = None
    selection: Selection | None = None

    def target(self, group: int, visible: int, t: int) -> int:
        """Give how many of `visible` positions stay after the eviction of step t (0 for the prompt)."""
        if self.targets is not None:
            return int(self.targets[group, t])
        budget = int(self.budgets[group])
        while self.batch and visible > budget:
            # A share is a whole percentage: what is added makes 29% of 100 be 29, as in exact arithmetic.
            visible -= max(1, int(self.batch * visible + 1e-9))
        return visible if self.batch else min(budget, visible)

    def check_shadow(self) -> None:
        """Refuse a shadow run of a plan that it would leave without a meaning.

        Raises
        ------
        PolicyError
            With an admission: a cache that could recall anything is one that admitted everything.
        """
        if self.admission is not None:
            raise PolicyError(
                f"{self.policy}: shadow mode ranks all positions as if nothing was ever lost, so admission has no "
                "meaning there; replay it without shadow mode, or leave admit= out"
            )

    def of_layer(self, layer: int) -> "Plan":
        """Give the plan of the `layer`-th eligible layer alone; its groups must lie within layers.

        Raises
        ------
        ValueError
            If groups span layers, or scores are not those of attention alone, whose arrays would have to be cut too.
        """
        groups = self.groups
        if not self.layers_are_apart:
            raise ValueError(f"{self.policy}: a layer is not decided by its own attention alone")
        own = slice(*(index * (groups.count // len(groups.layers)) for index in (layer, layer + 1)))
        return replace(
            self,
            groups=replace(groups, layers=groups.layers[layer : layer + 1]),
            m0=self.m0[own],
            budgets=self.budgets[own],
            n_sink=self.n_sink[own],
            n_recent=self.n_recent[own],
            ring=None if self.ring is None else self.ring[own],
            rescue=None if self.rescue is None else self.rescue[own],
            admission=None if self.admission is None else self.admission.of_groups(own),
            targets=None if self.targets is None else self.targets[own],
        )

    @property
    def layers_are_apart(self) -> bool:
        """Whether what a layer retains depends on its own attention and on nothing else that a run brings."""
        score = self.score
        attention = score.kind == "attention" and score.weight is None and score.redundancy is None
        return attention and self.groups.kind != "shared" and self.control is None
