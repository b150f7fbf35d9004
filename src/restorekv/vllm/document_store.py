"""Documents of a folder, and which of them a prompt is about; needs no vLLM.

Both kinds of documents are found the same way: a prompt begins with a mark and with placeholders
that follow from a document's contents. Each kind has a store that lists its files and reads them:
`PortableStore` and `RaggedStore`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from transformers import PretrainedConfig

from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.model.position_limits import PositionLimit, refuse_long_question
from restorekv.model.rope import NO_LIMIT, get_rope_settings
from restorekv.model.shape import get_dtype_name
from restorekv.storage.manifest import Manifest
from restorekv.storage.portable import MARK

if TYPE_CHECKING:
    from vllm.config import VllmConfig


# A file's mtime and ctime, in nanoseconds, and its size.
Change = tuple[int, int, int]


@dataclass(frozen=True)
class EngineModel:
    """The engine's model, as far as documents must have been made for it.

    Args:
        layers: How many layers the model has.
        heads: KV heads of a layer.
        head_dim: The dimension of a head.
        rope: The settings of the model's RoPE.
        dtype: The engine's dtype, to which keys and values are cast.
        vocabulary: How many token ids there are.
        limit: How many positions the model was made for.
        fingerprint: The fingerprint of the weights; None fits any.
    """

    layers: int
    heads: int
    head_dim: int
    rope: Mapping[str, Any]
    dtype: str
    vocabulary: int
    limit: PositionLimit
    fingerprint: str | None = None

    @classmethod
    def from_vllm(cls, config: VllmConfig, fingerprint: str | None) -> EngineModel:
        """Return the requirements that an engine's model has for documents."""
        model = config.model_config
        text = model.hf_text_config
        return cls(
            layers=text.num_hidden_layers,
            heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            head_dim=model.get_head_size(),
            rope=get_rope_settings(text),
            dtype=get_dtype_name(model.dtype),
            vocabulary=text.vocab_size,
            limit=find_limit(text),
            fingerprint=fingerprint,
        )

    def check(self, manifest: Manifest, path: Path, vocabulary: int | None = None) -> None:
        """Refuse a document of a different model.

        Args:
            manifest: The document's manifest.
            path: Its file, for the error.
            vocabulary: How many token ids its placeholders were drawn from; None if they fit every
                model.

        Raises:
            CacheFileError: The document was made for a different model.
        """
        # vLLM keeps the pairs of a window itself, and there is no way to hand it those of a file.
        if manifest.windows:
            raise CacheFileError(
                f"{path} was made by a model with sliding-window layers, whose state vLLM cannot "
                "be given; serve it with the library's own engine."
            )
        if manifest.shares_pairs:
            raise CacheFileError(
                f"{path} was made by a model with latent attention, whose pairs vLLM holds in "
                "another form; serve it with the library's own engine."
            )
        if manifest.states or manifest.empty_layers:
            raise CacheFileError(
                f"{path} was made by a model with linear attention or convolutions, whose states "
                "vLLM cannot be given; serve it with the library's own engine."
            )
        found = {
            "rope": manifest.rope,
            "layers": manifest.shape["layers"],
            "heads": manifest.shape["heads"],
            "head_dim": manifest.shape["head_dim"],
        }
        for name, value in found.items():
            needed = getattr(self, name)
            if value != needed:
                raise CacheFileError(
                    f"{path} was made for {name} {value}, but the engine's model has {needed}."
                )
        if vocabulary is not None and vocabulary != self.vocabulary:
            raise CacheFileError(
                f"{path} was made for {vocabulary} token ids, but the engine's model has "
                f"{self.vocabulary}."
            )
        # Without a fingerprint of the engine's weights, only the shape can be checked.
        if self.fingerprint not in (None, manifest.fingerprint):
            raise CacheFileError(
                f"{path} was made with other weights ({manifest.fingerprint}, {manifest.model})."
            )


def find_limit(config: PretrainedConfig) -> PositionLimit:
    """Return how many positions vLLM's model can see in full.

    If all layers have a window, it limits the positions, as in the library's own engine. vLLM would
    not notice where the window ends: it counts placeholders, which are fewer than the tokens of the
    text. Documents of models that mix layers with and without a window are refused.
    """
    limit = PositionLimit.from_config(config)
    window = getattr(config, "sliding_window", None)
    return replace(limit, positions=min(limit.positions, window or NO_LIMIT))


