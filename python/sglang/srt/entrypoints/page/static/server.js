/* What the server does now, and what it decided at its start. */

import { getJson } from "./api.js";
import { byId, count, h, svg } from "./dom.js";

const BUSY_MS = 1000;
const IDLE_MS = 4000;
const SAMPLES = 60;
const GIB = 2 ** 30;

const samples = [];
let last = null;
let info = null;
let isBusy = () => false;

/** Starts to ask the server for its numbers while the page is visible. */
export function watchServer(busy) {
  isBusy = busy;
  document.addEventListener("visibilitychange", () => document.hidden || look());
  look();
}

let timer = 0;
let asking = false;

/** Asks now, and then again and again. */
export async function look() {
  clearTimeout(timer);
  if (document.hidden || asking) return;
  asking = true;
  try {
    showLoad(sumOf(await getJson("v1/loads")));
  } catch (error) {
    last = null;
    showState("off", error.status === 503 ? `Not ready: ${error.message}` : error.message);
  }
  asking = false;
  timer = setTimeout(look, isBusy() || !byId("server").hidden || last?.running ? BUSY_MS : IDLE_MS);
}

function sumOf({ timestamp, loads }) {
  const sum = (pick) => loads.reduce((total, load) => total + pick(load), 0);
  return {
    timestamp,
    running: sum((load) => load.num_running_reqs),
    waiting: sum((load) => load.num_queue_reqs),
    used: sum((load) => load.num_used_tokens),
    total: sum((load) => load.max_total_num_tokens),
    generated: sum((load) => load.num_generated_tokens),
  };
}

function showLoad(load) {
  const seconds = last ? load.timestamp - last.timestamp : 0;
  const rate = seconds > 0 && load.generated >= last.generated ? (load.generated - last.generated) / seconds : 0;
  last = load;
  samples.push(rate);
  if (samples.length > SAMPLES) samples.shift();
  const numbers = {
    throughput: `${Math.round(rate).toLocaleString("en")} tokens/s`,
    running: load.running.toLocaleString("en"),
    waiting: load.waiting.toLocaleString("en"),
    cache: `${((100 * load.used) / load.total).toFixed(load.used ? 1 : 0)}%`,
  };
  const text = `${Math.round(rate).toLocaleString("en")} tok/s · ${load.running} running · ${load.waiting} waiting · KV ${numbers.cache}`;
  showState(load.running ? "busy" : "on", load.running || load.waiting || rate ? text : "Ready");
  for (const [name, value] of Object.entries(numbers)) {
    const place = byId(`live-${name}`);
    if (place) place.textContent = value;
  }
  const meter = byId("live-meter");
  if (meter) meter.value = load.used / load.total;
  byId("live-chart")?.replaceChildren(...chart());
}

function showState(state, text) {
  byId("live-dot").className = `dot ${state}`;
  byId("live-text").textContent = text;
}

function chart() {
  const highest = Math.max(1, ...samples);
  const points = samples.map((rate, at) => {
    const x = 240 - (samples.length - 1 - at) * (240 / (SAMPLES - 1));
    return `${x.toFixed(1)},${(46 - (44 * rate) / highest).toFixed(1)}`;
  });
  return [svg("polyline", { points: points.join(" ") })];
}

/* --- the sheet ------------------------------------------------------------------------------------------------------ */

/** Fills the sheet, once the server can say what it is. */
export async function showServer() {
  const sheet = byId("server");
  if (info === null) {
    sheet.replaceChildren(h("p", { class: "note" }, "Asking the server"));
    try {
      info = await getJson("server_info");
    } catch (error) {
      sheet.replaceChildren(h("p", { class: "problem" }, error.message));
      return;
    }
  }
  sheet.replaceChildren(...liveSection(), ...modelSection(), ...kernelSection(), ...warningSection(), memorySection(), argumentSection(), await endpointSection());
  look();
}

function pairs(entries) {
  return h("dl", {}, ...entries.filter(([, value]) => value !== null && value !== undefined && value !== "").flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value instanceof Node ? value : String(value))]));
}

