"""One pool of pages for all layers and KV heads: rings of recent tokens, and global tokens (WG-KV section 4.1)."""

from collections.abc import Sequence as Items

import torch

from kvsim.errors import KvsimError

__all__ = ["PAGE", "Pool", "PoolFullError", "pages_of"]

PAGE = 16
"""Tokens in a page."""


class PoolFullError(KvsimError):
    """No page was left where a token had to be promoted; nothing is lost, and a larger pool can go on."""


def pages_of(tokens: int) -> int:
    """Give the pages that so many tokens take."""
    return -(-tokens // PAGE)


class Pool:
    """Keys and values of all rows, a row being a KV head of a layer of a sequence.

    A row's page table starts with the pages of its ring, whose slot is the position modulo the window; the pages of its
    global tokens follow, in the order in which they were promoted.

    Parameters
    ----------
    layers, rows : int
        Layers K, and rows of each, R: sequences times KV heads.
    window : int
        W.
    most_global : int
        The most global tokens that a row can come to hold.
    pages : int
        Pages of the pool.
    dim : int
        Dimension of keys and values.
    dtype, device
        Of keys and values.

    Attributes
    ----------
    keys, values : Tensor [pages, 16, d]
        One allocation each, never enlarged while decoding.
    table : Tensor [K, R, ring pages + global pages] int32
    counts : Tensor [K, R] int32
        Global tokens.
    lengths : Tensor [K, R] int32
        Tokens of ring and global pages together.
    ring_gates : Tensor [K, R, W] float32
        Gates of the tokens in the rings, minus infinity for an empty slot.
    pointer : Tensor [K, R] int32
        The ring's slot that the next token takes.
    free : Tensor [pages] int32
        A stack of the numbers of free pages, of which the first `top` count.
    top, status : Tensor [1] int32
        `status` is set when a page was needed and there was none; from then on nothing is written.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        *,
        window: int,
        most_global: int,
        pages: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.window, self.ring_pages, self.rows = window, pages_of(window), rows
        rings = layers * rows * self.ring_pages
        if pages < rings:
            raise PoolFullError(f"a pool of {pages} pages does not hold the {rings} pages of the local windows alone")
        place = {"device": device}
        self.keys = torch.zeros(pages, PAGE, dim, dtype=dtype, **place)
        self.values = torch.zeros_like(self.keys)
        self.table = torch.zeros(layers, rows, self.ring_pages + pages_of(most_global), dtype=torch.int32, **place)
        own = torch.arange(rings, dtype=torch.int32, **place).view(layers, rows, self.ring_pages)
        self.table[:, :, : self.ring_pages] = own
        self.counts, self.lengths = torch.zeros(2, layers, rows, dtype=torch.int32, **place)
        self.ring_gates = torch.full((layers, rows, window), -torch.inf, **place)
        self.pointer = torch.zeros(layers, rows, dtype=torch.int32, **place)
        # The lowest numbers lie on top.
        self.free = torch.arange(pages - 1, -1, -1, dtype=torch.int32, **place)
        self.top = torch.tensor([pages - rings], dtype=torch.int32, **place)
        self.status = torch.zeros(1, dtype=torch.int32, **place)
        self._used = rings

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return int(self.keys.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, free pages included."""
        return int(self.keys.nbytes + self.values.nbytes)

    def used(self) -> int:
        """Pages in use; waits for the device."""
        return self.pages - int(self.top)

    def fill(
        self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor, gates: torch.Tensor, marks: torch.Tensor
    ) -> None:
        """Take the prompt of some rows of a layer (WG-KV section 4.2, initial cache population).

        Parameters
        ----------
        layer, row : int
            The layer, and its first row.
        keys, values : Tensor [Hk, n, d]
        gates : Tensor [Hk, n] float32
        marks : Tensor [Hk, n]
            Boolean: what is admitted.

        Raises
        ------
        PoolFullError
            If the pool does not hold it.
        """
        heads, length, dim = keys.shape
        recent, old = min(length, self.window), max(0, length - self.window)
        slots = torch.arange(length - recent, length, device=keys.device) % self.window
        chosen = marks[:, :old]
        counts = [int(count) for count in chosen.sum(dim=1)]
        for head in range(heads):
            number, own = counts[head], row + head
            pages = pages_of(number)
            if self._used + pages > self.pages:
                raise PoolFullError(f"a pool of {self.pages} pages does not hold the prompt; give it more")
            numbers = torch.arange(self._used, self._used + pages, dtype=torch.int32, device=keys.device)
            self.table[layer, own, self.ring_pages : self.ring_pages + pages] = numbers
            ring = self.table[layer, own, torch.div(slots, PAGE, rounding_mode="floor")].long()
            for pool, part in ((self.keys, keys), (self.values, values)):
                flat = pool.view(-1, dim)
                first = self._used * PAGE
                flat[first : first + number] = part[head, :old][chosen[head]]
                pool[ring, slots % PAGE] = part[head, old:]
            self._used += pages
        rows = slice(row, row + heads)
        self.counts[layer, rows] = torch.tensor(counts, dtype=torch.int32, device=keys.device)
        self.lengths[layer, rows] = self.counts[layer, rows] + recent
        self.ring_gates[layer, rows, slots] = gates[:, old:].float()
        self.pointer[layer, rows] = length % self.window
        self.top.fill_(self.pages - self._used)

    def enlarged(self, pages: int) -> "Pool":
        """Give a pool of `pages` pages that holds what this one holds; its status is clear.

        Raises
        ------
        KvsimError
            If it is not larger.
        """
        if pages <= self.pages:
            raise KvsimError(f"the pool has {self.pages} pages; a larger one has more than that, got {pages}")
        other = object.__new__(Pool)
        other.__dict__.update(self.__dict__)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(pages, *old.shape[1:])
            new[: self.pages] = old
            setattr(other, name, new)
        top = int(self.top)
        fresh = torch.arange(pages - 1, self.pages - 1, -1, dtype=torch.int32, device=self.free.device)
        other.free = torch.empty(pages, dtype=torch.int32, device=self.free.device)
        other.free[: fresh.numel()] = fresh
        other.free[fresh.numel() : fresh.numel() + top] = self.free[:top]
        other.top = torch.tensor([top + fresh.numel()], dtype=torch.int32, device=self.free.device)
        other.status = torch.zeros_like(self.status)
        return other


def pages_needed(marks: Items[torch.Tensor], window: int, steps: int) -> int:
    """Give the pages that prompts and any `steps` steps after them can take.

    Parameters
    ----------
    marks : sequence of Tensor [rows, n]
        What is admitted of each prompt, for all its rows.
    window : int
    steps : int
    """
    total = 0
    for own in marks:
        old = max(0, own.shape[1] - window)
        counts = own[:, :old].sum(dim=1)
        # In each step one token leaves the window, once it is full.
        total += int(torch.div(counts + steps + PAGE - 1, PAGE, rounding_mode="floor").sum())
        total += own.shape[0] * pages_of(window)
    return total
