"""Offload to host memory: checked, simulated with a copy lane, chosen within limits, and compared with brute force.

Copies run when a slow implementation runs them. Brute force finds no choice that moves fewer bytes than the bound.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

import zerobubble as zb
from tests.refusals import raises, states
from zerobubble.cli import main
from zerobubble.costs import FULL
from zerobubble.errors import ParseError
from zerobubble.export.perfetto import perfetto_json
from zerobubble.graph import Graph, play
from zerobubble.lane import Lane, LaneWork, steps_of_ranks
from zerobubble.offload import HostLink, Offload, RankOffloads, offload_faults, plan_offloads, play_offloads
from zerobubble.offload.copies import OffloadPlayer, copy_works
from zerobubble.offload.offloads import offloads_from_list, offloads_to_list
from zerobubble.simulation import pass_times
from zerobubble.timeline import Awaited, Copying
from zerobubble.verify import checked

MB = 10**6
NAMES = ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "dualpipe-v")


def costs_of(schedule: zb.Schedule, draw: random.Random | None = None) -> zb.Costs:
    """Costs of 1 ms and 1 MB, or random ones whose stages differ."""
    stages = schedule.num_stages
    if draw is None:
        return zb.Costs.uniform(stages)
    times = [[draw.randint(2, 9) / 2 for _ in range(stages)] for _ in range(3)]
    held = [draw.randint(1, 6) * MB for _ in range(stages)]
    return zb.Costs.from_ms(*times, draw.choice((0.0, 0.25)), held_after_f=held, held_after_b=[size // 2 for size in held])


def every_offload(schedule: zb.Schedule, rank: int) -> Iterator[tuple[int, int, int, int]]:
    """(stage, microbatch, made, needed) of all that waits on a rank."""
    steps = schedule.steps[rank]
    where = {op: number for number, step in enumerate(steps) for op in step}
    for op, made in where.items():
        if op.kind == zb.Kind.F:
            users = [number for other, number in where.items() if other.kind in ("B", "BW") and other[1:] == op[1:]]
            yield op.stage, op.microbatch, made, users[0]


def random_offloads(schedule: zb.Schedule, draw: random.Random) -> list[RankOffloads]:
    """Any legal offloads, the figures of which nobody has filled in."""
    plans = []
    for rank in range(schedule.num_ranks):
        chosen = []
        for stage, microbatch, made, needed in every_offload(schedule, rank):
            if needed - made > 1 and draw.random() < 0.6:
                freed = draw.randint(made + 1, needed - 1)
                chosen.append(Offload(stage, microbatch, made, freed, draw.randint(freed + 1, needed), needed))
        plans.append(RankOffloads(tuple(chosen), 0, 0, 0, 0))
    return plans


def slowly(schedule: zb.Schedule, costs: zb.Costs, plans: Sequence[RankOffloads], link: HostLink) -> dict[zb.Op, tuple[int, int]]:
    """When each pass begins and ends, by trying every rank's next step and every lane's next copy again and again."""
    ends: dict[object, int] = {}
    times: dict[zb.Op, tuple[int, int]] = {}
    plain = zb.simulate(schedule, costs)
    message = {}  # what each pass waits for on another rank, from the rules as the text of F and B says them
    ops = [span.op for _, span in plain.spans()]
    for _, span in plain.spans():
        kind, stage, microbatch = span.op
        last = schedule.num_stages - 1
        if kind == "F" and stage:
            message[span.op] = [zb.Op(zb.Kind.F, stage - 1, microbatch)]
        if kind in ("B", "BW") and stage < last:
            above = next(other for other in ops if other.kind in ("B", "BW") and other[1:] == (stage + 1, microbatch))
            message[span.op] = [above]
    queues = []
    for plan in plans:
        out = [((one.made + 1, one.freed, 0), "out", one) for one in plan.offloads]
        back = [((one.back, one.needed, 1), "back", one) for one in plan.offloads]
        queues.append([(kind, one) for key, kind, one in sorted(out + back, key=lambda item: (item[0], item[2][:2]))])
    heads, lanes, free = [0] * schedule.num_ranks, [0] * schedule.num_ranks, [0] * schedule.num_ranks
    step_end: list[list[int]] = [[] for _ in plans]
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(schedule.steps):
            queue, at = queues[rank], heads[rank]
            while queue:
                kind, one = queue[0]
                begins = one.made + 1 if kind == "out" else one.back
                if begins > at:
                    break
                size = costs.held(zb.kinds.ValueKind.SAVED, one.stage, one.microbatch)
                begin = max(lanes[rank], step_end[rank][begins - 1])
                lanes[rank] = begin + link.time(size, Copying.TO_HOST if kind == "out" else Copying.FROM_HOST)
                ends[rank, kind, one] = lanes[rank]
                queue.pop(0)
            if at == len(steps):
                continue
            step = steps[at]
            needs = [need for op in step for need in message.get(op, [])]
            if any(need not in times for need in needs):
                continue
            place = {op: r for r, row in enumerate(schedule.rows) for op in row}
            arrivals = [times[need][1] + costs.message_time(need.kind, need.stage) * (place[need] != rank) for need in needs]
            copies = [end for (r, kind, one), end in ends.items() if r == rank and at == (one.freed if kind == "out" else one.needed)]
            begin = max([free[rank], *arrivals, *copies])
            free[rank] = begin + costs.step_time(step)
            step_end[rank].append(free[rank])
            times |= dict.fromkeys(step, (begin, free[rank]))
            heads[rank] += 1
            moved = True
    return times


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", NAMES)
def test_copies_are_where_a_slow_reading_puts_them(name: str, seed: int) -> None:
    draw = random.Random(f"{name} {seed}")
    schedule = zb.make(name, 2 if name != "zb-v" else 3, 6)
    costs = costs_of(schedule, draw)
    plans = random_offloads(schedule, draw)
    link = HostLink(draw.choice((5e8, 2e9)), draw.choice((1e9, 4e9)), draw.choice((0, 100_000)))
    assert not offload_faults(schedule, costs, plans)
    timeline = play_offloads(schedule, costs, plans, link)
    assert {span.op: (span.start, span.end) for _, span in timeline.spans()} == slowly(schedule, costs, plans, link)
    assert zb.Timeline.from_dict(timeline.to_dict()) == timeline


@pytest.mark.parametrize("name", NAMES)
def test_no_order_of_copies_that_may_begin_together_is_quicker(name: str) -> None:
    """Lanes with any other order of the copies that may begin before the same step are not quicker, and some are slower."""
    draw = random.Random(name)
    schedule = zb.make(name, 2, 6)
    slower = 0
    for _ in range(20):
        costs, plans = costs_of(schedule, draw), random_offloads(schedule, draw)
        link = HostLink(draw.choice((5e8, 2e9)), draw.choice((1e9, 4e9)))
        graph, order = checked(schedule)
        lanes = copy_works(schedule, costs, plans, link)
        shuffled = [sorted(works, key=lambda work: (work.earliest, draw.random())) for works in lanes]
        ours, others = (ends_with(graph, order, costs, works) for works in (lanes, shuffled))
        assert ours == ends_with(graph, order, costs, [sorted(works) for works in lanes])
        assert all(mine <= other for mine, other in zip(ours, others, strict=True))
        slower += ours != others
    assert slower


def ends_with(graph: Graph, order: Sequence[int], costs: zb.Costs, works: Sequence[Sequence[LaneWork]]) -> list[int]:
    """When each pass ends if the lanes of the ranks run `works`."""
    lanes = [Lane(row, steps) for row, steps in zip(works, steps_of_ranks(graph), strict=True)]
    return play(graph, order, *pass_times(graph, costs), earliest=lambda number, end: lanes[graph.rank[number]].ready(number, end)).end


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", NAMES)
def test_memory_on_the_device_is_what_has_not_gone(name: str, seed: int) -> None:
    """At any time the device holds what passes left, without what is away; the peak is that of the order alone."""
    draw = random.Random(f"memory {name} {seed}")
    schedule = zb.make(name, 2, 6)
    costs = costs_of(schedule, draw)
    plans = random_offloads(schedule, draw)
    link = HostLink(draw.choice((5e8, 2e9)), 1e9)
    timeline = play_offloads(schedule, costs, plans, link)
    for rank, (plan, row) in enumerate(zip(plans, timeline.rows, strict=True)):
        held = [now for _, now in timeline.memory[rank]]
        assert [time for time, _ in timeline.memory[rank]] == sorted(time for time, _ in timeline.memory[rank])
        assert held[0] == held[-1] == 0 or schedule.is_forward_only
        steps = schedule.steps[rank]
        most, before = 0, 0
        for number, step in enumerate(steps):
            there_not = [one for one in plan.offloads if one.freed <= number < one.back]
            away = sum(costs.held(zb.kinds.ValueKind.SAVED, one.stage, one.microbatch) for one in there_not)
            most = max(most, before - away)
            for op in step:
                before += costs.memory_change(op.kind, op.stage)
                most = max(most, before - away)
        assert max(held) == most
        waiting = {span.op for span in row if span.why is not None and span.why.cause is Awaited.COPY}
        needed = {number for one in plan.offloads for number in (one.freed, one.needed)}
        assert waiting <= {op for number in needed for op in steps[number]}


def test_of_two_overlapped_passes_the_first_waits_for_the_copy() -> None:
    """The second begins with the first, whatever that waits for."""
    schedule, costs = zb.make("dualpipe-v", 2, 4), zb.Costs.uniform(4, stages_per_rank=2)
    link = HostLink(to_host=1e9, from_host=1e9)
    limits = zb.Limits((zb.simulate(schedule, costs).peak_bytes // 2,) * 2)
    timeline = play_offloads(schedule, costs, plan_offloads(schedule, costs, limits, link), link)
    waiting = {str(span.op) for _, span in timeline.spans() if span.why is not None and span.why.cause is Awaited.COPY}
    overlapped = {str(first): str(second) for first, second in schedule.overlaps}
    assert waiting & overlapped.keys() == {"1F3", "2F3"}
    assert waiting.isdisjoint(overlapped.values())


def test_what_cannot_be_played_is_reported_with_all_its_faults() -> None:
    schedule, costs = zb.make("1f1b", 2, 4), zb.Costs.uniform(2)
    good = Offload(0, 1, made=1, freed=2, back=4, needed=4)
    nothing = RankOffloads((), 0, 0, 0, 0)

    def faults_of(*offloads: Offload) -> str:
        return "; ".join(map(str, offload_faults(schedule, costs, [RankOffloads(offloads, 0, 0, 0, 0), nothing])))

    assert faults_of(good) == ""
    states(faults_of(good, good), "rank 0", "stage 0", "microbatch 1", 2)
    states(faults_of(good._replace(microbatch=9)), "nothing", "rank")
    states(faults_of(good._replace(stage=1)), "nothing", "rank")
    states(faults_of(good._replace(made=0)), "0F1", "step 1", "made=1")
    states(faults_of(good._replace(needed=5)), "0BW1", "step 4", "needed=4")
    wrong = faults_of(good._replace(freed=1), good._replace(microbatch=0, made=0, freed=2, back=3, needed=2))
    states(wrong, "freed", "back", 1, 4)
    states(wrong, "freed", "back", 0, 2)
    with raises(zb.InputError, "2 ranks", "offloads", 1):
        offload_faults(schedule, costs, [nothing])
    with raises(zb.InputError, "offloads", "cannot", "run"):
        play_offloads(schedule, costs, [RankOffloads((good._replace(freed=1),), 0, 0, 0, 0), nothing], HostLink(1e9, 1e9))
    small = zb.Limits((MB // 2, MB))
    (fault,) = offload_faults(schedule, costs, [nothing, nothing], small)
    states(str(fault), "rank 0", 2000000, 1500000, 500000)


def test_what_is_computed_again_is_not_moved() -> None:
    schedule = zb.schedules.with_recompute(zb.make("1f1b", 2, 4), stages=[0])
    costs = zb.Costs.uniform(2).with_recompute(FULL)
    plans = [RankOffloads((Offload(0, 1, 1, 2, 4, 5),), 0, 0, 0, 0), RankOffloads((), 0, 0, 0, 0)]
    states(str(offload_faults(schedule, costs, plans)[0]), "offload", "recomputed")
    assert all(not rank.offloads for rank in plan_offloads(schedule, costs, zb.Limits((10 * MB,) * 2), HostLink(1e9, 1e9)))


@pytest.mark.parametrize("wrong", [0, -1, 1e16, float("nan"), "fast"])
def test_a_link_that_cannot_be_is_refused(wrong: object) -> None:
    with raises(zb.InputError, "from", "host", got=wrong):
        HostLink(1e9, wrong)  # type: ignore[arg-type]
    with raises(zb.InputError, "latency", got=-1):
        HostLink(1e9, 1e9, -1)


def all_away(schedule: zb.Schedule, costs: zb.Costs, rank: int) -> int:
    """What a rank holds at most where all is on the host that waits, as long as it waits."""
    longest = [Offload(s, j, made, made + 1, needed, needed) for s, j, made, needed in every_offload(schedule, rank) if needed > made + 1]
    plans = [RankOffloads(tuple(longest) if r == rank else (), 0, 0, 0, 0) for r in range(schedule.num_ranks)]
    return play_offloads(schedule, costs, plans, HostLink(1e9, 1e9)).ranks[rank].peak_bytes or 0


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_keeps_every_rank_within_its_limit(name: str) -> None:
    for seed in range(3):
        draw = random.Random(f"plan {name} {seed}")
        schedule = zb.make(name, 4, 8)
        costs = costs_of(schedule, draw if seed else None)
        peaks = zb.simulation.peak_memory(schedule, costs)
        least = [all_away(schedule, costs, rank) for rank in range(schedule.num_ranks)]
        room = [draw.choice((0.0, 0.3, 0.6, 1.0)) for _ in peaks]
        limits = zb.Limits(tuple(low + round(share * (peak - low)) for low, peak, share in zip(least, peaks, room, strict=True)))
        plans = plan_offloads(schedule, costs, limits, HostLink(1e9, 2e9), evaluations=30)
        assert not offload_faults(schedule, costs, plans, limits)
        timeline = play_offloads(schedule, costs, plans, HostLink(1e9, 2e9))
        for rank, (plan, peak, limit) in enumerate(zip(plans, peaks, limits.memory, strict=True)):
            assert timeline.ranks[rank].peak_bytes == plan.peak_bytes <= limit
            assert plan.bound <= plan.bytes
            assert bool(plan.offloads) == (peak > limit)
        assert timeline.makespan >= zb.simulate(schedule, costs).makespan


def choices(schedule: zb.Schedule, rank: int) -> Iterator[tuple[Offload, ...]]:
    """All that a rank could move, in all ways."""
    ways = []
    for stage, microbatch, made, needed in every_offload(schedule, rank):
        windows = [(freed, back) for freed in range(made + 1, needed) for back in range(freed + 1, needed + 1)]
        ways.append([None, *(Offload(stage, microbatch, made, freed, back, needed) for freed, back in windows)])
    for chosen in product(*ways):
        yield tuple(one for one in chosen if one is not None)


CASES = [("1f1b", 2, 4, 0.5), ("1f1b", 2, 4, 2.0), ("1f1b", 3, 3, 1.0), ("gpipe", 2, 3, 0.5), ("zb-h1", 2, 4, 1.0)]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "rate"), CASES)
def test_small_plans_against_every_choice(name: str, ranks: int, microbatches: int, rate: float) -> None:
    """The bound is the fewest bytes of all choices on the rank, and no choice there is more than 6 % quicker than the plan."""
    schedule = zb.make(name, ranks, microbatches)
    costs, link = zb.Costs.uniform(schedule.num_stages), HostLink(rate * 1e9, rate * 1e9)
    peaks = zb.simulation.peak_memory(schedule, costs)
    limits = zb.Limits((peaks[0] - MB, *peaks[1:]))
    plans = plan_offloads(schedule, costs, limits, link)
    found = play_offloads(schedule, costs, plans, link).makespan
    nothing = RankOffloads((), 0, 0, 0, 0)
    fewest, quickest = 10**18, 10**18
    for offloads in choices(schedule, 0):
        given = [RankOffloads(offloads, 0, 0, 0, 0), *[nothing] * (ranks - 1)]
        if not offload_faults(schedule, costs, given, limits):
            fewest = min(fewest, len(offloads) * MB)
            quickest = min(quickest, play_offloads(schedule, costs, given, link).makespan)
    assert plans[0].bound == fewest
    assert quickest <= found <= 1.06 * quickest


def test_what_stays_on_the_device_is_not_counted_as_moved() -> None:
    schedule = zb.make("1f1b", 2, 6)
    costs = zb.Costs.uniform(2).with_columns(offloadable=[MB // 2, MB // 2])
    limits = zb.Limits((3 * MB // 2, MB))
    plans = plan_offloads(schedule, costs, limits, HostLink(4e9, 4e9))
    assert plans[0].bytes == len(plans[0].offloads) * MB // 2
    assert plans[0].peak_bytes == 3 * MB // 2
    with raises(zb.InputError, "rank 0", "1.5 MB", "0F1", "1.4 MB"):
        plan_offloads(schedule, costs, zb.Limits((1_400_000, MB)), HostLink(4e9, 4e9))
    unequal = replace(costs, shares=(1, 2, 1, 2, 1, 2))
    more = plan_offloads(schedule, unequal, zb.Limits((5 * MB // 2, 2 * MB)), HostLink(4e9, 4e9))
    assert not offload_faults(schedule, unequal, more, zb.Limits((5 * MB // 2, 2 * MB)))


PAGE = (Path(__file__).parents[2] / "docs/offload.md").read_text(encoding="utf-8")


def test_the_program_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for program in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        if "torchrun" not in program:  # tests/procs/test_offload_runs.py has ranks for it
            exec(program, {})
    states(capsys.readouterr().out, "35 ms")


def test_the_command_of_the_page_draws_its_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = re.findall(r"^    zerobubble (show .*)$", PAGE, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, shlex.split(command))
    assert done.exit_code == 0, done.output
    picture = (Path(__file__).parents[2] / "docs/offload.svg").read_text(encoding="utf-8")
    assert (tmp_path / "offload.svg").read_text(encoding="utf-8") == picture
    states(picture, "F", "stage 0", "microbatch 1")


SHOW = ("show", "1f1b", "--ranks", "4", "--microbatches", "8", "--width", "90")


def test_show_shows_copies_in_text_and_json() -> None:
    text = CliRunner().invoke(main, [*SHOW, "--memory", "2", "--offload", "0.5"]).output
    states(text, "rank 0", 5, 2)
    states(text, "rank 3", "offload")
    states(text, "35 ms", "6.1", "33 ms")
    lanes = [line for line in text.splitlines() if line.startswith("       ") and set(line.strip()) == {"·", ">", "<"}]
    assert len(lanes) == 2
    assert {len(line) for line in lanes} == {90}
    data = json.loads(CliRunner().invoke(main, [*SHOW, "--memory", "2", "--offload", "0.5,1", "--json"]).output)["offload"]
    assert data["makespan_without"] == 33
    first = data["ranks"][0]
    assert first["bytes"] == first["bound"] == 5 * MB
    assert {copy["copying"]: copy["end"] - copy["start"] for copy in first["copies"]} == {"to host": 500_000, "from host": 1_000_000}
    assert len(first["copies"]) == 2 * len(first["offloads"]) == 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--offload", "1"), "--offload needs --memory"),
        (("--memory", "2"), "--memory needs --offload"),
        (("--memory", "2", "--offload", "fast"), "'fast' is neither bytes per second with a unit"),
        (("--memory", "2", "--offload", "0"), "'0' is neither"),
        (("--memory", "2", "--offload", "1,2,3"), "has 3 rates; give one, or one to the host and one back"),
        (("--memory", "2", "--offload", "25GB"), "--offload in bytes per second needs costs in bytes"),
        (("--memory", "2GB", "--offload", "1"), "--memory in bytes needs costs in bytes"),
        (("--memory", "0.5", "--offload", "1"), "even with everything offloaded, more than its limit of"),
        (("--memory", "2", "--offload", "1", "--weights", "1GB"), "gathers and offload cannot be simulated together"),
    ],
)
def test_wrong_offloads_are_refused(words: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(main, [*SHOW, *words])
    assert done.exit_code != 0
    assert message in " ".join(done.output.split()), done.output


def test_copies_are_in_the_trace_for_perfetto() -> None:
    schedule, costs, link = zb.make("1f1b", 2, 4), zb.Costs.uniform(2), HostLink(1e9, 1e9)
    plans = plan_offloads(schedule, costs, zb.Limits((MB, MB)), link)
    events = json.loads(perfetto_json(play_offloads(schedule, costs, plans, link)))["traceEvents"]
    copies = [event for event in events if event.get("cat") == "copy"]
    assert len(copies) == 2 * sum(len(plan.offloads) for plan in plans)
    assert {event["dur"] for event in copies} == {1000.0}


def test_the_figures_of_the_page_are_those_of_the_benchmark() -> None:
    results = json.loads((Path(__file__).parents[2] / "benchmarks/offload/results.json").read_text(encoding="utf-8"))
    half = results["half"]
    for row in half["offloaded"]:
        peak, cells = row["peak_microbatches"], " | ".join(f"+{link['longer']:.1f} %" for link in row["links"])
        assert f"| `{row['schedule']}` | {peak:g}, {peak / 2:g} | {row['makespan_ms']:g} | {cells} |" in PAGE
        assert all(link["must"] <= link["moved"] for link in row["links"])
    assert {row["schedule"]: row["makespan_ms"] for row in half["within_half"]}["v-min"] == 855
    exact = results["exact"]
    assert exact["optimal"] == exact["of"] == exact["bounds_met"] == 40
    assert max(abs(cell["off"]) for cell in results["k"]["cells"] if cell["length"] == 4096) <= 1
    assert results["k"]["farthest_off"] <= 7
    plans = {(row["memory"], row["k"]): row for row in results["plans"]}
    assert [round(plans[4, k]["plan_ms"]) for k in (0.5, 1.0, 1.5, 2.0)] == [755, 785, 791, 810]
    assert all(row["bound_ms"] <= row["plan_ms"] <= row["without_ms"] for row in plans.values())


def test_a_link_is_read_off_the_copies_of_a_timeline() -> None:
    schedule = zb.make("zb-h1", 3, 6)
    costs = costs_of(schedule, random.Random(5)).with_columns(offloadable=[MB, 2 * MB, MB])
    plans = random_offloads(schedule, random.Random(6))
    link = zb.offload.HostLink(to_host=2e9, from_host=5e8)
    found = zb.offload.fit_link(play_offloads(schedule, costs, plans, link), costs)
    assert (found.to_host, found.from_host) == pytest.approx((2e9, 5e8), rel=1e-4)
    with raises(zb.InputError, "copy", "host", "offloads"):
        zb.offload.fit_link(zb.simulate(schedule, costs), costs)


def test_a_forward_named_twice_is_one_fault_at_the_first() -> None:
    schedule, costs = zb.make("1f1b", 2, 4), zb.Costs.uniform(2)
    row = tuple(zb.offload.Offload(stage=0, microbatch=1, made=made, freed=2, back=4, needed=4) for made in (2, 1))
    plans = [zb.offload.RankOffloads(row, 0, 0, 0, 0), zb.offload.RankOffloads((), 0, 0, 0, 0)]
    (fault,) = zb.offload.offload_faults(schedule, costs, plans)
    assert (fault.code, fault.rank, fault.position) == ("offload", 0, 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_price_of_offloads_is_that_of_their_timeline(name: str) -> None:
    schedule = zb.make(name, 2, 6)
    costs = replace(costs_of(schedule, random.Random(1)), reduce=(3, *[0] * (schedule.num_stages - 1)))  # one rank has sums
    offloads = [plan.offloads for plan in random_offloads(schedule, random.Random(2))]
    graph, order = checked(schedule)
    for by_span in (False, True):
        player = OffloadPlayer(graph, order, schedule, costs, HostLink(1e9, 1e9), by_span=by_span)
        timeline = player.timeline(offloads)
        ends = [max([row[-1].end, *(one.end for one in timeline.reductions_of(rank))]) for rank, row in enumerate(timeline.rows)]
        assert player.price(offloads) == (timeline.span if by_span else timeline.makespan, sum(ends))


def test_a_bound_in_a_file_is_at_most_the_bytes_offloaded() -> None:
    schedule, costs = zb.make("1f1b", 2, 4), zb.Costs.uniform(2)
    plans = plan_offloads(schedule, costs, zb.Limits((MB, MB)), HostLink(1e9, 1e9))
    data = offloads_to_list(plans)
    assert offloads_from_list(data, schedule, costs) == plans
    for bound in (0, plans[0].bytes):
        data[0]["bound"] = bound
        assert offloads_from_list(data, schedule, costs)[0].bound == bound
    for bound in (-1, plans[0].bytes + 1):
        data[0]["bound"] = bound
        with raises(ParseError, "rank 0", plans[0].bytes, bound):
            offloads_from_list(data, schedule, costs)
