// What is above a conversation: its name, its model, and what can be done with all of it.

import { about } from "./about.js";
import { button, h } from "./dom.js";
import { menuButton } from "./menu.js";
import { modelPicker } from "./models.js";
import { options } from "./options.js";
import { change, settings } from "./settings.js";

export class Bar {
  /** `menu()` gives the menu's entries (`menu.js`); `onChange()` is called when the conversation has changed. */
  constructor(conversation, heading, { menu, onChange }) {
    this.heading = heading;
    this.picker = modelPicker({
      wanted: () => conversation.model || settings.model,
      onChange: (model) => {
        change({ model }); // for new conversations
        conversation.model = model;
        onChange();
      },
    });
    const open = () => options(conversation, onChange);
    this.element = h("header", { class: "bar" }, heading,
      h("div", { class: "tools" }, this.picker,
        button("settings", "Options of the conversation", open, { class: "quiet wide-only" }),
        menuButton("Menu of the conversation", () => [["settings", "Options", open], ["info", "About the model", () => about(this.picker.value), { disabled: !this.picker.value }], ...menu()])));
  }
}
