"""What the server gives the page: files and headers, which tokens survive, the progress of a
compression, and documents without restoring.
"""

import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest

openai = pytest.importorskip("openai")

from restorekv import compress  # noqa: E402
from restorekv.compression import adapters  # noqa: E402
from restorekv.compression.presets import resolve_preset  # noqa: E402
from restorekv.errors import ModelError, RestoreKVError  # noqa: E402
from restorekv.model.tokenize import split_into_pieces, tokenize_text  # noqa: E402
from restorekv.serve import (  # noqa: E402
    caches,
    page,
)
from restorekv.serve.run import Settings, build_app  # noqa: E402
from restorekv.serve.variants import Variant  # noqa: E402
from tests.helpers.compressing import make_adapter  # noqa: E402
from tests.helpers.hybrids import LATENT, build_hybrid  # noqa: E402
from tests.helpers.models import build_model  # noqa: E402
from tests.helpers.serving import (  # noqa: E402
    KEY,
    TEXT,
    VARIANT,
    client_of,
    expected,
    listening,
    serving,
    upload,
)


@pytest.fixture(scope="module")
def adapter_folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    make_adapter(model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(model, tiny_tokenizer, tmp_path_factory, adapter_folder):
    """The address of a server with a model that an adapter ships for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters, "find_shipped_adapter", lambda *_: adapter_folder)
        with serving(model, tiny_tokenizer, tmp_path_factory.mktemp("store")) as url:
            yield url


@pytest.fixture(scope="module")
def file(url):
    return upload(client_of(url)).id


def fetch(url: str, path: str, key: str | None = None, **query: object):
    """Return status, headers and body of a path; an error status raises nothing."""
    address = (
        url.removesuffix("/v1") + path + (f"?{urllib.parse.urlencode(query)}" if query else "")
    )
    request = urllib.request.Request(
        address, headers={"authorization": f"Bearer {key}"} if key else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def kept(url: str, file: str, **query: object) -> dict:
    status, _, body = fetch(url, f"/v1/files/{file}/kept", **{"model": VARIANT, **query})
    assert status == 200, body
    return json.loads(body)


def shares(found: dict, tokenizer) -> list[tuple[int, float]]:
    """Return how many tokens every piece of the text has, and the share of them that survives."""
    return [
        (size, share)
        for (_, size), (_, share) in zip(
            split_into_pieces(tokenizer, ids_of(tokenizer)), found["pieces"], strict=True
        )
    ]


def ids_of(tokenizer) -> tuple[int, ...]:
    context = compress(
        build_model("qwen3"), tokenizer, TEXT, evictor="snapkv", adapter=None, ratio=1
    ).context
    return tuple(context.ids[0, context.prefix_length :].tolist())


def test_the_files_are_served_with_a_strict_policy(url):
    for path in page.PATHS:
        status, headers, body = fetch(url, path)
        assert status == 200 and body
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "connect-src": "'self'",
            "img-src": "'self' data:",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
            "base-uri": "'none'",
        }
        assert headers["x-content-type-options"] == "nosniff"
    assert fetch(url, "/page/app.js")[1].get_content_type() == "text/javascript"
    assert fetch(url, "/page/page.py")[0] == fetch(url, "/page/..%2fpage.py")[0] == 404


def test_the_page_asks_nobody_else_and_puts_no_text_in_as_html():
    written = {name: path.read_text() for name, path in page.FILES.items()}
    assert {"index.html", "style.css", "app.js"} <= written.keys()
    assert sum(len(text.splitlines()) for text in written.values()) < 900
    for name, text in written.items():
        assert not re.search(
            r"https?:|//[a-z]|@import|url\(", re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)
        ), name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", text
        ), name
        assert not re.search(r"localStorage|sessionStorage|\.cookie", text), name
    html = written["index.html"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)", html)
    ids = set(re.findall(r'\bid="([\w-]+)"', html))
    used = {each for text in written.values() for each in re.findall(r'\$\("([\w-]+)"\)', text)}
    assert used <= ids, used - ids
    assert set(re.findall(r'\b(?:for|aria-labelledby)="([\w-]+)"', html)) <= ids


def test_what_survives_is_what_the_cache_keeps(url, file, model, tiny_tokenizer, adapter_folder):
    small = compress(
        model, tiny_tokenizer, TEXT, evictor="snapkv", ratio=0.4, adapter=adapter_folder
    )
    mask = small.kept[..., small.context.prefix_length :].float()
    whole = kept(url, file)
    assert "".join(text for text, _ in whole["pieces"]) == TEXT
    assert (whole["layers"], whole["heads"]) == tuple(mask.shape[:2])
    assert whole["pairs"] == {"before": small.kept.numel(), "after": small.manifest.pairs_held}
    assert whole["bytes"] == {
        "before": small.manifest.bytes_full,
        "after": small.manifest.bytes_held,
    }
    assert whole["kept_share"] == pytest.approx(float(mask.float().mean()), abs=1e-4)
    assert whole["surviving"] == int((mask.sum((0, 1)) > 0).sum()) and whole["restore_tokens"] > 0
    for layer, head in ((None, None), (1, None), (None, 1), (2, 0)):
        query = {
            name: value for name, value in (("layer", layer), ("head", head)) if value is not None
        }
        part = mask[[layer] if layer is not None else slice(None)]
        part = part[:, [head] if head is not None else slice(None)].mean((0, 1))
        start = 0
        for tokens, share in shares(kept(url, file, **query), tiny_tokenizer):
            assert share == pytest.approx(float(part[start : start + tokens].mean()), abs=1e-4)
            start += tokens
        assert start == mask.shape[-1]


def test_pieces_are_whole_characters(tiny_tokenizer):
    text = "Zoë said 日本 and 🙂🙂 in a café — twice."
    pieces = split_into_pieces(tiny_tokenizer, tuple(tokenize_text(tiny_tokenizer, text)))
    assert "".join(piece for piece, _ in pieces) == text
    assert not any("\ufffd" in piece for piece, _ in pieces)
    assert sum(tokens for _, tokens in pieces) == len(tokenize_text(tiny_tokenizer, text))


@pytest.mark.parametrize(
    "query, status, message",
    [
        ({"layer": 3}, 400, "layer must be a number from 0 to 2"),
        ({"head": -1}, 400, "head must be a number from 0 to 1"),
        ({"layer": "x"}, 400, "layer"),
        ({"model": "tiny:no-0.1"}, 404, "There is no model"),
    ],
)
def test_wrong_requests_get_a_sentence(url, file, query, status, message):
    answer = fetch(url, f"/v1/files/{file}/kept", **{"model": VARIANT, **query})
    assert answer[0] == status and message in json.loads(answer[2])["error"]["message"]
    assert fetch(url, "/v1/files/file-none/kept", model=VARIANT)[0] == 404


def test_base_variants_have_no_restore_tokens(url, file, model, tiny_tokenizer):
    """The model id that ends in -base answers as `compress` does with adapter=None; the other one
    does not.
    """
    small = expected(model, tiny_tokenizer)
    alone, restored = kept(url, file, model=f"{VARIANT}-base"), kept(url, file)
    assert alone["restore_tokens"] == 0 < restored["restore_tokens"]
    assert alone["pairs"]["after"] == small.manifest.pairs_held
    per_token = small.kept[..., small.context.prefix_length :].float().mean((0, 1))
    assert alone["surviving"] == int((per_token > 0).sum())
    parts = [{"type": "file", "file": {"file_id": file}}, {"type": "text", "text": "Which code?"}]
    answer = client_of(url).chat.completions.create(
        model=f"{VARIANT}-base",
        messages=[{"role": "user", "content": parts}],
        temperature=0,
        max_tokens=12,
    )
    assert answer.choices[0].message.content == small.ask("Which code?", 12)
    seconds = answer.restorekv["seconds"]
    assert 0 < seconds["first"] <= seconds["total"]


@pytest.mark.parametrize(
    "name", ["tiny", "tiny:fast-0.1", "tiny:kvzip+-0.25-base", "tiny:contrastkv-simple-0.1-base"]
)
def test_variants_read_the_names_they_write(name):
    variant = Variant.parse(name, "tiny")
    assert variant.name == name
    assert variant.restores != name.endswith("-base")


def test_variants_go_by_the_whole_base_name_and_ratio():
    base = r"C:\models\x"
    assert Variant.parse(base, base) == Variant(base)
    assert Variant.parse(rf"{base}:fast-0.1", base).method == "fast"
    for wrong in (
        "",
        "C",
        "x",
        f"{base}:",
        f"{base}x",
        f"{base}:fast",
        f"a{base}:fast-0.1",
        "C:fast-0.1",
    ):
        with pytest.raises(RestoreKVError, match="There is no model"):
            Variant.parse(wrong, base)
    names = [
        Variant.parse(f"t:fast-{ratio}", "t").name
        for ratio in ("0.10", "1", "0.12345678", "0.12345699")
    ]
    assert names == ["t:fast-0.1", "t:fast-1", "t:fast-0.12345678", "t:fast-0.12345699"]


@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma2"])
def test_methods_that_the_model_refuses_are_not_listed(kind, tiny_tokenizer, tmp_path):
    """Latent attention and capped logits have no formula for some methods, and no gates ship for
    either model.
    """
    if kind == "deepseek_v3" and not LATENT:
        pytest.skip("transformers caches latents since it has states")
    model = build_hybrid(kind)
    with serving(model, tiny_tokenizer, tmp_path / "store") as url:
        methods = json.loads(fetch(url, "/v1/variants")[2])["methods"]
    assert "best" in methods and "snapkv" in methods
    for method in page.METHODS:
        options = {"evictor": resolve_preset(method), "ratio": 0.5, "adapter": None}
        if method in methods:
            compress(model, tiny_tokenizer, TEXT, **options)
        else:
            with pytest.raises(RestoreKVError):
                compress(model, tiny_tokenizer, TEXT, **options)
    refused = Settings(tmp_path / "other", "tiny", "tiny:expected-attention-0.5")
    with pytest.raises(ModelError, match="use another evictor"):
        build_app(model, tiny_tokenizer, refused)


def test_methods_and_progress(url, file):
    variants = json.loads(fetch(url, "/v1/variants")[2])
    assert variants["base"] == "tiny" and variants["default"] == {"method": "snapkv", "ratio": 0.4}
    for method in variants["methods"]:
        Variant.parse(f"tiny:{method}-0.5", "tiny")

    def phase(model: str) -> str:
        return json.loads(fetch(url, f"/v1/files/{file}/progress", model=model)[2])["phase"]

    assert phase(VARIANT) == "ready" and phase("tiny:knorm-0.3") == "waiting"
    kept(url, file, model="tiny:knorm-0.3")
    assert phase("tiny:knorm-0.3") == "ready"
    bad = upload(client_of(url), b"\xff\xfe\x00", "x.txt")
    assert (
        json.loads(fetch(url, f"/v1/files/{bad.id}/progress", model=VARIANT)[2])["phase"] == "error"
    )


def test_phases_are_those_of_compress(url, file, monkeypatch):
    """While a document is compressed, its phase is the one that `compress` is in."""
    started, real = [], caches.compress

    def slow(*args, progress, **options):
        def waiting(name: str, share: float) -> None:
            progress(name, share)
            if name not in started:
                started.append(name)
                time.sleep(0.3)

        return real(*args, progress=waiting, **options)

    monkeypatch.setattr(caches, "compress", slow)
    made = upload(client_of(url), f"Another. {TEXT}", "other.txt", wait=False)
    seen, deadline = [], time.time() + 30
    while not seen or seen[-1] != "ready":
        assert time.time() < deadline
        seen.append(
            json.loads(fetch(url, f"/v1/files/{made.id}/progress", model=VARIANT)[2])["phase"]
        )
        time.sleep(0.02)
    inside = [name for name in dict.fromkeys(seen) if name not in ("waiting", "ready")]
    assert inside == started and len(started) >= 3


def test_with_keys_the_page_is_open_and_documents_are_not(model, tiny_tokenizer, tmp_path):
    with serving(model, tiny_tokenizer, tmp_path, keys=(KEY,)) as url:
        assert all(fetch(url, path)[0] == 200 for path in page.PATHS)
        for path in (
            "/v1/variants",
            "/v1/files",
            "/v1/files/x/kept",
            "/v1/files/x/progress",
            "/page/none",
        ):
            assert fetch(url, path)[0] == 401
        assert fetch(url, "/v1/variants", KEY)[0] == 200


def test_three_caches_of_a_document_are_read_once(url):
    """The page compares three caches of a document; the first one is made before the others."""
    client = client_of(url)
    made = upload(client, f"A text of its own. {TEXT}", "once.txt")
    for name in (VARIANT, "tiny", f"{VARIANT}-base"):
        kept(url, made.id, model=name)
    about = [{"role": "user", "content": [{"type": "file", "file": {"file_id": made.id}}]}]
    about[0]["content"].append({"type": "text", "text": "Which code?"})
    seconds = []
    for name in (VARIANT, "tiny", f"{VARIANT}-base"):
        reply = client.chat.completions.create(model=name, messages=about, max_tokens=2)
        seconds.append(reply.model_extra["restorekv"]["seconds"])
    assert "prefill" in seconds[0]
    assert "prefill" not in seconds[1] and "prefill" not in seconds[2]


def test_a_deleted_document_is_not_kept_whole(model, tiny_tokenizer, tmp_path):
    app = build_app(model, tiny_tokenizer, Settings(tmp_path, "tiny", VARIANT))
    with listening(app) as url:
        client = client_of(url)
        made = upload(client)
        prepared = app.state.service.engine.prepared_cache
        assert prepared.bytes_held > 0
        client.files.delete(made.id)
        assert prepared.bytes_held == 0


def test_a_document_deleted_while_it_is_compressed_is_not_kept_whole(
    model, tiny_tokenizer, tmp_path, monkeypatch
):
    app = build_app(model, tiny_tokenizer, Settings(tmp_path, "tiny", VARIANT))
    real = caches.compress

    def delete_first(*arguments, **options):
        client.files.delete(made.id)
        return real(*arguments, **options)

    with listening(app) as url:
        client = client_of(url)
        made = upload(client)
        monkeypatch.setattr(caches, "compress", delete_first)
        status, _, _ = fetch(url, f"/v1/files/{made.id}/kept", model="tiny:knorm-0.3")
        engine = app.state.service.engine
        assert status == 404
        assert engine.prepared_cache.bytes_held == 0 and not engine.held
