"""Expected attention of future queries."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.plan import FloatArray, ScoreSource
from kvsim.rope import rope_of
from kvsim.scorers.base import Scorer, register

HIGHEST = 1e37  # Sinks may stand at twice the highest of the others and still be a float32.
LARGEST = 80.0  # A decode key may outscore the whole prompt, and states are compared in float32, which ends at e^88.


@register
@dataclass(frozen=True)
class Expected(Scorer):
    r"""Attention that queries to come are expected to pay, times the value norm (Devoto et al., 2025); needs qkv.

    Queries before RoPE are taken as Gaussian with the mean and covariance of the prompt's; R is the rotation averaged
    over the positions to come. A query head's logit of key k is then :math:`\mu^T R^T k / \sqrt d + k^T R \Sigma R^T
    k / 2d`; its softmax over the prompt, averaged over the query heads of a KV head, is the expected attention. A key
    of a decode step is measured against the same sum over the prompt.

    The statistics use the prompt queries that the trace keeps: the published form takes them all, which needs a
    recording made with ``--prompt-queries all``. Softcaps and sliding windows are not modelled.

    Attributes
    ----------
    n_future : int
        Positions after the prompt over which the rotation is averaged.
    n_sink : int
        First positions of the prompt, whose queries are left out and which get the highest score.
    vnorm : bool
        Multiply by the L2 norm of the value.
    epsilon : float
        Added to the expected attention before the value norm multiplies it.
    """

    name: ClassVar[str] = "expected"
    n_future: int = field(default=512, kw_only=True)
    n_sink: int = field(default=4, kw_only=True)
    vnorm: bool = field(default=True, kw_only=True)
    epsilon: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        if not 1 <= self.n_future <= 2**20:
            raise PolicyError(f"n_future of 'expected' must be 1 to {2**20} positions, got {self.n_future}")
        if self.n_sink < 0:
            raise PolicyError(f"n_sink of 'expected' must be 0 or more positions, got {self.n_sink}")
        if not 0 <= self.epsilon <= 1:
            raise PolicyError(f"epsilon of 'expected' must be in [0, 1], got {self.epsilon}")

    def source(self, context: Context) -> ScoreSource:
        """See `Scorer.source`."""
        if context.prompt_length <= self.n_sink:
            raise PolicyError(
                f"{context.policy}: score=expected needs a prompt of more than n_sink={self.n_sink} tokens, "
                f"{context.trace.path} has {context.prompt_length}"
            )
        norms = np.linalg.norm(context.values, axis=-1) if self.vnorm else 1.0
        shares = np.stack([self._attention(context, layer) for layer in range(len(context.groups.layers))])
        scores = (shares + self.epsilon) * norms
        scores = np.minimum(scores, HIGHEST / 2)
        scores[:, :, : self.n_sink] = 2 * scores[:, :, self.n_sink :].max(axis=(1, 2), keepdims=True)
        return ScoreSource("static", values=np.minimum(scores, HIGHEST))

    def _attention(self, context: Context, layer: int) -> FloatArray:
        """Compute the expected attention of one eligible layer's keys, [Hk, L0+T], sinks included."""
        recorded = context.groups.layers[layer]
        mean, covariance = self._future_queries(context, recorded)
        keys = context.keys[layer]
        scaling = context.trace.manifest.layers[recorded].scaling or keys.shape[-1] ** -0.5
        share = np.zeros(keys.shape[:2])
        heads = mean.shape[0] // keys.shape[0]
        for head, (mu, sigma) in enumerate(zip(mean, covariance, strict=True)):
            own = keys[head // heads]
            logits = scaling * (own @ mu) + scaling**2 / 2 * ((own @ sigma) * own).sum(axis=-1)
            prompt = logits[self.n_sink : context.prompt_length]
            total = prompt.max() + np.log(np.exp(prompt - prompt.max()).sum())
            share[head // heads] += np.exp(np.minimum(logits - total, LARGEST)) / heads
        return share

    def _future_queries(self, context: Context, recorded: int) -> tuple[FloatArray, FloatArray]:
        """Mean [H, d] and covariance [H, d, d] of the queries to come, rotated on average."""
        rope, prompt = rope_of(context.trace, recorded), context.prompt_length
        queries = context.trace.prompt_queries()[recorded].astype(np.float64)
        first = max(self.n_sink, prompt - queries.shape[1])
        queries = rope.undo(queries[:, first - prompt :], np.arange(first, prompt))
        mean = queries.mean(axis=1)
        centred = queries - mean[:, None]
        covariance = centred.transpose(0, 2, 1) @ centred / queries.shape[1]
        rotation = rope.mean_rotation(np.arange(prompt, prompt + self.n_future), queries.shape[-1])
        return mean @ rotation.T, rotation @ covariance @ rotation.T
