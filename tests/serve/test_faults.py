"""What goes wrong around requests: users' own files, full disks, deletions, engines that are not
there, the server's end.
"""

import errno
import gc
import io
import os
import sqlite3
import threading
import time
import weakref
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor

import pytest

openai = pytest.importorskip("openai")

from restorekv.context import CompressedContext  # noqa: E402
from restorekv.errors import CacheFileError, RestoreKVError  # noqa: E402
from restorekv.generation.decoding import BATCH  # noqa: E402
from restorekv.model.shape import get_backbone  # noqa: E402
from restorekv.serve import caches, service, shared  # noqa: E402
from restorekv.serve.caches import CacheEngine  # noqa: E402
from restorekv.serve.engine import DeletedError, UnavailableError  # noqa: E402
from restorekv.serve.service import Limits  # noqa: E402
from restorekv.serve.store import Store  # noqa: E402
from restorekv.serve.variants import Variant  # noqa: E402
from tests.helpers.caches import DocumentHolder  # noqa: E402
from tests.helpers.serving import (  # noqa: E402
    OTHER,
    QUESTION,
    TEXT,
    about,
    ask,
    client_of,
    serving,
    until,
    upload,
)

MUCH, SHA = 1 << 30, "ab" * 32


@pytest.fixture
def client(model, tiny_tokenizer, tmp_path):
    with serving(model, tiny_tokenizer, tmp_path, limits=Limits(tokens=64, max_waiting=8)) as url:
        yield client_of(url)


@pytest.fixture
def slow(model):
    """Three events that hold up a compression: `stop`, `inside` and `go`.

    Once `stop` is set, the compressing thread sets `inside` between two layers and waits for `go`.
    """
    stop, inside, go = threading.Event(), threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        if threading.current_thread().name.startswith("restorekv-compress") and stop.is_set():
            inside.set()
            go.wait(30)

    hook = get_backbone(model).layers[1].register_forward_pre_hook(wait)
    yield stop, inside, go
    go.set()
    hook.remove()


def test_a_users_own_files_stay(tmp_path):
    own = [
        tmp_path / "files" / "thesis.txt",
        tmp_path / "caches" / "thumb.png",
        tmp_path / "files" / "photos" / "a",
    ]
    for path in own:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    left = tmp_path / "caches" / f"{SHA[:32]}.rkv"
    left.write_text("of a server that was killed")
    Store(tmp_path, MUCH).close()
    assert all(path.exists() for path in own) and not left.exists()


def test_uploads_without_their_index_are_not_deleted(tmp_path):
    store = Store(tmp_path, MUCH)
    made = store.add_upload("a.txt", "user_data", io.BytesIO(b"text"))
    store.close()
    (tmp_path / "index.sqlite").rename(tmp_path / "away")
    with pytest.raises(RestoreKVError, match="has files and no index; move the whole folder away"):
        Store(tmp_path, MUCH)
    (tmp_path / "away").rename(tmp_path / "index.sqlite")
    store = Store(tmp_path, MUCH)
    assert store.read_upload(made) == b"text"
    store.close()


def test_an_upload_whose_row_does_not_fit_leaves_no_file(tmp_path):
    store = Store(tmp_path, MUCH)
    store.index.disk.execute("pragma query_only = 1")
    with pytest.raises(sqlite3.OperationalError):
        store.add_upload("a.txt", "user_data", io.BytesIO(b"text"))
    assert not list((tmp_path / "files").iterdir())
    store.close()


def test_bytes_are_another_document_under_another_ending(tmp_path):
    store = Store(tmp_path, MUCH)
    page = [
        store.add_upload(name, "x", io.BytesIO(b"<p>a</p>")).sha256
        for name in ("a.txt", "a.md", "a.html", "a.HTM", "a.rkv")
    ]
    assert page[0] == page[1] and page[2] == page[3] and len(set(page)) == 3
    store.close()


KINDS = {"txt": "text", "html": "html", "pdf": "pdf", "docx": "docx", "rkv": "rkv"}


