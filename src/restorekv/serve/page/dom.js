// Elements by their id, and new ones. Text is only ever set as text.

export const $ = (id) => document.getElementById(id);

export function el(tag, properties = {}, ...children) {
  const { dataset, aria, ...rest } = properties;
  const element = Object.assign(document.createElement(tag), rest);
  Object.assign(element.dataset, dataset);
  for (const [name, value] of Object.entries(aria ?? {})) element.setAttribute(`aria-${name}`, value);
  element.append(...children);
  return element;
}

export function tell(error) {
  if (!error || error.name === "AbortError") {
    $("notice").replaceChildren();
    return;
  }
  const close = el("button", {
    type: "button", className: "close", textContent: "×", aria: { label: "Close this message" }, onclick: () => tell(null),
  });
  $("notice").replaceChildren(el("span", { textContent: error.message }), close);
}

export const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

export const count = (number) => number.toLocaleString("en-US");

export const percent = (share) => `${Number((100 * share).toPrecision(share < 0.1 ? 2 : 3))}%`;

export function size(bytes) {
  const units = ["bytes", "KiB", "MiB", "GiB"];
  const unit = Math.min(Math.floor(Math.log2(Math.max(bytes, 1)) / 10), 3);
  return `${Number((bytes / 1024 ** unit).toPrecision(3))} ${units[unit]}`;
}
