"""`zerobubble explore` in a real browser: the page queries the package as values change, shows errors next to fields, and keeps links.

Pictures, figures and files are the package's own. Requests are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.browser.accessibility import CONTRAST
from tests.browser.chromium import Browser
from tests.browser.explorer import READY, Page, Server, serving
from tests.thinned import every
from zerobubble import Costs, make, simulate
from zerobubble.blocks import Block, collisions, four_steps, known_block
from zerobubble.cost_model import transformer
from zerobubble.export import from_torch_csv
from zerobubble.export.blocks import layout_figures
from zerobubble.planning import Plan
from zerobubble.simulation import period
from zerobubble.units import show_bytes, show_ms

SAVES = "[...document.querySelectorAll('#explorer .saved button')]"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as started:
        yield started


@pytest.mark.long
def test_picture_and_figures_follow_every_change_and_so_does_the_link(browser: Browser, server: Server) -> None:
    page = Page(browser, server)
    assert page.boxes == 8 * 8 * 3
    for field, value in {"schedule": "interleaved-1f1b", "ranks": "3", "microbatches": "6", "stages": "3", "forward": "12.5"}.items():
        page.put(field, value)
    timeline = simulate(make("interleaved-1f1b", 3, 6, 3), Costs.uniform(9, (12.5, 10, 8), 0.5, stages_per_rank=3))
    assert page.boxes == 9 * 6 * 2
    assert show_ms(timeline.makespan) in page.text(".cards")
    link = page.link
    page.put("ranks", "4")
    again = Page(browser, server, link)
    assert (again.link, again.boxes) == (link, 9 * 6 * 2)
    assert "zerobubble show interleaved-1f1b --ranks 3 --microbatches 6 --stages-per-rank 3 --times 12.5,10,8" in page.text("#line-command")
    found: dict[str, Any] = {}
    exec(page.text("#line-python").replace("print(timeline)", ""), found)
    assert found["timeline"].makespan == timeline.makespan
    assert page.errors == []


@pytest.mark.long
def test_an_invalid_value_is_reported_at_its_field_and_keeps_the_picture(browser: Browser, server: Server) -> None:
    page = Page(browser, server)
    for field, value, sentence in (
        ("microbatches", "many", "'many' is not a whole number"),
        ("ranks", "1000", "1000 is not in 1 to 256"),
        ("forward", "-1", "-1 is not in 0 to"),
        ("slow_link", "1", "give the time of its messages, too"),
    ):
        before = browser.run(f"document.getElementById('q-{field}').value")
        page.put(field, value)
        place = "slow_comm" if field == "slow_link" else field
        assert sentence in page.text(f"#q-{place}-problem")
        assert browser.run(f"document.getElementById('q-{place}').getAttribute('aria-invalid')") == "true"
        assert page.boxes == 8 * 8 * 3
        assert sentence in page.text("#missing")
        assert browser.run(f"{SAVES}.every((e) => e.disabled)"), "nothing but the old picture could be saved"
        page.put(field, before)
        assert not browser.run(f"{SAVES}.some((e) => e.disabled)")
        assert page.text(f"#q-{place}-problem") == ""
    assert page.errors == []


def test_the_first_screen_compares_with_1f1b(browser: Browser, server: Server) -> None:
    page = Page(browser, server, "")
    assert page.boxes == 8 * 8 * 3 + 4 * 8 * 2
    assert "1f1b" in page.text(".cards")
    assert "versus=1f1b" in page.link
    assert page.errors == []


def test_back_undoes_the_change_of_a_field(browser: Browser, server: Server) -> None:
    """Changes of the same field are one step back, however many there were."""
    page = Page(browser, server)
    links = [page.link]
    for field, values in (("ranks", ("5", "6")), ("forward", ("12",)), ("versus", ("1f1b",))):
        for value in values:
            page.put(field, value)
        links.append(page.link)
    where, ranks = "location.hash", "document.getElementById('q-ranks').value"
    for link in links[-2::-1]:
        browser.run("history.back()")
        browser.until(f"{where} === {json.dumps(link)} && {READY}")
    browser.until(f"{ranks} === '4'")
    browser.until(f"document.querySelector('.stage').dataset.boxes === '{4 * 2 * 8 * 3}'")
    browser.run("history.forward()")
    browser.until(f"{where} === {json.dumps(links[1])} && {ranks} === '6'")
    assert page.errors == []


def test_a_wrong_link_is_explained_in_the_place_of_the_picture_and_at_its_fields(browser: Browser, server: Server) -> None:
    page = Page(browser, server, "#link=1&schedule=zb-9&ranks=0")
    assert "0 is not in 1 to 256" in page.text("#missing")
    assert "zb-9" in page.text("#q-schedule-problem")
    assert not browser.run("document.querySelector('.stage')")
    page.put("ranks", "2")
    assert (page.text("#missing"), page.boxes) == ("", 2 * 2 * 8 * 3)
    assert "zb-9" in page.text("#q-schedule-problem")
    page.put("schedule", "1f1b")
    assert page.text("#q-schedule-problem") == ""
    page = Page(browser, server, "#link=1&tab=blocks&ranks=0&microbatches=x")
    assert [field in page.text("#w-wrong") for field in ("ranks (p)", "microbatches (m)")] == [True, True]
    assert page.text("#w-ranks-problem") != ""
    assert page.text("#w-microbatches-problem") != ""


DROP = """(() => { const data = new DataTransfer(); data.items.add(new File([TEXT], NAME));
dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true })); })()"""


def test_a_dropped_file_is_opened_at_the_field_that_fits_it(browser: Browser, server: Server) -> None:
    page = Page(browser, server)
    schedule = make("1f1b", 2, 4)
    costs = Costs.uniform(2)
    fields = {"file": schedule.to_text(), "costs": json.dumps(costs.to_dict()), "run": json.dumps(simulate(schedule, costs).to_dict())}
    for field, text in fields.items():
        browser.run(DROP.replace("TEXT", json.dumps(text)).replace("NAME", json.dumps(f"{field}.json")))
        browser.until(f"!document.getElementById('q-{field}-drop').hidden && {READY}")
        assert page.text(f"#q-{field}-problem") == ""
    assert page.boxes == 2 * (2 * 4 * 2)
    for text, words in (("hello", "zerobubble make"), ("", "is empty")):
        browser.run(DROP.replace("TEXT", json.dumps(text)).replace("NAME", '"picture.png"'))
        browser.until(f"document.getElementById('q-file-problem').innerText.includes({json.dumps(words)})")
    assert page.errors == []


def test_a_message_goes_as_its_field_is_edited_and_a_slow_answer_is_announced(browser: Browser, server: Server) -> None:
    page = Page(browser, server)
    page.put("ranks", "abc")
    assert page.text("#q-ranks-problem") != ""
    browser.run("window.answered = window.fetch; window.fetch = () => new Promise(() => {})")
    browser.run("(() => { const e = document.getElementById('q-ranks'); e.value = '6'; e.dispatchEvent(new Event('input')); })()")
    assert page.text("#q-ranks-problem") == ""
    assert browser.run("document.getElementById('q-ranks').getAttribute('aria-invalid')") == "false"
    browser.until("document.getElementById('computing').checkVisibility()")
    browser.run("window.fetch = window.answered")
    page.put("ranks", "3")
    assert not browser.run("document.getElementById('computing').checkVisibility()")
    assert page.boxes == 3 * 2 * 8 * 3
    assert page.errors == []


@pytest.mark.parametrize("text", every(2, ["", "abc"]))
def test_a_slider_stays_when_its_box_has_no_number(browser: Browser, server: Server, text: str) -> None:
    page = Page(browser, server)
    for field in ("ranks", "stages", "forward", "memory"):
        page.put("schedule", "interleaved-1f1b")
        page.put(field, "3")
        slider = f"document.querySelector('.field.{field} input[type=range]').value"
        assert browser.run(slider) == "3"
        page.put(field, text)
        assert browser.run(slider) == ("2" if (field, text) == ("stages", "") else "3"), field
        page.put(field, "4")


@pytest.mark.long
def test_every_wrong_field_is_explained_at_once(browser: Browser, server: Server) -> None:
    page = Page(browser, server)
    wrong = {"ranks": "1000", "microbatches": "many", "forward": "-1"}
    for field, value in wrong.items():
        page.put(field, value)
    shown = "[...document.querySelectorAll('.field > .problem:not([hidden])')].map((e) => e.id)"
    assert set(browser.run(shown)) == {f"q-{field}-problem" for field in wrong}
    page.put("ranks", "4")
    assert set(browser.run(shown)) == {"q-microbatches-problem", "q-forward-problem"}
    status, text = server.post("timeline", json.dumps(wrong))
    assert status == 422
    assert [fault["field"] for fault in json.loads(text)["faults"]] == list(wrong)


@pytest.mark.long
@pytest.mark.parametrize("width", [1280, 390])
def test_two_schedules_are_drawn_on_one_axis(browser: Browser, server: Server, width: int) -> None:
    page = Page(browser, server, "#link=1&schedule=zb-h1&ranks=4&microbatches=8", width)
    assert browser.run("document.querySelector('.fields').offsetTop <= document.getElementById('viewer').offsetTop")
    alone = page.boxes
    page.put("versus", "1f1b")
    assert page.boxes == alone + 4 * 8 * 2
    assert "versus=1f1b" in page.link
    costs = Costs.uniform(4, (10, 10, 8), 0.5)
    ratio = period(make("1f1b", 4, 8), costs) / period(make("zb-h1", 4, 8), costs)
    assert f"{ratio:.3f}×" in page.text(".cards")
    page.put("versus", "dualpipe")
    page.put("microbatches", "7")
    assert page.boxes == 4 * 7 * 3, "a comparison that is not possible leaves the schedule itself"
    assert page.text("#q-versus-problem") != ""
    assert browser.run("document.getElementById('q-versus').getAttribute('aria-invalid')") == "true"
    assert not browser.run(f"!!document.querySelector('.answer.old') || {SAVES}.some((e) => e.disabled)")
    page.put("microbatches", "8")
    assert page.text("#q-versus-problem") == ""
    assert page.errors == []


@pytest.mark.long
def test_a_model_on_gpus_gives_the_estimated_costs_and_says_what_does_not_fit_it(browser: Browser, server: Server) -> None:
    page = Page(browser, server, "#link=1&schedule=zb-v&ranks=4&microbatches=8&model=llama3-70b&gpu=H100&tp=8")
    found = transformer("llama3-70b", gpu="H100", tp=8, pp=4, v=2)
    step = found.step("zb-v", 8)
    assert f"{step.seconds:.4g} s" in page.text(".cards")
    assert show_bytes(max(step.rank_bytes)) in page.text(".cards")
    assert browser.run("document.querySelectorAll('#assumed li').length") == len(found.assumptions)
    assert browser.run("document.getElementById('q-forward').disabled")
    reported: dict[str, Any] = {}
    exec(page.text("#line-python").replace("print(timeline)", ""), reported)
    assert reported["costs"] == found.costs
    for field, value, sentence in (
        ("tp", "7", "tp=7 does not divide the 64 heads"),
        ("cp", "3", "does not divide the 8192 tokens"),
        ("recompute", "selective", "llama3-70b has fused attention"),
        ("gpu", "A100", ""),
        ("precision", "fp8", "'fp8'"),
        ("ep", "2", "llama3-70b has no experts to divide over ep=2 GPUs"),
        ("gradients", "bf16", ""),
        ("layers", "70, 10", "got 2 with the sum 80"),
        ("layers", "ten", "'ten' are not numbers of layers"),
    ):
        before = browser.run(f"document.getElementById('q-{field}').value")
        page.put(field, value)
        assert sentence in page.text(f"#q-{field}-problem")
        if sentence:
            page.put(field, before)
            assert page.text(f"#q-{field}-problem") == ""
    page.put("tp", "1")
    assert "Does not fit" in page.text(".noted")
    page.put("model", "")
    assert "model=" not in page.link
    assert page.errors == []


@pytest.mark.long
@pytest.mark.parametrize("width", [1280, 390])
def test_an_offered_cut_is_used_and_shortens_the_step(browser: Browser, server: Server, width: int) -> None:
    offered = "document.getElementById('offers').dataset.state === 'ready'"
    page = Page(browser, server, "#link=1&schedule=zb-v&ranks=8&microbatches=24&model=llama3-70b&tp=8", width)
    browser.until(offered)
    assert browser.run("document.querySelectorAll('#offers .offer').length") == 1
    browser.click("#offers button")
    browser.until(f"{READY} && location.hash.includes('layers=') && {offered}")
    layers = [float(count) for count in browser.run("document.getElementById('q-layers').value").split(", ")]
    found = transformer("llama3-70b", gpu="H100", tp=8, pp=8, v=2, layers=layers)
    assert show_ms(period(make("zb-v", 8, 24), found.costs)) in page.text(".cards")
    assert browser.run("document.querySelectorAll('#offers .offer').length") == 0
    page.put("model", "")
    assert page.errors == []


@pytest.mark.long
def test_old_and_foreign_links_open_or_say_why_not(browser: Browser, server: Server) -> None:
    page = Page(browser, server, "#link=1&schedule=1f1b&ranks=2&microbatches=4&color=red")
    assert "color, which this version does not know" in page.text("#notice")
    assert page.boxes == 2 * 4 * 2
    for link in ("#link=9&ranks=2", "#ranks=2"):
        assert Page(browser, server, link).text("#notice") != ""
        assert browser.run("document.getElementById('q-ranks').value") == "4", "the defaults"
    for field in ("schedule", "versus", "model", "gpu"):
        assert "zb-9" in Page(browser, server, f"#link=1&{field}=zb-9").text("#notice")
    assert "costs is damaged" in Page(browser, server, "#link=1&costs=***").text("#notice")
    assert page.errors == []


@pytest.mark.parametrize("width", [1280, 390])
def test_every_field_has_a_label_and_is_reached_by_keys_at_both_widths(browser: Browser, server: Server, width: int) -> None:
    page = Page(browser, server, "", width)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
    names = "[...document.querySelectorAll('input, select, textarea, button')].filter((e) => !e.disabled && e.checkVisibility())"
    unnamed = (
        f"{names}.filter((e) => e.tabIndex < 0 || !((e.labels && e.labels[0]) || e.getAttribute('aria-label') || e.textContent.trim()))"
    )
    assert browser.run(f"{unnamed}.map((e) => e.id)") == []
    assert browser.run(CONTRAST) == []
    browser.click("#dark")
    assert browser.run(CONTRAST) == []
    assert page.errors == []


def test_the_legend_has_the_shades_drawn(browser: Browser, server: Server) -> None:
    page = Page(browser, server, "#link=1&schedule=zb-v&versus=1f1b")
    kinds = (
        "[...document.querySelectorAll('.legend li:has(b)')].map((e) => [e.querySelector('b').textContent, e.querySelectorAll('i').length])"
    )
    assert dict(browser.run(kinds)) == {"F": 2, "B": 2, "W": 2, "BW": 1}
    assert page.errors == []


CUT = "[...document.querySelectorAll('{}')].filter((e) => e.scrollWidth > e.clientWidth).length"


@pytest.mark.parametrize("block", ["v-half", "gpipe"])
def test_figures_fit_into_a_narrow_window_and_hide_what_is_below_them(browser: Browser, server: Server, block: str) -> None:
    page = Page(browser, server, "#link=1&schedule=gpipe&versus=1f1b", 390)
    assert browser.run("document.querySelectorAll('.card').length") == 4
    assert browser.run(CUT.format(".cards, .card")) == 0
    page.put("ranks", "many")
    opacity = "Number(getComputedStyle(document.querySelector('{}')).opacity)"
    opacities = [browser.run(opacity.format(part)) for part in (".cards", ".card", ".card .value")]
    assert opacities[:2] == [1, 1]
    assert opacities[2] < 1
    page = Page(browser, server, f"#link=1&tab=blocks&block={block}", 390)
    assert browser.run("document.querySelectorAll('#w-steps table').length") == 2
    assert browser.run(CUT.format("#w-steps")) == 0
    assert page.errors == []


def test_forms_hold_what_is_shown(server: Server) -> None:
    question = json.dumps({"schedule": "zb-v", "slow_link": 1, "slow_comm": 9})
    assert from_torch_csv(server.post("saved/torch-csv", question)[1]).rows == make("zb-v", 4, 8).rows
    costs = server.post("saved/costs", question)[1]
    status, text = server.post("timeline", json.dumps({"costs": costs}))
    assert (status, json.loads(text)["figures"]) == (200, json.loads(server.post("timeline", question)[1])["figures"])
    assert server.post("saved/svg", question)[1].startswith("<svg")
    drawn = [server.post(f"saved/{form}", question)[1] for form in ("svg", "svg-memory")]
    assert len(drawn[0]) < len(drawn[1]), "memory is drawn on request only"
    assert server.post("saved/gif", question)[0] == 422


def test_a_limit_that_is_not_kept_gives_no_bound(server: Server) -> None:
    free, tight = (json.loads(server.post("timeline", json.dumps(each))[1]) for each in ({}, {"memory": 2}))
    assert tight["figures"][0]["detail"] == free["figures"][0]["detail"]
    assert (free["misfits"], len(tight["misfits"])) == ([], 1)
    assert [figure["label"] for figure in tight["figures"] if figure["exceeds"]] == ["peak memory"]
    assert not any(figure["exceeds"] for figure in free["figures"])


def test_the_server_refuses_with_a_sentence(server: Server) -> None:
    assert server.refuses({"schedule": "zb-z"})[:2] == (422, "schedule")
    assert server.refuses({"schedule": "1f1b", "ranks": 256, "microbatches": 4096})[:2] == (422, "microbatches")
    assert server.refuses({"file": "hello"})[:2] == (422, "file")
    assert "'forward'" in server.refuses({"costs": '{"format": "zerobubble costs 1"}'})[2]
    assert server.refuses([1])[0] == 422
    status, text = server.post("timeline", '"' + "x" * 5_000_000 + '"')
    assert (status, "more than" in json.loads(text)["error"]) == (413, True)
    assert server.post("timeline", "{")[0] == 400
    assert server.post("timeline", "{}", host="evil.example")[0] == 400


def searched(server: Server, question: dict[str, Any], stop_at: str = "") -> Iterator[dict[str, Any]]:
    """The news of a search, which is stopped at the first of the kind `stop_at`."""
    connection = HTTPConnection(server.host, server.port, timeout=300)
    connection.request("POST", "/api/search", json.dumps(question), {"Content-Type": "application/json"})
    number, stopped = 0, False
    for line in connection.getresponse():
        if not line.startswith(b"data: "):
            continue
        news = json.loads(line[6:])
        number = news.get("number", number)
        if news["event"] == stop_at and not stopped:
            stopped = json.loads(server.post(f"search/{number}/stop", "{}")[1])["stopped"]
        yield news
    connection.close()


@pytest.mark.long
def test_a_search_shows_its_progress_is_stopped_with_its_best_and_its_plan_opens(server: Server) -> None:
    hard = {
        "ranks": 8,
        "microbatches": 24,
        "forward": 18.522,
        "backward": 18.086,
        "weight": 9.337,
        "comm": 0.601,
        "memory": 5,
        "seconds": 300,
    }
    *_, found = searched(server, hard, stop_at="progress")
    assert (found["event"], found["interrupted"]) == ("found", True)
    assert not any(isinstance(value, str) and value.startswith("{") for value in found.values()), "plans are in their rows only"
    status, text = server.post("timeline", json.dumps({"file": found["rows"][0]["plan"], "file_name": "plan.json"}))
    assert (status, json.loads(text)["ranks"]) == (200, 8)
    *_, late = searched(server, hard | {"seconds": 0.01})
    assert (late["event"], late["searched"]) == ("found", False)
    *_, refused = searched(server, {"ranks": 2, "microbatches": 4, "memory": 0.5, "evaluations": 1})
    assert refused["event"] == "refused"
    assert server.post("search", json.dumps({"seconds": 1e9}))[0] == 422


@pytest.mark.long
def test_a_front_has_a_plan_for_each_limit(server: Server) -> None:
    *news, found = searched(server, {"ranks": 2, "microbatches": 4, "evaluations": 20, "limits": [1, 2]})
    (first,) = [each for each in news if each["event"] == "points"]
    assert (first["done"], first["total"]) == (1, 2)
    assert [point["memory"] for point in first["front"]["points"]] == [1]
    points = found["front"]["points"]
    assert [point["memory"] for point in points] == [1, 2]
    best = [point["answers"][0] for point in points]
    assert best[0]["bubble"] >= best[1]["bubble"]
    plans = [Plan.from_dict(json.loads(found["plans"][answer["opens"]])) for answer in best]
    assert [plan.bubble for plan in plans] == [answer["bubble"] for answer in best]


@pytest.mark.long
def test_a_search_for_a_model_has_its_costs_and_what_it_leaves_of_the_memory(server: Server) -> None:
    shape = {"schedule": "zb-v", "ranks": 4, "microbatches": 8, "model": "llama3-70b", "tp": 8, "sequence_parallel": 0, "overlap_tp": 1}
    *_, found = searched(server, {**shape, "evaluations": 20})
    estimate = transformer("llama3-70b", gpu="H100", tp=8, pp=4, v=2, sequence_parallel=False, overlap_tp=True)
    problem = Plan.from_dict(json.loads(found["rows"][0]["plan"])).problem
    assert (problem.costs, problem.placement.name, problem.num_microbatches) == (estimate.costs, "vee", 8)
    assert problem.limits == estimate.limits(problem.placement)
    *_, refused = searched(server, {**shape, "tp": 1, "evaluations": 20})
    assert refused["event"] == "refused"
    costs = server.post("saved/costs", json.dumps(shape))[1]
    *_, again = searched(server, {"schedule": "1f1b", "ranks": 8, "microbatches": 8, "costs": costs, "evaluations": 20, "limits": [8]})
    assert Plan.from_dict(json.loads(again["plans"][0])).problem.costs == estimate.costs


def pressed(browser: Browser, op: str, key: str, shift: bool = False) -> None:
    """Press a key on a pass of the block, and wait for the answer."""
    browser.run(f"document.querySelector('[data-op=\"{op}\"]').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.send("Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 if shift else 0)
    browser.until("document.documentElement.dataset.state === 'ready'")


BLOCKS = "#link=1&tab=blocks&block=v-half&ranks=4&microbatches=8"


@pytest.mark.long
def test_a_pass_is_moved_by_keys_and_collisions_and_steps_follow_as_the_package_has_them(browser: Browser, server: Server) -> None:
    page = Page(browser, server, BLOCKS)
    block = known_block("v-half", 4)
    assert page.boxes == 3 * 8 * 8 * 3
    assert page.link == f"{BLOCKS}&reorder_steady=0"
    pressed(browser, "7B0", "ArrowRight")
    moved = Block.from_text(block.to_text().replace("7B0@14", "7B0@15"))
    (collision,) = collisions(moved)
    assert (str(collision.first), str(collision.second)) == ("7B0@15", "7W0@15")
    assert "7B0@15 and 7W0@15 collide" in page.text("#w-wrong")
    assert "7W0 starts in slot 15" in page.text("#w-wrong")
    assert browser.run("document.activeElement.dataset.op") == "7B0"
    assert browser.run("document.querySelectorAll('.block-pass.wrong').length") == 2
    assert Page(browser, server, page.link).text("#w-wrong").startswith("on rank 0 7B0@15")
    pressed(browser, "7B0", "ArrowLeft")
    pressed(browser, "0W0", "ArrowRight", shift=True)
    held = Block.from_text(block.to_text().replace("0W0@29", "0W0@35"))
    steps = four_steps(held, 8)
    assert page.text("#w-wrong") == ""
    found = page.text("#w-steps")
    for layout in (steps.repeated, steps.squeezed, steps.reordered):
        assert "\t".join(layout_figures(layout)) in found
    assert "zerobubble block v-half.block.txt --microbatches 8" in page.text("#block-line-command")
    status, text = server.post("workshop/saved/text", json.dumps({"text": held.to_text(), "microbatches": 8}))
    assert (status, text) == (200, steps.reordered.schedule.to_text())
    browser.click("#w-reset")
    browser.until("document.documentElement.dataset.state === 'ready'")
    assert page.link == f"{BLOCKS}&reorder_steady=0"
    assert page.errors == []


def test_a_pass_is_dragged_by_the_mouse_and_its_schedule_opens_among_the_others(browser: Browser, server: Server) -> None:
    page = Page(browser, server, "#link=1&tab=blocks&block=1f1b&ranks=3&microbatches=5")
    browser.run("document.querySelector('#block-editor').scrollIntoView({ block: 'center' })")
    rect = "document.querySelector('[data-op=\"0BW0\"] rect').getBoundingClientRect()"
    x, y, width = browser.run(f"(() => {{ const b = {rect}; return [b.left + 5, b.top + 9, b.width]; }})()")
    browser.drag((x, y), (x + 1.5 * (width + 1), y))
    browser.until("document.documentElement.dataset.state === 'ready'")
    assert "0BW0@10" in browser.run("document.getElementById('w-text').value")
    browser.click("#w-open")
    browser.until("document.documentElement.dataset.state === 'ready' && !!document.querySelector('#viewer .stage')")
    assert page.boxes == 3 * 5 * 2
    assert "1f1b.txt" in page.text("#q-file-name")
    assert browser.run("document.querySelector('#block-viewer').children.length") == 0
    assert page.errors == []


@pytest.mark.long
def test_a_pass_stays_under_the_pointer_until_it_is_dropped_or_escape_returns_it(browser: Browser, server: Server) -> None:
    page = Page(browser, server, BLOCKS)
    browser.run("document.querySelector('#block-editor').scrollIntoView({ block: 'center' })")
    rect = (
        "(() => { const b = document.querySelector('[data-op=\"0W0\"] rect').getBoundingClientRect(); return [b.left, b.top, b.width]; })()"
    )
    left, top, width = browser.run(rect)
    slot, x, y = width + 1, left + 4, top + 9
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    for slots in range(1, 13):  # to the right of the picture, which grows meanwhile
        browser.mouse("mouseMoved", x + slots * slot, y, button="left", buttons=1)
    browser.settle()
    browser.until(READY)
    assert browser.run(rect)[0] == pytest.approx(left + 12 * slot, abs=1)
    browser.key("Escape")
    browser.mouse("mouseReleased", x + 12 * slot, y, button="left", clickCount=1)
    browser.until(READY)
    assert browser.run(rect) == pytest.approx([left, top, width], abs=1)
    assert page.errors == []


@pytest.mark.long
def test_a_block_that_cannot_be_used_is_refused_by_its_field(browser: Browser, server: Server) -> None:
    page = Page(browser, server, BLOCKS)
    for name, value, sentence in (
        ("text", "zerobubble block 1\nname x", "the header line 'interval' is missing"),
        ("memory", "2", "more than the limit of 2"),
        ("microbatches", "100000", "100000 is not in 1 to 1,024"),
        ("ranks", "0", "0 is not in 1 to 32"),
    ):
        page.put(name, value, "w")
        assert sentence in page.text(f"#w-{name}-problem")
        assert page.boxes == 3 * 8 * 8 * 3
        browser.click("#w-reset")
        page.put("memory", "", "w")
        page.put("microbatches", "8", "w")
    assert page.errors == []
    wide = known_block("1f1b", 2).to_text().replace("interval 3", "interval 999999")
    status, found = server.post("workshop", json.dumps({"text": wide, "microbatches": 9}))
    assert (status, json.loads(found)["field"]) == (422, "microbatches")
    assert server.post("workshop/saved/pdf", "{}")[0] == 422
