"""No text of an SVG picture overlaps another text or leaves the picture, with a browser's fonts."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.browser.chromium import Browser
from zerobubble.cli import main

MEASURED = "--times 18.522,18.086,9.337 --comm 0.601"
PICTURES = {
    "compare": f"compare 1f1b zb-v dualpipe-v -p 4 -m 8 {MEASURED}",
    "plan": "plan -p 4 -m 16 --times 12,11,7 --comm 0.4 --budget 0.5",
    "pareto": f"pareto -p 4 -m 8 {MEASURED} --memory 1:4:1 --budget 0.2",
    "block": "block v-half -p 4 -m 8",
}

FAULTS = """(() => {
  const { right } = document.documentElement.getBoundingClientRect();
  const texts = [...document.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
  const meet = (one, other) => one.left < other.right - 1 && other.left < one.right - 1
    && one.top < other.bottom - 4 && other.top < one.bottom - 4;
  return texts.flatMap(([name, one], at) => [
    ...(one.left < 0 || one.right > right ? [`${name} leaves the picture`] : []),
    ...texts.slice(at + 1).filter(([, other]) => meet(one, other)).map(([other]) => `${name} over ${other}`),
  ]);
})()"""


@pytest.mark.parametrize("name", PICTURES)
def test_texts_do_not_overlap(browser: Browser, tmp_path: Path, name: str) -> None:
    file = tmp_path / "picture.svg"
    result = CliRunner().invoke(main, [*PICTURES[name].split(), "--svg", str(file)])
    assert result.exit_code == 0, result.output
    page = file.with_suffix(".html")
    page.write_text(f"<html data-state=ready style='margin:0'><body style='margin:0'>{file.read_text(encoding='utf-8')}", encoding="utf-8")
    browser.open(page, 1100)
    assert browser.run(FAULTS) == []
