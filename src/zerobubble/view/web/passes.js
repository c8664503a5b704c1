// A timeline's passes as columns, numbered rank after rank, and who needs whom by the table of kinds that came with the page.

import { summed, unpack } from "./columns.js";
import { showTime } from "./words.js";

export const PASS = 0, MESSAGE = 1, HOST = 2, UNKNOWN = 3, LAID_OUT = 4, COPYING = 5;

// What idle time is for once nothing is waited for, by the source of the timeline.
const REST = { "simulated": MESSAGE, "laid out": LAID_OUT };

export class Passes {
  static async read(head, kinds) {
    const names = Object.keys(head.columns);
    const columns = await Promise.all(names.map((name) => unpack(head.columns[name])));
    const passes = new Passes(head, kinds, Object.fromEntries(names.map((name, i) => [name, columns[i]])));
    if (head.gaps) passes.gaps = await unpackAll(head.gaps);
    if (head.marks) passes.marks = await unpackAll(head.marks);
    if (head.memory) {
      const { first, wait, added } = await unpackAll(head.memory);
      passes.memory = { first, ...restarted(first, wait, added) };
    }
    return passes;
  }

  constructor(head, kinds, { kind, stage, microbatch, wait, time, back }) {
    const { name, source, caption, unit, makespan, first, sums, copies, delays, limits, layers, last, microbatchBytes, memoryUnit } = head;
    Object.assign(this, { name, source, caption, unit, makespan, first, sums, copies: copies.map((row) => row.map(copyOf)), delays, limits, layers, last, microbatchBytes, memoryUnit, kinds, kind, stage });
    this.microbatch = summed(microbatch);
    this.back = back || null;
    this.count = kind.length;
    this.numRanks = first.length - 1;
    this.stages = 1 + stage.reduce((most, value) => Math.max(most, value), 0);
    this.microbatches = 1 + this.microbatch.reduce((most, value) => Math.max(most, value), 0);
    this.rank = new Int32Array(this.count);
    for (let r = 0; r < this.numRanks; r++) this.rank.fill(r, first[r], first[r + 1]);
    this.setTimes(wait, time);
    this.setShades();
  }

  setTimes(wait, time) {
    this.start = new Float64Array(this.count);
    this.end = new Float64Array(this.count);
    this.lane = new Uint8Array(this.count); // 0 alone, 1 and 2 the upper and lower of two that overlap
    for (let r = 0; r < this.numRanks; r++) {
      let end = 0;
      for (let i = this.first[r]; i < this.first[r + 1]; i++) {
        this.start[i] = end + wait[i];
        end = this.end[i] = this.start[i] + time[i];
        const overlaps = i > this.first[r] && this.lane[i - 1] === 0 && this.start[i] < this.end[i - 1];
        if (overlaps) [this.lane[i - 1], this.lane[i]] = [1, 2];
      }
    }
  }

  // The place of each pass's stage among those of its rank: later ones are lighter.
  setShades() {
    this.shade = new Uint8Array(this.count);
    this.shades = 1;
    for (let r = 0; r < this.numRanks; r++) {
      const held = [...new Set(this.stage.subarray(this.first[r], this.first[r + 1]))].sort((a, b) => a - b);
      const place = new Map(held.map((stage, i) => [stage, i]));
      for (let i = this.first[r]; i < this.first[r + 1]; i++) this.shade[i] = place.get(this.stage[i]);
      this.shades = Math.max(this.shades, held.length);
    }
  }

  show(time) {
    return showTime(time, this.unit);
  }

  nameOf(number) {
    return `${this.stage[number]}${this.kinds[this.kind[number]].letters}${this.microbatch[number]}`;
  }

  // The number of a pass; -1 where the timeline has none such.
  find(kind, stage, microbatch) {
    if (kind < 0 || stage < 0 || stage >= this.stages || microbatch >= this.microbatches) return -1;
    if (!this.index) {
      this.index = new Int32Array(this.kinds.length * this.stages * this.microbatches).fill(-1);
      for (let i = this.count - 1; i >= 0; i--) this.index[(this.kind[i] * this.stages + this.stage[i]) * this.microbatches + this.microbatch[i]] = i;
    }
    return this.index[(kind * this.stages + stage) * this.microbatches + microbatch];
  }

