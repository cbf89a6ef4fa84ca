// What the page asks of the server: JSON, Prometheus text, and streamed answers. Only the server that the page came
// from is ever asked.

const BASE = new URL("../", import.meta.url); // right behind a --root-path, too
const KEY = "bitnet.key";

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";

export function setApiKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** A request that failed: `status` 0 means that the server was not reached; `wait` is in seconds, or null; `code` is the server's word for it. */
export class ApiError extends Error {
  constructor(status, detail, wait = null, code = "") {
    super(detail);
    this.status = status;
    this.wait = wait;
    this.code = code;
  }

  /** What happened, in words for whoever sits in front of the page. */
  get title() {
    if (this.tooLong) return "This is too long for the model";
    if (this.status === 0) return "The connection to the server was lost";
    if (this.status === 401 || this.status === 403) return "The server asks for an API key";
    if (this.status === 429) return "The server is busy";
    if (this.status === 503) return "The server is not ready";
    if (this.status >= 500) return "The server had a problem";
    return "The server refused the request";
  }

  get tooLong() {
    return this.code === "context_length_exceeded";
  }

  get needsKey() {
    return this.status === 401 || this.status === 403;
  }
}

function retryAfter(response) {
  const value = response.headers.get("Retry-After");
  if (value === null) return null;
  const seconds = /^\d+$/.test(value) ? Number(value) : (Date.parse(value) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.max(0, Math.ceil(seconds)) : null;
}

async function failure(response) {
  let detail = response.statusText || `HTTP status ${response.status}`;
  let code;
  try {
    const body = await response.json();
    code = body.error?.code;
    detail = body.error?.message ?? body.error ?? body.detail ?? body.message ?? detail; // Ollama's errors are texts
  } catch {
    // The status has to do: the body is not JSON.
  }
  return new ApiError(response.status, String(detail), retryAfter(response), code);
}

async function request(path, { body, signal, key = apiKey() } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, BASE), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "Check that the server runs and that this device can reach it.");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

export const getJSON = async (path, options) => (await request(path, options)).json();
export const postJSON = async (path, body, signal) => (await request(path, { body, signal })).json();
export const getText = async (path, options) => (await request(path, options)).text();

/** The lines of a text that arrives in pieces; one without its end is dropped. */
async function* split(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const found = (rest + value).split("\n");
      rest = found.pop();
      for (const line of found) yield line.endsWith("\r") ? line.slice(0, -1) : line;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The data of each server-sent event, as text; comments (pings) are passed over. */
export async function* events(stream) {
  let data = [];
  for await (const line of split(stream)) {
    if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
    else if (line === "" && data.length) {
      yield data.join("\n");
      data = [];
    }
  }
}

/** The objects of an answer that has one on each line. Ends with a line whose status is success, or with an ApiError. */
export async function* lines(path, body, signal) {
  const response = await request(path, { body, signal });
  try {
    for await (const line of split(response.body)) {
      const value = JSON.parse(line);
      if (value.error) throw new ApiError(500, value.error);
      yield value;
      if (value.status === "success") return;
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
  }
  throw new ApiError(0, "The answer broke off before its end.");
}

/** The chunks of one streamed completion. Ends with [DONE], or with an ApiError; never silently in between. */
export async function* stream(path, body, signal) {
  const response = await request(path, {
    body: { ...body, stream: true, stream_options: { include_usage: true } },
    signal,
  });
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(Number(chunk.error.code) || 500, chunk.error.message ?? "The answer broke off.");
      yield { chunk, headers: response.headers };
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError(0, "The answer broke off before its end.");
  }
  throw new ApiError(0, "The answer broke off before its end.");
}

/** The models that the server offers: `{id, …}`, in its order. */
export const models = async (options) => (await getJSON("v1/models", options)).data;
