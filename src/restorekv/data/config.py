"""The settings of a mixture: the defaults are the counts and limits of the paper's appendix on
training data.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from restorekv.errors import RestoreKVError, check_choice

MIXTURE_NAMES = ("paper", "permissive", "passages", "corpus")
MAY_BE_ZERO = {
    "documents",
    "books",
    "examples",
    "question_characters",
    "least_answer",
    "seed",
    "story_passages",
    "novel_passages",
    "section_passages",
    "corpus_passages",
    "human_questions",
    "loop",
    "short_answer_tokens",
}


def setting(default: object, help: str) -> Any:
    """Return a dataclass field with the `help` text of its command-line option."""
    return field(default=default, metadata={"help": help})


def require_at_least(least: int, config: object, names: Iterable[str]) -> None:
    """Refuse settings below `least`, infinite ones and NaN; accept None, a choice left open."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value < math.inf:
            raise RestoreKVError(f"{name} must be at least {least}, not {value}.")


@dataclass(frozen=True)
class BuildConfig:
    """The settings of a build. Tokens are counted with the model's tokenizer; a source with a count
    of 0 is left out.
    """

    mixture: str = setting(
        "paper",
        "paper; permissive: freely licensed papers instead of LongAlpaca; passages: parts of "
        "stories, novels and fact sheets, for small models; corpus: passages of many genres and "
        "made-up tables, settings and logs.",
    )
    longalpaca: str = setting(
        "Yukang/LongAlpaca-12k", "Hub id (ID@REVISION), file or folder of LongAlpaca."
    )
    papers: str = setting(
        "common-pile/arxiv_papers_filtered", "Hub id, file or folder of openly licensed papers."
    )
    pg19: str = setting("emozilla/pg19", "Hub id, file or folder of PG-19.")
    flan: str = setting(
        "allenai/tulu-3-sft-mixture", "Hub id, file or folder of the Tulu-3 mixture."
    )
    documents: int = setting(500, "Number of LongAlpaca documents, or of papers.")
    shortest: int = setting(2048, "Minimum tokens of such a document.")
    longest: int = setting(16000, "Maximum tokens of any context.")
    books: int = setting(50, "Number of PG-19 books.")
    chunk: int = setting(3072, "Tokens per chunk of a book.")
    chunks: int = setting(10, "Maximum number of chunks drawn from a book.")
    examples: int = setting(1500, "Number of FLAN examples, after filtering.")
    flan_shortest: int = setting(512, "Minimum tokens of a FLAN prompt.")
    stories: str = setting(
        "stories", "File or folder of FairytaleQA's training stories (passages)."
    )
    novels: str = setting("novels", "File or folder of novels (passages).")
    sections: str = setting("sections", "File or folder of the Factbook's sections (passages).")
    corpus: str = setting(
        "corpus", "File or folder of passages with their genre and license (corpus)."
    )
    corpus_passages: int = setting(
        2400, "Number of passages from the corpus, made documents included."
    )
    made: float = setting(0.15, "Share of these that are made-up tables, settings, logs and lists.")
    part: str = setting(
        "1/1", "K/N builds every N-th passage of the corpus from the K-th on, to share the work."
    )
    human_questions: int = setting(
        2, "Maximum number of people's questions about a passage of the corpus that are used."
    )
    loop: int = setting(
        0, "Stop an answer once its last N tokens have already appeared in it; 0: never."
    )
    story_passages: int = setting(200, "Number of passages from stories.")
    novel_passages: int = setting(120, "Number of passages from novels.")
    section_passages: int = setting(60, "Number of Factbook sections.")
    per_novel: int = setting(12, "Maximum number of passages from one novel.")
    passage_shortest: int = setting(320, "Minimum tokens of a passage.")
    passage_longest: int = setting(
        1600,
        "Maximum tokens of a passage, without invented facts; of made documents about as many.",
    )
    questions: int = setting(4, "Maximum number of a passage's own questions that are used.")
    invented: float = setting(0.3, "Share of the passages that get invented facts.")
    wording: str = setting(
        "{question}", "Template for a passage's own questions; {question} is the question."
    )
    question_tokens: int = setting(64, "Maximum tokens of a question.")
    answer_tokens: int = setting(512, "Maximum tokens of an answer in self-study.")
    short_answer_tokens: int = setting(
        0, "Maximum tokens of an answer about a single place of the text; 0: the same as others."
    )
    flan_answer_tokens: int = setting(256, "Maximum tokens of an answer to a FLAN prompt.")
    question_characters: int = setting(10, "Shorter questions are dropped.")
    least_answer: int = setting(4, "Answers with fewer tokens, not counting the EOS, are dropped.")
    licenses: str = setting(
        "cc-by-4.0,cc-by-3.0,cc0-1.0,public-domain",
        "Licenses that papers may have, separated by commas.",
    )
    overlap: float = setting(
        0.1, "Documents that share at least this fraction of 13-grams with a test are refused."
    )
    seed: int = setting(
        0, "Seed of what is drawn: chunks of books, passages, questions and made-up facts."
    )

    def __post_init__(self) -> None:
        check_choice("The mixture", self.mixture, MIXTURE_NAMES)
        # Every whole number is a count; those that may be 0 turn something off.
        hints = get_type_hints(type(self))
        counts = {item.name for item in fields(self) if hints[item.name] is int}
        require_at_least(0, self, MAY_BE_ZERO)
        require_at_least(1, self, sorted(counts - MAY_BE_ZERO))
        if not 0 < self.overlap <= 1:
            raise RestoreKVError(f"overlap must be above 0 and at most 1, not {self.overlap:g}.")
        if self.documents and self.shortest > self.longest:
            raise RestoreKVError(
                f"--shortest {self.shortest} is more than --longest {self.longest}; swap them."
            )
        if not 0 <= self.invented <= 1:
            raise RestoreKVError(f"invented must be from 0 to 1, not {self.invented:g}.")
        if "{question}" not in self.wording:
            raise RestoreKVError(
                f"--wording needs {{question}} where the question goes, not {self.wording!r}."
            )
        if self.passage_shortest > self.passage_longest:
            raise RestoreKVError("--passage-shortest is more than --passage-longest; swap them.")
        if not 0 <= self.made < 1:
            raise RestoreKVError(f"made must be at least 0 and below 1, not {self.made:g}.")
        _, parts = self.shard  # refuses a malformed part
        # Without this, every part of another mixture would be the whole of it.
        if parts > 1 and self.mixture != "corpus":
            raise RestoreKVError("--part is for --mixture corpus; add that, or leave out --part.")
        counts_of_mixture = {
            "passages": (self.story_passages, self.novel_passages, self.section_passages),
            "corpus": (self.corpus_passages,),
        }
        if not any(
            counts_of_mixture.get(self.mixture, (self.documents, self.books, self.examples))
        ):
            raise RestoreKVError(
                "Every source has a count of 0; give at least one a count above 0."
            )

    @property
    def shard(self) -> tuple[int, int]:
        """The part of the corpus that is built, counted from 0, and the number of parts."""
        found = re.fullmatch(r"([1-9][0-9]{0,3})/([1-9][0-9]{0,3})", self.part)
        if not found or int(found[1]) > int(found[2]):
            raise RestoreKVError(
                f"--part must be K/N with K from 1 to N, such as 1/2, not {self.part!r}."
            )
        return int(found[1]) - 1, int(found[2])

    @property
    def allowed_licenses(self) -> tuple[str, ...]:
        return tuple(name.strip().lower() for name in self.licenses.split(",") if name.strip())
