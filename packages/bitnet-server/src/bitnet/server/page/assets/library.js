// The server's models and their states, and a form that has the server pull another one from the hub.

import { about } from "./about.js";
import { lines } from "./api.js";
import { announce, button, field, h, refill } from "./dom.js";
import { problem } from "./message.js";
import * as models from "./models.js";

const EVERY = 5_000; // milliseconds
const pulls = new Map(); // each download's state by the model's name; they go on while another view is shown
let redraw = () => {};

const size = (bytes) => (bytes >= 1e9 ? `${(bytes / 1e9).toFixed(2)} GB` : `${(bytes / 1e6).toFixed(1)} MB`);

function model({ id, status = {} }) {
  const facts = [status.device, status.bytes && size(status.bytes), status.reason].filter(Boolean).join(" · ");
  return h("li", { class: "device" },
    h("h3", {}, h("span", {}, id), h("span", { class: status.value === "loaded" ? "tag good" : "tag" }, status.value ?? "served"), button("info", `About ${id}`, () => about(id), { class: "quiet" })),
    facts && h("p", { class: "hint" }, facts));
}

/** What shows a download: a bar for each file, and a button that stops it, or the error that ended it. */
class Pull {
  constructor(name) {
    this.name = name;
    this.controller = new AbortController();
    this.bars = new Map();
    this.said = h("p", { class: "hint" }, "Asking the hub …");
    this.files = h("div", {});
    this.actions = h("div", { class: "row" }, button("stop", `Stop pulling ${name}`, () => this.controller.abort(), { text: true }));
    this.element = h("li", { class: "device" }, h("h3", {}, name), this.said, this.files, this.actions);
  }

  /** Shows a line of progress: `{status, total, completed}`. */
  show({ status, total, completed }) {
    if (!total) {
      this.said.textContent = status;
      return;
    }
    if (!this.bars.has(status)) {
      const bar = h("progress", { max: "1", value: 0, "aria-label": `${this.name}, ${status}` });
      const text = h("span", { class: "hint" });
      this.bars.set(status, { bar, text });
      this.files.append(h("p", { class: "pulled" }, bar, text));
    }
    const { bar, text } = this.bars.get(status);
    bar.value = completed / total;
    text.textContent = `${size(completed)} of ${size(total)}`;
    this.said.textContent = status;
  }

  async run() {
    try {
      for await (const line of lines("api/pull", { model: this.name }, this.controller.signal)) this.show(line);
      pulls.delete(this.name);
      announce(`${this.name} is here`);
      await models.refresh();
    } catch (error) {
      if (error.name === "AbortError") {
        pulls.delete(this.name);
        announce(`${this.name} is no longer pulled`);
      } else {
        refill(this.actions, [button("close", "Close this message", () => (pulls.delete(this.name), redraw()), { text: true })]);
        refill(this.files, [problem(error, () => pull(this.name))]);
        this.said.textContent = "";
      }
    }
    redraw();
  }
}

function pull(name) {
  if (pulls.has(name)) pulls.get(name).controller.abort();
  const one = new Pull(name);
  pulls.set(name, one);
  redraw();
  one.run();
}

/** The view; it asks for the models again every few seconds while it is seen. Returns what ends it. */
export function show(main, { title }) {
  const place = h("div", {}, h("p", { class: "hint" }, "Asking the server …"));
  const running = h("ul", { class: "cards", "aria-label": "Downloads" });
  let seen = "";
  async function load() {
    const found = await models.refresh();
    const text = JSON.stringify(found);
    if (models.failure) {
      seen = "";
      place.replaceChildren(problem(models.failure, load));
    } else if (text !== seen) {
      seen = text;
      refill(place, [found.length ? h("ul", { class: "cards", "aria-label": "Models" }, found.map(model)) : h("p", {}, "There are no models here yet: pull one, or put one into the server’s folder.")]);
    }
  }
  redraw = () => {
    refill(running, [...pulls.values()].map((one) => one.element));
    running.hidden = !pulls.size;
    load();
  };
  const name = h("input", { type: "text", required: true, placeholder: "ORG/NAME", spellcheck: "false", autocomplete: "off", autocapitalize: "off" });
  const form = h("form", { onsubmit: (event) => {
    event.preventDefault();
    pull(name.value.trim());
    name.value = "";
  } }, field("Pull a model from the Hugging Face Hub", name, "As ORG/NAME, or ORG/NAME:FILE where it has several files. The server downloads it; stopping keeps what is there."),
  button("download", "Pull", null, { text: true, type: "submit", class: "primary" }));
  main.replaceChildren(h("div", { class: "sheet" }, title("Models"),
    h("p", { class: "lead" }, "The models of this server. One that is not loaded is loaded by the first message to it."),
    h("section", { "aria-labelledby": "l-here" }, h("h2", { id: "l-here" }, "On this server"), place),
    h("section", { "aria-labelledby": "l-pull" }, h("h2", { id: "l-pull" }, "Pull a model"), form, running)));
  redraw();
  const timer = setInterval(() => document.hidden || load(), EVERY);
  return () => {
    clearInterval(timer);
    redraw = () => {};
  };
}
