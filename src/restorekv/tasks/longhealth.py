"""LongHealth (arXiv 2401.14490): the records of 20 fictional patients, 20 questions of five options about each."""

from collections.abc import Iterator
from dataclasses import dataclass

from restorekv.errors import RestoreKVError
from restorekv.tasks.base import Question, Sample, Tokenizer
from restorekv.tasks.reading import Lettered
from restorekv.tasks.rows import field, file_rows, well_formed

OPTIONS = ("answer_a", "answer_b", "answer_c", "answer_d", "answer_e")


@dataclass(frozen=True)
class LongHealth(Lettered):
    """A context is the records of `patients` patients, in the order of their ids; those left over are not asked.

    RestoreKV's own evaluation takes one patient; if there are several, every question names its patient.
    """

    name, title = "longhealth", "LongHealth"
    file = "benchmark_v5.json"
    source = "github.com/kbressem/LongHealth (data/benchmark_v5.json)"
    license = "Apache-2.0"

    patients: int = 1

    def __post_init__(self) -> None:
        if self.patients < 1:
            raise RestoreKVError(f"A context of LongHealth has at least 1 patient, not {self.patients}.")

    def samples(self, tokenizer: Tokenizer, protocol: str) -> Iterator[Sample]:
        path = self.located()
        rows = [row for _, row in file_rows(path)]
        if len(rows) != 1 or not isinstance(rows[0], dict) or not rows[0]:
            raise RestoreKVError(f"{path} is not one JSON object of patients; fetch it again.")
        read = [self.read(name, rows[0][name], protocol) for name in sorted(rows[0])]
        for start in range(0, len(read) - self.patients + 1, self.patients):
            group = read[start : start + self.patients]
            questions = [question for sample in group for question in sample.questions]
            context = "\n\n".join(filter(None, (sample.context for sample in group))).strip()
            yield Sample("+".join(sample.id for sample in group), context, tuple(questions))

    def read(self, name: str, patient: dict, protocol: str) -> Sample:
        """Returns the records of a patient, each between tags of its name, with all questions."""
        problem = f"{self.located()}: {name} lacks texts or questions in the form of version 5"
        with well_formed(problem, "fetch it again"):
            records = field(patient, "texts", dict)
            blocks = [f"<{title}>\n{field(records, title)}\n</{title}>" for title in records]
            about = ", ".join(f"{key.capitalize()}: {field(patient, key)}" for key in ("name", "birthday", "diagnosis"))
            intro = f"About patient ID {name}, {about}: " if self.patients > 1 else ""
            questions = [self.read_question(name, row, intro, protocol) for row in field(patient, "questions", list)]
            return Sample(name, "\n\n".join(blocks), tuple(questions))

    def read_question(self, name: str, row: dict, intro: str, protocol: str) -> Question:
        """Returns a question of the file, which gives the right answer by its text and may lack options."""
        options = [field(row, key) for key in OPTIONS if row.get(key)]
        stripped = [option.strip() for option in options]
        right = field(row, "correct").strip()
        if right not in stripped:
            raise RestoreKVError(f"{self.located()}: question {row['No']} of {name} has no right option; fix the file.")
        text = intro + field(row, "question").strip()
        return self.question(f"{name}-{row['No']}", text, options, stripped.index(right), protocol)

    @property
    def data(self) -> str:
        return f"{self.file}, patients a context: {self.patients}"
