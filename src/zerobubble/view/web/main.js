// Reads the page's data and draws every element that the page has. `data-state` says whether all of it was drawn.

import { addCopyButtons } from "./copy.js";
import { FrontChart } from "./front_chart.js";
import { LossChart } from "./losses.js";
import { Picture } from "./picture.js";
import { Theme } from "./theme.js";

const root = document.documentElement;
const fail = (message) => {
  root.dataset.error = message;
  const notice = document.createElement("p");
  notice.setAttribute("role", "alert");
  notice.textContent = `This page could not be drawn: ${message}`;
  document.querySelector("main").prepend(notice);
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
  addCopyButtons();
  root.dataset.state = "ready";
  root.dataset.shown = `${Math.round(performance.now())}`;
}

// The chart of a front, and below it the schedule of the point that was chosen last, at first the one with the smallest bubble in the least memory.
async function startFront(picture, data) {
  const title = document.getElementById("opened");
  const open = async (answer, name) => {
    title.textContent = name;
    await picture.show({ ...data, timelines: [data.timelines[answer.opens]] });
  };
  const bubbles = data.front.points.map((point) => point.answers[0].bubble);
  await new FrontChart(document.getElementById("front"), data.front, open).open(bubbles.indexOf(Math.min(...bubbles)), 0);
}

start();
