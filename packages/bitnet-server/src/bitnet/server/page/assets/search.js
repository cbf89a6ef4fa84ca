// Which conversations have all words of a search in their names and messages, whatever the case and the accents.

import { withFiles } from "./attachments.js";
import { everything } from "./branches.js";
import * as store from "./store.js";

const AROUND = 30; // letters shown before the first word that was found
const SNIPPET = 120;
const AT_ONCE = 8; // milliseconds of work, about half a frame

const fold = (text) => text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();

const known = new Map(); // by id: when it was changed, and its texts

let reading = null; // while the texts are read

async function read() {
  known.clear();
  let begun = performance.now();
  for (const { id, title, updated, messages } of await store.all()) {
    const said = everything(messages).map(withFiles);
    known.set(id, { updated, said, folded: [title, ...said].map(fold) });
    if (performance.now() - begun < AT_ONCE) continue;
    await new Promise((resolve) => setTimeout(resolve)); // typing goes on meanwhile
    begun = performance.now();
  }
}

async function texts() {
  await reading;
  const listed = await store.list();
  if (listed.some(({ id, updated }) => known.get(id)?.updated !== updated)) {
    reading ??= read().finally(() => (reading = null));
    await reading;
  }
  return listed;
}

/** The part of a text around the first of `words`. */
function snippet({ said, folded }, words) {
  const at = folded.findIndex((text, nth) => nth && words.some((word) => text.includes(word)));
  if (at < 1) return "";
  const found = folded[at].indexOf(words.find((word) => folded[at].includes(word)));
  const text = said[at - 1].length === folded[at].length ? said[at - 1] : folded[at]; // folding may change the length
  const begin = Math.max(0, found - AROUND);
  return (begin ? "…" : "") + text.slice(begin, begin + SNIPPET).replace(/\s+/g, " ");
}

/** `{id, title, updated, snippet}` of the conversations that have all words of `text`, the latest first; all without a word. */
export async function search(text) {
  const words = fold(text).split(/\s+/).filter(Boolean);
  if (!words.length) return store.list();
  const listed = await texts();
  return listed
    .filter(({ id }) => words.every((word) => known.get(id)?.folded.some((one) => one.includes(word))))
    .map((one) => ({ ...one, snippet: snippet(known.get(one.id), words) }));
}
