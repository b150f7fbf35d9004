"""Every source is read from its true format, and the filters drop what they say."""

import gzip
import json
import random
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from restorekv.data.build import index_excluded_texts
from restorekv.data.documents import DropRow, SourceDocument
from restorekv.data.files import identify_source, iterate_rows
from restorekv.data.gather import LengthFilter
from restorekv.data.overlap import EvaluationIndex, read_evaluation_texts, split_words
from restorekv.data.self_study import clean_question, find_answer_fault, find_question_fault
from restorekv.data.sources import (
    LICENSES,
    cut_before_question,
    read_book,
    read_flan_prompt,
    read_license_label,
    read_longalpaca,
    read_paper,
)
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.restore.licenses import combine_licenses, normalize_license
from tests.helpers.data_world import (
    BY,
    BY_SA,
    book,
    messages,
    paper,
    settings,
    text,
    two_papers,
    write_jsonl,
    write_sources,
)

LOCAL = {"files": []}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    return write_sources(tmp_path_factory.mktemp("sources"))


def read(source, where: str, tokenizer, **changes) -> tuple[list[SourceDocument], list[str]]:
    found = list(source(iterate_rows(where, LOCAL), settings({}, **changes), tokenizer))
    return [x for x in found if isinstance(x, SourceDocument)], [
        str(x) for x in found if isinstance(x, DropRow)
    ]


def test_longalpaca_is_cut_before_its_question(files, tiny_tokenizer):
    made, dropped = read(read_longalpaca, files["longalpaca"], tiny_tokenizer)
    assert dropped == ["no document"] and [item.name for item in made] == [
        f"row {n}" for n in range(1, 7)
    ]
    assert made[0].text.startswith("Below is a paper.") and made[0].text.endswith(text("a", 40))
    assert made[3].text.endswith(text("b", 45)) and "summarize" not in made[3].text
    assert text("c", 20) in made[5].text and made[5].text.endswith(text("d", 20))
    assert {item.license for item in made} == {"cc-by-nc-4.0"}


@pytest.mark.parametrize(
    ("instruction", "kept"),
    [
        (
            "A B. Now the paper ends. X. Now the paper ends. \nQuestion: Why?",
            "A B. Now the paper ends. X.",
        ),
        ("A text. Question: one? Still text. Question: why?", "A text. Question: one? Still text."),
        ("Write a poem.", ""),
        (paper("P"), paper("P").split(" \n Now")[0]),
        (two_papers("P", "Q"), two_papers("P", "Q").split(" Now the second")[0]),
        (book("P"), book("P").split(" \n Now")[0]),
    ],
)
def test_the_last_marker_counts(instruction, kept):
    assert cut_before_question(instruction) == kept


def test_books_are_cut_into_chunks_that_lie_in_them(files, tiny_tokenizer):
    made, dropped = read(read_book, files["pg19"], tiny_tokenizer)
    assert dropped == ["no whole chunk"]
    assert [(item.book, item.more) for item in made] == [
        (f"row {n}", more) for n in (0, 2, 3) for more in (True, False)
    ]
    for item in made:
        book = item.name.split(" ")[0][-1]
        whole = text(int(book), {"0": 130, "2": 120, "3": 110}[book])
        ids = tiny_tokenizer.encode(whole, add_special_tokens=False)
        number = int(item.name.rsplit(" ", 1)[1])
        assert item.text in whole and item.text == tiny_tokenizer.decode(
            ids[96 * number : 96 * (number + 1)]
        )
    again, _ = read(read_book, files["pg19"], tiny_tokenizer)
    other, _ = read(read_book, files["pg19"], tiny_tokenizer, seed=3)
    assert again == made and other != made
    every, _ = read(read_book, files["pg19"], tiny_tokenizer, chunks=1000)
    assert "".join(item.text for item in every if item.book == "row 0") in text(0, 130)


def test_flan_is_the_first_words_of_the_user_in_its_own_subset(files, tiny_tokenizer):
    made, dropped = read(read_flan_prompt, files["flan"], tiny_tokenizer)
    assert dropped == ["another subset"] and [item.name for item in made] == [
        "f0",
        "short",
        "f1",
        "f2",
    ]
    assert made[0].text == text("f0", 30) and {item.license for item in made} == {"odc-by"}
    assert list(
        map(
            str,
            read_flan_prompt(iter([{"id": "x", "messages": messages(" ")}]), settings({}), None),
        )
    ) == ["no prompt"]


