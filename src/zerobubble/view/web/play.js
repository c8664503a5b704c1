// Play through time: a moment moves over the picture, in about twelve seconds from start to end.

import { element } from "./words.js";

const SECONDS = 12;

export function listenToPlayer(viewer) {
  const [button, slider, clock] = ["play", "moment", "clock"].map((id) => document.getElementById(id));
  let last = 0;
  let playing = false;
  const show = (moment) => {
    viewer.moment = moment;
    slider.value = `${Math.round((1000 * (moment ?? 0)) / viewer.total)}`;
    clock.replaceChildren(...(moment === null ? [] : [element("b", viewer.timelines[0].show(moment)), ` ${running(viewer, moment)}`]));
    if (moment !== null && (moment < viewer.from || moment > viewer.to)) viewer.move(moment - viewer.from);
    viewer.redrawOverlay();
  };
  const stop = () => {
    playing = false;
    button.textContent = "▶ play";
    button.setAttribute("aria-label", "play");
  };
  const frame = (now) => {
    if (!playing) return;
    const moment = viewer.moment + ((now - last) / 1000 / SECONDS) * viewer.total;
    last = now;
    if (moment >= viewer.total) {
      stop();
      show(null);
    } else {
      show(moment);
      requestAnimationFrame(frame);
    }
  };
  button.addEventListener("click", () => {
    if (playing) {
      stop();
      return;
    }
    playing = true;
    button.textContent = "❚❚ pause";
    button.setAttribute("aria-label", "pause");
    last = performance.now();
    if (viewer.moment === null) show(0);
    requestAnimationFrame(frame);
  });
  slider.addEventListener("input", () => {
    stop();
    show(+slider.value ? (+slider.value / 1000) * viewer.total : null);
  });
}

// How many ranks of the first timeline are at work at a moment.
function running(viewer, moment) {
  const counts = viewer.timelines.map((timeline) => {
    let busy = 0;
    for (let rank = 0; rank < timeline.numRanks; rank++) {
      const number = timeline.firstEndingAfter(rank, moment);
      busy += number < timeline.first[rank + 1] && timeline.start[number] <= moment ? 1 : 0;
    }
    return `${busy} of ${timeline.numRanks}`;
  });
  return `${counts.join(", ")} ranks at work`;
}
