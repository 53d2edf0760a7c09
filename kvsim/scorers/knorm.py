"""Key norm."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvsim.context import Context
from kvsim.plan import ScoreSource
from kvsim.scorers.base import Scorer, register


@register
@dataclass(frozen=True)
class KNormScore(Scorer):
    """Minus the L2 norm of the key (Devoto et al., 2024; kvpress has the same sign); needs a qk capture."""

    name: ClassVar[str] = "knorm"

    def source(self, context: Context) -> ScoreSource:
        """See `Scorer.source`."""
        return ScoreSource("static", values=-np.linalg.norm(context.keys, axis=-1), signed=True)
