// The menu: views, conversations, and on a phone a drawer over the page.

import { button, h, icon, refill } from "./dom.js";
import * as store from "./store.js";

const VIEWS = [["compare", "Compare", "compare"], ["devices", "Devices", "chip"], ["metrics", "Metrics", "chart"], ["settings", "Settings", "settings"]];

export class Sidebar {
  constructor(element, opener, rest) {
    this.element = element;
    this.opener = opener;
    this.rest = rest; // what is out of reach while the drawer is open
    this.list = h("ul", { class: "conversations" });
    this.views = h("ul", { class: "views" }, VIEWS.map(([id, label, name]) =>
      h("li", {}, h("a", { href: `#/${id}`, "data-view": id }, icon(name), h("span", {}, label)))));
    element.replaceChildren(
      h("div", { class: "brand" }, h("a", { href: "#/", "aria-label": "bitnet, a new conversation" }, icon("mark"), h("span", {}, "bitnet")),
        button("close", "Close the menu", () => this.close(), { class: "quiet drawer-only" })),
      h("a", { class: "button new", href: "#/" }, icon("plus"), h("span", {}, "New conversation")),
      h("nav", { "aria-label": "Conversations" }, h("h2", {}, "Conversations"), this.list),
      h("nav", { "aria-label": "Views" }, this.views));
    element.addEventListener("click", (event) => event.target.closest("a") && this.close(false));
    element.addEventListener("keydown", (event) => event.key === "Escape" && this.close());
    opener.addEventListener("click", () => this.open());
    document.getElementById("veil").addEventListener("click", () => this.close());
  }

  open() {
    document.body.classList.add("drawer");
    this.opener.setAttribute("aria-expanded", "true");
    for (const part of this.rest) part.inert = true;
    this.element.querySelector("button").focus();
  }

  close(focus = true) {
    if (!document.body.classList.contains("drawer")) return;
    document.body.classList.remove("drawer");
    this.opener.setAttribute("aria-expanded", "false");
    for (const part of this.rest) part.inert = false;
    if (focus) this.opener.focus();
  }

  /** Marks where the user is: a view's name, or a conversation's id. */
  async here(place) {
    this.place = place;
    const conversations = await store.all();
    refill(this.list, conversations.map(({ id, title }) => h("li", {}, h("a", { href: `#/chat/${id}`, title, "aria-current": id === place ? "page" : null }, title))));
    if (!conversations.length) this.list.append(h("li", { class: "hint" }, "None yet"));
    for (const link of this.views.querySelectorAll("a")) {
      if (link.dataset.view === place) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  }
}
