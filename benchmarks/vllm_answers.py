"""The benchmark `vllm-answers`: answers from cache files in an unpatched vLLM, compared with those
of `ask` in every mode of the engine.

There are thirty documents of 300 to 6,000 tokens, compressed by several evictors to several ratios,
allocations and dtypes, and ten questions about each. In every mode all questions are asked at once,
twice: cold, then with whatever vLLM kept. Everything is kept in a folder, so an interrupted run
continues where it stopped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from benchmarks.folder_options import claim_folder
from benchmarks.workload import check_novel, describe_machine, load_novel
from restorekv.compression.config import CompressionConfig
from restorekv.context import CompressedContext
from restorekv.errors import RestoreKVError
from restorekv.evaluation.tables import Table
from restorekv.files import write_json
from restorekv.model.load import load_model
from restorekv.pipeline import compress
from restorekv.vllm import prompt, ragged_config

ANSWER_TOKENS = 24
SHORTEST = 300
LONGEST = 6000
QUESTIONS = (
    "Who is named in the text?",
    "Where does it take place?",
    "What happens first?",
    "What happens at the end?",
    "Which numbers are mentioned?",
    "Who speaks, and to whom?",
    "What is the mood of the text?",
    "Which animals or things are described?",
    "Sum up the text in one sentence.",
    "What might happen next?",
)
EVICTORS = ("kvzip", "fastkvzip", "snapkv")
RATIOS = ("0.1", "0.05", "0.2", "0.3")
ALLOCATIONS = ("global", "per-layer", "per-head", "adakv")
# The arguments of vllm.LLM that each mode sets, in addition to those of `vllm_answers_side`.
MODES: dict[str, dict[str, object]] = {
    "in process": {},
    "engine in its own process": {},
    "pieces of 32 tokens": {"max_num_batched_tokens": 32, "max_num_seqs": 32},
    "no prefix cache": {"enable_prefix_caching": False},
    "torch.compile": {"enforce_eager": False},
    "preemption": {"max_num_seqs": 16},
    "documents wait for room": {},
}
# Blocks of 32 tokens: too few for sixteen requests at a time.
FEW_BLOCKS = 40
# In the mode "documents wait for room": the pool's size as a share of the bytes of all documents.
ROOM = 0.3


@dataclass(frozen=True)
class DocumentPlan:
    """What one document is made of."""

    name: str
    tokens: int
    evictor: str
    ratio: str
    allocation: str
    kv_dtype: str
    restored: bool


def plan_documents(count: int) -> list[DocumentPlan]:
    """Return documents whose lengths rise geometrically from 300 to 6,000 tokens.

    Evictors, ratios and allocations repeat with different periods, so that many combinations of
    them occur. Every fifth document is stored in 8 bits and every third is not restored.
    """
    plans = []
    for number in range(count):
        share = number / max(count - 1, 1)
        plans.append(
            DocumentPlan(
                f"document-{number:02d}",
                round(SHORTEST * (LONGEST / SHORTEST) ** share),
                EVICTORS[number % len(EVICTORS)],
                RATIOS[number % len(RATIOS)],
                ALLOCATIONS[(number // 2) % len(ALLOCATIONS)],
                "int8" if number % 5 == 4 else "model",
                number % 3 != 2,
            )
        )
    return plans


def cut_documents(tokenizer: Tokenizer, plans: list[DocumentPlan]) -> list[str]:
    """Return the documents' texts, one after the other in a novel."""
    ids = tokenizer.encode(load_novel())
    needed = sum(plan.tokens for plan in plans)
    check_novel(len(ids), needed, f"{len(plans)} documents of {needed:,} in all")
    texts = []
    start = 0
    for plan in plans:
        texts.append(tokenizer.decode(ids[start : start + plan.tokens]))
        start += plan.tokens
    return texts


def run_answers(
    folder: Path,
    count: int,
    longest: int,
    modes: list[str],
    model_name: str,
    tell: Callable[[str], None],
) -> dict:
    """Make what is missing in the folder, ask vLLM in every mode and return the result.

    Args:
        folder: The folder that keeps model, cache files, answers and the modes that are done.
        count: The number of documents.
        longest: Documents of more tokens are left out.
        modes: Names in `MODES`.
        model_name: The model, which must be available offline.
        tell: Called with what is being done.
    """
    torch.set_num_threads(1)
    # `count` decides how each document is made, and `longest` which of them are asked about.
    claim_folder(folder, {"model": model_name, "documents": count, "longest": longest})
    plans = [plan for plan in plan_documents(count) if plan.tokens <= longest]
    expected = _make_documents(folder, plans, model_name, tell)
    rows = []
    for mode in modes:
        tell(f"asking vLLM {len(expected) * len(QUESTIONS)} questions twice: {mode}")
        rows.append({"mode": mode, **_ask_mode(folder, mode, expected)})
    return {
        "model": model_name,
        "documents": [asdict(plan) for plan in plans],
        "questions": len(QUESTIONS),
        "answer_tokens": ANSWER_TOKENS,
        "machine": describe_machine(1),
        "rows": rows,
    }


