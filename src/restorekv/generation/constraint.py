"""Answers that match a JSON schema or a regular expression: llguidance says which tokens may come
next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote
from weakref import WeakKeyDictionary

import regex as regex_library
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import OptionError, RestoreKVError, import_extra, make_printable

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Allowed between the parts of a JSON answer: nothing, a space, or a line break with an indentation.
# JSON allows any run of spaces and blank lines, which a small model may continue up to the limit. A
# schema's own "x-guidance" takes precedence.
WHITESPACE = {"whitespace_pattern": r"( |\n {0,16})?"}
# Keywords that hold schemas under names that the author chose: these names are not keywords.
NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
# Keywords with values that are not schemas, whatever keys they have.
VALUES = {"const", "enum", "default", "examples", "required"}
# Keywords with the bounds of a number, and such keywords with their values.
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
Bounds = frozenset[tuple[str, float]]
MOST_ALTERNATIVES = 1000  # sets of bounds that are distinguished in one schema
# Parts of a schema that references name. llguidance follows each reference inside the one before,
# and a chain of a thousand ends the process with its stack full.
MOST_REFERENCES = 250
# What `str.strip` takes from the start of an answer: spaces of all widths, line and page breaks.
WHITE_SPACE = "".join(each for each in map(chr, range(0x3001)) if each.isspace())
# A number of repetitions in a regular expression, such as {2,5}.
COUNT = re.compile(r"\{[\d,]+\}")
# The cause in llguidance's message about a regular expression, after a drawing of the place.
CAUSE = re.compile(r"^error: (.+)$", re.MULTILINE)
# Its message about keywords of a JSON schema that it knows but cannot enforce.
KEYWORDS = re.compile(r"Unimplemented keys: \[(.*)\]")
LOOK_AROUND = "look-around, such as \\b, ^ and $ between characters, is not supported"
# llguidance's vocabularies, which take a second to make.
VOCABULARIES: WeakKeyDictionary[Tokenizer, dict[tuple[int, tuple[int, ...]], Any]] = (
    WeakKeyDictionary()
)


class Constraint:
    """The grammar of one answer, which says token by token what may come next."""

    def __init__(self, matcher: LLMatcher, size: int, ends: Sequence[int] = ()) -> None:
        # `size` counts the tokenizer's ids; a model may have more. `ends` are the EOS ids.
        self.matcher = matcher
        self.size = size
        self.ends = list(ends)

    @classmethod
    def make(
        cls, tokenizer: Tokenizer, schema: str | dict | None, regex: str | None, stop_ids: set[int]
    ) -> Self | None:
        """Return a constraint for a JSON schema or a regular expression, or None without either;
        refuse invalid ones.
        """
        if schema is None and regex is None:
            return None
        if schema is not None:
            _refuse_many_references(schema)
        llguidance = import_extra("llguidance", "constrained", "A JSON schema or regex")
        import_extra("llguidance.hf", "constrained", "A JSON schema or regex")
        if not tokenizer.is_fast:
            raise RestoreKVError(
                "json_schema and regex need a fast tokenizer; load the model with one."
            )
        own = VOCABULARIES.setdefault(tokenizer, {})
        # Some configs name an id that no token has, such as -1, so that no answer ends by itself.
        ends = tuple(sorted(each for each in stop_ids if 0 <= each < len(tokenizer)))
        if not ends and tokenizer.eos_token_id is None:
            # llguidance would take the first token of the vocabulary as the end.
            raise RestoreKVError(
                "json_schema and regex need a token that ends the answer, and this model has none; "
                "set model.generation_config.eos_token_id."
            )
        key = (len(tokenizer), ends)  # tokens may be added to a tokenizer
        if key not in own:
            own[key] = llguidance.hf.from_tokenizer(tokenizer, eos_token=list(ends) or None)
        kind = llguidance.LLMatcher
        vocabulary = own[key]
        grammar = ""
        try:
            if schema is not None:
                text = close_objects(schema)
                grammar = kind.grammar_from_json_schema(text, defaults=WHITESPACE)
            elif regex is not None:
                grammar = kind.grammar_from_regex(_allow_space(regex))
            wrong = kind.validate_grammar(grammar, vocabulary)
        except RecursionError:
            wrong = "its parts are nested too deeply"
        except (ValueError, TypeError) as error:
            wrong = str(error)
        if wrong:
            if regex is not None:
                raise _make_regex_error(regex, wrong)
            raise _make_schema_error(wrong)
        if schema is not None:
            refuse_leaking_bounds(schema)
        return cls(kind(vocabulary, grammar), vocabulary.vocab_size, ends)

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        return self.matcher.is_stopped()

    def allow(self, logits: Tensor) -> Tensor:
        """Return logits (1, V) with -inf for every token that may not come next."""
        # A byte for each token, 0 where it may not come next. llguidance.torch would do the rest
        # with torch.compile, which takes seconds when the first answer is written.
        marks = bytearray(self.matcher.compute_logit_bias())
        permitted = torch.frombuffer(marks, dtype=torch.uint8)
        # A tokenizer may have tokens that the model has no logits for.
        size = min(self.size, logits.shape[-1])
        refused = permitted[:size].to(logits.device) == 0
        allowed = logits[:, :size].masked_fill(refused, -torch.inf)
        if self.matcher.is_error() or (
            self.matcher.is_stopped() and not self.matcher.is_accepting()
        ):
            raise RestoreKVError(
                "No text matches the regular expression or JSON schema; give another one."
            )
        # An EOS id may be ordinary text, such as a line break, which the grammar has in an answer.
        early = [each for each in self.ends if each < size and marks[each]]
        if early and not self.matcher.is_accepting():
            allowed[:, early] = -torch.inf
            if int(permitted[:size].count_nonzero()) == len(early):
                raise RestoreKVError(
                    f"The regular expression or JSON schema asks for the token {early[0]} before "
                    "its end, and this token ends every answer; give another one, or set "
                    "model.generation_config.eos_token_id."
                )
        if bool(refused.all()):
            raise RestoreKVError(
                "The model has no logits for the added token that the regular expression or JSON "
                "schema asks for; call model.resize_token_embeddings(len(tokenizer)), or give "
                "another one."
            )
        return torch.nn.functional.pad(
            allowed, (0, logits.shape[-1] - allowed.shape[-1]), value=-torch.inf
        )

    def take(self, token: int) -> None:
        """Advance the grammar by a token."""
        if not self.matcher.consume_token(token):
            # The message continues with the state of the matcher, over many lines.
            why = (self.matcher.get_error() or "unknown").partition("<state>")[0]
            raise RestoreKVError(
                f"The answer left its grammar: {_shorten(why)}; give a simpler regex or schema."
            )


def close_objects(schema: str | dict[str, Any]) -> str:
    """Return a JSON schema, as JSON, in which objects have the properties that it names and no
    others.

    JSON Schema allows further properties unless the schema says otherwise, and a small model
    invents them up to the limit. Whatever matches the result also matches the given schema.

    Two kinds of schema are returned unchanged. If one value has to match several schemas, each of
    them, once closed, would refuse the properties of the others. If llguidance refuses a oneOf,
    because an answer could match two of its schemas, it would accept them once they are closed and
    exclude each other; but an answer could still match two of the given schemas.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        parsed = json.loads(text)
    except ValueError:  # llguidance will say what is wrong
        return text
    if _combines_schemas(parsed) or (_has_alternatives(parsed) and not _is_accepted(text)):
        return text
    return json.dumps(_close(parsed))


