"""Writing a trace, so that a kill at any moment loses only steps that were not committed."""

import contextlib
import copy
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvsim_traces.behind import WriteBehind
from kvsim_traces.errors import TraceError
from kvsim_traces.files import (
    lock_directory,
    made_directory,
    os_reason,
    remove_made,
    sync_directory,
    write_json,
    write_whole,
)
from kvsim_traces.layout import (
    METADATA_NAME,
    POSITION_ARRAYS,
    PROMPT_ARRAYS,
    STEP_ARRAYS,
    ArrayLayout,
    array_shape,
    plan,
)
from kvsim_traces.manifest import LayerInfo, Manifest
from kvsim_traces.paths import check_new_directory, local_path
from kvsim_traces.pieces import PieceBuffer
from kvsim_traces.values import check_finite, check_sums, fill_rows, floats, rounded

COMMIT_SECONDS = 1.0
"""How often a writer that flushes behind commits, unless asked to."""


def group_metadata(manifest: Manifest) -> dict[str, Any]:
    """Return the trace's root ``zarr.json``: a Zarr v3 group with the manifest as the attribute ``kvsim``."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {"kvsim": manifest.to_json()}}


class TraceWriter:
    """Write a trace step by step.

    Rows go into the array's current piece in its final order; a full piece is written aside, flushed and renamed, and
    then the manifest's `committed_steps` says so. Memory is one piece for each array.

    Use it as a context manager: leaving it closes the trace; leaving it with an exception commits what it can, and
    removes a trace without a committed step.

    Parameters
    ----------
    path : str or Path
        The directory to create; it must not exist, or be empty.
    manifest : Manifest
        What the trace is. It is copied; `committed_steps` starts at 0.
    qk_dtype : str
        ``float16`` or ``float32``, for queries, keys, values and prompt queries.
    behind : bool
        Whether a thread flushes full pieces while further steps are appended. Steps are then committed about once a
        second instead of whenever a piece fills, and a commit that fails cannot be tried again.

    Attributes
    ----------
    path : Path
        The trace's directory.
    manifest : Manifest
        The manifest as the next commit will write it. `check`, `notes`, `environment` and `generation` may be set
        until `close`.

    Raises
    ------
    TraceError
        If the directory is not empty, the manifest is wrong or the disk is full.
    """

    def __init__(
        self, path: str | Path, manifest: Manifest, *, qk_dtype: str = "float16", behind: bool = False
    ) -> None:
        local_path(path)
        self.path = Path(path)
        self.manifest = copy.deepcopy(manifest)
        self.manifest.committed_steps = 0
        self.manifest.complete = False
        if not self.manifest.layers:
            self.manifest.layers = [LayerInfo()] * self.manifest.num_layers
        self.manifest.validate()
        if qk_dtype not in ("float16", "float32"):
            raise TraceError(f"qk_dtype: must be float16 or float32, got {qk_dtype!r}")
        self._qk_dtype = qk_dtype
        self._buffers: dict[str, PieceBuffer] = {}
        self._layouts: dict[str, ArrayLayout] = {}
        self._stale: set[Path] = set()
        self._prompt_done: set[str] = set()
        self._steps = 0
        self._failed = False
        self._closed = False
        self._created = not check_new_directory(self.path)
        self._lock = -1
        self._top = self.path
        self._behind = WriteBehind() if behind else None
        self._next_commit = time.monotonic() + COMMIT_SECONDS
        try:
            with self._disk():
                self._top = made_directory(self.path)
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = lock_directory(self.path)
                for name in self.manifest.arrays:
                    if name != "prompt_queries":
                        self._create(name)
                write_json(self.path / METADATA_NAME, group_metadata(self.manifest))
        except BaseException:
            self._discard()
            raise

    @property
    def num_steps(self) -> int:
        """Steps appended so far, committed or not."""
        return self._steps

    @property
    def committed_steps(self) -> int:
        """Steps that are safe on disk."""
        return self.manifest.committed_steps

    def write_prompt(
        self,
        *,
        tokens: ArrayLike | None = None,
        text: Sequence[bytes] | None = None,
        keys: ArrayLike | None = None,
        values: ArrayLike | None = None,
        keys_pre: ArrayLike | None = None,
        prompt_queries: ArrayLike | None = None,
        prompt_mass: ArrayLike | None = None,
        kvzip_scores: ArrayLike | None = None,
        gates: ArrayLike | None = None,
    ) -> None:
        """Store what belongs to the prompt, before the first step; may be called in several parts.

        Parameters
        ----------
        tokens : array of int, shape [L0]
            Token ids.
        text : sequence of bytes, length L0
            Each token's text.
        keys, values, keys_pre : array, shape [K, Hk, n, d]
            Given to `append_positions`.
        prompt_queries : array, shape [K, H, W, d]
            The last W queries of the prompt, post-RoPE.
        prompt_mass : array, shape [K, H, L0]
            Attention each prompt position received during prefill.
        kvzip_scores : array, shape [K, Hk, L0]
            Scores of the optional reconstruction pass.
        gates : array, shape [K, Hk, L0+T]
            Scores of a write gate for all planned positions.

        Raises
        ------
        TraceError
            Naming the argument that is superfluous, of the wrong shape or type, not finite, or given twice; or the
            file that could not be written.
        """
        self._usable()
        if self._steps:
            raise TraceError("write_prompt: must come before the first step")
        length = self.manifest.prompt_length
        if tokens is not None:
            ids = self._tokens(tokens, length)
            self._once("tokens")
            self._put_items("tokens", ids)
        if text is not None:
            if len(text) != length:
                raise TraceError(f"text: must hold {length} tokens, got {len(text)}")
            for index, one in enumerate(text):
                if not isinstance(one, bytes):
                    raise TraceError(f"text[{index}]: must be bytes, got {type(one).__name__}")
            self._once("text")
            self._put_text(text)
        self.append_positions(keys, values, keys_pre)
        for name, value in zip(PROMPT_ARRAYS, (prompt_queries, prompt_mass, kvzip_scores, gates), strict=True):
            if value is not None:
                self._put_prompt_array(name, value)

    def append_positions(
        self, keys: ArrayLike | None = None, values: ArrayLike | None = None, keys_pre: ArrayLike | None = None
    ) -> None:
        """Store the keys and values of the next n positions.

        Parameters
        ----------
        keys, values, keys_pre : array, shape [K, Hk, n, d]
            Post-RoPE keys, values, and keys before RoPE. `append` calls this for each step's position.

        Raises
        ------
        TraceError
            Naming the argument that is superfluous, of the wrong shape, not finite or too long; or the file.
        """
        self._usable()
        ready = {}
        for name, value in zip(POSITION_ARRAYS, (keys, values, keys_pre), strict=True):
            if value is not None:
                ready[name] = self._positions(name, value)
        for name, rows in ready.items():
            self._put_positions(name, rows)

    def append(
        self,
        *,
        token: int | None = None,
        text: bytes | None = None,
        attention: ArrayLike | None = None,
        scores: ArrayLike | None = None,
        queries: ArrayLike | None = None,
        keys: ArrayLike | None = None,
        values: ArrayLike | None = None,
        keys_pre: ArrayLike | None = None,
        row_sums: ArrayLike | None = None,
        scaled: bool = False,
    ) -> None:
        """Append the next step t; its position is ``L0 + t - 1``.

        Nothing is appended if anything is wrong. When a piece of steps fills, everything is committed.

        Parameters
        ----------
        token : int
            The token at the step's position.
        text : bytes
            That token's text.
        attention : array, shape [K, H, L0 + t]
            Rows of attention probabilities.
        scores : array, shape [K, L0 + t]
            Their head mean.
        queries : array, shape [K, H, d]
            Post-RoPE queries.
        keys, values, keys_pre : array, shape [K, Hk, d]
            Post-RoPE key, value, and key before RoPE, of the step's position.
        row_sums : array, shape [K, H]
            Sums of the softmax rows; by default those of the rows given, or 1 without rows.
        scaled : bool
            Whether `attention` and `scores` are float16 and already times 2^15; they are then copied as they are.

        Raises
        ------
        TraceError
            Naming the argument that is missing, superfluous, of the wrong shape or type, not finite, or whose rows do
            not sum to `row_sums`; or the file that could not be written.
        """
        self._usable()
        manifest, step = self.manifest, self._steps + 1
        if step > manifest.planned_steps:
            raise TraceError(f"append: step {step} exceeds planned_steps {manifest.planned_steps}")
        given: dict[str, Any] = {
            "tokens": token,
            "text": text,
            "attention": attention,
            "scores": scores,
            "queries": queries,
            "keys": keys,
            "values": values,
            "keys_pre": keys_pre,
        }
        argument = {"tokens": "token"}
        for name, value in given.items():
            if (value is None) == (name in manifest.arrays):
                raise TraceError(f"{argument.get(name, name)}: {'is missing' if value is None else _superfluous(name)}")
        self._prompt_complete()
        ids = None if token is None else self._tokens([token], 1)
        if text is not None and not isinstance(text, bytes):
            raise TraceError(f"text: must be bytes, got {type(text).__name__}")
        positions = {}
        for name in POSITION_ARRAYS:
            if (value := given[name]) is not None:
                row = np.asarray(value)
                positions[name] = self._positions(name, row[:, :, np.newaxis] if row.ndim == 3 else row, 1)
        for name in self._buffers:
            # Done first: a full disk then leaves no step half appended.
            self._make_room(name)
        k, h, length = manifest.num_layers, manifest.num_heads, manifest.prompt_length + step
        sums = self._sums(row_sums, (k, h))
        if attention is not None:
            sums = self._put_rows("attention", attention, (k, h, length), sums, scaled)
        if scores is not None:
            sums = self._put_rows("scores", scores, (k, length), sums, scaled)
        if queries is not None:
            self._put_step("queries", queries, (k, h, manifest.head_dim or 0))
        if "row_sums" in manifest.arrays:
            self._buffers["row_sums"].slot()[:] = 1 if sums is None else sums
        for name, rows in positions.items():
            self._put_positions(name, rows)
        if ids is not None:
            self._put_items("tokens", ids)
        if text is not None:
            self._put_text([text])
        for name in STEP_ARRAYS:
            if name in self._buffers:
                self._buffers[name].advance()
        self._steps = step
        full = any(self._buffers[name].full for name in STEP_ARRAYS if name in self._buffers)
        if full if self._behind is None else time.monotonic() >= self._next_commit:
            self.commit()

    def commit(self) -> None:
        """Make every step appended so far durable.

        Raises
        ------
        TraceError
            If the disk is full or otherwise fails; a later commit tries again.
        """
        if self._closed:
            raise TraceError(f"{self.path}: the writer is closed")
        with self._disk():
            for name in self._buffers:
                self._flush(name)
            if self._behind is not None:
                self._behind.wait()
            for directory in sorted(self._stale):
                sync_directory(directory)
            self._stale.clear()
            if "text" in self._buffers:
                self._describe(self._layouts["text"].resized((self._buffers["text"].rows,)))
            self._write_manifest(committed_steps=self._steps)
        self._failed = False
        self._next_commit = time.monotonic() + COMMIT_SECONDS

    def close(self) -> None:
        """Commit, trim the shapes to what was appended and mark the trace complete.

        Raises
        ------
        TraceError
            If no step was appended, or the disk fails.
        """
        if self._closed:
            return
        if not self._steps:
            raise TraceError(f"{self.path}: a trace needs at least one step, got none")
        self.commit()
        with self._disk():
            for name in self.manifest.arrays:
                layout = self._layouts[name]
                free = {"text": layout.shape[0], "prompt_queries": layout.shape[min(2, len(layout.shape) - 1)]}
                self._describe(layout.resized(array_shape(name, self.manifest, self._steps, free.get(name, 0))))
            self._write_manifest(planned_steps=self._steps, complete=True)
        self._release()

    def __enter__(self) -> "TraceWriter":
        """Return the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the trace, or after an exception keep what can be kept."""
        try:
            if kind is None:
                self.close()
            elif not self._closed and self._steps > self.committed_steps:
                with contextlib.suppress(TraceError):
                    self.commit()
        finally:
            if not self.committed_steps:
                self._discard()
            self._release()

    # Buffers

    def _create(self, name: str, free: int = 0) -> None:
        shape = array_shape(name, self.manifest, self.manifest.planned_steps, free)
        dtype = {
            "tokens": "int32",
            "text": "uint8",
            "text_ends": "int64",
            "attention": "float16",
            "scores": "float16",
            "row_sums": "float32",
            "prompt_mass": "float32",
            "kvzip_scores": "float32",
            "gates": "float32",
        }.get(name, self._qk_dtype)
        layout = plan(name, dtype, shape)
        directory = self.path / name
        directory.mkdir()
        self._describe(layout)
        sync_directory(self.path)
        self._buffers[name] = PieceBuffer(layout, directory)

    def _describe(self, layout: ArrayLayout) -> None:
        if self._layouts.get(layout.name) != layout:
            write_json(self.path / layout.name / METADATA_NAME, layout.metadata())
            self._layouts[layout.name] = layout

    def _flush(self, name: str) -> None:
        if self._buffers[name].flush(write_whole if self._behind is None else self._behind.write):
            self._stale.add(self.path / name)

    def _write_manifest(self, **changes: Any) -> None:
        # The manifest in memory changes only once the file has.
        new = copy.copy(self.manifest)
        for name, value in changes.items():
            setattr(new, name, value)
        new.validate()
        write_json(self.path / METADATA_NAME, group_metadata(new))
        self.manifest = new

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed = True
            done = f"{self.committed_steps} of {self.manifest.planned_steps} steps are committed"
            raise TraceError(f"{error.filename or self.path}: {os_reason(error)}; {done}") from error

    def _release(self) -> None:
        self._closed = True
        self._buffers.clear()
        if self._behind is not None:
            self._behind.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _discard(self) -> None:
        """Remove what this writer made."""
        self._release()
        if self._created:
            remove_made(self.path, self._top)
            return
        for name in self.manifest.arrays:
            shutil.rmtree(self.path / name, ignore_errors=True)
        (self.path / METADATA_NAME).unlink(missing_ok=True)

    def _usable(self) -> None:
        if self._closed:
            raise TraceError(f"{self.path}: the writer is closed")
        if self._failed:
            raise TraceError(f"{self.path}: writing failed earlier; commit() tries again")

    # Arguments

    def _tokens(self, tokens: ArrayLike, length: int) -> NDArray[Any]:
        self._expected("tokens")
        ids = np.asarray(tokens)
        if ids.dtype.kind not in "iu" or ids.shape != (length,):
            raise TraceError(f"tokens: must be integers of shape [{length}], got {ids.dtype} {list(ids.shape)}")
        top = self.manifest.vocab_size or 2**31
        if length and not (int(ids.min()) >= 0 and int(ids.max()) < top):
            raise TraceError(f"tokens: must lie in 0..{top - 1}, got {int(ids.min())}..{int(ids.max())}")
        return ids

    def _expected(self, name: str) -> None:
        if name not in self.manifest.arrays:
            raise TraceError(f"{name}: {_superfluous(name)}")

    def _once(self, name: str) -> None:
        self._expected(name)
        if name in self._prompt_done:
            raise TraceError(f"{name}: was given before")
        self._prompt_done.add(name)

    def _prompt_complete(self) -> None:
        """Check that what precedes a step is there."""
        manifest = self.manifest
        for name in manifest.arrays:
            if name in PROMPT_ARRAYS or name in ("tokens", "text"):
                if name not in self._prompt_done:
                    raise TraceError(f"{name}: the prompt's must be written before the first step")
            elif name in POSITION_ARRAYS:
                want, have = manifest.prompt_length + self._steps, self._buffers[name].rows
                if have != want:
                    raise TraceError(f"{name}: step {self._steps + 1} follows {want} positions, got {have}")

    def _positions(self, name: str, value: ArrayLike, exactly: int | None = None) -> NDArray[Any]:
        self._expected(name)
        manifest, buffer = self.manifest, self._buffers[name]
        given = floats(name, value)
        count = given.shape[2] if given.ndim == 4 and exactly is None else exactly or 0
        shape = (manifest.num_layers, manifest.num_kv_heads, count, manifest.head_dim)
        if given.shape != shape:
            wanted = [*shape[:2], "n", shape[3]] if exactly is None else [*shape[:2], shape[3]]
            got = given.shape if exactly is None or given.ndim != 4 else (*given.shape[:2], given.shape[3])
            raise TraceError(f"{name}: must have shape {wanted}, got {list(got)}")
        limit = manifest.prompt_length + manifest.planned_steps
        if buffer.rows + count > limit:
            raise TraceError(f"{name}: {buffer.rows + count} positions exceed the planned {limit}")
        return rounded(name, given, buffer.layout.numpy_dtype)

    def _sums(self, row_sums: ArrayLike | None, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
        if row_sums is None:
            return None
        self._expected("row_sums")
        given = floats("row_sums", row_sums)
        if given.shape != shape:
            raise TraceError(f"row_sums: must have shape {list(shape)}, got {list(given.shape)}")
        sums = rounded("row_sums", given, np.dtype(np.float32))
        if not self.manifest.sink_logits:
            check_sums(sums, 1.0, f"row_sums of step {self._steps + 1}", "is")
        return sums

    # Storing

    def _put_rows(
        self, name: str, value: ArrayLike, shape: tuple[int, ...], sums: NDArray[np.float32] | None, scaled: bool
    ) -> NDArray[np.float32]:
        """Fill the step's rows and return the sums by layer and head; the caller advances."""
        given = floats(name, value)
        if given.shape != shape:
            raise TraceError(f"{name}: step {self._steps + 1} must have shape {list(shape)}, got {list(given.shape)}")
        if scaled and given.dtype != np.float16:
            raise TraceError(f"{name}: scaled rows must be float16, got {given.dtype}")
        where = f"{name} of step {self._steps + 1}"
        slot = self._buffers[name].slot()[..., : shape[-1]]
        found = fill_rows(slot, given, where, scaled=scaled)
        apart = found.ndim == 2
        expected = 1.0 if sums is None else sums if apart else sums.mean(axis=-1)
        if not (sums is None and self.manifest.sink_logits):
            check_sums(found, expected, where)
        if sums is not None:
            return sums
        return (
            found if found.ndim == 2 else np.broadcast_to(found[:, np.newaxis], (len(found), self.manifest.num_heads))
        )

    def _put_step(self, name: str, value: ArrayLike, shape: tuple[int, ...]) -> None:
        given = floats(name, value)
        if given.shape != shape:
            raise TraceError(f"{name}: step {self._steps + 1} must have shape {list(shape)}, got {list(given.shape)}")
        buffer = self._buffers[name]
        buffer.slot()[:] = rounded(name, given, buffer.layout.numpy_dtype)

    def _put_positions(self, name: str, rows: NDArray[Any]) -> None:
        buffer, done = self._buffers[name], 0
        while done < rows.shape[2]:
            self._make_room(name)
            part = rows[:, :, done : done + buffer.room]
            buffer.put_positions(part)
            buffer.advance(part.shape[2])
            done += part.shape[2]

    def _put_items(self, name: str, items: NDArray[Any]) -> None:
        buffer, done = self._buffers[name], 0
        while done < len(items):
            self._make_room(name)
            part = items[done : done + buffer.room]
            buffer.put_items(part)
            buffer.advance(len(part))
            done += len(part)

    def _make_room(self, name: str) -> None:
        if self._buffers[name].full:
            with self._disk():
                self._flush(name)

    def _put_text(self, texts: Sequence[bytes]) -> None:
        start = self._buffers["text"].rows
        ends = start + np.cumsum([len(one) for one in texts], dtype=np.int64)
        self._put_items("text", np.frombuffer(b"".join(texts), np.uint8))
        self._put_items("text_ends", ends)

    def _put_prompt_array(self, name: str, value: ArrayLike) -> None:
        manifest = self.manifest
        self._expected(name)
        given = floats(name, value)
        width = given.shape[2] if name == "prompt_queries" and given.ndim == 4 else 0
        shape = array_shape(name, manifest, manifest.planned_steps, width)
        if name == "prompt_queries" and not 1 <= width <= manifest.prompt_length:
            raise TraceError(f"{name}: must keep 1 to {manifest.prompt_length} queries, got shape {list(given.shape)}")
        if given.shape != shape:
            raise TraceError(f"{name}: must have shape {list(shape)}, got {list(given.shape)}")
        check_finite(given, name)
        self._once(name)
        with self._disk():
            if name == "prompt_queries":
                self._create(name, width)
            buffer = self._buffers[name]
            for layer in given:
                buffer.slot()[:] = rounded(name, layer, buffer.layout.numpy_dtype)
                buffer.advance()
                if buffer.full:
                    self._flush(name)
            self._flush(name)
        # Written once and whole; its buffer is not needed again.
        del self._buffers[name]


def _superfluous(name: str) -> str:
    return f"is superfluous: the manifest's arrays do not list {name}"
