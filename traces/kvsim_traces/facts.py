"""What a manifest says about where a recording came from: model, tokenizer, environment."""

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

# Keys of a config that say where it was loaded from or by what, not what the model is.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version")


def _canonical(value: Any) -> bytes:
    """JSON in one fixed spelling, for hashing."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _base_name(name: str) -> str:
    """Return the last part of a local path and a hub id as it is: a trace does not tell the recorder's directories."""
    return Path(name).resolve().name if name and (Path(name).is_absolute() or Path(name).exists()) else name


def weights_hash(model: torch.nn.Module) -> str:
    """Sha256 over every parameter's name, type, shape and bytes, in the model's order; one at a time on the host."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(_canonical([name, str(parameter.dtype).removeprefix("torch."), list(parameter.shape)]))
        data = parameter.detach().reshape(-1).contiguous().cpu().view(torch.uint8)
        digest.update(memoryview(data.numpy()))
    return digest.hexdigest()


def model_facts(model: torch.nn.Module, name: str | None = None) -> dict[str, Any]:
    """Name, config, config hash and weight hash of a model.

    Parameters
    ----------
    model : PreTrainedModel
    name : str, optional
        By default the hub id, or the file name of a local path.
    """
    config = json.loads(model.config.to_json_string(use_diff=False))
    config = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}
    return {
        "name": name or _base_name(str(getattr(model.config, "_name_or_path", "") or "")) or type(model).__name__,
        "config": config,
        "config_hash": hashlib.sha256(_canonical(config)).hexdigest(),
        "weights_hash": weights_hash(model),
    }


def tokenizer_facts(tokenizer: Any, name: str | None = None) -> dict[str, str]:
    """Name and hash of a tokenizer; padding and truncation, which belong to a call, are not part of the hash."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        description = json.loads(backend.to_str())
        description.pop("padding", None)
        description.pop("truncation", None)
    else:
        description = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    return {
        "name": name or _base_name(str(getattr(tokenizer, "name_or_path", "") or "")) or type(tokenizer).__name__,
        "hash": hashlib.sha256(_canonical(description)).hexdigest(),
    }


def environment_facts(model: torch.nn.Module, attention: str) -> dict[str, str]:
    """Versions, device, number type and attention implementation of a recording."""
    parameter = next(model.parameters())
    device = parameter.device.type
    if device == "cuda":
        device = f"cuda ({torch.cuda.get_device_name(parameter.device)})"
    return {
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "python": platform.python_version(),
        "device": device,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "attention": attention,
    }
