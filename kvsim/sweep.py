"""Sweeps: many policies on many recordings, resumable, in one table."""

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from kvsim_traces import Trace, open_trace

from kvsim.engines import DEFAULT_ENGINE, get_engine
from kvsim.engines.outcome import MODES, Mode, Progress
from kvsim.errors import KvsimError, unknown_name
from kvsim.grid import expand_grid, setting_of
from kvsim.plan import Plan
from kvsim.policy import Policy, parse
from kvsim.replay import replay_many
from kvsim.results_file import RESULT_KEY, SETTING, frame_of, locked, read_results, write_results
from kvsim.version import __version__

if TYPE_CHECKING:
    import polars as pl

__all__ = ["SWEEP_KEY", "Sweep", "run_sweep", "sweep"]

SWEEP_KEY = (*RESULT_KEY, "engine", "engine_mode")
"""The columns that tell the rows of a sweep apart."""

SAVE_SECONDS = 5.0
BATCH_POLICIES = 64
BATCH_BYTES = 256 * 2**20

Row = dict[str, Any]
Key = tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    """A finished sweep.

    Attributes
    ----------
    rows : list of dict
        One row a result, recording by recording, in the order of the policies.
    num_policies, num_traces : int
        Different policies and recordings.
    num_run, num_found : int
        Results computed now, and those that the file held already.
    """

    rows: list[Row]
    num_policies: int
    num_traces: int
    num_run: int
    num_found: int


def sweep(
    traces: Trace | str | Path | Sequence[Trace | str | Path],
    policies: Policy | str | Sequence[Policy | str],
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    out: str | Path | None = None,
    shadow: bool = False,
    shadow_churn: bool = False,
    engine: str = DEFAULT_ENGINE,
    mode: Mode = "exact",
    jobs: int | None = None,
    progress: Progress | None = None,
) -> "pl.DataFrame":
    """Replay every combination of policies and settings on every recording.

    Parameters
    ----------
    traces : Trace, path or sequence of them
        The recordings; one that occurs twice (by hash) runs once.
    policies : Policy, str or sequence of them
        The base policies.
    grid : mapping of str to sequence, optional
        Values of settings: arguments of the policies' heads, axes, or ``compression_ratio``; see `kvsim.grid`.
        A policy without a budget gets a compression ratio of 0.9.
    out : path, optional
        Parquet file to add the results to; results that it holds already are not computed again.
    shadow : bool
        Evict nothing; rank all positions at every step.
    shadow_churn : bool
        Run the shadow mode as well for its churn, which costs dense passes.
    engine, mode
        As for `kvsim.replay`.
    jobs : int, optional
        Worker threads; one for each core by default.
    progress : callable, optional
        Called with (results done, results to compute), from worker threads but never twice at once.

    Returns
    -------
    polars.DataFrame
        One row a result: its summary, ``engine_mode``, and a column ``set_NAME`` for each setting, which holds the
        value that the row's policy has for it.

    Raises
    ------
    KvsimError
        On a bad policy, setting, engine or file, before anything runs.
    TraceError
        If a recording is damaged, or its capture level lacks what a policy reads.

    Examples
    --------
    >>> import kvsim
    >>> grid = {"alpha": [0.6, 0.8, 0.9], "compression_ratio": [0.5, 0.9]}
    >>> kvsim.sweep("traces/samples/smollm2-long-64", "ema", grid).shape[0]
    6
    """
    done = run_sweep(
        traces,
        policies,
        grid,
        out=out,
        shadow=shadow,
        shadow_churn=shadow_churn,
        engine=engine,
        mode=mode,
        jobs=jobs,
        progress=progress,
    )
    return frame_of(done.rows)


