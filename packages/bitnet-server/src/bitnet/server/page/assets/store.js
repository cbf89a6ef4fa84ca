// Conversations, kept in this browser (IndexedDB) and nowhere else. Where the browser lends no storage, as some do in
// private windows, they last as long as the page.

const NAME = "bitnet";
const STORE = "conversations";
const memory = new Map();
const channel = new BroadcastChannel(NAME); // tells the other tabs of a change

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
      const database = await promised(request);
      database.onclose = () => (opened = undefined); // the browser closed it: site data were deleted
      return database;
    } catch {
      return null;
    }
  })();
  return opened;
}

/** What ``ask`` reads of the store; null where there is none. */
async function read(ask) {
  const database = await open();
  return database && promised(ask(database.transaction(STORE).objectStore(STORE)));
}

/** Whether ``change`` was made to the store; false where there is none. */
async function write(change) {
  const database = await open();
  if (!database) return false;
  const transaction = database.transaction(STORE, "readwrite");
  const kept = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
  change(transaction.objectStore(STORE));
  transaction.commit(); // at once: a browser drops an open transaction of a page that is left
  await kept;
  return true;
}

/** All conversations, the latest first. */
export async function all() {
  const found = (await read((store) => store.getAll())) ?? [...memory.values()].map((one) => structuredClone(one));
  return found.sort((a, b) => b.updated - a.updated);
}

let index = null; // {id, title, updated} by id: reading all messages for each list would be slow

/** `{id, title, updated}` of each conversation, the latest first. */
export async function list() {
  index ??= new Map((await all()).map(({ id, title, updated }) => [id, { id, title, updated }]));
  return [...index.values()].sort((a, b) => b.updated - a.updated);
}

/** Calls `listener` when another tab has changed a conversation. */
export const onOtherTab = (listener) =>
  channel.addEventListener("message", () => {
    index = null;
    listener();
  });

export async function load(id) {
  return (await read((store) => store.get(id))) ?? structuredClone(memory.get(id)) ?? null;
}

export const save = (conversation) => saveAll([conversation]);

/** Saves all of some conversations, or none. */
export async function saveAll(conversations) {
  if (!(await write((store) => conversations.forEach((one) => store.put(one))))) {
    for (const one of conversations) memory.set(one.id, structuredClone(one));
  }
  const moved = conversations.filter(({ id, title, updated }) => index?.get(id)?.title !== title || index.get(id).updated !== updated);
  for (const { id, title, updated } of moved) index?.set(id, { id, title, updated });
  if (moved.length) channel.postMessage("saved");
}

export async function remove(id) {
  if (!(await write((store) => store.delete(id)))) memory.delete(id);
  index?.delete(id);
  channel.postMessage("removed");
}

export async function clear() {
  if (!(await write((store) => store.clear()))) memory.clear();
  index?.clear();
  channel.postMessage("cleared");
}

export const newId = () => [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

/** A conversation that is not saved yet. */
export const fresh = (system) => ({ id: newId(), title: "New conversation", named: false, updated: Date.now(), system, messages: [] });

/** Whether a conversation is one that the store has or will have: it has a message or a name. */
export const begun = ({ named, messages }) => named || messages.length > 0;
