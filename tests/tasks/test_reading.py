"""FairytaleQA, genres, XQuAD, HotpotQA and Factbook load offline, ask the same every time, and stay
out of training.
"""

import gzip
import hashlib
import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from restorekv import tasks
from restorekv.data.overlap import EvaluationIndex, read_evaluation_texts
from restorekv.errors import RestoreKVError
from restorekv.evaluation.grid import Cell
from restorekv.evaluation.protocols import PROTOCOLS
from restorekv.evaluation.run import run_grid
from restorekv.model.load import load_tokenizer
from restorekv.tasks import splits
from restorekv.tasks.base import digest_samples
from restorekv.tasks.fairytaleqa import match_passages
from restorekv.tasks.metrics import longest_common_f1, match_exactly
from restorekv.tasks.reading import TEXTS, WORDING, choose_spread, pack_neighbors, split_text
from tests.helpers.models import build_model

NAMES = ("fairytaleqa", "genres", "xquad", "hotpotqa", "factbook")
RECIPE = Path(__file__).parents[2] / "recipes" / "benchmark_texts.py"
TRAINING = RECIPE.parent / "smollm2" / "texts"
WRITTEN_HERE = {"facts"}  # texts of our own, which no recipe makes
PUBLIC = next(
    (path / "shared/data" for path in RECIPE.parents if (path / "shared/data").is_dir()), None
)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for which every word is a token."""
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.fixture(params=NAMES)
def spec(request) -> str:
    return request.param


def test_it_loads_offline_and_asks_the_same_every_time(spec):
    benchmark = tasks.make_benchmark(spec)
    samples = benchmark.choose_samples(word_tokenizer(), "kvpress")
    assert digest_samples(samples) == digest_samples(
        tasks.make_benchmark(spec).choose_samples(word_tokenizer(), "kvzip")
    ), "both protocols ask alike"
    assert 0 < sum(path.stat().st_size for path in TEXTS.rglob("*") if path.is_file()) < 2_000_000
    questions = [question for sample in samples for question in sample.questions]
    assert len({sample.id for sample in samples}) == len(samples) >= 23
    assert len({question.id for question in questions}) == len(questions) >= 75
    assert all(1 <= len(sample.questions) <= 6 for sample in samples)
    assert all(
        benchmark.score(question, question.answers[0]) == 1
        for question in questions
        if spec != "factbook"
    )
    assert all(
        0 <= value <= 1
        for asked in questions
        for value in benchmark.compute_metrics(asked, "the red house").values()
    )
    told = benchmark.to_json()
    assert told["wording"] == WORDING and told["license"] and len(told["files"][0]["sha256"]) == 64
    assert (
        len(tasks.make_benchmark(f"{spec}:count=3").choose_samples(word_tokenizer(), "kvpress"))
        == 3
    )


def test_questions_follow_the_text_in_one_wording_under_both_protocols(spec, tiny_tokenizer):
    (sample,) = tasks.make_benchmark(f"{spec}:count=1").choose_samples(word_tokenizer(), "kvpress")
    for protocol in PROTOCOLS.values():
        context, _ = protocol.make_context("any", tiny_tokenizer, "a text")
        told = tiny_tokenizer.decode(
            protocol.make_prompt(tiny_tokenizer, context, sample.questions[0])[0]
        )
        assert (
            told.startswith("\n\nQuestion: ")
            and "\nAnswer:<|im_end|>" in told
            and "Q: " not in told
        )


def test_passages_of_stories_hold_what_is_asked():
    whole = tasks.make_benchmark("fairytaleqa:length=0,questions=0").choose_samples(
        word_tokenizer(), "kvpress"
    )
    cut = tasks.make_benchmark("fairytaleqa:length=400,questions=0").choose_samples(
        word_tokenizer(), "kvpress"
    )
    assert len(whole) == 23 and sum(len(sample.questions) for sample in whole) == 1025
    assert all(len(sample.context.split()) <= 400 for sample in cut) and len(cut) > 100
    text = {sample.id: sample.context for sample in whole}
    home = {question.id: sample for sample in cut for question in sample.questions}
    assert 0.85 * 1025 < len(home) < 1025, "what no passage clearly holds is not asked"
    assert all(home[name].context in text[name.rpartition("/")[0]] for name in home), (
        "in the very words"
    )
    explicit = [
        each for each in home.values() for each in each.questions if each.task == "explicit"
    ]
    held = [
        any(answer.lower() in home[each.id].context.lower() for answer in each.answers)
        for each in explicit
    ]
    elsewhere = [
        any(answer.lower() in cut[0].context.lower() for answer in each.answers)
        for each in explicit
    ]
    assert sum(held) > 0.5 * len(held) > 4 * sum(elsewhere)
    tasks_of = Counter(question.task for sample in whole for question in sample.questions)
    assert tasks_of["explicit"] > 2 * tasks_of["implicit"] > 400


def test_equal_evidence_is_a_tie_in_whatever_order_words_are_summed():
    """Passages 0 and 1 hold different words of equal weights; the order of words in a set differs
    by process.
    """
    for turn in range(40):
        left, right = ([f"{side}{turn}n{number}" for number in range(7)] for side in "lr")
        frequent = [
            " ".join(pair)
            for times, pair in enumerate(zip(left, right, strict=True))
            for _ in range(times)
        ]
        question = {"question": " ".join(left), "answers": [" ".join(right)], "sections": "1"}
        last = {"question": "nothing", "answers": ["at all"], "sections": "40"}
        assert (
            match_passages([question, last], [" ".join(left), " ".join(right), *frequent])[0] == 0
        )


def test_a_question_goes_where_words_and_place_agree():
    texts = [
        "the king had a golden bird. " * 3,
        "a wolf ate the grey sheep. " * 3,
        "the king sold the bird at last. " * 3,
    ]

    def asked(question, answer, sections):
        return {"question": question, "answers": [answer], "sections": sections}

    questions = [
        asked("What did the wolf eat?", "the grey sheep", "2"),
        asked("What had the king?", "a golden bird", "1"),
        asked("What did the wolf eat?", "the grey sheep", "3"),
        asked("Who sold the bird?", "the king", "3"),
    ]
    assert match_passages(questions, texts) == [1, 0, None, 2]


def test_text_is_cut_at_the_ends_of_paragraphs():
    text = "\n\n".join(f"{'word ' * size}end." for size in (9, 4, 4, 30, 2))
    found = split_text(text, 16, lambda part: len(part.split()))
    assert all(len(part.split()) <= 16 for part in found) and len(found) == 4
    assert "".join("".join(found).split()) == "".join(text.split()) and all(
        part == part.strip() for part in found
    )
    assert split_text(text, 0, len) == [text] == split_text(text, 10_000, len)
    assert pack_neighbors([5, 5, 5, 5], 10) == [range(2), range(2, 4)] and pack_neighbors(
        [9, 1, 1, 9], 12
    ) == [
        range(2),
        range(2, 4),
    ]
    assert [list(group) for group in pack_neighbors([1] * 7, 3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert choose_spread([*range(10)], 3) == [0, 3, 6] and choose_spread([1, 2], 5) == [
        1,
        2,
    ] == choose_spread([1, 2], 0)


def test_longest_common_subsequence_against_every_subsequence():
    def brute(a, b):
        subsequences = {
            tuple(word for turn, word in enumerate(a) if chosen >> turn & 1)
            for chosen in range(2 ** len(a))
        }
        others = iter(sorted(subsequences, key=len, reverse=True))
        return next(len(each) for each in others if is_within(each, iter(b)))

    def is_within(wanted, said):
        return all(word in said for word in wanted)

    texts = ["a b c d", "d c b a", "a c a d b", "b b a", "c", "a d d a c b c"]
    for one in texts:
        for two in texts:
            common = brute(one.split(), two.split())
            expected = 2 * common / (len(one.split()) + len(two.split()))
            assert longest_common_f1(one, two) == pytest.approx(expected)
    assert (
        longest_common_f1("The King's daughter!", "the king S daughter") == 1
        and longest_common_f1("", "a") == 0
    )
    assert longest_common_f1("...", "...") == 0


def test_exact_match_and_hotpots_yes_and_no():
    assert (
        match_exactly("The Eiffel Tower.", "eiffel tower") == 1
        and match_exactly("eiffel towers", "eiffel tower") == 0
    )
    hotpot = tasks.make_benchmark("hotpotqa")
    question = hotpot.make_question("1", "hotpotqa", "Is it?", ["yes"])
    assert hotpot.score(question, "Yes.") == 1 and hotpot.score(question, "yes it is") == 0
    other = hotpot.make_question("1", "hotpotqa", "Which?", ["video game"])
    assert hotpot.score(other, "a game") == pytest.approx(2 / 3) and hotpot.score(other, "no") == 0
    assert hotpot.compute_metrics(other, "The video game") == {"exact_match": 1}
    assert tasks.make_benchmark("factbook").compute_metrics(
        other, "It is a video game, I think"
    ) == {"contained": 1}
    assert tasks.make_benchmark("factbook").compute_metrics(other, "video gamer") == {
        "contained": 0
    }


def rows_of(file: Path) -> list[dict]:
    with gzip.open(file) as stream:
        return [json.loads(line) for line in stream]


def test_splits_do_not_meet():
    names = [splits.split_fairytale("train", index) for index in range(232)]
    assert (
        Counter(names) == {"training": 213, "development": 19}
        and splits.split_fairytale("val", 5) == "evaluation"
    )
    assert (
        splits.split_novel("Burnett_Garden_1911") == "evaluation"
        and splits.split_novel("Kipling_Kim_1901") == "training"
    )
    assert splits.split_novel("Chesterton_Thursday_1908") == "development"
    countries = [f"{first}{second}" for first in "abcd" for second in "vwxyz"]
    found = splits.split_factbook(
        f"{country}/{part}" for country in countries[::-1] for part in ("Economy", "Geography")
    )
    assert {country: found[f"{country}/Economy"] for country in countries} == {
        country: {0: "evaluation", 1: "development"}.get(index % 8, "training")
        for index, country in enumerate(countries)
    }
    assert all(found[name] == found[name.replace("Economy", "Geography")] for name in found)


@pytest.mark.parametrize(
    ("spec", "content", "said"),
    [
        ("fairytaleqa", '{"id": "a", "context": "b"}', "not in the form of FairytaleQA"),
        ("xquad", '{"data": [{"title": "a"}]}', "not in the form of XQuAD"),
        (
            "hotpotqa",
            '{"_id": "a", "context": [["b", ["c"]]], "question": "d"}',
            "not in the form of HotpotQA",
        ),
        (
            "factbook",
            '{"id": "a/b", "context": "c", "questions": [{"question": "d", "answers": []}]}',
            "not in the form",
        ),
    ],
)
def test_foreign_files_are_refused(tmp_path, spec, content, said):
    path = tmp_path / "val.jsonl"
    path.write_text(content + "\n")
    with pytest.raises(RestoreKVError, match=said):
        tasks.make_benchmark(f"{spec}:path={path}").choose_samples(word_tokenizer(), "kvpress")
    with pytest.raises(RestoreKVError, match="no file"):
        tasks.make_benchmark(f"{spec}:path={path}s").choose_samples(word_tokenizer(), "kvpress")


@pytest.mark.parametrize("spec", ["lines", "fairytaleqa", "hotpotqa"])
def test_a_file_without_texts_is_named_as_such(tmp_path, spec):
    path = tmp_path / "val.jsonl"
    path.write_text("\n")
    with pytest.raises(RestoreKVError, match=r"val\.jsonl holds no texts; name a file"):
        tasks.make_benchmark(f"{spec}:path={path}").choose_samples(word_tokenizer(), "kvpress")


def test_training_documents_are_asked_only_by_name(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(gzip.decompress((TEXTS / "fairytaleqa/val.jsonl.gz").read_bytes()))
    with pytest.raises(RestoreKVError, match="no question for"):
        tasks.make_benchmark(f"fairytaleqa:path={path}").choose_samples(word_tokenizer(), "kvpress")
    found = tasks.make_benchmark(
        f"fairytaleqa:path={path},split=development,length=0"
    ).choose_samples(word_tokenizer(), "kvpress")
    assert [sample.id for sample in found] == [
        rows_of(TEXTS / "fairytaleqa/val.jsonl.gz")[place]["id"] for place in (5, 17)
    ]
    with pytest.raises(RestoreKVError, match="split must be one of"):
        tasks.make_benchmark("factbook:split=test")
    with pytest.raises(RestoreKVError, match="at least 64"):
        tasks.make_benchmark("xquad:length=10")


def test_every_file_of_stories_has_its_own_split(tmp_path):
    """Validation stories are for evaluation in a folder with training stories too."""
    content = gzip.decompress((TEXTS / "fairytaleqa/val.jsonl.gz").read_bytes())
    stories = [row["id"] for row in rows_of(TEXTS / "fairytaleqa/val.jsonl.gz")]
    for name in ("train", "val"):
        renamed = content.replace(b'"id": "', f'"id": "{name} '.encode())
        (tmp_path / f"{name}.jsonl").write_bytes(renamed)

    def list_ids(split):
        benchmark = tasks.make_benchmark(f"fairytaleqa:path={tmp_path},split={split},length=0")
        return [row["id"] for _, row in benchmark.load_rows()]

    assert list_ids("evaluation") == [f"val {name}" for name in stories]
    assert list_ids("development") == [f"train {stories[place]}" for place in (5, 17)]
    (tmp_path / "val.jsonl").rename(tmp_path / "validation.jsonl")
    with pytest.raises(RestoreKVError, match=r"validation\.jsonl is neither train nor val"):
        list_ids("development")


@pytest.mark.slow
def test_a_cell_records_both_metrics(tmp_path, tiny_tokenizer):
    build_model("qwen3").save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    cells = [
        Cell.full_cache(model=str(tmp_path / "model"), benchmark=f"{name}:count=1,questions=2")
        for name in ("fairytaleqa", "xquad")
    ]
    for result, metric in zip(
        run_grid(cells, tmp_path / "run"), ("rouge_l", "exact_match"), strict=True
    ):
        benchmark, (line,) = tasks.make_benchmark(result.cell.benchmark), result.lines
        (sample,) = benchmark.choose_samples(tiny_tokenizer, "kvpress")
        for asked, told in zip(sample.questions, line["answers"], strict=True):
            assert told["metrics"] == benchmark.compute_metrics(asked, told["prediction"]) and {
                *told["metrics"]
            } == {metric}
        by_task = Counter(told["task"] for told in line["answers"])
        means = [
            sum(
                told["metrics"][metric] / by_task[task]
                for told in line["answers"]
                if told["task"] == task
            )
            for task in by_task
        ]
        assert result.summary["metrics"] == {metric: pytest.approx(100 * sum(means) / len(means))}


@pytest.mark.skipif(not TRAINING.is_dir(), reason="no training texts ship")
def test_training_texts_that_ship_share_no_text_with_what_is_evaluated():
    index = EvaluationIndex(read_evaluation_texts([str(TEXTS)]), 0.25)
    found = [text for text in read_evaluation_texts([str(TRAINING)]) if index.find_match(text[1])]
    assert not found


@pytest.mark.skipif(PUBLIC is None, reason="the public data are not beside this checkout")
def test_training_documents_share_no_text_with_what_is_evaluated():
    """Stories and novels not at all; Factbook's sections share names of fields and lists of
    treaties.
    """
    strict = EvaluationIndex(read_evaluation_texts([str(TEXTS)]), 0.01)
    stories = (PUBLIC / "fairytaleqa/train.jsonl").read_text().splitlines()
    assert not [row["id"] for row in map(json.loads, stories) if strict.find_match(row["context"])]
    novels = [
        path
        for path in (PUBLIC / "novels").glob("*.txt")
        if splits.split_novel(path.stem) != "evaluation"
    ]
    assert len(novels) == 15 and not [
        path.stem for path in novels if strict.find_match(path.read_text())
    ]
    loose = EvaluationIndex(read_evaluation_texts([str(TEXTS / "factbook")]), 0.25)
    rows = [
        json.loads(line) for line in (PUBLIC / "factbook/documents.jsonl").read_text().splitlines()
    ]
    split = splits.split_factbook(row["id"] for row in rows)
    assert not [
        row["id"]
        for row in rows
        if split[row["id"]] != "evaluation" and loose.find_match(row["context"])
    ]
    assert {row["id"] for row in rows_of(TEXTS / "factbook/evaluation.jsonl.gz")} <= {
        name for name in split if split[name] == "evaluation"
    }


@pytest.mark.skipif(PUBLIC is None, reason="the public data are not beside this checkout")
def test_the_recipe_makes_the_files_that_ship(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(RECIPE), "--data", str(PUBLIC), "--out", str(tmp_path)])
    runpy.run_path(str(RECIPE), run_name="__main__")
    made = {path.relative_to(tmp_path): path for path in tmp_path.rglob("*") if path.is_file()}
    ships = {
        path.relative_to(TEXTS): path
        for path in TEXTS.rglob("*")
        if path.is_file() and path.name != "README.md" and path.parent.name not in WRITTEN_HERE
    }
    assert made.keys() == ships.keys()
    for name, path in made.items():
        one, other = (
            (gzip.decompress(file.read_bytes()) if name.suffix == ".gz" else file.read_bytes())
            for file in (path, ships[name])
        )
        assert one == other and os.path.getsize(path) > 0


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("ruler:length=1024,per_task=2", "9efe15fa2ba3480d"),
        ("fairytaleqa:length=768,questions=4,count=6", "98a12d2ff3eb83f8"),
        ("xquad:count=4", "470d627314eb1743"),
        ("hotpotqa:count=4", "8cdc344e028246e5"),
        ("factbook:count=4", "12150675c2ef9ddb"),
        ("tiny:count=13", "e5543f35baa45e79"),
    ],
)
def test_samples_stay_those_of_stored_results(spec, expected):
    """Results in paper/results were measured on these; the tiny tokenizer decides their lengths
    here.
    """
    sha256 = hashlib.sha256()
    for sample in tasks.make_benchmark(spec).load_samples(load_tokenizer("tiny"), "kvpress"):
        sha256.update(sample.context.encode())
        for question in sample.questions:
            words = (
                question.text,
                question.answers,
                question.max_new_tokens,
                question.answer_prefix,
            )
            sha256.update("|".join(map(str, words)).encode())
    assert sha256.hexdigest()[:16] == expected
