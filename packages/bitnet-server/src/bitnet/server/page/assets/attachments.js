// Files that go along with a message, as text.

import { postJSON } from "./api.js";
import { announce, button, dialog, h, icon, scrollable } from "./dom.js";

const LARGEST = 20_000_000; // bytes of a file that is read
const PDF = [...new TextEncoder().encode("%PDF-")];
const count = new Intl.NumberFormat("en");

/** The text of a PDF, whose reader is loaded when it is first needed. */
async function textOfPages(file, bytes) {
  const reader = await import("./pdf.js").catch(() => {
    throw new Error(`${file.name} could not be read: this server has no reader of PDFs. Attach its text.`);
  });
  const text = await reader.textOfPdf(bytes).catch((error) => {
    throw new Error(`${file.name} ${error.message}`);
  });
  if (!text) throw new Error(`${file.name} has no text: its pages may be pictures.`);
  return text;
}

/** The text of a file. Throws an Error that says why it has none. */
export async function textOf(file) {
  if (file.size > LARGEST) throw new Error(`${file.name} is larger than ${LARGEST / 1e6} MB.`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (PDF.every((byte, index) => bytes[index] === byte)) return textOfPages(file, bytes);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    text = "\0";
  }
  if (text.includes("\0")) throw new Error(`${file.name} is neither a text in UTF-8 nor a PDF. The model reads texts only.`);
  if (!text.trim()) throw new Error(`${file.name} has no text.`);
  return text;
}

/** What the model is sent of a message: its files, each in a fence that its text does not close, and its words. */
export function withFiles({ content, files = [] }) {
  const parts = files.map(({ name, text }) => {
    const longest = Math.max(2, [...text.matchAll(/`+/g)].reduce((most, [ticks]) => Math.max(most, ticks.length), 0));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, ...(content ? [content] : [])].join("\n\n");
}

const size = ({ tokens, text }) => (tokens === undefined ? `${count.format(text.length)} letters` : `${count.format(tokens)} ${tokens === 1 ? "token" : "tokens"}`);

function show(file) {
  const close = () => element.close();
  const element = dialog(file.name, h("pre", { class: "receipt", ...scrollable(`Text of ${file.name}`) }, file.text),
    h("button", { type: "button", class: "primary", onclick: close }, "Close"));
}

/** The list of a message's files; with `onRemove(file)` each can be taken away. */
export const fileList = (files, onRemove) =>
  h("ul", { class: "files", "aria-label": "Attached files" }, files.map((file) => h("li", {},
    h("button", { type: "button", class: "quiet", onclick: () => show(file) }, icon("file"), h("span", { class: "file-name" }, file.name), h("span", { class: "hint" }, size(file))),
    onRemove && button("close", `Take ${file.name} away`, () => onRemove(file), { class: "quiet" }))));

/** The files of a message that is being written: they are chosen, dropped or pasted. */
export class Attachments {
  /** `model()` counts their tokens; `drop` is the element that files may be dropped on. */
  constructor(model, drop) {
    this.model = model;
    this.files = [];
    this.place = h("div", { class: "attached" });
    this.problem = h("p", { class: "bad", role: "alert" });
    this.picker = h("input", { type: "file", multiple: true, hidden: true, "aria-label": "Files to attach", onchange: () => {
      this.add([...this.picker.files]);
      this.picker.value = "";
    } });
    this.element = h("div", {}, this.picker, this.place, this.problem);
    this.button = button("attach", "Attach files", () => this.picker.click(), { class: "quiet round" });
    drop.addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
    drop.addEventListener("drop", (event) => this.take(event, event.dataTransfer));
    drop.addEventListener("paste", (event) => this.take(event, event.clipboardData));
  }

  take(event, { files }) {
    if (!files.length) return;
    event.preventDefault();
    this.add([...files]);
  }

  async add(files) {
    this.problem.textContent = "";
    for (const one of files) {
      try {
        const file = { name: one.name, text: await textOf(one) };
        this.files.push(file);
        this.show();
        announce(`${one.name} is attached`);
        file.tokens = (await postJSON("tokenize", { model: this.model(), content: file.text })).tokens.length;
        this.show();
      } catch (error) {
        if (error.status === undefined) this.problem.textContent = error.message; // else the server could not count
      }
    }
  }

  show() {
    this.place.replaceChildren(this.files.length ? fileList(this.files, (file) => {
      this.files = this.files.filter((other) => other !== file);
      this.show();
    }) : "");
  }

  clear() {
    this.files = [];
    this.problem.textContent = "";
    this.show();
  }
}