@dataclass(frozen=True)
class StoredDocument:
    """A document of a store; if its file cannot be read, only `path` and `problem` are set.

    Args:
        path: Where its file is.
        name: A hash of its contents.
        ids: The placeholders that name it.
        positions: How many positions its text takes, which are more than the placeholders.
        problem: Why the file is not served.
        lengths: (L, H), pairs of every head, if heads may differ in length.
        parts: The documents of a composition.
    """

    path: Path
    name: str = ""
    ids: tuple[int, ...] = ()
    positions: int = 0
    problem: str = ""
    lengths: Tensor | None = None
    parts: tuple[StoredDocument, ...] = ()

    @property
    def files(self) -> tuple[tuple[str, Path], ...]:
        """Name and path of every file that the document is read from."""
        if self.parts:
            return tuple((part.name, part.path) for part in self.parts)
        return ((self.name, self.path),)


def _begins_with(ids: Sequence[int], placeholders: tuple[int, ...]) -> bool:
    """Return whether a prompt begins with a document's placeholders; a damaged file has none."""
    return bool(placeholders) and tuple(ids[: len(placeholders)]) == placeholders


def _contains(ids: Sequence[int], part: Sequence[int]) -> bool:
    """Return whether `ids` contains `part` as a run."""
    first = -1
    with suppress(ValueError):  # `index` finds no further occurrence
        while True:
            first = ids.index(part[0], first + 1)
            if list(ids[first : first + len(part)]) == part:
                return True
    return False


