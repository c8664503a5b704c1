// Timelines on one time axis: what is in view and what is selected. Drawing is the painter's and the overlay's, input the controls'.

import { LEFT, Layout, RIGHT } from "./layout.js";
import { Overlay } from "./overlay.js";
import { Painter } from "./painter.js";
import { RowImage } from "./rows.js";
import { describe, idleOf } from "./tip.js";

const SHORTEST = 1000; // ns in view at least

export class Viewer {
  constructor(host, timelines, data, theme) {
    Object.assign(this, { host, timelines, theme, waiting: data.waiting, summing: data.summing, copying: data.copying, doing: data.doing });
    this.layout = new Layout(timelines);
    this.shows = { messages: false, critical: false };
    this.total = Math.max(1, ...timelines.map((t) => t.makespan));
    this.mostBytes = Math.max(1, ...timelines.map(mostBytes));
    Object.assign(this, { from: 0, to: this.total, selected: null, moment: null, whole: false, paths: [], listeners: [] });
    [this.base, this.over] = ["base", "over"].map((name) => host.querySelector(`canvas.${name}`));
    this.images = timelines.map(() => new RowImage());
    this.sheet = host.querySelector(".sheet");
    this.tip = host.querySelector(".tip");
    this.listen();
    this.draw();
  }

  listen() {
    const { theme } = this;
    const redraw = () => this.redraw();
    const observer = new ResizeObserver(redraw);
    const stop = new AbortController();
    theme.listeners.push(redraw);
    observer.observe(this.host);
    window.addEventListener("scroll", redraw, { passive: true, signal: stop.signal });
    for (const [event, whole] of [["beforeprint", true], ["afterprint", false]]) {
      window.addEventListener(event, () => this.print(whole), { signal: stop.signal });
    }
    this.stop = () => {
      stop.abort();
      observer.disconnect();
      theme.listeners = theme.listeners.filter((listener) => listener !== redraw);
    };
  }

  // Let go of the window, for a page that draws other timelines in its place.
  end() {
    this.stop();
  }

  x(time) {
    return LEFT + ((time - this.from) / (this.to - this.from)) * (this.width - LEFT - RIGHT);
  }

  time(x) {
    return this.from + ((x - LEFT) / (this.width - LEFT - RIGHT)) * (this.to - this.from);
  }

  // The canvases are as large as the window and stay in it while the page scrolls past them.
  fit() {
    this.ratio = window.devicePixelRatio || 1;
    this.width = this.host.clientWidth;
    this.visible = this.whole ? this.layout.height : Math.min(this.layout.height, window.innerHeight);
    this.host.style.height = `${this.layout.height}px`;
    this.sheet.style.height = `${this.visible}px`;
    this.offset = Math.max(0, this.sheet.getBoundingClientRect().top - this.host.getBoundingClientRect().top);
  }

  print(whole) {
    this.whole = whole;
    this.draw();
  }

  // The lower canvas is covered whole, and so need not be transparent.
  context(canvas) {
    const [width, height] = [Math.round(this.width * this.ratio), Math.round(this.visible * this.ratio)];
    if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
    const g = canvas.getContext("2d", { alpha: canvas === this.over });
    g.setTransform(1, 0, 0, 1, 0, 0);
    if (canvas === this.over) g.clearRect(0, 0, width, height);
    g.scale(this.ratio, this.ratio);
    return g;
  }

  redraw() {
    this.ask("frame", () => this.draw());
  }

  redrawOverlay() {
    this.ask("overlay", () => this.drawOverlay());
  }

  ask(name, draw) {
    if (this[name]) return;
    this[name] = requestAnimationFrame(() => {
      this[name] = 0;
      draw();
    });
  }

  draw() {
    this.fit();
    if (!this.width) return;
    const painter = new Painter(this.context(this.base), this);
    painter.draw();
    this.host.dataset.boxes = painter.boxes;
    this.host.dataset.dense = painter.dense;
    this.host.dataset.marks = painter.marks;
    this.host.dataset.narrow = painter.isNarrow;
    this.host.classList.toggle("zoomed", this.to - this.from < this.total);
    this.drawOverlay();
  }

