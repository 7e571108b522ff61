// The heat maps of the experts: every layer small, one large, and lines of chosen experts.

import { column } from "./api.js";
import { css, lineColour } from "./colour.js";
import { fill, h, perFrame, select } from "./dom.js";
import { short } from "./format.js";
import { ColourBar, HeatMap, bounds, shade } from "./heatmap.js";
import { Lines } from "./lines.js";
import { Panel } from "./panel.js";
import { plain } from "./run_data.js";
import { theme } from "./theme.js";
import { views } from "./view.js";

const SMALL_POINTS = 96;
const LARGE_POINTS = 500;
const LINE_POINTS = 1000;
const STATISTICS = ["count", "mean", "rms", "min", "median", "max", "p99"];
const PLANES = [["high", "highest"], ["values", "mean"], ["low", "lowest"]];
const SCALES = [["shared", "one scale for all layers"], ["own", "each layer its own"], ["relative", "relative to the median"]];
const RAMPS = [["aurora", "violet–yellow"], ["ember", "blue–yellow"]];

export class Experts {
  constructor(clock, data) {
    this.clock = clock;
    this.data = data;
    this.shades = new Map();
    this.blocks = new Map();
    this.bar = new ColourBar();
    this.recolour = perFrame(() => this.#recolour());
    this.controls = h("div", { class: "controls wide" });
    this.grid = h("div", { class: "thumbs", role: "group", "aria-label": "all layers" });
    this.map = new HeatMap(clock, { height: 430, label: "Heat map of a layer" });
    this.map.onpick = (item) => this.#toggle(item);
    this.lines = new Lines(clock, { height: 210, label: "chosen experts" });
    this.chosen = h("div", { class: "legend" });
    this.overview = new Panel({
      title: "All layers", points: SMALL_POINTS, className: "full",
      about: "Each picture is a layer: its experts from top to bottom, time from left to right. Choose one to enlarge it. The number is the item farthest from the median at the end: the largest (↑) or the least (↓) over the median.",
      body: this.grid, load: (signal) => this.#loadSmall(signal),
    });
    this.large = new Panel({
      title: "", points: LARGE_POINTS, className: "full", body: [this.map.element, this.bar.element],
      load: (signal) => this.#loadLarge(signal),
    });
    this.detail = new Panel({
      title: "Chosen experts", points: LINE_POINTS, className: "full", body: [this.chosen, this.lines.element],
      about: "Press on a row of the heat map above to add an expert or to take it away. In grey: the least, the median and the largest of all.",
      load: (signal) => this.#loadDetail(signal),
    });
    this.panels = [this.overview, this.large, this.detail];
    this.thumbs = new Map();
    this.visible = new Set();
    this.observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting) this.visible.add(Number(target.dataset.layer));
        else this.visible.delete(Number(target.dataset.layer));
      }
      this.#loadMissing();
    }, { rootMargin: "60px 0px" });
    this.#drawControls();
    this.#makeThumbs();
  }

  // ------------------------------------------------------------------------------------------ what is chosen

  static choices(data) {
    return [...data.metrics.values()].filter((metric) => metric.items > 1 && metric.layers.some((layer) => layer >= 0));
  }

  get metric() {
    const choices = Experts.choices(this.data);
    const named = (name) => choices.find((metric) => metric.name === name);
    return named(views.now.metric) ?? named("moe.output_norm_max") ?? choices[0];
  }

  get statistic() {
    return STATISTICS.includes(views.now.stat) ? views.now.stat : this.metric.headline;
  }

  get plane() {
    return PLANES.some(([plane]) => plane === views.now.plane) ? views.now.plane : "high";
  }

  get scale() {
    return SCALES.some(([scale]) => scale === views.now.scale) ? views.now.scale : "shared";
  }

  get ramp() {
    return RAMPS.some(([ramp]) => ramp === views.now.ramp) ? views.now.ramp : "aurora";
  }

  get layer() {
    const { layers } = this.metric;
    return layers.includes(this.data.layer) ? this.data.layer : layers.at(-1);
  }

  get itemName() {
    return { expert: "expert", group: "EP rank", rank: "rank", depth: "depth" }[this.metric.item] ?? "item";
  }

  /** Those of the address, else those that open alerts are about. */
  get items() {
    if (views.now.items.length) return views.now.items;
    const alerted = this.data.alerts.filter((alert) => alert.ended_iteration === null && alert.layer === this.layer && alert.item !== null);
    return [...new Set(alerted.map((alert) => alert.item))].slice(0, 7);
  }

  #toggle(item) {
    const { items } = this;
    views.change({ items: items.includes(item) ? items.filter((other) => other !== item) : [...items, item].slice(-7) });
  }

  #drawControls() {
    const { metric } = this;
    const metrics = Experts.choices(this.data).map(({ name }) => [name, plain(name)]);
    fill(this.controls,
      select("quantity", metrics, metric.name, (value) => views.change({ metric: value, stat: undefined })),
      select("statistic", STATISTICS.map((name) => [name, name === metric.headline ? `${name} (headline)` : name]),
        this.statistic, (value) => views.change({ stat: value === metric.headline ? undefined : value })),
      select("over time", PLANES, this.plane, (value) => views.change({ plane: value === "high" ? undefined : value })),
      select("colour scale", SCALES, this.scale, (value) => views.change({ scale: value === "shared" ? undefined : value })),
      select("colours", RAMPS, this.ramp, (value) => views.change({ ramp: value === "aurora" ? undefined : value })),
      select("layer", metric.layers, this.layer, (value) => views.change({ layer: Number(value) })));
  }

  // ------------------------------------------------------------------------------------------ small ones

  #makeThumbs() {
    for (const { plot, button } of this.thumbs.values()) {
      plot.dispose();
      this.observer.unobserve(button);
    }
    this.thumbs.clear();
    this.visible.clear();
    for (const layer of this.metric.layers) {
      const plot = new HeatMap(this.clock, { height: 62, small: true });
      const note = h("span", { class: "note" });
      const button = h("button", {
        type: "button", class: "thumb", "data-layer": layer,
        onclick: () => {
          views.change({ layer });
          this.large.element.scrollIntoView({ block: "nearest", behavior: "smooth" });
        },
      }, h("span", { class: "thumb-head" }, h("span", {}, `layer ${layer}`), note), plot.element);
      this.thumbs.set(layer, { plot, button, note });
      this.observer.observe(button);
    }
    fill(this.grid, [...this.thumbs.values()].map(({ button }) => button));
    this.#markLayer();
  }

  #titles() {
    const { metric, layer, itemName } = this;
    this.large.setTitle(`Layer ${layer}: ${plain(metric.name)}`, `${metric.description || metric.name}; ${this.statistic} over micro-batches and replicas.`);
    const items = this.items.filter((item) => item < metric.items);
    this.detail.setTitle(items.length ? `Layer ${layer}, ${itemName} ${items.join(", ")}` : `Chosen ${itemName}s of layer ${layer}`);
  }

  #markLayer() {
    this.#titles();
    const open = this.data.alerts.filter((alert) => alert.ended_iteration === null);
    for (const [layer, { button }] of this.thumbs) {
      button.classList.toggle("on", layer === this.layer);
      button.setAttribute("aria-pressed", String(layer === this.layer));
      const alert = open.find((one) => one.layer === layer);
      button.classList.toggle("alerted", Boolean(alert));
      button.title = alert ? `${alert.rule.replaceAll("_", " ")}: ${alert.subject}` : `enlarge layer ${layer}`;
    }
  }

  async #loadSmall(signal) {
    this.shades.clear();
    this.requested = new Set();
    this.signal = signal;
    await this.#loadMissing();
  }

  async #loadMissing() {
    if (!this.requested || this.signal.aborted) return;
    const layers = [...this.visible].filter((layer) => !this.requested.has(layer)).sort((a, b) => a - b);
    if (!layers.length) return;
    for (const layer of layers) this.requested.add(layer);
    const { signal } = this;
    try {
      await this.data.points(this.metric.name, {
        layers, statistic: this.statistic, maxPoints: SMALL_POINTS, planes: [this.plane], signal,
        onpart: (blocks) => {
          if (signal.aborted) return;
          for (const block of blocks) this.#takeSmall(block);
          this.recolour();
        },
      });
    } catch (error) {
      for (const layer of layers) this.requested.delete(layer);
      if (!signal.aborted && error.name !== "AbortError") throw error;
    }
  }

  #takeSmall(block) {
    this.blocks.set(block.layer, block);
    this.shades.set(block.layer, shade(block, this.plane, this.scale === "relative"));
  }

  // ------------------------------------------------------------------------------------------ the large one

  async #loadLarge(signal) {
    const { metric, layer } = this;
    const [block] = await this.data.points(metric.name, { layers: [layer], statistic: this.statistic, maxPoints: LARGE_POINTS, signal });
    if (signal.aborted) return;
    this.largeBlock = block;
    this.#reshade();
  }

  #reshade() {
    const relative = this.scale === "relative";
    if (this.largeBlock) this.map.set({ shade: shade(this.largeBlock, this.plane, relative) });
    for (const [layer, block] of this.blocks) if (this.shades.has(layer)) this.shades.set(layer, shade(block, this.plane, relative));
    this.recolour();
  }

  #recolour() {
    const relative = this.scale === "relative";
    const all = [...this.shades.values()];
    if (this.map.shade) all.push(this.map.shade);
    const shared = bounds(all, relative);
    const own = this.scale === "own";
    for (const [layer, { plot, note }] of this.thumbs) {
      const one = this.shades.get(layer) ?? null;
      const flagged = this.data.alerts.filter((alert) => alert.layer === layer && alert.ended_iteration === null);
      plot.set({ shade: one, ramp: this.ramp, limits: own && one ? bounds([one], relative) : shared, flagged });
      note.textContent = one ? farthest(one) : "";
    }
    const limits = own && this.map.shade ? bounds([this.map.shade], relative) : shared;
    this.map.set({
      ramp: this.ramp, limits, itemName: this.itemName, chosen: this.items,
      flagged: this.data.alerts.filter((alert) => alert.layer === this.layer),
    });
    this.map.setLabel(`Heat map of layer ${this.layer}, ${plain(this.metric.name)}: ${this.itemName}s by iteration. Arrow keys move, Enter chooses the ${this.itemName}.`);
    this.bar.set(limits, this.ramp, relative);
  }

  // ------------------------------------------------------------------------------------------ lines

  async #loadDetail(signal) {
    const { metric, layer } = this;
    const items = this.items.filter((item) => item < metric.items);
    const shared = { layers: [layer], statistic: this.statistic, maxPoints: LINE_POINTS, signal };
    const [[all], [some]] = await Promise.all([
      this.data.points(metric.name, { ...shared, fold: true }),
      items.length ? this.data.points(metric.name, { ...shared, items }) : [null],
    ]);
    if (signal.aborted) return;
    const grey = (now) => (now === "dark" ? [150, 156, 165] : [130, 134, 140]);
    const edge = (index, label, dashed) => ({ ...column(all, index), low: undefined, high: undefined, label, dashed, faint: true, colour: grey });
    const middle = { ...edge(1, "median of all", false) };
    const lines = [edge(0, "least of all", true), middle, edge(2, "largest of all", true)];
    // The edges of all items are the edges of their points' lows and highs.
    if (all.low) lines[0].values = column({ ...all, values: all.low }, 0).values;
    if (all.high) lines[2].values = column({ ...all, values: all.high }, 2).values;
    for (const [index, item] of items.entries()) {
      lines.push({
        ...column(some, some.columns.indexOf(item)), label: `${this.itemName} ${item}`, strong: true,
        colour: (now) => lineColour(items.indexOf(item), now),
      });
    }
    this.lines.setLines(lines, { logarithmic: true });
    fill(this.chosen, items.map((item) => h("button", {
      type: "button", class: "key", title: "take it away", onclick: () => this.#toggle(item),
    }, h("i", { class: "swatch", style: { background: css(lineColour(items.indexOf(item), theme())) } }), `${this.itemName} ${item} ✕`)));
  }

  // ------------------------------------------------------------------------------------------ changes

  changed(before, now) {
    const differs = (...names) => names.some((name) => before[name] !== now[name]);
    if (differs("metric")) this.#makeThumbs();
    if (differs("metric", "stat", "layer", "scale", "ramp", "plane")) this.#drawControls();
    if (differs("metric", "stat", "plane")) {
      this.map.set({ shade: null });
      this.shades.clear();
      this.blocks.clear();
      for (const panel of this.panels) panel.invalidate();
    } else if (differs("layer")) {
      this.largeBlock = null;
      this.map.set({ shade: null });
      this.large.invalidate();
      this.detail.invalidate();
    } else if (String(before.items) !== String(now.items)) {
      this.detail.invalidate();
    }
    if (differs("scale")) this.#reshade();
    this.#markLayer();
    this.recolour();
  }

  alertsChanged() {
    this.#markLayer();
    this.recolour();
  }

  dispose() {
    this.observer.disconnect();
    for (const { plot } of this.thumbs.values()) plot.dispose();
    this.map.dispose();
    this.lines.dispose();
  }
}

/** The item farthest from the median at the last point, over the median. */
function farthest({ block, source, medians }) {
  if (!block.rows || block.width < 2) return "";
  const start = (block.rows - 1) * block.width;
  let largest = -Infinity;
  let least = Infinity;
  for (let item = 0; item < block.width; item += 1) {
    const value = source[start + item];
    if (value > largest) largest = value;
    if (value < least) least = value;
  }
  const median = Math.exp(medians[block.rows - 1]);
  const [up, down] = [largest / median, least / median];
  if (!Number.isFinite(up) || !Number.isFinite(down)) return Number.isNaN(up) ? "" : "↑ ∞";
  return up * down >= 1 ? `↑ ${short(up)}` : `↓ ${short(down)}`;
}
