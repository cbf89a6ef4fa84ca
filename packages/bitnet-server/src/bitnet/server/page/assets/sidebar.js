// The menu: views, conversations by date with a search, and on a phone a drawer over the page.

import { button, h, icon, refill } from "./dom.js";
import { menuButton } from "./menu.js";
import { search } from "./search.js";
import * as store from "./store.js";

const VIEWS = [["models", "Models", "download"], ["compare", "Compare", "compare"], ["devices", "Devices", "chip"], ["metrics", "Metrics", "chart"], ["settings", "Settings", "settings"]];
const MONTH = new Intl.DateTimeFormat("en", { month: "long", year: "numeric" });
const MOMENT = new Intl.DateTimeFormat("en", { dateStyle: "medium", timeStyle: "short" });

/** The heading under which a conversation of that time is listed. */
function age(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  const days = Math.ceil((midnight - time) / 86_400_000);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  if (days <= 7) return "Last 7 days";
  if (days <= 30) return "Last 30 days";
  return MONTH.format(time);
}

export class Sidebar {
  /** `rest` is out of reach while the drawer is open; `menu(id)` gives the entries of a conversation's menu. */
  constructor(element, opener, rest, menu) {
    Object.assign(this, { element, opener, rest, menu });
    this.found = h("div", { class: "conversations" });
    this.find = h("input", { type: "search", "aria-label": "Search conversations", placeholder: "Search", autocomplete: "off" });
    this.find.addEventListener("input", () => this.list());
    this.find.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.find.value) return;
      event.stopPropagation();
      this.find.value = "";
      this.list();
    });
    this.views = h("ul", { class: "views" }, VIEWS.map(([id, label, name]) =>
      h("li", {}, h("a", { href: `#/${id}`, "data-view": id }, icon(name), h("span", {}, label)))));
    element.replaceChildren(
      h("div", { class: "brand" }, h("a", { href: "#/", "aria-label": "bitnet, a new conversation" }, icon("mark"), h("span", {}, "bitnet")),
        button("close", "Close the menu", () => this.close(), { class: "quiet drawer-only" })),
      h("a", { class: "button new", href: "#/" }, icon("plus"), h("span", {}, "New conversation")),
      h("nav", { "aria-label": "Conversations" }, h("h2", {}, "Conversations"), this.find, this.found),
      h("nav", { "aria-label": "Views" }, this.views));
    element.addEventListener("click", (event) => event.target.closest("a") && this.close(false));
    element.addEventListener("keydown", (event) => event.key === "Escape" && this.close());
    opener.addEventListener("click", () => this.open());
    document.getElementById("veil").addEventListener("click", () => this.close());
    store.onOtherTab(() => this.list());
  }

  open() {
    document.body.classList.add("drawer");
    this.opener.setAttribute("aria-expanded", "true");
    for (const part of this.rest) part.inert = true;
    this.element.querySelector("button").focus();
  }

  /** Has the user type a search. */
  search() {
    if (getComputedStyle(this.opener.parentElement).display !== "none") this.open(); // the menu is a drawer
    this.find.select();
  }

  close(focus = true) {
    if (!document.body.classList.contains("drawer")) return;
    document.body.classList.remove("drawer");
    this.opener.setAttribute("aria-expanded", "false");
    for (const part of this.rest) part.inert = false;
    if (focus) this.opener.focus();
  }

  row({ id, title, updated, snippet }) {
    const link = h("a", { href: `#/chat/${id}`, title: `${title}\n${MOMENT.format(updated)}`, "aria-current": id === this.place ? "page" : null },
      title, snippet && h("span", { class: "snippet" }, snippet));
    return h("li", {}, link, menuButton(`Menu of “${title}”`, () => this.menu(id)));
  }

  /** Lists the conversations that the search finds. */
  async list() {
    const text = this.find.value;
    const found = await search(text);
    if (text !== this.find.value) return; // more has been typed
    const groups = new Map();
    for (const one of found) groups.set(age(one.updated), [...(groups.get(age(one.updated)) ?? []), one]);
    refill(this.found, [...groups].map(([heading, all]) => [h("h3", {}, heading), h("ul", {}, all.map((one) => this.row(one)))]));
    if (!found.length) this.found.append(h("p", { class: "hint" }, text.trim() ? "No conversation has these words." : "None yet. They are kept in this browser."));
  }

  /** Marks where the user is: a view's name, or a conversation's id. */
  async here(place) {
    this.place = place;
    for (const link of this.views.querySelectorAll("a")) {
      if (link.dataset.view === place) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    await this.list();
  }
}
