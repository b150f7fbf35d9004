"""Options that several commands share, so that one name means the same everywhere."""

import inspect
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer

from restorekv.cli.choices import ALLOCATIONS, KV_DTYPES, check_device, list_evictors
from restorekv.cli.terminal import STDOUT, output
from restorekv.compression.presets import DEFAULT_EVICTOR
from restorekv.errors import RestoreKVError
from restorekv.files import check_target


def _check_output(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before hours of work go into its contents."""
    if path == STDOUT:
        raise RestoreKVError("This is not written to stdout; give the name of a file.")
    if path is not None:
        check_target(path)
    return path


def make_output_option(help: str, *names: str) -> Any:
    """Return an option that names a file to write, which is checked when the command is read."""
    return typer.Option(*names, help=help, callback=_check_output)


def _parse_name(name: str | Path) -> str | Path:
    """Refuse an empty name, such as that of an unset shell variable: Python would take it for the
    current folder.
    """
    if str(name) == "":
        raise typer.BadParameter("the name is empty; name a file or folder, or . for this one")
    return name


def _parse_folder(name: str | Path) -> Path:
    """Refuse an empty name, and "-", which means stdout for other options."""
    if str(name) == "-":
        raise typer.BadParameter("this is not written to stdout; name a file or folder")
    return Path(_parse_name(name))


def make_folder_option(help: str, *names: str, **settings: Any) -> Any:
    """Return an option that names a folder to write."""
    return typer.Option(*names, help=help, parser=_parse_folder, metavar="<path>", **settings)


def make_text_argument(help: str) -> Any:
    """Return an argument that names a text or a folder of texts."""
    return typer.Argument(help=help, parser=_parse_name, metavar="file")


def _check_json(context: typer.Context, path: Path | None) -> Path | None:
    """Accept "-" for stdout: only the JSON is written there, and everything else to stderr."""
    if path != STDOUT:
        return _check_output(path)
    output.stderr = True
    context.call_on_close(lambda: setattr(output, "stderr", False))
    return path


def make_json_option(help: str, *names: str) -> Any:
    """Return an option that names a file for figures, or "-" for stdout."""
    return typer.Option(*names, help=f"{help} Use - for stdout.", callback=_check_json)


CacheFile = Annotated[Path, make_output_option("Cache file to write.", "--output", "-o")]
EVICTOR_HELP = (
    f"One of {', '.join(list_evictors())}; settings follow a colon: snapkv:window=64,kernel=5."
)

Evictor = Annotated[
    str | None,
    typer.Option(
        help=f"Method that chooses which KV pairs stay; {DEFAULT_EVICTOR} without --preset. "
        f"{EVICTOR_HELP}"
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="Instead of --evictor: fast (fastkvzip, which takes little longer than reading the "
        "text) or best (kvzip)."
    ),
]
OTHER_ADAPTERS = (
    "none, published (by the paper's authors), a folder, a hub id, or one that ships, such as "
    "smollm2:kvzip."
)
Adapter = Annotated[
    str,
    typer.Option(
        help="Restore adapter: auto (the one that ships for the model, up to the ratio where it "
        f"helps), {OTHER_ADAPTERS}"
    ),
]
# For commands that add a text or turns to an existing cache.
SAME_ADAPTER_HELP = f"auto (the one that made the cache file, if it ships), {OTHER_ADAPTERS}"
SameAdapter = Annotated[str, typer.Option(help=f"Restore adapter: {SAME_ADAPTER_HELP}")]
DEFAULT_MODEL = "smollm2"  # of every command; the toy is used only if it is named
DEFAULT_WORKERS = 2  # of Ray
STOP_REPEATS = 3  # as in conversations; 0 lets an answer repeat itself
MODEL_HELP = "smollm2, gemma3-270m, tiny, a model folder, a GGUF file or a hub id."
Model = Annotated[str, typer.Option(help=f"Model: {MODEL_HELP}")]
OtherModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Model that made the cache file: a folder, a GGUF file or a hub id. Not needed for "
        "smollm2, gemma3-270m and tiny.",
    ),
]
System = Annotated[
    str, typer.Option(help="System message before the text; by default the chat template's own.")
]
Device = Annotated[
    str,
    typer.Option(
        help="Device that the model runs on: cpu, cuda, cuda:1 or mps.", callback=check_device
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Type of the model's weights: auto (as stored), float32, bfloat16 or float16."
    ),
]
PrefixPolicy = Annotated[
    str,
    typer.Option(
        help="The chat template's tokens before the text: free (kept in addition to the budget) or "
        "counted (they compete with the text for it)."
    ),
]
# For scores: the default is how the shipped adapters were trained, whatever the protocol.
ScoredPrefixPolicy = Annotated[
    str,
    typer.Option(
        help="The chat template's tokens before the text: free (kept in addition to the budget, as "
        "the shipped adapters were trained), counted (they compete for it, as in kvpress) or "
        "protocol (the protocol's rule)."
    ),
]
OnSmallBudget = Annotated[
    str,
    typer.Option(
        help="If the restore tokens alone exceed the budget: whole (keep the whole text), error, "
        "fewer (use as many as fit) or clip (exceed the budget)."
    ),
]
# For scores, without "whole": only caches of the same size can be compared.
ScoredOnSmallBudget = Annotated[
    str,
    typer.Option(
        help="If the restore tokens alone exceed the budget: error, fewer (use as many as fit) or "
        "clip (exceed the budget)."
    ),
]
Allocation = Annotated[
    str,
    typer.Option(help=f"Which pairs compete with each other: {', '.join(ALLOCATIONS)}."),
]
RestoreFrom = Annotated[
    str,
    typer.Option(
        help="Cache that the restore pass reads: full, or evicted (a control of the paper, for "
        "adapters trained with it)."
    ),
]
Offset = Annotated[
    int,
    typer.Option(
        min=0,
        max=2**31,
        help="Positions to skip between text and question (a control of the paper, without an "
        "adapter).",
    ),
]
KV_DTYPE_HELP = (
    f"Type of the kept pairs: {', '.join(KV_DTYPES)}. It changes their bytes, not their number."
)
KvDtype = Annotated[str, typer.Option(help=KV_DTYPE_HELP)]
KvDtypes = Annotated[list[str], typer.Option(help=f"{KV_DTYPE_HELP} Repeatable.")]
StreamingChunk = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens to read between two evictions, so that the full cache is never held; an "
        "approximation.",
    ),
]
Offload = Annotated[
    bool,
    typer.Option(
        "--offload",
        help="While compressing, keep the full cache in a temporary file (of a GPU, in the host's "
        "memory).",
    ),
]
OnLongText = Annotated[
    str,
    typer.Option(
        help="If the text is longer than the model's positions: refuse, or cut (drop its end)."
    ),
]
Yarn = Annotated[
    float | None,
    typer.Option(
        help="Factor by which YaRN stretches the model's positions, for longer texts; the cache "
        "file records it."
    ),
]
RestoreTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Use only this many of the adapter's restore tokens; for adapters trained with "
        "--nested.",
    ),
]


def refuse_workers_without_ray(workers: int | None, ray: str | None) -> None:
    """Refuse a number of workers if there is no Ray cluster."""
    if workers is not None and ray is None:
        raise RestoreKVError("--workers counts Ray's workers; add --ray local, or leave it out.")


@dataclass(frozen=True)
class SamplingFlags:
    """How `ask` and `chat` write answers: the options of `SamplingConfig`."""

    temperature: float = field(
        default=0.0,
        metadata={
            "help": "Randomness of the answer: 0 always takes the most likely token, 1 samples "
            "from the model's own probabilities, higher is more random.",
            "min": 0,
            "max": 100,
        },
    )
    top_p: float = field(
        default=1.0,
        metadata={
            "help": "Sample only from the most likely tokens whose probabilities add up to this; 1 "
            "samples from all.",
            "min": 0,
            "max": 1,
        },
    )
    top_k: int = field(
        default=0,
        metadata={
            "help": "Sample only from this many of the most likely tokens; 0 samples from all.",
            "min": 0,
        },
    )
    min_p: float = field(
        default=0.0,
        metadata={
            "help": "Sample only from tokens at least this fraction as likely as the most likely "
            "one; 0 samples from all.",
            "min": 0,
            "max": 1,
        },
    )
    repetition_penalty: float = field(
        default=1.0,
        metadata={
            "help": "Above 1, makes tokens of the text, the question and the answer so far less "
            "likely; 1 is off.",
            "min": 0,
            "max": 100,
        },
    )
    seed: int = field(
        default=0,
        metadata={
            "help": "Seed of the sampling; the same seed gives the same answer.",
            "min": 0,
        },
    )
    stop: list[str] | None = field(
        default=None, metadata={"help": "End an answer before this text; repeatable."}
    )
    stop_repeats: int = field(
        default=STOP_REPEATS,
        metadata={
            "help": "End an answer once it says the same thing this many times in a row, at least "
            "2, and keep one copy; 0 lets it continue.",
            "min": 0,
            "max": 1000,
        },
    )
    json_schema: Path | None = field(
        default=None,
        metadata={"help": "File with a JSON schema that every answer follows."},
    )
    regex: str | None = field(
        default=None,
        metadata={"help": "Regular expression that every answer matches from start to end."},
    )


def add_options_of(config: type) -> Callable[[Callable], Callable]:
    """Decorate a command that takes `**settings`: every field of the dataclass becomes an option.

    The metadata of a field holds its help and the smallest and largest number that it takes, so
    that others are refused before PyTorch is imported. On the command line a tuple is typed with
    commas, a literal as text.
    """

    def decorate(run: Callable) -> Callable:
        kinds = get_type_hints(config)
        parameters = [
            parameter
            for parameter in inspect.signature(run).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        parameters.extend(_make_parameter(field, kinds[field.name]) for field in fields(config))
        # Typer reads both the signature and the annotations.
        vars(run)["__signature__"] = inspect.Signature(parameters)
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _make_parameter(field: Field, kind: Any) -> inspect.Parameter:
    """Return the parameter of a command for a field of this type."""
    default = field.default
    if get_origin(kind) in (tuple, Literal):
        kind = str
        if isinstance(default, tuple):
            default = ",".join(default)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, typer.Option(**field.metadata)],
    )
