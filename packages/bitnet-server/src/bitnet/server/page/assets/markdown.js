// Markdown as models write it: headings, lists, quotes, tables, fenced code. A text is cut into blocks, each with its
// source, so that while an answer grows only its last blocks are built again.

import { button, copyButton, download, fill, h, scrollable } from "./dom.js";
import { ending, highlight } from "./highlight.js";
import { inline } from "./inline.js";
import { math } from "./math.js";

const DEEPEST = 8;
const MAX_FORMULA_LINES = 100;
// No expression has two ways to match the same text: a hostile line costs time linear in its length.
const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: |$)/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const FORMULA = /^ {0,3}(\$\$|\\\[)/;
const ROW = /\|/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

const blank = (line) => line.trim() === "";
const indent = (line) => line.length - line.trimStart().length;
const starts = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) || FORMULA.test(line);

/** Cuts lines into blocks: `{kind, lines, …}`; deeper than DEEPEST everything is a paragraph. */
function cut(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (blank(lines[at])) {
      at += 1;
      continue;
    }
    const block = depth < DEEPEST ? special(lines, at, depth) : null;
    if (block) {
      blocks.push({ ...block, raw: lines.slice(at, block.end).join("\n") });
      at = block.end;
      continue;
    }
    let end = at + 1;
    while (end < lines.length && !blank(lines[end]) && !(depth < DEEPEST && starts(lines[end])) && !table(lines, end)) end += 1;
    const raw = lines.slice(at, end).join("\n");
    blocks.push({ kind: "paragraph", text: raw.replace(/^ +/gm, ""), raw });
    at = end;
  }
  return blocks;
}

const table = (lines, at) => ROW.test(lines[at]) && at + 1 < lines.length && lines[at + 1].includes("-") && ROW.test(lines[at + 1]) && DIVIDER.test(lines[at + 1]);

function special(lines, at, depth) {
  const line = lines[at];
  let found = FENCE.exec(line);
  if (found) return fence(lines, at, found);
  if ((found = HEADING.exec(line))) {
    return { kind: "heading", level: found[1].length, text: line.slice(found[0].length).trim().replace(/(^| )#+$/, ""), end: at + 1 };
  }
  if ((found = FORMULA.exec(line))) return formula(lines, at, found);
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (QUOTE.test(line)) {
    let end = at + 1;
    while (end < lines.length && !blank(lines[end]) && (QUOTE.test(lines[end]) || !starts(lines[end]))) end += 1;
    return { kind: "quote", inner: cut(lines.slice(at, end).map((one) => one.replace(QUOTE, "")), depth + 1), end };
  }
  if (ITEM.test(line)) return list(lines, at, depth);
  if (table(lines, at)) {
    let end = at + 2;
    while (end < lines.length && !blank(lines[end]) && ROW.test(lines[end])) end += 1;
    return { kind: "table", rows: [at, ...range(at + 2, end)].map((row) => cells(lines[row])), align: cells(lines[at + 1]), end };
  }
  return null;
}

const range = (from, to) => Array.from({ length: Math.max(0, to - from) }, (_, index) => from + index);

function fence(lines, at, found) {
  let end = at + 1;
  const closes = (line) => line.trim().startsWith(found[1]) && line.trim() === found[1][0].repeat(line.trim().length);
  while (end < lines.length && !closes(lines[end])) end += 1;
  const margin = indent(lines[at]);
  const code = lines.slice(at + 1, end).map((line) => line.slice(Math.min(margin, indent(line))));
  return { kind: "code", language: found[2].trim().split(/\s/)[0], text: code.join("\n"), end: Math.min(end + 1, lines.length) };
}

/** A formula of its own, to the line that ends with its mark; null where there is no such line, or more text after it. */
function formula(lines, at, [begin, mark]) {
  const close = mark === "$$" ? "$$" : "\\]";
  for (let end = at; end < Math.min(lines.length, at + MAX_FORMULA_LINES) && !(blank(lines[end]) && mark === "$$"); end += 1) {
    const line = end === at ? lines[at].slice(begin.length) : lines[end];
    const stop = line.indexOf(close);
    if (stop < 0) continue;
    if (!blank(line.slice(stop + close.length))) return null;
    const inner = end === at ? [line.slice(0, stop)] : [lines[at].slice(begin.length), ...lines.slice(at + 1, end), line.slice(0, stop)];
    return { kind: "formula", text: inner.join("\n"), end: end + 1 };
  }
  return null;
}

function list(lines, at, depth) {
  const [, , first] = ITEM.exec(lines[at]);
  const sort = first.at(-1);
  const items = [];
  let loose = false;
  let end = at;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]);
    if (!found || found[2].at(-1) !== sort || RULE.test(lines[end])) break;
    const width = found[3].length > 4 || !found[3] ? found[1].length + found[2].length + 1 : found[0].length;
    const own = [lines[end].slice(width)];
    end += 1;
    while (end < lines.length) {
      const line = lines[end];
      if (blank(line)) {
        let next = end + 1;
        while (next < lines.length && blank(lines[next])) next += 1;
        if (next === lines.length) break;
        const inner = indent(lines[next]) >= width;
        if (!inner && !ITEM.test(lines[next])) break;
        end = next;
        if (!inner) {
          loose = true;
          break;
        }
        own.push("");
        continue;
      }
      if (indent(line) >= width) own.push(line.slice(width));
      else if (starts(line) || blank(lines[end - 1])) break;
      else own.push(line.trimStart());
      end += 1;
    }
    loose ||= own.some((line, index) => blank(line) && index > 0 && index < own.length - 1);
    items.push(cut(own, depth + 1));
  }
  return { kind: "list", start: /\d/.test(first) ? Number.parseInt(first, 10) : null, items, loose, end };
}

