"""Every page that the package writes or serves, in both themes, wide and narrow: reached by keys, named, and readable.

Text has a contrast of at least 4.5 in both themes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.accessibility import contrast_faults, cut, mouse_only, out_of_reach, unnamed, wordless
from tests.browser.chromium import Browser
from tests.browser.explorer import Server
from tests.browser.watching import watching
from tests.pure.test_cli import run
from tests.run_folders import Recorded
from zerobubble import Costs, make, simulate
from zerobubble.explain import diff, gaps
from zerobubble.explorer.playground import playground_html
from zerobubble.timeline import Timeline
from zerobubble.view import MemoryRow, Report, ThroughputRow, report_html

WORK = "-p 4 -m 6 --times 10,10,8 --comm 1"
COMMANDS = {
    "compare": f"compare 1f1b zb-v {WORK}",
    "plan": f"plan {WORK} --budget 0",
    "front": f"pareto {WORK} --budget 0 --memory 1:4:1",
    "block": "block v-half -p 4 -m 6",
}
"""The commands that write a page, without the option that names it."""

COSTS = Costs.uniform(4, times=(10, 10, 8), comm=1)


def reported() -> str:
    """As a training run, `diff` and `trace` write it, with every section."""
    schedule = make("zb-h1", 4, 6)
    plan = simulate(schedule, COSTS)
    measured = Timeline("zb-h1", simulate(schedule, Costs.uniform(4, times=(11, 10, 8), comm=1)).rows, plan.memory, source="measured")
    return report_html(
        Report(
            "A run",
            facts=[("ranks", "4")],
            timelines=[plan, measured],
            memory=[MemoryRow(rank, 900, 800, 1000) for rank in range(4)],
            losses={"pipeline": [3.0, 2.0], "one device": [3.0, 2.1]},
            throughput=[ThroughputRow("1f1b", 900.0, 0.2, 0.21, 1000), ThroughputRow("zb-h1", 1000.0, 0.1, 0.12, 1000)],
            notes=["A note."],
            gaps=[(), gaps(schedule, COSTS, measured)],
            difference=diff(schedule, COSTS, measured),
        )
    )


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, str]]]:
    """Where each page is, and what it may ask for."""
    folder: Path = tmp_path_factory.mktemp("pages")
    for name, command in COMMANDS.items():
        assert run(*command.split(), "--html", str(folder / f"{name}.html")).exit_code == 0
    (folder / "report.html").write_text(reported(), encoding="utf-8")
    (folder / "playground.html").write_text(playground_html(("1f1b", "zb-v"), ((2, 4),)), encoding="utf-8")
    found = {page.stem: (page.as_uri(), "file:") for page in folder.glob("*.html")}
    recorded = Recorded(folder / "run", slow=1.5)
    for number in range(5):
        recorded.step(number)
    recorded.details(4)
    recorded.end(1, {"message": "rank 1 failed", "rank": 1, "op": None})
    server = Server()
    with watching(recorded.folder) as watched:
        yield found | {"explorer": (server.address, server.address), "watch": (watched, watched)}
    server.process.terminate()
    server.process.communicate(timeout=600)


@pytest.mark.long
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", [*COMMANDS, "report", "playground", "explorer", "watch"])
def test_a_page_can_be_read_and_used_by_everybody(browser: Browser, addresses: dict[str, tuple[str, str]], name: str, width: int) -> None:
    browser.media()
    browser.visit(*addresses[name], width=width)
    assert contrast_faults(browser) == []
    assert unnamed(browser) == []
    assert mouse_only(browser) == []
    assert cut(browser) == []
    assert wordless(browser) == []
    assert out_of_reach(browser) == []
    browser.media(dark=True)
    browser.settle()
    assert browser.run("document.documentElement.dataset.theme") == "dark"
    assert contrast_faults(browser) == []
    browser.media()
    assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
    assert browser.errors == []


FAULTY = """<!doctype html><html lang="en" data-state="ready"><title>x</title><link rel="icon" href="data:,">
<main style="background: #fff"><p style="color: #888">pale</p><p style="color: #767676">dark enough</p>
<svg><text y="20" fill="#999">pale</text></svg>
<p style="white-space: nowrap">{wide}</p><table><tr><td style="display: flex">7</td></tr></table>
<button></button><button tabindex="-1">by mouse alone</button><button>named</button>
<div tabindex="0" onfocus="document.querySelector('button').focus()">never reached</div></main></html>""".replace("{wide}", "wide " * 400)


def test_each_fault_of_a_page_is_found(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "faulty.html").write_text(FAULTY, encoding="utf-8")
    browser.media()
    browser.open(tmp_path / "faulty.html")
    assert [(tag, text) for _, tag, text in contrast_faults(browser)] == [("P", "pale"), ("text", "pale")]
    assert unnamed(browser) == ["button"]
    assert [left[:3] for left in cut(browser)] == ["<p ", "<td"]
    assert len(wordless(browser)) == 1
    assert len(mouse_only(browser)) == 1
    assert "by mouse alone" in mouse_only(browser)[0]
    assert [left.partition(" ")[0] for left in out_of_reach(browser)] == ["<div"]
    browser.run("document.querySelectorAll('button')[2].style.outline = 'none'")
    with pytest.raises(AssertionError, match="no outline on <button"):
        out_of_reach(browser)
