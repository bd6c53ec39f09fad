/* Questions that stop everything else. */

import { byId } from "./dom.js";

const closed = (dialog) => new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));

/** Resolves to the key that the user gives. `rejected`: the one in use was wrong. */
export async function askForKey(rejected) {
  const dialog = byId("key-dialog");
  const field = byId("key");
  byId("key-problem").textContent = rejected ? "The server does not accept this key." : "";
  field.value = "";
  do {
    dialog.showModal();
    await closed(dialog);
  } while (!field.value.trim());
  const key = field.value.trim();
  field.value = "";
  return key;
}

async function ask(title, yes, label, text) {
  const dialog = byId("question");
  byId("question-title").textContent = title;
  byId("question-yes").textContent = yes;
  byId("question-field").hidden = label === null;
  byId("question-label").textContent = label ?? "";
  byId("question-text").value = text ?? "";
  dialog.returnValue = "";
  dialog.showModal();
  (label === null ? byId("question-yes") : byId("question-text")).focus();
  await closed(dialog);
  return dialog.returnValue === "yes";
}

export const confirmed = (title, yes) => ask(title, yes, null, null);

/** The new text, or null. Enter in the field means yes. */
export async function askForText(title, yes, label, text) {
  return (await ask(title, yes, label, text)) ? byId("question-text").value.trim() : null;
}

export function startDialogs() {
  byId("question-text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    byId("question").close("yes");
  });
}
