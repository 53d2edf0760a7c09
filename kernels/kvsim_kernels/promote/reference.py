"""Lazy promotion in plain PyTorch."""

import torch

from kvsim_kernels.paged_decode import PAGE

__all__ = ["EXHAUSTED", "TABLE_FULL", "check", "promote"]

EXHAUSTED = 1
TABLE_FULL = 2


def check(
    pool_keys: torch.Tensor,
    pool_values: torch.Tensor,
    ring_gates: torch.Tensor,
    table: torch.Tensor,
    pointer: torch.Tensor,
    counts: torch.Tensor,
    new_slots: torch.Tensor,
    lengths: torch.Tensor | None,
    window: int,
) -> int:
    """Return the pages of a ring, or raise ValueError unless shapes fit."""
    rows = len(counts)
    if pool_keys.shape != pool_values.shape or pool_keys.ndim != 3 or pool_keys.shape[1] != PAGE:
        raise ValueError(
            f"pools of shapes {tuple(pool_keys.shape)} and {tuple(pool_values.shape)} must both be [P, {PAGE}, d]"
        )
    if window < 1 or ring_gates.shape != (rows, window):
        raise ValueError(f"ring_gates of shape {tuple(ring_gates.shape)} must be [{rows}, window={window}]")
    each = [counts, new_slots, *([] if lengths is None else [lengths])]
    if any(x.shape != (rows,) for x in each) or pointer.shape not in ((1,), (rows,)):
        raise ValueError(f"counts, new_slots and lengths must be [{rows}] and pointer [1] or [{rows}]")
    pages = -(-window // PAGE)
    if table.ndim != 2 or len(table) != rows or table.shape[1] < pages:
        raise ValueError(f"a table of shape {tuple(table.shape)} does not hold {rows} rings of {pages} pages")
    return pages


def promote(
    pool_keys: torch.Tensor,
    pool_values: torch.Tensor,
    ring_gates: torch.Tensor,
    table: torch.Tensor,
    pointer: torch.Tensor,
    counts: torch.Tensor,
    free: torch.Tensor,
    top: torch.Tensor,
    status: torch.Tensor,
    new_slots: torch.Tensor,
    *,
    window: int,
    tau: float,
    lengths: torch.Tensor | None = None,
) -> None:
    """Make room for a step's keys and values in the rings: what leaves is promoted or gone (WG-KV, section 4.3).

    In place. The token under a row's pointer, its oldest, is appended to the row's global pages if its gate is at least
    `tau`; so global tokens lie in order of position. Its slot is the new token's, whose key, value and gate the caller
    writes there. If pages or the table do not suffice for all rows, `status` is set, all `new_slots` are -1 and nothing
    else is written, and a call with `status` set does the same: no token is lost, and once there are more pages and
    `status` is 0 again the step can be repeated.

    Parameters
    ----------
    pool_keys, pool_values : Tensor [P, 16, d]
        Pages of all rows.
    ring_gates : Tensor [R, window]
        Gate scores, 0 to 1, of what lies in the ring; below 0 for an empty slot.
    table : Tensor [R, M] int32
        Pages of each row: ``ceil(window / 16)`` of its ring, then those of its global tokens.
    pointer : Tensor [1] or [R] int32
        The slot of the ring to empty, of all rows or of each; moves on by one, modulo the window.
    counts : Tensor [R] int32
        Global tokens of each row.
    free : Tensor [F] int32
        Stack of free pages; the rows that need one take it from the top, in the order of the rows.
    top : Tensor [1] int32
        Pages on the stack.
    status : Tensor [1] int32
        Set to 1 if pages do not suffice, to 2 if a row's table is full.
    new_slots : Tensor [R] int32
        Where to say which slot of its ring each row's new token goes to.
    window : int
        Slots of a ring.
    tau : float
        Least gate score that is promoted, compared in float32.
    lengths : Tensor [R] int32, optional
        Tokens of each row, in ring and global pages, the new one among them; kept up to date for
        `kvsim_kernels.paged_decode`.

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    pages = check(pool_keys, pool_values, ring_gates, table, pointer, counts, new_slots, lengths, window)
    new_slots.fill_(-1)
    if int(status):
        return
    rows = len(counts)
    at = pointer.expand(rows).tolist()
    victims = [float(ring_gates[row, at[row]]) for row in range(rows)]
    least = max(float(torch.tensor(tau, dtype=torch.float32)), 0)
    promoted = [row for row in range(rows) if victims[row] >= least]
    opening = [row for row in promoted if int(counts[row]) % PAGE == 0]
    if any(pages + int(counts[row]) // PAGE >= table.shape[1] for row in opening):
        status.fill_(TABLE_FULL)
    elif len(opening) > int(top):
        status.fill_(EXHAUSTED)
    if int(status):
        return
    for row in range(rows):
        page, slot = int(table[row, at[row] // PAGE]), at[row] % PAGE
        if row in promoted:
            count = int(counts[row])
            if row in opening:
                top -= 1
                table[row, pages + count // PAGE] = free[int(top)]
            there = int(table[row, pages + count // PAGE])
            for pool in (pool_keys, pool_values):
                pool[there, count % PAGE] = pool[page, slot]
            counts[row] += 1
        if lengths is not None and (row in promoted or victims[row] < 0):
            lengths[row] += 1
    new_slots.copy_(pointer.expand(rows))
    pointer.copy_((pointer + 1) % window)
