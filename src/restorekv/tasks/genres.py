"""Passages of 38 genres, from contracts and logs to plays and papers, to see how a cache does on
texts of any kind.

If people wrote questions and references for a passage, these are asked. The other questions are
exercises with the answer in the text: fill in a blank, continue a quotation, say what comes before
or after. Small models solve few of the exercises, even with the full cache, so for these the
divergence from the full cache says more than the score.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from restorekv.tasks.base import Sample
from restorekv.tasks.metrics import longest_common_f1
from restorekv.tasks.reading import Reading, choose_spread
from restorekv.tasks.rows import get_field, get_texts


@dataclass(frozen=True)
class Genres(Reading):
    """Contexts are single passages. The genre of a passage is its task, so scores and divergence
    are reported by genre.
    """

    name = "genres"
    title = "Genres"
    shipped = "genres/evaluation.jsonl.gz"
    source = "80 passages of 38 genres of a corpus, kept out of training"
    metric = "token F1; in addition ROUGE-L"
    further_metric = ("rouge_l", longest_common_f1)
    license = "each passage's own, all free: public domain, CC0, CC BY and permissive ones"

    def parse_row(self, row: dict, size: Callable[[str], int]) -> Iterator[Sample]:
        """Yield the passage of a row with its questions."""
        questions = [
            self.make_question(
                f"{row['id']} {number}",
                row["genre"],
                get_field(asked, "question"),
                get_texts(asked, "answers"),
            )
            for number, asked in enumerate(row["questions"], 1)
        ]
        yield Sample(row["id"], row["context"], tuple(choose_spread(questions, self.questions)))
