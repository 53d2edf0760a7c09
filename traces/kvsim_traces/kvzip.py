"""KVzip's reconstruction pass: how much each prompt position is needed to repeat the prompt (Kim et al., 2025).

After prefill the model is asked to repeat the context and fed the context once more, chunk by chunk, on a copy of its
cache. A position's score is the highest attention it receives in its own chunk's pass, over all queries of the pass and
all query heads of its KV head. As in the authors' code the softmax runs over the first few positions, the chunk and the
pass's own tokens, whatever else is cached; with one chunk that is all there is.
"""

from typing import Any, Final

import numpy as np
import torch
from kvsim_kernels.attention_rows import attention_row

from kvsim_traces.decoding import Decoder
from kvsim_traces.errors import TraceError
from kvsim_traces.hooks import AttentionCall, observed
from kvsim_traces.manifest import LayerInfo
from kvsim_traces.request import token_ids

__all__ = ["CHUNK_SIZE", "Reconstruction", "highest_attention"]

CHUNK_SIZE: Final = 2048
"""Prompt positions that one pass repeats."""

N_SINK: Final = 4
"""First positions of the prompt that take part in the softmax of every later chunk."""

REQUEST: Final = "\n\nRepeat the previous context exactly."
REQUEST_PART: Final = "\n\nRepeat the part of the previous context exactly, starting with"
_TAIL = 8
_BLOCK = 2**23
_MARK = "KVSIM-CONTEXT"


def highest_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    start: int,
    stop: int,
    *,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Give the highest attention that each position of a chunk receives from the queries of a pass.

    Parameters
    ----------
    query : Tensor [H, q, d]
        The pass's queries; its own keys are the last q of `key`, and causal.
    key : Tensor [Hk, n, d]
        Keys of the prompt and of the pass.
    start, stop : int
        The chunk's positions.
    scaling, softcap, sink_logits
        As in `kvsim_kernels.attention_rows.attention_row`.

    Returns
    -------
    Tensor [Hk, stop - start]
        Float32. Queries are taken in blocks; no temporary holds more than a block of rows.
    """
    heads, count, dim = query.shape
    kv_heads, sink = key.shape[0], min(N_SINK, start)
    seen = torch.cat([key[:, :sink], key[:, start:stop], key[:, -count:]], dim=1)
    context = sink + stop - start
    block = max(1, _BLOCK // (heads * seen.shape[1]))
    own = torch.arange(count, device=query.device)
    best = torch.zeros(kv_heads, stop - start, device=query.device)
    for first in range(0, count, block):
        part = query[:, first : first + block]
        size = part.shape[1]
        causal = own[None] <= own[first : first + size, None]
        visible = torch.nn.functional.pad(causal, (context, 0), value=True)
        # Every (head, query) pair is a head of its own to the row function; pairs of one KV head lie together.
        rows = attention_row(
            part.reshape(heads * size, dim),
            seen,
            scaling=scaling,
            softcap=softcap,
            mask=visible.repeat(heads, 1),
            sink_logits=None if sink_logits is None else sink_logits.repeat_interleave(size),
        )
        received = rows[:, sink:context].view(kv_heads, -1, stop - start)
        best = torch.maximum(best, received.amax(dim=1))
    return best


class Reconstruction:
    """The passes over one prompt.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        Spells the request.
    prompt : list of int
        The recorded prompt.
    chat : bool
        Whether the prompt was made with the tokenizer's chat template; the request then ends the user's turn as the
        template does.
    vocab_size : int
        Tokens that the model knows.
    chunk_size : int
        Prompt positions that one pass repeats.

    Attributes
    ----------
    note : str
        What was asked, for the manifest.
    """

    def __init__(
        self, tokenizer: Any, prompt: list[int], *, chat: bool, vocab_size: int, chunk_size: int = CHUNK_SIZE
    ) -> None:
        self._prompt = prompt
        self._chunk_size = chunk_size
        suffix = _suffix(tokenizer) if chat else "\n"

        def encoded(text: str) -> list[int]:
            return token_ids("kvzip: the request", tokenizer(text, add_special_tokens=False).input_ids, vocab_size)

        self._first, self._later, self._suffix = encoded(REQUEST), encoded(REQUEST_PART), encoded(suffix)
        passes = len(range(0, len(prompt), chunk_size))
        count = "1 reconstruction pass" if passes == 1 else f"{passes} reconstruction passes"
        self.note = (
            f"kvzip_scores: highest attention in {count} of up to {chunk_size} positions after {REQUEST + suffix!r}"
        )
        if passes > 1:
            self.note += f", later ones after {REQUEST_PART!r}, the {_TAIL} tokens before the chunk and {suffix!r}"

    def passes(self) -> list[tuple[int, int, list[int]]]:
        """Give each pass's chunk, as its first and one past its last position, and the tokens it feeds."""
        found = []
        for start in range(0, len(self._prompt), self._chunk_size):
            stop = min(start + self._chunk_size, len(self._prompt))
            request = [*self._later, *self._prompt[max(0, start - _TAIL) : start]] if start else self._first
            found.append((start, stop, [*request, *self._suffix, *self._prompt[start:stop]]))
        return found

    def scores(self, decoder: Decoder, layers: list[LayerInfo], kv_heads: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Run the passes on copies of the decoder's cache, which must hold the prompt.

        Parameters
        ----------
        decoder : Decoder
            After its prefill; its cache stays as it is.
        layers : list of LayerInfo
            The recorded layers; those that do not see the whole prompt score 0.
        kv_heads : int
            KV heads of a layer.

        Returns
        -------
        ndarray of float32, shape [K, Hk, L0]

        Raises
        ------
        TraceError
            If a layer sees other keys than the prompt's and the pass's.
        """
        scores = np.zeros((len(layers), kv_heads, len(self._prompt)), np.float32)
        for start, stop, tokens in self.passes():
            observer = _Pass(layers, len(self._prompt), start, stop, scores)
            with observed(decoder.model, observer):
                decoder.feed_copy(tokens)
        return scores


class _Pass:
    """Observer of one pass; writes its chunk's scores into their place."""

    def __init__(
        self, layers: list[LayerInfo], length: int, start: int, stop: int, scores: np.ndarray[Any, np.dtype[np.float32]]
    ) -> None:
        self._layers, self._length, self._start, self._stop = layers, length, start, stop
        self._scores = scores
        self._ordinal = 0

    def __call__(self, call: AttentionCall) -> None:
        ordinal = self._ordinal
        self._ordinal += 1
        if ordinal >= len(self._layers):
            raise TraceError(
                f"model: the reconstruction pass ran more than the {len(self._layers)} attention layers of the prefill"
            )
        if self._layers[ordinal].type != "full_attention":
            return
        if call.key.shape[1] != self._length + call.query.shape[1]:
            raise TraceError(
                f"model: layer {ordinal} sees {call.key.shape[1]} keys in the reconstruction pass, not the prompt's "
                f"{self._length} and the pass's {call.query.shape[1]}"
            )
        best = highest_attention(
            call.query,
            call.key,
            self._start,
            self._stop,
            scaling=call.scaling,
            softcap=call.softcap,
            sink_logits=call.sink_logits,
        )
        self._scores[ordinal, :, self._start : self._stop] = best.cpu().numpy()


def _suffix(tokenizer: Any) -> str:
    """Give what the chat template puts between a user's words and the answer."""
    turn = [{"role": "user", "content": _MARK}]
    rendered = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    return rendered.rpartition(_MARK)[2] or "\n"
