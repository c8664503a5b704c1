// Light and dark: as the system has it until the reader chooses.

const SYSTEM = matchMedia("(prefers-color-scheme: dark)");

export class Theme {
  constructor() {
    this.chosen = null;
    this.listeners = [];
    SYSTEM.addEventListener("change", () => this.apply());
    this.apply();
  }

  get dark() {
    return this.chosen === null ? SYSTEM.matches : this.chosen === "dark";
  }

  toggle() {
    this.chosen = this.dark ? "light" : "dark";
    this.apply();
  }

  apply() {
    document.documentElement.dataset.theme = this.dark ? "dark" : "light";
    const style = getComputedStyle(document.documentElement);
    const names = ["paper", "panel", "ink", "soft", "line", "idle", "hatch", "accent", "limit", "halo", "held", "layer", "waiting"];
    this.colors = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.font = getComputedStyle(document.body).fontFamily;
    for (const listener of this.listeners) listener();
  }
}
