// What holds for one conversation alone: its system prompt and sampling.

import { dialog, field, fill, h } from "./dom.js";
import { servers } from "./mcp.js";
import { presetChooser } from "./presets.js";
import { samplingFields } from "./sampling.js";

/** A box for each MCP server, none of which is ticked before the user does so; nothing where the server names none. */
function tools(conversation, onChange) {
  const place = h("div", {});
  const box = (url) => {
    const input = h("input", { type: "checkbox", checked: (conversation.tools ?? []).includes(url), onchange: () => {
      conversation.tools = [...(conversation.tools ?? []).filter((one) => one !== url), ...(input.checked ? [url] : [])];
      onChange();
    } });
    return h("div", { class: "field check" }, h("label", {}, input, h("span", {}, url)));
  };
  servers().then((urls) => urls.length && place.append(h("h3", {}, "Tools"),
    h("p", { class: "hint" }, "The model may ask to call the tools of a server that is ticked. You allow or refuse each call."), fill(h("div"), urls.map(box)))).catch(() => {});
  return place;
}

/** The dialog of a conversation's options; `onChange()` is called after each change. */
export function options(conversation, onChange) {
  const keep = () => {
    conversation.system = system.value;
    onChange();
  };
  const system = h("textarea", { rows: 4, value: conversation.system, onchange: keep });
  const sampling = samplingFields(conversation.sampling ?? {}, (values) => {
    conversation.sampling = { ...conversation.sampling, ...values };
    onChange();
  }, "As in the settings");
  const presets = presetChooser(() => system.value, (text) => {
    system.value = text;
    keep();
  });
  const close = () => element.close();
  const element = dialog("Options of the conversation",
    h("div", { class: "options" }, field("System prompt", system, "What the model is told first"), presets, tools(conversation, onChange), h("h3", {}, "Sampling"), sampling),
    h("button", { type: "button", class: "primary", onclick: close }, "Done"));
}
