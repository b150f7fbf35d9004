"""`restorekv serve` refuses what cannot be served before it loads a model, with a sentence."""

import errno
import socket
from contextlib import ExitStack

import pytest

from restorekv.cli import loading, serve
from restorekv.errors import RestoreKVError
from restorekv.files import folder_lock
from tests.helpers.cli_world import cli

pytest.importorskip("fastapi")

from restorekv.serve import run


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--memory", "lots"), "a size such as 512M or 4G"),
        (
            ("--preset", "never"),
            "--preset must be fast or best, or the name of an evictor, not 'never'.",
        ),
        (("--ratio", 7), "The ratio must be above 0"),
        (("--api-key-file", "none"), "none"),
        (("--host", "no.such.host.invalid"), "; choose a different --host."),
        (("--engine", "tgi"), "one of embedded, vllm"),
        (("--vllm-options", "{}x"), "must be a JSON object"),
        (("--vllm-url", "http://127.0.0.1:1/v1"), "--engine vllm"),
        (("--documents-memory", "1G"), "--engine vllm"),
        (("--engine", "vllm", "--documents-memory", "much"), "a size such as"),
        (("--engine", "vllm", "--vllm-documents", "round"), "must be one of ragged, portable"),
        (("--engine", "vllm", "--vllm-store", "x"), "--vllm-store is for --vllm-url"),
        (
            ("--engine", "vllm", "--vllm-url", "http://127.0.0.1:1/v1", "--port", 0),
            "There is no vLLM server",
        ),
    ],
)
def test_wrong_flags(tmp_path, flags, message):
    result = cli("serve", "--model", "tiny", "--port", 0, "--store", tmp_path / "store", *flags)
    assert result.code == 1 and "error: " in result.err and message in result.err
    assert not (tmp_path / "store").exists() or "vLLM" in message  # which is asked last


def test_keys_are_what_clients_send(tmp_path):
    """A key that matches no request would lock its client out without a word."""
    path = tmp_path / "keys"
    key = "a-key-of-sixteen-characters"
    # As editors on Windows save a text.
    for written in (f"\ufeff{key}\r\n".encode(), f"{key}\n".encode("utf-16")):
        path.write_bytes(written)
        assert serve._read_keys(path) == (key,)
    path.write_text("a-key-of-sixteen-characters-é")
    with pytest.raises(RestoreKVError, match="has a key that no client could send"):
        serve._read_keys(path)
    path.write_bytes(b"a-key-of-sixteen-characters-\xe9")
    with pytest.raises(RestoreKVError, match="is not UTF-8 text"):
        serve._read_keys(path)


def test_short_keys_taken_ports_and_shared_stores(tmp_path):
    (tmp_path / "keys").write_text("short\n")
    assert (
        "write keys of at least 16, one per line"
        in cli("serve", "--model", "tiny", "--api-key-file", tmp_path / "keys").err
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert (
            "choose a different --port"
            in cli("serve", "--model", "tiny", "--port", port, "--store", tmp_path / "a").err
        )
        own = "--ray", "local", "--store", tmp_path / "my store é"
        assert (
            "choose a different --port" in cli("serve", "--model", "tiny", "--port", port, *own).err
        )
        assert not list(tmp_path.glob("my*")), "nothing is left of a server that did not start"
    with folder_lock(tmp_path / "b"):
        assert (
            "Another process"
            in cli("serve", "--model", "tiny", "--port", 0, "--store", tmp_path / "b").err
        )


def test_the_port_is_held_while_the_model_is_loaded(tmp_path, monkeypatch):
    """And given to uvicorn as it is; once the command has ended, another server can listen
    there.
    """
    seen = []

    def load(*_: object) -> tuple[str, str]:
        port = int(flags[flags.index("--port") + 1])
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
                other.listen()
        seen.append(port)
        return "model", "tokenizer"

    def answer(_app: object, listeners: list) -> None:
        seen.extend(each.getsockname()[1] for each in listeners)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--model", "tiny", "--store", str(tmp_path / "store"), "--port", str(port)]
    monkeypatch.setattr(loading, "open_model", load)
    monkeypatch.setattr(run, "build_app", lambda *_: None)
    monkeypatch.setattr(run, "serve_app", answer)
    monkeypatch.setattr(run, "exit_after_signal", lambda _: None)
    result = cli("serve", *flags)
    assert (result.code, seen) == (0, [port, port]), result.err
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    "host, here, names",
    [("127.0.0.1", "127.0.0.1", ()), ("0.0.0.0", "localhost", ("my-machine",))],
)
def test_addresses_are_printed_that_the_server_accepts(tmp_path, monkeypatch, host, here, names):
    found = []
    monkeypatch.setattr(loading, "open_model", lambda *_, **__: (None, None))
    monkeypatch.setattr(run, "build_app", lambda *given: found.append(given[-1]))
    monkeypatch.setattr(run, "serve_app", lambda _, listeners: found.append(listeners[0]))
    monkeypatch.setattr(run, "exit_after_signal", lambda _: None)
    monkeypatch.setattr(serve, "_find_own_name", lambda: "my-machine")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ("--store", tmp_path, "--host", host, "--port", port)
    result = cli("serve", "--model", "tiny", *flags)
    assert result.code == 0, result.err
    assert f"Serving tiny:fast-0.1 at http://{here}:{port}/v1\n" in result.err
    assert f"The page is at http://{here}:{port}/\n" in result.err
    assert "0.0.0.0" not in result.err and found[0].host_names == names


