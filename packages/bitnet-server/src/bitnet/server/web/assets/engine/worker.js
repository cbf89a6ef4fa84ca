// The engine: Python with bitnet and its server, in a worker. Messages are `{id, type, …}`; answers carry the same id.

import * as kept from "./kept.js";
import { librariesOf, restore, start } from "./snapshot.js";
import * as store from "./store.js";

const HERE = new URL("./", import.meta.url);
const MODELS = "/models";
const AHEAD = 8 << 20; // bytes
const reader = new FileReaderSync();

let python = null;
let engine = null;
let key = null; // by which what is kept is found
let found = null; // what an earlier start kept
let keeps = false; // whether the next start's work is done ahead, once an answer has been given
const controllers = new Map(); // of requests that can be aborted, by id

/** The server's module, in a Python that an earlier start kept, or from the site's files. */
async function prepare(id) {
  python = await (found ? restore(found) : start((stage) => tell(id, stage)));
  python.FS.mkdir(MODELS);
  await mount();
  return python.pyimport("bitnet.server.web.engine");
}

/** Has a worker make what the next start uses, once. */
function keepForNext() {
  if (!keeps) return;
  keeps = false;
  const modules = python.pyimport("bitnet.server.web.next_start").loaded().toJs();
  const maker = new Worker(new URL("keep.js", HERE), { type: "module" });
  maker.addEventListener("error", (event) => event.preventDefault()); // then the next start is as slow as this one
  maker.postMessage({ key, modules, libraries: librariesOf(python) });
}

/** Says how far something is: `{stage, done, total}`; the last two may be missing. */
const tell = (id, stage, done, total) => postMessage({ id, type: "progress", stage, done, total });

/** Shows Python the files that are stored; they are read from there, in pieces, not copied. */
async function mount() {
  const { FS } = python;
  FS.filesystems.WORKERFS.stream_ops.read = readAhead;
  if (FS.analyzePath(MODELS).object?.mount.mountpoint === MODELS) FS.unmount(MODELS);
  const blobs = (await store.list()).map(({ name, file }) => ({ name: `${name}.gguf`, data: file }));
  FS.mount(FS.filesystems.WORKERFS, { blobs }, MODELS);
}

/** Reads as Emscripten's WORKERFS does, but asks the browser for as much as it takes no longer to get. */
function readAhead({ node }, buffer, offset, length, position) {
  const { contents: file } = node;
  if (!(node.begin <= position && position + length <= node.begin + node.ahead.length)) {
    node.begin = position;
    node.ahead = new Uint8Array(reader.readAsArrayBuffer(file.slice(position, position + Math.max(length, AHEAD))));
  }
  const piece = node.ahead.subarray(position - node.begin, position - node.begin + length);
  buffer.set(piece, offset);
  return piece.length;
}

/** The SHA-256 of a file. */
async function digest(file) {
  const made = python.pyimport("bitnet.server.web.engine").Digest();
  try {
    for await (const piece of file.stream()) made.update(piece);
    return made.hexdigest();
  } finally {
    made.destroy();
  }
}

/** Stores a model, from a file, an address or a name on the hub (`text`); resolves to its name here. */
async function add({ file, text, ...given }, id, signal) {
  const progress = (done, total) => tell(id, "model", done, total);
  const found = { ...(file ? { name: store.nameOf(file.name ?? "model") } : text ? await store.locate(text, signal) : {}), ...given };
  if (file) await store.addFile(found.name, file, digest, progress);
  else await store.addAddress(found.name, found, digest, signal, progress);
  await mount();
  return found.name;
}

const work = {
  /** Loads Python and the server. */
  async start({ device, context }, id) {
    tell(id, "python");
    key = await kept.key().catch(() => null);
    found = key && (await kept.find(key).catch(() => null));
    const module = await prepare(id).catch(async (error) => {
      if (!found) throw error;
      found = null; // what was kept is of no use
      await kept.forget();
      return prepare(id);
    });
    found &&= {}; // what it held is Python's now
    engine = module.Engine(MODELS, device ?? null, context ?? null, (done, total) => tell(0, "kernels", done, total));
  },

  /** Asks that the next start is made faster, after an answer. */
  async keep() {
    keeps = !found && Boolean(key && globalThis.caches);
  },

  /** Names and bytes of the stored models. */
  async models() {
    return (await store.list()).map(({ name, file }) => ({ name, bytes: file.size }));
  },

  add,

  async remove({ name }) {
    await store.remove(name);
    if (python) await mount();
  },

  /** Loads a model; resolves to the name of its device. */
  load: ({ name }) => engine.load(name),

  /** Answers a request of the page. */
  async request({ method, path, headers, body }, id, signal) {
    if (method === "POST" && path === "/api/pull") return pull(JSON.parse(new TextDecoder().decode(body)), id, signal);
    signal.addEventListener("abort", () => engine.leave(id));
    const head = (status, list) => postMessage({ id, type: "head", status, headers: JSON.parse(list) });
    const piece = (bytes) => {
      const data = bytes.toJs();
      postMessage({ id, type: "piece", data }, [data.buffer]);
    };
    await engine.answer(id, method, path, JSON.stringify(headers), body ?? null, head, piece);
    if (method === "POST") keepForNext();
  },
};

/** Downloads a model as Ollama's servers do: an object on each line, the last with the status success or an error. */
async function pull({ model }, id, signal) {
  postMessage({ id, type: "head", status: 200, headers: [["content-type", "application/x-ndjson"]] });
  const line = (value) => postMessage({ id, type: "piece", data: new TextEncoder().encode(`${JSON.stringify(value)}\n`) });
  try {
    const found = await store.locate(model, signal);
    const progress = (completed, total) => line({ status: found.name, completed, total: total ?? undefined });
    await store.addAddress(found.name, found, digest, signal, progress);
    await mount();
    line({ status: "success" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    line({ error: error.message });
  }
}

/** What is left of an error of Python's: its last line, without the class. */
function words(error) {
  if (error.constructor?.name !== "PythonError") return error.message;
  const last = error.message.trim().split("\n").pop();
  if (last.startsWith("MemoryError")) return "This does not fit the memory that the browser gives to a tab. Close other tabs, or choose a smaller model.";
  return last.replace(/^[\w.]+: /, "");
}

addEventListener("message", async ({ data: { id, type, ...given } }) => {
  if (type === "abort") {
    controllers.get(id)?.abort();
    return;
  }
  const controller = new AbortController();
  controllers.set(id, controller);
  try {
    const value = await work[type](given, id, controller.signal);
    postMessage({ id, type: "done", value });
  } catch (error) {
    postMessage({ id, type: "failed", message: words(error), name: error.name, code: error.code });
  } finally {
    controllers.delete(id);
  }
});
