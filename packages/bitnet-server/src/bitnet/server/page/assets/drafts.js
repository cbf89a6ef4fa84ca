// What is written and not sent yet, by conversation. It lasts as long as the tab (sessionStorage), where the browser lends storage.

const PREFIX = "bitnet.draft.";

/** All conversations that are not saved yet share one draft: a reload begins another of them. */
const name = ({ id, named, messages }) => PREFIX + (named || messages.length ? id : "new");

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

export function clear() {
  try {
    for (const key of Object.keys(sessionStorage)) if (key.startsWith(PREFIX)) sessionStorage.removeItem(key);
  } catch {
    // there is nothing to clear
  }
}
