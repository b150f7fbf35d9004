"""The mixture of many genres: which passages are taken, what is asked about them, and what is made
up.
"""

import contextlib
import csv
import datetime
import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from recipes.benchmark_texts import draw_checked_exercises
from restorekv.data import exercises, made, passages
from restorekv.data.build import build_mixture
from restorekv.data.corpus import identify_license, read_corpus
from restorekv.data.documents import DropRow, SourceDocument
from restorekv.data.mixture import read_mixture
from restorekv.data.self_study import GreedyUntilLoop
from restorekv.data.sources import LICENSES
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.model.prompt import encode_text
from restorekv.restore.licenses import PERMISSIVE, combine_licenses
from restorekv.train.config import TrainConfig
from restorekv.train.examples import check_example_lengths, read_examples
from tests.helpers.data_world import settings, text, write_jsonl
from tests.helpers.models import build_model

GENRES = ("letters", "logs", "news")
CONFIG = settings(
    {},
    mixture="corpus",
    passage_shortest=300,
    passage_longest=500,
    questions=3,
    corpus_passages=6,
    made=0.25,
    answer_tokens=12,
    short_answer_tokens=6,
)


def passage(name: str, sentences: int = 12) -> str:
    return " ".join(text(f"{name} {number}", 7).capitalize() for number in range(sentences))


def rows() -> list[dict]:
    made_rows = []
    for genre in GENRES:
        for number in range(4):
            row = {
                "id": f"{genre}/{number}",
                "genre": genre,
                "license": "CC BY 4.0" if number % 2 else "public domain (US government)",
                "split": "train",
                "text": passage(f"{genre} {number}"),
            }
            if number == 0:
                row["questions"] = [{"question": f"who wrote it, {each}?"} for each in range(5)]
            made_rows.append(row)
    made_rows[0] = {**made_rows[0], "split": "development"}
    made_rows[1] = {**made_rows[1], "license": "CC BY-NC 4.0"}
    return made_rows


def read(config, tokenizer) -> tuple[list[SourceDocument], Counter]:
    items = list(read_corpus(iter(rows()), config, tokenizer))
    reasons = Counter(str(item) for item in items if isinstance(item, DropRow))
    return [item for item in items if isinstance(item, SourceDocument)], reasons


def test_genres_take_turns_and_only_the_training_split_is_read(tiny_tokenizer):
    documents, reasons = read(CONFIG, tiny_tokenizer)
    assert reasons == {"of another split": 1, "license cc by-nc 4.0": 1}
    of_corpus = [
        each.name.partition("/")[0] for each in documents if not each.name.startswith("made ")
    ]
    assert sorted(of_corpus[:3]) == sorted(GENRES)
    assert Counter(of_corpus) == {"letters": 2, "logs": 4, "news": 4}


def test_made_documents_have_their_share(tiny_tokenizer):
    documents, _ = read(CONFIG, tiny_tokenizer)
    invented = [each for each in documents if each.name.startswith("made ")]
    assert abs(len(invented) - 0.25 * len(documents)) <= 1
    documents, _ = read(replace(CONFIG, made=0.0), tiny_tokenizer)
    assert not any(each.name.startswith("made ") for each in documents)


def test_the_parts_make_the_whole(tiny_tokenizer):
    whole, _ = read(CONFIG, tiny_tokenizer)
    parts = [read(replace(CONFIG, part=f"{part}/3"), tiny_tokenizer)[0] for part in (1, 2, 3)]
    assert [len(part) for part in parts] and parts[1] == whole[1::3]
    assert sorted(each.name for part in parts for each in part) == sorted(
        each.name for each in whole
    )


@pytest.mark.parametrize("wrong", ["0/2", "3/2", "1", "1/0", "a/b", "1/2/3"])
def test_a_part_that_is_none_is_refused(wrong):
    with pytest.raises(RestoreKVError, match="--part must be K/N"):
        replace(CONFIG, part=wrong)


def test_passages_are_cut_at_the_end_of_a_sentence(tiny_tokenizer):
    documents, _ = read(replace(CONFIG, made=0.0, invented=0.0), tiny_tokenizer)
    for document in documents:
        assert len(encode_text(tiny_tokenizer, document.text)[0]) <= 502
        last_end = document.text.rfind(". ")
        assert document.text.endswith(".") or last_end <= 0.8 * len(document.text)
    assert any(document.text.endswith(".") for document in documents)


