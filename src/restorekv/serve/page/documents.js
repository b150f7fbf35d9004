// The list of documents: add, open, delete.

import { json, ofFile, request } from "./api.js";
import { $, el, size, sleep, tell } from "./dom.js";

let open = () => {};
let openId = null;
let polling = false;
let requested = 0, shown = 0; // lists of documents, by number

const STATUS = { uploaded: "being compressed", processed: "compressed", error: "failed" };

function row(file) {
  const name = el("button", {
    type: "button", className: "open", textContent: file.filename, disabled: file.status === "error",
    onclick: () => open(file),
  });
  if (file.id === openId) name.setAttribute("aria-current", "true");
  const remove = el("button", {
    type: "button", className: "delete", textContent: "Delete", aria: { label: `Delete ${file.filename}` },
    onclick: () => removeFile(file).catch(tell),
  });
  const about = file.status_details ?? STATUS[file.status];
  return el("li", {}, name, el("span", { className: "quiet", textContent: `${size(file.bytes)}, ${about}` }), remove);
}

async function removeFile(file) {
  if (!confirm(`Delete ${file.filename} and its caches from the server?`)) return;
  await request(ofFile(file.id), { method: "DELETE" });
  if ($("adding").textContent === `Added ${file.filename}.`) $("adding").textContent = "";
  if (file.id === openId) open(null);
  await refresh();
  $("documents-title").focus();
}

// Shows the server's documents, and returns them.
export async function refresh() {
  const own = ++requested;
  const { data } = await json("/v1/files");
  if (own < shown) return data; // a later list came first
  shown = own;
  const focused = document.activeElement?.closest("#documents") ? document.activeElement.getAttribute("aria-label")
    ?? document.activeElement.textContent : null;
  $("documents").replaceChildren(...data.map(row));
  if (focused) {
    [...$("documents").querySelectorAll("button")]
      .find((button) => (button.getAttribute("aria-label") ?? button.textContent) === focused)?.focus();
  }
  $("none").hidden = data.length > 0;
  if (!polling && data.some((file) => file.status === "uploaded")) {
    polling = true;
    await sleep(1);
    polling = false;
    refresh().catch(tell);
  }
  return data;
}

export function mark(id) {
  openId = id;
  return refresh();
}

// Returns whether the server has taken it.
async function add(content, name) {
  const form = new FormData();
  form.append("purpose", "user_data");
  form.append("file", content, name);
  $("adding").textContent = `Adding ${name} …`;
  try {
    const file = await json("/v1/files", { method: "POST", body: form });
    $("adding").textContent = `Added ${name}.`;
    open(file);
    return true;
  } catch (error) {
    $("adding").textContent = "";
    tell(error);
    return false;
  }
}

export function start(onOpen) {
  open = onOpen;
  const drop = $("drop");
  $("file").onchange = async ({ target }) => {
    for (const file of target.files) await add(file, file.name);
    target.value = "";
  };
  for (const kind of ["dragover", "dragleave", "drop"]) {
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", kind === "dragover");
    });
  }
  drop.addEventListener("drop", async ({ dataTransfer }) => {
    const text = dataTransfer.getData("text/plain");
    if (!dataTransfer.files.length && text) await add(new Blob([text]), "dropped.txt");
    for (const file of dataTransfer.files) await add(file, file.name);
  });
  $("paste").onsubmit = async (event) => {
    event.preventDefault();
    const text = $("pasted").value;
    const first = text.trim().split(/\s+/).slice(0, 4).join(" ").replace(/[^\p{L}\p{N} -]/gu, "").slice(0, 40);
    if (await add(new Blob([text], { type: "text/plain" }), `${first || "pasted"}.txt`)) event.target.reset();
  };
}
