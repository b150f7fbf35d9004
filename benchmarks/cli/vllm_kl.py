"""`.venv-vllm/bin/python -m benchmarks vllm-kl`: how far vLLM's token distributions over cache
files are from those of `ask` in the same dtype.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.session import print_all, run_benchmark
from benchmarks.vllm_kl import make_tables, run_kl
from restorekv.files import check_target


def run(
    folder: Annotated[Path, typer.Option(help="Folder for the model and the documents.")],
    model: Annotated[str, typer.Option(help="Small decoder: smollm2 or a folder.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="Type of the weights of both sides.")] = "bfloat16",
    documents: Annotated[int, typer.Option(min=2, help="Number of documents.")] = 4,
    tokens: Annotated[int, typer.Option(help="Length of every document, in tokens.")] = 1024,
    ratio: Annotated[str, typer.Option(help="Ratio of the documents.")] = "0.1",
    answer: Annotated[int, typer.Option(min=1, help="Length of every answer, in tokens.")] = 12,
    json: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    if json:
        check_target(json)
    run_benchmark(
        lambda tell: run_kl(folder, model, dtype, documents, tokens, ratio, answer, tell),
        lambda result: print_all(make_tables(result)),
        json,
    )
