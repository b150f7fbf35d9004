"""RULER against kvpress 0.5.5's own scripts, by `make conformance`: the string match, and where a
prompt is cut.
"""

import json
import random
import string

import pytest
from transformers import AutoTokenizer

from restorekv.model.names import tiny_path
from restorekv.tasks import Question, make_benchmark
from tests.conformance.reference import scorer, script

pytestmark = pytest.mark.kvpress
pandas = pytest.importorskip(
    "pandas", reason="kvpress's scorer needs pandas; `make conformance` installs it"
)
theirs = scorer("ruler")
PAIRS = 250
TASKS = ("niah_single_1", "niah_multivalue", "vt", "cwe", "fwe", "qa_1", "qa_2")


def pair(rng):
    """A prediction that holds some of the references: whole, damaged, in other case, beside control
    characters.
    """
    alphabet = string.ascii_letters + string.digits + " -é"
    references = [
        "".join(rng.choices(alphabet, k=rng.randrange(1, 9))) for _ in range(rng.randrange(1, 11))
    ]
    pieces = []
    for reference in references:
        changed = rng.choice(("whole", "upper", "lower", "split", "cut", "left out"))
        middle = len(reference) // 2
        damaged = f"{reference[:middle]}{chr(rng.randrange(34))}{reference[middle:]}"
        forms = {
            "whole": reference,
            "upper": reference.upper(),
            "lower": reference.lower(),
            "split": damaged,
        }
        pieces.append(forms.get(changed, reference[1:] if changed == "cut" else ""))
    rng.shuffle(pieces)
    glue = rng.choice((" ", "\n", ", ", "\t", "\x00", "\x7f", "\u2028"))
    return rng.choice(("", " ", "\n\x01 ")) + glue.join(pieces) + rng.choice(
        ("", " \n", "\x1f")
    ), references


def theirs_of(task, pairs):
    predictions, answers = zip(*pairs, strict=True)
    frame = pandas.DataFrame({"task": task, "predicted_answer": predictions, "answer": answers})
    return theirs.calculate_metrics(frame)[task]["string_match"]


@pytest.mark.parametrize("task", TASKS)
def test_every_score_is_theirs(task):
    rng, ruler = random.Random(task), make_benchmark("ruler")
    pairs = [pair(rng) for _ in range(PAIRS)]
    ours = [
        ruler.score(Question("0", task, "", tuple(answers), 1), told) for told, answers in pairs
    ]
    assert [round(100 * score, 2) for score in ours] == [theirs_of(task, [each]) for each in pairs]
    assert round(100 * sum(ours) / PAIRS, 2) == theirs_of(task, pairs)
    assert 0 < sum(ours) < PAIRS and 0 in ours and 1 in ours


def test_prompts_are_cut_where_kvpress_cuts_them(tmp_path):
    """Its script that makes the hub's data set reads our prompts as RULER's files."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_path("model"))
    ours = {}
    for sample in make_benchmark("ruler:length=1500,per_task=3").load_samples(tokenizer, "kvpress"):
        (asked,) = sample.questions
        prompt = sample.context + asked.text + asked.answer_prefix
        row = (
            sample.context,
            asked.text,
            asked.answer_prefix,
            list(asked.answers),
            asked.max_new_tokens,
        )
        ours[prompt] = (asked.task, *row)
        file = tmp_path / "1500" / asked.task / "validation.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as stream:
            stream.write(json.dumps({"input": prompt, "outputs": asked.answers}) + "\n")
    frame = script("ruler", "create_huggingface_dataset").get_dataframe(tmp_path / "1500")
    columns = ("task", "context", "question", "answer_prefix", "answer", "max_new_tokens")
    found = {
        row[1] + row[2] + row[3]: row
        for row in zip(*(frame[name] for name in columns), strict=True)
    }
    assert found == ours and len(found) == 39
