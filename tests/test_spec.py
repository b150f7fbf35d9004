"""The grammar of specs: what comes back, and what each mistake is told."""

import importlib
import linecache
import os
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from restorekv import spec
from restorekv.errors import RestoreKVError
from restorekv.evictors.kvzip import KVzip
from restorekv.evictors.snapkv import SnapKV


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


@pytest.mark.parametrize("wrong", [Bare, lambda: None, KVzip()])
def test_what_is_no_class_of_the_kind_is_refused(wrong):
    with pytest.raises(RestoreKVError, match="'mine' is not a class that is derived from"):
        spec.parse_spec("mine", {"mine": wrong}, "evictor", bases=(KVzip,))


@dataclass(frozen=True)
class Nameless:
    pass


@dataclass(frozen=True)
class Demanding:
    name: ClassVar[str] = "demanding"
    count: int


class Undecorated(Thing):
    name: ClassVar[str] = "undecorated"
    power: float = 1.0


@pytest.mark.parametrize(
    ("kind", "told"),
    [(Bare, "its class Bare has the name 'bare'"), (Nameless, "its class Nameless has no name")],
)
def test_a_class_under_another_name_is_refused(kind, told):
    """Records hold the class's own name, which may be that of another method."""
    with pytest.raises(RestoreKVError, match=f"^The evictor 'mine' is registered .* {told}"):
        spec.parse_spec("mine", {"mine": kind}, "evictor", bases=(kind,))


def test_a_field_without_a_default_needs_a_value():
    classes = {"demanding": Demanding}
    made = spec.parse_spec("demanding:count=3", classes, "evictor", bases=(Demanding,))
    assert made == Demanding(3)
    with pytest.raises(RestoreKVError, match=r"needs a value of count, .*; write demanding:count="):
        spec.parse_spec("demanding", classes, "evictor", bases=(Demanding,))


def test_a_class_without_its_decorator_is_told_of_it():
    with pytest.raises(
        RestoreKVError, match=r"no setting 'power=2'; put @dataclass\(frozen=True\)"
    ):
        spec.parse_spec("undecorated:power=2", {"undecorated": Undecorated}, "evictor")


def test_an_unknown_evictor_may_be_ones_own():
    with pytest.raises(RestoreKVError, match="or register your own in the program that runs"):
        spec.parse_spec("mine", KNOWN, "evictor")


def test_a_file_in_place_of_a_benchmark_is_told_its_spec():
    with pytest.raises(RestoreKVError, match=r"; texts and .* are lines:path=data/mine\.jsonl\.$"):
        spec.parse_spec("data/mine.jsonl", KNOWN, "benchmark")


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
    assert spec.parse_spec(text, KNOWN, "thing") == made
    assert spec.parse_spec(spec.format_spec(made.name, made), KNOWN, "thing") == made


@pytest.mark.parametrize("text", ["thing:count=1,count=2", "thing:count=3,loud=true, count=3"])
def test_a_setting_is_given_once(text):
    with pytest.raises(RestoreKVError, match="thing is given count twice; give each setting"):
        spec.parse_spec(text, KNOWN, "thing")


def test_the_shortest_spec_is_written():
    assert spec.format_spec("thing", Thing(7, loud=True)) == "thing:count=7,loud=true"
    assert spec.format_spec("thing", Thing()) == "thing"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("thin", "There is no thing 'thin' (did you mean thing?); use one of thing, bare."),
        ("THING", "There is no thing 'THING' (did you mean thing?); use one of thing, bare."),
        (
            "thing:size=3",
            "thing has no setting 'size=3'; give count=NUMBER, loud=true|false, mode=TEXT, "
            "share=NUMBER.",
        ),
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
        spec.parse_spec(text, KNOWN, "thing")
    assert told in str(mistake.value)


OWN = """
from dataclasses import dataclass
from typing import ClassVar

import torch
from restorekv.evictors import EVICTORS, Evictor


@dataclass(frozen=True)
class First(Evictor):
    name: ClassVar[str] = "first"

    def score(self, model, tokenizer, context, full, observer=None):
        layers, heads = len(full.layers), full.layers[0].keys.shape[1]
        scores = {sign}torch.arange(context.text_tokens, dtype=torch.float32)
        return scores.expand(layers, heads, -1).clone()
"""


def identity_of(folder: Path) -> tuple[str, str]:
    """What another process that has the folder's packages calls the evictor "first", and its
    warnings.
    """
    code = "from restorekv import evictors; print(evictors.make_evictor('first').identity(None))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    return done.stdout.strip(), done.stderr


def install_evictor(folder: Path, source: str) -> None:
    """Writes what `pip install` would leave of a package with an evictor."""
    (folder / "mine.py").write_text(source)
    (about := folder / "mine-1.0.dist-info").mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[restorekv.evictors]\nfirst = mine:First\n")


