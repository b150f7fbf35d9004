"""Options that several commands share, so that one name means the same everywhere."""

from typing import Annotated

import typer

from restorekv.cache.quantized import STORAGES
from restorekv.compression.allocate import ALLOCATIONS
from restorekv.compression.compressor import DEFAULT, METHODS
from restorekv.evictors import EVICTORS

EVICTOR_HELP = f"{', '.join((*EVICTORS, *METHODS))}; with settings as in snapkv:window=64,kernel=5."

Evictor = Annotated[str | None, typer.Option(help=f"{DEFAULT} unless a preset or an evictor is named. {EVICTOR_HELP}")]
Preset = Annotated[
    str | None, typer.Option(help="fast (fastkvzip: costs little more than reading) or best (kvzip), for --evictor.")
]
Adapter = Annotated[
    str,
    typer.Option(help="auto (ships for the model), none, published (by the paper's authors), a folder or a hub id."),
]
MODEL_HELP = "smollm2, tiny (also called bundled), a model folder, a GGUF file or a hub id."
Model = Annotated[str, typer.Option(help=MODEL_HELP)]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
PrefixPolicy = Annotated[
    str, typer.Option(help="free: keep the chat prefix and do not count it; counted: let it compete.")
]
OnSmallBudget = Annotated[str, typer.Option(help="When the restore tokens exceed the budget: error, fewer or clip.")]
Allocation = Annotated[str, typer.Option(help=f"Which pairs compete: {', '.join(ALLOCATIONS)}.")]
RestoreFrom = Annotated[
    str, typer.Option(help="What the restore pass reads: full, or evicted (a control; its adapter is trained so).")
]
Offset = Annotated[int, typer.Option(min=0, help="Positions between context and question (a control, no adapter).")]
STORAGE_HELP = f"How to store the kept pairs: {', '.join(STORAGES)}; the ratio does not count it."
Storage = Annotated[str, typer.Option(help=STORAGE_HELP)]
Storages = Annotated[list[str], typer.Option(help=f"{STORAGE_HELP} Repeatable.")]
Streaming = Annotated[
    int | None,
    typer.Option(min=1, help="Compress while the prefill reads so many tokens at a time; an approximation."),
]
Offload = Annotated[
    bool, typer.Option("--offload", help="Keep the full cache in a temporary file (on a GPU: the host's memory).")
]
RestoreTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Use the adapter's first so many restore tokens; train it with --nested."),
]
