"""Screenshots of the pages of `compare --html`, `explore` and `watch`, in docs/view.md, docs/explore.md and docs/watch.md.

`make screenshots` takes them again with Chromium. A browser draws text differently on each machine, so no test compares their bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from click.testing import CliRunner

from tests.browser.chromium import Browser, chromium
from tests.browser.explorer import serving
from tests.browser.watching import watching
from tests.run_folders import COSTS, Recorded
from zerobubble import Costs, make, simulate
from zerobubble.cli import main as zerobubble

FOLDER = Path(__file__).parent
WIDTH = 1100
STEPS = 40
SLOW = 1.6
"""How much longer than planned the passes of stage 1 take in the run that is watched."""


def view(browser: Browser, file: Path, folder: Path) -> None:
    """Two schedules compared; the pointer is on a bubble."""
    page = folder / "page.html"
    words = ["compare", "1f1b", "zb-v", "--ranks", "4", "--microbatches", "8", "--times", "10,10,8", "--comm", "0.2", "--html", str(page)]
    assert CliRunner().invoke(zerobubble, words).exit_code == 0
    browser.open(page, WIDTH, 480)
    browser.run("document.querySelector('#viewer').scrollIntoView(), scrollBy(0, -16)")
    browser.settle()
    left, top = browser.run("(() => { const b = document.querySelector('.stage').getBoundingClientRect(); return [b.left, b.top]; })()")
    browser.point(left + 0.25 * WIDTH, top + 40)
    browser.screenshot(file)


def explore(browser: Browser, file: Path, folder: Path) -> None:
    """The page as it opens."""
    with serving() as server:
        browser.visit(server.address, server.address, WIDTH, 680)
        browser.settle()
        browser.screenshot(file)


def watch(browser: Browser, file: Path, folder: Path) -> None:
    """A run in which stage 1 is slower than planned."""
    schedule = make("zb-h1", 2, 8)
    slower = Costs.from_ms(*([times[0] / 1e6, SLOW * times[1] / 1e6] for times in (COSTS.forward, COSTS.backward, COSTS.weight)), 0.5)
    timeline = simulate(schedule, slower)
    run = Recorded(folder / "first", schedule, slow=SLOW)
    for step in range(STEPS):
        run.step(step, loss=0.05 + 0.9**step, seconds=timeline.makespan / 1e9, bubble=timeline.bubble_makespan)
    run.details(STEPS - 1, timeline)
    with watching(run.folder) as address:
        browser.visit(address, address, WIDTH, 740)
        browser.settle()
        browser.screenshot(file)


PICTURES = {"view": view, "explore": explore, "watch": watch}


def take(folder: Path) -> None:
    """Take all screenshots into `folder`."""
    with chromium() as browser, TemporaryDirectory() as scratch:
        for name, picture in PICTURES.items():
            picture(browser, folder / f"{name}.webp", Path(scratch))


if __name__ == "__main__":
    take(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