  // The value kinds that a pass makes; those of a recomputed forward are given by the pass that recomputes it.
  makes(number) {
    const { makes } = this.kinds[this.kind[number]];
    const isThere = (code) => this.find(code, this.stage[number], this.microbatch[number]) >= 0;
    const recomputing = this.kinds.find((kind, code) => kind.forward.some((valueKind) => makes.includes(valueKind)) && isThere(code));
    return recomputing ? recomputing.forward : makes;
  }

  // The passes that make what a pass uses.
  needs(number) {
    const found = [];
    for (const [valueKind, hop] of this.kinds[this.kind[number]].uses) {
      this.kinds.forEach((kind, code) => {
        const maker = this.find(code, this.stage[number] + hop, this.microbatch[number]);
        if (maker >= 0 && this.makes(maker).includes(valueKind)) found.push(maker);
      });
    }
    return [...new Set([...found, ...this.partners(number, "gathers", "gives")])];
  }

  // The passes of the same microbatch with which a pass of a divided head, or of the last stage, meets in a collective.
  partners(number, own, others) {
    const meets = this.collectives(this.kind[number], this.stage[number], own);
    const found = [];
    if (!meets.length) return found;
    this.kinds.forEach((_, code) => {
      for (let stage = 0; stage < this.stages; stage++) {
        if (!this.collectives(code, stage, others).some((one) => meets.includes(one))) continue;
        const other = this.find(code, stage, this.microbatch[number]);
        if (other >= 0) found.push(other);
      }
    });
    return found;
  }

  // The collectives that passes of a kind and stage give to or gather; those of the last stage meet in some more.
  collectives(code, stage, which) {
    return this.kinds[code][which][stage === this.stages - 1 ? 1 : 0];
  }

  // The passes that use what a pass makes.
  users(number) {
    const makes = this.makes(number);
    const found = new Set();
    this.kinds.forEach((kind, code) => {
      for (const [valueKind, hop] of kind.uses) {
        const user = makes.includes(valueKind) ? this.find(code, this.stage[number] - hop, this.microbatch[number]) : -1;
        if (user >= 0) found.add(user);
      }
    });
    for (const user of this.partners(number, "gives", "gathers")) found.add(user);
    return [...found];
  }

  // The passes of the step that `number` belongs to: itself, or the two that overlap.
  step(number) {
    if (this.lane[number] === 1) return [number, number + 1];
    return this.lane[number] === 2 ? [number - 1, number] : [number];
  }

  // When a message of `maker` is with another rank; its end where that is not known.
  arrival(maker) {
    return this.end[maker] + (this.delays ? this.delays[this.kind[maker]][this.stage[maker]] || 0 : 0);
  }

  // The passes on other ranks whose messages the step of `number` uses.
  senders(number) {
    return this.step(number).flatMap((one) => this.needs(one)).filter((need) => this.rank[need] !== this.rank[number]);
  }

  // When the rank is done with everything before the step of `number`.
  free(number) {
    const [head] = this.step(number);
    return head === this.first[this.rank[number]] ? 0 : this.endOf(head - 1);
  }

  // The end of the step that `number` belongs to.
  endOf(number) {
    const other = this.lane[number] === 1 ? number + 1 : this.lane[number] === 2 ? number - 1 : number;
    return Math.max(this.end[number], this.end[other]);
  }

  // Whether the rank does nothing before the step of `number`.
  isIdleBefore(number) {
    const head = this.lane[number] === 2 ? number - 1 : number;
    return this.start[head] > (head === this.first[this.rank[number]] ? 0 : this.endOf(head - 1));
  }

  // The pass that `number` came right after: that before it on its rank, or the sender of the message it waited for; -1 for none.
  cause(number) {
    if (this.back) return this.back[number] ? number - this.back[number] : -1;
    const [head] = this.step(number);
    let [best, time] = head === this.first[this.rank[number]] ? [-1, 0] : [head - 1, this.free(number)];
    for (const sender of this.senders(number)) if (this.end[sender] > time) [best, time] = [sender, this.end[sender]];
    return best;
  }

