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
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.compression.prepared import ScoredContext
from restorekv.errors import AdapterError, RestoreKVError
from restorekv.model.prompt import default_between, encode
from restorekv.restore.adapter import RestoreAdapter
from restorekv.train import checkpoint
from restorekv.train.answers import answer_pass
from restorekv.train.checkpoint import Run
from restorekv.train.checks import check
from restorekv.train.config import TrainConfig, learning_rate
from restorekv.train.data import check_lengths
from restorekv.train.distill import from_hidden, matching, reduced
from restorekv.train.example import Example, sources
from restorekv.train.lessons import TeacherCache
from restorekv.train.parallel import SINGLE_PROCESS, ProcessGroup
from restorekv.train.teacher import TeacherTarget
from restorekv.train.visit import StepSample, draw

Progress = Callable[[int, int, float], None]


def visit_loss(
    model: PreTrainedModel, adapter: RestoreAdapter, taught: tuple[ScoredContext, list[TeacherTarget]],
    visit: StepSample, config: TrainConfig,
) -> Tensor:  # fmt: skip
    """Loss of one context over the answer tokens of its drawn questions."""
    prepared, lessons = taught
    chosen = [lessons[question] for question in visit.questions]
    student = prepared.with_restore_cache(adapter).evict(visit.ratio, visit.tokens)
    rows, answers = [lesson.ids for lesson in chosen], [lesson.answer for lesson in chosen]
    watched = config.watched()
    seen = answer_pass(model, student, rows, answers, tuple(watched))
    teacher = torch.cat([lesson.hidden for lesson in chosen])
    losses = from_hidden(model, teacher, seen.hidden, config.kl)
    for name, weight in watched.items():
        states = torch.cat([lesson.states[name] for lesson in chosen], 1)
        losses = losses + weight * matching(states, seen.states[name])
    return reduced(losses, len(chosen), config.reduction)


def train(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    examples: list[Example],
    config: TrainConfig,
    folder: Path,
    resume: bool = False,
    progress: Progress = lambda step, steps, loss: None,
    *,
    store: Path | None = None,
    store_prefill: bool = False,
    team: ProcessGroup = SINGLE_PROCESS,
    notice: Callable[[str], None] = lambda text: None,
) -> RestoreAdapter:
    """Train an adapter, write it to `folder`/adapter and return it; `notice` hears what was found before the start.

    Logs go to `folder`/loss.csv and TensorBoard files, checkpoints to `folder`. `resume` continues from the
    checkpoint with the losses an uninterrupted run would have had. `store` is a folder for what runs have in common
    (`TeacherCache`). Raises RestoreKVError when `folder` holds another run.
    """
    if not examples:
        raise RestoreKVError("There is nothing to train on; give at least one example.")
    if model.dtype == torch.float16:
        raise RestoreKVError("Gradients of long answers vanish in float16; train with --dtype bfloat16 or float32.")
    model.requires_grad_(False)
    adapter = fresh_adapter(model, tokenizer, config)
    folder.mkdir(parents=True, exist_ok=True)
    parameters = [parameter for parameter in adapter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, betas=(0.9, 0.999), weight_decay=config.weight_decay)
    run = Run(config, adapter, optimizer, checkpoint.origin(model, tokenizer, examples, config, team.size))
    team.agree(config.text() + json.dumps(run.origin))
    check_lengths(model, tokenizer, examples, config)
    start = opened(folder, run, resume, team, notice)
    lessons = TeacherCache(model, tokenizer, examples, config, store, store_prefill)
    first = draw(config, start, examples, team.size)[team.rank]
    with team.level(model):
        notice(str(check(adapter, lessons, first)))
    with Log(folder, start, team.rank) as log:
        for step in range(start, config.steps):
            begun = time.perf_counter()
            loss = take_step(adapter, lessons, config, step, optimizer, parameters, team)
            log.write(step, loss, learning_rate(config, step), time.perf_counter() - begun)
            progress(step + 1, config.steps, loss)
            due = (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps
            if due and team.rank == 0:
                checkpoint.save(folder, run, step + 1)
    finish(adapter, lessons, folder, team)
    return adapter


def opened(folder: Path, run: Run, resume: bool, team: ProcessGroup, notice: Callable[[str], None]) -> int:
    """The step to begin with; the log then ends before it."""
    start = checkpoint.restart(folder, run) if resume else 0
    if resume and not start:
        notice(f"There is no checkpoint in {folder}; starting from the beginning.")
    team.wait()
    if team.rank == 0:
        checkpoint.trim(folder, start) if start else checkpoint.begin(folder)
    return start


def take_step(
    adapter: RestoreAdapter,
    lessons: TeacherCache,
    config: TrainConfig,
    step: int,
    optimizer,
    parameters,
    team: ProcessGroup = SINGLE_PROCESS,
) -> float:
    """One optimizer step over `config.contexts` contexts of every process; returns the mean loss."""
    model = lessons.model
    own = draw(config, step, lessons.examples, team.size)[team.rank :: team.size]
    total = 0.0
    for visit in own:
        with team.level(model):
            taught = lessons[visit.index]
        loss = visit_loss(model, adapter, taught, visit, config) / len(own)
        if loss.requires_grad:  # of a ratio into which no restore token fits there is nothing to learn
            loss.backward()
        total += float(loss.detach())
    team.average(parameters)
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip or math.inf)
    if not math.isfinite(total + float(norm)):
        raise RestoreKVError(
            f"Loss or gradient of step {step} is not finite ({total:g}, {float(norm):g}); lower the learning rate. The "
            "last checkpoint is from before it."
        )
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return team.mean(total)


