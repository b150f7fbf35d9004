"""What RestoreKV does with every decoder class of the installed transformers: `python
tests/families.py`.

A tiny random model of each class is compared with transformers beyond every length that its config
mentions, at ratio 1 and below (tests/helpers/exactness.py). paper/results/families.md has the
table; `--types llama,mistral` prints some rows of it.
"""

import argparse
import re
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import transformers
from transformers import PreTrainedModel

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from restorekv.errors import RestoreKVError
from restorekv.model.shape import find_state_layers, list_windows
from restorekv.model.support import UNLIMITED, get_support
from tests.helpers import decoders, exactness

TEXT, QUESTION, ANSWER = 200, 12, 6  # tokens; configs mention 48 and 96
RATIOS = (1, 0.4)
USED, WINDOWED, REFUSED, UNBUILT = "used", "up to its window", "refused", "not built"
# Models whose default parts besides the text model take gigabytes or minutes, or packages that are
# not installed.
LARGE = {"blt", "phi4_multimodal", "moss_transcribe_diarize", "gemma3n"}


@dataclass(frozen=True)
class Family:
    """One row: a model type, its class, what happens, and why."""

    kind: str
    name: str
    outcome: str
    why: str = ""


def judge(kind: str, seed: int = 0, **overrides: object) -> tuple[Family, list[str]]:
    """Builds a tiny model of a type; returns its row, and what is wrong about it."""
    name = decoders.class_name(kind)
    if kind in LARGE:
        return Family(kind, name, UNBUILT, "too large for this table"), []
    try:
        model = decoders.build(kind, seed, **overrides)
    except Exception as error:  # configs and models check their sizes in their own ways
        return Family(kind, name, UNBUILT, type(error).__name__), []
    outcome, why, problems = judge_model(model, seed)
    if not overrides:
        variants = [
            *decoders.windowed_variants(kind),
            *decoders.hybrid_variants(kind),
            *decoders.sharing_variants(kind),
        ]
        for variant in variants:
            mixed, others = judge(kind, seed, **variant)
            problems += others
            if outcome == WINDOWED and mixed.outcome == USED:
                why += "; used if mixed"
    return Family(kind, name, outcome, why), problems


def judge_model(model: PreTrainedModel, seed: int = 0) -> tuple[str, str, list[str]]:
    """Returns what happens with a model, why, and every difference from transformers."""
    try:
        limit = get_support(model).positions
    except RestoreKVError as error:
        return REFUSED, reason(error), []
    if limit == UNLIMITED:
        windows = list_windows(model.config)
        limited = len(windows) - windows.count(None)
        why = f"{limited} of {len(windows)} layers have a window" if limited else ""
        states = len(find_state_layers(model.config))
        if states:
            layers = model.config.get_text_config().num_hidden_layers
            why = f"{states} of {layers} layers keep a state"
        return USED, why, exactness.compare(model, TEXT, QUESTION, ANSWER, RATIOS, seed)
    text = limit - QUESTION - ANSWER
    problems = (
        exactness.compare(model, text, QUESTION, ANSWER, RATIOS, seed)
        if text > exactness.PREFIX
        else []
    )
    problems += [
        f"{what} is not refused"
        for what in exactness.answered_beyond(model, limit, QUESTION, ANSWER)
    ]
    return WINDOWED, get_support(model).beyond.partition(",")[0], problems


def reason(error: RestoreKVError) -> str:
    """Returns a sentence without the advice at its end and without the class's name at its
    start.
    """
    sentence = re.split(r";| \(|, where", str(error))[0]
    return sentence.split(" ", 1)[1]


def table(rows: list[Family]) -> str:
    """Returns rows as Markdown."""
    lines = ["| model type | class | outcome | why |", "|---|---|---|---|"]
    lines += [f"| `{row.kind}` | {row.name} | {row.outcome} | {row.why} |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", help="model types, separated by commas; all unless given")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    kinds = options.types.split(",") if options.types else decoders.causal_types()
    rows = []
    failures = []
    for kind in kinds:
        row, problems = judge(kind)
        rows.append(row)
        failures += [f"{kind}: {problem}" for problem in problems]
    print(table(rows))
    counts = Counter(row.outcome for row in rows)
    print(
        f"\ntransformers {transformers.__version__}: "
        + ", ".join(f"{n} {what}" for what, n in counts.items())
    )
    sys.exit("\n".join(failures) if failures else 0)


if __name__ == "__main__":
    main()
