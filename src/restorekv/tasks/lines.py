"""Texts of the user's own: a JSON line for each text, with its questions and their answers.

The form is that of training data, `{"context": ..., "questions": [...], "answers": [...]}`, with an
answer to each question: a text, or a list of texts, any of which is right.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from restorekv.errors import RestoreKVError
from restorekv.tasks.base import Question, Sample
from restorekv.tasks.metrics import contains_words, normalize
from restorekv.tasks.reading import Reading, choose_spread
from restorekv.tasks.rows import FieldError, Rows, check_form, get_field, get_texts, load_rows

FORM = '{"context": text, "questions": [text, ...], "answers": [text or list of texts, ...]}'


@dataclass(frozen=True)
class Lines(Reading):
    """Contexts are the texts of the file `path`, whole and in its order.

    A row may have an `id` (by default its number) and a `task`, by which scores are averaged.
    """

    name = "lines"
    title = "Own texts"
    shipped = ""  # nothing does
    source = "a file of the user's"
    license = "not known"
    metric = "token F1, best over the answers; in addition whether one is contained"
    further_metric = ("contained", contains_words)

    questions: int = 0

    def load_rows(self) -> Rows:
        """Yield the rows of `path` with an id each."""
        if not self.path:
            raise RestoreKVError(
                "lines asks about your own texts; name their file, as in lines:path=mine.jsonl."
            )
        for number, (location, row) in enumerate(load_rows(self.path), 1):
            yield location, {"id": str(number), **row} if isinstance(row, dict) else row

    def check_form(self, location: str) -> AbstractContextManager[None]:
        return check_form(f"{location} is not a text with questions and answers", f"write {FORM}")

    def parse_row(self, row: dict, size: Callable[[str], int]) -> Iterator[Sample]:
        context = get_field(row, "context")
        if not context.strip():
            raise FieldError("context")
        questions = get_texts(row, "questions")
        answers = get_field(row, "answers", list)
        if len(answers) != len(questions):
            raise FieldError("answers", f"has {len(answers)}, and questions has {len(questions)}")
        task = get_field(row, "task") if "task" in row else self.name
        asked = []
        for number, (question, answer) in enumerate(zip(questions, answers, strict=True), 1):
            references = [answer] if isinstance(answer, str) else answer
            found = get_texts({"answers": references}, "answers")
            if not question.strip():
                raise FieldError("questions")
            if not all(text.strip() for text in found):
                raise FieldError("answers")
            asked.append(self.make_question(f"{row['id']}/{number}", task, question, found))
        yield Sample(str(row["id"]), context, tuple(choose_spread(asked, self.questions)))

    def score(self, question: Question, prediction: str) -> float:
        """Return the token F1. An answer without words, such as the letter A or a sign, is right if
        it is the whole of the first line.
        """
        line = prediction.strip().partition("\n")[0].strip(" .").casefold()
        for answer in question.answers:
            if not normalize(answer) and line == answer.strip(" .").casefold():
                return 1.0
        return super().score(question, prediction)
