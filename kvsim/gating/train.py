"""Training write gates (WG-KV section 3.3): a frozen model under soft gates is to stay what it is with full attention.

The loss of an update is ``distill + lambda * sparsity``. ``distill`` is the mean over samples, tokens and dimensions of
the squared difference between the last hidden states, after the final norm, of the model under write-gated attention
and of the same model with full attention. ``sparsity`` is the mean of g + g (1 - g) over eligible layers, KV heads and
tokens, the instruction's included. The paper says L2 and no more; the mean over dimensions is what the authors'
published code takes. That code weights a token's sparsity by the share of its later queries beyond the window, which
the paper does not; the paper is followed here.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvsim_traces.facts import model_facts

from kvsim.errors import KvsimError
from kvsim.gating.attention import attention_form
from kvsim.gating.checkpoint import State, load_state, save_state
from kvsim.gating.data import Samples, check_length, digest, order
from kvsim.gating.module import Gates, default_hidden
from kvsim.gating.optimizer import arrays_of, make_optimizer, restore
from kvsim.gating.settings import Settings
from kvsim.gating.validate import cache_size, validate
from kvsim.gating.watcher import GatedAttention, frozen, hidden_states, shape_of
from kvsim.write_gate import WriteGate

__all__ = ["COLUMNS", "Report", "checkpoint_path", "train"]

COLUMNS = ("distill", "sparsity", "cache_size", "learning_rate")
"""What an update reports: both losses before it, the hard-threshold cache size at tau, and its learning rate."""

Progress = Callable[[int, int, dict[str, float]], None]


@dataclass(frozen=True)
class Report:
    """What training came to.

    Attributes
    ----------
    history : list of dict
        `COLUMNS` of each update.
    validation : dict
        See `kvsim.gating.validate.validate`.
    seconds : float
        Of this run's updates, checkpoints included.
    updates : int
        Updates in those.
    tokens : int
        Tokens in those.
    """

    history: list[dict[str, float]]
    validation: dict[str, Any]
    seconds: float
    updates: int
    tokens: int

    def facts(self) -> dict[str, Any]:
        """Give the report as JSON data, the history as columns."""
        rate = self.tokens / self.seconds if self.seconds else None
        return {
            "history": {name: [row[name] for row in self.history] for name in COLUMNS},
            "validation": self.validation,
            "seconds": round(self.seconds, 3),
            "updates": self.updates,
            "tokens": self.tokens,
            "tokens_per_second": None if rate is None else round(rate, 1),
        }


def checkpoint_path(out: str | Path) -> Path:
    """Name the checkpoint beside the gate that a run will write; it goes when the gate is there."""
    return Path(f"{out}.checkpoint")


def train(
    model: Any,
    samples: Samples,
    held_out: Samples,
    settings: Settings,
    *,
    checkpoint: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> tuple[WriteGate, Report]:
    """Train the write gates of a model.

    On a CPU a run is a function of its arguments, resumed or not. On a GPU sums are made in no fixed order.

    Parameters
    ----------
    model : PreTrainedModel
        A transformers causal language model, on the device to train on; its parameters do not change.
    samples, held_out : array
        [N, length] tokens to train on and to validate with.
    settings : Settings
    checkpoint : Path, optional
        Where to keep where the run is.
    resume : bool
        Go on from `checkpoint`.
    progress : callable, optional
        Called with (updates done, updates in all, `COLUMNS` of the last).

    Raises
    ------
    KvsimError
        If the model, its length or the samples do not fit, the checkpoint is of another run, or the loss is not finite.
    """
    _check(model, samples, held_out, settings)
    device = model.get_input_embeddings().weight.device
    shape = shape_of(model)
    attention = attention_form(settings.attention, device)
    hidden = settings.hidden
    if hidden is None:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        hidden = default_hidden(parameters, len(shape.layers) * shape.num_kv_heads, shape.head_dim)
    gates = Gates(shape.layers, shape.num_kv_heads, shape.head_dim, hidden, seed=settings.seed).to(device)
    trained = dict(gates.named_parameters())
    optimizer = make_optimizer(trained, settings.weight_decay)
    facts = _facts(model, samples, settings)
    history = np.zeros((0, len(COLUMNS)))
    if resume:
        if checkpoint is None:
            raise KvsimError("resume: no checkpoint was named")
        state = load_state(checkpoint, {name: tuple(value.shape) for name, value in trained.items()}, facts)
        restore(trained, optimizer, state.arrays, state.step)
        history = state.history

    begun, start = len(history), time.perf_counter()
    rows = [tuple(row) for row in history.tolist()]
    for step in range(begun, settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step)
        chosen = order(len(samples), step, settings.batch, settings.seed)
        tokens = torch.from_numpy(samples[chosen]).to(device)
        found = _update(model, gates, attention, tokens, optimizer, settings)
        rows.append((*found, settings.rate(step)))
        done = step + 1
        if not all(map(math.isfinite, found)):
            raise KvsimError(f"training diverged at update {done} (losses {found[0]}, {found[1]}); lower learning_rate")
        if progress is not None:
            progress(done, settings.steps, dict(zip(COLUMNS, rows[-1], strict=True)))
        # After the last update, too: validation takes a while, and may be what is interrupted.
        due = settings.checkpoint_every and (done % settings.checkpoint_every == 0 or done == settings.steps)
        if checkpoint is not None and due:
            save_state(State(done, arrays_of(trained, optimizer), np.array(rows), facts), checkpoint)
    seconds = time.perf_counter() - start

    updates = settings.steps - begun
    gate = gates.gate(
        window=settings.window,
        tau=settings.tau,
        penalty=settings.penalty,
        model=facts["model"],
        config_hash=facts["config_hash"],
        training={**settings.facts(), "samples": len(samples), "data_hash": facts["data_hash"]},
    )
    checks = validate(model, gates, held_out, settings)
    named = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    return gate, Report(named, checks, seconds, updates, updates * settings.batch * settings.length)


def _update(
    model: Any, gates: Gates, attention: Any, tokens: torch.Tensor, optimizer: Any, settings: Settings
) -> tuple[float, float, float]:
    """Make one update; gives both losses before it, and the hard-threshold cache size."""
    with torch.no_grad():
        teacher = hidden_states(model, tokens).float()
    watcher = GatedAttention(gates, attention, window=settings.window)
    # The way back is in here too: what is computed again must meet the same attention.
    with frozen(model, watcher):
        student = hidden_states(model, tokens, watcher, checkpointing=settings.checkpointing)
        found = watcher.gates()
        distill = (student.float() - teacher).square().mean()
        sparsity = (found + found * (1 - found)).mean()
        optimizer.zero_grad()
        (distill + settings.penalty * sparsity).backward()
    optimizer.step()
    losses = torch.stack([distill.detach(), sparsity.detach()]).tolist()
    return losses[0], losses[1], cache_size(found.detach() >= settings.tau, settings.window)


def _facts(model: Any, samples: Samples, settings: Settings) -> dict[str, Any]:
    """Say what a run is of, for its checkpoints."""
    held = settings.facts()
    for name in ("checkpoint_every", "max_tokens", "taus", "held_out"):
        del held[name]
    known = model_facts(model)
    return {
        **held,
        "model": known["name"],
        "config_hash": known["config_hash"],
        "weights_hash": known["weights_hash"],
        "data_hash": digest(samples),
    }


def _check(model: Any, samples: Samples, held_out: Samples, settings: Settings) -> None:
    """Say what does not fit before anything runs."""
    if settings.window >= settings.length:
        raise KvsimError(
            f"no key leaves a window of {settings.window} in a sample of {settings.length} tokens, so gates have "
            "nothing to learn; make window smaller or length larger"
        )
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    for name, part in (("samples", samples), ("held_out", held_out)):
        if part.ndim != 2 or part.shape[1] != settings.length or not len(part):
            raise KvsimError(f"{name}: must be [N, {settings.length}] with N of at least 1, got {list(part.shape)}")
        if part.min() < 0 or part.max() >= vocabulary:
            raise KvsimError(f"{name}: tokens must be in 0..{vocabulary - 1}, got {part.min()}..{part.max()}")
    check_length(model, settings.length)
