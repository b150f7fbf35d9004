// The same question to three caches, and conversations with one of them.

import { answer } from "./api.js";
import { $, count, el, size, tell } from "./dom.js";

const LIMIT = 256; // tokens of an answer
const PHASES = {
  waiting: "Waiting for the model", prefill: "Reading the document", score: "Scoring its tokens",
  restore: "Computing restore tokens", evict: "Evicting tokens", ready: "Ready",
};

// What is done now, and how much of the whole is done.
export function describePhase(phase, share) {
  const done = share > 0 && share < 1 ? `, ${Math.round(100 * share)} % done` : "";
  return phase in PHASES ? `${PHASES[phase]}${done} …` : "";
}

let running = null;
let last = Promise.resolve(); // the end of the run that was begun last

// Runs `work` as the only one; a stop button, or a later run, ends it.
async function run(stop, work) {
  stopAll();
  const own = running = new AbortController();
  const before = last;
  let end;
  last = new Promise((resolve) => { end = resolve; });
  $("compare-stop").hidden = $("chat-stop").hidden = true;
  stop.hidden = false;
  stop.onclick = () => own.abort();
  try {
    await before; // what it said may be part of the conversation
    tell(null);
    await work(own.signal);
  } catch (error) {
    tell(error);
  } finally {
    if (running === own) stop.hidden = true;
    end();
  }
}

export const stopAll = () => running?.abort();

const opening = (file, question) => ({
  role: "user", content: [{ type: "file", file: { file_id: file.id } }, { type: "text", text: question }],
});

// Whether an element's end is on the screen, or just below it: then who reads it has scrolled neither up nor past it.
const isInView = (element) => {
  const { bottom } = element.getBoundingClientRect();
  return bottom > 0 && bottom < innerHeight + 160;
};

async function write(into, about, state, model, messages, signal) {
  into.setAttribute("aria-busy", "true");
  const onProgress = (phase, share) => {
    about.textContent = phase === "ready" ? "Answering …" : describePhase(phase, share);
  };
  onProgress("waiting", 0);
  const follow = (change) => {
    const follows = isInView(about);
    change();
    if (follows) about.scrollIntoView({ block: "nearest" });
  };
  const onText = (text) => follow(() => { into.textContent = text; });
  try {
    const limit = Math.min(LIMIT, state.variants.max_tokens);
    const result = await answer(state.file.id, model, messages, limit, { onText, onProgress, signal });
    if (!result.text) into.textContent = "(The answer is empty.)";
    const { pairs, bytes, seconds } = result.held;
    const cut = result.finish === "length" ? `cut at ${limit} tokens; ` : "";
    follow(() => { about.textContent = `${cut}first word ${seconds.first.toFixed(2)} s, all ${seconds.total.toFixed(2)} s; `
      + `${count(pairs)} KV pairs, ${size(bytes)}`; });
    return result.text;
  } catch (error) {
    about.textContent = error.name === "AbortError" ? "Stopped." : "Failed.";
    throw error;
  } finally {
    into.setAttribute("aria-busy", "false");
  }
}

async function compare(state, question, signal) {
  const models = [
    ["Full cache", state.variants.base], ["Evictor alone", `${state.model}-base`], ["RestoreKV", state.model],
  ];
  const columns = models.map(([name, model]) => {
    const into = el("p", { className: "answer", aria: { live: "polite", busy: "true" } });
    const about = el("p", { className: "quiet", textContent: "Next …" });
    const column = el("article", {}, el("h4", { textContent: name }), el("code", { textContent: model }), into, about);
    return { model, into, about, column };
  });
  $("answers").replaceChildren(...columns.map(({ column }) => column));
  let asked = 0;
  try {
    for (const { model, into, about, column } of columns) {
      if (!asked || isInView(columns[asked - 1].about)) column.firstChild.scrollIntoView({ block: "nearest" });
      if (!asked) about.scrollIntoView({ block: "nearest" });
      asked += 1;
      await write(into, about, state, model, [opening(state.file, question)], signal);
    }
  } finally {
    for (const { about } of columns.slice(asked)) about.textContent = "Not asked.";
  }
}

async function talk(state, message, signal) {
  const messages = [...state.turns, state.turns.length ? { role: "user", content: message } : opening(state.file, message)];
  const into = el("p", { className: "answer" });
  const about = el("p", { className: "quiet" });
  const said = el("p", { className: "said" }, el("b", { textContent: "You: " }), message);
  $("log").append(said, into, about);
  about.scrollIntoView({ block: "nearest" });
  // Of a conversation that was left meanwhile, nothing is added to the next one.
  const add = (text) => {
    if (said.isConnected) state.turns = [...messages, { role: "assistant", content: text }];
  };
  try {
    add(await write(into, about, state, state.model, messages, signal));
  } catch (error) {
    if (into.textContent) {
      add(into.textContent); // as much of the answer as is shown
    } else {
      [said, into, about].forEach((each) => each.remove());
      if (!$("message").value) $("message").value = message; // to be sent again
    }
    throw error;
  }
}

export function reset(state) {
  stopAll();
  state.turns = [];
  $("log").replaceChildren();
  $("answers").replaceChildren();
  $("chat-model").textContent = state.model;
}

export function start(state) {
  $("compare").onsubmit = (event) => {
    event.preventDefault();
    run($("compare-stop"), (signal) => compare(state, $("question").value, signal));
  };
  $("chat").onsubmit = (event) => {
    event.preventDefault();
    const message = $("message").value;
    event.target.reset();
    run($("chat-stop"), (signal) => talk(state, message, signal));
  };
  $("chat-new").onclick = () => {
    stopAll();
    state.turns = [];
    $("log").replaceChildren();
    $("message").focus();
  };
}
