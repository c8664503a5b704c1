"""The training report: self-contained, escaped, and its figures those of the report.

Pages open offline and log no errors. (`tests/browser` checks pointer, touch and keys.)
"""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

from tests.refusals import raises, states
from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.schedules import make
from zerobubble.simulation import simulate
from zerobubble.timeline import Timeline
from zerobubble.units import show_ms
from zerobubble.view import report_html
from zerobubble.view.report import MemoryRow, Report, ThroughputRow


class Text(HTMLParser):
    """The text and the tags of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.inside not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def full_report(**changes: object) -> Report:
    schedule = make("zb-h1", 2, 3)
    plan = simulate(schedule, Costs.uniform(2))
    measured = Timeline(plan.name, plan.rows, source="measured")
    parts = {
        "title": "A run",
        "facts": [("machine", "one & only")],
        "timelines": [plan, measured],
        "memory": [MemoryRow(0, 2_000_000, 2_100_000, 3_000_000), MemoryRow(1)],
        "losses": {"pipeline": [4.0, 2.5, 1.25], "one device": [4.0, 2.5, 1.25]},
        "throughput": [ThroughputRow("1f1b", 1000, 0.25, 0.26), ThroughputRow("zb-h1", 1150)],
        "notes": ["A note."],
    }
    return Report(**(parts | changes))  # type: ignore[arg-type]


def test_the_headline_shows_loss_equality_bubble_and_speed() -> None:
    text = Text(report_html(full_report())).text
    for figure in (
        "4.000 → 1.250",
        "Against one device identical",
        "planned 10.00 %",
        "zb-h1 is faster than 1f1b 1.15×",
        "limit 3 MB",
        "2.1 MB",
    ):
        assert figure in text, figure


def test_a_difference_of_losses_is_reported_with_its_step() -> None:
    page = report_html(full_report(losses={"pipeline": [4.0, 2.5, 1.0], "one device": [4.0, 2.25, 1.0, 0.5]}))
    states(Text(page).text, "0.25", "step 2", 3)
    assert "identical" not in Text(page).text


def test_nothing_is_fetched_from_outside() -> None:
    page = report_html(full_report())
    for tag, attributes in Text(page).tags:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            assert attributes.get(name) in (None, "data:,"), (tag, attributes)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|\bimport\s*\(|sendBeacon|WebSocket", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}  # a namespace, never fetched


def test_every_text_is_escaped() -> None:
    evil = "</script><script>alert(1)</script><b>&"
    timeline = simulate(make("1f1b", 2, 2), Costs.uniform(2))
    report = Report(
        evil,
        [(evil, evil)],
        [Timeline(evil, timeline.rows, source=evil)],
        [MemoryRow(0, 1)],
        {evil: [1.0], evil + "2": [1.0]},
        [ThroughputRow(evil, 1.0)],
        [evil],
    )
    parsed = Text(report_html(report))
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    assert not any(tag == "b" and not attributes and "alert" in tag for tag, attributes in parsed.tags)
    assert "alert(1)" in parsed.text


def test_parts_that_are_not_given_leave_no_section() -> None:
    parsed = Text(report_html(Report("Nothing yet")))
    assert not {"section", "div", "table"} & {tag for tag, _ in parsed.tags}


def test_a_report_shows_of_the_schedule_that_stands_below_1f1b() -> None:
    base, own = (simulate(make(name, 2, 3), Costs.uniform(2)) for name in ("1f1b", "zb-h1"))
    measured = [Timeline(one.name, one.rows, one.memory, "measured") for one in (base, own)]
    rows = [ThroughputRow("1f1b", 1000, peak_bytes=2_000_000), ThroughputRow("zb-h1", 1150, 0.1, 0.2, 2_500_000)]
    layers = [{"parameters": [size, size]} for size in (10, 20, 20)]
    report = full_report(timelines=[*measured, own], throughput=rows, layers=layers)
    assert (report.measured, report.predicted) == (measured[1], own)
    page = report_html(report)
    assert "zb-h1 1,150 1.15× 2.5 MB 10.00 % 20.00 %" in Text(page).text
    [data] = re.findall(r'id="data">(.*?)</script>', page)
    assert [drawn["layers"] for drawn in json.loads(data)["timelines"]] == layers
    with raises(InputError, 1, 3, "layers", "timeline"):
        replace(report, layers=layers[:1])


def test_what_to_know_first_comes_before_all_figures() -> None:
    page = report_html(full_report(caution="7 % of passes took longer than planned."))
    assert 0 < page.index("7 % of passes took longer") < page.index('<section class="cards"')
    assert 'class="caution"' not in report_html(full_report())


def test_a_run_without_losses_is_refused() -> None:
    with raises(InputError, "pipeline", "empty"):
        full_report(losses={"pipeline": []})


def test_the_speed_up_is_that_of_the_timelines_schedule() -> None:
    rows = [ThroughputRow("1f1b", 100), ThroughputRow("zb-v", 130), ThroughputRow("zb-h1", 110)]
    assert full_report(throughput=rows).speed_up() == ("zb-h1", 1.1)
    assert Report("no timeline", throughput=rows).speed_up() == ("zb-v", 1.3)
    assert Report("no reference", throughput=rows[1:]).speed_up() is None


def test_the_card_of_the_loss_has_that_on_held_out_data_if_known() -> None:
    cards = report_html(full_report(held_out=(5.25, 3.125))).split('<section class="cards"')[1].split("</section>")[0]
    assert "5.250" in cards
    assert "3.125" in cards
    assert "4.000" not in cards


def test_the_first_card_has_the_speed_of_the_steps_drawn() -> None:
    """On a busy machine the median steps may be slower, and the steps drawn faster. The card must not contradict the timeline."""
    plan, measured = full_report().timelines
    base = simulate(make("1f1b", 2, 3), Costs.uniform(2))
    base = Timeline(base.name, base.rows, source="measured")
    rows = [ThroughputRow("1f1b", 1000), ThroughputRow("zb-h1", 570)]
    report = full_report(timelines=[base, measured, plan], throughput=rows)
    ratio = base.makespan / measured.makespan
    assert report.drawn_steps() == (base, measured)
    cards = report_html(report).split('<section class="cards"')[1].split("</section>")[0]
    assert cards.index(f"{ratio:.2f}×") < cards.index("Loss")
    assert ratio > 1
    assert "0.57" not in cards
    assert "zb-h1 is slower than 1f1b" in report_html(full_report(throughput=rows))
    swapped = [base, Timeline(plan.name, simulate(make("zb-h1", 2, 3), Costs.uniform(2, (20, 20, 20))).rows, source="measured")]
    assert "zb-h1 is slower than 1f1b" in report_html(full_report(timelines=swapped))


def test_the_first_card_of_a_run_without_a_reference_has_its_step_and_the_planned_one() -> None:
    report = full_report(throughput=[])
    plan, measured = report.timelines
    cards = report_html(report).split('<section class="cards"')[1].split("</section>")[0].split('<div class="card">')
    assert show_ms(measured.makespan) in cards[1]
    assert show_ms(plan.makespan) in cards[1]


def test_a_loss_that_is_not_a_number_leaves_a_gap_and_is_no_equality() -> None:
    nan = float("nan")
    assert full_report(losses={"a": [1.0, nan], "b": [1.0, nan]}).loss_difference() == ("a", "b", 0.0, 0)
    assert full_report(losses={"a": [1.0, 2.0], "b": [1.0, nan]}).loss_difference() == ("a", "b", float("inf"), 1)
    assert '"values":[1.0,null]' in report_html(full_report(losses={"a": [1.0, nan]}))
