"""`restorekv serve`: OpenAI's API over documents that stay compressed."""

import errno
import json
import os
import re
import socket
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from restorekv.cli import options
from restorekv.cli.choices import DTYPES, ENGINES, check_preset
from restorekv.cli.terminal import notes
from restorekv.compression.budget import parse_ratio
from restorekv.errors import RestoreKVError, check_choice, import_extra
from restorekv.files import decode_text, folder_lock, read_bytes
from restorekv.serve.ray.options import RayOptions

MIN_KEY_CHARS = 16  # characters
BACKLOG = 2048  # connections that wait to be accepted, as many as uvicorn has
FACT_LOSS_RATIO = 0.2  # a ratio below which single facts of short texts are lost (docs/choosing.md)
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")  # values of --host that other machines cannot reach
# Addresses that a server can listen at but no client can connect to, and what to open instead.
WILDCARD_HOSTS = {"0.0.0.0": "localhost", "::": "[::1]"}
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@options.add_options_of(RayOptions)
def run(
    model: options.Model = "smollm2",
    preset: Annotated[
        str, typer.Option(help="How documents are compressed: fast, best or an evictor's name.")
    ] = "fast",
    ratio: Annotated[
        str,
        typer.Option(help="Share of a document's KV pairs to keep, above 0 and at most 1."),
    ] = "0.1",
    adapter: options.Adapter = "auto",
    host: Annotated[
        str,
        typer.Option(help="Address to listen at; 0.0.0.0 lets other machines connect."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")
    ] = 8080,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the API keys that clients may use, one per line; without it no key is "
            "needed."
        ),
    ] = None,
    store: Annotated[
        Path | None,
        options.make_folder_option("Folder of the documents.", show_default="restorekv-store"),
    ] = None,
    memory: Annotated[
        str, typer.Option(help="Maximum memory for documents, such as 512M or 4G.")
    ] = "4G",
    disk: Annotated[
        str,
        typer.Option(help="Maximum disk space for compressed documents, such as 50G."),
    ] = "100G",
    shared: Annotated[
        str | None,
        typer.Option(help="Folder of caches that several servers share: a path or s3://..."),
    ] = None,
    waiting: Annotated[
        int,
        typer.Option(min=1, help="Maximum number of waiting requests; more are refused with 429."),
    ] = 256,
    engine: Annotated[
        str, typer.Option(help="What writes the answers: embedded (this library) or vllm.")
    ] = "embedded",
    vllm_url: Annotated[
        str | None,
        typer.Option(help="Address of a running vLLM server, such as http://HOST:8000/v1."),
    ] = None,
    vllm_store: Annotated[
        Path | None, typer.Option(help="Folder from which that vLLM server reads documents.")
    ] = None,
    vllm_options: Annotated[
        str | None, typer.Option(help="Arguments of vLLM's engine, as a JSON object.")
    ] = None,
    vllm_documents: Annotated[
        str | None,
        typer.Option(
            help="What vLLM reads: ragged (caches unchanged) or portable (heads of equal length).",
            show_default="ragged",
        ),
    ] = None,
    documents_memory: Annotated[
        str | None,
        typer.Option(help="Maximum memory for documents in vLLM, such as 1G.", show_default="1G"),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum length of an answer, in tokens.")
    ] = 1024,
    temperature: Annotated[
        float,
        typer.Option(
            min=0,
            max=2,
            help="Temperature of requests that set none; 0 always takes the most likely token.",
        ),
    ] = 1.0,
    stop_repeats: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1000,
            help="End an answer once it says the same thing this many times in a row, at least 2; "
            "0 lets it continue.",
            show_default=str(options.STOP_REPEATS),
        ),
    ] = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    **ray_flags: Any,
) -> None:
    ray_options = RayOptions(**ray_flags)
    check_choice("The dtype", dtype, DTYPES)
    check_choice("The engine", engine, ENGINES)
    check_preset(preset)
    parse_ratio(ratio)
    repeats = _choose_repeats(stop_repeats, engine)
    memory_bytes = _parse_size("--memory", memory)
    disk_bytes = _parse_size("--disk", disk)
    if ray_options.ray and engine != "embedded":
        raise RestoreKVError("--ray works only with --engine embedded; leave out --engine.")
    keys = _read_keys(api_key_file) if api_key_file else ()
    store = store or Path("restorekv-store")
    engine_options = _collect_engine_options(
        vllm_url, vllm_store, vllm_options, vllm_documents, documents_memory
    )
    with ExitStack() as stack:
        # Before PyTorch is imported and the model loaded, which takes seconds, so that a port or a
        # store in use is refused immediately, and no other process takes them meanwhile.
        listeners = open_listeners(host, port, stack)
        _lock_store(store, stack)
        _warn_of_open_access(host, keys)
        server = import_extra("restorekv.serve.run", "serve", "Serving")
        settings = server.Settings(
            store=store,
            base=model,
            default=f"{model}:{preset}-{ratio}",
            adapter=None if adapter == "none" else adapter,
            memory=memory_bytes,
            disk=disk_bytes,
            shared=_choose_shared_folder(shared, store, bool(ray_options.ray)),
            keys=keys,
            host_names=_list_host_names(host),
            limits=server.Limits(tokens=max_tokens, max_waiting=waiting),
            defaults=server.AnswerDefaults(temperature, repeats),
            engine=engine,
            options=engine_options,
        )
        _check_settings(server, settings)
        if ray_options.ray:
            engines = import_module("restorekv.serve.ray.engine")
            with notes.status("starting replicas"):
                replicas = stack.enter_context(
                    engines.deploy_replicas(settings, ray_options, model, dtype, device)
                )
            app = server.build_engine_app(replicas, server.open_store(settings), settings)
        else:
            from restorekv.cli.loading import open_model  # which imports PyTorch

            app = server.build_app(*open_model(model, dtype, device), settings)
        _print_address(settings.default, host, listeners[0], ratio)
        server.serve_app(app, listeners)
        _print_note(f"Stopped; the documents stay in {store}.")
        server.exit_after_signal(app)