def test_papers_keep_their_own_license_and_others_are_dropped(files, tiny_tokenizer):
    made, dropped = read(read_paper, files["papers"], tiny_tokenizer)
    assert [(item.name, item.license) for item in made] == [
        ("2106.0", "cc-by-4.0"),
        ("2106.3", "public-domain"),
    ]
    assert dropped == ["license cc-by-sa-4.0", "license Some rights", "license missing"]
    shared, _ = read(
        read_paper, files["papers"], tiny_tokenizer, licenses="CC-BY-SA-4.0, cc-by-4.0"
    )
    assert [item.license for item in shared] == ["cc-by-4.0", "cc-by-sa-4.0"]


def test_papers_may_name_their_license_by_the_identifier_of_the_allow_list(tiny_tokenizer):
    rows = [{"text": "a", "license": name} for name in ("cc-by-4.0", "CC0-1.0", "cc-by-sa-4.0")]
    read_rows = list(read_paper(iter(rows), settings({}), tiny_tokenizer))
    assert [item.license for item in read_rows[:2]] == ["cc-by-4.0", "cc0-1.0"]
    assert str(read_rows[2]) == "license cc-by-sa-4.0"


def test_licenses_are_found_in_every_form_and_known_to_the_model_card():
    assert read_license_label({"metadata": json.dumps({"license": BY})}) == BY
    assert read_license_label({"metadata": "{", "license": BY_SA}) == BY_SA
    assert read_license_label({"metadata": None}) == ""
    assert all(normalize_license(name) == name and combine_licenses([name]) for name in LICENSES)
    assert combine_licenses(settings({}).allowed_licenses) == "apache-2.0"


ODD = [
    (read_longalpaca, {"instruction": ["Now the paper ends."]}, "instruction"),
    (read_longalpaca, {"instruction": 5}, "instruction"),
    (read_longalpaca, {"text": "half a pair \ud800"}, "text"),
    (read_flan_prompt, {"messages": "Why?"}, "messages"),
    (read_flan_prompt, {"messages": ["Why?"]}, "messages"),
    (read_flan_prompt, {"messages": [{"role": "user", "content": 7}]}, "content"),
    (read_flan_prompt, {"source": 3, "messages": messages("Why?")}, "source"),
    (read_paper, {"text": ["a", "b"], "metadata": {"license": BY}}, "text"),
    (read_book, {"text": 1813}, "text"),
]


@pytest.mark.parametrize(("source", "row", "name"), ODD)
def test_a_field_that_is_not_text_is_dropped_by_its_name(source, row, name, tiny_tokenizer):
    assert list(map(str, source(iter([row]), settings({}), tiny_tokenizer))) == [
        f"field {name} is not text"
    ]


def test_the_text_parts_of_a_message_are_joined():
    parts = [
        {"type": "text", "text": "Look."},
        {"type": "image", "image": None},
        {"type": "text", "text": "What is it?"},
    ]
    made = list(read_flan_prompt(iter([{"messages": messages(parts)}]), settings({}), None))
    assert [item.text for item in made] == ["Look.\nWhat is it?"]


@pytest.mark.parametrize("kind", ["json", "jsonl", "txt", "parquet", "folder"])
def test_a_source_may_be_any_local_format(kind, tmp_path, tiny_tokenizer):
    texts = [text(n, 20) + "\n\u2028 end" for n in range(2)]
    where = tmp_path / f"data.{kind}"
    if kind == "json":
        where.write_text(json.dumps([{"text": words} for words in texts]))
    elif kind == "jsonl":
        write_jsonl(where, [{"text": words} for words in texts])
    elif kind == "parquet":
        pq.write_table(pa.table({"text": texts}), where)
    elif kind == "txt":
        where.write_text(texts[0], encoding="utf-8")
        texts = texts[:1]
    else:
        where.mkdir()
        for number, words in enumerate(texts):
            (where / f"{number}.txt").write_text(words, encoding="utf-8")
    assert [row["text"] for row in iterate_rows(str(where), identify_source(str(where)))] == texts


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b'[{"text": "a"}, {"text": "b"}]'),
        ("a.json", b'{"text": "a"}\n{"text": "b"}\n'),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "b"}'),
        ("a.json.gz", gzip.compress(b'{"text": "a"}\n{"text": "b"}\n', mtime=0)),
    ],
)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_json_is_read_in_every_form_with_a_bom_or_without(name, content, mark, tmp_path):
    content = (
        gzip.compress(mark + gzip.decompress(content)) if name.endswith("gz") else mark + content
    )
    (tmp_path / name).write_bytes(content)
    assert list(iterate_rows(str(tmp_path / name), LOCAL)) == [{"text": "a"}, {"text": "b"}]
    (tmp_path / "b.txt").write_bytes(mark + b"one\r\ntwo")
    assert list(iterate_rows(str(tmp_path / "b.txt"), LOCAL)) == [{"text": "one\ntwo"}]


