// The view of one run.

import { getBlocks, getJson, column } from "./api.js";
import { fillAlerts, number } from "./alerts.js";
import { figureLayers, foldedLayers, latest, layersPanel, linesPanel } from "./charts.js";
import { Clock } from "./clock.js";
import { fill, h, select } from "./dom.js";
import { Experts } from "./experts.js";
import { ago, duration, large, ranks, short, whole } from "./format.js";
import { Panel, Panels } from "./panel.js";
import { ranksPanel } from "./ranks.js";
import { RunData, plain } from "./run_data.js";
import { views } from "./view.js";

const POLL_SECONDS = 2;
const PATIENCE_SECONDS = 10; // after which it is worth a word for which ranks an iteration waits

export class RunPage {
  constructor(root) {
    this.root = root;
    this.panels = new Panels();
    this.clock = new Clock((from, to) => views.change({ from: from ?? undefined, to: to ?? undefined }));
    this.disposed = false;
  }

  async open(name) {
    this.data = await RunData.load(name);
    if (this.disposed) return;
    this.clock.setMarks(this.data.alerts);
    this.#setRange();
    this.#build();
    this.#summarise();
    this.#readWaiting().catch(() => {});
    this.timer = setInterval(() => this.#poll(), POLL_SECONDS * 1000);
  }

  dispose() {
    this.disposed = true;
    clearInterval(this.timer);
    this.panels.dispose();
    this.experts?.dispose();
  }

  // ------------------------------------------------------------------------------------------ live

  async #poll() {
    if (document.hidden || this.polling) return;
    this.polling = true;
    try {
      const run = await getJson(this.data.path);
      if (this.disposed) return;
      const before = this.data.run;
      this.data.update(run);
      this.live(run);
      this.#status();
      await this.#readWaiting();
      if (this.disposed || run === before) return;
      await this.#readAlerts();
      if (this.disposed) return;
      this.#summarise();
      this.experts?.alertsChanged();
      if (views.now.to !== undefined || run.last_iteration === before.last_iteration) return;
      this.#setRange();
      for (const panel of this.panels) panel.advance(run.last_iteration, this.clock.to - this.clock.from + 1);
    } catch (error) {
      this.#status(error);
    } finally {
      this.polling = false;
    }
  }

  /** Told of the run with each poll; the page's head listens. */
  live() {}

