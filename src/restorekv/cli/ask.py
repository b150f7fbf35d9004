"""`restorekv ask doc.rkv ... "question" ...`: answers from a cache file, or from several in one
batch.
"""

import time
from itertools import chain, takewhile
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from restorekv.cli import options
from restorekv.cli.errors import make_visible
from restorekv.cli.session import check_outputs_apart, notes, open_documents, output, read_text
from restorekv.errors import RestoreKVError
from restorekv.files import write_json
from restorekv.many_contexts import ask_many


@options.add_options_of(options.SamplingOptions)
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
    **sampling: object,
) -> None:
    files = [file, *map(Path, takewhile(lambda word: word.endswith(".rkv"), questions))]
    questions = [
        each
        for word in questions[len(files) - 1 :]
        for each in (_read_questions() if word == "-" else [word])
    ]
    if not questions:
        raise RestoreKVError("There is no question after the cache files; ask something.")
    if not all(question.strip() for question in questions):
        raise RestoreKVError("A question is empty; ask something.")
    if max_new_tokens < 1:
        raise RestoreKVError(f"--max-new-tokens is a number of at least 1, not {max_new_tokens}.")
    check_outputs_apart([json], (*files, sampling["json_schema"], model))
    decoding = options.SamplingOptions(**sampling).decoding()
    compressed = open_documents(files, model, dtype, device)
    start = time.perf_counter()
    rows = [{"file": str(each), "question": question} for each in files for question in questions]
    if len(rows) == 1 and json is None:
        for piece in compressed[0].ask(questions[0], max_new_tokens, stream=True, **decoding):
            print(make_visible(piece), end="", flush=True)
        print()
        return
    with notes.status(f"answering {len(rows)} questions"):
        by_file = ask_many([(each, questions) for each in compressed], max_new_tokens, **decoding)
    answers = list(chain.from_iterable(by_file))
    if json:  # before anything is printed, since whoever reads that may go away
        lines = [{**row, "answer": answer} for row, answer in zip(rows, answers, strict=True)]
        write_json(json, {"answers": lines, "seconds": round(time.perf_counter() - start, 4)})
    if len(rows) == 1:
        print(make_visible(answers[0]))
        return
    for row, answer in zip(rows, answers, strict=True):
        title = f"{row['file']}: {row['question']}" if len(files) > 1 else row["question"]
        output.print(Text(make_visible(title), style="bold"), soft_wrap=True)
        output.print(Text("  " + make_visible(answer)), soft_wrap=True)


def _read_questions() -> list[str]:
    """Return the lines of stdin that are not empty."""
    return [line.strip() for line in read_text("-").split("\n") if line.strip()]
