"""The training loop (Eqs. 7-9 and "Training Setup Details"), top to bottom.

One step: draw a few contexts, and for each of them one or more ratios r, by default from
U(r_min, r_max); prefill and score without gradients, run the restore pass with gradients, evict to
the budget of each r, and let the student read the small cache. Teacher and student see the same
question and the teacher's own greedy answer; only embeddings, LoRA and, of an adapter that knows
the ratio, its vectors are trained. The teacher's question starts at position S + T, the student's
at S + T + n, with as many restore tokens n as were drawn.
"""

import csv
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.compression.full_cache import ScoredContext
from restorekv.compression.progress import OnStep
from restorekv.errors import AdapterError, RestoreKVError, import_extra
from restorekv.files import folder_lock, open_without_links
from restorekv.model.prompt import encode_text, get_default_separator
from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.adapter_file import read_adapter
from restorekv.restore.lora import keep_gradient_flags
from restorekv.spec import drop_gate, split_specs
from restorekv.train import checkpoint
from restorekv.train.checkpoint import TrainingRun
from restorekv.train.checks import check_setup
from restorekv.train.config import TrainConfig, compute_learning_rate
from restorekv.train.draw import StepSample, draw_step_samples, select_own_samples
from restorekv.train.examples import TrainingContext, check_example_lengths, count_sources
from restorekv.train.loss import (
    compute_hidden_divergence,
    compute_state_distance,
    reduce_losses,
    run_answers,
    weigh_answer_tokens,
)
from restorekv.train.parallel import SINGLE_PROCESS, ProcessGroup
from restorekv.train.run_folder import check_folders
from restorekv.train.teacher import TeacherTarget
from restorekv.train.teacher_cache import TeacherCache

# Added to a loss before its power is taken, so that samples with a far lower loss hardly matter.
LOSS_OFFSET = 1e-3


def compute_sample_loss(
    adapter: RestoreAdapter,
    prepared: ScoredContext,
    targets: list[TeacherTarget],
    sample: StepSample,
    config: TrainConfig,
) -> Tensor:
    """Return the loss of one context over the answer tokens of the sampled questions.

    Args:
        adapter: What is trained; its restore pass runs with gradients.
        prepared: The context with its scores, without a restore cache.
        targets: The teacher's targets for all of the context's questions.
        sample: Which questions, at which ratio, with how many restore tokens.
        config: The weights and directions of the loss.
    """
    # The questions that this step drew, of all that the context has.
    chosen = [targets[question] for question in sample.questions]
    # Restore pass with gradients, then eviction to the drawn ratio: what the student reads.
    student = prepared.with_restore_cache(adapter).evict(sample.ratio, sample.restore_tokens)
    # The name and the weight of every further loss.
    state_weights = config.state_weights()
    model = prepared.model
    rows = [target.ids for target in chosen]
    answer_lengths = [target.answer_length for target in chosen]
    output = run_answers(model, student, rows, answer_lengths, tuple(state_weights))
    losses = compute_hidden_divergence(
        model, torch.cat([target.hidden for target in chosen]), output.hidden, config.kl
    )
    # Further losses on the same pass: hidden states or attention outputs, layer by layer.
    for name, weight in state_weights.items():
        states = torch.cat([target.states[name] for target in chosen], 1)
        losses = losses + weight * compute_state_distance(states, output.states[name])
    token_weights = weigh_answer_tokens(answer_lengths, config.answer_decay)
    losses = losses * token_weights.to(losses.device)
    return reduce_losses(losses, len(chosen), config.reduction)


