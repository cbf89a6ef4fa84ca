// The list of models to choose from. One request serves every list on the page.

import { models } from "./api.js";
import { h, refill } from "./dom.js";
import { change, settings } from "./settings.js";

let found = [];
let asked = null;

/** Asks for the models again, when the key or the server has changed. */
export function refresh() {
  asked = models().then((list) => (found = list)).catch(() => {
    asked = null; // the next that wants them asks again
    return found;
  });
  return asked;
}

/** The models, once they are known; none while the server cannot be asked. */
export const known = () => asked ?? refresh();

function fill(select, wanted) {
  const ids = found.map((model) => model.id);
  const value = ids.includes(wanted) ? wanted : (ids[0] ?? "");
  refill(select, found.map((model) => h("option", { value: model.id }, model.id)));
  select.value = value;
  select.disabled = ids.length === 0;
}

/** A list of the models; the one for conversations remembers its choice. */
export function modelPicker({ label = "Model", nth = null } = {}) {
  const select = h("select", { "aria-label": label, class: "model" });
  if (nth === null) select.addEventListener("change", () => change({ model: select.value }));
  const wanted = () => select.value || (nth === null ? settings.model : (found[nth]?.id ?? found[0]?.id));
  fill(select, wanted());
  select.ready = () => known().then(() => fill(select, wanted()));
  select.ready();
  return select;
}
