"""Pages by hand, and against a plain simulation that writes, evicts and frees one token at a time."""

import numpy as np
import pytest

from kvsim.errors import KvsimError
from kvsim.paging import LAYOUTS, paginate


def at(evicted_at, prompt, **options):
    return paginate(np.array([evicted_at]), prompt, **options)


def test_a_page_is_free_when_its_last_token_dies():
    gone = [1, 2, 2, 3, -1, -1, -1]
    found = at(gone, 4, page_size=4)
    assert found.tokens.tolist() == [[4, 4, 3, 3]]
    # The prompt's page holds position 3 until after step 3; the next one opens with step 1's token.
    assert found.pages.tolist() == [[1, 2, 2, 1]]
    assert found.written.tolist() == [[1, 2, 2, 2]]
    assert found.visible.tolist() == [[4, 5, 5, 4]]
    assert found.evicted.tolist() == [[0, 1, 2, 1]]
    found = at(gone, 4, page_size=4, layout="compact")
    assert found.pages.tolist() == [[1, 1, 1, 1]]
    assert found.written.tolist() == [[1, 2, 2, 1]]
    # Slots 4 1 2 3 after step 1; 4 5 3 after step 2, whose token 5 and the last one fill the holes; 4 5 6 after step 3.
    assert found.moved.tolist() == [[0, 1, 2, 1]]


def test_a_page_that_is_not_full_stays():
    assert at([0, 0, -1], 2, page_size=4).pages.tolist() == [[1, 1]]
    assert at([0, 0, -1], 2, page_size=2).pages.tolist() == [[0, 1]]


def test_one_token_takes_a_page():
    found = at([-1], 1)
    assert found.tokens.tolist() == found.pages.tolist() == [[1]]
    assert 1 - 1 / (found.pages[0, 0] * found.page_size) == 15 / 16


def test_the_window_has_ring_pages_from_the_start():
    # W = 3: of positions 0..4, position 2 leaves after the prompt, 3 after step 1, 4 after step 2.
    admitted = np.array([[True, False, True, False, True, True, True]])
    gone = [2, 0, -1, 1, -1, -1, -1]
    found = at(gone, 5, page_size=2, window=3, admitted=admitted)
    assert found.visible.tolist() == [[4, 5, 5]]
    assert found.tokens.tolist() == [[4, 4, 4]]
    # Two pages of the ring; 0 and 2 share the first global page, 4 opens the next.
    assert found.pages.tolist() == [[3, 3, 4]]
    assert found.written.tolist() == [[3, 3, 3]]
    assert found.evicted.tolist() == [[0, 0, 1]]
    # Without the mask position 0 is one that was admitted, since it was there after the prompt.
    assert at(gone, 5, page_size=2, window=3).pages.tolist() == found.pages.tolist()
    compact = at(gone, 5, page_size=2, window=3, admitted=admitted, layout="compact")
    assert compact.pages.tolist() == [[3, 3, 3]]
    assert compact.moved.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize(("window", "ring"), [(1, 1), (2, 1), (3, 2), (9, 5)])
def test_windows_of_one_and_longer_than_all(window, ring):
    positions = 7
    leaves = np.maximum(0, np.arange(positions) - 4 + window)
    gone = np.where(leaves <= 3, leaves, -1)[np.newaxis]
    found = paginate(gone, 4, page_size=2, window=window, admitted=np.zeros((1, positions), dtype=bool))
    assert (found.pages == ring).all()
    assert not found.evicted.any()
    assert found.visible[0, 1:].tolist() == [min(window, 4 + t) for t in (1, 2, 3)]
    assert found.tokens[0].tolist() == [min(window - 1, 4 + t) for t in (0, 1, 2, 3)]


def test_heads_are_ragged():
    gone = np.array([[-1] * 6, [0, 0, 0, 0, -1, -1]])
    found = paginate(gone, 5, page_size=2)
    assert found.tokens.tolist() == [[5, 6], [1, 2]]
    assert found.pages.tolist() == [[3, 3], [1, 1]]


