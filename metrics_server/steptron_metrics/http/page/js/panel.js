// A card that loads what it shows when it can be seen, and again when that has changed.

import { ApiError } from "./api.js";
import { fill, h } from "./dom.js";

const MIN_SECONDS = 1.5;

export class Panel {
  /**
   * @param title     heading
   * @param about     a sentence under it
   * @param body      elements
   * @param load      async (signal) → shows what is to be seen; called when visible
   * @param points    about how many points are shown: a live run is asked again when so small a part of it is new
   */
  constructor({ title, about = "", controls = [], body, load, points = 500, className = "" }) {
    this.heading = h("h3", {}, title);
    this.aboutLine = h("p", { class: "about" }, about);
    this.legend = h("div", { class: "legend" });
    this.message = h("div", { class: "panel-message", role: "status", hidden: true });
    this.element = h("section", { class: `panel ${className}` },
      h("header", {}, h("div", {}, this.heading, this.aboutLine), h("div", { class: "controls" }, controls)),
      this.legend, this.message, body);
    this.load = load;
    this.points = points;
    this.visible = false;
    this.stale = true;
    this.loadedAt = 0;
    this.loadedTo = 0;
  }

  setTitle(title, about) {
    this.heading.textContent = title;
    if (about !== undefined) this.aboutLine.textContent = about;
  }

  /** What is shown is no longer what is wanted. */
  invalidate() {
    this.stale = true;
    this.abort?.abort();
    if (this.visible) this.refresh();
  }

  /** A live run has got to an iteration; span: how many are shown. */
  advance(last, span) {
    this.wantedTo = last;
    if (last === this.loadedTo || this.element.dataset.state === "loading") return;
    const enough = last - this.loadedTo >= Math.max(1, Math.floor(span / this.points));
    if (enough && performance.now() - this.loadedAt > MIN_SECONDS * 1000) {
      this.stale = true;
      if (this.visible) this.refresh(last);
    }
  }

  show(visible) {
    this.visible = visible;
    if (visible && this.stale) this.refresh();
  }

  async refresh(last = this.wantedTo ?? 0) {
    this.abort?.abort();
    const abort = new AbortController();
    this.abort = abort;
    this.stale = false;
    this.element.dataset.state = "loading";
    try {
      await this.load(abort.signal);
      if (abort.signal.aborted) return;
      this.message.hidden = true;
      this.loadedAt = performance.now();
      this.loadedTo = last;
      this.element.dataset.state = "ready";
    } catch (error) {
      if (abort.signal.aborted || error.name === "AbortError") return;
      this.stale = true;
      this.element.dataset.state = "failed";
      this.message.hidden = false;
      const why = error instanceof ApiError ? error.message : `cannot be loaded: ${error.message}`;
      fill(this.message, why, " ", h("button", { type: "button", onclick: () => this.refresh() }, "Try again"));
    }
  }

  dispose() {
    this.abort?.abort();
    this.ondispose?.();
  }
}

/** Tells panels when they come into sight and go out of it. */
export class Panels {
  #panels = new Map();
  #observer = new IntersectionObserver((entries) => {
    for (const entry of entries) this.#panels.get(entry.target)?.show(entry.isIntersecting);
  }, { rootMargin: "120px 0px" });

  add(...panels) {
    for (const panel of panels) {
      this.#panels.set(panel.element, panel);
      this.#observer.observe(panel.element);
    }
    return panels;
  }

  [Symbol.iterator]() {
    return this.#panels.values();
  }

  dispose() {
    this.#observer.disconnect();
    for (const panel of this) panel.dispose();
    this.#panels.clear();
  }
}
