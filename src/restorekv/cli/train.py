"""`restorekv train --data tiny --out DIR`: TrainConfig's fields are options."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from restorekv.cli import options
from restorekv.cli.choices import check_evictor
from restorekv.cli.terminal import notes, output, print_written, show_progress_bar
from restorekv.compression.presets import resolve_preset
from restorekv.data.build_folder import read_manifest
from restorekv.errors import RestoreKVError, import_extra
from restorekv.spec import split_specs
from restorekv.tiny.world import LONGEST, SHORTEST
from restorekv.train.config import TrainConfig
from restorekv.train.run_folder import CHECKPOINT_FILE, LOG_FILE, check_folders, read_losses

TINY_TEXTS = 1000
ShortestTinyText = Annotated[
    int | None,
    typer.Option(
        min=64,
        help="Minimum length of a text of the tiny world, in tokens.",
        show_default=str(SHORTEST),
    ),
]
LongestTinyText = Annotated[
    int | None,
    typer.Option(
        min=64,
        help="Maximum length of a text of the tiny world, in tokens.",
        show_default=str(LONGEST),
    ),
]
DATA_HELP = (
    "Training data: tiny (the tiny model's world), a folder of `restorekv data build`, or JSON "
    'lines with "context", "questions" and, if there are drafts, "answers"; repeatable.'
)


@options.add_options_of(TrainConfig)
def run(
    out: Annotated[
        Path,
        options.make_folder_option("Folder of the run, for adapter, losses and checkpoint."),
    ],
    data: Annotated[list[str], typer.Option(help=DATA_HELP)],
    count: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of texts of the tiny world.", show_default=str(TINY_TEXTS)
        ),
    ] = None,
    shortest: ShortestTinyText = None,
    longest: LongestTinyText = None,
    longest_context: Annotated[
        int | None,
        typer.Option(min=64, help="Leave out texts of more tokens than this, of any data."),
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the folder's checkpoint.")
    ] = False,
    shard: Annotated[
        bool,
        typer.Option(
            "--shard",
            help="Spread the backbone over the processes of `torchrun` or `accelerate launch`.",
        ),
    ] = False,
    store: Annotated[
        Path | None,
        options.make_folder_option(
            "Folder for scores and the teacher's answers, which later steps and runs use."
        ),
    ] = None,
    store_prefill: Annotated[
        bool,
        typer.Option(
            "--store-prefill", help="Keep the full caches in --store, too; for small models."
        ),
    ] = False,
    **settings: Any,
) -> None:
    targets: tuple[str, ...] = ()
    if settings["targets"] != "none":
        targets = tuple(name.strip() for name in settings["targets"].split(","))
    refuse_world_options(data, {"--count": count})
    count = count or TINY_TEXTS
    shortest, longest = choose_lengths(data, shortest, longest)
    check_folders(out, resume, store)
    if store_prefill and store is None:
        raise RestoreKVError("--store-prefill needs a folder; name it with --store.")
    evictors = [resolve_preset(each) for each in split_specs(settings["evictor"])]
    for evictor in evictors:
        check_evictor(evictor)
    settings["evictor"] = ",".join(evictors)
    check_data(data)
    config = TrainConfig(**{**settings, "targets": targets})

    # From here on PyTorch is imported.
    from restorekv.cli.loading import open_model
    from restorekv.train.examples import (
        TrainingContext,
        keep_short_examples,
        make_tiny_examples,
        read_examples,
    )
    from restorekv.train.loop import train_adapter
    from restorekv.train.parallel import (
        is_shared,
        open_process_group,
        select_own_device,
        shard_model,
        wants_shards,
    )

    import_extra("torch.utils.tensorboard", "train", "Training")
    own = select_own_device(device)
    shared = is_shared(device)
    sharing = wants_shards(shard, shared)
    with open_process_group(own, shared) as group:
        notes.quiet = output.quiet = group.rank > 0
        loaded, tokenizer = open_model(model, dtype, "cpu" if sharing else str(own))
        if sharing:
            shard_model(loaded, own)
        examples: list[TrainingContext] = []
        for name in data:
            if name == "tiny":
                examples += make_tiny_examples(tokenizer, count, config.seed, shortest, longest)
            else:
                examples += read_examples(Path(name), loaded, tokenizer)
        if longest_context is not None:
            examples = keep_short_examples(tokenizer, examples, longest_context)
        with _explain_resume(out), show_progress_bar("training") as show:
            train_adapter(
                loaded,
                tokenizer,
                examples,
                config,
                out,
                resume,
                show,
                store=store,
                store_prefill=store_prefill,
                group=group,
                notice=notes.print,
            )
    if group.rank == 0:
        losses = read_losses(out)
        # The log may have been lost; the run has warned of that.
        if losses:
            notes.print(summarize_losses(losses))
    print_written(out / "adapter")


def check_data(names: list[str]) -> None:
    """Refuse a missing file, or a missing package of an extra, before PyTorch is imported."""
    for name in names:
        if name == "tiny":
            continue
        path = Path(name)
        if not path.exists():
            raise RestoreKVError(
                f"There is no training file {name}; give a JSON-lines file, a mixture or 'tiny'."
            )
        if path.is_dir():
            read_manifest(path)
            import_extra("pyarrow.parquet", "data", "A mixture")


def refuse_world_options(data: list[str], given: Mapping[str, int | None]) -> None:
    """Refuse options of the tiny model's world, given by flag, if none of the data is from it."""
    for flag, value in given.items():
        if value is not None and "tiny" not in data:
            raise RestoreKVError(f"{flag} is for --data tiny; leave it out.")


def choose_lengths(data: list[str], shortest: int | None, longest: int | None) -> tuple[int, int]:
    """Return the minimum and maximum length of the tiny world's texts, with defaults filled in.

    Refuse lengths if none of the data is from the tiny world, and an empty range.
    """
    refuse_world_options(data, {"--shortest": shortest, "--longest": longest})
    shortest = shortest or SHORTEST
    longest = longest or LONGEST
    if shortest > longest:
        raise RestoreKVError(f"--shortest {shortest} is more than --longest {longest}; swap them.")
    return shortest, longest


def summarize_losses(losses: Sequence[float]) -> str:
    """Return the mean loss of the first and of the last tenth of a run's steps, in a sentence.

    Steps have different texts and ratios, so the means of a short run say little.
    """
    tenth = max(len(losses) // 10, 1)
    begin = fmean(losses[:tenth])
    end = fmean(losses[-tenth:])
    return (
        f"loss {begin:.4f} over the first {tenth} of {len(losses)} steps, {end:.4f} over the last "
        f"{tenth}; each step has its own texts and ratios, and all losses are in {LOG_FILE}"
    )


@contextmanager
def _explain_resume(out: Path) -> Iterator[None]:
    """Make Ctrl-C report how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        fix = f"no checkpoint yet in {out}"
        if (out / CHECKPOINT_FILE).exists():
            fix = f"continue from the last checkpoint in {out} with --resume"
        raise KeyboardInterrupt(f"Interrupted; {fix}.") from None
