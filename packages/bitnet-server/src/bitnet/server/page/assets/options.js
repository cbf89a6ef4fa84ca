// What holds for one conversation alone: its system prompt and sampling.

import { dialog, field, h } from "./dom.js";
import { presetChooser } from "./presets.js";
import { samplingFields } from "./sampling.js";

/** The dialog of a conversation's options; `onChange()` is called after each change. */
export function options(conversation, onChange) {
  const keep = () => {
    conversation.system = system.value;
    onChange();
  };
  const system = h("textarea", { rows: 4, value: conversation.system, onchange: keep });
  const sampling = samplingFields(conversation.sampling ?? {}, (values) => {
    conversation.sampling = { ...conversation.sampling, ...values };
    onChange();
  }, "As in the settings");
  const presets = presetChooser(() => system.value, (text) => {
    system.value = text;
    keep();
  });
  const close = () => element.close();
  const element = dialog("Options of the conversation",
    h("div", { class: "options" }, field("System prompt", system, "What the model is told first"), presets, h("h3", {}, "Sampling"), sampling),
    h("button", { type: "button", class: "primary", onclick: close }, "Done"));
}
