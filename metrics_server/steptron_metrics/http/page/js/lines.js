// Lines over time, with a band between the least and the largest where points stand for several iterations.

import { pointAt } from "./clock.js";
import { css } from "./colour.js";
import { h } from "./dom.js";
import { iterations, large, short } from "./format.js";
import { Plot } from "./plot.js";
import { scaleOf } from "./scale.js";
import { ink, theme } from "./theme.js";

const FEW = 8;

export class Lines extends Plot {
  /** lines: [{label, colour: (theme) => rgb, first, last, values, low, high, dashed, faint, strong}] */
  setLines(lines, { logarithmic = false, unit = short, threshold = null } = {}) {
    this.lines = lines;
    this.logarithmic = logarithmic;
    this.unit = unit;
    this.threshold = threshold;
    this.redraw();
  }

  lines = null;
  logarithmic = false;
  unit = short;
  threshold = null;
  highlighted = null;

  /** Makes one line stand out; null: none. */
  highlight(label) {
    if (this.highlighted === label) return;
    this.highlighted = label;
    this.redraw();
  }

  draw(context) {
    if (this.lines === null) {
      this.say(context, "loading …");
      return;
    }
    const shown = this.lines.map((line) => this.#visible(line));
    const arrays = shown.flatMap((line) => [line.values, line.low ?? line.values, line.high ?? line.values]);
    if (this.threshold !== null) arrays.push([this.threshold]);
    this.scale = scaleOf(arrays, this.logarithmic);
    this.drawValueAxis(context, this.scale);
    const { left, top, width, height } = this.area;
    if (!this.lines.length || !arrays.some((values) => values.length)) {
      this.say(context, "nothing measured here");
      return;
    }
    context.save();
    context.beginPath();
    context.rect(left, top - 2, width, height + 4);
    context.clip();
    const now = theme();
    const many = this.lines.length > FEW;
    if (this.threshold !== null) this.#dashed(context, this.threshold);
    if (!many) for (const line of shown) this.#band(context, line, now);
    for (const line of shown) if (!this.#stands(line)) this.#line(context, line, now, many);
    for (const line of shown) {
      if (!this.#stands(line)) continue;
      if (many) this.#band(context, line, now);
      this.#line(context, line, now, false);
    }
    context.restore();
  }

  tickText(value) {
    return this.unit === large && Math.abs(value) >= 1000 ? large(value) : super.tickText(value);
  }

  #stands(line) {
    return this.highlighted === null ? Boolean(line.strong) : line.label === this.highlighted;
  }

  #dashed(context, value) {
    const { left, width } = this.area;
    context.setLineDash([4, 4]);
    context.strokeStyle = ink.warning;
    context.beginPath();
    context.moveTo(left, this.y(value));
    context.lineTo(left + width, this.y(value));
    context.stroke();
    context.setLineDash([]);
  }

  /** The part of a line within the shown range and one point beyond on either side. */
  #visible(line) {
    let start = 0;
    let end = line.first.length;
    while (start < end && line.last[start] < this.clock.from) start += 1;
    while (end > start && line.first[end - 1] > this.clock.to) end -= 1;
    if (start === 0 && end === line.first.length) return line;
    const cut = (plane) => plane?.subarray(start, end);
    return { ...line, first: cut(line.first), last: cut(line.last), values: cut(line.values), low: cut(line.low), high: cut(line.high) };
  }

  y(value) {
    const { top, height } = this.area;
    if (this.logarithmic && value <= 0) return top + height + 10;
    if (value === Infinity) return top - 5;
    return top + height - this.scale.at(value) * height;
  }

