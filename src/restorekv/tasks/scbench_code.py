"""RepoQA's metric (arXiv 2406.06025, github.com/evalplus/repoqa) as SCBench and KVzip use it.

It compares the prediction's first function with every function that the context's questions ask for. The prediction
passes if the right one is the most similar and BLEU is at least 0.8.
"""

import re
from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from typing import Any

from restorekv.data.files import optional
from restorekv.errors import RestoreKVError

THRESHOLD = 0.8
BLOCK = re.compile(r"^```\w*\s*\n(.*?)^```", re.DOTALL | re.MULTILINE)
GRAMMARS = {  # package, its function, the node type of a named function
    "python": ("tree_sitter_python", "language", "function_definition"),
    "java": ("tree_sitter_java", "language", "method_declaration"),
    "typescript": ("tree_sitter_typescript", "language_typescript", "function_declaration"),
    "rust": ("tree_sitter_rust", "language", "function_item"),
    "cpp": ("tree_sitter_cpp", "language", "function_definition"),
    "go": ("tree_sitter_go", "language", "function_declaration"),
}


def passes(prediction: str, language: str, name: str, functions: Sequence[tuple[str, str]]) -> float:
    """Returns whether the prediction is the function of that name, out of `functions` as (name, source).

    The first of equally similar functions counts.
    """
    code = extracted(prediction, language)
    score, best = max(((similarity(code, source), other) for other, source in functions), key=itemgetter(0))
    return float(best == name and score >= THRESHOLD)


def similarity(candidate: str, reference: str) -> float:
    """Returns sentence BLEU over words between spaces, smoothed by Chen and Cherry's method 4 (the library nltk)."""
    bleu = optional("nltk.translate.bleu_score", "eval")
    words = [re.split(r"\s+", text.strip()) for text in (candidate, reference)]
    return bleu.sentence_bleu([words[1]], words[0], smoothing_function=bleu.SmoothingFunction().method4)


def extracted(prediction: str, language: str) -> str:
    """Returns the first function in a fenced block, else the first block, else all of the prediction."""
    prediction = prediction.strip()
    blocks = BLOCK.findall(prediction)
    functions = (first_function(block, language) for block in blocks)
    return next(filter(None, functions), blocks[0] if blocks else prediction)


def first_function(source: str, language: str) -> str:
    """Returns the first function by tree-sitter's grammar, without decorators or templates around it; else ""."""
    encoded = source.encode()
    kind = GRAMMARS[language][2]
    stack = [parser(language).parse(encoded).root_node]
    while stack:
        node = stack.pop()
        if node.type == kind and is_named(node, language):
            return encoded[node.start_byte : node.end_byte].decode()
        stack += reversed(node.children)
    return ""


def is_named(node: Any, language: str) -> bool:
    """Returns whether a function counts: in C++ methods, operators and functions that return pointers do not."""
    if language != "cpp":
        return node.child_by_field_name("name") is not None
    declarator = node.child_by_field_name("declarator")
    is_function = declarator is not None and declarator.type == "function_declarator"
    name = declarator.child_by_field_name("declarator") if is_function else None
    return name is not None and name.type == "identifier"


@cache
def parser(language: str) -> Any:
    """Returns tree-sitter's parser; raises RestoreKVError for an unknown language or a missing package."""
    if language not in GRAMMARS:
        raise RestoreKVError(f"Functions of {language} cannot be told apart; known are {', '.join(GRAMMARS)}.")
    library = optional("tree_sitter", "eval")
    package, function, _ = GRAMMARS[language]
    return library.Parser(library.Language(getattr(optional(package, "eval"), function)()))
