// The server's own figures, read from /metrics every two seconds while this view is seen. What is counted is drawn over
// the last ten seconds, so that a line shows how much there is to do and not when it was read.

import { getText } from "./api.js";
import { Chart, short } from "./chart.js";
import { h, scrollable } from "./dom.js";
import { problem } from "./message.js";
import { parse, points } from "./prometheus.js";

const EVERY = 2000;
const SPAN = 10_000;
const OWN = /^bitnet[_:]/;
const ABBREVIATIONS = { http: "HTTP", kv: "KV" };

// What is looked at most comes first, and what belongs together is in one chart; every other family has its own.
const CHARTS = [
  { title: "Tokens", families: ["bitnet_tokens"] },
  { title: "Requests", families: ["bitnet_requests_running", "bitnet_requests_waiting"], help: "Those that take part in steps, and those that wait for a place" },
  { title: "Time to first token", families: ["bitnet_time_to_first_token_seconds"] },
  { title: "Time between tokens", families: ["bitnet_inter_token_seconds"] },
  { title: "KV cache", families: ["bitnet_kv_blocks", "bitnet_kv_blocks_used", "bitnet_kv_blocks_cached"], help: "All blocks, those that generations hold, and those whose content can be used again" },
];
const PLACED = new Set(CHARTS.flatMap((chart) => chart.families));
const FACTS = /_info$/; // always 1: its labels are told in the table

const words = (name) => {
  const text = name.replace(OWN, "").replace(/_(total|seconds|bytes)$/, "").split("_").map((word) => ABBREVIATIONS[word] ?? word).join(" ");
  return text[0].toUpperCase() + text.slice(1);
};

function unit({ name, kind }) {
  const base = /_seconds(_total)?$/.test(name) ? "s" : /_bytes(_total)?$/.test(name) ? "B" : "";
  return kind === "counter" ? `${base}/s` : base;
}

function table(families) {
  const rows = families.flatMap((family) => family.samples)
    .filter(({ name }) => !/_(bucket|created)$/.test(name))
    .map(({ name, labels, value }) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)),
      h("td", {}, Object.entries(labels).map(([key, text]) => `${key}=${text}`).join(", ")), h("td", { class: "right" }, short(value))));
  return h("table", {}, h("caption", { class: "visually-hidden" }, "All values"), h("thead", {}, h("tr", {}, ["Name", "Labels", "Value"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows));
}

/** The view; returns what ends it. */
export function show(main, { title }) {
  const charts = new Map();
  const grid = h("div", { class: "charts" });
  const trouble = h("div", {});
  const values = h("div", { class: "table", ...scrollable("All values") });
  const all = h("details", {}, h("summary", {}, "All values"), values);
  let readings = []; // of the last SPAN milliseconds, the oldest first
  let timer = 0;
  let ended = false;
  function draw(families, now) {
    readings = readings.filter((one) => one.now > now - SPAN - EVERY / 2);
    const before = readings[0];
    const seconds = before ? (now - before.now) / 1000 : 1;
    const drawn = [...families.values()].filter(({ name, samples }) => OWN.test(name) && !FACTS.test(name) && samples.length && !PLACED.has(name));
    const own = drawn.map(({ name, help }) => ({ title: words(name), families: [name], help }));
    for (const wanted of [...CHARTS, ...own]) {
      const found = wanted.families.map((name) => families.get(name)).filter(Boolean);
      const added = new Map(found.flatMap((family) => {
        const values = [...points(before?.families.get(family.name), family, seconds)];
        return found.length > 1 ? values.map(([name, value]) => [`${words(family.name)} ${name}`.trim(), value]) : values;
      }));
      if (!found.length) continue;
      if (!charts.has(wanted.title)) {
        const chart = new Chart(wanted.title, unit(found[0]), wanted.help ?? found[0].help);
        charts.set(wanted.title, chart);
        grid.append(chart.element);
      }
      charts.get(wanted.title).add(added);
    }
    readings.push({ families, now });
    if (all.open) values.replaceChildren(table([...families.values()]));
  }
  async function load() {
    clearTimeout(timer);
    try {
      if (!document.hidden) draw(parse(await getText("metrics")), performance.now());
      trouble.replaceChildren();
    } catch (error) {
      if (!ended && !trouble.childElementCount) trouble.replaceChildren(problem(error, load));
    }
    if (!ended) timer = setTimeout(load, EVERY);
  }
  all.addEventListener("toggle", () => readings.length && values.replaceChildren(table([...readings.at(-1).families.values()])));
  main.replaceChildren(h("div", { class: "sheet wide" }, title("Metrics"),
    h("p", { class: "lead" }, "The last five minutes, as long as this view stays open. What is counted is drawn as its rate over ten seconds."), trouble, grid, all));
  load();
  return () => {
    ended = true;
    clearTimeout(timer);
  };
}