def _make_documents(
    folder: Path, plans: list[DocumentPlan], model_name: str, tell: Callable[[str], None]
) -> list[dict]:
    """Make the documents that the folder lacks; return the prompts and `ask`'s answers of each."""
    store = folder / "store"
    store.mkdir(parents=True, exist_ok=True)
    places = [folder / f"{plan.name}.json" for plan in plans]
    if not all(place.exists() for place in places):
        model, tokenizer = load_model(model_name)
        if not (folder / "model").exists():
            for part in (model, tokenizer):
                part.save_pretrained(folder / "model")
        texts = cut_documents(tokenizer, plans)
        for number, (plan, text, place) in enumerate(zip(plans, texts, places, strict=True)):
            if place.exists():
                continue
            tell(f"document {number + 1} of {len(plans)}: {plan.tokens:,} tokens")
            config = CompressionConfig(allocation=plan.allocation, kv_dtype=plan.kv_dtype)
            small: CompressedContext = compress(
                model,
                tokenizer,
                text,
                ratio=plan.ratio,
                evictor=plan.evictor,
                adapter="auto" if plan.restored else None,
                config=config,
            )
            path = store / f"{plan.name}.rkv"
            small.save(path)
            answers = small.ask(list(QUESTIONS), max_new_tokens=ANSWER_TOKENS)
            prompts = [prompt(path, question, tokenizer) for question in QUESTIONS]
            # Written last: a document counts as made only if all of it is there.
            write_json(place, {"prompts": prompts, "answers": answers})
    return [json.loads(place.read_text("utf-8")) for place in places]


def _ask_mode(folder: Path, mode: str, expected: list[dict]) -> dict:
    """Ask all questions in one mode, in a separate process; return how many answers are those of
    `ask`.
    """
    place = folder / f"{mode}.json"
    out = place.with_suffix(".out.json")
    if not out.exists():
        sizes = [path.stat().st_size for path in (folder / "store").glob("*.rkv")]
        room = int(max(max(sizes) * 1.5, sum(sizes) * ROOM))
        own_process = mode == "engine in its own process"
        options = dict(MODES[mode])
        if mode == "preemption":
            options |= {"num_gpu_blocks_override": FEW_BLOCKS, "disable_log_stats": False}
        prompts = [ids for each in expected for ids in each["prompts"]]
        job = {
            "model": str(folder / "model"),
            "transfer": ragged_config(
                folder / "store",
                documents_memory=room if mode == "documents wait for room" else None,
            ),
            "own_process": own_process,
            "options": options,
            "prompts": prompts,
            "longest": max(len(ids) for ids in prompts) + 2 * ANSWER_TOKENS,
            "tokens": ANSWER_TOKENS,
        }
        place.write_text(json.dumps(job), "utf-8")
        if run_side(place):
            raise RestoreKVError(f"vLLM ended with an error in the mode {mode!r}; see above.")
    found = json.loads(out.read_text("utf-8"))
    answers = [text for each in expected for text in each["answers"]]
    rounds = [count_equal(answers, given) for given in found["rounds"]]
    return {
        "asked": len(answers) * len(rounds),
        "equal": sum(rounds),
        "preemptions": found["preemptions"],
        "seconds": found["seconds"],
    }


def run_side(place: Path) -> int:
    """Run the job in the file `place` in a separate process and return its exit status."""
    command = [sys.executable, "-m", "benchmarks.vllm_answers_side", str(place)]
    return subprocess.run(command, check=False).returncode


def count_equal(expected: list[str], found: list[str]) -> int:
    """Return how many answers are equal.

    U+FFFD at the end is ignored: if an answer ends in the middle of a character of several tokens,
    vLLM writes U+FFFD for it and `ask` leaves it out.
    """
    pairs = zip(expected, found, strict=True)
    return sum(one.rstrip("\ufffd") == other.rstrip("\ufffd") for one, other in pairs)


def make_tables(result: dict) -> Iterator[Table | str]:
    """Yield the table, then a sentence on what was asked."""
    lines = []
    for row in result["rows"]:
        seconds = ", ".join(f"{each:.0f} s" for each in row["seconds"])
        preemptions = str(row["preemptions"])
        lines.append([row["mode"], f"{row['equal']} of {row['asked']}", preemptions, seconds])
    yield Table(
        "vllm-answers",
        "Answers of vLLM equal to those of ask",
        ["mode", "equal", "preemptions", "cold, warm"],
        lines,
    )
    tokens = [each["tokens"] for each in result["documents"]]
    yield (
        f"{result['model']}, {len(tokens)} documents of {min(tokens):,} to {max(tokens):,} tokens, "
        f"{result['questions']} questions each, {result['answer_tokens']} tokens an answer, "
        f"{result['machine']['processor']}."
    )
