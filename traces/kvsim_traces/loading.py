"""Load a causal language model and its tokenizer from local files, GGUF included, without asking any hub."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvsim_traces.errors import TraceError
from kvsim_traces.paths import local_path, path_kind

_REFUSALS = (OSError, ValueError, TypeError, RuntimeError, ImportError, KeyError)


def _gguf_file(path: Path) -> Path | None:
    """Return the GGUF file a path means: itself, or the only one in a directory that is no transformers folder."""
    kind = path_kind(path)
    if kind == "file":
        if path.suffix != ".gguf":
            raise TraceError(f"{path}: not a model (expected a transformers folder or a .gguf file)")
        return path
    if kind != "directory":
        raise TraceError(f"{path}: no such model directory or .gguf file")
    if path_kind(path / "config.json") == "file":
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        found = f"{len(files)} .gguf files" if files else "no .gguf file"
        raise TraceError(f"{path}: not a model directory (no config.json and {found})")
    return files[0]


def _source(path: str | Path) -> tuple[Path, Path, dict[str, Any]]:
    """Return a path, the folder for ``from_pretrained`` and the arguments that say what to read in it."""
    local_path(path)
    path = Path(path)
    gguf = _gguf_file(path)
    if gguf is None:
        return path, path, {"local_files_only": True}
    return path, gguf.parent, {"local_files_only": True, "gguf_file": gguf.name}


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a model, without its weights.

    Parameters
    ----------
    path : str or Path
        As for `load_model`.

    Raises
    ------
    TraceError
        When the path is no model, or transformers cannot load its tokenizer. Nothing is ever downloaded.
    """
    path, folder, source = _source(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **source)
    except _REFUSALS as error:
        raise TraceError(f"{path}: transformers cannot load this model's tokenizer: {error}") from error
    if "gguf_file" in source:
        tokenizer.name_or_path = str(folder / source["gguf_file"])
    return tokenizer


def device_of(device: torch.device | str | None) -> torch.device:
    """Give the device that is meant: "cuda" where there is one, else "cpu", by default.

    Raises
    ------
    TraceError
        If torch knows no such device, or cannot use it here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.zeros(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise TraceError(f"device {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from None
    return place


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    attention: str = "sdpa",
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer.

    Parameters
    ----------
    path : str or Path
        A transformers folder (with a config.json), a .gguf file, or a directory with exactly one .gguf file. GGUF
        weights are dequantized.
    dtype : torch.dtype or str, optional
        float32 on the CPU and bfloat16 elsewhere by default.
    device : torch.device or str, optional
        "cuda" where there is one, else "cpu", by default.
    attention : str
        "sdpa", "eager", "flash_attention_2", ...

    Returns
    -------
    (model, tokenizer)
        The model is in evaluation mode.

    Raises
    ------
    TraceError
        When the path is no model, transformers cannot load it, or there is no such device. Nothing is ever downloaded.
    """
    path, folder, source = _source(path)
    place = device_of(device)
    if dtype is None:
        dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    elif isinstance(dtype, str):
        number_type = getattr(torch, dtype, None)
        if not isinstance(number_type, torch.dtype):
            raise TraceError(f"dtype: {dtype!r} is not a torch number type; use float32, bfloat16 or float16")
        dtype = number_type
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    # Newer transformers keep GGUF weights packed unless told otherwise; older ones have no such class.
    if "gguf_file" in source and hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    tokenizer = load_tokenizer(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), **source, **options)
    except _REFUSALS as error:
        raise TraceError(f"{path}: transformers cannot load this model: {error}") from error
    if "gguf_file" in source:
        model.config._name_or_path = tokenizer.name_or_path
    return model.to(place).eval(), tokenizer
