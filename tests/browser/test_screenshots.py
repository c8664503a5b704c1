"""The screenshots of the pages can be taken again, are small, and are shown on their pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.screenshots import FOLDER, PICTURES, take
from tests.browser.chromium import CHROMIUM

MOST_BYTES = 150_000


@pytest.mark.parametrize("name", PICTURES)
def test_a_page_shows_its_small_screenshot(name: str) -> None:
    assert f"]({name}.webp)" in (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert (FOLDER / f"{name}.webp").stat().st_size < MOST_BYTES


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or chrome on the PATH to open pages in")
def test_screenshots_are_taken_again(tmp_path: Path) -> None:
    take(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {f"{name}.webp" for name in PICTURES}
    assert all(5_000 < file.stat().st_size < MOST_BYTES for file in tmp_path.iterdir())
