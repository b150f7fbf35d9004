"""What is wrong with arguments, paths and kinds of files is refused before PyTorch is imported."""

import inspect
import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from restorekv.cache.quantized import KV_DTYPES
from restorekv.cli import choices
from restorekv.cli.inputs import PLOTS, check_cache_files
from restorekv.compression.allocate import ALLOCATIONS
from restorekv.compression.eviction import COMPRESSORS
from restorekv.compression.growing import RESTORE_CHOICES
from restorekv.compression.presets import DEFAULT_EVICTOR, PRESETS, choose_evictor
from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.evaluation.grid import parse_method
from restorekv.evaluation.protocols import PROTOCOLS
from restorekv.evaluation.survivors import FORMATS
from restorekv.evictors import EVICTORS, gate_file
from restorekv.files import folder_lock
from restorekv.model.load import DTYPES
from restorekv.pipeline import compress
from restorekv.seal import read_tensors
from restorekv.serve.run import ENGINES
from restorekv.storage import cache_file, portable
from restorekv.tasks import BENCHMARKS
from tests.helpers.cli_world import cli

# Prints the exit code of a command and which of the slow packages it imported, as JSON.
PROBE = """
import json, sys
from restorekv.cli import execute
code = execute(sys.argv[1:])
slow = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
print(json.dumps([code, slow]))
"""
OUT = ["-o", "out.rkv"]
WRONG = {
    "no such command": ["comprss", "text.txt"],
    "no such flag of compress": ["compress", "text.txt", *OUT, "--ration", "0.1"],
    "no text": ["compress", "missing.txt", *OUT],
    "an empty text": ["compress", "empty.txt", *OUT],
    "a blank text": ["compress", "blank.txt", *OUT],
    "a binary file": ["compress", "program", *OUT],
    "a text in another encoding": ["compress", "latin.txt", *OUT],
    "a text as a PDF": ["compress", "text.pdf", *OUT],
    "a blank text to append": ["append", "doc.rkv", "blank.txt", *OUT],
    "no schema": ["ask", "doc.rkv", "who?", "--json-schema", "missing.json"],
    "a cache as a text": ["compress", "doc.rkv", *OUT],
    "no folder for the output": ["compress", "text.txt", "-o", "nowhere/out.rkv"],
    "a text in the place of the output": ["compress", "text.txt", "-o", "talk.json"],
    "a text in the place of figures": ["ask", "doc.rkv", "who?", "--json", "text.txt"],
    "a cache in the place of a portable file": ["export", "doc.rkv", "-o", "other.rkv"],
    "a text in the place of a gate": ["train-gate", "--data", "tiny", "--out", "text.txt"],
    "a wrong ratio": ["compress", "text.txt", *OUT, "--ratio", "2"],
    "a wrong evictor": ["compress", "text.txt", *OUT, "--evictor", "kvzipp"],
    "a wrong preset": ["compress", "text.txt", *OUT, "--preset", "slow"],
    "a preset with settings": ["compress", "text.txt", *OUT, "--evictor", "best:chunk=7"],
    "a preset with settings to score": ["eval", "--benchmark", "ruler", "--evictor", "fast:a=1"],
    "a wrong dtype": ["compress", "text.txt", *OUT, "--dtype", "float33"],
    "workers without Ray": ["eval", "--benchmark", "ruler", "--workers", "4"],
    "workers of compress without Ray": ["compress", ".", "-o", "caches", "--workers", "4"],
    "restore tokens of no adapter": [
        *["eval", "--benchmark", "ruler", "--evictor", "kvzip@none", "--restore-tokens", "4"]
    ],
    "no cache to ask": ["ask", "missing.rkv", "who?"],
    "a text as a cache": ["ask", "text.txt", "who?"],
    "no question": ["ask", "doc.rkv"],
    "a folder as a cache": ["ask", "empty", "who?"],
    "a file of another ending as a question": ["ask", "doc.rkv", "talk.json", "who?"],
    "a temperature below 0": ["ask", "doc.rkv", "who?", "--temperature", "-1"],
    "a wrong flag of ask": ["ask", "doc.rkv", "who?", "--do-sample"],
    "no cache to chat with": ["chat", "missing.rkv"],
    "no cache to append to": ["append", "missing.rkv", "text.txt", *OUT],
    "nothing to compose": ["compose", "missing.rkv", *OUT],
    "no cache to export": ["export", "missing.rkv", *OUT],
    "no cache to inspect": ["inspect", "missing.rkv"],
    "a picture of no kind": ["inspect", "doc.rkv", "--plot", "plot.doc"],
    "nothing to verify": ["verify", "missing.rkv"],
    "a wrong size for the server": ["serve", "--memory", "much"],
    "a wrong ratio for the server": ["serve", "--ratio", "0"],
    "a preset that is none": ["serve", "--preset", "fats"],
    "a wrong engine": ["serve", "--engine", "vlm"],
    "a file as the server's store": ["serve", "--port", "0", "--store", "text.txt"],
    "a device that is none": ["compress", "text.txt", *OUT, "--device", "gpu"],
    "JSON in place of a cache": ["inspect", "talk.json"],
    "a text in place of a cache": ["ask", "text.txt", "who?"],
    "a wrong flag of serve": ["serve", "--prot", "8080"],
    "a wrong flag of the demo": ["demo", "--fulll"],
    "nothing to score on": ["eval"],
    "a wrong benchmark": ["eval", "--benchmark", "rulr"],
    "a wrong evictor to score": ["eval", "--benchmark", "ruler", "--evictor", "kvzipp@none"],
    "a wrong ratio to score": ["eval", "--benchmark", "ruler", "--ratio", "1.5"],
    "no results to report": ["report", "missing"],
    "no adapter to publish": ["push", "missing", "me/mine"],
    "no data to train on": ["train", "--data", "missing.jsonl", "--out", "run"],
    "an empty folder to train on": ["train", "--data", "empty", "--out", "run"],
    "a text to train into": ["train", "--data", "tiny", "--out", "text.txt"],
    "a wrong evictor to train for": ["train", "--data", "tiny", "--out", "run", "--evictor", "kv"],
    "a wrong number of steps": ["train", "--data", "tiny", "--out", "run", "--steps", "0"],
    "a folder that is no place for data": ["data", "build", "--out", "text.txt"],
    "no text to keep out of data": ["data", "build", "--out", "new", "--exclude", "missing"],
    "no data to show": ["data", "show", "missing"],
    "no data for a gate": ["train-gate", "--data", "missing.jsonl", "--out", "gate"],
    "a wrong kind of gate": ["train-gate", "--data", "tiny", "--out", "gate", "--kind", "mlp"],
    "a wrong number for a gate": ["train-gate", "--data", "tiny", "--out", "gate", "--rank", "0"],
    "a file for a gate's features": [
        "train-gate",
        "--data",
        "tiny",
        "--out",
        "gate",
        "--features",
        "text.txt",
    ],
    "no gate to convert": ["convert-gate", "missing.pt", "-o", "gate"],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_does_not_wait_for_pytorch(tmp_path, name):
    (tmp_path / "text.txt").write_text("A text of a few words.")
    (tmp_path / "talk.json").write_text('{"format": "restorekv-chat"}')
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.txt").write_text(" \n\t")
    (tmp_path / "program").write_bytes(b"\x7fELF\0\0\0\1")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "text.pdf").write_text("A text of a few words.")
    (tmp_path / "empty").mkdir()
    header = b'{"__metadata__":{"format":"restorekv-cache"}}'
    for cache in ("doc.rkv", "other.rkv"):
        (tmp_path / cache).write_bytes(len(header).to_bytes(8, "little") + header)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *WRONG[name]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr.startswith("error: "), done
    code, slow = json.loads(done.stdout.splitlines()[-1])
    assert code in (1, 2) and not slow


