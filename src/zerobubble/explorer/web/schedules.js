// The tab of schedules: fields on one side, on the other figures, the picture, the search, and what to save.

import { element } from "./words.js";
import { Asker } from "./asker.js";
import { Fields } from "./fields.js";
import { foldable } from "./group.js";
import { Search } from "./search.js";
import { Shown } from "./shown.js";

export class Schedules {
  constructor(home, theme, settings, changed) {
    Object.assign(this, { path: "timeline", pause: 120, offering: new Asker() });
    const form = element("form", "", { class: "fields", "aria-label": "what to show" });
    form.addEventListener("submit", (event) => event.preventDefault());
    this.right = element("div", "", { class: "answer" });
    const whole = foldable(home, form);
    home.append(this.right);
    this.fields = new Fields(form, whole, settings, () => {
      search.report("");
      changed();
    });
    this.shown = new Shown(this.right, theme, settings, (values) => {
      this.fields.put(values);
      this.fields.changed();
    });
    const search = new Search(this.fields, (plan, looks, found) => this.openPlan(plan, looks, found));
    this.shown.cards.before(this.fields.openFile);
    this.shown.saver.host.before(search.host);
  }

  openPlan(plan, looks, found) {
    this.fields.use("file", plan, "plan.json", found);
    if (looks) this.shown.viewer.scrollIntoView({ block: "nearest" });
  }

  values() {
    return this.fields.values();
  }

  set(values, faults) {
    this.fields.set(values, faults);
  }

  open(file) {
    return this.fields.open(file);
  }

  showProblem(answer) {
    this.fields.showProblem(answer);
    this.right.classList.toggle("old", Boolean(answer.error));
    this.shown.miss(answer);
    this.shown.saver.enable(!answer.error);
  }

  async show(answer, values) {
    this.fields.usePlanTimes(answer.isPlan);
    await this.shown.show(answer, values);
    this.askForOffers(values);
  }

  // Offers take longer than the picture, which does not wait for them; those before stay until then, dimmed.
  async askForOffers(values) {
    this.shown.offers.dataset.state = "waiting";
    this.offering.drop();
    const found = values.model ? await this.offering.ask("offers", values) : { offers: [] };
    if (!found) return;
    this.shown.offer(found.offers || []);
    this.shown.offers.dataset.state = "ready";
  }

  leave() {
    this.shown.leave();
  }
}
