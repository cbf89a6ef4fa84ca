// Keeps the site's files in this browser. VERSION and FILES come before this; other files make another version, which
// takes over when the last page of the one before has been closed.

const ROOT = new URL("./", self.location).href;
const OWN = `bitnet-site ${ROOT} `; // other sites may have the same origin
const CACHE = OWN + VERSION;
const KEPT = new Set(FILES.map((file) => new URL(file, ROOT).href));

/** The address by which a request's file is kept. */
const kept = ({ url }) => {
  const plain = url.split(/[?#]/)[0];
  return plain === `${ROOT}index.html` ? ROOT : plain;
};

self.addEventListener("install", (event) => {
  event.waitUntil(caches.open(CACHE).then((cache) => cache.add(ROOT)));
});

self.addEventListener("activate", (event) => {
  event.waitUntil((async () => {
    for (const name of await caches.keys()) {
      if (name.startsWith(OWN) && name !== CACHE) await caches.delete(name);
    }
    await self.clients.claim();
  })());
});

// The page has been started: what it has not asked for yet is fetched, too.
self.addEventListener("message", (event) => {
  if (event.data !== "keep") return;
  event.waitUntil((async () => {
    const cache = await caches.open(CACHE);
    for (const address of KEPT) {
      if (!(await cache.match(address))) await cache.add(address).catch(() => {}); // the next start tries again
    }
  })());
});

self.addEventListener("fetch", (event) => {
  const address = kept(event.request);
  if (event.request.method !== "GET" || !KEPT.has(address)) return;
  event.respondWith((async () => {
    const cache = await caches.open(CACHE);
    const found = await cache.match(address);
    if (found) return found;
    const response = await fetch(event.request);
    if (response.ok && response.status === 200) await cache.put(address, response.clone()).catch(() => {});
    return response;
  })());
});