  /** Names the ranks without which the run's oldest iteration is not whole. */
  async #readWaiting() {
    const { waiting, now_ns: now } = await getJson("server");
    const one = waiting.find((found) => found.run === this.data.name && found.ranks < found.world_size);
    this.waiting.hidden = !one || (now - one.since_ns) / 1e9 < PATIENCE_SECONDS;
    if (!this.waiting.hidden) {
      this.waiting.textContent = `Iteration ${whole(one.iteration)} waits for rank ${ranks(one.missing, one.world_size - one.ranks)}; its first frame came ${ago(one.since_ns)}.`;
    }
  }

  async #readAlerts() {
    this.data.alerts = await RunData.readAlerts(this.data.name);
    this.clock.setMarks(this.data.alerts);
    this.#drawAlerts();
  }

  #setRange() {
    const { from, to } = this.data.range();
    this.clock.setRange(from, to);
    if (this.fromInput) {
      this.fromInput.value = from;
      this.toInput.value = views.now.to ?? "";
      this.toInput.placeholder = "latest";
      this.rangeNote.textContent = `${whole(to - from + 1)} of ${whole(this.data.run.iterations)} iterations`;
    }
  }

  // ------------------------------------------------------------------------------------------ changes of the view

  changed(before, now) {
    if (before.from !== now.from || before.to !== now.to) {
      this.#setRange();
      for (const panel of this.panels) panel.invalidate();
    }
    this.experts?.changed(before, now);
    if (before.layer !== now.layer) for (const panel of this.panels) panel.mark?.();
    if (before.layer !== now.layer) this.groups?.invalidate();
    if (before.figure !== now.figure) for (const panel of this.relative) panel.invalidate();
    if (before.role !== now.role) for (const panel of this.byRole) panel.invalidate();
  }

  // ------------------------------------------------------------------------------------------ building

  #build() {
    const { data } = this;
    this.tiles = h("div", { class: "tiles" });
    this.alertsOpen = h("div", { class: "alerts open-alerts" });
    this.waiting = h("p", { class: "quiet waiting", role: "status", hidden: true });
    const sections = [
      ["training", "Training", this.#training()],
      ["experts", "Experts", this.#experts()],
      ["balance", "Largest and least against the median", this.#relative()],
      ["routing", "Routing", this.#routing()],
      ["parameters", "Parameters, gradients, updates, Muon", this.#parameters()],
      ["details", "Training in detail", this.#details()],
      ["ranks", "Ranks and iterations", this.#ranks()],
      ["other", "Other metrics", this.#other()],
      ["alerts", "Alerts", this.#alerts()],
    ].filter(([, , content]) => content !== null);
    const nav = h("nav", { class: "sections", "aria-label": "sections" }, sections.map(([id, title]) =>
      h("button", { type: "button", onclick: () => document.getElementById(id).scrollIntoView({ behavior: "smooth" }) }, shortTitle(title))));
    fill(this.root, h("div", { class: "run" },
      h("h1", { class: "visually-hidden" }, `Run ${data.name}`), this.tiles, this.waiting, this.alertsOpen, this.#toolbar(nav),
      sections.map(([id, title, content]) => h("section", { id, class: "section" }, h("h2", {}, title), content))));
    this.#setRange();
  }

  #toolbar(nav) {
    const input = (label, apply) => h("input", {
      type: "number", min: 1, "aria-label": label, onchange: (event) => apply(event.target.value === "" ? undefined : Number(event.target.value)),
    });
    this.fromInput = input("first iteration shown", (from) => views.change({ from }));
    this.toInput = input("last iteration shown; empty: follow the run", (to) => views.change({ to }));
    this.rangeNote = h("span", { class: "quiet" });
    const shortcut = (text, patch, title) => h("button", { type: "button", title, onclick: () => views.change(patch) }, text);
    return h("div", { class: "toolbar" }, nav, h("div", { class: "range", role: "group", "aria-label": "range of iterations" },
      h("span", { class: "field" }, h("span", {}, "iterations"), h("span", { class: "pair" }, this.fromInput, "to", this.toInput)),
      shortcut("All", { from: undefined, to: undefined }, "all iterations, following the run"),
      shortcut("Last 1,000", { from: -1000, to: undefined }, "the last 1,000 iterations, following the run"),
      shortcut("Last 100", { from: -100, to: undefined }, "the last 100 iterations, following the run"),
      this.rangeNote));
  }

  #grid(panels, className = "") {
    const there = panels.filter(Boolean);
    this.panels.add(...there);
    return there.length ? h("div", { class: `grid ${className}` }, there.map((panel) => panel.element)) : null;
  }

  /** Lines of metrics that are not of a layer. */
  #plain(title, about, metrics, options = {}) {
    const { data, clock } = this;
    const there = metrics.filter(([name]) => data.has(name));
    if (!there.length) return null;
    return linesPanel(clock, {
      title, about, points: 600, ...options,
      fetch: async (signal) => {
        const lines = await Promise.all(there.map(async ([name, label]) => {
          const [block] = await data.points(name, { layers: [data.metrics.get(name).layers[0]], maxPoints: 600, signal });
          return block.width === 1 ? [{ label, ...column(block, 0) }]
            : block.columns.slice(0, 8).map((item, index) => ({ label: `${label} ${item + 1}`, ...column(block, index) }));
        }));
        return lines.flat();
      },
    });
  }

  #training() {
    return this.#grid([
      this.#plain("Loss", "Cross entropy of the main head and the training objective, nats per token.", [
        ["train.lm_loss", "main head"], ["train.loss", "objective"], ["validation.lm_loss", "validation"],
      ], { height: 260 }),
      this.#plain("Throughput", "Tokens per second, all devices together.", [["train.tokens_per_second", "tokens/s"]], { height: 260, unit: large })
        ?? this.#timeline("Throughput", "Tokens per second by the iterations' own times.", "tokens_per_second", { height: 260, unit: large }),
    ], "pair");
  }

  #details() {
    return this.#grid([
      this.#plain("Losses of the MTP depths", "Cross entropy of each multi-token-prediction depth, nats per token.", [["train.mtp_loss", "depth"]]),
      this.#plain("Gradient norm", "Global norm before clipping.", [["train.grad_norm", "norm"]], { logarithmic: true }),
      this.#timeline("Time of an iteration", "The longest of the ranks' times, seconds.", "seconds", {}),
      this.#plain("Balance loss", "EP-group balance loss; 1 at balance.", [["train.ep_loss", "EP loss"]]),
      this.#plain("Learning rate", "", [["train.learning_rate", "learning rate"]]),
      this.#plain("Batch", "Sequences of a step.", [["train.batch_size", "sequences"]]),
      this.#plain("Model FLOP/s", "TFLOP/s per device, recomputation left out.", [["train.model_tflops", "TFLOP/s"]]),
    ]);
  }

  /** Lines of a derived figure of each layer. */
  #figure(name, title, about, options = {}) {
    const { data, clock } = this;
    return data.figures.includes(name) ? layersPanel(clock, data, {
      title, about, fetch: (signal) => figureLayers(data, name, signal), ...options,
    }) : null;
  }

  #timeline(title, about, name, options) {
    return linesPanel(this.clock, {
      title, about, points: 600, ...options,
      fetch: async (signal) => {
        const block = await this.data.timeline({ maxPoints: 600, signal });
        return [{ label: plain(name), ...column(block, block.columns.indexOf(name)) }];
      },
    });
  }

  #experts() {
    if (!Experts.choices(this.data).length) return null;
    this.experts = new Experts(this.clock, this.data);
    this.panels.add(...this.experts.panels);
    return h("div", {}, this.experts.controls, h("div", { class: "grid experts" }, this.experts.panels.map((panel) => panel.element)));
  }

  #relative() {
    const { data, clock } = this;
    const bases = data.figures.filter((name) => name.endsWith(".max_over_median")).map((name) => name.replace(/\.max_over_median$/, ""));
    this.relative = [];
    if (!bases.length) return null;
    const base = () => (bases.includes(views.now.figure) ? views.now.figure
      : bases.includes("moe.output_norm_max") ? "moe.output_norm_max" : bases[0]);
    const panel = (kind, title, about, threshold) => layersPanel(clock, data, {
      title, about, height: 260, logarithmic: true, threshold,
      fetch: async (signal) => (data.figures.includes(`${base()}.${kind}`) ? figureLayers(data, `${base()}.${kind}`, signal) : []),
    });
    const levels = [
      panel("median", "Level of a layer", "The median of its experts: a whole layer that grows leaves the ratios above as they are."),
      panel("over_layers", "Level beside other layers", "That median over the median of the other layers' ones."),
    ];
    this.relative = [
      panel("max_over_median", "Largest over median", "Rises when one or two experts blow up, while the loss sees nothing."),
      panel("min_over_median", "Least over median", "Falls when experts collapse although tokens still arrive."),
      ...(data.figures.some((name) => name.endsWith(".over_layers")) ? levels : []),
    ];
    return h("div", {}, h("div", { class: "controls wide" }, select("of", bases.map((name) => [name, plain(name)]), base(),
      (value) => views.change({ figure: value }))), this.#grid(this.relative, "pair"));
  }

  #routing() {
    const { data, clock } = this;
    const figure = (...about) => this.#figure(...about);
    const groups = data.has("moe.group_load") ? linesPanel(clock, {
      title: "Load of the EP ranks", about: "Token copies that reach each expert-parallel rank of the chosen layer, over their mean.",
      fetch: async (signal) => {
        const { layers } = data.metrics.get("moe.group_load");
        const layer = layers.includes(data.layer) ? data.layer : layers.at(-1);
        groups.setTitle(`Load of the EP ranks, layer ${layer}`);
        const [block] = await data.points("moe.group_load", { layers: [layer], signal });
        return block.columns.slice(0, 64).map((item, index) => ({ label: `EP rank ${item}`, ...column(block, index) }));
      },
    }) : null;
    this.groups = groups;
    return this.#grid([
      figure("moe.straggler_factor", "Straggler factor", "Largest load of an expert-parallel rank over the mean, mean of the micro-batches; 1 at balance."),
      figure("moe.group_imbalance", "Group imbalance", "Largest share of a group of experts over the mean, as the balance loss sees it; 1 at balance."),
      figure("moe.straggler_worst", "Worst straggler factor", "Likewise, of the worst micro-batch."),
      groups,
      data.has("moe.confidence") ? layersPanel(clock, data, {
        title: "Routing confidence", about: "Router probability of a token's selected experts, mean over tokens; low values make routing brittle.",
        fetch: (signal) => foldedLayers(data, "moe.confidence", "median", { signal }),
      }) : null,
      data.has("moe.tokens") ? layersPanel(clock, data, {
        title: "Least tokens of an expert", about: "Tokens routed to the expert that gets fewest, mean of the micro-batches; near zero when routing collapses.",
        fetch: (signal) => foldedLayers(data, "moe.tokens", "min", { signal }),
      }) : null,
    ]);
  }

  #parameters() {
    const { data, clock } = this;
    const kinds = [
      ["weight.norm", "Weight norm", "Frobenius norm", "max", false],
      ["gradient.norm", "Gradient norm", "Norm of the gradient, clipped", "max", true],
      ["update.norm", "Update norm", "Norm of the change in the step", "max", true],
      ["muon.largest", "Muon's largest intermediate", "Absolute; outliers come before unrecoverable spikes", "max", true],
      ["gradient.stable_rank", "Stable rank of the gradient", "Least of the experts; falls in a blow-up", "min", true],
    ];
    const roles = data.roles(...kinds.map(([name]) => name));
    this.byRole = [];
    if (!roles.length) return null;
    const role = () => (roles.includes(views.now.role) ? views.now.role : roles.includes("expert_down") ? "expert_down" : roles[0]);
    const make = ([name, title, about, which, logarithmic]) => {
      if (!data.roles(name).length) return null;
      const panel = layersPanel(clock, data, {
        title, about: `${about}; ${which === "max" ? "the largest" : "the least"} of a layer's matrices.`, logarithmic,
        fetch: (signal) => {
          panel.setTitle(`${title}: ${role().replaceAll("_", " ")}`);
          return data.has(`${name}.${role()}`) ? foldedLayers(data, `${name}.${role()}`, which, { signal }) : [];
        },
      });
      return panel;
    };
    const panels = kinds.map(make);
    const extremes = [["gradient.cosine_max", "largest"], ["gradient.cosine_min", "least"]];
    if (data.figures.some((name) => name.startsWith("gradient.cosine_"))) {
      const panel = layersPanel(clock, data, {
        title: "Cosine between gradient and weight",
        about: "The largest, and dashed the least, of a layer's matrices: below 0 the step lets the weight grow along itself, as in a blow-up; above 0 it shrinks. Sampled.",
        fetch: async (signal) => {
          panel.setTitle(`Cosine between gradient and weight: ${role().replaceAll("_", " ")}`);
          const lines = await Promise.all(extremes.map(async ([name, which]) => {
            const figure = `${name}.${role()}`;
            if (!data.figures.includes(figure)) return [];
            return (await figureLayers(data, figure, signal)).map((line) => ({ ...line, note: which, dashed: which === "least" }));
          }));
          return lines.flat();
        },
      });
      panels.push(panel);
    }
    if (data.has("moe.alignment")) {
      panels.push(layersPanel(clock, data, {
        title: "Alignment of gate and up", about: "||silu(g)·u|| / (||silu(g)||·||u||), the largest of the experts; 1 when aligned. Sampled.",
        fetch: (signal) => foldedLayers(data, "moe.alignment", "max", { signal }),
      }));
    }
    this.byRole = panels.filter(Boolean);
    const largest = this.#figure("muon.largest", "Muon's largest intermediate: all matrices", "The largest of a layer's matrices of all roles.", { logarithmic: true });
    return h("div", {}, h("div", { class: "controls wide" }, select("matrices", roles.map((name) => [name, name.replaceAll("_", " ")]), role(),
      (value) => views.change({ role: value }))), this.#grid([...this.byRole, largest]));
  }

  #ranks() {
    const { data, clock } = this;
    const partial = h("div", { class: "table-box" });
    const events = h("div", { class: "table-box" });
    const missing = linesPanel(clock, {
      title: "Missing ranks", about: "Ranks whose frames an iteration lacks, and frames that clients had to give up.",
      fetch: async (signal) => {
        const block = await data.timeline({ maxPoints: 600, signal });
        return ["missing_ranks", "dropped"].map((name) => {
          const line = column(block, block.columns.indexOf(name));
          return { label: plain(name), ...line, values: line.high };
        });
      },
    });
    return this.#grid([
      data.has("rank.compute_seconds") ? ranksPanel(clock, data) : null,
      this.#figure("rank.slowdown", "Slowest rank", "Its time over the median of the ranks that do the same work."),
      missing,
      new Panel({
        title: "Partial iterations", about: "The latest 50 that were reduced without every rank.", points: 50, body: partial,
        load: async (signal) => {
          const rows = await data.rows("iterations", { partial: true, latest: true, limit: 50 }, signal);
          fill(partial, rows.length ? table(["iteration", "ranks", "missing"], rows.reverse().map((row) => [
            whole(row.iteration), `${whole(row.num_ranks)} of ${whole(row.world_size)}`, ranks(row.missing, row.world_size - row.num_ranks)])) : h("p", { class: "quiet" }, "none: every rank sent each iteration"));
        },
      }),
      new Panel({
        title: "Events", about: "The latest 100 that ranks reported: checkpoints, skipped steps, stages.", points: 100, body: events,
        load: async (signal) => {
          const rows = await data.rows("events", { latest: true, limit: 100 }, signal);
          fill(events, rows.length ? table(["iteration", "kind", "what"], rows.reverse().map((row) => [whole(row.iteration), row.kind, row.detail]))
            : h("p", { class: "quiet" }, "none"));
        },
      }),
    ]);
  }

  #other() {
    const { data, clock } = this;
    const unknown = [...data.metrics.values()].filter((metric) => metric.item === null);
    if (!unknown.length) return null;
    let chosen = unknown[0].name;
    const panel = layersPanel(clock, data, {
      title: "A metric that the server knows nothing about", about: "The median of its items, by layer.",
      controls: [select("metric", unknown.map(({ name }) => name), chosen, (value) => { chosen = value; panel.invalidate(); })],
      fetch: (signal) => foldedLayers(data, chosen, "median", { signal }),
    });
    return this.#grid([panel]);
  }

  #alerts() {
    this.alertsBox = h("div", { class: "alerts" });
    this.#drawAlerts();
    return this.alertsBox;
  }

  #drawAlerts() {
    const open = this.data.alerts.filter((alert) => alert.ended_iteration === null);
    fillAlerts(this.alertsBox, this.data.alerts, "No alert so far.");
    this.alertsOpen.hidden = !open.length;
    if (open.length) fillAlerts(this.alertsOpen, open.slice(0, 6), "");
  }

  // ------------------------------------------------------------------------------------------ in short

  async #summarise() {
    const { data } = this;
    const { run } = data;
    const last = { first: run.last_iteration, last: run.last_iteration, max_points: 1, plane: "values" };
    const value = async (metric) => {
      if (!data.has(metric)) return null;
      const [block] = await getBlocks(`${data.path}/points`, { metric, layer: data.metrics.get(metric).layers[0], ...last });
      return latest(block.values);
    };
    const ratios = data.figures.filter((name) => name.startsWith("moe.") && name.includes("norm") && name.endsWith(".max_over_median"));
    const [loss, rate, rows, worst] = await Promise.all([
      value(data.has("train.lm_loss") ? "train.lm_loss" : "train.loss"),
      value("train.tokens_per_second"),
      getJson(`${data.path}/iterations`, { first: run.last_iteration, last: run.last_iteration }),
      ratios.length ? getBlocks(`${data.path}/derived`, { figure: ratios.slice(0, 16), ...last }) : [],
    ]);
    if (this.disposed) return;
    const [row] = rows;
    const top = highest(worst);
    const tiles = [
      ["iteration", whole(run.last_iteration), run.partial ? `${whole(run.partial)} partial` : "all whole"],
      ["loss", loss === null ? null : loss.toFixed(4), "nats per token"],
      ["tokens", large(run.consumed_tokens), rate === null ? "" : `${large(rate)}/s`],
      ["time", row ? duration(number(row.seconds)) : null, "an iteration"],
      ["ranks", whole(run.world_size), row && row.num_ranks < row.world_size ? `${whole(row.world_size - row.num_ranks)} missing` : "all there"],
      ["max/median", top ? short(top.value) : null, top ? `layer ${top.layer}, ${plain(top.figure).replace(" · max over median", "")}` : ""],
      ["alerts", whole(run.open_alerts), run.open_alerts ? "open" : "none open"],
    ];
    fill(this.tiles, tiles.filter(([, text]) => text !== null).map(([name, text, note]) =>
      h("div", { class: name === "alerts" && run.open_alerts ? "tile alarmed" : "tile" },
        h("span", { class: "tile-name" }, name), h("span", { class: "tile-value" }, text), h("span", { class: "tile-note" }, note))));
    this.live(run);
  }

  #status(error = null) {
    this.failed(error);
  }

  /** Told of the outcome of each poll; the page's head listens. */
  failed() {}
}

function highest(blocks) {
  let top = null;
  for (const block of blocks) {
    block.values.forEach((value, index) => {
      if (!Number.isNaN(value) && (top === null || value > top.value)) top = { value, layer: block.columns[index % block.width], figure: block.figure };
    });
  }
  return top;
}

function shortTitle(title) {
  return { "Largest and least against the median": "Max & min", "Training in detail": "Details", "Ranks and iterations": "Ranks", "Other metrics": "Other" }[title]
    ?? title.split(",")[0];
}

function table(heads, rows) {
  return h("table", {}, h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell))))));
}
