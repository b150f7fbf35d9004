"""Answers that repeat themselves end: the rule compared with a plain version of it, in texts,
streams and conversations, and answers that must not change.
"""

import random
import re

import pytest

from restorekv import Chat, ask_many
from restorekv.cli.options import SamplingFlags
from restorekv.errors import RestoreKVError
from restorekv.generation.repetition import (
    DEFAULT_REPEATS,
    LEAST_TOKENS,
    RepetitionWatch,
    drop_repetition,
)
from restorekv.generation.sampling import SamplingConfig
from tests.helpers.chat_templates import build_chat_tokenizer
from tests.helpers.compressing import QUESTIONS, make_small
from tests.helpers.dictating import Dictate

SENTENCE = "The blue house has a green door, and nobody lives there."
LOOP = f"Nobody knows. {' '.join([SENTENCE] * 12)}"
CUT = f"Nobody knows. {SENTENCE}"


@pytest.fixture(scope="module")
def small(tiny_tokenizer):
    return make_small(tiny_tokenizer)


def dictate(small, text=LOOP, **options):
    """Return options that make the model answer with `text`, and end there."""
    processor = Dictate(small.tokenizer, text)
    return {"processors": [processor], "max_tokens": len(processor.ids), **options}


class Letters:
    """A tokenizer with letters as ids; a capital is its small letter with a space before it."""

    def convert_ids_to_tokens(self, token):
        return f"\u0120{chr(token).lower()}" if chr(token).isupper() else chr(token)

    def decode(self, ids, skip_special_tokens):
        return put_spaces("".join(map(chr, ids)))


def put_spaces(text):
    return re.sub("[A-Z]", lambda capital: f" {capital[0].lower()}", text)


# Words and numbers with signs in them, then what a comma separates, then what any sign does.
WORDS = [r"[^\W_]+(?:[.,:'/-][^\W_]+)*", r"[^\W_]+(?:[.:'/-][^\W_]+)*", r"[^\W_]+"]


def find_border(text, start, size):
    """Return how many of `size` letters from `start` on come before the first border of words."""
    for pattern in WORDS:
        words = list(re.finditer(pattern, put_spaces(text)))
        for letters in range(size):
            border = len(put_spaces(text[: start + letters]))
            if not any(word.start() < border < word.end() for word in words):
                return letters
    return 0


