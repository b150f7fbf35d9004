"""The training loop (Eqs. 7-9 and "Training Setup Details"), top to bottom.

One step: for each of a few contexts, prefill and score without gradients, run the restore pass with them, draw
r ~ U(r_min, r_max), evict to the budget, and let the student answer from what is left. Teacher and student see the
same question and the teacher's own greedy answer; only embeddings and LoRA move. The teacher's question starts at
position T, the student's at T + n.
"""

from __future__ import annotations

import csv
import json
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.budget import PrefixPolicy
from restorekv.compression import Eviction
from restorekv.errors import RestoreKVError
from restorekv.prepared import Prepared, RestoreFrom, one_of
from restorekv.prompt import encode
from restorekv.restore import RestoreAdapter
from restorekv.train.data import Example
from restorekv.train.distill import symmetric_kl
from restorekv.train.teacher import Lesson, answer_logits, teach


@dataclass(frozen=True)
class TrainConfig:
    """The paper's settings are the defaults."""

    evictor: str = "kvzip"
    prefix_policy: PrefixPolicy = "free"
    allocation: str = "global"
    restore_from: RestoreFrom = "full"
    restore_tokens: int = 8  # n
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    embeddings: str = "learned"  # or "fixed": those of a line break
    lr: float = 2e-4
    weight_decay: float = 0.01
    warmup: int = 50
    clip: float = 1.0
    steps: int = 5000
    contexts: int = 1  # per step
    questions: int = 4  # per context and step, at most
    ratio_min: float = 0.025
    ratio_max: float = 0.25
    max_new_tokens: int = 512
    seed: int = 0
    keep: int = 0  # contexts whose prefill, scores and lessons stay in memory for the next time they are drawn
    checkpoint_every: int = 50

    def __post_init__(self) -> None:
        self.eviction()
        one_of("embeddings", self.embeddings, ("learned", "fixed"))
        for name in ("restore_tokens", "rank", "steps", "contexts", "questions", "max_new_tokens", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise RestoreKVError(f"{name} is a number of at least 1, not {getattr(self, name)}.")
        for name in ("alpha", "lr", "weight_decay", "warmup", "clip", "keep"):
            if not 0 <= getattr(self, name) < math.inf:
                raise RestoreKVError(f"{name} is a number of at least 0, not {getattr(self, name)}.")
        if not 0 < self.ratio_min <= self.ratio_max <= 1:
            raise RestoreKVError(
                f"Training ratios need 0 < ratio_min <= ratio_max <= 1, not {self.ratio_min:g} and {self.ratio_max:g}."
            )

    def eviction(self) -> Eviction:
        """What the adapter is trained to restore; contexts too short for n restore tokens get fewer."""
        conventions = {"allocation": self.allocation, "restore_from": self.restore_from}
        return Eviction.make(self.evictor, prefix_policy=self.prefix_policy, on_tight="fewer", **conventions)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine to zero."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * done))


def draw(config: TrainConfig, step: int, examples: int) -> tuple[list[int], random.Random]:
    """The contexts of `step`, in an order shuffled anew every epoch, and the step's own random numbers."""
    indices = []
    for visit in range(step * config.contexts, (step + 1) * config.contexts):
        epoch, place = divmod(visit, examples)
        order = list(range(examples))
        random.Random(f"order {config.seed} {epoch}").shuffle(order)
        indices.append(order[place])
    return indices, random.Random(f"step {config.seed} {step}")


class Lessons:
    """Prepared contexts with their teacher's answers, the first `keep` of them remembered."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, examples: list[Example], config: TrainConfig):
        self.model, self.tokenizer, self.examples, self.config = model, tokenizer, examples, config
        self.eviction = config.eviction()
        self.kept: dict[int, tuple[Prepared, list[Lesson]]] = {}

    def __getitem__(self, index: int) -> tuple[Prepared, list[Lesson]]:
        if index in self.kept:
            return self.kept[index]
        example = self.examples[index]
        with torch.no_grad():
            prepared = self.eviction.prepare(self.model, self.tokenizer, example.context)
            lessons = teach(self.model, self.tokenizer, prepared, example, self.config.max_new_tokens)
        if len(self.kept) < self.config.keep:
            self.kept[index] = prepared, lessons
        return prepared, lessons


def step_loss(
    model: PreTrainedModel,
    adapter: RestoreAdapter,
    lessons: Lessons,
    index: int,
    config: TrainConfig,
    rng: random.Random,
) -> Tensor:
    """Loss of one context: the mean over the answer tokens of its drawn questions."""
    prepared, taught = lessons[index]
    chosen = rng.sample(taught, min(config.questions, len(taught)))
    ratio = rng.uniform(config.ratio_min, config.ratio_max)
    student = prepared.restored_by(adapter).at(f"{ratio:.6f}")
    logits = answer_logits(model, student, [lesson.ids for lesson in chosen], [lesson.answer for lesson in chosen])
    return symmetric_kl(torch.cat([lesson.logits for lesson in chosen]), logits).mean()


def train(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    examples: list[Example],
    config: TrainConfig,
    folder: Path,
    resume: bool = False,
    progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> RestoreAdapter:
    """Train an adapter, write it to `folder`/adapter and return it.

    Logs go to `folder`/loss.csv and TensorBoard files, checkpoints to `folder`/checkpoint.pt. `resume` continues from
    the checkpoint with the losses an uninterrupted run would have had. Raises RestoreKVError when `folder` holds
    another run.
    """
    if not examples:
        raise RestoreKVError("There is nothing to train on; give at least one example.")
    model.requires_grad_(False)
    adapter = fresh_adapter(model, tokenizer, config)
    folder.mkdir(parents=True, exist_ok=True)
    parameters = [parameter for parameter in adapter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, betas=(0.9, 0.999), weight_decay=config.weight_decay)
    start = restart(folder, config, adapter, optimizer) if resume else begin(folder)
    lessons = Lessons(model, tokenizer, examples, config)
    with (folder / "loss.csv").open("a", newline="") as file, SummaryWriter(str(folder), purge_step=start) as board:
        for step in range(start, config.steps):
            begun = time.perf_counter()
            loss = take_step(model, adapter, lessons, config, step, optimizer, parameters)
            csv.writer(file).writerow(
                [step, f"{loss:.9g}", f"{learning_rate(config, step):.9g}", f"{time.perf_counter() - begun:.3f}"]
            )
            board.add_scalar("loss", loss, step)
            progress(step + 1, config.steps, loss)
            if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
                file.flush()
                checkpoint(folder, config, adapter, optimizer, step + 1)
    adapter.describe(
        evictor=lessons.eviction.identity(model),
        prefix_policy=config.prefix_policy,
        ratio_range=(config.ratio_min, config.ratio_max),
        allocation=lessons.eviction.conventions.allocation.spec,
        restore_from=config.restore_from,
    )
    adapter.save_pretrained(folder / "adapter")
    return adapter


def fresh_adapter(model: PreTrainedModel, tokenizer: Tokenizer, config: TrainConfig) -> RestoreAdapter:
    """The adapter before its first step."""
    fixed = int(encode(tokenizer, "\n")[0, -1]) if config.embeddings == "fixed" else None
    return RestoreAdapter.create(
        model, config.restore_tokens, rank=config.rank, alpha=config.alpha, targets=config.targets, seed=config.seed,
        fixed=fixed,
    )  # fmt: skip


def take_step(model, adapter, lessons, config, step, optimizer, parameters) -> float:
    """One optimizer step over `config.contexts` contexts; returns their mean loss."""
    indices, rng = draw(config, step, len(lessons.examples))
    total = 0.0
    for index in indices:
        loss = step_loss(model, adapter, lessons, index, config, rng) / len(indices)
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(parameters, config.clip)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def begin(folder: Path) -> int:
    """A fresh run; an older one in the same folder is never overwritten."""
    if (folder / "checkpoint.pt").exists():
        raise RestoreKVError(f"{folder} already holds a run; continue it with --resume or choose another folder.")
    (folder / "loss.csv").write_text("step,loss,lr,seconds\n")
    return 0


def checkpoint(
    folder: Path, config: TrainConfig, adapter: RestoreAdapter, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Written under another name first, so a kill at any moment leaves a whole one."""
    state = {
        "config": json.dumps(asdict(config)), "adapter": adapter.trainable_state(),
        "optimizer": optimizer.state_dict(), "step": step,
    }  # fmt: skip
    torch.save(state, folder / "checkpoint.tmp")
    os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")


def restart(folder: Path, config: TrainConfig, adapter: RestoreAdapter, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint, drop log lines written after it, and return the step to go on with."""
    path = folder / "checkpoint.pt"
    if not path.exists():
        return begin(folder)
    state = torch.load(path, weights_only=True)
    saved = TrainConfig(
        **{
            key: tuple(value) if isinstance(value, list) else value
            for key, value in json.loads(state["config"]).items()
        }
    )
    if replace(saved, keep=config.keep, checkpoint_every=config.checkpoint_every) != config:
        raise RestoreKVError(
            f"The run in {folder} has other settings; resume it with the same ones or choose another folder."
        )
    adapter.load_trainable_state(state["adapter"])
    optimizer.load_state_dict(state["optimizer"])
    lines = (folder / "loss.csv").read_text().splitlines()
    (folder / "loss.csv").write_text("\n".join(lines[: state["step"] + 1]) + "\n")
    return state["step"]
