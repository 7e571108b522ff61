// What the page knows of the run it shows, and how it asks for more.

import { getBlocks, getJson } from "./api.js";
import { views } from "./view.js";

const LAYERS_A_REQUEST = 8;

export class RunData {
  constructor(run, metrics, figures, alerts) {
    this.name = run.name;
    this.update(run);
    this.metrics = new Map(metrics.map((metric) => [metric.name, metric]));
    this.figures = figures;
    this.alerts = alerts;
  }

  static async load(name) {
    const path = `runs/${encodeURIComponent(name)}`;
    const [run, metrics, figures, alerts] = await Promise.all([
      getJson(path), getJson(`${path}/metrics`), getJson(`${path}/figures`), RunData.readAlerts(name),
    ]);
    return new RunData(run, metrics, figures, alerts);
  }

  static readAlerts(run) {
    return getJson("alerts", { run, limit: 500 });
  }

  get path() {
    return `runs/${encodeURIComponent(this.name)}`;
  }

  update(run) {
    this.run = run;
  }

  has(metric) {
    return this.metrics.has(metric);
  }

  /** The iterations that are shown: a negative "from" counts from the last one. */
  range() {
    const { first_iteration: first, last_iteration: last } = this.run;
    const { from, to } = views.now;
    const end = Math.max(first, Math.min(to ?? last, Math.max(last, first)));
    const start = from === undefined ? first : from < 0 ? last + 1 + from : from;
    return { from: Math.min(Math.max(first, start), end), to: end };
  }

  /** The range as parameters; the end is left open while the run is followed, so that answers can be the same. */
  #parameters() {
    const { from } = this.range();
    return { first: from, last: views.now.to };
  }

  /** Points of a metric for layers; in parts, several at a time. */
  async points(metric, { layers, statistic, items, fold, maxPoints = 400, planes, signal, onpart }) {
    const wanted = layers ?? this.metrics.get(metric).layers;
    const parts = [];
    for (let start = 0; start < wanted.length; start += LAYERS_A_REQUEST) parts.push(wanted.slice(start, start + LAYERS_A_REQUEST));
    const blocks = await Promise.all(parts.map(async (part) => {
      const got = await getBlocks(`${this.path}/points`, {
        metric, layer: part, statistic, item: items, fold_items: fold ? true : undefined,
        max_points: maxPoints, plane: planes, ...this.#parameters(),
      }, { signal });
      onpart?.(got);
      return got;
    }));
    return blocks.flat();
  }

  async derived(figures, { maxPoints = 400, signal } = {}) {
    return getBlocks(`${this.path}/derived`, { figure: figures, max_points: maxPoints, ...this.#parameters() }, { signal });
  }

  async timeline({ maxPoints = 400, signal } = {}) {
    const [block] = await getBlocks(`${this.path}/timeline`, { max_points: maxPoints, ...this.#parameters() }, { signal });
    return block;
  }

  rows(what, parameters, signal) {
    const { from } = this.range();
    return getJson(`${this.path}/${what}`, { first: from, last: views.now.to, ...parameters }, { signal });
  }

  /** Layers of experts. */
  get moeLayers() {
    for (const [name, metric] of this.metrics) if (name.startsWith("moe.") && metric.layers.length) return metric.layers;
    return [];
  }

  /** The layer that is looked at: the address's, else one with an open alert, else the last. */
  get layer() {
    const layers = this.moeLayers;
    if (layers.includes(views.now.layer)) return views.now.layer;
    const alerted = this.alerts.find((alert) => alert.ended_iteration === null && layers.includes(alert.layer));
    return alerted?.layer ?? layers.at(-1);
  }

  /** Roles of the metrics NAME.role. */
  roles(...names) {
    const found = new Set();
    for (const name of names) {
      for (const metric of this.metrics.values()) if (metric.role && metric.name === `${name}.${metric.role}`) found.add(metric.role);
    }
    return [...found];
  }
}

/** Names for people: moe.output_norm_max → output norm max. */
export function plain(name) {
  return name.replace(/^(moe|train|validation|rank)\./, "").replaceAll("_", " ").replaceAll(".", " · ");
}
