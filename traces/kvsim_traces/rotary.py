"""Keys before the rotary embedding: what a model hands to its own ``apply_rotary_pos_emb``.

Nothing is turned back: scaled, partial and interleaved rotations are recorded alike, and a layer that rotates nothing
has equal keys before and after. The function is replaced in the model's own file, only while a recording runs.
"""

import inspect
import threading
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, Final

import torch

from kvsim_traces.errors import TraceError
from kvsim_traces.hooks import AttentionCall

__all__ = ["RotaryTap"]

_NAME: Final = "apply_rotary_pos_emb"


class RotaryTap:
    """Keeps the keys that a model rotates; a context manager around its forward passes, which may be entered again.

    Parameters
    ----------
    model : PreTrainedModel
        Its attention layers call ``apply_rotary_pos_emb(q, k, ...)`` of their own file.

    Raises
    ------
    TraceError
        If none of its layers' files has such a function.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._scopes = {id(scope): scope for scope in map(_scope, model.modules()) if _takes_keys(scope)}
        if not self._scopes:
            raise TraceError(
                f"pre_rope_keys: {type(model).__name__} calls no {_NAME}(q, k, ...), so its keys before the rotary "
                "embedding cannot be recorded"
            )
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        self._token: Token[RotaryTap | None] | None = None

    def __enter__(self) -> "RotaryTap":
        """Watch the model's rotations."""
        for scope in self._scopes.values():
            _install(scope)
        self._token = _tap.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Put everything back."""
        if self._token is not None:
            _tap.reset(self._token)
        self._last = None
        for scope in self._scopes.values():
            _remove(scope)

    def saw(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Keep the keys of the latest rotation, as they were and as they are."""
        self._last = before, after

    def take(self, call: AttentionCall, layer: int, *, compare: bool = False) -> torch.Tensor:
        """Give the new keys of an attention call as they were before the rotation that preceded it.

        Parameters
        ----------
        call : AttentionCall
        layer : int
            For errors.
        compare : bool
            Whether to check that the call's keys are what the rotation gave; waits for a GPU.

        Returns
        -------
        Tensor [Hk, q, d]
            Of the call's last q positions. The call's own where the layer rotated nothing.

        Raises
        ------
        TraceError
            If what was rotated is not those keys.
        """
        last, self._last = self._last, None
        new = call.key[:, -call.query.shape[1] :]
        if last is None:
            return new
        before, after = last
        rotated = before.shape[-1]
        same = before.ndim == 4 and before.shape[:3] == (1, *new.shape[:2]) and rotated <= new.shape[-1]
        if not same or (compare and not torch.equal(after[0].to(new.dtype), new[..., :rotated])):
            raise TraceError(
                f"pre_rope_keys: layer {layer} ({type(call.module).__name__}) does more to its keys than {_NAME}, so "
                "those before the rotary embedding cannot be recorded"
            )
        return before[0] if rotated == new.shape[-1] else torch.cat([before[0], new[..., rotated:]], dim=-1)


_tap: ContextVar[RotaryTap | None] = ContextVar("kvsim_rotary_tap", default=None)
_lock = threading.Lock()
_replaced: dict[int, tuple[Any, int]] = {}
"""The function of each file that is replaced now, and by how many recordings."""


def _scope(module: torch.nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = getattr(inspect.unwrap(type(module).forward), "__globals__", {})
    return found


def _takes_keys(scope: dict[str, Any]) -> bool:
    function = scope.get(_NAME)
    return callable(function) and {"q", "k"} <= inspect.signature(function).parameters.keys()


def _install(scope: dict[str, Any]) -> None:
    with _lock:
        original, count = _replaced.get(id(scope), (scope[_NAME], 0))
        _replaced[id(scope)] = original, count + 1
        if not count:
            scope[_NAME] = _watched(original)


def _remove(scope: dict[str, Any]) -> None:
    with _lock:
        original, count = _replaced.pop(id(scope))
        if count > 1:
            _replaced[id(scope)] = original, count - 1
        else:
            scope[_NAME] = original


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def rotate(*args: Any, **kwargs: Any) -> Any:
        rotated = original(*args, **kwargs)
        tap = _tap.get()
        if tap is not None:
            tap.saw(signature.bind(*args, **kwargs).arguments["k"], rotated[1])
        return rotated

    return rotate
