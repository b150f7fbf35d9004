"""JSON answers: no runs of spaces or blank lines, and schemas of pydantic classes."""

import json
import sys
from typing import Annotated, Literal

import numpy
import pytest
import torch

from restorekv import compress, load_model
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.generation.constraint import Constraint, close_objects, refuse_leaking_bounds
from restorekv.generation.sampling import SamplingConfig
from tests.helpers.models import build_model, build_tokenizer

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
    """Return whether an answer may be this text, token by token."""
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


def test_a_pydantic_class_is_its_schema():
    pydantic = pytest.importorskip("pydantic")

    class House(pydantic.BaseModel):
        open: bool
        codes: list[int]

    assert SamplingConfig.make(json_schema=House) == SamplingConfig(
        json_schema=House.model_json_schema()
    )
    model, tokenizer = load_model("tiny")
    text = "The code of the red house is seven. The blue house is open. " * 8
    small = compress(model, tokenizer, text, ratio=0.5, evictor="knorm", adapter=None)
    question = "Which house is open?"
    answer = small.ask(question, 60, json_schema=House)
    assert answer == small.ask(question, 60, json_schema=House.model_json_schema())
    assert answer.startswith("{")
    with pytest.warns(RestoreKVWarning, match="An answer reached max_new_tokens before the end"):
        assert small.ask(question, 4, json_schema=House).startswith("{")
    with pytest.warns(RestoreKVWarning, match="3 answers reached max_new_tokens .* its regex"):
        small.ask([question, question, question], 2, regex=r"(a|b){40}")
    with pytest.warns(RestoreKVWarning, match="cannot be parsed"):
        small.chat().ask(question, 4, json_schema=House)
    with pytest.raises(RestoreKVError, match="not the class int; derive"):
        small.ask(question, json_schema=int)


def test_what_may_come_next_is_what_llguidance_says(tokenizer, monkeypatch):
    """The masks are made without llguidance.torch, which would stop a server for seconds while
    torch.compile runs.
    """
    monkeypatch.setitem(sys.modules, "llguidance.torch", None)
    masks = pytest.importorskip("llguidance.numpy")
    constraint = Constraint.make(tokenizer, SCHEMA, None, {tokenizer.eos_token_id})
    assert constraint is not None
    size = len(tokenizer)
    # A model may have more ids than its tokenizer; those may never come.
    logits = torch.randn(1, size + 3)
    for token in tokenizer('{"open": true, "cod', add_special_tokens=False).input_ids:
        bits = masks.allocate_token_bitmask(1, size)
        masks.fill_next_token_bitmask(constraint.matcher, bits)
        expected = logits.numpy().copy()
        expected[:, size:] = -numpy.inf
        masks.apply_token_bitmask_inplace(expected[:, :size], bits)
        assert torch.equal(constraint.allow(logits), torch.from_numpy(expected))
        constraint.take(token)


