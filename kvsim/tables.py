"""Results as Parquet files."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from kvsim.errors import KvsimError
from kvsim.result import Result

__all__ = ["write_parquet"]


def write_parquet(results: Sequence[Result], out: str | Path) -> None:
    """Write results into a new directory, whole or not at all.

    ``results.parquet`` has one row a result (its summary), ``steps.parquet`` one row a step, ``evicted_at.parquet`` one
    row for each group and position of the irreversible results, ``retained.parquet`` one row for each step and group
    of the shadow ones, with the set as a little-endian bitmap over positions.

    Parameters
    ----------
    results : sequence of Result
        What to write.
    out : path
        A directory that does not exist yet.

    Raises
    ------
    KvsimError
        If `out` exists or cannot be written.
    """
    out = Path(out)
    if out.exists():
        raise KvsimError(f"{out}: exists already; name a new directory")
    summary = pl.DataFrame([result.summary() for result in results], infer_schema_length=None)
    frames = {"results": summary.with_columns(pl.selectors.by_dtype(pl.Null).cast(pl.Float64))}
    frames["steps"] = pl.concat([_labelled(result, result.steps) for result in results])
    kept = [_labelled(result, _evictions(result)) for result in results if result.mode == "irreversible"]
    shadow = [_labelled(result, _bitmaps(result)) for result in results if result.mode == "shadow"]
    if kept:
        frames["evicted_at"] = pl.concat(kept)
    if shadow:
        frames["retained"] = pl.concat(shadow)
    try:
        made = [folder for folder in out.parents if not folder.exists()]
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".tmp", dir=out.parent))
        try:
            for name, frame in frames.items():
                frame.write_parquet(aside / f"{name}.parquet")
            aside.chmod(0o755)
            os.rename(aside, out)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            for folder in made:
                folder.rmdir()
            raise
    except (OSError, pl.exceptions.PolarsError) as error:
        raise KvsimError(f"{out}: cannot write results ({getattr(error, 'strerror', None) or error})") from error


def _labelled(result: Result, frame: pl.DataFrame) -> pl.DataFrame:
    key = result.key
    labels = [pl.lit(key[name]).alias(name) for name in ("trace_hash", "policy", "mode", "loop", "version")]
    return frame.select(pl.lit(result.trace_name).alias("trace"), *labels, pl.all())


def _evictions(result: Result) -> pl.DataFrame:
    groups, positions = result.evicted_at.shape
    return pl.DataFrame(
        {
            "group": np.repeat(np.arange(groups, dtype=np.int32), positions),
            "position": np.tile(np.arange(positions, dtype=np.int32), groups),
            "evicted_at": result.evicted_at.ravel(),
        }
    )


def _bitmaps(result: Result) -> pl.DataFrame:
    retained = result.outcome.retained
    assert retained is not None
    steps, groups, _ = retained.shape
    packed = np.packbits(retained, axis=-1, bitorder="little")
    return pl.DataFrame(
        {
            "step": np.repeat(np.arange(1, steps + 1, dtype=np.int32), groups),
            "group": np.tile(np.arange(groups, dtype=np.int32), steps),
            "bitmap": [row.tobytes() for row in packed.reshape(steps * groups, -1)],
        }
    )