def test_fields_of_mixed_types_stay_as_they_are(tmp_path):
    given = [{"text": "a"}, {"text": ["b"]}, {"text": 3}]
    (tmp_path / "a.json").write_text(json.dumps(given))
    assert list(iterate_rows(str(tmp_path / "a.json"), LOCAL)) == given


def test_a_dataset_of_the_hub_is_pinned_and_streamed(monkeypatch):
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.HfApi.dataset_info",
        lambda self, name, revision: SimpleNamespace(sha=f"{name}-{revision}"),
    )
    monkeypatch.setattr(
        "datasets.load_dataset", lambda **options: asked.update(options) or [{"text": "a"}]
    )
    known = identify_source("some/set@v1")
    assert known == {"hub": "some/set", "revision": "some/set-v1"}
    assert list(iterate_rows("some/set@v1", known)) == [{"text": "a"}]
    assert asked == {
        "path": "some/set",
        "revision": "some/set-v1",
        "split": "train",
        "streaming": True,
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n\n[1]\n', r"a\.jsonl, line 3 is not a JSON object"),
        ("a.json", b'[{"text": "a"}, "b"]', r"a\.json, row 2 is not a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe4"}\n', r"a\.jsonl, line 2 is not UTF-8"),
        (
            "a.parquet",
            b"PAR1 no parquet",
            r"a\.parquet is damaged or not a parquet file \(.*\); get",
        ),
        (
            "a.json",
            b'[{"text": "a"},\n{"text": ',
            r"a\.json, line 2 is not JSON \(Expecting value, character \d+\); .* fetch the file "
            r"again",
        ),
        ("a.json", b'[{"text": "a"},\n{"text": "\xe4"}]', r"a\.json, line 2 is not UTF-8"),
        ("a.json", b'{"text": "a"}\n{"text"', r"a\.json, line 2 is not JSON"),
        ("a.json", b"[" * 100_000, r"a\.json, line 1 is not JSON"),
        # Of two values one would be lost without a word.
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "b", "id": 1, "text": "c"}\n',
            r"a\.jsonl, line 2 has the key 'text' twice in an object; fix it\.",
        ),
        (
            "a.json",
            b'{"text": "a", "meta": [{"b": 1, "b": 1}]}\n{"text": "c"}\n',
            r"a\.json, line 1 has the key 'b' twice in an object; fix it\.",
        ),
        (
            "a.json",
            b'[{"text": "a"},\n{"text": "b", "text": "c"}]',
            r"a\.json has the key 'text' twice in an object; fix it\.",
        ),
        (
            "a.jsonl",
            b'{"text": "a", "id": 1' + b"0" * 5000 + b"}",
            r"a\.jsonl, line 1 is not JSON \(an integer of 5,001 digits\); fix",
        ),
        (
            "a.json.gz",
            gzip.compress(b'{"text": "a"}\n' * 9, mtime=0)[:-9],
            r"a\.json\.gz is damaged \(.*\); fetch it again",
        ),
        ("a.json.gz", b"not packed", r"a\.json\.gz is damaged \(.*\); fetch it again"),
        ("a.parquet.gz", b"", r"a\.parquet\.gz is empty"),
        ("a.txt", b"a\xff\xfe\x00", r"a\.txt is binary; give a text"),
        ("a.txt", b"a\xff\xfe", r"a\.txt is not UTF-8 text \(byte 1\)"),
        *(
            (f"a.{kind}", b"", rf"a\.{kind} is empty; fetch it again")
            for kind in ("json", "jsonl", "parquet", "txt")
        ),
        ("a.csv", b"text\n", r"not a file of type \.json"),
    ],
)
def test_damaged_files_are_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RestoreKVError, match=message):
        list(iterate_rows(str(tmp_path / name), identify_source(str(tmp_path / name))))


def test_missing_files_and_unreachable_hubs_are_one_sentence(tmp_path, monkeypatch):
    for where in ("./nothing", "/no/such/file", "nothing.jsonl", "a/b/c"):
        with pytest.raises(RestoreKVError, match="There is no file"):
            identify_source(where)

    def unreachable(*_, **__):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unreachable)
    with pytest.raises(
        RestoreKVError, match="Yukang/LongAlpaca-12k; give a hub id that can be reached"
    ):
        identify_source("Yukang/LongAlpaca-12k")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RestoreKVError, match="no file that ends in"):
        identify_source(str(tmp_path / "empty"))


