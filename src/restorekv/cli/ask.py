"""`restorekv ask doc.rkv ... "question" ...`: answers from a cache file, or from several in one
batch.
"""

import time
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from restorekv.cli import options
from restorekv.cli.errors import make_visible
from restorekv.cli.session import check_outputs_apart, notes, open_documents, output, read_text
from restorekv.errors import RestoreKVError
from restorekv.files import write_json
from restorekv.many_contexts import ask_many


@options.add_options_of(options.SamplingFlags)
def run(
    file: Annotated[Path, typer.Argument(help="A cache file made by compress.")],
    questions: Annotated[
        list[str],
        typer.Argument(
            help="Further cache files (.rkv), then questions; - reads them from stdin, one a line."
        ),
    ],
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer, in tokens.")] = 128,
    model: options.OtherModel = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    json: Annotated[
        Path | None, options.make_output_option("Write questions and answers here, for programs.")
    ] = None,
    **flags: Any,
) -> None:
    files, asked = _split_words(file, questions)
    if not asked:
        raise RestoreKVError("There is no question after the cache files; ask something.")
    if not all(question.strip() for question in asked):
        raise RestoreKVError("A question is empty; ask something.")
    if max_new_tokens < 1:
        raise RestoreKVError(f"--max-new-tokens is a number of at least 1, not {max_new_tokens}.")
    check_outputs_apart([json], (*files, flags["json_schema"], model))
    sampling = options.SamplingFlags(**flags).make_config()
    documents = open_documents(files, model, dtype, device)

    # One question of one file is answered piece by piece; more in one batch.
    start = time.perf_counter()
    if len(files) * len(asked) == 1 and json is None:
        for piece in documents[0].ask(asked[0], max_new_tokens, stream=True, config=sampling):
            print(make_visible(piece), end="", flush=True)
        print()
        return
    with notes.status(f"answering {len(files) * len(asked)} questions"):
        by_file = ask_many([(each, asked) for each in documents], max_new_tokens, config=sampling)
    rows = []
    for each, answers in zip(files, by_file, strict=True):
        for question, answer in zip(asked, answers, strict=True):
            rows.append({"file": str(each), "question": question, "answer": answer})

    if json:  # before anything is printed, because whoever reads that may go away
        write_json(json, {"answers": rows, "seconds": round(time.perf_counter() - start, 4)})
    if len(rows) == 1:
        print(make_visible(rows[0]["answer"]))
        return
    for row in rows:
        title = f"{row['file']}: {row['question']}" if len(files) > 1 else row["question"]
        output.print(Text(make_visible(title), style="bold"), soft_wrap=True)
        output.print(Text("  " + make_visible(row["answer"])), soft_wrap=True)


def _split_words(file: Path, words: list[str]) -> tuple[list[Path], list[str]]:
    """Return the cache files and the questions: files come first, and end in .rkv."""
    further = list(takewhile(lambda word: word.endswith(".rkv"), words))
    questions: list[str] = []
    for word in words[len(further) :]:
        questions.extend(_read_questions() if word == "-" else [word])
    return [file, *map(Path, further)], questions


def _read_questions() -> list[str]:
    """Return the lines of stdin that are not empty."""
    return [line.strip() for line in read_text("-").split("\n") if line.strip()]
