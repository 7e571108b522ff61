// The list of runs.

import { ApiError, column, getBlocks, getJson, remove } from "./api.js";
import { css, lineColour } from "./colour.js";
import { fill, h } from "./dom.js";
import { ago, large, moment, whole } from "./format.js";
import { theme } from "./theme.js";
import { format } from "./view.js";

const POLL_SECONDS = 3;

export class RunsPage {
  constructor(root) {
    this.root = root;
    this.list = h("div", { class: "runs" });
  }

  async open() {
    fill(this.root, h("h1", {}, "Runs"), this.list);
    await this.#read();
    this.timer = setInterval(() => { if (!document.hidden) this.#read().catch(() => {}); }, POLL_SECONDS * 1000);
  }

  dispose() {
    clearInterval(this.timer);
  }

  changed() {}

  async #read() {
    const runs = await getJson("runs");
    if (runs === this.shown) return;
    this.shown = runs;
    if (!runs.length) {
      fill(this.list, h("div", { class: "panel empty" }, h("h3", {}, "No run yet"),
        h("p", {}, "Set telemetry.server to this server's gRPC address in a training configuration; its run appears here with its first iteration.")));
      return;
    }
    fill(this.list, runs.map((run) => this.#card(run)));
  }

  #card(run) {
    const canvas = h("canvas", { class: "spark", width: 280, height: 72, "aria-hidden": "true" });
    this.#spark(run, canvas);
    return h("article", { class: "panel run-card" },
      h("header", {},
        h("a", { class: "run-name", href: format({ page: "run", run: run.name, items: [] }) }, run.name),
        h("span", { class: run.live ? "live on" : "live" }, run.live ? "live" : `${run.finished ? "finished" : "last heard of"} ${ago(run.last_ended_ns)}`)),
      canvas,
      h("dl", { class: "facts" },
        h("dt", {}, "iteration"), h("dd", {}, whole(run.last_iteration)),
        h("dt", {}, "tokens"), h("dd", {}, large(run.consumed_tokens)),
        h("dt", {}, "ranks"), h("dd", {}, whole(run.world_size)),
        h("dt", {}, "partial"), h("dd", {}, whole(run.partial)),
        h("dt", {}, "alerts"), h("dd", { class: run.open_alerts ? "alarmed" : "" }, run.open_alerts ? `▲ ${run.open_alerts} open` : "none"),
        h("dt", {}, "began"), h("dd", { title: moment(run.started_ns) }, ago(run.started_ns))),
      h("button", { type: "button", class: "quiet-button", onclick: () => this.#askToDelete(run) }, "Delete …"));
  }

  async #spark(run, canvas) {
    const path = `runs/${encodeURIComponent(run.name)}`;
    let block;
    try {
      [block] = await getBlocks(`${path}/points`, { metric: "train.loss", layer: -1, max_points: 140, plane: "values" });
    } catch (error) {
      if (error instanceof ApiError) return; // it measures no loss
      throw error;
    }
    const { values } = column(block, 0);
    const finite = values.filter((value) => Number.isFinite(value));
    if (finite.length < 2) return;
    const low = Math.min(...finite);
    const high = Math.max(...finite);
    const context = canvas.getContext("2d");
    context.strokeStyle = css(lineColour(0, theme()));
    context.lineWidth = 2;
    context.beginPath();
    values.forEach((value, index) => {
      if (Number.isFinite(value)) context.lineTo((index / (values.length - 1)) * 276 + 2, 68 - ((value - low) / (high - low || 1)) * 64);
    });
    context.stroke();
  }

  #askToDelete(run) {
    const message = h("p", { class: "quiet" }, "Aggregates, alerts and raw values go; this cannot be undone.");
    const force = h("input", { type: "checkbox" });
    const close = () => { dialog.close(); dialog.remove(); };
    const dialog = h("dialog", { "aria-label": `Delete ${run.name}` }, h("h3", {}, `Delete ${run.name}?`), message,
      run.live ? h("label", {}, force, " although it is live") : null,
      h("div", { class: "actions" },
        h("button", { type: "button", onclick: close }, "Keep it"),
        h("button", {
          type: "button", class: "danger", onclick: async () => {
            try {
              await remove(`runs/${encodeURIComponent(run.name)}`, { force: force.checked });
              close();
              await this.#read();
            } catch (error) {
              message.textContent = error.message;
            }
          },
        }, "Delete")));
    document.body.append(dialog);
    dialog.addEventListener("cancel", () => dialog.remove());
    dialog.showModal();
  }
}