@pytest.mark.parametrize("one, other", [(a, b) for a in KINDS for b in KINDS if a != b])
def test_no_content_of_one_kind_has_the_name_of_another(tmp_path, one, other):
    """Such as a text that begins with "html", and a page: kind and content were once hashed without
    a separator.
    """
    store = Store(tmp_path, MUCH)
    page = store.add_upload(f"page.{one}", "x", io.BytesIO(b"<p>a</p>")).sha256
    begins = [KINDS[one].encode(), len(KINDS[one]).to_bytes(8, "big") + KINDS[one].encode()]
    for begin in begins:
        assert (
            store.add_upload(f"notes.{other}", "x", io.BytesIO(begin + b"<p>a</p>")).sha256 != page
        )
    store.close()


def test_a_page_never_answers_from_a_text(client, tmp_path):
    page = "<html><body><p>" + TEXT + "</p></body></html>"
    text = upload(client, "html" + page, "notes.txt")
    assert text.status == "processed"
    read = [
        ask(client, about(each)).usage.prompt_tokens
        for each in (text, upload(client, page, "page.html"))
    ]
    assert read[0] > read[1], "the text has the tags in it"
    assert len(list((tmp_path / "caches").iterdir())) == 2


def test_a_byte_order_mark_is_no_part_of_a_text(client):
    """It is dropped from files and from texts in requests, so the same bytes are the same text."""
    made = upload(client, b"\xef\xbb\xbf" + TEXT.encode())
    part = {"type": "text", "text": f"\ufeff{TEXT}", "cache_control": {"type": "ephemeral"}}
    inline = [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}]
    assert (
        ask(client, inline).choices[0].message.content
        == ask(client, about(made)).choices[0].message.content
    )


def test_a_file_whose_whole_name_is_an_ending_is_of_one_kind(client):
    # A text, by name and by how it is read.
    assert upload(client, TEXT, ".rkv").status == "processed"


def test_an_answer_that_leaves_its_grammar_harms_no_other(client):
    """llguidance gives up on this schema in the middle of an answer."""
    made = upload(client)
    many = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/x"}}] * 400}
    form = {"name": "x", "schema": {"$defs": {"x": many}, "$ref": "#/$defs/x"}}

    def one(number: int) -> str:
        more = (
            {"response_format": {"type": "json_schema", "json_schema": form}} if number == 2 else {}
        )
        try:
            return ask(client, about(made, question=f"{number}?"), **more).choices[0].finish_reason
        except openai.BadRequestError as error:
            return error.message

    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(one, range(4)))
    assert "grammar" in ended.pop(2) and set(ended) <= {"stop", "length"}


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0}, {"logprobs": True, "top_logprobs": 2}, {"stream": True}]
)
def test_a_document_over_which_the_model_computes_no_numbers_fails_its_own_questions(
    client, monkeypatch, options
):
    """They fail with 400 and a sentence; a question about another document in the same batch is
    answered.
    """
    compress = caches.compress

    def overflowing(model, tokenizer, text, **how):
        made = compress(model, tokenizer, text, **how)
        for layer in made.cache.layers if "overflow" in text else ():
            layer.context_values.fill_(float("nan"))
        return made

    monkeypatch.setattr(caches, "compress", overflowing)
    good, bad = upload(client), upload(client, TEXT + " overflow")

    def one(number: int) -> str:
        try:
            said = ask(client, about(bad if number % 2 else good, question=f"{number}?"), **options)
            return (
                list(said)[-1].choices[0].finish_reason
                if "stream" in options
                else said.choices[0].finish_reason
            )
        except openai.BadRequestError as error:
            return error.message

    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(one, range(4)))
    assert all("not finite" in each for each in ended[1::2]) and set(ended[::2]) <= {
        "stop",
        "length",
    }


def test_a_document_deleted_while_it_is_compressed_otherwise_leaves_nothing(client, slow, tmp_path):
    made, (stop, inside, go) = upload(client), slow
    stop.set()
    with ThreadPoolExecutor(1) as pool:
        # Of another evictor than the upload's, so that the text is read again.
        asking = pool.submit(ask, client, about(made), "tiny:knorm-0.2")
        assert inside.wait(30)
        client.files.delete(made.id)
        go.set()
        with pytest.raises(openai.NotFoundError, match="was deleted while it was compressed"):
            asking.result()
    assert not list((tmp_path / "files").iterdir()) and not list((tmp_path / "caches").iterdir())


