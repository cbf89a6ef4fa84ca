// Building the page's elements. Text is always a text node: nothing here, or anywhere in the page, parses HTML.

const SVG = "http://www.w3.org/2000/svg";
const MATHML = "http://www.w3.org/1998/Math/MathML";

function build(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  return fill(element, children);
}

/** Puts children (nodes, text, or lists of them) at the end of an element: one by one, as an argument list has a limit. */
export function fill(element, children) {
  for (const child of children) {
    if (Array.isArray(child)) fill(element, child);
    else if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

/** Puts children in place of those that an element has. */
export function refill(element, children) {
  element.replaceChildren(fill(document.createDocumentFragment(), children));
}

/** An HTML element: attributes, listeners (`onclick`), and children (nodes or text). */
export const h = (tag, props = {}, ...children) => build(document.createElement(tag), props, children);

/** An SVG element. */
export const s = (tag, props = {}, ...children) => build(document.createElementNS(SVG, tag), props, children);

/** A MathML element. */
export const m = (tag, props = {}, ...children) => build(document.createElementNS(MATHML, tag), props, children);

/** A picture from index.html, which assistive technology passes over. */
export const icon = (name) =>
  s("svg", { class: "icon", "aria-hidden": "true", focusable: "false" }, s("use", { href: `#icon-${name}` }));

/** A button that shows an icon and is called `label`; with `text` the label is seen, too. */
export function button(name, label, onclick, { text = false, ...props } = {}) {
  const named = text ? {} : { "aria-label": label, title: label };
  return h("button", { type: "button", ...(onclick && { onclick }), ...named, ...props }, icon(name), text && h("span", {}, label));
}

/** Replaces what a button shows. */
export function relabel(element, name, label) {
  element.setAttribute("aria-label", label);
  element.title = label;
  element.replaceChildren(icon(name));
}

/** Has a screen reader say a sentence when it is next silent. */
export function announce(text) {
  const region = document.getElementById("announcer");
  region.append(h("p", {}, text));
  while (region.childElementCount > 20) region.firstElementChild.remove();
}

/** Copies text, on plain http too, where browsers do not lend `navigator.clipboard`. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { class: "visually-hidden", "aria-hidden": "true", value: text });
    const before = document.activeElement;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    before?.focus();
  }
  announce("Copied");
}

/** A copy button that says so for a moment. `text` is a function: what is copied may still grow. */
export function copyButton(label, text) {
  const element = button("copy", label, async () => {
    await copy(text());
    relabel(element, "check", "Copied");
    setTimeout(() => relabel(element, "copy", label), 1500);
  }, { class: "quiet" });
  return element;
}

/** Offers text as a file. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

let serial = 0;

/** A dialog that the browser keeps focus in, closed by Escape; focus goes back to where it was. */
export function dialog(title, body, ...actions) {
  const id = `dialog-${++serial}`;
  const before = document.activeElement;
  const element = h("dialog", { "aria-labelledby": id }, h("h2", { id }, title), body, actions.length > 0 && h("div", { class: "actions" }, actions));
  element.addEventListener("close", () => {
    element.remove();
    if (before?.isConnected) before.focus();
  });
  document.body.append(element);
  element.showModal();
  return element;
}

/** Asks before something is lost; resolves to whether to go on. */
export function confirm(title, text, yes) {
  return new Promise((resolve) => {
    let agreed = false;
    const element = dialog(
      title,
      h("p", {}, text),
      h("button", { type: "button", onclick: () => element.close() }, "Keep"),
      h("button", { type: "button", class: "danger", onclick: () => { agreed = true; element.close(); } }, yes),
    );
    element.addEventListener("close", () => resolve(agreed));
  });
}

/** Asks for a line of text: `onAnswer(text)` gets it in the turn of the event loop in which it is given. */
export function ask(title, label, value, onAnswer) {
  const input = h("input", { type: "text", value, maxlength: "120" });
  const answer = (event) => {
    event.preventDefault();
    if (input.value.trim()) onAnswer(input.value.trim());
    element.close();
  };
  const element = dialog(title, h("form", { onsubmit: answer }, field(label, input),
    h("div", { class: "actions" }, h("button", { type: "button", onclick: () => element.close() }, "Cancel"), h("button", { type: "submit", class: "primary" }, "Keep"))));
  input.select();
}

const TOAST = 20_000; // milliseconds; longer while the pointer or the focus is on it

/** Says what was done, with a button that takes it back. */
export function undoable(text, undo) {
  const place = document.getElementById("toast");
  const hide = () => place.replaceChildren();
  let timer;
  const wait = () => (timer = setTimeout(() => element.isConnected && hide(), TOAST));
  const element = h("div", { onpointerenter: () => clearTimeout(timer), onfocusin: () => clearTimeout(timer), onpointerleave: wait, onfocusout: wait },
    h("span", {}, text),
    h("button", { type: "button", onclick: () => { hide(); undo(); } }, "Undo"),
    button("close", "Close this message", hide, { class: "quiet" }));
  place.replaceChildren(element);
  wait();
}

/** What makes a box that scrolls reachable by keys: it has a name, and is no landmark, of which a conversation would have hundreds. */
export const scrollable = (label) => ({ tabindex: "0", role: "group", "aria-label": label });

/** A labelled form field. `hint` is read after the label. */
export function field(label, input, hint) {
  const id = input.id || `field-${++serial}`;
  input.id = id;
  if (hint) input.setAttribute("aria-describedby", `${id}-hint`);
  return h("div", { class: "field" }, h("label", { for: id }, label), input, hint && h("p", { class: "hint", id: `${id}-hint` }, hint));
}

/** Makes a text area as high as its text, where the browser does not (`field-sizing`); returns what does so at once. */
export function autosize(area) {
  if (CSS.supports("field-sizing", "content")) return () => {};
  const fit = () => {
    area.style.height = "auto";
    area.style.height = `${area.scrollHeight + 2}px`;
  };
  area.addEventListener("input", fit);
  requestAnimationFrame(fit);
  return fit;
}
