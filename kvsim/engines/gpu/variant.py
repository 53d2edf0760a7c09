"""Which plans share a launch, and which kernel runs them."""

from dataclasses import dataclass

from kvsim.plan import GroupKind, Plan

__all__ = ["Variant", "largest_visible"]

KINDS = {"attention": 0, "static": 1, "cosine": 2, "bilinear": 3}
"""Kinds of score source, as the kernels know them."""


@dataclass(frozen=True)
class Variant:
    """What is compiled into a kernel; plans that differ in numbers only share one.

    Attributes
    ----------
    group : {"shared", "layer", "head"}
        Retention groups.
    kind : int
        Kind of the score source.
    weighted, highest, entropy, pivotal, signed : bool
        What else the score source asks for.
    windowed, rescued, admitted, targeted : bool
        Whether plans have a window of scores, rescue positions, have a local window, or say how many stay.
    sorted : bool
        Whether positions must be held in ascending order after the first step: ranks are pooled over neighbours.
    dim : int
        Length of the vectors that scores are made of, 1 without any.
    """

    group: GroupKind
    kind: int
    weighted: bool
    highest: bool
    entropy: bool
    pivotal: bool
    signed: bool
    windowed: bool
    rescued: bool
    admitted: bool
    targeted: bool
    sorted: bool
    dim: int

    @classmethod
    def of(cls, plan: Plan) -> "Variant":
        """Sort a plan; one that scores no step needs no source."""
        score, scores = plan.score, bool(plan.scored.any())
        kind = KINDS[score.kind] if scores else 0
        return cls(
            group=plan.groups.kind,
            kind=kind,
            weighted=scores and score.weight is not None,
            # Static scores are combined over heads when they are uploaded.
            highest=scores and score.heads == "max" and kind != KINDS["static"],
            entropy=scores and score.entropy,
            pivotal=scores and score.pivotal,
            signed=scores and score.signed,
            windowed=scores and plan.window > 0,
            rescued=plan.rescue is not None,
            admitted=plan.admission is not None,
            targeted=plan.targets is not None,
            sorted=plan.pool > 1 and bool(plan.evicts[2:].any()),
            dim=score.values.shape[-1] if kind > KINDS["static"] and score.values is not None else 1,
        )

    @property
    def layerwise(self) -> bool:
        """Whether a layer's scores must all be there before the state changes."""
        cosine = self.kind == KINDS["cosine"]
        return self.entropy or self.pivotal or self.signed or self.windowed or self.rescued or cosine

    @property
    def resident(self) -> bool:
        """Whether the kernel that holds its state in registers knows these plans."""
        return not (self.layerwise or self.weighted or self.sorted or self.kind > KINDS["static"])


def largest_visible(plan: Plan) -> int:
    """Give the most positions that a group can see from step 2 on."""
    steps: int = plan.scored.size
    positions = int(plan.m0.shape[1]) + steps
    if plan.targets is not None:
        return int(min(positions, plan.targets[:, 1:].max() + 1))
    budget = int(plan.budgets.max())
    if plan.evicts[1:].all():
        return min(positions, budget + 1)
    return min(positions, budget + steps) if plan.evicts[0] else positions
