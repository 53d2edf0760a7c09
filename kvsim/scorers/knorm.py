"""Key norm."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from kvsim.context import Context
from kvsim.plan import ScoreSource
from kvsim.scorers.base import Scorer, register


@register
@dataclass(frozen=True)
class KNormScore(Scorer):
    """Minus the L2 norm of the key (Devoto et al., 2024; kvpress has the same sign); needs a qk capture.

    Attributes
    ----------
    sign : {"minus", "plus"}
        ``minus`` keeps small norms, ``plus`` large ones. Which of them attention prefers differs from model to model.
    """

    name: ClassVar[str] = "knorm"
    sign: Literal["minus", "plus"] = field(default="minus", kw_only=True)

    def source(self, context: Context) -> ScoreSource:
        """See `Scorer.source`."""
        norms = np.linalg.norm(context.keys, axis=-1)
        return ScoreSource("static", values=norms if self.sign == "plus" else -norms, signed=self.sign == "minus")
