"""How questions follow a context in benchmarks that kvpress does not have, or has in other words."""

WORDING = "\n\nQuestion: {q}\nAnswer:"  # the best of eleven on training documents: recipes/smollm2/wording.py


def apart(question: str, protocol: str) -> str:
    """kvpress puts nothing between the two, so a blank line comes with the question; KVzip's protocol puts its own."""
    return question if protocol == "kvzip" else f"\n\n{question}"


def worded(question: str) -> tuple[str, dict[str, object]]:
    """Returns a question in the one wording of FairytaleQA, XQuAD, HotpotQA and Factbook, and the facts it needs.

    The facts keep KVzip's protocol from putting its own "Q: " before it, so that both protocols ask alike.
    """
    return WORDING.format(q=question), {"bare": True}
