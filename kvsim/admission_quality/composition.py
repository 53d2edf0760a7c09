"""Admission and eviction under one hard budget: both, or either alone (WG-KV appendix K)."""

from collections.abc import Sequence
from dataclasses import replace

from kvsim.admission_quality.families import Families
from kvsim.admission_quality.recordings import Recordings
from kvsim.admissions.random import RandomAdmit
from kvsim.budget import Budget
from kvsim.errors import KvsimError
from kvsim.policies.snapkv import SnapKV
from kvsim.policy import Policy
from kvsim.when import When

__all__ = ["BOTH", "compositions"]

BOTH = "admission + eviction"
_HALVINGS = 24


def compositions(families: Families, recordings: Recordings, budget: Budget) -> dict[str, Policy]:
    """Give the three policies that keep within a budget, which bounds the mean over KV heads at every step.

    Eviction is appendix K.1's: the highest attention of a KV head's query heads, summed over the last window of
    queries, max-pooled over 5 positions; a tenth of each head goes whenever the heads together exceed the budget.

    - ``eviction``: everything is admitted.
    - ``admission + eviction``: a gate at its own threshold; of several the sparsest that still exceeds the budget
      without eviction, so that eviction has something to do, else the one that holds most.
    - ``admission``: the lowest threshold at which no recording exceeds the budget; of several gates the one that comes
      nearest to the budget at its own threshold.

    Raises
    ------
    KvsimError
        If the local window alone exceeds the budget.
    """
    budgets = [budget.resolve(trace.prompt_length) for trace in recordings.traces]
    snapkv = Policy(SnapKV(families.window, heads="max"), when=When("overflow"), budget=budget)
    everything = replace(snapkv, admit=RandomAdmit(1.0, seed=families.seed, window=families.window))
    peaks = {file: recordings.peak(families.gated(file), budgets) for file in families.gates}
    over = {file: peak for file, peak in peaks.items() if peak > 1}
    both = min(over, key=lambda file: over[file]) if over else max(peaks, key=lambda file: peaks[file])
    alone = min(peaks, key=lambda file: abs(peaks[file] - 1))
    return {
        BOTH: replace(snapkv, admit=families.gated(both).admit),
        "eviction": everything,
        "admission": _within(families, recordings, alone, budgets, str(budget)),
    }


def _within(families: Families, recordings: Recordings, file: str, budgets: Sequence[int], said: str) -> Policy:
    """Lower a gate's threshold as far as the budget allows."""
    policy_of = families.thresholds(file)
    low, high = families.span
    best = policy_of(low)
    if recordings.peak(best, budgets) > 1:
        raise KvsimError(f"a local window of {families.window} alone exceeds the budget {said}")
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        policy = policy_of(middle)
        if recordings.peak(policy, budgets) <= 1:
            low, best = middle, policy
        else:
            high = middle
    return best
