"""Synthetic documents in the forms of structured data: tables, settings, logs, diaries.

Questions about such texts look up single values, which prose seldom has. Every document is drawn
from a seed. Its values cannot be guessed, and its questions ask for single cells, whole rows and
columns. No template, word list or number format is one of RULER's: no number has seven digits, and
there are no UUIDs.
"""

import csv
import io
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from restorekv.data.passages import MONTHS, NAMES, OWNED, PLACES, WORDS

MADE_LICENSE = "cc0-1.0"
LOOKUP = "lookup"
ROW = "row"
COLUMN = "column"
MAX_REPEATED_NAMES = 50  # a table ends after this many draws of names that it already has
MADE_KINDS = (LOOKUP, ROW, COLUMN)
CHARACTERS_PER_TOKEN = 1.9  # of such texts, roughly; only the length of a document depends on it
TOWNS = (
    "Aldbury",
    "Brennik",
    "Corvale",
    "Dunmore",
    "Eskholm",
    "Farrow",
    "Galston",
    "Hexley",
    "Ivrea",
    "Jarnow",
    "Kelso",
    "Lomond",
    "Marwick",
    "Norden",
    "Orsova",
    "Penrith",
    "Quillan",
    "Rosser",
    "Skagen",
    "Tolmin",
    "Ulster",
    "Varna",
)
GOODS = (
    "copper wire",
    "oak boards",
    "rye flour",
    "lamp oil",
    "wool blankets",
    "glass jars",
    "steel bolts",
    "roof tiles",
    "paper reels",
    "dried apples",
    "hemp rope",
    "candles",
    "brass hinges",
    "linen thread",
    "clay pipes",
    "salt bags",
)
SERVICES = (
    "auth",
    "billing",
    "cache",
    "gateway",
    "mailer",
    "indexer",
    "scheduler",
    "search",
    "storage",
    "webhook",
)
EVENTS = (
    "connection reset by {name}",
    "finished job {code} in {small} ms",
    "retrying upload of {word}.bin",
    "user {name} changed the limit to {number}",
    "disk {word} is {small} % full",
    "loaded {number} rows from {word}",
    "token {code} expired",
    "started worker {small}",
    "dropped message {code}",
    "checksum of {word} is {code}",
)


@dataclass(frozen=True)
class MadeDocument:
    """A text and the questions that can be asked about it, as pairs of kind and question."""

    text: str
    questions: list[tuple[str, str]]


@dataclass(frozen=True)
class MadeTable:
    """Rows of values. The first column identifies the row, and `key` is its name."""

    key: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def make_document(rng: random.Random, tokens: int) -> MadeDocument:
    """Return a document of roughly that many tokens, in a random one of FORMS."""
    characters = int(tokens * CHARACTERS_PER_TOKEN)
    form = rng.choice(FORMS)
    return form(rng, characters)


def draw_number(rng: random.Random) -> str:
    """Draw a number of 2 to 6 or of 8 digits."""
    digits = rng.choice((2, 3, 4, 5, 6, 8))
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def draw_code(rng: random.Random) -> str:
    """Draw letters and digits as on a label."""
    letters = "".join(rng.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(2, 5)))
    return rng.choice(
        (f"{letters}-{digits}", f"{letters}{digits}", f"{digits}{letters}", f"{letters}/{digits}")
    )


def draw_date(rng: random.Random) -> str:
    """Draw a date in one of three notations."""
    return draw_day(rng)[1]


def draw_day(rng: random.Random) -> tuple[tuple[int, int, int], str]:
    """Draw a day; return its year, month and day, and the date in one of three notations."""
    day = rng.randint(1, 28)
    month = rng.randint(1, 12)
    year = rng.randint(1850, 2060)
    month_name = MONTHS[month - 1]
    date = rng.choice(
        (f"{year}-{month:02}-{day:02}", f"{day} {month_name} {year}", f"{month_name} {day}, {year}")
    )
    return (year, month, day), date


def draw_flag(rng: random.Random) -> str:
    return rng.choice(("true", "false"))


