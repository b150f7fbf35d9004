"""The World Factbook (last edition, January 2026): sections about countries as lines of fields,
asked field by field.

The questions are machine-made: they ask for the value of a field. Figures for 2025 are newer than
SmolLM2, so it cannot know them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from restorekv.tasks.base import Sample
from restorekv.tasks.metrics import contains_words
from restorekv.tasks.reading import Reading, choose_spread
from restorekv.tasks.rows import get_texts
from restorekv.tasks.splits import EVALUATION, split_factbook


@dataclass(frozen=True)
class Factbook(Reading):
    """Contexts are whole documents of 512 to 4,096 tokens.

    If `path` names a file, only its documents of `split` are asked. The file should have the whole
    collection, because the split of a document depends on all of them.
    """

    name = "factbook"
    title = "Factbook"
    shipped = "factbook/evaluation.jsonl.gz"
    source = "60 sections of The World Factbook (factbook/factbook.json at 8662a8b1)"
    license = "CC0"
    metric = "token F1; in addition whether the answer contains the value"
    further_metric = ("contained", contains_words)

    split: str = EVALUATION

    def load_rows(self) -> Iterator[tuple[str, dict]]:
        rows = list(super().load_rows())
        with self.check_form(str(self.locate_file())):
            splits = {}
            if self.path:
                splits = split_factbook(row["id"] for _, row in rows)
            yield from (
                each for each in rows if splits.get(each[1]["id"], EVALUATION) == self.split
            )

    def parse_row(self, row: dict, size: Callable[[str], int]) -> Iterator[Sample]:
        questions = [
            self.make_question(
                f"{row['id']}/{number}", "factbook", asked["question"], get_texts(asked, "answers")
            )
            for number, asked in enumerate(choose_spread(row["questions"], self.questions), 1)
        ]
        yield Sample(row["id"], row["context"], tuple(questions))

    def to_json(self) -> dict[str, object]:
        return {**super().to_json(), "questions": "machine-made", "split": self.split}
