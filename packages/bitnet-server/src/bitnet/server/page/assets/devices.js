// The devices view: what `bitnet devices --json` says on the server's machine.

import { getJSON } from "./api.js";
import { announce, button, h, icon } from "./dom.js";
import { problem } from "./message.js";

const EVERY = 15_000;
const STATES = { ok: "ready" };

const gigabytes = (bytes) => (bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(1)} GiB` : `${Math.round(bytes / 2 ** 20)} MiB`);
const row = (name, value) => value && h("div", {}, h("dt", {}, name), h("dd", {}, value));

function device(one, selected) {
  const proof = one.proof && (one.proof.passed ? "kernels gave the right result" : `failed: ${one.proof.error}`);
  const chosen = one.name === selected;
  return h("li", { class: chosen ? "device chosen" : "device" },
    h("h3", {}, h("code", {}, one.name), chosen && h("span", { class: "tag good" }, icon("check"), "chosen")),
    h("p", {}, one.description),
    h("dl", { class: "pairs" },
      row("Vendor", one.vendor), row("Kind", one.type), row("Memory", one.memory ? gigabytes(one.memory) : ""),
      row("Driver", one.driver_version), row("Features", (one.features ?? []).join(", ")), row("Self-test", proof),
      Object.entries(one.details ?? {}).map(([name, value]) => row(name.replaceAll("_", " "), String(value)))));
}

function backend(one, selected) {
  const good = one.status === "ok";
  return h("section", { class: "backend" },
    h("h2", {}, one.name, h("span", { class: good ? "tag good" : "tag" }, STATES[one.status] ?? one.status.replaceAll("-", " "))),
    h("p", { class: "hint" }, [one.distribution, one.version].filter(Boolean).join(" ")),
    one.reason && h("p", {}, one.reason),
    one.hint && h("p", { class: "hint" }, one.hint),
    one.devices?.length > 0 && h("ul", { class: "cards" }, one.devices.map((found) => device(found, selected))));
}

/** The view; it asks again every quarter of a minute while it is seen. Returns what ends it. */
export function show(main, { title }) {
  const place = h("div", {}, h("p", { class: "hint" }, "Asking the server …"));
  let seen = "";
  async function load(byHand = false) {
    try {
      const found = await getJSON("devices");
      const text = JSON.stringify(found);
      if (text !== seen) {
        seen = text;
        const { backends, selected, summary } = found;
        const rank = (one) => (one.devices.some((device) => device.name === selected) ? 2 : one.status === "ok" ? 1 : 0);
        const sorted = [...backends].sort((a, b) => rank(b) - rank(a));
        place.replaceChildren(h("p", { class: "lead" }, summary), h("div", {}, sorted.map((one) => backend(one, selected))));
      }
      if (byHand) announce("The devices are up to date");
    } catch (error) {
      seen = "";
      place.replaceChildren(problem(error, () => load(true)));
    }
  }
  const timer = setInterval(() => document.hidden || load(), EVERY);
  main.replaceChildren(h("div", { class: "sheet" },
    h("div", { class: "heading" }, title("Devices"), button("again", "Ask again", () => load(true), { text: true })), place));
  load();
  return () => clearInterval(timer);
}
