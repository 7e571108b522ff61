// Starts the page: head, token, and the view that the address names.

import { forgetToken, hasToken, onTokenNeeded } from "./api.js";
import { fill, h } from "./dom.js";
import { ago, whole } from "./format.js";
import { RunPage } from "./run_page.js";
import { RunsPage } from "./runs_page.js";
import { ServerPage } from "./server_page.js";
import { onTheme, switchTheme, theme } from "./theme.js";
import { format, views } from "./view.js";

const content = document.getElementById("content");
const top = document.getElementById("top");
const where = h("div", { class: "where" });
const liveness = h("span", { class: "live", role: "status" });

function drawHead() {
  const switcher = h("button", { type: "button", class: "icon", onclick: switchTheme });
  const label = () => {
    const next = theme() === "dark" ? "light" : "dark";
    switcher.textContent = theme() === "dark" ? "☀" : "☾";
    switcher.setAttribute("aria-label", `switch to the ${next} theme`);
    switcher.title = `switch to the ${next} theme`;
  };
  label();
  onTheme(label);
  fill(top,
    h("a", { class: "brand", href: "#/runs" }, h("img", { src: "/page/icon.svg", alt: "", width: 24, height: 24 }), "Steptron metrics"),
    where, liveness, h("span", { class: "grow" }),
    h("button", { type: "button", onclick: copyLink, title: "copy a link to this view" }, "Copy link"),
    h("a", { href: "#/server" }, "Server"), h("a", { href: "/api/v1/openapi.json" }, "API"),
    hasToken() ? h("button", { type: "button", onclick: () => { forgetToken(); location.reload(); } }, "Forget token") : null,
    switcher);
}

async function copyLink() {
  const link = new URL(format(views.now), location.href).href;
  try {
    await navigator.clipboard.writeText(link);
    say("The link is copied.");
  } catch {
    say(link); // without a secure context there is no clipboard
  }
}

function say(text) {
  const notice = h("div", { class: "notice" }, text);
  document.getElementById("notices").append(notice);
  setTimeout(() => notice.remove(), 5000);
}

function askForToken(reason) {
  return new Promise((resolve) => {
    const input = h("input", { type: "password", name: "token", autocomplete: "off", required: true, "aria-label": "token", spellcheck: "false" });
    const dialog = h("dialog", { class: "token", "aria-label": "token" }, h("form", {
      onsubmit: (event) => {
        event.preventDefault();
        dialog.close();
        dialog.remove();
        resolve(input.value.trim());
        setTimeout(drawHead);
      },
    }, h("h3", {}, "This server asks for a token"),
    h("p", { class: "quiet" }, reason || "One with the right to read. It is kept until this tab is closed."),
    input, h("div", { class: "actions" }, h("button", { class: "primary" }, "Go on"))));
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    document.body.append(dialog);
    dialog.showModal();
  });
}

let page = null;
let shown = null;

function showLive(run, error = null) {
  liveness.className = `live${run.live && !error ? " on" : ""}${error ? " lost" : ""}`;
  liveness.textContent = error ? "no answer from the server" : run.live
    ? `live · iteration ${whole(run.last_iteration)} · ${ago(run.last_ended_ns)}` : `${run.finished ? "finished" : "last heard of"} ${ago(run.last_ended_ns)}`;
}

async function show() {
  const { now } = views;
  const key = `${now.page} ${now.run ?? ""}`;
  if (key === shown) return;
  shown = key;
  page?.dispose();
  liveness.textContent = "";
  liveness.className = "live";
  const made = now.page === "run" ? new RunPage(content) : now.page === "server" ? new ServerPage(content) : new RunsPage(content);
  page = made;
  document.title = now.page === "run" ? `${now.run} – Steptron metrics` : "Steptron metrics";
  fill(where, h("a", { href: "#/runs" }, "Runs"), now.page === "run" ? [h("span", { "aria-hidden": "true" }, "›"), h("strong", {}, now.run)] : null);
  fill(content, h("p", { class: "quiet loading" }, "loading …"));
  if (now.page === "run") {
    made.live = (run) => { made.last = run; showLive(run); };
    made.failed = (error) => { if (made.last) showLive(made.last, error); };
  }
  try {
    await made.open(now.run);
    window.scrollTo(0, 0);
  } catch (error) {
    if (page !== made) return;
    fill(content, h("div", { class: "panel empty" }, h("h3", {}, "This cannot be shown"), h("p", {}, error.message),
      h("button", { type: "button", onclick: () => { shown = null; show(); } }, "Try again")));
  }
}

onTokenNeeded(askForToken);
views.addEventListener("change", ({ detail }) => {
  if (detail.before.page === detail.now.page && detail.before.run === detail.now.run) page?.changed(detail.before, detail.now);
  else show();
});
drawHead();
show();
