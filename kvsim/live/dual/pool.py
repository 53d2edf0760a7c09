"""One pool of pages for all layers and KV heads: rings of recent tokens, and global tokens (WG-KV section 4.1)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from kvsim_kernels.promote.kernel import promote

from kvsim.errors import KvsimError

__all__ = ["PAGE", "Compact", "Pool", "PoolFullError", "pages_of"]

PAGE = 16
"""Tokens in a page."""


class PoolFullError(KvsimError):
    """No page was left where a token had to be promoted; nothing is lost, and a larger pool can go on."""


def pages_of(tokens: int) -> int:
    """Give the pages that so many tokens take."""
    return -(-tokens // PAGE)


@dataclass
class Compact:
    """What is left of one layer's prompt.

    Attributes
    ----------
    keys, values : Tensor [N, d]
        What was admitted of the positions before the last window, head after head, in order of position.
    counts : list of int
        How many of them each KV head has.
    recent_keys, recent_values : Tensor [Hk, r, d]
        The last window, or all of a shorter prompt.
    gates : Tensor [Hk, r]
        Their gates.
    length : int
        Positions of the prompt.
    """

    keys: torch.Tensor
    values: torch.Tensor
    counts: list[int]
    recent_keys: torch.Tensor
    recent_values: torch.Tensor
    gates: torch.Tensor
    length: int

    @classmethod
    def of(
        cls, keys: torch.Tensor, values: torch.Tensor, gates: torch.Tensor, marks: torch.Tensor, window: int
    ) -> "Compact":
        """Cut a prompt down: keys and values [Hk, n, d], gates and what is admitted [Hk, n]."""
        length = keys.shape[1]
        old = max(0, length - window)
        chosen = marks[:, :old]
        counts = [int(count) for count in chosen.sum(dim=1)]
        return cls(
            keys[:, :old][chosen], values[:, :old][chosen], counts,
            keys[:, old:].clone(), values[:, old:].clone(), gates[:, old:].clone(), length,
        )  # fmt: skip

    def pages(self, window: int, steps: int) -> int:
        """Give the pages that it and any `steps` steps after it can take."""
        # In each step one token leaves the window, once it is full.
        return sum(pages_of(count + steps) + pages_of(window) for count in self.counts)


class Pool:
    """Keys and values of all rows, a row being a KV head of a layer of a sequence.

    A row's page table starts with the pages of its ring, whose slot is the position modulo the window; the pages of its
    global tokens follow, in the order in which they were promoted. The rings are the first pages, row after row.

    Parameters
    ----------
    layers, rows : int
        Layers K, and rows of each, R: sequences times KV heads.
    window : int
        W.
    most_global : int
        The most global tokens that a row can come to hold.
    steps : int
        The most decode steps that it is for.
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
    is_taken : bool
        Whether a session decodes in it.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        *,
        window: int,
        most_global: int,
        steps: int,
        pages: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.window, self.ring_pages, self.rows, self.steps = window, pages_of(window), rows, steps
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
        self.is_taken = False
        self._used = rings

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return int(self.keys.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, free pages included."""
        return int(self.keys.nbytes + self.values.nbytes)

    def rings(self, pool: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Give the rings as slots [K, batch, Hk, slots, d], a view of `keys` or `values`."""
        layers = self.table.shape[0]
        own = pool[: layers * self.rows * self.ring_pages]
        return own.view(layers, self.rows // kv_heads, kv_heads, self.ring_pages * PAGE, pool.shape[2])

    def used(self) -> int:
        """Pages in use; waits for the device."""
        return self.pages - int(self.top)

    def make_room(self, new_slots: torch.Tensor, tau: float) -> None:
        """Let the oldest token of every full ring go or be promoted.

        Which slots new tokens take is written to `new_slots` [K * R] int32: -1 once a page was needed and none left.
        """
        promote(
            self.keys, self.values, self.ring_gates.flatten(0, 1), self.table.flatten(0, 1), self.pointer.flatten(),
            self.counts.flatten(), self.free, self.top, self.status, new_slots, window=self.window, tau=tau,
            lengths=self.lengths.flatten(),
        )  # fmt: skip

    def judge(self, new_slots: torch.Tensor, gates: torch.Tensor) -> None:
        """Note the gates [K, R] of the tokens in `new_slots` [K, R], but for those that are -1."""
        slots = new_slots.clamp(min=0).long().unsqueeze(2)
        known = self.ring_gates.gather(2, slots)
        self.ring_gates.scatter_(2, slots, torch.where(new_slots.unsqueeze(2) < 0, known, gates.unsqueeze(2)))

    def fill(self, layer: int, row: int, prompt: "Compact") -> None:
        """Take the prompt of one sequence in a layer, whose first row is `row` (WG-KV section 4.2).

        Raises
        ------
        PoolFullError
            If the pool does not hold it.
        """
        heads, recent, dim = prompt.recent_keys.shape
        device = self.keys.device
        slots = torch.arange(prompt.length - recent, prompt.length, device=device) % self.window
        start = 0
        for own, number in enumerate(prompt.counts, row):
            pages = pages_of(number)
            if self._used + pages > self.pages:
                raise PoolFullError(f"a pool of {self.pages} pages does not hold the prompt; give it more")
            numbers = torch.arange(self._used, self._used + pages, dtype=torch.int32, device=device)
            self.table[layer, own, self.ring_pages : self.ring_pages + pages] = numbers
            ring = self.table[layer, own, torch.div(slots, PAGE, rounding_mode="floor")].long()
            for pool, old, new in (
                (self.keys, prompt.keys, prompt.recent_keys),
                (self.values, prompt.values, prompt.recent_values),
            ):
                first = self._used * PAGE
                pool.view(-1, dim)[first : first + number] = old[start : start + number]
                pool[ring, slots % PAGE] = new[own - row]
            self._used += pages
            start += number
        rows = slice(row, row + heads)
        self.counts[layer, rows] = torch.tensor(prompt.counts, dtype=torch.int32, device=device)
        self.lengths[layer, rows] = self.counts[layer, rows] + recent
        self.ring_gates[layer, rows, slots] = prompt.gates.float()
        self.pointer[layer, rows] = prompt.length % self.window
        self.top.fill_(self.pages - self._used)

    def undo(self) -> Callable[[], None]:
        """Give what undoes the next step of all layers, from a copy of what it overwrites.

        Pages that the step gives out stay in the tables, where a repeated step writes them again.
        """
        names = ("counts", "lengths", "ring_gates", "pointer", "top", "status")
        before = {name: getattr(self, name).clone() for name in names}
        page = self.table.gather(2, torch.div(self.pointer, PAGE, rounding_mode="floor").long().unsqueeze(2))
        place = page[:, :, 0].long(), (self.pointer % PAGE).long()
        keys, values = self.keys[place], self.values[place]

        def restore() -> None:
            for name, old in before.items():
                getattr(self, name).copy_(old)
            self.keys[place], self.values[place] = keys, values

        return restore

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
