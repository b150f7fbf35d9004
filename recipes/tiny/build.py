"""Make everything that ships in distributions/restorekv-tiny: tokenizer, model, gates, restore
adapters. Resumable.

    make tiny            or            python -m recipes.tiny.build runs/tiny
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.run import make_parser, run_recipe
from restorekv.evictors import gate_file
from restorekv.model import gate_kinds
from restorekv.restore.adapter import RestoreAdapter

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "distributions" / "restorekv-tiny" / "restorekv_tiny"
EVICTORS = ("kvzip", "kvzip+", "contrastkv", "contrastkv-simple", "snapkv", "h2o", "fastkvzip")
AT_ONCE = 2  # trainings at the same time, with one thread each


def start_script(script: str, *arguments: str | Path) -> subprocess.Popen:
    """Start one of the recipe's scripts."""
    command = [sys.executable, "-m", f"recipes.tiny.{script}", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT)


def wait_for(*running: subprocess.Popen) -> None:
    """Wait for scripts; stop with the first failure's exit status."""
    for process in running:
        if process.wait():
            raise SystemExit(process.returncode)


def install_models(folder: Path) -> None:
    """Copy the model (in float32) and the adapters (LoRA in bfloat16) into the package."""
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    shutil.rmtree(PACKAGE / "model", ignore_errors=True)
    model.save_pretrained(PACKAGE / "model")
    AutoTokenizer.from_pretrained(folder / "model", trust_remote_code=False).save_pretrained(
        PACKAGE / "model"
    )
    for evictor in EVICTORS:
        adapter = RestoreAdapter.from_pretrained(model, folder / f"restore-{evictor}" / "adapter")
        adapter.card = replace(adapter.card, model="tiny")
        adapter.lora_config.base_model_name_or_path = "tiny"
        adapter.save_pretrained(PACKAGE / "adapters" / evictor, dtype=torch.bfloat16)


def install_gates(folder: Path) -> None:
    """Copy the gates into the package.

    This must happen before the adapters are trained, because "fastkvzip" looks for its gate in the
    package.
    """
    (PACKAGE / "gates").mkdir(exist_ok=True)
    for kind in gate_kinds.KINDS:
        gate = gate_file.read_gate(folder / "gates" / f"{kind}.safetensors")
        gate_file.write_gate(
            PACKAGE / "gates" / f"{kind}.safetensors",
            replace(gate, card=replace(gate.card, model="tiny")),
        )


def main(args: Sequence[str] | None = None) -> None:
    """Run the steps that are not done yet, then install the results."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path, help="Keeps what is made.")
    folder = parser.parse_args(args).folder.resolve()
    if not (folder / "model" / "tokenizer.json").exists():
        wait_for(start_script("tokenizer", folder / "model"))
    if not (folder / "model" / "model.safetensors").exists():
        wait_for(start_script("pretrain", folder))
    wait_for(start_script("gates", folder))
    install_gates(folder)
    wanted = [
        evictor for evictor in EVICTORS if not (folder / f"restore-{evictor}" / "adapter").exists()
    ]
    for first in range(0, len(wanted), AT_ONCE):
        pair = wanted[first : first + AT_ONCE]
        wait_for(*(start_script("adapters", folder, "--evictor", evictor) for evictor in pair))
    install_models(folder)


if __name__ == "__main__":
    run_recipe(main)
