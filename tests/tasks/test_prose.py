"""Generated prose: endless, varied, clean, and the same for the same seed."""

import random
import re
from itertools import islice

from restorekv.tasks import prose


def drawn(seed, count):
    return list(islice(prose.draw_sentences(random.Random(seed)), count))


def test_twenty_thousand_sentences_are_all_different():
    made = drawn(0, 20_000)
    assert len(set(made)) == len(made)
    assert made == drawn(0, 20_000) and set(made[:50]).isdisjoint(drawn(1, 50))


def test_sentences_are_clean():
    for sentence in drawn(2, 5_000):
        assert sentence[0].isupper() and sentence.endswith(".") and sentence.count(".") == 1
        assert not set("{}|0123456789?\n") & set(sentence) and "  " not in sentence
        assert " a a" not in sentence and " a e" not in sentence and " a o" not in sentence
        assert "magic" not in sentence and "San Francisco" not in sentence


def test_every_rule_is_used():
    phrases = [phrase for phrases in prose.PHRASES.values() for phrase in phrases]
    assert {"sentence", *re.findall(r"{(\w+)}", " ".join(phrases))} == set(prose.PHRASES)
