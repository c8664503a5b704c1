// Draws what is in view: the axis, rows as boxes or densities, idle time, sums over replicas, copies, messages on their way, memory.

import { AXIS, COPY, LANE, LEFT, RIGHT } from "./layout.js";
import { stroke } from "./rows.js";
import { roundStep } from "./words.js";

const NARROWEST_BOX = 3.5; // in pixels, on average over a row; below that it is drawn as a density
const LEAST_NUMBER = 6.2, NARROWEST_DECORATED = 6; // in pixels: the size of a number, and a box with a pattern or a number

export class Painter {
  constructor(g, view) {
    Object.assign(this, { g, view, layout: view.layout, theme: view.theme, boxes: 0, dense: 0, marks: 0, isNarrow: false }); // `isNarrow`: some passes are too narrow for their numbers
    this.patterns = new Map();
  }

  draw() {
    const { g, view } = this;
    g.fillStyle = this.theme.colors.paper;
    g.fillRect(0, 0, view.width + 1, view.visible + 1); // to the last pixel where sizes are fractions
    g.translate(0, -view.offset);
    this.drawGrid();
    const seen = view.timelines.map((timeline, n) => this.rowsInView(timeline, n));
    this.isLong = view.timelines.every((timeline, n) => seen[n].every((row) => this.fitsLongNames(timeline, row)));
    view.timelines.forEach((timeline, n) => this.drawTimeline(timeline, n, seen[n]));
    this.drawAxis();
    g.setTransform(1, 0, 0, 1, 0, 0);
  }

  ticks() {
    const { from, to, width } = this.view;
    const step = roundStep(((to - from) * 90) / (width - LEFT - RIGHT));
    const found = [];
    for (let n = Math.ceil(from / step); n * step <= to; n++) found.push(n * step);
    return found;
  }

  drawGrid() {
    const { g, view, layout } = this;
    g.fillStyle = this.theme.colors.line;
    for (const tick of this.ticks()) {
      const x = Math.round(view.x(tick));
      view.timelines.forEach((t, n) => g.fillRect(x, layout.tops[n] - 4, 1, t.numRanks * layout.pitch(t) + 5));
    }
  }

  // At the foot of the picture, or of the window where the picture goes on below it.
  drawAxis() {
    const { g, view } = this;
    const foot = Math.min(this.layout.height, view.offset + view.visible);
    const y = foot - 8;
    g.fillStyle = this.theme.colors.paper;
    g.fillRect(0, foot - AXIS + 4, view.width, AXIS);
    g.font = `11.5px ${this.theme.font}`;
    g.textAlign = "center";
    g.fillStyle = this.theme.colors.soft;
    const ticks = this.ticks();
    ticks.forEach((tick, n) => {
      const label = `${+(tick / 1e6).toPrecision(10)}${n === ticks.length - 1 ? ` ${view.timelines[0].unit}` : ""}`;
      const half = g.measureText(label).width / 2;
      g.fillText(label, Math.min(view.x(tick), view.width - half), y);
    });
  }

  isVisible(y, height) {
    return y + height >= this.view.offset && y <= this.view.offset + this.view.visible;
  }

  rowsInView(timeline, n) {
    const { layout } = this;
    const ranks = [...Array(timeline.numRanks).keys()].filter((rank) => this.isVisible(layout.y(n, rank), layout.pitch(timeline)));
    return ranks.map((rank) => this.passesInView(timeline, rank));
  }

  drawTimeline(timeline, n, rows) {
    const { g, view, layout } = this;
    this.drawCaption(timeline, n);
    const pitch = layout.pitch(timeline);
    if (!rows.length) return;
    this.drawNames(n, rows.map(({ rank }) => rank), pitch);
    this.drawRows(timeline, n, rows, pitch);
    g.save();
    g.beginPath();
    g.rect(LEFT, view.offset, view.width - LEFT - RIGHT, view.visible);
    g.clip();
    for (const row of rows) this.drawOverRow(timeline, n, row);
    g.restore();
  }

