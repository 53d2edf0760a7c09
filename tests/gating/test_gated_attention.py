"""Write-gated attention and the gates under it, against plain loops and against the model's own attention."""

import math

import numpy as np
import pytest
import torch
from recording import PROMPT, tiny
from torch.nn.attention import flex_attention as flex_module

from kvsim import KvsimError
from kvsim.gating.attention import (
    EPS,
    attention_form,
    each_kind_compiled,
    flex_write_gated,
    log_gates,
    plain_write_gated,
)
from kvsim.gating.module import START, Gates, default_hidden
from kvsim.gating.validate import cache_size
from kvsim.gating.watcher import GatedAttention, frozen, hidden_states, shape_of, unrotated

FORMS = [plain_write_gated, flex_write_gated]


def inputs(*, heads=4, kv_heads=2, length=20, dim=16, batch=2, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    q = torch.randn(batch, heads, length, dim, dtype=dtype)
    k, v = torch.randn(2, batch, kv_heads, length, dim, dtype=dtype)
    return q, k, v, torch.rand(batch, kv_heads, length, dtype=dtype)


def by_hand(q, k, v, gates, *, window, scaling, softcap=None):
    """Section 3.2 in loops, m as a factor."""
    q, k, v, gates = (part.tolist() for part in (q, k, v, gates))
    out = []
    for b, rows in enumerate(q):
        out.append([])
        for h, queries in enumerate(rows):
            j = h // (len(rows) // len(k[b]))
            out[-1].append([])
            for i, query in enumerate(queries):
                weights = []
                for p in range(i + 1):
                    logit = scaling * math.fsum(x * y for x, y in zip(query, k[b][j][p], strict=True))
                    if softcap is not None:
                        logit = softcap * math.tanh(logit / softcap)
                    weights.append(math.exp(logit) * (1.0 if i - p < window else gates[b][j][p]))
                total = math.fsum(weights)
                dims = range(len(query))
                row = [math.fsum(w * v[b][j][p][e] for p, w in enumerate(weights)) / total for e in dims]
                out[-1][-1].append(row)
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (5, None), (5, 2.0), (20, None), (100, None)])
def test_forms_follow_the_formula(attention, window, softcap):
    q, k, v, gates = inputs()
    options = {"window": window, "scaling": 0.3, "softcap": softcap}
    want = by_hand(q, k, v, gates, **options)
    torch.testing.assert_close(attention(q, k, v, log_gates(gates), **options), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1)])
def test_heads_read_the_gates_of_their_kv_head(attention, heads, kv_heads):
    q, k, v, gates = inputs(heads=heads, kv_heads=kv_heads)
    want = by_hand(q, k, v, gates, window=3, scaling=0.25)
    found = attention(q, k, v, log_gates(gates), window=3, scaling=0.25)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("attention", FORMS)
def test_open_gates_are_full_attention_and_shut_ones_exactly_w_recent_tokens(attention):
    q, k, v, gates = inputs(length=30)
    full = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.4, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, log_gates(gates * 0 + 1), window=7, scaling=0.4), full)
    i = torch.arange(30)
    seen = (i[:, None] >= i) & (i[:, None] - i < 7)
    assert seen.sum(dim=1).tolist() == [min(n + 1, 7) for n in range(30)]
    local = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.4, enable_gqa=True)
    hard = attention(q, k, v, log_gates(gates, tau=1.1), window=7, scaling=0.4)
    torch.testing.assert_close(hard, local)
    soft = attention(q, k, v, log_gates(gates * 0), window=7, scaling=0.4)
    torch.testing.assert_close(soft, local, rtol=0, atol=1e-8)


@pytest.mark.parametrize("attention", FORMS)
def test_hard_gates_show_what_reaches_tau(attention):
    q, k, v, gates = inputs()
    gates[0, 0, 3] = 0.5
    want = by_hand(q, k, v, (gates >= 0.5).double(), window=4, scaling=0.3)
    found = attention(q, k, v, log_gates(gates, tau=0.5), window=4, scaling=0.3)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["plain", "flex"])
