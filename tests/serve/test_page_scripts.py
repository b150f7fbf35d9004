"""What the page's scripts do, in Node with a stub of the DOM; test_browser.py has the rest."""

import json
import shutil
import subprocess

import pytest

pytest.importorskip("openai")

from restorekv.serve.page import FOLDER

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node")

# Elements that remember what is set, and a `fetch` whose answers a test decides: `answers` holds
# functions by path, and `asked` the requests.
STUB = """
const elements = {};
function make() {
  return {
    children: [], dataset: {}, textContent: "", value: "", hidden: false, isConnected: true,
    classList: { toggle() {} },
    append(...more) { this.children.push(...more); },
    replaceChildren(...now) {
      for (const each of this.children) each.isConnected = false;
      this.children = now;
    },
    remove() { this.isConnected = false; },
    reset() { this.wasReset = true; },
    querySelectorAll: () => [],
    setAttribute() {}, addEventListener() {}, focus() {}, scrollIntoView() {},
    getBoundingClientRect: () => ({ bottom: 0 }),
    get firstChild() { return this.children[0]; },
  };
}
globalThis.innerHeight = 800;
globalThis.document = {
  activeElement: null, createElement: make, getElementById: (id) => elements[id] ??= make(),
};
const $ = document.getElementById;
const asked = [];
const answers = {};
globalThis.fetch = async (url, options) => {
  const path = new URL(url, import.meta.url).href;
  asked.push({ path, body: options?.body, signal: options?.signal });
  for (const [end, answer] of Object.entries(answers)) {
    if (path.split("?")[0].endsWith(end)) return answer(asked.at(-1));
  }
  throw new TypeError("Failed to fetch");
};
const json = (value) => new Response(JSON.stringify(value));
const until = async (holds) => {
  while (!holds()) await new Promise((resolve) => setTimeout(resolve, 1));
};
const row = (id) => ({ id, filename: `${id}.txt`, bytes: 1, status: "processed" });
"""
# A stream of an answer: its pieces, and then its end, where `ends` is true; null breaks it.
STREAM = """
const event = (content) => `data: ${JSON.stringify(content)}\\n\\n`;
const piece = (text) => event({ choices: [{ delta: { content: text } }] });
const cost = { choices: [], restorekv: { pairs: 1, bytes: 1, seconds: { first: 0, total: 0 } } };
const stream = (pieces, ends) => ({ signal }) => new Response(new ReadableStream({
  start(sent) {
    const send = (text) => sent.enqueue(new TextEncoder().encode(text));
    signal?.addEventListener("abort", () => sent.error(signal.reason));
    if (signal?.aborted) sent.error(signal.reason);
    else pieces.forEach((text) => send(piece(text)));
    if (ends === null) sent.error(new TypeError("network error"));
    if (ends) {
      send(`${event(cost)}data: [DONE]\\n\\n`);
      sent.close();
    }
  },
}));
answers["/progress"] = () => json({ phase: "ready", share: 1 });
const state = { file: row("a"), model: "m", turns: [], variants: { base: "m", max_tokens: 9 } };
const { reset, start } = await import("./page/ask.js");
start(state);
const send = (text) => {
  $("message").value = text;
  $("chat").onsubmit({ preventDefault() {}, target: { reset() { $("message").value = ""; } } });
};
// Sends a message, and waits until so much of its answer is shown.
const say = async (text, shown) => {
  send(text);
  await until(() => $("log").children.some((each) => each.textContent === shown));
};
const isOver = () => $("chat-stop").hidden;
const turns = () => state.turns.map(({ role, content }) => [role, content.at(-1).text ?? content]);
"""


@pytest.fixture
def run(tmp_path):
    """A function that runs a script next to the page's own and returns the value that the script
    passes to `sayResult`.
    """
    shutil.copytree(FOLDER, tmp_path / "under" / "page")
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def run(script: str) -> object:
        path = tmp_path / "under" / "test.js"
        say = "const sayResult = (value) => console.log(JSON.stringify(value));\n"
        path.write_text(f"{STUB}{say}{script}")
        done = subprocess.run([NODE, path], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize("works", [False, True])
def test_a_pasted_text_that_could_not_be_added_stays(run, works):
    script = """
    const { start } = await import("./page/documents.js");
    start(() => {});
    WORKS && (answers["/v1/files"] = () => json(row("a")));
    $("pasted").value = "A long text.";
    await $("paste").onsubmit({ preventDefault() {}, target: $("paste") });
    sayResult([$("paste").wasReset ?? false, $("notice").children.length > 0]);
    """
    assert run(script.replace("WORKS", json.dumps(works))) == [works, not works]


def test_an_earlier_list_of_documents_replaces_no_later_one(run):
    script = """
    const { refresh } = await import("./page/documents.js");
    const late = [];
    answers["/v1/files"] = () => new Promise((resolve) => late.push(resolve));
    const first = refresh(), second = refresh();
    await until(() => late.length === 2);
    late[1](json({ data: [row("b")] }));
    await second;
    late[0](json({ data: [row("a"), row("b")] }));
    await first;
    sayResult($("documents").children.length);
    """
    assert run(script) == 1


def test_a_stopped_answer_is_part_of_the_conversation_that_shows_it(run):
    script = f"""{STREAM}
    answers["/completions"] = stream(["One", " two"], false);
    await say("First?", "One two");
    $("chat-stop").onclick();
    await until(isOver);
    const stopped = turns();
    answers["/completions"] = stream(["Two"], false);
    await say("Second?", "Two");
    answers["/completions"] = stream(["Three."], true);
    await say("Third?", "Three."); // which stops the second answer
    await until(isOver);
    sayResult([stopped, turns()]);
    """
    stopped, turns = run(script)
    first = [["user", "First?"], ["assistant", "One two"]]
    assert stopped == first
    second = [["user", "Second?"], ["assistant", "Two"]]
    assert turns == [*first, *second, ["user", "Third?"], ["assistant", "Three."]]


def test_a_conversation_that_is_left_keeps_nothing_of_a_stopped_answer(run):
    script = f"""{STREAM}
    answers["/completions"] = stream(["One"], false);
    await say("First?", "One");
    $("chat-new").onclick();
    await until(isOver);
    const left = turns();
    await say("First?", "One");
    reset(state);
    await until(isOver);
    sayResult([left, turns()]);
    """
    assert run(script) == [[], []]


def test_a_broken_connection_gets_the_pages_own_sentence(run):
    script = f"""{STREAM}
    answers["/completions"] = stream([], null);
    send("First?");
    await until(() => $("notice").children.length);
    sayResult($("notice").children[0].textContent);
    """
    assert run(script) == "The server ended the answer early."


def test_requests_stay_below_the_path_of_the_page(run, tmp_path):
    script = """
    const { json: get } = await import("./page/api.js");
    answers["/v1/files"] = () => json({});
    await get("/v1/files");
    sayResult(asked[0].path);
    """
    assert run(script) == (tmp_path / "under" / "v1" / "files").as_uri()
