"""How vLLM is given compressed documents: as cache files, or as portable files.

Cache files need restorekv's attention backend, which one release of vLLM is known to run. Portable
files work with any backend, and have one length in every head, which costs fidelity (docs/vllm.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from restorekv.context import CompressedContext
from restorekv.errors import RestoreKVError
from restorekv.storage.cache_file import open_cache_file
from restorekv.storage.portable import make_portable_mark
from restorekv.vllm import plugin, ragged_config, ragged_documents, transfer_config
from restorekv.vllm.document_store import EngineModel
from restorekv.vllm.portable_store import PortableStore
from restorekv.vllm.ragged_store import RaggedStore, refuse_too_large


@dataclass(frozen=True)
class DocumentFile:
    """A file for vLLM: the placeholders of its document, and its size in bytes."""

    ids: list[int]
    size: int


class DocumentForm(ABC):
    """How a compressed document becomes a file, and how vLLM is started to read it.

    `name` is what `--vllm-documents` takes, `compress_settings` are fields of `CompressionConfig`
    that documents need, `environment` is what vLLM's processes need, and `engine_options` are its
    arguments unless the user overrides them. `needs_cpu`: vLLM reads this form on CPUs alone.
    """

    name: ClassVar[str]
    suffix: ClassVar[str]
    compress_settings: ClassVar[Mapping[str, Any]] = {}
    environment: ClassVar[Mapping[str, str]] = {}
    engine_options: ClassVar[Mapping[str, Any]] = {}
    needs_cpu: ClassVar[bool] = False

    @abstractmethod
    def check_version(self) -> None:
        """Refuse a vLLM that cannot read this form."""

    @abstractmethod
    def check_context(self, context: CompressedContext) -> None:
        """Refuse a document that this form cannot hold."""

    @abstractmethod
    def write_file(self, context: CompressedContext, path: Path) -> DocumentFile:
        """Write a document."""

    @abstractmethod
    def make_mark(self, vocabulary: int) -> list[int]:
        """Return the ids with which placeholders begin, for a model with `vocabulary` ids."""

    @abstractmethod
    def make_config(
        self, folder: Path, fingerprint: str | None = None, memory: int | None = None
    ) -> dict[str, Any]:
        """Return vLLM's kv_transfer_config.

        Args:
            folder: The folder of the files.
            fingerprint: The fingerprint of the weights that documents must have been made with.
            memory: Bytes of documents that each worker holds.
        """

    @abstractmethod
    def load_as_vllm(self, config: Any, folder: Path, fingerprint: str, ids: Sequence[int]) -> None:
        """Load the document of a prompt as vLLM does; raise the error with which that fails.

        Args:
            config: vLLM's.
            folder: The folder of the files.
            fingerprint: The fingerprint of the model's weights.
            ids: The prompt's ids.
        """


class RaggedForm(DocumentForm):
    """Cache files unchanged: every head keeps its own number of pairs."""

    name = "ragged"
    suffix = ".rkv"
    environment: ClassVar[Mapping[str, str]] = {plugin.OPTION: "1"}
    # vLLM's own blocks on a CPU are larger than a document's placeholders.
    engine_options: ClassVar[Mapping[str, Any]] = {"block_size": ragged_documents.PLACEHOLDERS}
    needs_cpu = True

    def check_version(self) -> None:
        found = plugin.installed_version()
        if found not in plugin.TESTED:
            raise RestoreKVError(
                f"Cache files are served in vLLM {' and '.join(plugin.TESTED)}, and this is "
                f"{found}; install one of these, or pass --vllm-documents portable."
            )

    def check_context(self, context: CompressedContext) -> None:
        if any(layer.bias is not None for layer in context.cache.full_attention):
            raise RestoreKVError(
                "Caches of Attention Matching add a bias to logits, which vLLM's attention cannot; "
                "compress with another evictor, such as kvzip."
            )

    def write_file(self, context: CompressedContext, path: Path) -> DocumentFile:
        self.check_context(context)
        context.save(path)
        # Identify the file as it is read back: the ids follow from the stored tensors.
        identity = ragged_documents.identify(open_cache_file(path))
        return DocumentFile(list(identity.ids), context.manifest.bytes_held)

    def make_mark(self, vocabulary: int) -> list[int]:
        return ragged_documents.make_ragged_mark()

    def make_config(
        self, folder: Path, fingerprint: str | None = None, memory: int | None = None
    ) -> dict[str, Any]:
        return ragged_config(folder, documents_memory=memory, fingerprint=fingerprint)

    def load_as_vllm(self, config: Any, folder: Path, fingerprint: str, ids: Sequence[int]) -> None:
        # The connector's own code, so that what failed in vLLM fails here in the same way.
        store = RaggedStore(folder, EngineModel.from_vllm(config, fingerprint))
        document = store.find_document(ids)
        if document is not None:
            refuse_too_large(document, config)
            for name, path in document.files:
                ragged_documents.load_file(path, name)


class PortableForm(DocumentForm):
    """Portable files: one length in every head."""

    name = "portable"
    suffix = ".safetensors"
    compress_settings: ClassVar[Mapping[str, Any]] = {"allocation": "per-head"}

    def check_version(self) -> None:
        """Refuse none: the connector uses what several releases have in common."""

    def check_context(self, context: CompressedContext) -> None:
        context.portable()

    def write_file(self, context: CompressedContext, path: Path) -> DocumentFile:
        portable = context.portable()
        portable.save(path)
        return DocumentFile(portable.ids.tolist(), portable.keys.nbytes + portable.values.nbytes)

    def make_mark(self, vocabulary: int) -> list[int]:
        return make_portable_mark(vocabulary)

    def make_config(
        self, folder: Path, fingerprint: str | None = None, memory: int | None = None
    ) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if fingerprint is not None:
            options["fingerprint"] = fingerprint
        if memory is not None:
            options["memory"] = memory
        return transfer_config(folder, **options)

    def load_as_vllm(self, config: Any, folder: Path, fingerprint: str, ids: Sequence[int]) -> None:
        store = PortableStore(folder, EngineModel.from_vllm(config, fingerprint))
        document = store.find_document(ids)
        if document is not None:
            store.load_pairs(document)


FORMS: dict[str, DocumentForm] = {form.name: form for form in (RaggedForm(), PortableForm())}
DEFAULT = RaggedForm.name


def find_form(name: str) -> DocumentForm:
    """Return a form by its name; refuse unknown names."""
    if name not in FORMS:
        raise RestoreKVError(f"--vllm-documents must be one of {', '.join(FORMS)}, not {name!r}.")
    return FORMS[name]
