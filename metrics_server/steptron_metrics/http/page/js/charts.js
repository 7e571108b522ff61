// Panels with lines: of a few metrics, of all layers, of derived figures.

import { column } from "./api.js";
import { css, layerColour, lineColour } from "./colour.js";
import { fill, h } from "./dom.js";
import { short } from "./format.js";
import { Lines } from "./lines.js";
import { Panel } from "./panel.js";
import { onTheme, theme } from "./theme.js";
import { views } from "./view.js";

/** A panel with a line for each of a few things. fetch: async (signal) → [{label, ...column}]. */
export function linesPanel(clock, { title, about, height, logarithmic = false, unit = short, threshold, controls, fetch, points }) {
  const plot = new Lines(clock, { height, label: title });
  const logButton = logSwitch(logarithmic, (value) => { plot.logarithmic = value; plot.redraw(); });
  const panel = new Panel({
    title, about, points, body: plot.element, controls: [...(controls ?? []), logButton],
    load: async (signal) => {
      const lines = (await fetch(signal)).map((line, index) => ({ ...line, colour: (now) => lineColour(index, now) }));
      plot.setLines(lines, { logarithmic: plot.logarithmic, unit, threshold });
      legend(panel, plot, lines, unit);
      plot.setLabel(`${title}. ${describe(lines, unit)}`);
    },
  });
  plot.logarithmic = logarithmic;
  panel.plot = plot;
  panel.ondispose = () => plot.dispose();
  return panel;
}

function describe(lines, unit) {
  return lines.slice(0, 8).map((line) => `${line.label}: last ${unit(line.values.at(-1) ?? NaN)}`).join("; ");
}

function logSwitch(initial, onchange) {
  const button = h("button", {
    type: "button", class: "toggle", "aria-pressed": String(initial), title: "logarithmic axis",
    onclick: () => {
      const next = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(next));
      onchange(next);
    },
  }, "log");
  return button;
}

/** Names with their colours, and their values where the pointer is (else the latest). */
function legend(panel, plot, lines, unit) {
  const draw = () => {
    const values = new Map();
    fill(panel.legend, lines.map((line) => {
      const value = h("b", {}, unit(latest(line.values)));
      values.set(line.label, { element: value, line });
      return h("button", {
        type: "button", class: "key", title: `show ${line.label} alone`,
        onclick: (event) => {
          const alone = plot.highlighted === line.label ? null : line.label;
          plot.highlight(alone);
          for (const key of panel.legend.children) key.classList.toggle("on", key === event.currentTarget && alone !== null);
        },
      }, h("i", { class: line.dashed ? "swatch dashed" : "swatch", style: { background: css(line.colour(theme())) } }), line.label, " ", value);
    }));
    plot.onhover = (found) => {
      const now = new Map(found.map(({ line, value }) => [line.label, value]));
      for (const [label, { element, line }] of values) {
        element.textContent = unit(found.length ? now.get(label) ?? NaN : latest(line.values));
      }
    };
  };
  draw();
  panel.unTheme?.();
  panel.unTheme = onTheme(draw);
}

export function latest(values) {
  for (let index = values.length - 1; index >= 0; index -= 1) if (!Number.isNaN(values[index])) return values[index];
  return NaN;
}

/** A panel with a line for each layer, or several told apart by a note; fetch: async (signal) → [{layer, note, ...column}]. */
export function layersPanel(clock, data, { title, about, height, logarithmic = false, unit = short, threshold, controls, fetch, points }) {
  const plot = new Lines(clock, { height, label: title });
  plot.logarithmic = logarithmic;
  const panel = new Panel({
    title, about, points, body: plot.element,
    controls: [...(controls ?? []), logSwitch(logarithmic, (value) => { plot.logarithmic = value; plot.redraw(); })],
    load: async (signal) => {
      const found = await fetch(signal);
      const layers = [...new Set(found.map((line) => line.layer))];
      const lines = found.map((line) => ({
        ...line, label: (line.layer < 0 ? "whole model" : `layer ${line.layer}`) + (line.note ? `, ${line.note}` : ""),
        colour: (now) => layerColour(layers.length > 1 ? layers.indexOf(line.layer) / (layers.length - 1) : 0.5, now),
      }));
      panel.lines = lines;
      mark();
      plot.setLines(lines, { logarithmic: plot.logarithmic, unit, threshold });
      plot.setLabel(`${title}. One line a layer, ${layers.length} layers. ${worst(lines, unit)}`);
      layerLegend(panel, layers, data);
    },
  });
  const mark = () => {
    for (const line of panel.lines ?? []) line.strong = line.layer === data.layer && panel.lines.some((other) => other.layer !== line.layer);
  };
  panel.mark = () => { mark(); plot.redraw(); if (panel.lines) layerLegend(panel, [...new Set(panel.lines.map((line) => line.layer))], data); };
  plot.onpick = (line) => { if (line.layer >= 0) views.change({ layer: line.layer }); };
  panel.plot = plot;
  panel.unTheme = onTheme(() => { if (panel.lines) layerLegend(panel, [...new Set(panel.lines.map((line) => line.layer))], data); });
  panel.ondispose = () => { plot.dispose(); panel.unTheme(); };
  return panel;
}

function worst(lines, unit) {
  let best = null;
  for (const line of lines) {
    const value = latest(line.values);
    if (best === null || value > best.value) best = { value, label: line.label };
  }
  return best ? `Largest at the end: ${best.label}, ${unit(best.value)}.` : "";
}

function layerLegend(panel, layers, data) {
  if (layers.length < 2) {
    fill(panel.legend, layers[0] < 0 ? "whole model" : layers.length ? `layer ${layers[0]}` : "");
    return;
  }
  const now = theme();
  const stops = [0, 0.25, 0.5, 0.75, 1].map((part) => css(layerColour(part, now))).join(", ");
  fill(panel.legend, h("span", {}, `layer ${layers[0]}`),
    h("i", { class: "layer-bar", style: { background: `linear-gradient(to right, ${stops})` } }),
    h("span", {}, `${layers.at(-1)}`),
    layers.includes(data.layer) ? h("span", { class: "bold-line" }, `bold: layer ${data.layer}`) : null);
}

/** Lines of all layers of a metric with several items: one of the folded columns min, median, max. */
export async function foldedLayers(data, metric, which, { statistic, signal, layers } = {}) {
  const info = data.metrics.get(metric);
  const fold = info.items > 1;
  const blocks = await data.points(metric, { statistic, fold, signal, layers });
  return blocks.map((block) => ({ layer: block.layer, ...column(block, fold ? ["min", "median", "max"].indexOf(which) : 0) }));
}

/** Lines of all layers of a derived figure. */
export async function figureLayers(data, figure, signal) {
  const [block] = await data.derived([figure], { signal });
  return block.columns.map((layer, index) => ({ layer, ...column(block, index) }));
}