def test_objects_have_no_other_properties():
    """A small model would invent properties until the limit."""
    inner = {"type": "object", "properties": {"properties": {"type": "string"}}}
    schema = {
        "type": "object",
        "properties": {"a": inner, "b": {"enum": [{"properties": {}}]}, "c": {"$ref": "#/$defs/d"}},
        "$defs": {"d": {"properties": {"e": {}}, "additionalProperties": True}},
    }
    closed = {
        "type": "object",
        "properties": {
            "a": {**inner, "additionalProperties": False},
            "b": {"enum": [{"properties": {}}]},
            "c": {"$ref": "#/$defs/d"},
        },
        "$defs": {"d": {"properties": {"e": {}}, "additionalProperties": True}},
        "additionalProperties": False,
    }
    assert close_objects(schema) == close_objects(json.dumps(schema))
    assert json.loads(close_objects(schema)) == closed
    # Each of two that hold at once would refuse what the other names.
    joined = {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    refused = {"not": {"properties": {"a": {}}}}
    beside = {"$ref": "#/$defs/d", "properties": {"a": {}}}
    one_of = {"properties": {"a": {}}, "oneOf": [{"properties": {"b": {}}, "required": ["b"]}]}
    undescribed = {"properties": {"a": {}}, "required": ["a", "b"]}
    others = (joined, {"anyOf": [joined]}, {"type": "object"}, refused, beside, one_of, undescribed)
    for other in others:
        assert json.loads(close_objects(other)) == other
    assert close_objects("{no JSON") == "{no JSON"


@pytest.mark.parametrize(
    "name",
    ["if", "not", "allOf", "anyOf", "oneOf", "$ref", "const", "enum", "default", "properties"],
)
def test_a_property_may_have_the_name_of_a_keyword(tokenizer, name):
    """The schema of such a property is closed like any other."""
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema = {"type": "object", "properties": {name: inner}, "required": [name]}
    closed = {**inner, "additionalProperties": False}
    assert json.loads(close_objects(schema)) == {
        "type": "object",
        "properties": {name: closed},
        "required": [name],
        "additionalProperties": False,
    }
    by_pattern = {"patternProperties": {name: inner}, "$defs": {name: inner}}
    assert json.loads(close_objects(by_pattern)) == {
        "patternProperties": {name: closed},
        "$defs": {name: closed},
    }
    assert is_allowed(tokenizer, json.dumps({name: {"a": 1}}), schema)
    assert not is_allowed(tokenizer, json.dumps({name: {"a": 1, "b": 2}}), schema)
    assert not is_allowed(tokenizer, json.dumps({name: {"a": 1}, "b": 2}), schema)


@pytest.mark.parametrize("joined", [{"$ref": "#/$defs/d"}, {"anyOf": [{"$ref": "#/$defs/d"}]}])
def test_what_must_be_there_may_be_described_elsewhere(tokenizer, joined):
    """If `d` were closed, it would refuse the name that is required outside of it."""
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema = {**joined, "required": ["b"], "$defs": {"d": inner}}
    assert is_allowed(tokenizer, '{"a": 1, "b": [2]}', schema)


def test_values_of_a_schema_are_no_schemas():
    inner = {"type": "object", "properties": {"a": {}}}
    joined = {"not": {}, "allOf": [{}, {}]}
    schema = {"properties": {"x": inner, "y": {"enum": [joined]}, "z": {"const": joined}}}
    closed = json.loads(close_objects(schema))
    assert closed["properties"]["x"] == {**inner, "additionalProperties": False}
    assert closed["properties"]["y"] == {"enum": [joined]}


def test_a_one_of_is_not_made_exclusive_by_closing_it(tokenizer):
    """{"a": 1} matches both schemas as they were given, since objects may have other names."""
    first = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    second = {"type": "object", "properties": {"b": {"const": "x"}}}
    schema = {"oneOf": [first, second]}
    assert json.loads(close_objects(schema)) == schema
    for wrong in (schema, {"oneOf": [{"type": "integer"}, {"type": "number"}]}):
        with pytest.raises(RestoreKVError, match="use anyOf"):
            is_allowed(tokenizer, "{", wrong)
    assert is_allowed(tokenizer, '{"a": 1}', {"anyOf": [first, second]})


def test_alternatives_of_pydantic_are_closed(tokenizer):
    """Alternatives are closed if they differ in a constant."""
    pydantic = pytest.importorskip("pydantic")

    class Red(pydantic.BaseModel):
        kind: Literal["red"]
        code: int

    class Blue(pydantic.BaseModel):
        kind: Literal["blue"]
        owner: str

    class House(pydantic.BaseModel):
        door: Annotated[Red | Blue, pydantic.Field(discriminator="kind")]

    schema = House.model_json_schema()
    assert '"additionalProperties": false' in close_objects(schema)
    text = '{"door": {"kind": "red", "code": 7}}'
    assert is_allowed(tokenizer, text, schema)
    assert not is_allowed(tokenizer, text.replace("7", '7, "b": 1'), schema)


def test_an_answer_has_the_fields_of_its_class():
    """Also if a random model would add others."""
    tokenizer = build_tokenizer()
    small = compress(build_model("llama"), tokenizer, "Seven. " * 40, ratio=0.5, adapter=None)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
    }
    for seed in range(6):
        answer = small.ask("Which?", 60, json_schema=schema, temperature=1.5, seed=seed)
        assert set(json.loads(answer)) == {"a"}


