"""A needle in a haystack over a grid of lengths and depths, scored by ROUGE-L."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvsim.errors import KvsimError
from kvsim.tasks.niah import DEPTHS, spread
from kvsim.tasks.rouge import rouge_l
from kvsim.tasks.sample import CountTokens, Metric, Sample, Text, count_words
from kvsim.tasks.scoring import postprocess
from kvsim.tasks.task import Draw, Plan, Task
from kvsim.tasks.words import prose

__all__ = ["Cell", "Needle", "grid", "grid_table", "needle_at"]

_CITIES = [
    "Lisbon",
    "Bergen",
    "Kyoto",
    "Quito",
    "Dakar",
    "Hobart",
    "Tallinn",
    "Valparaiso",
    "Cork",
    "Izmir",
    "Winnipeg",
    "Pune",
]
_FIRST = [
    "eat grilled sardines",
    "drink mint tea",
    "hire a blue rowing boat",
    "buy a basket of cherries",
    "ride the oldest tram",
    "listen to the brass band",
    "borrow a red bicycle",
    "climb the clock tower",
    "taste the walnut bread",
    "feed the tame pelicans",
]
_THEN = [
    "sit under the fig trees",
    "watch the ferries leave",
    "read in the botanical garden",
    "sketch the painted doors",
    "walk along the harbour wall",
    "play chess by the fountain",
    "sleep in the long grass",
    "write postcards on the pier",
    "count the swans",
    "fly a paper kite",
]
_DAYS = ["sunny", "windy", "foggy", "frosty", "rainy", "warm", "quiet"]


@dataclass(frozen=True)
class Needle(Task):
    """One sentence says what is best to do in a town; the model is asked for it and should give it word for word.

    The needle has the form of Kamradt's needle-in-a-haystack test (2023), which the paper's Figure 8 scores by ROUGE-L,
    but town and deeds are drawn, so that no model can know them; the prose is `kvsim.tasks.words.prose`. The reference
    is what follows the prefix.

    Parameters
    ----------
    depth : float or None
        Percent of the sentences before the needle; drawn for each sample if None.
    """

    depth: float | None = None

    answer_tokens: ClassVar[int] = 32
    metric: ClassVar[Metric] = "rouge_l"

    @property
    def summary(self) -> str:
        """See `Task.summary`."""
        return "one sentence to repeat (the needle grid)"

    def _plan(self, draw: Draw) -> Plan:
        rng = draw.rng("needle")
        town, first, then, day = (rng.choice(words) for words in (_CITIES, _FIRST, _THEN, _DAYS))
        drawn = rng.choice(DEPTHS)
        depth = float(drawn if self.depth is None else self.depth)
        prefix = f"The best thing to do in {town} is to"
        answer = f"{first} and {then} on a {day} day"

        def build(units: int) -> Text:
            context = spread(prose(units), [f"{prefix} {answer}."], [depth])
            lead = "A sentence about a town is hidden in the following text. I will ask you about it afterwards.\n"
            start = len(lead) + context.index(prefix) + len(prefix) + 1
            return Text(
                f"{lead}{context}\nWhat is the best thing to do in {town} according to the text?",
                f" {prefix}",
                (answer,),
                depth,
                ((start, start + len(answer)),),
            )

        return Plan(build)


@dataclass(frozen=True)
class Cell:
    """One cell of the grid.

    Attributes
    ----------
    length : int
        Tokens asked for.
    depth : float
        Depth asked for, in percent.
    samples : tuple of Sample
        What to ask there.
    """

    length: int
    depth: float
    samples: tuple[Sample, ...]


def grid(
    lengths: Sequence[int],
    depths: Sequence[float],
    count_tokens: CountTokens = count_words,
    *,
    samples: int = 1,
    seed: int = 0,
) -> Iterator[Cell]:
    """Make the samples of a grid, length by length (the paper's Figure 8 has 12 lengths and 9 depths).

    The same needles are hidden in all cells.

    Parameters
    ----------
    lengths : sequence of int
        Tokens of prompt and answer.
    depths : sequence of float
        Percent of the sentences before the needle, 0 to 100.
    count_tokens : callable
        See `kvsim.tasks.task.Task.sample`.
    samples : int
        How many in each cell.
    seed : int
        Seed of the needles.

    Raises
    ------
    KvsimError
        If a depth lies outside 0 to 100, a length is too small, there is no length or depth, or `samples` is below 1.
    """
    if not lengths or not depths or samples < 1:
        raise KvsimError("a grid needs at least one length, one depth and one sample a cell")
    tasks = [needle_at(depth) for depth in depths]
    for length in lengths:
        for depth, task in zip(depths, tasks, strict=True):
            made = tuple(task.sample(index, length, count_tokens, seed=seed) for index in range(samples))
            yield Cell(length, float(depth), made)


def needle_at(depth: float) -> Needle:
    """Give the needle task of one row of the grid.

    Parameters
    ----------
    depth : float
        Percent of the sentences before the needle.

    Raises
    ------
    KvsimError
        If it lies outside 0 to 100.
    """
    if not 0 <= depth <= 100:
        raise KvsimError(f"a depth is a percentage from 0 to 100, got {depth}")
    return Needle("needle", depth=float(depth))


def grid_table(cells: Sequence[Cell], predictions: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Score the answers to a grid.

    Parameters
    ----------
    cells : sequence of Cell
        What was asked.
    predictions : sequence of sequence of str
        For each cell the generated text to each of its samples.

    Returns
    -------
    list of dict
        For each cell ``length``, ``depth``, ``samples`` and ``rouge_l_f``, the mean F in [0, 1] as the paper prints it.

    Raises
    ------
    KvsimError
        If there is not one prediction for each sample.
    """
    if [len(said) for said in predictions] != [len(cell.samples) for cell in cells]:
        raise KvsimError("a grid needs one prediction for each sample of each cell")
    rows = []
    for cell, said in zip(cells, predictions, strict=True):
        pairs = zip(said, cell.samples, strict=True)
        values = [rouge_l(postprocess(text), sample.outputs[0]).f for text, sample in pairs]
        rows.append(
            {
                "length": cell.length,
                "depth": cell.depth,
                "samples": len(values),
                "rouge_l_f": sum(values) / len(values),
            }
        )
    return rows
