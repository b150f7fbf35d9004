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
from restorekv.files import check_target


def _check_output(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before hours of work go into its contents."""
    if path is not None:
        check_target(path)
    return path


def make_output_option(help: str, *names: str) -> Any:
    """Return an option that names a file to write, which is checked when the command is read."""
    return typer.Option(*names, help=help, callback=_check_output)


def _check_json(context: typer.Context, path: Path | None) -> Path | None:
    """Let "-" be stdout, which then has the JSON alone: everything else goes to stderr."""
    if path != STDOUT:
        return _check_output(path)
    output.stderr = True
    context.call_on_close(lambda: setattr(output, "stderr", False))
    return path


def make_json_option(help: str, *names: str) -> Any:
    """Return an option that names a file for figures, or "-" for stdout."""
    return typer.Option(*names, help=f"{help} - is stdout.", callback=_check_json)


CacheFile = Annotated[Path, make_output_option("The cache file to write.", "--output", "-o")]
EVICTOR_HELP = f"{', '.join(list_evictors())}; with settings as in snapkv:window=64,kernel=5."

Evictor = Annotated[
    str | None,
    typer.Option(help=f"{DEFAULT_EVICTOR} unless a preset or an evictor is named. {EVICTOR_HELP}"),
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="fast (fastkvzip: costs little more than reading) or best (kvzip), for --evictor."
    ),
]
Adapter = Annotated[
    str,
    typer.Option(
        help="auto (one that ships for the model, up to the ratio at which it helps), none, "
        "published (by the paper's authors), a folder or a hub id."
    ),
]
DEFAULT_MODEL = "smollm2"  # everywhere; the toy is used where it is named
STOP_REPEATS = 3  # as in conversations; 0 lets an answer repeat itself
MODEL_HELP = "smollm2, gemma3-270m, tiny, a model folder, a GGUF file or a hub id."
Model = Annotated[str, typer.Option(help=MODEL_HELP)]
OtherModel = Annotated[
    str | None,
    typer.Option("--model", help=f"The model, needed unless it has a name here. {MODEL_HELP}"),
]
System = Annotated[
    str, typer.Option(help="The system message before the text; unless given, the template's own.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.", callback=check_device)]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
PrefixPolicy = Annotated[
    str,
    typer.Option(help="free: keep the chat prefix and do not count it; counted: let it compete."),
]
# For scores: the default is how the shipped adapters were trained, whatever the protocol.
ScoredPrefixPolicy = Annotated[
    str,
    typer.Option(
        help="free, as the shipped adapters were trained; counted, as kvpress counts; or protocol, "
        "the protocol's own."
    ),
]
OnSmallBudget = Annotated[
    str,
    typer.Option(
        help="When the restore tokens exceed the budget: whole (keep the text whole), error, fewer "
        "or clip."
    ),
]
# Scores are of caches of one size.
ScoredOnSmallBudget = Annotated[
    str, typer.Option(help="When the restore tokens exceed the budget: error, fewer or clip.")
]
Allocation = Annotated[str, typer.Option(help=f"Which pairs compete: {', '.join(ALLOCATIONS)}.")]
RestoreFrom = Annotated[
    str,
    typer.Option(
        help="What the restore pass reads: full, or evicted (a control; its adapter is trained so)."
    ),
]
Offset = Annotated[
    int,
    typer.Option(
        min=0, max=2**31, help="Positions between context and question (a control, no adapter)."
    ),
]
KV_DTYPE_HELP = f"Dtype of the kept pairs: {', '.join(KV_DTYPES)}; the ratio does not count it."
KvDtype = Annotated[str, typer.Option(help=KV_DTYPE_HELP)]
KvDtypes = Annotated[list[str], typer.Option(help=f"{KV_DTYPE_HELP} Repeatable.")]
StreamingChunk = Annotated[
    int | None,
    typer.Option(
        min=1, help="Compress while the prefill reads so many tokens at a time; an approximation."
    ),
]
Offload = Annotated[
    bool,
    typer.Option(
        "--offload", help="Keep the full cache in a temporary file (on a GPU: the host's memory)."
    ),
]
OnLongText = Annotated[
    str, typer.Option(help="A context too long for the model's positions: refuse, or cut its end.")
]
Yarn = Annotated[
    float | None,
    typer.Option(
        help="Stretch the model's positions by this factor; ask does the same with the file."
    ),
]
RestoreTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Use the adapter's first so many restore tokens; train it with --nested."
    ),
]


@dataclass(frozen=True)
class SamplingFlags:
    """How `ask` and `chat` write answers: the options of `SamplingConfig`."""

    temperature: float = field(
        default=0.0,
        metadata={
            "help": "How much chance decides; 0 takes the likeliest token.",
            "min": 0,
            "max": 100,
        },
    )
    top_p: float = field(
        default=1.0,
        metadata={
            "help": "Sample from the likeliest tokens of this probability.",
            "min": 0,
            "max": 1,
        },
    )
    top_k: int = field(
        default=0, metadata={"help": "Sample from so many likeliest tokens; 0 for all.", "min": 0}
    )
    min_p: float = field(
        default=0.0,
        metadata={
            "help": "Leave out tokens below this share of the likeliest one's.",
            "min": 0,
            "max": 1,
        },
    )
    repetition_penalty: float = field(
        default=1.0,
        metadata={"help": "Above 1, makes what was read or said rarer.", "min": 0, "max": 100},
    )
    seed: int = field(
        default=0, metadata={"help": "The same seed gives the same answer.", "min": 0}
    )
    stop: list[str] | None = field(
        default=None, metadata={"help": "End an answer before this text; repeatable."}
    )
    stop_repeats: int = field(
        default=STOP_REPEATS,
        metadata={
            "help": "End an answer that says the same so many times in a row, and keep it once; 0 "
            "lets it go on.",
            "min": 0,
            "max": 1000,
        },
    )
    json_schema: Path | None = field(
        default=None, metadata={"help": "A file with the JSON schema of every answer."}
    )
    regex: str | None = field(
        default=None, metadata={"help": "An expression that every answer matches as a whole."}
    )


def add_options_of(config: type) -> Callable[[Callable], Callable]:
    """Decorate a command that takes `**settings`: every field of the dataclass becomes an option.

    The metadata of a field holds its help, and what numbers it may have, so that others are refused
    before PyTorch is imported. A tuple is typed with commas, a literal as text.
    """

    def decorate(run: Callable) -> Callable:
        kinds = get_type_hints(config)
        parameters = [
            parameter
            for parameter in inspect.signature(run).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        parameters.extend(_make_parameter(field, kinds[field.name]) for field in fields(config))
        # Typer looks at both.
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
