// A menu that a button opens, of actions on one thing. The browser closes it at Escape and at a click elsewhere.

import { button, fill, h, icon } from "./dom.js";

const GAP = 4; // pixels between the button and its menu

/** Puts a menu below its button, or above it where there is no room, within the window. */
function beside(menu, opener) {
  const from = opener.getBoundingClientRect();
  const { width, height } = menu.getBoundingClientRect();
  const below = from.bottom + GAP + height <= innerHeight;
  menu.style.left = `${Math.max(GAP, Math.min(from.right - width, innerWidth - width - GAP))}px`;
  menu.style.top = `${Math.max(GAP, below ? from.bottom + GAP : from.top - GAP - height)}px`;
}

function open(opener, label, items) {
  const menu = h("div", { class: "menu", popover: "auto", role: "menu", "aria-label": label });
  const entries = items.filter(Boolean).map(([name, text, act, props = {}]) =>
    h("button", { type: "button", role: "menuitem", tabindex: "-1", ...props, onclick: () => {
      menu.hidePopover();
      act();
    } }, icon(name), h("span", {}, text)));
  fill(menu, entries);
  menu.addEventListener("keydown", (event) => {
    const at = entries.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: -1 }[event.key];
    if (event.key === "Tab") menu.hidePopover();
    if (event.key === "Escape") event.stopPropagation(); // the browser closes the menu, and nothing else is closed
    if (to === undefined) return;
    event.preventDefault();
    entries.at(to % entries.length).focus();
  });
  menu.addEventListener("beforetoggle", (event) => {
    if (event.newState === "closed" && menu.contains(document.activeElement)) opener.focus();
  });
  menu.addEventListener("toggle", (event) => {
    if (event.newState !== "closed") return;
    opener.setAttribute("aria-expanded", "false");
    menu.remove();
  });
  opener.after(menu);
  menu.showPopover();
  beside(menu, opener);
  opener.setAttribute("aria-expanded", "true");
  entries[0].focus();
}

/** A button that opens a menu. `items()` gives its entries when it is opened: `[icon, text, act, attributes]`, or false. */
export function menuButton(label, items) {
  const opener = button("more", label, () => open(opener, label, items()), { class: "quiet", "aria-haspopup": "menu", "aria-expanded": "false" });
  return opener;
}
