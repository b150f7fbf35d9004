"""Needle in a haystack: lengths, depths and places of the needle, from essays and from generated
prose.
"""

import pytest

from restorekv.errors import RestoreKVError
from restorekv.tasks import make_benchmark
from restorekv.tasks.needle import NEEDLE, find_sentence_end

SENTENCE = NEEDLE.strip()


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def test_lengths_and_depths_span_the_map(tiny_tokenizer):
    made = make_benchmark("needle:lengths=600+300").choose_samples(tiny_tokenizer, "kvzip")
    assert len(made) == 22
    facts = [sample.questions[0].facts for sample in made]
    assert [(fact["length"], fact["depth"]) for fact in facts] == [
        (length, depth) for length in (300, 600) for depth in range(0, 101, 10)
    ]
    for sample, fact in zip(made, facts, strict=True):
        assert sample.context.count(SENTENCE) == 1
        assert abs(len(ids(tiny_tokenizer, sample.context)) - fact["length"]) <= 4
        assert (
            sample.questions[0].task == f"needle_{fact['length']}"
            and sample.questions[0].max_new_tokens == 32
        )


def test_the_needle_follows_a_full_stop_at_its_depth(tiny_tokenizer):
    made = make_benchmark("needle:lengths=2000").choose_samples(tiny_tokenizer, "kvzip")
    for sample in made:
        before, after = sample.context.split(SENTENCE)
        depth = sample.questions[0].facts["depth"]
        assert not before.strip() or before.rstrip().endswith(".") or depth == 100
        reached = (
            100 * len(ids(tiny_tokenizer, before)) / (len(ids(tiny_tokenizer, before + after)))
        )
        assert depth - 25 < reached <= depth + 1
    assert made[0].context.startswith(SENTENCE) and made[-1].context.endswith(SENTENCE)


def test_the_haystack_is_the_same_but_for_the_needle(tiny_tokenizer):
    made = make_benchmark("needle:lengths=400,depths=3").choose_samples(tiny_tokenizer, "kvzip")
    bare = {" ".join(sample.context.replace(SENTENCE, " ").split()) for sample in made}
    assert len(bare) == 1
    again = make_benchmark("needle:lengths=400,depths=3").choose_samples(tiny_tokenizer, "kvpress")
    other = make_benchmark("needle:lengths=400,depths=3,seed=1").choose_samples(
        tiny_tokenizer, "kvzip"
    )
    assert [sample.context for sample in again] == [sample.context for sample in made]
    assert again[0].questions[0].text == "\n\n" + made[0].questions[0].text
    assert made[0].questions[0].text.startswith("Based on the content of the book")
    assert other[0].context != made[0].context


def test_a_long_haystack_is_tokenised_as_a_whole_a_few_times(tiny_tokenizer, monkeypatch):
    """Though the whole has a fifth fewer ids than its parts."""
    long = []

    def merging(tokenizer, text):
        found = ids(tokenizer, text)
        if len(text) < 2000:
            return found
        long.append(len(found))
        return found[: 4 * len(found) // 5]

    monkeypatch.setattr("restorekv.tasks.needle.tokenize_text", merging)
    assert (
        len(make_benchmark("needle:lengths=5000,depths=2").choose_samples(tiny_tokenizer, "kvzip"))
        == 2
    )
    assert 1 < len(long) < 8


def test_essays_are_read_by_name_and_repeated(tiny_tokenizer, tmp_path):
    (tmp_path / "b.txt").write_text("Second essay. It is short. ")
    (tmp_path / "a.txt").write_text("First essay. ")
    (tmp_path / "c.md").write_text("No essay.")
    benchmark = make_benchmark(f"needle:lengths=200,depths=2,path={tmp_path}")
    start, end = benchmark.choose_samples(tiny_tokenizer, "kvzip")
    text = "First essay. Second essay. It is short. "
    assert end.context.startswith(2 * text) and "No essay" not in end.context
    assert start.context == NEEDLE.strip() + "\n" + end.context.removesuffix(NEEDLE.rstrip())
    assert (
        str(tmp_path) in benchmark.to_json()["data"]
        and "generated" in make_benchmark("needle").to_json()["data"]
    )


def test_places_are_after_full_stops(tiny_tokenizer):
    text = ids(tiny_tokenizer, "the red. the blue. who")
    stops = [
        place
        for place in range(1, len(text) + 1)
        if tiny_tokenizer.decode(text[:place]).endswith(".")
    ]
    assert len(stops) == 2
    expected = [
        max([stop for stop in [0, *stops] if stop <= place]) for place in range(len(text) + 1)
    ]
    assert [
        find_sentence_end(tiny_tokenizer, text, place) for place in range(len(text) + 1)
    ] == expected


def test_scores(tiny_tokenizer):
    benchmark = make_benchmark("needle:lengths=300,depths=2")
    question = benchmark.choose_samples(tiny_tokenizer, "kvzip")[0].questions[0]
    assert (
        benchmark.score(question, "You eat a sandwich and sit in Dolores Park, on a sunny day!")
        == 1
    )
    assert benchmark.score(question, "Eat sandwich and sit in the Dolores park on sunny day") == 1
    assert benchmark.score(question, "Eat a sandwich in Dolores Park on a sunny day.") == 0
    assert benchmark.score(question, "") == 0


def test_mistakes_are_told(tiny_tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text(" \n")
    for spec, told in {
        "needle:lengths=500;2000": "lengths must be numbers of ids",
        "needle:lengths=0": "lengths must be numbers of ids",
        "needle:depths=1": "depths must be at least 2",
        "needle:lengths=20": "no room for the needle",
        f"needle:path={tmp_path}": "has no words; give texts",
        f"needle:path={tmp_path / 'none'}": "There is no file or folder",
    }.items():
        with pytest.raises(RestoreKVError, match=told):
            make_benchmark(spec).choose_samples(tiny_tokenizer, "kvzip")
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(RestoreKVError, match="not UTF-8 text"):
        make_benchmark(f"needle:path={tmp_path}").choose_samples(tiny_tokenizer, "kvzip")
