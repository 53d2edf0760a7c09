"""Which heads retrieve: the JSON file of ``admit=duo``.

::

    {"model": "HuggingFaceTB/SmolLM2-135M", "num_layers": 30, "num_kv_heads": 3,
     "retrieval": [[0, 2], [4, 1]]}                      the heads, as [layer, KV head]
    {"model": …, "num_layers": 30, "num_kv_heads": 3,
     "scores": [[0.9, 0.1, 0.4], …], "threshold": 0.5}   or a score of each, [layers][KV heads], and from where on

Layers are the model's, from 0, sliding ones included. ``window`` and ``sink`` may say what the other heads were
identified with; further keys are left alone. ``kvsim duo-heads`` writes such files.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvsim_traces.files import os_reason, write_report

from kvsim.errors import KvsimError, PolicyError
from kvsim.inputs import regular_size
from kvsim.plan import FloatArray
from kvsim.shares import share_of

__all__ = ["RetrievalHeads", "load_heads", "save_heads"]

_MAX_BYTES = 2**24
_MOST = 10**6
_SEEN = {"window": 1, "sink": 0}


@dataclass(frozen=True)
class RetrievalHeads:
    """What an identification of retrieval heads found (DuoAttention section 2.2).

    Attributes
    ----------
    model : str
        The model's name.
    scores : array
        [layers of the model, Hk], the more the likelier a head retrieves; 1 and 0 where the file lists heads.
    threshold : float
        Heads retrieve from this score on.
    window, sink : int or None
        What the other heads saw when they were identified: recent positions, and those at the start.
    listed : bool
        Whether the file lists heads and has no scores.
    """

    model: str
    scores: FloatArray
    threshold: float
    window: int | None = None
    sink: int | None = None
    listed: bool = False

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return int(self.scores.shape[0])

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer, Hk."""
        return int(self.scores.shape[1])

    def retrieval(self, layers: Sequence[int], share: float | None = None) -> npt.NDArray[np.bool_]:
        """Mark the retrieval heads of some layers, [len(layers), Hk].

        Parameters
        ----------
        layers : sequence of int
            The model's indices of the layers.
        share : float, optional
            Take this share of their heads, floored, the highest scores first (the earliest layer and head among equal
            ones), instead of those that reach the threshold.

        Raises
        ------
        PolicyError
            If a share is asked for where heads are listed without scores.
        """
        own = self.scores[list(layers)]
        if share is None:
            reached: npt.NDArray[np.bool_] = own >= self.threshold
            return reached
        if self.listed:
            raise PolicyError("share of 'duo' needs scores, but the file lists heads without any")
        marks = np.zeros(own.size, dtype=np.bool_)
        marks[np.argsort(-own, axis=None, kind="stable")[: share_of(share, own.size)]] = True
        return marks.reshape(own.shape)


def save_heads(heads: Mapping[str, Any], out: Path) -> None:
    """Write what a file of retrieval heads says, as in the module's description, to a new file.

    Raises
    ------
    KvsimError
        If it exists or cannot be written.
    """
    if out.exists():
        raise KvsimError(f"{out}: exists already; name a new file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_report(out, heads)
    except OSError as error:
        raise KvsimError(f"{out}: cannot write the heads ({os_reason(error)})") from error


def load_heads(path: str | Path) -> RetrievalHeads:
    """Read a file of retrieval heads.

    Raises
    ------
    PolicyError
        If it is missing, too large, no such file, or its parts do not fit each other; the message names it.
    """
    hint = "retrieval heads are a JSON file from 'kvsim duo-heads'"
    size = regular_size(path, hint)
    if size > _MAX_BYTES:
        raise PolicyError(f"{path}: has {size} bytes, retrieval heads at most {_MAX_BYTES}; {hint}")
    try:
        found = json.loads(Path(path).read_bytes(), object_pairs_hook=_once)
    except OSError as error:
        raise PolicyError(f"{path}: {error.strerror or 'cannot be read'}; {hint}") from None
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{path}: is not JSON ({error}); {hint}") from None
    if not isinstance(found, dict):
        raise PolicyError(f"{path}: is not a JSON object; {hint}")
    layers, heads = (_count(path, found, name, 1) for name in ("num_layers", "num_kv_heads"))
    if layers * heads > _MOST:
        raise PolicyError(f"{path}: {layers} layers of {heads} KV heads are more than {_MOST} heads; {hint}")
    window, sink = (_count(path, found, name, least) if name in found else None for name, least in _SEEN.items())
    model = found.get("model")
    if not isinstance(model, str):
        raise PolicyError(f"{path}: 'model' must be the model's name, got {model!r:.80}")
    if ("retrieval" in found) == ("scores" in found):
        raise PolicyError(f"{path}: must have either 'retrieval' or 'scores'; {hint}")
    if "retrieval" in found:
        return RetrievalHeads(model, _listed(path, found["retrieval"], layers, heads), 1.0, window, sink, listed=True)
    threshold = found.get("threshold")
    if threshold is None or not _is_number(threshold):
        raise PolicyError(f"{path}: 'threshold' must be a finite number, got {threshold!r:.80}")
    return RetrievalHeads(model, _table(path, found["scores"], layers, heads), float(threshold), window, sink)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that is given twice: one of the two would be left out without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r:.80} is given twice")
    return found


def _count(path: str | Path, found: dict[str, Any], name: str, least: int) -> int:
    value = found.get(name)
    if type(value) is not int or not least <= value <= _MOST:
        bound = f"at most {_MOST}" if type(value) is int and value > _MOST else f"at least {least}"
        raise PolicyError(f"{path}: {name!r} must be a whole number of {bound}, got {value!r:.80}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def _listed(path: str | Path, pairs: Any, layers: int, heads: int) -> FloatArray:
    scores = np.zeros((layers, heads))
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        whole = isinstance(pair, list) and len(pair) == 2 and all(type(one) is int for one in pair)
        if not whole or not (0 <= pair[0] < layers and 0 <= pair[1] < heads):
            raise PolicyError(
                f"{path}: 'retrieval' must list [layer, KV head] below [{layers}, {heads}], got {pair!r:.80}"
            )
        scores[pair[0], pair[1]] = 1
    return scores


def _table(path: str | Path, rows: Any, layers: int, heads: int) -> FloatArray:
    fits = isinstance(rows, list) and len(rows) == layers
    if not fits or not all(isinstance(row, list) and len(row) == heads and all(map(_is_number, row)) for row in rows):
        raise PolicyError(f"{path}: 'scores' must be {layers} lists of {heads} finite numbers")
    return np.array(rows, dtype=np.float64)
