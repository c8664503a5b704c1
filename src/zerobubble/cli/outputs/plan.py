"""Plans as JSON, and as a page: the winner, the runner-up and 1F1B, with the reasons and the code that runs the winner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from html import escape

from zerobubble.cli.inputs.options import PictureFiles
from zerobubble.cli.inputs.schedule_and_costs import Costed
from zerobubble.cli.outputs.evaluation import Evaluation, evaluate, svg_of, write_page
from zerobubble.export.png import write_picture
from zerobubble.export.torch_csv import to_torch_csv
from zerobubble.ir import Kind, Placement, Schedule
from zerobubble.microbatch_order import with_numbers
from zerobubble.planning import Choice, Plan, Problem
from zerobubble.planning.problem.head import without_parts
from zerobubble.planning.shards.few_gathers import FewGathers
from zerobubble.rules import recomputed
from zerobubble.schedules import make
from zerobubble.units import counted, ms
from zerobubble.view.page import section

USUAL = "1f1b"
"""The common schedule shown for comparison."""


def write_plan(best: Plan, pictures: PictureFiles, plan_file: str | None) -> None:
    """Writes the pictures that are asked for; `plan_file` is the saved plan."""
    if pictures.svg is None and pictures.html is None:
        return
    evaluations = [*_answers(best), *_usual(best.problem)]
    if pictures.svg is not None:
        write_picture(pictures.svg, svg_of(evaluations))
    if pictures.html is not None:
        write_page(pictures.html, evaluations, sections=[_reasons(best, evaluations), _how_to_run(plan_file, best)])


def _answers(best: Plan) -> Iterator[Evaluation]:
    """Yields the winner and the runner-up, or the fastest plan with gathers or without offload; with a head, the best of each way."""
    feasible = [choice for choice in best.choices if choice.plan.order is not None]
    if best.head is not None:
        for choice in feasible:
            yield _evaluated(choice.plan, f"{choice.name} on {choice.plan.placement.name}: {choice.plan.schedule.name}")
        return
    if (gathers := best.saving(FewGathers)) is not None:
        others = [("winner", best.placement.name, best), ("fastest", gathers.quickest.plan.placement.name, gathers.quickest.plan)]
    elif best.problem.host is not None:
        others = [("winner", best.placement.name, best), *(("without offload", choice.name, choice.plan) for choice in feasible[:1])]
    else:
        others = [(place, choice.name, choice.plan) for place, choice in zip(("winner", "runner-up"), feasible, strict=False)]
    for place, name, shown in others:
        yield _evaluated(shown, f"{place}: {name}, {shown.how}")


def _usual(problem: Problem) -> Iterator[Evaluation]:
    """Yields 1F1B with the same work, unless its stages are not those that were measured."""
    placement = Placement.linear(problem.placement.num_ranks)
    if problem.workload is None and problem.placement.routes != placement.routes:
        return
    costs = without_parts(problem.costs) if problem.workload is None else problem.workload.costs(placement)
    costs = replace(costs, slices=())
    if problem.head is not None and (problem.workload is not None or problem.has_divided_head):
        costs = problem.head.whole(costs)
    schedule, held = make(USUAL, placement.num_ranks, problem.whole_microbatches), 0 if problem.head is None else round(problem.head.held)
    yield evaluate(Costed(schedule, costs, _source(problem), problem.workload is None, problem.limits.memory, head_bytes=held))


def _source(problem: Problem) -> str:
    work = repr(problem.costs).strip("<>") if problem.workload is None else problem.workload.times_text
    return f"planned for {work}"


def _evaluated(plan: Plan, name: str) -> Evaluation:
    return evaluate(replace(costed_plan(plan, _source(plan.problem)), schedule=replace(plan.schedule, name=name)))


def costed_plan(plan: Plan, source: str) -> Costed:
    """Returns the schedule of a plan with its costs, limits and offloads."""
    problem = plan.problem
    is_measured, memory = problem.workload is None, problem.limits.memory
    return Costed(plan.schedule, plan.costs, source, is_measured, memory, plan.offloads, problem.host, problem.bytes_of_whole_head)


def _reasons(best: Plan, evaluations: list[Evaluation]) -> str:
    """Explains the rank of each placement, and the alternatives."""
    items = [f"<b>{escape(choice.name)}</b> {escape(choice.note)}" for choice in best.choices]
    items += [escape(text) for text in (best.simple_text, best.unsearched_text) if text]
    items += [escape(text) for text in _beyond_memory(best.problem, evaluations)]
    return section("reasons", "Why", f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>")


def _beyond_memory(problem: Problem, evaluations: list[Evaluation]) -> Iterator[str]:
    """Yields a sentence if 1F1B does not fit the memory."""
    last = evaluations[-1]
    over = [rank for rank, (peak, limit) in enumerate(zip(last.peaks, problem.limits.memory, strict=True)) if peak > limit]
    if last.costed.schedule.name == USUAL and over:
        held = counted(last.peak_microbatches[over[0]], "microbatch")
        yield f"{USUAL} does not fit: rank {over[0]} would hold {held}, more than its memory."


def _how_to_run(plan_file: str | None, best: Plan) -> str:
    """Shows the code that runs, draws and exports the winner."""
    problem = best.problem
    file = plan_file or "plan.json"
    lead = "" if plan_file else "Save the plan first: give <code>-o plan.json</code> to the same command."
    # A plan that names layers brings the cut of the model.
    arguments = f"{'zb.split(model)' if problem.layer_names else 'build'}, zb.io.load_plan({file!r}), {problem.whole_microbatches}"
    lines = (
        f"pipe = zb.Pipeline({arguments}, loss_fn)  # in the program that torchrun starts",
        *_layers_to_build(problem),
        f"zerobubble show {file}",
        f"zerobubble check {file} --replicas N  # also prints what NCCL's communicators hold, in addition to the memory of the plan",
        *([] if problem.has_divided_head else [f"zerobubble make {file} --format torch-csv -o plan.csv  # for PyTorch's own runtime"]),
    )
    return section("run", "Run it", "".join(f'<pre tabindex="0">{escape(line)}</pre>' for line in lines), lead)


def _layers_to_build(problem: Problem) -> Iterator[str]:
    """Describes the layers that `build` has to make, if layers have no names by which `zb.split` could cut."""
    if problem.layers_per_stage and not problem.layer_names:
        yield f"# build(stage, num_stages) makes the layers of a stage; numbers of layers: {', '.join(map(str, problem.layers_per_stage))}"


def _csv(schedule: Schedule) -> str | None:
    """Returns PyTorch's CSV; None for what it cannot express."""
    cannot = schedule.slices > 1 or schedule.has_divided_head or any(map(recomputed, schedule.rows))
    return None if cannot else to_torch_csv(schedule)