# Gradients are on whatever the caller has set: without them, no step would change the adapter.
@torch.inference_mode(False)
@torch.enable_grad()
def train_adapter(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    examples: list[TrainingContext],
    config: TrainConfig,
    folder: Path,
    resume: bool = False,
    progress: OnStep = lambda step, steps, what: None,
    *,
    store: Path | None = None,
    store_prefill: bool = False,
    group: ProcessGroup = SINGLE_PROCESS,
    notice: Callable[[str], None] = lambda text: None,
) -> RestoreAdapter:
    """Train an adapter, write it to `folder`/adapter and return it.

    Losses go to `folder`/loss.csv and TensorBoard files, checkpoints to `folder`.

    Args:
        model: Teacher and student; its weights are never changed.
        tokenizer: The model's own.
        examples: The contexts with their questions.
        config: The settings of the run.
        folder: The folder of the run.
        resume: Continue from the checkpoint, with the losses an uninterrupted run would have had.
        progress: Called after each step with the steps done, their number and the loss in words.
        store: A folder where runs share scores and the teacher's targets (`TeacherCache`).
        store_prefill: Keep the full caches in `store` too.
        group: The processes that share every step.
        notice: Called before the first step with sentences for the user: what the setup check
            measured, and settings that are probably not meant.

    Raises:
        RestoreKVError: `folder` holds a different run, or a context does not fit.
    """
    if not examples:
        raise RestoreKVError("There is nothing to train on; give at least one example.")
    # The log needs it, and a run should fail now rather than after hours of preparation.
    import_extra("torch.utils.tensorboard", "train", "Training")
    if model.dtype == torch.float16:
        raise RestoreKVError(
            "Gradients of long answers vanish in float16; train with --dtype bfloat16 or float32."
        )
    if any(weight.is_inference() for weight in model.parameters()):
        raise RestoreKVError(
            "The model was loaded inside torch.inference_mode, so nothing can be trained through "
            "its weights; load it outside."
        )
    # Everything that can be refused is refused before the folder is made, by the lock below.
    check_folders(folder, resume, store)
    adapter = make_initial_adapter(model, tokenizer, config, notice)
    init_name = _name_init_adapter(config.init)
    # Fixed embeddings are not among the optimizer's parameters.
    parameters = [parameter for parameter in adapter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=config.lr, betas=(0.9, 0.999), weight_decay=config.weight_decay
    )
    origin = checkpoint.describe_origin(model, tokenizer, examples, config, group.size)
    if config.init:
        # The folder may hold a different adapter by the time the run is resumed.
        origin["init_adapter"] = checkpoint.identify_init_adapter(adapter)
    run = TrainingRun(config, adapter, optimizer, origin)
    # Processes with different data, settings or adapters would average gradients of different runs.
    group.check_same(config.to_json() + json.dumps(run.origin))
    check_example_lengths(model, tokenizer, examples, config)
    teacher_cache = TeacherCache(model, tokenizer, examples, config, store, store_prefill)
    start = 0
    if resume:
        start = checkpoint.load_checkpoint(folder, run)
        if not start:
            notice(f"There is no checkpoint in {folder}; starting from the beginning.")
    _check_first_sample(run, teacher_cache, start, group, notice)
    # Processes that resume may have found different checkpoints.
    group.check_same(adapter.to_stored().weights_hash())
    if config.steps < config.warmup:
        peak = compute_learning_rate(config, config.steps - 1)
        notice(
            f"The learning rate rises for {config.warmup} steps and the run has {config.steps}: it "
            f"ends at {peak:.2g} of {config.lr:.2g}; a lower --warmup lets it learn more."
        )
    lock = folder_lock(folder) if group.rank == 0 else nullcontext()
    with lock, keep_gradient_flags(model):
        if group.rank == 0:
            # A different run may have used the folder since the check above.
            check_folders(folder, resume, store)
            checkpoint.start_log(folder, start)
        # The adapter alone is trained.
        model.requires_grad_(False)
        _take_steps(run, teacher_cache, folder, start, progress, group)
        _save_adapter(adapter, init_name, teacher_cache, folder, group)
    return adapter