@pytest.mark.parametrize("processed", [True, False])
def test_a_text_that_was_uploaded_twice_outlives_one_of_its_names(
    client, slow, tmp_path, processed
):
    stop, inside, go = slow
    if not processed:
        stop.set()
    first = upload(client, TEXT, "first.txt", wait=processed)
    second = upload(client, TEXT, "second.txt", wait=processed)
    if not processed:
        assert inside.wait(30)
    client.files.delete(first.id)
    go.set()
    waiting = client.files.wait_for_processing(second.id, poll_interval=0.02)
    assert waiting.status == "processed"
    assert [each.filename for each in client.files.list()] == ["second.txt"]
    assert client.files.content(second.id).read() == TEXT.encode()
    answer = ask(client, about(second))
    assert answer.usage.prompt_tokens_details.cache_write_tokens == 0
    with pytest.raises(openai.NotFoundError):
        ask(client, about(first))
    client.files.delete(second.id)
    assert not list((tmp_path / "caches").iterdir()) and not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize("processed", [True, False])
def test_compressing_a_document_ends_when_it_is_deleted(client, slow, monkeypatch, processed):
    """Also if the question waits for a compression that the upload itself began."""
    stop, inside, go = slow
    made = None
    if processed:
        made = upload(client)
    ended = []
    compress = caches.compress

    def compress_watched(*arguments, **options):
        try:
            return compress(*arguments, **options)
        except Exception as error:
            ended.append(type(error))
            raise

    monkeypatch.setattr(caches, "compress", compress_watched)
    stop.set()
    made = made or upload(client, wait=False)
    with ThreadPoolExecutor(1) as pool:
        model = ["tiny:knorm-0.2"] if processed else []
        asking = pool.submit(ask, client, about(made), *model)
        assert inside.wait(30)
        client.files.delete(made.id)
        go.set()
        with pytest.raises(openai.NotFoundError):
            asking.result()
    assert ended == [DeletedError]


def test_a_text_in_a_request_outlives_an_upload_of_the_same_text(client, slow):
    stop, inside, go = slow
    text = b64encode(TEXT.encode()).decode()
    file = {"type": "file", "file": {"filename": "a.txt", "file_data": text}}
    messages = [{"role": "user", "content": [file, {"type": "text", "text": QUESTION}]}]
    stop.set()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, client, messages)
        assert inside.wait(30)
        client.files.delete(upload(client, wait=False).id)
        go.set()
        assert asking.result().choices[0].message.content


def test_a_damaged_cache_file_is_told_by_its_name(client, monkeypatch, tmp_path):
    """The error names the file, also if the question comes before the upload is processed."""
    monkeypatch.setattr(service.Service, "start_processing", lambda self, upload: None)
    bad = upload(client, b"no cache", "bad.rkv", wait=False)
    with pytest.raises(openai.BadRequestError, match=r"bad\.rkv ") as caught:
        ask(client, about(bad), "tiny")
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("change", [lambda content: content[:-9], lambda content: content.upper()])
def test_a_damaged_upload_is_refused_and_gives_no_cache(client, tmp_path, change):
    """Its caches are named by what was uploaded, so they would answer for sound uploads as well."""
    damaged = upload(client)
    path = tmp_path / "files" / damaged.id
    path.write_bytes(change(path.read_bytes()))
    problem = rf"doc\.txt is damaged on the server's disk; delete {damaged.id}, and upload it again"
    with pytest.raises(openai.BadRequestError, match=problem) as caught:
        ask(client, about(damaged), "tiny:snapkv-0.6")
    assert caught.value.param == "messages.0.content.0.file"
    with pytest.raises(openai.BadRequestError, match=problem):
        client.files.content(damaged.id)
    sound = upload(client)
    answer = ask(client, about(sound), "tiny:snapkv-0.6")
    assert answer.usage.prompt_tokens_details.cache_write_tokens
    # The cache that was made of the sound file answers for both.
    assert ask(client, about(damaged), "tiny:snapkv-0.6").choices[0].message.content


