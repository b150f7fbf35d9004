"""RULER as a benchmark: where its samples come from, how answers are scored, and what replaces
official data.

Prompts are those of kvpress's data set, NVIDIA/RULER of November 2024 with the template "base": the
context holds the instruction, worked examples and haystack; the question comes after it, then the
beginning of the answer. That data set has a config for each length and was made with the tokenizer
of Llama-3.1-8B (evaluation/benchmarks/ruler of kvpress).
"""

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from pathlib import Path
from random import Random

from restorekv.data.files import identify_source
from restorekv.errors import RestoreKVError
from restorekv.tasks import prose
from restorekv.tasks.base import Benchmark, Question, Sample, Tokenizer, make_token_counter
from restorekv.tasks.reading import TEXTS
from restorekv.tasks.rows import (
    check_exists,
    check_form,
    get_field,
    group_by_context,
    load_hub_rows,
    load_rows,
    load_texts,
    parse_kvpress_row,
)
from restorekv.tasks.ruler import documents
from restorekv.tasks.ruler.draft import DraftTask, PromptDraft, find_most_units, get_answer_limit
from restorekv.tasks.ruler.needles import HAYSTACKS, NEEDLES, Essays, hide_needles
from restorekv.tasks.ruler.synthetic import (
    EXAMPLE_TOKENS,
    SHORT,
    find_common_words,
    find_frequent_words,
    track_variables,
)