def _collect_engine_options(
    url: str | None,
    folder: Path | None,
    arguments: str | None,
    documents: str | None,
    documents_memory: str | None,
) -> dict[str, Any]:
    """Return the options of vLLM's engine that were given, by the names that it has for them."""
    given: dict[str, Any] = {"url": url, "folder": folder, "documents": documents}
    if arguments:
        given["options"] = _parse_json_object("--vllm-options", arguments)
    if documents_memory:
        given["documents_memory"] = _parse_size("--documents-memory", documents_memory)
    return {name: value for name, value in given.items() if value}


def _choose_shared_folder(shared: str | None, store: Path, uses_ray: bool) -> str | None:
    """Return the address of the folder that several servers share, if there is one.

    Ray's replicas share a folder in the store. Once it exists it is used without Ray, too, because
    a document that is deleted must be deleted there as well.
    """
    if shared is not None:
        return shared or None
    own = store / "shared"
    return str(own.resolve()) if uses_ray or own.is_dir() else None


def _list_host_names(host: str) -> tuple[str, ...]:
    """Return the names, in addition to localhost, by which clients may address a server that other
    machines can reach.

    A page of another site cannot have such a name, because this machine resolves it to itself.
    """
    name = None if host in LOCAL_HOSTS else _find_own_name()
    return () if name is None else (name,)


def _find_own_name() -> str | None:
    """Return this machine's name, or None if it resolves to nothing or to a different machine."""
    name = socket.gethostname().lower()
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            name, 0, type=socket.SOCK_STREAM
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)  # refused for an address of a different machine
    except (OSError, UnicodeError):
        return None
    return name


def _print_address(default: str, host: str, listener: socket.socket, ratio: str) -> None:
    """Print the server's address, and a note if its ratio loses facts."""
    listening, port = listener.getsockname()[:2]
    name = host
    if listening in WILDCARD_HOSTS:
        name = WILDCARD_HOSTS[listening]
    elif ":" in host:
        name = f"[{host}]"
    address = f"http://{name}:{port}"
    _print_note(f"Serving {default} at {address}/v1\nThe page is at {address}/")
    if parse_ratio(ratio) < FACT_LOSS_RATIO:
        _print_note(
            f"A short text full of facts loses some of them at {ratio}; --ratio 0.3 keeps more."
        )


def _choose_repeats(wanted: int | None, engine: str) -> int:
    """Return after how many repetitions answers end; vLLM ends none."""
    if engine != "vllm":
        return options.STOP_REPEATS if wanted is None else wanted
    if wanted:
        raise RestoreKVError("--stop-repeats is not for --engine vllm; leave it out.")
    return 0


