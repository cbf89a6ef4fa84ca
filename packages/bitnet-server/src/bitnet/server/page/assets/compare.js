// One prompt, two models or devices, side by side.

import { generate } from "./answer.js";
import { announce, autosize, button, field, h, relabel } from "./dom.js";
import { AnswerBody, factsList, problem } from "./message.js";
import { known, modelPicker } from "./models.js";
import { settings } from "./settings.js";

function side(name, nth) {
  const picker = modelPicker({ label: `Model ${name}`, nth });
  const place = h("div", { class: "answer" }, h("p", { class: "hint" }, "The answer comes here."));
  const element = h("section", { class: "side", "aria-label": `Answer ${name}` }, h("h2", {}, h("span", { class: "letter" }, name), picker), place);
  return { name, picker, place, element };
}

async function run(one, messages, signal) {
  const body = new AnswerBody();
  body.growing.onBlock = () => {}; // two answers read out at once would be noise: the end is announced
  one.place.replaceChildren(body.element);
  one.place.setAttribute("aria-busy", "true");
  try {
    await one.picker.ready();
    const onText = (text, stats, thought) => body.show(text, stats, thought);
    const { text, thought, stats } = await generate({ model: one.picker.value, messages, settings, signal, onText });
    body.finish(text, stats, thought);
    one.place.append(factsList(stats));
    return stats;
  } catch (error) {
    body.finish(error.partial?.text ?? "");
    one.place.append(problem(error, null));
    return null;
  } finally {
    one.place.removeAttribute("aria-busy");
  }
}

const ENOUGH = 32; // tokens: the speed of fewer says little

function verdict(a, b) {
  if (!a?.speed || !b?.speed) return "";
  if (Math.min(a.tokens, b.tokens) < ENOUGH) return "The answers are too short to say which is faster.";
  const [fast, ratio] = a.speed >= b.speed ? ["A", a.speed / b.speed] : ["B", b.speed / a.speed];
  return ratio < 1.02 ? "Both were about as fast." : `${fast} was ${ratio.toFixed(ratio < 10 ? 2 : 0)} times as fast this time.`;
}

/** The view that compares; returns what ends it. */
export function show(main, { title }) {
  let controller = null;
  const sides = [side("A", 0), side("B", 1)];
  const prompt = h("textarea", { rows: 2, required: true, placeholder: "One prompt for both" });
  const together = h("input", { type: "checkbox" });
  const go = button("send", "Compare", null, { text: true, class: "primary" });
  go.type = "submit";
  const result = h("p", { class: "verdict", role: "status" });
  const busy = (on) => {
    relabel(go, on ? "stop" : "send", on ? "Stop" : "Compare");
    go.append(h("span", {}, on ? "Stop" : "Compare"));
  };
  async function compare() {
    controller = new AbortController();
    const { signal } = controller;
    const messages = [{ role: "user", content: prompt.value.trim() }];
    if (settings.system.trim()) messages.unshift({ role: "system", content: settings.system });
    result.textContent = "";
    busy(true);
    announce("Comparing");
    const first = run(sides[0], messages, signal);
    if (!together.checked) await first;
    const second = signal.aborted ? null : run(sides[1], messages, signal);
    const [a, b] = [await first, await second];
    result.textContent = signal.aborted ? "Stopped." : verdict(a, b);
    controller = null;
    busy(false);
  }
  const form = h("form", {
    class: "ask",
    onsubmit: (event) => {
      event.preventDefault();
      if (controller) controller.abort();
      else if (prompt.value.trim()) compare();
    },
    onkeydown: (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.target !== prompt) return;
      event.preventDefault();
      if (!controller) form.requestSubmit();
    },
  }, field("Prompt", prompt), h("div", { class: "row" },
    h("label", { class: "check" }, together, h("span", {}, "Both at once (then each slows the other)")), go));
  main.onkeydown = (event) => {
    if (event.key === "Escape") controller?.abort();
  };
  autosize(prompt);
  const alone = h("p", { class: "hint", hidden: true }, "This server offers one model: both sides ask it.");
  known().then((models) => (alone.hidden = models.length !== 1));
  main.replaceChildren(h("div", { class: "sheet wide" }, title("Compare"),
    h("p", { class: "lead" }, "Give two models, or two devices, the same prompt."), alone,
    form, result, h("div", { class: "sides" }, sides.map((one) => one.element))));
  return () => {
    main.onkeydown = null;
    controller?.abort();
  };
}