  #xOf(line, index) {
    return this.x((line.first[index] + line.last[index]) / 2);
  }

  #band(context, line, now) {
    if (!line.low || !line.high) return;
    context.fillStyle = css(line.colour(now), line.faint ? 0.1 : 0.2);
    let start = 0;
    while (start < line.values.length) {
      while (start < line.values.length && Number.isNaN(line.low[start])) start += 1;
      let end = start;
      while (end < line.values.length && !Number.isNaN(line.low[end])) end += 1;
      if (end > start) {
        context.beginPath();
        for (let i = start; i < end; i += 1) context.lineTo(this.#xOf(line, i), this.y(line.high[i]));
        for (let i = end - 1; i >= start; i -= 1) context.lineTo(this.#xOf(line, i), this.y(line.low[i]));
        context.fill();
      }
      start = end;
    }
  }

  #line(context, line, now, many) {
    const faded = this.highlighted !== null && line.label !== this.highlighted;
    context.globalAlpha = faded ? 0.25 : many ? 0.8 : 1;
    context.strokeStyle = css(line.colour(now));
    context.fillStyle = context.strokeStyle;
    context.lineWidth = this.#stands(line) ? 2.2 : many || line.faint ? 1 : 1.5;
    context.lineJoin = "round";
    if (line.dashed) context.setLineDash([5, 3]);
    context.beginPath();
    let pen = false;
    for (let index = 0; index < line.values.length; index += 1) {
      const value = line.values[index];
      if (Number.isNaN(value)) { pen = false; continue; }
      const x = this.#xOf(line, index);
      const y = this.y(value);
      if (pen) context.lineTo(x, y);
      else context.moveTo(x, y);
      const alone = !pen && (index + 1 === line.values.length || Number.isNaN(line.values[index + 1]));
      if (alone) context.rect(x - 1, y - 1, 2, 2);
      pen = true;
    }
    context.stroke();
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  /** What each line is at an iteration: [{line, index, value}]. */
  at(iteration) {
    return (this.lines ?? []).flatMap((line) => {
      const index = pointAt(line, iteration);
      return index < 0 || Number.isNaN(line.values[index]) ? [] : [{ line, index, value: line.values[index] }];
    });
  }

  drawOver(context) {
    const { hover } = this.clock;
    this.onhover?.(hover === null ? [] : this.at(hover));
    if (hover === null || !this.pointer || !this.scale) {
      this.hideTip();
      return;
    }
    const found = this.at(hover);
    if (!found.length) {
      this.hideTip();
      return;
    }
    const distance = ({ value }) => Math.abs(this.y(value) - this.pointer.y);
    const nearest = found.reduce((best, one) => (distance(one) < distance(best) ? one : best));
    const now = theme();
    context.fillStyle = css(nearest.line.colour(now));
    context.beginPath();
    context.arc(this.x(hover), this.y(nearest.value), 4, 0, 7);
    context.fill();
    const { first, last } = nearest.line;
    const listed = found.length <= FEW ? found : [nearest];
    this.nearest = nearest.line;
    this.showTip(this.x(hover), this.pointer.y,
      h("div", { class: "tip-head" }, iterations(first[nearest.index], last[nearest.index])),
      ...listed.map((one) => this.#row(one, one === nearest, now)),
      ...(found.length > FEW ? this.#extremes(found, now) : []),
      ...this.alertLines(hover));
  }

  #row({ line, index, value }, strong, now) {
    const band = line.low && line.high && line.low[index] !== line.high[index]
      ? h("span", { class: "tip-band" }, ` ${this.unit(line.low[index])} to ${this.unit(line.high[index])}`) : null;
    return h("div", { class: strong ? "tip-row strong" : "tip-row" },
      h("i", { class: "swatch", style: { background: css(line.colour(now)) } }),
      h("span", {}, line.label), h("b", {}, this.unit(value)), band);
  }

  #extremes(found, now) {
    const sorted = [...found].sort((a, b) => b.value - a.value);
    return [h("div", { class: "tip-note" }, `largest and least of ${found.length}`),
      this.#row(sorted[0], false, now), this.#row(sorted.at(-1), false, now)];
  }

  click() {
    if (this.nearest) this.onpick?.(this.nearest);
  }
}