def find_cut(text, copies):
    """Return what the rule keeps of a text and where it ended it, or None; try all blocks."""
    for end in range(1, len(text) + 1):
        word = text[:end].lower()
        for size in range(1, end // copies + 1):
            block = word[-size:]
            covered = size
            while covered < end and word[-covered - 1] == block[-1 - covered % size]:
                covered += 1
            if covered >= copies * size and covered >= LEAST_TOKENS:
                # The other copies begin there, at the first space if there is one.
                start = end - covered + size
                spaces = [at for at in range(size) if text[start + at].isupper()]
                skipped = spaces[0] if spaces else find_border(text[:end], start, size)
                return text[: start + skipped], end
    return None


def follow(text, copies):
    """Return the same as `find_cut`, from a `RepetitionWatch` that is asked after every token."""
    watch = RepetitionWatch(Letters(), copies)
    for end, letter in enumerate(text, 1):
        watch.push(ord(letter))
        if watch.repeated:
            return text[: end - watch.repeated], end
    return None


def test_the_rule():
    assert follow("xy" + "a" * 31, 3) is None
    assert follow("xy" + "a" * 40, 3) == ("xya", 34)
    assert follow("x" + "abcdefghijkl" * 4, 3) == ("xabcdefghijkl", 37)
    assert follow("abcdefghijkl" * 4, 4) == ("abcdefghijkl", 48)
    assert follow("Abcdefghijkl" + "abcdefghijkl" * 2, 3) == ("Abcdefghijkl", 36)
    assert follow("no9." + "Acdefghijk9." * 3, 3) == ("no9.Acdefghijk9.", 38)
    assert follow("no " + "-." * 30, 3) == ("no -.", 35)
    assert follow("abcdefghijklmnop" * 2 + "abcdefghijklmno", 3) is None
    assert follow("".join(f"abcdefghijkl{number}" for number in range(9)), 3) is None


@pytest.mark.parametrize("copies", [2, 3, 5])
def test_the_rule_is_the_one_spelled_out(copies):
    draw = random.Random(copies)
    found = 0
    for _ in range(300):
        signs = draw.choice(["abB.", "ab.", "ab;,"])
        block = "".join(draw.choices(signs, k=draw.randint(1, 24)))
        text = "".join(draw.choices("abA.", k=draw.randint(0, 9))) + block * draw.randint(1, 9)
        text += "".join(draw.choices("abA.", k=draw.randint(0, 9)))
        expected = find_cut(text, copies)
        assert follow(text, copies) == expected
        found += expected is not None
        # A stream says the same, and nothing that it has to take back.
        written = text if expected is None else text[: expected[1]]
        said = "".join(map(chr, drop_repetition(map(ord, written), Letters(), copies)))
        assert said == (text if expected is None else expected[0])
    assert 50 < found < 300


def test_a_repetition_ends_an_answer_and_leaves_the_first_copy(small):
    answer = small.ask(QUESTIONS[0], details=True, stop_repeats=3, **dictate(small))
    assert (answer.text, answer.finish) == (CUT, "repetition")
    words = len(small.tokenizer.encode(SENTENCE))
    assert len(answer.ids) <= len(small.tokenizer.encode(CUT)) + 3 * words
    pieces = small.ask(QUESTIONS[0], stream=True, stop_repeats=3, **dictate(small))
    assert pieces.answer is None
    assert "".join(pieces) == CUT
    asked = [(small, QUESTIONS[0])]
    assert ask_many(asked, stop_repeats=3, **dictate(small)) == [CUT]


def test_no_number_is_cut_in_two(small):
    """The sentence before the loop and the block of the loop end with the same digit."""
    text = "It was made in 1759." + " The tower was made in 1879." * 9
    answer = small.ask(QUESTIONS[0], stop_repeats=3, **dictate(small, text))
    assert answer == "It was made in 1759. The tower was made in 1879."


@pytest.mark.parametrize(
    ("text", "is_repeated"),
    [
        ("开上面的门。开下面的门。开上面的门。", False),
        ("рад мел. сад мел. рад мел. ", False),
        ("рад мел. " * 3, True),
        ("开上面的门。" * 3, True),
    ],
)
def test_characters_whose_bytes_are_alike_are_not_the_same(text, is_repeated):
    """In a vocabulary of bytes, the last bytes of two characters may be named by a capital and its
    small letter.
    """
    tokenizer = build_chat_tokenizer("llama3")
    watch = RepetitionWatch(tokenizer, 3)
    for token in tokenizer.encode(text, add_special_tokens=False):
        watch.push(token)
    assert bool(watch.repeated) == is_repeated


@pytest.mark.parametrize("kind", ["llama3", "llama2", "gemma2"])
@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("它建于1759年。" + "塔建于1879年。" * 9, "它建于1759年。塔建于1879年"),
        ("x=2.14;" + "y=3.14;" * 9, "x=2.14;y=3.14"),
        ("1759," + "1879," * 9, "1759,1879"),
        ("1.75|2.75," + "3.75," * 9, "1.75|2.75,3.75"),
        ("\U0001f600" + "\U0001f916\U0001f680" * 9, "\U0001f600\U0001f916\U0001f680"),
    ],
)
def test_no_number_and_no_character_is_cut_in_two_without_spaces(kind, text, kept):
    """Tokens at the end of the block, such as the last byte of a character or the last digit of a
    number, also precede its first copy.
    """
    tokenizer = build_chat_tokenizer(kind)
    watch = RepetitionWatch(tokenizer, 3)
    written = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        written.append(token)
        watch.push(token)
        if watch.repeated:
            break
    said = list(drop_repetition(written, tokenizer, 3))
    assert len(said) == len(written) - watch.repeated
    assert tokenizer.decode(said) == kept


