"use strict";
// Timelines on one canvas and one time axis: draw what is in view, find the pass under the pointer, move by pointer, wheel and keys.

const KIND = 0, STAGE = 1, MICROBATCH = 2, START = 3, END = 4, SHADE = 5, WHY = 6, CAUSE = 7, LANE = 8, LANES = 9;
const LEFT = 58, RIGHT = 4, CAPTION = 26, AXIS = 26, BETWEEN = 12;

const nameOf = (cell) => `${cell[STAGE]}${cell[KIND]}${cell[MICROBATCH]}`;
const showMs = (ns) => `${(ns / 1e6).toLocaleString("en", { maximumFractionDigits: 3, minimumFractionDigits: 3 })} ms`;

class TimelineView {
  constructor(canvas, tip, data) {
    Object.assign(this, { canvas, tip, data });
    this.total = Math.max(1, ...data.timelines.map((t) => t.makespan));
    this.from = 0;
    this.to = this.total;
    this.selected = null;
    this.index = data.timelines.map(indexByName);
    const ranks = Math.max(...data.timelines.map((t) => t.rows.length));
    this.row = ranks > 16 ? 14 : ranks > 8 ? 18 : ranks > 4 ? 22 : 27;
    this.layout();
    this.listen();
    this.redraw();
  }

  layout() {
    let y = 0;
    this.tops = this.data.timelines.map((t) => {
      const top = y + CAPTION;
      y = top + t.rows.length * (this.row + 3) + BETWEEN;
      return top;
    });
    this.height = y - BETWEEN + AXIS;
    this.canvas.style.height = `${this.height}px`;
  }

  x(time) {
    return LEFT + ((time - this.from) / (this.to - this.from)) * (this.width - LEFT - RIGHT);
  }

  time(x) {
    return this.from + ((x - LEFT) / (this.width - LEFT - RIGHT)) * (this.to - this.from);
  }

