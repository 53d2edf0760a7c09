"""Reading a trace: memory-mapped, checksummed, and never trusting a claim."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvsim_traces.errors import CaptureError, TraceError
from kvsim_traces.files import read_json
from kvsim_traces.layout import DERIVED_ARRAYS, METADATA_NAME, PROMPT_ARRAYS, STEP_ARRAYS, parse_metadata
from kvsim_traces.manifest import CAPTURES, Manifest
from kvsim_traces.paths import local_path, path_kind
from kvsim_traces.recent import CACHE_BYTES, Recent
from kvsim_traces.rows import attention_row, check_side_rows, open_rows, side_row, write_rows
from kvsim_traces.stored import StoredArray, check_directory
from kvsim_traces.values import check_finite, check_halves, check_sums, halves_to_floats

_IDENTITY: Final = (
    "format_version",
    "capture",
    "prompt_length",
    "committed_steps",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "layers",
    "sink_logits",
    "arrays",
    "model",
    "tokenizer",
)

_HINTS: Final = {
    "prompt_mass": "record with prompt mass, or add prompt_mass [K,H,L0] to the npz",
    "prompt_queries": "record with prompt queries, or add prompt_queries [K,H,W,d] to the npz",
    "kvzip_scores": "record with kvzip, or add kvzip_scores [K,Hk,L0] to the npz",
    "keys_pre": "record with pre_rope_keys, or add keys_pre [K,Hk,L,d] to the npz",
    "gates": "`kvsim trace gates` adds them, or add gates [K,Hk,L] to the npz",
}


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of a trace's directory.

    Parameters
    ----------
    path : Path
        The trace's directory.

    Returns
    -------
    Manifest
        Checked.

    Raises
    ------
    TraceError
        Naming the file and the field.
    """
    if (kind := path_kind(path)) != "directory":
        raise TraceError(f"{path}: is {'missing' if kind == 'missing' else 'not a directory'}; a trace is a directory")
    file = path / METADATA_NAME
    data = read_json(file)
    for field, value in (("zarr_format", 3), ("node_type", "group")):
        if data.get(field) != value:
            raise TraceError(f"{file}: {field}: must be {value}, got {data.get(field)!r:.60}; this is not a trace")
    attributes = data.get("attributes")
    if not isinstance(attributes, dict) or "kvsim" not in attributes:
        raise TraceError(f"{file}: attributes.kvsim: is missing; this is not a trace")
    return Manifest.from_json(attributes["kvsim"], str(file))


def open_array(path: Path, name: str, manifest: Manifest, *, verify: bool = True) -> StoredArray:
    """Open one array of a trace; its pieces are checked when touched, or all by `StoredArray.check_files`.

    Parameters
    ----------
    path : Path
        The trace's directory.
    name : str
        The array.
    manifest : Manifest
        The trace's manifest.
    verify : bool
        Whether to check checksums.

    Raises
    ------
    TraceError
        Naming the file and the field of its metadata that is wrong.
    """
    check_directory(path / name)
    file = path / name / METADATA_NAME
    layout = parse_metadata(read_json(file), name, manifest, str(file))
    if name in STEP_ARRAYS:
        rows = manifest.committed_steps
    elif name == "text" or name in PROMPT_ARRAYS:
        rows = layout.length
    else:
        rows = manifest.prompt_length + manifest.committed_steps
    return StoredArray(layout, path / name, rows, verify=verify)


def open_arrays(path: Path, manifest: Manifest, *, verify: bool = True) -> dict[str, StoredArray]:
    """Open every array that a manifest lists and check the sizes of its files; arguments and errors of `open_array`."""
    return {name: open_array(path, name, manifest, verify=verify).check_files() for name in manifest.arrays}


