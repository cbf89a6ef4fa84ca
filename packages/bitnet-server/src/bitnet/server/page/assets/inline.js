// Markdown within a line: emphasis, code, links. One pass from left to right; nesting is bounded, and with it the time
// that the end of an emphasis or a link takes. The result is DOM nodes; HTML in the text stays text.

import { h } from "./dom.js";
import { math } from "./math.js";

const DEEPEST = 24; // openers at a time: looking for one costs so much at most
const LONGEST_URL = 2000;
const PLAIN = /[^\\`*_~[\]!<h\n$]+/y; // none of the characters that `step` looks at
const LINK = new RegExp(`\\( {0,3}(<[^<>\\n]{0,${LONGEST_URL}}>|[^\\s()]{0,${LONGEST_URL}}(?:\\([^\\s()]{0,200}\\)[^\\s()]{0,200})?)(?: {1,3}"[^"\\n]{0,300}")? {0,3}\\)`, "y");
const BARE = new RegExp(`https?://[^\\s<>"\`]{1,${LONGEST_URL}}`, "y");
const ANGLE = new RegExp(`<((?:https?://|mailto:)[^\\s<>]{1,${LONGEST_URL}})>`, "y");
const FORMULA = /\$\$([^$]{1,4000})\$\$|\$(?![\s$])([^$\n]{0,999}[^$\s\\])\$(?!\d)|\\\(((?:[^\\]|\\[^()[\]]){1,1000})\\\)|\\\[((?:[^\\]|\\[^()[\]]){1,1000})\\\]/y;
const BREAK = /<br ?\/?>/iy;
const PUNCTUATION = /[!-/:-@[-`{-~]/;

/** A link's address if it leads to the web or to mail; null for any other, such as `javascript:` or a path here. */
export function safeUrl(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

const anchor = (url, children) => h("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow" }, children);

/** Neighbouring strings as one. */
function joined(pieces) {
  const result = [];
  for (const piece of pieces) {
    if (typeof piece === "string" && typeof result.at(-1) === "string") result[result.length - 1] += piece;
    else result.push(piece);
  }
  return result;
}

class Inline {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.out = []; // finished nodes and strings
    this.open = []; // openers: {mark, size, index in `out`}
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    return pattern.exec(this.text);
  }

  push(mark, size, literal) {
    if (this.open.length < DEEPEST) this.open.push({ mark, size, index: this.out.length });
    this.out.push(literal);
  }

  /** Takes the openers above `depth` away (they stay text), and returns what followed that one. */
  close(depth) {
    const opener = this.open[depth];
    this.open.splice(depth);
    const inner = this.out.splice(opener.index + 1);
    this.out.pop();
    return joined(inner);
  }

  opener(mark, most) {
    return this.open.findLastIndex((one) => one.mark === mark && one.size <= most);
  }

  emphasis(mark) {
    let end = this.at;
    while (this.text[end] === mark) end += 1;
    let size = end - this.at;
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[end] ?? " ";
    this.at = end;
    const word = (char) => !/\s/.test(char) && !PUNCTUATION.test(char);
    const inside = mark === "_" && word(before) && word(after); // snake_case
    const opens = !/\s/.test(after) && !inside;
    const closes = !/\s/.test(before) && !inside;
    if (mark === "~" && size !== 2) return void this.out.push(mark.repeat(size));
    while (closes && size > 0) {
      const depth = this.opener(mark, size);
      if (depth < 0 || this.open[depth].index === this.out.length - 1) break;
      const used = this.open[depth].size;
      const tag = mark === "~" ? "del" : used === 2 ? "strong" : "em";
      this.out.push(h(tag, {}, this.close(depth)));
      size -= used;
    }
    if (size > 3 || !opens) {
      if (size) this.out.push(mark.repeat(size));
      return;
    }
    if (size >= 2) this.push(mark, 2, mark.repeat(2));
    if (size % 2) this.push(mark, 1, mark);
  }

  code() {
    let end = this.at;
    while (this.text[end] === "`") end += 1;
    const size = end - this.at;
    let from = end;
    for (;;) {
      const start = this.text.indexOf("`", from);
      if (start < 0) break;
      let stop = start;
      while (this.text[stop] === "`") stop += 1;
      if (stop - start === size) {
        const inner = this.text.slice(end, start).replaceAll("\n", " ");
        this.out.push(h("code", {}, inner.trim() && /^ .* $/.test(inner) ? inner.slice(1, -1) : inner));
        this.at = stop;
        return;
      }
      from = stop;
    }
    this.out.push("`".repeat(size));
    this.at = end;
  }

  endLink() {
    this.at += 1;
    const depth = this.opener("[", 2);
    if (depth < 0) return void this.out.push("]");
    const { size } = this.open[depth];
    const found = this.match(LINK);
    if (!found) {
      this.open.splice(depth, 1);
      return void this.out.push("]");
    }
    this.at += found[0].length;
    const inner = this.close(depth);
    const url = safeUrl(found[1].replace(/^<|>$/g, ""));
    if (size === 2) inner.unshift("Image: "); // a picture would be fetched from elsewhere: its address is linked instead
    if (url === null) this.out = this.out.concat(inner, ` (${found[1]})`);
    else this.out.push(anchor(url, inner.map((node) => (node.tagName === "A" ? node.textContent : node))));
  }

  step() {
    const plain = this.match(PLAIN);
    if (plain) {
      this.out.push(plain[0]);
      this.at += plain[0].length;
      return;
    }
    const char = this.text[this.at];
    const next = this.text[this.at + 1] ?? "";
    if ((char === "$" || (char === "\\" && (next === "(" || next === "["))) && this.formula()) return;
    if (char === "\\" && (PUNCTUATION.test(next) || next === "\n")) {
      this.out.push(next === "\n" ? h("br") : next);
      this.at += 2;
    } else if (char === "`") this.code();
    else if (char === "*" || char === "_" || char === "~") this.emphasis(char);
    else if (char === "[") {
      this.push("[", 1, "[");
      this.at += 1;
    } else if (char === "!" && next === "[") {
      this.push("[", 2, "![");
      this.at += 2;
    } else if (char === "]") this.endLink();
    else this.address(char);
  }

  /** A formula in TeX's marks; false where there is none, or none that is understood. */
  formula() {
    const found = this.match(FORMULA);
    if (!found) return false;
    const text = found.slice(1).find((part) => part !== undefined);
    const element = math(text, found[1] !== undefined || found[4] !== undefined);
    this.out.push(element ?? h("code", { class: "tex" }, found[0]));
    this.at += found[0].length;
    return true;
  }

  address(char) {
    let found = null;
    if (char === "<") {
      if ((found = this.match(ANGLE))) this.out.push(anchor(safeUrl(found[1]) ?? "about:blank", [found[1]]));
      else if ((found = this.match(BREAK))) this.out.push(h("br"));
    } else if (char === "h" && !/\w/.test(this.text[this.at - 1] ?? "") && this.opener("[", 2) < 0 && (found = this.match(BARE))) {
      found[0] = found[0].replace(/[.,;:!?*_~)'\]]{1,50}$/, "");
      const url = safeUrl(found[0]);
      this.out.push(url ? anchor(url, [found[0]]) : found[0]);
    } else if (char === "\n") {
      this.out.push(this.text.slice(Math.max(0, this.at - 2), this.at) === "  " ? h("br") : "\n");
      this.at += 1;
      return;
    }
    this.at += found ? found[0].length : 1;
    if (!found) this.out.push(char);
  }

  run() {
    while (this.at < this.text.length) this.step();
    return joined(this.out);
  }
}

/** The nodes of one paragraph's text. */
export const inline = (text) => new Inline(text).run();