const cells = (line) =>
  line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).slice(0, 64).map((cell) => cell.trim().replaceAll("\\|", "|"));

function codeBlock(block) {
  const label = block.language || "text";
  return h(
    "figure",
    { class: "code" },
    h("figcaption", {}, h("span", {}, label),
      button("download", `Download the ${label} code`, () => download(`code.${ending(block.language)}`, "text/plain", block.text), { class: "quiet" }),
      copyButton(`Copy the ${label} code`, () => block.text)),
    h("pre", scrollable(`Code, ${label}`), h("code", {}, highlight(block.text, block.language))),
  );
}

function tableBlock(block) {
  const align = block.align.map((cell) => (/^:-+:$/.test(cell) ? "center" : /-:$/.test(cell) ? "right" : ""));
  const row = (tag, values) =>
    h("tr", {}, align.map((side, index) => h(tag, { class: side || null, scope: tag === "th" ? "col" : null }, inline(values[index] ?? ""))));
  const [head, ...body] = block.rows;
  return h(
    "div",
    { class: "table", ...scrollable("Table") },
    h("table", {}, h("thead", {}, row("th", head)), h("tbody", {}, body.map((values) => row("td", values)))),
  );
}

function item(blocks, loose) {
  const box = blocks[0]?.kind === "paragraph" ? /^\[([ xX])\] /.exec(blocks[0].text) : null;
  const mark = box && h("span", { class: "box", role: "img", "aria-label": box[1] === " " ? "to do" : "done" }, box[1] === " " ? "☐ " : "☑ ");
  return h("li", {}, mark, blocks.map((block, index) => {
    const text = box && index === 0 ? block.text.slice(4) : block.text;
    return block.kind === "paragraph" && !loose ? inline(text) : node({ ...block, text });
  }));
}

/** The element of a block. Headings begin at h3: the page has h1, each message h2. */
function node(block) {
  switch (block.kind) {
    case "heading": return h(`h${Math.min(6, block.level + 2)}`, {}, inline(block.text));
    case "rule": return h("hr");
    case "quote": return h("blockquote", {}, block.inner.map(node));
    case "code": return codeBlock(block);
    case "formula": return math(block.text, true) ?? h("pre", { class: "tex", ...scrollable("Formula, as written") }, block.raw);
    case "table": return tableBlock(block);
    case "list": return h(block.start === null ? "ul" : "ol", { start: block.start }, block.items.map((blocks) => item(blocks, block.loose)));
    default: return h("p", {}, inline(block.text));
  }
}

/** Shows a text that grows in `element`: blocks whose source stayed the same keep their elements. */
export class Growing {
  constructor(element, onBlock = () => {}) {
    this.element = element;
    this.onBlock = onBlock;
    this.raws = [];
    this.finished = 0;
  }

  /** Shows all text so far; `onBlock(text)` gets each block that will not change any more. */
  show(text, done = false) {
    const blocks = cut(text.replace(/\r\n?/g, "\n").replaceAll("\t", "    ").split("\n"), 0);
    let same = 0;
    while (same < blocks.length && blocks[same].raw === this.raws[same]) same += 1;
    while (this.element.childElementCount > same) this.element.lastElementChild.remove();
    fill(this.element, blocks.slice(same).map(node));
    this.raws = blocks.map((block) => block.raw);
    for (; this.finished < blocks.length - (done ? 0 : 1); this.finished += 1) this.onBlock(blocks[this.finished].text ?? this.element.children[this.finished].textContent);
  }
}

/** Shows a finished text in a new element. */
export function markdown(text) {
  const element = h("div", { class: "prose" });
  new Growing(element).show(text, true);
  return element;
}
