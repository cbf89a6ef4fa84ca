// Tools of other servers, by the Model Context Protocol over streamable HTTP. The server that the page comes from says
// which servers may be called (`bitnet serve --mcp`); its Content-Security-Policy lets the page reach no others.

import { events, getJSON } from "./api.js";

const PROTOCOL = "2025-06-18";
const MAX_PAGES = 20; // of a list of tools
const MAX_RESULT = 20_000; // letters of a result that a model is given

/** A call that failed; its message is for the user, and for the model. */
export class ToolError extends Error {
  title = "The tools could not be used";
}

class Connection {
  constructor(url) {
    this.url = url;
    this.session = null;
    this.version = null;
    this.last = 0;
  }

  async send(message, signal) {
    const headers = { "Content-Type": "application/json", Accept: "application/json, text/event-stream" };
    if (this.session) headers["Mcp-Session-Id"] = this.session;
    if (this.version) headers["MCP-Protocol-Version"] = this.version;
    let response;
    try {
      response = await fetch(this.url, { method: "POST", headers, body: JSON.stringify({ jsonrpc: "2.0", ...message }), signal, credentials: "omit", cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ToolError(`${this.url} was not reached. It has to run, and to allow this page’s origin (CORS).`);
    }
    if (!response.ok) throw new ToolError(`${this.url} answered with HTTP status ${response.status}.`);
    this.session = response.headers.get("Mcp-Session-Id") ?? this.session;
    return response;
  }

  /** The result of a request; its answer is JSON, or an event among others. */
  async request(method, params, signal) {
    const id = ++this.last;
    const response = await this.send({ id, method, params }, signal);
    const kind = response.headers.get("Content-Type") ?? "";
    let answer;
    try {
      if (kind.startsWith("text/event-stream")) {
        for await (const data of events(response.body)) {
          const message = JSON.parse(data);
          if (message.id === id) {
            answer = message;
            break;
          }
        }
      } else answer = await response.json();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ToolError(`${this.url} gave an answer that is not of the protocol.`);
    }
    if (answer?.error) throw new ToolError(String(answer.error.message ?? "The server refused the request."));
    if (answer?.id !== id || typeof answer.result !== "object" || answer.result === null) throw new ToolError(`${this.url} gave no answer.`);
    return answer.result;
  }

  async tools(signal) {
    const hello = { protocolVersion: PROTOCOL, capabilities: {}, clientInfo: { name: "bitnet", version: "1" } };
    this.version = (await this.request("initialize", hello, signal)).protocolVersion;
    await this.send({ method: "notifications/initialized" }, signal);
    const found = [];
    let cursor;
    for (let page = 0; page < MAX_PAGES; page += 1) {
      const { tools, nextCursor } = await this.request("tools/list", cursor ? { cursor } : {}, signal);
      for (const tool of Array.isArray(tools) ? tools : []) if (typeof tool?.name === "string") found.push(tool);
      cursor = nextCursor;
      if (!cursor) break;
    }
    return found;
  }

  async call(name, given, signal) {
    const { content, isError } = await this.request("tools/call", { name, arguments: given }, signal);
    const text = (Array.isArray(content) ? content : []).map((part) => (part.type === "text" ? part.text : `[${part.type}]`)).join("\n");
    if (isError) throw new ToolError(text || "The tool failed.");
    return text.slice(0, MAX_RESULT);
  }
}

let offered = null;

/** The addresses of the servers that may be called. */
export const servers = async () => (offered ??= (await getJSON("assets/mcp.json")).servers);

/** The tools of some servers: `{tools, call}`, where `tools` are those of a chat's request. */
export async function toolbox(urls, signal) {
  const allowed = await servers();
  const owners = new Map();
  const tools = [];
  for (const url of urls.filter((one) => allowed.includes(one))) {
    const connection = new Connection(url);
    for (const { name, description, inputSchema } of await connection.tools(signal)) {
      if (owners.has(name)) continue; // the first server that has the name
      owners.set(name, connection);
      tools.push({ type: "function", function: { name, description: description ?? "", parameters: inputSchema ?? { type: "object" } } });
    }
  }
  const call = async (name, given, within) => {
    if (!owners.has(name)) throw new ToolError(`There is no tool named ${name}.`);
    let parsed;
    try {
      parsed = JSON.parse(given || "{}");
    } catch {
      throw new ToolError("The arguments are not JSON.");
    }
    return owners.get(name).call(name, parsed, within);
  };
  return { tools, call, server: (name) => owners.get(name)?.url };
}
