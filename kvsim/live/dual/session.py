"""A batch being decoded in the dual cache: promotion, attention and gates of all layers, no host in between."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch
from kvsim_kernels.paged_decode.kernel import paged_decode

from kvsim.errors import KvsimError
from kvsim.live.dual.doors import door_of
from kvsim.live.dual.pool import Compact, Pool, PoolFullError
from kvsim.live.dual.stage import Stage
from kvsim.live.fast.session import Session
from kvsim.live.fast.slots import Growth, Ring, Slots, growing_slots, ring_slots
from kvsim.live.prefix import Prefix
from kvsim.live.sequence import NEAR
from kvsim.policy import Policy

__all__ = ["DualSession"]


class DualSession(Session):
    """Prompts under one admission, decoded in one pool of pages.

    A step begins with what leaves the local windows, which is promoted or gone in all eligible layers at once. New keys
    and values are written into the rings, where queries attend to them and to the global pages; at the end the gates of
    all new keys are computed, which are not needed before these leave in their turn. When the pool has no page left,
    nothing is overwritten from that step on, and it is undone as soon as that is read: `check` raises `PoolFullError`,
    `grow` enlarges the pool, and decoding goes on with that step.

    Parameters
    ----------
    model, prefixes, policies, steps, forced, fused, graphs
        See `kvsim.live.fast.session.Session`; policies are ``full`` with one ``admit=`` for all rows.
    pool_pages : int, optional
        Pages of the pool; by default as many as the prompts and `steps` steps can need.

    Attributes
    ----------
    pool : Pool

    Raises
    ------
    PolicyError
        On a policy that does more than admit.
    PoolFullError
        If the pool does not hold the prompts.
    """

    def __init__(
        self,
        model: Any,
        prefixes: Items[Prefix],
        policies: Items[Policy],
        *,
        steps: int,
        forced: Items[int] | None = None,
        fused: bool | None = None,
        graphs: bool | None = None,
        pool_pages: int | None = None,
    ) -> None:
        self._pool_pages = pool_pages
        super().__init__(model, prefixes, policies, steps=steps, forced=forced, fused=fused, graphs=graphs)

    def _seat(self, prefixes: Items[Prefix]) -> list[Slots]:
        keeper = prefixes[0].keeper
        if keeper is None:
            raise KvsimError(f"{self.sequences[0].policy}: admits everything; the dual cache is for admit=")
        first, steps = prefixes[0].layers[0], self.sequences[0].steps
        kv_heads, device = first.keys.shape[0], first.keys.device
        batch, depth = len(prefixes), len(prefixes[0].eligible)
        self.keeper, self._kv_heads = keeper, kv_heads
        self.door = door_of(keeper, [prefix.length for prefix in prefixes], steps, kv_heads, device)
        own_pool = getattr(prefixes[0], "pool", None)
        if own_pool is None:
            longest = max(prefix.length for prefix in prefixes)
            stage = Stage(keeper.window, batch, steps=steps, pages=self._pool_pages, length=longest)
            for row, prefix in enumerate(prefixes):
                for place, index in enumerate(prefix.eligible):
                    stage.take(place, row, self._compact(prefix, place, index))
            own_pool = stage.pool()
        elif any(getattr(prefix, "pool", None) is not own_pool for prefix in prefixes):
            raise KvsimError("prompts of one batch must have been read into one pool")
        self._take(own_pool, batch * kv_heads, steps)
        self.gates = torch.zeros(depth, steps + 1, batch * kv_heads, device=device)
        self._new_slots = torch.zeros(depth, batch, kv_heads, dtype=torch.int32, device=device)
        self._full = torch.zeros(steps + 1, dtype=torch.int32, device=device)
        self._is_stuck = False
        if any(layer.info.sliding_window is not None for layer in prefixes[0].layers):
            # What a windowed layer's ring has overwritten cannot be undone.
            self.read_back = 1
        keys, values = self._rings()
        growths: dict[tuple[int, ...], Growth] = {}
        rings: dict[tuple[int, bool], Ring] = {}
        found: list[Slots] = []
        for index, layer in enumerate(prefixes[0].layers):
            window, chunked = layer.info.sliding_window, layer.info.type == "chunked_attention"
            if layer.sink_logits is not None:
                raise KvsimError("the dual cache does not run softmax sinks; the plain engine can (engine 'plain')")
            if window is not None:
                ring = rings.setdefault((window, chunked), Ring(self.clock, window, chunked=chunked))
                positions = max(prefix.length for prefix in prefixes) + steps
                found.append(ring_slots(prefixes, index, ring, positions))
            elif layer.info.eligible:
                place = prefixes[0].eligible.index(index)
                slots = self._new_slots[place]
                found.append(Slots(layer, keys[place], values[place], slots[:, 0], slots, ordinal=place))
            else:
                found.append(growing_slots(prefixes, self.sequences, index, growths))
        self._movers = [*growths.values(), *rings.values()]
        return found

    def _take(self, pool: Pool, rows: int, steps: int) -> None:
        """Decode in this pool."""
        if pool.is_taken:
            raise KvsimError("this pool has been decoded in; read the prompt again")
        if pool.rows != rows or pool.steps < steps:
            raise KvsimError(
                f"the pool is for {pool.rows} rows and {pool.steps} steps, this batch has {rows} and takes {steps}"
            )
        pool.is_taken = True
        self.pool = pool

    def _compact(self, prefix: Prefix, place: int, index: int) -> Compact:
        """Cut one layer of a prompt down to what was admitted and the last window."""
        own, known = prefix.layers[index], prefix.admitted
        assert known is not None
        groups, device = slice(place * self._kv_heads, (place + 1) * self._kv_heads), own.keys.device
        marks = torch.from_numpy(known.admitted[groups]).to(device)
        gates = marks.float() if known.scores is None else torch.from_numpy(known.scores[groups]).to(device)
        return Compact.of(own.keys, own.values, gates, marks, known.window)

    def _rings(self) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.pool
        return pool.rings(pool.keys, self._kv_heads), pool.rings(pool.values, self._kv_heads)

    def _forward(self, scored: bool) -> None:
        pool = self.pool
        pool.make_room(self._new_slots.flatten(), self.door.tau)
        self._full.index_copy_(0, self.clock.at, pool.status)
        super()._forward(scored)
        gates = self.door.gates(self._rings()[0], self._new_slots, self.clock.last).flatten(1)
        pool.judge(self._new_slots.flatten(1), gates)
        self.gates.index_copy_(1, self.clock.at, gates.unsqueeze(1))

    def _attend(self, own: Slots, query: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if own.ordinal is None:
            return super()._attend(own, query, out)
        place, pool = own.ordinal, self.pool
        batch, heads, dim = query.shape
        rows = batch * self._kv_heads
        info = own.info.info
        found = paged_decode(
            query.reshape(rows, heads // self._kv_heads, dim), pool.keys, pool.values, pool.table[place],
            pool.lengths[place], scaling=info.scaling, softcap=info.softcap, ring=pool.window,
            out=None if out is None else out.view(rows, heads // self._kv_heads, dim),
        )  # fmt: skip
        return found.view(batch, heads, dim)

    def _undo(self) -> Callable[[], None]:
        return self.pool.undo()

    def step(self) -> None:
        """See `Session.step`.

        Raises
        ------
        PoolFullError
            If the pool was found full and has not grown.
        """
        if self._is_stuck:
            raise PoolFullError("the pool is full; give it more pages (grow) before the next step")
        super().step()

    def check(self) -> None:
        """Read whether the pool has been enough; waits for the device.

        Raises
        ------
        PoolFullError
            If it has not; the session stands before the step that needed more.
        """
        if not int(self.pool.status):
            return
        pages, steps = self.pool.pages, self.sequences[0].steps
        self._rewind()
        raise PoolFullError(
            f"the pool of {pages} pages is full after step {self.done} of {steps}; nothing is lost, and a larger pool "
            "can go on from there"
        )

    def grow(self, pages: int) -> None:
        """Go on in a pool of so many pages, larger than the one there is."""
        self.pool = self.pool.enlarged(pages)
        self._is_stuck = False
        self._graphs.clear()
        self._warm.clear()
        keys, values = self._rings()
        for own in self.layers:
            if own.ordinal is not None:
                own.keys, own.values = keys[own.ordinal], values[own.ordinal]
        self._use()

    def _rewind(self) -> None:
        """Go back to before the step that found no page."""
        step = int(self._full.nonzero()[0])
        back = self.done - (step - 1)
        self.done, self._is_stuck = step - 1, True
        self.clock.last -= back
        self.clock.at -= back
        self.tokens.copy_(self.history[step])
        self._full.zero_()
        for mover in self._movers:
            mover.retreat(back)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the pool, free pages included, and of the other layers' slots."""
        return self.pool.nbytes + sum(own.nbytes for own in self.layers if own.ordinal is None)

    def adopt(self, row: int, end: int) -> None:
        """See `Session.adopt`."""
        heads = self._kv_heads
        gates = self.gates[:, 1 : end + 1, row * heads : (row + 1) * heads].transpose(1, 2).flatten(0, 1).cpu().numpy()
        near = int((np.abs(gates - self.door.tau) < NEAR).sum())
        self.sequences[row].adopt_gates(gates, gates >= np.float32(self.door.tau), near_ties=near)

    def close(self) -> None:
        """See `Session.close`."""
        super().close()
        del self.pool
