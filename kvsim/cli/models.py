"""Models and prompts, as the commands that run a model take them."""

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsim.cli.output import say, stderr
from kvsim.errors import KvsimError
from kvsim.questions import chat_text

__all__ = [
    "Chat",
    "Device",
    "Dtype",
    "Force",
    "ModelPath",
    "Prompt",
    "encode",
    "load",
    "load_tokenizer",
    "need_torch",
    "read_text",
]

ModelPath = Annotated[str, typer.Option(help="Model folder, .gguf file, or folder with one .gguf file.")]
Prompt = Annotated[str, typer.Option(help="Text file with the prompt, or - for stdin.")]
Chat = Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")]
Force = Annotated[Path | None, typer.Option(help="Text file whose tokens are fed instead of generated ones.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; by device if not given.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, …; a GPU if there is one.")]


def need_torch(what: str, extra: str) -> None:
    """Say which extra to install where torch or transformers is missing.

    Raises
    ------
    KvsimError
        If either is.
    """
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise KvsimError(f"{what} needs {package}: pip install '.[{extra}]' in the checkout, or 'kvsim[{extra}]'")


def load(model: str, *, dtype: str | None, device: str | None, attention: str = "sdpa", quiet: bool) -> tuple[Any, Any]:
    """Load a model and its tokenizer, quietly."""
    from kvsim_traces.loading import load_model

    if not quiet:
        say(f"loading {model} …", to=stderr)
    with _silence():
        return load_model(model, dtype=dtype, device=device, attention=attention)


def load_tokenizer(model: Path) -> Any:
    """Load the tokenizer of a model without its weights, quietly."""
    from kvsim_traces.loading import load_tokenizer

    with _silence():
        return load_tokenizer(model)


def _silence() -> contextlib.redirect_stderr[io.StringIO]:
    """Keep transformers' own bars and notes from mixing with ours; what goes wrong comes as an exception."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    return contextlib.redirect_stderr(io.StringIO())


def read_text(file: str, option: str) -> str:
    """Read a text file, or stdin for -.

    Raises
    ------
    KvsimError
        If it cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise KvsimError(f"{option} {file}: {error.strerror}; it takes a text file, or - for stdin") from None
    except UnicodeDecodeError:
        raise KvsimError(f"{option} {file}: not UTF-8 text") from None
    if not text.strip():
        raise KvsimError(f"{option} {file}: is empty")
    return text


def encode(tokenizer: Any, text: str, *, chat: bool) -> list[int]:
    """Turn a prompt into tokens, in the model's chat template if asked."""
    if chat:
        text = chat_text(tokenizer, text)
    return list(tokenizer(text, add_special_tokens=not chat).input_ids)
