"""Next-token loss of held-out text under policies, live: what a smaller cache costs in nats a token.

Each text is a prompt and its continuation. The prompt is read under the policy's admission, the continuation is forced,
and the loss is the mean negative log-likelihood of its tokens. Where admission is all that a policy does, one masked
pass over the whole text gives what decoding token by token would; where it evicts or selects, tokens are decoded.

``python -m kvsim.text_loss`` is the command ``kvsim loss`` without its dependencies.
"""

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvsim.errors import KvsimError
from kvsim.live.decode import check_forced, decode, known_logits
from kvsim.live.gatekeeper import Gatekeeper
from kvsim.live.keepers import keepers_of
from kvsim.live.prefix import check_numbers, prefill, run_prompt
from kvsim.paired import paired
from kvsim.policy import Policy, parse
from kvsim.replay import choose_budget

__all__ = ["TextLoss", "compare", "is_one_pass", "text_losses"]

_CHUNK = 512


@dataclass(frozen=True)
class TextLoss:
    """One text under one policy.

    Attributes
    ----------
    policy : str
        Canonical policy string with its budget.
    loss : float
        Mean negative log-likelihood of the continuation's tokens, in nats.
    tokens : int
        Of the continuation.
    cache_tokens : float
        What a query of the continuation could see of an eligible layer's KV head, averaged over steps and heads:
        ``|V_t|``, the query's own token included.
    cache_share : float
        The same over what it could see of a full cache.
    one_pass : bool
        Whether it was one masked pass.
    """

    policy: str
    loss: float
    tokens: int
    cache_tokens: float
    cache_share: float
    one_pass: bool


def is_one_pass(policy: Policy) -> bool:
    """Whether admission, if anything, is all that a policy does."""
    expanded = policy.expand()
    return expanded.head.name == "full" and expanded.select is None


