"""Public values show themselves: `repr` on a line, `print` on a screen, a picture in a notebook.

Drawing code is loaded by the first picture only.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

import zerobubble as zb
from tests.pure.test_export_pictures import PASSES
from zerobubble import Costs, Limits, Op, Placement, Timeline, Workload, diff, lower, make, plan, schedule_faults, simulate
from zerobubble.blocks import four_steps, known_block, lifespans
from zerobubble.bounds import lower_bounds
from zerobubble.explain import attribute, gaps
from zerobubble.io import MemoryRow, Report, ThroughputRow
from zerobubble.partition import Layer
from zerobubble.planning import Problem, sensitivity, solve
from zerobubble.recognition import recognize
from zerobubble.schedules import SCHEDULES

LINES = 40

NAMESPACES = [name for name in dir(zb) if isinstance(getattr(zb, name), ModuleType) and name not in ("nn", "hooks")]

SHOWN_IN_FULL = (zb.planning.Plan, zb.explain.Difference, zb.blocks.FoundBlock)
"""`print` of these is the table or the sentences that the command line shows; a `FoundBlock` is a block and its layout."""


TRACES = [Path(__file__).parent / f"traces/zbv-rank{rank}.json.gz" for rank in (0, 1)]


def samples(ranks: int, microbatches: int) -> list[Any]:
    """Values of every public class, of so many ranks and microbatches."""
    schedule = make("zb-v", ranks, microbatches)
    costs = Costs.uniform(2 * ranks, (10, 10.5, 8), 0.2, stages_per_rank=2)
    limits = Limits((2 * ranks * 10**6,) * ranks)
    timeline = simulate(schedule, costs)
    run = replace(timeline, source="measured")
    problem = Problem(schedule.placement, microbatches, costs, limits)
    workload = Workload.uniform(ranks, (10, 10, 8))
    found = plan(workload, microbatches, memory=ranks, seconds=0)
    layers = plan(layers_of(ranks), microbatches, placements=schedule.placement, seconds=0)
    block = known_block("v-zb", ranks)
    steps = four_steps(block, microbatches)
    idle = attribute(schedule, costs)
    reported = diff(schedule, costs, run)
    bounds = lower_bounds(schedule.placement, microbatches, costs, limits)
    sensitive = sensitivity(schedule, costs, samples=2)
    report = Report("a run", [("ranks", str(ranks))], [timeline], [MemoryRow(0, 1)], {"one": [1.0] * 1000}, [ThroughputRow("1f1b", 1.0)])
    illegal = replace(schedule, rows=schedule.rows[::-1])
    nothing = solve(replace(problem, limits=Limits((1,) * ranks)), seconds=0)
    values = [schedule, costs, limits, timeline, problem, workload, found, layers, block, steps, idle, reported, bounds, sensitive, report]
    values += [
        schedule.placement,
        Placement.custom(range(ranks)),
        Op.parse("0F3"),
        lower(schedule),
        zb.lowering.Compiled.from_schedule(schedule),
        illegal,
        nothing,
        run,
    ]
    values += [found.choices[0], found.choices[0].plan, layers.savings[0], layers.cut]
    values += [steps.reordered, block.starts[0][0], bounds.span, idle.ranks[0]]
    values += [
        reported.accounts[0],
        reported.accounts[0].passes,
        reported.drifts[0],
        diff(schedule, Costs.uniform(schedule.num_stages), timeline).cause,
        *gaps(schedule, costs, run)[-1][:1],
        lifespans(block)[0][0],
    ]
    values += [*zb.explain.windows(schedule, costs)[-1][:1]]
    gathered = zb.lowering.plan_gathers(schedule, [10**6] * schedule.num_stages, memory=10**6)[0]
    link = zb.offload.HostLink(1e9, 1e9)
    away = zb.offload.plan_offloads(schedule, costs, Limits((2 * ranks * 10**6 - 10**6,) * ranks), link)[0]
    values += [link, away, zb.offload.Offload(0, 0, 0, 1, 2, 3)]
    away_too = plan(Workload.uniform(2, (10, 10, 8)), 4, 1, host=link, placements="linear", seconds=0)
    values += [away_too, *away_too.savings]
    start = block.starts[0][0]
    values += [zb.blocks.Collision(0, start, start, (0,), 0), zb.blocks.EarlyStart(start, start.op, 2)]
    values += [zb.kinds.traits_of(zb.Kind.F), zb.kinds.traits_of(zb.Kind.R).forward, gathered, gathered.gathers[0]]
    values += [SCHEDULES["zb-v"], recognize(schedule), recognize(illegal), schedule_faults(illegal)[0], *report.memory, *report.throughput]
    (few,) = plan(Workload.uniform(2, (10, 10, 8)), 4, placements="vee", seconds=0, sharded=zb.planning.Sharded(2, 1)).savings
    assert isinstance(few, zb.planning.FewGathers)
    values += [few, few.chosen, few.sharded]
    traced = zb.io.read_trace(TRACES)
    estimate = zb.cost_model.transformer(
        "megatron-175b", gpu="H100", tp=8, pp=ranks, v=2, precision="fp8", layers=[96, *[0] * (2 * ranks - 1)]
    )
    values += [estimate, estimate.step(schedule), estimate.setting.model, estimate.setting.gpu, estimate.efficiency]
    with_experts = zb.cost_model.MODELS["deepseek-v3"]
    values += [with_experts, with_experts.experts, with_experts.latent]
    divided = zb.cost_model.divide("megatron-22b", gpu="A100", gpus=8, batch=ranks, top=2)
    values += [divided, divided.best]
    head = zb.planning.Head((10, 10, 8))
    headed = plan(Workload.uniform(ranks, (10, 10, 8)), microbatches, head=head, placements="vee", seconds=0)
    values += [head, headed, *headed.savings]
    return [*values, layers_of(ranks)[0], traced, traced.clocks[1], zb.simulation.metrics(schedule, costs)]


def layers_of(ranks: int) -> list[Layer]:
    return [Layer(3, 3, 2, 1, 1)] * (4 * ranks)


@pytest.mark.sweep
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (24, 48)])
def test_a_value_is_reported_on_a_line_and_printed_on_a_screen(ranks: int, microbatches: int) -> None:
    for value in samples(ranks, microbatches):
        assert "\n" not in repr(value)
        assert len(repr(value)) <= 260, repr(value)
        if not isinstance(value, SHOWN_IN_FULL):
            assert len(str(value).split("\n")) <= LINES, str(value)


def test_every_public_class_of_values_is_among_the_samples() -> None:
    shown = {type(value) for value in samples(2, 4)}
    spaces = [zb, *(getattr(zb, name) for name in NAMESPACES)]
    public = [getattr(space, name) for space in spaces for name in space.__all__]
    classes = {
        each
        for each in public
        if isinstance(each, type) and not each.__module__.startswith(("zerobubble.replanning", "zerobubble.runtime"))
    }
    values = {each for each in classes if is_dataclass(each) or hasattr(each, "_fields")}
    assert {each.__name__ for each in values - shown} == {"FoundBlock"}


def test_the_small_print_of_values() -> None:
    schedule = make("zb-h1", 2, 2)
    assert repr(schedule) == "<Schedule zb-h1: 2 stages on 2 ranks (linear), 2 microbatches, 12 passes>"
    assert str(schedule).split("\n")[1:] == ["rank 0: 0F0 0F1 0B0 0W0 0B1 0W1", "rank 1: 1F0 1B0 1F1 1B1 1W0 1W1"]
    assert repr(schedule.rows[0][0]) == "Op.parse('0F0')"
    assert repr(Costs.uniform(1, (1, 2, 3))) == "<Costs of 1 stage: F 1 ms, B 2 ms, W 3 ms, messages none>"
    assert repr(Costs.from_ms([1, 2], [1, 1], [1, 1], 0.5)) == "<Costs of 2 stages: F 1 ms to 2 ms, B 1 ms, W 1 ms, messages 0.5 ms>"
    assert repr(Limits((4 * 10**9,) * 8)) == "<Limits of 8 ranks: 4 GB>"
    assert repr(Placement.vee(2)) == "<Placement vee: 4 stages on 2 ranks: 0 1 1 0>"
    assert repr(simulate(schedule, Costs.uniform(2))).startswith("<Timeline zb-h1 (simulated): 2 ranks, 12 spans, makespan 7 ms, bubble ")


def test_notebooks_draw_schedules_timelines_and_plans() -> None:
    schedule = make("zb-v", 2, 4)
    costs = Costs.uniform(4)
    problem = Problem(schedule.placement, 4, costs, Limits((10**7,) * 2))
    for value in (schedule, simulate(schedule, costs), solve(problem, seconds=0)):
        svg = value._repr_svg_()
        passes = ElementTree.fromstring(svg).findall(PASSES)
        assert len(passes) == 48
        html = value._repr_html_()
        assert "<iframe" in html
        assert len(html) < 100_000
        assert "data:image/svg+xml;base64," in html  # what is seen where frames are left out


def test_a_notebook_lists_the_faults_of_a_schedule_that_cannot_run() -> None:
    illegal = replace(make("1f1b", 2, 2), name="<b>", rows=((), ()))
    assert illegal._repr_svg_() is None
    html = illegal._repr_html_()
    assert schedule_faults(illegal)[0].message in html
    assert "<b>" not in html


def test_a_notebook_shows_a_plan_as_a_table_with_its_reasons_and_the_winner() -> None:
    found = plan(Workload.uniform(2, (10, 10, 8)), 4, memory=2, seconds=0)
    html = found._repr_html_()
    page = ElementTree.fromstring(f"<page>{html}</page>")
    assert len(page.findall(".//tbody/tr")) == len(found.choices)
    for choice in found.choices:
        assert any(cell.text == choice.note for cell in page.iter("td"))
    assert page.find(".//img").get("src").startswith("data:image/svg+xml;base64,")


def test_what_cannot_be_drawn_is_reported_in_text() -> None:
    assert Timeline("none", ((), ()))._repr_svg_() is None
    assert make("zb-v", 24, 64)._repr_svg_() is None  # 9,216 passes
    assert Limits((1,))._repr_svg_() is None
    assert Limits((1,))._repr_html_() is None
    nothing = plan(Workload.uniform(2, (10, 10, 8)), 4, memory=0.1, seconds=0)
    assert nothing._repr_svg_() is None
    assert "<img" not in nothing._repr_html_()


def test_drawing_is_loaded_by_the_first_picture() -> None:
    code = "import sys, zerobubble as zb; s = zb.make('zb-v', 2, 4); repr(s), str(s); print('zerobubble.export' in sys.modules);"
    code += "s._repr_svg_(); print('zerobubble.export' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\nTrue\n"