  // The passes that set the end, first to last; empty where it is not known.
  criticalPath() {
    const path = [];
    for (let at = this.last; at >= 0 && path.length <= this.count; at = this.cause(at)) path.push(at);
    return path.reverse();
  }

  // The first pass of a rank that ends after `time`; one past its last where none does.
  firstEndingAfter(rank, time) {
    let [low, high] = [this.first[rank], this.first[rank + 1]];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end[middle] > time) high = middle;
      else low = middle + 1;
    }
    return this.lane[low] === 2 && low > this.first[rank] ? low - 1 : low;
  }

  // Idle time before the step that `number` begins, cut by what the rank waits for: [from, to, what].
  waits(number) {
    const [from, to] = [this.free(number), this.start[this.step(number)[0]]];
    if (to <= from) return [];
    if (this.gaps) return this.recorded(this.rank[number], from, to);
    const edge = Math.min(Math.max(from, this.made(number)), to);
    const rest = REST[this.source] ?? UNKNOWN;
    const rested = rest === MESSAGE && this.copies.length ? Math.min(Math.max(edge, this.arrived(number)), to) : to;
    return [[from, edge, PASS], [edge, rested, rest], [rested, to, COPYING]].filter(([a, b]) => b > a);
  }

  // When the last of the messages that the step of `number` uses is here.
  arrived(number) {
    return Math.max(0, ...this.senders(number).map((sender) => this.arrival(sender)));
  }

  // The copies to the host and back of what the forward of a pass's stage and microbatch saved.
  copiesOf(number) {
    const row = this.copies[this.rank[number]] || [];
    return row.filter((copy) => copy.stage === this.stage[number] && copy.microbatch === this.microbatch[number]);
  }

  // When the last of the messages that the step of `number` uses was made; remembered, as every frame asks for all in view.
  made(number) {
    this.ends ||= new Float64Array(this.count).fill(-1);
    if (this.ends[number] < 0) this.ends[number] = Math.max(0, ...this.senders(number).map((sender) => this.end[sender]));
    return this.ends[number];
  }

  recorded(rank, from, to) {
    const { first, start, time, what } = this.gaps;
    const found = [];
    let [low, high] = [first[rank], first[rank + 1]];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (start[middle] >= from) high = middle;
      else low = middle + 1;
    }
    for (; low < first[rank + 1] && start[low] < to; low++) found.push([start[low], start[low] + time[low], what[low]]);
    return found;
  }

  // The bytes that a rank holds at `time`, without its layers.
  heldAt(rank, time) {
    const { first, at, held } = this.memory;
    let [low, high] = [first[rank], first[rank + 1]];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (at[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low > first[rank] ? held[low - 1] : 0;
  }

  layerBytes(rank) {
    return Object.values(this.layers).reduce((sum, sizes) => sum + sizes[rank], 0);
  }

  // The time in which a rank runs passes.
  work(rank) {
    if (!this.works) {
      this.works = new Float64Array(this.numRanks);
      for (let i = 0; i < this.count; i++) {
        if (this.lane[i] !== 2) this.works[this.rank[i]] += this.endOf(i) - this.start[i];
      }
    }
    return this.works[rank];
  }
}

function copyOf([way, stage, microbatch, start, end]) {
  return { way, stage, microbatch, start, end };
}

async function unpackAll({ first, ...columns }) {
  const names = Object.keys(columns);
  const arrays = await Promise.all(names.map((name) => unpack(columns[name])));
  return { first, ...Object.fromEntries(names.map((name, i) => [name, arrays[i]])) };
}

// Times and bytes of memory, each rank summed from its own beginning.
function restarted(first, wait, added) {
  const [at, held] = [new Float64Array(wait.length), new Float64Array(added.length)];
  for (let r = 0; r + 1 < first.length; r++) {
    let [time, size] = [0, 0];
    for (let i = first[r]; i < first[r + 1]; i++) {
      at[i] = time += wait[i];
      held[i] = size += added[i];
    }
  }
  return { at, held };
}
