"""RULER's variable tracking: multi-hop tracing."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from string import ascii_uppercase
from typing import ClassVar

from kvsim.tasks.niah import NOISE
from kvsim.tasks.sample import Span, Text
from kvsim.tasks.task import Draw, Plan, Task, fill

__all__ = ["VariableTracking"]

EXAMPLE_TOKENS = 500


@dataclass(frozen=True)
class VariableTracking(Task):
    """Chains of assignments are hidden in noise; the variables that have one value in the end are asked for.

    A chain is ``VAR A = 12345``, ``VAR B = VAR A``, … in this order, ``num_hops + 1`` variables. The first chain is
    asked for; a needle's span is the variable where it is assigned. An example with its answer comes first, of at most
    500 tokens, as RULER has it. Below 1,000 tokens, where that does not fit, it has half of the length; two assignments
    may then share a gap between two lines of noise.

    Source: Hsieh et al. 2024 (RULER), Section 3 and Appendix B; the wording is RULER's.

    Parameters
    ----------
    num_chains, num_hops : int
        Chains, and assignments from variable to variable in each.
    num_fewshot : int
        1 with the example, 0 without.
    """

    num_chains: int = 1
    num_hops: int = 4
    num_fewshot: int = 1

    answer_tokens: ClassVar[int] = 30

    @property
    def summary(self) -> str:
        """See `Task.summary`."""
        return "variables that a value is handed down to"

    def _plan(self, draw: Draw) -> Plan:
        example = self._example(draw) if self.num_fewshot else ""
        asked = self._question(draw, "question", name_length=5)
        whole = len(example)

        def build(units: int) -> Text:
            context, depth, text = asked(units)
            names = text.outputs
            spans: list[Span] = []
            others: list[Span] = []
            for found in re.finditer(r"^VAR (\w+) = ", context, flags=re.MULTILINE):
                (spans if found[1] in names else others).append(found.span(1))
            start = whole + text.input.index(context)
            return Text(
                example + text.input,
                text.prefix,
                names,
                depth,
                tuple((a + start, b + start) for a, b in spans),
                tuple((a + start, b + start) for a, b in others),
            )

        return Plan(build)

    def _example(self, draw: Draw) -> str:
        shown = self._question(draw, "example", name_length=3)

        def text(units: int) -> str:
            _, _, question = shown(units)
            return f"{question.prompt} {' '.join(question.outputs)}\n\n"

        limit = min(EXAMPLE_TOKENS, draw.length // 2)
        return text(fill(lambda units: draw.count_tokens(text(units)), limit) or 1)

    def _question(self, draw: Draw, label: str, *, name_length: int) -> Callable[[int], tuple[str, float, Text]]:
        rng = draw.rng(label)
        names: list[str] = []
        while len(names) < self.num_chains * (self.num_hops + 1):
            name = "".join(rng.choices(ascii_uppercase, k=name_length))
            if name not in names and name != "VAR":
                names.append(name)
        size = self.num_hops + 1
        chains = [names[start : start + size] for start in range(0, len(names), size)]
        values = rng.sample(range(10_000, 100_000), len(chains))

        def build(units: int) -> tuple[str, float, Text]:
            lines = [NOISE] * units
            places = draw.rng(label, units)
            for chain, value in zip(chains, values, strict=True):
                _hide(lines, chain, value, places)
            context = "\n".join(lines)
            before = next(place for place, line in enumerate(lines) if line.startswith(f"VAR {chains[0][0]} ="))
            question = f"Find all variables that are assigned the value {values[0]} in the text above."
            text = Text(
                "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
                f"{context}\nQuestion: {question}",
                f" Answer: According to the chain(s) of variable assignment in the text above, {size} variables are "
                f"assigned the value {values[0]}, they are: ",
                tuple(chains[0]),
            )
            return context, 100 * before / len(lines), text

        return build


def _hide(lines: list[str], chain: list[str], value: int, rng: random.Random) -> None:
    """Put the assignments of a chain between lines, in their order."""
    draw = rng.sample if len(lines) >= len(chain) else rng.choices
    gaps = sorted(draw(range(len(lines)), k=len(chain)))
    for hop, (gap, name) in enumerate(zip(gaps, chain, strict=True)):
        # The space at the end is RULER's.
        lines.insert(gap + hop, f"VAR {name} = VAR {chain[hop - 1]} " if hop else f"VAR {name} = {value}")
