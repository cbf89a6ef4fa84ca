// The Prometheus text format, and what can be drawn of it.

const SAMPLE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;

/** Families by name: `{name, kind, help, samples: [{name, labels, value}]}`. */
export function parse(text) {
  const families = new Map();
  const family = (name) => {
    if (!families.has(name)) families.set(name, { name, kind: "untyped", help: "", samples: [] });
    return families.get(name);
  };
  let current = null;
  for (const line of text.split("\n")) {
    const note = /^# (HELP|TYPE) (\S+) ?(.*)$/.exec(line);
    if (note) {
      current = family(note[2].replace(/_(total|created)$/, ""));
      if (note[2].endsWith("_created")) continue;
      if (note[1] === "HELP") current.help = note[3].replaceAll("\\n", " ");
      else current.kind = note[3];
      continue;
    }
    const found = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (!found) continue;
    const labels = Object.fromEntries([...(found[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [name, value.replace(/\\(.)/g, "$1")]));
    const value = found[3] === "+Inf" ? Infinity : found[3] === "-Inf" ? -Infinity : Number(found[3]);
    // prometheus_client writes a counter's family with or without `_total`; `_created` is when it began.
    if (found[1].endsWith("_created")) continue;
    const owner = current && found[1].startsWith(current.name) ? current : family(found[1]);
    owner.samples.push({ name: found[1], labels, value });
  }
  return families;
}

const labelled = ({ le, ...labels }) => Object.values(labels).join(" ");

function sums(family, suffix) {
  const result = new Map();
  for (const { name, labels, value } of family.samples) {
    if (suffix.some((end) => name === family.name + end)) result.set(labelled(labels), (result.get(labelled(labels)) ?? 0) + value);
  }
  return result;
}

/** What a quantile of new observations lies at, within the bucket it falls into; null where there were none. */
export function quantile(share, before, after) {
  const buckets = (family) => {
    const result = new Map();
    for (const { name, labels, value } of family?.samples ?? []) {
      if (!name.endsWith("_bucket")) continue;
      const edge = labels.le === "+Inf" ? Infinity : Number(labels.le);
      result.set(edge, (result.get(edge) ?? 0) + value);
    }
    return result;
  };
  const old = buckets(before);
  const counts = [...buckets(after)].sort((a, b) => a[0] - b[0]).map(([edge, count]) => [edge, count - (old.get(edge) ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  let low = 0;
  let below = 0;
  for (const [edge, count] of counts) {
    if (count >= share * total) return edge === Infinity ? low : low + ((edge - low) * (share * total - below)) / (count - below);
    low = edge;
    below = count;
  }
  return low;
}

/** The points that one family adds to its chart between two readings: `Map(series → value or null)`. */
export function points(before, after, seconds) {
  if (after.kind === "gauge" || after.kind === "untyped") return sums(after, [""]);
  if (after.kind === "histogram") {
    return new Map([["median", quantile(0.5, before, after)], ["95 %", quantile(0.95, before, after)]]);
  }
  if (after.kind !== "counter") return new Map();
  const old = before ? sums(before, ["", "_total"]) : null;
  const rates = [...sums(after, ["", "_total"])].map(([key, value]) => [key, old ? Math.max(0, value - (old.get(key) ?? 0)) / seconds : null]);
  return new Map(rates);
}