def draw_time(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"


def draw_price(rng: random.Random) -> str:
    return f"{rng.randint(1, 999)}.{rng.randint(0, 99):02}"


CELLS: dict[str, Callable[[random.Random], str]] = {
    "amount": draw_number,
    "badge": draw_code,
    "batch": draw_code,
    "birthday": draw_date,
    "contact": lambda rng: rng.choice(NAMES),
    "delivered": draw_date,
    "departure": draw_time,
    "destination": lambda rng: rng.choice(TOWNS),
    "extension": draw_number,
    "item": lambda rng: rng.choice(GOODS),
    "password": lambda rng: rng.choice(WORDS),
    "platform": lambda rng: str(rng.randint(1, 40)),
    "price": draw_price,
    "room": lambda rng: str(rng.randint(100, 999)),
    "serial": draw_code,
    "town": lambda rng: rng.choice(TOWNS),
    "weight": lambda rng: f"{rng.randint(1, 900)} kg",
}
KEYS: dict[str, Callable[[random.Random], str]] = {
    "person": lambda rng: rng.choice(NAMES),
    "order": draw_code,
    "train": draw_code,
    "thing": lambda rng: f"{rng.choice(NAMES)}'s {rng.choice(OWNED)}",
    "station": lambda rng: f"{rng.choice(TOWNS)} {rng.choice('ABCDEFGH')}{rng.randint(1, 99)}",
}


def draw_table(rng: random.Random, characters: int) -> MadeTable:
    """Draw a table: rows with different names, until it has that many characters."""
    key = rng.choice(list(KEYS))
    columns = rng.sample(list(CELLS), rng.randint(2, 4))
    rows: list[tuple[str, ...]] = []
    names: set[str] = set()
    size = 0
    repeats = 0
    # A long table may run out of names and ends then; even the shortest has a row to ask about.
    while not rows or (size < characters and repeats < MAX_REPEATED_NAMES):
        name = KEYS[key](rng)
        if name in names:
            repeats += 1
            continue
        names.add(name)
        row = (name, *(CELLS[column](rng) for column in columns))
        rows.append(row)
        size += sum(len(cell) + 3 for cell in row)
    return MadeTable(key, (key, *columns), rows)


def ask_table(table: MadeTable, rng: random.Random) -> list[tuple[str, str]]:
    """Return questions about cells, rows and a column of a table."""
    questions = []
    for row in rng.sample(table.rows, min(3, len(table.rows))):
        column_index = rng.randrange(1, len(table.columns))
        column = table.columns[column_index]
        value = row[column_index]
        forward = f"What is the {column} of {row[0]}?"
        backward = f"Which {table.key} has the {column} {value}?"
        question = rng.choice((forward, f"Which {column} is given for {row[0]}?", backward))
        # A value that several rows share does not identify any of them.
        if question == backward and [each[column_index] for each in table.rows].count(value) > 1:
            question = forward
        questions.append((LOOKUP, question))
    row = rng.choice(table.rows)
    questions.append((ROW, f"Give everything that is said of {row[0]}."))
    column = rng.choice(table.columns)
    questions.append((COLUMN, f"List the {column} of every row, in order."))
    return questions


def make_csv(rng: random.Random, characters: int) -> MadeDocument:
    table = draw_table(rng, characters)
    separator = rng.choice((",", ";", "\t", " | "))
    rows = (table.columns, *table.rows)
    if separator == " | ":
        text = "\n".join(separator.join(row) for row in rows)
    else:
        lines = io.StringIO()
        # Quotes a cell with the separator in it, such as a date.
        csv.writer(lines, delimiter=separator, lineterminator="\n").writerows(rows)
        text = lines.getvalue().removesuffix("\n")
    return MadeDocument(text, ask_table(table, rng))


def make_markdown_table(rng: random.Random, characters: int) -> MadeDocument:
    table = draw_table(rng, characters)
    lines = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    return MadeDocument("\n".join(lines), ask_table(table, rng))


def make_json(rng: random.Random, characters: int) -> MadeDocument:
    table = draw_table(rng, characters // 2)
    records = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    if rng.random() < 0.5:
        text = "\n".join(json.dumps(record) for record in records)
    else:
        text = json.dumps(records, indent=rng.choice((1, 2)))
    return MadeDocument(text, ask_table(table, rng))


def make_sentences(rng: random.Random, characters: int) -> MadeDocument:
    """Return a table as prose, a paragraph for each row."""
    table = draw_table(rng, characters // 2)
    paragraphs = []
    for row in table.rows:
        facts = [
            f"the {column} is {cell}"
            for column, cell in zip(table.columns[1:], row[1:], strict=True)
        ]
        rng.shuffle(facts)
        opening = rng.choice(("For {}, ", "As to {}: ", "About {} it is noted that ", "{}: "))
        paragraphs.append(opening.format(row[0]) + ", ".join(facts[:-1]) + f" and {facts[-1]}.")
    return MadeDocument(rng.choice(("\n", "\n\n", " ")).join(paragraphs), ask_table(table, rng))


def make_settings(rng: random.Random, characters: int) -> MadeDocument:
    """Return a file of settings in sections."""
    assign, section_form = rng.choice(((" = ", "[{}]"), (": ", "{}:"), ("=", "# {}")))
    values: list[tuple[str, str, str]] = []
    lines: list[str] = []
    sections: set[str] = set()
    size = 0
    # Three of the values are asked for.
    while size < characters or len(values) < 3:
        base = f"{rng.choice(SERVICES)}.{rng.choice(WORDS)}"
        section = base
        # A question about a key has one answer only if no two sections have the same name.
        while section in sections:
            section = f"{base}{rng.randint(2, 999)}"
        sections.add(section)
        lines.append(section_form.format(section))
        for key in rng.sample(WORDS, rng.randint(2, 6)):
            draw = rng.choice((draw_number, draw_code, draw_price, draw_flag))
            value = draw(rng)
            values.append((section, key, value))
            lines.append(f"{key}{assign}{value}")
        size = sum(map(len, lines))
    questions = []
    for section, key, _ in rng.sample(values, 3):
        questions.append((LOOKUP, f"What is {key} set to in {section}?"))
    section = rng.choice(values)[0]
    questions.append((ROW, f"Give all settings of {section}."))
    questions.append((COLUMN, "List the sections of these settings."))
    return MadeDocument("\n".join(lines), questions)


def make_log(rng: random.Random, characters: int) -> MadeDocument:
    """Return the log of several services."""
    minutes = rng.randint(0, 600)
    # Time, service and what it reports.
    lines: list[tuple[str, str, str]] = []
    size = 0
    # Two of the lines are asked for.
    while size < characters or len(lines) < 2:
        minutes += rng.randint(1, 4)
        stamp = f"{minutes // 60 % 24:02}:{minutes % 60:02}:{rng.randint(0, 59):02}"
        # Every field is drawn, so that the number of draws does not depend on the event.
        fields = {
            "name": rng.choice(NAMES),
            "code": draw_code(rng),
            "word": rng.choice(WORDS),
            "number": draw_number(rng),
            "small": str(rng.randint(1, 99)),
        }
        service = rng.choice(SERVICES)
        event = rng.choice(EVENTS).format(**fields)
        lines.append((stamp, service, event))
        size += len(event) + 20
    text = "\n".join(f"{stamp} [{service}] {event}" for stamp, service, event in lines)
    # In a log of more than a day a time may come up twice; it is then not asked for.
    counts = Counter(stamp for stamp, _, _ in lines)
    stamps = [stamp for stamp, _, _ in lines if counts[stamp] == 1]
    questions = [(LOOKUP, f"What happened at {stamp}?") for stamp in rng.sample(stamps, 2)]
    stamp, service, event = rng.choice(lines)
    reports = [line[1:] for line in lines]
    # What a service reported twice has no single time.
    if reports.count((service, event)) == 1:
        questions.append((LOOKUP, f'When did {service} report "{event}"?'))
    questions.append((COLUMN, f"List everything that {service} reported."))
    earlier = stamps[:-1] if stamps[-1] == lines[-1][0] else stamps
    questions.append((ROW, f"Which line comes after the one of {rng.choice(earlier)}?"))
    return MadeDocument(text, questions)


def make_diary(rng: random.Random, characters: int) -> MadeDocument:
    """Return a diary of appointments."""
    entries: list[tuple[str, str]] = []
    days: set[tuple[int, int, int]] = set()
    size = 0
    # Two of the entries are asked for.
    while size < characters or len(entries) < 2:
        day, date = draw_day(rng)
        # Compared as a day, because one day may be written in two ways.
        if day in days:
            continue
        days.add(day)
        appointment = rng.choice(
            (
                f"{rng.choice(NAMES)} hands over {rng.choice(GOODS)} at {rng.choice(PLACES)}",
                f"meet {rng.choice(NAMES)} in {rng.choice(TOWNS)} at {draw_time(rng)}",
                f"pay {draw_price(rng)} for {rng.choice(GOODS)}",
                f"call {rng.choice(NAMES)}, extension {draw_number(rng)}",
            )
        )
        entries.append((date, appointment))
        size += len(date) + len(appointment) + 3
    text = "\n".join(f"{date}: {appointment}" for date, appointment in entries)
    questions = [(LOOKUP, f"What is planned for {date}?") for date, _ in rng.sample(entries, 2)]
    appointment = rng.choice(entries)[1]
    # What is planned twice has no single date.
    if [planned for _, planned in entries].count(appointment) == 1:
        questions.append((LOOKUP, f'On which date does the diary say "{appointment}"?'))
    questions.append((COLUMN, "List the dates of the diary in order."))
    questions.append((ROW, f"Which entry follows that of {rng.choice(entries[:-1])[0]}?"))
    return MadeDocument(text, questions)


FORMS: tuple[Callable[[random.Random, int], MadeDocument], ...] = (
    make_csv,
    make_markdown_table,
    make_json,
    make_sentences,
    make_settings,
    make_log,
    make_diary,
)
