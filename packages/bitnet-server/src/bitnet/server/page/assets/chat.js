// The conversation view.

import { generate } from "./answer.js";
import { fit, said } from "./context.js";
import { announce, autosize, button, confirm, field, h, refill, relabel } from "./dom.js";
import * as drafts from "./drafts.js";
import { markdown } from "./markdown.js";
import { Gauge } from "./gauge.js";
import { AnswerBody, answerMessage, problem, userMessage } from "./message.js";
import { modelPicker } from "./models.js";
import { settings } from "./settings.js";
import * as store from "./store.js";

const NEAR = 80; // pixels from the end that still count as reading the end
const KEEP_EVERY = 1000; // milliseconds after which what has come of an answer is kept again

class Chat {
  constructor(main, conversation, { title, onSaving, onSaved, onDelete }) {
    Object.assign(this, { main, conversation, onSaving, onSaved, onDelete });
    this.controller = null;
    this.error = null;
    this.picker = modelPicker();
    this.gauge = new Gauge();
    this.list = h("ol", { class: "messages", "aria-label": "Messages" });
    this.scroller = h("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": "Conversation" }, this.list);
    this.heading = title(conversation.title);
    main.replaceChildren(h("div", { class: "chat" }, this.header(), this.scroller, this.composer()));
    this.render();
    this.toEnd(true);
  }

  header() {
    this.system = h("textarea", { rows: 3, value: this.conversation.system });
    this.system.addEventListener("change", () => {
      this.conversation.system = this.system.value;
      if (this.conversation.named || this.conversation.messages.length) this.save();
    });
    return h("header", { class: "bar" },
      this.heading,
      h("div", { class: "tools" },
        button("edit", "Rename the conversation", () => this.rename(), { class: "quiet" }),
        button("trash", "Delete the conversation", () => this.remove(), { class: "quiet" })),
      this.picker,
      h("details", { class: "system" }, h("summary", {}, "System prompt"), field("What the model is told first", this.system)));
  }

  composer() {
    this.input = h("textarea", { id: "prompt", rows: 1, "aria-label": "Message", placeholder: "Write a message", enterkeyhint: "send", value: drafts.load(this.conversation) });
    this.input.addEventListener("input", () => drafts.save(this.conversation, this.input.value));
    this.fit = autosize(this.input);
    this.send = button("send", "Send", null, { class: "primary round" });
    this.send.type = "submit";
    const form = h("form", {
      class: "composer",
      onsubmit: (event) => {
        event.preventDefault();
        if (this.controller) this.stop();
        else this.ask(this.input.value.trim());
      },
    }, this.input, this.send);
    this.input.addEventListener("keydown", (event) => {
      const phone = matchMedia("(pointer: coarse)").matches; // there Enter is a new line: Shift+Enter cannot be typed
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || phone) return;
      event.preventDefault();
      if (!this.controller) form.requestSubmit();
    });
    this.main.onkeydown = (event) => {
      if (event.key === "Escape" && this.controller) this.stop();
    };
    return h("div", { class: "dock" }, form, h("div", { class: "under" },
      h("p", { class: "hint keys" }, "Enter sends, Shift + Enter makes a new line, Escape stops."), this.gauge.element));
  }

  welcome() {
    const ideas = ["Why is the sky blue?", "Write a haiku about winter.", "Explain a hash table with an example in Python."];
    return h("li", { class: "welcome" },
      h("p", { class: "big" }, "What would you like to know?"),
      h("p", {}, "Your words go to this server and no further; conversations stay in this browser."),
      h("div", { class: "ideas" }, ideas.map((idea) => h("button", { type: "button", onclick: () => this.ask(idea) }, idea))));
  }

  render() {
    const { messages, from } = this.conversation;
    const items = messages.map((message, index) => {
      const forgotten = from > 0 && index === from && h("li", { class: "forgotten" }, "The context is full: the model no longer sees what is above.");
      if (message.role === "user") return [forgotten, userMessage(message, (text) => this.edit(index, text))];
      const last = index === messages.length - 1;
      const ways = last ? { onRegenerate: () => this.regenerate(), onContinue: () => this.resume() } : {};
      return answerMessage(message, markdown(message.content), ways);
    });
    this.gauge.show(messages.findLast(({ role }) => role === "assistant")?.stats);
    if (this.error) {
      const { partial } = this.error;
      const shown = partial && !partial.kept && partial.text && [h("h2", { class: "who" }, partial.stats.model), markdown(partial.text)];
      items.push(h("li", { class: "message assistant" }, shown, problem(this.error, () => this.again())));
    } else if (messages.at(-1)?.role === "user" && !this.controller) {
      items.push(h("li", { class: "message assistant" }, button("again", "Answer", () => this.answer(), { text: true })));
    }
    refill(this.list, items.length ? items : [this.welcome()]);
  }

  nearEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR;
  }

  toEnd(always = false) {
    if (always || this.follow) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  async save() {
    if (this.removed) return;
    this.conversation.updated = Date.now();
    this.onSaving(this.conversation);
    try {
      await store.save(this.conversation);
    } catch {
      announce("The browser could not keep this conversation"); // it goes on, and lasts as long as the page
      return;
    }
    this.onSaved(this.conversation);
  }

  async ask(text) {
    if (!text || this.controller) return;
    const { conversation } = this;
    this.input.value = "";
    drafts.save(conversation, "");
    this.fit();
    this.input.focus();
    if (!conversation.named && !conversation.messages.length) this.entitle(text.split("\n")[0].slice(0, 60));
    if (conversation.messages.at(-1)?.role === "user") conversation.messages.pop(); // never answered: the new words replace it
    conversation.messages.push({ role: "user", content: text });
    await this.answer();
  }

  async edit(index, text) {
    this.stop();
    this.conversation.messages.splice(index, Infinity, { role: "user", content: text });
    this.input.focus();
    await this.answer();
  }

  /** Asks again after an error: for the answer that is missing, or in place of the one that is there. */
  again() {
    return this.conversation.messages.at(-1).role === "user" ? this.answer() : this.regenerate();
  }

  async regenerate() {
    const replaced = this.conversation.messages.pop();
    this.input.focus();
    await this.answer({ replaced });
  }

  /** Goes on with an answer that was stopped or cut off. */
  async resume() {
    const replaced = this.conversation.messages.pop();
    this.input.focus();
    await this.answer({ replaced, begun: replaced.content });
  }

  stop() {
    this.controller?.abort();
  }

  busy(on) {
    relabel(this.send, on ? "stop" : "send", on ? "Stop" : "Send");
    this.scroller.setAttribute("aria-busy", String(on));
  }

  /**
   * Asks for an answer to the conversation as it stands. `replaced` is the answer that makes room for it: it comes back
   * if there is no new one. With `begun`, its beginning, the answer is continued.
   */
  async answer({ replaced = null, begun = "" } = {}) {
    const controller = new AbortController();
    const { signal } = controller;
    this.stop();
    this.controller = controller;
    this.unkept = null;
    this.error = null;
    this.render();
    const body = new AnswerBody();
    if (begun) body.show(begun);
    const waiting = h("p", { class: "waiting" }, h("span", { class: "dots", "aria-hidden": "true" }, h("i"), h("i"), h("i")), h("span", { class: "visually-hidden" }, "Waiting for the answer"));
    this.list.append(h("li", { class: "message assistant" }, h("h2", { class: "who" }, this.picker.value), body.element, waiting));
    this.busy(true);
    this.toEnd(true);
    announce("The model is answering");
    const { conversation } = this;
    // A whole answer is kept until there is a new one; of any other, as much as has come.
    const keeps = !replaced || replaced.cut || begun;
    let outcome;
    let failed = null;
    try {
      if (!replaced) await this.save();
      await this.picker.ready();
      const sent = await this.sent(begun, signal);
      outcome = await generate({
        ...sent, begun, model: this.picker.value, settings, signal,
        onText: (text, stats, thought) => {
          waiting.remove();
          this.follow = this.nearEnd();
          body.show(text, stats, thought);
          if (keeps && text) this.keep({ role: "assistant", content: text, thought, stats, cut: true });
          requestAnimationFrame(() => this.toEnd());
        },
      });
    } catch (error) {
      failed = error.name === "AbortError" ? null : error;
      outcome = error.partial ?? { text: begun, stats: { finish: "stopped" } };
    }
    if (this.controller !== controller) return; // edited meanwhile: another answer has begun
    this.controller = null;
    this.unkept = null;
    this.follow = this.nearEnd();
    const { text, thought, stats } = outcome;
    if (text !== begun) {
      body.finish(text, stats, thought);
      outcome.kept = !failed || keeps;
      if (outcome.kept) conversation.messages.push({ role: "assistant", content: text, thought: thought || replaced?.thought, stats, cut: Boolean(failed) });
    } else if (!failed && stats.finish !== "stopped" && !begun) {
      const why = thought ? "The model thought, and ended before it answered." : "The model ended without a word.";
      failed = Object.assign(new Error(why), { title: "The answer is empty" });
    }
    if (replaced && conversation.messages.at(-1)?.role !== "assistant") {
      if (begun && !failed && stats.finish === "stop") Object.assign(replaced, { cut: false, stats: { ...replaced.stats, finish: "stop" } }); // nothing was missing
      conversation.messages.push(replaced);
    }
    this.error = failed;
    this.busy(false);
    await this.save();
    if (this.controller) return; // the next answer has begun while this one was saved
    this.render();
    this.toEnd();
    if (!failed) announce(stats.finish === "stopped" ? "Stopped" : "The answer is complete");
  }

  /** What of the conversation is sent. Where the server cannot count its tokens, all of it is. */
  async sent(begun, signal) {
    const { conversation } = this;
    const before = conversation.from ?? 0;
    conversation.from = 0;
    let found = {};
    try {
      found = await fit(conversation, { model: this.picker.value, begun, most: Number(settings.max_tokens), signal });
    } catch (error) {
      if (begun || error.name === "AbortError") throw error;
    }
    conversation.from = found.from ?? 0;
    if (conversation.from > before) announce("The context is full: the model no longer sees the oldest messages");
    return { ...found, messages: said(conversation, conversation.from) };
  }

  /** Keeps what has come of an answer, at most once in KEEP_EVERY milliseconds: the server or the page may end at any time. */
  keep(message) {
    this.unkept = message;
    this.keeping ??= setTimeout(() => this.keepNow(), KEEP_EVERY);
  }

  keepNow() {
    clearTimeout(this.keeping);
    this.keeping = undefined;
    if (!this.unkept || this.removed) return;
    const { conversation } = this;
    store.save({ ...conversation, messages: [...conversation.messages, this.unkept] }).catch(() => {}); // as `save` does, it goes on
    this.unkept = null;
  }

  entitle(text) {
    this.conversation.title = text;
    this.heading.textContent = text;
    document.title = `${text} · bitnet`;
  }

  rename() {
    const input = h("input", { type: "text", "aria-label": "Name of the conversation", value: this.conversation.title, maxlength: "120" });
    const form = h("form", { class: "rename" }, input, button("check", "Keep the name", () => form.requestSubmit(), { class: "quiet" }));
    const done = (keep) => {
      if (!form.isConnected) return;
      form.replaceWith(this.heading);
      this.heading.focus();
      if (!keep || !input.value.trim()) return;
      drafts.save(this.conversation, ""); // a name makes it a conversation of its own
      this.conversation.named = true;
      drafts.save(this.conversation, this.input.value);
      this.entitle(input.value.trim());
      this.save();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      done(true);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      done(false);
    });
    this.heading.replaceWith(form);
    input.select();
  }

  async remove() {
    if (!(await confirm("Delete this conversation?", "It is kept in this browser alone and cannot be brought back.", "Delete"))) return;
    this.removed = true; // what was begun does not bring it back
    this.stop();
    drafts.save(this.conversation, "");
    await store.remove(this.conversation.id);
    this.onDelete(this.conversation.id);
  }
}

/** Shows a conversation; returns what ends it. */
export function show(main, conversation, options) {
  const chat = new Chat(main, conversation, options);
  if (matchMedia("(pointer: fine)").matches) chat.input.focus();
  const hidden = () => chat.keepNow();
  addEventListener("pagehide", hidden);
  return () => {
    removeEventListener("pagehide", hidden);
    main.onkeydown = null;
    chat.stop();
  };
}
