// One message of a conversation, with what can be done with it.

import { facts, seconds } from "./answer.js";
import { fileList } from "./attachments.js";
import * as branches from "./branches.js";
import { announce, autosize, button, copyButton, dialog, download, h, icon, scrollable } from "./dom.js";
import { Growing, markdown } from "./markdown.js";
import { callBlock } from "./rounds.js";

/** The list of an answer's facts: speed, device and so on. */
export const factsList = (stats) =>
  h("dl", { class: "facts" }, facts(stats).map(([name, value]) => h("div", { title: name }, h("dt", { class: "visually-hidden" }, name), h("dd", {}, value))));

/** What went wrong, kindly, with a way on. */
export function problem(error, retry) {
  const said = error.message.charAt(0).toUpperCase() + error.message.slice(1);
  const wait = error.wait ? ` The server asks to wait ${error.wait} s.` : "";
  const shorten = error.tooLong && retry ? " Edit an earlier message, or begin a new conversation." : "";
  return h(
    "div",
    { class: "problem", role: "alert" },
    icon("warning"),
    h("div", {}, h("p", { class: "what" }, `${error.title ?? "Something went wrong"}.`), h("p", {}, `${said}${wait}${shorten}`)),
    h("div", { class: "actions" },
      shorten && h("a", { class: "button", href: "#/" }, "New conversation"),
      error.needsKey && h("a", { class: "button", href: "#/settings" }, "Enter the key"),
      retry && button("again", "Try again", retry, { text: true })),
  );
}

function showReceipt(receipt) {
  const text = `${JSON.stringify(receipt, null, 2)}\n`;
  dialog(
    "Receipt",
    h("div", {},
      h("p", {}, "The server’s record of this answer: device, kernels, model, options and times. Check it with ", h("code", {}, "bitnet receipt verify receipt.json"), "."),
      h("pre", { class: "receipt", ...scrollable("The receipt as JSON") }, text)),
    copyButton("Copy the receipt", () => text),
    button("download", "Download", () => download("receipt.json", "application/json", text), { text: true }),
    h("button", { type: "button", class: "primary", onclick: (event) => event.target.closest("dialog").close() }, "Close"),
  );
}

/** What a model thought before it answered, folded. */
const thoughtFold = (label, text) => h("details", { class: "thought" }, h("summary", {}, label), h("p", {}, text));

const thoughtFor = ({ thinking }) => (thinking === undefined ? "Thought" : `Thought for ${seconds(thinking)}`);

/** Shows an answer that grows, and the thought before it; screen readers get each paragraph once it is complete. */
export class AnswerBody {
  constructor() {
    this.prose = h("div", { class: "prose" });
    this.thought = thoughtFold("Thinking…", "");
    this.thought.hidden = true;
    this.element = h("div", {}, this.thought, this.prose);
    this.growing = new Growing(this.prose, announce);
    this.frame = 0;
    this.shown = { text: "", thought: "", stats: {} };
  }