@pytest.mark.parametrize(
    "command",
    ["compress", "ask", "chat", "serve", "demo", "eval", "inspect", "train", "train-gate"],
)
def test_help_does_not_wait_for_pytorch(command):
    done = subprocess.run(
        [sys.executable, "-c", PROBE, command, "--help"], capture_output=True, text=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]


def test_a_port_in_use_does_not_wait_for_pytorch(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-c", PROBE, "serve", "--port", port, "--store", "store"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.stderr.startswith(f"error: Cannot listen at 127.0.0.1:{port}"), done
    assert json.loads(done.stdout.splitlines()[-1]) == [1, []]
    assert not (tmp_path / "store").exists()


def test_a_store_in_use_does_not_wait_for_pytorch(tmp_path):
    with folder_lock(tmp_path / "store"):
        done = subprocess.run(
            [sys.executable, "-c", PROBE, "serve", "--port", "0", "--store", "store"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert "Another process is at work in" in done.stderr, done
    assert json.loads(done.stdout.splitlines()[-1]) == [1, []]


def test_a_preset_is_an_evictor_for_every_command(tmp_path):
    """As in Python, where `evictor="fast"` works; no command takes it for a misspelled name."""
    (tmp_path / "text.txt").write_text("A text of a few words.")
    for command in (
        ["compress", "text.txt", *OUT, "--evictor", "fast", "--ratio", "7"],
        ["eval", "--benchmark", "tiny", "--evictor", "fast@none", "--ratio", "7"],
        ["train", "--data", "missing.jsonl", "--out", "run", "--evictor", "best,fast"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", PROBE, *command], cwd=tmp_path, capture_output=True, text=True
        )
        assert "ratio must be above 0" in done.stderr or "missing.jsonl" in done.stderr, done
    assert choose_evictor("fast", None) == "fastkvzip"
    assert parse_method("best@none") == ("kvzip", None)


@pytest.mark.parametrize("resolve", [parse_method, lambda text: choose_evictor(text, None)])
def test_a_preset_has_no_settings(resolve):
    said = "The preset best takes no settings; name its evictor, as in kvzip:chunk=7"
    with pytest.raises(RestoreKVError, match=said):
        resolve("best:chunk=7")


def test_an_evictor_that_a_program_has_added_is_known(tmp_path):
    """The four lines of CONTRIBUTING.md."""
    (tmp_path / "text.txt").write_text("The mill at Aldbury was built in 1871. " * 40)
    program = (
        "import sys; from restorekv.evictors import EVICTORS\n"
        "from restorekv.evictors.knorm import Knorm\n"
        "class Mine(Knorm): name = 'mine'\n"
        "EVICTORS['mine'] = Mine\n"
        "from restorekv.cli import execute\n"
        "sys.exit(execute(sys.argv[1:]))"
    )
    (tmp_path / "mine.py").write_text(program)
    words = ["compress", "text.txt", *OUT, "--model", "tiny", "--evictor", "mine", "--ratio", "0.5"]
    done = subprocess.run(
        [sys.executable, "mine.py", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and (tmp_path / "out.rkv").exists(), done


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("talk.json", "is not a safetensors file, but JSON, such as a conversation's; name"),
        ("text.txt", "is not a safetensors file, but a text, or another kind; name"),
    ],
)
def test_a_file_of_another_kind_is_not_said_to_be_cut(tmp_path, name, said):
    path = tmp_path / name
    path.write_text('{"turns": []}' if name.endswith("json") else "The mill at Aldbury.")
    for refuse in (lambda: check_cache_files([path]), lambda: read_tensors(path, str(path))):
        with pytest.raises(RestoreKVError, match=said):
            refuse()


def test_several_texts_are_answered_with_a_folder():
    """As the shell makes them of texts/*.txt."""
    result = cli("compress", "one.txt", "two.txt", *OUT)
    assert result.code == 2 and "name one text, or a folder of texts; see" in result.err


def test_an_adapter_to_score_is_told_its_place():
    result = cli("eval", "--benchmark", "tiny", "--adapter", "mine")
    assert result.code == 2 and "No such option: --adapter; an adapter follows" in result.err


def test_a_folder_of_caches_is_answered_with_the_names_of_its_files(tmp_path):
    (tmp_path / "doc.txt.rkv").write_bytes(b"")
    with pytest.raises(
        CacheFileError, match=r"is a folder; .* such as .*doc\.txt\.rkv; .*/\*\.rkv"
    ):
        check_cache_files([tmp_path])


def test_the_names_for_the_command_line_are_those_of_the_library():
    assert inspect.signature(compress).parameters["evictor"].default == DEFAULT_EVICTOR
    assert {DEFAULT_EVICTOR, *PRESETS.values()} <= set(choices.EVICTORS)
    assert set(choices.EVICTORS) == set(EVICTORS)
    assert tuple(COMPRESSORS) == choices.COMPRESSORS
    assert tuple(ALLOCATIONS) == choices.ALLOCATIONS
    assert choices.KV_DTYPES == KV_DTYPES
    assert choices.DTYPES == DTYPES
    assert tuple(PROTOCOLS) == choices.PROTOCOLS
    assert choices.GROWING == RESTORE_CHOICES
    assert set(choices.BENCHMARKS) == set(BENCHMARKS)
    assert PLOTS == FORMATS
    kinds = (cache_file.KIND, portable.KIND, gate_file.FILE)
    assert {kind.format: kind.name for kind in kinds} == choices.OUTPUT_KINDS
    assert tuple(ENGINES) == choices.ENGINES
    for device in choices.DEVICES:
        torch.device(device)  # PyTorch knows the name


@pytest.mark.parametrize(
    ("own", "expected"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")]
)
def test_threads_sleep_while_they_wait_unless_told_otherwise(own, expected):
    """PyTorch's OpenMP reads this when it is imported, so it must be set before."""
    code = (
        "import atexit, os, sys; from restorekv.cli import main; "
        "atexit.register(lambda: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)); "
        "main(['--version'])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**environment, **own}
    )
    assert ran.stdout.split()[-2:] == [expected, "False"]
