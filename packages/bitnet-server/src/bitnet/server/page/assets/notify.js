// The browser's notice that an answer is complete, for whoever looks at something else meanwhile.

export const LONG = 10_000; // milliseconds: the end of a shorter answer is not told

export const allowed = () => globalThis.Notification?.permission === "granted";

/** Asks the browser for notices; returns why there are none, or "". */
export async function request() {
  if (!isSecureContext || !globalThis.Notification) return "This browser shows notices only of pages on https and of this machine’s own (localhost).";
  return (await Notification.requestPermission()) === "granted" ? "" : "The browser does not allow notices of this page. Its settings for this site can change that.";
}

/** Tells of an answer that took so many milliseconds, if nobody looks at the page. */
export function tell(title, text, took) {
  if (took < LONG || !document.hidden || !allowed()) return;
  const notice = new Notification(title, { body: text.slice(0, 120), tag: title });
  notice.onclick = () => {
    focus();
    notice.close();
  };
}
