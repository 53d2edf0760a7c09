"""Write-gated attention (WG-KV section 3.2): a plain form that is the reference, and one by FlexAttention.

Query i sees key j <= i with its logit plus log m_ij, where m_ij is 1 if i - j < W and the gate g_j of its KV head
otherwise. Exactly W recent tokens, the query's own included, have m = 1.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kvsim.errors import KvsimError

__all__ = [
    "EPS",
    "MOST_KINDS",
    "attention_form",
    "each_kind_compiled",
    "flex_write_gated",
    "log_gates",
    "plain_write_gated",
]

EPS = 1e-12
"""Added to a gate under the logarithm: at g = 0 a far key still has 1e-12 of its weight, so gradients stay finite."""

MOST_KINDS = 64
"""Kinds of calls of FlexAttention that one process compiles."""

Attention = Callable[..., torch.Tensor]


def log_gates(gates: torch.Tensor, tau: float | None = None) -> torch.Tensor:
    """Turn gates into what is added to far logits.

    Parameters
    ----------
    gates : Tensor
        In [0, 1].
    tau : float, optional
        The hard threshold: 0 where g >= tau and minus infinity elsewhere. By default log(g + `EPS`).
    """
    if tau is None:
        return torch.log(gates + EPS)
    return torch.where(gates >= tau, 0.0, -torch.inf).to(gates.dtype)


def plain_write_gated(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_gate: torch.Tensor,
    *,
    window: int,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend to all keys of a sequence from its start, far ones by their gates, with the full matrix of logits.

    Parameters
    ----------
    query : Tensor [batch, H, n, d]
        Query head i reads KV head i // (H / Hk).
    key, value : Tensor [batch, Hk, n, d]
    log_gate : Tensor [batch, Hk, n]
        See `log_gates`.
    window : int
        W, at least 1.
    scaling : float
        Factor on the dot products.
    softcap : float, optional
        ``softcap * tanh(logit / softcap)`` replaces a logit, before the gate is added.

    Returns
    -------
    Tensor [batch, H, n, d]
        In the queries' type; logits and weights are float32, or float64 for float64 queries.
    """
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    grouped = query.to(wide).view(batch, kv_heads, heads // kv_heads, length, dim)
    logits = grouped @ key.to(wide).transpose(2, 3).unsqueeze(2) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    positions = torch.arange(length, device=query.device)
    behind = positions[:, None] - positions
    bias = torch.where(behind < window, 0.0, log_gate.to(wide)[:, :, None, None])
    logits = (logits + bias).masked_fill(behind < 0, -torch.inf)
    weights = torch.softmax(logits, dim=-1).to(value.dtype)
    return (weights @ value.unsqueeze(2)).flatten(1, 2)


def flex_write_gated(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_gate: torch.Tensor,
    *,
    window: int,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Do the same by FlexAttention: compiled on a GPU, eager elsewhere, where it has no gradients.

    Gradients of `log_gate`, a captured buffer, are summed by atomic additions, in no fixed order.
    """
    group = query.shape[1] // key.shape[1]

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return torch.where(i - j < window, score, score + log_gate[b, h // group, j])

    mask = _causal(query.shape[2], str(query.device))
    options = {"score_mod": score_mod, "block_mask": mask, "scale": scaling, "enable_gqa": group > 1}
    function = flex_attention
    if query.device.type == "cuda":
        function = _compiled()
        # The kernel for few queries refuses groups of 3 heads.
        options["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        # Tracing looks at .grad of the captured gates, which are no leaves.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        found: torch.Tensor = function(query, key, value, **options)
        return found


@functools.cache
def _compiled() -> Callable[..., Any]:
    return each_kind_compiled(flex_attention)


def each_kind_compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function for every kind of its arguments, up to `MOST_KINDS`; torch.compile gives up after eight.

    Lengths, windows, and what has gradients each make a kind. One that is not compiled would be computed with the full
    matrix of logits.

    Parameters
    ----------
    function : callable
    **options
        As torch.compile takes them.
    """
    compiled = torch.compile(function, dynamic=False, **options)

    def call(*arguments: Any, **more: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=MOST_KINDS):
            return compiled(*arguments, **more)

    return call


@functools.lru_cache(maxsize=8)
def _causal(length: int, device: str) -> Any:
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device)


def attention_form(name: str, device: torch.device) -> Attention:
    """Choose a form by name: plain, flex, or auto, which is flex on a GPU and plain elsewhere.

    Raises
    ------
    KvsimError
        For flex without a GPU: it has no gradients there.
    """
    on_gpu = device.type == "cuda"
    if name == "flex" and not on_gpu:
        raise KvsimError(f"attention 'flex' trains on a CUDA GPU only, not on {device.type}; use plain")
    return flex_write_gated if name == "flex" or (name == "auto" and on_gpu) else plain_write_gated
