"""What ``kvsim train-gate`` is asked for, and doing it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsim.errors import KvsimError
from kvsim.gating.data import read_texts
from kvsim.gating.run import check_out, gate_facts, lines, load_samples, table, train_to
from kvsim.gating.settings import Settings
from kvsim.gating.sweep import check_folder, frontier_lines, sweep
from kvsim.gating.train import checkpoint_path

__all__ = ["Request"]


@dataclass(frozen=True)
class Request:
    """A gate, or a sweep of them.

    Attributes
    ----------
    data : str
        The text to train on.
    out : Path
        The gate's file, or a sweep's folder.
    settings : Settings
    held_out_data : str or None
        The text to validate with.
    penalties : tuple of float or None
        The lambdas of a sweep.
    resume : bool
        Go on from the checkpoint beside `out`.
    """

    data: str
    out: Path
    settings: Settings
    held_out_data: str | None = None
    penalties: tuple[float, ...] | None = None
    resume: bool = False

    def check(self) -> None:
        """Say what is wrong before a model is loaded.

        Raises
        ------
        KvsimError
            If a text cannot be read or the result cannot be written.
        """
        if self.penalties is None:
            check_out(self.out, resume=self.resume)
        elif self.resume:
            raise KvsimError("--resume goes with one gate, not with --sweep")
        else:
            check_folder(self.out)
        read_texts(self.data)
        if self.held_out_data is not None:
            read_texts(self.held_out_data)

    def run(
        self, model: Any, tokenizer: Any, tell: Callable[[str], None] | None = None
    ) -> tuple[dict[str, Any], list[str]]:
        """Train.

        Parameters
        ----------
        model, tokenizer
            Of transformers, the model on its device.
        tell : callable, optional
            Takes lines of progress.

        Returns
        -------
        (dict, list of str)
            What it came to as JSON data, and as lines.

        Raises
        ------
        KvsimError
            If anything does not fit.
        """
        samples, held_out = load_samples(tokenizer, self.data, self.settings, held_out=self.held_out_data)
        if self.penalties is not None:
            found = sweep(
                self.out,
                model,
                samples,
                held_out,
                self.settings,
                [(penalty, self.settings.window) for penalty in self.penalties],
                progress=None if tell is None else lambda own: lines(tell, own.penalty),
            )
            wrote = f"wrote {self.out}: {len(found['runs'])} gates, frontier.json and frontier.csv"
            return found, [*frontier_lines(found), wrote]
        progress = None if tell is None else lines(tell, self.settings.penalty)
        try:
            gate, report = train_to(
                self.out, model, samples, held_out, self.settings, resume=self.resume, progress=progress
            )
        except KeyboardInterrupt:
            if tell is not None and checkpoint_path(self.out).exists():
                tell("stopped; --resume goes on from the last checkpoint")
            raise
        size = f"{gate.num_parameters:,} parameters in {len(gate.layers)} layers"
        wrote = f"wrote {self.out}: {size}; {report.updates} updates in {report.seconds:.0f} s"
        return gate_facts(gate, report, self.out), [*table(report.validation), wrote]