def test_gradients_of_inputs_and_gates_in_float64(form, monkeypatch):
    q, k, v, gates = inputs(heads=4, kv_heads=2, length=9, dim=4 if form == "plain" else 16, batch=1)
    parts = [part.requires_grad_() for part in (q, k, v, 0.05 + 0.9 * gates)]

    def plain(q, k, v, gates):
        return plain_write_gated(q, k, v, log_gates(gates), window=3, scaling=0.4, softcap=3.0)

    if form == "plain":
        assert torch.autograd.gradcheck(plain, parts)
        return
    # Only a GPU has them in public; the same function computes them here.
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    weights = torch.randn_like(q)
    leaves = [part.detach().clone().requires_grad_() for part in parts]
    found = flex_write_gated(*leaves[:3], log_gates(leaves[3]), window=3, scaling=0.4, softcap=3.0)
    got = torch.autograd.grad((found * weights).sum(), leaves)
    want = torch.autograd.grad((plain(*parts) * weights).sum(), parts)
    for one, other in zip(got, want, strict=True):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_gradients_stay_finite_where_gates_vanish():
    gates = torch.tensor([0.0, 1e-30, 1.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(log_gates(gates).sum(), gates)
    assert torch.isfinite(gradient).all()
    assert gradient[0] == pytest.approx(1 / EPS)


def test_every_kind_of_call_is_compiled():
    """torch.compile gives up after eight kinds, and attention with a full matrix of logits takes its place."""
    made = []

    def backend(graph, given):
        made.append(tuple(given[0].shape))
        return graph

    torch._dynamo.reset()
    call = each_kind_compiled(lambda x: x + 1, backend=backend)
    for _ in range(2):
        for length in range(2, 22):
            assert torch.equal(call(torch.zeros(length)), torch.ones(length))
    assert made == [(length,) for length in range(2, 22)]
    torch._dynamo.reset()


def test_flex_does_not_train_on_a_cpu():
    with pytest.raises(KvsimError, match="attention 'flex' trains on a CUDA GPU only, not on cpu"):
        attention_form("flex", torch.device("cpu"))
    assert attention_form("auto", torch.device("cpu")) is plain_write_gated
    assert attention_form("auto", torch.device("cuda")) is flex_write_gated
    assert attention_form("plain", torch.device("cuda")) is plain_write_gated


def random_gates(dtype=torch.float32, **changes):
    gates = Gates(**{"layers": (0, 2), "num_kv_heads": 2, "head_dim": 16, "hidden": 5, "seed": 3} | changes)
    torch.manual_seed(1)
    for parameter in gates.parameters():
        torch.nn.init.normal_(parameter)
    return gates.to(dtype)


def test_the_module_gives_the_scores_of_its_file():
    gates = random_gates()
    gate = gates.gate(window=4, tau=0.1, penalty=0.08, model="tiny")
    pre, post = torch.randn(2, 2, 2, 9, 16)
    found = torch.stack([gates(place, pre[place][None], post[place][None])[0] for place in range(2)])
    np.testing.assert_allclose(found.detach().numpy(), gate.score(pre.numpy(), post.numpy()), rtol=2e-5, atol=1e-7)
    again = Gates.of(gate)
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), gates.parameters(), strict=True))


def test_gradients_of_the_gates_in_float64():
    gates = random_gates(torch.float64, head_dim=3, hidden=2, layers=(1,))
    pre, post = torch.randn(2, 1, 2, 4, 3, dtype=torch.float64)
    names, values = zip(*gates.named_parameters(), strict=True)
    pre, post = pre.requires_grad_(), post.requires_grad_()

    def call(pre, post, *parameters):
        return torch.func.functional_call(gates, dict(zip(names, parameters, strict=True)), (0, pre, post))

    assert torch.autograd.gradcheck(call, (pre, post, *values))


def test_gates_start_open_and_take_a_small_share_of_the_parameters():
    gates = Gates((0, 1), 2, 16, 48, seed=5)
    keys = torch.randn(2, 1, 2, 500, 16)
    found = gates(0, keys[0], keys[1]).detach()
    assert float(found.min()) > 0.7
    assert float(found.mean()) == pytest.approx(float(torch.sigmoid(torch.tensor(START))), abs=0.05)
    again = Gates((0, 1), 2, 16, 48, seed=5)
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), gates.parameters(), strict=True))
    assert default_hidden(134_515_008, 90, 64) == 48
    assert default_hidden(8_030_261_248, 256, 128) == 480
    assert default_hidden(1000, 90, 64) == 16


MODELS = ["llama-gqa1", "llama-gqa3", "qwen3", "mistral", "gemma3"]