  // The name of every rank if they fit, else of every fourth or eighth.
  drawNames(n, ranks, pitch) {
    const { g, layout } = this;
    const every = pitch >= 11 ? 1 : pitch >= 6 ? 4 : 8;
    const size = Math.min(12, Math.max(9, pitch - 1));
    g.font = `${size}px ${this.theme.font}`;
    g.textAlign = "right";
    g.fillStyle = this.theme.colors.soft;
    for (const rank of ranks) {
      if (rank % every === 0) g.fillText(`rank ${rank}`, LEFT - 10, layout.y(n, rank) + layout.row / 2 + 0.35 * size);
    }
  }

  drawCaption(timeline, n) {
    const { g, view, layout } = this;
    const y = layout.tops[n] - 10;
    if (!this.isVisible(y, 20)) return;
    g.textAlign = "left";
    g.font = `600 12.5px ${this.theme.font}`;
    g.fillStyle = this.theme.colors.ink;
    g.fillText(timeline.name, LEFT, y);
    const after = LEFT + g.measureText(timeline.name).width + 8;
    g.font = `12.5px ${this.theme.font}`;
    g.fillStyle = this.theme.colors.soft;
    const whole = `${timeline.source}    ${timeline.caption}`;
    g.fillText(after + g.measureText(whole).width <= view.width ? whole : timeline.source, after, y);
  }

  // The passes of a rank in view, from `low` to before `stop`, and whether they are too narrow for boxes.
  passesInView(timeline, rank) {
    const { view } = this;
    const [low, high] = [timeline.firstEndingAfter(rank, view.from), timeline.first[rank + 1]];
    const stop = high > low ? this.stopOf(timeline, rank, low, high) : low;
    // As if the schedule filled the width: next to a longer one it is drawn as on a page of its own.
    const share = (Math.min(view.to, timeline.makespan) - view.from) / Math.min(view.to - view.from, timeline.makespan || 1);
    const isDense = (share * (view.width - LEFT - RIGHT)) / Math.max(1, stop - low) < NARROWEST_BOX;
    return { rank, low, stop, high, isDense };
  }

  drawRows(timeline, n, rows, pitch) {
    const { g, layout } = this;
    const image = this.view.images[n];
    image.begin(g, this, timeline, layout.y(n, rows[0].rank), rows.length * pitch);
    for (const { rank, low, stop, high, isDense } of rows) {
      const y = layout.y(n, rank);
      if (isDense) image.drawDense(timeline, rank, y, layout.row);
      else image.drawBoxes(timeline, low, stop, Math.min(high, stop + 1), y, layout.row);
      this.isNarrow ||= isDense;
      if (isDense) this.dense += 1;
      else this.boxes += stop - low;
    }
    image.put(g);
  }

  // Patterns and names in boxes, and the strips below the row.
  drawOverRow(timeline, n, { rank, low, stop, high, isDense }) {
    const { layout } = this;
    if (!isDense) this.drawNamesOfPasses(timeline, n, low, stop);
    if (timeline.sums.length) this.drawSums(timeline, n, rank);
    if (timeline.copies.length) this.drawCopies(timeline, n, rank);
    if (layout.lane) this.drawMessages(timeline, n, rank, low, Math.min(high, stop + 64));
    if (layout.memory && timeline.memory) this.drawMemory(timeline, n, rank);
  }

  // One past the last pass of a rank that starts within view.
  stopOf(timeline, rank, low, high) {
    let [a, b] = [low, high];
    while (a < b) {
      const middle = (a + b) >> 1;
      if (timeline.start[middle] > this.view.to) b = middle;
      else a = middle + 1;
    }
    return a;
  }

