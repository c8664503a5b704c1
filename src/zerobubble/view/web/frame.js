// The viewer's frame: its legend, its buttons with labels, the canvases and the tip.

import { element, unbroken } from "./words.js";

export const BUTTONS = [
  ["zoom-in", "zoom in", "zoom in: the key +"], ["zoom-out", "zoom out", "zoom out: the key −"], ["zoom-all", "all", "show all: the key 0"],
  ["taller", "taller", "taller rows"], ["lower", "lower", "lower rows"], ["dark", "dark", "dark or light"],
];
const TOGGLES = [
  ["messages", "messages", "lines from passes to those that use their results on other ranks"],
  ["critical", "critical path", "the chain of passes that determines the makespan"],
  ["lanes", "message lanes", "messages in transit, below the rank that receives them"],
  ["memory", "memory", "bytes held by each rank over time, and its limit"],
  ["textures", "patterns", "patterns that distinguish the kinds without colors"],
];
const KEYS = "Keys: arrows select passes and bubbles, Enter goes to the cause, + and − zoom, Page Up and Page Down move, 0 shows all, space plays.";

export function frame(host, timelines, data) {
  const label = `Timelines: ${timelines.map((t) => `${t.name}, ${t.source}, ${t.caption}`).join("; ")}`;
  const stage = element("div", "", { class: "stage" });
  const sheet = element("div", "", { class: "sheet" });
  sheet.append(element("canvas", "", { class: "base", "aria-hidden": "true" }));
  sheet.append(element("canvas", "", { class: "over", tabindex: "0", role: "application", "aria-label": label, "aria-describedby": "keys" }));
  stage.append(sheet, element("div", "", { class: "tip", role: "status", hidden: "" }));
  const hint = `Point at a pass or a bubble to see why it is there. Ctrl and wheel, or pinch, to zoom, drag to move, double click for all. ${KEYS}`;
  const keys = element("p", hint, { class: "hint", id: "keys" });
  keys.append(element("span", " Stacked colors are shares of the time of many passes; zoom in to see each.", { class: "stacked" }));
  host.append(legend(timelines, data), bar(timelines), stage, captions(timelines), keys);
  return stage;
}

function bar(timelines) {
  const made = element("div", "", { class: "bar" });
  const buttons = element("div", "", { class: "buttons", role: "group", "aria-label": "view" });
  for (const [id, text, label] of BUTTONS) buttons.append(element("button", text, { type: "button", id, "aria-label": label, title: label }));
  const toggles = element("div", "", { class: "toggles", role: "group", "aria-label": "layers" });
  for (const [id, text, title] of TOGGLES.filter(([name]) => isUseful(name, timelines))) {
    toggles.append(element("button", text, { type: "button", id, title, "aria-pressed": "false" }));
  }
  made.append(toggles, player(), buttons);
  return made;
}

function isUseful(name, timelines) {
  if (name === "memory") return timelines.some((t) => t.memory);
  if (name === "critical") return timelines.some((t) => t.last >= 0);
  return true;
}

function player() {
  const made = element("div", "", { class: "player" });
  made.append(element("button", "▶ play", { type: "button", id: "play", "aria-label": "play", title: "play through time: the space bar" }));
  made.append(element("input", "", { type: "range", id: "moment", min: "0", max: "1000", value: "0", "aria-label": "moment" }));
  made.append(element("output", "", { id: "clock", for: "moment" }));
  return made;
}

function legend(timelines, data) {
  const made = element("ul", "", { class: "legend" });
  const shades = Math.max(...timelines.map((t) => t.shades));
  const present = new Set(timelines.flatMap((t) => [...new Set(t.kind)]));
  data.kinds.forEach((kind, code) => {
    if (!present.has(code)) return;
    const item = element("li");
    for (const color of colorsOf(timelines, code, kind.colors)) item.append(swatch(color));
    item.append(element("b", kind.letters), ` ${kind.phrase}`);
    made.append(item);
  });
  const idle = element("li", "idle");
  idle.prepend(element("i", "", { class: "idle" }));
  made.append(idle);
  data.waiting.forEach(({ color, text }, what) => {
    if (what === 2 && !timelines.some((t) => t.gaps?.what.includes(2))) return;
    if (what === 3 && timelines.every((t) => t.gaps || ["simulated", "laid out"].includes(t.source))) return;
    if (what === 5 && !timelines.some((t) => t.copies.length && t.source === "simulated")) return;
    if (what === 4 && !timelines.some((t) => t.source === "laid out")) return;
    made.append(labeled(color, text, "waiting"));
  });
  if (timelines.some((t) => t.sums.length)) made.append(labeled(data.summing, "sum over replicas"));
  if (timelines.some((t) => t.copies.length)) made.append(...data.copying.map(({ color, text }) => labeled(color, text)));
  if (shades > 1) made.append(element("li", "lighter: later stages of the rank"));
  if (timelines.some((t) => t.marks)) made.append(...data.doing.map(({ color, text }) => shownWith("lanes", labeled(color, text))));
  made.append(...memoryLegend(timelines), numbers());
  return made;
}

// What the numbers in passes are, and where to find those that do not fit.
function numbers() {
  const item = element("li", "number: microbatch");
  item.append(element("span", "; zoom in for more", { class: "narrow" }));
  return item;
}

// The colors of a kind's passes, at most four.
function colorsOf(timelines, code, colors) {
  const places = new Set();
  for (const t of timelines) t.kind.forEach((kind, i) => kind === code && places.add(Math.min(t.shade[i], colors.length - 1)));
  return colors.filter((_, place) => places.has(place)).slice(0, 4);
}

// What memory is drawn in; shown where memory is.
function memoryLegend(timelines) {
  const layers = new Set(timelines.flatMap((t) => Object.keys(t.layers)));
  const items = [["var(--held)", "activations"], ...(layers.size ? [["var(--layer)", [...layers].join(", ")]] : [])];
  if (timelines.some((t) => t.limits.length)) items.push(["var(--limit)", "limit"]);
  return items.map(([color, text]) => shownWith("memory", labeled(color, text)));
}

function shownWith(layer, item) {
  item.className = `of-${layer}`;
  return item;
}

function swatch(color, look = "") {
  const made = element("i", "", { class: look });
  made.style.setProperty("--color", color);
  return made;
}

function labeled(color, text, look) {
  const made = element("li", text);
  made.prepend(swatch(color, look));
  return made;
}

// For pages too narrow for figures next to the names.
function captions(timelines) {
  const made = element("ul", "", { class: "captions" });
  for (const { name, source, caption } of timelines) {
    const item = element("li");
    item.append(element("b", name), ` ${source} `, element("span", unbroken(caption)));
    made.append(item);
  }
  return made;
}
