// The settings view.

import { apiKey, models, setApiKey } from "./api.js";
import { announce, button, field, h } from "./dom.js";
import * as notify from "./notify.js";
import { presetList } from "./presets.js";
import { NONE, samplingFields } from "./sampling.js";
import { change, settings } from "./settings.js";

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
  return button("again", "Leave sampling to the server", () => {
    change(NONE);
    render();
    announce("Sampling is the server’s choice again");
  }, { text: true });
}

/** Asks the server whether it takes the key, and says so in `place`. */
async function checkKey(place) {
  const say = (kind, text) => {
    place.className = kind;
    place.textContent = text;
  };
  say("hint", "Asking the server …");
  try {
    await models();
    const open = apiKey() && (await models({ key: "" }).then(() => true, () => false));
    if (!apiKey()) say("hint", "The server asks for no key.");
    else say("good", open ? "The server asks for no key; any is accepted." : "The server accepts this key.");
  } catch (error) {
    if (error.needsKey) say("bad", apiKey() ? "The server does not accept this key." : "The server asks for a key. Whoever runs it has it.");
    else say("bad", `${error.title}. ${error.message}`);
  }
}

/** The switch of notices; says why they cannot be had where the browser or the user refuses them. */
function notices() {
  const place = h("p", { class: "hint", role: "status" });
  const box = h("input", { type: "checkbox", checked: settings.notify && notify.allowed(), onchange: async () => {
    const problem = box.checked ? await notify.request() : "";
    if (problem) box.checked = false;
    place.textContent = problem;
    change({ notify: box.checked });
  } });
  return h("div", { class: "field check" }, h("label", {}, box, h("span", {}, `Tell me when an answer of more than ${notify.LONG / 1000} s is complete and the page is out of sight`)), place);
}

/** Shows the view. `onKey()` is called when there is another API key. */
export function show(main, { title, manager, onKey }) {
  const result = h("p", { class: "hint", role: "status" });
  const key = h("input", { type: "password", autocomplete: "off", spellcheck: "false", value: apiKey(), onchange: () => keepKey() });
  const keepKey = () => {
    if (key.value.trim() === apiKey()) return checkKey(result);
    setApiKey(key.value.trim());
    onKey();
    return checkKey(result);
  };
  const system = h("textarea", { rows: 3, value: settings.system, onchange: () => change({ system: system.value }) });
  const receipts = h("input", { type: "checkbox", checked: settings.receipts, onchange: () => change({ receipts: receipts.checked }) });
  main.replaceChildren(
    h("div", { class: "sheet" },
      title("Settings"),
      h("section", { "aria-labelledby": "s-server" }, h("h2", { id: "s-server" }, "Server"),
        h("form", { onsubmit: (event) => { event.preventDefault(); keepKey(); } }, field("API key", key, "Only if the server asks for one. Forgotten when this tab is closed."),
          button("check", "Check the key", null, { text: true, type: "submit" }), result)),
      h("section", { "aria-labelledby": "s-look" }, h("h2", { id: "s-look" }, "Look"), themes()),
      h("section", { "aria-labelledby": "s-answers" }, h("h2", { id: "s-answers" }, "Answers"),
        field("System prompt of new conversations", system, "What the model is told before the first message"),
        samplingFields(settings, change, "Server’s choice"),
        h("div", { class: "field check" }, h("label", {}, receipts, h("span", {}, "Ask for a receipt with each answer"))),
        notices(),
        reset(() => show(main, { title, manager, onKey }))),
      h("section", { "aria-labelledby": "s-presets" }, h("h2", { id: "s-presets" }, "Prompt presets"), presetList()),
      h("section", { "aria-labelledby": "s-data" }, h("h2", { id: "s-data" }, "Conversations"),
        h("p", { class: "hint" }, "They are kept in this browser, and sent to the server only to be answered."), manager.panel()),
    ),
  );
}
