// A button next to each text that a reader may want elsewhere: commands, programs and files.

import { element } from "./words.js";

export function addCopyButtons() {
  for (const text of document.querySelectorAll("main pre")) {
    const line = element("div", "", { class: "line-of" });
    const button = element("button", "copy", { type: "button", "aria-label": `copy ${text.textContent.slice(0, 40)}` });
    button.addEventListener("click", async () => {
      const copied = await navigator.clipboard.writeText(text.textContent).then(() => true, () => false);
      if (!copied) getSelection().selectAllChildren(text);
      button.textContent = copied ? "copied" : "selected";
    });
    text.replaceWith(line);
    line.append(text, button);
  }
}
