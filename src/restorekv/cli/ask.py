"""`restorekv ask doc.rkv ... "question" ...`: answers from a cache file, or from several in one
batch.
"""

import os
import time
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from restorekv.cli import options
from restorekv.cli.errors import make_visible
from restorekv.cli.inputs import (
    check_cache_files,
    check_json_output,
    check_outputs_apart,
    check_readable,
    read_text,
)
from restorekv.cli.terminal import STDOUT, explain_cut, notes, output, write_figures
from restorekv.errors import RestoreKVError

MIN_WORDS = 3  # fewer unquoted words are not taken for one question


@options.add_options_of(options.SamplingFlags)
def run(
    file: Annotated[Path, typer.Argument(help="Cache file made by compress.")],
    questions: Annotated[
        list[str],
        typer.Argument(
            help="More cache files (.rkv), if any, then the questions; - reads questions from "
            "stdin, one per line."
        ),
    ],
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum length of an answer, in tokens.")
    ] = 128,
    answer_prefix: Annotated[
        str,
        typer.Option(help="Words that every answer starts with; they are not printed."),
    ] = "",
    model: options.OtherModel = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    json: Annotated[
        Path | None, options.make_json_option("JSON file for questions and answers.")
    ] = None,
    **flags: Any,
) -> None:
    further, words = _split_words(questions)
    files = [file, *further]
    if not words:
        raise RestoreKVError(
            "There is no question after the cache files, which come first: restorekv ask DOC.rkv "
            '"What is the code?"'
        )
    if not all(word.strip() for word in words):
        raise RestoreKVError("A question is empty; ask something.")
    _refuse_file_names(words)
    check_outputs_apart([json], (*files, flags["json_schema"], model))
    check_json_output(json)
    check_cache_files(files)
    if flags["json_schema"] is not None:
        check_readable(flags["json_schema"])
    asked = _read_questions(words)
    if not asked:
        raise RestoreKVError("There is no question in the input; ask something.")
    _warn_of_unquoted_question(words)

    # From here on PyTorch is imported.
    from restorekv.cli.loading import make_sampling, open_documents
    from restorekv.many_contexts import ask_many

    sampling = make_sampling(options.SamplingFlags(**flags))
    documents = open_documents(files, model, dtype, device)

    # One question about one file is streamed as it is answered; more are answered in one batch.
    start = time.perf_counter()
    if len(files) * len(asked) == 1 and json is None:
        stream = documents[0].ask(
            asked[0], max_new_tokens, stream=True, answer_prefix=answer_prefix, config=sampling
        )
        try:
            for piece in stream:
                print(make_visible(piece), end="", flush=True)
        finally:
            print()  # after a Ctrl-C too, so that the next message begins a line
        if stream.answer:
            _say_how_answers_ended([stream.answer.finish], max_new_tokens)
        return
    with notes.status(f"answering {len(files) * len(asked)} questions"):
        by_file = ask_many(
            [(each, asked) for each in documents],
            max_new_tokens,
            answer_prefix,
            details=True,
            config=sampling,
        )
    rows = []
    for each, answers in zip(files, by_file, strict=True):
        for question, answer in zip(asked, answers, strict=True):
            row = {"file": str(each), "question": question, "answer": answer.text}
            rows.append({**row, "finish": answer.finish})

    if json:  # before anything is printed, because the reader of a pipe may close it
        write_figures(json, {"answers": rows, "seconds": round(time.perf_counter() - start, 4)})
    if json == STDOUT:
        return
    if len(rows) == 1:
        print(make_visible(rows[0]["answer"]))
    else:
        for row in rows:
            title = f"{row['file']}: {row['question']}" if len(files) > 1 else row["question"]
            output.print(Text(make_visible(title), style="bold"), soft_wrap=True)
            output.print(Text("  " + make_visible(row["answer"])), soft_wrap=True)
    _say_how_answers_ended([row["finish"] for row in rows], max_new_tokens)


def _say_how_answers_ended(finishes: list[str], max_new_tokens: int) -> None:
    """Report on stderr how many answers were ended by a limit."""
    ways = {
        "length": explain_cut(max_new_tokens),
        "repetition": "ended at a repetition; with --stop-repeats 0, repetitions end no answer",
    }
    for finish, what in ways.items():
        count = finishes.count(finish)
        if not count:
            continue
        if len(finishes) == 1:
            which = "the answer was"
        elif count == len(finishes):
            which = f"{count} answers were"
        else:
            which = f"{count} of {len(finishes)} answers {'was' if count == 1 else 'were'}"
        notes.print(f"({which} {what})", style="dim", highlight=False, soft_wrap=True)


def _split_words(words: list[str]) -> tuple[list[Path], list[str]]:
    """Return the further cache files, which come first and end in .rkv, and the rest."""
    files = list(takewhile(lambda word: word.lower().endswith(".rkv"), words))
    return [Path(name) for name in files], words[len(files) :]


def _refuse_file_names(questions: list[str]) -> None:
    """Refuse a question that is the name of an existing file or folder: it was probably meant as a
    path, not as a question.
    """
    for question in questions:
        if question == "-" or not os.path.exists(question):
            continue
        kind = "folder" if os.path.isdir(question) else "file"
        raise RestoreKVError(
            f"{question} is a {kind} here; cache files come first and end in .rkv, and a question "
            f"that is the name of a {kind} needs a question mark."
        )


def _warn_of_unquoted_question(words: list[str]) -> None:
    """Warn if every question is a single word: that is what the shell makes of one question without
    quotation marks.
    """
    # "Who? When?" can be meant, and in some languages a single word can be a whole question.
    are_words = all(word.isascii() and word.isprintable() and " " not in word for word in words)
    if len(words) < MIN_WORDS or not are_words or words[0].endswith("?") or "-" in words:
        return
    notes.print(
        f"warning: each of these {len(words)} words is asked as a separate question; put one "
        f'question into quotation marks: "{" ".join(words)}"',
        highlight=False,
        soft_wrap=True,
    )


def _read_questions(words: list[str]) -> list[str]:
    """Return the questions, with the non-empty lines of stdin in place of "-"."""
    if words.count("-") > 1:
        raise RestoreKVError("The standard input is read once; give - for its questions once.")
    questions: list[str] = []
    for word in words:
        if word != "-":
            questions.append(word)
            continue
        lines = read_text("-", wanted="at least one question, each on its own line").split("\n")
        questions.extend(line.strip() for line in lines if line.strip())
    return questions
