"""The settings of a mixture: the defaults are the counts and limits of the paper's appendix on training data."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from restorekv.errors import RestoreKVError

MIXTURE_NAMES = ("paper", "permissive", "passages")


def setting(default: object, text: str) -> object:
    """A field with its one line of help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class BuildConfig:
    """Tokens are those of the model's tokenizer; a source of which nothing is wanted (a count of 0) is left out."""

    mixture: str = setting(
        "paper",
        "paper; permissive: freely licensed papers in place of LongAlpaca; passages: parts of stories, novels and "
        "fact sheets, for small models.",
    )
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
    stories: str = setting("stories", "File or folder of FairytaleQA's training stories (passages).")
    novels: str = setting("novels", "File or folder of novels (passages).")
    sections: str = setting("sections", "File or folder of the Factbook's sections (passages).")
    story_passages: int = setting(200, "Passages of stories.")
    novel_passages: int = setting(120, "Passages of novels.")
    section_passages: int = setting(60, "Sections of the Factbook.")
    per_novel: int = setting(12, "Passages of one novel, at most.")
    passage_shortest: int = setting(320, "Fewest tokens of a passage.")
    passage_longest: int = setting(1600, "Most tokens of a passage.")
    questions: int = setting(4, "Questions of a passage that come with it, at most.")
    invented: float = setting(0.3, "Share of the passages into which made-up facts are put.")
    wording: str = setting("{question}", "How a question that comes with a text is put; {question} stands for it.")
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
        counts = {
            "documents", "books", "examples", "question_characters", "least_answer", "seed", "story_passages",
            "novel_passages", "section_passages",
        }  # fmt: skip
        for item in fields(self):
            value, least = getattr(self, item.name), 0 if item.name in counts else 1
            if isinstance(value, int) and value < least:
                raise RestoreKVError(f"--{item.name.replace('_', '-')} is at least {least}, not {value}.")
        if not 0 < self.overlap <= 1:
            raise RestoreKVError(f"--overlap is a share above 0 and at most 1, not {self.overlap:g}.")
        if self.documents and self.shortest > self.longest:
            raise RestoreKVError(f"--shortest {self.shortest} is more than --longest {self.longest}; swap them.")
        if not 0 <= self.invented <= 1:
            raise RestoreKVError(f"--invented is a share from 0 to 1, not {self.invented:g}.")
        if "{question}" not in self.wording:
            raise RestoreKVError(f"--wording needs {{question}} where the question stands, not {self.wording!r}.")
        if self.passage_shortest > self.passage_longest:
            raise RestoreKVError("--passage-shortest is more than --passage-longest; swap them.")
        wanted = (
            (self.story_passages, self.novel_passages, self.section_passages)
            if self.mixture == "passages"
            else (self.documents, self.books, self.examples)
        )
        if not any(wanted):
            raise RestoreKVError("Nothing is wanted; give at least one source a count above 0.")

    @property
    def allowed(self) -> tuple[str, ...]:
        """The licences that papers may have."""
        return tuple(name.strip().lower() for name in self.licences.split(",") if name.strip())
