// The rows of a timeline in view as one picture, pixel by pixel: without a GPU a canvas takes several times as long for as many boxes.

import { drawDensity } from "./density.js";
import { LEFT, RIGHT } from "./layout.js";

export function colorNumber(hex) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

// `share` of the second color over the first.
function mix(under, color, share) {
  const t = Math.round(256 * share);
  const redAndBlue = (((under & 0xff00ff) * (256 - t) + (color & 0xff00ff) * t) / 256) & 0xff00ff;
  const green = (((under & 0xff00) * (256 - t) + (color & 0xff00) * t) / 256) & 0xff00;
  return (0xff000000 | redAndBlue | green) >>> 0;
}

// Colors what lies between two places of a line of pixels, those at the edges by how much of them does; 0 is what has no color yet.
function cover(line, left, right, color, under) {
  const from = Math.max(0, left);
  const to = Math.min(line.length, right);
  if (to <= from) return;
  const first = Math.floor(from);
  const last = Math.ceil(to) - 1;
  if (first === last) {
    line[first] = mix(line[first] || under, color, to - from);
    return;
  }
  line[first] = mix(line[first] || under, color, first + 1 - from);
  for (let at = first + 1; at < last; at++) line[at] = color;
  line[last] = mix(line[last] || under, color, to - last);
}

// One for each timeline, kept from frame to frame: most of them have the same size.
export class RowImage {
  // From the top of the first row in view to the foot of the last, in paper, with the lines of the grid.
  begin(g, painter, timeline, top, height) {
    const { view, theme } = painter;
    const { ratio } = view;
    Object.assign(this, { view, ratio, top: Math.round((top - view.offset) * ratio), left: Math.round(LEFT * ratio) });
    const width = Math.max(1, Math.round((view.width - RIGHT) * ratio) - this.left);
    const lines = Math.max(1, Math.round(height * ratio));
    if (this.image?.width !== width || this.image.height !== lines) {
      this.image = g.createImageData(width, lines);
      this.pixels = new Uint32Array(this.image.data.buffer);
      this.lines = [0, 1, 2, 3].map(() => new Uint32Array(width));
    }
    Object.assign(this, { width, pxPerNs: ((view.width - LEFT - RIGHT) * ratio) / (view.to - view.from) });
    this.pixels.fill(colorNumber(theme.colors.paper));
    this.drawGrid(painter, lines);
    this.colors = timeline.kinds.map((kind) => kind.colors.map(colorNumber));
    this.setColors(theme);
  }

  drawGrid(painter, lines) {
    const color = colorNumber(painter.theme.colors.line);
    for (const tick of painter.ticks()) {
      const left = Math.round(this.view.x(tick)) * this.ratio - this.left;
      const [from, to] = [Math.max(0, Math.round(left)), Math.min(this.width, Math.round(left + this.ratio))];
      for (let line = 0; line < lines; line++) this.pixels.fill(color, line * this.width + from, line * this.width + Math.max(from, to));
    }
  }

  // Colors as numbers, and a line of idle time for each line of the pattern's tile.
  setColors(theme) {
    const { idle, hatch } = theme.colors;
    const look = `${idle}${hatch}${theme.dark}${this.width}${this.ratio}`;
    if (look === this.look) return;
    this.look = look;
    this.idle = colorNumber(idle);
    this.waiting = this.view.waiting.map(({ color }) => mix(this.idle, colorNumber(color), parseFloat(theme.colors.waiting) / 100));
    const tile = idleTile(theme.colors, this.ratio);
    const size = tile.width;
    const colors = new Uint32Array(tile.data.buffer);
    this.hatches = [...Array(size).keys()].map((y) => Uint32Array.from({ length: this.width }, (_, x) => colors[y * size + (x % size)]));
  }

  put(g) {
    g.putImageData(this.image, this.left, this.top);
  }

  place(time) {
    return (time - this.view.from) * this.pxPerNs;
  }

  // Where a row is: its first pixel, how many lines it has, and how many pixels of each are before the end of the timeline.
  row(timeline, y, height) {
    const first = Math.round((y - this.view.offset) * this.ratio) - this.top;
    const width = Math.max(0, Math.min(this.width, Math.round(this.place(timeline.makespan))));
    return { begin: first * this.width, stride: this.width, width, height: Math.round(height * this.ratio), ratio: this.ratio };
  }

  drawDense(timeline, rank, y, height) {
    const row = this.row(timeline, y, height);
    const colors = this.colors.map(([first]) => first);
    if (row.width) drawDensity(this.pixels, row, timeline, rank, this.view.from, 1 / this.pxPerNs, colors, this.hatches);
  }

  // Passes as boxes, two that overlap in half of the row each; between them idle time, with a band for what is waited for.
  drawBoxes(timeline, low, stop, next, y, height) {
    const row = this.row(timeline, y, height);
    const [upper, middle, lower, waits] = this.lines;
    for (const line of this.lines) line.fill(0);
    let areHalves = false;
    for (let i = low; i < stop; i++) {
      const shades = this.colors[timeline.kind[i]];
      const color = shades[Math.min(timeline.shade[i], shades.length - 1)];
      const from = this.place(timeline.start[i]);
      const to = this.place(timeline.end[i]);
      const right = to - from > 3 * this.ratio ? to - 0.8 * this.ratio : Math.max(to, from + 0.5 * this.ratio);
      const lane = timeline.lane[i];
      areHalves ||= lane > 0;
      if (lane !== 2) cover(upper, from, right, color, this.idle);
      if (lane === 0) cover(middle, from, right, color, this.idle);
      if (lane !== 1) cover(lower, from, right, color, this.idle);
    }
    for (let i = low; i < next; i++) this.drawWaits(timeline, i, waits);
    const half = areHalves ? Math.floor((row.height - this.ratio) / 2) : row.height;
    const [third, last] = [Math.round(row.height / 3), Math.round((2 * row.height) / 3)];
    for (let line = 0; line < row.height; line++) {
      const boxes = line < half ? upper : line < row.height - half ? middle : lower;
      this.compose(row, line, boxes, line >= third && line < last ? waits : boxes);
    }
  }

  drawWaits(timeline, i, line) {
    if (!timeline.isIdleBefore(i)) return;
    for (const [from, to, what] of timeline.waits(i)) {
      const left = this.place(from);
      const right = Math.max(left + 0.4 * this.ratio, this.place(to) - 0.4 * this.ratio);
      cover(line, left, right, this.waiting[what], this.idle);
    }
  }

  // A line of a row: what the boxes leave free is what `below` has, or idle.
  compose({ begin, width }, line, boxes, below) {
    const { pixels } = this;
    const idle = this.hatches[line % this.hatches.length];
    let at = begin + line * this.width;
    for (let x = 0; x < width; x++) pixels[at++] = boxes[x] || below[x] || idle[x];
  }
}

// Idle time: lines that rise, in a tile that repeats.
function idleTile(colors, ratio) {
  const size = Math.max(1, Math.round(6 * ratio));
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const g = tile.getContext("2d");
  g.scale(size / 6, size / 6);
  g.fillStyle = colors.idle;
  g.fillRect(0, 0, 6, 6);
  g.strokeStyle = colors.hatch;
  stroke(g, [[-1, 1, 1, -1], [0, 6, 6, 0], [5, 7, 7, 5]]);
  return g.getImageData(0, 0, size, size);
}

export function stroke(g, lines) {
  g.beginPath();
  for (const [x0, y0, x1, y1] of lines) {
    g.moveTo(x0, y0);
    g.lineTo(x1, y1);
  }
  g.stroke();
}
