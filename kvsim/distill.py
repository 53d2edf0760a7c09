"""Training the bilinear scorer on recorded attention (InertiaKV section 5.1); needs torch.

The target of a step and layer is the recorded attention over positions 0..p_t, averaged over the query heads: a
distribution p. The scores z of those positions are the logits of another one, and the loss is

    sum_i (softmax(z)_i - p_i)^2  +  mix * temperature^2 * KL(p_temperature || softmax(z / temperature))

averaged over the rows of a batch, p_temperature being p to the power 1 / temperature, normalised. The paper says
"MSE + KL, lambda = 0.1, tau = 1.0" and no more: squared errors are summed over a row here, because their mean vanishes
as rows grow longer. Optimised with AdamW on rows of one layer of one recording at a time, drawn at random.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace

from kvsim.bilinear import RANK, BilinearScorer
from kvsim.correlation import spearman, top_jaccard
from kvsim.errors import KvsimError
from kvsim.version import __version__

__all__ = ["Report", "Settings", "evaluate", "train"]

TOP = 0.1
"""Share of the positions whose overlap is reported."""

EVALUATED_STEPS = 32
"""Held-out steps of a recording that a report looks at, evenly spaced."""

_TARGET_BYTES = 2**28


@dataclass(frozen=True)
class Settings:
    """How a scorer is trained.

    Attributes
    ----------
    steps : int
        Updates.
    batch : int
        Decode steps in an update.
    learning_rate, weight_decay : float
        Of AdamW.
    mix, temperature : float
        The paper's lambda and tau.
    rank : int
        Dimensions that queries and keys are projected to.
    held_out : float
        Share of each recording's steps, its last ones, that are not trained on; at least one step.
    seed : int
        Seed of the initial matrices and of the draws.
    """

    steps: int = 1000
    batch: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    mix: float = 0.1
    temperature: float = 1.0
    rank: int = RANK
    held_out: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "rank"):
            if getattr(self, name) < 1:
                raise KvsimError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise KvsimError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("weight_decay", "mix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise KvsimError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0 < self.held_out < 1:
            raise KvsimError(f"held_out must be above 0 and below 1, got {self.held_out}")
        if self.seed < 0:
            raise KvsimError(f"seed must be at least 0, got {self.seed}")

    def trained_steps(self, trace: Trace) -> int:
        """Give how many of a recording's steps, its first ones, are trained on."""
        return trace.num_steps - max(1, int(self.held_out * trace.num_steps))


@dataclass(frozen=True)
class Report:
    """What training came to.

    Attributes
    ----------
    losses : list of float
        Loss of each update's batch, before the update.
    layers : list of dict
        For each eligible layer its ``layer`` number, ``spearman`` and ``top_jaccard`` against attention, averaged over
        the held-out steps of all recordings; None where a scoring is constant.
    """

    losses: list[float]
    layers: list[dict[str, float | None]]

    def mean(self, name: str) -> float | None:
        """Average a figure of `layers` over the layers where it is defined."""
        known = [value for layer in self.layers if (value := layer[name]) is not None]
        return float(np.mean(known)) if known else None


