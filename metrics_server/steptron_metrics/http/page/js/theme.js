// Light and dark.

import { views } from "./view.js";

const system = matchMedia("(prefers-color-scheme: dark)");
const KEY = "steptron-metrics-theme";

/** The theme that is shown: the address's, the person's choice, or the system's. */
export function theme() {
  const chosen = views.now.theme ?? localStorage.getItem(KEY);
  if (chosen === "dark" || chosen === "light") return chosen;
  return system.matches ? "dark" : "light";
}

const listeners = new Set();

export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function applyTheme() {
  const now = theme();
  if (document.documentElement.dataset.theme === now) return;
  document.documentElement.dataset.theme = now;
  readInk();
  for (const listener of listeners) listener(now);
}

export function switchTheme() {
  const next = theme() === "dark" ? "light" : "dark";
  localStorage.setItem(KEY, next);
  views.change({ theme: next });
  applyTheme();
}

/** Colours of the style sheet that drawings use. */
export const ink = {};

function readInk() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "soft", "faint", "grid", "surface", "accent", "critical", "warning", "info", "hole"]) {
    ink[name] = style.getPropertyValue(`--${name}`).trim();
  }
}

system.addEventListener("change", applyTheme);
views.addEventListener("change", applyTheme);
applyTheme();
