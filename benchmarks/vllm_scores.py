"""The benchmark `vllm-scores`: the questions of a benchmark, answered by `ask` in this process and
by an unpatched vLLM through `restorekv serve`.

Every context is compressed once for each ratio. `ask` answers from the cache. The cache file is
then uploaded to a server with vLLM as its engine, and OpenAI's client asks it the same questions.
Both sides' answers get the benchmark's official score. A question has no answer prefix here,
because a chat completion has no place for one; so scores are not those of `restorekv eval`.

Everything is kept in a folder, so an interrupted run continues where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import openai
import torch

from benchmarks.folder_options import claim_folder
from benchmarks.serving import ask_about_upload, run_server
from benchmarks.vllm_answers import count_equal
from benchmarks.vllm_settings import SETTINGS
from benchmarks.workload import describe_machine
from restorekv.evaluation.tables import Table
from restorekv.files import write_json
from restorekv.model.load import load_model
from restorekv.pipeline import compress
from restorekv.tasks import Benchmark, Sample, make_benchmark

ENVIRONMENT = {**SETTINGS, "VLLM_CPU_KVCACHE_SPACE": "1", "RESTOREKV_VLLM": "1"}
# Both sides compute in float32, so that differences do not come from rounding.
ENGINE_OPTIONS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 4096}


def run_scores(
    folder: Path,
    model_name: str,
    benchmark_spec: str,
    ratios: Sequence[str],
    evictor: str,
    tell: Callable[[str], None],
) -> dict:
    """Ask what the folder has no answers to yet, and return the scores of both sides.

    Args:
        folder: The folder that keeps cache files and answers.
        model_name: The model, which must be available offline.
        benchmark_spec: The benchmark, such as ruler:length=1024,per_task=5.
        ratios: The ratios of the caches.
        evictor: The evictor's spec or a preset; caches are restored if an adapter ships for it.
        tell: Called with what is being done.
    """
    torch.set_num_threads(1)
    benchmark = make_benchmark(benchmark_spec)
    # Every ratio has its own files, so a later run may add ratios.
    options = {"model": model_name, "benchmark": benchmark.spec, "evictor": evictor}
    claim_folder(folder, options)
    model, tokenizer = load_model(model_name, dtype="float32")
    samples = benchmark.choose_samples(tokenizer, "kvpress")
    for number, sample in enumerate(samples, 1):
        for ratio in ratios:
            place = locate_answers(folder, "ask", sample, ratio)
            if place.exists():
                continue
            tell(f"ask: context {number} of {len(samples)} at r = {ratio}")
            small = compress(model, tokenizer, sample.context, ratio=ratio, evictor=evictor)
            small.save(locate_cache(folder, sample, ratio))
            answers = []
            for question in sample.questions:
                answers.append(small.ask(question.text, max_new_tokens=question.max_new_tokens))
            restored = small.manifest.adapter is not None
            # Written last: a context counts as asked only if all of it is there.
            write_json(place, {"answers": answers, "restored": restored})
    if not (folder / "model").exists():
        for part in (model, tokenizer):
            part.save_pretrained(folder / "model")
    del model
    _ask_vllm(folder, samples, ratios, tell)
    return {
        "model": model_name,
        "benchmark": benchmark.spec,
        "evictor": evictor,
        "dtype": "float32",
        "machine": describe_machine(1),
        "rows": [compare_sides(folder, benchmark, samples, ratio) for ratio in ratios],
    }


def locate_cache(folder: Path, sample: Sample, ratio: str) -> Path:
    """Return the path of a context's cache file."""
    return folder / f"{_make_file_name(sample)}-{ratio}.rkv"


def locate_answers(folder: Path, side: str, sample: Sample, ratio: str) -> Path:
    """Return the path of a side's answers about a context."""
    return folder / f"{_make_file_name(sample)}-{ratio}-{side}.json"


def _make_file_name(sample: Sample) -> str:
    """Return the sample's id as a file name, without the slash that ids of book passages have."""
    return sample.id.replace("/", "--")


def _ask_vllm(
    folder: Path, samples: Sequence[Sample], ratios: Sequence[str], tell: Callable[[str], None]
) -> None:
    """Start a server with vLLM as its engine, and ask it what it was not asked yet."""
    missing = []
    for ratio in ratios:
        for sample in samples:
            if not locate_answers(folder, "vllm", sample, ratio).exists():
                missing.append((sample, ratio))
    if not missing:
        return
    name = str(folder / "model")
    command = ["restorekv", "serve", "--model", name, "--dtype", "float32", "--engine", "vllm"]
    command += ["--store", str(folder / "store"), "--vllm-options", json.dumps(ENGINE_OPTIONS)]
    tell("starting restorekv serve --engine vllm")
    with run_server(command, ENVIRONMENT) as client:
        for number, (sample, ratio) in enumerate(missing, 1):
            tell(f"vLLM: {number} of {len(missing)} caches")
            answers = ask_server(client, name, locate_cache(folder, sample, ratio), sample)
            write_json(locate_answers(folder, "vllm", sample, ratio), {"answers": answers})


def ask_server(client: openai.OpenAI, model: str, cache: Path, sample: Sample) -> list[str]:
    """Upload a cache file, ask a sample's questions about it, and delete it again."""
    upload = client.files.create(file=(cache.name, cache.read_bytes()), purpose="user_data")
    client.files.wait_for_processing(upload.id, poll_interval=0.1)
    answers = []
    for question in sample.questions:
        answer = ask_about_upload(client, model, upload.id, question.text, question.max_new_tokens)
        answers.append(answer.choices[0].message.content or "")
    client.files.delete(upload.id)
    return answers


def compare_sides(
    folder: Path, benchmark: Benchmark, samples: Sequence[Sample], ratio: str
) -> dict[str, object]:
    """Return the scores of both sides at a ratio, and how many answers are equal."""
    scores: dict[str, list[float]] = {"ask": [], "vllm": []}
    equal = 0
    restored = False
    for sample in samples:
        answers = {}
        for side in scores:
            stored = json.loads(locate_answers(folder, side, sample, ratio).read_text("utf-8"))
            answers[side] = stored["answers"]
            restored = restored or stored.get("restored", False)
            for question, answer in zip(sample.questions, stored["answers"], strict=True):
                scores[side].append(benchmark.score(question, answer))
        equal += count_equal(answers["ask"], answers["vllm"])
    count = len(scores["ask"])
    return {
        "ratio": ratio,
        "restored": restored,
        "contexts": len(samples),
        "questions": count,
        "equal": equal,
        "ask": 100 * sum(scores["ask"]) / count,
        "vllm": 100 * sum(scores["vllm"]) / count,
    }


def make_tables(result: dict) -> Iterator[Table | str]:
    """Yield the table, then a sentence on what was asked."""
    lines = []
    for row in result["rows"]:
        equal = f"{row['equal']} of {row['questions']}"
        restored = "yes" if row["restored"] else "no"
        lines.append([row["ratio"], restored, f"{row['ask']:.1f}", f"{row['vllm']:.1f}", equal])
    yield Table(
        "vllm-scores",
        "Scores of ask, and of vLLM through HTTP",
        ["r", "restored", "ask", "vLLM", "equal answers"],
        lines,
    )
    contexts = result["rows"][0]["contexts"]
    yield (
        f"{result['model']}, {result['evictor']}, {result['benchmark']}, {contexts} contexts, mean "
        f"over questions without answer prefixes, {result['dtype']}, "
        f"{result['machine']['processor']}."
    )
