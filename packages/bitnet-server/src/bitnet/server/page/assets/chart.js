// A small line chart in SVG: a few series over the last minutes.

import { h, refill, s } from "./dom.js";

const WIDTH = 320;
const HEIGHT = 96;
const MAX_POINTS = 150;
const SERIES = 4;

/** A number as people read it: three digits, with the letter of its thousands. */
export function short(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, " G"], [1e6, " M"], [1e4, " k"]]) {
    if (size >= unit) return `${Number((value / (letter === " k" ? 1e3 : unit)).toPrecision(3))}${letter}`;
  }
  return String(Number(value.toPrecision(3)));
}

/** A value with its unit; less than a second is told in milliseconds. */
const withUnit = (value, unit) =>
  (unit === "s" && value !== null && value < 1 ? `${short(value * 1000)} ms` : `${short(value)} ${unit}`).trim();

export class Chart {
  constructor(title, unit, help) {
    this.title = title;
    this.unit = unit;
    this.series = new Map();
    this.plot = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", preserveAspectRatio: "none" });
    this.top = h("span", { class: "top", "aria-hidden": "true" });
    this.legend = h("ul", { class: "legend" });
    this.element = h("figure", { class: "chart" },
      h("figcaption", {}, h("h2", {}, title), help && h("p", { class: "hint" }, help)),
      h("div", { class: "plot" }, this.plot, this.top), this.legend);
  }

  /** Adds the newest value of each series; the busiest few are drawn. */
  add(values) {
    for (const [name, value] of values) {
      if (!this.series.has(name)) this.series.set(name, []);
      this.series.get(name).push(value);
    }
    for (const list of this.series.values()) if (list.length > MAX_POINTS) list.shift();
    this.draw();
  }

  draw() {
    const highest = (list) => list.reduce((most, value) => Math.max(most, value ?? 0), 0);
    const busiest = new Set([...this.series.values()].sort((a, b) => highest(b) - highest(a)).slice(0, SERIES));
    const shown = [...this.series].filter(([, list]) => busiest.has(list));
    const most = highest(shown.map(([, list]) => highest(list))) || 1;
    const lines = shown.flatMap(([, list], index) => {
      const offset = MAX_POINTS - list.length;
      const place = (value, at) => `${(((offset + at) / (MAX_POINTS - 1)) * WIDTH).toFixed(1)},${(HEIGHT - 2 - (value / most) * (HEIGHT - 8)).toFixed(1)}`;
      const runs = [[]];
      list.forEach((value, at) => (value === null ? runs.at(-1).length && runs.push([]) : runs.at(-1).push(place(value, at))));
      return runs.filter((run) => run.length).map((run) =>
        s("polyline", { class: `line series-${index}${run.length > 1 ? "" : " dot"}`, points: (run.length > 1 ? run : [run[0], run[0]]).join(" ") }));
    });
    refill(this.plot, [[0.25, 0.5, 0.75].map((y) => s("line", { class: "rule", x1: 0, x2: WIDTH, y1: HEIGHT * y, y2: HEIGHT * y })), lines]);
    const last = (list) => list.findLast((value) => value !== null) ?? null;
    const said = shown.map(([name, list]) => `${name ? `${name}: ` : ""}${withUnit(last(list), this.unit)}`);
    this.plot.setAttribute("aria-label", `${this.title}, last ${said.join("; ") || "no value yet"}`);
    this.top.textContent = withUnit(most, this.unit);
    refill(this.legend, shown.map(([name, list], index) =>
      h("li", {}, h("span", { class: `swatch series-${index}`, "aria-hidden": "true" }), `${name} `, h("strong", {}, withUnit(last(list), this.unit)))));
  }
}
