"""The page in real Chromium, found by what a screen reader would find: documents, shading, answers,
keys, keyboard.
"""

import shutil
from collections.abc import Iterator
from urllib.request import urlopen

import pytest

pytest.importorskip("openai")
playwright = pytest.importorskip("playwright.sync_api")

from tests.helpers.serving import (  # noqa: E402
    KEY,
    QUESTION,
    TEXT,
    VARIANT,
    about,
    ask,
    client_of,
    expected,
    serving,
    upload,
)

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
HOSTILE = "<img src=x onerror=alert(1)>"
expect = playwright.expect
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def origin(model, tiny_tokenizer, tmp_path) -> Iterator[str]:
    with serving(model, tiny_tokenizer, tmp_path) as url:
        yield url.removesuffix("/v1")


@pytest.fixture
def page(browser, origin) -> Iterator:
    """An open page. At its end, its console must be empty, except for refused requests, and all its
    requests must have gone to our server.
    """
    context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme="dark")
    page, said, asked = context.new_page(), [], []
    page.set_default_timeout(60_000)
    expect.set_options(timeout=60_000)
    refused = ("status of 4", "net::ERR_FAILED")
    page.on(
        "console",
        lambda message: any(each in message.text for each in refused) or said.append(message.text),
    )
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(origin)
    yield page
    assert not said
    assert all(url.startswith((origin, "data:")) for url in asked)
    context.close()


def add(page, name: str, text: str) -> None:
    page.get_by_label("Drop a file here").set_input_files(
        {"name": name, "mimeType": "text/plain", "buffer": text.encode()}
    )
    expect(page.get_by_role("heading", level=2, name=name)).to_be_visible()
    expect(page.get_by_role("heading", name="What survives")).to_be_visible()


def test_a_document_is_shown_and_asked(page, model, tiny_tokenizer):
    add(page, "doc.txt", TEXT)
    small, whole = expected(model, tiny_tokenizer), expected(model, tiny_tokenizer, ratio=1)
    text = page.get_by_role("region", name="Text, shaded")
    assert text.text_content() == TEXT
    cells = page.get_by_role("row", name="KV pairs").get_by_role("cell").all_text_contents()
    assert cells[:2] == [f"{small.kept.numel():,}", f"{small.manifest.pairs_held:,}"]
    kept = small.kept[2, 1, small.context.prefix_length :]
    page.get_by_label("Layer").select_option("2")
    page.get_by_label("KV head").select_option("1")
    expect(page.get_by_text(f"{int(kept.sum())} of {len(kept)} tokens")).to_be_visible()
    assert {each.get_attribute("data-shade") for each in text.locator("span").all()} == {"0", "5"}
    page.get_by_role("textbox", name="Question").fill(QUESTION)
    page.get_by_role("textbox", name="Question").press("Enter")
    columns = page.get_by_role("article")
    expect(columns.get_by_text("all ")).to_have_count(3)
    answers = [each.text_content() for each in columns.locator(".answer").all()]
    assert answers == [cache.ask(QUESTION, 256) for cache in (whole, small, small)]
    assert "the last two caches are the same" in page.get_by_role("main").text_content()


def test_a_text_that_is_kept_whole_is_called_so_and_a_deleted_one_is_not_added(page):
    status = page.get_by_role("status")
    add(page, "short.txt", "Goats")
    expect(page.get_by_text("Added short.txt.")).to_be_visible()
    page.get_by_label("Share of the cache to keep").fill("0.1")
    page.get_by_role("button", name="Compress").click()
    said = "short.txt is kept whole, since it is too short to be compressed as tiny:snapkv-0.1."
    expect(status.get_by_text(said)).to_be_visible()
    page.get_by_label("Share of the cache to keep").fill("1")
    page.get_by_role("button", name="Compress").click()
    expect(status.get_by_text("short.txt is kept whole.")).to_be_visible()
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete short.txt").click()
    expect(page.get_by_text("Added short.txt.")).to_have_count(0)
    expect(page.get_by_text("short.txt is")).to_have_count(0)


def test_conversations_go_on_and_start_over(page, origin):
    """The second message is sent with the first one and its answer, as the API expects."""
    add(page, "doc.txt", TEXT)
    client, log = client_of(f"{origin}/v1"), page.get_by_role("log")
    messages = about(client.files.list().data[0])
    for turn, question in enumerate((QUESTION, "And then?"), 1):
        page.get_by_label("Message").fill(question)
        page.get_by_role("button", name="Send").click()
        expect(log.get_by_text("all ")).to_have_count(turn)
        answer = ask(client, messages, max_tokens=256).choices[0].message.content
        assert log.locator(".answer").nth(turn - 1).text_content() == answer
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "And then?"},
        ]
    # The newest answer can be seen without scrolling.
    box = log.locator(".quiet").last.bounding_box()
    assert box["y"] + box["height"] <= page.viewport_size["height"]
    page.get_by_role("button", name="Start over").click()
    assert log.text_content() == ""


def test_a_message_that_was_not_answered_is_kept(page):
    add(page, "doc.txt", TEXT)
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.get_by_label("Message").fill(QUESTION)
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert").get_by_text("The server does not answer")).to_be_visible()
    assert page.get_by_role("textbox", name="Message").input_value() == QUESTION
    page.get_by_role("textbox", name="Question").fill(QUESTION)
    page.get_by_role("textbox", name="Question").press("Enter")
    expect(page.get_by_role("article").get_by_text("Not asked.")).to_have_count(2)
    page.get_by_role("button", name="Close this message").click()
    expect(page.get_by_text("The server does not answer")).to_have_count(0)


