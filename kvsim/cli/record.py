"""``kvsim record``."""

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvsim.cli.options import Quiet
from kvsim.cli.output import preview, progress_bar, say, stderr
from kvsim.errors import KvsimError

__all__ = ["record"]


def record(
    model: Annotated[str, typer.Option(help="Model folder, .gguf file, or folder with one .gguf file.")],
    prompt: Annotated[str, typer.Option(help="Text file with the prompt, or - for stdin.")],
    out: Annotated[Path, typer.Option(help="New trace directory.")],
    steps: Annotated[int, typer.Option(help="Decode steps to record.")] = 64,
    capture: Annotated[
        Literal["heads", "scores", "qk", "qkv"],
        typer.Option(help="Attention of every head, its head mean, or queries and keys (and values)."),
    ] = "heads",
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    force: Annotated[
        Path | None, typer.Option(help="Text file whose tokens are fed instead of generated ones.")
    ] = None,
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
    eligible: Annotated[
        Literal["full", "all"], typer.Option(help="Layers that policies may evict from: full attention only, or all.")
    ] = "full",
    attention: Annotated[
        str, typer.Option(help="Attention implementation: sdpa, eager, flash_attention_2, …")
    ] = "sdpa",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; by device if not given.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …; a GPU if there is one.")] = None,
    quiet: Quiet = False,
) -> None:
    """Run a transformers model once and record what its KV cache was asked for.

    Example: kvsim record --model SmolLM2-135M-Instruct --prompt question.txt --chat --capture qk --out runs/a
    """
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise KvsimError(f"recording needs {package}: pip install '.[record]' in the checkout, or 'kvsim[record]'")
    if steps < 1:
        raise KvsimError(f"--steps must be at least 1, got {steps}")
    if prompt_queries != "all" and not prompt_queries.isdigit():
        raise KvsimError(f"--prompt-queries must be a number or 'all', got {prompt_queries!r}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise KvsimError(f"--out {out}: exists already; name a new directory")
    text = _read(prompt, "--prompt")
    forced_text = _read(str(force), "--force") if force is not None else None

    from kvsim_traces import record as run_record
    from kvsim_traces.loading import load_model
    from transformers.utils import logging as transformers_logging

    # transformers' own bars and notes would mix with ours; what goes wrong comes as an exception.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    if not quiet:
        say(f"loading {model} …", to=stderr)
    with contextlib.redirect_stderr(io.StringIO()):
        network, tokenizer = load_model(model, dtype=dtype, device=device, attention=attention)
    with progress_bar(f"recording {out.name}", quiet=quiet) as advance:
        trace = run_record(
            network,
            _encode(tokenizer, text, chat=chat),
            out=out,
            steps=steps,
            capture=capture,
            tokenizer=tokenizer,
            force=None if forced_text is None else tokenizer(forced_text, add_special_tokens=False).input_ids,
            prompt_queries="all" if prompt_queries == "all" else int(prompt_queries),
            prompt_mass=prompt_mass,
            kvzip=kvzip,
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


def _read(file: str, option: str) -> str:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise KvsimError(f"{option} {file}: {error.strerror}; it takes a text file, or - for stdin") from None
    except UnicodeDecodeError:
        raise KvsimError(f"{option} {file}: not UTF-8 text") from None
    if not text.strip():
        raise KvsimError(f"{option} {file}: is empty")
    return text


def _encode(tokenizer: Any, text: str, *, chat: bool) -> list[int]:
    if chat:
        if tokenizer.chat_template is None:
            raise KvsimError("--chat: the model's tokenizer has no chat template")
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=not chat).input_ids)
