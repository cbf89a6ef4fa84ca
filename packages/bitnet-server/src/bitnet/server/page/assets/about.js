// What the server says about a model.

import { getJSON, postJSON } from "./api.js";
import { dialog, h, scrollable } from "./dom.js";
import { problem } from "./message.js";

const count = new Intl.NumberFormat("en");

function pairs({ status = {}, max_model_len: context }, { details = {}, model_info: info = {}, capabilities = [] }) {
  const found = {
    State: status.value,
    Device: status.device,
    Context: context && `${count.format(context)} tokens`,
    Parameters: details.parameter_size,
    Weights: details.quantization_level,
    Memory: status.bytes && `${count.format(Math.round(status.bytes / 1e6))} MB`,
    Architecture: details.family,
    Layers: info[`${details.family}.block_count`],
    Capabilities: capabilities.join(", "),
  };
  return Object.entries(found).filter(([, value]) => value);
}

/** A dialog about a model. */
export async function about(model) {
  const body = h("div", { class: "about" }, h("p", { class: "hint" }, "Asking the server …"));
  const close = () => element.close();
  const element = dialog(model, body, h("button", { type: "button", class: "primary", onclick: close }, "Close"));
  try {
    const [entry, shown] = await Promise.all([getJSON(`v1/models/${encodeURIComponent(model)}`), postJSON("api/show", { model })]);
    body.replaceChildren(
      h("dl", { class: "pairs" }, pairs(entry, shown).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value))))),
      shown.template ? h("details", {}, h("summary", {}, "Chat template"), h("pre", { class: "receipt", ...scrollable("Chat template") }, shown.template)) : "");
  } catch (error) {
    body.replaceChildren(problem(error, null));
  }
}
