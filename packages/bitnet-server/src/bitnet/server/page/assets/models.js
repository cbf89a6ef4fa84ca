// The list of models to choose from. One request serves every list on the page.

import { models } from "./api.js";
import { h } from "./dom.js";
import { change, settings } from "./settings.js";

let known = [];
let asked = null;

/** Asks for the models again, when the key or the server has changed. */
export function refresh() {
  asked = models().then((found) => (known = found)).catch(() => known);
  return asked;
}

function fill(select, wanted) {
  const ids = known.map((model) => model.id);
  const value = ids.includes(wanted) ? wanted : (ids[0] ?? "");
  select.replaceChildren(...known.map((model) => h("option", { value: model.id }, model.id)));
  select.value = value;
  select.disabled = ids.length === 0;
}

/** A list of the models; the one for conversations remembers its choice. */
export function modelPicker({ label = "Model", nth = null } = {}) {
  const select = h("select", { "aria-label": label, class: "model" });
  if (nth === null) select.addEventListener("change", () => change({ model: select.value }));
  const wanted = () => select.value || (nth === null ? settings.model : (known[nth]?.id ?? known[0]?.id));
  fill(select, wanted());
  (asked ?? refresh()).then(() => fill(select, wanted()));
  return select;
}