@pytest.mark.parametrize("name", MODELS)
def test_keys_are_turned_back_to_what_the_model_rotated(name):
    model = tiny(name)
    shape = shape_of(model)
    assert shape.layers == ((1,) if name == "gemma3" else (0, 1, 2))
    seen = {}

    class Spy(GatedAttention):
        def attend(self, call):
            if call.layer in shape.layers:
                seen[call.layer] = unrotated(call.key, *self.rotations[call.layer])
            return super().attend(call)

    before = {}
    decoder = model.get_decoder()
    for layer in shape.layers:
        own = decoder.layers[layer].self_attn
        source = own.k_norm if hasattr(own, "k_norm") else own.k_proj
        source.register_forward_hook(lambda _, __, out, layer=layer: before.__setitem__(layer, out))
    gates = Gates(shape.layers, shape.num_kv_heads, shape.head_dim, 4)
    watcher = Spy(gates, plain_write_gated, window=4)
    with frozen(model, watcher):
        hidden_states(model, torch.tensor([PROMPT]), watcher)
    for layer, found in seen.items():
        # Gemma normalises what is split into heads already, others what is not.
        want = before[layer].unflatten(-1, (-1, shape.head_dim)) if before[layer].ndim == 3 else before[layer]
        want = want if want.shape[1] == shape.num_kv_heads else want.transpose(1, 2)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_partly_rotated_and_scaled_keys_are_turned_back():
    torch.manual_seed(0)
    key = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    angles = torch.randn(1, 5, 2, dtype=torch.float64).repeat(1, 1, 2)
    cos, sin = 1.3 * angles.cos(), 1.3 * angles.sin()
    first, second, rest = key.split([2, 2, 4], dim=-1)
    c, s = cos[:, None, :, :2], sin[:, None, :, :2]
    rotated = torch.cat([first * c - second * s, second * c + first * s, rest], dim=-1)
    torch.testing.assert_close(unrotated(rotated, cos, sin), key)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_under_open_gates_is_itself_and_under_shut_ones_sees_w_tokens(name):
    model = tiny(name)
    shape = shape_of(model)
    tokens = torch.tensor([PROMPT])
    gates = Gates(shape.layers, shape.num_kv_heads, shape.head_dim, 4)
    with torch.no_grad():
        full = hidden_states(model, tokens)

        def under(tau, window):
            watcher = GatedAttention(gates, plain_write_gated, window=window, tau=tau)
            with frozen(model, watcher):
                return hidden_states(model, tokens, watcher)

        torch.testing.assert_close(under(0.0, 3), full, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(under(2.0, len(PROMPT)), full, rtol=1e-4, atol=1e-4)
        local = under(2.0, 3)
        torch.testing.assert_close(local[:, :3], full[:, :3], rtol=1e-4, atol=1e-4)
        assert float((local[:, 3] - full[:, 3]).abs().max()) > 1e-2
        with torch.random.fork_rng():
            torch.testing.assert_close(hidden_states(model, tokens), full, rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_layers_keep_their_inputs_alone_and_gradients_are_the_same():
    model = tiny("llama-gqa3")
    gates = Gates((0, 1, 2), 2, 16, 4)
    found = []
    for checkpointing in (False, True):
        watcher = GatedAttention(gates, plain_write_gated, window=3)
        with frozen(model, watcher):
            hidden = hidden_states(model, torch.tensor([PROMPT]), watcher, checkpointing=checkpointing)
            (hidden.square().mean() + watcher.gates().mean()).backward()
        found.append([parameter.grad.clone() for parameter in gates.parameters()])
        gates.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert all("forward" not in vars(layer) for layer in model.get_decoder().layers)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gated_layers_are_recomputed_under_the_watcher_of_the_forward_in_another_thread():
    """A GPU's way back runs in threads of its own, which see no context of this one."""
    import threading

    model = tiny("llama-gqa3")
    gates = Gates((0, 1, 2), 2, 16, 4)
    watcher = GatedAttention(gates, plain_write_gated, window=3)
    with frozen(model, watcher):
        hidden = hidden_states(model, torch.tensor([PROMPT]), watcher, checkpointing=True)
        watcher.found.clear()
        thread = threading.Thread(target=hidden.square().mean().backward)
        thread.start()
        thread.join()
    assert sorted(watcher.found) == [0, 1, 2]
    assert float(gates.w1.grad.abs().max()) > 0


@pytest.mark.parametrize("name", ["gpt-oss", "llama4"])
def test_models_whose_rotation_is_not_known_are_refused(name):
    with pytest.raises(KvsimError, match=r"how type '.*' rotates its keys is not known"):
        shape_of(tiny(name, attention="eager"))


def test_a_model_without_full_attention_is_refused():
    with pytest.raises(ValueError, match="no full-attention layer"):
        shape_of(tiny("mistral-sliding"))


def test_cache_size_counts_the_window_and_what_was_admitted_before_it():
    admitted = torch.tensor([[1, 0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0, 0]]).bool()
    assert cache_size(admitted, 3) == pytest.approx(((3 + 3) + (0 + 3)) / 2 / 8)
    assert cache_size(admitted, 1) == pytest.approx(((4 + 1) + 1) / 2 / 8)
    assert cache_size(admitted, 8) == cache_size(admitted, 50) == 1.0