def run_sweep(
    traces: Trace | str | Path | Sequence[Trace | str | Path],
    policies: Policy | str | Sequence[Policy | str],
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    out: str | Path | None = None,
    shadow: bool = False,
    shadow_churn: bool = False,
    engine: str = DEFAULT_ENGINE,
    mode: Mode = "exact",
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Do what `sweep` does, and say how much of it was there already."""
    get_engine(engine)
    if mode not in MODES:
        raise unknown_name("mode", mode, MODES)
    if jobs is not None and jobs < 1:
        raise KvsimError(f"jobs must be at least 1, got {jobs}")
    wanted = expand_grid([policies] if isinstance(policies, Policy | str) else policies, grid or {})
    recordings = _recordings([traces] if isinstance(traces, Trace | str | Path) else traces)
    if not (wanted and recordings):
        raise KvsimError(f"a sweep needs at least one {'policy' if recordings else 'trace'}")
    job = _Job(recordings, wanted, shadow, shadow_churn, engine, mode)
    # A link is followed: the file it names is replaced, not the link.
    target = None if out is None else Path(os.path.realpath(out))
    with contextlib.nullcontext() if target is None else locked(target):
        table = _Table(target, list(grid or {}))
        batches = job.batches(table, jobs or _cores())
        missing = sum(len(batch.policies) for batch in batches)
        _run(job, batches, table, jobs or _cores(), _Counter(missing, progress))
    rows = [table.rows[job.key(recording, policy)] for recording in recordings for policy in wanted]
    return Sweep(rows, len(wanted), len(recordings), missing, len(rows) - missing)


@dataclass(frozen=True)
class _Recording:
    """A recording that is open only while it is read, because an open one keeps keys and values."""

    source: Trace | Path
    hash: str

    def open(self) -> Trace:
        return self.source if isinstance(self.source, Trace) else open_trace(self.source)


def _recordings(traces: Iterable[Trace | str | Path]) -> list[_Recording]:
    found: dict[str, _Recording] = {}
    for source in traces:
        trace = source if isinstance(source, Trace) else open_trace(source)
        found.setdefault(trace.hash, _Recording(source if isinstance(source, Trace) else trace.path, trace.hash))
    return list(found.values())


@dataclass(frozen=True)
class _Batch:
    """Policies that run on one recording in one go."""

    recording: _Recording
    policies: list[Policy]


@dataclass(frozen=True)
class _Job:
    """What is to be computed."""

    recordings: list[_Recording]
    policies: list[Policy]
    shadow: bool
    shadow_churn: bool
    engine: str
    mode: Mode

    def key(self, recording: _Recording, policy: Policy) -> Key:
        kind = "shadow" if self.shadow else "irreversible"
        return (recording.hash, str(policy), kind, "open", __version__, self.engine, self.mode)

    def batches(self, table: "_Table", jobs: int) -> list[_Batch]:
        """Plan what the table lacks, which refuses what cannot run, and split it up among the workers."""
        beside = self.shadow_churn and not self.shadow
        missing = [
            [p for p in self.policies if not table.has(self.key(recording, p), shadow_churn=beside)]
            for recording in self.recordings
        ]
        # Two batches a worker, so that none waits long for the last one.
        share = max(1, min(BATCH_POLICIES, math.ceil(sum(map(len, missing)) / (2 * jobs))))
        batches = []
        for recording, policies in zip(self.recordings, missing, strict=True):
            if not policies:
                continue
            trace = recording.open()
            limit = math.ceil(len(policies) / math.ceil(len(policies) / share))
            batch, size = _Batch(recording, []), 0
            for policy in policies:
                cost = _size(policy.plan(trace), trace, shadow=self.shadow or beside)
                if batch.policies and (len(batch.policies) == limit or size + cost > BATCH_BYTES):
                    batches.append(batch)
                    batch, size = _Batch(recording, []), 0
                batch.policies.append(policy)
                size += cost
            batches.append(batch)
        return batches

    def run(self, batch: _Batch, progress: Progress) -> list[Row]:
        results = replay_many(
            batch.recording.open(),
            batch.policies,
            shadow=self.shadow,
            shadow_churn=self.shadow_churn,
            engine=self.engine,
            mode=self.mode,
            progress=progress,
        )
        return [{**result.summary(), "engine_mode": self.mode} for result in results]


def _size(plan: Plan, trace: Trace, *, shadow: bool) -> int:
    """Bytes that a plan and its outcome take while their batch runs."""
    arrays = [value for part in (plan, plan.score) for value in vars(part).values() if isinstance(value, np.ndarray)]
    history = trace.num_steps if shadow else 0
    return sum(array.nbytes for array in arrays) + plan.groups.count * trace.num_positions * (4 + history)


class _Table:
    """The rows of a sweep, and the file they are kept in."""

    def __init__(self, out: Path | None, settings: list[str]) -> None:
        self.rows: dict[Key, Row] = {}
        self._out = out
        self._settings = settings
        self._unsaved = False
        self._next_save = 0.0
        if out is not None and os.path.lexists(out):
            self._read(out)

    def _read(self, out: Path) -> None:
        if out.is_dir():
            raise KvsimError(f"{out}: is a directory; a sweep is written to one file")
        frame = read_results(out, SWEEP_KEY, what="kvsim sweep")
        earlier = [name.removeprefix(SETTING) for name in frame.columns if name.startswith(SETTING)]
        self._unsaved = not set(self._settings) <= set(earlier)
        self._settings = list(dict.fromkeys([*earlier, *self._settings]))
        for row in frame.to_dicts():
            self.rows[_key(row)] = self._completed(row)

    def has(self, key: Key, *, shadow_churn: bool) -> bool:
        """Whether a row is there, with its shadow churn if that is asked for."""
        return key in self.rows and not (shadow_churn and self.rows[key].get("shadow_churn") is None)

    def add(self, rows: Iterable[Row]) -> None:
        """Take over new rows."""
        for row in rows:
            self.rows[_key(row)] = self._completed(row)
            self._unsaved = True

    def save(self, *, now: bool) -> None:
        """Write the file if it is to change, and at once or if the last time is long enough ago."""
        start = time.monotonic()
        if self._out is None or not self._unsaved or (start < self._next_save and not now):
            return
        # Sorted, so that the file depends on what it holds and not on the order in which that was computed.
        frame = frame_of(self.rows[key] for key in sorted(self.rows)).sort("trace", maintain_order=True)
        settings = [SETTING + name for name in self._settings]
        write_results(frame.select([name for name in frame.columns if name not in settings] + settings), self._out)
        self._unsaved = False
        # Saving takes at most a twentieth of the time.
        end = time.monotonic()
        self._next_save = end + max(SAVE_SECONDS, 20 * (end - start))

    def _completed(self, row: Row) -> Row:
        """Fill in the settings; a policy that this version does not know keeps what its row says."""
        names = [name for name in self._settings if row.get(SETTING + name) is None]
        row.update(dict.fromkeys(SETTING + name for name in names))
        if names:
            with contextlib.suppress(KvsimError):
                policy = parse(row["policy"])
                row.update({SETTING + name: setting_of(policy, name) for name in names})
        return row


def _key(row: Row) -> Key:
    return tuple(row[name] for name in SWEEP_KEY)


class _Counter:
    """Adds up the progress of batches that run at the same time."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._lock = threading.Lock()
        self._done = 0
        self._total = total
        self._progress = progress
        if progress is not None and total:
            progress(0, total)

    def of(self, batch: _Batch) -> Progress:
        """Give the function that a batch reports its progress to."""
        before = 0

        def advance(done: int, total: int) -> None:
            nonlocal before
            with self._lock:
                now = len(batch.policies) * done // total
                self._done += now - before
                before = now
                if self._progress is not None:
                    self._progress(self._done, self._total)

        return advance


def _run(job: _Job, batches: list[_Batch], table: _Table, jobs: int, counter: _Counter) -> None:
    """Run the batches on threads, which the kernels allow; whatever happens, what is finished is saved."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(job.run, batch, counter.of(batch)) for batch in batches]
        try:
            for future in as_completed(futures):
                table.add(future.result())
                table.save(now=False)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            table.add(row for future in futures for row in _finished(future))
            raise
        finally:
            table.save(now=True)


def _finished(future: Future[list[Row]]) -> list[Row]:
    return [] if future.cancelled() or future.exception() is not None else future.result()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
