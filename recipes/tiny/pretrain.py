"""Train the tiny language model: retrieval on short noisy documents first, then on longer and more
predictable ones.

    python -m recipes.tiny.pretrain runs/tiny     (resumes from runs/tiny/state.pt if it is there)

paper/log.md says what each choice is for, and what failed.
"""

from __future__ import annotations

import csv
import json
import math
import os
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from recipes.run import make_parser, run_recipe
from recipes.tiny.examples import ANSWER, CONTEXT, REPEAT, Batch, Sampler


@dataclass(frozen=True)
class Stage:
    """A stage of training: it lasts until step `until`, on documents of `low` to `high` ids."""

    until: int
    low: int
    high: int
    rows: int
    questions: int
    noise: float
    context: float  # weight of the language-modelling loss on the document
    repeat: float  # weight of the loss on reconstructing it
    mix: tuple[float, ...]  # how often each kind of document is drawn


# Mixes of kinds of documents: one of mostly facts, one with more word lists.
FACTS = (0.3, 0.3, 0.15, 0.15, 0.1)
LISTS = (0.25, 0.15, 0.1, 0.35, 0.15)
STAGES = (
    Stage(850, 40, 96, 16, 3, 1.0, 0.02, 1.0, FACTS),
    Stage(1150, 64, 192, 12, 4, 0.5, 0.02, 0.5, FACTS),
    Stage(1550, 128, 384, 8, 5, 0.3, 0.02, 0.3, LISTS),
    Stage(2000, 256, 768, 5, 6, 0.1, 0.1, 0.3, LISTS),
    Stage(2250, 512, 2048, 3, 6, 0.05, 0.1, 0.3, LISTS),
)
LONGEST = 2300


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters; the command line sets some of them by name."""

    optimizer: str = "muon"
    lr: float = 3e-3
    warmup: int = 200
    decay_from: float = 0.6
    # Steps to the end of the cosine; training stops earlier, when nothing more is gained.
    horizon: int = 2500
    seed: int = 0
    hidden: int = 192
    layers: int = 4
    heads: int = 6
    kv_heads: int = 3
    ffn: int = 512


def build_model(recipe: Recipe, vocabulary: int, stop: int) -> Qwen3ForCausalLM:
    """Return a Qwen3 model of about two million parameters, initialized from the seed."""
    torch.manual_seed(recipe.seed)
    config = Qwen3Config.from_dict(
        {
            "vocab_size": vocabulary,
            "hidden_size": recipe.hidden,
            "num_hidden_layers": recipe.layers,
            "head_dim": 32,
            "num_attention_heads": recipe.heads,
            "num_key_value_heads": recipe.kv_heads,
            "intermediate_size": recipe.ffn,
            "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
            "rope_theta": 1e5,
            "eos_token_id": stop,
            "pad_token_id": 0,
            "bos_token_id": None,
            "attn_implementation": "sdpa",
        }
    )
    return Qwen3ForCausalLM(config)


def make_optimizers(model: Qwen3ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers and AdamW for the rest, or AdamW for all."""
    inner = [p for p in model.model.layers.parameters() if p.ndim == 2]
    ids = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in ids]
    adam = {"lr": recipe.lr, "betas": (0.9, 0.98), "weight_decay": 0.01}
    if recipe.optimizer == "adamw":
        return [torch.optim.AdamW([*inner, *rest], **adam, fused=True)]
    muon = torch.optim.Muon(inner, lr=recipe.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, **adam, fused=True)]


def scale_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate's factor: warm-up, constant, then a cosine to 2 %."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    done = max(step / recipe.horizon - recipe.decay_from, 0) / (1 - recipe.decay_from)
    return 0.02 + 0.98 * (1 + math.cos(math.pi * min(done, 1))) / 2


