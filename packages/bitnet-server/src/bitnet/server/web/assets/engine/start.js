// Where a static site begins: says what the engine needs, starts it when asked, and has it answer the page's requests.

import { h, refill } from "../assets/dom.js";
import { Engine, keepOffline } from "./client.js";
import { list } from "./store.js";

const BASE = new URL("../", import.meta.url).href;
const FILES = /^(?:assets|engine|weights)\/|^(?:site|package)\.json$|^$/;
const REMEMBERED = "bitnet.model"; // the model that the reader started last
const ADDRESS = ":address";
const FILE = ":file";
const ENGINE_MEMORY = 250e6; // bytes: Python, numpy, this project
const STAGES = { python: "Loading Python", numpy: "Loading numpy", packages: "Loading bitnet", model: "Getting the model", load: "Loading the model", kernels: "Compiling kernels" };

const ask = globalThis.fetch.bind(globalThis);
const query = new URLSearchParams(location.search);
let answerWith;
const started = new Promise((resolve) => (answerWith = resolve));

/** The page's requests wait for the engine, and go to it; those for files and other servers go their way. */
globalThis.fetch = async (input, init = {}) => {
  const { href } = new URL(input?.url ?? input, location.href);
  const inside = href.startsWith(BASE) ? href.slice(BASE.length) : "";
  if (FILES.test(inside)) return ask(input, init);
  return (await started).fetch(`/${inside}`, init);
};

const megabytes = (bytes) => (bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : `${Math.max(1, Math.round(bytes / 1e6))} MB`);

/** What will compute, in words; `good` is whether that is a GPU. */
async function processor() {
  if (query.get("device") === "cpu") return { good: false, text: "This machine’s processor, as the address asks." };
  if (!navigator.gpu) {
    const why = globalThis.isSecureContext ? "This browser has no WebGPU" : "WebGPU needs a page that is served by HTTPS";
    return { good: false, text: `${why}. The processor computes, which is slow. Chrome and Edge have WebGPU from version 113, Safari from 26.` };
  }
  const adapter = await navigator.gpu.requestAdapter().catch(() => null);
  if (!adapter) return { good: false, text: "The browser’s WebGPU finds no GPU. The processor computes, which is slow. Update the graphics driver, or allow hardware acceleration in the browser’s settings." };
  const { vendor, architecture, description } = adapter.info ?? {};
  return { good: true, text: `WebGPU: ${description || [vendor, architecture].filter(Boolean).join(" ") || "a GPU"}` };
}

const remembered = localStorage.getItem(REMEMBERED);
let next = remembered ? new Engine() : null; // its files are loaded meanwhile
const [site, stored] = await Promise.all([ask(new URL("site.json", BASE)).then((response) => response.json()), list().catch(() => [])]);
const isHere = (name) => stored.some((one) => one.name === name);
const offered = (name) => site.models.find((one) => one.name === name);

const choices = [
  ...site.models.map(({ name, bytes }) => [name, isHere(name) ? `${name} (in this browser)` : `${name} (${megabytes(bytes)})`]),
  ...stored.filter(({ name }) => !offered(name)).map(({ name }) => [name, `${name} (in this browser)`]),
  [ADDRESS, "Another, from an address"],
  [FILE, "Another, from a file"],
];

class Start {
  constructor() {
    this.select = h("select", { id: "start-model", onchange: () => this.show() }, choices.map(([value, text]) => h("option", { value }, text)));
    this.address = h("input", { type: "text", id: "start-address", placeholder: "https://… or ORG/NAME:FILE", spellcheck: "false", autocomplete: "off" });
    this.file = h("input", { type: "file", id: "start-file", accept: ".gguf" });
    this.other = h("p", {});
    this.needs = h("dl", { class: "pairs" });
    this.bar = h("progress", { max: "1", "aria-label": "Progress" });
    this.said = h("p", { class: "hint", role: "status" });
    this.problem = h("p", { class: "start-problem", role: "alert" });
    this.button = h("button", { type: "submit", class: "primary" }, "Start");
    this.element = h("dialog", { class: "start", "aria-labelledby": "start-title", oncancel: (event) => event.preventDefault() },
      h("h2", { id: "start-title" }, "A language model in this browser"),
      h("p", {}, "Nothing is installed, and what you write stays on this machine."),
      h("form", { onsubmit: (event) => { event.preventDefault(); this.begin(); } },
        h("p", {}, h("label", { for: "start-model" }, "Model "), this.select), this.other, this.needs,
        this.bar, this.said, this.problem, h("div", { class: "actions" }, this.button)));
    document.body.append(this.element);
    this.element.showModal();
    this.bar.hidden = true;
    this.processor = { text: "Asking the browser …" };
    this.show();
    processor().then((found) => {
      this.processor = found;
      this.show();
    });
  }

