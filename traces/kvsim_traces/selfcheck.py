"""The recorder's check of itself: its rows against the attention the model reports when run eagerly."""

from typing import Any

import torch

from kvsim_traces.errors import TraceError

FLOAT_LIMIT = 1e-4
"""Largest error accepted before storage for a model in float32."""
HALF_LIMIT = 3e-2
"""The same for half precision: eager attention rounds its own rows to the model's type."""
AGAINST = "eager output_attentions"


def check_rows(
    exact: list[torch.Tensor],
    stored: list[torch.Tensor],
    reported: tuple[torch.Tensor, ...],
    dtype: torch.dtype,
    step: int,
) -> dict[str, Any]:
    """Compare one step's rows with what the model reports.

    Parameters
    ----------
    exact : list of Tensor [H, n]
        The rows as computed, one for each layer.
    stored : list of Tensor [H, n] or [n]
        The rows, or their head mean, as a reader of the trace will get them.
    reported : tuple of Tensor [H, m]
        The model's own, over the last m <= n positions.
    dtype : torch.dtype
        The model's number type.
    step : int
        For the report.

    Returns
    -------
    dict
        The manifest's `check`.

    Raises
    ------
    TraceError
        When the model reports nothing to compare with, or `exact` is further off than the limit for its type.
    """
    if len(reported) != len(exact):
        raise TraceError(
            f"check: the model reports the attention of {len(reported)} layers in an eager pass, {len(exact)} were "
            "recorded; record with check=False to do without the comparison"
        )
    errors, stored_errors = [], []
    for rows, kept, theirs in zip(exact, stored, reported, strict=True):
        # a windowed layer reports its window only
        reference = torch.nn.functional.pad(theirs.float(), (rows.shape[-1] - theirs.shape[-1], 0))
        errors.append((rows - reference).abs().max().cpu())
        stored_errors.append((kept - (reference.mean(dim=0) if kept.ndim == 1 else reference)).abs().max().cpu())
    # torch's maximum keeps a NaN, Python's may lose it
    per_layer = torch.stack(errors)
    worst, layer = float(per_layer.max()), int(per_layer.argmax())
    limit = FLOAT_LIMIT if dtype in (torch.float32, torch.float64) else HALF_LIMIT
    if not worst <= limit:
        raise TraceError(
            f"check: rows of step {step} differ by {worst:.3g} from the model's own at layer {layer} "
            f"(at most {limit:g} is accepted for {str(dtype).removeprefix('torch.')}); this model's attention is not "
            "what the recorder computes"
        )
    return {
        "step": step,
        "max_abs_error": worst,
        "max_abs_error_stored": float(torch.stack(stored_errors).max()),
        "against": AGAINST,
    }