def text_losses(
    model: Any,
    texts: Items[Items[int]],
    policies: Items[Policy | str],
    *,
    prompt: int,
    compression_ratio: float | str | None = None,
    budget: int | str | None = None,
    rows: int = 8,
    one_pass: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[list[TextLoss]]:
    """Measure texts under policies, text by text.

    Parameters
    ----------
    model : PreTrainedModel
    texts : sequence of sequences of int
        Their tokens.
    policies : sequence of Policy or str
    prompt : int
        Tokens of each text that are its prompt.
    compression_ratio, budget
        As for `kvsim.replay`; of the prompt.
    rows : int
        The most policies that are decoded together.
    one_pass : bool
        Whether to take one masked pass where that is the same.
    progress : callable, optional
        Called with (texts done, texts in all).

    Yields
    ------
    list of TextLoss
        One for each policy.

    Raises
    ------
    KvsimError
        If a text is not longer than its prompt, a policy cannot run live, or the model gives NaN.
    """
    chosen = choose_budget(compression_ratio, budget)
    parsed = [(parse(one) if isinstance(one, str) else one).with_budget(chosen) for one in policies]
    if prompt < 1:
        raise KvsimError(f"prompt must be at least 1 token, got {prompt}")
    for text in texts:
        if len(text) < prompt + 2:
            raise KvsimError(f"a text has {len(text)} tokens; a prompt of {prompt} and 2 more are needed")
    keepers = keepers_of(model, parsed)
    for number, text in enumerate(texts):
        tokens = check_forced(text, model)
        found: dict[int, TextLoss] = {}
        stepped: list[int] = []
        for index, (policy, keeper) in enumerate(zip(parsed, keepers, strict=True)):
            if one_pass and is_one_pass(policy):
                found[index] = _passed(model, tokens, prompt, policy, keeper)
            else:
                stepped.append(index)
        for start in range(0, len(stepped), rows):
            batch = stepped[start : start + rows]
            own = _decoded(model, tokens, prompt, [parsed[i] for i in batch], [keepers[i] for i in batch])
            found.update(zip(batch, own, strict=True))
        yield [found[index] for index in range(len(parsed))]
        if progress is not None:
            progress(number + 1, len(texts))


def _passed(model: Any, tokens: list[int], prompt: int, policy: Policy, keeper: Gatekeeper | None) -> TextLoss:
    # The token after the last one fed is known; what the last one predicts is not asked for.
    count = len(tokens) - prompt
    outputs, watcher = run_prompt(model, tokens[:-1], keeper, logits=count)
    logits = outputs.logits[0, -count:]
    check_numbers(logits, "text")
    targets = torch.tensor(tokens[prompt:], device=logits.device)
    total = 0.0
    for start in range(0, len(targets), _CHUNK):
        own = slice(start, start + _CHUNK)
        total += float(torch.nn.functional.cross_entropy(logits[own].float(), targets[own], reduction="sum"))
    positions = np.arange(prompt, len(tokens) - 1)
    known = watcher.admitted(0)
    held = (positions + 1).astype(np.float64)
    if known is not None:
        before = np.cumsum(known.admitted, axis=1).mean(axis=0)
        outside = positions - known.window
        held = np.minimum(positions + 1, known.window) + np.where(outside >= 0, before[np.maximum(outside, 0)], 0.0)
    return _found(policy, total, tokens, prompt, held, one_pass=True)


def _decoded(
    model: Any, tokens: list[int], prompt: int, policies: list[Policy], keepers: list[Gatekeeper | None]
) -> list[TextLoss]:
    known: dict[int, Any] = {}
    for keeper in keepers:
        if id(keeper) not in known:
            known[id(keeper)] = prefill(model, tokens[:prompt], keeper=keeper)
    prefixes = [known[id(keeper)] for keeper in keepers]
    totals = [_surprise(known_logits(prefix.logits), tokens[prompt]) for prefix in prefixes]

    def add(row: int, t: int, logits: torch.Tensor) -> None:
        totals[row] += _surprise(logits, tokens[prompt + t])

    fed = tokens[prompt:-1]
    runs = decode(model, prefixes, policies, steps=len(fed), force=fed, physical=True, on_logits=add)
    losses = []
    for policy, run, total in zip(policies, runs, totals, strict=True):
        gone = run.evicted_at
        # V_t is what was there before step t evicted, and the step's own position.
        left = np.bincount(gone[gone >= 0], minlength=len(fed) + 1)[: len(fed)].cumsum()
        held = prompt + np.arange(1, len(fed) + 1) - left / len(gone)
        losses.append(_found(policy, float(total), tokens, prompt, held, one_pass=False))
    return losses


def _surprise(logits: torch.Tensor, token: int) -> torch.Tensor:
    return torch.logsumexp(logits, dim=-1) - logits[token]


def _found(
    policy: Policy, total: float, tokens: list[int], prompt: int, held: npt.NDArray[np.float64], *, one_pass: bool
) -> TextLoss:
    count = len(tokens) - prompt
    if not math.isfinite(total):
        raise KvsimError(f"{policy}: the loss is not a number; the model's weights or its type are at fault")
    full = np.arange(prompt + 1, len(tokens))
    return TextLoss(str(policy), total / count, count, float(held.mean()), float(held.sum() / full.sum()), one_pass)


def compare(losses: Items[Items[TextLoss]], *, seed: int = 0) -> list[dict[str, Any]]:
    """Average over texts, with intervals of the difference from the first policy, paired by text.

    Parameters
    ----------
    losses : sequence of sequences of TextLoss
        For each text, of all policies in one order.
    seed : int
        Of the bootstrap and the permutation test.

    Returns
    -------
    list of dict
        For each policy: ``policy``, ``texts``, ``tokens``, ``loss``, ``perplexity``, ``cache_tokens``,
        ``cache_share``, ``one_pass``, and ``against_first``, `kvsim.paired.Paired` of the losses as a dict (a negative
        delta is a lower loss), None for the first.

    Raises
    ------
    KvsimError
        If there are no texts.
    """
    if not losses:
        raise KvsimError("there are no texts to average over")
    table = []
    base = np.array([text[0].loss for text in losses])
    for index, columns in enumerate(zip(*losses, strict=True)):
        own = np.array([one.loss for one in columns])
        loss = float(own.mean())
        table.append(
            {
                "policy": columns[0].policy,
                "texts": len(columns),
                "tokens": sum(one.tokens for one in columns),
                "loss": loss,
                "perplexity": float(np.exp(loss)),
                "cache_tokens": float(np.mean([one.cache_tokens for one in columns])),
                "cache_share": float(np.mean([one.cache_share for one in columns])),
                "one_pass": columns[0].one_pass,
                "against_first": None if index == 0 else paired(own, base, seed=seed).to_dict(),
            }
        )
    return table


if __name__ == "__main__":
    from kvsim.text_loss_command import main

    raise SystemExit(main())