def test_without_the_extra_the_mend_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RestoreKVError, match=r"restorekv\[data\]"):
        next(iterate_rows("some/set", {"hub": "some/set", "revision": "a"}))


def test_filters_of_questions_answers_and_contexts(tiny_tokenizer):
    config = settings({}, question_characters=10, least_answer=4)
    assert [find_question_fault(q, config) for q in ("", "123456789", "1234567890")] == [
        "short question"
    ] * 2 + [None]
    assert [find_answer_fault("word", n, config) for n in (0, 3, 4)] == ["short answer"] * 2 + [
        None
    ]
    assert find_answer_fault(" \n", 9, config) == "short answer"
    body = text("x", 30)
    count = len(tiny_tokenizer.encode(body, add_special_tokens=False))
    assert not isinstance(LengthFilter(tiny_tokenizer, count, count).check_text(body), str)
    assert LengthFilter(tiny_tokenizer, count + 1, 9999).check_text(body) == "too short"
    assert LengthFilter(tiny_tokenizer, 1, count - 1).check_text(body) == "too long"
    twice = LengthFilter(tiny_tokenizer, 1, 9999)
    assert (
        twice.check_text(body).text_tokens == count
        and twice.check_text(body.upper() + "\n") == "repeated"
    )


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        ("\n  Question: What is it?\nmore", "What is it?"),
        ('"Why so?"', "Why so?"),
        ("Q: Who?", "Who?"),
        (" \n", ""),
    ],
)
def test_questions_are_tidied(raw, kept):
    assert clean_question(raw) == kept


def shares(document: str, evaluation: str) -> tuple[float, int]:
    """By sets of tuples: the larger share of common 13-grams, and how many there are."""
    one, other = (
        {tuple(w[i : i + 13]) for i in range(len(w) - 12)}
        for w in (split_words(document), split_words(evaluation))
    )
    return max(len(one & other) / len(one), len(one & other) / len(other)), len(one & other)


@pytest.mark.parametrize("first", [0x4E00, 0x3041, 0x0E01], ids=["chinese", "hiragana", "thai"])
def test_texts_without_spaces_are_found_however_their_lines_break(first):
    rng = random.Random(first)
    letters = [chr(first + number) for number in range(40)]
    clauses = ["".join(rng.choices(letters, k=rng.randint(8, 18))) for _ in range(200)]
    evaluation = "，".join(clauses)
    index = EvaluationIndex(iter([("the set", evaluation)]), 0.1)
    lines = [evaluation[start : start + 20] for start in range(0, len(evaluation), 20)]
    for document in ("\n".join(lines), "\n".join(lines[3:15])):
        found = index.find_match(document)
        assert found is not None and found[0] == "the set"
    rng.shuffle(letters)
    other = "，".join("".join(rng.choices(letters, k=12)) for _ in range(200))
    assert index.find_match(other) is None
    assert split_words("日本 is ひ1") == ["日", "本", "is", "ひ", "1"]


@pytest.mark.parametrize("taken", [0, 15, 20, 21, 30, 60, 200])
def test_overlap_is_the_share_of_13_grams(taken):
    evaluation = text("evaluation", 400)
    stretch = " ".join(evaluation.split()[100 : 100 + taken])
    document = f"{text('before', 90)} {stretch.upper()} -- {text('after', 90)}"
    share, common = shares(document, evaluation)
    others = [("other", text("other", 300)), ("set", evaluation), ("third", text("third", 200))]
    match = EvaluationIndex(iter(others), 0.1).find_match(document)
    assert match == (("set", round(share, 4)) if share >= 0.1 and common >= 8 else None)
    assert (match is not None) == (taken >= 60 or (taken == 30 and share >= 0.1))


def test_a_short_evaluation_text_inside_a_long_document_and_an_equal_one_are_found():
    short = text("short", 40)
    index = EvaluationIndex(iter([("short", short)]), 0.5)
    assert index.find_match(f"{text('x', 2000)} {short} {text('y', 2000)}") == ("short", 1.0)
    few = EvaluationIndex(iter([("few", "Six words are enough for this.")]), 0.1)
    assert (
        few.find_match("six words, are ENOUGH for this") == ("few", 1.0)
        and few.find_match(text("z", 50)) is None
    )
    assert EvaluationIndex(iter([]), 0.1).find_match(text("z", 50)) is None


