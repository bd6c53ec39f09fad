/* Elements without a framework. Text always becomes text nodes: nothing here parses HTML. */

export const byId = (id) => document.getElementById(id);

/** An element. A function value is a listener of the event that its key names, `true` an empty attribute. Children may
    come in arrays: an argument each is too many from some ten thousand on. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const icon = (name) => svg("svg", { "aria-hidden": "true" }, svg("use", { href: `#icon-${name}` }));

export function iconButton(name, label, onClick) {
  return h("button", { type: "button", class: "icon small", "aria-label": label, title: label, click: onClick }, icon(name));
}

/** Says `text` to screen readers, also when it is what was said last. */
export function announce(text) {
  const region = byId("announcer");
  region.textContent = "";
  requestAnimationFrame(() => (region.textContent = text));
}

/** Copies and says so on the button for a moment. */
export async function copyText(text, button) {
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copied = false; // no permission, or a page that is neither https nor localhost
  }
  announce(copied ? "Copied" : "The browser did not allow copying");
  button.classList.toggle("done", copied);
  setTimeout(() => button.classList.remove("done"), 1200);
}

export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

export const isNarrow = () => matchMedia("(max-width: 60rem)").matches;

export const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
