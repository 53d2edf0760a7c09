"""Small PNGs: what a chart needs, for pages that many people load."""

import struct
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOURS = 256


def packed(picture: bytes) -> bytes:
    """Write an opaque picture of 8 bits a channel again with a palette, each rare colour as the nearest frequent one.

    A picture of another kind is given back as it is.
    """
    pixels = _pixels(picture)
    if pixels is None:
        return picture
    colours, which, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    palette = colours[np.argsort(-counts, kind="stable")[:COLOURS]].astype(np.int64)
    distances = ((colours[:, None].astype(np.int64) - palette[None]) ** 2).sum(axis=-1)
    indices = distances.argmin(axis=1).astype(np.uint8)[which.ravel()].reshape(pixels.shape[:2])
    height, width = indices.shape
    rows = np.zeros((height, width + 1), np.uint8)
    rows[:, 1:] = indices
    found = SIGNATURE + _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
    found += _chunk(b"PLTE", palette.astype(np.uint8).tobytes())
    return found + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + _chunk(b"IEND", b"")


def _pixels(picture: bytes) -> NDArray[np.uint8] | None:
    """Decode an opaque RGBA picture whose rows are unfiltered or differences to the left or above, [H, W, 3]."""
    header, data = b"", b""
    for name, content in _chunks(picture):
        header = content if name == b"IHDR" else header
        data += content if name == b"IDAT" else b""
    width, height, *kind = struct.unpack(">IIBBBBB", header)
    if kind != [8, 6, 0, 0, 0]:
        return None
    raw = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + 4 * width)
    pixels = raw[:, 1:].reshape(height, width, 4).copy()
    for y, filter_ in enumerate(raw[:, 0].tolist()):
        if filter_ == 1:
            pixels[y] = np.cumsum(pixels[y], axis=0, dtype=np.uint8)
        elif filter_ == 2 and y:
            pixels[y] += pixels[y - 1]
        elif filter_ > 2:
            return None
    return pixels[..., :3] if (pixels[..., 3] == 255).all() else None


def _chunks(picture: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = len(SIGNATURE)
    while place < len(picture):
        (length,) = struct.unpack(">I", picture[place : place + 4])
        yield picture[place + 4 : place + 8], picture[place + 8 : place + 8 + length]
        place += 12 + length


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