def fresh_adapter(model: PreTrainedModel, tokenizer: Tokenizer, config: TrainConfig) -> RestoreAdapter:
    """The adapter before its first step: untrained, or the one that the run goes on from."""
    if config.init:
        return continued(model, config)
    fixed = int(encode(tokenizer, "\n")[0, -1]) if config.embeddings == "fixed" else None
    return RestoreAdapter.create(
        model, config.restore_tokens, rank=config.rank, alpha=config.alpha, targets=config.targets, seed=config.seed,
        fixed=fixed,
    )  # fmt: skip


def continued(model: PreTrainedModel, config: TrainConfig) -> RestoreAdapter:
    """The adapter `config.init`, which must have the shape that the settings name."""
    adapter = RestoreAdapter.from_pretrained(model, config.init)
    has = {"restore_tokens": adapter.restore_tokens, "rank": adapter.config.r, "alpha": adapter.config.lora_alpha}
    for name, value in has.items():
        if value != getattr(config, name):
            raise AdapterError(
                f"The adapter {config.init} has {name} {value:g}, the settings {getattr(config, name):g}; "
                f"train with --{name.replace('_', '-')} {value:g}."
            )
    if set(adapter.config.target_modules or ()) != set(config.targets):
        raise AdapterError(f"The adapter {config.init} has LoRA on other layers than --targets; name the same ones.")
    return adapter


def finish(adapter: RestoreAdapter, lessons: TeacherCache, folder: Path, team: ProcessGroup) -> None:
    """The adapter with what it was trained with, in its folder; what one began with counts among its data."""
    config, before = lessons.config, adapter.card
    began = [row | {"source": f"{row.get('source')}, through the adapter it began with"} for row in before.data or []]
    adapter.describe(
        evictor=lessons.eviction.identity(lessons.model),
        prefix_policy=config.prefix_policy,
        ratio_range=(config.ratio_min, config.ratio_max),
        allocation=lessons.eviction.conventions.allocation.spec,
        restore_from=config.restore_from,
        settings=json.loads(config.text()) | {"processes": team.size},
        data=sources(lessons.examples) + (began if config.init else []),
        between=default_between(lessons.tokenizer),
    )
    if team.rank == 0:
        adapter.save_pretrained(folder / "adapter")
    team.wait()


class Log:
    """loss.csv and TensorBoard's files, by the first process alone."""

    def __init__(self, folder: Path, start: int, rank: int) -> None:
        self.file = (folder / checkpoint.LOG).open("a", newline="") if rank == 0 else None
        self.board = SummaryWriter(str(folder), purge_step=start) if rank == 0 else None

    def __enter__(self) -> Log:
        return self

    def write(self, step: int, loss: float, lr: float, seconds: float) -> None:
        """One step."""
        if self.file and self.board:
            csv.writer(self.file).writerow([step, f"{loss:.9g}", f"{lr:.9g}", f"{seconds:.3f}"])
            self.file.flush()
            self.board.add_scalar("loss", loss, step)

    def __exit__(self, *_: object) -> None:
        if self.file and self.board:
            self.file.close()
            self.board.close()
