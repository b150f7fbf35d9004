"""`restorekv ask doc.rkv ... "question" ...`: answers from a cache file, or from several in one batch."""

import time
from itertools import chain, takewhile
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from restorekv.cli import options
from restorekv.cli.session import open_model, output, phase, yarn_of
from restorekv.compression.context import CompressedContext, ask_many
from restorekv.compression.context_file import read
from restorekv.errors import RestoreKVError
from restorekv.files import check_target, write_json
from restorekv.seal import read_key


def run(
    file: Annotated[Path, typer.Argument(help="A cache file made by compress.")],
    questions: Annotated[list[str], typer.Argument(help="Further cache files (.rkv), then one or more questions.")],
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer, in tokens.")] = 128,
    model: Annotated[
        str | None, typer.Option(help=f"The model, unless it is the one that the file names: {options.MODEL_HELP}")
    ] = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    sign_key: options.SignKey = None,
    json: Annotated[Path | None, typer.Option(help="Write questions and answers here, for programs.")] = None,
) -> None:
    files = [file, *map(Path, takewhile(lambda word: word.endswith(".rkv"), questions))]
    questions = questions[len(files) - 1 :]
    if not questions:
        raise RestoreKVError("There is no question after the cache files; ask something.")
    if not all(question.strip() for question in questions):
        raise RestoreKVError("A question is empty; ask something.")
    if max_new_tokens < 1:
        raise RestoreKVError(f"--max-new-tokens is a number of at least 1, not {max_new_tokens}.")
    if json:
        check_target(json)
    key = read_key(sign_key)
    stored = [read(each, key) for each in files]  # wrong files are refused before a model is loaded
    loaded, tokenizer = open_model(model or stored[0].manifest.model, dtype, device, yarn_of(stored[0].manifest.rope))
    compressed = [CompressedContext.load(each, loaded, tokenizer) for each in stored]
    start = time.perf_counter()
    rows = [{"file": str(each), "question": question} for each in files for question in questions]
    if len(rows) == 1 and json is None:
        compressed[0].ask(questions[0], max_new_tokens, stream=True)
        return
    with phase(f"answering {len(rows)} questions"):
        by_file = ask_many([(each, questions) for each in compressed], max_new_tokens)
    answers = list(chain.from_iterable(by_file))
    if json:  # before anything is printed, since whoever reads that may go away
        lines = [{**row, "answer": answer} for row, answer in zip(rows, answers, strict=True)]
        write_json(json, {"answers": lines, "seconds": round(time.perf_counter() - start, 4)})
    if len(rows) == 1:
        print(answers[0])
        return
    for row, answer in zip(rows, answers, strict=True):
        title = f"{row['file']}: {row['question']}" if len(files) > 1 else row["question"]
        output.print(Text(title, style="bold"), soft_wrap=True)
        output.print(Text("  " + answer.strip()), soft_wrap=True)
