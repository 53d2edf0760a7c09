"""Tokens to be read: nothing is lost, nothing unseen."""

import pytest
from cases import SAMPLES, write_trace

import kvsim
from kvsim.token_display import display, display_token


@pytest.mark.parametrize(
    ("data", "text", "kind"),
    [
        (b" magic", " magic", "text"),
        (b"\n", "↵\n", "text"),
        (b".\n\n", ".↵\n↵\n", "text"),
        (b"   ", "   ", "blank"),
        (b"\t", "⇥\t", "text"),
        (b"\x00\x7f", "␀␡", "text"),
        ("é".encode(), "é", "text"),
        (b"\xe2", "⟨0xE2⟩", "bytes"),
        (b"\x80\x99", "⟨0x80 0x99⟩", "bytes"),
        (b" \xe2\x80a", " ⟨0xE2 0x80⟩a", "bytes"),
        (b"\xffab\xfe", "⟨0xFF⟩ab⟨0xFE⟩", "bytes"),
        ("\u202eabc\u200b".encode(), "⟨U+202E⟩abc⟨U+200B⟩", "text"),
        (b"<|im_start|>", "<|im_start|>", "special"),
        (b"</s>", "</s>", "special"),
        (b"<end_of_turn>", "<end_of_turn>", "special"),
        (b"[INST]", "[INST]", "special"),
        (b"<b>", "<b>", "text"),
    ],
)
def test_a_token(data, text, kind):
    found = display_token(data)
    assert (found.text, found.kind) == (text, kind)


def test_a_recording_with_text_and_without(tmp_path):
    trace = kvsim.open_trace(SAMPLES / "smollm2-needle-512")
    found = display(trace)
    assert len(found) == trace.num_positions
    assert (found[0].text, found[0].kind) == ("<|im_start|>", "special")
    assert [one.text.replace("↵", "") for one in found[3:9]] == trace.texts()[3:9]
    bare = write_trace(tmp_path / "t", seed=1)
    if not bare.has("text") and bare.tokens is None:
        assert [one.text for one in display(bare)[:3]] == ["0", "1", "2"]
        assert display(bare)[0].kind == "number"
