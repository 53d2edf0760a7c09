"""RULER's question answering: a question's documents among others, from SQuAD or HotpotQA."""

import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from kvsim.errors import KvsimError
from kvsim.tasks.sample import Metric, Span, Text
from kvsim.tasks.task import Draw, Plan, Task

__all__ = ["Qa", "Question", "read_questions"]

Dataset = Literal["squad", "hotpotqa"]

_FILES = {"squad": "SQuAD (dev-v2.0.json)", "hotpotqa": "HotpotQA (hotpot_dev_distractor_v1.json)"}


@dataclass(frozen=True)
class Question:
    """A question with numbers of documents.

    Attributes
    ----------
    query : str
        The question.
    outputs : tuple of str
        Answers, any of which is right.
    documents : tuple of int
        Documents that belong to it.
    holders : tuple of int
        Those of them that hold the answer.
    related : tuple of int
        Documents to add first (other paragraphs of the same article).
    spans : tuple of (int, int, int)
        Document and characters where an answer stands.
    """

    query: str
    outputs: tuple[str, ...]
    documents: tuple[int, ...]
    holders: tuple[int, ...]
    related: tuple[int, ...]
    spans: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Qa(Task):
    """Answer a question whose documents are mixed among others; sample i is the file's i-th answerable question.

    Documents are added until the length is reached or the file has no more. For SQuAD those of the same article come
    first; all ten that HotpotQA gives for a question are always there. Needle spans are where the data set marks the
    answer (SQuAD), or where it is spelled out in a supporting document (HotpotQA).

    Source: Hsieh et al. 2024 (RULER), Section 3 and Appendix B; the wording is RULER's.

    Parameters
    ----------
    dataset : {"squad", "hotpotqa"}
        Format of the file.
    file : str or None
        A JSON file with questions, as its authors publish it; see `with_file`.
    """

    dataset: Dataset = "squad"
    file: str | None = None

    answer_tokens: ClassVar[int] = 32
    metric: ClassVar[Metric] = "part"

    @property
    def summary(self) -> str:
        """See `Task.summary`."""
        return "a question about one of many documents (needs a file)"

    def with_file(self, file: str | os.PathLike[str]) -> "Qa":
        """Give the task with a file of questions."""
        return replace(self, file=os.fspath(file))

    def _plan(self, draw: Draw) -> Plan:
        if self.file is None:
            raise KvsimError(f"{self.name} needs questions: a JSON file of {_FILES[self.dataset]}")
        questions, documents = read_questions(self.dataset, self.file)
        if draw.index >= len(questions):
            raise KvsimError(f"{self.file}: has {len(questions)} questions, so none with index {draw.index}")
        question = questions[draw.index]
        rng = draw.rng("documents")
        related = rng.sample(question.related, len(question.related))
        own = {*question.documents, *question.related}
        others = [number for number in range(len(documents)) if number not in own]
        rng.shuffle(others)
        ranked = [*question.documents, *related, *others]
        keys = [rng.random() for _ in ranked]

        def build(units: int) -> Text:
            chosen = [number for _, number in sorted(zip(keys[:units], ranked[:units], strict=True))]
            return _text(question, chosen, documents)

        return Plan(build, least=len(question.documents), most=len(ranked))


def _text(question: Question, chosen: list[int], documents: list[str]) -> Text:
    rule = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    )
    text = f"{rule}\n\nThe following are given documents.\n\n"
    starts: dict[int, int] = {}
    for place, number in enumerate(chosen, 1):
        text += f"Document {place}:\n"
        starts[number] = len(text)
        text += f"{documents[number]}\n\n"
    spans: list[Span] = [(starts[at] + first, starts[at] + end) for at, first, end in question.spans]
    depth = 100 * min(chosen.index(number) for number in question.holders) / len(chosen)
    text += f"{rule}\n\nQuestion: {question.query}"
    return Text(text, " Answer:", question.outputs, depth, tuple(sorted(spans)))


def read_questions(dataset: Dataset, file: str) -> tuple[list[Question], list[str]]:
    """Read questions and the documents of all of them, sorted and without repeats.

    Parameters
    ----------
    dataset : {"squad", "hotpotqa"}
        Format of the file.
    file : str
        Its path. It is read once, and again after it has changed.

    Raises
    ------
    KvsimError
        If the file cannot be read or is not of the format; the error names the entry at fault.
    """
    try:
        state = os.stat(file)
    except OSError as error:
        raise KvsimError(f"{file}: {error.strerror}; it takes a JSON file of {_FILES[dataset]}") from None
    return _read(dataset, file, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=2)
