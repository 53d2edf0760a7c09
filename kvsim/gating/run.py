"""From a model folder and a file of text to a file with a gate; what the commands share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvsim.errors import KvsimError
from kvsim.gating.data import Samples, read_texts, samples_of
from kvsim.gating.settings import Settings
from kvsim.gating.train import Progress, Report, checkpoint_path, train
from kvsim.write_gate import WriteGate, save_gate

__all__ = ["check_out", "gate_facts", "lines", "load_samples", "table", "train_to"]


def load_samples(
    tokenizer: Any, data: str | Path, settings: Settings, *, held_out: str | Path | None = None
) -> tuple[Samples, Samples]:
    """Read the samples to train on, and the `settings.held_out` ones to validate with.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizer
    data : str or Path
        See `kvsim.gating.data.read_texts`.
    settings : Settings
    held_out : str or Path, optional
        The text to validate with, its first samples; by default the last samples of `data` are, and are not trained on.

    Raises
    ------
    KvsimError
        If a file is not text, or too short.
    """

    def cut(file: str | Path) -> Samples:
        return samples_of(tokenizer, read_texts(file), length=settings.length, instruction=settings.instruction)

    samples = cut(data)
    if held_out is not None:
        return samples, cut(held_out)[: settings.held_out]
    if len(samples) <= settings.held_out:
        raise KvsimError(
            f"{data}: makes {len(samples)} sample(s) of {settings.length} tokens; {settings.held_out} are held out, so "
            "none is left to train on"
        )
    return samples[: -settings.held_out], samples[-settings.held_out :]


def check_out(out: Path, *, resume: bool) -> None:
    """Make sure that a gate can be written.

    Raises
    ------
    KvsimError
        If the file exists, or a checkpoint that is not to be resumed, or nothing can be written there.
    """
    if out.exists():
        raise KvsimError(f"--out {out}: exists already; name a new file")
    checkpoint = checkpoint_path(out)
    if checkpoint.exists() and not resume:
        raise KvsimError(f"{checkpoint}: a run has begun; go on with --resume, or remove it")
    if resume and not checkpoint.exists():
        raise KvsimError(f"{checkpoint}: no such file; there is no checkpoint to resume from")
    nearest = next(parent for parent in out.absolute().parents if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise KvsimError(f"--out {out}: {nearest} is no folder that can be written to")


def train_to(
    out: Path,
    model: Any,
    samples: Samples,
    held_out: Samples,
    settings: Settings,
    *,
    resume: bool = False,
    progress: Progress | None = None,
) -> tuple[WriteGate, Report]:
    """Train a gate into a new file; its checkpoint stands beside it until then.

    Raises
    ------
    KvsimError
        See `check_out` and `kvsim.gating.train.train`.
    """
    check_out(out, resume=resume)
    checkpoint = checkpoint_path(out)
    gate, report = train(model, samples, held_out, settings, checkpoint=checkpoint, resume=resume, progress=progress)
    save_gate(gate, out)
    checkpoint.unlink(missing_ok=True)
    return gate, report


def gate_facts(gate: WriteGate, report: Report, out: Path) -> dict[str, Any]:
    """Give what a run came to as JSON data."""
    return {
        "file": str(out),
        "hash": gate.hash,
        "model": gate.model,
        "parameters": gate.num_parameters,
        "hidden": gate.hidden,
        "layers": list(gate.layers),
        "settings": gate.training,
        **report.facts(),
    }


def lines(say: Callable[[str], None], penalty: float, *, every: int | None = None) -> Progress:
    """Tell progress in lines: the first update, the last, and twenty or so between."""

    def tell(done: int, total: int, row: dict[str, float]) -> None:
        if done in (1, total) or done % (every or max(1, total // 20)) == 0:
            say(
                f"update {done}/{total}  loss {row['distill'] + penalty * row['sparsity']:.4f} = distill "
                f"{row['distill']:.4f} + {penalty:g} x sparsity {row['sparsity']:.4f}  cache {row['cache_size']:.3f}  "
                f"rate {row['learning_rate']:.1e}"
            )

    return tell


def table(validation: dict[str, Any]) -> list[str]:
    """Give the lines of a validation."""
    found = [f"{'tau':>6} {'loss':>10} {'cache size':>10} {'admitted':>9}"]
    named = [(f"{row['tau']:g}", row) for row in validation["rows"]]
    for name, row in [*named, ("local", validation["local"]), ("full", validation["full"])]:
        found.append(f"{name:>6} {row['loss']:10.6f} {row['cache_size']:10.4f} {row['admitted']:9.4f}")
    found.append(
        f"held out: {validation['samples']} x {validation['length']} tokens, window {validation['window']}; loss: mean "
        "squared difference of the last hidden states; local: nothing admitted, full: everything"
    )
    return found
