// Connects the parts of the page: one document is open, compressed in one way.

import { json, watched } from "./api.js";
import * as ask from "./ask.js";
import { $, el, tell } from "./dom.js";
import * as documents from "./documents.js";
import { fillHeads, kept, showSizes, showText } from "./survivors.js";

const state = { variants: null, file: null, model: "", turns: [] };
const METHODS = { fast: "fast: a learned gate", best: "best: KVzip" };
let turn = 0; // of what was asked for last: answers to earlier requests are dropped

const asItIs = (file) => file.filename.endsWith(".rkv"); // asked by the model's name alone

const chosen = () => (state.file && asItIs(state.file) ? state.variants.base
  : `${state.variants.base}:${$("method").value}-${Number($("ratio").value)}`);

function busy(phase, share = 0) {
  $("bar").hidden = !phase;
  $("bar").value = share;
  $("phase").textContent = phase ? ask.describePhase(phase, share) : "";
}

// So that a reload opens the same document, compressed in the same way.
function remember() {
  const way = asItIs(state.file) ? "" : `/${$("method").value}-${Number($("ratio").value)}`;
  history.replaceState(null, "", `#${state.file.id}${way}`);
}

// Says how the open document is held. A text too short for its ratio is kept whole.
function describe({ pairs }) {
  const { file: { filename }, model } = state;
  if (asItIs(state.file)) return "This is a cache file, which is used as it is.";
  if (pairs.after !== pairs.before) return `${filename} is compressed as ${model}.`;
  if (/-1(-base)?$/.test(model)) return `${filename} is kept whole.`;
  return `${filename} is kept whole, since it is too short to be compressed as ${model}.`;
}

async function compress() {
  const own = ++turn;
  state.model = chosen();
  remember();
  ask.reset(state);
  tell(null);
  $("results").hidden = true;
  markOld();
  busy("waiting");
  try {
    const found = await watched(state.file.id, state.model, kept(state.file, state.model), (phase, share) => {
      if (own === turn) busy(phase, share);
    });
    if (own !== turn) return;
    showSizes(found);
    fillHeads(found);
    showText(found);
    $("results").hidden = false;
    busy(null);
    $("phase").textContent = describe(found);
  } catch (error) {
    if (own !== turn) return;
    busy(null);
    $("adding").textContent = "";
    tell(error);
  }
  documents.refresh().catch(tell);
}

function open(file) {
  state.file = file;
  $("hint").hidden = file !== null;
  $("variant").hidden = file === null || asItIs(file);
  $("three").hidden = $("variant").hidden;
  $("title").textContent = file?.filename ?? "No document is open";
  documents.mark(file?.id ?? null).catch(tell);
  if (file) {
    compress();
    $("document").focus({ preventScroll: true });
    if (innerWidth <= 820) $("document").scrollIntoView();
  } else {
    turn += 1;
    history.replaceState(null, "", location.pathname);
    ask.stopAll();
    busy(null);
    $("results").hidden = true;
  }
}

// Dims what is shown while the form asks for another cache than that.
function markOld() {
  $("results").classList.toggle("old", state.model !== chosen());
}

async function shade() {
  const own = turn;
  const layer = $("layer").value, head = $("head").value;
  const found = await kept(state.file, state.model, layer, head);
  if (own === turn && layer === $("layer").value && head === $("head").value) showText(found);
}

async function start() {
  documents.start(open);
  ask.start(state);
  $("variant").onsubmit = (event) => {
    event.preventDefault();
    compress();
  };
  $("variant").oninput = markOld;
  // Its own address would take the place of the open document's.
  document.querySelector(".skip").onclick = (event) => {
    event.preventDefault();
    $("document").focus();
  };
  for (const id of ["layer", "head"]) $(id).onchange = () => shade().catch(tell);
  state.variants = await json("/v1/variants");
  const { base, default: usual, methods } = state.variants;
  $("model").textContent = `The model is ${base}.`;
  $("method").replaceChildren(...methods.map((name) => el("option", { value: name, textContent: METHODS[name] ?? name })));
  $("method").value = usual.method;
  $("ratio").value = usual.ratio;
  const [id, way = ""] = location.hash.slice(1).split("/");
  const [, method, ratio] = way.match(/^(.+)-([\d.]+)$/) ?? [];
  if (methods.includes(method)) $("method").value = method;
  if (ratio > 0 && ratio <= 1) $("ratio").value = ratio;
  const opened = (await documents.refresh()).find((file) => file.id === id);
  if (opened) open(opened);
}

start().catch(tell);