def plan_to_dict(best: Plan) -> dict[str, object]:
    """Returns the figures of the winner, with its CSV, and of every placement. Bounds are bubble rates.

    The CSV numbers microbatches of unequal cost in the order of the last stage, `microbatch_order`.
    """
    in_places, ordered = best.schedule, {}
    if best.problem.costs.shares:
        last = best.schedule.num_stages - 1
        order = [op.microbatch for _, _, op in best.schedule.ops() if op.kind is Kind.F and op.stage == last]
        in_places = with_numbers(best.schedule, {number: place for place, number in enumerate(order)})
        ordered = {"microbatch_order": order}
    return {
        **solved_to_dict(_name(best), best),
        "seconds": best.seconds,
        "compile_seconds": best.compiling,
        "csv": _csv(in_places),
        **ordered,
        **{saving.axis: saving.to_dict() for saving in best.savings},
        "choices": [
            solved_to_dict(_placement(best, choice), choice.plan) | {"reason": choice.note, "searched": choice.searched}
            for choice in best.choices
        ],
        "not_run": list(best.not_run),
        "simple": best.simple and solved_to_dict(best.simple.problem.placement.name, best.simple),
        "interrupted": best.interrupted,
    }


def _name(best: Plan) -> str:
    """The placement of the winner, by its name among the choices if it is one of them."""
    first = best.choices[0]
    return _placement(best, first) if first.plan.order is best.order else best.placement.name


def _placement(best: Plan, choice: Choice) -> str:
    """The placement of a choice. With a head, the name of a choice is the place of its head."""
    return choice.name if best.head is None else choice.plan.placement.name


def solved_to_dict(name: str, plan: Plan) -> dict[str, object]:
    """Returns the figures of one plan: bubbles and bounds as rates, times in ms, None without a schedule.

    With recomputation, `levels` has the level of each stage, and bubbles count R as idle time.
    """
    problem, timeline, recomputation = plan.problem, plan.timeline, plan.problem.recomputation
    bounds = plan.bounds
    return {
        "placement": name,
        "name": None if plan.order is None else plan.schedule.name,
        "how": plan.how,
        "bubble_span": timeline and plan.bubble_at(timeline.span),
        "bubble_makespan": timeline and plan.bubble_at(timeline.makespan),
        "lower_bound_span": problem.least_bubble(bounds.span),
        "lower_bound_makespan": problem.least_bubble(bounds.makespan),
        "period_ms": None if plan.period is None else ms(plan.period),
        "span_ms": timeline and ms(timeline.span),
        "makespan_ms": timeline and ms(timeline.makespan),
        "gap": plan.gap,
        "status": plan.status.value,
        "peak_microbatches": plan.peak_microbatches,
        "messages": problem.messages,
        "seconds": plan.seconds,
        **({} if recomputation is None else {"levels": [level.name for level in recomputation.chosen]}),
    }