def _take_steps(
    run: TrainingRun,
    teacher_cache: TeacherCache,
    folder: Path,
    start: int,
    progress: OnStep,
    group: ProcessGroup,
) -> None:
    """Take the steps from `start` on, with a checkpoint every `checkpoint_every` steps and on an
    interruption.

    An interrupted step changes nothing: adapter and optimizer change together, at its very end.
    """
    config = run.config
    done = start
    try:
        with _open_step_log(folder, start, group.rank) as log:
            for step in range(start, config.steps):
                begun = time.perf_counter()
                loss = _run_forward_backward(run, teacher_cache, step, group)
                # A step changes adapter and optimizer together, or not at all.
                with checkpoint.hold_signals():
                    _take_optimizer_step(run, step)
                    # Counted before its line is written, which may fail on a full disk: the step
                    # has been taken.
                    done = step + 1
                    log(
                        step, loss, compute_learning_rate(config, step), time.perf_counter() - begun
                    )
                progress(done, config.steps, f"loss {loss:.4f}")
                due = done % config.checkpoint_every == 0 or done == config.steps
                if due and group.rank == 0:
                    checkpoint.save_checkpoint(folder, run, done)
    except BaseException as error:
        # Interrupted by the user or an error: save the steps since the last checkpoint.
        if done > start and group.rank == 0:
            # A launcher such as torchrun repeats the signal, which would interrupt the saving.
            signal_guard = checkpoint.hold_signals() if group.size > 1 else nullcontext()
            # If the disk is full, the first error is the one to report.
            ignored = () if isinstance(error, KeyboardInterrupt) else (OSError, RestoreKVError)
            with signal_guard, suppress(*ignored):
                checkpoint.save_checkpoint(folder, run, done)
        raise


def _check_first_sample(
    run: TrainingRun,
    teacher_cache: TeacherCache,
    start: int,
    group: ProcessGroup,
    notice: Callable[[str], None],
) -> None:
    """Check the setup on the first sample of step `start`; no files but the store's are changed."""
    samples = draw_step_samples(run.config, start, teacher_cache.examples, group.size)
    sample = select_own_samples(samples, run.config.draws, group.rank, group.size)[0]
    with group.allow_uneven_passes(teacher_cache.model):
        notice(str(check_setup(run.adapter, teacher_cache, sample, start)))


def _run_forward_backward(
    run: TrainingRun, teacher_cache: TeacherCache, step: int, group: ProcessGroup
) -> float:
    """Run a step's samples forward and backward; return the mean loss over all processes, and leave
    the clipped mean gradient in the parameters.

    Every process reads `config.contexts` contexts and evicts each of them `config.draws` times.
    """
    config = run.config
    parameters = run.optimizer.param_groups[0]["params"]
    samples = draw_step_samples(config, step, teacher_cache.examples, group.size)
    samples = select_own_samples(samples, config.draws, group.rank, group.size)
    total = 0.0
    for sample in samples:
        with group.allow_uneven_passes(teacher_cache.model):
            prepared, targets = teacher_cache.get_context(sample.index, sample.evictor)
        sample_loss = compute_sample_loss(run.adapter, prepared, targets, sample, config)
        # The mean over the samples of this process; `average_gradients` takes that over the
        # processes.
        loss = sample_loss / len(samples)
        if loss.requires_grad:  # a ratio with no room for a restore token teaches nothing
            weight = weigh_ratio(config, float(sample.ratio))
            weight *= weigh_loss(config.loss_power, float(sample_loss.detach()))
            (loss * weight).backward()
        total += float(loss.detach())
    group.average_gradients(parameters)
    # Without a limit the norm is still computed, since it must be finite.
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip or math.inf)
    if not math.isfinite(total + float(norm)):
        raise RestoreKVError(
            f"Loss or gradient of step {step} is not finite ({total:g}, {float(norm):g}); lower "
            "the learning rate. The steps before it are kept."
        )
    return group.average_loss(total)


