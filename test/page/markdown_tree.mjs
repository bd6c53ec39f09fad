/* Shows the Markdown of standard input, a JSON list of texts, by the page's own module and writes what it makes of each:
   nodes as lists of a name, attributes and children. The document is the least that the module asks for. */

import { readFileSync } from "node:fs";

class Element {
  constructor(name) {
    this.name = name;
    this.attributes = {};
    this.childNodes = [];
  }

  setAttribute(name, value) {
    this.attributes[name] = value;
  }

  addEventListener() {}

  append(...children) {
    for (const child of children) this.childNodes.push(child);
  }

  get lastChild() {
    return { remove: () => this.childNodes.pop() };
  }
}

globalThis.document = { createElement: (name) => new Element(name), createElementNS: (_, name) => new Element(name) };

const { showMarkdown } = await import(process.argv[2]);

const tree = (node) => (typeof node === "string" ? node : [node.name, node.attributes, ...node.childNodes.map(tree)]);
const count = (node) => (typeof node === "string" ? 1 : node.childNodes.reduce((sum, child) => sum + count(child), 1));

const shown = JSON.parse(readFileSync(0, "utf8")).map((text) => {
  const container = new Element("div");
  showMarkdown(container, text);
  const size = count(container);
  return { size, tree: size < 1000 ? container.childNodes.map(tree) : null };
});
process.stdout.write(JSON.stringify(shown));
