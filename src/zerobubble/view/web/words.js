// Numbers and elements as the page writes them.

// A time in the unit of its timeline: ms, or what a ms stands for.
export function showTime(ns, unit) {
  if (unit !== "ms") return `${+(ns / 1e6).toPrecision(10)} ${ns === 1e6 ? unit.replace(/s$/, "") : unit}`;
  return `${(ns / 1e6).toLocaleString("en", { maximumFractionDigits: 3, minimumFractionDigits: 3 })} ms`;
}

// A share; a dash for none.
export function percent(share) {
  return share === null ? "–" : `${(100 * share).toFixed(2)} %`;
}

export function showBytes(bytes) {
  const power = bytes < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(bytes) / 3));
  return `${+(bytes / 1000 ** power).toPrecision(3)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

export function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// An element of an SVG picture.
export function shape(tag, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

// The smallest 1, 2 or 5 times a power of ten that is at least `rough`.
export function roundStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= rough);
}

// A number stays on the line of its unit.
export function unbroken(text) {
  return text.replace(/(\d) (?=(?:%|ms|[kMGT]?B|slots)(?![\w]))/g, "$1\u00a0");
}
