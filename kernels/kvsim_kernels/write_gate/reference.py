"""The write gate in plain PyTorch."""

import torch

__all__ = ["check", "write_gate"]


def check(
    keys_pre: torch.Tensor,
    keys_post: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
) -> None:
    """Raise ValueError unless shapes fit."""
    if keys_pre.ndim != 3 or keys_post.shape != keys_pre.shape:
        raise ValueError(
            f"keys of shapes {tuple(keys_pre.shape)} and {tuple(keys_post.shape)} before and after RoPE must both be "
            "[Hk, n, d]"
        )
    kv_heads, _, dim = keys_pre.shape
    hidden = w1.shape[1] if w1.ndim == 3 else 0
    shapes = [tuple(x.shape) for x in (w1, b1, w2, b2)]
    if shapes != [(kv_heads, hidden, 2 * dim), (kv_heads, hidden), (kv_heads, hidden), (kv_heads,)]:
        raise ValueError(
            f"weights of shapes {shapes} do not fit {kv_heads} KV heads of d={dim}: [Hk, h, 2d], [Hk, h], [Hk, h] and "
            "[Hk] are needed"
        )


def write_gate(
    keys_pre: torch.Tensor,
    keys_post: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
    *,
    eps: float = 1e-6,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Score keys: ``sigmoid(w2 . GELU(w1 x + b1) + b2)`` with ``x = [RMSNorm(pre); RMSNorm(post)]`` (WG-KV, 3.2).

    Parameters
    ----------
    keys_pre, keys_post : Tensor [Hk, n, d]
        Keys before and after RoPE.
    w1 : Tensor [Hk, h, 2d]
    b1, w2 : Tensor [Hk, h]
    b2 : Tensor [Hk]
    eps : float
        Added to the mean square; the norms have no learned scale. GELU is the exact one.
    dtype : torch.dtype
        The type everything is computed in, and of what is returned.

    Returns
    -------
    Tensor [Hk, n]

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    check(keys_pre, keys_post, w1, b1, w2, b2)
    x = torch.cat(
        [
            keys * torch.rsqrt(keys.square().mean(-1, keepdim=True) + eps)
            for keys in (keys_pre.to(dtype), keys_post.to(dtype))
        ],
        -1,
    )
    hidden = torch.nn.functional.gelu(x @ w1.to(dtype).transpose(1, 2) + b1.to(dtype).unsqueeze(1))
    return torch.sigmoid((hidden @ w2.to(dtype).unsqueeze(-1)).squeeze(-1) + b2.to(dtype).unsqueeze(-1))
