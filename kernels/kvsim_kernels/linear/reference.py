"""A linear layer with what stands before and after it in plain PyTorch."""

import torch

__all__ = ["check", "linear"]


def check(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_weight: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> None:
    """Raise ValueError unless shapes fit."""
    batch, width = x.shape
    if weight.ndim != 2 or weight.shape[1] != width:
        raise ValueError(f"a weight of shape {tuple(weight.shape)} does not fit x of shape {tuple(x.shape)}")
    if up_bias is not None and up_weight is None:
        raise ValueError("up_bias needs up_weight")
    height = weight.shape[0]
    for name, tensor, shape in (
        ("norm_weight", norm_weight, (width,)),
        ("bias", bias, (height,)),
        ("up_weight", up_weight, (height, width)),
        ("up_bias", up_bias, (height,)),
        ("residual", residual, (batch, height)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias: torch.Tensor | None = None,
    up_weight: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Multiply by a weight: ``silu(g) * u + residual`` with ``g = W n + bias``, ``u = U n + up_bias``, ``n = norm(x)``.

    Parameters
    ----------
    x : Tensor [batch, in]
    weight : Tensor [out, in]
        W.
    norm_weight : Tensor [in], optional
        Normalise x first: ``x / sqrt(mean(x ** 2) + eps) * norm_weight`` (RMSNorm). Of models that scale by one plus
        a weight (Gemma), pass that sum.
    eps : float
    bias : Tensor [out], optional
    up_weight, up_bias : Tensor [out, in], [out], optional
        U and its bias (SwiGLU, W being the gate). Without them neither u nor silu is there: ``g + residual``.
    residual : Tensor [batch, out], optional
        Added at the end.
    dtype : torch.dtype
        The type everything is computed in; float64 is also the type of what is returned.

    Returns
    -------
    Tensor [batch, out]
        In the type of x.

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    check(x, weight, norm_weight, bias, up_weight, up_bias, residual)
    n = x.to(dtype)
    if norm_weight is not None:
        n = n * torch.rsqrt(n.square().mean(-1, keepdim=True) + eps) * norm_weight.to(dtype)
    y = n @ weight.to(dtype).T
    if bias is not None:
        y = y + bias.to(dtype)
    if up_weight is not None:
        up = n @ up_weight.to(dtype).T
        y = torch.nn.functional.silu(y) * (up if up_bias is None else up + up_bias.to(dtype))
    if residual is not None:
        y = y + residual.to(dtype)
    return y if dtype == torch.float64 else y.to(x.dtype)
