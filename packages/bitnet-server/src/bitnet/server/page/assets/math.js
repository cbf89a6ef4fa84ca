// Mathematics: the part of TeX that models write, as MathML, which browsers show by themselves. What is not known here
// is shown as it was written.

import { m } from "./dom.js";
import { ABOVE, ALPHABETS, BELOW, ENVIRONMENTS, FUNCTIONS, LARGE, LETTERS, LIMITS, OPERATORS, SPACES } from "./math_symbols.js";

const DEEPEST = 40;
const MAX_LETTERS = 4000;
const TOKEN = /\\[a-zA-Z]+|\\[^]|\d+(?:\.\d+)?|\s+|[^]/gu;
const TEXTS = new Set(["text", "textrm", "textbf", "textit", "textsf", "texttt", "mathrm", "mathit", "operatorname", "mbox"]);
const PASSED_OVER = new Set([
  "displaystyle", "textstyle", "limits", "nolimits", "nonumber", "notag", "hline", "middle",
  ...["big", "Big", "bigg", "Bigg"].flatMap((size) => [size, `${size}l`, `${size}r`, `${size}m`]),
]);
const FRACTIONS = new Set(["frac", "dfrac", "tfrac", "cfrac"]);
const END = Symbol("end");

class Unknown extends Error {}

const row = (nodes) => (nodes.length === 1 ? nodes[0] : m("mrow", {}, nodes));
const fence = (sign, form) => m("mo", { form, fence: "true", stretchy: "true" }, sign);

/** A letter or digit in one of Unicode's alphabets. */
function inAlphabet(letter, [capital, small, digit, elsewhere]) {
  const at = elsewhere.indexOf(letter);
  if (at >= 0) return elsewhere[at + 1];
  if (/[A-Z]/.test(letter)) return String.fromCodePoint(capital + letter.charCodeAt(0) - 65);
  if (/[a-z]/.test(letter)) return String.fromCodePoint(small + letter.charCodeAt(0) - 97);
  if (/\d/.test(letter) && digit) return String.fromCodePoint(digit + Number(letter));
  return letter;
}

class Reader {
  constructor(text, display) {
    this.tokens = text.match(TOKEN) ?? [];
    this.display = display;
    this.at = 0;
    this.depth = 0;
  }

  /** The token that comes, spaces passed over; END after the last. */
  get next() {
    while (this.tokens[this.at]?.trim() === "" && this.tokens[this.at] !== "\\ ") this.at += 1;
    return this.tokens[this.at] ?? END;
  }

  take() {
    const token = this.next;
    if (token === END) throw new Unknown("the end");
    this.at += 1;
    return token;
  }

  taken(token) {
    if (this.next !== token) return false;
    this.at += 1;
    return true;
  }

  need(token) {
    if (!this.taken(token)) throw new Unknown(token);
  }

  /** The nodes up to one of the tokens in `ends`, which stays. */
  nodes(ends) {
    const found = [];
    this.depth += 1;
    if (this.depth > DEEPEST) throw new Unknown("depth");
    while (!ends.includes(this.next)) {
      const node = this.scripted();
      if (node) found.push(node);
    }
    this.depth -= 1;
    return found;
  }

  /** An argument: a group in braces, or one token; of a number its first digit. */
  argument() {
    if (this.next !== END && /^\d\d/.test(this.next)) {
      const digits = this.take();
      this.at -= 1;
      this.tokens[this.at] = digits.slice(1);
      return m("mn", {}, digits[0]);
    }
    return this.next === "{" ? this.atom() : (this.atom() ?? m("mrow"));
  }

  /** The text of a group in braces, as written. */
  words() {
    this.need("{");
    let text = "";
    for (let open = 1; ; ) {
      const token = this.tokens[this.at++];
      if (token === undefined) throw new Unknown("}");
      if (token === "{") open += 1;
      if (token === "}") open -= 1;
      if (open === 0) return text;
      text += /^\\[^a-zA-Z]$/.test(token) ? token[1] : token;
    }
  }

  /** An atom with what is above, below, and beside it. */
  scripted() {
    const limits = this.display && this.hasLimits();
    let base = this.atom();
    let above = null;
    let below = null;
    while (this.next === "^" || this.next === "_" || this.next === "'") {
      const token = this.take();
      if (token === "'") {
        let primes = "′";
        while (this.taken("'")) primes += "′";
        above = above ? row([above, m("mo", {}, primes)]) : m("mo", {}, primes);
      } else if (token === "^") above = above ? row([above, this.argument()]) : this.argument();
      else if (below) throw new Unknown("_");
      else below = this.argument();
    }
    if (!above && !below) return base;
    base ??= m("mrow");
    if (above && below) return m(limits ? "munderover" : "msubsup", {}, base, below, above);
    if (below) return m(limits ? "munder" : "msub", {}, base, below);
    return m(limits ? "mover" : "msup", {}, base, above);
  }

  /** Whether what comes has its limits above and below it. */
  hasLimits() {
    const { next } = this;
    if (next === END || next[0] !== "\\") return false;
    const name = next.slice(1);
    return LIMITS.has(name) || name === "underbrace" || name === "overbrace" || (LARGE.has(name) && !"∫∬∭∮".includes(LARGE.get(name)));
  }

  /** One thing; null for what shows nothing. */
  atom() {
    const token = this.take();
    if (token === "{") {
      const found = this.nodes(["}", END]);
      this.need("}");
      return row(found);
    }
    if (token === "}" || token === "^" || token === "_" || token === "&" || token === "$") throw new Unknown(token);
    if (token === "~") return this.space(" ");
    if (/^\d/.test(token)) return m("mn", {}, token);
    if (/^\p{L}$/u.test(token)) return m("mi", {}, token);
    if (token[0] === "\\") return this.command(token.slice(1));
    return m("mo", "()[]|".includes(token) ? { stretchy: "false" } : {}, token === "-" ? "−" : token === "*" ? "∗" : token);
  }

