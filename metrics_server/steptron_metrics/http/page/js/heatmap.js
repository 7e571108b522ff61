// Items by time as colours.

import { pointAt } from "./clock.js";
import { DIVERGING, RAMPS, css, lineColour, packed } from "./colour.js";
import { h } from "./dom.js";
import { iterations, short, whole } from "./format.js";
import { Plot } from "./plot.js";
import { ticks } from "./scale.js";
import { ink, theme } from "./theme.js";

const HOLES = { light: [221, 221, 216], dark: [45, 51, 60] };

/**
 * What colours are chosen by, made once of a block: natural logarithms, medians over the items, and the bounds.
 * Of a relative one, logarithms are of the ratio to the median.
 */
export function shade(block, plane, relative) {
  const { rows, width } = block;
  const source = block[plane] ?? block.values ?? block.high ?? block.low;
  const logs = new Float32Array(rows * width);
  const medians = new Float32Array(rows);
  let low = Infinity;
  let high = -Infinity;
  const sorted = new Float32Array(width);
  for (let row = 0; row < rows; row += 1) {
    const start = row * width;
    let count = 0;
    let zeros = 0;
    for (let item = 0; item < width; item += 1) {
      const value = source[start + item];
      if (value >= 0) sorted[count++] = value;
      if (value === 0) zeros += 1;
    }
    let measured = sorted.subarray(0, count).sort();
    // When more than half are zero, the others are compared among themselves.
    if (2 * zeros >= count) measured = measured.subarray(zeros);
    const middle = measured.length - 1;
    const median = middle < 0 ? NaN : Math.log((measured[middle >> 1] + measured[(middle + 1) >> 1]) / 2);
    medians[row] = median;
    for (let item = 0; item < width; item += 1) {
      const value = source[start + item];
      // Zero is a measurement, the least there can be: the darkest colour, and no part of the bounds.
      let log = value > 0 ? Math.log(value) : value <= 0 ? -Infinity : NaN;
      if (relative) log -= median;
      logs[start + item] = log;
      if (Number.isFinite(log)) {
        if (log < low) low = log;
        if (log > high) high = log;
      }
    }
  }
  return { block, source, logs, medians, relative, low, high };
}

const SAMPLES = 2048;

/**
 * From logarithms to [0, 1], for several shades together or for one. The middle 98 % get at least three fifths of the
 * colours, so that what is usual keeps its texture beside an outlier a thousand times as large; each part is logarithmic.
 */
export function bounds(shades, relative) {
  const values = [];
  let low = Infinity;
  let high = -Infinity;
  for (const { logs, low: least, high: largest } of shades) {
    low = Math.min(low, least);
    high = Math.max(high, largest);
    const step = Math.max(1, Math.floor(logs.length / SAMPLES)) | 1;
    for (let index = 0; index < logs.length; index += step) if (Number.isFinite(logs[index])) values.push(logs[index]);
  }
  if (low > high) return pieces([-1, 1], [0, 1]);
  values.sort((a, b) => a - b);
  const quantile = (part) => values[Math.min(values.length - 1, Math.floor(part * values.length))] ?? low;
  if (relative) {
    const usual = Math.max(0.3, -quantile(0.01), quantile(0.99));
    const most = Math.max(Math.log(4), Math.abs(low), Math.abs(high), usual * 1.01);
    const share = Math.max(0.6, usual / most) / 2;
    return pieces([-most, -usual, usual, most], [0, 0.5 - share, 0.5 + share, 1]);
  }
  if (high - low < 0.4) return pieces([(low + high) / 2 - 0.2, (low + high) / 2 + 0.2], [0, 1]);
  const from = quantile(0.01);
  const to = Math.max(quantile(0.99), from + 1e-6);
  const span = high - low;
  if ((to - from) / span >= 0.6) return pieces([low, high], [0, 1]);
  const outside = span - (to - from);
  const below = (0.4 * (from - low)) / outside;
  return pieces([low, from, to, high], [0, below, below + 0.6, 1]);
}

/** A scale of straight pieces between knots. */
function pieces(knots, places) {
  const at = (log) => {
    if (log <= knots[0]) return places[0];
    for (let index = 1; index < knots.length; index += 1) {
      if (log <= knots[index]) {
        const part = (log - knots[index - 1]) / (knots[index] - knots[index - 1] || 1);
        return places[index - 1] + part * (places[index] - places[index - 1]);
      }
    }
    return 1;
  };
  return { knots, places, at };
}