def _list_inner_schemas(schema: Any) -> list[Any]:
    """Return the schemas inside a schema, or of a list of them."""
    if isinstance(schema, list):
        return schema
    if not isinstance(schema, dict):
        return []
    inner = []
    for name, value in schema.items():
        if name in NAMED_SCHEMAS and isinstance(value, dict):
            inner.extend(value.values())
        elif name not in VALUES:
            inner.append(value)
    return inner


def _has_alternatives(schema: Any) -> bool:
    """Return whether a schema has a oneOf anywhere: a value must match exactly one of several."""
    if isinstance(schema, dict) and isinstance(schema.get("oneOf"), list):
        return True
    return any(map(_has_alternatives, _list_inner_schemas(schema)))


def _is_accepted(schema: str) -> bool:
    """Return whether llguidance accepts a JSON schema without changes."""
    try:
        matcher = import_extra("llguidance", "constrained", "A JSON schema or regex").LLMatcher
        return not matcher.validate_grammar(matcher.grammar_from_json_schema(schema))
    except (ValueError, TypeError):
        return False


def refuse_leaking_bounds(schema: str | dict[str, Any]) -> None:
    """Refuse a schema with an exclusive bound that llguidance would let through.

    That is a whole number whose other bound is less than 1 away: it would accept 0 as a number
    above 0 and at most 0.5. The other bound may be in another schema that the same value has to
    match, by allOf or $ref for example.

    Args:
        schema: A JSON schema, or its JSON.

    Raises:
        OptionError: It has such a bound, too many references, or is nested too deeply.
    """
    _refuse_many_references(schema)
    merged: dict[int, list[Bounds]] = {}
    try:
        parsed = schema if isinstance(schema, dict) else json.loads(schema)
        for each in _list_all_schemas(parsed):
            for bounds in _list_bounds(each, parsed, merged):
                _refuse_leak(bounds)
    except RecursionError as error:
        raise _make_schema_error("its parts are nested too deeply") from error