def test_requests_that_wait_for_documents_are_counted(client, slow):
    stop, _, go = slow
    stop.set()
    with ThreadPoolExecutor(9) as pool:
        texts = [b64encode(f"{number} {OTHER}".encode()).decode() for number in range(9)]
        files = [
            {"type": "file", "file": {"filename": "a.txt", "file_data": text}} for text in texts
        ]
        parts = [[file, {"type": "text", "text": "Who?"}] for file in files]
        asking = [pool.submit(ask, client, [{"role": "user", "content": each}]) for each in parts]
        until(lambda: any(each.done() for each in asking))
        go.set()
        ended = [each.exception() for each in asking]
    assert [type(each) for each in ended if each] == [openai.RateLimitError]


def test_documents_that_take_too_long_are_told_as_the_reason(model, tiny_tokenizer, tmp_path, slow):
    """The error does not ask for a shorter answer, which would not help."""
    stop, _, go = slow
    with serving(model, tiny_tokenizer, tmp_path, limits=Limits(seconds=0.3)) as url:
        stop.set()  # the check at the start is over
        content = [
            {"type": "text", "text": OTHER, "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Who?"},
        ]
        with pytest.raises(openai.InternalServerError, match="were not compressed") as late:
            ask(client_of(url), [{"role": "user", "content": content}])
        go.set()
    assert late.value.status_code == 504 and "within 0.3 seconds" in str(late.value)


def test_nothing_is_compressed_for_clients_who_left(client, slow, tmp_path):
    stop, inside, go = slow
    stop.set()
    upload(client, wait=False)
    assert inside.wait(30)
    text = b64encode(OTHER.encode()).decode()
    parts = [
        {"type": "file", "file": {"filename": "a.txt", "file_data": text}},
        {"type": "text", "text": "Who?"},
    ]
    with pytest.raises(openai.APITimeoutError):
        ask(client, [{"role": "user", "content": parts}], timeout=0.5)
    time.sleep(2.5)  # the server looks every second
    go.set()
    upload(client, f"Another one. {TEXT}")
    assert len(list((tmp_path / "caches").iterdir())) == 2


def test_the_end_waits_for_no_compression_and_the_next_start_goes_on(
    model, tiny_tokenizer, tmp_path, slow
):
    stop, inside, go = slow
    with serving(model, tiny_tokenizer, tmp_path) as url:
        stop.set()
        made = [upload(client_of(url), f"{number} {TEXT}", wait=False) for number in range(5)]
        assert inside.wait(30)
        threading.Timer(0.5, go.set).start()
    stop.clear()
    store = Store(tmp_path, MUCH)
    assert [each.status for each in store.list_uploads()] == ["uploaded"] * 5 and not list(
        (tmp_path / "caches").iterdir()
    )
    store.close()
    with serving(model, tiny_tokenizer, tmp_path) as url:
        for each in made:
            assert (
                client_of(url).files.wait_for_processing(each.id, poll_interval=0.02).status
                == "processed"
            )


def test_an_upload_outlasts_an_engine_that_is_away(client, monkeypatch):
    monkeypatch.setattr(service, "RETRY_SECONDS", 0.1)
    real, left = (
        CacheEngine.make_document,
        [UnavailableError("vLLM does not answer; ask again in a moment.")] * 2,
    )

    def fetch(self, *order):
        if left:
            raise left.pop()
        return real(self, *order)

    monkeypatch.setattr(CacheEngine, "make_document", fetch)
    assert upload(client).status == "processed" and not left


def test_a_full_disk_is_507_and_too_many_open_files_503(client, monkeypatch):
    made = upload(client)
    statuses = {errno.ENOSPC: 507, errno.EDQUOT: 507, errno.EROFS: 507, errno.EMFILE: 503}
    for number, status in statuses.items():

        def save(*_: object, number: int = number) -> None:
            try:
                raise OSError(number, os.strerror(number))
            except OSError as error:
                raise CacheFileError(
                    f"/secret/place cannot be written ({error.strerror}); choose another."
                ) from None

        with monkeypatch.context() as patched, pytest.raises(openai.APIStatusError) as told:
            patched.setattr(CompressedContext, "save", save)
            ask(client, about(made), f"tiny:snapkv-0.{number}")
        assert told.value.status_code == status
        assert "secret" not in str(told.value) and os.strerror(number) in str(told.value)