def weigh_ratio(config: TrainConfig, ratio: float) -> float:
    """Return the weight of a sample's loss at `ratio`.

    The divergence falls steeply as the ratio grows, so without a weight the lowest ratios alone
    decide what is learned.
    """
    return (ratio / config.ratio_max) ** config.ratio_weight


def weigh_loss(power: float, loss: float) -> float:
    """Return the factor of a sample's gradient, so that the step minimizes the loss to the power
    `power`, or its logarithm if `power` is 0.

    The gradient of (L + c)^p / p is (L + c)^(p - 1) times that of L, and that of log(L + c) is the
    same with p = 0. Without c = LOSS_OFFSET, samples that are already right would get the largest
    factors.
    """
    return float((loss + LOSS_OFFSET) ** (power - 1.0))


def _take_optimizer_step(run: TrainingRun, step: int) -> None:
    """Take an optimizer step with the gradients of training step `step`."""
    run.optimizer.param_groups[0]["lr"] = compute_learning_rate(run.config, step)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)


def make_initial_adapter(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    config: TrainConfig,
    notice: Callable[[str], None] = lambda text: None,
) -> RestoreAdapter:
    """Return an untrained adapter, or the one that `config.init` names.

    A named adapter must have the targets, kind of embeddings and so on of the settings. If it has
    fewer restore tokens or a lower rank than they say, it is extended.

    Args:
        model: The model that it is for.
        tokenizer: The model's own.
        config: The settings of the run.
        notice: Gets a sentence if the named adapter is extended.

    Raises:
        AdapterError: The named adapter does not match the settings.
    """
    if config.init:
        adapter = RestoreAdapter.from_pretrained(model, config.init)
        adapter = _extend_to_settings(adapter, config, notice)
        _check_same_shape(adapter, config)
    else:
        adapter = _make_untrained_adapter(model, tokenizer, config)
    if config.knows_ratio:
        adapter.add_ratio_vectors()
    return adapter


def _extend_to_settings(
    adapter: RestoreAdapter, config: TrainConfig, notice: Callable[[str], None]
) -> RestoreAdapter:
    """Return an adapter with the restore tokens and the rank of the settings, where they are more
    than it has.

    These numbers may be the defaults, larger than intended, so the user is told.
    """
    restore_tokens = max(adapter.restore_tokens, config.restore_tokens)
    rank = max(adapter.lora_config.r, config.rank)
    if restore_tokens > adapter.restore_tokens:
        notice(
            f"The adapter {config.init} has {adapter.restore_tokens} restore tokens and gets "
            f"{restore_tokens - adapter.restore_tokens} more, which begin as copies of them; "
            f"--restore-tokens {adapter.restore_tokens} continues its training with only those "
            "that it has."
        )
    if rank > adapter.lora_config.r:
        notice(
            f"The LoRA of the adapter {config.init} has rank {adapter.lora_config.r} and gets rank "
            f"{rank}, which changes nothing before the first step; --rank {adapter.lora_config.r} "
            f"--alpha {adapter.lora_config.lora_alpha:g} continues its training as it is."
        )
    return adapter.extend(restore_tokens, rank, config.seed)


def _name_init_adapter(init: str) -> str:
    """Return the name of the adapter that training begins with, as its record has it.

    The record may be published, so a local adapter is named by the hash of its weights, not by its
    folder.
    """
    if not os.path.isdir(init):
        return init
    return f"a local adapter, weights {read_adapter(Path(init)).weights_hash()}"


def _make_untrained_adapter(
    model: PreTrainedModel, tokenizer: Tokenizer, config: TrainConfig
) -> RestoreAdapter:
    fixed = None
    # The paper's control: n times the embedding of a line break.
    if config.embeddings == "fixed":
        line_break = encode_text(tokenizer, "\n")
        fixed = int(line_break[0, -1])
    return RestoreAdapter.create(
        model,
        config.restore_tokens,
        rank=config.rank,
        alpha=config.alpha,
        targets=config.targets,
        seed=config.seed,
        fixed=fixed,
    )


