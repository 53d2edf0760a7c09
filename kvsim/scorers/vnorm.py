"""Attention weighted by value norms."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvsim.context import Context
from kvsim.plan import ScoreSource
from kvsim.scorers.base import Scorer, register


@register
@dataclass(frozen=True)
class VNorm(Scorer):
    """Attention times the L2 norm of the value over its mean, per head (InertiaKV section 5.1); needs a qkv capture."""

    name: ClassVar[str] = "vnorm"

    def source(self, context: Context) -> ScoreSource:
        """See `Scorer.source`."""
        return ScoreSource("attention", weight=np.linalg.norm(context.values, axis=-1))