export function colours(ramp, relative) {
  return relative ? DIVERGING[theme()] : RAMPS[ramp] ?? RAMPS.aurora;
}

export class HeatMap extends Plot {
  shade = null;
  limits = pieces([0, 1], [0, 1]);
  ramp = "aurora";
  itemName = "item";
  chosen = [];
  flagged = [];

  set(options) {
    Object.assign(this, options);
    this.redraw();
  }

  draw(context) {
    const { left, top, width, height } = this.area;
    const { shade } = this;
    if (!shade || !shade.block.rows || !shade.block.width) {
      context.fillStyle = ink.hole;
      context.fillRect(left, top, width, height);
      if (!this.small) this.say(context, shade ? "nothing measured here" : "loading …");
      return;
    }
    const pixelWidth = Math.max(1, Math.round(width * this.ratio));
    const pixelHeight = Math.max(1, Math.round(height * this.ratio));
    const rows = Math.min(pixelHeight, shade.block.width);
    const image = this.#image(pixelWidth, rows);
    const canvas = new OffscreenCanvas(pixelWidth, rows);
    canvas.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(canvas, left, top, width, height);
    this.element.dataset.items = shade.block.width;
    if (!this.small) this.#items(context);
    this.#flags(context);
  }

  /** Where several items share a row of pixels, the one farthest from the median is shown: outliers never vanish. */
  #image(pixelWidth, rows) {
    const { block, logs, medians, relative } = this.shade;
    const table = packed(colours(this.ramp, relative), HOLES[theme()]);
    const { at } = this.limits;
    const image = new ImageData(pixelWidth, rows);
    const pixels = new Uint32Array(image.data.buffer);
    const columnOf = new Map();
    const span = this.clock.to - this.clock.from + 1;
    for (let x = 0; x < pixelWidth; x += 1) {
      const iteration = Math.min(this.clock.to, Math.floor(this.clock.from + (x / pixelWidth) * span));
      const point = pointAt(block, iteration);
      const same = columnOf.get(point);
      if (same !== undefined) {
        for (let row = 0; row < rows; row += 1) pixels[row * pixelWidth + x] = pixels[row * pixelWidth + same];
        continue;
      }
      columnOf.set(point, x);
      const start = point * block.width;
      const reference = relative ? 0 : medians[point];
      for (let row = 0; row < rows; row += 1) {
        let index = 256;
        if (point >= 0) {
          const from = Math.floor((row * block.width) / rows);
          const to = Math.max(from + 1, Math.floor(((row + 1) * block.width) / rows));
          let log = logs[start + from];
          for (let item = from + 1; item < to; item += 1) {
            const other = logs[start + item];
            if (Number.isNaN(log) || Math.abs(other - reference) > Math.abs(log - reference)) log = other;
          }
          if (!Number.isNaN(log)) index = Math.min(255, Math.max(0, Math.round(at(log) * 255)));
        }
        pixels[row * pixelWidth + x] = table[index];
      }
    }
    return image;
  }

  #items(context) {
    const { left, top, height } = this.area;
    const count = this.shade.block.width;
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillStyle = ink.soft;
    for (const tick of ticks(0, count - 1, Math.max(2, Math.floor(height / 34)))) {
      if (Number.isInteger(tick)) context.fillText(whole(tick), left - 9, this.rowY(tick));
    }
    const now = theme();
    this.chosen.forEach((item, index) => {
      if (item >= count) return;
      const y = this.rowY(item);
      context.fillStyle = css(lineColour(index, now));
      context.beginPath();
      context.moveTo(left - 1, y);
      context.lineTo(left - 8, y - 4.5);
      context.lineTo(left - 8, y + 4.5);
      context.fill();
    });
  }

  /** Alerts about one item: lines just above and below its row from when the alert began, and its number. */
  #flags(context) {
    const { left, width, height } = this.area;
    const count = this.shade.block.width;
    for (const alert of this.flagged) {
      const end = alert.ended_iteration ?? this.clock.to;
      if (alert.item === null || alert.item >= count || end < this.clock.from || alert.since_iteration > this.clock.to) continue;
      const from = Math.max(left, this.x(alert.since_iteration));
      const to = Math.max(Math.min(left + width, this.x(end)), from + 2);
      const half = Math.max(height / count, 1) / 2 + (this.small ? 2 : 3);
      const y = this.rowY(alert.item);
      context.fillStyle = ink[alert.severity] ?? ink.info;
      const thick = this.small ? 1 : 1.5;
      context.fillRect(from, y - half - thick, to - from, thick);
      context.fillRect(from, y + half, to - from, thick);
      if (this.small) continue;
      const text = `${this.itemName} ${alert.item}`;
      context.font = "600 11px system-ui, sans-serif";
      const wide = context.measureText(text).width + 10;
      const x = Math.min(from, left + width - wide);
      const below = y + half + 20 < this.area.top + height;
      context.fillRect(x, below ? y + half : y - half - 17, wide, 17);
      context.fillStyle = ink.surface;
      context.textAlign = "left";
      context.textBaseline = "middle";
      context.fillText(text, x + 5, below ? y + half + 9 : y - half - 8);
    }
  }

  rowY(item) {
    const { top, height } = this.area;
    return top + ((item + 0.5) / this.shade.block.width) * height;
  }

  verticalStep(shift) {
    return this.shade ? Math.max(0.5, this.area.height / this.shade.block.width) * (shift ? 10 : 1) : 6;
  }

  /** What is under the pointer: {item, point} or null. */
  under() {
    if (!this.pointer || !this.shade || this.clock.hover === null) return null;
    const { top, height } = this.area;
    const part = (this.pointer.y - top) / height;
    if (part < 0 || part >= 1) return null;
    const point = pointAt(this.shade.block, this.clock.hover);
    return point < 0 ? null : { item: Math.floor(part * this.shade.block.width), point };
  }

  drawOver(context) {
    const found = this.small ? null : this.under();
    if (!found) {
      this.hideTip();
      return;
    }
    const { block, source, medians } = this.shade;
    const { item, point } = found;
    const { left, width } = this.area;
    context.strokeStyle = ink.ink;
    context.globalAlpha = 0.8;
    context.lineWidth = 1;
    const tall = Math.max(this.area.height / block.width, 2);
    context.strokeRect(left, this.rowY(item) - tall / 2, width, tall);
    context.globalAlpha = 1;
    const at = point * block.width + item;
    const value = source[at];
    const lines = [h("div", { class: "tip-head" }, iterations(block.first[point], block.last[point])),
      h("div", {}, `${this.itemName} ${this.items?.(item) ?? whole(item)}: `, h("b", {}, short(value)))];
    if (block.low && block.high && block.low[at] !== block.high[at]) {
      lines.push(h("div", { class: "tip-band" }, `${short(block.low[at])} to ${short(block.high[at])}`));
    }
    const ratio = value / Math.exp(medians[point]);
    if (Number.isFinite(ratio) && block.width > 1) lines.push(h("div", { class: "tip-note" }, `${short(ratio)} × the median`));
    this.showTip(this.pointer.x, this.pointer.y, ...lines, ...this.alertLines(this.clock.hover));
  }

  click() {
    const found = this.under();
    if (found) this.onpick?.(found.item);
  }
}

