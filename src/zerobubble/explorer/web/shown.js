// The answer: figures, the picture in the viewer, what to save, and the lines that reproduce it.

import { Picture } from "./picture.js";
import { element, unbroken } from "./words.js";
import { LABELS } from "./labels.js";
import { Saver } from "./saver.js";

export class Shown {
  // `take` puts offered values into the fields.
  constructor(right, theme, settings, take) {
    this.take = take;
    this.missing = element("p", "", { class: "problem missing", id: "missing", hidden: "" });
    this.cards = element("section", "", { class: "cards", "aria-label": "Figures", "aria-live": "polite", tabindex: "0" });
    this.notes = element("div", "", { class: "noted" });
    this.offers = element("div", "", { role: "status", id: "offers" });
    this.viewer = element("div", "", { id: "viewer" });
    this.picture = new Picture(this.viewer, theme);
    this.saver = new Saver(settings.forms, "saved", "");
    right.append(this.missing, this.cards, this.offers, this.notes, this.viewer, this.saver.host);
  }

  async show(answer, values) {
    const { data, figures, misfits, notes, assumptions } = answer;
    this.cards.replaceChildren(...figures.map(card));
    this.notes.replaceChildren(...misfits.map((misfit) => element("p", misfit, { class: "misfit" })), ...notes.map((note) => element("p", unbroken(note))), ...(assumptions.length ? [assumed(assumptions)] : []));
    this.saver.show(answer, values);
    await this.picture.show(data);
  }

  // Says in the place of the picture why there is none, or why it is of earlier values.
  miss({ error = "", field = "", faults = [{ field, error }] }) {
    const why = faults.map((fault) => (LABELS[fault.field] ? `${LABELS[fault.field]}: ${fault.error}` : fault.error)).join(". ");
    this.missing.textContent = error ? `${this.picture.viewer ? "The picture is of earlier values" : "There is no picture"}. ${why}.` : "";
    this.missing.hidden = !error;
  }

  // Shows what could be changed, which replaces what was offered for the picture before.
  offer(offers) {
    this.offers.replaceChildren(...offers.map((one) => this.offered(one)));
  }

  offered({ text, fields }) {
    const made = element("p", `${text} `, { class: "offer" });
    const button = element("button", "use it", { type: "button" });
    button.addEventListener("click", () => this.take(fields));
    made.append(button);
    return made;
  }

  leave() {
    this.picture.clear();
  }
}

function assumed(sentences) {
  const made = element("details", "", { id: "assumed" });
  const list = element("ul");
  list.append(...sentences.map((sentence) => element("li", sentence)));
  made.append(element("summary", `${sentences.length} things are assumed`), list);
  return made;
}

export function card({ label, value, detail, exceeds }) {
  const made = element("div", "", { class: exceeds ? "card exceeds" : "card" });
  made.append(element("div", exceeds ? `${label}: does not fit` : label, { class: "label" }), element("div", value, { class: "value" }), element("div", unbroken(detail), { class: "detail" }));
  return made;
}
