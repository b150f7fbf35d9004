"""`.venv-vllm/bin/python -m benchmarks vllm`: whole documents compared with compressed ones in the
same unpatched vLLM.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.session import print_all, run_benchmark
from benchmarks.vllm_memory import RANDOM, Options, make_tables
from benchmarks.vllm_memory import run_vllm as measure
from restorekv.files import check_target

# typer wants lists as the defaults of repeatable options
RATIOS = ["0.2", "0.1"]
TOGETHER = [1, 8, 32]


def run(
    folder: Annotated[Path, typer.Option(help="Folder for the model and the documents.")],
    model: Annotated[
        str, typer.Option(help=f"Small decoder: smollm2, a folder, a hub id or {RANDOM}.")
    ] = "smollm2",
    tokens: Annotated[int, typer.Option(help="Length of every document, in tokens.")] = 2048,
    documents: Annotated[
        int, typer.Option(min=2, help="Number of documents, which are asked in turn.")
    ] = 8,
    fitting: Annotated[
        int, typer.Option(min=1, help="Number of whole documents that the KV space has room for.")
    ] = 4,
    ratio: Annotated[
        list[str], typer.Option(help="Ratio of the compressed documents; repeatable.")
    ] = RATIOS,
    together: Annotated[
        list[int], typer.Option(help="Number of questions asked at the same time; repeatable.")
    ] = TOGETHER,
    answer: Annotated[int, typer.Option(help="Length of every answer, in tokens.")] = 16,
    json: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    if json:
        check_target(json)
    options = Options(model, tokens, documents, fitting, tuple(ratio), tuple(together), answer)
    run_benchmark(
        lambda tell: measure(folder, options, tell),
        lambda result: print_all(make_tables(result)),
        json,
    )
