"""JSON answers have no runs of spaces or blank lines between their parts."""

import json

import pytest
import torch

from restorekv import load_model
from restorekv.generation.constraint import Constraint

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"open": {"type": "boolean"}, "codes": {"type": "array"}},
    "required": ["open", "codes"],
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_model("tiny")[1]


def is_allowed(tokenizer, text: str, schema: dict) -> bool:
    """Whether an answer may be this text, token by token."""
    constraint = Constraint.make(tokenizer, schema, None, {tokenizer.eos_token_id})
    assert constraint is not None
    for token in tokenizer(text, add_special_tokens=False).input_ids:
        logits = constraint.allow(torch.zeros(1, len(tokenizer)))
        if logits[0, token] == -torch.inf:
            return False
        constraint.take(token)
    return True


@pytest.mark.parametrize(
    "text",
    [
        '{"open":true,"codes":[1,2]}',
        '{"open": true, "codes": [1, 2]}',
        json.dumps({"open": False, "codes": [1, {"a": [2]}]}, indent=2),
        json.dumps({"open": False, "codes": [1, {"a": [2]}]}, indent=4),
    ],
)
def test_json_as_people_write_it_is_allowed(tokenizer, text):
    assert is_allowed(tokenizer, text, SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        '{\n\n"open": true, "codes": []}',
        '{"open":  true, "codes": []}',
        '{"open": true,\n \n"codes": []}',
        '{"open": true,\t"codes": []}',
    ],
)
def test_runs_of_spaces_and_lines_are_not(tokenizer, text):
    json.loads(text)
    assert not is_allowed(tokenizer, text, SCHEMA)


def test_a_schema_may_choose_its_own_spaces(tokenizer):
    text = '{\n\n"open": true, "codes": []}'
    own = SCHEMA | {"x-guidance": {"whitespace_pattern": r"[ \n]*"}}
    assert is_allowed(tokenizer, text, own)
