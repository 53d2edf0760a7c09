"""Scores of NVIDIA's kvpress, in an environment that has it."""

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvsim.context import Context
from kvsim.errors import PolicyError, unknown_name
from kvsim.plan import FloatArray, ScoreSource
from kvsim.scorers.base import Scorer, register

PRESSES = ("CUR", "KeyDiff", "Knorm", "LagKV", "StreamingLLM")
"""The presses of kvpress 0.5.5 whose score is a function of keys and values alone, and the same at every run."""


@register
@dataclass(frozen=True)
class KVPress(Scorer):
    """A kvpress ScorerPress with its default settings, per KV head; needs a qkv capture and kvpress itself.

    Prompt positions are scored over the prompt, as kvpress does in prefill; a decode step's position is scored once,
    over all positions up to it, so that ``when=prefill`` is what kvpress would have done. kvpress 0.5.5 needs
    transformers below 5.3 and the recorder of kvsim 5.12 or later: install kvpress and kvsim without its extras into an
    environment of their own. Importing kvpress patches every attention function of transformers in the process for
    good, so it is imported only when a replay asks for it, and a process that did so should not run models.

    Attributes
    ----------
    press : {"CUR", "KeyDiff", "Knorm", "LagKV", "StreamingLLM"}
        Name of the class in kvpress, without its ending `Press`; the others need a model.
    """

    name: ClassVar[str] = "kvpress"
    press: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "press", self.press.removesuffix("Press"))
        if self.press not in PRESSES:
            raise unknown_name("press that scores keys and values alone", self.press, PRESSES)

    def source(self, context: Context) -> ScoreSource:
        """See `Scorer.source`."""
        try:
            kvpress, torch = importlib.import_module("kvpress"), importlib.import_module("torch")
            press = getattr(kvpress, f"{self.press}Press")()
        except Exception as error:  # whatever a mismatch of its many dependencies raises
            raise PolicyError(
                f"{context.policy}: kvpress cannot be used here ({type(error).__name__}: {error}); it needs "
                "transformers below 5.3, so give it an environment of its own: pip install kvsim kvpress"
            ) from error
        prompt, positions = context.prompt_length, context.trace.num_positions
        kept = prompt if context.budget is None else context.budget.resolve(prompt)
        # Half a token more, so that flooring the product gives the budget back.
        press.compression_ratio = max(0.0, 1 - (kept + 0.5) / prompt)
        lengths = [prompt, *range(prompt + 1, positions + 1)] if context.when.name != "prefill" else [prompt]
        values = np.zeros(context.keys.shape[:3])
        with torch.no_grad():
            for layer in range(len(context.groups.layers)):
                cached = [torch.from_numpy(x[layer][None].astype(np.float32)) for x in (context.keys, context.values)]
                for length in lengths:
                    scores = self._score(press, context, *(x[:, :, :length] for x in cached))
                    new = slice(0, prompt) if length == prompt else slice(length - 1, length)
                    values[layer, :, new] = scores[:, new]
        return ScoreSource("static", values=values, signed=True)

    def _score(self, press: Any, context: Context, keys: Any, values: Any) -> FloatArray:
        """Score [1, Hk, n, d] keys and values, [Hk, n]."""
        try:
            scores: FloatArray = press.score(None, None, keys, values, None, {})[0].double().numpy()
        except AssertionError as error:
            raise PolicyError(f"{context.policy}: kvpress refuses {keys.shape[2]} positions ({error})") from error
        if not np.isfinite(scores).all():
            raise PolicyError(f"{context.policy}: kvpress scores {keys.shape[2]} positions with values not finite")
        return scores
