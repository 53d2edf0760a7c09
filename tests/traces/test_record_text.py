"""Token texts: the bytes of all tokens, one after the other, are the text."""

import numpy as np
import pytest
from kvsim_traces import record
from kvsim_traces.token_text import byte_alphabet, token_bytes, token_style
from recording import tiny
from token_texts import byte_level, sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def word_piece():
    vocab = {word: i for i, word in enumerate(["[UNK]", "play", "##ing", "well"])}
    backend = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def test_byte_alphabet_is_a_bijection_on_bytes():
    table = byte_alphabet()
    assert sorted(table.values()) == list(range(256))
    assert table["Ġ"] == ord(" ")
    assert table["Ċ"] == ord("\n")
    assert table["a"] == ord("a")
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize("text", ["the café\n\n 😀 tab\t", " leading", ""])
@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_bytes_of_all_tokens_are_the_text(make, text):
    tokenizer = make()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert b"".join(token_bytes(tokenizer, ids)) == text.encode()


def test_fragments_are_bytes_and_not_replacement_characters():
    tokenizer = byte_level()
    assert token_style(tokenizer) == "byte"
    assert token_bytes(tokenizer, tokenizer("thé").input_ids) == [b"th", b"\xc3", b"\xa9"]
    tokenizer = sentencepiece()
    assert token_style(tokenizer) == "sentencepiece"
    assert token_bytes(tokenizer, tokenizer(" aü").input_ids) == [b" a", b"\xc3", b"\xbc"]


def test_special_and_added_tokens_are_their_literal_text():
    tokenizer = byte_level()
    ids = tokenizer("<|start|>th<é><|end|>").input_ids
    assert token_bytes(tokenizer, ids) == [b"<|start|>", b"th", "<é>".encode(), b"<|end|>"]
    tokenizer = sentencepiece()
    assert token_bytes(tokenizer, [tokenizer.bos_token_id]) == [b"<s>"]


def test_ids_the_tokenizer_does_not_know_are_empty():
    tokenizer = byte_level()
    assert token_bytes(tokenizer, [97, len(tokenizer), 10**6, 98]) == [b"a", b"", b"", b"b"]


def test_other_tokenizers_are_decoded():
    tokenizer = word_piece()
    assert token_style(tokenizer) == "other"
    assert token_bytes(tokenizer, [1, 3]) == [b"play", b"well"]


class OldByteLevel:
    """What a slow byte-level tokenizer offers."""

    byte_decoder = byte_alphabet()
    all_special_ids = (2,)

    @property
    def added_tokens_decoder(self):
        return {2: "<end>"}

    def __len__(self):
        return 3

    def convert_ids_to_tokens(self, index):
        return ["Ġa", "Ã", "<end>"][index]


def test_slow_byte_level_tokenizer():
    assert token_bytes(OldByteLevel(), [0, 1, 2]) == [b" a", b"\xc3", b"<end>"]


def test_trace_holds_the_text(tmp_path):
    tokenizer = byte_level()
    tokenizer.name_or_path = "someone/tiny"
    prompt = tokenizer("the café: 😀").input_ids
    model = tiny("llama-gqa3", vocab_size=300)
    forced = [*tokenizer(" ça").input_ids, 299]
    trace = record(model, prompt, out=tmp_path / "t", steps=9, force=forced, tokenizer=tokenizer)
    assert b"".join(trace.token_bytes(i) for i in range(trace.num_positions)).decode() == "the café: 😀 ça"
    assert trace.texts()[0] == "th"
    assert trace.manifest.tokenizer["name"] == "someone/tiny"
    np.testing.assert_array_equal(trace.tokens, prompt + forced)


def test_tokenizer_hash_ignores_how_it_was_called(tmp_path):
    from kvsim_traces.facts import tokenizer_facts

    one, two, other = byte_level(), byte_level(), sentencepiece()
    two(["a", "bcd"], padding=False, truncation=True, max_length=2)
    assert tokenizer_facts(one)["hash"] == tokenizer_facts(two)["hash"]
    assert tokenizer_facts(one)["hash"] != tokenizer_facts(other)["hash"]
    one.add_tokens(["new"])
    assert tokenizer_facts(one)["hash"] != tokenizer_facts(two)["hash"]
