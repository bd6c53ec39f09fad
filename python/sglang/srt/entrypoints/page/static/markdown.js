/* The Markdown that models write, as elements. It builds nodes and never parses HTML, loads no images, and takes time in
   proportion to the text: the place of a marker's partner is looked for once, no pattern has two ways to divide a text
   between its parts, and what is trimmed from an end is read from there. */

import { copyText, h, iconButton } from "./dom.js";

const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})\s/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+([^]*)$/;
const TABLE_RULE = /^:?-+:?$/;

/** Shows `text` in `container`. Blocks that are as they were stay, so that a growing text costs what is new. */
export function showMarkdown(container, text) {
  const blocks = splitBlocks(text.split("\n"), 0);
  const shown = (container.blockSources ??= []);
  let same = 0;
  while (same < blocks.length && blocks[same].source === shown[same]) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const block of blocks.slice(same)) container.append(block.make());
  container.blockSources = blocks.map((block) => block.source);
}

function splitBlocks(lines, depth) {
  const blocks = [];
  let at = 0;
  const take = (end, make) => {
    blocks.push({ source: lines.slice(at, end).join("\n"), make });
    at = end;
  };
  while (at < lines.length) {
    const line = lines[at];
    const start = at;
    let match;
    if (!line.trim()) at += 1;
    else if ((match = fenceOf(line))) takeFence(match);
    else if ((match = HEADING.exec(line))) takeHeading(match[1], line.slice(match[0].length));
    else if (RULE.test(line)) take(at + 1, () => h("hr"));
    else if (depth < MAX_DEPTH && line.trimStart().startsWith(">")) takeQuote();
    else if (depth < MAX_DEPTH && ITEM.test(line)) takeList();
    else if (line.includes("|") && cells(lines[at + 1] ?? "").every((cell) => TABLE_RULE.test(cell))) takeTable();
    else takeParagraph();
    if (at === start) throw new Error("a block must take a line");
  }
  return blocks;

  function endWhile(from, holds) {
    let end = from;
    while (end < lines.length && holds(lines[end])) end += 1;
    return end;
  }

  function takeFence({ fence, language }) {
    const closes = (line) => line.trim().length >= fence.length && line.trim() === fence[0].repeat(line.trim().length);
    const end = endWhile(at + 1, (line) => !closes(line));
    const code = lines.slice(at + 1, end).join("\n");
    take(Math.min(end + 1, lines.length), () => codeBlock(code, language));
  }

  function takeHeading(marks, rest) {
    const title = withoutEnd(rest.trim(), "#");
    const isClosed = !title || /\s/.test(title.at(-1));
    take(at + 1, () => h(`h${Math.min(6, marks.length + 2)}`, {}, inline(isClosed ? title.trim() : rest.trim())));
  }

  function takeQuote() {
    const end = endWhile(at, (line) => line.trimStart().startsWith(">"));
    const inner = lines.slice(at, end).map((line) => line.trimStart().replace(/^> ?/, ""));
    take(end, () => h("blockquote", {}, splitBlocks(inner, depth + 1).map((block) => block.make())));
  }

  function takeList() {
    const indent = ITEM.exec(lines[at])[1].length;
    const ordered = /\d/.test(ITEM.exec(lines[at])[2]);
    const first = Number.parseInt(ITEM.exec(lines[at])[2], 10);
    const items = [];
    let end = at;
    for (; end < lines.length; end += 1) {
      const item = ITEM.exec(lines[end]);
      const space = lines[end].length - lines[end].trimStart().length;
      if (item && item[1].length <= indent + 1) {
        if (/\d/.test(item[2]) !== ordered || item[1].length < indent) break;
        items.push([item[3]]);
      } else if (!lines[end].trim()) {
        const next = lines[end + 1] ?? "";
        if (!next.startsWith(" ") && !ITEM.test(next)) break;
        items.at(-1).push("");
      } else if (space > indent || !startsBlock(lines[end])) items.at(-1).push(lines[end].slice(Math.min(space, indent + 2)));
      else break;
    }
    const make = () => h(ordered ? "ol" : "ul", ordered && first !== 1 ? { start: first } : {}, items.map(listItem));
    take(end, make);
  }

  function listItem(inner) {
    const blocks = splitBlocks(inner, depth + 1);
    if (blocks.length === 1 && !startsBlock(inner[0])) return h("li", {}, inline(inner.join("\n")));
    return h("li", {}, blocks.map((block) => block.make()));
  }

  function takeTable() {
    const end = endWhile(at + 2, (line) => line.includes("|"));
    const head = cells(lines[at]);
    const rows = lines.slice(at + 2, end).map(cells);
    take(end, () =>
      h(
        "div",
        { class: "table", tabindex: "0", role: "region", "aria-label": "Table" },
        h(
          "table",
          {},
          h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col" }, inline(cell))))),
          h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, inline(cell)))))),
        ),
      ),
    );
  }

  function takeParagraph() {
    const end = endWhile(at + 1, (line) => line.trim() && !startsBlock(line));
    const text = lines.slice(at, end).join("\n");
    take(end, () => h("p", {}, inline(text)));
  }
}

