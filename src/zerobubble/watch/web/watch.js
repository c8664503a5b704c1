// The page of running jobs: asks the server every second, and replaces what has changed. `data-state` is "ready" once all of it is drawn.

import { DASHES, LossChart } from "./losses.js";
import { Picture } from "./picture.js";
import { Theme } from "./theme.js";
import { element, shape } from "./words.js";

const EVERY_MS = 1000;
const root = document.documentElement;
const part = (id) => document.getElementById(id);
const shown = {};

// Replaced only if it is different, so that a selection and the focus stay.
function put(id, html) {
  if (shown[id] === html) return;
  shown[id] = html;
  part(id).innerHTML = html;
}

class Charts {
  constructor(host) {
    Object.assign(this, { host, drawn: new Map() });
  }

  show(charts) {
    const titles = charts.map((chart) => chart.title).join("\n");
    if (titles !== this.titles) {
      this.host.replaceChildren(...charts.map((chart) => this.frame(chart)));
      this.titles = titles;
    }
    for (const chart of charts) this.draw(chart);
  }

  frame({ title }) {
    const made = element("section");
    const [legend, host] = [element("ul", "", { class: "legend" }), element("div", "", { class: "chart", tabindex: "0", role: "img" })];
    const stage = element("div", "", { class: "stage" });
    stage.append(host);
    made.append(element("h2", title), legend, stage);
    this.drawn.set(title, { legend, host, text: "" });
    return made;
  }

  draw(chart) {
    const place = this.drawn.get(chart.title);
    const text = JSON.stringify(chart);
    if (text === place.text || !chart.runs.some((run) => run.values.length)) return;
    place.text = text;
    place.legend.replaceChildren(...chart.runs.map((run, n) => lineOf(run, chart.plain ? DASHES[n % DASHES.length] : "")));
    place.host.setAttribute("aria-label", `${chart.title} per step of ${chart.runs.map((run) => run.name).join(", ")}`);
    if (place.chart) place.chart.replace(chart.runs, chart);
    else place.chart = new LossChart(place.host, chart.runs, chart);
  }
}

function lineOf(run, dashes) {
  const item = element("li");
  const pen = shape("svg", { class: "pen", "aria-hidden": "true" });
  pen.append(shape("line", { x1: 0, x2: 34, y1: 2, y2: 2, stroke: run.color, "stroke-width": 3, "stroke-dasharray": dashes }));
  item.append(pen, run.name);
  return item;
}

async function start() {
  const picture = new Picture(part("viewer"), new Theme());
  const charts = new Charts(part("charts"));
  let key = "";
  for (;;) {
    try {
      const response = await fetch(`api/parts?drawn=${encodeURIComponent(key)}`);
      const answer = await response.json();
      part("notice").textContent = answer.error || "";
      if (!answer.error) {
        document.title = answer.title;
        for (const id of ["status", "cards", "why", "tables"]) put(id, answer[id]);
        part("timeline-lead").textContent = answer.lead;
        charts.show(answer.charts);
        if (answer.timeline) await picture.show(answer.timeline);
        key = answer.key;
        root.dataset.step = key;
      }
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      part("notice").textContent = "The server does not answer. Is zerobubble watch still running?";
    }
    root.dataset.state = "ready";
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

start();
