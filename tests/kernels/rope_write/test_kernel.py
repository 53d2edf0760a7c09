"""Norm, rotation and writing: the kernel against the reference, and the reference against transformers."""

import pytest
import torch
from kernel_cases import DEVICE, TYPES, ints, normal
from kvsim_kernels.rope_write import rope_write as reference
from kvsim_kernels.rope_write.kernel import rope_write
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

FIRST = 40


def inputs(batch, heads, kv_heads, dim, turned, slots=9, value_dim=None, dtype=torch.float32):
    value_dim = value_dim or dim
    joined = normal(batch, (heads + kv_heads) * dim + kv_heads * value_dim, seed=1, dtype=dtype)
    query, key, value = joined.split([heads * dim, kv_heads * dim, kv_heads * value_dim], dim=1)
    angles = normal(7, turned // 2, seed=2).repeat(1, 2)
    given = {
        "query": query.view(batch, heads, dim),
        "key": key.view(batch, kv_heads, dim),
        "value": value.view(batch, kv_heads, value_dim),
        "keys": normal(batch, kv_heads, slots, dim, seed=3, dtype=dtype),
        "values": normal(batch, kv_heads, slots, value_dim, seed=4, dtype=dtype),
        "new_slots": ints(*([3, -1, 5][:batch])).view(-1, 1),
        "positions": ints(*([FIRST, FIRST + 6, FIRST + 2][:batch])),
        "first_position": FIRST,
    }
    return given | {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}


def both(given, close):
    theirs, mine = ({name: x.clone() if hasattr(x, "clone") else x for name, x in given.items()} for _ in range(2))
    wanted, found = reference(**theirs), rope_write(**mine)
    if wanted is not None:
        torch.testing.assert_close(found, wanted, **close)
    for name in ("keys", "values", "value_norms"):
        if name in given:
            torch.testing.assert_close(mine[name], theirs[name], **close)
    return found, mine


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "dim", "turned"), [(1, 4, 2, 64, 64), (3, 3, 1, 80, 80), (2, 2, 2, 128, 96)]
)
def test_shapes(batch, heads, kv_heads, dim, turned, dtype):
    given = inputs(batch, heads, kv_heads, dim, turned, dtype=dtype)
    close = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    both(given, close)
    weights = {"query_norm": normal(dim, seed=5, dtype=dtype), "key_norm": normal(dim, seed=6, dtype=dtype)}
    norms = normal(batch, kv_heads, 9, seed=7)
    both(given | weights | {"eps": 1e-5, "value_norms": norms}, close)


def test_only_the_new_slot_of_each_head_is_written():
    given = inputs(2, 4, 2, 16, 16) | {"new_slots": ints(1, 2, 3, -1).view(2, 2)}
    before = given["keys"].clone(), given["values"].clone()
    _, after = both(given, {"rtol": 1e-6, "atol": 1e-6})
    for old, new in zip(before, (after["keys"], after["values"]), strict=True):
        changed = torch.nonzero((old != new).any(-1))
        assert changed.tolist() == [[0, 0, 1], [0, 1, 2], [1, 0, 3]]


def test_without_tables_vectors_are_written_as_they_are():
    given = inputs(1, 2, 2, 16, 16, value_dim=24)
    for name in ("query", "cos", "sin", "positions"):
        del given[name]
    found, after = both(given, {"rtol": 0, "atol": 0})
    assert found is None
    assert torch.equal(after["keys"][0, :, 3], given["key"][0])
    assert torch.equal(after["values"][0, :, 3], given["value"][0])


def test_the_reference_turns_as_transformers_does():
    given = inputs(1, 2, 1, 16, 16)
    cos, sin = given["cos"][:1, None], given["sin"][:1, None]
    query, key = apply_rotary_pos_emb(given["query"][:, :, None], given["key"][:, :, None], cos, sin)
    found = reference(**given)
    torch.testing.assert_close(found, query[:, :, 0])
    torch.testing.assert_close(given["keys"][:, :, 3], key[:, :, 0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"new_slots": ints(1, 2).view(1, 2)}, "new_slots of shape"),
        ({"sin": None}, "come together"),
        ({"keys": torch.zeros(1, 1, 9, 8, device=DEVICE)}, "do not fit a cache"),
        ({"query": torch.zeros(1, 2, 8, device=DEVICE)}, "a query of shape"),
        ({"cos": torch.zeros(7, 18, device=DEVICE), "sin": torch.zeros(7, 18, device=DEVICE)}, "an even number"),
    ],
)
def test_what_does_not_fit(change, message):
    for write in (rope_write, reference):
        with pytest.raises(ValueError, match=message):
            write(**inputs(1, 2, 1, 16, 16) | change)