def test_a_passage_about_which_nothing_can_be_asked_is_counted(tiny_tokenizer):
    bare = {**rows()[4], "id": "bare", "text": "word " * 3, "questions": []}
    config = replace(CONFIG, made=0.0, invented=0.0)
    reasons = []
    for number in range(40):  # a tenth of such passages ask themselves
        found = list(read_corpus(iter([{**bare, "id": f"bare/{number}"}]), config, tiny_tokenizer))
        assert len(found) == 1
        reasons += [str(item) for item in found if isinstance(item, DropRow)]
        assert isinstance(found[0], DropRow) or found[0].studied
    assert len(reasons) > 20 and set(reasons) == {"nothing to ask"}


def test_a_passage_asks_its_people_first(tiny_tokenizer):
    documents, _ = read(replace(CONFIG, invented=0.0), tiny_tokenizer)
    own = next(each for each in documents if each.name == "logs/0")
    kinds = [kind for kind, _ in own.asked]
    assert (
        kinds[:2] == [passages.HUMAN, passages.HUMAN]
        and kinds[2] in exercises.VERBATIM
        and not own.studied
    )


def test_exercises_quote_the_text():
    words = passage("quoted", 30)
    for seed in range(60):
        drawn = exercises.draw_exercises(words, random.Random(seed), 6)
        kinds = [kind for kind, _ in drawn]
        assert kinds[0] in exercises.VERBATIM and kinds[1] in exercises.OPEN
        assert sorted(kinds[2:]) == sorted(exercises.LOCAL) and len(set(kinds)) == len(kinds)
        for kind, question in drawn:
            for quote in re.findall(r'"([^"]*)"', question):
                for part in quote.split(" ____ "):
                    assert part.strip("_ ") in words, (kind, question)


HARD_PLACES = """\
The harbor opened in the spring.
Short line.
The ferry leaves from the second pier at noon.
The captain\thas kept\ta log since the war ended.
Name: ____ and the date of birth.
A lamp burns in every window of the town.
A lamp burns in every window of the town.
Nobody has seen the keeper since the storm.
The bridge was closed for repairs all year.
The mayor promised a new one by autumn.
Its stones were taken from the old mill.
"""


def test_checked_exercises_know_the_answer():
    """Short lines are neighbors too, tabs are spaces, blanks of the text and repeated lines are not
    asked about.
    """
    lines = HARD_PLACES.splitlines()
    flat = [" ".join(line.split()) for line in lines]
    asked_lines = set()
    for seed in range(40):
        drawn = draw_checked_exercises(HARD_PLACES, random.Random(seed), 8)
        assert len(drawn) == 8
        for kind, question, answer in drawn:
            gap = next(
                (
                    line
                    for line in flat
                    if exercises.BLANK not in line and fits_gap(question, line, answer)
                ),
                None,
            )
            if kind == "blank":
                assert gap is not None, question
                continue
            starts = [
                index for index, line in enumerate(flat) if " ".join(line.split()[:6]) in question
            ]
            assert len(starts) == 1, question
            place = starts[0]
            asked_lines.add(place)
            if kind == "after":
                assert answer == lines[place + 1]
            elif kind == "before":
                assert answer == lines[place - 1]
            else:
                assert flat[place].endswith(answer) or answer == lines[place + 1]
    # The others have a short neighbor, are the first or last, have a blank or are repeated.
    assert asked_lines == {3, 7, 8, 9}


def fits_gap(question: str, line: str, answer: str) -> bool:
    """Whether the question shows the line, with a blank in place of the answer."""
    return any(
        f"{line[:start]}{exercises.BLANK}{line[start + len(answer) :]}" in question
        for start in (match.start() for match in re.finditer(re.escape(answer), line))
    )


def test_which_comes_first_has_both_answers():
    words = passage("quoted", 30)
    orders = set()
    for seed in range(200):
        for kind, question in exercises.draw_exercises(words, random.Random(seed), 6):
            quotes = re.findall(r'"([^"]*)"', question)
            if kind == "compare" and "first" in question:
                orders.add(words.index(quotes[0]) < words.index(quotes[1]))
    assert orders == {True, False}


def test_a_text_too_short_to_quote_gives_no_exercise():
    assert exercises.draw_exercises("Two words. Three more words here.", random.Random(0), 4) == []


