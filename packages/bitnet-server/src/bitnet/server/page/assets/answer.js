// One answer: asked for, streamed and timed.

import { stream } from "./api.js";
import { sampling } from "./sampling.js";

/**
 * Streams an answer. `onText(text, stats, thought)` is called with all text so far, that of the model's thought before
 * it, and `stats` filled in as it becomes known: `first` (seconds to the first token, measured in this browser),
 * `thinking` (seconds of the thought), `seconds` (the whole answer), `tokens`, `speed` (tokens a second after the first:
 * as the server measured it, else as they came here), `cached` (prompt tokens that were reused), `device`, `finish` and
 * `receipt`.
 * Resolves to `{text, thought, stats, calls}`, where `calls` of `tools` are `{id, name, arguments}`; an abort ends it with `finish: "stopped"`; other errors carry the `partial` result.
 * With `begun`, the beginning of an answer, it is continued: `prompt` has the token ids of the conversation and of it.
 */
export async function generate({ model, messages, prompt, context, begun = "", settings, tools, signal, onText }) {
  const body = { model, ...sampling(settings) };
  if (begun) Object.assign(body, { prompt, max_tokens: body.max_tokens ?? Math.max(1, context - prompt.length) });
  else Object.assign(body, { messages, ...(tools?.length && { tools }) });
  if (settings.receipts) body.x_bitnet_receipt = true;
  const begin = performance.now();
  const stats = { model, device: "", finish: "", context, prompt: prompt?.length };
  let text = begun;
  let thought = "";
  let first = null;
  let last = begin;
  let pieces = 0;
  const calls = [];
  const finish = () => {
    stats.seconds = (performance.now() - begin) / 1000;
    stats.tokens ??= pieces;
    if (first !== null) {
      stats.first = (first - begin) / 1000;
      if (!stats.speed && stats.tokens > 1 && last > first) stats.speed = ((stats.tokens - 1) * 1000) / (last - first);
    }
    return { text, thought, stats, calls };
  };
  try {
    for await (const { chunk, headers } of stream(begun ? "v1/completions" : "v1/chat/completions", body, signal)) {
      stats.device = headers.get("x-bitnet-device") ?? "";
      stats.model = chunk.model ?? stats.model;
      if (chunk.x_bitnet_receipt) stats.receipt = chunk.x_bitnet_receipt;
      if (chunk.timings?.predicted_per_second) stats.speed = chunk.timings.predicted_per_second;
      if (chunk.usage) {
        stats.tokens = chunk.usage.completion_tokens;
        stats.prompt = chunk.usage.prompt_tokens;
        stats.cached = chunk.usage.prompt_tokens_details?.cached_tokens;
      }
      const choice = chunk.choices?.[0];
      for (const { index, id, function: part } of choice?.delta?.tool_calls ?? []) {
        calls[index] ??= { id: id ?? `call-${index}`, name: "", arguments: "" };
        calls[index].name += part?.name ?? "";
        calls[index].arguments += part?.arguments ?? "";
      }
      const piece = choice?.delta?.content ?? choice?.text;
      const reasoning = choice?.delta?.reasoning_content;
      if (piece || reasoning) {
        last = performance.now();
        first ??= last;
        pieces += 1;
        if (piece && thought) stats.thinking ??= (last - first) / 1000;
        thought += reasoning ?? "";
        text += piece ?? "";
        onText(text, stats, thought);
      }
      if (choice?.finish_reason) stats.finish = choice.finish_reason;
    }
  } catch (error) {
    if (error.name === "AbortError") {
      stats.finish = "stopped";
      return finish();
    }
    error.partial = finish();
    throw error;
  }
  return finish();
}

export const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`);

/** The facts of an answer, as `[what, value]`, most asked for first. */
export function facts(stats) {
  const rows = [];
  if (stats.speed) rows.push(["Speed", `${stats.speed.toFixed(stats.speed < 100 ? 1 : 0)} tokens/s`]);
  if (stats.first !== undefined) rows.push(["First token", `first after ${seconds(stats.first)}`]);
  if (stats.tokens) rows.push(["Length", `${stats.tokens} ${stats.tokens === 1 ? "token" : "tokens"}`]);
  if (stats.device) rows.push(["Device", stats.device]);
  if (stats.cached) rows.push(["From the cache", `${stats.cached} of ${stats.prompt} prompt tokens cached`]);
  if (stats.finish === "stopped") rows.push(["End", "stopped by you"]);
  if (stats.finish === "length") rows.push(["End", "length limit"]);
  if (stats.finish === "edited") rows.push(["End", "edited by you"]);
  return rows;
}
