"""The size, time to first picture, and smoothness of a page of 64 ranks and 512 microbatches, compared with one SVG.

Chromium renders without a GPU. Writes `results.json` next to this file; `--frames` measures the frames only, and keeps the rest. Absolute
times depend on the machine and its load: `frames` has the load when it began, and the processor time of a frame.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import zerobubble as zb
from zerobubble.export import timeline_svg
from zerobubble.view import Viewed, comparison_html

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
from ranks import machine, show

from tests.browser.chromium import Browser, chromium

RANKS, MICROBATCHES = 64, 512
CASES = (("zb-v",), ("1f1b", "zb-h1", "zb-v"))
REPEATS = 3
SIZES = ((1280, 900), (390, 844))
COUNT = 90

FRAMES = """new Promise((done) => {
  const canvas = document.querySelector("canvas.over"), begin = performance.now(), times = [];
  const frame = (now) => {
    times.push(now);
    if (times.length > COUNT) return done((times.length - 1) * 1000 / (times.at(-1) - times[0]));
    const turn = times.length < COUNT / 2 ? -1 : 1;
    canvas.dispatchEvent(new WheelEvent("wheel", EVENT));
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
})"""
MOVES = {"zoom": "{ deltaY: 14 * turn, ctrlKey: true, cancelable: true, clientX: 640 }", "pan": "{ deltaX: -8 * turn, cancelable: true }"}
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now()))))"


FILE = Path(__file__).with_name("results.json")


def main() -> None:
    """Measure every case and write the table."""
    results: dict[str, Any] = json.loads(FILE.read_text()) if "--frames" in sys.argv else {"machine": machine(), "pages": []}
    results["frames"] = {"machine": machine(), "load": os.getloadavg()[0], "pages": []}
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        for names in CASES:
            if "--frames" not in sys.argv:
                results["pages"].append(show(case(browser, Path(folder), names)))
            results["frames"]["pages"].append(show(moved(browser, Path(folder), names)))
    FILE.write_text(json.dumps(results, indent=1) + "\n")


def case(browser: Browser, folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """One page: its size, how soon it was drawn, and the same figures of the SVG."""
    viewed = [viewed_of(name) for name in names]
    started = time.perf_counter()
    page = comparison_html(", ".join(names), [], [[] for _ in names], viewed, "")
    made = time.perf_counter() - started
    file, picture = folder / "page.html", folder / "svg.html"
    file.write_text(page)
    picture.write_text(f"<!doctype html><html data-state='ready'><body>{timeline_svg(*(each.timeline for each in viewed))}</body></html>")
    passes = sum(len(row) for each in viewed for row in each.timeline.rows)
    row: dict[str, Any] = {"schedules": list(names), "ranks": RANKS, "microbatches": MICROBATCHES, "passes": passes}
    row |= {"page_mb": file.stat().st_size / 1e6, "svg_mb": picture.stat().st_size / 1e6, "page_made_s": made}
    row["first_picture_s"] = statistics.median(first_picture(browser, file) for _ in range(REPEATS))
    row["svg_first_picture_s"] = first_picture(browser, picture)
    return row | {"svg_over_page": row["svg_first_picture_s"] / row["first_picture_s"]}


def viewed_of(name: str) -> Viewed:
    schedule = zb.make(name, RANKS, MICROBATCHES)
    share = schedule.num_ranks / schedule.num_stages
    costs = zb.Costs.uniform(schedule.num_stages, times=(10 * share, 10 * share, 8 * share), comm=0.2)
    return Viewed(zb.simulate(schedule, costs), costs)


def first_picture(browser: Browser, file: Path) -> float:
    """Seconds from the start of the navigation to the second frame after everything was drawn."""
    browser.open(file)
    return float(browser.run(DRAWN)) / 1000


def moved(browser: Browser, folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Frames a second of one page while it zooms and pans, and the processor time of a frame."""
    file = folder / "page.html"
    file.write_text(comparison_html(", ".join(names), [], [[] for _ in names], [viewed_of(name) for name in names], ""))
    row: dict[str, Any] = {"schedules": list(names), "ranks": RANKS, "microbatches": MICROBATCHES}
    for width, height in SIZES:
        for move, event in MOVES.items():
            per_second, cpu_ms = frames(browser, file, width, height, event)
            row |= {f"{move}_frames_per_s_{width}": per_second, f"{move}_cpu_ms_per_frame_{width}": cpu_ms}
    return row


def frames(browser: Browser, file: Path, width: int, height: int, event: str) -> tuple[float, float]:
    """Frames a second over `COUNT` of them, and ms of processor time for each in all of the browser's processes.

    A quarter of the whole is in view at first, so that it can move.
    """
    browser.open(file, width, height)
    browser.run("document.querySelector('.stage').scrollIntoView()")
    for _ in range(3):
        browser.click("#zoom-in")
    before = browser_seconds()
    per_second = float(browser.run(FRAMES.replace("COUNT", str(COUNT)).replace("EVENT", event)))
    return per_second, 1000 * (browser_seconds() - before) / COUNT


def browser_seconds() -> float:
    """Processor time of the processes that this one started, and of theirs, so far."""
    times: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            times[int(entry.parent.name)] = (int(fields[1]), int(fields[11]) + int(fields[12]))
    family = {os.getpid()}
    while born := {process for process, (parent, _) in times.items() if parent in family} - family:
        family |= born
    return sum(times[process][1] for process in family - {os.getpid()}) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
