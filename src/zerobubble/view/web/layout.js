// Where everything stands: timelines above each other, a row per rank, strips below a row for messages and for memory, one time axis.

export const LEFT = 58, RIGHT = 6, CAPTION = 28, AXIS = 26, BETWEEN = 14, LANE = 6, COPY = 3;

export class Layout {
  constructor(timelines) {
    this.timelines = timelines;
    this.scale = 1;
    this.shows = { memory: false, lanes: false };
    this.update();
  }

  update() {
    const ranks = Math.max(...this.timelines.map((t) => t.numRanks));
    const usual = ranks > 32 ? 12 : ranks > 16 ? 15 : ranks > 8 ? 18 : ranks > 4 ? 22 : 27;
    this.row = Math.round(Math.min(60, Math.max(4, usual * this.scale)));
    this.space = this.row < 14 ? 1 : 3;
    this.memory = this.shows.memory ? Math.max(12, Math.round(this.row * 0.9)) : 0;
    this.lane = this.shows.lanes ? LANE : 0;
    this.tops = [];
    let y = 0;
    for (const timeline of this.timelines) {
      this.tops.push(y + CAPTION);
      y += CAPTION + timeline.numRanks * this.pitch(timeline) + BETWEEN;
    }
    this.height = y - BETWEEN + AXIS;
  }

  // A row with its strips and the space below; sums over replicas and copies have a strip where a timeline has them.
  pitch(timeline) {
    return this.row + this.sumStrip(timeline) + this.copyStrip(timeline) + this.lane + this.memory + this.space;
  }

  sumStrip(timeline) {
    return timeline.sums.length ? 4 : 0;
  }

  copyStrip(timeline) {
    return timeline.copies.length ? 2 * COPY + 1 : 0;
  }

  y(n, rank) {
    return this.tops[n] + rank * this.pitch(this.timelines[n]);
  }

  sumY(n, rank) {
    return this.y(n, rank) + this.row + 1;
  }

  copyY(n, rank) {
    return this.sumY(n, rank) + this.sumStrip(this.timelines[n]);
  }

  laneY(n, rank) {
    return this.copyY(n, rank) + this.copyStrip(this.timelines[n]);
  }

  memoryY(n, rank) {
    return this.laneY(n, rank) + this.lane;
  }

  // Top and height of a pass in its row: two that overlap share it.
  box(n, number) {
    const timeline = this.timelines[n];
    const y = this.y(n, timeline.rank[number]);
    const half = (this.row - 1) / 2;
    return [[y, this.row], [y, half], [y + this.row - half, half]][timeline.lane[number]];
  }

  // Which rank of which timeline is at `y`, and in which of its parts; null between timelines.
  at(y) {
    for (let n = this.tops.length - 1; n >= 0; n--) {
      if (y < this.tops[n]) continue;
      const rank = Math.floor((y - this.tops[n]) / this.pitch(this.timelines[n]));
      if (rank >= this.timelines[n].numRanks) return null;
      const inside = y - this.y(n, rank);
      const part = inside <= this.row + 1 ? "row" : this.memory && y >= this.memoryY(n, rank) ? "memory" : "strip";
      return { timeline: n, rank, part, lower: inside > this.row / 2 };
    }
    return null;
  }
}
