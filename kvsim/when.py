"""When a policy evicts: the ``when=`` axis."""

import re
from dataclasses import dataclass

from kvsim.errors import PolicyError, unknown_name

__all__ = ["When"]

_NAMES = ("every", "prefill", "overflow")


@dataclass(frozen=True)
class When:
    """The moments of eviction.

    Attributes
    ----------
    name : {"every", "prefill", "overflow"}
        ``every``: down to the budget after every step. ``prefill``: once, before the first step, and the cache grows
        afterwards. ``overflow``: whenever the budget is exceeded, `percent` of what is cached at once (WG-KV K.1).
    percent : int
        Share of the cache that an overflow evicts, in percent, 1 to 100.
    """

    name: str = "every"
    percent: int = 10

    def __post_init__(self) -> None:
        if self.name not in _NAMES:
            raise unknown_name("when", self.name, _NAMES)
        if self.name != "overflow":
            object.__setattr__(self, "percent", 10)
        if not 1 <= self.percent <= 100:
            raise PolicyError(f"when=overflow must evict 1% to 100% of the cache, got {self.percent}%")

    @classmethod
    def parse(cls, text: str) -> "When":
        """Read ``every``, ``prefill``, ``overflow`` or ``overflow:25%``."""
        name, colon, share = text.partition(":")
        if not colon:
            return cls(name)
        if name != "overflow" or not re.fullmatch(r"[0-9]{1,3}%", share):
            raise PolicyError(f"when takes every, prefill, overflow or overflow:25%, got {text!r}")
        return cls("overflow", int(share[:-1]))

    def __str__(self) -> str:
        return self.name if self.name != "overflow" or self.percent == 10 else f"overflow:{self.percent}%"
