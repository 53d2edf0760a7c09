"""Where each array's numbers lie on disk: shapes, pieces, chunks, and the Zarr v3 metadata that says so.

An array is cut along one axis into pieces (Zarr shards, one file each) and each piece into chunks, the unit of the
checksum. The chunks of a piece lie one after the other in C order, each followed by its crc32c; the index and its
crc32c come last.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvsim_traces.errors import TraceError
from kvsim_traces.manifest import LIMIT, Manifest

METADATA_NAME: Final = "zarr.json"

SCALE: Final = 32768.0
"""Stored scores are float16 times this; unscaled float16 turns a fifth of them into zero."""

SCALED_ARRAYS: Final = ("attention", "scores")
STEP_ARRAYS: Final = ("attention", "scores", "row_sums", "queries")
POSITION_ARRAYS: Final = ("keys", "values", "keys_pre")
PROMPT_ARRAYS: Final = ("prompt_queries", "prompt_mass", "kvzip_scores", "gates")
"""Arrays of layers, given whole before the first step."""

DERIVED_ARRAYS: Final = ("gates",)
"""Arrays computed from the others after the recording; a trace's hash is the same without them."""

WIDE_ARRAYS: Final = (*SCALED_ARRAYS, "gates")
"""Arrays whose last axis may be longer in a piece than in the shape: that keeps the planned length."""

MISSING: Final = 2**64 - 1
"""Offset and length of a chunk that was not written."""

_CRC_BYTES: Final = 4
_PIECE_BYTES: Final = 32 * 10**6
_BLOCK_BYTES: Final = 4 * 2**20
_MAX_PIECE_STEPS: Final = 16
_MAX_CHUNK_STEPS: Final = 4
_FLAT_CHUNKS: Final = 64
_FLAT_CHUNK_ITEMS: Final = {"tokens": 1024, "text": 4096, "text_ends": 1024}

_DIMENSIONS: Final[dict[str, tuple[str, ...]]] = {
    "tokens": ("position",),
    "text": ("byte",),
    "text_ends": ("position",),
    "attention": ("step", "layer", "head", "position"),
    "scores": ("step", "layer", "position"),
    "row_sums": ("step", "layer", "head"),
    "queries": ("step", "layer", "head", "dim"),
    "keys": ("layer", "kv_head", "position", "dim"),
    "values": ("layer", "kv_head", "position", "dim"),
    "keys_pre": ("layer", "kv_head", "position", "dim"),
    "prompt_queries": ("layer", "head", "prompt_query", "dim"),
    "prompt_mass": ("layer", "head", "prompt_position"),
    "kvzip_scores": ("layer", "kv_head", "prompt_position"),
    "gates": ("layer", "kv_head", "position"),
}
_FLOATS: Final = ("float16", "float32")
_DTYPES: Final[dict[str, tuple[str, ...]]] = {
    "tokens": ("int32",),
    "text": ("uint8",),
    "text_ends": ("int64",),
    "attention": ("float16",),
    "scores": ("float16",),
    "row_sums": ("float32",),
    "queries": _FLOATS,
    "keys": _FLOATS,
    "values": _FLOATS,
    "keys_pre": _FLOATS,
    "prompt_queries": _FLOATS,
    "prompt_mass": ("float32",),
    "kvzip_scores": ("float32",),
    "gates": ("float32",),
}


