"""FairytaleQA (arXiv 2203.13947): questions by education experts about stories, in two tasks,
explicit and implicit.

A question belongs to the sections of its story that hold its answer. The files number the sections
but do not say where they begin. A passage is therefore asked a question only if two signs agree
that the question belongs there: the words of question and answers, and where in the story the
section numbers lie. On 25 training stories whose sections are known, 96 % of the questions asked
belonged to their passage at 1,024 tokens, and 9 % of all questions were left out.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from restorekv.data.files import list_source_files
from restorekv.errors import RestoreKVError
from restorekv.tasks.base import Question, Sample
from restorekv.tasks.metrics import longest_common_f1, normalize
from restorekv.tasks.reading import Reading, choose_spread, split_text
from restorekv.tasks.rows import check_exists, get_texts, load_file_rows
from restorekv.tasks.splits import EVALUATION, split_fairytale

FILES = ("train", "val")  # names, without their endings
POSITION = 3  # what a distance, as a share of the story, takes off the share of words found
COMMON = frozenset(
    "what why how who where when which did does do is was were be been to of in on at for and or "
    "he she it his her "
    "they them their with that this as by from had has have not would could will about after "
    "before so because him i "
    "you".split()
)


@dataclass(frozen=True)
class FairytaleQA(Reading):
    """Contexts are passages of stories of at most `length` tokens, cut at paragraph ends; 0 keeps
    the stories whole.

    Only the stories of one `split` are asked: val.jsonl is for evaluation, train.jsonl for the
    others, whether `path` is one of them or a folder of both.
    """

    name = "fairytaleqa"
    title = "FairytaleQA"
    shipped = "fairytaleqa/val.jsonl.gz"
    source = "FairytaleQA's validation set (uci-soe/FairytaleQAData at a24ddc17)"
    license = "Apache-2.0; the stories are in the public domain"
    metric = "token F1; in addition ROUGE-L; both best over two annotators"
    further_metric = ("rouge_l", longest_common_f1)

    length: int = 1024
    split: str = EVALUATION

    def load_rows(self) -> Iterator[tuple[str, dict]]:
        for path in list_source_files(check_exists(self.locate_file())):
            file = path.name.partition(".")[0]
            if file not in FILES:
                raise RestoreKVError(
                    f"{path} is neither train nor val, which says whether its stories are for "
                    "evaluation; name it train.jsonl or val.jsonl."
                )
            for index, story in enumerate(load_file_rows(path)):
                if split_fairytale(file, index) == self.split:
                    yield story

    def parse_row(self, row: dict, size: Callable[[str], int]) -> Iterator[Sample]:
        """Yield the passages that have questions."""
        passages = split_text(row["context"], self.length, size)
        by_passage: list[list[Question]] = [[] for _ in passages]
        for asked, index in zip(
            row["questions"], match_passages(row["questions"], passages), strict=True
        ):
            if index is not None:
                task = "explicit" if asked["explicit"] else "implicit"
                question = self.make_question(
                    asked["id"], task, asked["question"], get_texts(asked, "answers")
                )
                by_passage[index].append(question)
        for number, (text, questions) in enumerate(zip(passages, by_passage, strict=True), 1):
            if questions:
                name = (
                    f"{row['id']}/{number} of {len(passages)}" if len(passages) > 1 else row["id"]
                )
                yield Sample(name, text, tuple(choose_spread(questions, self.questions)))

    def to_json(self) -> dict[str, object]:
        return {**super().to_json(), "split": self.split}


def match_passages(questions: Sequence[dict], passages: Sequence[str]) -> list[int | None]:
    """Return the index of the passage that each question of a story is about; None if words and
    place disagree.
    """
    sections = []  # of each question; their numbers begin at 1
    for each in questions:
        sections.append([int(number) for number in each["sections"].split(",")])
    last = max(map(max, sections), default=1)
    ends = list(accumulate(len(text) for text in passages))
    edges = [end / ends[-1] for end in (0, *ends)]
    vocabularies = [content_words(text) for text in passages]
    frequency = Counter(word for words in vocabularies for word in words)
    indices = []
    for each, numbers in zip(questions, sections, strict=True):
        evidence = content_words(" ".join([each["question"], *each["answers"]]))
        weights = {
            word: math.log((len(passages) + 1) / (frequency[word] + 0.5)) for word in evidence
        }
        # fsum, because a set's order, and so the last bit of a plain sum, varies by process.
        total = math.fsum(weights.values()) or 1.0
        shares = []
        for words in vocabularies:
            shares.append(math.fsum(weights[word] for word in evidence & words) / total)
        center = (sum(numbers) / len(numbers) - 0.5) / last
        distances = [max(low - center, center - high, 0) for low, high in pairwise(edges)]
        likelihoods = [
            share - POSITION * distance for share, distance in zip(shares, distances, strict=True)
        ]
        by_words = max(range(len(passages)), key=shares.__getitem__)
        by_both = max(range(len(passages)), key=likelihoods.__getitem__)
        indices.append(by_both if by_words == by_both else None)
    return indices


def content_words(text: str) -> set[str]:
    """Return the normalized words of a text that are not common."""
    return set(normalize(text).split()) - COMMON
