"""`restorekv verify FILE...`: whether files can be trusted to load, and what they are, in a sentence each."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from restorekv.cli import options
from restorekv.cli.session import method_of, output
from restorekv.compression import context_file
from restorekv.compression.portable import FORMAT as PORTABLE
from restorekv.compression.portable import load_portable
from restorekv.data import manifest as data_manifest
from restorekv.data.mixture import read_mixture
from restorekv.errors import RestoreKVError
from restorekv.evaluation import results
from restorekv.evictors import gate_file
from restorekv.files import read_tensors
from restorekv.restore import adapter_file
from restorekv.seal import read_key
from restorekv.train import checkpoint, tensor_file

Key = bytes | None


def run(
    files: Annotated[list[Path], typer.Argument(help="Cache files, gates, folders of adapters, data or results.")],
    sign_key: options.SignKey = None,
) -> None:
    key, refused = read_key(sign_key), 0
    for path in files:
        try:
            what, signed = described(path, key)
        except RestoreKVError as error:
            refused += 1
            output.print(Text(f"refused  {error}"), soft_wrap=True)
            continue
        output.print(Text(f"intact   {path}: {what}{', signed with this key' if signed else ''}."), soft_wrap=True)
    if refused:
        raise RestoreKVError(f"{refused} of {len(files)} cannot be loaded; see above why.")


def described(path: Path, key: Key) -> tuple[str, bool]:
    """Says what a file or folder is and whether it is signed with the key; refuses what would not load."""
    if path.is_dir():
        for file, describe in FOLDERS.items():
            if any(path.glob(file)):
                return describe(path), False
        raise RestoreKVError(f"{path} is no folder that restorekv made; name a file or another folder.")
    metadata, tensors = read_tensors(path, str(path))
    kind = metadata.get("format")
    if kind in SIGNED:
        return SIGNED[kind](path, key), key is not None
    if kind == gate_file.FORMAT:
        gate = gate_file.read(path)
        return f"a gate of kind {gate.card.kind} for {gate.card.model}", False
    tensor_file.read(path, str(path), "make it again")
    summed = "" if tensor_file.SUM in metadata else ", without a checksum"
    return f"a safetensors file of {len(tensors)} tensors, as training keeps them{summed}", False


def cache(path: Path, key: Key) -> str:
    m = context_file.read(path, key).manifest
    return f"a cache of {m.tokens:,} tokens for {m.model}, {method_of(m)}, r = {m.ratio}, {m.pairs_held:,} pairs"


def portable(path: Path, key: Key) -> str:
    stored = load_portable(path, key=key)
    m = stored.manifest
    return f"a portable cache of {m.tokens:,} tokens as {stored.tokens:,} positions for {m.model}, {stored.name}"


def adapter(folder: Path) -> str:
    stored = adapter_file.read(folder)
    card = stored.card
    known = f"for {card.model}, {card.evictor or 'any evictor'}, license {card.license}" if card else "without a record"
    return f"a restore adapter of {len(stored.embeddings)} tokens {known}"


def data(folder: Path) -> str:
    contexts, manifest = read_mixture(folder)
    return f"training data of {len(contexts):,} contexts from {len(manifest['sources'])} sources"


def grid(folder: Path) -> str:
    cells = results.load(folder)
    answers = sum(len(cell.answers) for cell in cells)  # reads and checks them all
    done = sum(bool(cell.summary) for cell in cells if cell.done)
    return f"results of {len(cells)} cells, {done} of them done, with {answers:,} answers"


def training(folder: Path) -> str:
    metadata, tensors = tensor_file.read(folder / checkpoint.FILE, str(folder / checkpoint.FILE), "train again")
    return f"a training run at step {metadata.get('step', '?')[:20]} with {len(tensors)} tensors"


SIGNED: dict[str, Callable[[Path, Key], str]] = {context_file.FORMAT: cache, PORTABLE: portable}
FOLDERS: dict[str, Callable[[Path], str]] = {
    adapter_file.CONFIG: adapter, data_manifest.NAME: data, f"{results.CELLS}/*/{results.CELL}": grid,
    checkpoint.FILE: training,
}  # fmt: skip
