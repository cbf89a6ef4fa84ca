// One message of a conversation, with what can be done with it.

import { facts, seconds } from "./answer.js";
import { announce, autosize, button, copyButton, dialog, download, h, icon } from "./dom.js";
import { Growing } from "./markdown.js";

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
      h("pre", { class: "receipt", tabindex: "0", role: "region", "aria-label": "The receipt as JSON" }, text)),
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

/** A message of the user; `onEdit(text)` sends it anew. */
export function userMessage(message, onEdit) {
  const body = h("div", { class: "bubble" }, message.content);
  const element = h("li", { class: "message user" }, h("h2", { class: "visually-hidden" }, "You"), body);
  const tools = h("div", { class: "tools" },
    copyButton("Copy the message", () => message.content),
    onEdit && button("edit", "Edit the message", edit, { class: "quiet" }));
  function edit() {
    const area = h("textarea", { "aria-label": "Edit the message", "aria-describedby": "edit-hint", value: message.content });
    const cancel = () => {
      form.replaceWith(body);
      tools.hidden = false;
      tools.querySelector(":scope > :last-child").focus();
    };
    const form = h("form", {
      class: "edit",
      onsubmit: (event) => {
        event.preventDefault();
        if (area.value.trim()) onEdit(area.value.trim());
      },
      onkeydown: (event) => {
        if (event.key === "Escape") cancel();
        else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
          event.preventDefault();
          form.requestSubmit();
        }
      },
    }, area, h("p", { class: "hint", id: "edit-hint" }, "What follows this message is answered anew."),
      h("div", { class: "actions" }, h("button", { type: "button", onclick: cancel }, "Cancel"), h("button", { type: "submit", class: "primary" }, "Send")));
    body.replaceWith(form);
    tools.hidden = true;
    autosize(area);
    area.focus();
  }
  element.append(tools);
  return element;
}

/** An answer; the last one can be made anew (`onRegenerate`), and continued (`onContinue`) unless the model ended it. */
export function answerMessage(message, body, { onRegenerate, onContinue } = {}) {
  const { stats = {} } = message;
  const ended = !message.cut && stats.finish !== "stopped" && stats.finish !== "length";
  return h("li", { class: "message assistant" },
    h("h2", { class: "who" }, stats.model || "Answer"),
    message.thought && thoughtFold(thoughtFor(stats), message.thought),
    body,
    message.cut && h("p", { class: "cut" }, icon("warning"), "This answer was cut off."),
    h("div", { class: "below" }, factsList(stats),
      h("div", { class: "tools" },
        onContinue && !ended && button("continue", "Continue the answer", onContinue, { text: true }),
        copyButton("Copy the answer", () => message.content),
        onRegenerate && button("again", "Answer again", onRegenerate, { class: "quiet" }),
        stats.receipt && button("receipt", "Show the receipt", () => showReceipt(stats.receipt), { class: "quiet" }))));
}
