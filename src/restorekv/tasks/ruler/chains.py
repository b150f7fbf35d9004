"""Variable tracking, RULER's vt (arXiv 2404.06654, section 3; NVIDIA/RULER, variable_tracking.py): one chain of four
hops in noise, after a worked example with a chain of its own.
"""

import string
from collections.abc import Callable
from itertools import pairwise
from random import Random

from restorekv.tasks.ruler.draft import Draft, Task, answer_tokens, most_units
from restorekv.tasks.ruler.needles import NOISE

PARTS = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{text}\n",
    "Question: Find all variables that are assigned the value {value} in the text above. ",
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are: ",
)
HOPS = 4
EXAMPLE_TOKENS = 500  # RULER's length of the example, its answer's 30 tokens included
EXAMPLE_NOISES = 10  # what RULER's search, in steps of five, returns with most tokenizers


def chains(length: int, tokens: Callable[[str], int]) -> Task:
    """Units are noises. The example has at most 500 tokens, or a quarter of the length, and at least one noise."""

    def size(noises: int) -> int:
        return tokens(example(noises, Random("example"))) + answer_tokens("vt")

    limit = min(EXAMPLE_TOKENS, length // 4)
    noises = most_units(size, limit, 1, EXAMPLE_NOISES) if size(1) <= limit else 1

    def draft(units: int, rng: Random) -> Draft:
        solved = example(noises, rng)
        task = chain(5, units, rng)
        return task._replace(context=f"{solved}\n\n\n\n{task.context}")

    return Task(draft)


def example(noises: int, rng: Random) -> str:
    """Returns a solved task with names of three letters."""
    task = chain(3, noises, rng)
    return f"{task.text} {' '.join(task.answers)}"


def chain(letters: int, noises: int, rng: Random) -> Draft:
    """Returns one chain among noises; if the noises are few, their sentences are used one by one, as RULER does."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in {*names, "VAR"}:
            names.append(name)
    value = str(rng.randrange(10000, 99999))
    links = [f"VAR {names[0]} = {value}", *(f"VAR {new} = VAR {old} " for old, new in pairwise(names))]
    lines = [NOISE + "\n"] * noises
    if noises <= len(links):
        pieces = [piece for line in lines for piece in line.split(".")]
        lines = [f"{piece}." if piece.strip() else piece for piece in pieces]
    for inserted, place in enumerate(sorted(rng.sample(range(len(lines)), len(links)))):
        lines.insert(place + inserted, links[inserted])
    text = " ".join(lines).replace(". \n", ".\n")
    return Draft(*(part.format(text=text, value=value, count=len(names)) for part in PARTS), tuple(names))
