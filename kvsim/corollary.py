"""Corollary 2 of InertiaKV (section 5.3): which change of a scorer keeps the ranking, and which need not."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsim.errors import KvsimError
from kvsim.plan import FloatArray
from kvsim.proposition import ema_states

__all__ = ["MapOfScores", "map_of_scores"]

STEADY, LOW, HIGH = 0.5, 0.0, 0.9
"""Token i always scores `STEADY`; token j scores `LOW` or `HIGH`, each half of the time."""


@dataclass(frozen=True)
class MapOfScores:
    """What an increasing map f(x) = x^power does to two tokens, applied to expected utilities or to scores.

    Token i scores 0.5 at every step, token j 0 or 0.9 with equal probability, so i is worth more: 0.5 against 0.45.
    Each pair holds the number of token i and that of token j.

    Attributes
    ----------
    power : float
        The map.
    expected : tuple of float
        Expected scores: i first.
    map_of_expected : tuple of float
        f of these, the expected scores of a scorer that Corollary 2 speaks of: i first still, for every increasing f.
    expected_of_map : tuple of float
        Expected scores of a scorer that maps each score; from a power of 1.18 on (log 2 over log 1.8), j first.
    states, states_of_map : array
        [T, 2] states of an EMA of drawn scores, and of the same scores mapped.
    """

    power: float
    expected: tuple[float, float]
    map_of_expected: tuple[float, float]
    expected_of_map: tuple[float, float]
    states: FloatArray
    states_of_map: FloatArray

    def rows(self) -> list[dict[str, Any]]:
        """Give one row for each scorer: its expected scores, which token is first, and how often its EMA agrees."""
        i_leads, mapped = (np.mean(states[:, 0] > states[:, 1]) for states in (self.states, self.states_of_map))
        found = [
            ("scores", self.expected, i_leads),
            ("map of expected utilities", self.map_of_expected, None),
            ("expected map of scores", self.expected_of_map, mapped),
        ]
        return [
            {
                "scorer": name,
                "token_i": i,
                "token_j": j,
                "first": "i" if i > j else "j" if j > i else "tie",
                "steps_with_i_first": None if share is None else float(share),
            }
            for name, (i, j), share in found
        ]


def map_of_scores(power: float = 4.0, *, steps: int = 2000, decay: float = 0.99, seed: int = 0) -> MapOfScores:
    """Show that an increasing map of expected utilities keeps the expected ranking, and one of the scores need not.

    Corollary 2 is about the first: a scorer with expected scores f(u) has an EMA whose expected ranking is, after many
    steps, that of u. A scorer that applies f to each score has expected scores E f(s), and f(E s) is not E f(s).

    Parameters
    ----------
    power : float
        The map f(x) = x^power, above 0.
    steps, decay, seed : int, float, int
        Length and A of the EMAs that are run on drawn scores, and the seed of these.

    Raises
    ------
    KvsimError
        If the map is not increasing, or an EMA has no steps or a decay outside [0, 1).
    """
    if not (np.isfinite(power) and power > 0):
        raise KvsimError(f"power must be above 0 for an increasing map, got {power}")
    if steps < 1 or not 0 <= decay < 1:
        raise KvsimError(f"an EMA needs at least 1 step and a decay in [0, 1), got {steps} and {decay}")
    drawn = np.random.default_rng(seed).choice([LOW, HIGH], size=steps)
    scores = np.stack([np.full(steps, STEADY), drawn], axis=1)
    expected = STEADY, (LOW + HIGH) / 2
    return MapOfScores(
        power=power,
        expected=expected,
        map_of_expected=(expected[0] ** power, expected[1] ** power),
        expected_of_map=(STEADY**power, (LOW**power + HIGH**power) / 2),
        states=ema_states(scores, decay),
        states_of_map=ema_states(scores**power, decay),
    )
