// Requests to the server that this page came from. An API key stays in this module's memory.

import { $, sleep } from "./dom.js";

let key = "";
let asking = null;

function askForKey(refused) {
  asking ??= new Promise((resolve) => {
    const form = $("key");
    form.hidden = false;
    $("key-refused").textContent = refused ? "The server does not know this key." : "";
    $("key-value").focus();
    form.onsubmit = (event) => {
      event.preventDefault();
      key = $("key-value").value;
      asking = null;
      form.reset();
      form.hidden = true;
      resolve();
    };
  });
  return asking;
}

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

export async function request(path, options = {}) {
  // Next to this module's folder, so that a proxy may serve all of it under a path of its own.
  const url = new URL(`..${path}`, import.meta.url);
  for (;;) {
    const sent = key;
    const headers = sent ? { ...options.headers, authorization: `Bearer ${sent}` } : options.headers;
    const response = await fetch(url, { ...options, headers }).catch((error) => {
      throw error.name === "AbortError" ? error : new Error("The server does not answer. Is it running?");
    });
    if (response.status === 401) {
      if (sent === key) await askForKey(sent !== "");
    } else if (response.ok) {
      return response;
    } else {
      throw new Error(await problem(response));
    }
  }
}

export const json = async (path, options) => (await request(path, options)).json();

export const ofFile = (id, what = "") => `/v1/files/${encodeURIComponent(id)}${what}`;

// Waits for `work`, and meanwhile passes the phase of a file's compression, and its share that is done, to `show`.
export async function watched(id, model, work, show) {
  let done = false;
  const poll = async () => {
    while (!done) {
      const { phase, share } = await json(ofFile(id, `/progress?model=${encodeURIComponent(model)}`));
      if (!done) show(phase, share);
      await sleep(0.25);
    }
  };
  const result = work.finally(() => { done = true; });
  poll().catch(() => {}); // `work` says what is wrong
  return result;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    // A browser has words of its own for a connection that breaks.
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new Error("The server ended the answer early.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// Streams an answer to `onText`, and returns it with what the server says of its cache and seconds.
export async function answer(file, model, messages, limit, { onText, onProgress, signal }) {
  const body = { model, messages, max_tokens: limit, temperature: 0, stream: true };
  body.stream_options = { include_usage: true };
  const headers = { "content-type": "application/json" };
  const sent = request("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  const result = { text: "", held: null, finish: null };
  for await (const chunk of events(await watched(file, model, sent, onProgress))) {
    if (chunk.error) throw new Error(chunk.error.message);
    const piece = chunk.choices[0]?.delta.content;
    result.finish = chunk.choices[0]?.finish_reason ?? result.finish;
    if (piece) onText(result.text += piece);
    result.held = chunk.restorekv ?? result.held;
  }
  return result;
}