  show(text, stats = {}, thought = "") {
    this.shown = { text, thought, stats };
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw(ended = false) {
    const { text, thought, stats } = this.shown;
    this.frame = 0;
    const [summary, said] = this.thought.children;
    this.thought.hidden = !thought;
    summary.textContent = text || ended ? thoughtFor(stats) : "Thinking…";
    said.textContent = thought;
    this.growing.show(text, ended);
  }

  finish(text, stats = {}, thought = "") {
    cancelAnimationFrame(this.frame);
    this.shown = { text, thought, stats };
    this.draw(true);
  }
}

/** Goes through the versions of a message: `onVersion(at)` shows another; without it one only sees which is shown. */
function versions(message, onVersion) {
  const count = branches.count(message);
  const at = branches.place(message);
  if (count < 2) return null;
  const step = (name, label, to) => button(name, label, () => onVersion(to), { class: "quiet", disabled: !onVersion || to < 0 || to >= count });
  return h("div", { class: "versions", role: "group", "aria-label": "Versions" },
    step("left", "Earlier version", at - 1), h("span", {}, `${at + 1}/${count}`), step("right", "Later version", at + 1));
}

/** A message's text as a form in its `place`. `ways` are the buttons that end it: `[label, act(text)]`, the last by Enter, too, with `enter`. */
function edit(place, tools, { label, hint, text, ways, enter }) {
  const area = h("textarea", { "aria-label": label, "aria-describedby": "edit-hint", value: text });
  const [body] = place.children;
  const cancel = () => {
    place.replaceChildren(body);
    tools.hidden = false;
    tools.querySelector(`[aria-label="${label}"]`).focus();
  };
  const finish = (act) => area.value.trim() && act(area.value.trim());
  const [, main] = ways.at(-1);
  const form = h("form", {
    class: "edit",
    onsubmit: (event) => {
      event.preventDefault();
      finish(main);
    },
    onkeydown: (event) => {
      if (event.key === "Escape") cancel();
      else if (event.key === "Enter" && (event.ctrlKey || (enter && !event.shiftKey)) && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      } else return;
      event.stopPropagation();
    },
  }, area, h("p", { class: "hint", id: "edit-hint" }, hint),
    h("div", { class: "actions" }, h("button", { type: "button", onclick: cancel }, "Cancel"),
      ways.map(([name, act], nth) => (nth === ways.length - 1
        ? h("button", { type: "submit", class: "primary" }, name)
        : h("button", { type: "button", onclick: () => finish(act) }, name)))));
  place.replaceChildren(form);
  tools.hidden = true;
  autosize(area);
  area.focus();
}

/** A message of the user; `onEdit(text)` sends it anew, `onVersion(at)` shows another version. */
export function userMessage(message, { onEdit, onVersion }) {
  const place = h("div", { class: "place" }, h("div", { class: "bubble" }, message.content, message.files && fileList(message.files)));
  const label = "Edit the message";
  const hint = "What follows this message is answered anew. The message as it was stays as another version.";
  const tools = h("div", { class: "tools" },
    versions(message, onVersion),
    copyButton("Copy the message", () => message.content),
    button("edit", label, () => edit(place, tools, { label, hint, text: message.content, ways: [["Send", onEdit]], enter: true }), { class: "quiet" }));
  return h("li", { class: "message user" }, h("h2", { class: "visually-hidden" }, "You"), place, tools);
}

/** A button that shows an answer's text as the model wrote it, and as it is meant. */
function rawButton(message, place) {
  const [body] = place.children;
  const raw = h("pre", { class: "raw", ...scrollable("The answer as written") }, message.content);
  const element = button("raw", "Show the answer as written", () => {
    const on = body.isConnected;
    place.replaceChildren(on ? raw : body);
    element.setAttribute("aria-pressed", String(on));
  }, { class: "quiet", "aria-pressed": "false" });
  return element;
}

/**
 * An answer. `onEdit(text)` keeps it with another text and `onVersion(at)` shows another version; the last one can be
 * made anew (`onRegenerate`), and continued (`onContinue`) unless the model ended it.
 */
export function answerMessage(message, { onRegenerate, onContinue, onEdit, onVersion }) {
  const { stats = {} } = message;
  const ended = !message.cut && !["stopped", "length", "edited"].includes(stats.finish);
  const place = h("div", { class: "place" }, markdown(message.content));
  const label = "Edit the answer";
  const ways = [onContinue && ["Keep and continue", (text) => onContinue(text)], ["Keep", onEdit]].filter(Boolean);
  const hint = "The conversation goes on from the answer as you keep it. The answer as it was, and what followed it, stay as another version.";
  const tools = h("div", { class: "tools" },
    versions(message, onVersion),
    onContinue && !ended && button("continue", "Continue the answer", () => onContinue(), { text: true }),
    copyButton("Copy the answer", () => message.content),
    onRegenerate && button("again", "Answer again", onRegenerate, { class: "quiet" }),
    button("edit", label, () => edit(place, tools, { label, hint, text: message.content, ways }), { class: "quiet" }),
    rawButton(message, place),
    stats.receipt && button("receipt", "Show the receipt", () => showReceipt(stats.receipt), { class: "quiet" }));
  return h("li", { class: "message assistant" },
    h("h2", { class: "who" }, stats.model || "Answer"),
    message.rounds?.map(({ content, thought, calls }) => [thought && thoughtFold("Thought", thought), content && markdown(content), calls.map((call) => callBlock(call))]),
    message.thought && thoughtFold(thoughtFor(stats), message.thought),
    place,
    message.cut && h("p", { class: "cut" }, icon("warning"), "This answer was cut off."),
    h("div", { class: "below" }, factsList(stats), tools));
}
