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

/** Whether conversations outlast the page. */
export const lasting = async () => (await open()) !== null;

/** All conversations, the latest first. */
export async function all() {
  const found = (await read((store) => store.getAll())) ?? [...memory.values()].map((one) => structuredClone(one));
  return found.sort((a, b) => b.updated - a.updated);
}

export async function load(id) {
  return (await read((store) => store.get(id))) ?? structuredClone(memory.get(id)) ?? null;
}

export async function save(conversation) {
  if (!(await write((store) => store.put(conversation)))) memory.set(conversation.id, structuredClone(conversation));
}

export async function remove(id) {
  if (!(await write((store) => store.delete(id)))) memory.delete(id);
}

export async function clear() {
  if (!(await write((store) => store.clear()))) memory.clear();
}

/** A conversation that is not saved yet. */
export function fresh(system) {
  const id = [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "New conversation", named: false, updated: Date.now(), system, messages: [] };
}
