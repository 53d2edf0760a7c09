"""Questions with known answers, of any length: RULER's thirteen tasks and a needle grid.

>>> from kvsim.tasks import TASKS, score
>>> sample = TASKS["niah_single_1"].sample(index=0, length=512)
>>> score("The number is " + sample.outputs[0], sample)
100.0

RULER is Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language Models?", and
github.com/NVIDIA/RULER (Apache-2.0). Definitions and wording are its own; texts, word lists and random draws are not,
so a score here says the same kind of thing as one of RULER's, but is not comparable to the digit.
"""

from kvsim.tasks.grid import grid, grid_table, needle_at
from kvsim.tasks.registry import RULER, TASKS, find_task
from kvsim.tasks.sample import Sample, count_words
from kvsim.tasks.scoring import score, task_score
from kvsim.tasks.task import Task

__all__ = [
    "RULER",
    "TASKS",
    "Sample",
    "Task",
    "count_words",
    "find_task",
    "grid",
    "grid_table",
    "needle_at",
    "score",
    "task_score",
]
