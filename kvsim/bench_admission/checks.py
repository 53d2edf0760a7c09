"""What must hold before a time counts: the plain form's answers on small models, references' at true heads."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from kvsim_kernels.gather_admitted.kernel import gather_admitted
from kvsim_kernels.vertical_slash import vertical_slash_reference
from kvsim_kernels.vertical_slash.kernel import vertical_slash

from kvsim.bench_admission.decode import dual_session, full_session
from kvsim.bench_admission.dense import dense_attention, dense_names
from kvsim.bench_admission.models import Setting, drawn_masks, gatekeeper
from kvsim.bench_admission.prefill import Clock, DualCache, FullCache, prefill
from kvsim.bench_live_checks import SMALL
from kvsim.bench_live_models import build
from kvsim.live.decode import decode
from kvsim.live.fast.session import Session
from kvsim.live.gatekeeper import FixedKeeper
from kvsim.live.prefix import prefill as plain_prefill

__all__ = ["LIMIT", "attention_errors", "model_errors", "wrong"]

CHECKED = SMALL["llama"] | {"head_dim": 32, "num_hidden_layers": 2}

LIMIT = {"attention": 1e-2, "model": 1e-3}
"""The largest relative errors that pass: of attention in bfloat16, and of logits in float32."""


def model_errors(
    setting: Setting,
    *,
    length: int = 600,
    steps: int = 12,
    kinds: tuple[str, ...] = ("llama", "qwen3"),
    shape: dict[str, Any] = CHECKED,
) -> dict[str, float]:
    """Compare logits of prefill and decode with the plain form's, on small models in float32 under one random mask.

    Returns
    -------
    dict
        For each model, cache and phase the largest difference over the largest logit.
    """
    found: dict[str, float] = {}
    torch.manual_seed(1)
    layers, kv_heads = shape["num_hidden_layers"], shape["num_key_value_heads"]
    for kind in kinds:
        model = build(shape | {"kind": kind}, setting.device, torch.float32)
        small = replace(
            setting, window=max(1, min(setting.window, length // 3)), chunk=max(1, length // 3), steps=steps, warm=0,
            dtype=torch.float32, tiling=None,
        )  # fmt: skip
        masks = drawn_masks(layers, kv_heads, length + steps + 1, small.kept(length + steps + 1), small.device)
        tokens = torch.randint(0, shape["vocab_size"], (length + steps,)).tolist()
        prompt, forced = tokens[:length], tokens[length:]
        given = torch.tensor(prompt, device=small.device)
        gates = gatekeeper(model, small)
        keeper = FixedKeeper(gates.name, small.window, gates.layers, _first(masks))
        dense = dense_attention("SDPA math")
        for name, cache, policy, own in (
            ("full", FullCache(model, length, small, dense), "full", None),
            ("dual", DualCache(model, length, small, gates, masks[:, :, :length]), small.policy, keeper),
        ):
            first = prefill(model, given, cache, Clock(small.device), chunk=small.chunk)
            prefix = plain_prefill(model, prompt, keeper=own)
            options: dict[str, Any] = {"steps": steps, "force": forced, "keep_logits": True}
            (plain,) = decode(model, [prefix], [policy], **options)
            session: Session
            if isinstance(cache, FullCache):
                session = full_session(model, cache, prompt, steps=steps)
            else:
                session = dual_session(model, cache, prompt, gates, policy, masks[:, :, length:], steps=steps)
            assert prefix.logits is not None
            found[f"{kind}, {name}, prefill"] = _gap(first, prefix.logits)
            pairs = zip(_fed(session, forced), plain.logits, strict=True)
            found[f"{kind}, {name}, decode"] = max(_gap(ours, theirs) for ours, theirs in pairs)
    return found


def _first(masks: torch.Tensor) -> Callable[[int], Any]:
    whole = masks.cpu().numpy()
    return lambda positions: whole[:, :, :positions]


def _fed(session: Session, tokens: list[int]) -> list[torch.Tensor]:
    found = []
    with session.attached():
        for token in tokens:
            session.tokens.fill_(token)
            session.step()
            found.append(session.logits[0].clone())
    return found


def _gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    gap = (ours.float() - theirs.to(ours.device).float()).abs().max() / theirs.abs().max()
    return float(gap) if torch.isfinite(gap) else 1e9


def attention_errors(
    heads: int, kv_heads: int, dim: int, setting: Setting, *, length: int = 3000
) -> dict[str, float | str]:
    """Compare each attention that is timed with plain PyTorch in float32: relative errors, or what is missing."""
    query = torch.randn(heads, length, dim, device=setting.device, dtype=setting.dtype)
    key, value = torch.randn(2, kv_heads, length, dim, device=setting.device, dtype=setting.dtype)
    wide = query.float(), key.float(), value.float()
    found: dict[str, float | str] = {}
    # The last head admits nothing, the first one twice its share.
    shares = torch.linspace(min(1.0, 2 * setting.admitted), 0, kv_heads, device=setting.device)
    mask = torch.rand(kv_heads, length, device=setting.device) < shares[:, None]
    exact = vertical_slash_reference(*wide, mask, window=setting.window).output
    admitted = gather_admitted(key, value, mask)
    ours = vertical_slash(query, key, value, admitted, window=setting.window, tiling=setting.tiling)
    assert isinstance(ours, torch.Tensor)
    found["vertical-slash"] = _relative(ours, exact)
    everything = vertical_slash_reference(*wide, torch.ones_like(mask), window=1).output
    for name in dense_names(on_gpu=setting.on_gpu):
        try:
            found[name] = _relative(dense_attention(name)(query, key, value), everything)
        except Exception as error:
            found[name] = " ".join(str(error).split())[:200]
    return found


def _relative(ours: torch.Tensor, exact: torch.Tensor) -> float:
    gap = (ours.float() - exact).norm() / exact.norm()
    return float(gap) if torch.isfinite(gap) else 1e9


def wrong(kind: str, errors: dict[str, float | str] | dict[str, float]) -> list[str]:
    """Name what is not right; what is not there is not wrong."""
    return [
        f"{name}: relative error {error:.2g}, at most {LIMIT[kind]:g} passes"
        for name, error in errors.items()
        if isinstance(error, float) and not error <= LIMIT[kind]
    ]
