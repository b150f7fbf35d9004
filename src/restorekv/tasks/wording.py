"""Words the questions of benchmarks that kvpress lacks or words differently."""

from collections.abc import Sequence

WORDING = "\n\nQuestion: {q}\nAnswer:"  # the best of eleven on training documents: recipes/smollm2/wording.py
LETTERS = "ABCDE"
REQUEST = (
    "Please think very briefly and then respond with **only** the letter ({letters}) of the correct option. "
    "If you are not sure, still make a guess."
)


def apart(question: str, protocol: str) -> str:
    """Puts a blank line before the question, except under KVzip's protocol, which separates it from the context."""
    return question if protocol == "kvzip" else f"\n\n{question}"


def worded(question: str) -> tuple[str, dict[str, object]]:
    """Returns a question in the one wording of FairytaleQA, XQuAD, HotpotQA and Factbook, and the facts it needs.

    The facts keep KVzip's protocol from putting its own "Q: " before it, so that both protocols ask alike.
    """
    return WORDING.format(q=question), {"bare": True}


def with_options(question: str, options: Sequence[str]) -> str:
    """Returns the question, its options as "A. ..." lines, and the request for one letter of A to D, or A to E of five.

    The wording is that of RestoreKV's own evaluation (cvsp-lab/RestoreKV d591d4d, data/wrapper.py), whose request comes
    from Attention Matching.
    """
    lines = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
    letters = "A, B, C, D, or E" if len(options) > 4 else "A, B, C, or D"
    return f"{question}\n\n{lines}\n\n{REQUEST.format(letters=letters)}"
