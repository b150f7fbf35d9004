"""Our results in kvpress's layout against kvpress 0.5.5's own evaluation: settings, names of
folders, scorers.
"""

import ast
import dataclasses
import importlib
import json
import random
import sys
from unittest.mock import MagicMock

import pytest
import yaml

from restorekv.evaluation.grid import Cell
from restorekv.evaluation.kvpress_layout import export_kvpress
from restorekv.tasks import Question
from restorekv.tasks.longbench import TASKS as LONGBENCH
from restorekv.tasks.ruler.benchmark import TASKS as RULER
from tests.conformance import reference
from tests.helpers.grid_results import finished

pytest.importorskip(
    "kvpress", reason="kvpress is not installed; `make conformance` installs and uses it"
)
pytestmark = pytest.mark.kvpress

WORDS = "the red House of 7 yes, no. 42 Paragraph 3 x = 1; ünï".split(" ")
# Of other benchmarks.
UNUSED = ("nltk", "nltk.translate.bleu_score", "nltk.translate.meteor_score", "bert_score")


@pytest.fixture(scope="module")
def evaluate():
    """kvpress's evaluate.py."""
    reference.scorer("ruler")  # skips where its folder is missing
    folder = str(reference.evaluation())
    before = dict(sys.modules)
    for name in filter(is_theirs, before):  # our own benchmarks/
        del sys.modules[name]
    sys.path.insert(0, folder)
    sys.modules.update({name: MagicMock() for name in UNUSED if name not in sys.modules})
    yield importlib.import_module("evaluate")
    sys.path.remove(folder)
    for name in [
        name for name in sys.modules if is_theirs(name) or (name in UNUSED and name not in before)
    ]:
        del sys.modules[name]
    sys.modules.update({name: module for name, module in before.items() if is_theirs(name)})


def is_theirs(name: str) -> bool:
    """Returns whether kvpress's evaluation has a module of this name."""
    return name.split(".")[0] in ("evaluate", "evaluate_registry", "benchmarks")


def asked(tasks, classes=()):
    """Twenty questions of every task, some answered rightly, with control characters between."""
    draw = random.Random("layout")
    for task in tasks:
        for turn in range(20):
            said = " ".join(draw.choices(WORDS, k=6))
            answers = tuple(
                " ".join(draw.choices(WORDS, k=draw.choice([1, 2])))
                for _ in range(draw.choice([1, 3]))
            )
            answers = (f"Paragraph {turn % 5}",) if task == "passage_retrieval_en" else answers
            text = said + draw.choice(["", "\n", "\x07 ", "\nmore"]) + draw.choice(["", answers[0]])
            yield (
                Question(
                    f"{task}-{turn}",
                    task,
                    "who?",
                    answers,
                    32,
                    "Answer:",
                    {"classes": list(classes)},
                ),
                text,
            )


def table(place):
    """predictions.csv as kvpress's scorers take it: lists for answers."""
    pandas = pytest.importorskip("pandas")
    found = pandas.read_csv(place / "predictions.csv", keep_default_na=False)
    for column in {"answer", "answers"} & set(found):
        found[column] = found[column].map(ast.literal_eval)
    return found


def test_its_ruler_scorer_gives_our_metrics(evaluate, tmp_path):
    finished(
        tmp_path,
        Cell("org/m", "ruler:source=hub", "kvzip", "0.05"),
        list(asked(RULER)),
        data="simonjegou/ruler",
    )
    (place,) = export_kvpress(tmp_path)
    metrics = evaluate.SCORER_REGISTRY["ruler"](table(place))
    assert metrics == json.loads((place / "metrics.json").read_text()) and len(metrics) == 13
    assert len({told["string_match"] for told in metrics.values()}) > 5


def test_its_longbench_scorer_gives_our_metrics(evaluate, tmp_path):
    classes = WORDS[:4]
    finished(tmp_path, Cell("org/m", "longbench", "kvzip", "0.05"), list(asked(LONGBENCH, classes)))
    places = export_kvpress(tmp_path)
    assert len(places) == 16
    for place in places:
        found = table(place)
        found["all_classes"] = [classes] * len(found)
        metrics = evaluate.SCORER_REGISTRY["longbench"](found)
        assert metrics == pytest.approx(
            json.loads((place / "metrics.json").read_text()), abs=0.011
        ), place.name


@pytest.mark.parametrize(
    ("cell", "known"),
    [
        (Cell.full_cache(model="org/m", benchmark="ruler:source=hub"), True),
        (Cell("org/m", "ruler:source=hub", "kvzip", "0.125"), True),
        (Cell("org/m", "ruler:source=hub", "kvzip+", "1/3", adapter="a", max_context=4000), True),
        (Cell("org/m", "ruler:source=hub", "snapkv", "0.1"), False),
    ],
)
def test_its_settings_take_ours(evaluate, tmp_path, cell, known):
    finished(tmp_path, cell, list(asked(RULER[:3])), data="simonjegou/ruler")
    (place,) = export_kvpress(tmp_path)
    config = yaml.safe_load((place / "config.yaml").read_text())
    if not known:
        with pytest.raises(AssertionError, match="not found in PRESS_REGISTRY"):
            evaluate.EvaluationConfig(**config)
        return
    theirs = evaluate.EvaluationConfig(**config)
    assert theirs.get_results_dir(tmp_path / "theirs").name == place.name
    theirs.save_config(tmp_path / "config.yaml")
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert saved.pop("trust_remote_code") is False, "the leaderboard does not know it"
    assert saved == config
    fields = {field.name for field in dataclasses.fields(evaluate.EvaluationConfig)}
    assert fields - set(config) == {"trust_remote_code", "head_compression_ratio", "threshold"}