def _refuse_many_references(schema: str | dict[str, Any]) -> None:
    """Refuse a schema with references to more than MOST_REFERENCES of its parts."""
    try:
        parsed = schema if isinstance(schema, dict) else json.loads(schema)
    except (ValueError, RecursionError):  # llguidance will say what is wrong
        return
    named = set()
    for each in _list_all_schemas(parsed):
        reference = each.get("$ref") if isinstance(each, dict) else None
        if isinstance(reference, str):
            named.add(reference)
    if len(named) > MOST_REFERENCES:
        raise OptionError(
            f"The JSON schema cannot be used: it refers to more than {MOST_REFERENCES} of its "
            "parts; use fewer.",
            "json_schema",
        )


def _list_all_schemas(schema: Any) -> Iterator[Any]:
    """Yield a schema and all those inside it, at any depth."""
    unread = [schema]
    while unread:
        each = unread.pop()
        yield each
        unread += _list_inner_schemas(each)


def _refuse_leak(bounds: Bounds) -> None:
    """Refuse bounds of one value if llguidance would not enforce an exclusive one."""
    # Below 0 it compares numbers without their signs, so that the bounds change places.
    for sign, near, far in ((1, "Minimum", "Maximum"), (-1, "Maximum", "Minimum")):
        starts = [sign * value for name, value in bounds if name == f"exclusive{near}"]
        ends = [sign * value for name, value in bounds if name in (f"exclusive{far}", far.lower())]
        for start in starts:
            is_whole = start >= 0 and start % 1 == 0
            if is_whole and any(start < end < start + 1 for end in ends):
                raise OptionError(
                    f"The JSON schema cannot be used: the keyword exclusive{near} cannot be "
                    f"enforced if the other bound is less than 1 away; use {near.lower()}.",
                    "json_schema",
                )


def _list_bounds(schema: Any, root: Any, merged: dict[int, list[Bounds]]) -> list[Bounds]:
    """Return the bounds that a value has to meet to match a schema: one set for each choice among
    its alternatives.

    Args:
        schema: A schema inside `root`.
        root: The whole schema, which references name parts of.
        merged: What was found for schemas so far, by their id.
    """
    if not isinstance(schema, dict):
        return [frozenset()]
    if id(schema) in merged:
        return merged[id(schema)]
    merged[id(schema)] = [frozenset()]  # for a reference that leads back here
    own = {(name, schema[name]) for name in BOUNDS if type(schema.get(name)) in (int, float)}
    # Each part is a list of alternatives, and a value matches one of every part.
    parts = [[each] for each in _get_list(schema, "allOf")]
    parts += [_get_list(schema, name) for name in ("anyOf", "oneOf")]
    parts.append([_follow_reference(schema.get("$ref"), root)])
    found: list[Bounds] = [frozenset(own)]
    for part in filter(None, parts):
        others = [bounds for each in part for bounds in _list_bounds(each, root, merged)]
        others = list(dict.fromkeys(others))
        # Rather refuse too much than take long.
        if len(found) * len(others) > MOST_ALTERNATIVES:
            found = [frozenset().union(*found)]
            others = [frozenset().union(*others)]
        found = list(dict.fromkeys(one | other for one in found for other in others))
    merged[id(schema)] = found
    return found


def _get_list(schema: dict[str, Any], name: str) -> list[Any]:
    """Return the list that a keyword of a schema has; empty if it has none."""
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _follow_reference(reference: object, root: Any) -> Any:
    """Return the part of a schema that a reference such as "#/$defs/share" names, None if there is
    none.
    """
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    part = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
        elif isinstance(part, dict):
            part = part.get(name)
        else:
            return None
    return part


