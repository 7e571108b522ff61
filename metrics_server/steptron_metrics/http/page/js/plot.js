// What all plots over time have in common: two canvases, the time axis, zooming, a cross-hair and a tool tip.

import { h, perFrame } from "./dom.js";
import { whole } from "./format.js";
import { ticks } from "./scale.js";
import { ink, onTheme } from "./theme.js";

const FONT = "11px system-ui, sans-serif";
const DRAG = 5;

export class Plot {
  /**
   * @param clock     the time axis
   * @param options   height in pixels; label for screen readers; small: without axes
   */
  constructor(clock, { height = 190, label = "", small = false } = {}) {
    this.clock = clock;
    this.small = small;
    this.margin = small ? { left: 1, right: 1, top: 1, bottom: 1 } : { left: 58, right: 12, top: 10, bottom: 22 };
    this.data = h("canvas", { class: "data", "aria-hidden": "true" });
    this.over = h("canvas", { class: "over", tabindex: small ? null : "0", role: small ? null : "img", "aria-label": label || null });
    this.tip = h("div", { class: "tip", role: "status", hidden: true });
    this.element = h("div", { class: small ? "plot small" : "plot", style: { height: `${height}px` } },
      this.data, this.over, this.tip);
    this.pointer = null;
    this.redraw = perFrame(() => this.#draw());
    this.redrawOver = perFrame(() => this.#drawOver());
    this.#cleanups = [onTheme(this.redraw)];
    this.#listen(clock, "range", this.redraw);
    this.#listen(clock, "hover", this.redrawOver);
    this.#observer = new ResizeObserver(() => this.#resize());
    this.#observer.observe(this.element);
    if (!small) this.#interact();
  }

  #cleanups;
  #observer;

  #listen(target, name, action) {
    target.addEventListener(name, action);
    this.#cleanups.push(() => target.removeEventListener(name, action));
  }

  dispose() {
    this.#observer.disconnect();
    for (const cleanup of this.#cleanups) cleanup();
  }

  setLabel(label) {
    this.over.setAttribute("aria-label", label);
  }

  // ------------------------------------------------------------------------------------------ places

  /** The plotting area in CSS pixels. */
  get area() {
    const { left, right, top, bottom } = this.margin;
    return { left, top, width: Math.max(1, this.width - left - right), height: Math.max(1, this.height - top - bottom) };
  }

  /** From iterations to pixels; an iteration is as wide as its share. */
  x(iteration) {
    const { left, width } = this.area;
    const span = this.clock.to - this.clock.from + 1;
    return left + ((iteration - this.clock.from + 0.5) / span) * width;
  }

  iterationAt(x) {
    const { left, width } = this.area;
    const span = this.clock.to - this.clock.from + 1;
    const at = this.clock.from - 0.5 + ((x - left) / width) * span;
    return Math.min(this.clock.to, Math.max(this.clock.from, Math.round(at)));
  }

  // ------------------------------------------------------------------------------------------ drawing

  #resize() {
    const { width, height } = this.element.getBoundingClientRect();
    if (!width || !height) return;
    const ratio = window.devicePixelRatio || 1;
    this.width = width;
    this.height = height;
    for (const canvas of [this.data, this.over]) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    this.ratio = ratio;
    this.#draw();
  }

  #context(canvas) {
    const context = canvas.getContext("2d");
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = FONT;
    return context;
  }