def test_a_sound_cache_that_cannot_be_read_now_stays(model, tiny_tokenizer, tmp_path, monkeypatch):
    caches, variant = (
        DocumentHolder(model, tiny_tokenizer, Store(tmp_path, MUCH)),
        Variant.parse("tiny:snapkv-0.4", "tiny"),
    )
    made = caches.make_document(SHA, variant, lambda: TEXT)
    caches.held.clear()

    def load(*_: object) -> None:
        try:
            raise OSError(errno.EMFILE, "Too many open files")
        except OSError as error:
            raise CacheFileError(f"Cannot read ({error.strerror}).") from None

    with monkeypatch.context() as patched, pytest.raises(CacheFileError):
        patched.setattr(CompressedContext, "load", load)
        caches.load_document(made)
    assert not list((tmp_path / "damaged").iterdir())
    assert caches.load_document(made).ask("Which?", 4) and caches.counts["loaded"] == 1


def test_a_document_that_is_deleted_later_ends_the_work_on_no_other_one(
    model, tiny_tokenizer, tmp_path
):
    """The engine may already be working on the next document when the deletion comes."""
    caches = DocumentHolder(model, tiny_tokenizer, Store(tmp_path, MUCH))
    variant = Variant.parse("tiny:snapkv-0.4", "tiny")
    caches.make_document(SHA, variant, lambda: TEXT)

    def read_while_the_first_is_deleted() -> str:
        caches.forget_document(SHA)
        return f"{TEXT} More."

    assert caches.make_document("1" * 64, variant, read_while_the_first_is_deleted).fresh


def test_a_slow_shared_folder_holds_up_no_local_document(
    model, tiny_tokenizer, tmp_path, monkeypatch
):
    store = Store(tmp_path / "store", MUCH, shared.SharedFolder(f"file://{tmp_path}/shared"))
    caches, variant = (
        DocumentHolder(model, tiny_tokenizer, store),
        Variant.parse("tiny:snapkv-0.4", "tiny"),
    )
    made, inside, go = (
        caches.make_document(SHA, variant, lambda: TEXT),
        threading.Event(),
        threading.Event(),
    )
    caches.held.clear()
    monkeypatch.setattr(
        shared.SharedFolder, "get_cache", lambda *_: inside.set() or (go.wait(30) and False)
    )
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(caches.load_cache, "0" * 32, "cd" * 32)
        assert inside.wait(30) and caches.load_document(made) is not None and not other.done()
        go.set()
        assert other.result() is None
    store.close()


def test_questions_that_wait_hold_no_cache(model, tiny_tokenizer, tmp_path, monkeypatch):
    """--memory bounds the caches that are held in addition to those of the current batch."""
    seen, load = [], CompressedContext.load

    def loaded(*told: object) -> CompressedContext:
        made = load(*told)
        seen.append(weakref.ref(made))
        return made

    monkeypatch.setattr(CompressedContext, "load", loaded)
    with serving(model, tiny_tokenizer, tmp_path, memory=1, limits=Limits(tokens=64)) as url:
        client = client_of(url)
        made = [upload(client, f"{number} {TEXT}") for number in range(3 * BATCH)]
        busy, go = threading.Event(), threading.Event()
        hook = (
            get_backbone(model)
            .layers[0]
            .register_forward_pre_hook(lambda *_: busy.set() or (go.wait(30) and None))
        )
        with ThreadPoolExecutor(3 * BATCH) as pool:
            asking = [pool.submit(ask, client, about(each)) for each in made]
            assert busy.wait(30)
            time.sleep(1)
            gc.collect()
            assert sum(each() is not None for each in seen) <= BATCH + 2
            go.set()
            assert all(each.result().choices for each in asking)
        hook.remove()