def _combines_schemas(schema: Any) -> bool:
    """Return whether, anywhere in a schema, one value must match several schemas, or must not match
    one.
    """
    inner = _list_inner_schemas(schema)
    if not isinstance(schema, dict):
        return any(map(_combines_schemas, inner))
    joined = schema.get("allOf")
    several = isinstance(joined, list) and len(joined) > 1
    # A schema next to `properties` or `required` applies to the same value.
    own = {"properties", "required"} & schema.keys()
    other_schemas = own and {"allOf", "anyOf", "oneOf", "$ref"} & schema.keys()
    conditional = {"if", "not", "dependentSchemas", "unevaluatedProperties"} & schema.keys()
    return several or bool(other_schemas or conditional) or any(map(_combines_schemas, inner))


def _close(schema: Any) -> Any:
    """Return a schema in which objects that name properties allow no others."""
    if isinstance(schema, list):
        return [_close(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {}
    for name, value in schema.items():
        if name in VALUES:
            closed[name] = value
        elif name in NAMED_SCHEMAS and isinstance(value, dict):
            closed[name] = {each: _close(own) for each, own in value.items()}
        else:
            closed[name] = _close(value)
    properties = schema.get("properties")
    open_to = {"additionalProperties", "patternProperties"} & schema.keys()
    if isinstance(properties, dict) and not open_to:
        required = schema.get("required")
        # A required property that is not described would be refused, so the object stays open.
        if not isinstance(required, list) or all(each in properties for each in required):
            closed["additionalProperties"] = False
    return closed


def _allow_space(regex: str) -> str:
    """Return an expression that also matches with a space before it.

    Many tokenizers begin a word with one, which is not part of the answer. If the expression itself
    may begin with white space, nothing is added, since the two could not be distinguished.
    """
    core = _drop_anchors(regex)
    return core if begins_with_space(regex) else f" ?(?:{core})"


def _drop_anchors(regex: str) -> str:
    """Return an expression without ^ at its start and $ at its end, which mean nothing here: an
    answer always has to match as a whole.
    """
    regex = regex.removeprefix("^")
    return regex[:-1] if regex.endswith("$") and not regex.endswith("\\$") else regex


@lru_cache(maxsize=64)
def begins_with_space(expression: str) -> bool:
    """Return whether what matches a regular expression may begin with white space."""
    # What may come first does not depend on how often it comes, and compiling {1000000000} would
    # take all memory.
    once = COUNT.sub(lambda count: re.sub(r"\d+", _cap_count, count[0]), _drop_anchors(expression))
    try:
        pattern = regex_library.compile(once)
        return any(pattern.fullmatch(each, partial=True) for each in WHITE_SPACE)
    # This is not a regular expression, or it means something else to this library, which supports
    # recursion. llguidance says what is wrong with it.
    except (regex_library.error, RecursionError, MemoryError):
        return False


def _cap_count(number: re.Match[str]) -> str:
    """Return a number of repetitions as 0 or 1."""
    return "1" if number[0].strip("0") else "0"


def _make_regex_error(regex: str, wrong: str) -> OptionError:
    """Return the error for a regular expression, given llguidance's message."""
    cause = CAUSE.search(wrong)
    if "lookarounds not supported" in wrong:
        why = LOOK_AROUND
    else:
        why = _shorten(cause[1] if cause else wrong)
    fix = "write it without" if "not supported" in why else "correct it"
    return OptionError(
        f"The regular expression '{make_printable(regex)}' cannot be used: {why}; {fix}.", "regex"
    )


def _make_schema_error(wrong: str) -> OptionError:
    """Return the error for a JSON schema, given llguidance's message."""
    keywords = KEYWORDS.search(wrong)
    cause = CAUSE.search(wrong)
    fix = "correct it"
    if "oneOf constraints are not supported" in wrong:
        why = (
            "oneOf is taken where its schemas differ in their types or in a constant that they "
            "require, so that no answer matches two of them"
        )
        fix = "use anyOf"
    elif keywords:
        names = re.findall(r'"([^"]+)"', keywords[1])
        noun = "keyword" if len(names) == 1 else "keywords"
        why = f"the {noun} {', '.join(names)} cannot be enforced"
        fix = "write it without"
    else:
        why = cause[1] if cause else wrong  # the cause of a pattern inside the schema
    return OptionError(
        f"The JSON schema cannot be used: {_shorten(why).rstrip('.')}; {fix}.", "json_schema"
    )


def _shorten(text: str) -> str:
    """Return the start of a library's message, as one line."""
    return " ".join(text.split())[:200]
