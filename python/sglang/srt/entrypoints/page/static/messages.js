/* How the messages of a conversation look. */

import { parsed } from "./api.js";
import { copyText, count, h, icon, iconButton } from "./dom.js";
import { showMarkdown } from "./markdown.js";

/** `actions`: edit(index), retry(index), sendResults(). */
export function messageElement(message, index, messages, actions) {
  if (message.role === "user") return userElement(message, index, actions);
  if (message.role === "tool") return h("div", { hidden: true }); // shown with its call
  const element = h("article", { class: "message assistant" }, h("h2", { class: "unseen" }, "Answer"));
  element.parts = {
    thoughts: thoughtsElement(),
    text: h("div", { class: "text" }),
    calls: h("div", { class: "calls" }),
    waiting: h("p", { class: "waiting" }, h("span", { class: "unseen" }, "Waiting for the answer")),
    problem: h("div", { class: "failure", role: "alert" }),
    foot: h("footer", {}),
  };
  element.append(...Object.values(element.parts));
  updateAnswer(element, message, index, messages, actions);
  return element;
}

function userElement(message, index, actions) {
  const copy = iconButton("copy", "Copy the message", () => copyText(message.text, copy));
  const images = (message.images ?? []).map((url, i) => h("img", { src: url, alt: `Attached image ${i + 1}` }));
  return h(
    "article",
    { class: "message user" },
    h("h2", { class: "unseen" }, "You"),
    images.length ? h("div", { class: "images" }, ...images) : null,
    message.text ? h("div", { class: "text" }, message.text) : null,
    h("footer", {}, copy, iconButton("edit", "Edit the message", () => actions.edit(index))),
  );
}

function thoughtsElement() {
  const body = h("div", { class: "text" });
  const title = h("span", {});
  const element = h("details", { class: "thoughts", hidden: true }, h("summary", {}, title), body);
  element.parts = { title, body };
  return element;
}

/** Brings `element` up to date with a message that has grown or ended. */
export function updateAnswer(element, message, index, messages, actions) {
  const { thoughts, text, calls, waiting, problem, foot } = element.parts;
  const ended = message.seconds !== null;
  const thinking = !ended && !message.text && !message.calls.length;
  thoughts.hidden = !message.thoughts;
  if (message.thoughts) {
    showMarkdown(thoughts.parts.body, message.thoughts);
    const seconds = message.thoughtSeconds.toFixed(1);
    thoughts.parts.title.textContent = thinking ? "Thinking" : `Thought for ${seconds} s`;
    thoughts.classList.toggle("running", thinking);
  }
  waiting.hidden = !thinking || Boolean(message.thoughts);
  showMarkdown(text, message.text);
  showCalls(calls, message, index, messages, actions, ended);
  element.classList.toggle("growing", !ended);
  if (!ended) return;
  problem.replaceChildren(...failure(message, index, actions));
  const copy = iconButton("copy", "Copy the answer", () => copyText(message.text, copy));
  const retry = iconButton("retry", "Answer again", () => actions.retry(index));
  foot.replaceChildren(...(message.text ? [copy] : []), ...(message.error ? [] : [retry]), h("span", { class: "note" }, numbersOf(message)));
}

function failure(message, index, actions) {
  if (message.error) {
    const again = h("button", { type: "button", click: () => actions.retry(index) }, "Try again");
    return [h("p", {}, h("strong", {}, "No answer. "), message.error), again];
  }
  const ends = {
    length: "The answer ends here because it has reached the longest length allowed.",
    stopped: "Stopped.",
    abort: "The server ended the answer.",
  };
  return ends[message.finish] ? [h("p", { class: "note" }, ends[message.finish])] : [];
}

function numbersOf(message) {
  const parts = [];
  const tokens = message.usage?.completion_tokens;
  if (tokens) parts.push(count(tokens, "token"));
  if (message.firstSeconds !== null) parts.push(`first after ${message.firstSeconds.toFixed(2)} s`);
  const rest = message.seconds - message.firstSeconds;
  if (tokens > 1 && rest > 0) parts.push(`${Math.round((tokens - 1) / rest).toLocaleString("en")} tokens/s`);
  return parts.join(" · ");
}

/* --- tool calls --------------------------------------------------------------------------------------------------- */

/** The results of the calls of message `index`, by call id. */
function resultsAfter(index, messages) {
  const results = new Map();
  for (let at = index + 1; messages[at]?.role === "tool"; at += 1) results.set(messages[at].callId, messages[at].text);
  return results;
}

function showCalls(container, message, index, messages, actions, ended) {
  if (!message.calls.length) return;
  const results = resultsAfter(index, messages);
  const open = ended && !results.size && index === messages.length - 1;
  if (open && container.querySelector("form")) return; // somebody may be typing into it
  const cards = message.calls.map((call, number) => callCard(call, number, results.get(call.id), open));
  if (!open) {
    container.replaceChildren(...cards);
    return;
  }
  const send = h("button", { type: "submit", class: "primary" }, message.calls.length === 1 ? "Send the result" : "Send the results");
  const form = h("form", {}, ...cards, h("div", { class: "actions" }, send));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const texts = [...form.querySelectorAll("textarea")].map((field) => field.value);
    actions.sendResults(message.calls.map((call, at) => ({ role: "tool", callId: call.id, text: texts[at] })));
  });
  container.replaceChildren(form);
}

function callCard(call, number, result, open) {
  const id = `result-${call.id || number}`;
  const value = parsed(call.arguments);
  const shown = value === undefined ? call.arguments : JSON.stringify(value, null, 2);
  const parts = [
    h("p", { class: "name" }, icon("call"), h("span", { class: "unseen" }, "Calls "), call.name),
    h("pre", { tabindex: "0", "aria-label": `Arguments of ${call.name}` }, shown),
  ];
  if (result !== undefined) parts.push(h("p", { class: "label" }, "Result"), h("pre", { tabindex: "0", "aria-label": "Result" }, result));
  else if (open) parts.push(h("label", { for: id }, "Result"), h("textarea", { id, rows: "2", class: "code" }));
  return h("section", { class: "call", "aria-label": `Call of ${call.name}` }, ...parts);
}