@pytest.mark.parametrize("form", made.FORMS)
def test_made_documents_answer_their_questions(form):
    for seed in range(20):
        document = form(random.Random(f"{form.__name__} {seed}"), 1500)
        assert {kind for kind, _ in document.questions} <= set(made.MADE_KINDS)
        assert 600 < len(document.text) < 9000
        again = form(random.Random(f"{form.__name__} {seed}"), 1500)
        assert again == document


def test_what_is_asked_of_a_made_document_has_one_answer():
    for seed in range(40):
        settings = made.make_settings(random.Random(seed), 9000).text.split("\n")
        sections = [line for line in settings if line[0] in "[#" or line[-1] == ":"]
        assert len(set(sections)) == len(sections)
        log = made.make_log(random.Random(seed), 60_000)
        times = re.findall(r"(?m)^\d\d:\d\d:\d\d", log.text)
        assert len(times) > 600  # more than a day
        for _, question in log.questions:
            for time in re.findall(r"\d\d:\d\d:\d\d", question):
                assert times.count(time) == 1
        days = []
        for line in made.make_diary(random.Random(seed), 9000).text.split("\n"):
            date = line.partition(": ")[0]
            for notation in ("%Y-%m-%d", "%d %B %Y", "%B %d, %Y"):
                with contextlib.suppress(ValueError):
                    days.append(datetime.datetime.strptime(date, notation))
        assert len(set(days)) == len(days) > 50


def test_a_question_about_a_cell_names_a_row_of_the_table():
    for seed in range(50):
        rng = random.Random(seed)
        table = made.draw_table(rng, 800)
        assert len({row[0] for row in table.rows}) == len(table.rows)
        for kind, question in made.ask_table(table, rng):
            if kind == made.ROW:
                assert any(row[0] in question for row in table.rows)


