"""How many tokens a cache may keep: exact decimal arithmetic, never a float product."""

import re
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal, InvalidOperation, localcontext

from kvsim.errors import KvsimError, PolicyError

__all__ = ["DEFAULT_COMPRESSION_RATIO", "Budget"]

DEFAULT_COMPRESSION_RATIO = "0.9"

MAX_DIGITS = 50
"""Digits of a ratio that count; products with a length are exact with twice as many."""


@dataclass(frozen=True)
class Budget:
    """A number of tokens to keep, absolute or as a share of the prompt.

    Exactly one of the two is set.

    Attributes
    ----------
    tokens : int or None
        Tokens to keep, at least 1.
    keep_ratio : Decimal or None
        Share of the prompt length L0 to keep, in (0, 1]; ``B = max(1, floor(keep_ratio * L0))``
        (InertiaKV section 3: ``B = floor((1 - compression_ratio) * L0)``).
    """

    tokens: int | None = None
    keep_ratio: Decimal | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.keep_ratio is None):
            raise PolicyError("a budget is either a number of tokens or a share of the prompt")
        if self.tokens is not None and (not isinstance(self.tokens, int) or isinstance(self.tokens, bool)):
            raise PolicyError(f"budget must be a whole number of tokens, got {self.tokens!r}")
        if self.tokens is not None and self.tokens < 1:
            raise PolicyError(f"budget must be at least 1 token, got {self.tokens}")
        if self.keep_ratio is not None:
            if not 0 < self.keep_ratio <= 1:
                raise PolicyError(f"budget must keep more than 0% and at most 100%, got {self}")
            # 10.0% and 10% are one budget and must print alike.
            with localcontext(prec=2 * MAX_DIGITS):
                object.__setattr__(self, "keep_ratio", self.keep_ratio.normalize())

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Read ``2048`` (tokens) or ``10%`` (of the prompt); a bare ``0.1`` is refused as ambiguous."""
        if re.fullmatch(r"[0-9]{1,18}", text):
            return cls(tokens=int(text))
        if match := re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)%", text):
            return cls(keep_ratio=Decimal(match[1]) / 100)
        hint = ""
        if re.fullmatch(r"0?\.[0-9]{1,18}", text):
            hint = (
                f"; to keep that share of the prompt write {format(Decimal(text) * 100, 'f').rstrip('0').rstrip('.')}%"
            )
        raise PolicyError(f"budget must be a number of tokens (2048) or a percentage (10%), got {text!r}{hint}")

    @classmethod
    def from_compression_ratio(cls, ratio: float | str | Decimal) -> "Budget":
        """Turn the fraction REMOVED, in [0, 1), into a budget; 0.9 of 1,000 tokens leaves 100, not 99."""
        try:
            exact = Decimal(str(ratio)[:MAX_DIGITS])
        except InvalidOperation:
            raise KvsimError(f"compression_ratio must be a number in [0, 1), got {ratio!r}") from None
        if not (exact.is_finite() and 0 <= exact < 1):
            raise KvsimError(f"compression_ratio is the fraction removed and must be in [0, 1), got {ratio}")
        with localcontext(prec=2 * MAX_DIGITS):
            return cls(keep_ratio=1 - exact)

    def resolve(self, prompt_length: int) -> int:
        """Give B, the number of tokens kept, for a prompt of `prompt_length` tokens."""
        if self.tokens is not None:
            return self.tokens
        assert self.keep_ratio is not None
        with localcontext(prec=2 * MAX_DIGITS):
            return max(1, int((self.keep_ratio * prompt_length).to_integral_value(ROUND_FLOOR)))

    def __str__(self) -> str:
        if self.tokens is not None:
            return str(self.tokens)
        assert self.keep_ratio is not None
        text = format(self.keep_ratio * 100, "f")
        return (text.rstrip("0").rstrip(".") if "." in text else text) + "%"
