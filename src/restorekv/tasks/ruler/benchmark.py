"""RULER as a benchmark: where its samples come from, how answers are scored, and what stands in for something official.

Prompts are those of kvpress's data set, NVIDIA/RULER of November 2024 with the template "base": the context holds the
instruction, worked examples and haystack; the question comes after it, then the beginning of the answer.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from random import Random
from typing import ClassVar

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.files import identity, local_files, values
from restorekv.errors import RestoreKVError
from restorekv.tasks import prose
from restorekv.tasks.base import Benchmark, Question, Sample
from restorekv.tasks.reading import TEXTS
from restorekv.tasks.ruler import dataset, documents, passages
from restorekv.tasks.ruler.chains import EXAMPLE_TOKENS, Chains
from restorekv.tasks.ruler.counts import SHORT, CommonWords, FrequentWords
from restorekv.tasks.ruler.documents import Documents
from restorekv.tasks.ruler.draft import Draft, Task, answer_tokens, most_units
from restorekv.tasks.ruler.needles import NEEDLES, Essays, Needles
from restorekv.tasks.splits import EVALUATION_NOVEL

GROUPS = {
    "retrieval": tuple(NEEDLES),
    "multi-hop tracing": ("vt",),
    "aggregation": ("cwe", "fwe"),
    "question answering": ("qa_1", "qa_2"),
}
TASKS = tuple(task for tasks in GROUPS.values() for task in tasks)
OF_ESSAYS = tuple(task for task, settings in NEEDLES.items() if "haystack" not in settings)
OFFICIAL = {**dict.fromkeys(OF_ESSAYS, "essays"), "qa_1": "squad", "qa_2": "hotpot"}  # the setting that names a file
STAND_INS = {
    "essays": "generated prose instead of Paul Graham's essays",
    "squad": "generated documents instead of SQuAD",
    "hotpot": "generated documents instead of HotpotQA",
}
NOVEL = "novel"
SHIPPED = {  # with the source "novel"
    "essays": f"novels/{EVALUATION_NOVEL}.txt.gz",
    "squad": "share-alike/squad.json.gz",
    "hotpot": "share-alike/hotpotqa.json.gz",
}
OF_SHIPPED = {
    "essays": "The Secret Garden (1911) instead of Paul Graham's essays, from a sentence drawn for each sample on",
    "squad": "a subset of SQuAD, 36 articles of XQuAD's English part, in an order drawn by the seed",
    "hotpot": "a subset of HotpotQA, 75 of the 100 dev examples on its site, in an order drawn by the seed",
}
SUBSETS = "qa_1 and qa_2 on subsets (XQuAD's English part; HotpotQA's 100 dev examples)"
SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’)]))\s+(?=[\"'“‘(]?[A-Z0-9])")
LEAST_TOKENS = 25  # of a generated document, by any tokenizer


@dataclass(frozen=True)
class Ruler(Benchmark):
    """`length` counts the prompt and the answer's budget; `tasks` are joined by "+", "" is all thirteen.

    `source` is "novel", "generated", "hub", or a file or folder of kvpress's data set. The first two make `per_task`
    samples a task from the files `essays` (texts, or JSON with the field text), `squad` and `hotpot`. Where these are
    not given, "novel" takes a novel and the subsets of both that ship, and "generated" makes something up.
    """

    name: ClassVar[str] = "ruler"
    title: ClassVar[str] = "RULER"

    length: int = 4096
    tasks: str = ""
    source: str = NOVEL
    per_task: int = 100
    essays: str = ""
    squad: str = ""
    hotpot: str = ""

    def __post_init__(self) -> None:
        for task in self.tasks.split("+") if self.tasks else ():
            if task not in TASKS:
                raise RestoreKVError(f"RULER has no task {task!r}; use some of {', '.join(TASKS)}, joined by +.")
        if self.per_task < 1 or self.length < 1:
            raise RestoreKVError("RULER takes a length and per_task of at least 1.")
        given = [setting for setting in STAND_INS if getattr(self, setting)]
        if given and not self.making:
            raise RestoreKVError(
                f"The setting {given[0]} is for samples made here; leave it or source={self.source} out."
            )

    @property
    def making(self) -> bool:
        """Whether samples are made here, not read."""
        return self.source in (NOVEL, "generated")

    @property
    def chosen_tasks(self) -> tuple[str, ...]:
        return tuple(task for task in TASKS if not self.tasks or task in self.tasks.split("+"))

    def samples(self, tokenizer: Tokenizer, protocol: str) -> Iterable[Sample]:
        """Both protocols ask alike."""
        if self.source == "hub":
            return dataset.samples(dataset.hub_rows(self.length), self.chosen_tasks)
        if not self.making:
            return dataset.samples(dataset.local_rows(self.source, self.length), self.chosen_tasks)
        return self.generated(lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids))

    def generated(self, tokens: Callable[[str], int]) -> Iterator[Sample]:
        """A sample depends on seed, task and index alone, and on how many tokens texts have."""
        for task in self.chosen_tasks:
            made, count = self.maker(task, tokens), self.per_task
            if task in ("qa_1", "qa_2") and self.shipped(OFFICIAL[task]):
                count = min(count, len(self.collection(task).questions))
            for index in range(count):
                draft = self.fitted(task, index, made(index), tokens)
                name = f"{task}-{index}"
                asked = Question(name, task, draft.question, draft.answers, answer_tokens(task), draft.answer_prefix)
                yield Sample(name, draft.context, (asked,))

    def fitted(self, name: str, index: int, task: Task, tokens: Callable[[str], int]) -> Draft:
        """The longest draft that leaves room for the answer."""

        def draft(units: int) -> Draft:
            return task.draft(units, Random(f"{self.seed} {name} {index}"))

        def size(units: int) -> int:
            return tokens(draft(units).text)

        answer = answer_tokens(name)
        if (least := size(task.least) + answer) > self.length:
            raise RestoreKVError(
                f"RULER's {name} takes {least} tokens of this tokenizer at least, not {self.length}; give a larger "
                "length or other tasks."
            )
        return draft(most_units(size, self.length - answer, task.least, task.most))

    def maker(self, name: str, tokens: Callable[[str], int]) -> Callable[[int], Task]:
        """The task of every sample, by its index."""
        match name:
            case "vt":
                made = Chains.sized(self.length, tokens)
            case "cwe":
                made = CommonWords.sized(self.length)
            case "fwe":
                made = FrequentWords.sized(self.length)
            case "qa_1" | "qa_2":
                return self.asker(name)
            case _ if "haystack" in NEEDLES[name]:
                made = Needles(**NEEDLES[name])
            case _:
                haystack = self.haystack(name)
                return lambda index: Needles(haystack(index), **NEEDLES[name])
        return lambda index: made

    def shipped(self, setting: str) -> bool:
        """Whether what ships is used for want of a file."""
        return self.source == NOVEL and not getattr(self, setting)

    def file(self, setting: str) -> str:
        """The file that a setting names, or the one that ships; empty where something is made up."""
        return str(TEXTS / SHIPPED[setting]) if self.shipped(setting) else getattr(self, setting)

    def haystack(self, name: str) -> Callable[[int], Essays]:
        """The essays from the first word on, as RULER has it, or generated sentences.

        Of a novel every sample has an excerpt of its own, since few samples would else see little but its opening.
        """
        if not (where := self.file("essays")):
            made = Essays(prose.sentences(Random(f"{self.seed} prose")))
            return lambda index: made
        sentences = sentences_of(where)
        if self.source != NOVEL:
            made = Essays(cycle(sentences))
            return lambda index: made
        ends = list(accumulate(len(sentence.split()) for sentence in sentences))
        places = max(bisect_right(ends, ends[-1] - self.length), 1)  # from which on no excerpt runs over the end

        def excerpt(index: int) -> Essays:
            start = Random(f"{self.seed} {name} {index} place").randrange(places)
            return Essays(islice(cycle(sentences), start, None))

        return excerpt

    def asker(self, name: str) -> Callable[[int], Task]:
        """The questions of a file in its order, those of a shipped one in an order of the seed's, or generated ones."""
        if where := self.file(OFFICIAL[name]):
            collection = self.collection(name)
            order = list(range(len(collection.questions)))
            if self.shipped(OFFICIAL[name]):
                Random(f"{self.seed} {name} order").shuffle(order)
            elif self.per_task > len(order):
                raise RestoreKVError(f"{where} has {len(order)} questions; give per_task={len(order)} at most.")
            return lambda index: Documents(collection.documents, collection.questions[order[index]])
        make, count = {"qa_1": passages.articles, "qa_2": passages.pairs}[name], self.length // LEAST_TOKENS + 1
        return lambda index: make(count, Random(f"{self.seed} {name} {index} documents"))

    def collection(self, name: str) -> documents.Collection:
        return documents.read(OFFICIAL[name], self.file(OFFICIAL[name]))

    def score(self, question: Question, prediction: str) -> float:
        """String match as kvpress 0.5.5 has it: of qa any reference, of others the share of references found."""
        told = re.sub(r"[\x00-\x1f]", "", prediction.strip()).strip().lower()
        found = [answer.lower() in told for answer in question.answers]
        return float(any(found)) if question.task.startswith("qa") else sum(found) / len(found)

    def described(self) -> dict[str, object]:
        """What stands in for RULER's own, by task; hashes of the files read."""
        about: dict[str, object] = {"metric": "string match: share of references found, any of them in qa"}
        if self.source == "hub":
            made = f"NVIDIA/RULER by kvpress's authors: {self.length} tokens of the tokenizer of Llama-3.1-8B"
            licence = "not stated; RULER is Apache-2.0, SQuAD and HotpotQA CC BY-SA 4.0, the essays Paul Graham's"
            return {"data": dataset.NAME, "made": made, "licence": licence, **about}
        if not self.making:
            return {"data": "files in kvpress's form", "licence": "theirs", **identified(self.source), **about}
        files = {setting: where for setting in STAND_INS if (where := self.file(setting))}
        shipped = {"subsets": SUBSETS} if {"qa_1", "qa_2"} & {*self.chosen_tasks} and self.source == NOVEL else {}
        return {
            "data": "generated in RULER's form, not RULER's own samples",
            "licence": "Apache-2.0; the novel in the public domain, SQuAD and HotpotQA CC BY-SA 4.0"
            if self.source == NOVEL
            else "Apache-2.0; that of the files given",
            "length": f"{self.length} tokens of the model's tokenizer, the answer's budget included, no template",
            "stand_ins": {task: told for task, told in self.stand_ins() if task in self.chosen_tasks},
            "files": {setting: identified(where) for setting, where in files.items()},
            **shipped,
            **about,
        }

    def stand_ins(self) -> Iterator[tuple[str, str]]:
        for task, setting in OFFICIAL.items():
            if self.shipped(setting):
                yield task, OF_SHIPPED[setting]
            elif not getattr(self, setting):
                yield task, STAND_INS[setting]
        if self.length // 4 < EXAMPLE_TOKENS:
            yield "vt", f"a worked example of {self.length // 4} tokens or one noise instead of {EXAMPLE_TOKENS}"
        if self.length < SHORT:
            yield "cwe", "common words 3 times and others once instead of 6 times and once, and a shorter example"

    def groups(self) -> Mapping[str, tuple[str, ...]]:
        """RULER's four categories."""
        held = {name: tuple(task for task in tasks if task in self.chosen_tasks) for name, tasks in GROUPS.items()}
        return {name: tasks for name, tasks in held.items() if tasks}


def identified(where: str) -> dict:
    """Names and hashes of local files."""
    return identity(str(dataset.existing(where)))


def sentences_of(where: str) -> list[str]:
    """The sentences of a file or folder of texts, all white space made one."""
    rows = [row for file in local_files(dataset.existing(where)) for _, row in values(file)]
    if not all(isinstance(row, dict) and isinstance(row.get("text"), str) for row in rows):
        raise RestoreKVError(f"{where} holds something else than texts or JSON with the field text; mend it.")
    text = " ".join(" ".join(row["text"] for row in rows).split())
    if not text:
        raise RestoreKVError(f"{where} has no words; give essays.")
    return SENTENCE_END.split(text)