  /** Says what the chosen model needs. */
  show() {
    const chosen = this.select.value;
    refill(this.other, chosen === ADDRESS ? [h("label", { for: "start-address" }, "Address of a GGUF file, or a model of the Hugging Face Hub"), this.address]
      : chosen === FILE ? [h("label", { for: "start-file" }, "A GGUF file"), this.file] : []);
    const here = stored.find(({ name }) => name === chosen)?.file.size;
    const bytes = here ?? offered(chosen)?.bytes;
    const model = here ? "the model is in this browser" : bytes ? `${megabytes(bytes)} for the model` : chosen === FILE ? "the file is copied into the browser’s storage" : "the model’s file";
    const memory = bytes ? `about ${megabytes(ENGINE_MEMORY + 2 * bytes)}` : `about ${megabytes(ENGINE_MEMORY)}, and twice the file`;
    const limit = (navigator.deviceMemory ?? 0) * 2 ** 30; // browsers name 8 GB at most
    const tight = bytes && limit && limit < 8 * 2 ** 30 && ENGINE_MEMORY + 2 * bytes > limit / 2;
    const rows = {
      Download: `${megabytes(site.bytes)} for the engine, kept for the next time; ${model}`,
      Memory: tight ? `${memory}, which may be too much for this machine` : memory,
      "Computed by": this.processor.text,
    };
    refill(this.needs, Object.entries(rows).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  }

  progress(stage, done, total) {
    this.said.textContent = stage === "model" ? `${STAGES.model}: ${megabytes(done)}${total ? ` of ${megabytes(total)}` : ""}`
      : stage === "kernels" ? `${STAGES.kernels}: ${done} of ${total}` : `${STAGES[stage]} …`;
    if (total) this.bar.value = done / total;
    else this.bar.removeAttribute("value");
  }

  async begin() {
    this.button.disabled = true;
    this.select.disabled = true;
    this.bar.hidden = false;
    this.problem.textContent = "";
    try {
      await this.run();
    } catch (error) {
      this.problem.textContent = error.message;
      this.said.textContent = "";
      this.button.textContent = "Try again";
      this.bar.hidden = true;
      this.button.disabled = false;
      this.select.disabled = false;
    }
  }

  async run() {
    const chosen = this.select.value;
    const progress = ({ stage, done, total }) => this.progress(stage, done, total);
    if (!this.engine || this.engine.ended) {
      this.engine = next ?? new Engine();
      next = null;
      this.engine.onKernels = (done, total) => this.progress("kernels", done, total);
      const context = Number(query.get("context")) || undefined;
      try {
        await this.engine.call("start", { device: query.get("device") ?? undefined, context }, { progress });
      } catch (error) {
        this.engine.end(error.message);
        throw error;
      }
    }
    navigator.storage?.persist?.();
    let name = chosen;
    if (chosen === ADDRESS) name = await this.engine.call("add", { text: this.address.value.trim() }, { progress });
    else if (chosen === FILE) name = await this.engine.call("add", { file: this.file.files[0] ?? new File([], "none") }, { progress });
    else if (!(await list()).some((one) => one.name === chosen)) {
      const { path, sha256, bytes } = offered(chosen);
      await this.engine.call("add", { name, url: new URL(path, BASE).href, sha256, bytes }, { progress });
    }
    this.progress("load");
    await this.engine.call("load", { name });
    localStorage.setItem(REMEMBERED, name);
    this.element.close();
    this.element.remove();
    answerWith(this.engine);
    keepOffline().then(() => this.engine.call("keep")).catch(() => {}); // the page works without it, while there is a connection
  }
}

const start = new Start();
if (remembered && isHere(remembered)) {
  start.select.value = remembered;
  start.show();
  start.begin();
}
