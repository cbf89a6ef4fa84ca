// What the engine keeps for its next start: Python's memory once it runs ("snapshot"), and its packages' files ("files").
// Both are made here, from the site's files. Other files, or another version of the browser, make others.

import { version } from "./pyodide/pyodide.mjs";

const NAME = `bitnet-start ${new URL("../", import.meta.url).href}`;
const KINDS = ["snapshot", "files"];
const BYTES = "x-bytes"; // headers with a file's size and digest
const SHA256 = "x-sha256";

/** By what it is found: what it was made of, and for which browser. */
export async function key() {
  const site = await (await fetch(new URL("../site.json", import.meta.url))).json();
  return `${version} ${site.packages} ${navigator.userAgent}`;
}

/** What is kept: promises of `snapshot` and `files`, which reject if it is damaged, and the snapshot's bytes as `size`; null if it is not there. */
export async function find(key) {
  if (!globalThis.caches || !(await caches.has(NAME))) return null;
  const cache = await caches.open(NAME);
  const responses = await Promise.all(KINDS.map((kind) => cache.match(address(kind, key))));
  if (!responses.every(Boolean)) return null;
  const [snapshot, files] = responses.map(checked);
  return { snapshot, files, size: Number(responses[0].headers.get(BYTES)) };
}

/** The bytes of what is kept. */
async function checked(response) {
  const bytes = await response.arrayBuffer();
  if ((await digest(bytes)) !== response.headers.get(SHA256)) throw new Error("What is kept is damaged."); // Python would wait for ever
  return bytes;
}

/** Keeps both, and nothing else. */
export async function keep(key, made) {
  await forget();
  const cache = await caches.open(NAME);
  for (const kind of KINDS) {
    const bytes = await made[kind];
    const headers = { [BYTES]: String(bytes.byteLength), [SHA256]: await digest(bytes) };
    await cache.put(address(kind, key), new Response(bytes, { headers }));
  }
}

/** Deletes what is kept. */
export const forget = () => caches.delete(NAME);

async function digest(bytes) {
  const found = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(found, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

const address = (kind, key) => new URL(`kept/${kind}?${encodeURIComponent(key)}`, import.meta.url).href;
