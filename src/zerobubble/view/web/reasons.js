// Why a rank is idle and what would help, derived from the passes alone.

import { COPYING, HOST, LAID_OUT, MESSAGE, PASS, UNKNOWN } from "./passes.js";

const MOST_LOOKED_AT = 4000;

// All that is known of idle time before `number`, or after a rank's last pass where `number` is -1.
export function explainIdle(passes, rank, number) {
  if (number < 0) return explainEnd(passes, rank);
  const senders = passes.senders(number);
  const cause = senders.reduce((best, one) => (best < 0 || passes.arrival(one) > passes.arrival(best) ? one : best), -1);
  const parts = passes.waits(number);
  const [from, to] = [passes.free(number), passes.start[passes.step(number)[0]]];
  return { from, to, next: number, cause, lines: parts.map((part) => describePart(passes, part, number, cause)), remedy: remedy(passes, number, cause, parts) };
}

function explainEnd(passes, rank) {
  const stop = passes.first[rank + 1];
  const from = stop > passes.first[rank] ? passes.endOf(stop - 1) : 0;
  const [to, last] = [passes.makespan, passes.last];
  const lines = [stop > passes.first[rank] ? `rank ${rank} has done all its passes` : `rank ${rank} has no passes`];
  if (last >= 0) lines.push(`the step ends with ${passes.nameOf(last)} on rank ${passes.rank[last]}`);
  const remedy = "Draining the pipeline takes the same time for any number of microbatches: with more of them, it is a smaller share.";
  return { from, to, next: -1, cause: last >= 0 && passes.rank[last] !== rank ? last : -1, lines, remedy };
}

function describePart(passes, [from, to, what], number, cause) {
  const time = passes.show(to - from);
  const named = cause < 0 ? "a message" : `${passes.nameOf(cause)} on rank ${passes.rank[cause]}`;
  const blocked = passes.nameOf(number);
  if (what === PASS) return `${time} until ${named} is done, which ${blocked} needs`;
  if (what === MESSAGE) return `${time} while the message of ${cause < 0 ? "it" : passes.nameOf(cause)} is in transit`;
  if (what === LAID_OUT) return `${time} although ${blocked} could run: the block starts it later`;
  if (what === COPYING) return `${time} until a copy to or from the host, which ${blocked} waits for, is done`;
  if (what === HOST) return `${time} until the host starts ${blocked}, which is ready`;
  if (what === UNKNOWN && cause >= 0) return `${time} for the message of ${passes.nameOf(cause)}, or for the host`;
  return `${time} until the host starts ${blocked}`;
}

// The first thing that would help most: an own pass that fits, a faster link or host, even work, or the pass waited for earlier.
function remedy(passes, number, cause, parts) {
  if (parts.some(([, , what]) => what === LAID_OUT)) return "Squeeze the block: every pass then runs as soon as its inputs are available.";
  if (parts.some(([, , what]) => what === COPYING)) return "A faster link to the host, or more device memory, so that less is offloaded or is offloaded earlier.";
  const filler = findFiller(passes, number);
  if (filler) return describeFiller(passes, number, filler);
  const [, , most] = parts.reduce((a, b) => (b[1] - b[0] > a[1] - a[0] ? b : a), [0, 0, UNKNOWN]);
  if (most === HOST) return "The host delays this pass, not the order: launch fewer and larger kernels, or CUDA graphs.";
  if (most === MESSAGE || cause < 0) return "A faster link, smaller messages, or an order with another pass to run in the meantime.";
  return describeChain(passes, number, cause);
}

// A later pass of the same rank that has all it uses while the rank is idle: the one that fills most of the time.
function findFiller(passes, number) {
  const rank = passes.rank[number];
  const [from, to] = [passes.free(number), passes.start[passes.step(number)[0]]];
  const stop = Math.min(passes.first[rank + 1], number + MOST_LOOKED_AT);
  let best = null;
  for (let i = passes.step(number).at(-1) + 1; i < stop; i++) {
    if (passes.lane[i]) continue;
    const ready = Math.max(0, ...passes.needs(i).map((need) => (passes.rank[need] === rank ? passes.end[need] : passes.arrival(need))));
    const begin = Math.max(from, ready);
    const time = passes.end[i] - passes.start[i];
    const fills = Math.min(time, to - begin);
    if (begin < to && fills > 0 && (!best || fills > best.fills)) best = { number: i, ready, fills, late: Math.max(0, begin + time - to) };
    if (best && best.fills >= to - from) break;
  }
  return best;
}

function describeFiller(passes, number, { number: filler, ready, fills, late }) {
  const name = passes.nameOf(filler);
  const when = ready > passes.free(number) ? `is ready at ${passes.show(ready)}` : "is ready";
  const price = passes.kinds[passes.kind[filler]].fills ? " It costs memory: one more activation is held from then on." : "";
  const delay = late > 0 ? `, but delay ${passes.nameOf(number)} by ${passes.show(late)}` : "";
  return `${name} of this rank ${when}: run here it would fill ${passes.show(fills)}${delay}.${price}`;
}

// Why the pass waited for was not done earlier: how long its rank had been busy, and behind what.
function describeChain(passes, number, cause) {
  const rank = passes.rank[cause];
  let head = cause;
  while (head > passes.first[rank] && passes.start[head] <= passes.free(head)) head -= 1;
  const since = passes.start[head];
  const mean = passes.first.slice(1).reduce((sum, _, r) => sum + passes.work(r), 0) / passes.numRanks;
  const share = passes.work(rank) / mean - 1;
  const uneven = share > 0.03 ? ` Rank ${rank} has ${Math.round(share * 100)} % more work than the mean: balanced stages would shorten it.` : "";
  const name = passes.nameOf(cause);
  if (passes.first[passes.rank[number]] === passes.step(number)[0]) {
    return `The pipeline is filling: the first microbatch goes through ${countHops(passes, cause)} before it reaches this rank. With more microbatches, this is a smaller share.${uneven}`;
  }
  const busy = head === cause ? "" : ` Rank ${rank} was busy without a break from ${passes.show(since)} to then.`;
  const sender = passes.cause(head);
  const behind = sender >= 0 && passes.rank[sender] !== rank ? ` Before that it waited for ${passes.nameOf(sender)} of rank ${passes.rank[sender]}.` : "";
  return `${name} would have to end earlier: this rank has nothing else that is ready.${busy}${behind}${uneven}`;
}

function countHops(passes, number) {
  let hops = 0;
  for (let at = number; at >= 0 && hops <= passes.count; at = passes.cause(at)) hops += 1;
  return hops === 1 ? "1 pass" : `${hops} passes`;
}
