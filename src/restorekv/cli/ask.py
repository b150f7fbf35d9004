"""`restorekv ask doc.rkv "question" ...`: answers from a cache file."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from restorekv.atomic import check_target, write_json
from restorekv.cli.session import open_model, output, phase
from restorekv.compressed import CompressedContext
from restorekv.context_file import read_header
from restorekv.errors import RestoreKVError


def run(
    file: Annotated[Path, typer.Argument(help="A cache file made by compress.")],
    questions: Annotated[list[str], typer.Argument(help="One or more questions.")],
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer, in tokens.")] = 128,
    model: Annotated[
        str, typer.Option(help="The model the file was made with: bundled, a folder or a hub id.")
    ] = "bundled",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    json: Annotated[Path | None, typer.Option(help="Write questions and answers here, for programs.")] = None,
) -> None:
    if not all(question.strip() for question in questions):
        raise RestoreKVError("A question is empty; ask something.")
    if max_new_tokens < 1:
        raise RestoreKVError(f"--max-new-tokens is a number of at least 1, not {max_new_tokens}.")
    if json:
        check_target(json)
    read_header(file)  # refuses most wrong files before a model is loaded
    loaded, tokenizer = open_model(model, dtype, device)
    compressed = CompressedContext.load(file, loaded, tokenizer)
    begun = time.perf_counter()
    if len(questions) == 1:
        answers = [compressed.ask(questions[0], max_new_tokens, stream=True)]
    else:
        with phase(f"answering {len(questions)} questions"):
            answers = compressed.ask(questions, max_new_tokens)
        for question, answer in zip(questions, answers, strict=True):
            output.print(Text(question, style="bold"), soft_wrap=True)
            output.print(Text("  " + answer.strip()), soft_wrap=True)
    if json:
        rows = [{"question": q, "answer": a} for q, a in zip(questions, answers, strict=True)]
        write_json(json, {"file": str(file), "answers": rows, "seconds": round(time.perf_counter() - begun, 4)})
