// The workshop of building blocks: its fields, the block to be moved, what is wrong with it, and its steps. The block is its text form,
// in which a move is another number.

import { askForText } from "./asker.js";
import { BlockEditor } from "./block_editor.js";
import { Group, foldable, slide } from "./group.js";
import { Picture } from "./picture.js";
import { Saver } from "./saver.js";
import { element } from "./words.js";

const MOST_ERRORS = 4; // shown for a block
const BLOCK_LABELS = {
  block: "published", ranks: "ranks (p)", interval: "interval, in slots", microbatches: "microbatches (m)",
  memory: "limit, in stage activations", reorder_steady: "also reorder the steady state", text: "block as text",
};
const BLOCK_SLIDERS = { ranks: [1, 16, 1], microbatches: [1, 64, 1], interval: [1, 48, 1] };
const BLOCK_GROUPS = [["Building block", ["block", "ranks", "interval"]], ["Steps", ["microbatches", "memory", "reorder_steady"]], ["Block as text", ["text"]]];
const STEP_TITLES = ["step", "makespan", "span", "bubble", "peak"];

export class Workshop {
  constructor(home, theme, settings, { changed, openSchedule }) {
    Object.assign(this, { home, settings, changed, path: "workshop", pause: 40, boxes: {}, sliders: {}, problems: {}, linkFaults: [], text: "", moved: false });
    this.form = element("form", "", { class: "fields", "aria-label": "which block" });
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.groups = BLOCK_GROUPS.map(([title, names]) => this.group(title, names));
    this.problems[""] = element("p", "", { class: "problem", id: "w-problem", role: "alert", hidden: "" });
    this.form.append(this.problems[""]);
    this.right = element("div", "", { class: "answer" });
    this.whole = foldable(home, this.form);
    home.append(this.right);
    this.fill(theme, openSchedule);
  }

  fill(theme, openSchedule) {
    const lead = "Drag a pass of the block, or select it with Tab and move it with the arrow keys. Lighter passes belong to later stages of the rank, pale ones to the next microbatches. The bars below show how long each stage holds a microbatch, the numbers on the right how many stage activations a rank holds at most.";
    const scroll = element("div", "", { class: "scroll", id: "block-editor" });
    this.wrong = element("div", "", { class: "wrong-of", role: "status", id: "w-wrong" });
    this.figures = element("div", "", { class: "scroll", tabindex: "0", id: "w-steps" });
    this.right.append(element("p", lead, { class: "lead" }), scroll, this.wrong, this.figures);
    const viewer = element("div", "", { id: "block-viewer" });
    this.picture = new Picture(viewer, theme);
    this.saver = new Saver(this.settings.blockForms, "workshop/saved", "block-");
    const open = element("button", "open this schedule in the explorer", { type: "button", id: "w-open" });
    open.addEventListener("click", () => this.saver.report(askForText("workshop/saved/text", this.values()).then((text) => openSchedule(text, `${this.name}.txt`))));
    this.saver.buttons.append(open);
    this.right.append(viewer, this.saver.host);
    this.editor = new BlockEditor(scroll, (op, slot) => this.edit(`(?<=\\s)${op}@\\d+(?=\\s|$)`, `${op}@${slot}`));
  }

  group(title, names) {
    const rows = names.map((name) => this.field(name));
    if (names.includes("block")) {
      const button = element("button", "reset to published", { type: "button", id: "w-reset" });
      button.addEventListener("click", () => this.publish());
      rows.push(button);
    }
    return new Group(this.form, title, rows, { open: !names.includes("text") });
  }

  field(name) {
    const row = element("div", "", { class: `field ${name}` });
    const box = this.box(name);
    for (const [key, value] of [["id", `w-${name}`], ["aria-describedby", `w-${name}-problem`]]) box.setAttribute(key, value);
    box.addEventListener(name === "block" || name === "reorder_steady" ? "change" : "input", () => this.put(name));
    row.append(element("label", BLOCK_LABELS[name], { for: `w-${name}` }), box);
    if (name in BLOCK_SLIDERS) row.append(this.slider(name, box));
    this.boxes[name] = box;
    this.problems[name] = element("p", "", { class: "problem", id: `w-${name}-problem`, role: "alert", hidden: "" });
    row.append(this.problems[name]);
    return row;
  }

  box(name) {
    if (name === "reorder_steady") return element("input", "", { type: "checkbox" });
    if (name === "text") return element("textarea", "", { rows: "9", spellcheck: "false" });
    if (name !== "block") return element("input", "", { type: "text", inputmode: "numeric", autocomplete: "off", placeholder: name === "memory" ? "its own" : "" });
    const made = element("select");
    for (const text of this.settings.blocks) made.append(element("option", text, { value: text }));
    return made;
  }

  slider(name, box) {
    const [min, max, step] = BLOCK_SLIDERS[name];
    const made = element("input", "", { type: "range", min, max, step, "aria-label": `${BLOCK_LABELS[name]}, slider` });
    made.addEventListener("input", () => {
      box.value = made.value;
      this.put(name);
    });
    this.sliders[name] = made;
    return made;
  }

