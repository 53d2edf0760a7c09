"""Positions that are never evicted while unprotected ones remain: ``protect=sink:4+recent:32``."""

import re
from dataclasses import dataclass

from kvsim.errors import PolicyError, unknown_name

__all__ = ["Protect"]


@dataclass(frozen=True)
class Protect:
    """A static reserve: the first positions, the most recent ones, or both.

    Attributes
    ----------
    sink : int
        The first `sink` positions of the sequence (StreamingLLM's attention sinks).
    recent : int or str
        The last `recent` positions, the newest included; ``"50%"`` is that share of the budget, floored.
    """

    sink: int = 0
    recent: int | str = 0

    def __post_init__(self) -> None:
        if self.sink < 0:
            raise PolicyError(f"protect=sink must be 0 or more tokens, got {self.sink}")
        if isinstance(self.recent, int):
            if self.recent < 0:
                raise PolicyError(f"protect=recent must be 0 or more tokens, got {self.recent}")
        elif not (re.fullmatch(r"[0-9]{1,3}%", self.recent) and int(self.recent[:-1]) <= 100):
            raise PolicyError(f"protect=recent must be tokens (32) or a share of the budget (50%), got {self.recent!r}")
        else:
            share = int(self.recent[:-1])
            object.__setattr__(self, "recent", f"{share}%" if share else 0)

    @classmethod
    def parse(cls, text: str) -> "Protect":
        """Read ``sink:S``, ``recent:R``, ``recent:P%`` or two of them joined by ``+``."""
        values: dict[str, int | str] = {}
        for part in text.split("+"):
            name, _, raw = part.partition(":")
            if name not in ("sink", "recent"):
                raise unknown_name("protected part", name, ["sink", "recent"])
            if name in values:
                raise PolicyError(f"protect={text}: {name!r} is given twice")
            if name == "recent" and raw.endswith("%"):
                values[name] = raw
            elif re.fullmatch(r"[0-9]{1,18}", raw):
                values[name] = int(raw)
            else:
                raise PolicyError(f"protect={name} needs a number of tokens, as in {name}:4, got {raw!r}")
        return cls(**values)  # type: ignore[arg-type]

    def resolve(self, budget: int) -> tuple[int, int]:
        """Give (sink, recent) in tokens under a budget of `budget` tokens; more than fit is an error."""
        recent = self.recent if isinstance(self.recent, int) else int(self.recent[:-1]) * budget // 100
        if self.sink + recent > budget:
            raise PolicyError(
                f"protect={self} protects {self.sink + recent} tokens, more than the budget of {budget} tokens; "
                "protect fewer or raise the budget"
            )
        return self.sink, recent

    def __str__(self) -> str:
        parts = [f"sink:{self.sink}"] if self.sink else []
        if self.recent:
            parts.append(f"recent:{self.recent}")
        return "+".join(parts) or "sink:0"
