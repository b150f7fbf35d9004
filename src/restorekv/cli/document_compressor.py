"""The compressor for one document of a folder, in this process or in a worker of a Ray cluster.

Next to the cache files, the folder `.made` records what each of them was made from, so that a run
that was stopped can continue.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import __version__
from restorekv.cli.errors import name_flags
from restorekv.cli.loading import open_model
from restorekv.compression.adapters import load_adapter
from restorekv.compression.budget import parse_ratio
from restorekv.compression.config import CompressionConfig
from restorekv.compression.eviction import make_compressor
from restorekv.errors import RestoreKVError, summarize_error
from restorekv.files import read_bytes, read_record, write_json
from restorekv.model.identity import identify_model
from restorekv.pipeline import compress
from restorekv.readers.extract import read_document
from restorekv.seal import digest_file
from restorekv.size_limits import TEXT_BYTES
from restorekv.storage.cache_file import open_cache_file
from restorekv.storage.manifest import Manifest

# What one document may raise without ending the others.
EXPECTED = (RestoreKVError, OSError, MemoryError, RuntimeError)


@dataclass(frozen=True)
class CompressionRecipe:
    """A model and the settings to compress texts with, as `restorekv.compress` takes them."""

    model: str
    dtype: str
    device: str
    yarn: float | None
    evictor: str
    ratio: str | None
    tokens_per_head: int | None
    adapter: str | None
    config: CompressionConfig

    def get_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `compress` besides `config`."""
        return {
            "evictor": self.evictor,
            "ratio": self.ratio,
            "tokens_per_head": self.tokens_per_head,
            "adapter": self.adapter,
        }


@dataclass(frozen=True)
class DocumentResult:
    """What became of a document.

    Attributes:
        outcome: "wrote", "kept" (an earlier run made the same cache file) or "failed".
        held: Bytes of the small cache.
        full: Bytes of the full cache.
        reason: Why it failed, if it did.
        warning: Which parts of the document could not be read.
        whole: Whether the cache keeps every pair.
        restored: Whether an adapter's restore tokens are in the cache.
        cut: How many tokens of the text's end were dropped.
    """

    outcome: str
    held: int = 0
    full: int = 0
    reason: str = ""
    warning: str = ""
    whole: bool = False
    restored: bool = False
    cut: int = 0

    @classmethod
    def of_manifest(cls, outcome: str, manifest: Manifest, warning: str) -> Self:
        """Return the result for a cache file that exists, with the figures of its manifest."""
        return cls(
            outcome,
            held=manifest.bytes_held,
            full=manifest.bytes_full,
            warning=warning,
            whole=Fraction(manifest.ratio) == 1,
            restored=manifest.adapter is not None,
            cut=manifest.cut,
        )


