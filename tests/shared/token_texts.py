"""Small handmade tokenizers."""

from kvsim_traces.token_text import byte_alphabet
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_level():
    """Byte-level BPE with one merge and two special tokens; every other token is one byte."""
    alphabet = {byte: char for char, byte in byte_alphabet().items()}
    vocab = {alphabet[byte]: byte for byte in range(256)}
    vocab["th"] = 256
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<é>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|start|>", eos_token="<|end|>")


def sentencepiece():
    """SentencePiece-like BPE with byte fallback."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "é"]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("\u2581", "a")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")
