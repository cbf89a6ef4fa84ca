// How much of a conversation a model sees. Where all of it does not fit, the oldest exchanges are left out.

import { postJSON } from "./api.js";
import { withFiles } from "./attachments.js";
import { messagesOf } from "./rounds.js";

export const SHARE = 3 / 4; // of the context: the rest is room for the answer

/** What the model is told: the system prompt, and the messages from index `from` on. */
export function said({ system, messages }, from = 0) {
  const sent = messages.slice(from).flatMap((message) => [...messagesOf(message.rounds), {
    role: message.role,
    content: withFiles(message),
    ...(message.thought && { reasoning_content: message.thought }),
  }]);
  return system.trim() ? [{ role: "system", content: system }, ...sent] : sent;
}

/** The token ids of a prompt that asks for an answer which begins with `begun`. */
async function tokens(model, messages, begun, tools, signal) {
  const body = { model, messages, ...(tools?.length && { tools }) };
  if (begun) body.chat_template_kwargs = { enable_thinking: false }; // the model has thought before the answer began
  const { prompt } = await postJSON("apply-template", body, signal);
  return (await postJSON("tokenize", { model, content: prompt + begun }, signal)).tokens;
}

/**
 * What of a conversation is sent so that there is room for an answer: `from`, the index of the first message, the
 * prompt's token ids in `prompt`, and the model's `context` in tokens. The last message is always sent.
 */
export async function fit(conversation, { model, begun = "", most = 0, tools, signal }) {
  const { max_model_len: context } = await postJSON("tokenize", { model, content: "" }, signal);
  const room = Math.min(context * SHARE, most < context ? context - most : context);
  const asked = conversation.messages.flatMap(({ role }, index) => (role === "user" ? [index] : []));
  const from = (place) => (place ? asked[place] : 0);
  const counted = new Map();
  const fits = async (place) => {
    try {
      counted.set(place, await tokens(model, said(conversation, from(place)), begun, tools, signal));
    } catch (error) {
      if (error.tooLong) return false; // for the server to count
      throw error;
    }
    return counted.get(place).length <= room;
  };
  let low = 0; // bisected: the first place that fits lies from `low` to `high`
  let high = asked.length - 1;
  if (await fits(0)) high = 0;
  else low = Math.min(1, high);
  while (low < high) {
    const middle = (low + high) >> 1;
    if (await fits(middle)) high = middle;
    else low = middle + 1;
  }
  const prompt = counted.get(high) ?? (await tokens(model, said(conversation, from(high)), begun, tools, signal));
  return { from: from(high), prompt, context };
}
