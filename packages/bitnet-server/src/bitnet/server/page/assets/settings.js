// What the user has chosen: kept in this browser. The API key lasts as long as the tab (sessionStorage).

import { NONE } from "./sampling.js";

const NAME = "bitnet.settings";
const DEFAULTS = {
  ...NONE, theme: "auto", model: "", system: "", receipts: false, notify: false, presets: [],
};

function read() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(NAME) ?? "{}") };
  } catch {
    return { ...DEFAULTS };
  }
}

export const settings = read();

addEventListener("storage", (event) => event.key === NAME && Object.assign(settings, read())); // of another tab

export function change(values) {
  Object.assign(settings, values);
  try {
    localStorage.setItem(NAME, JSON.stringify(settings));
  } catch {
    // No storage is lent: the choice holds until the page is left.
  }
  if ("theme" in values) applyTheme();
}

export function applyTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = settings.theme === "auto" ? (dark ? "dark" : "light") : settings.theme;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
