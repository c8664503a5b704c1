// Reads the page's data and starts what it has a place for. `data-state` tells whether all of it was drawn.

import { FrontChart } from "./front_chart.js";
import { LossChart } from "./losses.js";
import { Picture } from "./picture.js";
import { Theme } from "./theme.js";

const root = document.documentElement;
const fail = (message) => {
  root.dataset.error = message;
  const told = document.createElement("p");
  told.setAttribute("role", "alert");
  told.textContent = `This page could not be drawn: ${message}`;
  document.querySelector("main").prepend(told);
};
window.addEventListener("error", (event) => fail(event.message));
window.addEventListener("unhandledrejection", (event) => fail(`${event.reason}`));

async function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const theme = new Theme();
  const host = document.getElementById("viewer");
  const picture = host && new Picture(host, theme);
  if (data.front) await startFront(picture, data);
  else if (picture) await picture.show(data);
  if (data.losses.length) new LossChart(document.getElementById("losses"), data.losses);
  root.dataset.state = "ready";
  root.dataset.shown = `${Math.round(performance.now())}`;
}

// The chart of a front, and below it the schedule of the point that was chosen last, at first that of the most memory.
async function startFront(picture, data) {
  const told = document.getElementById("opened");
  const open = async (answer, text) => {
    told.textContent = text;
    await picture.show({ ...data, timelines: [data.timelines[answer.opens]] });
  };
  await new FrontChart(document.getElementById("front"), data.front, open).open(data.front.points.length - 1, 0);
}

start();
