"""Admission on recordings: mean cache sizes without a replay, and what a replay measures."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace

from kvsim.admission import Admission
from kvsim.admissions.wgkv import Wgkv
from kvsim.errors import KvsimError
from kvsim.policy import Policy
from kvsim.replay import replay_many
from kvsim.result import Result

__all__ = ["Measured", "Recordings", "admitted_sizes"]


def admitted_sizes(admission: Admission, prompt_length: int, steps: int) -> npt.NDArray[np.int64]:
    """Count what the queries of the decode steps see under admission alone.

    Parameters
    ----------
    admission : Admission
    prompt_length, steps : int
        L0 and T.

    Returns
    -------
    array of int
        ``|V_t|`` of each group and step, [G, T]: the window, and what was admitted of the positions before it.
    """
    seen = prompt_length + np.arange(1, steps + 1)
    outside = np.maximum(0, seen - admission.window)
    before = np.concatenate(
        [np.zeros((len(admission.admitted), 1), np.int64), np.cumsum(admission.admitted, axis=1)], axis=1
    )
    sizes: npt.NDArray[np.int64] = before[:, outside] + np.minimum(seen, admission.window)
    return sizes


@dataclass(frozen=True)
class Measured:
    """One policy on one recording or text.

    Attributes
    ----------
    name : str
        The recording or text.
    size : float
        Mean cache size, as `kvsim.Result.cache_size` is.
    peak : float
        The most tokens that a KV head kept from one step to the next, averaged over heads; what prefill leaves to the
        first step does not count.
    kept_mass, output_error : float or None
        Means over the steps; the error needs values.
    """

    name: str
    size: float
    peak: float
    kept_mass: float | None
    output_error: float | None


class Recordings:
    """Recordings on which policies are compared.

    Parameters
    ----------
    traces : sequence of Trace
    engine : str
        Of the replays.

    Raises
    ------
    KvsimError
        If there are none.
    """

    def __init__(self, traces: Sequence[Trace], *, engine: str = "cpu") -> None:
        if not traces:
            raise KvsimError("there are no recordings to compare policies on")
        self.traces = list(traces)
        self._engine = engine
        self._scores: dict[tuple[str, int], npt.NDArray[np.float32]] = {}

    @property
    def longest(self) -> int:
        """Positions of the longest one."""
        return max(trace.num_positions for trace in self.traces)

    def size(self, policy: Policy) -> float:
        """Give the mean cache size of a policy that evicts nothing: over KV heads and steps, then over recordings."""
        return float(np.mean([self._share(policy, place) for place in range(len(self.traces))]))

    def peak(self, policy: Policy, budgets: Sequence[int]) -> float:
        """Give the highest share of its budget that any recording keeps (`Measured.peak`)."""
        found = []
        for place, budget in enumerate(budgets):
            found.append(_peak(self._sizes(policy, place)) / budget)
        return float(max(found))

    def measure(self, policies: Sequence[Policy]) -> list[list[Measured]]:
        """Replay policies on every recording.

        Returns
        -------
        list of list of Measured
            For each policy, one for each recording.
        """
        columns = [
            [_measured(result) for result in replay_many(trace, policies, shadow_churn=False, engine=self._engine)]
            for trace in self.traces
        ]
        return [list(row) for row in zip(*columns, strict=True)]

    def _share(self, policy: Policy, place: int) -> float:
        trace = self.traces[place]
        seen = trace.prompt_length + np.arange(1, trace.num_steps + 1)
        return float((self._sizes(policy, place) / seen).mean())

    def _sizes(self, policy: Policy, place: int) -> npt.NDArray[np.int64]:
        trace = self.traces[place]
        return admitted_sizes(self._admission(policy, place), trace.prompt_length, trace.num_steps)

    def _admission(self, policy: Policy, place: int) -> Admission:
        """Give a policy's admission; the gates of a file are scored once for all thresholds."""
        admit, trace = policy.admit, self.traces[place]
        if not isinstance(admit, Wgkv) or admit.tau is None or admit.window is None:
            found = policy.plan(trace).admission
            assert found is not None
            return found
        key = admit.file, place
        if key not in self._scores:
            scored = policy.plan(trace).admission
            assert scored is not None
            assert scored.scores is not None
            self._scores[key] = scored.scores.astype(np.float32)
        return Admission(admit.window, self._scores[key] >= np.float32(admit.tau))


def _peak(sizes: npt.NDArray[np.int64]) -> float:
    # V_t is R_(t-1) and the step's own position; V_1 is what prefill left.
    return float(sizes.mean(axis=0)[1:].max(initial=1)) - 1


def _measured(result: Result) -> Measured:
    summary = result.summary()
    return Measured(
        name=result.trace_name,
        size=result.cache_size,
        peak=_peak(result.visible_sizes),
        kept_mass=summary["kept_mass"],
        output_error=summary["output_error"],
    )
