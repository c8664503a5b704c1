"""Every control of the explorer at both widths changes a query or the page; a control that is not used fails the test.

No control is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from tests.browser.chromium import Browser
from tests.browser.explorer import READY, Page, Server, serving
from zerobubble import Costs, make, simulate
from zerobubble.export import dumps

pytestmark = pytest.mark.long
both_widths = pytest.mark.parametrize("width", [1280, 390])

STUBS = (
    "window.saved = []; HTMLAnchorElement.prototype.click = function () { window.saved.push(this.download); };"
    "Object.defineProperty(navigator, 'clipboard', { value: { writeText: async (text) => { window.copied = text; } } })"
)
CONTROLS = "[...document.querySelectorAll('HOME :is(input, select, textarea, button):enabled')].filter((e) => e.checkVisibility())"
GROUPS = "[...document.querySelectorAll('details.group:is(HOME, HOME *)')]"
PROBLEM = ":is(.field, .fields, .saved) > .problem:not([hidden])"
SIZE = "document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as started:
        yield started


class Controls:
    """The controls within `home` of a page, and which of them were used so far."""

    def __init__(self, page: Page, home: str) -> None:
        self.page, self.browser, self.home = page, page.browser, home
        self.met: set[str] = set()
        self.used: set[str] = set()
        self.browser.run(STUBS)
        self.open_groups()
        self.meet()

    def meet(self) -> None:
        """Note the controls that can be used now, by id or label."""
        self.met |= set(self.browser.run(CONTROLS.replace("HOME", self.home) + ".map((e) => e.id || e.ariaLabel)"))

    def open_groups(self) -> None:
        """Open each closed group of fields by its title, as the reader would."""
        groups = GROUPS.replace("HOME", self.home)
        while self.browser.run(f"{groups}.some((e) => !e.open)"):
            self.browser.run(f"{groups}.find((e) => !e.open).querySelector('summary').id = 'closed'")
            self.browser.click("#closed")
            self.browser.run("document.getElementById('closed').removeAttribute('id')")

    def ready(self) -> None:
        self.browser.until(READY)
        self.meet()

    def write(self, values: Mapping[str, str], form: str = "q") -> None:
        """Write into fields one after another without waiting for answers to each."""
        for field, value in values.items():
            name = f"{form}-{field}"
            self.browser.run(
                f"(() => {{ const e = document.getElementById('{name}'); if (e.disabled) throw new Error('{name} is disabled');"
                f"if (e.type === 'checkbox') e.checked = {json.dumps(value)} === '1'; else e.value = {json.dumps(value)};"
                "e.dispatchEvent(new Event(e.tagName === 'SELECT' || e.type === 'checkbox' ? 'change' : 'input')); })()"
            )
            self.used.add(name)
        self.ready()
        assert self.problems == []

    def fill(self, values: Mapping[str, str], form: str = "q") -> None:
        """Write into fields, and see all of it in the link."""
        self.write(values, form)
        asked = parse_qs(self.page.link[1:])
        assert {field: asked.get(field) for field in values} == {field: [value] for field, value in values.items()}

    @property
    def problems(self) -> list[str]:
        """The messages next to fields and exports."""
        return list(self.browser.run(f"[...document.querySelectorAll('{PROBLEM}')].map((e) => e.innerText)"))

    def slide(self) -> None:
        """Move every slider that can be moved by a key: its box has the slider's value."""
        sliders = CONTROLS.replace("HOME", f"{self.home} .field") + ".filter((e) => e.type === 'range').map((e) => e.ariaLabel)"
        for slider in self.browser.run(sliders):
            chosen = f"document.querySelector('{self.home} [aria-label=\"{slider}\"]')"
            before = self.browser.run(f"{chosen}.focus(), {chosen}.value")
            self.browser.key("ArrowRight" if self.browser.run(f"{chosen}.value < +{chosen}.max") else "ArrowLeft")
            value, box = self.browser.run(f"[{chosen}.value, {chosen}.closest('.field').querySelector('input').value]")
            assert value != before, slider
            assert box == value, slider
            self.used.add(slider)
            self.ready()
        assert self.problems == []

    def press(self, names: Iterable[str], times: int = 1) -> None:
        for name in names:
            for _ in range(times):
                self.browser.click(f"#{name}")
            self.used.add(name)

    def save_and_copy(self, prefix: str) -> None:
        """Every form is downloaded, every line copied."""
        forms = [name for name in self.met if name.startswith(f"{prefix}save-")]
        for count, form in enumerate(forms, 1):
            self.press([form])
            self.browser.until(f"window.saved.length >= {count} || !!document.querySelector('{PROBLEM}')")
            assert self.problems == [], form
        assert len(set(self.browser.run("window.saved"))) == len(forms)
        for line in ("command", "python"):
            self.press([f"{prefix}copy-{line}"])
            self.browser.until(f"document.getElementById('{prefix}copy-{line}').innerText === 'copied'")
            assert self.browser.run(f"window.copied === document.getElementById('{prefix}line-{line}').textContent")

    def use_viewer(self) -> None:
        """Press every button of the viewer twice, which leaves the picture as it was, and go through time."""
        toggles = CONTROLS.replace("HOME", f"{self.home} .toggles") + ".map((e) => e.id)"
        for toggle in self.browser.run(toggles):
            for pressed in ("true", "false"):
                self.press([toggle])
                assert self.browser.run(f"document.getElementById('{toggle}').getAttribute('aria-pressed')") == pressed
        self.press(["zoom-in", "taller", "zoom-out", "lower", "zoom-all"])
        self.press(["dark", "play"], times=2)
        self.browser.run("document.getElementById('moment').focus()")
        self.browser.key("ArrowRight")
        assert self.browser.run("document.getElementById('clock').textContent") != ""
        self.used.add("moment")

    def open_file(self, name: str, file: Path) -> None:
        """Choose a file as the reader would; what is said of it, and the button that leaves it out."""
        found = self.browser.send("Runtime.evaluate", expression=f"document.getElementById('q-{name}')")["result"]["objectId"]
        self.browser.send("DOM.setFileInputFiles", files=[str(file)], objectId=found)
        self.browser.until(f"!document.getElementById('q-{name}-drop').hidden")
        self.ready()
        assert self.problems == []
        self.used.add(f"q-{name}")

    def drop(self, name: str) -> None:
        self.press([f"q-{name}-drop"])
        self.ready()
        assert self.page.text(f"#q-{name}-name") == ""

    def all_used(self) -> None:
        assert self.met - self.used == set()
        assert self.browser.run(SIZE), "the page is wider than the window"
        assert self.browser.run("document.documentElement.dataset.error") is None
        assert self.page.errors == []


