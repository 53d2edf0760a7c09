"""``kvsim duo-heads``."""

from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli.models import Device, Dtype, ModelPath, load, need_torch
from kvsim.cli.options import AsJson, Quiet
from kvsim.cli.output import print_json, progress_bar, say
from kvsim.errors import KvsimError
from kvsim.gating.duo_settings import DuoSettings

__all__ = ["duo_heads"]

_DEFAULT = DuoSettings()


def duo_heads(
    model: ModelPath,
    out: Annotated[Path, typer.Option(help="New JSON file.")],
    penalty: Annotated[float, typer.Option("--lambda", help="Weight of the sum of all alphas.")] = _DEFAULT.penalty,
    sink: Annotated[int, typer.Option(help="First tokens that a streaming head sees.")] = _DEFAULT.sink,
    window: Annotated[int, typer.Option(help="Last tokens that it sees.")] = _DEFAULT.window,
    steps: Annotated[int, typer.Option(help="Updates, one sample each.")] = _DEFAULT.steps,
    samples: Annotated[int, typer.Option(help="Samples.")] = _DEFAULT.samples,
    length: Annotated[int, typer.Option(help="The most tokens of a sample, the answer's included.")] = _DEFAULT.length,
    task: Annotated[str, typer.Option(help="Task that hides values (kvsim tasks).")] = _DEFAULT.task,
    learning_rate: Annotated[float, typer.Option(help="Peak of AdamW's.")] = _DEFAULT.learning_rate,
    attention: Annotated[str, typer.Option(help="auto, plain or flex (FlexAttention, on a GPU).")] = _DEFAULT.attention,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute activations on the way back to save memory.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the samples and of their order.")] = _DEFAULT.seed,
    dtype: Dtype = None,
    device: Device = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Find a model's retrieval heads as DuoAttention does: the KV heads that need more than a sink and recent tokens.

    Example: kvsim duo-heads --model SmolLM2-135M-Instruct --steps 300 --out heads.json
    """
    need_torch("finding heads", "record")
    settings = DuoSettings(
        penalty=penalty,
        sink=sink,
        window=window,
        steps=steps,
        samples=samples,
        length=length,
        task=task,
        learning_rate=learning_rate,
        attention=attention,
        checkpointing=checkpointing,
        seed=seed,
    )
    if out.exists():
        raise KvsimError(f"--out {out}: exists already; name a new file")

    from kvsim.gating.duo import find_heads, passages
    from kvsim.retrieval_heads import save_heads

    silent = quiet or as_json
    network, tokenizer = load(model, dtype=dtype, device=device, quiet=silent)
    texts = passages(tokenizer, settings)
    with progress_bar(f"finding heads of {Path(model).name}", quiet=silent) as advance:
        found = find_heads(network, texts, settings, progress=lambda done, total, _: advance(done, total))
    save_heads(found, out)
    if as_json:
        print_json({"file": str(out), **found})
        return
    rows = [found["scores"][layer] for layer in found["layers"]]
    heads = sum(len(row) for row in rows)
    above = sum(score >= found["threshold"] for row in rows for score in row)
    for layer, row in zip(found["layers"], rows, strict=True):
        say(f"layer {layer:3}  " + " ".join(f"{score:.2f}" for score in row))
    losses = found["training"]["distill"]
    retrieve = f"{above} of {heads} KV heads retrieve (alpha >= {found['threshold']})"
    say(f"wrote {out}: {retrieve}; last loss {losses[-1]:.4f}")