  // An upper canvas with nothing on it has no pixels, which would be laid over the lower one in every frame.
  drawOverlay() {
    let lines = 0;
    if (this.selected || this.moment !== null || this.shows.messages || this.shows.critical) {
      const overlay = new Overlay(this.context(this.over), this);
      overlay.draw();
      ({ lines } = overlay);
    } else if (this.over.width) {
      this.over.width = 0;
    }
    this.host.dataset.lines = lines;
    for (const listener of this.listeners) listener();
  }

  criticalPath(n) {
    this.paths[n] = this.paths[n] || this.timelines[n].criticalPath();
    return this.paths[n];
  }

  show(what, on) {
    const owner = what in this.layout.shows ? this.layout.shows : this.shows;
    owner[what] = on;
    this.host.parentElement.classList.toggle(`shows-${what}`, on);
    this.layout.update();
    this.redraw();
  }

  scaleRows(factor) {
    this.layout.scale = Math.min(4, Math.max(0.3, this.layout.scale * factor));
    this.layout.update();
    this.redraw();
  }

  range(from, to) {
    const span = Math.min(this.total, Math.max(to - from, SHORTEST));
    this.from = Math.min(Math.max(0, from), this.total - span);
    this.to = this.from + span;
    this.redraw();
  }

  zoom(factor, x = (LEFT + this.width - RIGHT) / 2) {
    const pivot = this.time(x);
    const share = (pivot - this.from) / (this.to - this.from);
    const span = Math.min(this.total, Math.max((this.to - this.from) * factor, SHORTEST));
    this.range(pivot - share * span, pivot + (1 - share) * span);
  }

  move(time) {
    this.range(this.from + time, this.to + time);
  }

  // What is at a point of the host: a pass, a bubble or a moment of memory; null for nothing.
  at(x, y) {
    const place = x < LEFT ? null : this.layout.at(y);
    if (!place) return null;
    const timeline = this.timelines[place.timeline];
    const time = this.time(x);
    if (place.part === "memory") return timeline.memory && time <= timeline.makespan ? { ...place, time, number: -1 } : null;
    if (place.part !== "row" || time < 0) return null;
    return this.inRow(place, timeline, time);
  }

  inRow(place, timeline, time) {
    const { rank, lower } = place;
    const stop = timeline.first[rank + 1];
    let number = timeline.firstEndingAfter(rank, time);
    if (number < stop && timeline.lane[number] === 1 && lower) number += 1;
    if (number < stop && timeline.start[number] <= time && time < timeline.end[number]) return { ...place, number };
    const idle = idleOf(timeline, rank, number < stop ? timeline.step(number)[0] : -1);
    return idle && idle.from <= time && time <= idle.to ? { ...place, number, idle } : null;
  }

  select(found) {
    this.selected = found;
    this.redrawOverlay();
    this.tip.hidden = !found;
    if (!found) return;
    this.tip.replaceChildren(...describe(this, found));
    this.placeTip(found);
  }

