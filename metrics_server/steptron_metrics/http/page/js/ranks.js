// How long each rank takes, and which is the slowest among those that do the same work.

import { fill, h } from "./dom.js";
import { iterations, short, whole } from "./format.js";
import { ColourBar, HeatMap, bounds, shade } from "./heatmap.js";
import { Panel } from "./panel.js";

const METRIC = "rank.compute_seconds";
const STAGE = "rank.stage";
const VALUES = 1_200_000;

export function ranksPanel(clock, data) {
  const map = new HeatMap(clock, { height: 260, label: "Heat map of the ranks' times" });
  map.itemName = "rank";
  const bar = new ColourBar();
  const table = h("div", { class: "table-box" });
  const { items } = data.metrics.get(METRIC);
  const points = Math.max(20, Math.min(400, Math.floor(VALUES / items)));
  const panel = new Panel({
    title: "Time of each rank", className: "full", points,
    about: "Time in the step that a rank spends in attention alone, where it waits for no other; colours relative to the median of all ranks.",
    body: [map.element, bar.element, table],
    load: async (signal) => {
      const [[block], [stages]] = await Promise.all([
        data.points(METRIC, { maxPoints: points, planes: ["values", "high"], signal }),
        data.has(STAGE) ? data.points(STAGE, { maxPoints: 1, planes: ["values"], signal }) : [null],
      ]);
      if (signal.aborted) return;
      const one = shade(block, "values", true);
      const limits = bounds([one], true);
      map.set({ shade: one, limits });
      bar.set(limits, "aurora", true);
      const { rows, text } = slowest(block, stages);
      map.setLabel(`Heat map of the ranks' times. ${text}`);
      fill(table, rows.length ? [
        h("h4", {}, `Slowest in ${rows[0].when}`),
        h("table", {},
          h("thead", {}, h("tr", {}, ["rank", "stage", "seconds", "against its stage's median"].map((name) => h("th", { scope: "col" }, name)))),
          h("tbody", {}, rows.map((row) => h("tr", {}, h("td", {}, whole(row.rank)), h("td", {}, row.stage),
            h("td", {}, short(row.seconds)), h("td", {}, `${short(row.ratio)} ×`))))),
      ] : h("p", { class: "quiet" }, "nothing measured yet"));
    },
  });
  panel.ondispose = () => map.dispose();
  return panel;
}

function slowest(block, stages) {
  if (!block.rows) return { rows: [], text: "" };
  const last = block.rows - 1;
  const byStage = new Map();
  for (let rank = 0; rank < block.width; rank += 1) {
    const seconds = block.values[last * block.width + rank];
    if (Number.isNaN(seconds)) continue;
    const stage = stages && rank < stages.width ? stages.values[rank] : 0;
    if (!byStage.has(stage)) byStage.set(stage, []);
    byStage.get(stage).push({ rank, seconds });
  }
  const rows = [];
  for (const [stage, ranks] of byStage) {
    const sorted = ranks.map(({ seconds }) => seconds).sort((a, b) => a - b);
    const median = sorted[(sorted.length - 1) >> 1];
    for (const { rank, seconds } of ranks) {
      rows.push({ rank, seconds, stage: stages ? whole(stage) : "–", ratio: seconds / median, when: iterations(block.first[last], block.last[last]) });
    }
  }
  rows.sort((a, b) => b.ratio - a.ratio);
  const [first] = rows;
  return { rows: rows.slice(0, 8), text: first ? `Slowest: rank ${first.rank}, ${short(first.ratio)} times the median of its stage.` : "" };
}