@pytest.mark.parametrize(
    "flags, name",
    [((), "auto"), (("--adapter", "none"), None), (("--adapter", "tiny:kvzip"), "tiny:kvzip")],
)
def test_an_adapter_is_named_as_for_compress(tmp_path, monkeypatch, flags, name):
    found = []
    monkeypatch.setattr(loading, "open_model", lambda *_, **__: (None, None))
    monkeypatch.setattr(run, "build_app", lambda *given: found.append(given[-1]))
    monkeypatch.setattr(run, "serve_app", lambda *_: None)
    monkeypatch.setattr(run, "exit_after_signal", lambda _: None)
    result = cli("serve", "--model", "tiny", "--port", 0, "--store", tmp_path, *flags)
    assert result.code == 0, result.err
    assert found[0].adapter == name


def test_a_name_is_the_machines_own_only_if_it_leads_here(monkeypatch):
    monkeypatch.setattr(serve.socket, "gethostname", lambda: "LocalHost")
    assert serve._find_own_name() == "localhost"
    for name in ("192.0.2.254", "no.such.host.invalid"):
        monkeypatch.setattr(serve.socket, "gethostname", lambda name=name: name)
        assert serve._find_own_name() is None


@pytest.mark.parametrize("is_there", [False, True])
def test_a_shared_folder_of_a_run_with_ray_stays_in_use(tmp_path, monkeypatch, is_there):
    """Else a document that is deleted now would stay there."""
    found = []
    monkeypatch.setattr(loading, "open_model", lambda *_, **__: (None, None))
    monkeypatch.setattr(run, "build_app", lambda *given: found.append(given[-1]))
    monkeypatch.setattr(run, "serve_app", lambda *_: 0)
    monkeypatch.setattr(run, "exit_after_signal", lambda _: None)
    if is_there:
        (tmp_path / "shared").mkdir()
    result = cli("serve", "--model", "tiny", "--store", str(tmp_path), "--port", "0")
    assert result.code == 0, result.err
    (settings,) = found
    assert settings.shared == (str(tmp_path / "shared") if is_there else None)


def test_a_free_port_is_named_and_the_same_at_all_addresses():
    with ExitStack() as lasting:
        listeners = serve.open_listeners("localhost", 0, lasting)
        ports = {each.getsockname()[1] for each in listeners}
        assert len(ports) == 1 and 0 not in ports
        with pytest.raises(
            RestoreKVError,
            match=rf"Cannot listen at localhost:{min(ports)} \(.*\); choose a different",
        ):
            serve.open_listeners("localhost", min(ports), lasting)
    assert [each.fileno() for each in listeners] == [-1] * len(listeners)


def test_a_server_without_the_gate_of_its_preset_does_not_start(tmp_path, monkeypatch):
    """It would refuse every document."""
    monkeypatch.setattr("restorekv.evictors.gate_file.SHIPPING", ())
    result = cli("serve", "--model", "tiny", "--store", tmp_path / "store", "--port", 0)
    assert result.code == 1 and "Serving" not in result.err
    assert "with gate=FILE. Or serve with --preset best, which needs no gate." in result.err


@pytest.mark.parametrize(
    "problem, message",
    [
        (
            RestoreKVError("A stored document was read again."),
            "error: A stored document was read again.",
        ),
        (
            OSError(errno.EMFILE, "Too many open files", "/tmp/probe"),
            "error: Cannot use /tmp/probe: Too many open files; ",
        ),
        (RuntimeError("can't start new thread"), "error: There is not enough memory; "),
    ],
)
def test_what_keeps_a_server_from_starting_is_one_sentence(
    tmp_path, monkeypatch, capfd, problem, message
):
    """Uvicorn would print a stack trace and end with a code of its own."""

    def check(*_: object) -> None:
        raise problem

    monkeypatch.setattr(run, "check_loading", check)
    result = cli("serve", "--model", "tiny", "--store", tmp_path / "store", "--port", 0)
    assert result.code == 1 and message in result.err
    assert "Traceback" not in result.err + capfd.readouterr().err
