"""Minimum requirements of WCAG 2.2: controls have names and keyboard access, and every text has enough contrast."""

from __future__ import annotations

from typing import Any

from tests.browser.chromium import Browser

CONTROLS = "button, input, select, textarea, a[href], summary, [tabindex], [contenteditable]"
"""What a reader may use, as CSS selects it."""

ROLES = {"button", "slider", "textbox", "combobox", "checkbox", "radio", "spinbutton", "link", "application", "img", "image", "group"}
"""Roles whose names a screen reader reads out, as in the browser's accessibility tree."""

OTHERS = 10
"""What else a browser may stop at between them, such as what scrolls."""

CONTRAST = """(() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const bright = ([r, g, b]) => {
    const linear = [r, g, b].map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const over = ([r, g, b, a = 1], below) => [r, g, b].map((v, i) => a * v + (1 - a) * below[i]);
  const behind = (e) => (e ? over(numbers(getComputedStyle(e).backgroundColor), behind(e.parentElement)) : [255, 255, 255]);
  const hasText = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  const isSeen = (e) => e.checkVisibility() && !e.matches(":disabled");
  return [...document.querySelectorAll("main *")].filter((e) => hasText(e) && isSeen(e)).map((e) => {
    const style = getComputedStyle(e);
    const paper = behind(e);
    const [a, b] = [bright(over(numbers(e instanceof SVGElement ? style.fill : style.color), paper)), bright(paper)];
    return [Math.round(100 * (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)) / 100, e.tagName, e.textContent.slice(0, 30)];
  }).filter(([contrast]) => contrast < 4.5);
})()"""
"""Texts of less contrast than 4.5 against what is behind them; a control that is switched off needs none."""

CUT = """(() => {
  const scrolls = (e) => e.closest("pre, textarea, .scroll, #block-editor, select");
  const beyond = (e) => {
    const range = document.createRange();
    range.selectNodeContents(e);
    const { left, right, width } = range.getBoundingClientRect();
    return width > 0 && (left < -1 || right > innerWidth + 1);
  };
  const hasText = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  const texts = [...document.querySelectorAll("main *")].filter((e) => hasText(e) && e.checkVisibility() && !scrolls(e));
  const cells = [...document.querySelectorAll("td:not(.wide)")].filter((e) => getComputedStyle(e).display === "flex" && !e.dataset.title);
  return [...texts.filter(beyond), ...cells].map((e) => e.outerHTML.slice(0, 80));
})()"""
"""Texts that leave the window, and cells of a folded table without the title of their column; what scrolls is not cut."""

WORDLESS = """[...document.querySelectorAll("button")]
  .filter((e) => e.checkVisibility() && !/[a-zA-Z]{2}/.test(e.innerText)).map((e) => e.outerHTML)"""
"""Buttons that show no word."""

FOCUSED = """(() => {
  const e = document.activeElement;
  if (!e || e === document.body) return -1;
  const style = getComputedStyle(e);
  if (style.outlineStyle === "none" || !parseFloat(style.outlineWidth)) return "no outline on " + e.outerHTML.slice(0, 80);
  return CONTROLS.indexOf(e);
})()"""


def contrast_faults(browser: Browser) -> list[Any]:
    return list(browser.run(CONTRAST))


def unnamed(browser: Browser) -> list[str]:
    """The controls and pictures for which a screen reader would have no name."""
    nodes = browser.send("Accessibility.getFullAXTree")["nodes"]
    seen = [node for node in nodes if not node["ignored"] and node["role"]["value"] in ROLES]
    assert seen, "the page has no control at all"
    return [node["role"]["value"] for node in seen if not node.get("name", {}).get("value", "").strip()]


def cut(browser: Browser) -> list[str]:
    """The texts that cannot be read whole, and the figures whose column is not named."""
    return list(browser.run(CUT))


def wordless(browser: Browser) -> list[str]:
    """The buttons with nothing but a sign."""
    return list(browser.run(WORDLESS))


def out_of_reach(browser: Browser) -> list[str]:
    """The controls that are not reached by pressing Tab from the top of the page; raises where one that is reached shows no outline."""
    are_usable = "(e) => e.checkVisibility() && !e.matches(':disabled') && e.tabIndex >= 0"
    usable = f"[...document.querySelectorAll({CONTROLS!r})].filter({are_usable})"
    browser.run("document.activeElement?.blur(); getSelection().removeAllRanges(); scrollTo(0, 0)")
    count = int(browser.run(f"{usable}.length"))
    reached = set()
    for _ in range(count + OTHERS):
        browser.send("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        browser.send("Input.dispatchKeyEvent", type="keyUp", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        place = browser.run(FOCUSED.replace("CONTROLS", usable))
        assert not isinstance(place, str), place
        reached.add(place)
    missed = [place for place in range(count) if place not in reached]
    return [browser.run(f"{usable}[{place}].outerHTML.slice(0, 80)") for place in missed]


def mouse_only(browser: Browser) -> list[str]:
    """The buttons, fields and links that keys can never reach."""
    kinds = "button, input, select, textarea, a[href], summary"
    return list(
        browser.run(f"[...document.querySelectorAll({kinds!r})].filter((e) => e.tabIndex < 0).map((e) => e.outerHTML.slice(0, 80))")
    )
