// The input fields in groups. Each has a label, a box, often a slider, and an error message below.

import { Group, slide } from "./group.js";
import { LABELS } from "./labels.js";
import { element } from "./words.js";

const GROUPS = [
  ["Schedule", ["schedule", "ranks", "microbatches", "stages", "options", "versus"]],
  ["Times per rank and microbatch, in ms", ["preset", "forward", "backward", "weight", "comm"]],
  ["Model on GPUs", ["model", "gpu", "tp", "cp", "ep", "dp", "microbatch", "recompute", "sequence_parallel", "overlap_tp", "precision", "gradients", "layers"]],
  ["Memory", ["memory", "held"]],
  ["Slow link", ["slow_link", "slow_comm"]],
  ["Files", ["file", "costs", "run"]],
];
const TIMES_GROUP = 1; // this group and the one before it are open at first
const ALWAYS = ["schedule", "ranks", "microbatches", "forward", "backward", "weight", "comm", "gpu", "tp"];
// What a closed group says of its fields: of these always, of others if they differ from their defaults.
const SAID = {
  schedule: "#", ranks: "p = #", microbatches: "m = #", stages: "v = #", options: "#", versus: "against #", forward: "F #", backward: "B #", weight: "W #", comm: "message #",
  model: "#", gpu: "#", tp: "tp #", cp: "cp #", ep: "ep #", dp: "dp #", microbatch: "# sequences", recompute: "recompute #", sequence_parallel: "no sequence parallelism", overlap_tp: "tp overlapped",
  precision: "#", gradients: "# gradients", layers: "layers #", memory: "# microbatches", held: "# kept", slow_link: "after rank #", slow_comm: "# ms", file: "#", costs: "costs", run: "run",
};
const SLIDERS = { ranks: [1, 64, 1], microbatches: [1, 256, 1], stages: [1, 8, 1], forward: [0, 40, 0.1], backward: [0, 40, 0.1], weight: [0, 40, 0.1], comm: [0, 10, 0.05], memory: [0.25, 64, 0.25] };
const HINTS = { memory: "no limit", slow_link: "none", slow_comm: "none", options: "such as group=4", layers: "equally many" };
const NOTHING = { preset: "own times", model: "none", versus: "nothing" };
const OF_MODEL = ["gpu", "tp", "cp", "ep", "dp", "microbatch", "recompute", "sequence_parallel", "overlap_tp", "precision", "gradients", "layers"];
const CHECKS = ["sequence_parallel", "overlap_tp"]; // "1" where it is checked, else "0"
const TIMES = ["preset", "forward", "backward", "weight", "comm", "held", "slow_link", "slow_comm"];
const FILES = { file: "file_name", costs: "", run: "" };

// A condition as the object of a sentence.
function lowered(text) {
  return text.charAt(0).toLowerCase() + text.slice(1);
}

