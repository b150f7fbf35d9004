"""`python -m benchmarks compare`: time and memory of compressing and answering, compared with
kvpress 0.5.5.

Both sides load the same weights and the same tokens from one folder, use the same number of threads
and compress with KVzip to the same ratio and under the same prefix policy (counted). Each
measurement runs in its own process:

    load, compress a short text as a warm-up, compress T tokens (seconds per phase, peak memory
    above what was resident), ask a question and generate a fixed number of tokens, fill a full
    cache, generate again (r = 1).

Our side also runs a restore pass with a random adapter (n = 8, rank 8); its time is reported
separately. kvpress has its own environment because it needs transformers < 5.3. The sides take
turns at going first.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from benchmarks.compress_cost import make_text, measure_apart
from benchmarks.workload import SHAPE, describe_machine, save_model, save_tokenizer
from restorekv.compression.budget import parse_ratio
from restorekv.errors import RestoreKVError
from restorekv.model.prompt import encode_question, make_context

FOLDER = Path(__file__).parent
OURS = "ours"
KVPRESS = "kvpress"
WARM_UP = 64  # tokens
# Short, because kvpress hides evicted pairs behind one key that every query of the question must
# turn away from, and refuses if it finds none.
QUESTION = "Why?"
NO_KVPRESS = (
    "kvpress is not measured, because there is no environment for it; "
    "run `make bench`, or pass --kvpress-python."
)


@dataclass(frozen=True)
class Options:
    """The options of `compare`.

    `shape` replaces fields of Qwen3-0.6B's config. `decode` tokens are generated, of which the
    first two are a warm-up.
    """

    tokens: Sequence[int] = (2048, 4096)
    ratio: float | str = "0.05"
    decode: int = 10
    repeat: int = 1
    threads: int = 0
    seed: int = 0
    kvpress_python: Path | None = None
    shape: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parse_ratio(self.ratio)
        if not self.tokens or min(self.tokens) < WARM_UP:
            raise RestoreKVError(
                f"Every number of tokens is at least {WARM_UP}, not {list(self.tokens)}."
            )
        if (
            self.decode < 4
            or self.repeat < 1
            or self.threads < 0
            or self.shape.get("num_hidden_layers", 1) < 1
        ):
            raise RestoreKVError(
                "Generate at least 4 tokens, with at least 1 repetition, layer and thread."
            )


def run_comparison(options: Options, progress: Callable[[str], None] = lambda phase: None) -> dict:
    """Run all measurements; return rows of medians per side and T, and ratios ours /
    kvpress per T.
    """
    found = ask_kvpress_version(options.kvpress_python) if options.kvpress_python else None
    sides = [OURS, KVPRESS] if found else [OURS]
    threads = options.threads or torch.get_num_threads()
    shape = {**SHAPE, **options.shape}
    rows: dict[tuple[int, str], list[dict]] = {}
    with tempfile.TemporaryDirectory(prefix="restorekv-bench-") as name:
        folder = Path(name)
        progress("making the model")
        tokenizer = save_tokenizer(folder)
        parameters = save_model(folder, shape, options.seed)
        for repetition in range(options.repeat):
            for turn, tokens in enumerate(options.tokens):
                job = {"model": name, "threads": threads, **make_job(options, tokenizer, tokens)}
                for side in sides if (repetition + turn) % 2 == 0 else sides[::-1]:
                    progress(f"T = {tokens:,}: {side}")
                    rows.setdefault((tokens, side), []).append(
                        measure_side(side, job, folder, options.kvpress_python)
                    )
    middle = {key: compute_medians(measurements) for key, measurements in rows.items()}
    return {
        "model": {"parameters": parameters, "dtype": "bfloat16", **shape},
        "machine": describe_machine(threads),
        "ratio": float(parse_ratio(options.ratio)),
        "repeat": options.repeat,
        "decoded": options.decode,
        "kvpress": found,
        "rows": [
            {"tokens": tokens, "side": side, **middle[tokens, side]}
            for tokens, side in sorted(middle)
        ],
        "ratios": {
            str(tokens): compute_ratios(middle[tokens, OURS], middle[tokens, KVPRESS])
            for tokens in options.tokens
            if found
        },
        "note": None if found else NO_KVPRESS,
    }


def make_job(options: Options, tokenizer: Tokenizer, tokens: int) -> dict:
    """Return the job of one measurement: the text, its ids, and how to compress and decode.

    It holds ids so that both sides get the same tokens.
    """
    text = make_text(tokens, options.seed)
    context = make_context(tokenizer, text)
    assert context.text_tokens == tokens
    return {
        "text": text,
        "context_ids": context.ids[0].tolist(),
        "question_ids": encode_question(tokenizer, context, QUESTION)[0].tolist(),
        "ratio": float(parse_ratio(options.ratio)),
        "warm_up": WARM_UP,
        "decode": options.decode,
        "seed": options.seed,
    }


def ask_kvpress_version(python: Path) -> str:
    """Return the version of kvpress in that environment; refuse one without kvpress."""
    code = "import importlib.metadata as m; print(m.version('kvpress'))"
    try:
        found = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise RestoreKVError(
            f"{python} is not a Python with kvpress; run `make bench` to make one."
        ) from None
    return found


def measure_side(side: str, job: dict, folder: Path, python: Path | None) -> dict:
    """Run one measurement in its own process, ours or kvpress's, and return its figures."""
    what = f"The measurement of {side} at T = {len(job['text']):,}"
    if side == OURS:
        return measure_apart([sys.executable, "-m", "benchmarks.ours"], job, folder, what)
    command = [str(python), str(FOLDER / "kvpress_side.py")]
    # PYTHONPATH may name packages of this environment, whose versions do not fit kvpress's.
    return measure_apart(command, job, folder, what, without=["PYTHONPATH"])


def compute_medians(found: Sequence[dict]) -> dict:
    """Return the median of every number over the repetitions, and the rest of the first one."""
    middle = {}
    for key, first in found[0].items():
        every = [each[key] for each in found if key in each]
        if isinstance(first, dict):
            middle[key] = compute_medians(every)
        elif isinstance(first, int | float):
            middle[key] = median(every)
        else:
            middle[key] = first
    return middle


def compute_ratios(ours: dict, kvpress: dict) -> dict[str, float | None]:
    """Return ours / kvpress, below 1 if ours is faster or smaller, None if either is unknown.

    "compress" is KVzip without the restore pass, on both sides.
    """
    mine = ours["seconds"]
    theirs = kvpress["seconds"]
    pairs = {
        "compress": (mine["total"] - mine["restore"], theirs["total"]),
        "compress and restore": (mine["total"], theirs["total"]),
        "peak memory": (ours["peak"], kvpress["peak"]),
        "bytes held": (ours["held"]["bytes"], kvpress["held"]["bytes"]),
        "token": (ours["small"].get("token"), kvpress["small"].get("token")),
        "token, r = 1": (ours["full"].get("token"), kvpress["full"].get("token")),
    }
    return {name: a / b if a and b else None for name, (a, b) in pairs.items()}
