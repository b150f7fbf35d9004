"""`restorekv doctor`: what it prints and writes, what it says of broken code, and what it never
tells.
"""

import json
import re

import pytest
import torch

from restorekv.cli import diagnosis
from restorekv.model.attention import backend_self_test, cascade, reference, self_tests
from restorekv.model.attention.self_tests import COMPONENTS
from tests.helpers import fake_device
from tests.helpers.cli_world import cli
from tests.helpers.models import build_model

WORD = "a-secret-word-of-mine"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Two cases of attention."""
    monkeypatch.setattr(backend_self_test, "CASES", backend_self_test.CASES[:2])
    monkeypatch.setattr(
        backend_self_test, "explain_missing_kernels", lambda device, dtype: "it is for CUDA devices"
    )
    for name in ("triton", "maxima"):
        if name in COMPONENTS:
            kernel = COMPONENTS[name]
            monkeypatch.setitem(
                COMPONENTS,
                name,
                self_tests.Component(
                    kernel.name,
                    kernel.title,
                    kernel.instead,
                    lambda device, dtype: "it is for CUDA devices",
                    kernel.measure,
                ),
            )


def test_a_healthy_machine(tmp_path):
    result = cli("doctor", "--device", "cpu", "-o", tmp_path / "report.json")
    assert result.code == 0 and not result.err
    assert "Everything that is used here has passed its self-test." in result.out
    assert "head dimension 64" in result.out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["devices"][0]["name"] == report["machine"]["processor"]
    [check] = report["checks"]
    rows = {row["component"]: row for row in check["components"]}
    assert set(rows) == set(COMPONENTS)
    assert all(
        row["used"] == (name not in ("triton", "maxima", "offload-plain"))
        for name, row in rows.items()
    )
    assert all(name in result.out for name in rows)
    # Cells of the table are broken into lines.
    printed = "".join(re.findall(r"\w", result.out))
    for name in ("maxima", "offload-plain"):
        remark = f"{COMPONENTS[name].title}: {rows[name]['why']}"
        assert "".join(re.findall(r"\w", remark)) in printed
    assert (
        rows["reference"]["self_test"]["error"]
        <= rows["reference"]["self_test"]["tolerance"]
        < 1e-3
    )
    assert report["shape"] == {"model": "smollm2", "heads": 3, "groups": 3, "dim": 64}
    assert {
        "restorekv",
        "torch",
        "transformers",
        "triton",
        "peft",
        "safetensors",
        "vllm",
        "python",
    } <= set(report["versions"])
    assert report["devices"][0]["device"] == "cpu" and "memory" in report["machine"]


def test_the_shape_is_the_model_s(tmp_path):
    build_model("qwen3", num_key_value_heads=1).save_pretrained(tmp_path / "private-model")
    result = cli(
        "doctor",
        "--device",
        "cpu",
        "--model",
        tmp_path / "private-model",
        "--dtype",
        "bfloat16",
        "-o",
        tmp_path / "r",
    )
    assert result.code == 0, result.err
    text = (tmp_path / "r").read_text()
    assert json.loads(text)["shape"] == {
        "model": "a file or folder on this machine",
        "heads": 1,
        "groups": 4,
        "dim": 16,
    }
    assert json.loads(text)["checks"][0]["dtype"] == "bfloat16" and "private-model" not in text


def test_a_broken_component_is_told_and_is_no_failure(monkeypatch, tmp_path):
    attend = cascade.attend_ragged
    monkeypatch.setattr(cascade, "attend_ragged", lambda *given: attend(*given) * 1.1)
    result = cli("doctor", "--device", "cpu", "-o", tmp_path / "report.json")
    assert (
        result.code == 0
        and "Not used because it failed its self-test: cascade on cpu" in result.out
    )
    rows = json.loads((tmp_path / "report.json").read_text())["checks"][0]["components"]
    [row] = [row for row in rows if row["component"] == "cascade"]
    assert (
        not row["used"]
        and "off by" in row["why"]
        and row["self_test"]["error"] > row["self_test"]["tolerance"]
    )


def test_a_device_that_is_wrong_itself_is_a_failure(monkeypatch, tmp_path):
    attend = reference.attend_ragged
    monkeypatch.setattr(
        reference,
        "attend_ragged",
        lambda q, *more: attend(q, *more) * (1 + 0.1 * (q.dtype != torch.double)),
    )
    result = cli("doctor", "--device", "cpu", "-o", tmp_path / "report.json")
    assert result.code == 1 and "own operations compute attention wrongly on cpu" in result.err
    assert json.loads((tmp_path / "report.json").read_text())["checks"]


def test_again_checks_again(monkeypatch, tmp_path):
    """On a device that remembers."""
    fake_device.install(monkeypatch, tmp_path / "cache")
    calls, component = [], COMPONENTS["reference"]

    def measure(target):
        calls.append(target)
        yield self_tests.Measurement("all", 0.0, 1.0)

    for name in list(COMPONENTS):
        if name != "reference":
            monkeypatch.delitem(COMPONENTS, name)
    again = self_tests.Component(
        "reference",
        component.title,
        component.instead,
        backend_self_test.explain_no_obstacle,
        measure,
    )
    monkeypatch.setitem(COMPONENTS, "reference", again)
    for words, count in (((), 1), ((), 1), (("--again",), 2)):
        self_tests.forget_self_tests()
        result = cli("doctor", "--device", "cpu", *words)
        assert result.code == 0 and len(calls) == count, result.err
    self_tests.forget_self_tests()


def test_the_file_tells_nothing_private(monkeypatch, tmp_path):
    home = tmp_path / "home" / "ada.lovelace"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("RESTOREKV_CACHE", str(home / "cache"))
    monkeypatch.setenv("HF_TOKEN", WORD)
    monkeypatch.setenv("SOME_API_KEY", WORD[::-1])
    monkeypatch.setattr(diagnosis.getpass, "getuser", lambda: "alovelace")
    monkeypatch.setattr(diagnosis.platform, "node", lambda: "ada-laptop")
    attend = cascade.attend_ragged

    def failing(query, *more):
        raise RuntimeError(
            f"cannot open {home}/x or /home/bob/y or /Users/Carl/z with {WORD} and {WORD[::-1]} at "
            "https://me:pass@host, said alovelace of ada-laptop"
        )

    monkeypatch.setattr(cascade, "attend_ragged", failing)
    result = cli("doctor", "--device", "cpu", "-o", tmp_path / "report.json")
    assert result.code == 0 and attend
    text = (tmp_path / "report.json").read_text()
    assert "cannot open ~/x or ~/y or ~/z" in text
    for private in (
        "lovelace",
        "ada-laptop",
        "/home/",
        "/Users/",
        WORD,
        WORD[::-1],
        "pass@",
        "bob",
        "Carl",
    ):
        assert private not in text, private
    assert json.loads(text)["places"]["models and self-tests of restorekv"] == "~/cache"


def test_common_words_are_not_taken_for_names(monkeypatch):
    monkeypatch.setattr(diagnosis.getpass, "getuser", lambda: "root")
    monkeypatch.setattr(diagnosis.platform, "node", lambda: "localhost")
    assert diagnosis.remove_private_text("the root of localhost") == "the root of localhost"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--device", "nowhere"), "There is no device"),
        (("--dtype", "float8"), "The dtype must be one of"),
        (("--model", "/nothing/here"), "Cannot read the config of"),
        (("-o", "/nothing/here.json"), "does not exist"),
    ],
)
def test_bad_input_gets_a_sentence(words, sentence):
    result = cli("doctor", *words)
    assert result.code in (1, 2) and sentence in result.err and "Traceback" not in result.err


def test_a_secret_that_begins_like_another_is_hidden_whole(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "abcdefgh")
    monkeypatch.setenv("B_TOKEN", "abcdefgh12345678")
    text = diagnosis.remove_private_text("abcdefgh12345678 and abcdefgh")
    assert text == "<secret> and <secret>"