/** A bar that explains the colours. */
export class ColourBar {
  constructor() {
    this.canvas = h("canvas", { class: "bar", width: 256, height: 1, "aria-hidden": "true" });
    this.labels = h("div", { class: "bar-labels" });
    this.note = h("span", { class: "bar-note" });
    this.element = h("div", { class: "colour-bar" }, h("div", { class: "bar-box" }, this.canvas, this.labels), this.note);
  }

  set({ knots, places }, ramp, relative) {
    const context = this.canvas.getContext("2d");
    colours(ramp, relative).forEach((colour, x) => {
      context.fillStyle = css(colour);
      context.fillRect(x, 0, 1, 1);
    });
    const marks = knots.map((log, index) => [log, places[index]]);
    if (relative) marks.push([0, 0.5]);
    // The ends are always labelled, what is between them where there is room.
    const clear = ([, place]) => place === 0 || place === 1 || (place > 0.13 && place < 0.87);
    this.labels.replaceChildren(...marks.filter(clear).map(([log, place]) => h("span", {
      style: { left: `${place * 100}%` },
    }, `${relative ? "×" : ""}${short(Math.exp(log))}`)));
    this.note.textContent = [relative ? "of the median of the items, logarithmic" : "logarithmic",
      knots.length > 2 ? "; most of the colours for the middle 98 %" : "", ". Grey: not measured."].join("");
  }
}
