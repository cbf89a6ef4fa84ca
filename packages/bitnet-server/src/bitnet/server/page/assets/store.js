// Conversations, kept in this browser (IndexedDB) and nowhere else. Where the browser lends no storage, as some do in
// private windows, they last as long as the page.

const NAME = "bitnet";
const STORE = "conversations";
const memory = new Map();

const promised = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

let opened;

function open() {
  opened ??= (async () => {
    try {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
      return await promised(request);
    } catch {
      return null;
    }
  })();
  return opened;
}

async function objects(mode) {
  const database = await open();
  return database && database.transaction(STORE, mode).objectStore(STORE);
}

/** Whether conversations outlast the page. */
export const lasting = async () => (await open()) !== null;

/** All conversations, the latest first. */
export async function all() {
  const store = await objects("readonly");
  const found = store ? await promised(store.getAll()) : [...memory.values()].map((one) => structuredClone(one));
  return found.sort((a, b) => b.updated - a.updated);
}

export async function load(id) {
  const store = await objects("readonly");
  return (store ? await promised(store.get(id)) : structuredClone(memory.get(id))) ?? null;
}

export async function save(conversation) {
  const store = await objects("readwrite");
  if (store) await promised(store.put(conversation));
  else memory.set(conversation.id, structuredClone(conversation));
}

export async function remove(id) {
  const store = await objects("readwrite");
  if (store) await promised(store.delete(id));
  else memory.delete(id);
}

export async function clear() {
  const store = await objects("readwrite");
  if (store) await promised(store.clear());
  else memory.clear();
}

/** A conversation that is not saved yet. */
export function fresh(system) {
  const id = [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "New conversation", named: false, updated: Date.now(), system, messages: [] };
}
