// Describes a selected pass, bubble or moment of memory.

import { COPYING } from "./passes.js";
import { explainIdle } from "./reasons.js";
import { element, showBytes } from "./words.js";

const MOST_USERS = 4;

export function describe(view, found) {
  const timeline = view.timelines[found.timeline];
  if (found.part === "memory") return describeMemory(timeline, found);
  return found.idle ? describeIdle(timeline, found) : describePass(timeline, found.number);
}

export function idleOf(timeline, rank, number) {
  const idle = explainIdle(timeline, rank, number);
  return idle.to > idle.from ? idle : null;
}

function describePass(timeline, number) {
  const kind = timeline.kinds[timeline.kind[number]];
  const title = element("strong", `${kind.phrase} of stage ${timeline.stage[number]}, microbatch ${timeline.microbatch[number]}`);
  const swatch = element("i");
  swatch.style.background = kind.colors[Math.min(timeline.shade[number], kind.colors.length - 1)];
  title.prepend(swatch);
  const [start, end] = [timeline.start[number], timeline.end[number]];
  const rows = [["pass", `${timeline.nameOf(number)} on rank ${timeline.rank[number]}`], ["starts", timeline.show(start)], ["takes", timeline.show(end - start)]];
  const others = timeline.step(number).filter((one) => one !== number);
  if (others.length) rows.push(["overlapped with", timeline.nameOf(others[0])]);
  rows.push(["idle before", timeline.show(Math.max(0, timeline.start[timeline.step(number)[0]] - timeline.free(number)))]);
  const lines = [describeCause(timeline, number), ...timeline.copiesOf(number).map((copy) => describeCopy(timeline, copy))];
  return [title, table(rows), ...lines.map((line) => element("p", line)), ...describeUsers(timeline, number)];
}

function describeCopy(timeline, { way, start, end }) {
  const what = way ? "comes back from the host" : "goes to the host";
  return `what the forward saved ${what} from ${timeline.show(start)} to ${timeline.show(end)}`;
}

function describeCause(timeline, number) {
  const cause = timeline.cause(number);
  if (timeline.waits(number).some(([, , what]) => what === COPYING)) return "waited for a copy to or from the host";
  if (cause < 0) return "started at once";
  if (timeline.rank[cause] !== timeline.rank[number]) return `waited for the message of ${timeline.nameOf(cause)}, on rank ${timeline.rank[cause]}`;
  const idle = timeline.start[timeline.step(number)[0]] > timeline.free(number);
  return `followed ${timeline.nameOf(cause)} ${idle ? "after a pause" : "without a gap"}`;
}

// The passes that wait for this one, and how long its result is available before the others use it.
function describeUsers(timeline, number) {
  const users = timeline.users(number).map((user) => {
    const name = `${timeline.nameOf(user)} on rank ${timeline.rank[user]}`;
    const spare = timeline.start[user] - (timeline.rank[user] === timeline.rank[number] ? timeline.end[number] : timeline.arrival(number));
    if (timeline.cause(user) === number) return `delays ${name}, which starts as soon as it can after this`;
    return spare > 0 ? `${name} uses its result ${timeline.show(spare)} later` : `${name} uses its result at once`;
  });
  const more = users.length > MOST_USERS ? [`and ${users.length - MOST_USERS} more`] : [];
  return [...users.slice(0, MOST_USERS), ...more].map((line) => element("p", line));
}

function describeIdle(timeline, { rank, idle }) {
  const rows = [["from", timeline.show(idle.from)], ["for", timeline.show(idle.to - idle.from)]];
  const title = element("strong", `Bubble on rank ${rank}`);
  title.prepend(element("i", "", { class: "idle" }));
  const lines = idle.lines.map((line) => element("p", line));
  const remedy = element("p", idle.remedy, { class: "remedy" });
  remedy.prepend(element("b", "What would remove it: "));
  return [title, table(rows), ...lines, remedy];
}

function describeMemory(timeline, { rank, time }) {
  const held = timeline.heldAt(rank, time);
  const unit = timeline.microbatchBytes[rank];
  const show = (bytes) => (unit ? `${+(bytes / unit).toFixed(2)} ${timeline.memoryUnit}` : showBytes(bytes));
  const rows = [["at", timeline.show(time)], ["activations", show(held)]];
  for (const [name, sizes] of Object.entries(timeline.layers)) rows.push([name, show(sizes[rank])]);
  if (timeline.limits.length) rows.push(["limit of activations", show(timeline.limits[rank])]);
  return [element("strong", `Memory of rank ${rank}`), table(rows)];
}

function table(rows) {
  const made = element("table");
  for (const [label, value] of rows) {
    const row = made.insertRow();
    row.append(element("td", label), element("td", value));
  }
  return made;
}
