"""Decode steps out of a CUDA graph: lengths, coefficients and slots change in between. Without a GPU the same calls."""

import torch
from kernel_cases import DEVICE, error, ints, normal
from kvsim_kernels import decode_attention as attention_references
from kvsim_kernels import score_update as score_references
from kvsim_kernels import select as select_references
from kvsim_kernels.decode_attention.kernel import decode_attention
from kvsim_kernels.launch import SERIAL
from kvsim_kernels.linear.kernel import linear
from kvsim_kernels.rope_write.kernel import rope_write
from kvsim_kernels.score_update.kernel import score_update, unscored_update
from kvsim_kernels.select.kernel import select_evicted

LAYERS, HEADS, KV_HEADS, DIM, SLOTS = 2, 4, 2, 64, 48


def captured(call):
    """Give a function that does what `call` does."""
    if DEVICE == "cpu":
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def test_steps_from_one_graph():
    keys, values = normal(LAYERS, 1, KV_HEADS, SLOTS, DIM, seed=1), normal(LAYERS, 1, KV_HEADS, SLOTS, DIM, seed=2)
    queries = torch.empty(LAYERS, 1, HEADS, DIM, device=DEVICE)
    outputs, logits = torch.empty_like(queries), torch.empty(LAYERS, 1, HEADS, SLOTS, device=DEVICE)
    lse, state = torch.empty(LAYERS, 1, HEADS, device=DEVICE), torch.zeros(1, 1, SLOTS, device=DEVICE)
    a, b = torch.zeros(2, LAYERS, device=DEVICE)
    positions = torch.arange(SLOTS, device=DEVICE, dtype=torch.int32).view(1, 1, -1).contiguous()
    lengths, last, new, gone = ints(1), ints(0), ints(0).view(1, 1), ints(0).view(1, 1)
    limits = ints(40, 2, 4).view(1, 1, 3)

    def step():
        for layer in range(LAYERS):
            decode_attention(
                queries[layer], keys[layer], values[layer], lengths, with_logits=True, out=outputs[layer],
                logits=logits[layer], lse=lse[layer],
            )  # fmt: skip
        score_update(state, logits, lse, lengths, a, b, new_slots=new)
        gone.copy_(select_evicted(state, positions, lengths, limits, last).slots)

    def unscored_step():
        unscored_update(state, lengths, new)
        gone.copy_(select_evicted(state, positions, lengths, limits, last).slots)

    scored, unscored = captured(step), captured(unscored_step)
    exact = torch.zeros(1, 1, SLOTS, device=DEVICE, dtype=torch.float64)
    state.zero_()
    slot, used, evicted = 30, 30, []
    for t in range(14):
        # The new position goes to the end until the cache is full, and then where another has left.
        used = max(used, slot + 1)
        for tensor, number in ((lengths, used), (last, 100 + t), (new, slot)):
            tensor.fill_(number)
        positions[0, 0, slot] = 100 + t
        keys[:, :, :, slot], values[:, :, :, slot] = normal(LAYERS, 1, KV_HEADS, DIM, seed=t), float(t)
        queries.copy_(normal(LAYERS, 1, HEADS, DIM, seed=50 + t) * 2)
        a.copy_(torch.linspace(0.3, 0.9, LAYERS) - t / 50)
        b.copy_(1 - a)
        if t % 4 == 3:
            unscored()
            score_references.unscored_update(exact, lengths, new)
        else:
            scored()
            found = [
                attention_references.decode_attention(*given, lengths, with_logits=True, dtype=torch.float64)
                for given in zip(queries, keys, values, strict=True)
            ]
            assert error(outputs, torch.stack([one.output for one in found])) < 2e-6
            score_references.score_update(
                exact, torch.stack([one.logits for one in found]), torch.stack([one.lse for one in found]), lengths,
                a.double(), b.double(), new_slots=new,
            )  # fmt: skip
        assert error(state[..., :used], exact[..., :used]) < 2e-6
        expected = select_references.select_evicted(exact, positions, lengths, limits, last).slots.item()
        assert gone.item() == expected
        evicted.append(expected)
        slot = used if expected < 0 else expected
    assert evicted[:10] == [-1] * 10
    assert min(evicted[10:]) >= 0


def test_kernels_that_start_early_wait_for_what_they_read(monkeypatch):
    """A chain in which each kernel reads what the one before wrote, and buffers are used again."""
    width, heads = (512, 4) if DEVICE == "cuda" else (64, 1)
    dim = width // heads
    w = [normal(width, width, seed=seed) * width**-0.5 for seed in range(4)]
    keys, values = normal(2, 1, heads, SLOTS, dim, seed=7)
    start, lengths, new = normal(1, width, seed=8), ints(SLOTS), ints(3).view(1, 1)
    x, y, found = start.clone(), torch.empty_like(start), torch.empty(1, heads, dim, device=DEVICE)

    def step():
        for _ in range(3):
            linear(x, w[0], norm_weight=start[0], out=y)
            rope_write(y.view(1, heads, dim), x.view(1, heads, dim), keys, values, new)
            decode_attention(y.view(1, heads, dim), keys, values, lengths, out=found)
            linear(found.view(1, width), w[1], residual=x, out=x)
            linear(x, w[2], up_weight=w[3], out=y)
            linear(y, w[0], residual=x, out=x)

    results = []
    for serial in ("0", "1"):
        monkeypatch.setenv(SERIAL, serial)
        run = captured(step)
        for _ in range(5 if DEVICE == "cuda" else 1):
            x.copy_(start)
            run()
            results.append(x.clone())
    assert torch.isfinite(results[0]).all()
    for one in results:
        torch.testing.assert_close(one, results[0], rtol=1e-5, atol=1e-5)
