// Conversations as files: JSON that has all of them, and Markdown for people. Both can be read again.

import { withFiles } from "./attachments.js";
import { NONE } from "./sampling.js";
import { newId } from "./store.js";

const FORMAT = "bitnet-conversations";
const VERSION = 1;
const DEEPEST = 100; // versions within versions
const MARK = /^(\\*)<!-- bitnet: (user|assistant|system) -->$/;

/** A file that cannot be read; its message says what was wrong and where. */
export class FormatError extends Error {}

export const toJSON = (conversations) => `${JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1)}\n`;

/** The path that is shown; a comment before each message says whose it is, so that it can be read again. */
export function toMarkdown({ title, system, messages }) {
  const part = (role, heading, text) =>
    `<!-- bitnet: ${role} -->\n\n## ${heading}\n\n${text.split("\n").map((line) => (MARK.test(line) ? `\\${line}` : line)).join("\n")}\n`;
  return [
    `# ${title.replace(/\s+/g, " ")}\n`,
    ...(system.trim() ? [part("system", "System prompt", system)] : []),
    ...messages.map((message) => part(message.role, message.role === "user" ? "You" : (message.stats?.model ?? "Answer"), withFiles(message))),
  ].join("\n");
}

/** A file's name for a conversation. */
export const fileName = (title, end) => `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "conversation"}.${end}`;

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function check(right, where, what) {
  if (!right) throw new FormatError(`${where} ${what}.`);
}

const TEXTS = new Set(["model", "device", "finish"]);
const NUMBERS = new Set(["first", "thinking", "seconds", "tokens", "speed", "cached", "prompt", "context"]);

/** An answer's facts (`answer.js`), without what is none. */
function facts(stats, where) {
  check(isObject(stats), where, "is not an object");
  const read = Object.entries(stats).filter(([name, value]) => (TEXTS.has(name) && typeof value === "string") || (NUMBERS.has(name) && Number.isFinite(value)));
  return { ...Object.fromEntries(read), ...(isObject(stats.receipt) && { receipt: stats.receipt }) };
}

function readFiles(files, where) {
  check(Array.isArray(files) && files.every((file) => isObject(file) && typeof file.name === "string" && typeof file.text === "string"), where, "has files without name or text");
  return files.map(({ name, text, tokens }) => ({ name, text, ...(Number.isFinite(tokens) && { tokens }) }));
}

function readRounds(rounds, where) {
  const sound = (call) => isObject(call) && [call.id, call.name, call.arguments].every((value) => typeof value === "string");
  const right = Array.isArray(rounds) && rounds.every((round) => isObject(round) && typeof round.content === "string" && Array.isArray(round.calls) && round.calls.every(sound));
  check(right, where, "has calls of tools without id, name or arguments");
  const text = (value) => (typeof value === "string" ? value : "");
  return rounds.map(({ content, thought, calls }) => ({
    content, thought: text(thought),
    calls: calls.map(({ id, name, arguments: given, result, state }) => ({ id, name, arguments: given, result: text(result), state: text(state) })),
  }));
}

function readVersions(versions, where, depth) {
  check(isObject(versions) && Array.isArray(versions.tails) && versions.tails.length > 1, where, "has no list of versions");
  check(depth < DEEPEST, where, `has versions within versions, more than ${DEEPEST} deep`);
  const { at, tails } = versions;
  check(Number.isInteger(at) && at >= 0 && at < tails.length && tails[at] === null, where, "does not say which version is shown");
  return { at, tails: tails.map((tail, nth) => (nth === at ? null : readMessages(tail, `${where}, version ${nth + 1}`, depth + 1))) };
}

function readMessages(messages, where, depth = 0) {
  check(Array.isArray(messages), where, "has no list of messages");
  check(messages.length || depth === 0, where, "is empty");
  return messages.map((message, nth) => {
    const place = `${where}, message ${nth + 1}`;
    check(isObject(message), place, "is not an object");
    const { role, content, thought, files, rounds, stats, cut, versions } = message;
    check(role === "user" || role === "assistant", place, "is neither of the user nor of the assistant");
    check(typeof content === "string", place, "has no text");
    const read = { role, content };
    if (typeof thought === "string" && thought) read.thought = thought;
    if (role === "assistant") Object.assign(read, { stats: facts(stats ?? {}, place), cut: cut === true });
    if (files !== undefined) read.files = readFiles(files, place);
    if (rounds !== undefined) read.rounds = readRounds(rounds, place);
    if (versions !== undefined) read.versions = readVersions(versions, place, depth);
    return read;
  });
}

function readConversation(one, nth) {
  const where = `Conversation ${nth + 1}`;
  check(isObject(one), where, "is not an object");
  check(typeof one.title === "string" && one.title.trim(), where, "has no title");
  return {
    id: newId(), // a conversation that is here already is not overwritten
    title: one.title.trim().slice(0, 120),
    named: true,
    updated: Number.isFinite(one.updated) && one.updated > 0 && one.updated < 8.64e15 ? one.updated : Date.now(),
    system: typeof one.system === "string" ? one.system : "",
    ...(typeof one.model === "string" && { model: one.model }),
    ...(isObject(one.sampling) && { sampling: Object.fromEntries(Object.entries(one.sampling).filter(([name, value]) => name in NONE && typeof value === "string")) }),
    messages: readMessages(one.messages, where),
  };
}

function fromJSON(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new FormatError(`The file is not JSON: ${error.message}.`);
  }
  check(isObject(found) && found.format === FORMAT && Array.isArray(found.conversations), "The file", "does not hold conversations of this page");
  check(found.version === VERSION, "The file", `has version ${String(found.version).slice(0, 20)} of the format; this page reads version ${VERSION}`);
  return found.conversations.map(readConversation);
}

function fromMarkdown(text) {
  const parts = [];
  let title = "";
  for (const line of text.replace(/\r\n?/g, "\n").split("\n")) {
    const mark = MARK.exec(line);
    if (mark && !mark[1]) parts.push({ role: mark[2], lines: [] });
    else if (parts.length) parts.at(-1).lines.push(mark ? line.slice(1) : line);
    else if (line.startsWith("# ")) title ||= line.slice(2);
  }
  check(parts.length, "The file", "has no messages: each begins with a line like <!-- bitnet: user -->");
  const read = parts.map(({ role, lines }) => ({ role, model: lines[1]?.slice(3), content: lines.slice(3).join("\n").replace(/\n$/, "") }));
  const messages = read
    .filter(({ role }) => role !== "system")
    .map(({ role, model, content }) => (role === "user" ? { role, content } : { role, content, stats: { model: model === "Answer" ? "" : model } }));
  const system = read.find(({ role }) => role === "system")?.content ?? "";
  return [readConversation({ title: title.trim() || "Conversation", system, messages }, 0)];
}

/** The conversations of a file's text, with ids of their own. Throws FormatError. */
export const parse = (name, text) => (/\.(md|markdown)$/i.test(name) ? fromMarkdown(text) : fromJSON(text));
