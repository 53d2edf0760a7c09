"""Attention rows and prompt mass against the full L x L softmax written out in float64."""

import pytest
import torch
from kvsim_kernels.attention_rows import attention_row, prompt_mass

torch.set_num_threads(1)
LENGTH, DIM = 37, 8


def inputs(heads, kv_heads, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(heads, LENGTH, DIM, generator=generator)
    keys = torch.randn(kv_heads, LENGTH, DIM, generator=generator)
    return queries.to(dtype), keys.to(dtype)


def full(queries, keys, scaling, softcap=None, window=None, chunk=None, sinks=None):
    """All rows at once, [H, L, L] float64: the matrix the kernels never build."""
    keys = keys.double().repeat_interleave(len(queries) // len(keys), dim=0)
    logits = torch.einsum("hid,hjd->hij", queries.double(), keys) * scaling
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    seen = j <= i
    if window is not None:
        seen &= i - j < window
    if chunk is not None:
        seen &= i // chunk == j // chunk
    weights = torch.where(seen, logits.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    return weights / (total if sinks is None else total + sinks.double().exp()[:, None, None])


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": True}, {"softcap": 1.5, "sinks": True}], ids=str)
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_row_is_last_row_of_the_full_matrix(heads, kv_heads, options, scaling):
    queries, keys = inputs(heads, kv_heads)
    sinks = torch.linspace(-1, 2, heads) if options.get("sinks") else None
    softcap = options.get("softcap")
    row = attention_row(queries[:, -1], keys, scaling=scaling, softcap=softcap, sink_logits=sinks)
    expected = full(queries, keys, scaling or DIM**-0.5, softcap, sinks=sinks)[:, -1]
    assert row.dtype == torch.float32
    torch.testing.assert_close(row.double(), expected, rtol=0, atol=1e-6)
    if sinks is None:
        torch.testing.assert_close(row.sum(-1), torch.ones(heads))
    else:
        assert (row.sum(-1) < 1).all()


def test_masks():
    queries, keys = inputs(4, 2)
    seen = torch.arange(LENGTH) >= 30
    expected = full(queries, keys, DIM**-0.5, window=LENGTH - 30)[:, -1].float()
    boolean = attention_row(queries[:, -1], keys, mask=seen)
    additive = torch.zeros(LENGTH).masked_fill(~seen, torch.finfo(torch.bfloat16).min).to(torch.bfloat16)
    per_head = seen.expand(4, LENGTH)
    for row in (
        boolean,
        attention_row(queries[:, -1], keys, mask=additive),
        attention_row(queries[:, -1], keys, mask=per_head),
    ):
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-6)
        assert (row[:, :30] == 0).all()


def test_row_of_half_precision_is_computed_in_float32_and_can_be_float64():
    queries, keys = inputs(6, 2, torch.bfloat16)
    expected = full(queries, keys, DIM**-0.5)[:, -1]
    torch.testing.assert_close(attention_row(queries[:, -1], keys).double(), expected, rtol=0, atol=1e-6)
    exact = attention_row(queries[:, -1], keys, dtype=torch.float64)
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2)])
@pytest.mark.parametrize("block", [None, 1, 5, LENGTH, 100])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 4}, {"window": 50}, {"chunk": 8}, {"softcap": 1.0}, {"sinks": True}, {"window": 3, "sinks": True}],
    ids=str,
)
def test_mass_is_the_column_sum_of_the_full_matrix(heads, kv_heads, block, options):
    queries, keys = inputs(heads, kv_heads)
    sinks = torch.linspace(-1, 2, heads) if options.get("sinks") else None
    window, chunk, softcap = (options.get(key) for key in ("window", "chunk", "softcap"))
    before = queries.clone(), keys.clone()
    mass = prompt_mass(
        queries, keys, softcap=softcap, sliding_window=window, chunk_size=chunk, sink_logits=sinks, block=block
    )
    expected = full(queries, keys, DIM**-0.5, softcap, window, chunk, sinks).sum(1)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass.double(), expected, rtol=0, atol=2e-5)
    assert torch.equal(queries, before[0])
    assert torch.equal(keys, before[1])
    if sinks is None:
        torch.testing.assert_close(mass.sum(-1), torch.full((heads,), float(LENGTH)))


def test_mass_builds_no_square_matrix(monkeypatch):
    queries, keys = inputs(6, 2)
    largest = 0
    matmul = torch.Tensor.__matmul__

    def spy(left, right):
        nonlocal largest
        result = matmul(left, right)
        largest = max(largest, result.numel())
        return result

    monkeypatch.setattr(torch.Tensor, "__matmul__", spy)
    prompt_mass(queries, keys, block=4)
    assert 0 < largest <= 6 * 4 * LENGTH


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(5, 2, DIM), (4, 2, DIM + 1)])
def test_shapes_that_do_not_fit(heads, kv_heads, dim):
    with pytest.raises(ValueError, match="do not fit keys"):
        attention_row(torch.zeros(heads, dim), torch.zeros(kv_heads, 3, DIM))
    with pytest.raises(ValueError, match="do not fit keys"):
        prompt_mass(torch.zeros(heads, 3, dim), torch.zeros(kv_heads, 3, DIM))