  // Passes show stage, kind and microbatch if every pass in view has the space, else the microbatch, so that all labels mean the same.
  fitsLongNames(timeline, { low, stop, isDense }) {
    if (isDense) return true;
    const size = this.sizeOfNames(this.layout.row);
    for (let i = low; i < stop; i++) {
      const width = this.widthOf(timeline, i);
      if (width > NARROWEST_DECORATED && width < 0.62 * size * timeline.nameOf(i).length + 6) return false;
    }
    return true;
  }

  sizeOfNames(height) {
    return Math.min(11, height - 0.5);
  }

  widthOf(timeline, i) {
    return this.view.x(timeline.end[i]) - this.view.x(timeline.start[i]) - 0.8;
  }

  drawNamesOfPasses(timeline, n, low, stop) {
    const { g, view, layout } = this;
    g.textAlign = "center";
    let size = 0;
    for (let i = low; i < stop; i++) {
      const width = this.widthOf(timeline, i);
      if (width <= NARROWEST_DECORATED) {
        this.isNarrow = true;
        continue;
      }
      const [top, height] = layout.box(n, i);
      const wanted = this.sizeOfNames(height);
      if (wanted !== size) g.font = `${(size = wanted)}px ${this.theme.font}`;
      this.drawNameOfPass(timeline, i, { x: view.x(timeline.start[i]), top, width, height }, size);
    }
  }

  drawNameOfPass(timeline, i, { x, top, width, height }, size) {
    const { g } = this;
    const kind = timeline.kinds[timeline.kind[i]];
    const ink = kind.inks[Math.min(timeline.shade[i], kind.colors.length - 1)];
    if (kind.texture) {
      g.fillStyle = this.texture(kind.texture, ink);
      g.fillRect(x, top, width, height);
    }
    // The numbers of all microbatches have the size at which the largest fits.
    const fits = this.isLong ? size : Math.min(size, (width - 2) / (0.58 * `${timeline.microbatches - 1}`.length));
    if (size < 8) return;
    if (fits < LEAST_NUMBER) {
      this.isNarrow = true;
      return;
    }
    const font = g.font;
    if (fits < size) g.font = `${fits.toFixed(1)}px ${this.theme.font}`;
    g.fillStyle = ink;
    g.fillText(this.isLong ? timeline.nameOf(i) : `${timeline.microbatch[i]}`, x + width / 2, top + height / 2 + 0.36 * fits);
    if (fits < size) g.font = font;
  }

  drawSums(timeline, n, rank) {
    const { g, view, layout } = this;
    g.fillStyle = view.summing;
    const y = layout.sumY(n, rank);
    for (const [, start, end] of timeline.sums[rank]) g.fillRect(view.x(start), y, Math.max(0.5, view.x(end) - view.x(start) - 0.4), 3);
  }

  // Copies to the host above those back, on one lane that both share.
  drawCopies(timeline, n, rank) {
    const { g, view, layout } = this;
    const y = layout.copyY(n, rank);
    g.fillStyle = this.theme.colors.idle;
    g.fillRect(view.x(0), y, view.x(timeline.makespan) - view.x(0), 2 * COPY);
    for (const { way, start, end } of timeline.copies[rank]) {
      if (end < view.from || start > view.to) continue;
      g.fillStyle = view.copying[way].color;
      g.fillRect(view.x(start), y + way * COPY, Math.max(0.5, view.x(end) - view.x(start) - 0.4), COPY);
    }
  }

  // Messages that this rank waits for or takes, from the end of their pass until they are here.
  drawMessages(timeline, n, rank, low, stop) {
    const { g, view, layout } = this;
    const y = layout.laneY(n, rank);
    g.fillStyle = this.theme.colors.idle;
    g.fillRect(LEFT, y, view.x(timeline.makespan) - LEFT, LANE - 2);
    if (timeline.marks) return this.drawMarks(timeline.marks, rank, y);
    g.fillStyle = view.waiting[1].color;
    for (let i = low; i < stop; i++) {
      for (const need of timeline.needs(i)) {
        if (timeline.rank[need] === rank) continue;
        const arrived = timeline.delays ? timeline.arrival(need) : timeline.start[i];
        const [x, end] = [view.x(timeline.end[need]), view.x(arrived)];
        if (end >= LEFT && x <= view.width) g.fillRect(x, y, Math.max(1, end - x), LANE - 2);
      }
    }
  }