def _check_settings(server: ModuleType, settings: Any) -> None:
    """Refuse settings that cannot work, before a model is loaded."""
    server.find_engine_class(settings.engine).check_options(settings.options)
    server.Variant.parse(settings.default, settings.base)
    if settings.shared:
        server.SharedFolder(settings.shared)  # tries to write there


def _lock_store(store: Path, stack: ExitStack) -> None:
    """Lock a store until `stack` ends; refuse one that another server has locked.

    On a disk that is full or read-only the lock file may be impossible to write. Then only a
    warning is printed, and the lock of the store's index keeps a second server out.
    """
    if store.exists() and not store.is_dir():
        raise RestoreKVError(f"--store must be a folder, and {store} is a file; name a folder.")
    if not store.exists():
        stack.callback(_remove_if_empty, store)
    try:
        stack.enter_context(folder_lock(store))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) or not store.is_dir():
            raise
        _print_note(
            f"warning: {store} cannot be written ({error.strerror}); nothing new is stored until "
            "it can."
        )


def _remove_if_empty(folder: Path) -> None:
    """Remove the store of a server that stored nothing, such as one that did not start."""
    with suppress(OSError):  # it holds something, or is gone
        folder.rmdir()


def _print_note(text: str) -> None:
    """Print a note; on a full disk, do without it, since the server can still answer."""
    with suppress(OSError):
        notes.print(text, highlight=False)


def _warn_of_open_access(host: str, keys: tuple[str, ...]) -> None:
    """Warn if other machines can reach a server without keys."""
    if host not in LOCAL_HOSTS and not keys:
        notes.print(
            "warning: anyone who can reach this machine can use the server; --api-key-file "
            "requires a key.",
            highlight=False,
        )


def open_listeners(host: str, port: int, stack: ExitStack) -> list[socket.socket]:
    """Return sockets that listen at every address of a host, until `stack` closes them.

    Clients can connect at once and wait until the server answers. Port 0 takes a free port, the
    same one at all addresses. Raise RestoreKVError if the server cannot listen.
    """
    listeners: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                listener = stack.enter_context(socket.socket(family, kind, protocol))
            except OSError:  # such as on a system without IPv6
                if len(found) == 1:
                    raise
                continue
            if os.name == "posix":  # elsewhere this would let two servers share a port
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen = listeners[0].getsockname()[1] if listeners else port
            try:
                listener.bind((address[0], chosen, *address[2:]))
                listener.listen(BACKLOG)
            except OSError as error:
                # IPv6 is switched off.
                if error.errno == errno.EADDRNOTAVAIL and (listeners or len(found) > 1):
                    continue
                raise
            listeners.append(listener)
        if not listeners:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except OSError as error:
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        which = "--host" if is_host else "--port"
        raise RestoreKVError(
            f"Cannot listen at {host}:{port} ({error.strerror}); choose a different {which}."
        ) from None
    if hasattr(os, "register_at_fork"):  # a process that outlives the server must not hold its port
        os.register_at_fork(after_in_child=lambda: [each.close() for each in listeners])
    return listeners


def _parse_size(name: str, text: str) -> int:
    """Return the bytes of a size such as 4G, which is 4 * 2^30."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if not parts:
        raise RestoreKVError(f"{name} must be a size such as 512M or 4G, not {text!r}.")
    return int(float(parts[1]) * UNITS[parts[2].upper()])


def _parse_json_object(name: str, text: str) -> dict:
    """Return the JSON object in the text of an option; refuse any other text."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RestoreKVError(
            f"{name} must be a JSON object such as '{{\"max_model_len\": 8192}}', not "
            f"{text[:60]!r}."
        )
    return found


def _read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys of a file, one per line."""
    what = f"The file {path}"
    text = decode_text(read_bytes(path, what), what)
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        raise RestoreKVError(f"The file {path} is empty; write one key per line.")
    if min(map(len, keys)) < MIN_KEY_CHARS:
        raise RestoreKVError(
            f"The file {path} has a key of {min(map(len, keys))} characters, which can be guessed; "
            f"write keys of at least {MIN_KEY_CHARS}, one per line."
        )
    # Clients send a key in a header, where other characters have no single encoding.
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise RestoreKVError(
            f"The file {path} has a key that no client could send; write keys of printable ASCII "
            "characters."
        )
    return keys
