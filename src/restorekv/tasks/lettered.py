"""QuALITY and LongHealth: questions with lettered options, asked as in RestoreKV's own evaluation.

QuALITY (arXiv 2112.08608) has stories and articles of some 5,000 words with questions of four
options. LongHealth (arXiv 2401.14490) has the records of 20 fictional patients, with 20 questions
of five options about each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from restorekv.errors import RestoreKVError
from restorekv.tasks.base import Benchmark, Question, Sample, Tokenizer, separate_question
from restorekv.tasks.metrics import find_letter
from restorekv.tasks.rows import check_form, get_field, get_texts, load_file_rows

LETTERS = "ABCDE"
REQUEST = (
    "Please think very briefly and then respond with **only** the letter ({letters}) of the "
    "correct option. "
    "If you are not sure, still make a guess."
)
MAX_NEW_TOKENS = 128
PATIENT = ("name", "birthday", "diagnosis")


@dataclass(frozen=True)
class Lettered(Benchmark):
    """A benchmark of questions with lettered options, read from one file; `path` is the file or the
    folder that holds it.
    """

    file: ClassVar[str]
    source: ClassVar[str]  # where to fetch the file
    metric = "accuracy of the first letter read"

    path: str = ""

    def locate_file(self) -> Path:
        """Return the path of the file; raise RestoreKVError if there is none."""
        path = Path(self.path) / self.file if Path(self.path).is_dir() else Path(self.path)
        if not self.path or not path.is_file():
            missing = "its data do not ship"
            if self.path:
                missing = f"there is no file {path}"
            raise RestoreKVError(
                f"{self.title} cannot be asked because {missing}; fetch {self.file} from "
                f"{self.source} and give {self.name}:path=FILE."
            )
        return path

    def make_question(
        self, name: str, text: str, options: Sequence[str], right: int, protocol: str
    ) -> Question:
        """Return a question with its options.

        RestoreKV's own evaluation puts no "Q: " before such a question; the fact `bare` makes the
        protocols leave it out.

        Args:
            name: The id of the question.
            text: What is asked, without the options.
            options: The options.
            right: The index of the right one.
            protocol: "kvpress" or "kvzip".
        """
        facts = {"options": list(options), "bare": True}
        # Question, options and request are one text, as in RestoreKV's own evaluation.
        text = separate_question(add_options(text.strip(), options), protocol)
        return Question(name, self.name, text, (LETTERS[right],), MAX_NEW_TOKENS, facts=facts)

    def averages_contexts(self, protocol: str) -> bool:
        """RestoreKV's own evaluation averages over contexts, as KVzip's does."""
        return protocol == "kvzip"

    def score(self, question: Question, prediction: str) -> float:
        return float(find_letter(prediction) == question.answers[0])


def add_options(question: str, options: Sequence[str]) -> str:
    """Return the question, its options as "A. ..." lines, and the request for a letter from A to D,
    or from A to E if there are five options.

    The wording is that of RestoreKV's own evaluation (cvsp-lab/RestoreKV d591d4d, data/wrapper.py),
    which has the request from Attention Matching.
    """
    lines = "\n".join(
        f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False)
    )
    letters = "A, B, C, D, or E" if len(options) > 4 else "A, B, C, or D"
    return f"{question}\n\n{lines}\n\n{REQUEST.format(letters=letters)}"


@dataclass(frozen=True)
class Quality(Lettered):
    """Contexts are the first `articles` articles of the dev set (0: all 115), which RestoreKV's
    authors ask, too; `subset` is "all" or "hard".

    The file has two lines for an article, each with a set of questions; they are one context here.
    "hard" asks only the questions that QuALITY's authors flag as `difficult`: most people in a
    hurry got them wrong.
    """

    name = "quality"
    title = "QuALITY"
    file = "QuALITY.v1.0.1.htmlstripped.dev"
    source = "github.com/nyu-mll/quality (in data/v1.0.1/QuALITY.v1.0.1.zip)"
    license = "CC BY 4.0"

    articles: int = 100
    subset: str = "all"

    def __post_init__(self) -> None:
        if self.subset not in ("all", "hard"):
            raise RestoreKVError(f"QuALITY's subset must be all or hard, not {self.subset!r}.")
        if self.articles < 0:
            raise RestoreKVError(f"articles must be 0 (all) or more, not {self.articles}.")

    def load_samples(self, tokenizer: Tokenizer, protocol: str) -> Iterator[Sample]:
        """Yield articles in the file's order, except those without a question of the subset."""
        merged = list(self._merge_articles().items())[: self.articles or None]
        if not merged:
            raise RestoreKVError(
                f"{self.locate_file()} has no question with a gold_label; give the dev set."
            )
        # The index counts all articles, so that a name means the same article in every subset.
        for index, ((_, article), rows) in enumerate(merged):
            questions = tuple(
                self.make_question(
                    f"{index}-{turn}",
                    row["question"],
                    row["options"],
                    row["gold_label"] - 1,
                    protocol,
                )
                for turn, row in enumerate(rows)
                if self.subset == "all" or row.get("difficult")
            )
            if questions:
                yield Sample(str(index), article, questions)

    def _merge_articles(self) -> dict[tuple[str, str], list[dict]]:
        """Return the labeled questions of each (article_id, article)."""
        articles: dict[tuple[str, str], list[dict]] = {}
        for location, row in load_file_rows(self.locate_file()):
            problem = (
                f"{location} is not an article of QuALITY with labeled questions of four options"
            )
            with check_form(problem, "fetch it again"):
                key = get_field(row, "article_id", str | int), get_field(row, "article").strip()
                labeled = [
                    each
                    for each in get_field(row, "questions", list)
                    if each.get("gold_label") is not None
                ]
                valid = (
                    get_field(each, "question")
                    and len(get_texts(each, "options")) == 4
                    and each["gold_label"] in (1, 2, 3, 4)
                    for each in labeled
                )
                # Raised inside `check_form`, which says which line is wrong.
                if not key[1] or not all(valid):
                    raise ValueError(row)
                articles.setdefault(key, []).extend(labeled)
        return {article: questions for article, questions in articles.items() if questions}

    def describe_data(self) -> str:
        articles = "all articles"
        if self.articles:
            articles = f"first {self.articles} articles"
        return f"{self.file}, {articles}, {self.subset} questions"