class DocumentCompressor:
    """A compressor of documents with a model that it opens once."""

    def __init__(self, recipe: CompressionRecipe) -> None:
        self.recipe = recipe
        self.model_and_tokenizer: tuple[PreTrainedModel, Tokenizer] | None = None
        # JSON of everything that decides a cache file, except the document.
        self.recipe_identity = ""
        # A digest of the same without the library's version and code: what the user chose.
        self.settings_digest = ""

    def open(self) -> None:
        """Open the model, at the first call, and record the identity of model and settings."""
        if self.model_and_tokenizer is None:
            recipe = self.recipe
            opened = open_model(recipe.model, recipe.dtype, recipe.device, recipe.yarn)
            self._identify(*opened)
            self.model_and_tokenizer = opened

    def _identify(self, model: PreTrainedModel, tokenizer: Tokenizer) -> None:
        """Record what decides every cache file; refuse an adapter that does not fit."""
        recipe = self.recipe
        config = recipe.config
        compressor = make_compressor(recipe.evictor, config)
        identity = identify_model(model, tokenizer)
        separator = config.choose_separator(tokenizer)
        ratio = parse_ratio(recipe.ratio) if recipe.ratio else None
        adapter = load_adapter(
            model,
            recipe.adapter,
            compressor,
            config.restore_tokens,
            separator,
            ratio,
            identity,
        )
        settings = {**recipe.get_options(), **vars(config), **config.to_json()}
        settings["ratio"] = ratio and str(ratio)  # 0.1 and 0.10 are the same ratio
        # `chosen` has the separator that is really used.
        del settings["separator"]
        chosen = [
            identity.fingerprint,
            identity.rope,
            identity.template,
            str(model.dtype),
            separator,
            compressor.identity(model),
            adapter and adapter.identity(),
            settings,
        ]
        deciding = [__version__, compressor.digest_code(), *chosen]
        self.recipe_identity = json.dumps(deciding, sort_keys=True, default=str)
        settings_identity = json.dumps(chosen, sort_keys=True, default=str)
        self.settings_digest = hashlib.sha256(settings_identity.encode()).hexdigest()

    def is_foreign_file(self, target: str) -> bool:
        """Return whether `target` is an intact cache file that was made by something other than a
        run with these settings: somebody may still need it.
        """
        self.open()
        path = Path(target)
        if not path.exists():
            return False
        try:
            entries = read_record(locate_record(path), target)
            # A run that is killed may leave a record that does not name the file's bytes.
            is_own = entries.get("settings") == self.settings_digest and (
                entries.get("file") in (None, digest_file(path))
            )
        except (RestoreKVError, AttributeError):  # without a record, or with a damaged one
            is_own = False
        return not is_own and _is_intact(path)

    def compress_document(self, source: str, name: str, target: str) -> DocumentResult:
        """Write the cache file of a document, unless it is there already."""
        try:
            return self._compress(Path(source), name, Path(target))
        except EXPECTED as error:
            reason = summarize_error(error)
            if isinstance(error, RestoreKVError):
                reason = name_flags(str(error))
            return DocumentResult("failed", reason=reason or type(error).__name__)

    def _compress(self, source: Path, name: str, target: Path) -> DocumentResult:
        """Compress one document; raise what is wrong with it."""
        self.open()
        assert self.model_and_tokenizer is not None
        model, tokenizer = self.model_and_tokenizer
        content = read_bytes(source, name, TEXT_BYTES)
        record = locate_record(target)
        digest = hashlib.sha256(self.recipe_identity.encode() + content).hexdigest()
        result = _find_existing(target, record, digest)
        if result is not None:
            return result
        target.parent.mkdir(parents=True, exist_ok=True)
        record.parent.mkdir(exist_ok=True)
        extraction = read_document(name, content)
        compressed = compress(
            model,
            tokenizer,
            extraction.text,
            config=self.recipe.config,
            **self.recipe.get_options(),
        )
        # Without its seconds, a cache file has the same bytes whenever it is made.
        manifest = replace(compressed.manifest, seconds={})
        # Until the cache file is replaced, the record says only that these settings make it: a run
        # that is killed in between leaves no record of a document, so the file is made again.
        write_json(record, {"settings": self.settings_digest}, follow=False)
        replace(compressed, manifest=manifest).save(target)
        entries = {
            "of": digest,
            "settings": self.settings_digest,
            "file": digest_file(target),
            "seconds": compressed.manifest.seconds,
            "warning": extraction.warning,
        }
        write_json(record, entries, follow=False)
        return DocumentResult.of_manifest("wrote", manifest, extraction.warning)


def locate_record(target: Path) -> Path:
    """Return where the record of a cache file is."""
    return target.parent / ".made" / f"{target.name}.json"


def _is_intact(path: Path) -> bool:
    """Return whether a file is a cache file that can be used."""
    try:
        open_cache_file(path)
    except RestoreKVError:
        return False
    return True


def _find_existing(target: Path, record: Path, digest: str) -> DocumentResult | None:
    """Return the result of an intact cache file of the same document and settings, or None."""
    if not target.exists() or not record.exists():
        return None
    try:
        entries = read_record(record, str(record))
        if entries.get("of") != digest:
            return None
        manifest = open_cache_file(target).manifest
        # Old records do not name the file's bytes.
        if entries.get("file") not in (None, digest_file(target)):
            return None
    except (RestoreKVError, AttributeError):  # damaged: it is made again
        return None
    # The document is not read again, so repeat its recorded warning. Old records have none.
    warning = entries.get("warning", "")
    if not isinstance(warning, str) or not warning.isprintable():
        return None
    return DocumentResult.of_manifest("kept", manifest, warning)
