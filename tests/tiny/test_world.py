"""The tiny world: reproducible, of the promised lengths, answerable from its text, scored as by
hand.
"""

import random

import pytest

from restorekv.tiny.suite import draw_documents
from restorekv.tiny.world import FAMILIES, KINDS, WorldQuestion, draw_document, token_f1


def words(sentence: str) -> int:
    return len(sentence.split())


def test_a_seed_names_a_document():
    first, second = (draw_document(random.Random("a"), "mixed", 300, words) for _ in range(2))
    assert first == second
    assert first != draw_document(random.Random("b"), "mixed", 300, words)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", (64, 400, 1500))
def test_documents_fill_but_do_not_exceed_their_length(kind, tokens):
    for seed in range(5):
        made = draw_document(random.Random(seed), kind, tokens, words)
        assert words(made.text) <= max(tokens, 75)
        assert words(made.text) > 0.6 * tokens


def test_every_answer_stands_in_the_text_and_the_target_scores_full_marks():
    seen = set()
    for seed in range(40):
        made = draw_document(random.Random(seed), KINDS[seed % len(KINDS)], 500, words)
        for question in made.questions:
            assert question.score(" " + question.target) == 1.0
            assert question.score("") == 0.0
            if question.metric == "all":
                assert all(answer in made.text for answer in question.answers)
            seen.add(question.family)
    assert seen == set(FAMILIES)


def test_frequent_words_are_the_most_frequent():
    made = draw_document(random.Random(3), "words", 600, words)
    for question in made.questions:
        title = "Word list: " if question.family == "cwe" else "Coded list: "
        listed = made.text.split(title)[1].split(".")[0].split()
        counts = {word: listed.count(word) for word in set(listed)}
        assert sorted(counts, key=counts.get)[-3:] == list(reversed(question.answers))


def test_scores_worked_out_by_hand():
    codes = WorldQuestion("?", ("123", "456"), "123, 456.", "multivalue", "all")
    assert codes.score("123") == 0.5
    assert codes.score("1234, 456") == 0.5  # 1234 is not 123
    letter = WorldQuestion("?", ("B",), "Mara Holt B.", "choice4", "letter")
    assert letter.score("Mara Holt B.") == 1.0
    assert letter.score("Mara Holt C.") == 0.0
    assert letter.score("Holt") == 0.0
    assert token_f1("Mara keeps a goat", "Mara keeps a lamb.") == pytest.approx(0.75)


def test_splits_and_seeds_never_share_a_document(tiny_tokenizer):
    texts = [
        made.text
        for split, seed in (("test", 0), ("test", 1), ("restore 0", 0), ("demo", 0))
        for made in draw_documents(tiny_tokenizer, 8, split, seed, 300, 500)
    ]
    assert len(set(texts)) == len(texts)
