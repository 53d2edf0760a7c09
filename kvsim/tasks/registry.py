"""The tasks by name."""

import os

from kvsim.errors import KvsimError, unknown_name
from kvsim.tasks.counting import CommonWords, FrequentWords
from kvsim.tasks.grid import Needle
from kvsim.tasks.niah import Niah
from kvsim.tasks.qa import Qa
from kvsim.tasks.task import Task
from kvsim.tasks.vt import VariableTracking

__all__ = ["RULER", "TASKS", "find_task"]

_RULER: list[Task] = [
    Niah("niah_single_1", haystack="noise"),
    Niah("niah_single_2"),
    Niah("niah_single_3", values="uuids"),
    Niah("niah_multikey_1", num_keys=4),
    Niah("niah_multikey_2", haystack="needle"),
    Niah("niah_multikey_3", haystack="needle", keys="uuids", values="uuids"),
    Niah("niah_multivalue", num_values=4),
    Niah("niah_multiquery", num_keys=4, num_queries=4),
    VariableTracking("vt"),
    CommonWords("cwe"),
    FrequentWords("fwe"),
    Qa("qa_1", dataset="squad"),
    Qa("qa_2", dataset="hotpotqa"),
]

RULER = tuple(task.name for task in _RULER)
"""Names of RULER's thirteen tasks; its overall score is the mean of theirs."""

TASKS: dict[str, Task] = {task.name: task for task in [*_RULER, Needle("needle")]}
"""Every task by its name: RULER's and ``needle``, the one of the grid."""


def find_task(name: str, file: str | os.PathLike[str] | None = None) -> Task:
    """Give a task by its name.

    Parameters
    ----------
    name : str
        A key of `TASKS`.
    file : path or None
        The questions of a task that reads them from a file.

    Raises
    ------
    KvsimError
        If there is no such task (the error lists them), or it takes no file.
    """
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    task = TASKS[name]
    if file is None:
        return task
    if not isinstance(task, Qa):
        takers = ", ".join(other.name for other in TASKS.values() if isinstance(other, Qa))
        raise KvsimError(f"{name} takes no file of questions (those that do: {takers})")
    return task.with_file(file)