  redraw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.draw();
    });
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    if (!this.width) return;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    const g = this.canvas.getContext("2d");
    g.scale(ratio, ratio);
    const style = getComputedStyle(document.documentElement);
    this.theme = (name) => style.getPropertyValue(name).trim();
    this.font = getComputedStyle(document.body).fontFamily;
    this.drawGrid(g);
    let boxes = 0;
    this.data.timelines.forEach((t, n) => (boxes += this.drawTimeline(g, t, this.tops[n])));
    if (this.selected) this.drawSelection(g);
    this.canvas.dataset.boxes = boxes;
    this.canvas.classList.toggle("zoomed", this.to - this.from < this.total);
  }

  drawGrid(g) {
    g.font = `11.5px ${this.font}`;
    g.textAlign = "center";
    g.textBaseline = "alphabetic";
    const step = roundStep(((this.to - this.from) * 90) / (this.width - LEFT - RIGHT));
    for (let tick = Math.ceil(this.from / step) * step; tick <= this.to; tick += step) {
      const x = Math.round(this.x(tick)) + 0.5;
      g.fillStyle = this.theme("--line");
      this.data.timelines.forEach((t, n) => g.fillRect(x - 0.5, this.tops[n] - 3, 1, t.rows.length * (this.row + 3) + 4));
      g.fillStyle = this.theme("--soft");
      const label = `${+(tick / 1e6).toPrecision(10)}`;
      const half = g.measureText(`${label} ms`).width / 2;
      g.fillText(tick + step > this.to ? `${label} ms` : label, Math.min(x, this.width - half), this.height - 8);
    }
  }

  drawTimeline(g, timeline, top) {
    this.drawCaption(g, timeline, top);
    const hatch = this.hatch(g);
    g.font = `12px ${this.font}`;
    timeline.rows.forEach((_, rank) => {
      g.textAlign = "right";
      g.fillStyle = this.theme("--soft");
      g.fillText(`rank ${rank}`, LEFT - 10, top + rank * (this.row + 3) + this.row / 2 + 4);
    });
    g.save();
    g.beginPath();
    g.rect(LEFT, 0, this.width - LEFT - RIGHT, this.height);
    g.clip();
    g.font = `11px ${this.font}`;
    g.textAlign = "center";
    let boxes = 0;
    timeline.rows.forEach((row, rank) => {
      const y = top + rank * (this.row + 3);
      g.fillStyle = hatch;
      g.fillRect(this.x(0), y, this.x(timeline.makespan) - this.x(0), this.row);
      for (const gap of timeline.gaps[rank] || []) this.drawGap(g, gap, y);
      for (let i = firstEndingAfter(row, this.from); i < row.length && row[i][START] <= this.to; i++, boxes++) this.drawBox(g, row[i], y);
    });
    g.restore();
    return boxes;
  }

  // Idle time by what the rank waits for: lower than a pass, so that it reads as time between passes.
  drawGap(g, [start, end, waiting], y) {
    if (end < this.from || start > this.to) return;
    g.fillStyle = this.data.waiting[waiting];
    g.fillRect(this.x(start), y + this.row / 3, Math.max(0.4, this.x(end) - this.x(start) - 0.4), this.row / 3);
  }

  drawCaption(g, timeline, top) {
    g.textAlign = "left";
    g.font = `600 12.5px ${this.font}`;
    g.fillStyle = this.theme("--ink");
    g.fillText(timeline.source, LEFT, top - 9);
    const after = LEFT + g.measureText(timeline.source).width + 8;
    g.font = `12.5px ${this.font}`;
    g.fillStyle = this.theme("--soft");
    const whole = `${timeline.name}    ${timeline.caption}`;
    const fits = after + g.measureText(whole).width <= this.width && this.width > 720;
    g.fillText(fits ? whole : timeline.name, after, top - 9);
  }

  drawBox(g, cell, y) {
    const x = this.x(cell[START]);
    const full = this.x(cell[END]) - x;
    const width = full > 3 ? full - 0.8 : Math.max(full, 0.5);
    const [top, height] = this.within(cell, y);
    g.fillStyle = this.data.colours[cell[KIND]][cell[SHADE]];
    g.fillRect(x, top, width, height);
    const label = `${cell[MICROBATCH]}`;
    const size = Math.min(11, height - 0.5);
    if (width < 0.58 * size * label.length + 3 || size < 8) return;
    g.font = `${size}px ${this.font}`;
    g.fillStyle = this.data.inks[cell[KIND]][cell[SHADE]];
    g.fillText(label, x + width / 2, top + height / 2 + 0.36 * size);
  }

  // Top and height of a box in its row at `y`: two passes that ran overlapped share it.
  within(cell, y) {
    const pitch = (this.row + 1) / cell[LANES];
    return [y + cell[LANE] * pitch, pitch - 1];
  }

  hatch(g) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const t = tile.getContext("2d");
    t.fillStyle = this.theme("--idle");
    t.fillRect(0, 0, 6, 6);
    t.strokeStyle = this.theme("--hatch");
    t.beginPath();
    for (const [x, y] of [[-1, 1], [0, 6], [5, 7]]) {
      t.moveTo(x, y);
      t.lineTo(x + (x ? 2 : 6), y - (x ? 2 : 6));
    }
    t.stroke();
    return g.createPattern(tile, "repeat");
  }

  // The selected pass in every timeline, and a line from the pass it waited for.
  drawSelection(g) {
    const name = nameOf(this.selected.cell);
    g.save();
    g.beginPath();
    g.rect(LEFT - 2, 0, this.width - LEFT - RIGHT + 4, this.height);
    g.clip();
    g.strokeStyle = this.theme("--ink");
    g.lineWidth = 2;
    this.index.forEach((index, n) => {
      const found = index.get(name);
      if (!found) return;
      const x = this.x(found.cell[START]);
      const [top, height] = this.within(found.cell, this.y(n, found.rank));
      g.strokeRect(x - 1, top - 1, Math.max(2, this.x(found.cell[END]) - x + 1), height + 2);
    });
    this.drawCause(g);
    g.restore();
  }

  drawCause(g) {
    const { timeline, rank, cell } = this.selected;
    const cause = cell[CAUSE] && this.index[timeline].get(cell[CAUSE]);
    if (!cause || cause.rank === rank) return;
    const [from, fromHeight] = this.within(cause.cell, this.y(timeline, cause.rank));
    const [to, toHeight] = this.within(cell, this.y(timeline, rank));
    const [x0, y0] = [this.x(cause.cell[END]) - 1, from + fromHeight / 2];
    const [x1, y1] = [this.x(cell[START]), to + (cause.rank < rank ? 0 : toHeight)];
    g.lineWidth = 1.5;
    g.beginPath();
    g.moveTo(x0, y0);
    g.bezierCurveTo(x0 + 14, y0, x1, y0 + (y1 - y0) / 2, x1, y1);
    g.stroke();
    g.fillStyle = g.strokeStyle;
    g.beginPath();
    g.arc(x0, y0, 3, 0, 7);
    g.fill();
  }

  y(timeline, rank) {
    return this.tops[timeline] + rank * (this.row + 3);
  }

  at(x, y) {
    if (x < LEFT) return null;
    for (let n = this.tops.length - 1; n >= 0; n--) {
      if (y < this.tops[n]) continue;
      const rank = Math.floor((y - this.tops[n]) / (this.row + 3));
      const row = this.data.timelines[n].rows[rank] || [];
      const place = firstEndingAfter(row, this.time(x));
      const lower = y > this.y(n, rank) + this.row / 2;
      const cell = row.slice(place, place + 2).find((c) => c[START] <= this.time(x) && (c[LANES] === 1 || (c[LANE] === 1) === lower));
      return cell ? { timeline: n, rank, cell } : null;
    }
    return null;
  }

  select(found) {
    this.selected = found;
    this.redraw();
    this.tip.hidden = !found;
    if (!found) return;
    this.tip.replaceChildren(...this.describe(found));
    this.placeTip(found);
  }

  // Beside the pass, so that the same pass stays visible in the timelines above and below.
  placeTip({ timeline, rank, cell }) {
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const right = this.x(Math.min(cell[END], this.to)) + 14;
    const left = right + width <= this.width ? right : Math.max(0, this.x(Math.max(cell[START], this.from)) - width - 14);
    const top = Math.min(Math.max(-40, this.y(timeline, rank) + this.row / 2 - height / 2), this.height - height + 20);
    this.tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  }

  describe({ timeline, rank, cell }) {
    const title = element("strong", `${this.data.phrases[cell[KIND]]} of stage ${cell[STAGE]}, microbatch ${cell[MICROBATCH]}`);
    const swatch = element("i");
    swatch.style.background = this.data.colours[cell[KIND]][cell[SHADE]];
    title.prepend(swatch);
    const row = this.data.timelines[timeline].rows[rank];
    const place = row.indexOf(cell);
    const before = row[place - 1 - cell[LANE]];
    const beside = cell[LANES] > 1 && row[place + (cell[LANE] ? -1 : 1)];
    const facts = [
      ["pass", `${nameOf(cell)} on rank ${rank}`],
      ...(beside ? [["overlapped with", nameOf(beside)]] : []),
      ["start", showMs(cell[START])],
      ["end", showMs(cell[END])],
      ["duration", showMs(cell[END] - cell[START])],
      ["idle before", showMs(cell[START] - (before ? before[END] : 0))],
      ...this.compare(timeline, cell),
    ];
    const table = element("table");
    for (const [label, value] of facts) table.insertRow().append(element("td", label), element("td", value));
    return cell[WHY] ? [title, table, element("p", cell[WHY])] : [title, table];
  }

  // Where the same pass lies in the other timelines.
  compare(timeline, cell) {
    const found = [];
    this.index.forEach((index, n) => {
      const other = n !== timeline && index.get(nameOf(cell));
      if (!other) return;
      const shift = cell[START] - other.cell[START];
      found.push([`start against ${this.data.timelines[n].source}`, `${shift >= 0 ? "+" : "−"}${showMs(Math.abs(shift))}`]);
    });
    return found;
  }

  view(from, to) {
    const span = Math.min(this.total, Math.max(this.total / 2000, to - from));
    this.from = Math.min(Math.max(0, from), this.total - span);
    this.to = this.from + span;
    this.redraw();
  }

  zoom(factor, x = (LEFT + this.width - RIGHT) / 2) {
    const [pivot, span] = [this.time(x), (this.to - this.from) * factor];
    const share = (pivot - this.from) / (this.to - this.from);
    this.view(pivot - share * span, pivot + (1 - share) * span);
  }

  move(time) {
    this.view(this.from + time, this.to + time);
  }

  listen() {
    const { canvas } = this;
    new ResizeObserver(() => this.redraw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    // A page scrolled under a resting pointer must not zoom: the wheel counts once the pointer has moved over the canvas.
    let armed = false;
    let drag = null;
    window.addEventListener("scroll", () => (armed = false), { passive: true });
    canvas.addEventListener("wheel", (event) => {
      const out = event.deltaY > 0 && this.to - this.from >= this.total;
      if ((!armed && !event.ctrlKey) || out) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move((event.deltaX / this.width) * (this.to - this.from));
      else this.zoom(Math.exp(event.deltaY * 0.002), event.offsetX);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, from: this.from, to: this.to };
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("dragging");
    });
    canvas.addEventListener("pointermove", (event) => {
      armed = armed || event.movementX !== 0 || event.movementY !== 0;
      if (!drag) return this.select(this.at(event.offsetX, event.offsetY));
      const shift = ((drag.x - event.clientX) / (this.width - LEFT - RIGHT)) * (drag.to - drag.from);
      return this.view(drag.from + shift, drag.to + shift);
    });
    const release = () => {
      drag = null;
      canvas.classList.remove("dragging");
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => {
      armed = false;
      this.select(null);
    });
    canvas.addEventListener("blur", () => this.select(null));
    canvas.addEventListener("dblclick", () => this.view(0, this.total));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const actions = {
      "ArrowRight": () => this.step(1), "ArrowLeft": () => this.step(-1), "ArrowDown": () => this.jump(1), "ArrowUp": () => this.jump(-1),
      "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1 / 0.7), "0": () => this.view(0, this.total),
      "Escape": () => this.select(null),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  first() {
    return { timeline: 0, rank: 0, cell: this.data.timelines[0].rows[0][0] };
  }

  step(by) {
    if (!this.selected) return this.show(this.first());
    const { timeline, rank, cell } = this.selected;
    const row = this.data.timelines[timeline].rows[rank];
    return this.show({ timeline, rank, cell: row[row.indexOf(cell) + by] });
  }

  // The pass at the same time on the next rank, or on the first rank of the next timeline.
  jump(by) {
    if (!this.selected) return this.show(this.first());
    const rows = this.data.timelines.flatMap((t, timeline) => t.rows.map((row, rank) => ({ timeline, rank, row })));
    const now = rows.findIndex((r) => r.timeline === this.selected.timeline && r.rank === this.selected.rank);
    const next = rows[now + by];
    if (!next) return undefined;
    const place = Math.min(firstEndingAfter(next.row, this.selected.cell[START]), next.row.length - 1);
    return this.show({ timeline: next.timeline, rank: next.rank, cell: next.row[place] });
  }

  show(found) {
    if (!found.cell) return;
    const { cell } = found;
    if (cell[START] < this.from) this.move(cell[START] - this.from);
    if (cell[END] > this.to) this.move(cell[END] - this.to);
    this.select(found);
  }
}

function indexByName(timeline) {
  const index = new Map();
  timeline.rows.forEach((row, rank) => row.forEach((cell) => index.set(nameOf(cell), { rank, cell })));
  return index;
}

// The place of the first cell that ends after `time`; the row's length when none does.
function firstEndingAfter(row, time) {
  let low = 0;
  let high = row.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row[middle][END] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The smallest 1, 2 or 5 times a power of ten that is at least `rough`.
function roundStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= rough);
}

function element(tag, text = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}