  // What a measured rank did outside its passes, as it was recorded.
  drawMarks({ first, start, time, what }, rank, y) {
    const { g, view } = this;
    for (let i = first[rank]; i < first[rank + 1]; i++) {
      if (start[i] > view.to || start[i] + time[i] < view.from) continue;
      g.fillStyle = view.doing[what[i]].color;
      g.fillRect(view.x(start[i]), y, Math.max(1, view.x(start[i] + time[i]) - view.x(start[i])), LANE - 2);
      this.marks += 1;
    }
  }

  drawMemory(timeline, n, rank) {
    const { g, view, layout, theme } = this;
    const [y, height] = [layout.memoryY(n, rank), layout.memory - 2];
    const scale = height / view.mostBytes;
    const base = timeline.layerBytes(rank);
    g.fillStyle = theme.colors.idle;
    g.fillRect(view.x(0), y, view.x(timeline.makespan) - view.x(0), height);
    g.fillStyle = theme.colors.layer;
    g.fillRect(view.x(0), y + height - base * scale, view.x(timeline.makespan) - view.x(0), base * scale);
    g.fillStyle = theme.colors.held;
    const right = Math.min(view.width - RIGHT, view.x(timeline.makespan));
    for (const [x, width, held] of this.memoryBars(timeline, rank, right)) {
      g.fillRect(x, y + height - (base + held) * scale, width, held * scale);
    }
    if (timeline.limits.length) {
      g.fillStyle = theme.colors.limit;
      g.fillRect(view.x(0), y + height - (base + timeline.limits[rank]) * scale - 0.5, view.x(timeline.makespan) - view.x(0), 1.5);
    }
  }

  // [x, width, bytes]: of all steps within a pixel the highest.
  memoryBars(timeline, rank, right) {
    const { view } = this;
    const { first, at, held } = timeline.memory;
    const bars = [];
    let [x, most] = [LEFT, timeline.heldAt(rank, view.from)];
    let low = first[rank];
    for (let high = first[rank + 1]; low < high; ) {
      const middle = (low + high) >> 1;
      if (at[middle] > view.from) high = middle;
      else low = middle + 1;
    }
    let now = most;
    for (; low < first[rank + 1] && at[low] <= view.to; low++) {
      const next = view.x(at[low]);
      if (next - x >= 1) {
        bars.push([x, Math.round(next) - x, most]);
        [x, most] = [Math.round(next), now];
      }
      now = held[low];
      most = next - x < 0.001 && bars.length ? now : Math.max(most, now);
    }
    if (right > x) bars.push([x, right - x, most]);
    return bars;
  }

  // Patterns that distinguish kinds without colors.
  texture(name, ink) {
    return this.pattern(`${name}${ink}`, (t) => {
      t.strokeStyle = ink;
      t.globalAlpha = 0.34;
      const lines = { rising: [[-1, 1, 1, -1], [0, 6, 6, 0], [5, 7, 7, 5]], falling: [[-1, 5, 1, 7], [0, 0, 6, 6], [5, -1, 7, 1]], level: [[0, 1.5, 6, 1.5], [0, 4.5, 6, 4.5]], upright: [[3, 0, 3, 6]] };
      stroke(t, lines[name]);
    });
  }

  pattern(name, draw) {
    if (!this.patterns.has(name)) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 6;
      draw(tile.getContext("2d"));
      this.patterns.set(name, this.g.createPattern(tile, "repeat"));
    }
    return this.patterns.get(name);
  }
}
