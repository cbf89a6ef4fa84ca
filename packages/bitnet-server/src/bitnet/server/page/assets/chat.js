// The conversation view.

import { Bar } from "./bar.js";
import * as branches from "./branches.js";
import { Composer } from "./composer.js";
import { fit, said } from "./context.js";
import { announce, button, fill, h, refill } from "./dom.js";
import { Gauge } from "./gauge.js";
import { AnswerBody, answerMessage, problem, userMessage } from "./message.js";
import { toolbox } from "./mcp.js";
import * as models from "./models.js";
import * as notify from "./notify.js";
import { generateWithTools } from "./rounds.js";
import { chosen } from "./sampling.js";
import { settings } from "./settings.js";
import * as store from "./store.js";
import { suggestions } from "./suggestions.js";

const NEAR = 80; // pixels from the end that still count as reading the end
const KEEP_EVERY = 1000; // milliseconds after which what has come of an answer is kept again

const until = (signal) => new Promise((resolve, reject) => signal.addEventListener("abort", () => reject(signal.reason)));

class Chat {
  constructor(main, conversation, { title, menu, onSaving, onSaved }) {
    Object.assign(this, { conversation, onSaving, onSaved });
    this.controller = null;
    this.answering = Promise.resolve(); // until the answer that is made has ended
    this.error = null;
    this.shown = new WeakMap(); // each message's element
    this.gauge = new Gauge();
    this.bar = new Bar(conversation, title(conversation.title), {
      menu: () => menu(conversation.id),
      onChange: () => store.begun(conversation) && this.save(),
    });
    this.composer = new Composer(conversation, { onSend: (text, files) => this.ask(text, files), onStop: () => this.stop(), onUp: (event) => this.editLast(event), model: () => this.bar.picker.value, beside: this.gauge.element });
    this.list = h("ol", { class: "messages", "aria-label": "Messages" });
    this.scroller = h("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": "Conversation" }, this.list);
    main.replaceChildren(h("div", { class: "chat" }, this.bar.element, this.scroller, this.composer.element));
    main.onkeydown = (event) => {
      if (event.key === "Escape" && !event.shiftKey && this.controller) this.stop();
    };
    this.jump = button("down", "Jump to the latest", () => this.toEnd(true), { class: "jump", hidden: true });
    this.composer.element.prepend(this.jump);
    this.scroller.addEventListener("scroll", () => (this.jump.hidden = this.nearEnd()), { passive: true });
    this.render();
    this.toEnd(true);
    this.bar.picker.ready().then(() => conversation.messages.length || this.controller || this.render()); // the model's own suggestions
  }

  welcome() {
    const ideas = suggestions(this.bar.picker.value);
    return h("li", { class: "welcome" },
      h("p", { class: "big" }, "What would you like to know?"),
      h("p", {}, "Your words go to this server and no further; conversations stay in this browser."),
      this.bar.picker.value
        ? h("div", { class: "ideas" }, ideas.map((idea) => h("button", { type: "button", onclick: () => this.ask(idea) }, idea)))
        : models.failure && problem(models.failure, () => models.refresh().then(() => this.bar.picker.ready()).then(() => this.render())));
  }

  /** The element of a message, made again only when what it offers has changed. */
  message(message, index, last) {
    const busy = this.controller !== null;
    const state = `${index} ${last} ${busy}`;
    const found = this.shown.get(message);
    if (found?.state === state) return found.element;
    const onVersion = busy ? null : (at) => this.choose(index, at);
    const element = message.role === "user"
      ? userMessage(message, { onEdit: (text) => this.edit(index, text), onVersion })
      : answerMessage(message, {
        onVersion,
        onEdit: (text) => this.editAnswer(index, text),
        ...(last && { onRegenerate: () => this.regenerate() }),
        ...(last && !message.rounds && { onContinue: (text) => this.resume(text) }),
      });
    this.shown.set(message, { state, element });
    return element;
  }

  render() {
    const { messages, from } = this.conversation;
    const items = messages.map((message, index) => [
      from > 0 && index === from && h("li", { class: "forgotten" }, "The context is full: the model no longer sees what is above."),
      this.message(message, index, index === messages.length - 1),
    ]);
    this.gauge.show(messages.findLast(({ role }) => role === "assistant")?.stats);
    if (this.error) items.push(h("li", { class: "message assistant" }, problem(this.error, () => this.again())));
    else if (messages.at(-1)?.role === "user" && !this.controller) {
      items.push(h("li", { class: "message assistant" }, button("again", "Answer", () => this.answer(), { text: true })));
    }
    refill(this.list, items.length ? items : [this.welcome()]);
  }

  /** The settings, with what the conversation has of its own. */
  settings() {
    return chosen(settings, this.conversation.sampling);
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

  async ask(text, files = []) {
    if ((!text && !files.length) || this.controller) return;
    const { conversation } = this;
    const { messages } = conversation;
    this.composer.clear();
    this.composer.focus();
    if (!store.begun(conversation)) this.entitle((text || files[0].name).split("\n")[0].slice(0, 60));
    const unanswered = messages.at(-1)?.role === "user"; // the new words replace it
    const versions = unanswered && { versions: branches.setAside(messages, messages.length - 1) };
    messages.push({ role: "user", content: text, ...(files.length && { files }), ...versions });
    await this.answer();
  }

  /** Ends the answer that is made; what has come of it is in the conversation then. */
  async halt() {
    this.stop();
    await this.answering;
  }

  async edit(index, content) {
    await this.halt();
    const { messages } = this.conversation;
    const { files } = messages[index];
    messages.push({ role: "user", content, ...(files && { files }), versions: branches.setAside(messages, index) });
    this.composer.focus();
    await this.answer();
  }

  editLast(event) {
    const found = [...this.list.querySelectorAll("[aria-label='Edit the message']")].at(-1);
    if (!found) return;
    event.preventDefault();
    found.click();
  }

  async editAnswer(index, content) {
    await this.halt();
    const { messages } = this.conversation;
    const { stats, thought, rounds } = messages[index];
    messages.push({ role: "assistant", content, thought, ...(rounds && { rounds }), stats: { ...stats, finish: "edited" }, versions: branches.setAside(messages, index) });
    await this.changed();
  }

  /** Shows another version of a message. */
  async choose(index, at) {
    branches.choose(this.conversation.messages, index, at);
    await this.changed();
    this.list.querySelectorAll(".message")[index]?.querySelector(".versions button:enabled")?.focus();
    announce(`Version ${at + 1} of ${branches.count(this.conversation.messages[index])}`);
  }

  async changed() {
    this.error = null;
    if (this.conversation.from >= this.conversation.messages.length) this.conversation.from = 0;
    this.render();
    await this.save();
  }

  /** Asks again after an error: for the answer that is missing, or for another version of the one that is there. */
  again() {
    return this.conversation.messages.at(-1).role === "user" ? this.answer() : this.regenerate();
  }

  async regenerate() {
    const { messages } = this.conversation;
    const before = [...messages];
    this.composer.focus();
    await this.answer({ before, versions: branches.setAside(messages, messages.length - 1) });
  }

  /** Goes on with an answer that was stopped or cut off, or with `text` as its new version. */
  async resume(text) {
    const { messages } = this.conversation;
    if (text && text !== messages.at(-1).content) await this.editAnswer(messages.length - 1, text);
    const before = [...messages];
    const { content, thought, versions } = messages.pop();
    this.composer.focus();
    await this.answer({ before, versions, begun: content, thought });
  }

  stop() {
    this.controller?.abort();
  }

  answer(wanted) {
    this.answering = this.make(wanted);
    return this.answering;
  }

  /**
   * Asks for an answer to the conversation as it stands. Without a word of it the messages are those of `before` again,
   * if given. `versions` are those of the answer (`branches.js`). With `begun`, its beginning, it is continued.
   */
  async make({ before = null, versions, begun = "", thought: thoughtBefore = "" } = {}) {
    const controller = new AbortController();
    const { signal } = controller;
    const { conversation, bar } = this;
    const began = performance.now();
    this.controller = controller;
    this.error = null;
    this.render();
    let body = new AnswerBody();
    if (begun) body.show(begun);
    const waiting = h("p", { class: "waiting" }, h("span", { class: "dots", "aria-hidden": "true" }, h("i"), h("i"), h("i")), h("span", { class: "visually-hidden" }, "Waiting for the answer"));
    const item = h("li", { class: "message assistant" }, h("h2", { class: "who" }, bar.picker.value), body.element, waiting);
    this.list.append(item);
    this.busy(true);
    this.toEnd(true);
    announce("The model is answering");
    const message = (content, thought, stats, cut, rounds) => ({
      role: "assistant", content, thought: thought || thoughtBefore, stats, cut, ...(rounds?.length && { rounds: [...rounds] }), ...(versions && { versions }),
    });
    let outcome;
    let failed = null;
    try {
      if (!before) await this.save();
      await Promise.race([bar.picker.ready(), until(signal)]);
      const found = conversation.tools?.length && !begun ? await toolbox(conversation.tools, signal) : null;
      const sent = await this.sent(begun, found?.tools, signal);
      outcome = await generateWithTools({
        ...sent, begun, toolbox: found, model: bar.picker.value, settings: this.settings(), signal,
        onRound: ({ content, thought, calls }) => {
          body.finish(content, {}, thought);
          const places = calls.map(() => h("div"));
          body = new AnswerBody();
          fill(item, [places, body.element, waiting]);
          this.toEnd();
          announce("The model asks to call a tool");
          return places;
        },
        onText: (text, stats, thought, rounds) => {
          waiting.remove();
          this.follow = this.nearEnd();
          body.show(text, stats, thought);
          if (text) this.keep(message(text, thought, stats, true, rounds));
          requestAnimationFrame(() => this.toEnd());
        },
      });
    } catch (error) {
      failed = error.name === "AbortError" ? null : error;
      outcome = error.partial ?? { text: begun, stats: { finish: "stopped" } };
    }
    this.controller = null;
    this.unkept = null;
    this.follow = this.nearEnd();
    const { text, thought, stats, rounds } = outcome;
    if (text !== begun || rounds?.length) {
      body.finish(text, stats, thought);
      conversation.messages.push(message(text, thought, stats, Boolean(failed), rounds));
    } else {
      if (before) conversation.messages = before;
      if (begun && !failed && stats.finish === "stop") this.complete(); // nothing was missing
      if (!begun && !failed && stats.finish !== "stopped") {
        const why = thought ? "The model thought, and ended before it answered." : "The model ended without a word.";
        failed = Object.assign(new Error(why), { title: "The answer is empty" });
      }
    }
    this.error = failed;
    this.busy(false);
    await this.save();
    if (this.controller) return; // the next answer has begun while this one was saved
    this.render();
    this.toEnd();
    notify.tell(failed ? failed.title : "The answer is complete", conversation.title, performance.now() - began);
    if (!failed) announce(stats.finish === "stopped" ? "Stopped" : "The answer is complete");
  }

  /** Takes the last answer for a whole one. */
  complete() {
    const { messages } = this.conversation;
    const last = messages.pop();
    messages.push({ ...last, cut: false, stats: { ...last.stats, finish: "stop" } });
  }

  busy(on) {
    this.composer.busy(on);
    this.scroller.setAttribute("aria-busy", String(on));
  }

  /** What of the conversation is sent. Where the server cannot count its tokens, all of it is. */
  async sent(begun, tools, signal) {
    const { conversation } = this;
    const before = conversation.from ?? 0;
    conversation.from = 0;
    let found = {};
    try {
      found = await fit(conversation, { model: this.bar.picker.value, begun, most: Number(this.settings().max_tokens), tools, signal });
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
    this.bar.heading.textContent = text;
    document.title = `${text} · bitnet`;
  }

  rename(name) {
    this.composer.keepOver(() => (this.conversation.named = true)); // a name makes it a conversation of its own
    this.entitle(name);
    this.save();
  }

  /** Ends what is made, and keeps nothing any more: the conversation is deleted. */
  async discard() {
    this.removed = true;
    await this.halt();
  }

  leave() {
    removeEventListener("pagehide", this.hidden);
    this.stop();
  }
}

/** Shows a conversation; the result has `rename()`, `discard()`, and `leave()`, which ends it. */
export function show(main, conversation, options) {
  const chat = new Chat(main, conversation, options);
  if (matchMedia("(pointer: fine)").matches) chat.composer.focus();
  chat.hidden = () => chat.keepNow();
  addEventListener("pagehide", chat.hidden);
  return chat;
}