def slow(gone, prompt, size, window, admitted, layout):
    """Write, evict and free one token at a time; rows (visible, written, tokens, pages, evicted, moved) of a head."""
    steps, slots, rows = len(gone) - prompt, [], []
    ring = -(-window // size)

    def pages():
        if layout == "compact":
            return -(-sum(s is not None for s in slots) // size) + ring
        parts = [slots[i : i + size] for i in range(0, len(slots), size)]
        return sum(len(part) < size or any(s is not None for s in part) for part in parts) + ring

    for t in range(steps + 1):
        if t == 0:
            slots += [j for j in range(prompt) if not window or (j <= prompt - window and admitted[j])]
        elif not window:
            slots.append(prompt + t - 1)
        near = min(window, prompt + t) if t else min(max(0, window - 1), prompt)
        alive = sum(s is not None for s in slots)
        visible, written = alive + near, pages()
        leaving = [j for j in range(len(gone)) if gone[j] == t and (not window or admitted[j])]
        moved, left = 0, alive - len(leaving)
        places = [slots.index(j) for j in leaving]
        for place in places:
            slots[place] = None
        if layout == "compact":
            for place in places:
                if place < left:
                    while slots[-1] is None:
                        slots.pop()
                    slots[place] = slots.pop()
                    moved += 1
            del slots[left:]
        if window and t and prompt + t - window >= 0 and admitted[prompt + t - window]:
            slots.append(prompt + t - window)
        near = min(max(0, window - 1), prompt + t)
        rows.append((visible, written, sum(s is not None for s in slots) + near, pages(), len(leaving), moved))
    return np.array(rows).T


def history(rng, groups, prompt, steps, window):
    """Draw histories that admission and eviction could make."""
    positions = prompt + steps
    gone = np.full((groups, positions), -1)
    admitted = rng.random((groups, positions)) < 0.6
    born = np.maximum(0, np.arange(positions) - prompt + (window or 1))
    for g in range(groups):
        for j in range(positions):
            if window and born[j] > steps:
                continue
            if window and not admitted[g, j]:
                gone[g, j] = born[j]
            elif rng.random() < 0.7:
                first = born[j] + (1 if window and born[j] else 0)
                gone[g, j] = rng.integers(first, steps + 1) if first <= steps else -1
    return gone, admitted


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [0, 1, 3, 8, 40])
def test_random_histories_are_those_of_a_plain_simulation(layout, window):
    rng = np.random.default_rng(window)
    for prompt, steps, size in ((1, 0, 2), (9, 14, 4), (20, 11, 3), (16, 16, 16)):
        gone, admitted = history(rng, 3, prompt, steps, window)
        found = paginate(gone, prompt, page_size=size, window=window, admitted=admitted, layout=layout)
        for g in range(3):
            expected = slow(gone[g].tolist(), prompt, size, window, admitted[g], layout)
            names = ("visible", "written", "tokens", "pages", "evicted", "moved")
            for name, values in zip(names, expected, strict=True):
                assert getattr(found, name)[g].tolist() == values.tolist(), (name, prompt, steps, size, g)


@pytest.mark.parametrize(
    ("gone", "options", "message"),
    [
        ([0, 0, 0], {"page_size": 0}, "page size must be at least 1"),
        ([0, 0, 0], {"page_size": 10**30}, "page size and window must be at most 2147483648 tokens"),
        ([-1, -1, -1], {"window": 10**18 - 1}, "must be at most 2147483648 tokens, got 16 and 999999999999999999"),
        ([0, 0, 0], {"window": -1}, "window at least 0"),
        ([0, 0, 0], {"layout": "heap"}, "unknown layout 'heap' (valid: append, compact)"),
        ([0, 9, -1], {}, "goes to step 1"),
        ([-1, -1, 0], {}, "group 0: position 2 is gone before it can be"),
        ([-1, 1, -1], {"window": 2}, "position 1 is gone before it can be"),
        ([-1, 0, -1], {"window": 3}, "position 1 is gone before it can be"),
    ],
)
def test_what_cannot_be_is_refused(gone, options, message):
    mask = np.ones((1, 3), dtype=bool) if options.get("window", 0) > 0 else None
    with pytest.raises(KvsimError) as error:
        at(gone, 2, admitted=mask, **options)
    assert message in str(error.value)
