// What to save: the answer in every form, PNG drawn here, and the command and the program that reproduce it.

import { element } from "./words.js";
import { askForText } from "./asker.js";

export class Saver {
  // `path` is where the server writes forms, `prefix` begins the names of the buttons.
  constructor(forms, path, prefix) {
    Object.assign(this, { path, prefix, host: element("section", "", { class: "saved", "aria-label": "Save" }) });
    this.buttons = element("div", "", { class: "forms", role: "group", "aria-label": "save as" });
    for (const form of forms) this.add(form.name, form.label, () => this.save(form));
    this.add("png", "PNG", () => this.savePng());
    this.problem = element("p", "", { class: "problem", role: "alert", id: `${prefix}save-problem`, hidden: "" });
    this.lines = element("div", "", { class: "lines" });
    this.host.append(element("h2", "Save"), this.buttons, this.problem, element("h2", "Reproduce it"), this.lines);
  }

  add(name, label, save) {
    const button = element("button", label, { type: "button", id: `${this.prefix}save-${name}` });
    button.addEventListener("click", () => this.report(save()));
    this.buttons.append(button);
  }

  // Without an answer to the fields as they are, there is nothing to save or to copy.
  enable(on) {
    for (const button of this.host.querySelectorAll("button")) button.disabled = !on;
  }

  // `needs` are the labels of the buttons whose files the lines read. Only a plan can be saved as one.
  show({ files, command, python, needs = [], isPlan }, values) {
    Object.assign(this, { files, values });
    const plan = this.buttons.querySelector(`#${this.prefix}save-plan`);
    if (plan) plan.hidden = !isPlan;
    const first = needs.length ? [element("p", `First save ${needs.map((label) => `“${label}”`).join(" and ")} with the buttons above.`, { class: "needs" })] : [];
    this.lines.replaceChildren(...first, this.line("command", command), this.line("python", python));
  }

  line(id, text) {
    const made = element("div", "", { class: "line-of" });
    const copy = element("button", "copy", { type: "button", id: `${this.prefix}copy-${id}`, "aria-label": `copy the ${id} line` });
    copy.addEventListener("click", () => this.report(navigator.clipboard.writeText(text).then(() => (copy.textContent = "copied"))));
    made.append(element("pre", text, { id: `${this.prefix}line-${id}`, tabindex: "0" }), copy);
    return made;
  }

  async report(work) {
    const error = await work.then(() => "", (reason) => reason.message);
    this.problem.textContent = error;
    this.problem.hidden = !error;
  }

  async save({ name }) {
    download(new Blob([await askForText(`${this.path}/${name}`, this.values)]), this.files[name]);
  }

  // The SVG, twice as large, as the browser draws it: with memory if the viewer shows it.
  async savePng() {
    const form = this.path === "saved" && document.querySelector("#viewer.shows-memory") ? "svg-memory" : "svg";
    const svg = await askForText(`${this.path}/${form}`, this.values);
    const image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
    await image.decode();
    const canvas = element("canvas");
    [canvas.width, canvas.height] = [2 * image.naturalWidth, 2 * image.naturalHeight];
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
    if (!blob) throw new Error("the PNG is too large for this browser: save the SVG instead");
    download(blob, this.files.png);
  }
}

function download(blob, name) {
  const link = element("a", "", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
