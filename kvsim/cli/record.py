"""``kvsim record``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvsim.cli.models import Chat, Device, Dtype, Force, ModelPath, Prompt, encode, load, need_torch, read_text
from kvsim.cli.options import Quiet
from kvsim.cli.output import preview, progress_bar, say
from kvsim.errors import KvsimError

__all__ = ["record"]


def record(
    model: ModelPath,
    prompt: Prompt,
    out: Annotated[Path, typer.Option(help="New trace directory.")],
    steps: Annotated[int, typer.Option(help="Decode steps to record.")] = 64,
    capture: Annotated[
        Literal["heads", "scores", "qk", "qkv"],
        typer.Option(help="Attention of every head, its head mean, or queries and keys (and values)."),
    ] = "heads",
    chat: Chat = False,
    force: Force = None,
    suppress_eos: Annotated[
        bool, typer.Option("--suppress-eos", help="Never generate end-of-sequence, so that every step is recorded.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    prompt_queries: Annotated[str, typer.Option(help="How many of the prompt's last queries to keep, or all.")] = "64",
    prompt_mass: Annotated[
        bool, typer.Option(help="Keep the attention that each prompt position received during prefill (H2O needs it).")
    ] = True,
    kvzip: Annotated[
        bool,
        typer.Option("--kvzip", help="Run KVzip's reconstruction pass after the prefill and keep its scores."),
    ] = False,
    pre_rope_keys: Annotated[
        bool,
        typer.Option("--pre-rope-keys", help="Keep keys before the rotary embedding too; with --capture qk or qkv."),
    ] = False,
    eligible: Annotated[
        Literal["full", "all"], typer.Option(help="Layers that policies may evict from: full attention only, or all.")
    ] = "full",
    attention: Annotated[
        str, typer.Option(help="Attention implementation: sdpa, eager, flash_attention_2, …")
    ] = "sdpa",
    dtype: Dtype = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Run a transformers model once and record what its KV cache was asked for.

    Example: kvsim record --model SmolLM2-135M-Instruct --prompt question.txt --chat --capture qk --out runs/a
    """
    need_torch("recording", "record")
    if steps < 1:
        raise KvsimError(f"--steps must be at least 1, got {steps}")
    if prompt_queries != "all" and not prompt_queries.isdigit():
        raise KvsimError(f"--prompt-queries must be a number or 'all', got {prompt_queries!r}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise KvsimError(f"--out {out}: exists already; name a new directory")
    if pre_rope_keys and capture not in ("qk", "qkv"):
        raise KvsimError(f"--pre-rope-keys needs --capture qk or qkv, got {capture}")
    text = read_text(prompt, "--prompt")
    forced_text = read_text(str(force), "--force") if force is not None else None

    from kvsim_traces import record as run_record

    network, tokenizer = load(model, dtype=dtype, device=device, attention=attention, quiet=quiet)

    with progress_bar(f"recording {out.name}", quiet=quiet) as advance:
        trace = run_record(
            network,
            encode(tokenizer, text, chat=chat),
            out=out,
            steps=steps,
            capture=capture,
            tokenizer=tokenizer,
            force=None if forced_text is None else tokenizer(forced_text, add_special_tokens=False).input_ids,
            prompt_queries="all" if prompt_queries == "all" else int(prompt_queries),
            prompt_mass=prompt_mass,
            kvzip=kvzip,
            pre_rope_keys=pre_rope_keys,
            temperature=temperature,
            seed=seed,
            suppress_eos=suppress_eos,
            eligible=eligible,
            chat_template=chat,
            progress=advance,
        )
    check = trace.manifest.check
    error = "" if check is None else f"; largest error against eager attention {check['max_abs_error']:.1e}"
    early = ""
    if trace.num_steps < steps:
        why = "end of sequence; --suppress-eos goes on" if force is None else "the forced text ended"
        early = f" of {steps} ({why})"
    lines = [
        f"wrote {out}: prompt {trace.prompt_length}, steps {trace.num_steps}{early}, capture {trace.capture}{error}"
    ]
    lines.append(f"text: {preview(trace)}")
    for line in lines:
        say(line)
