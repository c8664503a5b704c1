// Bubble over memory: an interactive chart with pan, zoom and keys; choosing a point opens its schedule.
// Bubble rates are even below the knee and logarithmic above it, so that a point far above the others does not press them together.

import { element, percent, roundStep, shape } from "./words.js";

const PLOT = { left: 62, right: 18, top: 12, bottom: 44 }, HEIGHT = 380;
const NEAR = 14, MOVED = 6, CLOSEST_RATES = 20, CLOSEST_LIMITS = 34; // pixels
const ROUND_RATES = [0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1];
const ACTIONS = [["front-in", "zoom in", "zoom in: the key +"], ["front-out", "zoom out", "zoom out: the key −"], ["front-all", "all", "show the whole front"]];
const HINT = "Click a point to see its schedule. Ctrl and wheel, or pinch, to zoom, drag to move, double click for all. Keys: left and right follow the front, up and down select other placements, Enter opens the schedule, + and − zoom, Page Up and Page Down move, 0 shows all.";

export class FrontChart {
  constructor(host, front, opened) {
    Object.assign(this, { host, points: front.points, knee: front.knee, opened, at: null, shown: null, down: new Map() });
    const label = `Bubble over memory, ${this.points.length} limits`;
    this.svg = shape("svg", { class: "front", tabindex: "0", role: "application", "aria-label": label, "aria-describedby": "front-keys" });
    this.details = element("p", "", { class: "point-details", role: "status", id: "front-details" });
    host.append(this.bar(), this.svg, this.details, element("p", front.note, { class: "hint" }), element("p", HINT, { class: "hint", id: "front-keys" }));
    this.objective = front.objective;
    this.all();
    this.listen();
    new ResizeObserver(() => this.draw()).observe(host);
  }

  // The placements by their colors, and the buttons.
  bar() {
    const bar = element("div", "", { class: "bar" });
    const legend = element("ul", "", { class: "legend" });
    for (const [placement, color] of new Map(this.points.flatMap((point) => point.answers.map((answer) => [answer.placement, answer.color])))) {
      const item = element("li", placement);
      item.prepend(element("i", "", { class: "dot", style: `background: ${color}` }));
      legend.append(item);
    }
    const bound = element("li", "bound");
    bound.prepend(element("i", "", { class: "dashes" }));
    legend.append(bound);
    const buttons = element("div", "", { class: "buttons", role: "group", "aria-label": "view of the front" });
    for (const [id, text, name] of ACTIONS) buttons.append(element("button", text, { type: "button", id, "aria-label": name, title: name }));
    bar.append(legend, buttons);
    return bar;
  }

  // Everything in view.
  all() {
    const memories = this.points.map((point) => point.memory);
    const heights = this.points.flatMap((point) => [point.bound, ...point.answers.map((answer) => answer.bubble)]).map((rate) => this.height(rate));
    const wide = 0.04 * (Math.max(...memories) - Math.min(...memories) || 1);
    const high = 0.06 * (Math.max(...heights) - Math.min(...heights) || 1);
    this.view = { left: Math.min(...memories) - wide, right: Math.max(...memories) + wide, low: Math.min(...heights) - high, top: Math.max(...heights) + high };
    this.whole = this.view;
    this.draw();
  }

  // How high a rate stands, and which rate stands so high.
  height(rate) {
    return Math.asinh(rate / this.knee);
  }

  rate(height) {
    return Math.sinh(height) * this.knee;
  }

  x(memory) {
    const { left, right } = this.view;
    return PLOT.left + ((memory - left) / (right - left)) * (this.width - PLOT.left - PLOT.right);
  }

  y(rate) {
    const { low, top } = this.view;
    return PLOT.top + ((top - this.height(rate)) / (top - low)) * (HEIGHT - PLOT.top - PLOT.bottom);
  }

  draw() {
    this.width = this.host.clientWidth;
    if (!this.width) return;
    const [wide, high] = [this.width - PLOT.left - PLOT.right, HEIGHT - PLOT.top - PLOT.bottom];
    const inside = { x: PLOT.left, y: PLOT.top, width: wide, height: high };
    const picture = shape("svg", { ...inside, viewBox: `${PLOT.left} ${PLOT.top} ${wide} ${high}` }); // cuts off what is out of view
    picture.append(this.line("bound", (point) => point.bound), this.line("best", (point) => point.answers[0].bubble));
    this.points.forEach((point, n) => point.answers.forEach((answer, k) => picture.prepend(this.dot(n, k))));
    for (const [name, place] of [["opened", this.shown], ["chosen", this.at]]) if (place) picture.append(this.ring(name, ...place));
    for (const [name, value] of [["viewBox", `0 0 ${this.width} ${HEIGHT}`], ["width", this.width], ["height", HEIGHT]]) this.svg.setAttribute(name, value);
    this.svg.replaceChildren(...this.axes(), picture);
  }