  space(name) {
    return m("mspace", { width: `${SPACES.get(name)}em` });
  }

  command(name) {
    if (LETTERS.has(name)) return m("mi", /[A-Z…⋯⋮⋱]/.test(name[0]) ? { mathvariant: "normal" } : {}, LETTERS.get(name));
    if (OPERATORS.has(name)) return m("mo", { stretchy: "false" }, OPERATORS.get(name));
    if (LARGE.has(name)) return m("mo", { largeop: "true", movablelimits: this.display ? "false" : "true" }, LARGE.get(name));
    if (FUNCTIONS.has(name) || LIMITS.has(name)) return this.named(name);
    if (SPACES.has(name)) return this.space(name);
    if (TEXTS.has(name)) return name === "operatorname" ? this.named(this.words()) : m("mtext", {}, this.words().replaceAll(" ", "\u00a0"));
    if (FRACTIONS.has(name)) return m("mfrac", {}, this.argument(), this.argument());
    if (ABOVE.has(name)) return m("mover", { accent: "true" }, this.argument(), m("mo", { stretchy: String(/wide|over/.test(name)) }, ABOVE.get(name)));
    if (BELOW.has(name)) return m("munder", { accentunder: "true" }, this.argument(), m("mo", { stretchy: "true" }, BELOW.get(name)));
    if (ALPHABETS.has(name)) return this.letters(ALPHABETS.get(name));
    if (PASSED_OVER.has(name)) return null;
    return this.construct(name);
  }

  /** A function's name, with the space that follows it. */
  named(name) {
    const spaced = this.next !== END && /^[\\\p{L}\d]/u.test(this.next) && !this.next.startsWith("\\l") && !this.next.startsWith("\\r");
    const node = m("mi", { mathvariant: "normal" }, name);
    return spaced ? row([node, m("mspace", { width: "0.17em" })]) : node;
  }

  letters(alphabet) {
    const text = this.next === "{" ? this.words() : this.take();
    if (!/^[\p{L}\d ]+$/u.test(text)) throw new Unknown(text);
    return m(/^\d/.test(text) ? "mn" : "mi", {}, [...text].map((letter) => inAlphabet(letter, alphabet)).join(""));
  }

  construct(name) {
    switch (name) {
      case "sqrt": {
        if (!this.taken("[")) return m("msqrt", {}, this.argument());
        const degree = row(this.nodes(["]", END]));
        this.need("]");
        return m("mroot", {}, this.argument(), degree);
      }
      case "binom": return row([fence("(", "prefix"), m("mfrac", { linethickness: "0" }, this.argument(), this.argument()), fence(")", "postfix")]);
      case "left": {
        const open = this.delimiter();
        const inner = this.nodes(["\\right", END]);
        this.need("\\right");
        return row([fence(open, "prefix"), row(inner), fence(this.delimiter(), "postfix")]);
      }
      case "overset": case "stackrel": {
        const above = this.argument();
        return m("mover", {}, this.argument(), above);
      }
      case "underset": {
        const below = this.argument();
        return m("munder", {}, this.argument(), below);
      }
      case "boxed": return m("mrow", { class: "boxed" }, this.argument());
      case "tag": return m("mtext", {}, `\u2003(${this.words()})`);
      case "pmod": return row([m("mspace", { width: "1em" }), m("mo", {}, "("), m("mi", {}, "mod"), m("mspace", { width: "0.33em" }), this.argument(), m("mo", {}, ")")]);
      case "bmod": return m("mo", { lspace: "0.28em", rspace: "0.28em" }, "mod");
      case "not": {
        const node = this.atom();
        node.textContent += "\u0338";
        return node;
      }
      case "begin": return this.environment(this.words());
      default: throw new Unknown(name);
    }
  }

  delimiter() {
    const token = this.take();
    if (token === ".") return "";
    if (token[0] !== "\\") return token;
    const sign = OPERATORS.get(token.slice(1));
    if (!sign) throw new Unknown(token);
    return sign;
  }

  environment(name) {
    if (!ENVIRONMENTS.has(name)) throw new Unknown(name);
    if (name === "array" || name === "alignat") this.words(); // how columns are aligned
    const [open, close] = ENVIRONMENTS.get(name);
    const table = this.rows("\\end");
    this.need("\\end");
    if (this.words() !== name) throw new Unknown(name);
    if (/^(align|split)/.test(name)) table.setAttribute("class", "aligned");
    if (name === "cases") table.setAttribute("class", "cases");
    return row([open && fence(open, "prefix"), table, close && fence(close, "postfix")].filter(Boolean));
  }

  /** Rows and cells up to `end`, which stays. */
  rows(end) {
    const table = m("mtable");
    for (;;) {
      const cells = [];
      do cells.push(m("mtd", {}, this.nodes(["&", "\\\\", end, END]))); while (this.taken("&"));
      table.append(m("mtr", {}, cells));
      if (!this.taken("\\\\")) return table;
      if (this.next === end) return table;
    }
  }

  all() {
    const table = this.rows(END);
    if (this.next !== END) throw new Unknown(this.next);
    const [first, ...others] = table.children;
    return others.length || first.children.length > 1 ? [table] : [...first.firstChild.childNodes];
  }
}

/** The element of a formula; null where it is not understood. */
export function math(text, display) {
  if (text.length > MAX_LETTERS) return null;
  try {
    return m("math", { display: display ? "block" : "inline" }, new Reader(text, display).all());
  } catch (error) {
    if (error instanceof Unknown) return null;
    throw error;
  }
}
