// A group of fields that opens and closes. While it is closed, what is set in it follows its title.

import { element } from "./words.js";

// A slider follows the number in its box. For any other text, and for none, it stays.
export function slide(slider, text) {
  if (slider && text.trim() && Number.isFinite(Number(text))) slider.value = text;
}

const NARROW = matchMedia("(max-width: 900px)"); // as in explore.css

// All fields of a tab: in a narrow window, where they are above the picture, a group that is closed at first.
export function foldable(home, form) {
  const made = new Group(home, "Fields", [form], { open: !NARROW.matches });
  made.box.classList.add("all");
  NARROW.addEventListener("change", () => (made.box.open = !NARROW.matches));
  return made;
}

export class Group {
  constructor(form, title, rows, { open = true } = {}) {
    this.set = element("span", "", { class: "set" });
    const summary = element("summary", title);
    summary.append(this.set);
    this.box = element("details", "", { class: "group", "aria-label": title });
    this.box.open = open;
    this.box.append(summary, ...rows);
    form.append(this.box);
  }

  // Shows what is set in the group, in a few words.
  show(words) {
    this.set.textContent = words.join(", ");
  }

  // Opens the group if one of these elements is in it.
  reveal(elements) {
    if (elements.some((one) => this.box.contains(one))) this.box.open = true;
  }
}
