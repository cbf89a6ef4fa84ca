// Versions of a message. A conversation's `messages` are the path that is shown. A message that has other versions has
// `versions`: `{at, tails}`. `at` is the place of the version that is shown, and `tails[n]` are the messages of version
// n from here on, null for the one that is shown.

/** The number of versions of a message. */
export const count = ({ versions }) => versions?.tails.length ?? 1;

/** The place of the version that is shown, from 0. */
export const place = ({ versions }) => versions?.at ?? 0;

/** The versions with the path from `index` on put among them; it is taken away from `messages`. */
function put(messages, index) {
  const [{ versions, ...first }, ...rest] = messages.splice(index);
  const tails = versions ? [...versions.tails] : [null];
  tails[versions?.at ?? 0] = [first, ...rest];
  return tails;
}

/** Sets the messages from `index` on aside; returns the `versions` of the message that takes their place. */
export function setAside(messages, index) {
  const tails = put(messages, index);
  return { at: tails.length, tails: [...tails, null] };
}

/** Shows version `at` of the message at `index`, with all that followed it. */
export function choose(messages, index, at) {
  const tails = put(messages, index);
  const [first, ...rest] = tails[at];
  tails[at] = null;
  messages.push({ ...first, versions: { at, tails } });
  for (const message of rest) messages.push(message);
}

/** All messages, those of versions that are not shown among them. */
export const everything = (messages) =>
  messages.flatMap((message) => [message, ...(message.versions?.tails ?? []).flatMap((tail) => (tail ? everything(tail) : []))]);
