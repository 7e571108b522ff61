// Making elements.

/** An element with properties (class, on..., data-..., attributes) and children (elements or text; null is left out). */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Replaces what is inside an element. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** A labelled select; options are [value, text] or values. */
export function select(label, options, value, onchange, properties = {}) {
  const list = h("select", { "aria-label": label, onchange: () => onchange(list.value), ...properties },
    options.map((option) => {
      const [key, text] = Array.isArray(option) ? option : [option, option];
      return h("option", { value: key, selected: String(key) === String(value) }, text);
    }));
  return h("label", { class: "field" }, h("span", {}, label), list);
}

/** Calls a function at most once an animation frame. */
export function perFrame(action) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; action(); });
  };
}
