// What a compressed cache holds: its size before and after, and the text shaded by what survives.

import { json, ofFile } from "./api.js";
import { $, count, el, percent, size } from "./dom.js";

const SHADES = 5;

export const kept = (file, model, layer = "", head = "") => {
  const query = new URLSearchParams({ model });
  if (layer !== "") query.set("layer", layer);
  if (head !== "") query.set("head", head);
  return json(ofFile(file.id, `/kept?${query}`));
};

export function showSizes(found) {
  const line = (name, { before, after }, write) => el("tr", {},
    el("th", { scope: "row", textContent: name }),
    ...[write(before), write(after), percent(after / before)].map((text) => el("td", { textContent: text })));
  $("sizes").replaceChildren(line("KV pairs", found.pairs, count), line("Memory", found.bytes, size));
  const took = Object.entries(found.seconds).filter(([, value]) => value >= 0.005);
  const seconds = took.map(([phase, value]) => `${phase} ${value.toFixed(2)} s`).join(", ");
  const tokens = found.restore_tokens;
  const added = tokens ? `with ${tokens} restore tokens in every head, which count in the share` : "without restore tokens";
  $("same").textContent = tokens ? "" : "There are no restore tokens here, so the last two caches are the same.";
  $("made").textContent = `${count(found.tokens)} tokens, ${found.layers} layers, ${found.heads} KV heads. `
    + `The evictor is ${found.evictor.split(":")[0]}, ${added}. `
    + `The ${count(found.prefix)} tokens of the chat template before the text are always kept. ${seconds && `Time: ${seconds}.`}`;
}

export function fillHeads(found) {
  for (const [id, total] of [["layer", found.layers], ["head", found.heads]]) {
    const one = [...Array(total).keys()].map((index) => el("option", { value: index, textContent: index }));
    $(id).replaceChildren(el("option", { value: "", textContent: "all" }), ...one);
  }
}

export function showText(found) {
  const single = $("layer").value !== "" && $("head").value !== "";
  const shares = found.pieces.map(([, share]) => share).sort((one, other) => one - other);
  const most = shares.at(-1) ?? 0;
  // The deepest shade begins below the few tokens that a method always keeps, which would leave the others pale.
  const usual = single ? most : shares[Math.floor(0.95 * (shares.length - 1))];
  const top = Math.max(usual || most, 1e-9);
  const spans = [];
  for (const [text, share] of found.pieces) {
    const shade = Math.min(SHADES, Math.ceil((SHADES * share) / top));
    const last = spans.at(-1);
    if (last?.shade === shade) last.text += text;
    else spans.push({ shade, text });
  }
  $("text").replaceChildren(...spans.map(({ shade, text }) => el("span", { dataset: { shade }, textContent: text })));
  const upTo = (shade) => percent((top * shade) / SHADES);
  const name = (shade) => {
    if (single) return shade ? "kept" : "evicted";
    if (shade === SHADES && top < most) return `over ${upTo(shade - 1)}`;
    return shade ? `${upTo(shade - 1)} to ${upTo(shade)}` : "none";
  };
  const shades = single ? [SHADES] : [...Array(SHADES).keys()].map((index) => index + 1);
  $("legend").replaceChildren(
    el("li", { textContent: single ? "Pairs of a token in this head:" : "Share of a token's pairs that are kept:" }),
    ...[0, ...shades].map((shade) => el("li", {}, el("span", { dataset: { shade }, textContent: name(shade) }))));
  const gone = found.tokens - found.surviving;
  $("surviving").textContent = single
    ? `${count(found.surviving)} of ${count(found.tokens)} tokens (${percent(found.kept_share)}) survive in this head.`
    : `A token keeps ${percent(found.kept_share)} of its pairs on average, and at most ${percent(most)}. `
      + `${count(gone)} of ${count(found.tokens)} tokens keep none.`;
}
