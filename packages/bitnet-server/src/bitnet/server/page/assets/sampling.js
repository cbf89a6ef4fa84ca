// How the next token is drawn: fields for the choices, and the part of a request that has them.

import { field, h } from "./dom.js";

/** No choice: all is left to the server. */
export const NONE = { temperature: "", top_p: "", top_k: "", min_p: "", max_tokens: "", seed: "", stop: "" };

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }, "0 takes the likeliest token each time"],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.01 }, "Draws from the likeliest tokens that make up this share"],
  ["top_k", "Top k", { min: 0, step: 1 }, "Draws from so many tokens; 0 sets no limit"],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }, "Drops tokens this much less likely than the best"],
  ["max_tokens", "Longest answer", { min: 1, step: 1 }, "In tokens"],
  ["seed", "Seed", { step: 1 }, "The same seed gives the same draws"],
];

/** Fields for the choices in `values`; `change({name: value})` gets each new one. An empty field shows `placeholder`. */
export function samplingFields(values, change, placeholder) {
  const number = ([name, label, limits, hint]) => {
    const input = h("input", { type: "number", inputmode: "decimal", placeholder, value: values[name] ?? "", ...limits, onchange: () => {
      if (input.checkValidity()) change({ [name]: input.value });
      else input.reportValidity();
    } });
    return field(label, input, hint);
  };
  const stop = h("textarea", { rows: 2, placeholder, value: values.stop ?? "", onchange: () => change({ stop: stop.value }) });
  return h("div", {}, h("div", { class: "grid" }, NUMBERS.map(number)), field("Stop at", stop, "One text a line; the answer ends before it"));
}

/** `base` with the choices of `own` in place of its own, where there are any. */
export const chosen = (base, own = {}) => ({ ...base, ...Object.fromEntries(Object.entries(own).filter(([name, value]) => name in NONE && value !== "")) });

/** The request's sampling fields: only those that were set, so that the server's defaults hold for the rest. */
export function sampling(values) {
  const body = {};
  for (const [name] of NUMBERS) {
    if (values[name] !== "" && values[name] !== undefined) body[name] = Number(values[name]);
  }
  const stop = (values.stop ?? "").split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  return body;
}