@dataclass(frozen=True)
class ArrayLayout:
    """How one array lies on disk.

    Attributes
    ----------
    name : str
        The array, one of `kvsim_traces.manifest.ARRAY_NAMES`.
    dtype : str
        NumPy (and Zarr) name of its type; stored little-endian.
    shape : tuple of int
        Its shape. The planned one while recording; `Manifest.committed_steps` says what is there.
    piece : tuple of int
        Shape of a piece (a Zarr shard). It spans every axis but `axis` whole.
    chunk : tuple of int
        Shape of a chunk, which divides `piece`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    piece: tuple[int, ...]
    chunk: tuple[int, ...]

    @property
    def axis(self) -> int:
        """The axis along which the array is cut into pieces."""
        return growing_axis(self.name)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The little-endian NumPy type."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks in a piece along each axis."""
        return tuple(piece // chunk for piece, chunk in zip(self.piece, self.chunk, strict=True))

    @property
    def chunks(self) -> int:
        """Number of chunks in a full piece."""
        return math.prod(self.grid)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk without its checksum."""
        return math.prod(self.chunk) * self.numpy_dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of one chunk with its checksum."""
        return self.chunk_bytes + _CRC_BYTES

    @property
    def index_bytes(self) -> int:
        """Bytes of the index at the end of a piece, its checksum included."""
        return 16 * self.chunks + _CRC_BYTES

    @property
    def length(self) -> int:
        """Rows along the growing axis."""
        return self.shape[self.axis]

    @property
    def piece_rows(self) -> int:
        """Rows of a piece along the growing axis."""
        return self.piece[self.axis]

    def pieces(self, rows: int) -> int:
        """Return how many pieces hold `rows` rows."""
        return -(-rows // self.piece_rows)

    def rows_in(self, piece: int, rows: int) -> int:
        """Return how many of an array's `rows` rows lie in a piece."""
        return min(self.piece_rows, rows - piece * self.piece_rows)

    def chunks_for(self, rows: int) -> int:
        """Return how many chunks at the front of a piece its first `rows` rows need."""
        if self.axis:
            return self.chunks
        return -(-rows // self.chunk[0]) * math.prod(self.grid[1:])

    def piece_name(self, piece: int) -> str:
        """Return the file name of a piece."""
        return ".".join(["c", *(str(piece if axis == self.axis else 0) for axis in range(len(self.shape)))])

    def file_bytes(self, chunks: int) -> int:
        """Return the size of a piece's file that holds `chunks` chunks."""
        return chunks * self.slot_bytes + self.index_bytes

    def index(self, chunks: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Return the index of a piece of which the first `chunks` chunks are present; shape [chunks, 2]."""
        index = np.full((self.chunks, 2), MISSING, dtype="<u8")
        index[:chunks, 0] = np.arange(chunks, dtype=np.uint64) * np.uint64(self.slot_bytes)
        index[:chunks, 1] = self.slot_bytes
        return index

    def resized(self, shape: Sequence[int]) -> "ArrayLayout":
        """Return the same layout with another shape."""
        return ArrayLayout(self.name, self.dtype, tuple(shape), self.piece, self.chunk)

    def metadata(self) -> dict[str, Any]:
        """Return the array's ``zarr.json``."""
        checked = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        sharding = {
            "chunk_shape": list(self.chunk),
            "codecs": checked,
            "index_codecs": checked,
            "index_location": "end",
        }
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.piece)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": 0 if np.dtype(self.dtype).kind in "iu" else 0.0,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": {"scale": SCALE} if self.name in SCALED_ARRAYS and self.dtype == "float16" else {},
            "dimension_names": list(_DIMENSIONS[self.name]),
            "storage_transformers": [],
        }


def growing_axis(name: str) -> int:
    """Return the axis along which an array is cut into pieces."""
    return 2 if name in POSITION_ARRAYS else 0


def array_shape(name: str, manifest: Manifest, steps: int, free: int = 0) -> tuple[int, ...]:
    """Return an array's shape for a number of steps.

    Parameters
    ----------
    name : str
        The array.
    manifest : Manifest
        Gives the other dimensions.
    steps : int
        T.
    free : int
        The one length that no manifest states: bytes of `text`, or W of `prompt_queries`.
    """
    k, h, hk, d = manifest.num_layers, manifest.num_heads, manifest.num_kv_heads, manifest.head_dim or 0
    prompt, positions = manifest.prompt_length, manifest.prompt_length + steps
    return {
        "tokens": (positions,),
        "text": (free,),
        "text_ends": (positions,),
        "attention": (steps, k, h, positions),
        "scores": (steps, k, positions),
        "row_sums": (steps, k, h),
        "queries": (steps, k, h, d),
        "keys": (k, hk, positions, d),
        "values": (k, hk, positions, d),
        "keys_pre": (k, hk, positions, d),
        "prompt_queries": (k, h, free, d),
        "prompt_mass": (k, h, prompt),
        "kvzip_scores": (k, hk, prompt),
        "gates": (k, hk, positions),
    }[name]


def plan(name: str, dtype: str, shape: Sequence[int]) -> ArrayLayout:
    """Choose the pieces and chunks of a new array.

    Parameters
    ----------
    name : str
        The array.
    dtype : str
        Its type's name.
    shape : sequence of int
        Its planned shape.

    Returns
    -------
    ArrayLayout
        About 32 MB and at most 16 steps a piece for arrays of steps, 4 MB for keys and values.
    """
    shape = tuple(shape)
    if name in _FLAT_CHUNK_ITEMS:
        items = _FLAT_CHUNK_ITEMS[name]
        return ArrayLayout(name, dtype, shape, (items * _FLAT_CHUNKS,), (items,))
    item = np.dtype(dtype).itemsize
    if name in POSITION_ARRAYS:
        piece: tuple[int, ...]
        position = shape[0] * shape[1] * shape[3] * item
        # The last block is stored whole, so a sixteenth of the positions is about what it may waste.
        block = min(_power_at_most(_BLOCK_BYTES // position, 16, 4096), _power_at_least(shape[2] // 16, 16))
        piece = (shape[0], shape[1], block, shape[3])
        return ArrayLayout(name, dtype, shape, piece, _chunk_of(name, piece, 1))
    row = math.prod(shape[1:]) * item
    if name in PROMPT_ARRAYS:
        layers = max(1, min(shape[0], _PIECE_BYTES // max(1, row)))
        piece = (layers, *shape[1:])
        return ArrayLayout(name, dtype, shape, piece, _chunk_of(name, piece, 1))
    steps = min(_power_at_most(_PIECE_BYTES // row, 1, _MAX_PIECE_STEPS), _power_at_least(shape[0], 1))
    piece = (steps, *shape[1:])
    return ArrayLayout(name, dtype, shape, piece, _chunk_of(name, piece, min(steps, _MAX_CHUNK_STEPS)))


def _chunk_of(name: str, piece: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Return the shape of the chunks of a piece, `rows` being their length along axis 0 where that is free."""
    if name in POSITION_ARRAYS or name in PROMPT_ARRAYS:
        return (1, *piece[1:])
    # One chunk holds every layer's row sums: a chunk a layer would be a few hundred bytes.
    if name == "row_sums" or len(piece) == 1:
        return (rows, *piece[1:])
    return (rows, 1, *piece[2:])


def _power_at_most(value: int, low: int, high: int) -> int:
    """Return the largest power of two up to `value`, within low..high."""
    return max(low, min(high, 1 << max(0, value.bit_length() - 1)))


def _power_at_least(value: int, low: int) -> int:
    """Return the smallest power of two from `value`, at least low."""
    return max(low, 1 << max(0, value - 1).bit_length())


def parse_metadata(data: dict[str, Any], name: str, manifest: Manifest, where: str) -> ArrayLayout:
    """Read an array's ``zarr.json`` and check it against the manifest and the format.

    Parameters
    ----------
    data : dict
        What the file holds.
    name : str
        The array.
    manifest : Manifest
        The trace's manifest.
    where : str
        The file, for errors.

    Returns
    -------
    ArrayLayout
        The layout; nothing is allocated for it.

    Raises
    ------
    TraceError
        If a shape contradicts the manifest or anything but the shapes differs from what a writer would have written.
    """

    def fail(field: str, message: str) -> TraceError:
        return TraceError(f"{where}: {field}: {message}")

    rank = len(_DIMENSIONS[name])
    dtype = data.get("data_type")
    if not isinstance(dtype, str) or dtype not in _DTYPES[name]:
        raise fail("data_type", f"{name} is stored as {' or '.join(_DTYPES[name])}, got {dtype!r:.60}")
    shape = _lengths(data.get("shape"), rank, 0, fail, "shape")
    grid = data.get("chunk_grid")
    outer = grid.get("configuration") if isinstance(grid, dict) else None
    piece_field = "chunk_grid.configuration.chunk_shape"
    piece = _lengths(outer.get("chunk_shape") if isinstance(outer, dict) else None, rank, 1, fail, piece_field)
    codecs = data.get("codecs")
    codec = codecs[0] if isinstance(codecs, list) and len(codecs) == 1 and isinstance(codecs[0], dict) else {}
    inner = codec.get("configuration")
    chunk_field = "codecs[0].configuration.chunk_shape"
    chunk = _lengths(inner.get("chunk_shape") if isinstance(inner, dict) else None, rank, 1, fail, chunk_field)
    layout = ArrayLayout(name, dtype, shape, piece, chunk)
    for field, value in layout.metadata().items():
        if not _same(data.get(field), value):
            raise fail(field, f"must be {value!r}, got {data.get(field)!r:.400}")
    _check_shape(layout, manifest, fail)
    for index in range(rank):
        wide = name in WIDE_ARRAYS and index == rank - 1
        if index != layout.axis and (piece[index] < shape[index] if wide else piece[index] != shape[index]):
            raise fail(piece_field, f"axis {index} of a piece must span {shape[index]}, got {piece[index]}")
    most = max(_FLAT_CHUNKS, _MAX_PIECE_STEPS * manifest.num_layers)
    if layout.chunks > most:
        raise fail(piece_field, f"a piece of {name} has at most {most} chunks, got {layout.chunks}")
    whole = _chunk_of(name, piece, chunk[0])
    if chunk != whole or piece[0] % chunk[0]:
        raise fail(chunk_field, f"must be {list(whole)} and divide the piece {list(piece)}, got {list(chunk)}")
    return layout


def _same(given: object, value: object) -> bool:
    """Compare JSON values, telling 1 from true; 0 and 0.0 are the same fill value."""
    if isinstance(value, dict):
        same_keys = isinstance(given, dict) and given.keys() == value.keys()
        return same_keys and all(_same(given[key], value[key]) for key in value)  # type: ignore[index]
    if isinstance(value, list):
        return isinstance(given, list) and len(given) == len(value) and all(map(_same, given, value))
    return not isinstance(given, bool) and given == value


def _lengths(value: object, rank: int, low: int, fail: Any, field: str) -> tuple[int, ...]:
    good = isinstance(value, list) and len(value) == rank
    if not good or not all(type(item) is int and low <= item < LIMIT**2 for item in value):  # type: ignore[attr-defined]
        raise fail(field, f"must be {rank} integers of at least {low}, got {value!r:.100}")
    return tuple(value)  # type: ignore[arg-type]


def _check_shape(layout: ArrayLayout, manifest: Manifest, fail: Any) -> None:
    name, shape = layout.name, layout.shape
    free = {"text": shape[0], "prompt_queries": shape[2] if name == "prompt_queries" else 0}.get(name, 0)
    if name == "prompt_queries" and not 1 <= free <= manifest.prompt_length:
        raise fail("shape", f"must keep 1 to {manifest.prompt_length} prompt queries, got {free}")
    # A writer killed while it trimmed the shapes leaves some arrays trimmed and some as planned.
    allowed = {array_shape(name, manifest, manifest.committed_steps, free)}
    if not manifest.complete:
        allowed.add(array_shape(name, manifest, manifest.planned_steps, free))
    if shape not in allowed:
        names = " or ".join(str(list(one)) for one in sorted(allowed))
        raise fail("shape", f"must be {names} by the manifest, got {list(shape)}")
