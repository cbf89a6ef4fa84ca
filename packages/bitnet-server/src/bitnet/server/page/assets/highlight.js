// Colours for code: comments, strings, numbers and the words most languages share. A help for the eye, not a parser;
// it never changes the text.

import { h } from "./dom.js";

const WORDS = new Set(
  ("and as assert async await auto begin bool boolean break byte case catch char class const continue def default defer del do double elif else end " +
    "enum except export extends extern false False final finally float fn for from func function global if impl import in int interface is lambda let " +
    "local long loop match mod mut new nil None nonlocal not null or package pass private pub public raise ref return self short static string struct " +
    "super switch then this throw trait true True try type typedef typeof undefined union unsafe unsigned use using var void where while with yield " +
    "SELECT FROM WHERE INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE JOIN ON GROUP BY ORDER LIMIT AND OR NOT NULL AS").split(" "),
);
const HASH = new Set(["", "py", "python", "sh", "bash", "shell", "zsh", "ruby", "rb", "yaml", "yml", "toml", "perl", "r", "make", "makefile", "dockerfile", "nix", "console"]);
const PROSE = new Set(["text", "txt", "markdown", "md", "plain"]);
const LONGEST = 50_000;

const ENDINGS = {
  python: "py", javascript: "js", typescript: "ts", bash: "sh", shell: "sh", zsh: "sh", console: "sh", ruby: "rb", rust: "rs", markdown: "md", perl: "pl",
  csharp: "cs", "c#": "cs", "c++": "cpp", kotlin: "kt", haskell: "hs", yaml: "yml", makefile: "mk", text: "txt", plain: "txt", "": "txt",
};

/** How the name of a file in that language ends. */
export function ending(language) {
  const name = language.toLowerCase();
  return ENDINGS[name] ?? (/^[a-z0-9]{1,10}$/.test(name) ? name : "txt");
}

/** Pieces of code, some wrapped in spans with a class. */
export function highlight(text, language) {
  const name = language.toLowerCase();
  if (PROSE.has(name) || text.length > LONGEST) return [text];
  const comment = HASH.has(name) ? "#[^\\n]*" : name === "sql" || name === "lua" ? "--[^\\n]*" : "//[^\\n]*|/\\*[^]*?(?:\\*/|$)";
  const token = new RegExp(`(${comment})|("(?:[^"\\\\\\n]|\\\\.)*"?|'(?:[^'\\\\\\n]|\\\\.)*'?)|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g");
  const pieces = [];
  let at = 0;
  for (const found of text.matchAll(token)) {
    const kind = found[1] ? "comment" : found[2] ? "string" : found[3] ? "number" : WORDS.has(found[4]) ? "word" : null;
    if (!kind) continue;
    pieces.push(text.slice(at, found.index), h("span", { class: `code-${kind}` }, found[0]));
    at = found.index + found[0].length;
  }
  pieces.push(text.slice(at));
  return pieces;
}
