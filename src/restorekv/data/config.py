"""The settings of a mixture: the defaults are the counts and limits of the paper's appendix on training data."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from restorekv.errors import RestoreKVError

MIXTURE_NAMES = ("paper", "permissive")


def setting(default: object, text: str) -> object:
    """A field with its one line of help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class BuildConfig:
    """Tokens are those of the model's tokenizer; a source of which nothing is wanted (a count of 0) is left out."""

    mixture: str = setting("paper", "paper, or permissive: freely licensed papers in place of LongAlpaca.")
    longalpaca: str = setting("Yukang/LongAlpaca-12k", "Hub id (ID@REVISION), file or folder of LongAlpaca.")
    papers: str = setting("common-pile/arxiv_papers_filtered", "Hub id, file or folder of openly licensed papers.")
    pg19: str = setting("emozilla/pg19", "Hub id, file or folder of PG-19.")
    flan: str = setting("allenai/tulu-3-sft-mixture", "Hub id, file or folder of the Tulu-3 mixture.")
    documents: int = setting(500, "Documents of LongAlpaca, or papers.")
    shortest: int = setting(2048, "Fewest tokens of such a document.")
    longest: int = setting(16000, "Most tokens of any context.")
    books: int = setting(50, "Books of PG-19.")
    chunk: int = setting(3072, "Tokens of a chunk of a book.")
    chunks: int = setting(10, "Chunks drawn from a book, at most.")
    examples: int = setting(1500, "Examples of FLAN, after the filters.")
    flan_shortest: int = setting(512, "Fewest tokens of a prompt of FLAN.")
    question_tokens: int = setting(64, "Longest question.")
    answer_tokens: int = setting(512, "Longest answer in self-study.")
    flan_answer_tokens: int = setting(256, "Longest answer to a prompt of FLAN.")
    question_characters: int = setting(10, "Questions with fewer characters are dropped.")
    least_answer: int = setting(4, "Answers with fewer tokens, the EOS apart, are dropped.")
    licences: str = setting("cc-by-4.0,cc-by-3.0,cc0-1.0,public-domain", "Licences that papers may have, with commas.")
    overlap: float = setting(0.1, "Share of 13-grams in common with an evaluation text from which on it is refused.")
    seed: int = setting(0, "Seed of the chunks drawn from books.")

    def __post_init__(self) -> None:
        if self.mixture not in MIXTURE_NAMES:
            raise RestoreKVError(f"The mixture is one of {', '.join(MIXTURE_NAMES)}, not {self.mixture!r}.")
        counts = {"documents", "books", "examples", "question_characters", "least_answer", "seed"}
        for item in fields(self):
            value, least = getattr(self, item.name), 0 if item.name in counts else 1
            if isinstance(value, int) and value < least:
                raise RestoreKVError(f"--{item.name.replace('_', '-')} is at least {least}, not {value}.")
        if not 0 < self.overlap <= 1:
            raise RestoreKVError(f"--overlap is a share above 0 and at most 1, not {self.overlap:g}.")
        if self.documents and self.shortest > self.longest:
            raise RestoreKVError(f"--shortest {self.shortest} is more than --longest {self.longest}; swap them.")
        if not (self.documents or self.books or self.examples):
            raise RestoreKVError("Nothing is wanted; give --documents, --books or --examples above 0.")

    @property
    def allowed(self) -> tuple[str, ...]:
        """The licences that papers may have."""
        return tuple(name.strip().lower() for name in self.licences.split(",") if name.strip())