class DocumentStore(ABC):
    """The documents of a folder.

    A new file is found when a prompt first names it; damaged ones are never served.

    Args:
        folder: Where the files are.
        model: What they must have been made for.
        mark: The MARK ids with which placeholders begin.
    """

    pattern: ClassVar[str]  # of the files' names
    contents: ClassVar[str]  # what people put into the folder, for errors

    def __init__(self, folder: str | Path, model: EngineModel, mark: list[int]) -> None:
        self.folder = Path(folder)
        self.model = model
        self.marks = [mark]
        if not self.folder.is_dir():
            raise RestoreKVError(
                f"The store {folder} is not a folder; make it and put {self.contents} there."
            )
        # By path: what `_find_change` returned, and the document.
        self._files: dict[Path, tuple[Change, StoredDocument]] = {}
        # The last MARK ids of all placeholders seen so far, and the largest number of placeholders.
        self._ends: set[tuple[int, ...]] = set()
        self._longest = 0

    @abstractmethod
    def _read_document(self, path: Path) -> StoredDocument:
        """Read and check a file."""

    @property
    def documents(self) -> list[StoredDocument]:
        """Every file that was found so far, those that are served first."""
        # False sorts before True: those without a problem come first.
        found = [document for _, document in self._files.values()]
        return sorted(found, key=lambda document: bool(document.problem))

    def find_document(self, ids: Sequence[int], wanted: str | None = None) -> StoredDocument | None:
        """Return the document that a prompt asks, or None for a prompt that asks none.

        Args:
            ids: The prompt's ids.
            wanted: The document's name or its file's name, if the request gives one as well.

        Raises:
            RestoreKVError: The placeholders name no document of the store, one that does not fit,
                or one other than `wanted`; they are not complete at the beginning; no question
                follows them; or the question ends beyond the model's positions.
        """
        # The first ids mark a document; a prompt that begins otherwise is an ordinary one.
        if list(ids[:MARK]) not in self.marks:
            if wanted:
                raise RestoreKVError(
                    f"The prompt does not begin with placeholders of the document {wanted}."
                )
            self.refuse_misplaced(ids)
            return None
        document = self._find(lambda each: _begins_with(ids, each.ids))
        if document is None:
            sentences = [
                "The prompt begins with placeholders of a document that the store does not have."
            ]
            # A file that cannot be read has no placeholders, and may be the one that is wanted.
            for each in self.documents:
                if not each.ids and each.path.exists():
                    sentences.append(each.problem)
            raise RestoreKVError(" ".join(sentences))
        path = document.path
        if wanted and wanted not in (document.name, path.stem, path.name):
            raise RestoreKVError(
                f"The prompt begins with placeholders of {path.name}, but the request names "
                f"{wanted}."
            )
        # Something must follow: the engine computes the last token of a prompt itself.
        if len(ids) <= len(document.ids):
            raise RestoreKVError(f"The prompt has placeholders of {path.name} and no question.")
        self.refuse_misplaced(ids[len(document.ids) :])
        self.refuse_long_prompt(document, ids)
        return document

    @property
    def signs(self) -> list[list[int]]:
        """The marks with which placeholders of any kind begin; a subclass may know more kinds."""
        return self.marks

    def refuse_misplaced(self, ids: Sequence[int]) -> None:
        """Raise RestoreKVError for placeholders among the ids of a text.

        vLLM would read them as a text, and silently answer about something else. If placeholders
        were cut at their beginning, only their end can be recognized.
        """
        has_sign = any(_contains(ids, sign) for sign in self.signs)
        beginning = ids[: self._longest]
        has_end = any(
            tuple(beginning[first : first + MARK]) in self._ends for first in range(len(beginning))
        )
        if has_sign or has_end:
            raise RestoreKVError(
                "The prompt has placeholders of a document that are not complete at its beginning; "
                "put nothing before what restorekv.vllm.prompt returns, pass several documents and "
                "turns to one call of it, and leave out truncate_prompt_tokens."
            )

    def refuse_long_prompt(self, document: StoredDocument, ids: Sequence[int]) -> None:
        """Raise RestoreKVError for a prompt whose question ends beyond the model's positions.

        vLLM does not notice this: it counts placeholders, not the positions of the document's text.
        """
        question = len(ids) - len(document.ids)
        refuse_long_question(self.model.limit, document.positions, question)

    def count_answer_room(self, document: StoredDocument, ids: Sequence[int]) -> int:
        """Return how many tokens an answer to a prompt may have.

        It is at least one: the first token of an answer is predicted at the question's last
        position.
        """
        question = len(ids) - len(document.ids)
        return max(self.model.limit.positions - document.positions - question, 1)

    def _find(self, is_asked: Callable[[StoredDocument], bool]) -> StoredDocument | None:
        """Return the document that is asked; look for new files if no known document is.

        Raises:
            RestoreKVError: Its file is not served.
        """
        # Folders are read again only for a document that is not known, not for every prompt.
        document = self._match(is_asked)
        if document is None and self.scan():
            document = self._match(is_asked)
        if document is not None and document.problem:
            raise RestoreKVError(document.problem)
        return document

    def _match(self, is_asked: Callable[[StoredDocument], bool]) -> StoredDocument | None:
        """Return the known document that is asked, if its file is still there, unchanged.

        Of several, one that can be served comes first.
        """
        for document in self.documents:
            # After a rename, its path has a different file, or none.
            if is_asked(document) and _find_change(document.path) == self._files[document.path][0]:
                return document
        return None

    def scan(self) -> bool:
        """Read files that are new or changed; return whether there were any."""
        has_news = False
        for path in sorted(self.folder.glob(self.pattern)):
            changed = _find_change(path)
            if changed is None:  # it was just moved away, or is a circular link
                continue
            known, _ = self._files.get(path, (None, None))
            if known != changed:
                has_news = True
                with suppress(OSError):
                    document = self._read_document(path)
                    self._files[path] = (changed, document)
                    if document.ids:
                        self._ends.add(document.ids[-MARK:])
                        self._longest = max(self._longest, len(document.ids))
        return has_news


def _find_change(path: Path) -> Change | None:
    """Return the times and the size by which a changed file is noticed, None if there is no file.

    Files from an archive may all have one time of modification, so the ctime counts too, which
    users cannot set.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size


def find_heads(rank: int, ranks: int, heads: int) -> slice:
    """Return the KV heads that a tensor parallel rank holds.

    If there are more ranks than heads, neighboring ranks share a head.
    """
    # 8 ranks of 2 heads: ranks 0 to 3 hold head 0, ranks 4 to 7 head 1, as in vLLM.
    own = max(heads // ranks, 1)
    first = rank * heads // ranks
    return slice(first, first + own)
