// What is written and not sent yet, by conversation. It lasts as long as the tab (sessionStorage), where the browser lends storage.

import { begun } from "./store.js";

const PREFIX = "bitnet.draft.";

/** All conversations that are not saved yet share one draft: a reload begins another of them. */
const name = (conversation) => PREFIX + (begun(conversation) ? conversation.id : "new");

export function load(conversation) {
  try {
    return sessionStorage.getItem(name(conversation)) ?? "";
  } catch {
    return "";
  }
}

export function save(conversation, text) {
  try {
    if (text) sessionStorage.setItem(name(conversation), text);
    else sessionStorage.removeItem(name(conversation));
  } catch {
    // without storage, or with too long a text, the draft lasts as long as the view
  }
}

/** All drafts, as `[name, text]`. */
export function all() {
  try {
    return Object.entries(sessionStorage).filter(([key]) => key.startsWith(PREFIX));
  } catch {
    return [];
  }
}

export function restore(drafts) {
  try {
    for (const [key, text] of drafts) sessionStorage.setItem(key, text);
  } catch {
    // without storage there is nothing to go back to
  }
}

export function clear() {
  for (const [key] of all()) sessionStorage.removeItem(key);
}
