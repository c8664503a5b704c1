"""Plans in JSON, as `plan` and `pareto` print them."""

from __future__ import annotations

from zerobubble.export.torch_csv import to_torch_csv
from zerobubble.ir import Kind
from zerobubble.planning import Choice, Plan
from zerobubble.planning.unequal.order import with_numbers
from zerobubble.rules import recomputed
from zerobubble.units import ms


def plan_to_dict(found: Plan) -> dict[str, object]:
    """The winner's figures, with its CSV, and those of every placement; bounds are bubble rates too.

    Where microbatches are of unequal cost, the CSV numbers them in the order in which the last stage takes them, `microbatch_order`.
    """
    in_places, ordered = found.schedule, {}
    if found.problem.costs.shares:
        last = found.schedule.num_stages - 1
        order = [op.microbatch for _, _, op in found.schedule.ops() if op.kind is Kind.F and op.stage == last]
        in_places = with_numbers(found.schedule, {number: place for place, number in enumerate(order)})
        ordered = {"microbatch_order": order}
    return {
        **solved_to_dict(_name(found), found),
        "seconds": found.seconds,
        "compile_seconds": found.compiling,
        "csv": None if found.schedule.has_divided_head or any(map(recomputed, in_places.rows)) else to_torch_csv(in_places),
        **ordered,
        **{saving.axis: saving.to_dict() for saving in found.savings},
        "choices": [
            solved_to_dict(_placement(found, choice), choice.plan) | {"reason": choice.note, "searched": choice.searched}
            for choice in found.choices
        ],
        "not_run": list(found.not_run),
        "simple": found.simple and solved_to_dict(found.simple.problem.placement.name, found.simple),
        "interrupted": found.interrupted,
    }


def _name(found: Plan) -> str:
    """The placement of the winner by its name among the choices, if it is one of them."""
    first = found.choices[0]
    return _placement(found, first) if first.plan.order is found.order else found.placement.name


def _placement(found: Plan, choice: Choice) -> str:
    """The placement of a choice: choices are named by theirs, or by where they have a head."""
    return choice.name if found.head is None else choice.plan.placement.name


def solved_to_dict(name: str, solved: Plan) -> dict[str, object]:
    """The figures of one answer: bubbles and bounds as rates, times in ms, None where there is no schedule.

    Where forwards may be computed again, `levels` has the level of each stage, and bubbles count the passes R as idle.
    """
    problem, timeline, again = solved.problem, solved.timeline, solved.problem.recomputation
    bounds = solved.bounds
    return {
        "placement": name,
        "name": None if solved.order is None else solved.schedule.name,
        "how": solved.how,
        "bubble_span": timeline and solved.bubble_at(timeline.span),
        "bubble_makespan": timeline and solved.bubble_at(timeline.makespan),
        "lower_bound_span": problem.least_bubble(bounds.span),
        "lower_bound_makespan": problem.least_bubble(bounds.makespan),
        "period_ms": None if solved.period is None else ms(solved.period),
        "span_ms": timeline and ms(timeline.span),
        "makespan_ms": timeline and ms(timeline.makespan),
        "gap": solved.gap,
        "status": solved.status.value,
        "peak_microbatches": solved.peak_microbatches,
        "messages": problem.messages,
        "seconds": solved.seconds,
        **({} if again is None else {"levels": [level.name for level in again.chosen]}),
    }