def train(
    traces: Sequence[Trace],
    settings: Settings | None = None,
    *,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[BilinearScorer, Report]:
    """Distil recorded attention into a bilinear scorer.

    Parameters
    ----------
    traces : sequence of Trace
        Recordings with queries and keys (capture `qk` or `qkv`) of models with equal numbers and sizes of heads.
    settings : Settings, optional
        How to train.
    device : str
        Where torch computes.
    progress : callable, optional
        Called with (updates done, updates in all).

    Raises
    ------
    KvsimError
        If torch or the device is missing, the recordings differ in shape, are too short or hold no queries, or the
        loss is not finite.
    """
    try:
        import torch
    except ImportError:
        raise KvsimError("training needs torch: pip install 'kvsim[record]'") from None
    settings = settings or Settings()
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise KvsimError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from None
    heads, kv_heads, dim = _shape(traces)
    for trace in traces:
        if settings.trained_steps(trace) < 1:
            raise KvsimError(f"{trace.path}: has {trace.num_steps} step(s); training needs some and a held-out one")

    generator = torch.Generator().manual_seed(settings.seed)

    def matrix(width: int) -> Any:
        drawn = torch.rand(settings.rank, width, generator=generator, dtype=torch.float32)
        return ((2 * drawn - 1) / width**0.5).to(device).requires_grad_()

    w_q, w_k = matrix(heads * dim), matrix(kv_heads * dim)
    optimizer = torch.optim.AdamW([w_q, w_k], lr=settings.learning_rate, weight_decay=settings.weight_decay)
    draw = np.random.Generator(np.random.PCG64(settings.seed))
    targets = _Targets()
    losses = []
    for update in range(settings.steps):
        trace = traces[int(draw.integers(len(traces)))]
        layer = int(draw.choice(trace.eligible_layers))
        trained = settings.trained_steps(trace)
        steps = np.sort(draw.choice(trained, size=min(settings.batch, trained), replace=False)) + 1
        length = trace.prompt_length + int(steps[-1])
        queries = torch.from_numpy(np.stack([trace.queries(t)[layer].reshape(-1) for t in steps])).to(device)
        keys = torch.from_numpy(trace.keys(layer)[:, :length].transpose(1, 0, 2).reshape(length, -1)).to(device)
        target = np.zeros((len(steps), length), np.float32)
        for row, t in enumerate(steps.tolist()):
            target[row, : trace.prompt_length + t] = targets.get(trace, layer, t)
        p = torch.from_numpy(target).to(device)
        beyond = torch.from_numpy(np.arange(length) >= trace.prompt_length + steps[:, None]).to(device)

        logits = (queries @ w_q.T) @ (keys @ w_k.T).T / settings.rank**0.5
        logits = logits.masked_fill(beyond, -torch.inf)
        squares = (torch.softmax(logits, dim=-1) - p).square().sum(dim=-1)
        tau = settings.temperature
        teacher = torch.softmax(p.clamp_min(1e-12).log().masked_fill(beyond, -torch.inf) / tau, dim=-1)
        student = torch.log_softmax(logits / tau, dim=-1).masked_fill(beyond, 0)
        divergence = (torch.special.xlogy(teacher, teacher) - teacher * student).sum(dim=-1)
        loss = (squares + settings.mix * tau**2 * divergence).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if progress is not None:
            progress(update + 1, settings.steps)
    if not math.isfinite(losses[-1]):
        raise KvsimError(f"training diverged (loss {losses[-1]}); lower the learning rate")
    scorer = BilinearScorer(
        w_q=w_q.detach().cpu().numpy().astype(np.float64),
        w_k=w_k.detach().cpu().numpy().astype(np.float64),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        training={**asdict(settings), "traces": [trace.hash for trace in traces], "kvsim_version": __version__},
    )
    return scorer, Report(losses, evaluate(scorer, traces, settings))


def evaluate(scorer: BilinearScorer, traces: Sequence[Trace], settings: Settings) -> list[dict[str, float | None]]:
    """Compare a scorer with attention on the steps that `settings` holds out; see `Report.layers`."""
    correlations: dict[int, list[float]] = {}
    overlaps: dict[int, list[float]] = {}
    for trace in traces:
        held = np.arange(settings.trained_steps(trace) + 1, trace.num_steps + 1)
        held = held[np.unique(np.linspace(0, held.size - 1, min(held.size, EVALUATED_STEPS)).astype(int))]
        for layer in trace.eligible_layers:
            keys = scorer.keys(trace.keys(layer).astype(np.float64))
            for t in held.tolist():
                n = trace.prompt_length + t
                scores = keys[:n] @ scorer.queries(trace.queries(t)[layer].astype(np.float64))
                attention = trace.score_rows(t, [layer])[0]
                rho = spearman(scores, attention)
                correlations.setdefault(layer, []).extend([] if math.isnan(rho) else [rho])
                overlaps.setdefault(layer, []).append(top_jaccard(scores, attention, max(1, int(TOP * n))))
    return [
        {
            "layer": layer,
            "spearman": float(np.mean(correlations[layer])) if correlations[layer] else None,
            "top_jaccard": float(np.mean(overlaps[layer])),
        }
        for layer in sorted(overlaps)
    ]


def _shape(traces: Sequence[Trace]) -> tuple[int, int, int]:
    """Give the recordings' common (H, Hk, d)."""
    if not traces:
        raise KvsimError("training needs at least one recording")
    for trace in traces:
        if not (trace.has("queries") and trace.has("keys")):
            raise KvsimError(f"{trace.path}: capture {trace.capture} has no queries and keys; record with --capture qk")
        if not trace.eligible_layers:
            raise KvsimError(f"{trace.path}: no recorded layer is eligible for eviction")
    shapes = [(trace.num_heads, trace.num_kv_heads, trace.head_dim or 0) for trace in traces]
    for trace, shape in zip(traces, shapes, strict=True):
        if shape != shapes[0]:
            raise KvsimError(
                f"{trace.path}: has heads, KV heads and dimension {shape}, but {traces[0].path} has {shapes[0]}; "
                "one scorer is for one shape"
            )
    return shapes[0]


class _Targets:
    """Rows of attention averaged over heads and summing to 1; the most recent ones are kept."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[str, int, int], npt.NDArray[np.float32]] = OrderedDict()
        self._bytes = 0

    def get(self, trace: Trace, layer: int, t: int) -> npt.NDArray[np.float32]:
        key = (str(trace.path), layer, t)
        row = self._held.get(key)
        if row is None:
            row = trace.score_rows(t, [layer])[0]
            row = self._held[key] = row / row.sum()
            self._bytes += row.nbytes
            while self._bytes > _TARGET_BYTES and len(self._held) > 1:
                self._bytes -= self._held.popitem(last=False)[1].nbytes
        return row
