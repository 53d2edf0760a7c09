"""What a value must be before it is stored or believed; every failure names the field and the place."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvsim_traces.errors import TraceError
from kvsim_traces.layout import SCALE

SUM_TOLERANCE: Final = 2e-3
"""How far a stored row may sum from its row sum, and that from 1 (float16 rounding; the design's figure)."""

_CACHED: Final = 2**20
"""Numbers handled at a time, so that they stay in the processor's cache."""

_LAYERED: Final = ("layer", "head", "position")
_FINITE_HALF: Final = 0x7BFF
_NEGATIVE_ZERO: Final = 0x8000
_EXPONENT_SHIFT: Final = np.float32(2.0**112)


def halves_to_floats(stored: NDArray[Any], scale: float = SCALE) -> NDArray[np.float32]:
    """Convert finite, non-negative float16 values to float32 and divide by a power of two, exactly.

    Parameters
    ----------
    stored : ndarray of float16
        The values as stored.
    scale : float
        A power of two to divide by.

    Returns
    -------
    ndarray of float32
        Same shape, contiguous.
    """
    if np.float32(1e-40) * _EXPONENT_SHIFT == 0:
        # A library has told this thread's FPU to flush denormals, which the trick below goes through.
        return np.divide(stored.astype(np.float32), np.float32(scale), dtype=np.float32)
    # The bits of a half, moved to where a float keeps them, are that half times 2^-112: ten times as fast as astype.
    bits = np.left_shift(stored.view("<u2"), np.uint32(13), dtype=np.uint32, order="C")
    floats: NDArray[np.float32] = bits.view(np.float32)
    return np.multiply(floats, _EXPONENT_SHIFT / np.float32(scale), out=floats)


def check_halves(stored: NDArray[Any], where: str, layers: Sequence[int] | None = None) -> None:
    """Check that float16 values are finite and not negative (nor negative zeros).

    Parameters
    ----------
    stored : ndarray of float16
        Values with the layers along axis 0.
    where : str
        What to call them in errors.
    layers : sequence of int, optional
        Which layers those are; all by default.

    Raises
    ------
    TraceError
        Naming the layer and the kind of the first bad value.
    """
    bits = stored.view("<u2")
    # As unsigned integers all finite non-negative halves lie below infinity, NaN and the sign bit.
    if bits.size == 0 or int(bits.max()) <= _FINITE_HALF:
        return
    bad = bits > _FINITE_HALF
    if bad.any():
        place = tuple(int(index) for index in np.argwhere(bad)[0])
        value = float(stored[place])
        sign = "is negative" if np.signbit(value) else "is infinite, or overflows float16"
        kind = "is NaN" if np.isnan(value) else sign
        raise TraceError(f"{where}: value at {_place(place, _LAYERED, layers)} {kind}")


def clear_negative_zeros(stored: NDArray[Any]) -> None:
    """Turn the negative zeros of a float16 array into zeros, in place."""
    bits = stored.view("<u2")
    if bits.size and int(bits.max()) >= _NEGATIVE_ZERO:
        bits[bits == _NEGATIVE_ZERO] = 0


def fill_rows(slot: NDArray[Any], given: NDArray[Any], where: str, *, scaled: bool) -> NDArray[np.float32]:
    """Store one step's rows as float16 times `SCALE`, checked.

    Parameters
    ----------
    slot : ndarray of float16
        Where they go, with the layers along axis 0.
    given : ndarray of float, same shape
        Probabilities; or float16 as stored, if `scaled`.
    where : str
        What to call them in errors.
    scaled : bool

    Returns
    -------
    ndarray of float32
        Sums along the last axis: of what was given, or if that was scaled, of what is stored.

    Raises
    ------
    TraceError
        Naming the place of the first value that is negative or not finite.
    """
    wide = np.result_type(given.dtype, np.float32)
    found = np.empty(slot.shape[:-1], np.float32)
    layers = max(1, _CACHED // max(1, math.prod(slot.shape[1:])))
    for first in range(0, len(slot), layers):
        part = slice(first, first + layers)
        own, ours = slot[part], given[part]
        if scaled:
            own[:] = ours
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                np.multiply(ours, SCALE, out=own, casting="unsafe", dtype=wide)
        clear_negative_zeros(own)
        check_halves(own, where, range(first, first + len(own)))
        found[part] = halves_to_floats(own).sum(axis=-1) if scaled else ours.sum(axis=-1, dtype=wide)
    return found


def check_finite(values: NDArray[Any], where: str, axes: tuple[str, ...] = ()) -> None:
    """Check that values are finite.

    Parameters
    ----------
    values : ndarray
        The values.
    where : str
        What to call them in errors.
    axes : tuple of str
        Names of the axes for errors.

    Raises
    ------
    TraceError
        Naming the place of the first value that is not.
    """
    finite = np.isfinite(values)
    if not finite.all():
        place = tuple(int(index) for index in np.argwhere(~finite)[0])
        kind = "is NaN" if np.isnan(values[place]) else "is infinite, or overflows the stored type"
        raise TraceError(f"{where}: value at {_place(place, axes)} {kind}")


def rounded(name: str, given: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert to the stored type, refusing what does not fit.

    Parameters
    ----------
    name : str
        What to call the values in errors.
    given : ndarray
        The values.
    dtype : dtype
        The type to store.

    Raises
    ------
    TraceError
        Naming the place of the first value that is not finite in that type.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        stored = given.astype(dtype, copy=False)
    check_finite(stored, name)
    return stored


def check_sums(
    sums: NDArray[Any],
    expected: NDArray[Any] | float,
    where: str,
    what: str = "row sums to",
    layers: Sequence[int] | None = None,
) -> None:
    """Check row sums against what they should be.

    Parameters
    ----------
    sums : ndarray
        Sums, with the layers along axis 0.
    expected : ndarray or float
        What they should be, within `SUM_TOLERANCE`.
    where, what : str
        Words for errors.
    layers : sequence of int, optional
        Which layers those are; all by default.

    Raises
    ------
    TraceError
        Naming the first layer (and head) that is off.
    """
    # Written so that NaN fails.
    good = np.abs(sums - expected) <= SUM_TOLERANCE
    if not good.all():
        place = tuple(int(index) for index in np.argwhere(~good)[0])
        target = float(np.broadcast_to(expected, sums.shape)[place])
        spot = _place(place, _LAYERED, layers)
        raise TraceError(f"{where}: {spot} {what} {float(sums[place]):.6g} instead of {target:.6g}")


def check_floats(
    rows: NDArray[np.float32], expected: NDArray[Any] | float, where: str, layers: Sequence[int] | None = None
) -> None:
    """Check that float32 rows are finite, not negative, and sum to what they should.

    Parameters
    ----------
    rows : ndarray of float32
        Rows with the layers along axis 0.
    expected : ndarray or float
        Their sums, within `SUM_TOLERANCE`.
    where : str
        Words for errors.
    layers : sequence of int, optional
        Which layers those are; all by default.

    Raises
    ------
    TraceError
        Naming the first value or row that is off.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        sums = rows.sum(axis=-1)
    # A sum is finite only if no value is NaN or infinite.
    check_sums(sums, expected, where, layers=layers)
    if rows.size and rows.min() < 0:
        place = tuple(int(index) for index in np.argwhere(rows < 0)[0])
        raise TraceError(f"{where}: value at {_place(place, _LAYERED, layers)} is negative")


def floats(name: str, value: ArrayLike) -> NDArray[Any]:
    """Return an argument as an array of floating point numbers, or raise a TraceError naming it."""
    given = np.asarray(value)
    if given.dtype.kind != "f":
        raise TraceError(f"{name}: must be floating point, got {given.dtype}")
    return given


def _place(index: tuple[int, ...], axes: tuple[str, ...], layers: Sequence[int] | None = None) -> str:
    if len(index) > len(axes):
        return f"index {list(index)}"
    named = (index[0] if layers is None else layers[index[0]], *index[1:])
    return ", ".join(f"{axis} {value}" for axis, value in zip(axes, named, strict=False))
