"""Making a trace of anyone's arrays in an .npz file."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvsim_traces.errors import TraceError
from kvsim_traces.files import MAX_METADATA_BYTES, os_reason, parse_json, sync_directory
from kvsim_traces.layout import POSITION_ARRAYS, PROMPT_ARRAYS
from kvsim_traces.manifest import ARRAY_NAMES, IMPORTED_GENERATION, LayerInfo, Manifest
from kvsim_traces.npz import NpzFile
from kvsim_traces.paths import check_new_directory, hidden_directory, local_path
from kvsim_traces.reader import Trace, open_trace
from kvsim_traces.writer import TraceWriter

MANIFEST_NAME: Final = "manifest"
"""The array in which an export keeps the manifest's JSON, as bytes."""

_NUMBERS: Final = ("prompt_length", "num_kv_heads", "num_heads")
_FLOATS: Final = ("float16", "float32", "float64")
_PER_STEP: Final = ("attention", "scores", "queries", "row_sums")
_KEPT: Final = (
    "layers",
    "sink_logits",
    "model",
    "tokenizer",
    "vocab_size",
    "environment",
    "generation",
    "notes",
    "gate",
)

# Axes of each array: T, K, H, G (KV heads), d and W must agree; L must reach the last position, P is the prompt.
_AXES: Final = {
    "attention": "TKHL",
    "scores": "TKL",
    "row_sums": "TKH",
    "queries": "TKHd",
    "keys": "KGLd",
    "values": "KGLd",
    "keys_pre": "KGLd",
    "prompt_queries": "KHWd",
    "prompt_mass": "KHP",
    "kvzip_scores": "KGP",
    "gates": "KGL",
    "tokens": "L",
    "text_ends": "L",
    "text": "B",
}


@dataclass(frozen=True)
class _Plan:
    """What the file's headers amount to."""

    manifest: Manifest
    qk_dtype: str
    positions: int


def import_npz(file: str | Path, out: str | Path, *, progress: Callable[[int, int], None] | None = None) -> Trace:
    """Make a trace of the arrays in an .npz file.

    Parameters
    ----------
    file : str or Path
        Holds ``prompt_length`` (L0) and one of ``attention [T, K, H, L]``, ``scores [T, K, L]``, or ``queries
        [T, K, H, d]`` with ``keys [K, Hk, L, d]``; L is at least L0 + T, and zero or NaN beyond a step's position is
        padding. Optional: ``num_kv_heads`` (one for each query head by default), ``num_heads`` (for ``scores``),
        ``values`` and ``keys_pre`` like ``keys``, ``row_sums [T, K, H]``, ``prompt_mass [K, H, L0]``, ``prompt_queries
        [K, H, W, d]``, ``kvzip_scores [K, Hk, L0]``, ``gates [K, Hk, L]``, ``tokens [L]``, ``text`` with ``text_ends
        [L]``, and the ``manifest`` that `kvsim_traces.export_npz` writes; arrays of other names are left out and listed
        in the manifest's notes.
        Numbers are float16, float32 or float64. An array is read step by step, so that memory does not grow with T.
    out : str or Path
        The trace's directory; it must not exist, or be empty.
    progress : callable, optional
        Called with the steps done and their number.

    Returns
    -------
    Trace
        Opened.

    Raises
    ------
    TraceError
        Naming the file and the array at fault, or the file that could not be written. Nothing is left then.
    """
    local_path(file)
    source, target = Path(file), local_path(out)
    check_new_directory(target)
    with NpzFile(source) as npz:
        try:
            plan = _plan(npz)
            with hidden_directory(target, parents=True) as aside:
                with TraceWriter(aside / "trace", plan.manifest, qk_dtype=plan.qk_dtype) as writer:
                    _copy(npz, plan, writer, aside, progress)
                os.rename(aside / "trace", target)
                sync_directory(target.parent)
        except OSError as error:
            raise TraceError(f"{error.filename or target}: {os_reason(error)}; nothing was imported") from error
        except TraceError as error:
            if isinstance(error.__cause__, OSError) or str(error).startswith(str(source)):
                raise
            raise TraceError(f"{source}: {error}") from None
    return open_trace(target)


