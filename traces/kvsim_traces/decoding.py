"""Run a transformers model one token at a time, across the versions that renamed the cache argument."""

import copy
from inspect import signature
from typing import Any

import torch


class Decoder:
    """A model, its cache, and the logits of the last token fed.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with batch size 1.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache: Any = None
        # "cache" since transformers 5.24, "past_key_values" before.
        self._cache_name = "past_key_values"

    def prefill(self, tokens: list[int]) -> torch.Tensor:
        """Feed the prompt into a new cache and return the last token's logits [vocabulary]."""
        # The model makes its own cache: it knows which of its layers slide.
        outputs = self.model(input_ids=self._ids(tokens), use_cache=True, **self._last_only())
        if getattr(outputs, "cache", None) is not None:
            self._cache_name = "cache"
        self.cache = getattr(outputs, self._cache_name, None)
        return _last_logits(outputs)

    def step(self, token: int | torch.Tensor) -> torch.Tensor:
        """Feed one token, a number or a tensor [1] on the model's device, and return its logits [vocabulary]."""
        return _last_logits(self._forward(token if isinstance(token, torch.Tensor) else [token], self.cache))

    def release(self) -> None:
        """Let go of the cache."""
        self.cache = None

    def feed_copy(self, tokens: list[int]) -> None:
        """Feed tokens after what the cache holds, into a copy of it; the cache stays as it is."""
        self._forward(tokens, copy.deepcopy(self.cache), **self._last_only())

    def attentions(self, token: int) -> tuple[torch.Tensor, ...]:
        """Attention rows the model itself reports for the next token; the cache stays as it is.

        Returns
        -------
        tuple of Tensor [H, n]
            One for each layer, over the n keys it sees; empty when the model reports none.
        """
        outputs = self._forward([token], copy.deepcopy(self.cache), output_attentions=True)
        return tuple(layer[0, :, -1] for layer in outputs.attentions or () if layer is not None)

    def _forward(self, tokens: list[int] | torch.Tensor, cache: Any, **options: Any) -> Any:
        return self.model(input_ids=self._ids(tokens), use_cache=True, **{self._cache_name: cache}, **options)

    def _last_only(self) -> dict[str, int]:
        """Give the option that spares the logits of all but the last token, where the model has it."""
        return {"logits_to_keep": 1} if "logits_to_keep" in signature(self.model.forward).parameters else {}

    def _ids(self, tokens: list[int] | torch.Tensor) -> torch.Tensor:
        if isinstance(tokens, torch.Tensor):
            return tokens.view(1, -1)
        return torch.tensor([tokens], dtype=torch.long, device=self.model.get_input_embeddings().weight.device)


def _last_logits(outputs: Any) -> torch.Tensor:
    logits: torch.Tensor = outputs.logits[0, -1]
    return logits.float()


def choose(logits: torch.Tensor, temperature: float, generator: torch.Generator, banned: list[int]) -> int:
    """Choose the next token.

    Parameters
    ----------
    logits : Tensor [vocabulary]
    temperature : float
        0 takes the largest logit (the first of equal ones); otherwise samples from ``softmax(logits / temperature)``.
    generator : torch.Generator
        On the CPU, so that a seed means the same draw on every device.
    banned : list of int
        Tokens never chosen.
    """
    if banned:
        logits = logits.clone()
        logits[banned] = -torch.inf
    if temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.double().cpu() / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
