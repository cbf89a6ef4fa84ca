// An answer with calls of tools: the model asks for calls, the user allows or refuses each, and the model goes on with
// what they gave. A round is `{content, thought, calls}`, a call `{id, name, arguments, result, state}`.

import { generate } from "./answer.js";
import { button, h, icon, scrollable } from "./dom.js";
import { ToolError } from "./mcp.js";

const MAX_ROUNDS = 8;
const STATES = { asked: "May it be called?", called: "Called", refused: "Refused by you", failed: "Failed", running: "Running …" };

/** The messages of rounds, as the model is told them. */
export const messagesOf = (rounds = []) => rounds.flatMap(({ content, thought, calls }) => [
  {
    role: "assistant", content, ...(thought && { reasoning_content: thought }),
    tool_calls: calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given || "{}" } })),
  },
  ...calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result ?? "" })),
]);

const pretty = (text) => {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
};

/** A call, with what it gave; `decide(allowed)` is given while it waits for the user. */
export function callBlock(call, { decide, server } = {}) {
  const waits = call.state === "asked" && decide;
  const box = (label, text) => h("pre", scrollable(`${label} of ${call.name}`), text);
  return h("details", { class: "call", open: Boolean(waits) }, h("summary", {}, icon("tool"), h("code", {}, call.name), h("span", { class: "hint" }, STATES[call.state] ?? "")),
    server && h("p", { class: "hint" }, `A tool of ${server}, which gets these arguments:`),
    box("Arguments", pretty(call.arguments)),
    call.result !== undefined && box("Result", call.result),
    waits && h("div", { class: "actions" }, h("button", { type: "button", onclick: () => decide(false) }, "Refuse"), button("check", "Allow this call", () => decide(true), { text: true, class: "primary" })));
}

/** Resolves to whether the user allows the call that `place` shows. */
const permission = (call, place, server, signal) =>
  new Promise((resolve, reject) => {
    signal.addEventListener("abort", () => reject(signal.reason));
    const element = callBlock(call, { server, decide: resolve });
    place.replaceChildren(element);
    place.scrollIntoView({ block: "nearest" });
  });

async function run(call, place, toolbox, signal) {
  const show = (state) => {
    call.state = state;
    place.replaceChildren(callBlock(call));
  };
  try {
    call.state = "asked";
    if (!(await permission(call, place, toolbox.server(call.name), signal))) {
      call.result = "The user did not allow this call.";
      return show("refused");
    }
    show("running");
    call.result = await toolbox.call(call.name, call.arguments, signal);
    show("called");
  } catch (error) {
    if (!(error instanceof ToolError)) throw error;
    call.result = error.message;
    show("failed");
  }
}

/**
 * As `generate` (answer.js), with the tools of a `toolbox` (mcp.js). `onRound(round)` returns the elements that show
 * the calls of a round, one for each; `onText` gets the rounds, too. The result has the `rounds`, too; those that were not ended are left out.
 */
export async function generateWithTools({ toolbox, onRound, ...wanted }) {
  const rounds = [];
  for (;;) {
    const last = rounds.length === MAX_ROUNDS;
    const messages = [...wanted.messages, ...messagesOf(rounds)];
    let outcome;
    try {
      const onText = (text, stats, thought) => wanted.onText(text, stats, thought, rounds);
      outcome = await generate({ ...wanted, onText, messages, tools: last ? undefined : toolbox?.tools });
    } catch (error) {
      if (error.partial) error.partial.rounds = rounds;
      throw error;
    }
    if (!outcome.calls.length) return { ...outcome, rounds };
    const round = { content: outcome.text, thought: outcome.thought, calls: outcome.calls };
    const places = onRound(round);
    try {
      for (const [nth, call] of round.calls.entries()) await run(call, places[nth], toolbox, wanted.signal);
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      return { ...outcome, stats: { ...outcome.stats, finish: "stopped" }, rounds };
    }
    rounds.push(round);
  }
}
