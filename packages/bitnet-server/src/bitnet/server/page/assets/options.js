// What holds for one conversation alone.

import { dialog, field, h } from "./dom.js";

/** The dialog of a conversation's options; `onChange()` is called after each change. */
export function options(conversation, onChange) {
  const system = h("textarea", { rows: 4, value: conversation.system, onchange: () => {
    conversation.system = system.value;
    onChange();
  } });
  const close = () => element.close();
  const element = dialog("Options of the conversation",
    h("div", { class: "options" }, field("System prompt", system, "What the model is told first")),
    h("button", { type: "button", class: "primary", onclick: close }, "Done"));
}
