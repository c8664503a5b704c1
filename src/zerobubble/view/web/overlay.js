// What lies over the picture: the selected pass or bubble with arrows to causes, messages, the critical path, the moment played.

import { LEFT, RIGHT } from "./layout.js";

const MOST_LINES = 4000;

export class Overlay {
  constructor(g, view) {
    Object.assign(this, { g, view, layout: view.layout, colors: view.theme.colors, lines: 0 });
  }

  draw() {
    const { g, view } = this;
    g.save();
    g.translate(0, -view.offset);
    g.beginPath();
    g.rect(LEFT - 3, view.offset, view.width - LEFT - RIGHT + 6, view.visible);
    g.clip();
    if (view.moment !== null) this.drawMoment();
    view.timelines.forEach((timeline, n) => {
      if (view.shows.messages) this.drawMessages(timeline, n);
      if (view.shows.critical) this.drawCritical(timeline, n);
    });
    if (view.selected) this.drawSelection(view.selected);
    g.restore();
  }

  drawMoment() {
    const { g, view, layout } = this;
    const x = view.x(view.moment);
    g.globalAlpha = 0.72;
    g.fillStyle = this.colors.paper;
    g.fillRect(Math.max(LEFT, x), 0, view.width, layout.height);
    g.globalAlpha = 1;
    g.fillStyle = this.colors.ink;
    g.fillRect(x - 1, 0, 2, layout.height);
  }

  drawMessages(timeline, n) {
    const { g, view } = this;
    g.strokeStyle = this.colors.ink;
    g.lineWidth = 0.9;
    g.globalAlpha = 0.65;
    g.beginPath();
    for (let rank = 0; rank < timeline.numRanks && this.lines < MOST_LINES; rank++) {
      const y = this.layout.y(n, rank);
      if (y < view.offset - this.layout.row || y > view.offset + view.visible) continue;
      for (let i = timeline.firstEndingAfter(rank, view.from); i < timeline.first[rank + 1] && timeline.start[i] <= view.to; i++) {
        for (const need of timeline.needs(i)) if (timeline.rank[need] !== rank) this.line(n, need, i);
        if (this.lines >= MOST_LINES) break;
      }
    }
    g.stroke();
    g.globalAlpha = 1;
  }

  line(n, from, to) {
    const { g, view, layout } = this;
    const timeline = view.timelines[n];
    const [top, height] = layout.box(n, from);
    const [other, high] = layout.box(n, to);
    const down = timeline.rank[to] > timeline.rank[from];
    g.moveTo(view.x(timeline.end[from]), top + (down ? height : 0));
    g.lineTo(view.x(timeline.start[to]), other + (down ? 0 : high));
    this.lines += 1;
  }

  drawCritical(timeline, n) {
    const { g, view, layout } = this;
    const path = view.criticalPath(n);
    const draw = (color, width) => {
      g.strokeStyle = color;
      g.lineWidth = width;
      g.lineJoin = "round";
      g.beginPath();
      let begun = false;
      for (const i of path) {
        if (timeline.end[i] < view.from || timeline.start[i] > view.to) continue;
        const [top, height] = layout.box(n, i);
        const y = top + height - 2;
        if (begun) g.lineTo(view.x(timeline.start[i]), y);
        else g.moveTo(view.x(timeline.start[i]), y);
        g.lineTo(view.x(timeline.end[i]), y);
        begun = true;
      }
      g.stroke();
    };
    draw(this.colors.paper, 5.5);
    draw(this.colors.ink, 3);
  }

  drawSelection({ timeline: n, rank, number, idle }) {
    const { g, view, layout } = this;
    const timeline = view.timelines[n];
    g.strokeStyle = this.colors.ink;
    g.lineWidth = 2;
    if (idle) {
      const x = view.x(idle.from);
      g.setLineDash([4, 3]);
      g.strokeRect(x, layout.y(n, rank), Math.max(2, view.x(idle.to) - x), layout.row);
      g.setLineDash([]);
      if (idle.cause >= 0) {
        this.outline(n, idle.cause);
        this.arrow(n, idle.cause, view.x(idle.to), idle.next < 0 ? layout.y(n, rank) + layout.row / 2 : layout.box(n, idle.next)[0], rank);
      }
      return;
    }
    if (number < 0) return;
    this.outlineEverywhere(n, number);
    const cause = timeline.cause(number);
    if (cause >= 0 && timeline.rank[cause] !== rank) this.arrow(n, cause, view.x(timeline.start[number]), layout.box(n, number)[0], rank);
    g.setLineDash([2, 3]);
    for (const user of timeline.users(number)) {
      if (timeline.rank[user] !== rank) this.arrow(n, number, view.x(timeline.start[user]), layout.box(n, user)[0], timeline.rank[user]);
    }
    g.setLineDash([]);
  }

  // The same pass in every timeline.
  outlineEverywhere(n, number) {
    const { timelines } = this.view;
    const { kind, stage, microbatch } = timelines[n];
    timelines.forEach((timeline, other) => {
      const found = timeline.find(kind[number], stage[number], microbatch[number]);
      if (found >= 0) this.outline(other, found);
    });
  }

  outline(n, number) {
    const { g, view, layout } = this;
    const timeline = view.timelines[n];
    const [top, height] = layout.box(n, number);
    const x = view.x(timeline.start[number]);
    g.strokeRect(x - 1, top - 1, Math.max(2, view.x(timeline.end[number]) - x + 1), height + 2);
  }

  // From the end of a pass to (x, top of a row) on `rank`.
  arrow(n, from, x, top, rank) {
    const { g, view, layout } = this;
    const timeline = view.timelines[n];
    const [start, height] = layout.box(n, from);
    const [x0, y0] = [view.x(timeline.end[from]) - 1, start + height / 2];
    const y1 = timeline.rank[from] < rank ? top : top + layout.row;
    g.lineWidth = 1.6;
    g.beginPath();
    g.moveTo(x0, y0);
    g.bezierCurveTo(x0 + 14, y0, x, y0 + (y1 - y0) / 2, x, y1);
    g.stroke();
    g.fillStyle = g.strokeStyle;
    g.beginPath();
    const tip = y1 > y0 ? -6 : 6;
    g.moveTo(x, y1);
    g.lineTo(x - 4, y1 + tip);
    g.lineTo(x + 4, y1 + tip);
    g.fill();
    g.beginPath();
    g.arc(x0, y0, 3, 0, 7);
    g.fill();
  }
}
