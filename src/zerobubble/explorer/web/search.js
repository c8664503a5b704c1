// The planner's search: its news as it comes, a way to stop it, and what it found. The front asks it for several limits of memory.

import { FrontChart } from "./front_chart.js";
import { LABELS } from "./labels.js";
import { element, percent, unbroken } from "./words.js";
import { send } from "./asker.js";

export class Search {
  // `openPlan(plan, looks, found)` opens the plan of a search in the picture, and brings the picture into the window if it `looks`.
  constructor(fields, openPlan) {
    Object.assign(this, { fields, openPlan, number: 0, host: element("section", "", { class: "search", "aria-labelledby": "search-title" }) });
    this.problem = element("p", "", { class: "problem", role: "alert", id: "search-problem", hidden: "" });
    this.news = element("span", "", { role: "status", id: "search-news" });
    this.clock = element("span", "", { id: "search-clock" });
    const line = element("p", "", { class: "news" });
    line.append(this.clock, this.news);
    this.found = element("div", "", { id: "search-found" });
    const lead = "Finds the best schedule for the shape, times and memory in the fields, on every placement of stages, with a lower bound for each. With 0 seconds, it only compares published schedules. A model or a costs file sets times per stage, so the search then keeps the placement of the schedule above. To trade memory for bubble, it takes eight memory limits, and as many seconds for each.";
    this.host.append(element("h2", "Search", { id: "search-title" }), element("p", lead, { class: "lead" }), this.controls(), this.problem, line, this.found);
  }

  controls() {
    const bar = element("div", "", { class: "search-bar" });
    this.seconds = element("input", "", { type: "text", inputmode: "decimal", id: "search-seconds", value: "5", "aria-describedby": "search-problem" });
    this.seconds.addEventListener("input", () => this.report(""));
    this.seconds.addEventListener("keydown", (event) => event.key === "Enter" && !this.buttons[0].disabled && this.start({}));
    this.objective = element("select", "", { id: "search-objective" });
    for (const [value, text] of [["period", "period: no global operation between steps"], ["makespan", "makespan: a global operation after each step"]]) this.objective.append(element("option", text, { value }));
    const button = (id, text, act) => {
      const made = element("button", text, { type: "button", id });
      made.addEventListener("click", act);
      return made;
    };
    this.buttons = [
      button("search-plan", "find a plan", () => this.start({})),
      button("search-front", "trade memory for bubble", () => this.start({ limits: this.limits() })),
    ];
    this.stopper = button("search-stop", "stop", () => send(`search/${this.number}/stop`, {}));
    this.stopper.disabled = true;
    bar.append(
      labeledBox("seconds", this.seconds), labeledBox("objective", this.objective), ...this.buttons, this.stopper,
    );
    return bar;
  }

  // From a quarter of the ranks to twice as many microbatches, as the command line does.
  limits() {
    const ranks = Number(this.fields.values().ranks) || 1;
    return [...Array(8).keys()].map((step) => (ranks * (step + 1)) / 4).filter((limit) => limit >= 1);
  }

  async start(further) {
    this.before = JSON.stringify(this.fields.values());
    this.rows = new Map();
    const asked = { ...this.fields.values(), seconds: this.seconds.value, objective: this.objective.value, ...further };
    this.asked = asked.seconds;
    this.earlier = this.news.textContent; // stays with the earlier result if this search has none
    this.run(true);
    this.only = reasonForOne(asked);
    this.limitsAsked = further.limits || [];
    this.of = further.limits ? `0 of ${further.limits.length} limits. ` : "";
    this.report("");
    try {
      const response = await send("search", asked);
      if (!response.ok) {
        this.refuse(await response.json());
        return;
      }
      for await (const news of eventsOf(response)) this.hear(news);
    } catch (error) {
      this.refuse({ error: "The search ended without a result. Is zerobubble explore still running?" });
    } finally {
      this.run(false);
    }
  }

  run(on) {
    for (const button of this.buttons) button.disabled = on;
    this.stopper.disabled = true; // until the search has a number, by which it is stopped
    if (on) [this.began, this.news.textContent] = [performance.now(), "preparing"];
    clearInterval(this.ticking);
    if (on) this.ticking = setInterval(() => this.tick(), 1000);
    this.clock.textContent = "";
    this.host.dataset.running = `${on}`;
  }

  // Seconds that leave as long for the search as the published schedules took.
  enough() {
    return Math.max(2 * Number(this.asked), Math.ceil((2 * (performance.now() - this.began)) / 1000));
  }

  elapsed() {
    return `${Math.round((performance.now() - this.began) / 1000)} s`;
  }

  // The time so far, which screen readers do not read out.
  tick() {
    this.clock.textContent = `${this.elapsed()}: `;
  }

  // Shows why there is no result, each fault after the name of its field. The line of the earlier result comes back if that is still shown.
  refuse({ error, faults = [{ field: "", error }] }) {
    const labels = { ...LABELS, seconds: "seconds", objective: "objective" };
    this.report(faults.map((fault) => (labels[fault.field] ? `${labels[fault.field]}: ${fault.error}` : fault.error)).join(" "));
    this.seconds.setAttribute("aria-invalid", `${faults.some((fault) => fault.field === "seconds")}`);
    this.news.textContent = this.earlier;
  }

  report(error) {
    this.seconds.setAttribute("aria-invalid", "false");
    this.problem.textContent = error;
    this.problem.hidden = !error;
  }

