// What the engine keeps for its next start: Python's memory once it runs ("snapshot"), and modules compiled ("bytecode").
// Both are made here, from the site's files. Other files, or another version of the browser, make others.

const NAME = `bitnet-start ${new URL("../", import.meta.url).href}`;
const KINDS = ["snapshot", "bytecode"];
const SHA256 = "x-sha256"; // header with a file's digest

/** Whether an earlier start kept something. */
export const any = async () => Boolean(globalThis.caches) && caches.has(NAME);

/** What is kept for this version and this archive of packages, as `{snapshot, bytecode}`; null, too, if it is damaged. */
export async function find(version, archive) {
  const cache = await caches.open(NAME);
  const key = await keyOf(version, archive);
  const found = {};
  for (const kind of KINDS) {
    const response = await cache.match(address(kind, key));
    if (!response) return null;
    found[kind] = await response.arrayBuffer();
    if ((await digest(found[kind])) !== response.headers.get(SHA256)) {
      await forget(); // Python would not end with an error, but wait for ever
      return null;
    }
  }
  return found;
}

/** Keeps both, and nothing else. */
export async function keep(version, archive, made) {
  const key = await keyOf(version, archive);
  await forget();
  const cache = await caches.open(NAME);
  for (const kind of KINDS) {
    await cache.put(address(kind, key), new Response(made[kind], { headers: { [SHA256]: await digest(made[kind]) } }));
  }
}

/** Deletes what is kept. */
export const forget = () => caches.delete(NAME);

async function digest(bytes) {
  const found = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(found, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

const keyOf = async (version, archive) => digest(await new Blob([`${version} ${navigator.userAgent} `, archive]).arrayBuffer());
const address = (kind, key) => new URL(`kept/${kind}?${key}`, import.meta.url).href;
