// How the server does.

import { getJson } from "./api.js";
import { alertCard } from "./alerts.js";
import { fill, h } from "./dom.js";
import { ago, bytes, duration, ranks, whole } from "./format.js";

const POLL_SECONDS = 2;

export class ServerPage {
  constructor(root) {
    this.root = root;
    this.box = h("div", {});
  }

  async open() {
    fill(this.root, h("h1", {}, "Server"), this.box);
    await this.#read();
    this.timer = setInterval(() => { if (!document.hidden) this.#read().catch(() => {}); }, POLL_SECONDS * 1000);
  }

  dispose() {
    clearInterval(this.timer);
  }

  changed() {}

  async #read() {
    const [state, alerts] = await Promise.all([getJson("server"), getJson("alerts", { open: true, limit: 50 }).catch(() => null)]);
    const part = state.journal_limit_bytes ? state.journal_bytes / state.journal_limit_bytes : 0;
    const tiles = [
      ["waiting", whole(state.pending_iterations), "iterations not stored yet"],
      ["stored", whole(state.stored_iterations), "iterations since it began"],
      ["given up", whole(state.dropped_frames), "frames, by clients", state.dropped_frames > 0],
      ["journal", bytes(state.journal_bytes), `${Math.round(part * 100)} % of ${bytes(state.journal_limit_bytes)}`, part > 0.9],
      ["database", bytes(state.database_bytes), ""],
      ["disk", bytes(state.free_bytes), "free"],
      ...(state.set_aside ? [["set aside", whole(state.set_aside), "refused by the database", true]] : []),
      ["webhook", whole(state.webhook_waiting), state.webhook_failed ? `${whole(state.webhook_failed)} failed` : "waiting", state.webhook_failed > 0],
    ];
    fill(this.box,
      state.trouble ? h("p", { class: "trouble", role: "alert" }, "▲ ", h("strong", {}, "Nothing is stored: "), state.trouble) : null,
      h("p", { class: "quiet" }, `${state.software}, up for ${duration((state.now_ns - state.started_ns) / 1e9)}`),
      h("div", { class: "tiles" }, tiles.map(([name, text, note, alarmed]) => h("div", { class: alarmed ? "tile alarmed" : "tile" },
        h("span", { class: "tile-name" }, name), h("span", { class: "tile-value" }, text), h("span", { class: "tile-note" }, note)))),
      h("div", { class: "grid" },
        box("Receivers", ["number", "process", "restarts", "connections", "frames", "bytes", "refused", "put off"], state.receivers.map((one) => [
          one.number, one.pid || "none", one.restarts, whole(one.connections), whole(one.frames), bytes(one.bytes), whole(one.refused), whole(one.later)])),
        box("Reducers", ["number", "process", "restarts", "iterations", "busy"], state.reducers.map((one) => [
          one.number, one.pid || "none", one.restarts, whole(one.iterations), duration(one.busy_seconds)])),
        box("Waiting", ["run", "iteration", "ranks", "waits for", "since"], state.waiting.map((one) => [
          one.run, whole(one.iteration), `${whole(one.ranks)} of ${whole(one.world_size)}`,
          one.ranks < one.world_size ? `rank ${ranks(one.missing, one.world_size - one.ranks)}` : "the database", ago(one.since_ns)]))),
      h("h2", {}, "Open alerts of all runs"),
      h("div", { class: "alerts" }, alerts?.length ? alerts.map((alert) => alertCard(alert, { withRun: true })) : h("p", { class: "quiet" }, alerts ? "none" : "the database does not answer")));
  }
}

function box(title, heads, rows) {
  return h("section", { class: "panel" }, h("h3", {}, title), rows.length ? h("div", { class: "table-box" }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, String(cell)))))))) : h("p", { class: "quiet" }, "none"));
}