def open_trace(path: str | Path, *, verify: bool = True) -> "Trace":
    """Open a trace for reading.

    Parameters
    ----------
    path : str or Path
        Its directory, or an address ``scheme://...`` that fsspec knows (copied to a local cache first).
    verify : bool
        Whether to check the checksum of each chunk when it is first touched. Metadata, file sizes and rows are checked
        all the same.

    Returns
    -------
    Trace
        Nothing in proportion to what the metadata claims has been read or allocated.

    Raises
    ------
    TraceError
        Naming the file and the field that is wrong, the file that is missing or of the wrong size, or the link.
    """
    if isinstance(path, str) and "://" in path:
        from kvsim_traces.remote import fetch_trace

        path = fetch_trace(path)
    # Without following links: the rows lie beside the name that was given.
    directory = local_path(path)
    manifest = read_manifest(directory)
    if not manifest.committed_steps:
        file = directory / METADATA_NAME
        raise TraceError(f"{file}: committed_steps: is 0; the recording stopped before its first commit")
    return Trace(directory, manifest, open_arrays(directory, manifest, verify=verify), verify=verify)


class Trace:
    """A recorded run, read from disk as asked; made by `open_trace`.

    Symbols are the design's: L0 prompt length, T steps, K recorded layers, H query heads, Hk KV heads, d head dim.
    Steps count from 1 as in the design; layers from 0, over all recorded layers. Arrays handed out may be shared and
    are then read-only.

    Attributes
    ----------
    path : Path
        Its directory.
    manifest : Manifest
        What it says about itself.
    on_disk : bool
        Whether it lies at `path`, so that what is computed from it may be kept beside it.
    """

    on_disk = True

    def __init__(self, path: Path, manifest: Manifest, arrays: dict[str, StoredArray], *, verify: bool) -> None:
        self.path = path
        self.manifest = manifest
        self._arrays = arrays
        self._verify = verify
        self._recent = Recent(CACHE_BYTES)
        self._hash = ""
        self._rows: StoredArray | None = None
        self._rows_sought = False
        self._ends: NDArray[np.int64] | None = None
        self._text: NDArray[np.uint8] | None = None
        self._tokens: NDArray[np.int32] | None = None

    def __repr__(self) -> str:
        return (
            f"Trace({str(self.path)!r}, capture={self.capture!r}, prompt_length={self.prompt_length}, "
            f"num_steps={self.num_steps}, num_layers={self.num_layers}, num_heads={self.num_heads})"
        )

    @property
    def prompt_length(self) -> int:
        """L0, in positions."""
        return self.manifest.prompt_length

    @property
    def num_steps(self) -> int:
        """T: the steps that are committed."""
        return self.manifest.committed_steps

    @property
    def num_positions(self) -> int:
        """L0 + T."""
        return self.prompt_length + self.num_steps

    @property
    def num_layers(self) -> int:
        """K, all recorded layers."""
        return self.manifest.num_layers

    @property
    def num_heads(self) -> int:
        """H, the query heads."""
        return self.manifest.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Hk, the KV heads."""
        return self.manifest.num_kv_heads

    @property
    def head_dim(self) -> int | None:
        """d, or None where the trace has no vectors."""
        return self.manifest.head_dim

    @property
    def capture(self) -> str:
        """``heads``, ``scores``, ``qk`` or ``qkv``."""
        return self.manifest.capture

    @property
    def eligible_layers(self) -> tuple[int, ...]:
        """Indices of the layers that policies score and evict."""
        return self.manifest.eligible_layers

    @property
    def hash(self) -> str:
        """SHA-256 of its identity and every recorded chunk's checksum (which alone are read); `gates` do not count."""
        if not self._hash:
            facts = self.manifest.to_json()
            identity = {key: facts[key] for key in _IDENTITY}
            kept = sorted(name for name in self.manifest.arrays if name not in DERIVED_ARRAYS)
            identity["arrays"] = kept
            digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
            for name in kept:
                stored = self._arrays[name]
                layout = stored.layout
                digest.update(f"\n{name} {layout.dtype} {layout.piece} {layout.chunk} {stored.rows}\n".encode())
                for checksums in stored.checksums():
                    digest.update(checksums)
            self._hash = digest.hexdigest()
        return self._hash

    def has(self, name: str) -> bool:
        """Say whether the trace holds an array, by the names of `kvsim_traces.manifest.ARRAY_NAMES`."""
        return name in self._arrays

    def stored(self, name: str) -> StoredArray:
        """Return an array as it is stored.

        Raises
        ------
        CaptureError
            If the trace does not hold it.
        """
        if name not in self._arrays:
            having = [capture for capture, arrays in CAPTURES.items() if name in arrays]
            hint = (
                f"captures that have it: {', '.join(having)}" if having else _HINTS.get(name, "stored only when given")
            )
            raise CaptureError(f"{self.path}: capture {self.capture} has no {name}; {hint}")
        return self._arrays[name]

    def stored_rows(self, t: int, layers: Sequence[int] | None = None) -> NDArray[np.float16]:
        """Return step t's rows as stored: float16 times 2^15, finite, not negative, summing to their row sums.

        Parameters
        ----------
        t : int
            Step, from 1.
        layers : sequence of int, optional
            Recorded layers; all by default.

        Returns
        -------
        ndarray of float16
            Shape [layers, H, L0 + t] for `heads`, [layers, L0 + t] for `scores`; a read-only view where it can be.

        Raises
        ------
        TraceError
            If t or a layer is out of range, or the rows are damaged.
        CaptureError
            If the trace stores no rows.
        """
        return self._checked_rows(t, self._layers(layers))[0]

    def _checked_rows(self, t: int, layers: list[int] | None) -> tuple[NDArray[np.float16], NDArray[np.float32]]:
        name = "scores" if self.capture == "scores" else "attention"
        stored = self.stored(name)
        rows = stored.row(self._index(t), layers)[..., : self.prompt_length + t]
        where = f"{stored.path((t - 1) // stored.layout.piece_rows)}: {name} of step {t}"
        check_halves(rows, where, layers)
        floats = halves_to_floats(rows)
        expected: NDArray[np.float32] = np.ones(self.num_layers, np.float32)
        if name == "attention":
            expected = self.row_sums(t)
        elif "row_sums" in self._arrays:
            expected = self.row_sums(t).mean(axis=-1)
        check_sums(floats.sum(axis=-1), expected if layers is None else expected[layers], where, layers=layers)
        return rows, floats

    def attention_rows(self, t: int, layers: Sequence[int] | None = None) -> NDArray[np.float32]:
        """Return step t's attention over positions ``0 .. L0 + t - 1``.

        Parameters
        ----------
        t : int
            Step, from 1.
        layers : sequence of int, optional
            Recorded layers; all by default.

        Returns
        -------
        ndarray of float32, shape [layers, H, L0 + t]
            `heads`: the stored probabilities, exactly. `qk` and `qkv`: the softmax of queries and keys, computed in
            float64; the rows stored beside the trace by `store_rows` are the same bit for bit.

        Raises
        ------
        CaptureError
            For a `scores` capture.
        TraceError
            If t or a layer is out of range, or what is stored is damaged.
        """
        chosen = self._layers(layers)
        if self.capture == "scores":
            raise CaptureError(
                f"{self.path}: capture scores has no attention by head; captures that have it: heads, qk, qkv"
            )
        if self.capture == "heads":
            return self._checked_rows(t, chosen)[1]
        index = self._index(t)
        length = self.prompt_length + index + 1
        # What lies beside the trace is only a shortcut: without it, or if it is damaged, rows are computed.
        if not self._rows_sought:
            source = self.hash
            with contextlib.suppress(TraceError):
                self._rows = open_rows(self.path, self.manifest, source, verify=self._verify)
            self._rows_sought = True
        if (kept := self._rows) is not None:
            sums = self.row_sums(t)
            try:
                return side_row(kept, index + 1, chosen, length, sums)
            except TraceError:
                self._rows = None
        return self._computed_rows(t, chosen)

    def check_side_rows(self) -> None:
        """Check the rows that `store_rows` keeps beside the trace, if there are any of this trace.

        Raises
        ------
        TraceError
            Naming the file and what is wrong with it. Reading ignores such rows.
        """
        if self.capture not in ("qk", "qkv"):
            return
        kept = open_rows(self.path, self.manifest, self.hash, verify=True)
        if kept is not None:
            lengths = range(self.prompt_length + 1, self.num_positions + 1)
            check_side_rows(kept, lengths, self.row_sums, lambda step: self._computed_rows(step, None))

    def _computed_rows(self, t: int, layers: list[int] | None) -> NDArray[np.float32]:
        chosen = list(range(self.num_layers)) if layers is None else layers
        length = self.prompt_length + t
        queries = self.queries(t)
        result = np.empty((len(chosen), self.num_heads, length), np.float32)
        for place, layer in enumerate(chosen):
            keys = self._recent.get(("wide keys", layer), lambda layer=layer: self.keys(layer).astype(np.float64))  # type: ignore[misc]
            result[place] = attention_row(queries[layer], keys[:, :length], self.manifest.layers[layer])
        if self.manifest.sink_logits:
            result *= self.row_sums(t)[chosen, :, np.newaxis]
        return result

    def score_rows(self, t: int, layers: Sequence[int] | None = None) -> NDArray[np.float32]:
        """Return step t's attention averaged over the query heads.

        Parameters
        ----------
        t : int
            Step, from 1.
        layers : sequence of int, optional
            Recorded layers; all by default.

        Returns
        -------
        ndarray of float32, shape [layers, L0 + t]
            As stored for a `scores` capture; else the mean taken in float64.

        Raises
        ------
        TraceError
            If t or a layer is out of range, or what is stored is damaged.
        """
        if self.capture == "scores":
            return self._checked_rows(t, self._layers(layers))[1]
        rows: NDArray[np.float32] = self.attention_rows(t, layers).mean(axis=1, dtype=np.float64).astype(np.float32)
        return rows

    def row_sums(self, t: int) -> NDArray[np.float32]:
        """Return the sums of step t's softmax rows, [K, H]: 1 unless the softmax has a sink logit; may be read-only.

        Raises
        ------
        TraceError
            If t is out of range, or a sum is impossible.
        """
        index = self._index(t)
        if "row_sums" not in self._arrays:
            # A view of one number: no array stands for what the manifest says of the heads.
            return np.broadcast_to(np.float32(1), (self.num_layers, self.num_heads))
        stored = self._arrays["row_sums"]
        sums: NDArray[np.float32] = stored.row(index).astype(np.float32)
        where = f"{stored.path(index // stored.layout.piece_rows)}: row_sums of step {t}"
        # A sink logit takes part of every row's mass: anything from 0 to 1 is possible.
        check_sums(sums, np.clip(sums, 0, 1) if self.manifest.sink_logits else 1.0, where, "is")
        return sums

    def queries(self, t: int) -> NDArray[np.float32]:
        """Return step t's queries, [K, H, d], post-RoPE.

        Raises
        ------
        CaptureError
            If the trace holds none.
        TraceError
            If t is out of range, or they are damaged.
        """
        stored = self.stored("queries")
        queries: NDArray[np.float32] = stored.row(self._index(t)).astype(np.float32)
        check_finite(queries, f"{stored.path((t - 1) // stored.layout.piece_rows)}: queries of step {t}")
        return queries

    def keys(self, layer: int) -> NDArray[np.float32]:
        """Return a layer's keys, [Hk, L0+T, d], post-RoPE; read-only.

        Raises
        ------
        CaptureError
            If the trace holds none.
        TraceError
            If the layer is out of range, or they are damaged.
        """
        return self._vectors("keys", layer)

    def values(self, layer: int) -> NDArray[np.float32]:
        """Return a layer's values, [Hk, L0+T, d]; read-only. Errors as for `keys`."""
        return self._vectors("values", layer)

    def keys_pre(self, layer: int) -> NDArray[np.float32]:
        """Return a layer's keys before RoPE, [Hk, L0+T, d]; read-only. Errors as for `keys`."""
        return self._vectors("keys_pre", layer)

    def _vectors(self, name: str, layer: int) -> NDArray[np.float32]:
        stored = self.stored(name)
        (index,) = self._layers([layer]) or [0]

        def load() -> NDArray[np.float32]:
            found: NDArray[np.float32] = stored.layer(index).astype(np.float32)
            check_finite(found, f"{stored.directory}: {name} of layer {index}", ("KV head", "position", "dim"))
            return found

        return self._recent.get((name, index), load)

    def prompt_queries(self) -> NDArray[np.float32]:
        """Return the prompt's last W queries, [K, H, W, d]. CaptureError if the trace holds none."""
        return self._prompt("prompt_queries")

    def prompt_mass(self) -> NDArray[np.float32]:
        """Return what each prompt position received in prefill, [K, H, L0]. CaptureError if the trace lacks it."""
        return self._prompt("prompt_mass")

    def kvzip_scores(self) -> NDArray[np.float32]:
        """Return the scores of the reconstruction pass, [K, Hk, L0]. CaptureError if the trace lacks them."""
        return self._prompt("kvzip_scores")

    def gates(self) -> NDArray[np.float32]:
        """Return the scores of the manifest's write gate, [K, Hk, L0+T]. CaptureError if the trace lacks them."""
        return self._prompt("gates")[..., : self.num_positions]

    def _prompt(self, name: str) -> NDArray[np.float32]:
        stored = self.stored(name)

        def load() -> NDArray[np.float32]:
            found: NDArray[np.float32] = stored.whole().astype(np.float32)
            check_finite(found, f"{stored.directory}: {name}")
            return found

        return self._recent.get((name, 0), load)

    @property
    def tokens(self) -> NDArray[np.int32] | None:
        """Token ids of all positions, [L0+T]; None if the trace holds none."""
        if self._tokens is None and "tokens" in self._arrays:
            stored = self._arrays["tokens"]
            tokens = stored.whole()
            top = self.manifest.vocab_size or 2**31
            if tokens.min() < 0 or tokens.max() >= top:
                span = f"{tokens.min()}..{tokens.max()}"
                raise TraceError(f"{stored.directory}: tokens must lie in 0..{top - 1}, got {span}")
            tokens.setflags(write=False)
            self._tokens = tokens
        return self._tokens

    def token_bytes(self, position: int) -> bytes:
        """Return the text of the token at a position, as bytes.

        Raises
        ------
        CaptureError
            If the trace holds no text.
        TraceError
            If the position is out of range, or the text is damaged.
        """
        if type(position) is not int or not 0 <= position < self.num_positions:
            raise TraceError(f"position: must be from 0 to {self.num_positions - 1}, got {position!r}")
        ends, text = self._loaded_text()
        start = int(ends[position - 1]) if position else 0
        return text[start : int(ends[position])].tobytes()

    def texts(self) -> list[str]:
        r"""Return every token's text; bytes that are not UTF-8 on their own show as ``\x`` escapes. Errors as above."""
        return [self.token_bytes(index).decode(errors="backslashreplace") for index in range(self.num_positions)]

    def _loaded_text(self) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        if self._ends is None or self._text is None:
            stored = self.stored("text_ends")
            ends, text = stored.whole(), self.stored("text").whole()
            if ends[0] < 0 or np.any(np.diff(ends) < 0) or ends[-1] > len(text):
                raise TraceError(f"{stored.directory}: text_ends must rise from 0 to at most {len(text)}")
            self._ends, self._text = ends, text
        return self._ends, self._text

    def store_rows(self, progress: Callable[[int, int], None] | None = None) -> Path:
        """Compute every attention row of a `qk` or `qkv` trace once and keep it beside the trace.

        `attention_rows` then reads them (bit-equal) as long as the trace has the hash they were computed from.

        Parameters
        ----------
        progress : callable, optional
            Called with the steps done and their number.

        Returns
        -------
        Path
            ``<name>.rows`` beside the trace: a Zarr group with the float32 array ``attention`` [T, K, H, L0+T].

        Raises
        ------
        CaptureError
            If the capture does not compute its rows.
        TraceError
            If the trace is damaged or the rows cannot be written; nothing is left then.
        """
        if self.capture not in ("qk", "qkv"):
            raise CaptureError(f"{self.path}: capture {self.capture} does not compute rows; captures that do: qk, qkv")
        found = write_rows(self.path, self.manifest, self.hash, lambda step: self._computed_rows(step, None), progress)
        self._rows_sought = False
        return found

    def _index(self, t: int) -> int:
        if type(t) is not int and not isinstance(t, np.integer):
            raise TraceError(f"step: must be an integer, got {t!r}")
        if not 1 <= t <= self.num_steps:
            raise TraceError(f"step: must be from 1 to {self.num_steps}, got {t}")
        return int(t) - 1

    def _layers(self, layers: Sequence[int] | None) -> list[int] | None:
        if layers is None:
            return None
        for layer in layers:
            good = type(layer) is int or isinstance(layer, np.integer)
            if not good or not 0 <= layer < self.num_layers:
                raise TraceError(f"layer: must be from 0 to {self.num_layers - 1}, got {layer!r}")
        return [int(layer) for layer in layers]
