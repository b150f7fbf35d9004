"""`restorekv train --data bundled --out DIR`: the flags are the fields of TrainConfig, so they cannot drift apart."""

import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from restorekv.cli import options
from restorekv.cli.session import notes, open_model, output
from restorekv.errors import RestoreKVError
from restorekv.tiny.suite import LONGEST, SHORTEST
from restorekv.train import checkpoint
from restorekv.train.config import TrainConfig
from restorekv.train.data import bundled_examples, read_examples
from restorekv.train.example import Example
from restorekv.train.loop import train
from restorekv.train.parallel import ProcessGroup, assembled, own_device, spread, wants_shards

HELP = {
    "evictor": "Whose losses to restore, with its settings: kvzip, snapkv:window=64.",
    "prefix_policy": "free: the chat prefix is kept and not counted; counted.",
    "allocation": "Which pairs compete: global, per-layer, per-head or adakv.",
    "restore_from": "full, or evicted: a control whose restore pass reads the evicted cache.",
    "restore_tokens": "n, how many restore tokens.",
    "rank": "Rank of the LoRA.",
    "alpha": "The LoRA's scale is alpha / rank.",
    "targets": "Linear layers that get a LoRA, with commas between; none for a control without LoRA.",
    "init": "Adapter to begin with, a folder or hub id; else a fresh one.",
    "embeddings": "learned, or fixed: a control with n line breaks.",
    "lr": "Highest learning rate.",
    "weight_decay": "Weight decay of AdamW.",
    "warmup": "Steps of linear warm-up before the cosine.",
    "clip": "Largest norm of the gradient; 0: any.",
    "steps": "Optimizer steps.",
    "contexts": "Contexts per process and step; their gradients are averaged.",
    "questions": "Questions per context and step, at most.",
    "ratio_min": "Lowest compression ratio drawn.",
    "ratio_max": "Highest compression ratio drawn.",
    "ratio_law": "uniform, or log-uniform, which draws tight ratios more often.",
    "nested": "Draw how many restore tokens are used, so that the first few work alone.",
    "kl": "symmetric; forward: KL(teacher, student); reverse.",
    "reduction": "mean over the answer tokens, or their sum: long answers weigh more.",
    "hidden_weight": "Weight of matching the teacher's hidden states at the answer.",
    "attention_weight": "Weight of matching the teacher's attention outputs there.",
    "max_new_tokens": "Longest answer of the teacher.",
    "seed": "Seed of embeddings, LoRA and draws.",
    "keep": "Prepared contexts that stay in memory.",
    "checkpoint_every": "Steps between checkpoints.",
}
DATA_HELP = 'bundled, a mixture (restorekv data) or JSON lines {"context", "questions", "answers"}; repeatable.'


def run(
    out: Annotated[Path, typer.Option(help="Folder of the run: adapter, losses, checkpoint.")],
    data: Annotated[
        list[str],
        typer.Option(help=DATA_HELP),
    ] = ("bundled",),
    count: Annotated[int, typer.Option(min=1, help="How many bundled contexts.")] = 1000,
    shortest: Annotated[int, typer.Option(min=64, help="Fewest tokens of a bundled context.")] = SHORTEST,
    longest: Annotated[int, typer.Option(min=64, help="Most tokens of a bundled context.")] = LONGEST,
    model: options.Model = "bundled",
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's checkpoint.")] = False,
    shard: Annotated[
        bool, typer.Option("--shard", help="Spread the backbone over the processes of `accelerate launch`.")
    ] = False,
    store: Annotated[
        Path | None, typer.Option(help="Folder that keeps scores and the teacher's answers for later steps and runs.")
    ] = None,
    store_prefill: Annotated[
        bool, typer.Option("--store-prefill", help="Keep the full caches there too: for small models.")
    ] = False,
    **settings: Any,
) -> None:
    targets = () if settings["targets"] == "none" else tuple(name.strip() for name in settings["targets"].split(","))
    config = TrainConfig(**{**settings, "targets": targets})
    if shortest > longest:
        raise RestoreKVError(f"--shortest {shortest} is more than --longest {longest}; swap them.")
    if out.exists() and not out.is_dir():
        raise RestoreKVError(f"{out} is a file; give the name of a folder.")
    if store_prefill and store is None:
        raise RestoreKVError("--store-prefill says what --store keeps; give the folder with --store.")
    for name in data:
        there(name)
    own, sharing = own_device(device), wants_shards(shard)
    with assembled(own) as team:
        notes.quiet = output.quiet = team.rank > 0
        loaded, tokenizer = open_model(model, dtype, "cpu" if sharing else str(own))
        if sharing:
            spread(loaded, own)
        made = count, config.seed, shortest, longest
        examples = [each for name in data for each in gathered(name, loaded, tokenizer, made)]
        kept = {"store": store, "store_prefill": store_prefill}
        run_with_bar(loaded, tokenizer, examples, config, out, resume, team, **kept)
    output.print(f"Wrote {escape(str(out / 'adapter'))}")


