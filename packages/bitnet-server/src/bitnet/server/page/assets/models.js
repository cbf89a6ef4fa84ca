// The list of models to choose from. One request serves every list on the page.

import { models } from "./api.js";
import { h, refill } from "./dom.js";

let found = [];
let asked = null;

/** Why the models could not be asked for the last time, or null. */
export let failure = null;

/** Asks for the models again, when the key or the server has changed. */
export function refresh() {
  asked = models().then((list) => {
    failure = null;
    return (found = list);
  }).catch((error) => {
    failure = error;
    if (error.needsKey) found = []; // what another key was shown
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
  if (!ids.length) select.append(h("option", { value: "" }, "No model"));
  select.value = value;
  select.disabled = ids.length === 0;
}

/** A list of the models. `wanted()` is the one to choose first, `nth` its place where it is not there; `onChange(id)` gets another choice. */
export function modelPicker({ label = "Model", wanted = () => "", nth = 0, onChange = () => {} } = {}) {
  const select = h("select", { "aria-label": label, class: "model", onchange: () => onChange(select.value) });
  const first = () => select.value || wanted() || (found[nth] ?? found[0])?.id;
  fill(select, first());
  select.ready = () => known().then(() => fill(select, first()));
  select.ready();
  return select;
}