def _read(dataset: Dataset, file: str, changed: int, size: int) -> tuple[list[Question], list[str]]:
    try:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise KvsimError(f"{file}: {error.strerror}; it takes a JSON file of {_FILES[dataset]}") from None
    except ValueError as error:
        raise KvsimError(f"{file}: not JSON ({error})") from None
    found = _Reader(dataset, file)
    questions, documents = found.squad(data) if dataset == "squad" else found.hotpotqa(data)
    if not questions:
        raise KvsimError(f"{file}: has no question with an answer")
    return questions, documents


class _Reader:
    def __init__(self, dataset: Dataset, file: str) -> None:
        self.dataset, self.file = dataset, file

    def squad(self, data: Any) -> tuple[list[Question], list[str]]:
        articles = [
            [(where, self.get(paragraph, "context", str, where), paragraph) for where, paragraph in paragraphs]
            for paragraphs in (
                [*self.each(article, "paragraphs", at)] for at, article in self.each(data, "data", "the file")
            )
        ]
        documents = sorted({context for article in articles for _, context, _ in article})
        numbers = {context: number for number, context in enumerate(documents)}
        questions = []
        for article in articles:
            members = list(dict.fromkeys(numbers[context] for _, context, _ in article))
            for where, context, paragraph in article:
                own = numbers[context]
                for at, entry in self.each(paragraph, "qas", where):
                    query = self.get(entry, "question", str, at)
                    if entry.get("is_impossible"):
                        continue
                    answers = [
                        (self.get(answer, "text", str, place), self.get(answer, "answer_start", int, place))
                        for place, answer in self.each(entry, "answers", at)
                    ]
                    if not answers:
                        raise self.fault(f"{at} has no answers")
                    spans = {
                        (own, start, start + len(text)) for text, start in answers if context[start:].startswith(text)
                    }
                    outputs = tuple(dict.fromkeys(text for text, _ in answers))
                    related = tuple(number for number in members if number != own)
                    questions.append(Question(query, outputs, (own,), (own,), related, tuple(sorted(spans))))
        return questions, documents

    def hotpotqa(self, data: Any) -> tuple[list[Question], list[str]]:
        entries = []
        for at, entry in self.each({"questions": data}, "questions", "the file"):
            named = []
            for place, pair in self.each(entry, "context", at):
                if not (
                    isinstance(pair, list)
                    and len(pair) == 2
                    and isinstance(pair[0], str)
                    and isinstance(pair[1], list)
                    and all(isinstance(sentence, str) for sentence in pair[1])
                ):
                    raise self.fault(f"{place} is not a title with a list of sentences")
                named.append((pair[0], f"{pair[0]}\n{''.join(pair[1])}"))
            if not named:
                raise self.fault(f"{at} has no context")
            query, answer = self.get(entry, "question", str, at), self.get(entry, "answer", str, at)
            if not answer:
                raise self.fault(f"{at} has an empty answer")
            facts = set()
            for place, fact in self.each(entry, "supporting_facts", at):
                if not (isinstance(fact, list) and fact and isinstance(fact[0], str)):
                    raise self.fault(f"{place} does not start with a title")
                facts.add(fact[0])
            entries.append((query, answer, named, facts))
        documents = sorted({text for _, _, named, _ in entries for _, text in named})
        numbers = {text: number for number, text in enumerate(documents)}
        questions = []
        for query, answer, named, facts in entries:
            own = tuple(dict.fromkeys(numbers[text] for _, text in named))
            holders = tuple(dict.fromkeys(numbers[text] for title, text in named if title in facts)) or own
            told = () if answer in ("yes", "no") else holders
            spans = [(number, *span) for number in told for span in _occurrences(answer, documents[number])]
            questions.append(Question(query, (answer,), own, holders, (), tuple(sorted(spans))))
        return questions, documents

    def each(self, holder: Any, key: str, where: str) -> Iterator[tuple[str, Any]]:
        for number, entry in enumerate(self.get(holder, key, list, where)):
            place = f"{key}[{number}]"
            yield (place if where == "the file" else f"{where}.{place}"), entry

    def get(self, holder: Any, key: str, kind: type, where: str) -> Any:
        if not isinstance(holder, dict) or not isinstance(holder.get(key), kind):
            names = {str: "text", int: "number", list: "list"}
            raise self.fault(f"{where} has no {names[kind]} {key!r}")
        return holder[key]

    def fault(self, what: str) -> KvsimError:
        return KvsimError(f"{self.file}: not a file of {_FILES[self.dataset]}: {what}")


def _occurrences(part: str, text: str) -> Iterator[Span]:
    start = text.find(part)
    while start >= 0:
        yield start, start + len(part)
        start = text.find(part, start + len(part))