@both_widths
def test_every_control_of_the_schedules(browser: Browser, server: Server, tmp_path: Path, width: int) -> None:
    controls = Controls(Page(browser, server, "#link=1&ranks=2&microbatches=4", width), "#explorer .all")
    shape = {"schedule": "interleaved-1f1b", "ranks": "3", "microbatches": "6", "stages": "2", "options": "group=3", "versus": "1f1b"}
    times = {"forward": "11", "backward": "12", "weight": "7", "comm": "0.25", "slow_link": "0", "slow_comm": "2", "held": "0.5"}
    controls.fill({**shape, **times, "memory": "5"})
    controls.write({"schedule": "breadth-first", "slow_link": "", "slow_comm": "", "versus": ""})
    controls.slide()
    browser.run("(() => { const e = document.getElementById('q-preset'); e.selectedIndex = 1; e.dispatchEvent(new Event('change')); })()")
    controls.ready()
    assert browser.run("document.getElementById('q-forward').value") == "18.522"
    controls.used.add("q-preset")
    model = {"model": "llama3-70b", "gpu": "A100", "tp": "4", "cp": "2", "ep": "1", "dp": "2", "microbatch": "2", "recompute": "full"}
    checks = {"sequence_parallel": "0", "overlap_tp": "1", "precision": "bf16", "gradients": "bf16", "layers": ", ".join(["5"] * 16)}
    controls.fill({"schedule": "zb-v", "ranks": "8", "microbatches": "8", **model, **checks})
    controls.write({"model": "", "schedule": "1f1b", "ranks": "2", "microbatches": "4"})
    (tmp_path / "own.json").write_text(dumps(make("zb-h1", 3, 5)))
    controls.open_file("file", tmp_path / "own.json")
    assert controls.page.text("#q-file-name") == "own.json"
    assert controls.page.boxes == 3 * 5 * 3
    controls.drop("file")
    (tmp_path / "costs.json").write_text(dumps(Costs.uniform(2, times=(3, 4, 5))))
    controls.open_file("costs", tmp_path / "costs.json")
    controls.drop("costs")
    (tmp_path / "run.json").write_text(dumps(replace(simulate(make("1f1b", 2, 4), Costs.uniform(2)), source="measured")))
    controls.open_file("run", tmp_path / "run.json")
    assert "measured" in browser.run("document.querySelector('#viewer canvas.over').ariaLabel")
    controls.drop("run")
    controls.write({"costs-text": dumps(Costs.uniform(2, times=(4, 4, 4)))})
    controls.drop("costs")
    controls.all_used()