def _plan(npz: NpzFile) -> _Plan:
    """Check the headers against each other and describe the trace they make."""
    members = npz.members

    def fail(name: str, message: str) -> TraceError:
        return TraceError(f"{npz.path}: {name}: {message}")

    numbers = {name: _number(npz, name) for name in _NUMBERS if name in members}
    if "prompt_length" not in numbers:
        raise fail("prompt_length", "is missing")
    arrays: list[str] = [name for name in ARRAY_NAMES if name in members]
    if not {"attention", "scores"} & set(arrays) and not {"queries", "keys"} <= set(arrays):
        needs = "a trace needs attention, scores, or queries and keys"
        raise fail("attention", f"is missing; {needs}; found {', '.join(members) or 'no arrays'}")
    if {"attention", "scores"} <= set(arrays):
        raise fail("scores", "is superfluous beside attention, whose head mean it is")
    sizes = {"P": numbers["prompt_length"]}
    for name in arrays:
        shape, axes = members[name].shape, _AXES[name]
        if len(shape) != len(axes):
            raise fail(name, f"must have {len(axes)} axes, got shape {list(shape)}")
        wanted = "iu" if name in ("tokens", "text", "text_ends") else "f"
        dtype = members[name].dtype
        if (dtype.kind != wanted[0] and dtype.kind not in wanted) or (wanted == "f" and dtype.name not in _FLOATS):
            names = "integers" if wanted == "iu" else ", ".join(_FLOATS)
            raise fail(name, f"must be {names}, got {dtype}")
        for letter, length in zip(axes, shape, strict=True):
            if letter not in "LB" and sizes.setdefault(letter, length) != length:
                raise fail(name, f"shape {list(shape)} does not fit {letter} = {sizes[letter]} of the other arrays")
            if not length and letter != "B":
                raise fail(name, f"must not be empty, got shape {list(shape)}")
    positions = sizes["P"] + sizes["T"]
    for name in arrays:
        shape, axis = members[name].shape, _AXES[name].find("L")
        if axis >= 0 and shape[axis] < positions:
            raise fail(name, f"must reach {positions} positions (prompt_length + steps), got shape {list(shape)}")
    kv_heads = numbers.get("num_kv_heads")
    heads = sizes.get("H", numbers.get("num_heads", kv_heads or sizes.get("G", 1)))
    if kv_heads is not None and sizes.setdefault("G", kv_heads) != kv_heads:
        raise fail("num_kv_heads", f"is {kv_heads}, but keys or values have {sizes['G']} heads")
    if numbers.get("num_heads", heads) != heads:
        raise fail("num_heads", f"is {numbers['num_heads']}, but the arrays have {heads} heads")
    capture = "heads" if "attention" in arrays else "scores" if "scores" in arrays else "qk"
    if capture == "qk" and "values" in arrays:
        capture = "qkv"
    if capture == "heads" and "row_sums" not in arrays:
        arrays.append("row_sums")
    manifest = Manifest(
        capture=capture,
        prompt_length=sizes["P"],
        planned_steps=sizes["T"],
        num_layers=sizes["K"],
        num_heads=heads,
        num_kv_heads=sizes.get("G", heads),
        head_dim=sizes.get("d"),
        arrays=arrays,
        source="import",
        generation=dict(IMPORTED_GENERATION),
    )
    _restore(npz, manifest)
    ignored = sorted(set(members) - set(ARRAY_NAMES) - set(_NUMBERS) - {MANIFEST_NAME})
    if ignored:
        manifest.notes = [*manifest.notes, f"arrays of the import that a trace does not have: {', '.join(ignored)}"]
    vectors = [members[name].dtype for name in ("queries", *POSITION_ARRAYS, "prompt_queries") if name in members]
    exact = all(dtype.itemsize == 2 for dtype in vectors)
    if not manifest.layers:
        # As many as an array has whose bytes are really there.
        manifest.layers = [LayerInfo()] * manifest.num_layers
    manifest.validate(str(npz.path))
    return _Plan(manifest, "float16" if exact else "float32", positions)


