// The time axis that all plots of a run share: the range that is shown, where the pointer is, and marks of alerts.

export class Clock extends EventTarget {
  from = 1;
  to = 1;
  hover = null;
  marks = [];
  #zoom;

  /** zoom: called with (from, to), or (null, null) for everything. */
  constructor(zoom) {
    super();
    this.#zoom = zoom;
  }

  setRange(from, to) {
    if (from === this.from && to === this.to) return;
    this.from = from;
    this.to = Math.max(from, to);
    this.dispatchEvent(new Event("range"));
  }

  setHover(iteration) {
    if (iteration === this.hover) return;
    this.hover = iteration;
    this.dispatchEvent(new Event("hover"));
  }

  setMarks(alerts) {
    this.marks = alerts;
    this.dispatchEvent(new Event("range"));
  }

  zoom(from, to) {
    this.#zoom(Math.max(1, Math.round(Math.min(from, to))), Math.round(Math.max(from, to)));
  }

  zoomBy(factor) {
    const middle = this.hover ?? (this.from + this.to) / 2;
    const from = Math.round(middle - (middle - this.from) * factor);
    const to = Math.round(middle + (this.to - middle) * factor);
    if (to > from) this.zoom(from, to);
  }

  zoomOut() {
    this.#zoom(null, null);
  }
}

/** Index of the point that an iteration belongs to; -1 where there is none. */
export function pointAt(block, iteration) {
  let low = 0;
  let high = block.first.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (block.first[middle] <= iteration) low = middle;
    else high = middle - 1;
  }
  return high >= 0 && block.first[low] <= iteration && iteration <= block.last[low] ? low : -1;
}
