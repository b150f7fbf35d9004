"""Texts of facts that ship for the demo, with questions that have one short true answer.

No table reports scores on them. `tasks/texts/facts/README.md` has sources and licenses.
"""

from restorekv.files import read_bytes, read_json
from restorekv.tasks.base import Question, Sample
from restorekv.tasks.reading import TEXTS

FOLDER = TEXTS / "facts"
LONGEST_ANSWER = 24  # tokens


def load_facts() -> list[Sample]:
    """Return the texts with all of their questions, which are asked as a user would ask them."""
    by_name = read_json(FOLDER / "questions.json", "The questions of the demo")
    samples = []
    for name, rows in by_name.items():
        text = read_bytes(FOLDER / f"{name}.txt", f"The text {name}").decode()
        questions = []
        for number, row in enumerate(rows, 1):
            questions.append(
                Question(
                    f"{name}/{number}",
                    name,
                    row["question"],
                    tuple(row["answers"]),
                    LONGEST_ANSWER,
                )
            )
        samples.append(Sample(name, text, tuple(questions)))
    return samples
