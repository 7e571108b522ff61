// What is shown is all in the address: a link opens the same view, and the browser's back button goes back.

const NUMBERS = ["from", "to", "layer"];
const WORDS = ["metric", "stat", "plane", "scale", "ramp", "figure", "role", "theme"];

/** Reads a hash such as #/run/NAME?from=1&layer=44. */
export function parse(hash) {
  const [path, search = ""] = hash.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean);
  const view = { page: "runs", items: [] };
  if (parts[0] === "run" && parts[1]) Object.assign(view, { page: "run", run: decodeURIComponent(parts[1]) });
  else if (parts[0] === "server") view.page = "server";
  const parameters = new URLSearchParams(search);
  for (const name of NUMBERS) {
    const value = parameters.get(name);
    if (value !== null && /^-?\d{1,16}$/.test(value)) view[name] = Number(value);
  }
  for (const name of WORDS) if (parameters.has(name)) view[name] = parameters.get(name).slice(0, 160);
  view.items = (parameters.get("items") ?? "").split(",").filter((item) => /^\d{1,9}$/.test(item)).map(Number).slice(0, 7);
  return view;
}

export function format(view) {
  const path = view.page === "run" ? `run/${encodeURIComponent(view.run)}` : view.page;
  const parameters = new URLSearchParams();
  for (const name of [...NUMBERS, ...WORDS]) {
    if (view[name] !== undefined && view[name] !== null) parameters.set(name, view[name]);
  }
  if (view.items.length) parameters.set("items", view.items.join(","));
  const search = parameters.toString().replaceAll("%2C", ",");
  return `#/${path}${search ? `?${search}` : ""}`;
}

/** The current view; tells of changes by events "change". */
class Views extends EventTarget {
  constructor() {
    super();
    this.now = parse(location.hash);
    window.addEventListener("popstate", () => this.#read());
    window.addEventListener("hashchange", () => this.#read());
  }

  #read() {
    if (format(parse(location.hash)) === format(this.now)) return;
    const before = this.now;
    this.now = parse(location.hash);
    this.#tell(before);
  }

  /** Changes some of it; undefined takes a part away. */
  change(patch) {
    const before = this.now;
    this.now = { ...this.now, ...patch };
    if (format(before) === format(this.now)) return;
    history.pushState(null, "", format(this.now));
    this.#tell(before);
  }

  #tell(before) {
    this.dispatchEvent(new CustomEvent("change", { detail: { before, now: this.now } }));
  }
}

export const views = new Views();