def test_a_reload_opens_the_document_again(page):
    add(page, "doc.txt", TEXT)
    page.reload()
    expect(page.get_by_role("heading", level=2, name="doc.txt")).to_be_visible()
    page.get_by_label("Share of the cache").fill("0.9")
    expect(page.locator("#results.old")).to_be_visible()
    page.get_by_role("button", name="Compress").click()
    expect(page.get_by_role("status").get_by_text("tiny:snapkv-0.9")).to_be_visible()
    expect(page.locator("#results.old")).to_have_count(0)
    # In the same way as before, too.
    page.reload()
    expect(page.get_by_role("status").get_by_text("tiny:snapkv-0.9")).to_be_visible()
    expect(page.get_by_label("Share of the cache")).to_have_value("0.9")


def test_an_address_with_a_wrong_ratio_opens_the_document_with_the_usual_one(page):
    add(page, "doc.txt", TEXT)
    address, _, way = page.url.rpartition("/")
    assert way.startswith("snapkv-")
    page.goto(f"{address}/snapkv-7")
    page.reload()
    expect(page.get_by_role("status").get_by_text(f"tiny:{way}")).to_be_visible()


def test_a_cache_file_is_used_as_it_is(page, origin):
    """The variant that was chosen for the previous document does not matter."""
    client = client_of(f"{origin}/v1")
    text = upload(client)
    with urlopen(f"{origin}/v1/files/{text.id}/cache") as answer:
        made = upload(client, answer.read(), "own.rkv")
    page.goto(f"{origin}/#{made.id}")
    page.reload()
    expect(page.get_by_text("This is a cache file, which is used as it is.")).to_be_visible()
    page.get_by_label("Message").fill(QUESTION)
    page.get_by_role("button", name="Send").click()
    log = page.get_by_role("log")
    expect(log.get_by_text("all ")).to_have_count(1)
    wanted = ask(client, about(text), max_tokens=256).choices[0].message.content
    assert log.locator(".answer").text_content() == wanted


def test_the_skip_link_leads_to_the_document_and_keeps_its_address(page):
    add(page, "doc.txt", TEXT)
    address = page.url
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "document"
    assert page.url == address


def test_on_a_narrow_screen_an_opened_document_is_scrolled_to_the_top(page):
    add(page, "doc.txt", TEXT)
    assert abs(page.get_by_role("main").bounding_box()["y"]) < 1


def test_text_is_never_markup(page):
    add(page, f"{HOSTILE}.txt", f"{HOSTILE} {TEXT}")
    assert page.get_by_role("region", name="Text, shaded").text_content() == f"{HOSTILE} {TEXT}"
    page.get_by_label("Message").fill(HOSTILE)
    page.get_by_label("Message").press("Enter")
    expect(page.get_by_role("log").get_by_text(HOSTILE)).to_be_visible()
    assert page.locator("img").count() == 0


def test_by_keyboard_on_a_narrow_screen(page):
    """Paste, compress with another variant and delete, using only Tab, Enter and letters; nothing
    is wider than the screen.
    """

    def tab_to(name: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            focused = page.locator(":focus")
            if focused.count() and name in (
                focused.get_attribute("aria-label")
                or focused.text_content()
                or focused.get_attribute("id")
            ):
                return
        raise AssertionError(f"Tab does not reach {name}")

    tab_to("Skip to the document")
    tab_to("pasted")
    page.keyboard.type(f"Here {TEXT[:200]}")
    tab_to("Add the text")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="What survives")).to_be_visible()
    assert page.locator("#document:focus").count() == 1
    tab_to("ratio")
    page.keyboard.press("Control+a")
    page.keyboard.type("0.7")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").get_by_text("tiny:snapkv-0.7")).to_be_visible()
    sizes = page.locator("html").evaluate("root => [root.scrollWidth, root.clientWidth]")
    assert sizes[0] == sizes[1] == 390
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete Here").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("There are none yet.")).to_be_visible()
    expect(page.get_by_role("heading", name="No document is open")).to_be_visible()


def test_errors_are_said(page, origin):
    add(page, "doc.txt", TEXT)
    page.get_by_label("Method").select_option("kvzap")
    page.get_by_role("button", name="Compress").click()
    expect(page.get_by_role("alert").filter(has_text="kvzap")).to_be_visible()


def test_a_key_is_asked_for_and_not_stored(browser, model, tiny_tokenizer, tmp_path):
    with serving(model, tiny_tokenizer, tmp_path, keys=(KEY,)) as url:
        page = browser.new_page()
        page.goto(url.removesuffix("/v1"))
        for key in ("another-key-of-16-characters", KEY):
            page.get_by_label("This server needs an API key").fill(key)
            page.get_by_role("button", name="Use this key").click()
            if key != KEY:
                expect(page.get_by_text("does not know this key")).to_be_visible()
        expect(page.get_by_text("There are none yet.")).to_be_visible()
        expect(page.get_by_text("The model is tiny.")).to_be_visible()
        stored = "() => localStorage.length + sessionStorage.length + document.cookie.length"
        assert page.locator("html").evaluate(stored) == 0
        page.reload()
        expect(page.get_by_label("This server needs an API key")).to_be_visible()
        page.close()


def test_colors_follow_the_system(browser, origin):
    grounds = set()
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(origin)
        grounds.add(page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor"))
        page.close()
    assert len(grounds) == 2


def test_the_variant_is_that_of_the_server(page):
    expect(page.get_by_label("Method")).to_be_hidden()
    add(page, "doc.txt", TEXT)
    chosen = [page.get_by_label(label).input_value() for label in ("Method", "Share of the cache")]
    assert "tiny:" + "-".join(chosen) == VARIANT
