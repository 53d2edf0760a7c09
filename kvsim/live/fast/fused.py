"""The decode step of Llama-like models as a sequence of our own kernels, with the model's own weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from kvsim_kernels.linear.kernel import linear
from kvsim_kernels.rope_write.kernel import rope_write

from kvsim.live.fast.generic import Attend
from kvsim.live.fast.slots import Slots

__all__ = ["FusedForward", "why_not_fused"]

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
MOST_ROWS = 16

_stacks: WeakKeyDictionary[torch.nn.Module, torch.Tensor] = WeakKeyDictionary()


def why_not_fused(model: Any, batch: int) -> str | None:
    """Say what keeps a model from the fused step, None if nothing does."""
    kind = type(model).__name__
    if kind not in FAMILIES:
        return f"{kind} is not one of {', '.join(FAMILIES)}"
    if batch > MOST_ROWS:
        return f"a batch of {batch} is larger than {MOST_ROWS}"
    if getattr(model.model.rotary_emb, "rope_type", "default") in ("dynamic", "longrope"):
        return f"its rotary tables (rope_type {model.model.rotary_emb.rope_type!r}) change with the length"
    if model.config.hidden_act not in ("silu", "swish"):
        return f"its activation is {model.config.hidden_act!r}"
    if not {"full_attention", "sliding_attention"}.issuperset(getattr(model.config, "layer_types", None) or ()):
        return f"its layers are {', '.join(sorted(set(model.config.layer_types)))}"
    weights = {(p.dtype, p.device) for p in model.parameters()}
    if len(weights) != 1:
        return "its weights lie on several devices or differ in type"
    for name, module in model.named_modules():
        if name.endswith(("_proj", "lm_head")) and type(module) is not torch.nn.Linear:
            return f"{name} is a {type(module).__name__}"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name or kind} has hooks"
    return None


class FusedForward:
    """A decode step: norm, projections, rotation, slots, attention and feed-forward, seven kernels a layer.

    The weights of each layer's query, key and value projections are stacked once, so that one kernel reads them; the
    modules' own parameters become views of the stack, and no memory is taken twice.

    Parameters
    ----------
    model : PreTrainedModel
        One that `why_not_fused` has nothing against.
    attend : callable
        See `Attend`.
    batch : int
    first_position, positions : int
        The first position that will be decoded, and how many follow.
    """

    def __init__(self, model: Any, attend: Attend, *, batch: int, first_position: int, positions: int) -> None:
        self.model, self._attend, self.first_position = model, attend, first_position
        self._slots: list[Slots] = []
        self._norms: list[torch.Tensor | None] = []
        base = model.model
        first = base.layers[0]
        self._dim = int(first.self_attn.head_dim)
        self._heads = first.self_attn.q_proj.out_features // self._dim
        self._kv_heads = first.self_attn.k_proj.out_features // self._dim
        weight = model.lm_head.weight
        self._stacks = [_stacked(layer.self_attn) for layer in base.layers]
        self._biases = [_stacked_bias(layer.self_attn) for layer in base.layers]
        place = {"device": weight.device, "dtype": weight.dtype}
        ids = torch.arange(first_position, first_position + positions, device=weight.device)
        cos, sin = base.rotary_emb(torch.empty(1, **place), ids.unsqueeze(0))
        self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()
        self._x = torch.empty(batch, weight.shape[1], **place)
        self._joined = torch.empty(batch, self._stacks[0].shape[0], **place)
        self._query, self._found = torch.empty(2, batch, self._heads, self._dim, **place)
        self._wide = torch.empty(batch, first.mlp.gate_proj.out_features, **place)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Nothing is needed: the model's attention is not asked."""
        yield

    def use(self, layers: list[Slots], norms: list[torch.Tensor | None], seen: int) -> None:
        """Run over these slots from now on."""
        self._slots, self._norms = layers, norms

    def close(self) -> None:
        """Let go of the slots."""
        self._slots, self._norms = [], []

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor) -> None:
        """Feed one token a row, [batch], at positions [batch] int32; write logits [batch, vocabulary]."""
        base, x = self.model.model, self._x
        batch, sizes = x.shape[0], [self._heads * self._dim, self._kv_heads * self._dim, self._kv_heads * self._dim]
        query, key, value = (part.view(batch, -1, self._dim) for part in self._joined.split(sizes, dim=1))
        torch.index_select(base.embed_tokens.weight, 0, tokens, out=x)
        for layer, stack, bias, own, norms in zip(
            base.layers, self._stacks, self._biases, self._slots, self._norms, strict=True
        ):
            attention, mlp = layer.self_attn, layer.mlp
            linear(x, stack, bias=bias, out=self._joined, **_norm("norm_weight", layer.input_layernorm))
            head_norm = getattr(attention, "q_norm", None)
            rope_write(
                key, value, own.keys, own.values, own.new_slots,
                query=query, cos=self._cos, sin=self._sin, positions=positions, first_position=self.first_position,
                query_norm=None if head_norm is None else head_norm.weight,
                key_norm=None if head_norm is None else attention.k_norm.weight,
                eps=0.0 if head_norm is None else head_norm.variance_epsilon,
                value_norms=norms, out=self._query,
            )  # fmt: skip
            self._attend(own, self._query, self._found)
            output = attention.o_proj
            linear(self._found.view(batch, -1), output.weight, bias=output.bias, residual=x, out=x)
            gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
            linear(
                x, gate.weight, bias=gate.bias, up_weight=up.weight, up_bias=up.bias, out=self._wide,
                **_norm("norm_weight", layer.post_attention_layernorm),
            )  # fmt: skip
            linear(self._wide, down.weight, bias=down.bias, residual=x, out=x)
        head = self.model.lm_head
        linear(x, head.weight, bias=head.bias, out=logits, **_norm("norm_weight", base.norm))


def _norm(name: str, module: Any) -> dict[str, Any]:
    return {name: module.weight, "eps": float(module.variance_epsilon)}


def _stacked(attention: Any) -> torch.Tensor:
    """Stack a layer's query, key and value weights, whose modules get views of it; done once for a module."""
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    known = _stacks.get(attention)
    if known is not None and known.device == parts[0].weight.device and _are_views(known, parts):
        return known
    with torch.inference_mode(False), torch.no_grad():
        stack = torch.cat([part.weight for part in parts])
        row = 0
        for part in parts:
            part.weight.data = stack[row : row + part.out_features]
            row += part.out_features
    _stacks[attention] = stack
    return stack


def _are_views(stack: torch.Tensor, parts: list[Any]) -> bool:
    place = stack.data_ptr()
    for part in parts:
        if part.weight.data_ptr() != place or part.weight.dtype != stack.dtype:
            return False
        place += part.weight.nbytes
    return True


def _stacked_bias(attention: Any) -> torch.Tensor | None:
    parts = [attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias]
    with torch.no_grad():
        return None if parts[0] is None else torch.cat(parts)
