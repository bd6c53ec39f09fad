/* The parameters of a conversation: which there are, their form, and what they become in a request. */

import { parsed } from "./api.js";
import { h } from "./dom.js";

const EXAMPLE_TOOL = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Returns the weather of a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
};

const number = (name, label, note, limits) => ({ name, label, note, kind: "number", ...limits });

const FIELDS = [
  { name: "system", label: "System prompt", kind: "text", rows: 3 },
  {
    name: "thinking",
    label: "Thinking",
    kind: "choice",
    choices: [["", "As the model does"], ["on", "On"], ["off", "Off"]],
  },
  {
    name: "effort",
    label: "Reasoning effort",
    kind: "choice",
    choices: [["", "As the model does"], ["low", "Low"], ["medium", "Medium"], ["high", "High"]],
  },
  number("max_tokens", "Longest answer, tokens", "", { min: 1, step: 1 }),
  number("temperature", "Temperature", "0 takes the likeliest token", { min: 0, step: 0.1 }),
  number("top_p", "Top p", "", { min: 0, max: 1, step: 0.05 }),
  number("top_k", "Top k", "-1: all tokens", { min: -1, step: 1 }),
  number("min_p", "Min p", "", { min: 0, max: 1, step: 0.01 }),
  number("presence_penalty", "Presence penalty", "", { min: -2, max: 2, step: 0.1 }),
  number("frequency_penalty", "Frequency penalty", "", { min: -2, max: 2, step: 0.1 }),
  number("repetition_penalty", "Repetition penalty", "1: none", { min: 0, max: 2, step: 0.05 }),
  number("seed", "Seed", "the same seed gives the same answer", { step: 1 }),
  { name: "stop", label: "Stop texts", note: "one a line", kind: "text", rows: 2 },
  {
    name: "tools",
    label: "Tools",
    note: "a JSON list of functions; you give their results",
    kind: "json",
    rows: 4,
    example: EXAMPLE_TOOL,
    problem: (value) => (Array.isArray(value) ? "" : "Write a list: [ {\"type\": \"function\", ...} ]"),
  },
  {
    name: "schema",
    label: "JSON schema of the answer",
    kind: "json",
    rows: 4,
    example: EXAMPLE_SCHEMA,
    problem: (value) => (isObject(value) ? "" : "Write an object: { \"type\": ... }"),
  },
];

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function problemOf(field, text) {
  if (!text?.trim()) return "";
  if (field.kind === "number") {
    const value = Number(text);
    if (!Number.isFinite(value)) return "Write a number.";
    if (field.min !== undefined && value < field.min) return `Not below ${field.min}.`;
    if (field.max !== undefined && value > field.max) return `Not above ${field.max}.`;
    if (field.step === 1 && !Number.isInteger(value)) return "Write a whole number.";
  }
  if (field.kind === "json") {
    const value = parsed(text);
    return value === undefined ? "This is not JSON." : field.problem(value);
  }
  return "";
}

/** What is wrong with the parameters, for the message box; empty when nothing is. */
export function parametersProblem(parameters) {
  const field = FIELDS.find((each) => problemOf(each, parameters[each.name]));
  return field ? `Parameters, ${field.label}: ${problemOf(field, parameters[field.name])}` : "";
}

/** The fields of a chat request that these parameters ask for. Empty ones are left out. */
export function requestFields(parameters) {
  const fields = {};
  for (const field of FIELDS) {
    const text = parameters[field.name]?.trim();
    if (text && field.kind === "number") fields[field.name] = Number(text);
  }
  const stop = (parameters.stop ?? "").split("\n").filter((line) => line !== "");
  if (stop.length) fields.stop = stop;
  if (parameters.thinking) {
    const on = parameters.thinking === "on";
    fields.chat_template_kwargs = { enable_thinking: on, thinking: on };
  }
  if (parameters.effort) fields.reasoning_effort = parameters.effort;
  if (parameters.tools?.trim()) fields.tools = parsed(parameters.tools);
  if (parameters.schema?.trim()) {
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed(parameters.schema) } };
  }
  return fields;
}

/** Fills `sheet` with the form of `parameters`, which it changes in place; `changed` is called after each change. */
export function showParameters(sheet, parameters, changed) {
  const rows = FIELDS.map((field) => formRow(field, parameters, changed));
  const reset = h("button", { type: "button", class: "quiet", click: resetAll }, "Reset all");
  function resetAll() {
    for (const field of FIELDS) delete parameters[field.name];
    changed();
    showParameters(sheet, parameters, changed);
    sheet.focus();
  }
  sheet.replaceChildren(h("p", { class: "note" }, "Empty fields keep the defaults of the model and the server."), ...rows, reset);
}

function formRow(field, parameters, changed) {
  const id = `parameter-${field.name}`;
  const problem = h("p", { class: "problem", id: `${id}-problem`, "aria-live": "polite" });
  const control = formControl(field, id);
  control.value = parameters[field.name] ?? "";
  const check = () => {
    problem.textContent = problemOf(field, control.value);
    control.setAttribute("aria-invalid", String(problem.textContent !== ""));
  };
  const store = () => {
    parameters[field.name] = control.value;
    check();
    changed();
  };
  control.addEventListener("input", store);
  check();
  const example =
    field.example &&
    h(
      "button",
      {
        type: "button",
        class: "quiet",
        "aria-label": `Insert an example for ${field.label}`,
        click: () => {
          control.value = JSON.stringify(field.example, null, 2);
          store();
          control.focus();
        },
      },
      "Example",
    );
  const note = field.note && h("span", { class: "note", id: `${id}-note` }, field.note);
  return h(
    "div",
    { class: `row ${field.kind}` },
    h("div", { class: "label" }, h("div", {}, h("label", { for: id }, field.label), note), example),
    control,
    problem,
  );
}

function formControl(field, id) {
  const described = `${field.note ? `${id}-note ` : ""}${id}-problem`;
  const common = { id, "aria-describedby": described };
  if (field.kind === "choice") {
    return h("select", common, ...field.choices.map(([value, label]) => h("option", { value }, label)));
  }
  if (field.kind === "number") {
    return h("input", { ...common, inputmode: field.step === 1 && field.min >= 0 ? "numeric" : "text", placeholder: "default", autocomplete: "off" });
  }
  return h("textarea", { ...common, rows: field.rows, spellcheck: field.kind === "json" ? "false" : "true", class: field.kind === "json" ? "code" : null });
}
