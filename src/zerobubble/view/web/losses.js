// A figure of several runs per step, such as losses. Lines that lie on each other stay visible: each later one is thinner and dashed.

import { roundStep, shape } from "./words.js";

export const DASHES = ["", "9 4", "2 3", "12 3 2 3"]; // of plain lines in turn, which differ without colors, too
const EDGE = { left: 46, right: 10, top: 10, bottom: 34 };

export class LossChart {
  // Values are those of bins of `width` steps, from step `first` on. `plain` lines are all alike.
  constructor(host, runs, options = {}) {
    this.host = host;
    this.step = null;
    this.take(runs, options);
    new ResizeObserver(() => this.draw()).observe(host);
    host.addEventListener("pointermove", (event) => this.point(this.stepAt(event.clientX - host.getBoundingClientRect().left)));
    host.addEventListener("pointerleave", () => this.point(null));
    host.addEventListener("blur", () => this.point(null));
    host.addEventListener("keydown", (event) => this.key(event));
    this.draw();
  }

  take(runs, { first = 1, width: bin = 1, plain = false }) {
    Object.assign(this, { runs, plain, number: (place) => first + place * bin });
    this.steps = Math.max(...runs.map((run) => run.values.length));
    const values = runs.flatMap((run) => run.values).filter(Number.isFinite);
    this.ticks = values.length ? niceTicks(Math.min(...values), Math.max(...values)) : [0, 1];
  }

  // Other runs in the same place, such as those of more steps.
  replace(runs, options) {
    this.take(runs, options);
    this.draw();
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    this.point(this.step === null ? 0 : Math.min(this.steps - 1, Math.max(0, this.step + by)));
  }

  point(step) {
    if (step === this.step) return;
    this.step = step;
    this.draw();
  }

  x(step) {
    return EDGE.left + (step / Math.max(1, this.steps - 1)) * (this.width - EDGE.left - EDGE.right);
  }

  y(value) {
    const [low, high] = [this.ticks[0], this.ticks[this.ticks.length - 1]];
    return EDGE.top + ((high - value) / (high - low)) * (this.height - EDGE.top - EDGE.bottom);
  }

  stepAt(x) {
    const share = (x - EDGE.left) / (this.width - EDGE.left - EDGE.right);
    return Math.min(this.steps - 1, Math.max(0, Math.round(share * (this.steps - 1))));
  }

  draw() {
    this.width = this.host.clientWidth;
    this.height = this.host.clientHeight;
    const svg = shape("svg", { viewBox: `0 0 ${this.width} ${this.height}` });
    this.drawAxes(svg);
    this.runs.forEach((run, n) => svg.append(this.line(run, n)));
    if (this.step !== null) this.drawPointer(svg);
    this.host.replaceChildren(svg);
  }

  drawAxes(svg) {
    for (const tick of this.ticks) {
      const y = Math.round(this.y(tick)) + 0.5;
      svg.append(shape("line", { class: "grid", x1: EDGE.left, x2: this.width - EDGE.right, y1: y, y2: y }));
      svg.append(shape("text", { x: EDGE.left - 10, y: y + 4, "text-anchor": "end" }, `${+tick.toPrecision(6)}`));
    }
    const every = Math.max(1, roundStep((this.steps * 90) / this.width));
    for (let step = 0; step < this.steps; step++) {
      if (step && (step + this.number(0)) % every) continue;
      svg.append(shape("text", { x: this.x(step), y: this.height - 12, "text-anchor": "middle" }, `${this.number(step)}`));
    }
    svg.append(shape("text", { x: EDGE.left - 10, y: this.height - 12, "text-anchor": "end" }, "step"));
  }

  line(run, n) {
    const move = (step) => (Number.isFinite(run.values[step - 1]) ? "L" : "M");
    const points = run.values.map((value, step) => value !== null && `${move(step)}${this.x(step).toFixed(1)} ${this.y(value).toFixed(1)}`);
    const pen = this.plain ? { "stroke-width": 2, "stroke-dasharray": DASHES[n % DASHES.length] } : n ? { "stroke-width": 1.8, "stroke-dasharray": "5 5" } : { "stroke-width": 4 };
    return shape("path", { class: "run", d: points.filter(Boolean).join(""), stroke: run.color, ...pen });
  }

  drawPointer(svg) {
    const x = this.x(this.step);
    svg.append(shape("line", { class: "cursor", x1: x, x2: x, y1: EDGE.top, y2: this.height - EDGE.bottom }));
    const lines = [`step ${this.number(this.step)}`, ...this.runs.map((run) => `${run.name}  ${run.values[this.step] ?? "no number"}`)];
    const width = 20 + 6.4 * Math.max(...lines.map((line) => line.length));
    const left = x + width + 12 > this.width ? x - width - 12 : x + 12;
    svg.append(shape("rect", { class: "plate", x: left, y: EDGE.top + 4, width, height: 14 + 17 * lines.length, rx: 6 }));
    lines.forEach((line, n) => svg.append(shape("text", { class: n ? "value" : "", x: left + 10, y: EDGE.top + 22 + 17 * n }, line)));
  }
}

function niceTicks(low, high) {
  const step = roundStep((high - low || 1) / 5);
  const ticks = [];
  for (let n = Math.floor(low / step); ticks.length < 2 || ticks[ticks.length - 1] < high; n++) ticks.push(n * step);
  return ticks;
}
