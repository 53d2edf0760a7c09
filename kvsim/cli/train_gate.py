"""``kvsim train-gate``."""

from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli.models import Device, Dtype, ModelPath, load, need_torch
from kvsim.cli.options import AsJson, Quiet
from kvsim.cli.output import print_json, say, stderr
from kvsim.gating.settings import Settings, numbers

__all__ = ["train_gate"]

_DEFAULT = Settings()


def train_gate(
    model: ModelPath,
    data: Annotated[str, typer.Option(metavar="FILE", help="Text: .txt, or .jsonl with a 'text' on each line.")],
    out: Annotated[Path, typer.Option(help="New safetensors file; with --sweep a new folder.")],
    held_out_data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Text to validate with; the end of --data if not given.")
    ] = None,
    penalty: Annotated[float, typer.Option("--lambda", help="Weight of sparsity.")] = _DEFAULT.penalty,
    window: Annotated[int, typer.Option(help="Tokens of the local window.")] = _DEFAULT.window,
    tau: Annotated[float, typer.Option(help="Threshold that the gate is meant for.")] = _DEFAULT.tau,
    steps: Annotated[int, typer.Option(help="Updates.")] = _DEFAULT.steps,
    batch: Annotated[int, typer.Option(help="Samples in an update.")] = _DEFAULT.batch,
    length: Annotated[int, typer.Option(help="Tokens of a sample, the instruction included.")] = _DEFAULT.length,
    learning_rate: Annotated[float, typer.Option(help="Peak of AdamW's.")] = _DEFAULT.learning_rate,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.")] = _DEFAULT.weight_decay,
    warmup: Annotated[float, typer.Option(help="Share of the updates in which the rate rises.")] = _DEFAULT.warmup,
    hidden: Annotated[
        int | None, typer.Option(help="Hidden units of a head's network; 0.4% of the model's parameters if not given.")
    ] = None,
    held_out: Annotated[int, typer.Option(help="Samples that are not trained on but validated with.")] = (
        _DEFAULT.held_out
    ),
    taus: Annotated[str, typer.Option(metavar="TAU,…", help="Thresholds of the validation.")] = ",".join(
        map(str, _DEFAULT.taus)
    ),
    sweep: Annotated[
        str | None, typer.Option(metavar="LAMBDA,…", help="Train a gate for each, and write the trade-off.")
    ] = None,
    instruction: Annotated[str, typer.Option(help="Put before every sample.")] = _DEFAULT.instruction,
    attention: Annotated[str, typer.Option(help="auto, plain or flex (FlexAttention, on a GPU).")] = _DEFAULT.attention,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute activations on the way back to save memory.")
    ] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Updates between checkpoints; 0 for none.")] = (
        _DEFAULT.checkpoint_every
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint beside --out.")] = False,
    max_tokens: Annotated[int, typer.Option(help="A run over more tokens is refused.")] = _DEFAULT.max_tokens,
    seed: Annotated[int, typer.Option(help="Seed of the initial numbers and of the order.")] = _DEFAULT.seed,
    dtype: Dtype = None,
    device: Device = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a model's write gates: which keys are worth keeping once they have left the local window.

    The model is frozen; under its gates it is to stay what it is with full attention. "cache size" is the share of a
    sample that is held after its last token, at the threshold.

    Example: kvsim train-gate --model SmolLM2-135M-Instruct --data sotu.jsonl --steps 500 --out gate.safetensors
    """
    need_torch("training", "record")
    settings = Settings(
        penalty=penalty,
        window=window,
        tau=tau,
        steps=steps,
        batch=batch,
        length=length,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        warmup=warmup,
        hidden=hidden,
        held_out=held_out,
        taus=numbers(taus, "--taus"),
        instruction=instruction,
        attention=attention,
        checkpointing=checkpointing,
        checkpoint_every=checkpoint_every,
        max_tokens=max_tokens,
        seed=seed,
    )
    penalties = None if sweep is None else numbers(sweep, "--sweep")

    from kvsim.gating.request import Request

    request = Request(data, out, settings, held_out_data, penalties, resume)
    request.check()
    silent = quiet or as_json
    network, tokenizer = load(model, dtype=dtype, device=device, quiet=silent)
    facts, told = request.run(network, tokenizer, tell=None if silent else lambda line: say(line, to=stderr))
    if as_json:
        print_json(facts)
        return
    for line in told:
        say(line)