def test_tokens_that_are_added_later_are_known():
    """llguidance's table of the vocabulary is made again, because the old one lacks the tokens."""
    tokenizer = load_model("tiny")[1]
    stops = {tokenizer.eos_token_id}
    Constraint.make(tokenizer, None, "zyx", stops)
    tokenizer.add_tokens(["zyx"])
    constraint = Constraint.make(tokenizer, None, "zyx", stops)
    logits = constraint.allow(torch.zeros(1, len(tokenizer)))
    assert logits[0, len(tokenizer) - 1] == 0


def accepts(tokenizer, text: str, schema: dict) -> bool:
    """Return whether this text may be a whole answer."""
    constraint = Constraint.make(tokenizer, schema, None, {tokenizer.eos_token_id})
    assert constraint is not None
    ids = tokenizer(text, add_special_tokens=False).input_ids
    taken = constraint.matcher.try_consume_tokens(ids)
    return taken == len(ids) and constraint.matcher.is_accepting()


@pytest.mark.parametrize(
    "bounds, keyword",
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum"),
        ({"exclusiveMinimum": 7.0, "exclusiveMaximum": 7.25}, "exclusiveMinimum"),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, "exclusiveMaximum"),
        ({"exclusiveMaximum": -3, "exclusiveMinimum": -3.5}, "exclusiveMaximum"),
    ],
)
def test_an_excluded_number_that_llguidance_would_accept_is_refused(tokenizer, bounds, keyword):
    schema = {"type": "object", "properties": {"a": {"type": "number", **bounds}}}
    sentence = f"the keyword {keyword} cannot be enforced if .*; use {keyword[9:].lower()}"
    with pytest.raises(RestoreKVError, match=sentence):
        is_allowed(tokenizer, "{", schema)


SHARES = {"$defs": {"small": {"maximum": 0.5}, "a/b": {"$ref": "#/$defs/small"}}}


