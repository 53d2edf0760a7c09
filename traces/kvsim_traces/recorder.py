"""Record one run of a language model: its own fast attention for the prefill, then one row for each decode step."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvsim_kernels.attention_rows import prompt_mass

from kvsim_traces import facts
from kvsim_traces.capture import PrefillCapture, StepCapture
from kvsim_traces.decoding import Decoder, choose
from kvsim_traces.device_capture import DeviceCapture, device_prompt_mass
from kvsim_traces.errors import TraceError
from kvsim_traces.hooks import Observer, attention_implementation, implementation_set, observed
from kvsim_traces.kvzip import Reconstruction
from kvsim_traces.manifest import LayerInfo, Manifest, package_version
from kvsim_traces.overlapped import Overlapped, memory_error, overlapped_device
from kvsim_traces.packing import StepLayout
from kvsim_traces.reader import Trace, open_trace
from kvsim_traces.request import Request, checked, eligible_flags
from kvsim_traces.rotary import RotaryTap
from kvsim_traces.selfcheck import check_rows
from kvsim_traces.token_text import TokenText
from kvsim_traces.writer import TraceWriter

_POSITIONS = 4096


def record(
    model: Any,
    input_ids: Any,
    *,
    out: str | Path,
    steps: int = 64,
    capture: str = "heads",
    tokenizer: Any = None,
    force: Sequence[int] | None = None,
    prompt_queries: int | str = 64,
    prompt_mass: bool = True,
    kvzip: bool = False,
    temperature: float = 0.0,
    seed: int = 0,
    suppress_eos: bool = False,
    eligible: str | Sequence[int] | None = None,
    qk_dtype: str = "float16",
    pre_rope_keys: bool = False,
    chat_template: bool = False,
    check: bool = True,
    progress: Callable[[int, int], None] | None = None,
    name: str | None = None,
    kvsim_version: str | None = None,
) -> Trace:
    """Run a model over a prompt and record its full-cache attention, step by step, into a trace.

    The prefill runs the model's own attention; token 1 comes from its logits. Step t feeds token t at position
    ``L0 + t - 1`` and records the attention of its query over positions ``0 .. L0 + t - 1``. Each step is written as
    soon as it is computed. Without `suppress_eos` the run ends with the step that feeds an end-of-sequence token.

    Parameters
    ----------
    model : PreTrainedModel
        A transformers causal language model with standard attention (Llama, Qwen2, Qwen3, Mistral, Gemma 3, ...), on
        any device, in any floating type, with sdpa, eager or flash attention.
    input_ids : Tensor, array or sequence of int, [L0] or [1, L0]
        The prompt.
    out : str or Path
        Directory to create; it must not exist or be empty.
    steps : int
        The most decode steps, T.
    capture : {"heads", "scores", "qk", "qkv"}
        What is stored for each step: rows of every head, their head mean, or queries and keys (and values), from which
        rows are recomputed.
    tokenizer : PreTrainedTokenizerBase, optional
        Stores each token's text.
    force : sequence of int, optional
        Feed these tokens, the first `steps` of them, instead of generating.
    prompt_queries : int or "all"
        How many of the prompt's last queries to keep; 0 for none.
    prompt_mass : bool
        Whether to keep the attention each prompt position received during the prefill, summed over queries.
    kvzip : bool
        Whether to run KVzip's reconstruction pass after the prefill, on a copy of the cache, and keep its scores; needs
        a tokenizer and about twice the prefill's time.
    temperature : float
        0 is greedy; otherwise tokens are sampled with `seed`.
    seed : int
    suppress_eos : bool
        Never generate an end-of-sequence token.
    eligible : {"full", "all"} or sequence of int, optional
        Layers that policies score and evict: the full-attention ones by default.
    qk_dtype : {"float16", "float32"}
        How queries, keys and values are stored.
    pre_rope_keys : bool
        Whether captures `qk` and `qkv` also keep the keys as they were before the rotary embedding, which write gates
        score; the model must call its own ``apply_rotary_pos_emb``.
    chat_template : bool
        Whether the prompt was made with the tokenizer's; written to the manifest, and followed by `kvzip`.
    check : bool
        Compare step 1's rows with the model's own eager ``output_attentions``; the errors go into the manifest.
    progress : callable, optional
        Called with (steps done, steps planned).
    name : str, optional
        The model's and tokenizer's name in the manifest; by default that of the file or hub repository they came from.
    kvsim_version : str, optional
        For the manifest; by default that of the installed package.

    Returns
    -------
    Trace
        The finished recording, opened.

    Raises
    ------
    TraceError
        When an argument is wrong, the model's attention cannot be recorded, the check fails, the GPU's memory does not
        suffice, or writing fails. Before the first step is complete nothing is left on disk; afterwards the trace keeps
        its committed steps.
    """
    kind = type(model).__name__
    if not isinstance(model, torch.nn.Module) or not hasattr(getattr(model, "config", None), "get_text_config"):
        raise TraceError(f"model: {kind} is not a transformers model")
    request = checked(
        out=out,
        input_ids=input_ids,
        force=force,
        steps=steps,
        capture=capture,
        prompt_queries=prompt_queries,
        prompt_mass=prompt_mass,
        temperature=temperature,
        seed=seed,
        suppress_eos=suppress_eos,
        eligible=eligible,
        qk_dtype=qk_dtype,
        vocab_size=int(model.get_input_embeddings().weight.shape[0]),
        pre_rope_keys=pre_rope_keys,
    )
    reconstruction = None
    if kvzip:
        if tokenizer is None:
            raise TraceError("kvzip: needs a tokenizer, which spells the request to repeat the prompt")
        reconstruction = Reconstruction(
            tokenizer, request.prompt, chat=bool(chat_template), vocab_size=request.vocab_size
        )
    attention = attention_implementation(model)
    run = Recording(model, request, tokenizer, reconstruction)
    failed = None
    try:
        with torch.inference_mode(), _evaluating(model):
            manifest = run.start(check)
            manifest = replace(
                manifest,
                model=facts.model_facts(model, name),
                tokenizer=None if tokenizer is None else facts.tokenizer_facts(tokenizer, name),
                environment=facts.environment_facts(model, attention),
                generation=manifest.generation | {"chat_template": bool(chat_template)},
                kvsim_version=kvsim_version or package_version(),
            )
            with TraceWriter(out, manifest, qk_dtype=qk_dtype, behind=run.device is not None) as writer:
                run.write(writer, progress)
    except torch.OutOfMemoryError as error:
        failed = str(error)
    if failed is not None:
        # The frames that held the model's tensors are gone by now.
        run.release()
        gc.collect()
        torch.cuda.empty_cache()
        raise memory_error(failed)
    return open_trace(out)


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Switch dropout off, and put every module back into its own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class Recording:
    """One recording: `start` runs the prefill and step 1, `write` stores them and runs the rest.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode; both methods need inference mode.
    request : Request
    tokenizer : PreTrainedTokenizerBase or None
    reconstruction : Reconstruction or None
    """

    def __init__(
        self, model: Any, request: Request, tokenizer: Any = None, reconstruction: Reconstruction | None = None
    ) -> None:
        self.model = model
        self.request = request
        self.tokenizer = tokenizer
        self.text = None if tokenizer is None else TokenText(tokenizer)
        self.reconstruction = reconstruction
        self.kvzip_scores: np.ndarray[Any, Any] | None = None
        self.decoder = Decoder(model)
        self.config = model.config.get_text_config(decoder=True)
        self.eos = [token for token in eos_tokens(model, tokenizer) if token < request.vocab_size]
        self.generator = torch.Generator().manual_seed(request.seed)
        self.device = overlapped_device(model)
        self.rotary = RotaryTap(model) if request.pre_rope_keys else None
        self.prefill = PrefillCapture(
            self.config,
            request.capture,
            request.last_queries,
            request.prompt_mass,
            request.qk_dtype,
            prompt_mass if self.device is None else device_prompt_mass,
            self.rotary,
        )
        self.step = StepCapture([], request.capture, request.qk_dtype)
        self.overlapped: Overlapped | None = None

    def start(self, check: bool) -> Manifest:
        """Run the prefill, the reconstruction and step 1, check it, and describe the recording."""
        request, prefill = self.request, self.prefill
        with self._watched(prefill):
            logits = self.decoder.prefill(request.prompt)
        self._accept()
        flags = eligible_flags(request.eligible, prefill.layers)
        layers = [replace(layer, eligible=flag) for layer, flag in zip(prefill.layers, flags, strict=True)]
        notes = _notes(prefill.indices)
        if self.reconstruction is not None:
            self.kvzip_scores = self.reconstruction.scores(self.decoder, layers, prefill.shapes[0][1])
            notes.append(self.reconstruction.note)
        self.token = self._choose(logits, 0)
        reported: tuple[torch.Tensor, ...] = ()
        if check:
            with implementation_set(self.model, lambda _: "eager"):
                reported = self.decoder.attentions(self.token)
        self._first_step(layers, check)
        found = None
        if check:
            dtype = next(self.model.parameters()).dtype
            found = check_rows(self.step.exact, self.step.stored, reported, dtype, 1)
            self.step.forget()
        if isinstance(self.step, DeviceCapture) and self.step.plain:
            named = ", ".join(str(prefill.indices[ordinal]) for ordinal in sorted(self.step.plain))
            notes.append(f"attention rows of layers {named} were computed by PyTorch, not by the kernel")
        heads, kv_heads, head_dim, _ = prefill.shapes[0]
        return Manifest(
            capture=request.capture,
            prompt_length=len(request.prompt),
            planned_steps=request.steps,
            num_layers=len(layers),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            arrays=self._arrays(),
            layers=layers,
            sink_logits=prefill.sink_logits,
            vocab_size=request.vocab_size,
            generation={
                "mode": "generated" if request.forced is None else "forced",
                "seed": request.seed if request.forced is None else None,
                "temperature": request.temperature,
                "suppress_eos": request.suppress_eos,
                "eos_token_ids": self.eos,
                "chat_template": False,
            },
            check=found,
            notes=notes,
        )

    def write(self, writer: TraceWriter, progress: Callable[[int, int], None] | None = None) -> None:
        """Store the prompt and step 1, then run and store the other steps."""
        self._write_prompt(writer)
        with self._watched(self.step):
            if self.overlapped is not None:
                self.overlapped.write(writer, self.text, progress)
            else:
                self._write_in_turn(writer, progress)

    def release(self) -> None:
        """Let go of everything on the model's device."""
        self.decoder.release()
        self.logits = torch.empty(0)
        self.step.release()
        if self.overlapped is not None:
            self.overlapped.release()

    @contextmanager
    def _watched(self, observer: Observer) -> Iterator[None]:
        with observed(self.model, observer), self.rotary or nullcontext():
            yield

    def _first_step(self, layers: list[LayerInfo], check: bool) -> None:
        request, eos = self.request, self.eos
        if self.device is None:
            self.step = StepCapture(layers, request.capture, request.qk_dtype, self.rotary)
            with self._watched(self.step):
                self.logits, self.first = self._advance(1, keep=check)
            return
        self.step = capture = DeviceCapture(layers, request.capture, request.qk_dtype, self.rotary)
        heads, kv_heads, head_dim, _ = self.prefill.shapes[0]
        self.overlapped = Overlapped(
            self.device,
            self.decoder,
            request,
            capture,
            StepLayout(
                request.capture, len(layers), heads, kv_heads, head_dim, request.qk_dtype, request.pre_rope_keys
            ),
            banned=eos if request.suppress_eos else [],
            ends=eos if request.forced is None and not request.suppress_eos else [],
            generator=self.generator,
        )
        with self._watched(capture):
            self.overlapped.first(self.token, keep=check)

    def _write_in_turn(self, writer: TraceWriter, progress: Callable[[int, int], None] | None) -> None:
        arrays, total = self.first, self.request.steps
        for t in range(1, total + 1):
            if t > 1:
                self.token = self._choose(self.logits, t - 1)
                self.logits, arrays = self._advance(t)
            text = None if self.text is None else self.text([self.token])[0]
            writer.append(token=self.token, text=text, scaled=True, **arrays)
            if progress is not None:
                progress(t, total)
            if self.request.forced is None and not self.request.suppress_eos and self.token in self.eos:
                return

    def _advance(self, t: int, keep: bool = False) -> tuple[torch.Tensor, dict[str, np.ndarray[Any, Any]]]:
        """Feed the present token as step t; return the next logits and the step's arrays."""
        self.step.begin(len(self.request.prompt) + t - 1, keep)
        logits = self.decoder.step(self.token)
        return logits, self.step.arrays()

    def _choose(self, logits: torch.Tensor, index: int) -> int:
        if self.request.forced is not None:
            return self.request.forced[index]
        banned = self.eos if self.request.suppress_eos else []
        return choose(logits, self.request.temperature, self.generator, banned)

    def _accept(self) -> None:
        """Refuse what the trace cannot hold or a reader could not recompute."""
        kind, prefill, capture = type(self.model).__name__, self.prefill, self.request.capture
        if not prefill.layers:
            raise TraceError(
                f"model: {kind} has no attention hooks: none of its layers calls transformers' AttentionInterface, so "
                "its attention cannot be recorded"
            )
        if self.decoder.cache is None:
            raise TraceError(f"model: {kind} returns no KV cache, so decode steps cannot be recorded")
        if len(set(prefill.shapes)) != 1:
            raise TraceError(
                f"model: the layers of {kind} differ in heads or head dimension {sorted(set(prefill.shapes))}; a trace "
                "holds layers of one shape"
            )
        _, _, head_dim, value_dim = prefill.shapes[0]
        if capture == "qkv" and value_dim != head_dim:
            raise TraceError(
                f"capture: 'qkv' needs values as wide as keys, {kind} has {value_dim} and {head_dim}; use 'qk'"
            )

    def _arrays(self) -> list[str]:
        """Names of the arrays this recording stores."""
        request = self.request
        names = ["tokens"] if self.tokenizer is None else ["tokens", "text", "text_ends"]
        names += {"heads": ["attention"], "scores": ["scores"], "qk": ["queries", "keys"]}.get(
            request.capture, ["queries", "keys", "values"]
        )
        names += ["keys_pre", "row_sums"] if request.pre_rope_keys else ["row_sums"]
        if request.last_queries:
            names.append("prompt_queries")
        if request.prompt_mass:
            names.append("prompt_mass")
        if self.reconstruction is not None:
            names.append("kvzip_scores")
        return names

    def _write_prompt(self, writer: TraceWriter) -> None:
        """Hand over what the prefill captured, and let go of it."""
        prefill, prompt = self.prefill, self.request.prompt
        writer.write_prompt(
            tokens=np.asarray(prompt, dtype=np.int32),
            text=None if self.text is None else self.text(prompt),
            prompt_queries=np.stack(prefill.queries) if prefill.queries else None,
            prompt_mass=np.stack(prefill.mass) if prefill.mass else None,
            kvzip_scores=self.kvzip_scores,
        )
        if prefill.keys:
            for start in range(0, len(prompt), _POSITIONS):
                stop = start + _POSITIONS
                writer.append_positions(
                    keys=np.stack([keys[:, start:stop] for keys in prefill.keys]),
                    values=np.stack([values[:, start:stop] for values in prefill.values]) if prefill.values else None,
                    keys_pre=np.stack([keys[:, start:stop] for keys in prefill.keys_pre]) if prefill.keys_pre else None,
                )
        for held in (prefill.queries, prefill.mass, prefill.keys, prefill.values, prefill.keys_pre):
            held.clear()


def _notes(indices: list[int]) -> list[str]:
    """Say which of the model's layers were recorded, where some have no attention."""
    if indices == list(range(len(indices))):
        return []
    return [f"recorded layers are the model's layers {', '.join(map(str, indices))}; the others have no attention"]


def eos_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every end-of-sequence token that the model or its tokenizer names."""
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), model.config.get_text_config(decoder=True), tokenizer):
        value = getattr(owner, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or [])
    return sorted(int(token) for token in found if token is not None)
