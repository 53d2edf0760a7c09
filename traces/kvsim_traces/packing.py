"""One decode step's arrays, one after the other in one buffer, so that one copy brings them from a GPU to the host."""

import math

import torch

__all__ = ["StepLayout"]

_ALIGNMENT = 256


class StepLayout:
    """Where each array of a step lies in a buffer of bytes.

    Parameters
    ----------
    capture : str
        "heads", "scores", "qk" or "qkv".
    layers, heads, kv_heads, head_dim : int
        K, H, Hk and d.
    qk_dtype : str
        "float16" or "float32", for queries, keys and values.
    pre_rope_keys : bool
        Whether the keys before the rotary embedding are among them.
    """

    def __init__(
        self,
        capture: str,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qk_dtype: str,
        pre_rope_keys: bool = False,
    ) -> None:
        number = torch.float16 if qk_dtype == "float16" else torch.float32
        # -1 stands for the positions of the step.
        self._arrays: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
            ("token", torch.int64, (1,)),
            ("row_sums", torch.float32, (layers, heads)),
        ]
        if capture == "heads":
            self._arrays.append(("attention", torch.float16, (layers, heads, -1)))
        elif capture == "scores":
            self._arrays.append(("scores", torch.float16, (layers, -1)))
        else:
            self._arrays.append(("queries", number, (layers, heads, head_dim)))
            names = ["keys", "values"] if capture == "qkv" else ["keys"]
            names += ["keys_pre"] if pre_rope_keys else []
            self._arrays.extend((name, number, (layers, kv_heads, head_dim)) for name in names)

    def nbytes(self, positions: int) -> int:
        """Count the bytes of a step that sees `positions` positions."""
        return sum(_aligned(self._size(dtype, shape, positions)) for _, dtype, shape in self._arrays)

    def views(self, buffer: torch.Tensor, positions: int) -> dict[str, torch.Tensor]:
        """View a step's arrays in a buffer.

        Parameters
        ----------
        buffer : Tensor of uint8
            At least ``nbytes(positions)`` long.
        positions : int
            n = L0 + t.

        Returns
        -------
        dict
            ``token`` [1] and ``row_sums`` [K, H]; then ``attention`` [K, H, n], ``scores`` [K, n], or ``queries``
            [K, H, d], ``keys``, ``values`` and ``keys_pre`` [K, Hk, d].
        """
        found, start = {}, 0
        for name, dtype, shape in self._arrays:
            size = self._size(dtype, shape, positions)
            whole = tuple(positions if length < 0 else length for length in shape)
            found[name] = buffer[start : start + size].view(dtype).view(whole)
            start += _aligned(size)
        return found

    @staticmethod
    def _size(dtype: torch.dtype, shape: tuple[int, ...], positions: int) -> int:
        return int(dtype.itemsize) * math.prod(positions if length < 0 else length for length in shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