def gathered(data: str, model, tokenizer, made: tuple[int, int, int, int]) -> list[Example]:
    """The examples of one --data; `made` are count, seed, shortest and longest of the bundled world's."""
    return bundled_examples(tokenizer, *made) if data == "bundled" else read_examples(Path(data), model, tokenizer)


def there(data: str) -> None:
    """Refuses what names no training data."""
    if data != "bundled" and not Path(data).exists():
        raise RestoreKVError(f"There is no training file {data}; give a JSON-lines file, a mixture or 'bundled'.")


def run_with_bar(
    model,
    tokenizer,
    examples: list[Example],
    config: TrainConfig,
    out: Path,
    resume: bool,
    team: ProcessGroup,
    **kept: Any,
) -> None:
    """Trains with a bar on a terminal and a line per checkpoint elsewhere; `kept` says where lessons are kept."""
    columns = (
        TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(), TextColumn("to go"), TimeRemainingColumn(elapsed_when_finished=False),
    )  # fmt: skip
    with Progress(*columns, console=notes, disable=not notes.is_terminal) as bar:
        task = bar.add_task("train", total=config.steps, loss="-")

        def progress(step: int, steps: int, loss: float) -> None:
            bar.update(task, completed=step, loss=f"{loss:.4f}")
            if not notes.is_terminal and (step % config.checkpoint_every == 0 or step == steps):
                left = bar.tasks[0].time_remaining
                notes.print(f"step {step}/{steps}  loss {loss:.4f}" + (f"  {left:.0f} s to go" if left else ""))

        try:
            train(model, tokenizer, examples, config, out, resume, progress, team=team, notice=notes.print, **kept)
        except KeyboardInterrupt:
            there = (out / checkpoint.FILE).exists()
            way = f"go on from the last checkpoint in {out} with --resume" if there else f"no checkpoint yet in {out}"
            raise KeyboardInterrupt(f"Interrupted; {way}.") from None


def flag(name: str, kind: Any, default: Any) -> inspect.Parameter:
    """A field of TrainConfig as an option; tuples are written with commas, literals as their text."""
    if default is MISSING or get_origin(kind) is not None:
        kind, default = str, ",".join(default) if isinstance(default, tuple) else default
    option = Annotated[kind, typer.Option(help=HELP[name])]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)


def with_flags() -> inspect.Signature:
    """`run` as typer shall see it: its own options, then one for every field."""
    own = [p for p in inspect.signature(run).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    kinds = get_type_hints(TrainConfig)
    added = [flag(field.name, kinds[field.name], field.default) for field in fields(TrainConfig)]
    return inspect.Signature([*own, *added])


run.__signature__ = with_flags()
run.__annotations__ = {name: parameter.annotation for name, parameter in run.__signature__.parameters.items()}