@pytest.mark.parametrize(
    "bounds",
    [
        {"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]},
        {"exclusiveMinimum": 0, "allOf": [{"type": "number", "maximum": 0.5}]},
        {"exclusiveMinimum": 0, "$ref": "#/$defs/small"},
        {"exclusiveMinimum": 0, "$ref": "#/$defs/a~1b"},
        {"exclusiveMinimum": 0, "anyOf": [{"type": "number", "maximum": 0.5}]},
        {"exclusiveMinimum": 0, "anyOf": [{"allOf": [{"$ref": "#/$defs/small"}]}]},
    ],
)
def test_bounds_of_one_number_may_be_in_several_schemas(tokenizer, bounds):
    schema = {"type": "object", "properties": {"a": {"type": "number", **bounds}}, **SHARES}
    with pytest.raises(RestoreKVError, match="exclusiveMinimum cannot be enforced"):
        is_allowed(tokenizer, "{", schema)


def test_bounds_of_different_numbers_do_not_meet(tokenizer):
    """Nor do those of alternatives, and a reference that leads back to itself ends."""
    positive = {"type": "number", "exclusiveMinimum": 0}
    small = {"type": "number", "maximum": 0.5, "exclusiveMinimum": -5}
    schema = {
        "type": "object",
        "properties": {
            "a": positive,
            "b": small,
            "c": {"anyOf": [{**positive, "maximum": 10}, small]},
            "d": {"$ref": "#"},
        },
    }
    assert is_allowed(tokenizer, '{"a":1}', schema)


def test_many_alternatives_are_joined_rather_than_multiplied():
    choices = [{"maximum": number} for number in range(2, 40)]
    refuse_leaking_bounds({"allOf": [{"anyOf": choices} for _ in range(40)]})
    shared = {"$defs": {"0": {"maximum": 3}}}
    for number in range(1, 60):
        twice = [{"$ref": f"#/$defs/{number - 1}"}] * 2
        shared["$defs"][str(number)] = {"allOf": twice}
    refuse_leaking_bounds({**shared, "$ref": "#/$defs/59"})


@pytest.mark.parametrize(
    "bounds, holds",
    [
        ({"exclusiveMinimum": 0}, lambda x: x > 0),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, lambda x: 0 < x < 1),
        ({"exclusiveMinimum": 0, "maximum": 1}, lambda x: 0 < x <= 1),
        ({"exclusiveMinimum": 0.5, "maximum": 0.75}, lambda x: 0.5 < x <= 0.75),
        ({"exclusiveMaximum": 0, "minimum": -1}, lambda x: -1 <= x < 0),
        ({"exclusiveMinimum": -1, "maximum": -0.5}, lambda x: -1 < x <= -0.5),
        ({"minimum": 0, "exclusiveMaximum": 0.5}, lambda x: 0 <= x < 0.5),
        ({"exclusiveMinimum": -0.5, "exclusiveMaximum": 0.5}, lambda x: -0.5 < x < 0.5),
    ],
)
def test_numbers_are_within_their_bounds(tokenizer, bounds, holds):
    for text in ("-1", "-0.75", "-0.5", "-0.25", "0", "0.25", "0.5", "0.75", "1", "2.5"):
        is_accepted = accepts(tokenizer, text, {"type": "number", **bounds})
        assert is_accepted == holds(float(text)), text


@pytest.mark.parametrize("as_text", [False, True])
def test_a_schema_that_is_nested_too_deeply_is_refused(tokenizer, as_text):
    schema = {"type": "string"}
    for _ in range(20_000):
        schema = {"items": schema}
    if as_text:
        schema = '{"items":' * 20_000 + "{}" + "}" * 20_000
    with pytest.raises(RestoreKVError, match="cannot be used: its parts are nested too deeply"):
        Constraint.make(tokenizer, schema, None, {tokenizer.eos_token_id})


def chain_of_references(count):
    """A schema in which each part is named by the one before."""
    parts = {f"part{number}": {"$ref": f"#/$defs/part{number + 1}"} for number in range(count)}
    parts[f"part{count}"] = {"type": "number"}
    return {"$ref": "#/$defs/part0", "$defs": parts}


@pytest.mark.parametrize("count", [300, 3000])
def test_a_schema_of_too_many_references_is_refused(tiny_tokenizer, count):
    """llguidance followed three thousand until the stack was full, which ended the process."""
    schema = chain_of_references(count)
    for given in (schema, json.dumps(schema)):
        with pytest.raises(RestoreKVError, match="refers to more than 250 of its parts"):
            Constraint.make(tiny_tokenizer, given, None, {2})
        with pytest.raises(RestoreKVError, match="refers to more than 250 of its parts"):
            refuse_leaking_bounds(given)


def test_many_alternatives_are_not_multiplied():
    """These were 900 times 900,000 sets of bounds: hours."""
    several = [{"minimum": number} for number in range(900)]
    again = [{"$ref": "#/$defs/several"} for _ in range(1000)]
    whole = {"$defs": {"several": {"anyOf": several}}, "allOf": [{"anyOf": several}]}
    refuse_leaking_bounds({**whole, "anyOf": again})
    leaking = [*several, {"exclusiveMinimum": 0}]
    with pytest.raises(RestoreKVError, match="exclusiveMinimum cannot be enforced"):
        refuse_leaking_bounds({"allOf": [{"anyOf": leaking}, {"anyOf": several}], "maximum": 0.5})
