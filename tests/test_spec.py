"""The grammar of specs: what comes back, and what each mistake is told."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from restorekv import spec
from restorekv.errors import RestoreKVError


@dataclass(frozen=True)
class Thing:
    name: ClassVar[str] = "thing"
    count: int = 3
    share: float = 0.5
    mode: str = "max"
    loud: bool = False
    other: object = None  # not to be set by a spec


@dataclass(frozen=True)
class Bare:
    name: ClassVar[str] = "bare"


KNOWN = {"thing": Thing, "bare": Bare}


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("thing", Thing()),
        ("thing:count=7,share=0.25", Thing(7, 0.25)),
        ("thing: mode=avg , loud=true", Thing(mode="avg", loud=True)),
        ("thing:mode=a=b", Thing(mode="a=b")),
        ("bare", Bare()),
    ],
)
def test_specs_and_back(text, made):
    assert spec.parse(text, KNOWN, "thing") == made
    assert spec.parse(spec.write(made.name, made), KNOWN, "thing") == made


def test_the_shortest_spec_is_written():
    assert spec.write("thing", Thing(7, loud=True)) == "thing:count=7,loud=true"
    assert spec.write("thing", Thing()) == "thing"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("thin", "There is no thing 'thin'; use one of thing, bare."),
        ("thing:size=3", "thing has no setting 'size=3'; give count=NUMBER, loud=true|false, mode=TEXT, share=NUMBER."),
        ("thing:count=abc", "thing takes count=NUMBER, not 'abc'."),
        ("thing:count=-3", "thing takes count=NUMBER, not '-3'."),
        ("thing:count", "thing takes count=NUMBER, not ''."),
        ("thing:loud=yes", "thing takes loud=true|false, not 'yes'."),
        ("thing:other=1", "thing has no setting 'other=1'"),
        ("bare:x=1", "bare has no setting 'x=1'; it takes none."),
    ],
)
def test_every_mistake_is_told(text, told):
    with pytest.raises(RestoreKVError) as mistake:
        spec.parse(text, KNOWN, "thing")
    assert told in str(mistake.value)