def _number(npz: NpzFile, name: str) -> int:
    member = npz.members[name]
    if member.dtype.kind not in "iu" or member.shape not in ((), (1,)):
        raise TraceError(f"{npz.path}: {name}: must be one integer, got {member.dtype} of shape {list(member.shape)}")
    value = int(npz.whole(name, npz.path.parent).reshape(-1)[0])
    if not 1 <= value < 2**31:
        raise TraceError(f"{npz.path}: {name}: must be from 1 to {2**31 - 1}, got {value}")
    return value


def _restore(npz: NpzFile, manifest: Manifest) -> None:
    """Take over what an exported manifest says beyond the arrays."""
    if MANIFEST_NAME in npz.members:
        member = npz.members[MANIFEST_NAME]
        where = f"{npz.path}: {MANIFEST_NAME}"
        if member.dtype != np.uint8 or member.nbytes > MAX_METADATA_BYTES:
            raise TraceError(f"{where}: must be at most {MAX_METADATA_BYTES} bytes (uint8) of JSON, got {member.dtype}")
        data = parse_json(npz.whole(MANIFEST_NAME, npz.path.parent).tobytes(), where)
        given = Manifest.from_json(data, where)
        for name in _KEPT:
            setattr(manifest, name, getattr(given, name))
    elif "row_sums" in npz.members:
        # Sums below 1 that come with the rows say that the softmax had a sink.
        manifest.sink_logits = any(bool((row < 1 - 2e-3).any()) for row in npz.rows("row_sums", npz.path.parent))


def _copy(
    npz: NpzFile, plan: _Plan, writer: TraceWriter, scratch: Path, progress: Callable[[int, int], None] | None
) -> None:
    manifest = plan.manifest
    prompt, steps = manifest.prompt_length, manifest.planned_steps
    held: dict[str, NDArray[Any]] = {
        name: npz.whole(name, scratch)
        for name in ("tokens", "text", "text_ends", *POSITION_ARRAYS, *PROMPT_ARRAYS)
        if name in npz.members
    }
    texts = list(_texts(npz.path, held, plan.positions)) if "text" in held else []
    first: dict[str, Any] = {name: held[name] for name in PROMPT_ARRAYS if name in held}
    if "gates" in held:
        first["gates"] = held["gates"][..., : plan.positions]
    if "tokens" in held:
        first["tokens"] = held["tokens"][:prompt]
    if texts:
        first["text"] = texts[:prompt]
    writer.write_prompt(**first)
    vectors = {name: held[name] for name in POSITION_ARRAYS if name in held}
    for start in range(0, prompt if vectors else 0, 1024):
        stop = min(prompt, start + 1024)
        writer.append_positions(**{name: array[:, :, start:stop] for name, array in vectors.items()})
    streams = {name: npz.rows(name, scratch) for name in _PER_STEP if name in npz.members}
    for step in range(1, steps + 1):
        position = prompt + step - 1
        given: dict[str, Any] = {name: next(stream) for name, stream in streams.items()}
        for name in ("attention", "scores"):
            if name in given:
                given[name] = _visible(name, given[name], position + 1, step)
        given.update({name: array[:, :, position] for name, array in vectors.items()})
        if "tokens" in held:
            given["token"] = int(held["tokens"][position])
        if texts:
            given["text"] = texts[position]
        writer.append(**given)
        if progress is not None:
            progress(step, steps)


def _visible(name: str, row: NDArray[Any], length: int, step: int) -> NDArray[Any]:
    """Cut off the padding of a row, having checked that it is padding."""
    beyond = row[..., length:]
    # NaN compares unequal to itself.
    if not ((beyond == 0) | (beyond != beyond)).all():
        raise TraceError(f"{name}: step {step} attends beyond its own position {length - 1}")
    return row[..., :length]


def _texts(path: Path, held: dict[str, NDArray[Any]], positions: int) -> Iterator[bytes]:
    text, ends = held["text"], held["text_ends"][:positions].astype(np.int64)
    if text.dtype != np.uint8:
        raise TraceError(f"{path}: text: must be uint8, got {text.dtype}")
    if ends[0] < 0 or np.any(np.diff(ends) < 0) or ends[-1] > len(text):
        raise TraceError(f"{path}: text_ends: must rise from 0 to at most {len(text)}")
    start = 0
    for end in ends.tolist():
        yield text[start:end].tobytes()
        start = end