  hear(news) {
    if (news.event === "began") [this.number, this.stopper.disabled] = [news.number, false];
    else if (this.earlier !== null) {
      this.earlier = null; // this search has an answer of its own
      this.found.replaceChildren();
    }
    if (news.event === "progress") this.progress(news);
    if (news.event === "points") this.points(news);
    if (news.event === "refused") this.refuse(news);
    if (news.event !== "found") return;
    this.news.textContent = this.ending(news);
    if (news.front) {
      this.news.textContent += "Choose a point to see its schedule.";
      this.showFront(news);
      return;
    }
    this.found.replaceChildren(this.tableOf(news.rows, 0));
    // Unless the reader has gone on to something else meanwhile.
    const opens = JSON.stringify(this.fields.values()) === this.before;
    this.news.textContent += opens ? "The picture above shows the winner." : "The fields have changed meanwhile, so the picture above stays.";
    if (opens) this.openPlan(news.rows[0].plan, false, this.searchOf(news.rows[0].placement, true));
  }

  // How the search ended, in a sentence.
  ending({ interrupted, searched }) {
    if (interrupted) return "Stopped. This is the best found so far. ";
    if (Number(this.asked) === 0) return "Compared published schedules only, since the search had 0 seconds. ";
    if (searched === false) return `Published schedules of all placements took ${this.elapsed()} of the ${this.asked} s, so nothing was searched: give ${this.enough()} s or more. `;
    return `Found in ${this.elapsed()}. `;
  }

  // The best of each placement so far. A front shows its points instead.
  progress(news) {
    this.news.textContent = `${this.of || ""}${news.placement}: bubble ${percent(news.bubble)}, ${percent(news.gap)} longer than the bound, ${news.how}`;
    if (this.of) return;
    const { placement, bubble, gap, how } = news;
    this.rows.set(placement, { placement, time: null, bubble, bound: 1 - (1 - bubble) * (1 + gap), peak: null, note: how });
    const rows = [...this.rows.values()];
    this.found.replaceChildren(this.tableOf(rows, rows.indexOf(rows.reduce((best, row) => (row.bubble < best.bubble ? row : best)))));
  }

  points(news) {
    this.of = `${news.done} of ${news.total} limits. `;
    this.news.textContent = this.of;
    this.showFront(news);
  }

  // The chart of a page that `pareto` writes; a point opens its plan above.
  showFront({ front, plans, placements, nothingFits }) {
    const host = element("div", "", { id: "front" });
    const covered = `Placements covered: ${placements.join(", ")}.${this.only}`;
    const note = nothingFits ? `Nothing fits at ${nothingFits} of the limits.` : "";
    this.found.replaceChildren(element("p", covered, { class: "covered", id: "front-covers" }), host, element("p", note, { class: "hint" }));
    new FrontChart(host, front, ({ opens, placement }, name, isBest) => {
      this.news.textContent = "The picture above shows its schedule.";
      this.openPlan(plans[opens], true, this.searchOf(placement, isBest));
    });
  }

  // The row of the best schedule is marked; a button opens the plan of a row.
  tableOf(rows, winner) {
    const scroll = element("div", "", { class: "scroll", tabindex: "0" });
    const made = element("table", "", { class: "figures" });
    const head = made.createTHead().insertRow();
    for (const title of ["placement", `${this.objective.value}, ms`, "bubble", "bound", "peak, microbatches", "why"]) head.append(element("th", title, { scope: "col", class: title }));
    const body = made.createTBody();
    for (const [place, { placement, time, bubble, bound, peak, note, plan }] of rows.entries()) {
      const row = body.insertRow();
      const name = element("th", place === winner ? `${placement}, best` : placement, { scope: "row" });
      if (place === winner) row.className = "winner";
      if (plan) name.append(this.opener(plan, placement, place === winner));
      row.append(name);
      for (const text of [number(time, 5), percent(bubble), percent(bound), number(peak, 4)]) row.append(element("td", text));
      row.append(element("td", unbroken(note), { class: "why" }));
    }
    scroll.append(made);
    return scroll;
  }

  opener(plan, placement, isWinner) {
    const made = element("button", "open", { type: "button", "aria-label": `open the plan of ${placement}`, ...(isWinner ? { id: "search-open" } : {}) });
    made.addEventListener("click", () => this.openPlan(plan, true, this.searchOf(placement, isWinner)));
    return made;
  }

  // The fields of a plan's search. Only the best plan is what the same search finds, so others are saved as files.
  searchOf(placement, isBest) {
    const limits = this.limitsAsked;
    const range = limits.length ? `${limits[0]}:${limits.at(-1)}:${limits[1] - limits[0]}` : "";
    return { search_placement: placement, ...(isBest ? { search_seconds: this.asked, search_limits: range } : {}) };
  }
}

function number(value, digits) {
  return value === null ? "–" : `${+value.toPrecision(digits)}`;
}

// Why a search keeps the placement of the schedule above, if it does.
function reasonForOne({ file, model, costs }) {
  if (model || costs) return " The times of a model or of a costs file belong to the stages of the schedule above, so its placement is kept.";
  return file ? " The open plan or file, such as the winner of a search, sets the placement. To cover all placements, go back to the fields and search again." : "";
}

function labeledBox(text, box) {
  const made = element("label", `${text} `);
  made.append(box);
  return made;
}

// The events of a response, as they come.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part.replace(/^data: /, ""));
  }
}
