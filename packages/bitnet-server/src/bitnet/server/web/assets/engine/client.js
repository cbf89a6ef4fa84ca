// The engine as a page sees it: a worker that is asked by messages. `fetch` of an Engine is what a server would answer.

const WORKER = new URL("worker.js", import.meta.url).href;
const SERVICE_WORKER = new URL("../sw.js", import.meta.url).href;
// A Content-Security-Policy may ask for it; the policy makes these two addresses and no other.
const policy = globalThis.trustedTypes?.createPolicy("bitnet-engine", {
  createScriptURL(address) {
    if (address === WORKER || address === SERVICE_WORKER) return address;
    throw new TypeError(`${address} is no worker of bitnet.`);
  },
});
const trusted = (address) => policy?.createScriptURL(address) ?? address;

/** Keeps the site's files in this browser, so that it starts without a connection, too. */
export async function keepOffline() {
  if (!navigator.serviceWorker) return; // no HTTPS, or a private window
  await navigator.serviceWorker.register(trusted(SERVICE_WORKER));
  const { active } = await navigator.serviceWorker.ready;
  active.postMessage("keep");
}

/** What went wrong in the engine; `code` says what kind it is, or is undefined. */
export class EngineError extends Error {
  constructor(message, code) {
    super(message);
    this.name = "EngineError";
    this.code = code;
  }
}

export class Engine {
  constructor() {
    this.last = 0;
    this.waiting = new Map(); // by id: what takes a message
    this.onKernels = () => {};
    this.worker = new Worker(trusted(WORKER), { type: "module", name: "bitnet" });
    this.worker.addEventListener("message", ({ data }) => {
      if (data.id === 0) this.onKernels(data.done, data.total);
      else this.waiting.get(data.id)?.(data);
    });
    this.worker.addEventListener("error", (event) => {
      event.preventDefault();
      this.end(`The engine ended: ${event.message || "its files could not be loaded"}. Load the page again.`);
    });
  }

  /** Ends the worker; whoever waits for it gets an error. */
  end(message = "The engine was ended.") {
    this.worker.terminate();
    this.ended = message;
    for (const take of [...this.waiting.values()]) take({ type: "failed", message });
  }

  /** Sends a message and passes each answer on, until the last one. */
  send(message, signal, take) {
    const id = ++this.last;
    const abort = () => {
      this.waiting.delete(id);
      this.worker.postMessage({ id, type: "abort" });
      take({ type: "aborted" });
    };
    if (signal?.aborted || this.ended) {
      take(this.ended ? { type: "failed", message: this.ended } : { type: "aborted" });
      return () => {};
    }
    this.waiting.set(id, (data) => {
      if (data.type === "done" || data.type === "failed") {
        this.waiting.delete(id);
        signal?.removeEventListener("abort", abort);
      }
      take(data);
    });
    signal?.addEventListener("abort", abort, { once: true });
    this.worker.postMessage({ ...message, id });
    return abort;
  }

  /** Asks for work: `start`, `models`, `add`, `remove` or `load`; `progress({stage, done, total})` is called meanwhile. */
  call(type, values = {}, { signal, progress = () => {} } = {}) {
    return new Promise((resolve, reject) => {
      this.send({ ...values, type }, signal, (data) => {
        if (data.type === "progress") progress(data);
        else if (data.type === "done") resolve(data.value);
        else if (data.type === "aborted") reject(aborted(signal));
        else reject(new EngineError(data.message, data.code));
      });
    });
  }

  /** The answer to a request, as `fetch` gives it. `path` begins with a slash. */
  fetch(path, { method = "GET", headers = {}, body, signal } = {}) {
    const bytes = typeof body === "string" ? new TextEncoder().encode(body) : body;
    const message = { type: "request", path, method, headers: [...new Headers(headers)], body: bytes };
    return new Promise((resolve, reject) => {
      let stream;
      const leave = this.send(message, signal, (data) => {
        if (data.type === "head") {
          const source = new ReadableStream({ start: (controller) => (stream = controller), cancel: () => leave() });
          const empty = [101, 204, 205, 304].includes(data.status);
          resolve(new Response(empty ? null : source, { status: data.status, headers: data.headers }));
        } else if (data.type === "piece") stream.enqueue(data.data);
        else if (data.type === "done") stream.close();
        else {
          const error = data.type === "aborted" ? aborted(signal) : new TypeError(data.message);
          reject(error); // does nothing once there is an answer
          try {
            stream?.error(error);
          } catch {
            // Whoever read it has left.
          }
        }
      });
    });
  }
}

const aborted = (signal) => signal?.reason ?? new DOMException("The request was aborted.", "AbortError");