def test_answers_that_are_asked_in_one_batch_end_by_themselves(small):
    alone = [small.ask(question, 60) for question in QUESTIONS]
    together = small.ask(QUESTIONS, 60, stop_repeats=2)
    for whole, answer in zip(alone, together, strict=True):
        assert whole.startswith(answer)
    assert [small.ask(question, 60, stop_repeats=2) for question in QUESTIONS] == together


def test_ask_lets_answers_repeat_themselves_unless_told_otherwise(small):
    assert SamplingConfig().stop_repeats == 0 and SamplingConfig().plain
    assert not SamplingConfig(stop_repeats=3).plain
    assert SamplingFlags().stop_repeats == DEFAULT_REPEATS == 3
    answer = small.ask(QUESTIONS[0], details=True, **dictate(small))
    assert (answer.text, answer.finish) == (LOOP, "length")


def test_conversations_stop_repetitions_and_do_not_read_them_again(small):
    chat = small.chat()
    assert chat.ask(QUESTIONS[0], **dictate(small)) == CUT
    answer = chat.turns[0].answer
    assert answer.finish == "repetition"
    assert chat.columns == small.cache.restore_length + len(chat.ids())

    # The conversation is the one in which the answer had ended there.
    other = small.chat()
    ids = small.tokenizer.decode(answer.ids)
    other.ask(QUESTIONS[0], **dictate(small, ids, stop_repeats=0))
    assert other.turns[0].answer.ids == answer.ids and other.columns == chat.columns
    assert chat.ask(QUESTIONS[1], 12) == other.ask(QUESTIONS[1], 12)

    assert "".join(small.chat().ask(QUESTIONS[0], stream=True, **dictate(small))) == CUT
    assert small.chat().ask(QUESTIONS[0], stop_repeats=0, **dictate(small)) == LOOP
    plain = SamplingConfig(processors=dictate(small)["processors"])
    assert small.chat().ask(QUESTIONS[0], len(plain.processors[0].ids), config=plain) == LOOP


def test_a_saved_conversation_knows_why_an_answer_ended(small, tmp_path):
    chat = small.chat()
    chat.ask(QUESTIONS[0], **dictate(small))
    chat.save(tmp_path / "talk.json")
    again = Chat.load(tmp_path / "talk.json", small)
    assert again.turns[0].answer == chat.turns[0].answer
    assert again.columns == chat.columns


def test_a_stop_string_before_a_repetition_ends_the_answer(small):
    answer = small.ask(QUESTIONS[0], details=True, stop=" there", stop_repeats=3, **dictate(small))
    assert (answer.text, answer.finish) == (CUT.partition(" there")[0], "stop")


@pytest.mark.slow
def test_answers_that_match_as_a_whole_are_not_cut(small):
    pytest.importorskip("llguidance")
    regex = "(ab){40}"
    assert small.ask(QUESTIONS[0], 100, regex=regex, stop_repeats=2) == "ab" * 40
    assert "".join(small.chat().ask(QUESTIONS[0], 100, stream=True, regex=regex)) == "ab" * 40


@pytest.mark.parametrize("wrong", [1, -1, 2.5, True, 1001])
def test_a_wrong_number_of_copies_is_refused(small, wrong):
    with pytest.raises(RestoreKVError, match="stop_repeats must be 0, or a number of copies"):
        small.ask(QUESTIONS[0], stop_repeats=wrong)
    with pytest.raises(RestoreKVError, match="no_repeat_ngram_size; stop_repeats ends"):
        small.ask(QUESTIONS[0], no_repeat_ngram_size=3)
