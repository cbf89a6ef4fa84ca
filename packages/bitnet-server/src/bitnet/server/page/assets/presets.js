// System prompts with a name, to be used in any conversation.

import { announce, ask, button, field, h, refill, undoable } from "./dom.js";
import { change, settings } from "./settings.js";

/** Keeps `text` under `name`, in place of a preset that has the name. */
function keep(name, text) {
  const others = settings.presets.filter((one) => one.name !== name);
  change({ presets: [...others, { name, text }].sort((a, b) => a.name.localeCompare(b.name)) });
  announce(`The preset “${name}” is kept`);
}

/** A list to choose a preset from, with a button that keeps `current()` as one; `onChoose(text)` gets the chosen one. */
export function presetChooser(current, onChoose) {
  const select = h("select", { onchange: () => {
    const found = settings.presets.find(({ name }) => name === select.value);
    if (found) onChoose(found.text);
  } });
  const list = () => refill(select, [h("option", { value: "" }, settings.presets.length ? "Choose a preset" : "No presets yet"), settings.presets.map(({ name }) => h("option", {}, name))]);
  const save = () => current().trim() && ask("Keep the system prompt as a preset", "Name of the preset", "", (name) => {
    keep(name, current());
    list();
    select.value = name;
  });
  list();
  return h("div", { class: "presets" }, field("Preset", select), button("plus", "Keep as preset", save, { text: true }));
}

/** All presets, each with a button that deletes it. */
export function presetList() {
  const list = h("ul", { class: "preset-list" });
  const show = () => {
    refill(list, settings.presets.map((one) => h("li", {}, h("details", {}, h("summary", {}, one.name), h("p", {}, one.text)),
      button("trash", `Delete the preset “${one.name}”`, () => {
        change({ presets: settings.presets.filter((other) => other !== one) });
        show();
        undoable(`The preset “${one.name}” is deleted.`, () => {
          keep(one.name, one.text);
          show();
        });
      }, { class: "quiet" }))));
    if (!settings.presets.length) list.append(h("li", { class: "hint" }, "None yet. The options of a conversation keep its system prompt as a preset."));
  };
  show();
  return list;
}