def compute_losses(
    model: Qwen3ForCausalLM, batch: Batch, stage: Stage
) -> tuple[Tensor, dict[str, float], dict[str, list[bool]]]:
    """Return a batch's weighted loss, its parts, and by family whether each question's answer had
    all ids right.
    """
    with torch.autocast("cpu", torch.bfloat16):
        bias = torch.zeros(batch.mask.shape, dtype=torch.bfloat16).masked_fill_(
            ~batch.mask, float("-inf")
        )
        hidden = model.model(
            inputs_embeds=model.model.embed_tokens(batch.ids),
            attention_mask={"full_attention": bias},
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        counted = batch.part >= 0
        logits = model.lm_head(hidden[counted])
    target = batch.ids.roll(-1, 1)[counted]
    each = torch.nn.functional.cross_entropy(logits.float(), target, reduction="none")
    part = batch.part[counted]
    means = {
        name: each[part == number].mean()
        for name, number in (("answer", ANSWER), ("repeat", REPEAT), ("context", CONTEXT))
        if (part == number).any()
    }
    weight = {"answer": 1.0, "repeat": stage.repeat, "context": stage.context}
    total = torch.zeros(())
    for name, mean in means.items():
        total = total + weight[name] * mean
    right = torch.ones_like(batch.ids, dtype=torch.bool)
    right[counted] = logits.argmax(-1) == target
    seen: defaultdict[str, list[bool]] = defaultdict(list)
    for row, families in enumerate(batch.families):
        for number, family in enumerate(families):
            answered = (batch.question[row] == number) & (batch.part[row] == ANSWER)
            seen[family].append(bool(right[row][answered].all()))
    return total, {name: float(mean.detach()) for name, mean in means.items()}, seen


def save_state(path: Path, state: dict) -> None:
    """Write a checkpoint to a temporary file first, so that an interruption leaves the old one."""
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def pretrain(folder: Path, recipe: Recipe, steps: int | None, minutes: float) -> None:
    """Run the stages from the last checkpoint in `folder` to the end, or for at most `minutes`."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", trust_remote_code=False)
    sampler = Sampler(tokenizer)
    model = build_model(recipe, len(tokenizer), tokenizer.convert_tokens_to_ids("<|im_end|>"))
    opts = make_optimizers(model, recipe)
    steps = steps or STAGES[-1].until
    start = 0
    state = folder / "state.pt"
    if state.exists():
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        for opt, values in zip(opts, saved["optimizers"], strict=True):
            opt.load_state_dict(values)
        start = saved["step"]
    (folder / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1))
    begun = time.time()
    log = defaultdict(list)
    fresh = not (folder / "pretrain.csv").exists()
    table = csv.writer((folder / "pretrain.csv").open("a", buffering=1))
    if fresh:
        table.writerow(["step", "minutes", "answer", "repeat", "context", "family accuracy"])
    for step in range(start, steps):
        stage = next(s for s in STAGES if step < s.until)
        batch = sampler.batch(
            step,
            stage.rows,
            stage.low,
            stage.high,
            stage.questions,
            stage.noise,
            LONGEST,
            stage.mix,
        )
        loss, parts, seen = compute_losses(model, batch, stage)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = recipe.lr * scale_rate(recipe, step)
            opt.step()
            opt.zero_grad()
        for name, value in [*parts.items(), *((f, a) for f, many in seen.items() for a in many)]:
            log[name].append(value)
        if (step + 1) % 50 == 0:
            mean = {name: sum(values) / len(values) for name, values in log.items()}
            families = {
                name: round(100 * value) for name, value in mean.items() if name not in parts
            }
            row = [
                step + 1,
                round((time.time() - begun) / 60, 1),
                *(round(mean.get(k, 0), 3) for k in ("answer", "repeat", "context")),
                json.dumps(dict(sorted(families.items()))),
            ]
            table.writerow(row)
            print(*row, f"of {steps} steps", flush=True)
            log.clear()
        out_of_time = time.time() - begun > 60 * minutes
        if (step + 1) % 250 == 0 or step + 1 == steps or out_of_time:
            save_state(
                state,
                {
                    "model": model.state_dict(),
                    "optimizers": [o.state_dict() for o in opts],
                    "step": step + 1,
                },
            )
        if out_of_time and step + 1 < steps:
            return
    model.save_pretrained(folder / "model")


def main() -> None:
    """Read the options and train."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--optimizer", default="muon", choices=("muon", "adamw"))
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--minutes", type=float, default=1e9)
    options = parser.parse_args()
    pretrain(options.folder, Recipe(options.optimizer, options.lr), options.steps, options.minutes)


if __name__ == "__main__":
    run_recipe(main)