@both_widths
def test_groups_of_fields_are_short_and_say_what_is_set_in_them(browser: Browser, server: Server, width: int) -> None:
    set_fields = {"ranks": "2", "microbatches": "4", "slow_link": "0", "slow_comm": "7.5", "memory": "3"}
    page = Page(browser, server, "#link=1&" + "&".join(f"{field}={value}" for field, value in set_fields.items()), width)
    groups = GROUPS.replace("HOME", "#explorer .fields")
    height = browser.run("innerHeight")
    assert browser.run("document.querySelector('#explorer .all').open") == (width > 900)
    if width < 900:
        said = page.text("#explorer .all > summary .set")
        assert all(value in said for value in set_fields.values() if value != "0"), said
        top, bottom = browser.run("(({ top, bottom }) => [top, bottom])(document.querySelector('#viewer .stage').getBoundingClientRect())")
        assert 0 < top < bottom < height, "the picture is seen without scrolling"
        page.put("memory", "-1")
        assert page.text("#q-memory-problem") != ""
        page.put("memory", "3")
        browser.run("for (const e of document.querySelectorAll('#explorer :is(.all, .all .group:nth-child(4))')) e.open = false")
        browser.click("#explorer .all > summary")
    assert browser.run(f"{groups}.map((e) => e.open)") == [True, True, False, False, False, False]
    said = browser.run(f"{groups}.map((e) => e.querySelector('.set')).map((e) => (e.checkVisibility() ? e.innerText : ''))")
    assert [bool(text) for text in said] == [False, False, False, True, True, False]
    assert "3" in said[3]
    assert "7.5" in said[4]
    assert browser.run("document.querySelector('#explorer .fields').offsetHeight") <= height
    assert browser.run("document.querySelector('#viewer .stage').getBoundingClientRect().top + scrollY") <= 1.5 * height
    before = page.text("#explorer .cards")
    page.put("slow_comm", "15")
    assert page.text("#explorer .cards") != before
    assert browser.run("document.querySelector('#explorer .cards').getBoundingClientRect().bottom") <= height
    page.put("memory", "-1")
    assert browser.run(f"{groups}.map((e) => e.open)") == [True, True, False, True, False, False]
    assert page.text("#q-memory-problem") != ""
    page.put("memory", "3")
    assert page.errors == []
    page = Page(browser, server, "#link=1&model=llama3-70b&tp=8", width)
    assert browser.run(f"{groups}.map((e) => e.open)") == [True, False, False, False, False, False]
    assert "llama3-70b" in browser.run(f"{groups}[2].querySelector('.set').textContent")
    assert page.errors == []


