"""`restorekv serve` refuses what cannot be served before it loads a model, with a sentence."""

import socket

import pytest

from restorekv.files import alone
from tests.helpers.cli_world import cli

pytest.importorskip("fastapi")


@pytest.mark.parametrize(
    "flags, message", [
        (("--memory", "lots"), "a size such as 512M or 4G"), (("--preset", "never"), "There is no model"),
        (("--ratio", 7), "The ratio is a number above 0"), (("--api-key-file", "none"), "none"),
        (("--host", "no.such.host.invalid"), "Cannot listen at"), (("--engine", "tgi"), "one of embedded, vllm"),
        (("--vllm-options", "{}x"), "is a JSON object"), (("--vllm-url", "http://127.0.0.1:1/v1"), "--engine vllm"),
        (("--engine", "vllm", "--vllm-store", "x"), "goes with --vllm-url"),
        (("--engine", "vllm", "--vllm-url", "http://127.0.0.1:1/v1", "--port", 0), "There is no vLLM server"),
    ],
)  # fmt: skip
def test_wrong_flags(tmp_path, flags, message):
    result = cli("serve", "--model", "tiny", "--store", tmp_path / "store", *flags)
    assert result.code == 1 and "error: " in result.err and message in result.err


def test_short_keys_taken_ports_and_shared_stores(tmp_path):
    (tmp_path / "keys").write_text("short\n")
    assert "at least 16 characters" in cli("serve", "--model", "tiny", "--api-key-file", tmp_path / "keys").err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "choose another --port" in cli("serve", "--model", "tiny", "--port", port, "--store", tmp_path / "a").err
        own = "--ray", "local", "--store", tmp_path / "my store é"
        assert "choose another --port" in cli("serve", "--model", "tiny", "--port", port, *own).err
        assert [path.name for path in tmp_path.glob("my*")] == ["my store é"], "its shared folder is inside"
    with alone(tmp_path / "b"):
        assert "Another process" in cli("serve", "--model", "tiny", "--port", 0, "--store", tmp_path / "b").err
