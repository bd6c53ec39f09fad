/* The page: which conversation is open, and what happens to it. */

import { newAnswer, requestBody, streamAnswer } from "./answer.js";
import { getJson, onUnauthorized } from "./api.js";
import { allowImages, fill, showProblem, showRunning, startComposer } from "./composer.js";
import { askForKey, askForText, confirmed, startDialogs } from "./dialogs.js";
import { announce, byId, download, h } from "./dom.js";
import { messageElement, updateAnswer } from "./messages.js";
import { closeOverlay, closePanel, openPanel, selectTab, startPanels, startTabs } from "./panels.js";
import { parametersProblem, showParameters } from "./parameters.js";
import { look, showServer, watchServer } from "./server.js";
import { showConversations, startTheme, titleOf } from "./sidebar.js";
import { allConversations, deleteAllConversations, deleteConversation, newConversation, openStore, saveConversation, settings } from "./store.js";

const EXAMPLES = ["What is 15+27?", "What is the capital of France?", "Tom has 12 apples. He buys 30 more and then gives 5 away. How many does he have now?"];
const TITLE_LENGTH = 60;
const SAID_LENGTH = 2000;
const RETRY_MS = 2000;
const NEAR_END = 60;

let conversation = newConversation({});
let conversations = [];
let running = null; // the AbortController of the answer that is being written
let editedIndex = null;
let model = "";
let contextLength = 0;

/* --- the conversation ------------------------------------------------------------------------------------------------- */

const messageActions = { edit, retry, sendResults };

function showMessages() {
  const { messages } = conversation;
  byId("welcome").hidden = messages.length > 0;
  byId("messages").replaceChildren(...messages.map((message, index) => messageElement(message, index, messages, messageActions)));
  document.title = conversation.title ? `${conversation.title} · sm120-sglang` : "sm120-sglang";
  showContextUse();
  scrollToEnd();
}

function showContextUse() {
  const usage = conversation.messages.findLast((message) => message.usage)?.usage;
  byId("context-use").textContent =
    usage && contextLength ? `${usage.total_tokens.toLocaleString("en")} of ${contextLength.toLocaleString("en")} tokens` : "";
}

function open(next) {
  stop();
  conversation = next;
  cancelEditing();
  showMessages();
  list();
  showParameters(byId("parameters"), conversation.parameters, save);
}

function startNew() {
  open(newConversation(conversation.parameters));
  closeOverlay();
  byId("prompt").focus();
}

async function save(changed = conversation) {
  if (!changed.messages.length) return;
  changed.updated = Date.now();
  try {
    await saveConversation(changed);
  } catch (error) {
    showProblem(`The browser does not keep this conversation: ${error.message}`);
  }
  conversations = [changed, ...conversations.filter((each) => each.id !== changed.id)];
  list();
}

/* --- sending ---------------------------------------------------------------------------------------------------------- */

function send({ text, images }) {
  const problem = model ? parametersProblem(conversation.parameters) : "The server is not ready yet.";
  showProblem(running ? "Wait for the answer, or stop it." : problem);
  if (running || problem) return false;
  if (editedIndex !== null) conversation.messages.length = editedIndex;
  endEditing();
  conversation.messages.push({ role: "user", text, images });
  conversation.title ||= (text || "Images").replace(/\s+/g, " ").slice(0, TITLE_LENGTH);
  answer();
  return true;
}

function retry(index) {
  if (running) return;
  conversation.messages.length = index;
  byId("prompt").focus();
  answer();
}

function sendResults(results) {
  if (running) return;
  conversation.messages.push(...results);
  byId("prompt").focus();
  answer();
}

function edit(index) {
  const message = conversation.messages[index];
  editedIndex = index;
  byId("editing").hidden = false;
  fill(message.text, message.images ?? []);
  byId("prompt").focus();
}

function endEditing() {
  editedIndex = null;
  byId("editing").hidden = true;
}

function cancelEditing() {
  if (editedIndex !== null) fill("", []);
  endEditing();
}

async function answer() {
  const current = conversation;
  const body = requestBody(current.messages, current.parameters, model);
  const message = newAnswer();
  const index = current.messages.push(message) - 1;
  const controller = new AbortController();
  running = controller;
  showRunning(true);
  showMessages();
  save(current);
  announce("Answering");
  look();
  const element = byId("messages").lastElementChild;
  const update = () => {
    const follow = isAtEnd();
    updateAnswer(element, message, index, current.messages, messageActions);
    if (follow) scrollToEnd();
  };
  await streamAnswer(message, body, controller.signal, oncePerFrame(update));
  message.calls = message.calls.filter(Boolean);
  running = null;
  showRunning(false);
  update();
  if (current === conversation) showContextUse();
  announce(spokenEnd(message));
  await save(current);
}

