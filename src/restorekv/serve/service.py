"""The documents of requests: stores and compresses uploads, and compresses texts that come with a
request.

questions.py answers the questions about them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

from fastapi import UploadFile
from starlette.exceptions import HTTPException

from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.readers.extract import CACHE, TEXT, find_kind, printable_name, read_document
from restorekv.serve.document_checks import start_document_hash
from restorekv.serve.engine import (
    ENDING,
    BusyError,
    DeletedError,
    Engine,
    ServedDocument,
    UnavailableError,
    explain_resource_shortage,
)
from restorekv.serve.index import FAILED, PROCESSED, UPLOADED, Upload
from restorekv.serve.requests import (
    AnswerDefaults,
    AttachedFile,
    DocumentPart,
    RequestedDocument,
    UploadedFile,
    complete_name,
)
from restorekv.serve.store import Store
from restorekv.serve.variants import Variant

LOG = logging.getLogger("restorekv.serve")
RETRY_SECONDS = 5.0  # until an upload is tried again because the engine was not available
START_BYTES = 1024  # read first, to guess the kind of an upload if its name and type do not say it
# Extracts the text of files, which may take seconds.
READ_EXECUTOR = ThreadPoolExecutor(2, "restorekv-read")


@dataclass(frozen=True)
class Limits:
    """What requests may cost.

    Args:
        upload: Bytes of an upload or a body.
        tokens: Tokens of an answer.
        seconds: Seconds of a request.
        max_waiting: How many requests may wait for documents, and as many questions for answers.
    """

    upload: int = 64 << 20
    tokens: int = 1024
    seconds: float = 600.0
    max_waiting: int = 256


class ApiError(HTTPException):
    """An error response, in the form of OpenAI's API.

    Args:
        status: The HTTP status.
        message: A sentence for the client.
        code: A word for programs, as OpenAI's API has it.
        param: The field at fault, if there is one.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(status, message)
        self.code = code
        self.param = param