  axes() {
    const { width } = this;
    const marks = [shape("rect", { class: "plot", x: PLOT.left, y: PLOT.top, width: width - PLOT.left - PLOT.right, height: HEIGHT - PLOT.top - PLOT.bottom })];
    for (const rate of this.rates()) {
      const y = this.y(rate);
      marks.push(shape("line", { class: "grid", x1: PLOT.left, x2: width - PLOT.right, y1: y, y2: y }));
      marks.push(shape("text", { x: PLOT.left - 8, y: y + 4, "text-anchor": "end" }, `${+(100 * rate).toPrecision(4)} %`));
    }
    let last = -Infinity;
    for (const { memory } of this.points) {
      const x = this.x(memory);
      if (x < PLOT.left || x > width - PLOT.right || x - last < CLOSEST_LIMITS) continue;
      last = x;
      marks.push(shape("line", { class: "grid", x1: x, x2: x, y1: HEIGHT - PLOT.bottom, y2: HEIGHT - PLOT.bottom + 5 }));
      marks.push(shape("text", { x, y: HEIGHT - PLOT.bottom + 18, "text-anchor": "middle" }, `${+memory.toPrecision(4)}`));
    }
    const middle = PLOT.top + (HEIGHT - PLOT.top - PLOT.bottom) / 2;
    marks.push(shape("text", { x: (PLOT.left + width) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, "activation memory of a rank, in microbatches of all its stages"));
    marks.push(shape("text", { transform: `translate(13 ${middle}) rotate(-90)`, "text-anchor": "middle" }, `bubble of the ${this.objective}`));
    return marks;
  }

  // Rates for the axis: round ones, or evenly spaced where few of those are in view.
  rates() {
    const [low, top] = [Math.max(0, this.rate(this.view.low)), this.rate(this.view.top)];
    const round = ROUND_RATES.filter((rate) => rate >= low && rate <= top);
    const step = roundStep((top - low) / 6);
    const even = [...Array(8).keys()].map((n) => (Math.ceil(low / step) + n) * step).filter((rate) => rate <= top);
    const labels = [];
    for (const rate of round.length > 3 ? round : even) if (!labels.length || this.y(labels.at(-1)) - this.y(rate) >= CLOSEST_RATES) labels.push(rate);
    return labels;
  }

  line(name, rateOf) {
    const places = this.points.map((point) => `${this.x(point.memory).toFixed(1)} ${this.y(rateOf(point)).toFixed(1)}`);
    return shape("path", { class: name, d: `M${places.join("L")}` });
  }

  dot(n, k) {
    const answer = this.points[n].answers[k];
    const place = { cx: this.x(this.points[n].memory), cy: this.y(answer.bubble) };
    if (k) return shape("circle", { ...place, class: "other", r: 3, fill: answer.color });
    return shape("circle", { ...place, class: answer.optimal ? "winner" : "winner hollow", r: answer.optimal ? 6 : 5, fill: answer.color, stroke: answer.color });
  }

  ring(name, n, k) {
    return shape("circle", { class: name, cx: this.x(this.points[n].memory), cy: this.y(this.points[n].answers[k].bubble), r: k ? 7 : 10 });
  }

  // The answer nearest to a point of the chart; null where none is near.
  near(x, y) {
    let [best, nearest] = [null, NEAR];
    this.points.forEach((point, n) => point.answers.forEach((answer, k) => {
      const away = Math.hypot(this.x(point.memory) - x, this.y(answer.bubble) - y) - (k ? 0 : 3);
      if (away < nearest) [best, nearest] = [[n, k], away];
    }));
    return best;
  }

  nameOf(n, k) {
    const { memory, answers } = this.points[n];
    return `${+memory.toPrecision(4)} ${memory === 1 ? "microbatch" : "microbatches"}: ${answers[k].placement}`;
  }

  detailsOf(n, k) {
    const { bound, answers } = this.points[n];
    const { bubble, how, optimal, opens } = answers[k];
    const kept = opens === null ? " Its schedule is not on this page, which keeps those of the best plans." : "";
    return `${this.nameOf(n, k)}, bubble ${percent(bubble)}${optimal ? ", proven optimal for its placement" : ""}, bound over all placements ${percent(bound)}; ${how}.${kept}`;
  }

  choose(place) {
    this.at = place;
    this.details.textContent = place ? this.detailsOf(...place) : "";
    if (place) this.bringIntoView(...place);
    this.draw();
  }

  bringIntoView(n, k) {
    const { left, right, low, top } = this.view;
    const [memory, height] = [this.points[n].memory, this.height(this.points[n].answers[k].bubble)];
    if (memory < left || memory > right) this.move((memory - (left + right) / 2) / (right - left), 0);
    if (height < low || height > top) this.move(0, (height - (low + top) / 2) / (top - low));
  }

  async open(n, k) {
    this.choose([n, k]);
    const answer = this.points[n].answers[k];
    if (answer.opens === null) return;
    this.shown = [n, k];
    this.draw();
    await this.opened(answer, this.nameOf(n, k), k === 0);
  }

  // By shares of what is in view, but not beyond the whole.
  move(across, up) {
    const { left, right, low, top } = this.view;
    const { whole } = this;
    const [wide, high] = [right - left, top - low];
    const newLeft = Math.min(Math.max(whole.left, left + across * wide), whole.right - wide);
    const newLow = Math.min(Math.max(whole.low, low + up * high), whole.top - high);
    this.view = { left: newLeft, right: newLeft + wide, low: newLow, top: newLow + high };
    this.draw();
  }

  // Around a point of the chart, by default its middle.
  zoom(factor, x = (PLOT.left + this.width - PLOT.right) / 2, y = (PLOT.top + HEIGHT - PLOT.bottom) / 2) {
    const { left, right, low, top } = this.view;
    const { whole } = this;
    const within = Math.min(1, Math.max(factor * (right - left), (whole.right - whole.left) / 50) / (whole.right - whole.left));
    const [wide, high] = [within * (whole.right - whole.left), within * (whole.top - whole.low)];
    const [across, up] = [(x - PLOT.left) / (this.width - PLOT.left - PLOT.right), (HEIGHT - PLOT.bottom - y) / (HEIGHT - PLOT.top - PLOT.bottom)];
    const [newLeft, newLow] = [left + across * (right - left - wide), low + up * (top - low - high)];
    this.view = { left: newLeft, right: newLeft + wide, low: newLow, top: newLow + high };
    this.move(0, 0);
  }

  listen() {
    const { svg } = this;
    const actions = { "front-in": () => this.zoom(0.6), "front-out": () => this.zoom(1 / 0.6), "front-all": () => this.all() };
    for (const [id, action] of Object.entries(actions)) this.host.querySelector(`#${id}`).addEventListener("click", action);
    svg.addEventListener("keydown", (event) => this.key(event));
    svg.addEventListener("dblclick", () => this.all());
    svg.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    svg.addEventListener("pointerdown", (event) => this.press(event));
    svg.addEventListener("pointermove", (event) => this.drag(event));
    svg.addEventListener("pointerup", (event) => this.release(event, true));
    svg.addEventListener("pointercancel", (event) => this.release(event, false));
  }

  place(event) {
    const { left, top } = this.svg.getBoundingClientRect();
    return { x: event.clientX - left, y: event.clientY - top };
  }

  wheel(event) {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (!event.ctrlKey && !sideways) return;
    event.preventDefault();
    const { x, y } = this.place(event);
    if (event.ctrlKey) this.zoom(Math.exp(event.deltaY * 0.004), x, y);
    else this.move((event.deltaX || event.deltaY) / this.width, 0);
  }

  press(event) {
    if (event.pointerType === "mouse" && event.button) return;
    this.down.set(event.pointerId, this.place(event));
    this.svg.setPointerCapture(event.pointerId);
    if (this.down.size === 1) this.moved = 0;
  }

  // One pointer moves the chart, two zoom it; a mouse that is not pressed points.
  drag(event) {
    const [from, to] = [this.down.get(event.pointerId), this.place(event)];
    if (!from) {
      const place = this.near(to.x, to.y);
      if (place && event.pointerType === "mouse") this.choose(place);
      return;
    }
    const other = [...this.down].find(([id]) => id !== event.pointerId);
    this.down.set(event.pointerId, to);
    this.moved += Math.hypot(to.x - from.x, to.y - from.y);
    if (this.moved <= MOVED) return;
    if (other) {
      const apart = ({ x, y }) => Math.max(20, Math.hypot(x - other[1].x, y - other[1].y));
      this.zoom(apart(from) / apart(to), (to.x + other[1].x) / 2, (to.y + other[1].y) / 2);
    } else {
      this.move((from.x - to.x) / (this.width - PLOT.left - PLOT.right), (to.y - from.y) / (HEIGHT - PLOT.top - PLOT.bottom));
    }
  }

  release(event, ended) {
    const from = this.down.get(event.pointerId);
    this.down.delete(event.pointerId);
    const place = from && ended && this.moved <= MOVED ? this.near(from.x, from.y) : null;
    if (place) this.open(...place);
  }

  key(event) {
    const [n, k] = this.at || [this.points.length - 1, 0];
    const point = (to) => this.choose([Math.min(this.points.length - 1, Math.max(0, to)), 0]);
    const answer = (by) => this.choose([n, Math.min(this.points[n].answers.length - 1, Math.max(0, k + by))]);
    const actions = {
      "ArrowRight": () => point(n + 1), "ArrowLeft": () => point(n - 1), "Home": () => point(0), "End": () => point(this.points.length - 1),
      "ArrowUp": () => answer(1), "ArrowDown": () => answer(-1), "Enter": () => this.open(n, k), " ": () => this.open(n, k),
      "PageDown": () => this.move(0.8, 0), "PageUp": () => this.move(-0.8, 0), "+": () => this.zoom(0.7), "=": () => this.zoom(0.7),
      "-": () => this.zoom(1 / 0.7), "0": () => this.all(), "Escape": () => this.choose(null),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  }
}