function spokenEnd(message) {
  if (message.error) return ""; // its own alert speaks
  const calls = message.calls.map((call) => `Calls ${call.name}.`).join(" ");
  return `${message.text.slice(0, SAID_LENGTH)} ${calls}`.trim() || "The answer is empty";
}

function stop() {
  running?.abort();
}

function oncePerFrame(work) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      work();
    });
  };
}

/* --- scrolling -------------------------------------------------------------------------------------------------------- */

function isAtEnd() {
  const log = byId("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
}

function scrollToEnd() {
  const log = byId("log");
  log.scrollTop = log.scrollHeight;
}

function startScrolling() {
  byId("log").addEventListener("scroll", () => (byId("to-latest").hidden = isAtEnd()), { passive: true });
  byId("to-latest").addEventListener("click", () => {
    scrollToEnd();
    byId("prompt").focus();
  });
}

/* --- the list --------------------------------------------------------------------------------------------------------- */

const listActions = {
  open(chosen) {
    open(chosen);
    closeOverlay();
    byId("prompt").focus();
  },
  async rename(chosen) {
    const title = await askForText("Rename the conversation", "Rename", "Title", chosen.title);
    if (!title) return;
    chosen.title = title.slice(0, 200);
    await save(chosen);
    if (chosen === conversation) showMessages();
  },
  save(chosen) {
    download(`${titleOf(chosen).replace(/[^\w-]+/g, "-").slice(0, 40)}.json`, JSON.stringify(chosen, null, 2));
  },
  async remove(chosen) {
    if (!(await confirmed(`Delete “${titleOf(chosen)}”?`, "Delete"))) return;
    await deleteConversation(chosen.id);
    conversations = conversations.filter((each) => each.id !== chosen.id);
    if (chosen === conversation) startNew();
    list();
    byId("new-conversation").focus();
  },
};

const list = () => showConversations(conversations, conversation, listActions);

async function removeAll() {
  if (!(await confirmed("Delete all conversations?", "Delete all"))) return;
  await deleteAllConversations();
  conversations = [];
  startNew();
}

/* --- start ------------------------------------------------------------------------------------------------------------ */

async function askWhatIsServed() {
  const [{ data }, info] = await Promise.all([getJson("v1/models"), getJson("model_info")]);
  model = data[0].id;
  contextLength = info.max_model_len ?? data[0].max_model_len;
  byId("model-name").textContent = model;
  if (data.length > 1) {
    const select = byId("model");
    select.replaceChildren(...data.map(({ id }) => h("option", {}, id)));
    select.addEventListener("change", () => (model = select.value));
    select.hidden = false;
    byId("model-name").hidden = true;
  }
  allowImages(Boolean(info.has_image_understanding));
  byId("welcome-title").textContent = `Ask ${model}`;
  byId("welcome-note").textContent = `It reads and writes up to ${contextLength.toLocaleString("en")} tokens. Conversations stay in this browser.`;
  showContextUse();
}

async function waitUntilServed() {
  for (;;) {
    try {
      await askWhatIsServed();
      return;
    } catch (error) {
      byId("welcome-note").textContent = error.message;
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
}

function showTab(name) {
  if (name === "server") showServer();
}

function onKey(event) {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (!closeOverlay()) running ? stop() : cancelEditing();
}

/** An answer that was being written when the page was closed. */
function endInterrupted(message) {
  if (message?.role !== "assistant" || message.seconds !== null) return;
  message.seconds = 0;
  message.finish = "stopped";
}

async function start() {
  onUnauthorized(askForKey);
  startTheme(settings);
  startDialogs();
  startPanels();
  startTabs(showTab);
  startScrolling();
  startComposer({ send, stop, cancelEditing });
  document.addEventListener("keydown", onKey);
  byId("new-conversation").addEventListener("click", startNew);
  byId("delete-all").addEventListener("click", removeAll);
  byId("open-server").addEventListener("click", () => {
    if (!byId("panel").hidden && !byId("server").hidden) return closePanel("panel");
    openPanel("panel");
    selectTab("server", showTab);
  });
  byId("examples").append(
    ...EXAMPLES.map((text) => h("li", {}, h("button", { type: "button", click: () => send({ text, images: [] }) && byId("prompt").focus() }, text))),
  );
  showParameters(byId("parameters"), conversation.parameters, save);
  await openStore();
  conversations = await allConversations();
  for (const { messages } of conversations) endInterrupted(messages.at(-1));
  list();
  byId("prompt").focus();
  watchServer(() => running !== null);
  await waitUntilServed();
}

start();
