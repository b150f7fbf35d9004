"""SCBench (arXiv 2412.10319): many questions about one long context, 26K to 170K tokens, in nine
tasks of the paper.

The data are those of KVzip's evaluation (hub: Jang-Hyun/SCBench-preprocessed), a parquet file for
each task: prompts (context, then questions), ground_truth, and for repoqa lang, repo and func_name.
Contexts and questions are asked unchanged.

Metrics are those of KVzip and RestoreKV (results/metric.py of cvsp-lab/RestoreKV 2dbcfa9 and
Janghyun1230/FastKVzip); snu-mllab/KVzip (5d84729) differs in `score_option` alone, where it looks
at brackets only if both texts begin with one. For repoqa they are RepoQA's (arXiv 2406.06025,
github.com/evalplus/repoqa): of all functions that the context's questions ask for, the right one
must be the most similar to the prediction's first function, with BLEU of at least 0.8.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

from restorekv.data.files import read_parquet_rows
from restorekv.errors import RestoreKVError, import_extra
from restorekv.tasks.base import Benchmark, Question, Sample, Tokenizer, separate_question
from restorekv.tasks.metrics import contains_text, rouge_l, token_f1, write_digits
from restorekv.tasks.rows import check_form, explain_unreachable, get_field, get_texts

HUB = "Jang-Hyun/SCBench-preprocessed"
TASKS = (
    "kv",
    "prefix_suffix",
    "vt",
    "repoqa",
    "qa_eng",
    "choice_eng",
    "mf",
    "many_shot",
    "summary",
)
FULL_ONLY = ("vt", "qa_eng", "choice_eng")  # tasks without shorter variants
SHORTER = ("tiny", "short", "mid")  # contexts of some 8K, 20K and 60K tokens
KNOWN = (*TASKS, *(f"{task}_{tag}" for task in TASKS if task not in FULL_ONLY for tag in SHORTER))
# Limits of answers in tokens; "kvpress" has those of microsoft/MInference's scbench/eval_utils.py.
LENGTHS = {
    "kvzip": dict.fromkeys(TASKS, 96) | {"mf": 32, "summary": 256, "repoqa": 512},
    "kvpress": {
        "kv": 150,
        "prefix_suffix": 150,
        "vt": 30,
        "repoqa": 1024,
        "qa_eng": 40,
        "choice_eng": 40,
        "mf": 5,
        "many_shot": 10,
        "summary": 200,
    },
}
END = "</s>"
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


@dataclass(frozen=True)
class SCBench(Benchmark):
    """SCBench from the folder `path`, or from the hub at `revision` if it is empty.

    `tasks` are names joined by "+"; names such as kv_short and mf_mid have shorter contexts.
    """

    name = "scbench"
    title = "SCBench"
    license = "MIT (microsoft/SCBench)"
    metric = (
        "KVzip's: found, share found, exact, option, ROUGE-L, max of F1 and found, or pass@1 at "
        "BLEU 0.8"
    )
    known_tasks = KNOWN

    tasks: str = "+".join(TASKS)
    path: str = ""
    revision: str = "main"

    def load_samples(self, tokenizer: Tokenizer, protocol: str) -> Iterator[Sample]:
        """Yield the contexts of the tasks in the order in which the setting names them."""
        import_extra("nltk", "eval")  # fails before the first answer, not after it
        for task in self.tasks.split("+"):
            path = self.locate_file(task)
            for index, row in enumerate(read_parquet_rows(path)):
                yield _parse_row(task, f"{task}-{index}", f"{path}, row {index + 1}", row, protocol)

    def locate_file(self, task: str) -> Path:
        """Return the path of the task's file, which is downloaded unless `path` names a folder."""
        file = f"scbench_{task}.parquet"
        if not self.path:
            try:
                return Path(hf_hub_download(HUB, file, repo_type="dataset", revision=self.revision))
            except Exception as error:  # unreachable, unknown: the hub's client raises many kinds
                instead = "fetch it with a network and give path=FOLDER"
                raise explain_unreachable(f"{file} of {HUB}", error, instead) from error
        if not (Path(self.path) / file).is_file():
            raise RestoreKVError(
                f"{self.path} has no file {file}; fetch it from {HUB} (hub) or name other tasks."
            )
        return Path(self.path) / file

    def score(self, question: Question, prediction: str) -> float:
        """Return KVzip's metric of the task. An empty answer scores 0; for repoqa, KVzip leaves it
        out of the mean instead.
        """
        answer = prediction.removesuffix(END)
        if not answer.strip():
            return 0.0
        if get_full_task(question.task) == "repoqa":
            facts = question.facts
            return passes_repoqa(answer, facts["language"], facts["function"], facts["functions"])
        return METRICS[get_full_task(question.task)](answer, question.answers[0])

    def averages_contexts(self, protocol: str) -> bool:
        return protocol == "kvzip"

    def describe_data(self) -> str:
        return self.path or f"{HUB} (Hugging Face), {self.revision}"

    def to_json(self) -> dict[str, object]:
        return {
            **super().to_json(),
            "lengths": "KVzip's under kvzip, SCBench's own under kvpress",
        }


def get_full_task(task: str) -> str:
    """Return the task itself or, for a shorter variant such as "kv_short", the full one."""
    name, _, tag = task.rpartition("_")
    return name if tag in SHORTER else task


