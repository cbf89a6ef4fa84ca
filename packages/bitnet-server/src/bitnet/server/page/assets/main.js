// Where the page begins: which view the address names, and whether the server can be reached.

import { getJSON } from "./api.js";
import * as chat from "./chat.js";
import * as compare from "./compare.js";
import * as devices from "./devices.js";
import { h } from "./dom.js";
import * as library from "./library.js";
import { Manager } from "./manage.js";
import * as metrics from "./metrics.js";
import { refresh } from "./models.js";
import * as preferences from "./preferences.js";
import { applyTheme, settings } from "./settings.js";
import * as shortcuts from "./shortcuts.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";

const VIEWS = { models: library, compare, devices, metrics, settings: preferences };
const HEALTH_EVERY = 20_000;

const main = document.getElementById("main");
const notice = document.getElementById("notice");
const manager = new Manager({ shown: () => shown, listed: () => sidebar.list() });
const sidebar = new Sidebar(document.getElementById("sidebar"), document.getElementById("menu"), [main, document.getElementById("top"), notice],
  (id) => manager.menu(id));

let leave = null;
let turn = 0; // counts the views that were asked for
let shown = null; // the view of a conversation

/** A view's heading, which gets the focus when the view is entered. */
function title(text) {
  document.title = `${text} · bitnet`;
  return h("h1", { tabindex: "-1" }, text);
}

async function converse(id) {
  const mine = turn;
  let address = location.hash;
  const found = id ? await store.load(id) : null;
  if (mine !== turn) return; // another view has been asked for meanwhile
  if (id && !found) {
    location.replace("#/");
    return;
  }
  const conversation = found ?? store.fresh(settings.system);
  const view = chat.show(main, conversation, {
    title,
    menu: (here) => manager.menu(here),
    onSaving: (saving) => {
      // Before the save ends: a reload until then would show a new conversation.
      if (view !== shown || location.hash !== address) return; // a link was followed; its event is yet to come
      address = `#/chat/${saving.id}`;
      history.replaceState(null, "", address);
    },
    onSaved: (saved) => (view === shown ? sidebar.here(saved.id) : sidebar.list()),
  });
  shown = view;
  leave = () => view.leave();
  sidebar.here(conversation.id);
}

async function route(first = false) {
  const mine = ++turn;
  leave?.();
  leave = null;
  shown = null;
  const [view, id] = location.hash.replace(/^#\//, "").split("/");
  const begun = location.hash;
  if (VIEWS[view]) {
    leave = VIEWS[view].show(main, { title, manager, onKey: refresh }) ?? null;
    sidebar.here(view);
  } else {
    await converse(view === "chat" ? id : "");
    if (mine !== turn || begun !== location.hash) return;
  }
  if (!first && document.activeElement?.tagName !== "TEXTAREA") main.querySelector("h1")?.focus();
}

let checks = 0;

async function health() {
  if (document.hidden) return;
  let text = "";
  const mine = ++checks;
  try {
    await getJSON("health");
  } catch (error) {
    if (error.status === 0 || error.status === 503) text = `${error.title}. Trying again …`;
  }
  if (mine !== checks) return; // a later check knows better
  if (notice.textContent !== text) {
    notice.textContent = text;
    if (!text) refresh();
  }
}

shortcuts.listen({
  create: () => (location.hash = "#/"),
  search: () => sidebar.search(),
  write: () => (shown ? shown.composer.focus() : (location.hash = "#/")),
  remove: () => shown && store.begun(shown.conversation) && manager.remove(shown.conversation),
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the view
  main.focus();
});
addEventListener("hashchange", () => route());
addEventListener("online", health);
addEventListener("offline", health);
setInterval(health, HEALTH_EVERY);
applyTheme();
route(true);
health();
