/* One answer of the model: the request's body, and what its stream adds to the message. */

import { ApiError, eventData, parsed, request } from "./api.js";
import { requestFields } from "./parameters.js";

export function newAnswer() {
  return {
    role: "assistant",
    text: "",
    thoughts: "",
    thoughtSeconds: null,
    calls: [],
    finish: null,
    error: null,
    usage: null,
    firstSeconds: null,
    seconds: null,
  };
}

/** The body of the chat request that continues `messages` (without the answer to come). */
export function requestBody(messages, parameters, model) {
  const system = parameters.system?.trim();
  return {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages.map(toWire).filter(Boolean)],
    ...requestFields(parameters),
    stream: true,
    stream_options: { include_usage: true },
  };
}

function toWire(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.text };
  if (message.role === "user") return { role: "user", content: userContent(message) };
  const calls = message.calls.filter((call) => parsed(call.arguments) !== undefined);
  if (!message.text && !calls.length) return null;
  return {
    role: "assistant",
    content: message.text,
    ...(message.thoughts && { reasoning_content: message.thoughts }),
    ...(calls.length && {
      tool_calls: calls.map(({ id, name, arguments: text }) => ({
        id,
        type: "function",
        function: { name, arguments: text },
      })),
    }),
  };
}

function userContent(message) {
  if (!message.images?.length) return message.text;
  const images = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return message.text ? [...images, { type: "text", text: message.text }] : images;
}

/** Fills `answer` from the server's stream; `changed` is called after each event. Problems end up in the answer. */
export async function streamAnswer(answer, body, signal, changed) {
  const started = performance.now();
  const elapsed = () => (performance.now() - started) / 1000;
  try {
    const response = await request("v1/chat/completions", { body, signal });
    for await (const data of eventData(response)) {
      if (data === "[DONE]") continue; // the connection is still to end
      take(answer, JSON.parse(data), elapsed());
      changed();
    }
    if (answer.finish === null) throw new ApiError(0, "The connection ended in the middle of the answer.");
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else answer.error = error instanceof ApiError ? error.message : `The page failed: ${error.message}`;
  }
  answer.seconds = elapsed();
  changed();
}

function take(answer, chunk, now) {
  if (chunk.error) throw new ApiError(chunk.error.code, chunk.error.message);
  if (chunk.usage) answer.usage = chunk.usage;
  const choice = chunk.choices[0];
  if (!choice) return;
  const { content, reasoning_content: thoughts, tool_calls: calls } = choice.delta;
  if (answer.firstSeconds === null && (content || thoughts || calls)) answer.firstSeconds = now;
  if (thoughts) {
    answer.thoughts += thoughts;
    answer.thoughtSeconds = now;
  }
  if (content) answer.text += content;
  for (const call of calls ?? []) {
    const known = (answer.calls[call.index] ??= { id: "", name: "", arguments: "" });
    if (call.id) known.id = call.id;
    if (call.function?.name) known.name = call.function.name;
    known.arguments += call.function?.arguments ?? "";
  }
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}
