/* The two panels beside the conversation. In a narrow window they lie over it: then what is below is inert, Escape
   closes them, and the focus goes back to where it came from. */

import { byId, isNarrow } from "./dom.js";
import { settings } from "./store.js";

const WORKSPACE = "workspace";
const SIDES = {
  sidebar: { toggle: "toggle-sidebar", wide: "open" },
  panel: { toggle: "toggle-panel", wide: "closed" },
};

let narrow = isNarrow();

const isOpen = (name) => !byId(name).hidden;

function setOpen(name, open) {
  byId(name).hidden = !open;
  byId(SIDES[name].toggle).setAttribute("aria-expanded", String(open));
  if (!narrow) settings.set(name, open ? "open" : "closed");
  cover();
}

function cover() {
  const covered = narrow && Object.keys(SIDES).some(isOpen);
  byId(WORKSPACE).inert = covered;
  byId("backdrop").hidden = !covered;
}

export function openPanel(name) {
  if (narrow) for (const other of Object.keys(SIDES)) if (other !== name && isOpen(other)) setOpen(other, false);
  setOpen(name, true);
  if (narrow) byId(name).querySelector("[data-close]").focus();
}

export function closePanel(name) {
  const focusInside = byId(name).contains(document.activeElement);
  setOpen(name, false);
  if (focusInside) byId(SIDES[name].toggle).focus();
}

/** Closes what lies over the conversation; false if nothing did. */
export function closeOverlay() {
  const open = narrow ? Object.keys(SIDES).filter(isOpen) : [];
  open.forEach(closePanel);
  return open.length > 0;
}

export function startPanels() {
  for (const [name, side] of Object.entries(SIDES)) {
    byId(side.toggle).addEventListener("click", () => (isOpen(name) ? closePanel(name) : openPanel(name)));
    byId(name).querySelector("[data-close]").addEventListener("click", () => closePanel(name));
  }
  byId("backdrop").addEventListener("click", closeOverlay);
  matchMedia("(max-width: 60rem)").addEventListener("change", arrange);
  arrange();
}

function arrange() {
  narrow = isNarrow();
  for (const [name, side] of Object.entries(SIDES)) {
    const open = !narrow && settings.get(name, side.wide) === "open";
    byId(name).hidden = !open;
    byId(side.toggle).setAttribute("aria-expanded", String(open));
  }
  cover();
}

/* --- tabs ----------------------------------------------------------------------------------------------------------- */

const TABS = ["parameters", "server"];

export function selectTab(name, shown) {
  for (const each of TABS) {
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === name));
    tab.tabIndex = each === name ? 0 : -1;
    byId(each).hidden = each !== name;
  }
  shown(name);
}

export function startTabs(shown) {
  for (const [at, name] of TABS.entries()) {
    const tab = byId(`tab-${name}`);
    tab.addEventListener("click", () => selectTab(name, shown));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = TABS[(at + step + TABS.length) % TABS.length];
      selectTab(next, shown);
      byId(`tab-${next}`).focus();
    });
  }
}