def _check_same_shape(adapter: RestoreAdapter, config: TrainConfig) -> None:
    """Refuse settings that differ from the adapter's shape, which further training cannot change.

    Report all differences in one message.
    """
    shape = {
        "restore_tokens": adapter.restore_tokens,
        "rank": adapter.lora_config.r,
        "alpha": adapter.lora_config.lora_alpha,
        "embeddings": adapter.card.embeddings,
    }
    flags = []
    for name, value in shape.items():
        if value != getattr(config, name):
            flags.append(f"--{name.replace('_', '-')} {value}")
    targets = sorted(adapter.lora_config.target_modules or ())
    if targets != sorted(config.targets):
        flags.append(f"--targets {','.join(targets) or 'none'}")
    if adapter.knows_ratio and not config.knows_ratio:
        flags.append("--knows-ratio")
    if flags:
        raise AdapterError(
            f"The adapter {config.init} and the settings differ in shape; continue training it "
            f"with {' '.join(flags)}."
        )


def _save_adapter(
    adapter: RestoreAdapter,
    init_name: str,
    teacher_cache: TeacherCache,
    folder: Path,
    group: ProcessGroup,
) -> None:
    """Save the adapter with a record of its training.

    If training began with another adapter, the record has that adapter's data too, and its name,
    `init_name`.
    """
    config = teacher_cache.config
    data = count_sources(teacher_cache.examples)
    if config.init:
        data = data + inherit_data(adapter.card.data or [], data)
    identity = checkpoint.identify_scores(config, teacher_cache.model)
    settings = json.loads(config.to_json()) | {"processes": group.size}
    # The record may be published: it names a gate by its hash, and not by where it is.
    if any(drop_gate(spec) != spec for spec in split_specs(config.evictor)):
        settings["evictor"] = identity
    settings["init"] = init_name
    adapter.record_training(
        evictor=identity,
        prefix_policy=config.prefix_policy,
        ratio_range=(config.ratio_min, config.ratio_max),
        allocation=teacher_cache.evictions[0].config.allocation_spec,
        restore_from=config.restore_from,
        settings=settings,
        data=data,
        separator=get_default_separator(teacher_cache.tokenizer),
    )
    if group.rank == 0:
        adapter.save_pretrained(folder / "adapter")
    group.wait()


def inherit_data(before: list[dict], own: list[dict]) -> list[dict]:
    """Return rows for the data that an adapter was trained on before this run.

    Data that this run trains on again, with an equal row in `own`, are left out.
    """
    rows = []
    for row in before:
        name = row.get("source")
        if name is not None and row in own:
            continue
        rows.append(
            row | {"source": f"{name or 'unnamed data'}, through the adapter it began with"}
        )
    return rows


@contextmanager
def _open_step_log(
    folder: Path, start: int, rank: int
) -> Iterator[Callable[[int, float, float, float], None]]:
    """Yield a function that logs a step to loss.csv and TensorBoard; only the first process
    writes.
    """
    # Other processes compute the same steps and write nothing.
    if rank:
        yield lambda step, loss, lr, seconds: None
        return
    tensorboard = import_extra("torch.utils.tensorboard", "train", "Training")
    # TensorBoard drops what an interrupted run logged after its checkpoint.
    writer = tensorboard.SummaryWriter(str(folder), purge_step=start)
    with open_without_links(folder / checkpoint.LOG_FILE) as raw, writer as board:
        file = io.TextIOWrapper(raw, newline="", write_through=True)

        def write(step: int, loss: float, lr: float, seconds: float) -> None:
            csv.writer(file).writerow([step, f"{loss:.9g}", f"{lr:.9g}", f"{seconds:.3f}"])
            file.flush()
            board.add_scalar("loss", loss, step)

        yield write
