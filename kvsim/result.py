"""The result of one replay: who was evicted when, and what that cost."""

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvsim.engines.outcome import METRICS, Outcome
from kvsim.errors import KvsimError
from kvsim.plan import Plan
from kvsim.version import __version__

if TYPE_CHECKING:
    import polars as pl

__all__ = ["Result", "mean_of"]


@dataclass(frozen=True)
class Result:
    """One policy on one trace.

    Attributes
    ----------
    policy : str
        Canonical policy string with its budget.
    trace_name, trace_hash : str
        The recording's directory name and content hash.
    prompt_length, num_steps : int
        L0 and T of the recording.
    head_dim : int or None
        Elements of a key, where the recording knows.
    plan : Plan
        What the engine ran.
    outcome : Outcome
        What it returned.
    engine : str
        Name of the engine.
    approximate : bool
        True where scores could not be renormalised over the visible set (a ``scores`` capture).
    shadow_churn : float or None
        Churn of the same policy without eviction, which unlike churn is not bounded by 2 / (B + 1).
    version : str
        The kvsim version that computed this.
    loop : str
        ``"open"``: the recorded hidden states are held fixed, so the result is exact for the first eviction only.
    """

    policy: str
    trace_name: str
    trace_hash: str
    prompt_length: int
    num_steps: int
    head_dim: int | None
    plan: Plan
    outcome: Outcome
    engine: str
    approximate: bool
    shadow_churn: float | None = None
    version: str = __version__
    loop: str = "open"

    def __repr__(self) -> str:
        kept = mean_of(self.outcome.metrics["kept_mass"])
        mass = "" if kept is None else f", kept_mass={kept:.4f}"
        return f"Result({self.policy!r}, {self.trace_name!r}, {self.mode!r}, loop={self.loop!r}{mass})"

    @property
    def mode(self) -> str:
        """``"irreversible"`` or ``"shadow"``."""
        return "irreversible" if self.outcome.retained is None else "shadow"

    @property
    def evicted_at(self) -> npt.NDArray[np.int32]:
        """[G, L0+T]: the step after which each position was gone, 0 before the first step, -1 for never.

        Raises
        ------
        KvsimError
            In shadow mode, where sets can return; see `retained`.
        """
        if self.outcome.evicted_at is None:
            raise KvsimError("a shadow result has no evicted_at: its sets can return; use retained(step)")
        return self.outcome.evicted_at

    @property
    def budget(self) -> int | float:
        """Tokens kept, B; the mean over groups where they differ."""
        mean = float(self.plan.budgets.mean())
        return int(mean) if mean.is_integer() else mean

    def retained(self, step: int, group: int | None = None) -> npt.NDArray[np.int64]:
        """Give R_t, the positions retained after a step, ascending.

        Parameters
        ----------
        step : int
            0 (before the first step) to T.
        group : int, optional
            Retention group, 0 to G - 1; needed where there are several.

        Raises
        ------
        KvsimError
            If the step or the group does not exist, or the group is left open.
        """
        groups = self.plan.groups
        if group is None and groups.count > 1:
            raise KvsimError(
                f"{self.policy} has {groups.count} retention groups: name one, "
                f"group=0 ({groups.label(0)}) to {groups.count - 1} ({groups.label(groups.count - 1)})"
            )
        step, group = operator.index(step), operator.index(group or 0)
        if not 0 <= step <= self.num_steps:
            raise KvsimError(f"step must be in 0..{self.num_steps}, got {step}")
        if not 0 <= group < self.plan.groups.count:
            raise KvsimError(f"group must be in 0..{self.plan.groups.count - 1}, got {group}")
        if self.outcome.retained is not None:
            if step == 0:
                raise KvsimError("a shadow result has no set before step 1")
            return np.flatnonzero(self.outcome.retained[step - 1, group])
        gone = self.evicted_at[group, : self.prompt_length + step]
        return np.flatnonzero((gone < 0) | (gone > step))

    @cached_property
    def steps(self) -> "pl.DataFrame":
        """One row a step: the metrics of `kvsim.engines.outcome.METRICS`, averaged over groups."""
        import polars as pl  # kept out of the module: machines that only record or run live need not have it

        columns = {"step": np.arange(1, self.num_steps + 1), **self.outcome.metrics}
        return pl.DataFrame(columns).with_columns(pl.col(list(self.outcome.metrics)).fill_nan(None))

    @property
    def triggers(self) -> float | None:
        """Moments at which anything was evicted, averaged over groups; None in shadow mode.

        A position that is not admitted when it leaves the local window is not evicted.
        """
        if self.outcome.evicted_at is None:
            return None
        evicted = self.evicted_at >= 0
        if self.plan.admission is not None:
            # What is refused was never evicted before: the window is protected.
            evicted &= self.plan.admission.admitted[:, : evicted.shape[1]]
        return float(np.mean([np.unique(row[gone]).size for row, gone in zip(self.evicted_at, evicted, strict=True)]))

    @property
    def removed_of_seen(self) -> float | None:
        """Share of all positions seen, prompt and generated, that were evicted or refused; None in shadow mode."""
        return None if self.outcome.evicted_at is None else float((self.evicted_at >= 0).mean())

    @cached_property
    def visible_sizes(self) -> npt.NDArray[np.int64]:
        """``|V_t|``, how many positions each step's query could see, [G, T]."""
        steps = np.arange(1, self.num_steps + 1)
        if self.outcome.retained is not None:
            sizes = self.outcome.retained.sum(axis=2).T
            before = np.concatenate([np.full((len(sizes), 1), self.prompt_length), sizes[:, :-1]], axis=1)
            return before + 1
        gone = np.stack([np.bincount(row[row >= 0], minlength=self.num_steps + 1) for row in self.evicted_at])
        visible: npt.NDArray[np.int64] = self.prompt_length + steps - np.cumsum(gone, axis=1)[:, :-1]
        return visible

    @property
    def attended_pairs(self) -> int:
        """Sum over steps, layers and KV heads of ``|V_t|``, or of ``|S_t|`` under a selection (WG-KV Fig. 2b)."""
        groups = self.plan.groups
        pairs = len(groups.layers) * groups.num_kv_heads
        if self.outcome.selected is not None:
            return round(float(self.outcome.selected.sum()) * pairs)
        return int(self.visible_sizes.sum()) * (pairs // groups.count)

    @property
    def cache_size(self) -> float:
        """``|V_t| / (L0 + t)``, averaged over groups and steps: 1 for the full cache (WG-KV's normalised size)."""
        return float((self.visible_sizes / (self.prompt_length + np.arange(1, self.num_steps + 1))).mean())

    @property
    def admitted(self) -> float | None:
        """Share of what left the local window that was promoted; None without a window, or where nothing left it."""
        admission = self.plan.admission
        left = 0 if admission is None else admission.leaving(self.prompt_length, self.num_steps) + 1
        return None if admission is None or left < 1 else float(admission.admitted[:, :left].mean())

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of the keys and values retained after the last step, in 16-bit numbers, counted per KV head.

        None where the recording does not know its head dimension.
        """
        if self.head_dim is None:
            return None
        groups = self.plan.groups
        heads = len(groups.layers) * groups.num_kv_heads // groups.count
        tokens = sum(self.retained(self.num_steps, group).size for group in range(groups.count))
        return tokens * heads * self.head_dim * 2 * 2

    @property
    def oracle_bound(self) -> float | None:
        """The kept mass that no policy can exceed with these groups and budgets; known to oracles alone."""
        return None if self.mode == "shadow" else self.plan.bound

    @property
    def oracle_gap(self) -> float | None:
        """``1 - kept mass / oracle_bound``; `kvsim.oracle.gap` gives any policy's."""
        bound = self.oracle_bound
        if bound is None:
            return None
        return 1 - float(self.outcome.metrics["kept_mass"].mean()) / bound if bound > 0 else 0.0

    @property
    def key(self) -> dict[str, str]:
        """What this result is a function of; two results with equal keys hold equal numbers."""
        return {
            "trace_hash": self.trace_hash,
            "policy": self.policy,
            "mode": self.mode,
            "loop": self.loop,
            "version": self.version,
        }

    def summary(self) -> dict[str, Any]:
        """Give the key and every metric averaged over steps (churn: from step 2), None where undefined."""
        means = {name: mean_of(self.outcome.metrics[name]) for name in METRICS}
        return {
            "policy": self.policy,
            "trace": self.trace_name,
            "budget": self.budget,
            "prompt_length": self.prompt_length,
            "steps": self.num_steps,
            **means,
            "shadow_churn": self.shadow_churn,
            "oracle_bound": self.oracle_bound,
            "oracle_gap": self.oracle_gap,
            "triggers": self.triggers,
            "removed_of_seen": self.removed_of_seen,
            "attended_pairs": self.attended_pairs,
            "cache_size": self.cache_size,
            "admitted": self.admitted,
            "budget_of_mean_length": self.budget / (self.prompt_length + (self.num_steps + 1) / 2),
            "kv_bytes": self.kv_bytes,
            "mode": self.mode,
            "loop": self.loop,
            "approximate": self.approximate,
            "group": self.plan.groups.kind,
            "engine": self.engine,
            "trace_hash": self.trace_hash,
            "version": self.version,
        }


def mean_of(column: npt.NDArray[np.float64]) -> float | None:
    """Average a metric over the steps where it is defined; None if it is defined nowhere."""
    known = column[~np.isnan(column)]
    return float(known.mean()) if known.size else None
