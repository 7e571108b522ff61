// Numbers and times for people.

const PREFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];

/** Three significant digits, without an exponent where that is readable. */
export function short(value) {
  if (Number.isNaN(value) || value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e").replace("-", "−");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return Number(value.toPrecision(size >= 100 ? 4 : 3)).toString().replace("-", "−");
}

/** With a prefix: 4.19 M, 12 k. */
export function large(value) {
  for (const [size, prefix] of PREFIXES) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))} ${prefix}`;
  }
  return short(value);
}

export function whole(value) {
  return Number(value).toLocaleString("en-US");
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${Number(value.toPrecision(3))} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds < 0) seconds = 0;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Number((seconds / 3600).toFixed(1))} h`;
  return `${Number((seconds / 86400).toFixed(1))} days`;
}

/** How long ago a time in nanoseconds since 1970 was. */
export function ago(ns) {
  return `${duration(Date.now() / 1000 - ns / 1e9)} ago`;
}

export function moment(ns) {
  return new Date(ns / 1e6).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

/** An iteration, or the range that a point stands for. */
export function iterations(first, last) {
  return first === last ? `iteration ${whole(first)}` : `iterations ${whole(first)}–${whole(last)}`;
}

/** Ranks as ranges, 3, 8–15, and how many more there are of them. */
export function ranks(listed, number) {
  const parts = [];
  for (const rank of listed) {
    const last = parts.at(-1);
    if (last && last[1] === rank - 1) last[1] = rank;
    else parts.push([rank, rank]);
  }
  const more = number - listed.length;
  return parts.map(([from, to]) => (from === to ? from : `${from}–${to}`)).join(", ") + (more > 0 ? ` and ${whole(more)} more` : "");
}