@pytest.mark.slow
def test_evictors_of_installed_packages_are_known_by_name_and_source(tmp_path):
    install_evictor(tmp_path, OWN.format(sign="-"))
    first, _ = identity_of(tmp_path)
    assert re.fullmatch("first#[0-9a-f]{12}", first)
    (tmp_path / "mine.py").write_text(OWN.format(sign="2 * -"))
    second, _ = identity_of(tmp_path)
    assert re.fullmatch("first#[0-9a-f]{12}", second) and second != first


def test_an_evictor_that_cannot_be_loaded_is_named(tmp_path):
    install_evictor(tmp_path, "raise ValueError('it needs Fortran')")
    _, errors = identity_of(tmp_path)
    assert (
        "mine:First, an entry point of restorekv.evictors, cannot be loaded (it needs Fortran)"
        in errors
    )
    assert "There is no evictor 'first'" in errors


@pytest.mark.parametrize(("name", "taken"), [("kvzip", True), ("other", False)])
def test_an_entry_point_cannot_take_a_name_that_is_another_ones(monkeypatch, name, taken):
    """A subclass that forgets its `name` has its parent's."""
    own = type("Own", (KVzip,), {"name": name})
    group = "restorekv.evictors"
    entry = SimpleNamespace(load=lambda: own, value="mine:Own", module="mine", group=group)
    monkeypatch.setattr(spec, "entry_points", lambda group: [entry])
    classes = {"kvzip": KVzip}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        spec.register_entry_points("restorekv.evictors", classes)
    assert classes["kvzip"] is KVzip and ("other" in classes) is not taken
    assert [str(each.message) for each in told] == (
        [
            "mine:Own, an entry point of restorekv.evictors, cannot be loaded (the name 'kvzip' of "
            "its class is taken; give it another `name`); fix or remove its package."
        ]
        if taken
        else []
    )


def test_the_digest_of_a_source_is_no_part_of_a_spec():
    assert spec.parse_spec("thing:count=4#0123456789ab", KNOWN, "thing").count == 4
    assert re.fullmatch("#[0-9a-f]{12}", spec.digest_source(Thing))


@pytest.mark.parametrize("changed", ["helper", "parent"])
def test_a_digest_is_of_all_that_the_files_of_a_class_hold(tmp_path, monkeypatch, changed):
    """A helper, and the file of a parent, decide the scores as much as the class itself."""
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = {
        "parent": "class Parent:\n    sign = 1\n",
        "helper": "from digested_parent import Parent\n\ndef weigh(x):\n    return x\n\n"
        "class Own(Parent):\n    def score(self):\n        return weigh(self.sign)\n",
    }

    def digest():
        for name, source in sources.items():
            (tmp_path / f"digested_{name}.py").write_text(source)
            sys.modules.pop(f"digested_{name}", None)
        linecache.clearcache()
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        return spec.digest_source(importlib.import_module("digested_helper").Own)

    before = digest()
    assert digest() == before
    sources[changed] = sources[changed].replace("return x", "return -x").replace("= 1", "= -1")
    assert digest() != before


def test_our_own_classes_have_their_digest_in_records_alone():
    assert spec.digest_source(KVzip) == ""
    assert spec.digest_code(KVzip) and spec.digest_code(KVzip) != spec.digest_code(SnapKV)


def test_versions_name_only_what_is_installed():
    versions = spec.list_versions(["torch", "no-such-package"])
    assert versions == {"torch": version("torch")}


def test_specs_in_a_row_keep_their_settings():
    text = "kvzip+,snapkv:window=64,kernel=5, h2o,fastkvzip:path=a=b"
    assert spec.split_specs(text) == [
        "kvzip+",
        "snapkv:window=64,kernel=5",
        "h2o",
        "fastkvzip:path=a=b",
    ]
    assert spec.split_specs("") == [] and spec.split_specs("kvzip") == ["kvzip"]


@pytest.mark.parametrize(
    "first",
    [
        "restorekv.evictors",
        "both",
        pytest.param("restorekv.tasks", marks=pytest.mark.slow),
        pytest.param("restorekv", marks=pytest.mark.slow),
    ],
)
def test_a_module_with_an_evictor_and_a_benchmark_brings_both(tmp_path, first):
    """Whether this package imports it, or it is imported first and imports this package."""
    (tmp_path / "both.py").write_text(
        "from dataclasses import dataclass\n"
        "from restorekv.evictors.random import Random\n"
        "from restorekv.tasks.tiny import TinySuite\n"
        "@dataclass(frozen=True)\nclass Mine(Random):\n    name = 'mine'\n"
        "@dataclass(frozen=True)\nclass Asked(TinySuite):\n    name = 'asked'\n"
    )
    info = tmp_path / "both-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: both\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[restorekv.evictors]\nmine = both:Mine\n[restorekv.benchmarks]\nasked = both:Asked\n"
    )
    code = (
        f"import {first}\nfrom restorekv.compression.eviction import make_compressor\n"
        "from restorekv import tasks\n"
        "print(make_compressor('mine').spec, tasks.make_benchmark('asked').spec)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("mine asked\n", "")