class Service:
    """The link between requests, the store and the engine.

    Args:
        engine: Compresses documents and answers questions.
        store: Keeps uploads and caches.
        model_name: The name of the model.
        default_variant: The variant that uploads are compressed as.
        limits: What requests may cost.
        defaults: Settings of answers, for requests that do not give them.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        model_name: str,
        default_variant: Variant,
        limits: Limits,
        defaults: AnswerDefaults,
    ) -> None:
        self.engine = engine
        self.store = store
        self.model_name = model_name
        self.default_variant = default_variant
        self.limits = limits
        self.defaults = defaults
        self.tasks: set[asyncio.Task] = set()  # uploads that are being processed
        self.waiting = 0  # requests that wait for their documents
        self.ending = False
        # By upload id, while an upload is processed: a sentence on parts that could not be read.
        self.warnings: dict[str, str] = {}

    def end(self) -> None:
        """Refuse everything new from now on, because the server ends."""
        self.ending = True
        self.engine.stop_asking()

    def check_open(self) -> None:
        """Refuse to begin anything once the server ends."""
        if self.ending:
            raise UnavailableError(ENDING)

    # Uploads.

    async def add_upload(self, file: UploadFile, purpose: str, seconds: int | None) -> Upload:
        """Store an upload and begin to compress it."""
        self.check_open()
        # FastAPI has received the file by now; its size is known.
        if (file.size or 0) > self.limits.upload:
            raise ApiError(413, f"The file is larger than {self.limits.upload:,} bytes; split it.")
        if file.size == 0:
            raise ApiError(400, "The file is empty; upload one with a text.")
        start = file.file.read(START_BYTES)
        file.file.seek(0)
        media_type = (file.content_type or "").partition(";")[0].strip().lower()
        name = printable_name(complete_name(file.filename or "file", media_type, start))
        try:
            upload = await asyncio.to_thread(
                self.store.add_upload, name, printable_name(purpose), file.file, seconds
            )
        except (OSError, sqlite3.Error, RestoreKVError) as error:
            # A full disk is not the client's fault, and passes.
            shortage = explain_resource_shortage(error, "The server cannot store the file: it")
            if shortage is None:
                raise
            raise ApiError(*shortage) from None
        self.start_processing(upload)
        return upload

    def start_processing(self, upload: Upload) -> None:
        """Begin to compress an upload in the background."""
        task = asyncio.create_task(self._process(upload))
        # The event loop itself keeps only weak references to tasks.
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def resume_processing(self) -> None:
        """Begin to compress what a former run of the server did not finish.

        If that run had a different model, uploads that failed may succeed now, and uploaded cache
        files may belong to the earlier model, so both are processed again. Texts that were
        processed are compressed again only when they are queried.
        """
        # A key depends on the document, the model and the settings. With "" for the document, it
        # identifies model and settings.
        origin = self.engine.make_key("", self.default_variant)
        has_changed = self.store.read_origin() != origin
        for upload in self.store.list_uploads():
            if has_changed and (upload.status == FAILED or find_kind(upload.name) == CACHE):
                self.store.set_status(upload, UPLOADED)
                upload = replace(upload, status=UPLOADED, problem="")
            if upload.status == UPLOADED:
                self.start_processing(upload)
        if has_changed:
            self.store.write_origin(origin)

    async def _process(self, upload: Upload) -> None:
        """Compress an upload as the default variant, and note the parts that could not be read."""
        warning = ""
        try:
            await self._compress_upload(upload, self.default_variant)
            warning = await self._find_warning(upload)
        except UnavailableError:
            if self.ending:  # the next start continues with it
                return
            # The engine is not available for a while, for example because a replica restarts.
            await asyncio.sleep(RETRY_SECONDS)
            if not self.store.drop_caches_if_deleted(upload):
                self.start_processing(upload)
        except Exception as error:  # after any error, the file has not been processed
            self.store.set_status(upload, FAILED, explain_error(error, "upload it again"))
        else:
            self.store.set_status(upload, PROCESSED, warning)

    def find_upload(self, upload_id: str) -> Upload:
        """Return an upload by its id; raise ApiError if there is none."""
        upload = self.store.get_upload(upload_id)
        if upload is None:
            raise make_missing_error(upload_id)
        return upload

    def choose_variant(self, upload: Upload, variant: Variant) -> Variant:
        """Return the variant to answer from, if a request asks for `variant` of an upload.

        An uploaded cache file stays as it was compressed, so only the model's name without a
        variant can query it. It is stored as the default variant, as every upload is at first.

        Raises:
            ApiError: A cache file is asked for by the name of a variant.
        """
        if find_kind(upload.name) != CACHE:
            return variant
        if variant.method:
            raise ApiError(
                400,
                f"The file {upload.id} is already compressed and cannot be served as "
                f"{variant.name}; use the model {self.model_name}, or upload its text.",
            )
        return self.default_variant

    def _read_content(self, upload: Upload) -> str | Path:
        """Return the text of an upload, or the path of an uploaded cache file."""
        if find_kind(upload.name) == CACHE:
            return self.store.upload_path(upload.id)
        extraction = read_document(upload.name, self.store.read_upload(upload))
        if upload.status == UPLOADED:
            self.warnings[upload.id] = extraction.warning
        return extraction.text

    async def _find_warning(self, upload: Upload) -> str:
        """Return a sentence on the parts of an upload that could not be read, or ""."""
        if upload.id not in self.warnings and find_kind(upload.name) not in (CACHE, TEXT):
            # Its cache was there already, made from another upload or by another server.
            duplicate = self.store.find_processed_duplicate(upload)
            if duplicate is not None:
                # The sentence names the other upload.
                return duplicate.problem.replace(duplicate.name, upload.name, 1)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(READ_EXECUTOR, self._read_content, upload)
        return self.warnings.pop(upload.id, "")

    # Documents of requests.

    async def get_documents(
        self, requested: Sequence[RequestedDocument], variant: Variant
    ) -> list[ServedDocument]:
        """Return a request's documents, from memory, from disk, or compressed now.

        Clients that send the whole conversation name a file again in every turn; it is read only
        once, at its first place.

        Raises:
            BusyError: Too many requests wait for theirs.
        """
        # Refuse immediately, not after minutes in a queue.
        if self.waiting >= self.limits.max_waiting:
            raise BusyError
        self.waiting += 1
        try:
            documents: dict[str, ServedDocument] = {}
            for each in requested:
                with _add_field_to_errors(each.field):
                    document = await self._get_document(each.part, variant)
                documents.setdefault(document.sha256, document)
            return list(documents.values())
        finally:
            self.waiting -= 1

    async def _get_document(self, part: DocumentPart, variant: Variant) -> ServedDocument:
        """Return the document of one part of a request: an upload's, a file's or a text's."""
        if isinstance(part, UploadedFile):
            if part.kind is not None:
                self._check_kind(part.id, part.kind)
            return await self.get_uploaded(part.id, variant)
        if isinstance(part, AttachedFile):
            # In a thread: extracting a PDF takes seconds, and others are answered meanwhile.
            loop = asyncio.get_running_loop()
            extraction = await loop.run_in_executor(
                READ_EXECUTOR, read_document, part.name, part.content
            )
            text = extraction.text
            if extraction.warning:
                LOG.warning(json.dumps({"problem": extraction.warning}))
        else:
            text = part
        # A byte order mark is not part of the text; files are read without it, too.
        text = text.lstrip("\ufeff")
        # The same text in another request is the same document.
        digest = start_document_hash(TEXT)
        digest.update(text.encode())
        while True:
            try:
                return await self.engine.get_document(digest.hexdigest(), variant, lambda: text)
            except DeletedError:
                # An upload of the same text was deleted; this request still needs the text.
                continue

    def _check_kind(self, upload_id: str, kind: str) -> None:
        """Refuse a stated format that differs from how the upload is read."""
        name = self.find_upload(upload_id).name
        if kind != find_kind(name):
            raise RestoreKVError(
                f"The given format of {upload_id} does not match {name}; leave the format out, or "
                "upload the file under a name with the right extension."
            )

    async def get_uploaded(self, upload_id: str, variant: Variant) -> ServedDocument:
        """Return the document that was uploaded under an id."""
        upload = self.find_upload(upload_id)
        if upload.status == FAILED:
            raise ApiError(400, f"{upload.name} could not be processed: {upload.problem}")
        variant = self.choose_variant(upload, variant)
        try:
            document = await self._compress_upload(upload, variant)
        except RestoreKVError:
            # If the file was deleted meanwhile, that explains the error best.
            if self.store.drop_caches_if_deleted(upload):
                raise DeletedError from None
            raise
        # Compressing takes long enough for a deletion to come in between.
        if self.store.drop_caches_if_deleted(upload):
            raise DeletedError
        return document

    async def _compress_upload(self, upload: Upload, variant: Variant) -> ServedDocument:
        """Return an upload's document; compress it unless its cache is there."""
        try:
            return await self.engine.get_document(
                upload.sha256, variant, lambda: self._read_content(upload)
            )
        except CacheFileError as error:
            # The client knows the file by its name, not by its path on the server.
            path = str(self.store.upload_path(upload.id))
            raise CacheFileError(str(error).replace(path, upload.name)) from error


@contextmanager
def _add_field_to_errors(field: str) -> Iterator[None]:
    """Add the request's field to an error of the block, unless the error names one already."""
    try:
        yield
    except ApiError as error:
        error.param = error.param or field
        raise
    except RestoreKVError as error:
        if error.option:
            raise
        # A copy, since other requests may wait for the same document and get the same error, and
        # name it in a different field.
        named = copy(error)
        named.option = field
        raise named from error


def make_missing_error(upload_id: str) -> ApiError:
    """Return the error for an id that no upload has."""
    return ApiError(
        404, f"There is no file {upload_id[:60]!r} here; upload it first.", "file_not_found"
    )


def explain_error(error: Exception, again: str = "try again") -> str:
    """Return a sentence for an error; only ours are meant for users, others are logged.

    If the disk is full, the sentence ends with what to do when there is room, `again`.
    """
    shortage = explain_resource_shortage(error, again=again)
    if shortage:
        return shortage[1]
    if isinstance(error, RestoreKVError):
        return str(error)
    LOG.error("unexpected error", exc_info=error)
    return "The server failed on this; its log says why."
