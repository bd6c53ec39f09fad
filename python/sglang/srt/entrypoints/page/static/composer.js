/* The message box: text, images, send and stop. */

import { byId, h, iconButton } from "./dom.js";

const MAX_IMAGES = 16;
const MAX_IMAGE_BYTES = 20 * 2 ** 20;

let images = [];
let takesImages = false;

/** `actions`: send({text, images}) -> false to keep the text, stop(), cancelEditing(). */
export function startComposer(actions) {
  const prompt = byId("prompt");
  prompt.addEventListener("input", fit);
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  byId("stop").addEventListener("click", actions.stop);
  byId("cancel-editing").addEventListener("click", actions.cancelEditing);
  byId("attach").addEventListener("click", () => byId("image-files").click());
  byId("image-files").addEventListener("change", (event) => {
    attach([...event.target.files]);
    event.target.value = "";
  });
  prompt.addEventListener("paste", (event) => attachFrom(event, event.clipboardData));
  byId("workspace").addEventListener("dragover", (event) => takesImages && event.preventDefault());
  byId("workspace").addEventListener("drop", (event) => attachFrom(event, event.dataTransfer));

  function submit() {
    const text = prompt.value.trim();
    if ((text || images.length) && actions.send({ text, images }) !== false) fill("", []);
  }
}

export function allowImages(allowed) {
  takesImages = allowed;
  byId("attach").hidden = !allowed;
}

export function fill(text, attached) {
  byId("prompt").value = text;
  images = attached;
  showImages();
  fit();
}

export function showRunning(running) {
  byId("send").hidden = running;
  byId("stop").hidden = !running;
}

export function showProblem(text) {
  byId("composer-problem").textContent = text;
}

function fit() {
  const prompt = byId("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, innerHeight * 0.4)}px`;
}

function attachFrom(event, data) {
  const files = [...(data?.files ?? [])].filter((file) => file.type.startsWith("image/"));
  if (!takesImages || !files.length) return;
  event.preventDefault();
  attach(files);
}

async function attach(files) {
  showProblem("");
  for (const file of files) {
    if (images.length >= MAX_IMAGES) showProblem(`No more than ${MAX_IMAGES} images at once.`);
    else if (file.size > MAX_IMAGE_BYTES) showProblem(`${file.name} is larger than 20 MiB.`);
    else images = [...images, await dataUrl(file)];
  }
  showImages();
}

const dataUrl = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });

function showImages() {
  const items = images.map((url, at) =>
    h(
      "li",
      {},
      h("img", { src: url, alt: `Image ${at + 1}` }),
      iconButton("close", `Remove image ${at + 1}`, () => {
        images = images.filter((_, other) => other !== at);
        showImages();
        byId("prompt").focus();
      }),
    ),
  );
  byId("attachments").hidden = !items.length;
  byId("attachments").replaceChildren(...items);
}
