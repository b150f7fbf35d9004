"""SCBench (arXiv 2412.10319): many questions about one long context, 26K to 170K tokens, in nine tasks of the paper.

The data are those of KVzip's evaluation (hub: Jang-Hyun/SCBench-preprocessed), a parquet file a task: prompts (context,
then questions), ground_truth, and of repoqa lang, repo and func_name. Contexts and questions are asked as they stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from huggingface_hub import hf_hub_download
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.files import optional, parquet_rows
from restorekv.errors import RestoreKVError
from restorekv.tasks import scbench_code
from restorekv.tasks.base import Benchmark, Question, Sample
from restorekv.tasks.scbench_metrics import METRICS
from restorekv.tasks.wording import apart

HUB = "Jang-Hyun/SCBench-preprocessed"
TASKS = ("kv", "prefix_suffix", "vt", "repoqa", "qa_eng", "choice_eng", "mf", "many_shot", "summary")
WHOLE_ONLY = ("vt", "qa_eng", "choice_eng")
SHORTER = ("tiny", "short", "mid")  # contexts of some 8K, 20K and 60K tokens
LENGTHS = {  # answers' limits in tokens; "kvpress" are those of microsoft/MInference's scbench/eval_utils.py
    "kvzip": dict.fromkeys(TASKS, 96) | {"mf": 32, "summary": 256, "repoqa": 512},
    "kvpress": {
        "kv": 150, "prefix_suffix": 150, "vt": 30, "repoqa": 1024, "qa_eng": 40, "choice_eng": 40, "mf": 5,
        "many_shot": 10, "summary": 200,
    },
}  # fmt: skip
END = "</s>"


@dataclass(frozen=True)
class SCBench(Benchmark):
    """`tasks` are names with "+" between them, "kv_short+mf_mid" for shorter contexts; `path` is a folder of the files
    (empty: the hub, at `revision`)."""

    name: ClassVar[str] = "scbench"
    title: ClassVar[str] = "SCBench"

    tasks: str = "+".join(TASKS)
    path: str = ""
    revision: str = "main"

    def __post_init__(self) -> None:
        known = [*TASKS, *(f"{task}_{tag}" for task in TASKS if task not in WHOLE_ONLY for tag in SHORTER)]
        for task in self.tasks.split("+"):
            if task not in known:
                raise RestoreKVError(f"SCBench has no task {task!r}; use some of {', '.join(known)}, joined by +.")

    def samples(self, tokenizer: Tokenizer, protocol: str) -> Iterator[Sample]:
        optional("rouge", "eval")  # rather now than after the first answers
        optional("nltk", "eval")
        for task in self.tasks.split("+"):
            path = self.located(task)
            for index, row in enumerate(parquet_rows(path)):
                yield sample(task, f"{task}-{index}", f"{path}, row {index + 1}", row, protocol)

    def located(self, task: str) -> Path:
        """The task's file, fetched where it is not local."""
        file = f"scbench_{task}.parquet"
        if not self.path:
            try:
                return Path(hf_hub_download(HUB, file, repo_type="dataset", revision=self.revision))
            except Exception as error:  # unreachable, unknown: the hub's client raises many kinds
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
                mend = "fetch it where there is a network and give path=FOLDER"
                raise RestoreKVError(f"Cannot read {file} of {HUB} ({reason}); {mend}.") from error
        if not (Path(self.path) / file).is_file():
            raise RestoreKVError(
                f"{self.path} has no file {file}; fetch it from {HUB} (Hugging Face) or name other tasks."
            )
        return Path(self.path) / file

    def score(self, question: Question, prediction: str) -> float:
        """KVzip's metric of the task. Empty answers score 0, in repoqa too, where KVzip leaves them out of the mean."""
        said = prediction.removesuffix(END)
        if not said.strip():
            return 0.0
        if whole(question.task) == "repoqa":
            facts = question.facts
            return scbench_code.passes(said, facts["language"], facts["function"], facts["functions"])
        return METRICS[whole(question.task)](said, question.answers[0])

    def by_context(self, protocol: str) -> bool:
        return protocol == "kvzip"

    def described(self) -> dict[str, object]:
        return {
            "data": self.path or f"{HUB} (Hugging Face), {self.revision}",
            "licence": "MIT (microsoft/SCBench)",
            "metric": "KVzip's: found, share found, exact, option, ROUGE-L, max of F1 and found, or pass@1 at BLEU 0.8",
            "lengths": "KVzip's under kvzip, SCBench's own under kvpress",
        }


def whole(task: str) -> str:
    """The task of which this one may be a shorter variant."""
    name, _, tag = task.rpartition("_")
    return name if tag in SHORTER else task


def sample(task: str, name: str, place: str, row: dict, protocol: str) -> Sample:
    """A row's context and questions."""
    prompts, truths = row.get("prompts"), row.get("ground_truth")
    lists = isinstance(prompts, list) and isinstance(truths, list)
    if not lists or not truths or len(prompts) != len(truths) + 1 or not all(isinstance(text, str) for text in prompts):
        raise RestoreKVError(f"{place} has not a context and a prompt for every ground_truth; fetch the file again.")
    facts = code_facts(place, row) if whole(task) == "repoqa" else [{}] * len(truths)
    limit = LENGTHS[protocol][whole(task)]
    questions = []
    for turn, (prompt, truth, known) in enumerate(zip(prompts[1:], truths, facts, strict=True)):
        answer = option_line(place, prompt, str(truth)) if whole(task) == "many_shot" else reference(truth)
        questions.append(Question(f"{name}-{turn}", task, apart(prompt, protocol), (answer,), limit, facts=known))
    return Sample(name, prompts[0], tuple(questions))


def reference(truth: object) -> str:
    """Several names are one text, with ", " between them."""
    return ", ".join(map(str, truth)) if isinstance(truth, list) else str(truth)


def option_line(place: str, prompt: str, letter: str) -> str:
    """The first line of the prompt that has the letter in brackets."""
    for line in prompt.split("\n"):
        if f"({letter})" in line:
            return line.strip()
    raise RestoreKVError(
        f"{place} asks for the option ({letter}), which no line of its prompt has; fetch the file again."
    )


def code_facts(place: str, row: dict) -> list[dict[str, object]]:
    """For each question of repoqa its language, the function's name, and all functions that are asked for."""
    names, language = row.get("func_name"), row.get("lang")
    if not isinstance(names, list) or len(names) != len(row["ground_truth"]) or not isinstance(language, str):
        raise RestoreKVError(f"{place} lacks lang or a func_name for every ground_truth; fetch the file again.")
    scbench_code.parser(language)
    functions = list(zip(names, row["ground_truth"], strict=True))
    return [{"language": language, "function": name, "functions": functions} for name in names]