GROUPS = {
    "retrieval": tuple(NEEDLES),
    "multi-hop tracing": ("vt",),
    "aggregation": ("cwe", "fwe"),
    "question answering": ("qa_1", "qa_2"),
}
TASKS = tuple(task for tasks in GROUPS.values() for task in tasks)
HUB = "simonjegou/ruler"
HUB_FIX = (
    "fetch it once with a network, give source=FOLDER with its files, or leave source out to "
    "generate"
)
NOVEL = "novel"
ESSAY_TASKS = tuple(task for task in NEEDLES if task not in HAYSTACKS)
# The setting that holds a task's source file.
FILE_SETTING = {**dict.fromkeys(ESSAY_TASKS, "essays"), "qa_1": "squad", "qa_2": "hotpot"}
# Replacements for RULER's own texts: the file that ships (under TEXTS), and how results describe
# the replacement, by source.
REPLACEMENTS: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("stand_ins.json").read_text("utf-8")
)
SUBSETS = {"qa_1": "XQuAD's English part", "qa_2": "75 of HotpotQA's 100 dev examples"}
SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’)]))\s+(?=[\"'“‘(]?[A-Z0-9])")
MIN_DOCUMENT_TOKENS = 25  # of a generated document, by any tokenizer


@dataclass(frozen=True)
class Ruler(Benchmark):
    """RULER, read from kvpress's data set or generated in its form.

    To add a task, add it to GROUPS, to NEEDLES or `_make_task_maker`, and to
    `draft.MAX_NEW_TOKENS`, there by the part of its name before the first "_".

    Args:
        length: Tokens of the prompt and of the longest answer together.
        tasks: The tasks, joined by "+"; "" is all thirteen.
        source: "novel" or "generated" to make samples here, "hub", or a file or folder of kvpress's
            data set. For each of `essays`, `squad` and `hotpot` that is not given, "novel" takes
            the novel or the subset that ships, and "generated" generates texts.
        per_task: How many samples are made of each task.
        essays: A file or folder with texts, or JSON with the field text.
        squad: A file in SQuAD's form.
        hotpot: A file in HotpotQA's form.
    """

    name = "ruler"
    title = "RULER"
    metric = "string match: share of references found, any of them in qa"
    known_tasks = TASKS

    length: int = 4096
    tasks: str = ""
    source: str = NOVEL
    per_task: int = 100
    essays: str = ""
    squad: str = ""
    hotpot: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_task < 1 or self.length < 1:
            raise RestoreKVError(
                f"RULER needs length and per_task of at least 1, not {self.length} and "
                f"{self.per_task}."
            )
        given = [setting for setting in REPLACEMENTS if getattr(self, setting)]
        if given and not self.generates:
            raise RestoreKVError(
                f"{given[0]}= is for samples that are generated; leave it out, or leave out "
                f"source={self.source}."
            )

    @property
    def generates(self) -> bool:
        """Whether samples are made here, not read."""
        return self.source in (NOVEL, "generated")

    def load_samples(self, tokenizer: Tokenizer, protocol: str) -> Iterable[Sample]:
        if self.generates:
            return self._generate_samples(make_token_counter(tokenizer))
        return self._load_stored()

    def _load_stored(self) -> list[Sample]:
        """Return the distinct contexts of the hub, a file, a folder, or the folder's subfolder of
        that length.
        """
        if self.source == "hub":
            rows = load_hub_rows(HUB, str(self.length), "test", HUB_FIX)
        else:
            rows = load_rows(self._find_stored_folder(check_exists(self.source)))
        questions = []
        # Rows are numbered within their task, so that a question has the same name in a subset.
        counts = Counter()
        for location, row in rows:
            with check_form(
                f"{location} is not a row of kvpress's RULER data set", "give files of that form"
            ):
                task = get_field(row, "task")
                question = parse_kvpress_row(row, f"{task}-{counts[task]}", task, "answer")
            if task in self.chosen_tasks:
                questions.append(question)
                counts[task] += 1
        if missing := [task for task in self.chosen_tasks if not counts[task]]:
            raise RestoreKVError(
                f"The data has no rows of the task {missing[0]}; leave it out of tasks=."
            )
        return group_by_context(questions)

    def _find_stored_folder(self, source: Path) -> Path:
        """Return the subfolder of the length, or the source itself if it has none of any length."""
        folder = source / str(self.length)
        if folder.is_dir():
            return folder
        lengths = []
        if source.is_dir():
            lengths = [int(path.name) for path in source.iterdir() if path.name.isdecimal()]
        if lengths:
            there = ", ".join(str(length) for length in sorted(lengths))
            raise RestoreKVError(
                f"{source} has RULER of {there} tokens, not of {self.length}; give length= one of "
                "those."
            )
        return source

    def _generate_samples(self, count_tokens: Callable[[str], int]) -> Iterator[Sample]:
        """Yield samples, each of which depends only on seed, task, index and the tokenizer."""
        for name in self.chosen_tasks:
            make_task = self._make_task_maker(name, count_tokens)
            # No more samples than the shipped file has questions.
            count = self.per_task
            if name in ("qa_1", "qa_2") and self._uses_shipped_file(name):
                count = min(count, len(self._load_collection(name).questions))
            for index in range(count):
                context, text, answer_prefix, answers = self._fit_draft(
                    name, index, make_task(index), count_tokens
                )
                question = Question(
                    f"{name}-{index}", name, text, answers, get_answer_limit(name), answer_prefix
                )
                yield Sample(question.id, context, (question,))

    def _fit_draft(
        self, name: str, index: int, task: DraftTask, count_tokens: Callable[[str], int]
    ) -> PromptDraft:
        """Return the longest draft that leaves room for the answer."""

        def draft(units: int) -> PromptDraft:
            return task.draft(units, Random(f"{self.seed} {name} {index}"))

        def measure_draft(units: int) -> int:
            return count_tokens(draft(units).text)

        answer_limit = get_answer_limit(name)
        shortest = measure_draft(task.min_units) + answer_limit
        if shortest > self.length:
            raise RestoreKVError(
                f"RULER's {name} needs at least {shortest} tokens, more than length={self.length}; "
                "give a larger length or other tasks."
            )
        limit = self.length - answer_limit
        return draft(find_most_units(measure_draft, limit, task.min_units, task.max_units))

    def _make_task_maker(
        self, name: str, count_tokens: Callable[[str], int]
    ) -> Callable[[int], DraftTask]:
        """Return a function that makes the task of every sample from its index."""
        match name:
            case "vt":
                task = track_variables(self.length, count_tokens)
            case "cwe":
                task = find_common_words(self.length)
            case "fwe":
                task = find_frequent_words(self.length)
            case "qa_1" | "qa_2":
                return self._make_question_source(name)
            case _ if name in HAYSTACKS:
                task = hide_needles(HAYSTACKS[name], **NEEDLES[name])
            case _:
                haystack = self._make_haystack(name)
                return lambda index: hide_needles(haystack(index), **NEEDLES[name])
        return lambda index: task

    def _uses_shipped_file(self, name: str) -> bool:
        """Return whether the task uses the file that ships because none is given."""
        return self.source == NOVEL and not getattr(self, FILE_SETTING[name])

    def _find_file(self, name: str) -> str:
        """Return the file that the task uses, given or shipped; empty if its texts are
        generated.
        """
        setting = FILE_SETTING[name]
        if self._uses_shipped_file(name):
            return str(TEXTS / REPLACEMENTS[setting]["file"])
        return getattr(self, setting)

    def _make_haystack(self, name: str) -> Callable[[int], Essays]:
        """Return a function from a sample's index to its haystack.

        Files of essays and generated prose start at the first word, as in RULER. A novel starts at
        a random sentence for each sample, because a few short samples would otherwise see only its
        opening.
        """
        sentences = []
        if self._find_file(name):
            sentences = _load_sentences(self._find_file(name))
        if not sentences or not self._uses_shipped_file(name):
            source = prose.draw_sentences(Random(f"{self.seed} prose"))
            if sentences:
                source = cycle(sentences)
            essays = Essays(source)
            return lambda index: essays
        ends = list(accumulate(len(sentence.split()) for sentence in sentences))
        # How many of the first sentences can start an excerpt that stops before the end.
        starts = max(bisect_right(ends, ends[-1] - self.length), 1)

        def excerpt(index: int) -> Essays:
            start = Random(f"{self.seed} {name} {index} place").randrange(starts)
            return Essays(islice(cycle(sentences), start, None))

        return excerpt

    def _make_question_source(self, name: str) -> Callable[[int], DraftTask]:
        """Return a function from a sample's index to its question and documents.

        The questions of a given file come in its order, those of the file that ships in an order
        that the seed shuffles; without a file they are generated.
        """
        if not self._find_file(name):
            make = {"qa_1": documents.generate_articles, "qa_2": documents.generate_pairs}[name]
            count = self.length // MIN_DOCUMENT_TOKENS + 1
            return lambda index: make(count, Random(f"{self.seed} {name} {index} documents"))
        texts, questions = self._load_collection(name)
        order = list(range(len(questions)))
        if self._uses_shipped_file(name):
            Random(f"{self.seed} {name} order").shuffle(order)
        elif self.per_task > len(order):
            raise RestoreKVError(
                f"{self._find_file(name)} has {len(order)} questions; per_task must be at most "
                f"{len(order)}."
            )
        return lambda index: documents.ask_over_documents(texts, questions[order[index]])

    def _load_collection(self, name: str) -> documents.QuestionCollection:
        return documents.load_questions(FILE_SETTING[name], self._find_file(name))

    def score(self, question: Question, prediction: str) -> float:
        """Return the string match of kvpress 0.5.5: for qa whether any reference is found, for
        other tasks the share of references found.
        """
        text = re.sub(r"[\x00-\x1f]", "", prediction.strip()).strip().lower()
        matches = [answer.lower() in text for answer in question.answers]
        if question.task.startswith("qa"):
            return float(any(matches))
        return sum(matches) / len(matches)

    def to_json(self) -> dict[str, object]:
        """Include what replaces RULER's own texts, by task, and hashes of the files read."""
        if self.source == "hub":
            return self._describe_hub()
        if not self.generates:
            return self._describe_files()
        return self._describe_generated()

    def _describe_hub(self) -> dict[str, object]:
        origin = (
            f"NVIDIA/RULER by kvpress's authors: {self.length} tokens of the tokenizer of "
            "Llama-3.1-8B"
        )
        data_license = (
            "not stated; RULER is Apache-2.0, SQuAD and HotpotQA CC BY-SA 4.0, the essays Paul "
            "Graham's"
        )
        return {"data": HUB, "made": origin, "license": data_license, "metric": self.metric}

    def _describe_files(self) -> dict[str, object]:
        return {
            "data": "files in kvpress's form",
            "license": "theirs",
            **identify_source(str(check_exists(self.source))),
            "metric": self.metric,
        }

    def _describe_generated(self) -> dict[str, object]:
        files = {
            FILE_SETTING[name]: file for name in FILE_SETTING if (file := self._find_file(name))
        }
        tasks = [
            name for name in SUBSETS if name in self.chosen_tasks and self._uses_shipped_file(name)
        ]
        subsets = {}
        if tasks:
            what = "subsets" if len(tasks) > 1 else "a subset"
            parts = "; ".join(SUBSETS[name] for name in tasks)
            subsets = {"subsets": f"{' and '.join(tasks)} on {what} ({parts})"}
        return {
            "data": "generated in RULER's form, not RULER's own samples",
            "license": self._describe_license(),
            "length": (
                f"{self.length} tokens of the model's tokenizer, the answer's budget included, no "
                "template"
            ),
            "stand_ins": {
                task: text for task, text in self._list_stand_ins() if task in self.chosen_tasks
            },
            "files": {
                setting: identify_source(str(check_exists(file))) for setting, file in files.items()
            },
            **subsets,
            "metric": self.metric,
        }

    def _describe_license(self) -> str:
        if self.source != NOVEL:
            return "Apache-2.0; that of the files given"
        text = "Apache-2.0; the novel in the public domain, SQuAD and HotpotQA CC BY-SA 4.0"
        if any(getattr(self, setting) for setting in FILE_SETTING.values()):
            return f"{text}; that of the files given"
        return text

    def _list_stand_ins(self) -> Iterator[tuple[str, str]]:
        for name, setting in FILE_SETTING.items():
            if not getattr(self, setting):
                yield name, REPLACEMENTS[setting][self.source]
        if self.length // 4 < EXAMPLE_TOKENS:
            yield (
                "vt",
                f"a worked example of {self.length // 4} tokens or one noise instead of "
                f"{EXAMPLE_TOKENS}",
            )
        if self.length < SHORT:
            yield (
                "cwe",
                "common words 3 times and others once instead of 6 times and once, and a shorter "
                "example",
            )

    def group_tasks(self) -> Mapping[str, tuple[str, ...]]:
        groups = {
            name: tuple(task for task in tasks if task in self.chosen_tasks)
            for name, tasks in GROUPS.items()
        }
        return {name: tasks for name, tasks in groups.items() if tasks}


def _load_sentences(where: str) -> list[str]:
    """Return the sentences of a file or folder of texts, each run of white space as one space."""
    text = " ".join(" ".join(load_texts(where)).split())
    return SENTENCE_END.split(text)