/** The fence that opens code, and its language; null: the line opens none. */
function fenceOf(line) {
  const match = FENCE.exec(line);
  if (!match) return null;
  const rest = line.slice(match[0].length).trimStart();
  return rest.includes("`") ? null : { fence: match[1], language: /^\S*/.exec(rest)[0] };
}

/** `text` without the characters of `set` at its end. */
function withoutEnd(text, set) {
  let end = text.length;
  while (end && set.includes(text[end - 1])) end -= 1;
  return text.slice(0, end);
}

const startsBlock = (line) =>
  fenceOf(line) || HEADING.test(line) || RULE.test(line) || ITEM.test(line) || line.trimStart().startsWith(">");

const cells = (line) =>
  line
    .trim()
    .replace(/^\||\|$/g, "")
    .split("|")
    .map((cell) => cell.trim());

function codeBlock(code, language) {
  const copy = iconButton("copy", "Copy the code", () => copyText(code, copy));
  return h(
    "figure",
    { class: "code" },
    h("figcaption", {}, h("span", {}, language || "text"), copy),
    h("pre", { tabindex: "0", "aria-label": `Code, ${language || "text"}` }, h("code", {}, code)),
  );
}

/* --- within a line ---------------------------------------------------------------------------------------------- */

const PAIRS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const URL_END = ".,;:!?)]*";
/** They end a sentence behind a URL, and not the URL. */
const SPECIAL = /[\\`*_~[h\n]/g;
const URL_START = /https?:\/\/[^\s<>"'`]+/y;
const LINK_TARGET = /\((https?:\/\/[^\s()]+|mailto:[^\s()]+)\)/y;

/** Nodes of the text of a paragraph. */
export function inline(text, depth = 0) {
  const nodes = [];
  const places = new Map();
  let codeMarks = null;
  let noTarget = -1;
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) nodes.push(plain);
    plain = "";
  };
  const push = (node, end) => {
    flush();
    nodes.push(node);
    at = end;
  };
  const find = (mark, from) => {
    const known = places.get(mark);
    if (known !== undefined && (known < 0 || known >= from)) return known;
    const end = text.indexOf(mark, from);
    places.set(mark, end);
    return end;
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const special = SPECIAL.exec(text);
    const next = special ? special.index : text.length;
    plain += text.slice(at, next);
    at = next;
    if (at >= text.length) break;
    const mark = special[0];
    if (mark === "\n") push(h("br"), at + 1);
    else if (mark === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else if (mark === "`" && takeCode()) continue;
    else if (mark === "[" && takeLink()) continue;
    else if (mark === "h" && takeAddress()) continue;
    else if (depth < MAX_DEPTH && takePair()) continue;
    else {
      plain += text[at];
      at += 1;
    }
  }
  flush();
  return nodes;

  function takeCode() {
    let length = 1;
    while (text[at + length] === "`") length += 1;
    const end = findCodeMark(length, at + length);
    if (end === undefined) {
      plain += text.slice(at, at + length);
      at += length;
      return true;
    }
    push(h("code", {}, text.slice(at + length, end).replace(/^ (.*) $/, "$1")), end + length);
    return true;
  }

  /** The place of the next run of so many backticks. */
  function findCodeMark(length, from) {
    if (!codeMarks) {
      codeMarks = new Map();
      for (const { 0: run, index } of text.matchAll(/`+/g)) {
        if (!codeMarks.has(run.length)) codeMarks.set(run.length, { starts: [], next: 0 });
        codeMarks.get(run.length).starts.push(index);
      }
    }
    const runs = codeMarks.get(length) ?? { starts: [], next: 0 };
    while (runs.starts[runs.next] < from) runs.next += 1;
    return runs.starts[runs.next];
  }

  function takeLink() {
    const close = find("](", at);
    if (close < 0 || close - at > 500 || close === noTarget) return false;
    LINK_TARGET.lastIndex = close + 1;
    const target = LINK_TARGET.exec(text);
    if (!target) {
      noTarget = close;
      return false;
    }
    push(link(target[1], inline(text.slice(at + 1, close), MAX_DEPTH)), LINK_TARGET.lastIndex);
    return true;
  }

  function takeAddress() {
    if (/\w/.test(text[at - 1] ?? "")) return false;
    URL_START.lastIndex = at;
    const match = URL_START.exec(text);
    if (!match) return false;
    const url = withoutEnd(match[0], URL_END);
    push(link(url, [url]), at + url.length);
    return true;
  }

  function takePair() {
    for (const [mark, tag] of PAIRS) {
      if (!text.startsWith(mark, at)) continue;
      const from = at + mark.length;
      const opens = /\S/.test(text[from] ?? " ") && !(mark[0] === "_" && /\w/.test(text[at - 1] ?? ""));
      const end = opens ? find(mark, from + 1) : -1;
      if (end < 0 || /\s/.test(text[end - 1]) || (mark[0] === "_" && /\w/.test(text[end + mark.length] ?? ""))) continue;
      push(h(tag, {}, inline(text.slice(from, end), depth + 1)), end + mark.length);
      return true;
    }
    return false;
  }
}

const link = (url, children) => h("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, children);