@both_widths
def test_every_control_of_the_answer(browser: Browser, server: Server, width: int) -> None:
    controls = Controls(Page(browser, server, "#link=1&ranks=2&microbatches=4", width), "#explorer .answer")
    controls.use_viewer()
    controls.save_and_copy("")
    controls.used |= SEARCH
    controls.all_used()


@both_widths
def test_every_control_of_the_building_blocks(browser: Browser, server: Server, width: int) -> None:
    controls = Controls(Page(browser, server, "#link=1&tab=blocks&block=1f1b&ranks=2&microbatches=4", width), "#workshop")
    controls.fill({"block": "v-half", "ranks": "2", "microbatches": "5", "memory": "9", "reorder_steady": "1"}, "w")
    controls.use_viewer()
    controls.save_and_copy("block-")
    text = browser.run("document.getElementById('w-text').value")
    controls.slide()
    controls.write({"interval": "9"}, "w")
    controls.write({"text": text}, "w")
    assert "text=" in controls.page.link
    controls.press(["w-reset"])
    controls.ready()
    assert "text=" not in controls.page.link
    controls.press(["w-open"])
    browser.until(f"{READY} && !!document.querySelector('#viewer .stage')")
    assert ".txt" in controls.page.text("#q-open-file")
    controls.all_used()


SEARCH = {"search-seconds", "search-objective", "search-plan", "search-front", "search-stop"}
OVER = "document.querySelector('.search').dataset.running === 'false'"
VIEWER_TOP = "document.getElementById('viewer').getBoundingClientRect().top"
FIND = "document.getElementById('search-seconds').value = '1'; document.getElementById('search-objective').value = 'makespan'"


def searching(browser: Browser, server: Server, width: int = 1280, seconds: int = 1) -> Page:
    """A page of two ranks on which a search for a plan has begun."""
    page = Page(browser, server, "#link=1&ranks=2&microbatches=4", width)
    browser.run(FIND.replace("'1'", f"'{seconds}'"))
    browser.click("#search-plan")
    return page


@both_widths
def test_a_plan_is_searched_for_and_opened(browser: Browser, server: Server, width: int) -> None:
    page = searching(browser, server, width)
    browser.until(OVER)
    wide, inside = browser.run(
        "(({ scrollWidth, clientWidth }) => [scrollWidth, clientWidth])(document.querySelector('#search-found .scroll'))"
    )
    assert wide <= inside, "every column of the table is seen"
    assert page.text("#search-problem") == ""
    assert len(browser.run("[...document.querySelectorAll('#search-found tbody tr')].map((row) => row.innerText)")) > 1
    assert browser.run("document.querySelectorAll('#search-found tr.winner').length") == 1
    opened = f"{READY} && document.getElementById('q-file-name').textContent.startsWith('the search')"
    browser.until(opened)
    assert browser.run("document.getElementById('q-forward').disabled"), "the times of a plan are its own"
    browser.click("#q-file-back")
    browser.until(f"{READY} && document.getElementById('q-file-name').textContent === ''")
    assert not browser.run("document.getElementById('q-forward').disabled")
    browser.run("scrollTo(0, document.body.scrollHeight)")
    browser.click("#search-open")
    browser.until(opened)
    assert browser.run(VIEWER_TOP) < browser.run("innerHeight")
    assert page.errors == []


def test_a_search_of_no_seconds_says_what_it_compared(browser: Browser, server: Server) -> None:
    page = searching(browser, server, seconds=0)
    browser.until(OVER)
    assert page.text("#search-problem") == ""
    assert "published" in page.text("#search-news")
    assert browser.run("document.querySelectorAll('#search-found tbody tr').length") > 1


