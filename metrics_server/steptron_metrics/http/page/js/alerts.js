// Alerts in words.

import { fill, h } from "./dom.js";
import { ago, moment, short, whole } from "./format.js";
import { views } from "./view.js";

const SIGNS = { critical: "▲", warning: "◆", info: "●" };

/** A card for an alert; with show, a button that goes to what it is about. */
export function alertCard(alert, { withRun = false } = {}) {
  const open = alert.ended_iteration === null;
  return h("article", { class: `alert ${alert.severity}${open ? "" : " ended"}` },
    h("header", {},
      h("span", { class: "sign", "aria-hidden": "true" }, SIGNS[alert.severity] ?? "●"),
      h("strong", {}, alert.rule.replaceAll("_", " ")),
      h("span", { class: "where" }, alert.subject),
      h("span", { class: "severity" }, open ? alert.severity : "ended")),
    h("p", { class: "saw" }, alert.saw),
    h("dl", {},
      h("dt", {}, "since"), h("dd", { title: moment(alert.since_ns) }, `iteration ${whole(alert.since_iteration)}, ${ago(alert.since_ns)}`,
        open ? "" : `; ended at ${whole(alert.ended_iteration)}`),
      h("dt", {}, "value"), h("dd", {}, `${short(number(alert.value))} against ${short(number(alert.threshold))}; worst ${short(number(alert.worst))}`),
      h("dt", {}, "likely cause"), h("dd", {}, alert.cause),
      h("dt", {}, "remedy"), h("dd", {}, alert.remedy),
      alert.wants_checkpoint ? [h("dt", {}, "checkpoint"), h("dd", {}, "asked for")] : []),
    alert.layer !== null || withRun ? h("button", { type: "button", onclick: () => goTo(alert) }, withRun ? `Open ${alert.run}` : "Show it") : null);
}

function goTo(alert) {
  views.change({
    page: "run", run: alert.run, layer: alert.layer ?? undefined,
    items: alert.layer !== null && alert.item !== null ? [alert.item] : [],
  });
  document.getElementById("experts")?.scrollIntoView({ behavior: "smooth" });
}

/** The API's numbers: null and "Infinity" stand for what JSON does not know. */
export function number(value) {
  return value === null ? NaN : Number(value);
}

export function fillAlerts(element, alerts, empty) {
  fill(element, alerts.length ? alerts.map((alert) => alertCard(alert)) : h("p", { class: "quiet" }, empty));
}
