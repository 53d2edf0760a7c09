"""What hard-thresholded gates cost on text they were not trained on: the points of WG-KV's Figures 11 and 12."""

from typing import Any

import torch

from kvsim.gating.attention import attention_form
from kvsim.gating.data import Samples
from kvsim.gating.module import Gates
from kvsim.gating.settings import Settings
from kvsim.gating.watcher import GatedAttention, frozen, hidden_states

__all__ = ["cache_size", "validate"]


def cache_size(admitted: torch.Tensor, window: int) -> float:
    """Share of a sequence that is held after its last token: the window and what was admitted before it.

    Parameters
    ----------
    admitted : Tensor [..., n]
        Boolean.
    window : int
        W; the last W positions are held whatever was said of them.

    Returns
    -------
    float
        The mean over all sequences and heads, in (0, 1].
    """
    length = admitted.shape[-1]
    old = max(0, length - window)
    held = admitted[..., :old].double().sum(dim=-1) + (length - old)
    return float(held.mean() / length)


def validate(model: Any, gates: Gates, held_out: Samples, settings: Settings) -> dict[str, Any]:
    """Measure distillation losses on held-out samples.

    Parameters
    ----------
    model : PreTrainedModel
    gates : Gates
    held_out : array
        [N, length] tokens.
    settings : Settings
        `window`, `taus` and `attention` are used.

    Returns
    -------
    dict
        ``rows``, one for each threshold: ``tau``, ``loss``, ``cache_size`` and ``admitted``, the share of all tokens
        with g >= tau. ``local`` is a row where nothing is admitted, ``full`` one where everything is (its loss is what
        the arithmetic comes to), ``soft`` the losses of soft gates. All are means over samples of equal length.
        ``window``, ``length`` and ``samples`` say of what.
    """
    device = model.get_input_embeddings().weight.device
    attention = attention_form(settings.attention, device)
    nothing, everything = float("inf"), 0.0
    thresholds: list[float | None] = [*settings.taus, nothing, everything, None]
    totals = [[0.0, 0.0, 0.0] for _ in thresholds]
    with torch.no_grad():
        for sample in held_out:
            tokens = torch.from_numpy(sample[None]).to(device)
            teacher = hidden_states(model, tokens).float()
            for total, tau in zip(totals, thresholds, strict=True):
                watcher = GatedAttention(gates, attention, window=settings.window, tau=tau)
                with frozen(model, watcher):
                    student = hidden_states(model, tokens, watcher).float()
                found = watcher.gates()
                admitted = found >= (settings.tau if tau is None else tau)
                total[0] += float((student - teacher).square().mean())
                total[1] += cache_size(admitted, settings.window)
                total[2] += float((found + found * (1 - found) if tau is None else admitted.double()).mean())
    names = "loss", "cache_size", "admitted"
    rows: list[dict[str, Any]] = []
    for total, tau in zip(totals, thresholds, strict=True):
        rows.append({"tau": tau, **{name: part / len(held_out) for name, part in zip(names, total, strict=True)}})
    local, full, soft = ({name: value for name, value in row.items() if name != "tau"} for row in rows[-3:])
    return {
        "rows": rows[:-3],
        "local": local,
        "full": full,
        "soft": {"loss": soft["loss"], "sparsity": soft["admitted"]},
        "window": settings.window,
        "length": int(held_out.shape[1]),
        "samples": len(held_out),
    }
