"""`restorekv chat doc.rkv`: a conversation over a cache file in the terminal."""

from pathlib import Path
from typing import Annotated, Any

import typer

from restorekv.cli import options
from restorekv.cli.inputs import check_cache_files
from restorekv.errors import RestoreKVError


@options.add_options_of(options.SamplingFlags)
def run(
    file: Annotated[Path, typer.Argument(help="Cache file made by compress.")],
    resume: Annotated[
        Path | None, typer.Option("--continue", help="Continue a conversation that /save wrote.")
    ] = None,
    system: Annotated[
        str, typer.Option(help="System message, read before the first question.")
    ] = "",
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum length of an answer, in tokens.")
    ] = 128,
    fold: Annotated[
        bool,
        typer.Option(
            help="Compress earlier turns before the cache and the turns together outgrow the "
            "text's full cache."
        ),
    ] = True,
    adapter: Annotated[
        str,
        typer.Option(
            help=f"Restore adapter for turns that are compressed: {options.SAME_ADAPTER_HELP}"
        ),
    ] = "auto",
    model: options.OtherModel = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    **flags: Any,
) -> None:
    if resume and system:
        raise RestoreKVError("--continue keeps the conversation's own --system; leave it out.")
    check_cache_files([file])

    # From here on PyTorch is imported.
    from restorekv.cli.conversation import run_conversation
    from restorekv.cli.loading import make_sampling, open_documents
    from restorekv.generation.chat import Chat

    sampling = make_sampling(options.SamplingFlags(**flags))
    (document,) = open_documents([file], model, dtype, device)
    chat = Chat.load(resume, document) if resume else document.chat(system)
    run_conversation(
        chat,
        max_new_tokens,
        sampling,
        fold=fold,
        adapter=None if adapter == "none" else adapter,
        reads=[file],
        continued=resume,
    )
