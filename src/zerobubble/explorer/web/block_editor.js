// A block whose passes are dragged, or moved by arrow keys: its copy in full colors, the others pale, lifespans below the passes.

import { shape } from "./words.js";

const AT = { left: 58, right: 96, head: 22, pass: 22, life: 5, gap: 8 };
const [NARROWEST, WIDEST] = [11, 30]; // pixels of a slot

export class BlockEditor {
  constructor(host, onMove) {
    Object.assign(this, { host, onMove, block: null, held: null });
    this.svg = shape("svg", { class: "block-picture", role: "group", "aria-label": "the block: Tab selects the next pass, the left and right arrow keys move it by one slot, with Shift by one interval" });
    host.append(this.svg);
    this.svg.addEventListener("pointerdown", (event) => this.hold(event));
    this.svg.addEventListener("pointermove", (event) => this.drag(event));
    for (const end of ["pointerup", "pointercancel"]) this.svg.addEventListener(end, () => this.drop());
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(host);
  }

  // The block as the server returns it, with its errors.
  show(block) {
    this.block = block;
    this.wrong = new Set([...block.collisions, ...block.early].flatMap((one) => one.ops));
    this.draw();
  }

  hold(event) {
    const found = event.target.closest("[data-op]");
    if (!found || event.button) return;
    event.preventDefault();
    found.focus();
    const pass = this.pass(found.dataset.op);
    this.held = { op: pass[0], x: event.clientX, slot: pass[4] };
    this.svg.setPointerCapture(event.pointerId);
  }

  drag(event) {
    if (this.held) this.move(this.held.op, this.held.slot + Math.round((event.clientX - this.held.x) / this.size));
  }

  // The picture is fitted to its width again; while a pass is dragged, slots keep their size, so that the pass stays under the pointer.
  drop() {
    if (!this.held) return;
    this.held = null;
    this.draw();
  }

  key(event) {
    if (event.key === "Escape" && this.held) {
      this.move(this.held.op, this.held.slot);
      this.drop();
      return;
    }
    const found = event.target.closest("[data-op]");
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!found || !step) return;
    event.preventDefault();
    this.move(found.dataset.op, this.pass(found.dataset.op)[4] + step * (event.shiftKey ? this.block.interval : 1));
  }

  pass(op) {
    return this.block.rows.flat().find((pass) => pass[0] === op);
  }

  // A pass in another slot: it is drawn there at once, and the server asked what follows.
  move(op, slot) {
    const pass = this.pass(op);
    const to = Math.max(0, slot);
    if (to === pass[4]) return;
    pass[4] = to;
    this.draw();
    this.onMove(op, to);
  }

  draw() {
    if (!this.block || !this.host.clientWidth) return;
    const { rows, interval, lifespans, law } = this.block;
    const end = Math.max(...rows.flat().map((pass) => pass[4] + pass[5])) + Math.min(interval, 12);
    if (!this.held) this.size = Math.min(WIDEST, Math.max(NARROWEST, (this.host.clientWidth - AT.left - AT.right) / end));
    const width = AT.left + AT.right + end * this.size;
    const active = document.activeElement?.dataset?.op;
    const parts = this.grid(end);
    let y = AT.head;
    rows.forEach((row, rank) => {
      parts.push(shape("text", { x: AT.left - 8, y: y + 15, class: "block-rank" }, `rank ${rank}`));
      parts.push(...this.copies(row, y, end), ...row.map((pass) => this.box(pass, rank, y)));
      parts.push(...lifespans[rank].map((life, place) => this.life(life, y + AT.pass + 2 + AT.life * place, end)));
      parts.push(shape("text", { x: AT.left + end * this.size + 8, y: y + 15, class: "block-law" }, `at most ${law[rank]}`));
      y += AT.pass + AT.life * lifespans[rank].length + AT.gap;
    });
    for (const line of parts.filter((part) => part.classList.contains("block-line"))) line.setAttribute("y2", y);
    for (const [name, value] of [["width", width], ["height", y + 4], ["viewBox", `0 0 ${width} ${y + 4}`]]) this.svg.setAttribute(name, value);
    this.svg.replaceChildren(...parts);
    if (active) this.svg.querySelector(`[data-op="${active}"]`)?.focus({ preventScroll: Boolean(this.held) });
  }

  // A line for every interval, with its slot.
  grid(end) {
    const parts = [];
    const every = this.block.interval * Math.ceil(44 / (this.block.interval * this.size));
    for (let slot = 0; slot <= end; slot += every) {
      const x = AT.left + slot * this.size;
      parts.push(shape("line", { x1: x, x2: x, y1: AT.head - 4, class: "block-line" }), shape("text", { x: x + 3, y: 13, class: "block-slot" }, `${slot}`));
    }
    return parts;
  }

  // The other copies of a row's passes, where they are within the picture.
  copies(row, y, end) {
    const { interval, kinds } = this.block;
    const parts = [];
    for (const [, kind, place, , slot, length] of row) {
      const [fill] = kinds[kind].looks[place];
      for (let at = slot % interval; at < end; at += interval) {
        if (at === slot) continue;
        const shown = Math.min(length, end - at);
        parts.push(shape("rect", { x: AT.left + at * this.size, y: y + 3, width: shown * this.size - 1, height: AT.pass - 6, fill, class: "block-copy" }));
      }
    }
    return parts;
  }

  box([op, kind, place, microbatch, slot, length], rank, y) {
    const { interval, kinds, rows } = this.block;
    const { phrase, looks } = kinds[kind];
    const [fill, ink] = looks[place];
    const wrong = this.wrong.has(op);
    const label = `${op}, ${phrase}, on rank ${rank} in slot ${slot}, ${slot % interval} of the interval${wrong ? ", cannot stay there" : ""}`;
    const made = shape("g", { "data-op": op, class: wrong ? "block-pass wrong" : "block-pass", tabindex: "0", role: "slider", "aria-label": op, "aria-valuemin": "0", "aria-valuenow": slot, "aria-valuetext": label });
    const x = AT.left + slot * this.size;
    made.append(shape("rect", { x, y, width: length * this.size - 1, height: AT.pass, rx: 2, fill }), shape("title", {}, label));
    const text = rows.flat().some((pass) => pass[3]) && length * this.size >= 24 ? `${kind}${microbatch}` : kind;
    if (length * this.size >= 9 * text.length) made.append(shape("text", { x: x + (length * this.size) / 2, y: y + 15, fill: ink, class: "block-letter" }, text));
    return made;
  }

  life([stage, microbatch, start, slots], y, end) {
    const { interval } = this.block;
    const shown = Math.max(0, Math.min(slots, end - start));
    const made = shape("rect", { x: AT.left + start * this.size, y, width: shown * this.size - 1, height: AT.life - 2, rx: 1, class: "block-life" });
    made.append(shape("title", {}, `stage ${stage}, microbatch ${microbatch}: held for ${slots} slots, ${Math.ceil(slots / interval)} copies at once`));
    return made;
  }
}
