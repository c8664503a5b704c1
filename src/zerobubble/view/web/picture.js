// Timelines in the viewer, which others take the place of. Only one is on the page at a time: its buttons are found by their names.

import { listen, setTextures } from "./controls.js";
import { frame } from "./frame.js";
import { Passes } from "./passes.js";
import { listenToPlayer } from "./play.js";
import { Viewer } from "./viewer.js";

export class Picture {
  constructor(host, theme) {
    Object.assign(this, { host, theme, viewer: null, on: [], scale: 1 });
  }

  async show(data) {
    this.draw(await Promise.all(data.timelines.map((head) => Passes.read(head, data.kinds))), data);
  }

  // What was switched on stays on, and the page does not move meanwhile.
  draw(timelines, data) {
    this.host.style.minHeight = `${this.host.offsetHeight}px`;
    this.clear();
    this.viewer = new Viewer(frame(this.host, timelines, data), timelines, data, this.theme);
    setTextures(this.viewer, false);
    listen(this.viewer);
    listenToPlayer(this.viewer);
    for (const id of this.on) document.getElementById(id)?.click();
    if (this.scale !== 1) this.viewer.scaleRows(this.scale);
    this.viewer.draw();
    this.host.style.minHeight = "";
  }

  // Nothing, until something is drawn again.
  clear() {
    if (!this.viewer) return;
    this.on = [...this.host.querySelectorAll('.toggles [aria-pressed="true"]')].map((button) => button.id);
    this.scale = this.viewer.layout.scale;
    this.viewer.end();
    this.viewer = null;
    this.host.replaceChildren();
  }
}