  // What a changed field means: another published block, another number in the text, or another question about the same block.
  put(name) {
    this.linkFaults = this.linkFaults.filter((fault) => fault.field !== name);
    slide(this.sliders[name], this.boxes[name].value);
    if (name === "block" || name === "ranks") this.publish();
    else if (name === "interval") this.edit("^interval .*$", `interval ${this.boxes.interval.value.trim()}`);
    else if (name === "text") this.use(this.boxes.text.value);
    else this.changed();
  }

  publish() {
    this.moved = false;
    this.changed();
  }

  edit(pattern, by) {
    this.use(this.text.replace(new RegExp(pattern, "m"), by));
  }

  use(text) {
    Object.assign(this, { text, moved: true });
    if (document.activeElement !== this.boxes.text) this.boxes.text.value = text;
    this.changed();
  }

  values() {
    const { block, ranks, microbatches, memory, reorder_steady } = this.boxes;
    const values = { block: block.value, ranks: ranks.value.trim(), microbatches: microbatches.value.trim(), reorder_steady: reorder_steady.checked ? "1" : "0" };
    if (memory.value.trim()) values.memory = memory.value.trim();
    if (this.moved) values.text = this.text;
    return values;
  }

  // A dropped file is the text of a block.
  async open(file) {
    this.use(await file.text().catch(() => ""));
    this.boxes.text.value = this.text;
  }

  set(values, faults) {
    this.linkFaults = faults;
    const all = { ...this.settings.blockDefaults, ...values };
    for (const name of ["block", "ranks", "microbatches", "memory"]) this.boxes[name].value = all[name];
    for (const name of ["ranks", "microbatches"]) this.sliders[name].value = all[name];
    this.boxes.reorder_steady.checked = all.reorder_steady === "1";
    Object.assign(this, { text: all.text, moved: Boolean(all.text) });
  }

  showProblem({ error = "", field = "", faults = error ? [{ field, error }] : [] }) {
    for (const [name, place] of Object.entries(this.problems)) {
      const mine = [...this.linkFaults.filter((fault) => fault.field), ...faults].filter((fault) => name === (fault.field in this.problems ? fault.field : ""));
      place.textContent = mine.map((fault) => fault.error).join(" ");
      place.hidden = !mine.length;
      if (this.boxes[name]) this.boxes[name].setAttribute("aria-invalid", `${Boolean(mine.length)}`);
      if (mine.length) for (const group of [this.whole, ...this.groups]) group.reveal([place]);
    }
    if (error) this.wrong.replaceChildren(...faults.map((fault) => element("p", [BLOCK_LABELS[fault.field], fault.error].filter(Boolean).join(": "), { class: "problem" })));
    this.right.classList.toggle("old", Boolean(error));
    this.saver.enable(!error);
  }

  async show(answer, values) {
    const { text, interval, name, steps, data } = answer;
    Object.assign(this, { text, name });
    if (document.activeElement !== this.boxes.text) this.boxes.text.value = text;
    if (document.activeElement !== this.boxes.interval) this.boxes.interval.value = interval;
    this.sliders.interval.value = interval;
    this.whole.show([name, `p = ${values.ranks}`, `m = ${values.microbatches}`]);
    this.editor.show(answer);
    this.showWrong([...answer.collisions, ...answer.early].map((one) => one.text));
    this.right.classList.toggle("old", !data);
    this.saver.show(answer, values);
    if (!data) return;
    this.figures.replaceChildren(stepTable(steps), lawTable(answer));
    await this.picture.show(data);
  }

  showWrong(sentences) {
    const rest = sentences.length - MOST_ERRORS;
    const shown = sentences.slice(0, MOST_ERRORS).map((sentence) => element("p", sentence, { class: "problem" }));
    if (rest > 0) shown.push(element("p", `And ${rest} more.`, { class: "problem" }));
    this.wrong.replaceChildren(...shown);
  }

  leave() {
    this.picture.clear();
  }
}

function stepTable(steps) {
  return captionedTable("Construction steps, in slots and stage activations", STEP_TITLES, steps);
}

function lawTable({ rows, lifespans, terms, law, steady }) {
  const cells = rows.map((_, rank) => [`rank ${rank}`, lifespans[rank].map(([stage, , , slots]) => `${stage}:\u00a0${slots}`).join(", "), terms[rank], law[rank], steady[rank]]);
  return captionedTable("Lifespans and peak stage activations", ["rank", "stage: slots", "intervals", "at most", "steady"], cells);
}

function captionedTable(caption, titles, rows) {
  const made = element("table", "", { class: "figures" });
  made.append(element("caption", caption));
  const head = made.createTHead().insertRow();
  for (const title of titles) head.append(element("th", title, { scope: "col" }));
  const body = made.createTBody();
  for (const [name, ...cells] of rows) {
    const row = body.insertRow();
    row.append(element("th", name, { scope: "row" }), ...cells.map((cell) => element("td", `${cell}`)));
  }
  return made;
}
