"""A sample of the campaign against the command line, tests/hostile/commands.py."""

import random

import pytest

from tests.helpers.cli_world import World, build_world
from tests.hostile.command_kinds import Kind
from tests.hostile.commands import GROUPS, is_here, judge

SEED, SAMPLE = 15, {"values": 12, "types": 12, "files": 12, "known": 0, "processes": 6}
ALWAYS = (
    "ask who\\udcff\\udcfe?",
    "compress --device meta",
    "compress --offset 4611686018427387904",
    "text: fifo",
    "data to train on: deep_json",
    "data to train on: surrogates",
    "data to train on: long_number",
    "inspect to an ASCII terminal",
    "inspect without stdout",
    "text from a closed stdin",
    "compress ended by SIGTERM",
    "compress ended by SIGHUP",
)


def sample() -> list[Kind]:
    rng, chosen = random.Random(SEED), []
    for group, make in GROUPS.items():
        kinds = [kind for kind in make() if is_here(kind.name)]
        chosen += rng.sample(kinds, SAMPLE[group]) + [kind for kind in kinds if kind.name in ALWAYS]
    return list({kind.name: kind for kind in chosen}.values())


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_tokenizer) -> World:
    return build_world(tmp_path_factory.mktemp("world"), tiny_tokenizer)


def test_there_are_enough_kinds():
    assert sum(1 for make in GROUPS.values() for _ in make()) > 600
    assert {kind.name for kind in sample()} >= set(ALWAYS)


@pytest.mark.parametrize("kind", sample(), ids=lambda kind: kind.name)
def test_a_bad_command_is_one_sentence(world, tmp_path, kind):
    assert judge(world, kind, tmp_path / "case") is None
