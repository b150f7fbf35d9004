"""QuALITY (arXiv 2112.08608): stories and articles of some 5,000 words with questions of four options."""

from collections.abc import Iterator
from dataclasses import dataclass

from restorekv.errors import RestoreKVError
from restorekv.tasks.base import Sample, Tokenizer
from restorekv.tasks.reading import Lettered
from restorekv.tasks.rows import field, file_rows, texts, well_formed


@dataclass(frozen=True)
class Quality(Lettered):
    """Asks the first `articles` of the dev set (0: all 115), as RestoreKV's authors do; `subset` is "all" or "hard".

    The file gives an article in two lines with a set of questions each; they are one context here. "hard" are the
    questions that the authors flag `difficult`: most people in a hurry got them wrong.
    """

    name, title = "quality", "QuALITY"
    file = "QuALITY.v1.0.1.htmlstripped.dev"
    source = "github.com/nyu-mll/quality (in data/v1.0.1/QuALITY.v1.0.1.zip)"
    license = "CC BY 4.0"

    articles: int = 100
    subset: str = "all"

    def __post_init__(self) -> None:
        if self.subset not in ("all", "hard"):
            raise RestoreKVError(f"The subset of QuALITY is all or hard, not {self.subset!r}.")

    def samples(self, tokenizer: Tokenizer, protocol: str) -> Iterator[Sample]:
        """Yields articles in the file's order, except those without a question of the subset."""
        merged = list(self.merged().items())[: self.articles or None]
        if not merged:
            raise RestoreKVError(f"{self.located()} has no question with a gold_label; give the dev set.")
        for index, ((_, article), rows) in enumerate(merged):
            questions = tuple(
                self.question(f"{index}-{turn}", row["question"], row["options"], row["gold_label"] - 1, protocol)
                for turn, row in enumerate(rows)
                if self.subset == "all" or row.get("difficult")
            )
            if questions:
                yield Sample(str(index), article, questions)

    def merged(self) -> dict[tuple[str, str], list[dict]]:
        """Returns the labeled questions of each (article_id, article)."""
        articles: dict[tuple[str, str], list[dict]] = {}
        for place, row in file_rows(self.located()):
            problem = f"{place} is not an article of QuALITY with labeled questions of four options"
            with well_formed(problem, "fetch it again"):
                key = field(row, "article_id", str | int), field(row, "article").strip()
                labeled = [each for each in field(row, "questions", list) if each.get("gold_label") is not None]
                valid = (
                    field(each, "question") and len(texts(each, "options")) == 4 and each["gold_label"] in (1, 2, 3, 4)
                    for each in labeled
                )  # fmt: skip
                if not key[1] or not all(valid):
                    raise ValueError(row)
                articles.setdefault(key, []).extend(labeled)
        return {article: questions for article, questions in articles.items() if questions}

    @property
    def data(self) -> str:
        articles = f"first {self.articles} articles" if self.articles else "all articles"
        return f"{self.file}, {articles}, {self.subset} questions"
