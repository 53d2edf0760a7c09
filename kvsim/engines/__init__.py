"""Engines run plans on traces; all of them return the `evicted_at` of `kvsim.engines.reference`."""

import importlib
from collections.abc import Sequence
from typing import Protocol

from kvsim_traces import Trace

from kvsim.engines.outcome import Mode, Outcome, Progress
from kvsim.errors import unknown_name
from kvsim.plan import Plan
from kvsim.selecting import selected

__all__ = ["DEFAULT_ENGINE", "ENGINES", "Engine", "Outcome", "get_engine"]


class Engine(Protocol):
    """A function that replays plans on one trace; `kvsim.engines.reference.run_many` defines the answer."""

    def __call__(
        self,
        trace: Trace,
        plans: Sequence[Plan],
        *,
        shadow: bool = False,
        raw: bool = True,
        mode: Mode = "exact",
        progress: Progress | None = None,
    ) -> list[Outcome]:
        """Give one outcome for each plan, in order."""


ENGINES = {"cpu": "kvsim.engines.cpu", "gpu": "kvsim.engines.gpu", "reference": "kvsim.engines.reference"}
"""Name and module of each engine; a module is imported when its engine is first asked for."""

DEFAULT_ENGINE = "cpu"
"""What runs unless another is named: ``gpu`` is never chosen on its own, and ``cpu`` runs on any machine."""


def get_engine(name: str) -> Engine:
    """Look an engine up by name; what plans select is worked out here, the same way for all of them.

    Raises
    ------
    PolicyError
        On an unknown name; the message lists the engines there are.
    KvsimError
        If the machine lacks what the engine runs on.
    """
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    module = importlib.import_module(ENGINES[name])
    if hasattr(module, "check"):
        module.check()
    run_many: Engine = module.run_many

    def run(
        trace: Trace,
        plans: Sequence[Plan],
        *,
        shadow: bool = False,
        raw: bool = True,
        mode: Mode = "exact",
        progress: Progress | None = None,
    ) -> list[Outcome]:
        outcomes = run_many(trace, plans, shadow=shadow, raw=raw, mode=mode, progress=progress)
        return [
            outcome if plan.selection is None else selected(trace, plan, outcome, raw=raw)
            for plan, outcome in zip(plans, outcomes, strict=True)
        ]

    return run
