"""The admissions that are compared at equal cache size, each a family with one parameter that sets the size."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsim.admission_quality.sizes import TOLERANCE, Match, match_size
from kvsim.admissions.duo import Duo
from kvsim.admissions.local import Local
from kvsim.admissions.random import RandomAdmit
from kvsim.admissions.wgkv import Wgkv
from kvsim.errors import KvsimError
from kvsim.policies.full import Full
from kvsim.policy import Policy
from kvsim.retrieval_heads import load_heads
from kvsim.write_gate import load_gate

__all__ = ["FAMILIES", "Families", "SizeOf", "gate_window"]

SizeOf = Callable[[Policy], float]
"""Gives a policy's mean cache size."""

FAMILIES = ("wgkv", "local", "duo", "random")

_UNREACHED = 2.0
"""A threshold that no gate reaches."""

_REACH = 20.0
"""Thresholds are sought between sigmoid(-20) and sigmoid(20), then 0 and more than 1."""


@dataclass(frozen=True)
class Families:
    """What the families share.

    Attributes
    ----------
    gates : tuple of str
        Files of write gates, such as a sweep of lambda.
    heads : str or None
        A file of retrieval heads; without it there is no family ``duo``.
    window, sink : int
        Local window of all but ``local``, whose window is its parameter; first positions of ``local`` and ``duo``.
    seed : int
        Of ``random``.
    longest : int
        Positions of the longest text.
    tolerance : float
        See `kvsim.admission_quality.sizes.match_size`.
    """

    gates: tuple[str, ...]
    heads: str | None
    window: int
    sink: int
    seed: int
    longest: int
    tolerance: float = TOLERANCE

    @property
    def names(self) -> tuple[str, ...]:
        """The families that there are."""
        return tuple(name for name in FAMILIES if name != "duo" or self.heads is not None)

    def match(self, name: str, target: float, size_of: SizeOf) -> Match:
        """Find a family's policy of a mean cache size.

        ``wgkv``: of the gates the one whose size at its own threshold is nearest to the target, as a ratio, and if that
        is not near enough then its threshold (the paper fixes that at 0.1 and sweeps lambda: WG-KV 5.1). ``local``: the
        window. ``duo``: the most retrieval heads that do not exceed the target, then a larger window, for heads are
        few. ``random``: the probability.

        Raises
        ------
        KvsimError
            If the family has no policy of that size.
        """
        found: Match = {"wgkv": self._wgkv, "local": self._local, "duo": self._duo, "random": self._random}[name](
            target, size_of
        )
        return found

    @property
    def span(self) -> tuple[float, float]:
        """The parameters of `thresholds` at which nothing and everything is admitted."""
        return -_REACH, _REACH

    def gated(self, file: str, tau: float | None = None) -> Policy:
        """Give the policy of a gate, at its own threshold by default."""
        return Policy(Full(), admit=Wgkv(file, tau=tau, window=self.window))

    def thresholds(self, file: str) -> Callable[[float], Policy]:
        """Give the policies of a gate by minus the logit of the threshold: the higher, the more is admitted."""

        def policy_of(value: float) -> Policy:
            if abs(value) == _REACH:
                return self.gated(file, 0.0 if value > 0 else _UNREACHED)
            return self.gated(file, 1 / (1 + math.exp(value)))

        return policy_of

    def nearest_gate(self, target: float, size_of: SizeOf) -> str:
        """Choose the gate whose size at its own threshold is nearest to the target, as a ratio."""
        return min(self.gates, key=lambda file: abs(math.log(size_of(self.gated(file)) / target)))

    def _wgkv(self, target: float, size_of: SizeOf) -> Match:
        file = self.nearest_gate(target, size_of)
        policy = self.gated(file)
        if abs(size_of(policy) / target - 1) <= self.tolerance:
            return Match(policy, size_of(policy), target, 1)
        return self._solve(self.thresholds(file), size_of, *self.span, target)

    def _local(self, target: float, size_of: SizeOf) -> Match:
        return self._solve(self._windows(self.sink), size_of, 1, self.longest, target, whole=True)

    def _random(self, target: float, size_of: SizeOf) -> Match:
        return self._solve(
            lambda share: Policy(Full(), admit=RandomAdmit(share, seed=self.seed, window=self.window)),
            size_of,
            0.0,
            1.0,
            target,
        )

    def _duo(self, target: float, size_of: SizeOf) -> Match:
        assert self.heads is not None
        heads = load_heads(self.heads)
        if heads.listed:
            return self._solve(self._streaming(None), size_of, self.window, self.longest, target, whole=True)
        count = heads.num_layers * heads.num_kv_heads
        few, many = 0, count
        if size_of(self._streaming(0.0)(self.window)) > target * (1 + self.tolerance):
            raise KvsimError(
                f"a window of {self.window} and a sink of {self.sink} alone exceed a cache size of {target:g}"
            )
        while many - few > 1:
            middle = (few + many) // 2
            if size_of(self._streaming(_share(middle, count))(self.window)) <= target * (1 + self.tolerance):
                few = middle
            else:
                many = middle
        policies = self._streaming(_share(few, count))
        return self._solve(policies, size_of, self.window, self.longest, target, whole=True)

    def _windows(self, sink: int) -> Callable[[float], Policy]:
        return lambda window: Policy(Full(), admit=Local(window=int(window), sink=sink))

    def _streaming(self, share: float | None) -> Callable[[float], Policy]:
        file = self.heads or ""
        return lambda window: Policy(Full(), admit=Duo(file, window=int(window), sink=self.sink, share=share))

    def _solve(
        self,
        policy_of: Callable[[float], Policy],
        size_of: SizeOf,
        low: float,
        high: float,
        target: float,
        *,
        whole: bool = False,
    ) -> Match:
        return match_size(policy_of, size_of, low, high, target, whole=whole, tolerance=self.tolerance)


def _share(heads: int, count: int) -> float:
    # Floored again by the admission, so a little more than the quotient.
    return min(1.0, (heads + 0.5) / count)


def gate_window(files: Sequence[str]) -> int:
    """Give the local window that gates were trained with.

    Raises
    ------
    KvsimError
        If they differ.
    """
    windows = {load_gate(file).window for file in files}
    if len(windows) != 1:
        raise KvsimError(f"the gates were trained with different windows ({sorted(windows)}); say which with --window")
    return windows.pop()
