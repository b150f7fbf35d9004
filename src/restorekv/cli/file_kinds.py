"""Descriptions of restorekv's files and folders, each of which is read whole and checked first."""

from collections.abc import Callable
from pathlib import Path

from restorekv.cli.loading import describe_method
from restorekv.data import build_folder
from restorekv.data.mixture import read_mixture
from restorekv.errors import RestoreKVError, make_printable
from restorekv.evaluation import results
from restorekv.evictors import gate_file
from restorekv.files import open_with_size, read_json
from restorekv.generation import chat
from restorekv.restore import adapter_file
from restorekv.seal import FileKind, read_sealed, read_tensors
from restorekv.storage import cache_file, portable
from restorekv.train import checkpoint, teacher_cache


def describe_file(path: Path) -> str:
    """Return a phrase that says what a file or folder is; refuse one that would not load."""
    if path.is_dir():
        for file, describe_folder in FOLDERS.items():
            if any(path.glob(file)):
                return describe_folder(path)
        raise RestoreKVError(
            f"{path} is not a folder that restorekv made; name a file or a different folder."
        )
    with open_with_size(path, str(path)) as (file, _):
        start = file.read(1)
    if start == b"{":  # no safetensors file begins so: it would have a header of petabytes
        return _describe_conversation(path)
    metadata, _ = read_tensors(path, str(path))
    name = metadata.get("format")
    if name in FILES:
        return FILES[name](path)
    for kind in TRAINING_KINDS:
        if name == kind.format:
            return _describe_training(path, kind)
    raise RestoreKVError(
        f"{path} is a safetensors file of the format '{make_printable(name)}', which restorekv "
        "does not seal; "
        "of an adapter, name the folder."
    )


def _describe_conversation(path: Path) -> str:
    content = read_json(path, str(path))
    if content.get("format") != chat.FORMAT:
        raise RestoreKVError(
            f"{path} is JSON, but not a conversation of restorekv; name a different file."
        )
    turns = chat.check_form(path, content)["turns"]
    noun = "turn" if len(turns) == 1 else "turns"
    return f"a conversation of {len(turns):,} {noun}"


def _describe_cache(path: Path) -> str:
    m = cache_file.open_cache_file(path).manifest
    return (
        f"a cache of {m.tokens:,} tokens for {m.model}, {describe_method(m)}, r = {m.ratio}, "
        f"{m.pairs_held:,} pairs"
    )


def _describe_portable(path: Path) -> str:
    stored = portable.load_portable(path)
    m = stored.manifest
    return (
        f"a portable cache of {m.tokens:,} tokens as {stored.tokens:,} positions for {m.model}, "
        f"{stored.name}"
    )


def _describe_gate(path: Path) -> str:
    card = gate_file.read_gate(path).card
    return f"a gate of kind {card.kind} for {card.model}"


def _describe_training(path: Path, kind: FileKind) -> str:
    _, tensors = read_sealed(path, kind, finite=True)
    return f"{kind.name}, of {len(tensors)} tensors"


def _describe_adapter(folder: Path) -> str:
    stored = adapter_file.read_adapter(folder)
    card = stored.card
    what = f"a restore adapter of {len(stored.embeddings)} tokens"
    if card is None:
        return f"{what} without a record"
    return f"{what} for {card.model}, {card.evictor or 'any evictor'}, license {card.license}"


def _describe_data(folder: Path) -> str:
    contexts, manifest = read_mixture(folder)
    noun = "source" if len(manifest["sources"]) == 1 else "sources"
    return f"training data of {len(contexts):,} contexts from {len(manifest['sources'])} {noun}"


def _describe_results(folder: Path) -> str:
    cells = results.load_results(folder)
    answers = sum(len(cell.answers) for cell in cells)  # reads and checks them all
    done = sum(bool(cell.summary) for cell in cells if cell.done)
    return f"results of {len(cells)} cells, {done} of them done, with {answers:,} answers"


def _describe_run(folder: Path) -> str:
    metadata, tensors = read_sealed(
        folder / checkpoint.CHECKPOINT_FILE, checkpoint.KIND, finite=True
    )
    return f"a training run at step {metadata.get('step', '?')[:20]} with {len(tensors)} tensors"


TRAINING_KINDS = (checkpoint.KIND, teacher_cache.KIND)
FILES: dict[str, Callable[[Path], str]] = {
    cache_file.KIND.format: _describe_cache,
    portable.KIND.format: _describe_portable,
    gate_file.FILE.format: _describe_gate,
}
FOLDERS: dict[str, Callable[[Path], str]] = {
    adapter_file.CONFIG: _describe_adapter,
    build_folder.MANIFEST_FILE: _describe_data,
    f"{results.CELLS}/*/{results.CELL}": _describe_results,
    checkpoint.CHECKPOINT_FILE: _describe_run,
}
