// Where a message is written: it is sent by Enter, and what is not sent yet is kept by conversation.

import { Attachments } from "./attachments.js";
import { autosize, button, h, relabel } from "./dom.js";
import * as drafts from "./drafts.js";
import * as shortcuts from "./shortcuts.js";

export class Composer {
  /** `onSend(text, files)` gets what was written; while an answer is made the button stops it instead (`onStop`). `onUp(event)` is an arrow up in an empty field. */
  constructor(conversation, { onSend, onStop, onUp, model, beside }) {
    this.conversation = conversation;
    this.answering = false;
    this.input = h("textarea", { id: "prompt", rows: 1, "aria-label": "Message", placeholder: "Write a message", enterkeyhint: "send", value: drafts.load(conversation) });
    this.input.addEventListener("input", () => drafts.save(conversation, this.input.value));
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "ArrowUp" && !this.input.value) return void onUp(event);
      const phone = matchMedia("(pointer: coarse)").matches; // there Enter is a new line: Shift+Enter cannot be typed
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || phone) return;
      event.preventDefault();
      if (!this.answering) form.requestSubmit();
    });
    this.fit = autosize(this.input);
    this.send = button("send", "Send", null, { class: "primary round" });
    this.send.type = "submit";
    const form = h("form", {
      class: "composer",
      onsubmit: (event) => {
        event.preventDefault();
        if (this.answering) onStop();
        else onSend(this.input.value.trim(), this.attachments.files);
      },
    });
    this.attachments = new Attachments(model, form);
    form.append(this.attachments.element, h("div", { class: "line" }, this.attachments.button, this.input, this.send));
    this.element = h("div", { class: "dock" }, form, h("div", { class: "under" },
      h("p", { class: "hint keys" }, "Enter sends, Shift + Enter makes a new line.",
        h("button", { type: "button", class: "quiet", onclick: () => shortcuts.show() }, "All keys")), beside));
  }

  focus() {
    this.input.focus();
  }

  /** Takes away what was sent. */
  clear() {
    this.input.value = "";
    drafts.save(this.conversation, "");
    this.attachments.clear();
    this.fit();
  }

  /** The draft goes along when the conversation becomes one of its own (`change` makes it so). */
  keepOver(change) {
    drafts.save(this.conversation, "");
    change();
    drafts.save(this.conversation, this.input.value);
  }

  busy(on) {
    this.answering = on;
    relabel(this.send, on ? "stop" : "send", on ? "Stop" : "Send");
  }
}
