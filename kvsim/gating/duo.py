"""Which KV heads need the whole context: DuoAttention's identification by optimisation (Xiao et al. 2024, section 2.2).

One number alpha in [0, 1] for each layer with full attention and KV head mixes its output, ``alpha * full +
(1 - alpha) * streaming``; a streaming head sees its first `sink` tokens and the last `window`, the query's own
included. The model is frozen and reads synthetic questions about values hidden far back, whose answers follow. The
loss of an update is the squared L2 distance between the last hidden states (after the final norm, summed over
dimensions) of the mixed model and the model as it is, averaged over the tokens that predict the answers, plus
``penalty`` times the sum of all alphas, which the optimizer keeps within [0, 1]. Differences from the paper: needles of
RULER's form (`kvsim.tasks`) in place of ten 32-word passkeys, and fewer, shorter samples.

The heads are written as JSON::

    {"format": 1, "model": str, "num_layers": int, "num_kv_heads": int, "layers": [int, ...],
     "scores": [[float, ...], ...], "threshold": 0.5, "sink": int, "window": int, "training": {...}}

``scores`` has a row of alphas for every layer of the model, 0 in those that are not among ``layers``, the ones with
full attention; who uses them takes the heads from ``threshold`` on, or a share of the highest.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from kvsim_traces.facts import model_facts

from kvsim.errors import KvsimError
from kvsim.gating.attention import Attention, attention_form
from kvsim.gating.data import check_length, order
from kvsim.gating.duo_settings import DuoSettings
from kvsim.gating.watcher import Shape, frozen, hidden_states, shape_of
from kvsim.live.attention import Call
from kvsim.tasks import find_task

__all__ = ["FORMAT", "Passage", "find_heads", "passages"]

FORMAT = 1
THRESHOLD = 0.5

Progress = Callable[[int, int, dict[str, float]], None]


@dataclass(frozen=True)
class Passage:
    """A question with its answer.

    Attributes
    ----------
    tokens : list of int
    first : int
        Position of the first token that predicts one of the answer; the last token predicts nothing.
    """

    tokens: list[int]
    first: int


def passages(tokenizer: Any, settings: DuoSettings) -> list[Passage]:
    """Make the questions that heads are told apart by.

    Raises
    ------
    KvsimError
        If there is no such task, or it does not fit into the length.
    """
    task = find_task(settings.task)

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text).input_ids)

    found = []
    for index in range(settings.samples):
        sample = task.sample(index, settings.length, lambda text: len(tokens(text)), seed=settings.seed)
        if not sample.needle_spans:
            raise KvsimError(f"task {settings.task}: hides no values, so it tells no heads apart")
        prompt = tokens(sample.prompt)
        answer = list(tokenizer(f" {', '.join(sample.outputs)}", add_special_tokens=False).input_ids)
        found.append(Passage([*prompt, *answer][: settings.length], len(prompt) - 1))
    return found


class _Mixed:
    """Answers the attention calls of eligible layers with both kinds of attention, mixed."""

    def __init__(self, alphas: torch.nn.Parameter, shape: Shape, attention: Attention, settings: DuoSettings) -> None:
        self._alphas, self._attention, self._settings = alphas, attention, settings
        self._place = {layer: place for place, layer in enumerate(shape.layers)}
        self.rotations: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, call: Call) -> torch.Tensor | None:
        """See `kvsim.live.attention.Watcher`."""
        place = self._place.get(call.layer)
        if place is None:
            return None
        everything = torch.zeros(call.key.shape[:3], device=call.key.device)
        positions = torch.arange(call.key.shape[2], device=call.key.device)
        streaming = everything.masked_fill(positions >= self._settings.sink, -torch.inf)
        both = [
            self._attention(
                call.query,
                call.key,
                call.value,
                far,
                window=self._settings.window,
                scaling=call.scaling,
                softcap=call.softcap,
            )
            for far in (everything, streaming)
        ]
        group = call.query.shape[1] // call.key.shape[1]
        alpha = self._alphas[place].repeat_interleave(group)[:, None, None].to(call.value.dtype)
        return (alpha * both[0] + (1 - alpha) * both[1]).transpose(1, 2)


def find_heads(
    model: Any, samples: list[Passage], settings: DuoSettings, *, progress: Progress | None = None
) -> dict[str, Any]:
    """Optimise the alphas of a model.

    Parameters
    ----------
    model : PreTrainedModel
        A transformers causal language model; its parameters do not change.
    samples : list of Passage
    settings : DuoSettings
    progress : callable, optional
        Called with (updates done, updates in all, ``distill``, ``alphas`` (their mean) and ``learning_rate``).

    Returns
    -------
    dict
        What the file holds; ``training`` with the settings, and ``distill`` and ``alphas`` of each update.

    Raises
    ------
    KvsimError
        If the model does not fit, or the loss is not finite.
    """
    length = max(len(passage.tokens) for passage in samples)
    check_length(model, length)
    device = model.get_input_embeddings().weight.device
    shape = shape_of(model)
    attention = attention_form(settings.attention, device)
    alphas = torch.nn.Parameter(torch.ones(len(shape.layers), shape.num_kv_heads, device=device))
    optimizer = torch.optim.AdamW([alphas], lr=0.0, weight_decay=0.0)
    history: dict[str, list[float]] = {"distill": [], "alphas": []}
    watcher = _Mixed(alphas, shape, attention, settings)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step)
        passage = samples[order(len(samples), step, 1, settings.seed)[0]]
        # One length for all, so that attention is compiled once: nothing that is asked sees what comes after it.
        tokens = torch.tensor([passage.tokens + [0] * (length - len(passage.tokens))], device=device)
        asked = slice(passage.first, len(passage.tokens) - 1)
        with torch.no_grad():
            teacher = hidden_states(model, tokens)[:, asked].float()
        with frozen(model, watcher):
            student = hidden_states(model, tokens, watcher, checkpointing=settings.checkpointing)[:, asked].float()
            distill = (student - teacher).square().sum(dim=-1).mean()
            optimizer.zero_grad()
            (distill + settings.penalty * alphas.abs().sum()).backward()
        optimizer.step()
        with torch.no_grad():
            alphas.clamp_(0, 1)
        history["distill"].append(float(distill.detach()))
        history["alphas"].append(float(alphas.detach().mean()))
        if not math.isfinite(history["distill"][-1]):
            raise KvsimError(f"optimisation diverged at update {step + 1}; lower learning_rate")
        if progress is not None:
            last = {name: column[-1] for name, column in history.items()}
            progress(step + 1, settings.steps, {**last, "learning_rate": settings.rate(step)})
    num_layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    scores = np.zeros((num_layers, shape.num_kv_heads))
    scores[list(shape.layers)] = alphas.detach().double().cpu().numpy()
    return {
        "format": FORMAT,
        "model": model_facts(model)["name"],
        "num_layers": num_layers,
        "num_kv_heads": shape.num_kv_heads,
        "layers": list(shape.layers),
        "scores": scores.round(6).tolist(),
        "threshold": THRESHOLD,
        "sink": settings.sink,
        "window": settings.window,
        "training": {**asdict(settings), **history},
    }