def test_no_number_is_in_a_format_of_ruler():
    rng = random.Random(0)
    drawn = [
        draw(rng)
        for draw in (passages._draw_number, passages._draw_code, made.draw_number, made.draw_code)
        for _ in range(500)
    ]
    drawn += [made.make_document(random.Random(seed), 300).text for seed in range(60)]
    assert not any(re.search(r"(?<!\d)\d{7}(?!\d)", each) for each in drawn)
    assert not any(re.search(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}", each) for each in drawn)
    assert not any("special magic" in each.lower() or "VAR" in each for each in drawn)


def test_every_license_of_the_corpus_lets_an_adapter_be_apache():
    known = (
        "CC BY 4.0",
        "curl licence (MIT-like)",
        "public domain (NASA)",
        "Apache-2.0 or MIT",
        "CC0 1.0",
    )
    names = [identify_license({"license": name}) for name in known]
    assert (
        set(names) <= LICENSES
        and set(names) <= PERMISSIVE
        and combine_licenses(names) == "apache-2.0"
    )
    for refused in ("CC BY", "CC BY-SA 4.0", None, "proprietary"):
        with pytest.raises(DropRow, match="license"):
            identify_license({"license": refused})


def test_an_answer_ends_when_it_repeats_itself():
    sampler = GreedyUntilLoop(3, ids=[1, 2, 3, 4, 1, 2])
    assert not sampler.ends()
    sampler.ids.append(3)
    assert sampler.ends()
    assert (
        not GreedyUntilLoop(3, ids=[1, 1, 1]).ends() and GreedyUntilLoop(3, ids=[1, 1, 1, 1]).ends()
    )


def test_the_mixture_is_built_resumed_and_read(tiny_model, tiny_tokenizer, tmp_path, monkeypatch):
    source = tmp_path / "corpus.jsonl"
    write_jsonl(source, rows())
    config = replace(CONFIG, corpus=str(source), loop=4)
    manifest = build_mixture(tiny_model, tiny_tokenizer, config, tmp_path / "whole")
    contexts, _ = read_mixture(tmp_path / "whole", tiny_model, tiny_tokenizer)
    assert 4 <= len(contexts) <= manifest["sources"]["corpus"]["contexts"] == 6
    assert manifest["sources"]["corpus"]["dropped"]["of another split"] == 1
    kinds = {kind for each in contexts for kind in [each.source]}
    assert kinds == {"corpus"}
    longest = max(len(ids) for each in contexts for ids in each.answer_ids)
    assert longest <= 12

    stored = []

    def stop(self, document, attempts):
        if len(stored) == 2:
            raise KeyboardInterrupt
        stored.append(document)
        return add(self, document, attempts)

    from restorekv.data.gather import AttemptFile

    add = AttemptFile.append_attempts
    monkeypatch.setattr(AttemptFile, "append_attempts", stop)
    with pytest.raises(KeyboardInterrupt):
        build_mixture(tiny_model, tiny_tokenizer, config, tmp_path / "cut")
    monkeypatch.setattr(AttemptFile, "append_attempts", add)
    build_mixture(tiny_model, tiny_tokenizer, config, tmp_path / "cut", resume=True)
    assert (tmp_path / "cut" / "corpus.parquet").read_bytes() == (
        tmp_path / "whole" / "corpus.parquet"
    ).read_bytes()


def test_a_question_that_no_positions_are_left_for_is_dropped(tiny_tokenizer, tmp_path):
    """It ended a build after hours, and each further one at the same place."""
    model = build_model("llama", max_position_embeddings=800)
    row = {"genre": "logs", "license": "CC0-1.0", "text": passage("long question", 10)}
    row["questions"] = ["who wrote all of it? " * 40, "who wrote it?"]
    source = write_jsonl(tmp_path / "rows.jsonl", [row, row | {"text": passage("b"), "id": "b"}])
    config = replace(CONFIG, corpus=str(source), made=0.0, corpus_passages=2, invented=0.0)
    manifest = build_mixture(model, tiny_tokenizer, config, tmp_path / "data")
    assert manifest["sources"]["corpus"]["dropped_attempts"]["long question"] == 2
    contexts, _ = read_mixture(tmp_path / "data", model, tiny_tokenizer)
    assert [context.questions[0] for context in contexts] == ["\n\nwho wrote it?"] * 2
    # All of it can be trained on.
    limits = TrainConfig(restore_tokens=8, evictor="knorm")
    examples = read_examples(tmp_path / "data", model, tiny_tokenizer)
    check_example_lengths(model, tiny_tokenizer, examples, limits)


def test_made_documents_alone_are_no_build(tiny_model, tiny_tokenizer, tmp_path):
    """It ended well with an example of a made-up document and none of the user's texts."""
    row = {"genre": "logs", "license": "CC0-1.0", "text": "The mill was built in 1871."}
    source = write_jsonl(tmp_path / "rows.jsonl", [row])
    config = replace(CONFIG, corpus=str(source))
    with pytest.raises(RestoreKVError, match=r"gave no example from .*rows.jsonl \(dropped: 1 "):
        build_mixture(tiny_model, tiny_tokenizer, config, tmp_path / "data")


def test_made_documents_are_told_from_those_of_the_file(tiny_model, tiny_tokenizer, tmp_path):
    row = {"genre": "logs", "license": "CC0-1.0", "text": passage("only")}
    source = write_jsonl(tmp_path / "rows.jsonl", [row])
    config = replace(CONFIG, corpus=str(source))
    with pytest.warns(RestoreKVWarning, match="gave 2 of 6 documents, .*rows.jsonl and 1 made up"):
        build_mixture(tiny_model, tiny_tokenizer, config, tmp_path / "data")


def test_the_flag_that_lowers_the_shortest_length_is_named(tiny_tokenizer, tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", rows())
    model = build_model("llama", max_position_embeddings=400)
    config = replace(CONFIG, corpus=str(source))
    with pytest.raises(RestoreKVError, match="an answer; lower --passage-shortest"):
        build_mixture(model, tiny_tokenizer, config, tmp_path / "data")


def test_facts_are_asked_for(tiny_tokenizer):
    documents, _ = read(replace(CONFIG, invented=1.0), tiny_tokenizer)
    with_facts = [each for each in documents if passages.FACT in [kind for kind, _ in each.asked]]
    assert len(with_facts) == sum(not each.name.startswith("made ") for each in documents)


def test_every_row_of_a_table_has_a_cell_for_each_column():
    """Dates have a comma, which separates cells too."""
    with_dates = 0
    for seed in range(200):
        text = made.make_csv(random.Random(seed), 600).text
        separator = next(each for each in (" | ", "\t", ";", ",") if each in text.split("\n")[0])
        if separator == " | ":
            rows = [line.split(separator) for line in text.split("\n")]
        else:
            rows = list(csv.reader(text.split("\n"), delimiter=separator))
        assert {len(row) for row in rows} == {len(rows[0])}, text
        with_dates += separator == "," and '"' in text
    assert with_dates


@pytest.mark.parametrize("form", made.FORMS)
def test_the_shortest_documents_can_be_asked_about(form):
    for seed in range(100):
        document = form(random.Random(seed), 20)
        assert document.text and document.questions
