// The playground: a choice of schedules, ranks and microbatches whose pictures are in the page. The link names the choice.

import { Theme } from "./theme.js";
import { element } from "./words.js";
import { Picture } from "./picture.js";
import { card } from "./shown.js";

const playground = JSON.parse(document.getElementById("settings").textContent);
const CHOICES = [["schedule", "schedule"], ["ranks", "ranks (p)"], ["microbatches", "microbatches (m)"]];

function choicesOf(name, ranks) {
  const { schedules, shapes } = playground;
  if (name === "schedule") return schedules.map((one) => one.name);
  return name === "ranks" ? [...new Set(shapes.map(([p]) => p))] : shapes.filter(([p]) => p === ranks).map(([, m]) => m);
}

class Playground {
  constructor(home) {
    const [forward, backward, weight] = playground.times;
    const lead = `Every pass of a rank takes ${forward} ms for F, ${backward} ms for B and ${weight} ms for W, every message ${playground.comm} ms. To use your own times, run zerobubble explore.`;
    const bar = element("form", "", { class: "search-bar", "aria-label": "schedule to show" });
    Object.assign(this, { boxes: {}, about: element("p", "", { class: "about", id: "about" }), problem: element("p", "", { class: "problem", role: "status", id: "problem" }) });
    for (const [name, text] of CHOICES) {
      const label = element("label", `${text} `);
      this.boxes[name] = element("select", "", { id: `p-${name}` });
      this.boxes[name].addEventListener("change", () => this.show());
      label.append(this.boxes[name]);
      bar.append(label);
    }
    this.cards = element("section", "", { class: "cards", "aria-label": "Figures", "aria-live": "polite" });
    this.notes = element("div", "", { class: "noted" });
    const host = element("div", "", { id: "viewer" });
    this.picture = new Picture(host, new Theme());
    home.append(element("p", lead, { class: "lead" }), bar, this.about, this.problem, this.cards, this.notes, host);
    this.offer("schedule");
    this.offer("ranks");
  }

  // What can be chosen; what was chosen stays where it can.
  offer(name) {
    const [box, before] = [this.boxes[name], this.boxes[name].value];
    const texts = choicesOf(name, Number(this.boxes.ranks.value)).map(String);
    box.replaceChildren(...texts.map((text) => element("option", text, { value: text })));
    box.value = texts.includes(before) ? before : texts[Math.floor((texts.length - 1) / 2)];
  }

  open() {
    const given = new URLSearchParams(location.hash.slice(1));
    for (const [name] of CHOICES) {
      if (name === "microbatches") this.offer(name);
      const wanted = given.get(name);
      if (wanted !== null && choicesOf(name, Number(this.boxes.ranks.value)).map(String).includes(wanted)) this.boxes[name].value = wanted;
    }
    return this.show();
  }

  async show() {
    this.offer("microbatches");
    const chosen = CHOICES.map(([name]) => [name, this.boxes[name].value]);
    const { data, figures = [], notes = [], error = "" } = playground.answers[chosen.map(([, value]) => value).join(" ")];
    this.about.textContent = playground.schedules.find((one) => one.name === chosen[0][1]).summary;
    this.problem.textContent = error;
    this.cards.replaceChildren(...figures.map(card));
    this.notes.replaceChildren(...notes.map((note) => element("p", note)));
    if (data) await this.picture.show(data);
    else this.picture.clear();
    history.replaceState(null, "", `#${new URLSearchParams(chosen)}`);
    document.documentElement.dataset.state = "ready";
  }
}

const shownPlayground = new Playground(document.getElementById("playground"));
window.addEventListener("hashchange", () => shownPlayground.open());
shownPlayground.open();
