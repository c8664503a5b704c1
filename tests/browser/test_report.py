"""The report in a real browser: its scripts run without an error and draw every pass."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from zerobubble.costs import Costs
from zerobubble.export.html import report_html
from zerobubble.export.report import Report
from zerobubble.schedules import make
from zerobubble.simulation import simulate
from zerobubble.timeline import Timeline

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or chrome on the PATH to open the report in")

# Moves pointer and keys as a reader would, and leaves what the page then says in attributes.
READER = """<script>
setTimeout(() => {
  const root = document.documentElement, canvas = document.getElementById("timeline"), tip = document.getElementById("tip");
  const at = canvas.getBoundingClientRect();
  canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: at.left + 62, clientY: at.top + 34, bubbles: true }));
  root.dataset.hovered = tip.textContent;
  canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  root.dataset.stepped = tip.textContent;
  canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown" }));
  root.dataset.jumped = tip.textContent;
  for (let n = 0; n < 9; n++) document.getElementById("zoom-in").click();
  setTimeout(() => (root.dataset.zoomed = canvas.dataset.boxes), 50);
}, 50);
</script></body>"""

# A browser without a window draws no frames by itself.
FRAMES = "<head><script>window.requestAnimationFrame = (draw) => setTimeout(draw, 0);</script>"


def dump(page: str, folder: Path) -> str:
    """The page as the browser left it."""
    file = folder / "report.html"
    file.write_text(page, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=3000"]
    done = subprocess.run([str(CHROMIUM), *flags, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def attribute(dom: str, name: str) -> str:
    found = re.search(rf'data-{name}="([^"]*)"', dom)
    assert found is not None, f"the page has no data-{name}"
    return found[1]


def test_the_page_draws_every_pass_and_answers_pointer_and_keys(tmp_path: Path) -> None:
    schedule = make("zb-v", 4, 8)
    plan = simulate(schedule, Costs.uniform(schedule.num_stages, comm=0.1, stages_per_rank=2))
    passes = 2 * sum(1 for _ in plan.spans())
    report = Report("A run", timelines=[plan, Timeline(plan.name, plan.rows, source="measured")], losses={"a": [3.0, 2.0], "b": [3.0, 2.0]})
    dom = dump(report_html(report).replace("<head>", FRAMES).replace("</body>", READER), tmp_path)
    assert "data-error=" not in dom
    assert attribute(dom, "state") == "ready"
    assert 0 < int(attribute(dom, "zoomed")) < passes
    assert "forward of stage 0, microbatch 0" in attribute(dom, "hovered")
    assert "started at once" in attribute(dom, "hovered")
    assert "forward of stage 0, microbatch 1" in attribute(dom, "stepped")
    assert "rank 1" in attribute(dom, "jumped")
    assert dom.count('class="run"') == 2


# Points at the upper and at the lower half of the row where two passes ran overlapped.
POINTER = """<script>
setTimeout(() => {
  const root = document.documentElement, canvas = document.getElementById("timeline"), tip = document.getElementById("tip");
  const view = JSON.parse(document.getElementById("data").textContent).timelines[0], at = canvas.getBoundingClientRect();
  const cell = view.rows[0].find((c) => c[9] === 2), x = at.left + 58 + ((cell[3] + cell[4]) / 2 / view.makespan) * (at.width - 62);
  for (const [name, y] of [["upper", 30], ["lower", 49]]) {
    canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: at.top + y, bubbles: true }));
    root.dataset[name] = tip.textContent;
  }
}, 50);
</script></body>"""


def test_each_of_two_overlapped_passes_answers_on_its_half(tmp_path: Path) -> None:
    schedule = make("dualpipe-v", 2, 4)
    plan = simulate(schedule, Costs.uniform(schedule.num_stages))
    first, second = next(step for step in schedule.steps[0] if len(step) > 1)
    dom = dump(report_html(Report("Overlapped", timelines=[plan])).replace("<head>", FRAMES).replace("</body>", POINTER), tmp_path)
    assert "data-error=" not in dom
    for half, op, beside in (("upper", first, second), ("lower", second, first)):
        assert f"pass{op} on rank 0" in attribute(dom, half)
        assert f"overlapped with{beside}" in attribute(dom, half)
        assert "idle before0.000 ms" in attribute(dom, half)


def test_all_boxes_of_a_large_run_are_drawn(tmp_path: Path) -> None:
    schedule = make("interleaved-1f1b", 8, 64)
    plan = simulate(schedule, Costs.uniform(schedule.num_stages, stages_per_rank=2))
    dom = dump(report_html(Report("Large", timelines=[plan, plan])), tmp_path)
    assert "data-error=" not in dom
    assert int(attribute(dom, "boxes")) == 2 * 8 * 64 * 2 * 2
