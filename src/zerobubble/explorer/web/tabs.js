// Tabs: a button for each part of the page, of which one is seen.

import { element } from "./words.js";

export class Tabs {
  constructor(host, parts, onChoose) {
    Object.assign(this, { parts, buttons: {} });
    const list = element("div", "", { role: "tablist", class: "tabs", "aria-label": "tabs" });
    for (const { name, title, home } of parts) {
      const button = element("button", title, { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": home.id });
      button.addEventListener("click", () => onChoose(name));
      home.setAttribute("role", "tabpanel");
      home.setAttribute("aria-labelledby", button.id);
      this.buttons[name] = button;
      list.append(button);
    }
    list.addEventListener("keydown", (event) => this.key(event));
    host.append(list);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const place = this.parts.findIndex(({ name }) => this.buttons[name] === event.target);
    if (!step || place < 0) return;
    const { name } = this.parts[(place + step + this.parts.length) % this.parts.length];
    this.buttons[name].focus();
    this.buttons[name].click();
  }

  show(chosen) {
    for (const { name, home } of this.parts) {
      home.hidden = name !== chosen;
      this.buttons[name].setAttribute("aria-selected", `${name === chosen}`);
    }
  }
}
