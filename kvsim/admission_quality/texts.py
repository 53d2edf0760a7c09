"""Admission in a running model: mean cache sizes, and next-token losses of held-out texts; needs torch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvsim.admission import Admission
from kvsim.admission_quality.recordings import admitted_sizes
from kvsim.admissions.wgkv import Wgkv
from kvsim.errors import KvsimError
from kvsim.live.gatekeeper import Gatekeeper
from kvsim.live.keepers import keeper_of
from kvsim.policy import Policy
from kvsim.text_loss import TextLoss, text_losses

__all__ = ["LiveTexts"]


class LiveTexts:
    """Texts on which policies are compared in a running model.

    Parameters
    ----------
    model : PreTrainedModel
    texts : sequence of sequences of int
        Their tokens.
    prompt : int
        Tokens of each that are read as a prompt; losses and sizes are of what follows.

    Raises
    ------
    KvsimError
        If there are none.
    """

    def __init__(self, model: Any, texts: Sequence[Sequence[int]], prompt: int) -> None:
        if not texts:
            raise KvsimError("there are no texts to compare policies on")
        self._model, self._texts, self._prompt = model, [list(text) for text in texts], prompt
        self._known: dict[Policy, list[TextLoss]] = {}

    @property
    def longest(self) -> int:
        """Tokens of the longest one."""
        return max(map(len, self._texts))

    def size(self, policy: Policy) -> float:
        """Give the mean cache size of a policy that evicts nothing.

        What a write gate admits depends on what it has admitted before, so the model runs; the others' sizes follow
        from the texts' lengths.
        """
        if isinstance(policy.admit, Wgkv):
            return float(np.mean([one.cache_share for one in self.measure([policy])[0]]))
        keeper = keeper_of(self._model, policy)
        lengths = {len(text) for text in self._texts}
        shares = {length: 1.0 if keeper is None else self._fixed(keeper, length) for length in lengths}
        return float(np.mean([shares[len(text)] for text in self._texts]))

    def _fixed(self, keeper: Gatekeeper, length: int) -> float:
        config = self._model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        keys = torch.zeros(heads, length, 1)
        marks = torch.cat([keeper.decide(layer, keys, 0)[0] for layer in keeper.layers]).numpy()
        steps = length - 1 - self._prompt
        sizes = admitted_sizes(Admission(keeper.window, marks), self._prompt, steps)
        return float(sizes.mean(axis=0).sum() / (self._prompt + np.arange(1, steps + 1)).sum())

    def measure(self, policies: Sequence[Policy]) -> list[list[TextLoss]]:
        """Measure policies on every text.

        Returns
        -------
        list of list of TextLoss
            For each policy, one for each text.
        """
        new = [policy for policy in dict.fromkeys(policies) if policy not in self._known]
        if new:
            rows = list(text_losses(self._model, self._texts, new, prompt=self._prompt))
            self._known.update(zip(new, map(list, zip(*rows, strict=True)), strict=True))
        return [self._known[policy] for policy in policies]