// The field for a text that was dropped on the page: costs and runs are JSON with their format, anything else is a schedule or a plan.
function fieldFor(text) {
  const format = text.match(/"format"\s*:\s*"zerobubble (\w+) /)?.[1];
  return { costs: "costs", workload: "costs", timeline: "run" }[format] || "file";
}

export class Fields {
  // `whole` is the group of all of them.
  constructor(form, whole, settings, onChange) {
    Object.assign(this, { form, whole, settings, onChange, boxes: {}, sliders: {}, problems: {}, linkFaults: [], texts: { file: "", file_name: "", search_placement: "", search_seconds: "", search_limits: "", costs: "", run: "" } });
    this.groups = GROUPS.map(([title, names], place) => new Group(form, title, names.map((name) => this.field(name)), { open: place <= TIMES_GROUP }));
    this.problem = element("p", "", { class: "problem", role: "alert", id: "q-problem", hidden: "" });
    this.openFile = this.backFromFile();
    form.append(this.problem);
  }

  field(name) {
    const row = element("div", "", { class: `field ${name}` });
    row.append(element("label", LABELS[name], { for: `q-${name}` }));
    const box = name in FILES ? this.fileBox(name) : name in this.lists() ? this.choice(name) : this.box(name);
    for (const [key, value] of [["id", `q-${name}`], ["aria-describedby", `q-${name}-problem`]]) box.setAttribute(key, value);
    this.boxes[name] = box;
    row.append(box);
    if (name in SLIDERS) row.append(this.slider(name));
    if (name in FILES) row.append(this.opened(name));
    if (name === "schedule") row.append(element("p", "", { class: "about", id: "q-about" }));
    this.problems[name] = element("p", "", { class: "problem", id: `q-${name}-problem`, role: "alert", hidden: "" });
    row.append(this.problems[name]);
    return row;
  }

  box(name) {
    if (CHECKS.includes(name)) return this.check(name);
    const number = name in this.settings.ranges;
    const made = element("input", "", { type: "text", inputmode: number ? "decimal" : "text", autocomplete: "off", placeholder: HINTS[name] || "" });
    made.addEventListener("input", () => {
      slide(this.sliders[name], made.value);
      this.changed(name);
    });
    return made;
  }

  check(name) {
    const made = element("input", "", { type: "checkbox" });
    made.addEventListener("change", () => this.changed(name));
    return made;
  }

  slider(name) {
    const [min, max, step] = SLIDERS[name];
    const made = element("input", "", { type: "range", min, max, step, "aria-label": `${LABELS[name]}, slider` });
    made.addEventListener("input", () => {
      this.boxes[name].value = made.value;
      this.changed(name);
    });
    this.sliders[name] = made;
    return made;
  }

  // The fields of which one chooses, and what from.
  lists() {
    const names = (all) => all.map((one) => one.name);
    return { schedule: names(this.settings.schedules), versus: names(this.settings.schedules), preset: names(this.settings.presets), ...this.settings.choices };
  }

  choice(name) {
    const made = element("select");
    if (name in NOTHING) made.append(element("option", NOTHING[name], { value: "" }));
    for (const text of this.lists()[name]) made.append(element("option", text, { value: text }));
    made.addEventListener("change", () => (name === "preset" ? this.usePreset(made.selectedIndex - 1) : this.changed(name)));
    return made;
  }

  fileBox(name) {
    const made = element("input", "", { type: "file" });
    made.addEventListener("change", async () => {
      const [file] = made.files;
      if (file) await this.open(file, () => name);
    });
    return made;
  }

  // Uses a file for the field that fits its text.
  async open(file, fieldOf = fieldFor) {
    const most = this.settings.mostText.toLocaleString("en");
    const tooLarge = file.size > this.settings.mostText && `${file.name} has ${file.size.toLocaleString("en")} bytes; the page takes at most ${most}: use the command line, such as zerobubble show ${file.name}`;
    const text = tooLarge ? null : await file.text().catch(() => null);
    const field = fieldOf(text || "");
    if (text) this.use(field, text, file.name);
    else this.showProblem({ error: tooLarge || `${file.name} ${text === "" ? "is empty" : "cannot be read"}: open a file that zerobubble has written`, field });
  }

  // What of a file is used, with a button to let it go; costs may be pasted, too.
  opened(name) {
    const made = element("div", "", { class: "opened" });
    const drop = element("button", "leave it out", { type: "button", id: `q-${name}-drop`, hidden: "" });
    drop.addEventListener("click", () => this.use(name, "", ""));
    const text = element("span", "", { id: `q-${name}-name` });
    if (name === "costs") {
      const area = element("textarea", "", { id: "q-costs-text", rows: "2", "aria-label": "costs file, pasted", placeholder: "or paste its JSON here", spellcheck: "false" });
      area.addEventListener("input", () => this.use("costs", area.value, ""));
      made.append(area);
    }
    made.append(text, drop);
    return made;
  }

  // Names the open file, with a way back; for a place next to the figures.
  backFromFile() {
    const made = element("p", "", { class: "open-file", hidden: "" });
    const back = element("button", "back to the fields", { type: "button", id: "q-file-back" });
    back.addEventListener("click", () => this.use("file", "", ""));
    made.append(element("span", "", { id: "q-open-file" }), back);
    return made;
  }

  // `found` has the fields of the search that found a plan that is no file of the user's.
  use(name, text, fileName, found = {}) {
    this.texts[name] = text;
    if (name === "file") this.openedFile(found);
    if (FILES[name]) this.texts[FILES[name]] = text ? fileName : "";
    this.showFiles();
    this.changed(name);
  }

  openedFile(found) {
    this.isPlan = false; // until the server has read it
    Object.assign(this.texts, { search_placement: "", search_seconds: "", search_limits: "" }, found);
  }

  showFiles() {
    for (const name of Object.keys(FILES)) {
      const text = this.texts[name];
      document.getElementById(`q-${name}-drop`).hidden = !text;
      const called = FILES[name] ? this.nameOfFile() || "from the link" : `${text.length.toLocaleString("en")} characters`;
      document.getElementById(`q-${name}-name`).textContent = text ? called : "";
      if (!text) this.boxes[name].value = "";
      else for (const group of this.groups) group.reveal([this.boxes[name]]);
    }
    const area = document.getElementById("q-costs-text");
    if (area.value !== this.texts.costs) area.value = this.texts.costs;
    const fromFile = Boolean(this.texts.file);
    this.openFile.hidden = !fromFile;
    this.openFile.firstChild.textContent = `The schedule comes from ${this.nameOfFile() || "a file"}, not from the fields. `;
    for (const name of ["schedule", "ranks", "microbatches", "options"]) this.enable(name, !fromFile);
    this.enable("model", !this.texts.costs);
    this.showSchedule();
  }

  // What the open file is called: the plan of a search has no file yet.
  nameOfFile() {
    return this.texts.search_placement ? `the search's plan on ${this.texts.search_placement}` : this.texts.file_name;
  }

  enable(name, on) {
    for (const box of [this.boxes[name], this.sliders[name]]) if (box) box.disabled = !on;
  }

  // What the chosen schedule is, whether its stages per rank are open, and which fields the times come from.
  showSchedule() {
    const [costs, model] = [Boolean(this.texts.costs), Boolean(this.boxes.model.value)];
    for (const name of TIMES) this.enable(name, !this.elsewhere());
    for (const name of OF_MODEL) this.offer(name, !costs && model);
    const recipe = this.settings.schedules.find((one) => one.name === this.boxes.schedule.value);
    const about = recipe ? [recipe.summary, lowered(recipe.condition)].filter(Boolean).join(" It needs ") : "";
    document.getElementById("q-about").textContent = this.texts.file ? `The schedule comes from ${this.nameOfFile() || "a file"}: see Files below.` : about;
    this.offer("stages", Boolean(recipe && recipe.anyStages && !this.texts.file));
    this.offer("options", Boolean(recipe && recipe.options.length && !this.texts.file));
    if (recipe) this.boxes.stages.placeholder = `${recipe.stages}`;
    if (recipe && !recipe.anyStages) this.boxes.stages.value = "";
    if (recipe && recipe.options.length) this.boxes.options.placeholder = `${recipe.options[0]}=...`;
    if (recipe && !recipe.options.length) this.boxes.options.value = "";
    slide(this.sliders.stages, this.boxes.stages.value || `${recipe ? recipe.stages : 1}`);
    this.summarize();
  }

  // A field that can be used now is shown, another one hidden.
  offer(name, on) {
    this.enable(name, on);
    this.boxes[name].closest(".field").hidden = !on;
  }

  // Where times come from if not from their fields.
  elsewhere() {
    return this.texts.costs ? "costs" : this.boxes.model.value ? "model" : this.isPlan ? "plan" : "";
  }

  // Takes the server's word for whether the file is a plan, which has times of its own.
  usePlanTimes(isPlan) {
    this.isPlan = isPlan;
    this.showSchedule();
  }

  summarize() {
    const [values, elsewhere, all] = [this.values(), this.elsewhere(), []];
    for (const [place, [, names]] of GROUPS.entries()) {
      const isSet = (name) => values[name] && !this.boxes[name].disabled && (ALWAYS.includes(name) || values[name] !== this.settings.defaults[name]);
      const words = names.filter((name) => name in SAID && isSet(name)).map((name) => SAID[name].replace("#", name === "file" ? this.nameOfFile() || "from the link" : values[name]));
      const isElsewhere = place === TIMES_GROUP && elsewhere;
      this.groups[place].show(isElsewhere ? [`from the ${elsewhere}`] : words);
      all.push(...(isElsewhere ? [`times from the ${elsewhere}`] : words));
    }
    this.whole.show(all);
  }

  usePreset(place) {
    const preset = this.settings.presets[place];
    if (!preset) return;
    const [forward, backward, weight] = preset.times;
    this.put({ forward, backward, weight, comm: preset.comm, ranks: preset.ranks, microbatches: preset.microbatches });
    this.changed();
  }

  put(values) {
    for (const [name, value] of Object.entries(values)) {
      if (CHECKS.includes(name)) this.boxes[name].checked = `${value}` === "1";
      else if (this.boxes[name] && !(name in FILES)) this.boxes[name].value = `${value}`;
      if (this.sliders[name]) slide(this.sliders[name], value === "" ? this.sliders[name].max : `${value}`);
    }
  }

  // `faults` are those of the link that has the values, which its fields show until they are edited.
  set(values, faults) {
    this.linkFaults = faults.filter((fault) => fault.field in this.problems);
    const all = { ...this.settings.defaults, ...values };
    this.put(all);
    for (const name of Object.keys(this.texts)) this.texts[name] = all[name] || "";
    this.boxes.preset.selectedIndex = 0;
    this.showFiles();
    this.groups[TIMES_GROUP].box.open = !this.elsewhere();
  }

  // `name` is the field that was edited, whose message no longer applies.
  changed(name = "") {
    this.linkFaults = name ? this.linkFaults.filter((fault) => fault.field !== name) : [];
    this.showFault(name, "");
    this.showSchedule();
    this.onChange();
  }

  // What is asked: texts, without those that are empty and may be.
  values() {
    const names = Object.keys(this.boxes).filter((name) => name !== "preset" && !(name in FILES));
    const text = (name) => (CHECKS.includes(name) ? `${Number(this.boxes[name].checked)}` : this.boxes[name].value.trim());
    const all = { ...Object.fromEntries(names.map((name) => [name, text(name)])), ...this.texts };
    if (!all.model) for (const name of OF_MODEL) delete all[name];
    return Object.fromEntries(Object.entries(all).filter(([name, value]) => value !== "" || this.settings.defaults[name] !== ""));
  }

  // Shows the message of each wrong field below it and clears all others.
  showProblem({ error = "", field = "", faults: answered = error ? [{ field, error }] : [] }) {
    const faults = [...this.linkFaults, ...answered];
    const placeOf = (fault) => (fault.field in this.problems ? fault.field : "");
    for (const name of ["", ...Object.keys(this.problems)]) {
      this.showFault(name, faults.filter((fault) => placeOf(fault) === name).map((fault) => fault.error).join(" "));
    }
  }

  showFault(name, text) {
    const place = this.problems[name] || this.problem;
    place.textContent = text;
    place.hidden = !text;
    if (this.boxes[name]) this.boxes[name].setAttribute("aria-invalid", `${Boolean(text)}`);
    if (text) for (const group of [this.whole, ...this.groups]) group.reveal([place]);
  }
}
