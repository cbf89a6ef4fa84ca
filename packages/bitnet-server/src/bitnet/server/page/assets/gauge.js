// How full the context is: the tokens of the prompt and of the answer, of those that the model can see at once.

import { SHARE } from "./context.js";
import { dialog, h } from "./dom.js";

const count = new Intl.NumberFormat("en");

export class Gauge {
  constructor() {
    this.meter = h("meter", { min: "0", "aria-label": "Context in use" });
    this.text = h("button", { type: "button", class: "quiet", title: "What happens when the context is full", onclick: () => this.explain() });
    this.element = h("p", { class: "hint gauge", hidden: true }, this.meter, this.text);
  }

  /** Shows what the last answer's `stats` say; nothing where the server did not count. */
  show({ prompt, tokens = 0, context } = {}) {
    this.element.hidden = !context || prompt === undefined;
    if (this.element.hidden) return;
    this.stats = { prompt, tokens, context };
    const used = Math.min(context, prompt + tokens);
    const text = `${count.format(used)} of ${count.format(context)} tokens`;
    Object.assign(this.meter, { max: context, high: context * SHARE, optimum: 0, value: used });
    this.meter.setAttribute("aria-valuetext", text);
    this.text.textContent = `Context: ${text}`;
  }

  explain() {
    const { prompt, tokens, context } = this.stats;
    const close = () => element.close();
    const element = dialog("The context",
      h("div", {},
        h("p", {}, `The model sees at most ${count.format(context)} tokens at once. The last request had ${count.format(prompt)}, and its answer ${count.format(tokens)}.`),
        h("p", {}, `A request may fill ${SHARE * 100} % of it (${count.format(Math.floor(context * SHARE))} tokens): the rest is room for the answer. When the conversation is longer, its oldest questions and answers are no longer sent, and a line shows where the model’s view begins. They stay in the conversation.`),
        h("p", {}, "To make room, edit an earlier message, or begin a new conversation.")),
      h("button", { type: "button", class: "primary", onclick: close }, "Close"));
  }
}
