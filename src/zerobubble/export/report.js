"use strict";
// Reads the page's data and starts what it has a place for. `data-state` tells whether all of it was drawn.

window.addEventListener("error", (event) => (document.documentElement.dataset.error = event.message));

const data = JSON.parse(document.getElementById("data").textContent);

if (data.timelines.length) {
  const view = new TimelineView(document.getElementById("timeline"), document.getElementById("tip"), data);
  view.draw();
  document.getElementById("zoom-in").addEventListener("click", () => view.zoom(0.6));
  document.getElementById("zoom-out").addEventListener("click", () => view.zoom(1 / 0.6));
  document.getElementById("zoom-all").addEventListener("click", () => view.view(0, view.total));
}
if (data.losses.length) new LossChart(document.getElementById("losses"), data.losses);
document.documentElement.dataset.state = "ready";