function liveSection() {
  const place = (name) => h("span", { id: `live-${name}` }, "0");
  return [
    h("h2", {}, "Now"),
    svg("svg", { id: "live-chart", class: "chart", viewBox: "0 0 240 48", preserveAspectRatio: "none", role: "img", "aria-label": "Throughput of the last minute" }),
    pairs([
      ["Throughput", place("throughput")],
      ["Running", place("running")],
      ["Waiting", place("waiting")],
      ["KV cache in use", place("cache")],
    ]),
    h("meter", { id: "live-meter", min: "0", max: "1", value: "0", "aria-label": "KV cache in use" }),
  ];
}

function modelSection() {
  return [
    h("h2", {}, "Model"),
    pairs([
      ["Name", info.served_model_name ?? info.model_path],
      ["Path", info.model_path],
      ["Context", count(info.context_len, "token")],
      ["KV cache", count(info.max_total_num_tokens, "token")],
      ["Type", info.dtype],
      ["KV type", info.kv_cache_dtype],
      ["Device", [info.product, info.arch].filter(Boolean).join(", ")],
      ["Tensor parallel", info.tp_size > 1 ? info.tp_size : null],
      ["Tool calls", info.tool_call_parser ?? "not parsed (--tool-call-parser)"],
      ["Thoughts", info.reasoning_parser ?? "not told apart (--reasoning-parser)"],
      ["Version", info.version],
    ]),
  ];
}

function kernelSection() {
  const rows = Object.entries(info.kernels).map(([need, choice]) =>
    h(
      "details",
      { class: "kernel" },
      h("summary", {}, h("span", { class: "need" }, need.replaceAll("_", " ")), h("code", {}, choice.kernel)),
      choice.tile ? h("p", {}, "Tile ", h("code", {}, typeof choice.tile === "string" ? choice.tile : JSON.stringify(choice.tile))) : null,
      choice.remark ? h("p", {}, choice.remark) : null,
      choice.not_chosen.length ? h("p", { class: "label" }, "Not chosen") : null,
      h("ul", {}, ...choice.not_chosen.map(reasonItem)),
    ),
  );
  return [h("h2", {}, "Kernels"), h("p", { class: "note" }, "Chosen once, at the start. Open one to see why not another."), ...rows];
}

function reasonItem(line) {
  const at = line.indexOf(": ");
  return h("li", {}, h("code", {}, line.slice(0, at)), line.slice(at));
}

function warningSection() {
  const lines = [...(info.warnings ?? []), ...(info.internal_states?.[0]?.kernel_step_downs ?? []).map(String)];
  return lines.length ? [h("h2", {}, "Warnings"), h("ul", { class: "warnings" }, ...lines.map((line) => h("li", {}, line)))] : [];
}

const size = (bytes) => (bytes >= GIB / 10 ? `${(bytes / GIB).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`);

function memorySection() {
  const rows = Object.entries(info.memory ?? {}).filter(([name, value]) => value > 0 && name !== "mem_fraction_static");
  return h("details", { class: "fold" }, h("summary", {}, "Memory plan"), pairs(rows.map(([name, value]) => [name.replaceAll("_", " "), size(value)])));
}

function argumentSection() {
  const rows = Object.entries(info).filter(([, value]) => value === null || typeof value !== "object");
  return h("details", { class: "fold" }, h("summary", {}, "Arguments"), pairs(rows.map(([name, value]) => [name, value ?? "none"])));
}

async function endpointSection() {
  const { paths } = await getJson("openapi.json");
  const rows = Object.entries(paths).map(([path, methods]) => h("li", {}, h("code", {}, `${Object.keys(methods).join(" ").toUpperCase()} ${path}`)));
  return h("details", { class: "fold" }, h("summary", {}, "Endpoints"), h("ul", { class: "endpoints" }, ...rows), h("p", {}, h("a", { href: "openapi.json" }, "openapi.json")));
}