def test_evaluation_texts_are_found_by_the_names_of_their_fields(tmp_path):
    folder = tmp_path / "evaluation"
    folder.mkdir()
    write_jsonl(
        folder / "a.jsonl",
        [{"context": "one", "input": "no"}, {"article": "two", "questions": ["no"]}],
    )
    patient = {
        "patient_01": {
            "texts": {"text_0": "three", "text_1": "four"},
            "questions": [{"question": "no"}],
        }
    }
    (folder / "b.json").write_text(json.dumps(patient))
    (folder / "c.txt").write_text("five")
    pq.write_table(pa.table({"context": ["six"], "answer": ["no"]}), folder / "d.parquet")
    found = list(read_evaluation_texts([str(folder)]))
    assert [words for _, words in found] == ["one", "two", "three\nfour", "five", "six"]
    assert found[1][0] == "a.jsonl, row 2"


def test_in_a_folder_files_without_texts_are_skipped_with_a_warning(tmp_path):
    folder = tmp_path / "evaluation"
    folder.mkdir()
    (folder / "config.json").write_text('{"split": "test"}')
    (folder / "empty.jsonl").write_text("")
    with pytest.raises(RestoreKVError, match=r"evaluation has no evaluation text"):
        list(read_evaluation_texts([str(folder)]))
    (folder / "texts.json").write_bytes(b'\xef\xbb\xbf{"context": "one"}')
    with pytest.warns(RestoreKVWarning) as told:
        assert [words for _, words in read_evaluation_texts([str(folder)])] == ["one"]
    assert [str(warning.message).split("/")[-1] for warning in told] == [
        f"{name} has no evaluation text and is skipped." for name in ("config.json", "empty.jsonl")
    ]
    with pytest.raises(RestoreKVError, match=r"config\.json has no evaluation text"):
        list(read_evaluation_texts([str(folder / "config.json")]))


def test_files_that_are_not_read_are_named_before_texts_are_kept_out(tmp_path, tiny_tokenizer):
    """QuALITY's own file ends in .dev: its articles would be trained on without a word."""
    folder = tmp_path / "evaluation"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [{"context": "one"}])
    write_jsonl(folder / "QuALITY.v1.0.1.htmlstripped.dev", [{"article": "two"}])
    with pytest.warns(RestoreKVWarning, match=r"because of the ending: QuALITY.*\.dev\. If they"):
        index_excluded_texts(tiny_tokenizer, [str(folder)], 0.1)
    (folder / "QuALITY.v1.0.1.htmlstripped.dev").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RestoreKVWarning)
        index_excluded_texts(tiny_tokenizer, [str(folder)], 0.1)


def test_texts_of_answers_are_no_evaluation_texts(tmp_path):
    """With them a file whose texts have an unknown field would pass for one that was read."""
    row = {"body": "A long article.", "answers": [{"text": "long", "answer_start": 2}]}
    write_jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(RestoreKVError, match="has no evaluation text; name its fields"):
        list(read_evaluation_texts([str(tmp_path / "a.jsonl")]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"context": "x"}\n{"context":', "line 2 is not JSON"),
        ("a.json", '{"context":\n\n"x", }', "line 3 is not JSON"),
        ("a.jsonl", '{"input": "x"}\n', "has no evaluation text"),
        ("a.parquet", "no", "damaged or not a parquet"),
    ],
)
def test_useless_evaluation_files_are_refused(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(RestoreKVError, match=message):
        list(read_evaluation_texts([str(tmp_path / name)]))
    with pytest.raises(RestoreKVError, match="no evaluation file"):
        list(read_evaluation_texts([str(Path(tmp_path) / "none.jsonl")]))


def test_texts_in_a_linked_folder_are_excluded(tmp_path):
    (tmp_path / "given").mkdir()
    (tmp_path / "outside").mkdir()
    write_jsonl(tmp_path / "given" / "a.jsonl", [{"text": text("one", 60)}])
    write_jsonl(tmp_path / "outside" / "b.jsonl", [{"text": text("two", 60)}])
    (tmp_path / "given" / "linked").symlink_to(tmp_path / "outside")
    (tmp_path / "outside" / "back").symlink_to(tmp_path / "given")
    index = EvaluationIndex(read_evaluation_texts([str(tmp_path / "given")]), 0.1)
    assert index.names == ["a.jsonl, row 1", "b.jsonl, row 1"]
    assert index.find_match(text("two", 60))