  // Next to the selection and within the window, so that the same pass stays visible in the timelines above and below.
  placeTip(found) {
    const timeline = this.timelines[found.timeline];
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const [start, end] = found.idle ? [found.idle.from, found.idle.to] : found.part === "memory" ? [found.time, found.time] : [timeline.start[found.number], timeline.end[found.number]];
    const right = this.x(Math.min(end, this.to)) + 14;
    const left = right + width <= this.width ? right : Math.max(0, this.x(Math.max(start, this.from)) - width - 14);
    const middle = this.layout.y(found.timeline, found.rank) + this.layout.row / 2;
    const below = this.layout.height + 4;
    const height_left = window.innerHeight - this.host.getBoundingClientRect().top;
    if (below + height < height_left) {
      const x = Math.min(Math.max(0, this.x(Math.max(start, this.from)) - 20), this.width - width);
      this.tip.style.transform = `translate(${Math.round(x)}px, ${Math.round(below)}px)`;
      return;
    }
    const fits = left + width < this.x(Math.max(start, this.from)) || left >= right;
    const top = fits ? middle - height / 2 : middle + this.layout.row;
    const [low, high] = [this.offset - 30, this.offset + this.visible - height];
    this.tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(Math.max(low, Math.min(top, high)))}px)`;
  }

  // The pass or bubble after the selected one on its rank, or before it.
  step(by) {
    if (!this.selected || this.selected.part === "memory") return this.reveal(this.first());
    const { timeline: n, rank, number, idle } = this.selected;
    const timeline = this.timelines[n];
    if (idle) return this.reveal(this.item(n, rank, by > 0 ? number : number - 1, false));
    const next = by > 0 ? timeline.step(number).at(-1) + 1 : number;
    const before = this.item(n, rank, next, true);
    if (timeline.lane[number] === (by > 0 ? 1 : 2)) return this.reveal(this.item(n, rank, number + by, false));
    return this.reveal(before || this.item(n, rank, by > 0 ? next : number - 1, false));
  }

  // A pass, or the bubble before it; null where there is none.
  item(n, rank, number, bubble) {
    const timeline = this.timelines[n];
    const [low, stop] = [timeline.first[rank], timeline.first[rank + 1]];
    if (number < low || number > stop) return null;
    if (!bubble) return number < stop ? { timeline: n, rank, number, part: "row" } : null;
    const idle = idleOf(timeline, rank, number < stop ? timeline.step(number)[0] : -1);
    return idle ? { timeline: n, rank, number, idle, part: "row" } : null;
  }

  first() {
    const n = this.timelines.findIndex((t) => t.count);
    return n < 0 ? null : this.item(n, this.timelines[n].rank[0], 0, false);
  }

  // What runs at the same time on the next rank, or on the first rank of the next timeline.
  jump(by) {
    if (!this.selected) return this.reveal(this.first());
    const rows = this.timelines.flatMap((t, timeline) => [...Array(t.numRanks).keys()].map((rank) => ({ timeline, rank })));
    const now = rows.findIndex((r) => r.timeline === this.selected.timeline && r.rank === this.selected.rank);
    const next = rows[now + by];
    if (!next) return undefined;
    const timeline = this.timelines[next.timeline];
    return this.reveal(this.inRow({ ...next, part: "row", lower: false }, timeline, Math.min(this.timeOf(this.selected), timeline.makespan)));
  }

  timeOf({ timeline, number, idle, time }) {
    if (time !== undefined) return time;
    const [from, to] = idle ? [idle.from, idle.to] : [this.timelines[timeline].start[number], this.timelines[timeline].end[number]];
    return (from + to) / 2;
  }

  // To the pass that the selected one came after, or that its bubble waited for.
  follow() {
    if (!this.selected) return undefined;
    const { timeline: n, number, idle } = this.selected;
    const cause = idle ? idle.cause : this.timelines[n].cause(number);
    return cause < 0 ? undefined : this.reveal(this.item(n, this.timelines[n].rank[cause], cause, false));
  }

  // Selects and moves time and window so that it is seen.
  reveal(found) {
    if (!found) return;
    const timeline = this.timelines[found.timeline];
    const [start, end] = found.idle ? [found.idle.from, found.idle.to] : [timeline.start[found.number], timeline.end[found.number]];
    if (start < this.from) this.move(start - this.from);
    else if (end > this.to) this.move(Math.min(end - this.to, start - this.from));
    const y = this.host.getBoundingClientRect().top + this.layout.y(found.timeline, found.rank);
    if (y < 0) window.scrollBy(0, y - 40);
    else if (y + this.layout.row > window.innerHeight) window.scrollBy(0, y + this.layout.row + 40 - window.innerHeight);
    this.select(found);
  }
}

function mostBytes(timeline) {
  if (!timeline.memory) return 0;
  const { first, held } = timeline.memory;
  const most = (rank) => held.subarray(first[rank], first[rank + 1]).reduce((a, b) => Math.max(a, b), timeline.limits[rank] || 0);
  return Math.max(...[...Array(timeline.numRanks).keys()].map((rank) => timeline.layerBytes(rank) + most(rank)));
}
