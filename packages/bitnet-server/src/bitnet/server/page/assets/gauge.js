// How full the context is: the tokens of the prompt and of the answer, of those that the model can see at once.

import { h } from "./dom.js";

const told = new Intl.NumberFormat("en");

export class Gauge {
  constructor() {
    this.meter = h("meter", { min: "0", "aria-label": "Context in use" });
    this.text = h("span", {});
    this.element = h("p", { class: "hint gauge", hidden: true }, this.meter, this.text);
  }

  /** Shows what the last answer's `stats` say; nothing where the server did not count. */
  show({ prompt, tokens = 0, context } = {}) {
    this.element.hidden = !context || prompt === undefined;
    if (this.element.hidden) return;
    const used = Math.min(context, prompt + tokens);
    const text = `${told.format(used)} of ${told.format(context)} tokens`;
    Object.assign(this.meter, { max: context, high: context * 0.75, optimum: 0, value: used });
    this.meter.setAttribute("aria-valuetext", text);
    this.text.textContent = `Context: ${text}`;
  }
}
