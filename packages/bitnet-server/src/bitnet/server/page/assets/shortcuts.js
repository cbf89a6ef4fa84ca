// Keys that work anywhere on the page, and the list of all keys.

import { dialog, h } from "./dom.js";

const MAC = /Mac|iPhone|iPad/.test(navigator.platform);
const CONTROL = MAC ? "⌘" : "Ctrl";

/** `[keys, what they do, matches(event), act]`; the last two are missing where the page's parts see to the key themselves. */
function table({ create, search, write, remove }) {
  const control = (event) => (MAC ? event.metaKey : event.ctrlKey) && !event.altKey;
  return [
    [[CONTROL, "Shift", "O"], "New conversation", (event) => control(event) && event.shiftKey && event.code === "KeyO", create],
    [[CONTROL, "K"], "Search conversations", (event) => control(event) && !event.shiftKey && event.code === "KeyK", search],
    [["Shift", "Esc"], "Write a message", (event) => event.shiftKey && event.key === "Escape", write],
    [[CONTROL, "Shift", "⌫"], "Delete the conversation", (event) => control(event) && event.shiftKey && event.key === "Backspace", remove],
    [[CONTROL, "/"], "This list", (event) => control(event) && event.key === "/", show],
    [["Enter"], "Send the message"],
    [["Shift", "Enter"], "New line"],
    [["↑"], "In an empty message: edit the last one"],
    [[CONTROL, "Enter"], "Keep what is edited"],
    [["Esc"], "Stop the answer, or close what is open"],
  ];
}

let rows = [];

/** Shows the list. */
export function show() {
  if (document.querySelector("dialog[open]")) return;
  const close = () => element.close();
  const element = dialog("Keyboard shortcuts",
    h("dl", { class: "shortcuts" }, rows.map(([keys, what]) => h("div", {}, h("dt", {}, keys.map((key) => h("kbd", {}, key))), h("dd", {}, what)))),
    h("button", { type: "button", class: "primary", onclick: close }, "Close"));
}

/** Listens to the keys; `acts` are the functions of `table`. */
export function listen(acts) {
  rows = table(acts);
  addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    const found = rows.find(([, , matches]) => matches?.(event));
    if (!found) return;
    event.preventDefault();
    found[3]();
  });
}
