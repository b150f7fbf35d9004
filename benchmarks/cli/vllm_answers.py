"""`.venv-vllm/bin/python -m benchmarks vllm-answers`: answers from cache files in vLLM, compared
with those of `ask`.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.session import print_all, run_benchmark
from benchmarks.vllm_answers import LONGEST, MODES, SHORTEST, make_tables, run_answers
from restorekv.errors import RestoreKVError
from restorekv.files import check_target


def run(
    folder: Annotated[
        Path, typer.Option(help="Folder for documents and answers; modes that are done are kept.")
    ],
    documents: Annotated[int, typer.Option(min=1, help="Number of documents.")] = 30,
    longest: Annotated[
        int, typer.Option(min=SHORTEST, help="Leave out documents of more tokens than this.")
    ] = LONGEST,
    mode: Annotated[
        list[str] | None, typer.Option(help="Mode of the engine; repeatable. By default all.")
    ] = None,
    model: Annotated[str, typer.Option(help="Small decoder: smollm2 or a folder.")] = "smollm2",
    json: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    if json:
        check_target(json)
    modes = mode or list(MODES)
    unknown = [name for name in modes if name not in MODES]
    if unknown:
        raise RestoreKVError(f"There is no mode {unknown[0]!r}; choose from {', '.join(MODES)}.")
    run_benchmark(
        lambda tell: run_answers(folder, documents, longest, modes, model, tell),
        lambda result: print_all(make_tables(result)),
        json,
    )
