// What the user has chosen: kept in this browser. The API key lasts as long as the tab (sessionStorage).

import { apiKey, setApiKey } from "./api.js";
import { announce, button, field, h } from "./dom.js";

const NAME = "bitnet.settings";
const DEFAULTS = {
  theme: "auto", model: "", system: "", temperature: "", top_p: "", top_k: "", min_p: "", max_tokens: "", seed: "", stop: "", receipts: false,
};

function read() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(NAME) ?? "{}") };
  } catch {
    return { ...DEFAULTS };
  }
}

export const settings = read();

addEventListener("storage", (event) => event.key === NAME && Object.assign(settings, read())); // of another tab

export function change(values) {
  Object.assign(settings, values);
  try {
    localStorage.setItem(NAME, JSON.stringify(settings));
  } catch {
    // No storage is lent: the choice holds until the page is left.
  }
  if ("theme" in values) applyTheme();
}

export function applyTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = settings.theme === "auto" ? (dark ? "dark" : "light") : settings.theme;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }, "0 takes the likeliest token each time"],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.01 }, "Draws from the likeliest tokens that make up this share"],
  ["top_k", "Top k", { min: 0, step: 1 }, "Draws from so many tokens; 0 sets no limit"],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }, "Drops tokens this much less likely than the best"],
  ["max_tokens", "Longest answer", { min: 1, step: 1 }, "In tokens"],
  ["seed", "Seed", { step: 1 }, "The same seed gives the same draws"],
];

function number([name, label, limits, hint]) {
  const input = h("input", { type: "number", inputmode: "decimal", placeholder: "Server’s choice", value: settings[name], ...limits });
  input.addEventListener("change", () => {
    if (input.checkValidity()) change({ [name]: input.value });
    else input.reportValidity();
  });
  return field(label, input, hint);
}

function themes() {
  const names = { auto: "As the system", light: "Light", dark: "Dark" };
  return h(
    "fieldset",
    { class: "segments" },
    h("legend", {}, "Appearance"),
    Object.entries(names).map(([value, label]) =>
      h("label", {}, h("input", { type: "radio", name: "theme", value, checked: settings.theme === value, onchange: () => change({ theme: value }) }), h("span", {}, label)),
    ),
  );
}

function reset(render) {
  const { theme, model, system, receipts, ...sampling } = DEFAULTS;
  return button("again", "Leave sampling to the server", () => {
    change(sampling);
    render();
    announce("Sampling is the server’s choice again");
  }, { text: true });
}

/** The settings view. */
export function show(main, { title, manager, onKey }) {
  const key = h("input", { type: "password", autocomplete: "off", spellcheck: "false", value: apiKey(), onchange: () => keepKey() });
  const keepKey = () => {
    setApiKey(key.value.trim());
    onKey();
  };
  const system = h("textarea", { rows: 3, value: settings.system, onchange: () => change({ system: system.value }) });
  const stop = h("textarea", { rows: 2, value: settings.stop, onchange: () => change({ stop: stop.value }) });
  const receipts = h("input", { type: "checkbox", checked: settings.receipts, onchange: () => change({ receipts: receipts.checked }) });
  main.replaceChildren(
    h("div", { class: "sheet" },
      title("Settings"),
      h("section", { "aria-labelledby": "s-server" }, h("h2", { id: "s-server" }, "Server"),
        h("form", { onsubmit: (event) => { event.preventDefault(); keepKey(); } }, field("API key", key, "Only if the server asks for one. Forgotten when this tab is closed."))),
      h("section", { "aria-labelledby": "s-look" }, h("h2", { id: "s-look" }, "Look"), themes()),
      h("section", { "aria-labelledby": "s-answers" }, h("h2", { id: "s-answers" }, "Answers"),
        field("System prompt of new conversations", system, "What the model is told before the first message"),
        h("div", { class: "grid" }, NUMBERS.map(number)),
        field("Stop at", stop, "One text a line; the answer ends before it"),
        h("div", { class: "field check" }, h("label", {}, receipts, h("span", {}, "Ask for a receipt with each answer"))),
        reset(() => show(main, { title, manager, onKey }))),
      h("section", { "aria-labelledby": "s-data" }, h("h2", { id: "s-data" }, "Conversations"),
        h("p", { class: "hint" }, "They are kept in this browser, and sent to the server only to be answered."), manager.panel()),
    ),
  );
}
