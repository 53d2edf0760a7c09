"""A tiny model folder whose tokenizer is byte-level and has a chat template, recordings of it, and the command line."""

import json

from kvsim_traces import record
from kvsim_traces.loading import load_model
from recording import tiny
from token_texts import byte_level
from typer.testing import CliRunner

from kvsim.cli import app

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def chatting():
    """The byte-level tokenizer with a template whose markers are single tokens."""
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_model(path, name="llama-gqa3", tokenizer=None, **changes):
    """Write a tiny model and a tokenizer to a folder."""
    tiny(name, vocab_size=300, max_position_embeddings=4096, **changes).save_pretrained(path)
    (chatting() if tokenizer is None else tokenizer).save_pretrained(path)
    return path


def record_run(folder, out, *, steps=6, capture="qk", prompt="the other thing that they thought of then"):
    """Record a prompt with a model folder's model."""
    model, tokenizer = load_model(folder, device="cpu")
    return record(model, tokenizer(prompt).input_ids, out=out, steps=steps, capture=capture, tokenizer=tokenizer)


def run(*words, code=0):
    """Run kvsim; an error is one line on stderr."""
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == code, (result.output, result.exception)
    if code == 2:
        *before, error = result.stderr.splitlines()
        assert error.startswith("kvsim: error: "), result.stderr
        assert all(line.startswith("loading ") for line in before), result.stderr
    return result


def run_json(*words):
    """Run kvsim with --json, and read what it prints; NaN is no JSON."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(run(*words, "--json").stdout, parse_constant=refuse)
