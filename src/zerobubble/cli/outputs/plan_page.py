"""What `plan` draws: the winner, the runner-up and 1F1B on one page, with the reasons and the lines that run the winner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from html import escape

from zerobubble.cli.inputs.options import PictureFiles
from zerobubble.cli.inputs.schedule_and_costs import Costed
from zerobubble.cli.outputs.evaluation import Evaluation, evaluate
from zerobubble.cli.outputs.page import title_of, write_page
from zerobubble.export.svg import timeline_svg
from zerobubble.ir import Placement
from zerobubble.planning import Plan, Problem
from zerobubble.planning.problem.head import without_parts
from zerobubble.planning.shards.few_gathers import FewGathers
from zerobubble.schedules import make
from zerobubble.units import counted
from zerobubble.view.page import section
from zerobubble.whole_files import write_text

USUAL = "1f1b"
"""What the winner is shown beside, as the schedule that most use."""


def write_plan(found: Plan, pictures: PictureFiles, plan_file: str | None) -> None:
    """Write the files that are asked for; `plan_file` is where the plan was saved."""
    if pictures.svg is None and pictures.html is None:
        return
    evaluations = [*_answers(found), *_usual(found.problem)]
    if pictures.svg is not None:
        write_text(pictures.svg, timeline_svg(*(each.timeline for each in evaluations), title=title_of(evaluations)))
    if pictures.html is not None:
        write_page(pictures.html, evaluations, sections=[_reasons(found, evaluations), _how_to_run(plan_file, found)])


def _answers(found: Plan) -> Iterator[Evaluation]:
    """The winner and the runner-up, or what would be quickest with gathers or without offload; with a head the best of each way."""
    able = [choice for choice in found.choices if choice.plan.order is not None]
    if found.head is not None:
        for choice in able:
            yield _evaluated(choice.plan, f"{choice.name} on {choice.plan.placement.name}: {choice.plan.schedule.name}")
        return
    if (gathers := found.saving(FewGathers)) is not None:
        others = [("winner", found.placement.name, found), ("quickest", gathers.quickest.solved.placement.name, gathers.quickest.solved)]
    elif found.problem.host is not None:
        others = [("winner", found.placement.name, found), *(("without offload", choice.name, choice.plan) for choice in able[:1])]
    else:
        others = [(place, choice.name, choice.plan) for place, choice in zip(("winner", "runner-up"), able, strict=False)]
    for place, name, one in others:
        yield _evaluated(one, f"{place}: {name}, {one.how}")


def _usual(problem: Problem) -> Iterator[Evaluation]:
    """1F1B with the same work; not where stages were measured that it does not have."""
    placement = Placement.linear(problem.placement.num_ranks)
    if problem.workload is None and problem.placement.routes != placement.routes:
        return
    costs = without_parts(problem.costs) if problem.workload is None else problem.workload.costs(placement)
    if problem.head is not None and (problem.workload is not None or problem.has_divided_head):
        costs = problem.head.whole(costs)
    made, held = make(USUAL, placement.num_ranks, problem.num_microbatches), 0 if problem.head is None else round(problem.head.held)
    yield evaluate(Costed(made, costs, _source(problem), problem.workload is None, problem.limits.memory, of_head=held))


def _source(problem: Problem) -> str:
    return f"planned for {problem.workload or problem.costs!r}".replace("<", "").replace(">", "")


def _evaluated(plan: Plan, name: str) -> Evaluation:
    return evaluate(replace(costed_plan(plan, _source(plan.problem)), schedule=replace(plan.schedule, name=name)))


def costed_plan(plan: Plan, source: str) -> Costed:
    """The schedule of a plan with all that it is played with."""
    problem = plan.problem
    is_measured, memory = problem.workload is None, problem.limits.memory
    return Costed(plan.schedule, plan.costs, source, is_measured, memory, plan.offloads, problem.host, problem.bytes_of_whole_head)


def _reasons(found: Plan, evaluations: list[Evaluation]) -> str:
    """Why each placement stands where it does, and what else there is to choose."""
    items = [f"<b>{escape(choice.name)}</b> {escape(choice.note)}" for choice in found.choices]
    items += [escape(found.simple_text)] if found.simple is not None else []
    items += [escape(text) for text in _beyond_memory(found.problem, evaluations)]
    return section("reasons", "Why", f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>")


def _beyond_memory(problem: Problem, evaluations: list[Evaluation]) -> Iterator[str]:
    """Says so where 1F1B does not fit the memory."""
    last = evaluations[-1]
    over = [rank for rank, (peak, room) in enumerate(zip(last.peaks, problem.limits.memory, strict=True)) if peak > room]
    if last.schedule.name == USUAL and over:
        held = counted(last.peak_microbatches[over[0]], "microbatch")
        yield f"{USUAL} does not fit: rank {over[0]} would hold {held}, more than it has room for."


def _how_to_run(plan_file: str | None, found: Plan) -> str:
    """The lines that run, draw and export the winner."""
    problem = found.problem
    file = plan_file or "plan.json"
    lead = "" if plan_file else "Save the plan first: give <code>-o plan.json</code> to the same command."
    # A plan that names layers brings the cut of the model.
    arguments = f"{'zb.split(model)' if problem.layer_names else 'build'}, zb.io.load_plan({file!r}), {problem.num_microbatches}"
    lines = (
        f"pipe = zb.Pipeline({arguments}, loss_fn)  # in the program that torchrun starts",
        *_layers_to_build(problem),
        f"zerobubble show {file}",
        *([] if problem.has_divided_head else [f"zerobubble make {file} --format torch-csv -o plan.csv  # for PyTorch's own runtime"]),
    )
    return section("run", "Run it", "".join(f'<pre tabindex="0">{escape(line)}</pre>' for line in lines), lead)


def _layers_to_build(problem: Problem) -> Iterator[str]:
    """What `build` is to make where layers have no names by which a model could be cut."""
    if problem.layers_per_stage and not problem.layer_names:
        yield f"# build(stage, num_stages) makes the layers of a stage, so many of them: {', '.join(map(str, problem.layers_per_stage))}"
