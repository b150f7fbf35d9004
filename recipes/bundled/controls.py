"""The paper's controls and ablations of the restore pass on the bundled model, each a setting of the one trainer.

    python recipes/bundled/controls.py runs/controls [NAME ...]          (resumes; all unless named)

Every variant is trained on KVzip with the recipe's settings but its own, and asked the same held-out documents.
Writes FOLDER/<name>.json, and docs/results/controls.json and docs/controls.md from those that are there.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from adapters import CONTEXTS, SETTINGS

from restorekv.atomic import replacing, write_json
from restorekv.bundled.suite import documents
from restorekv.errors import RestoreKVError
from restorekv.evaluate import evaluate
from restorekv.groups import span
from restorekv.models import load_model
from restorekv.prepared import Conventions
from restorekv.tables import payload
from restorekv.train.data import bundled_examples
from restorekv.train.loop import train

DOCS = Path(__file__).parents[2] / "docs"
RATIOS = (0.2, 0.1, 0.05)
COUNT = 104
QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Control:
    """What it is called in the table, and its settings; without `train` nothing is trained."""

    label: str
    train: dict | None = field(default_factory=dict)
    conventions: dict = field(default_factory=dict)


CONTROLS = {
    "base": Control("KVzip alone", None),
    "offset": Control("questions 3 positions later, no restore states", None, {"offset": 3}),
    "full": Control("RestoreKV (n = 3, learned embeddings, LoRA everywhere)"),
    "evicted": Control("restored from the evicted cache", {"restore_from": "evicted"}, {"restore_from": "evicted"}),
    "fixed": Control("fixed embeddings (line breaks)", {"embeddings": "fixed"}),
    "embeddings": Control("learned embeddings, no LoRA", {"targets": ()}),
    "qkv": Control("LoRA on q, k, v", {"targets": QKV}),
    "qkvo": Control("LoRA on q, k, v, o", {"targets": (*QKV, "o_proj")}),
    **{f"n{n}": Control(f"n = {n}", {"restore_tokens": n}) for n in (1, 2, 4, 8, 16)},
}

INTRO = """# Controls and ablations

`make controls`: KVzip on the bundled model, {documents} held-out documents of the bundled suite. Every variant was
trained with the recipe's settings but the one named (seed 0, one run each) and holds exactly as many pairs as the base.
Where n restore tokens exceed the budget of a short document, fewer are used. Score with a 95 % bootstrap over
documents; prefix policy free, allocation global, float32. Variants of the recipe that are not listed have not been run.
Rows: [results/controls.json](results/controls.json).

| variant | r = 0.2 | r = 0.1 | r = 0.05 |
|---|---|---|---|
| full cache | {full} | | |
"""


def measure(folder: Path, name: str, threads: int) -> None:
    """Train the variant, unless that is done, and ask the suite."""
    control, path = CONTROLS[name], folder / f"{name}.json"
    settings = None if control.train is None else asdict(replace(SETTINGS, **control.train))
    made_with = json.loads(json.dumps({"train": settings, "documents": COUNT, **control.conventions}))
    if path.exists():
        if json.loads(path.read_text())["made_with"] != made_with:
            raise RestoreKVError(f"{path} was made with other settings; choose another folder.")
        return
    torch.set_num_threads(threads)
    model, tokenizer = load_model("bundled")

    def told(step: int, steps: int, loss: float | None = None) -> None:
        if step % 50 == 0:
            print(f"{name}: {step} of {steps}" + ("" if loss is None else f", loss {loss:.4f}"), flush=True)

    adapter = None
    if control.train is not None:
        config = replace(SETTINGS, **control.train)
        examples = bundled_examples(tokenizer, CONTEXTS, config.seed, 512, 1280)
        adapter = train(model, tokenizer, examples, config, folder / name, resume=True, progress=told)
    conventions = Conventions.make(on_tight="fewer", **control.conventions)
    made = documents(tokenizer, COUNT)
    result = evaluate(model, tokenizer, made, {"kvzip": adapter}, RATIOS, conventions, progress=told)
    write_json(path, {**payload(result), "made_with": made_with})


def table(folder: Path, names: list[str]) -> None:
    """From the files of these variants, which `measure` has checked."""
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    first = found[names[0]]
    if any(each["conventions"]["fingerprint"] != first["conventions"]["fingerprint"] for each in found.values()):
        raise RestoreKVError(f"The runs in {folder} are of different models; choose another folder.")
    text = INTRO.format(documents=COUNT, full=span(first["rows"][0], "score", "low", "high"))
    kept = {}
    for name in names:
        control = CONTROLS[name]
        rows = [row for row in found[name]["rows"] if row["evictor"] != "full"]
        kept[name] = [row for row in rows if row["restored"] == (control.train is not None)]
        text += f"| {control.label} |" + "".join(f" {span(row, 'score', 'low', 'high')} |" for row in kept[name]) + "\n"
    conventions = {name: each["conventions"] for name, each in found.items()}
    write_json(DOCS / "results" / "controls.json", {"rows": kept, "conventions": conventions})
    with replacing(DOCS / "controls.md") as path:
        path.write_text(text)


def main() -> None:
    """What has not been measured yet, then the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(CONTROLS))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        measure(options.folder, name, options.threads)
    there = [name for name in CONTROLS if (options.folder / f"{name}.json").exists()]
    for name in there:
        measure(options.folder, name, options.threads)
    table(options.folder, there)


if __name__ == "__main__":
    main()