@dataclass(frozen=True)
class LongHealth(Lettered):
    """Contexts are the records of `patients` patients each, in the order of their ids; a last group
    with fewer patients is not asked.

    RestoreKV's own evaluation takes one patient; if there are several, every question names its
    patient.
    """

    name = "longhealth"
    title = "LongHealth"
    file = "benchmark_v5.json"
    source = "github.com/kbressem/LongHealth (data/benchmark_v5.json)"
    license = "Apache-2.0"

    patients: int = 1

    def __post_init__(self) -> None:
        if self.patients < 1:
            raise RestoreKVError(f"patients must be at least 1, not {self.patients}.")

    def load_samples(self, tokenizer: Tokenizer, protocol: str) -> Iterator[Sample]:
        path = self.locate_file()
        rows = [row for _, row in load_file_rows(path)]
        if len(rows) != 1 or not isinstance(rows[0], dict) or not rows[0]:
            raise RestoreKVError(f"{path} is not one JSON object of patients; fetch it again.")
        read = [self.parse_row(name, rows[0][name], protocol) for name in sorted(rows[0])]
        # Whole groups only.
        for start in range(0, len(read) - self.patients + 1, self.patients):
            group = read[start : start + self.patients]
            questions = tuple(question for sample in group for question in sample.questions)
            context = "\n\n".join(filter(None, (sample.context for sample in group))).strip()
            yield Sample("+".join(sample.id for sample in group), context, questions)

    def parse_row(self, name: str, patient: dict, protocol: str) -> Sample:
        """Return the records of a patient, each between tags of its name, with all questions."""
        problem = f"{self.locate_file()}: {name} lacks texts or questions in the form of version 5"
        with check_form(problem, "fetch it again"):
            records = get_field(patient, "texts", dict)
            blocks = [f"<{title}>\n{get_field(records, title)}\n</{title}>" for title in records]
            about = ", ".join(f"{key.capitalize()}: {get_field(patient, key)}" for key in PATIENT)
            intro = ""
            if self.patients > 1:
                intro = f"About patient ID {name}, {about}: "
            questions = [
                self._parse_question(name, row, intro, protocol)
                for row in get_field(patient, "questions", list)
            ]
            return Sample(name, "\n\n".join(blocks), tuple(questions))

    def _parse_question(self, name: str, row: dict, intro: str, protocol: str) -> Question:
        """Return a question of the file, which gives the right answer by its text and may lack
        options.
        """
        keys = [f"answer_{letter.lower()}" for letter in LETTERS]
        options = [get_field(row, key) for key in keys if row.get(key)]
        stripped = [option.strip() for option in options]
        right = get_field(row, "correct").strip()
        # The file names the right answer by its text.
        if right not in stripped:
            raise RestoreKVError(
                f"{self.locate_file()}: question {row['No']} of {name} has no right option; fix "
                "the file."
            )
        text = intro + get_field(row, "question").strip()
        return self.make_question(
            f"{name}-{row['No']}", text, options, stripped.index(right), protocol
        )

    def describe_data(self) -> str:
        return f"{self.file}, patients a context: {self.patients}"