def _parse_row(task: str, name: str, location: str, row: dict, protocol: str) -> Sample:
    """Return a row's context and questions."""
    kind = get_full_task(task)
    fix = "fetch the file again"
    with check_form(f"{location} lacks a context and a prompt for every ground_truth", fix):
        prompts = get_texts(row, "prompts")
        truths = get_field(row, "ground_truth", list)
        if not truths or len(prompts) != len(truths) + 1:
            raise ValueError(len(prompts))
    # Only repoqa asks for functions; the row has their names.
    facts: list[dict[str, object]] = [{}] * len(truths)
    if kind == "repoqa":
        with check_form(f"{location} lacks lang or a func_name for every ground_truth", fix):
            functions = list(zip(get_field(row, "func_name", list), truths, strict=True))
            language = get_field(row, "lang")
        _load_parser(language)
        facts = [
            {"language": language, "function": function, "functions": functions}
            for function, _ in functions
        ]
    questions = []
    for turn, (prompt, truth, known) in enumerate(zip(prompts[1:], truths, facts, strict=True)):
        # A list of names is one reference, separated by commas.
        answer = ", ".join(map(str, truth)) if isinstance(truth, list) else str(truth)
        if kind == "many_shot":
            answer = _find_option_line(location, prompt, answer)
        questions.append(
            Question(
                f"{name}-{turn}",
                task,
                separate_question(prompt, protocol),
                (answer,),
                LENGTHS[protocol][kind],
                facts=known,
            )
        )
    return Sample(name, prompts[0], tuple(questions))


def _find_option_line(location: str, prompt: str, letter: str) -> str:
    """Return the first line of the prompt that has the letter in brackets."""
    for line in prompt.split("\n"):
        if f"({letter})" in line:
            return line.strip()
    raise RestoreKVError(
        f"{location} asks for the option ({letter}), which its prompt lacks; fetch the file again."
    )


def score_share(prediction: str, reference: str) -> float:
    """Return the share of the names, separated by ", ", that are in the prediction exactly."""
    names = reference.split(", ")
    return sum(name in prediction for name in names) / len(names)


def score_option(prediction: str, reference: str) -> float:
    """Compare an option such as "(B) law": the letters in the first brackets of both, else its text
    by `contains_text`.

    Text within other brackets is compared as well: "f(x) is (B)" says "x".
    """
    # The letters in the first brackets, wherever they are.
    if "(" in prediction and "(" in reference:
        answer, right = (text.split("(")[1].split(")")[0] for text in (prediction, reference))
        return float(answer == right)
    option = reference
    if reference.startswith("("):
        option = reference.split(")")[1].strip()
    return contains_text(prediction, option)


def score_found_or_f1(prediction: str, reference: str) -> float:
    """Return the better of token F1 and `contains_text`."""
    return max(
        token_f1(write_digits(prediction), write_digits(reference)),
        contains_text(prediction, reference),
    )


METRICS: dict[str, Callable[[str, str], float]] = {
    **dict.fromkeys(("kv", "prefix_suffix"), contains_text),
    "vt": score_share,
    "qa_eng": score_found_or_f1,
    "choice_eng": lambda prediction, reference: contains_text(prediction.split("\n")[0], reference),
    "mf": lambda prediction, reference: float(prediction == reference),
    "many_shot": score_option,
    "summary": rouge_l,
}


def passes_repoqa(
    prediction: str, language: str, name: str, functions: Sequence[tuple[str, str]]
) -> float:
    """Return 1 if the prediction is the function that was asked for, else 0.

    The first of equally similar functions counts.

    Args:
        prediction: The answer.
        language: Its programming language.
        name: The name of the function that was asked for.
        functions: (name, source) of every function that the context's questions ask for.
    """
    code = extract_function(prediction, language)
    score, best = max(
        ((compare_words(code, source), other) for other, source in functions), key=itemgetter(0)
    )
    return float(best == name and score >= THRESHOLD)


def compare_words(candidate: str, reference: str) -> float:
    """Return sentence BLEU over words between spaces, smoothed by Chen and Cherry's method 4 (the
    library nltk).
    """
    bleu = import_extra("nltk.translate.bleu_score", "eval")
    words = [re.split(r"\s+", text.strip()) for text in (candidate, reference)]
    return bleu.sentence_bleu(
        [words[1]], words[0], smoothing_function=bleu.SmoothingFunction().method4
    )


def extract_function(prediction: str, language: str) -> str:
    """Return the first function in a fenced block, else the first block, else all of the
    prediction.
    """
    prediction = prediction.strip()
    blocks = BLOCK.findall(prediction)
    functions = (_find_first_function(block, language) for block in blocks)
    return next(filter(None, functions), blocks[0] if blocks else prediction)


def _find_first_function(source: str, language: str) -> str:
    """Return the first function by tree-sitter's grammar, without decorators or templates around
    it; else "".
    """
    encoded = source.encode()
    kind = GRAMMARS[language][2]
    stack = [_load_parser(language).parse(encoded).root_node]
    while stack:
        node = stack.pop()
        if node.type == kind and _is_named(node, language):
            return encoded[node.start_byte : node.end_byte].decode()
        # Depth first, in the order of the text.
        stack += reversed(node.children)
    return ""


def _is_named(node: Any, language: str) -> bool:
    """Return whether a function counts: in C++ methods, operators and functions that return
    pointers do not.
    """
    if language != "cpp":
        return node.child_by_field_name("name") is not None
    declarator = node.child_by_field_name("declarator")
    if declarator is None or declarator.type != "function_declarator":
        return False
    name = declarator.child_by_field_name("declarator")
    return name is not None and name.type == "identifier"


@cache
def _load_parser(language: str) -> Any:
    """Return tree-sitter's parser; raises RestoreKVError for an unknown language or a missing
    package.
    """
    if language not in GRAMMARS:
        raise RestoreKVError(
            f"Functions of {language} cannot be parsed; known are {', '.join(GRAMMARS)}."
        )
    library = import_extra("tree_sitter", "eval")
    package, function, _ = GRAMMARS[language]
    return library.Parser(library.Language(getattr(import_extra(package, "eval"), function)()))
