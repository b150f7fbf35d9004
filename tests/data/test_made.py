"""Made documents: every size can be asked about, and a question has one answer."""

import random
import re

import pytest

from restorekv.data.made import FORMS, ask_table, draw_table, make_diary, make_log

SEEDS = range(150)


@pytest.mark.parametrize("form", FORMS)
def test_every_size_has_questions(form):
    for characters in (0, 1, 20, 300):
        for seed in range(20):
            document = form(random.Random(seed), characters)
            assert document.text
            assert len(document.questions) >= 3


def test_a_value_of_several_rows_is_not_asked_for_its_row():
    asked = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        table = draw_table(rng, 2000)
        for _, question in ask_table(table, rng):
            found = re.fullmatch(rf"Which {table.key} has the (\w+) (.+)\?", question)
            if found:
                column = table.columns.index(found[1])
                assert [row[column] for row in table.rows].count(found[2]) == 1
                asked += 1
    assert asked > 20


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (make_log, r'When did (?P<service>\w+) report "(?P<event>.+)"\?'),
        (make_diary, r'On which date does the diary say "(?P<event>.+)"\?'),
    ],
)
def test_what_happened_twice_is_not_asked_for_its_time(form, pattern):
    asked = 0
    for seed in SEEDS:
        document = form(random.Random(seed), 40_000 if form is make_log else 8000)
        for _, question in document.questions:
            found = re.fullmatch(pattern, question)
            if found:
                named = found.groupdict()
                service = f"[{named['service']}] " if "service" in named else ": "
                ends = service + named["event"]
                assert sum(line.endswith(ends) for line in document.text.splitlines()) == 1
                asked += 1
    assert asked > 20