def test_wrong_fields_of_a_search_leave_the_earlier_result(browser: Browser, server: Server) -> None:
    page = searching(browser, server)
    browser.until(f"{OVER} && {READY} && document.getElementById('q-file-name').textContent.startsWith('the search')")
    before = page.text("#search-found"), page.text("#search-news")
    assert before[0] != ""
    browser.run("document.getElementById('search-seconds').value = 'abc'")
    for button in ("search-plan", "search-front"):
        browser.click(f"#{button}")
        browser.until("!document.getElementById('search-problem').hidden")
        browser.until(OVER)
        assert (page.text("#search-found"), page.text("#search-news")) == before
        assert browser.run("document.getElementById('search-seconds').getAttribute('aria-invalid')") == "true"
        assert browser.run("document.getElementById('search-stop').disabled")
    assert page.errors == []


def test_a_search_that_finds_nothing_clears_the_earlier_result_and_names_the_field(browser: Browser, server: Server) -> None:
    page = searching(browser, server)
    browser.until(f"{OVER} && {READY} && document.getElementById('q-file-back').checkVisibility()")
    assert "zerobubble plan --ranks 2 --microbatches 4" in page.text("#line-command")
    assert "zb.plan(" in page.text("#line-python")
    browser.click("#q-file-back")
    page.put("memory", "0.1")
    browser.click("#search-plan")
    browser.until("!document.getElementById('search-problem').hidden")
    browser.until(OVER)
    assert page.text("#search-problem").startswith("limit per rank, in microbatches: no schedule fits")
    assert (page.text("#search-found"), page.text("#search-news")) == ("", "")
    assert page.errors == []


def test_a_front_names_its_placements_and_the_fields_come_back_with_all(browser: Browser, server: Server) -> None:
    page = searching(browser, server)
    browser.until(f"{OVER} && {READY} && document.getElementById('q-file-back').checkVisibility()")
    names = []
    for _ in range(2):
        browser.click("#search-front")
        browser.until(f"{OVER} && !!document.getElementById('front-covers')")
        names.append(page.text("#front-covers").partition(":")[2].partition(".")[0].split(", "))
        if browser.run("document.getElementById('q-file-back').checkVisibility()"):
            browser.click("#q-file-back")
            browser.until(f"{READY} && !document.getElementById('q-forward').disabled")
    assert len(names[0]) == 1
    assert len(names[1]) > 1
    assert page.errors == []


def test_a_search_does_not_replace_what_the_reader_has_changed_meanwhile(browser: Browser, server: Server) -> None:
    page = searching(browser, server)
    page.put("comm", "0.75")
    browser.until(OVER)
    browser.until(READY)
    assert browser.run("!!document.getElementById('search-open')")
    assert page.text("#q-file-name") == ""
    assert page.errors == []


def test_points_of_a_front_are_gone_through_and_opened(browser: Browser, server: Server) -> None:
    page = Page(browser, server, "#link=1&ranks=2&microbatches=4", 390)
    browser.run(FIND)
    browser.click("#search-front")
    browser.until(OVER)
    assert page.text("#search-problem") == ""
    assert page.text("#front .legend") != ""
    browser.run("document.querySelector('svg.front').focus()")
    for key in ("Home", "Enter"):
        browser.key(key)
    assert "microbatch" in page.text("#front-details")
    browser.until(f"{READY} && document.getElementById('q-file-name').textContent.startsWith('the search')")
    assert browser.run(SIZE), "the page is wider than the window"
    assert page.errors == []


def test_a_search_is_stopped(browser: Browser, server: Server) -> None:
    page = Page(browser, server, "#link=1&ranks=8&microbatches=24&forward=18.522&backward=18.086&weight=9.337&memory=5")
    browser.run("document.getElementById('search-seconds').value = '300'")
    browser.click("#search-plan")
    browser.until("document.getElementById('search-news').innerText.includes(': bubble')")
    browser.click("#search-stop")
    browser.until(OVER)
    assert "Stopped." in page.text("#search-news"), page.text("#search-problem")
    assert page.errors == []
