"""Checkpoints of a training run: safetensors, written aside and renamed, so that a killed write leaves the old one."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvsim_traces.files import os_reason, write_whole

from kvsim.errors import KvsimError

__all__ = ["State", "load_state", "save_state"]

_KIND = "kvsim training state"
_FORMAT = 1

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class State:
    """Where a run is.

    Attributes
    ----------
    step : int
        Updates done. The order of samples follows from it and the seed, and nothing else is drawn.
    arrays : dict of str to array
        The trained numbers, as ``name``, and AdamW's moments, as ``name.exp_avg`` and ``name.exp_avg_sq``.
    history : array of float64
        [step, columns] what each update reported.
    facts : dict
        What the run is of; a run of other facts is not continued.
    """

    step: int
    arrays: Arrays
    history: npt.NDArray[np.float64]
    facts: dict[str, Any]


def save_state(state: State, path: Path) -> None:
    """Write a checkpoint, in place of the one before.

    Raises
    ------
    KvsimError
        If it cannot be written.
    """
    from safetensors.numpy import save

    facts = {"kind": _KIND, "format": _FORMAT, "step": state.step, "facts": state.facts}
    arrays = {name: np.ascontiguousarray(array) for name, array in state.arrays.items()}
    data = save({**arrays, "history": state.history}, metadata={"kvsim": json.dumps(facts, sort_keys=True)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [data])
    except OSError as error:
        raise KvsimError(f"{path}: cannot write the checkpoint ({os_reason(error)})") from error


def load_state(path: Path, shapes: dict[str, tuple[int, ...]], facts: dict[str, Any]) -> State:
    """Read a checkpoint.

    Parameters
    ----------
    path : Path
    shapes : dict of str to tuple of int
        The trained arrays and their shapes.
    facts : dict
        What the run to be continued is of.

    Raises
    ------
    KvsimError
        If the file is missing, damaged or something else, or of a run with other facts.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, TypeError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise KvsimError(f"{path}: {reason}; there is no checkpoint to resume from") from None
    try:
        found = json.loads(metadata["kvsim"])
        if (found["kind"], found["format"]) != (_KIND, _FORMAT):
            raise ValueError
        step, held, history = found["step"], found["facts"], arrays.pop("history")
        if type(step) is not int or not isinstance(held, dict) or history.ndim != 2 or len(history) != step:
            raise ValueError
    except (KeyError, TypeError, ValueError, RecursionError):
        raise KvsimError(f"{path}: is not a checkpoint of format {_FORMAT}") from None
    for name in sorted(facts.keys() | held.keys()):
        if held.get(name) != facts.get(name):
            raise KvsimError(
                f"{path}: is of a run with {name} {held.get(name)!r:.80}, not {facts.get(name)!r:.80}; resume with the "
                "settings, model and data that it began with"
            )
    wanted = {f"{name}{part}": shape for name, shape in shapes.items() for part in ("", ".exp_avg", ".exp_avg_sq")}
    if {name: array.shape for name, array in arrays.items()} != wanted:
        raise KvsimError(f"{path}: its arrays are not those of this run")
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise KvsimError(f"{path}: holds numbers that are not finite")
    return State(step, arrays, history, held)