  #draw() {
    if (!this.width) return;
    const context = this.#context(this.data);
    const { left, top, width, height } = this.area;
    Object.assign(this.element.dataset, { left, top, width, height, from: this.clock.from, to: this.clock.to });
    this.draw(context);
    if (!this.small) {
      this.#drawTimeAxis(context);
      this.#drawMarks(context);
    }
    this.#drawOver();
  }

  #drawTimeAxis(context) {
    const { left, top, width, height } = this.area;
    context.font = FONT;
    context.textAlign = "center";
    context.textBaseline = "top";
    const bottom = top + height;
    const wanted = Math.max(2, Math.floor(width / 90));
    for (const tick of ticks(this.clock.from, this.clock.to, wanted)) {
      if (!Number.isInteger(tick)) continue;
      const x = this.x(tick);
      context.fillStyle = ink.faint;
      context.fillRect(Math.round(x), bottom, 1, 4);
      context.fillStyle = ink.soft;
      const text = whole(tick);
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(Math.max(x, left + half - 8), left + width - half + 8), bottom + 7);
    }
  }

  /** Alerts: a triangle where one began, a line while it was open. */
  #drawMarks(context) {
    const { left, top, width } = this.area;
    for (const alert of this.clock.marks) {
      const end = alert.ended_iteration ?? this.clock.to;
      if (end < this.clock.from || alert.since_iteration > this.clock.to) continue;
      const x = Math.max(left, this.x(alert.since_iteration));
      const stop = Math.min(left + width, this.x(end));
      context.fillStyle = ink[alert.severity] ?? ink.info;
      context.globalAlpha = 0.75;
      context.fillRect(x, top - 4, Math.max(1, stop - x), 2);
      context.globalAlpha = 1;
      context.beginPath();
      context.moveTo(x - 4, top - 9);
      context.lineTo(x + 4, top - 9);
      context.lineTo(x, top - 2);
      context.fill();
    }
  }

  /** Horizontal lines and labels of a scale whose 0 is at the bottom. */
  drawValueAxis(context, scale) {
    const { left, top, width, height } = this.area;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const tick of scale.ticks(Math.max(2, Math.floor(height / 38)))) {
      const y = top + height - scale.at(tick) * height;
      if (y < top - 1 || y > top + height + 1) continue;
      context.fillStyle = ink.grid;
      context.fillRect(left, Math.round(y), width, 1);
      context.fillStyle = ink.soft;
      context.fillText(this.tickText(tick), left - 7, y);
    }
  }

  /** A word in the middle instead of a drawing. */
  say(context, text) {
    const { left, top, width, height } = this.area;
    context.fillStyle = ink.soft;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(text, left + width / 2, top + height / 2);
  }

  tickText(value) {
    const size = Math.abs(value);
    if (size >= 1e5 || (size > 0 && size < 1e-3)) {
      const [head, power] = value.toExponential(1).split("e");
      return `${head.replace(".0", "")}e${Number(power)}`.replaceAll("-", "−");
    }
    return Number(value.toPrecision(6)).toLocaleString("en-US", { maximumFractionDigits: 6 });
  }

  #drawOver() {
    if (!this.width) return;
    const context = this.#context(this.over);
    const { left, top, width, height } = this.area;
    const { hover } = this.clock;
    if (this.drag && Math.abs(this.drag.now - this.drag.start) > DRAG) {
      const [a, b] = [this.drag.start, this.drag.now].sort((one, other) => one - other);
      context.fillStyle = ink.accent;
      context.globalAlpha = 0.18;
      context.fillRect(Math.max(a, left), top, Math.min(b, left + width) - Math.max(a, left), height);
      context.globalAlpha = 1;
    }
    if (hover !== null && hover >= this.clock.from && hover <= this.clock.to && !this.small) {
      context.fillStyle = ink.soft;
      context.globalAlpha = 0.6;
      context.fillRect(Math.round(this.x(hover)), top, 1, height);
      context.globalAlpha = 1;
    }
    this.drawOver(context);
  }

  showTip(x, y, ...lines) {
    this.tip.replaceChildren(...lines.map((line) => (line instanceof Node ? line : h("div", {}, line))));
    this.tip.hidden = false;
    const { offsetWidth, offsetHeight } = this.tip;
    const right = x + 14 + offsetWidth < this.width;
    this.tip.style.left = `${right ? x + 14 : Math.max(0, x - 14 - offsetWidth)}px`;
    this.tip.style.top = `${Math.max(0, Math.min(y - offsetHeight / 2, this.height - offsetHeight))}px`;
  }

  hideTip() {
    this.tip.hidden = true;
  }

  /** What alerts say about an iteration, for a tool tip. */
  alertLines(iteration) {
    const near = ((this.clock.to - this.clock.from + 1) / this.area.width) * 5;
    return this.clock.marks
      .filter((alert) => Math.abs(alert.since_iteration - iteration) <= near)
      .slice(0, 4)
      .map((alert) => h("div", { class: `tip-alert ${alert.severity}` }, `▼ ${alert.rule.replaceAll("_", " ")}: ${alert.subject}`));
  }

  // ------------------------------------------------------------------------------------------ hands

  #interact() {
    const { over } = this;
    over.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      this.drag = { start: event.offsetX, now: event.offsetX };
      over.setPointerCapture(event.pointerId);
    });
    over.addEventListener("pointermove", (event) => {
      this.pointer = { x: event.offsetX, y: event.offsetY };
      if (this.drag) this.drag.now = event.offsetX;
      this.clock.setHover(this.iterationAt(event.offsetX));
      this.redrawOver();
    });
    over.addEventListener("pointerup", (event) => {
      const { drag } = this;
      this.drag = null;
      if (!drag) return;
      if (Math.abs(event.offsetX - drag.start) > DRAG) {
        this.clock.zoom(this.iterationAt(drag.start), this.iterationAt(event.offsetX));
      } else {
        this.click();
      }
      this.redrawOver();
    });
    over.addEventListener("pointercancel", () => { this.drag = null; this.redrawOver(); });
    over.addEventListener("pointerleave", () => this.#leave());
    over.addEventListener("blur", () => this.#leave());
    over.addEventListener("dblclick", () => this.clock.zoomOut());
    over.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (this.key(event.key, event.shiftKey)) event.preventDefault();
    });
  }

  #leave() {
    if (this.drag) return;
    this.pointer = null;
    this.clock.setHover(null);
    this.hideTip();
    this.redrawOver();
  }

  key(key, shift) {
    const { clock } = this;
    const { left, top, width, height } = this.area;
    const step = Math.max(1, Math.round(((clock.to - clock.from + 1) / width) * (shift ? 40 : 4)));
    const at = clock.hover ?? clock.to;
    if (key === "ArrowLeft" || key === "ArrowRight") {
      const next = Math.min(clock.to, Math.max(clock.from, at + (key === "ArrowLeft" ? -step : step)));
      this.pointer = { x: this.x(next), y: this.pointer?.y ?? top + height / 2 };
      clock.setHover(next);
    } else if (key === "ArrowUp" || key === "ArrowDown") {
      const y = (this.pointer?.y ?? top + height / 2) + (key === "ArrowUp" ? -1 : 1) * this.verticalStep(shift);
      this.pointer = { x: this.pointer?.x ?? this.x(at), y: Math.min(top + height - 0.5, Math.max(top + 0.5, y)) };
      if (clock.hover === null) clock.setHover(at);
      this.redrawOver();
    } else if (key === "+" || key === "=") clock.zoomBy(0.5);
    else if (key === "-") clock.zoomBy(2);
    else if (key === "0") clock.zoomOut();
    else if (key === "Enter" || key === " ") this.click();
    else if (key === "Escape") this.#leave();
    else return false;
    return true;
  }

  verticalStep() {
    return 6;
  }

  draw() {}

  drawOver() {}

  click() {}
}

