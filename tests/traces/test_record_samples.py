"""The recordings that are shipped: whole, small, and showing a model that does what it is asked."""

from pathlib import Path

import numpy as np
import pytest
from kvsim_traces import open_trace, verify_trace

SAMPLES = Path(__file__).parents[2] / "traces" / "samples"
SHIPPED = {
    "smollm2-needle-512": ("qk", 512, 48, "for bright-mirror mentioned in the provided text is 1679215."),
    "smollm2-multineedle-256": ("qkv", 255, 24, "for amber-canyon mentioned in the provided text is 7368886."),
    "smollm2-long-64": ("scores", 60, 160, "The sky is blue during the day"),
}


def test_all_samples_are_listed_and_small():
    assert {path.name for path in SAMPLES.iterdir() if path.is_dir()} == set(SHIPPED)
    assert sum(path.stat().st_size for path in SAMPLES.rglob("*")) < 24e6


@pytest.mark.parametrize("name", SHIPPED)
def test_sample(name):
    capture, length, steps, answer = SHIPPED[name]
    assert verify_trace(SAMPLES / name).ok
    trace = open_trace(SAMPLES / name)
    assert (trace.capture, trace.prompt_length, trace.num_steps) == (capture, length, steps)
    assert (trace.num_layers, trace.num_heads, trace.num_kv_heads, trace.head_dim) == (30, 9, 3, 64)
    assert trace.eligible_layers == tuple(range(30))
    text = b"".join(trace.token_bytes(i) for i in range(trace.num_positions)).decode()
    assert text.startswith("<|im_start|>system\n")
    assert text.count("<|im_start|>") == 3
    prompt, reply = text.split("<|im_start|>assistant\n")
    assert answer in reply
    if steps != 160:
        number = answer.split()[-1]
        assert prompt.count(f"is: {number}") == 1
    assert trace.prompt_queries().shape == (30, 9, 16, 64)
    np.testing.assert_allclose(trace.prompt_mass().sum(-1), length, rtol=1e-4)
    check = trace.manifest.check
    assert check["max_abs_error"] < 1e-5
    assert check["max_abs_error_stored"] < (3e-4 if capture == "scores" else 3e-3)


@pytest.mark.parametrize("name", [name for name, facts in SHIPPED.items() if facts[0] != "scores"])
def test_row_from_queries_and_keys_looks_back_at_the_needle(name):
    trace = open_trace(SAMPLES / name)
    texts = trace.texts()
    number = SHIPPED[name][3].split()[-1].rstrip(".")
    prompt = "".join(texts[: trace.prompt_length])
    ends = np.cumsum([len(text) for text in texts[: trace.prompt_length]])
    first = int(np.searchsorted(ends, prompt.index(number), side="right"))
    # the step that chooses the number's first digit attends to that digit in the prompt in some head
    reply = texts[trace.prompt_length :]
    digit = next(i for i, text in enumerate(reply) if text == number[0])
    row = trace.attention_rows(digit)
    np.testing.assert_allclose(row.sum(-1), 1, rtol=0, atol=1e-5)
    assert row[:, :, first].max() > 0.3
