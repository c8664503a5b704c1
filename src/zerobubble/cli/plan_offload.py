"""`zerobubble plan --offload`: the quickest schedule where ranks may move what waits to the host, and what that buys."""

from __future__ import annotations

import json
from textwrap import fill

import click

from zerobubble.cli.beside.offload import Offloaded, Rates, as_dicts, host_link, told_of_rank
from zerobubble.cli.inputs.options import PLANNED_APART, Bytes, PictureFiles, given_flags
from zerobubble.cli.inputs.schedule_and_costs import Costed
from zerobubble.cli.inputs.workload import Question, SearchOptions, WorkOptions
from zerobubble.cli.outputs.evaluation import evaluate
from zerobubble.cli.outputs.forms import print_schedule
from zerobubble.cli.outputs.page import write_page
from zerobubble.costs import Limits
from zerobubble.errors import InputError
from zerobubble.export.svg import timeline_svg
from zerobubble.offload import HostLink
from zerobubble.planning import Objective, OffloadedPlan, Workload, plan_offloaded
from zerobubble.planning.attempt import ProgressCallback
from zerobubble.planning.plan_file import plan_text
from zerobubble.planning.problem.problem import microbatch_bytes
from zerobubble.planning.reasons import NOTE_WIDTH
from zerobubble.whole_files import write_text


def refuse_beside_offload(search: SearchOptions) -> None:
    """Raise for options with which offload is not planned."""
    if flags := given_flags(*PLANNED_APART):
        raise click.UsageError(f"--offload is not planned together with {', '.join(flags)}: leave out one or the other")
    if search.objective == Objective.SPAN:
        raise click.UsageError("--offload is planned for the makespan: leave out --objective span")


def plan_question(
    question: Question,
    memory: Limits | float | None,
    link: HostLink,
    work: WorkOptions,
    search: SearchOptions,
    progress: ProgressCallback | None,
) -> OffloadedPlan:
    """The plan with offload for what the options ask; raises for what is missing, and for plan files of what is not planned with it."""
    problem = question.problem
    if problem is not None and (problem.sharded is not None or problem.recomputation is not None or question.shares):
        raise InputError(
            f"{work.costs_file} is a plan with weights in shards, recomputation or microbatches of unequal cost, and --offload is planned "
            "with none of these: give the costs of its stages in a file"
        )
    if memory is None:
        raise click.UsageError("--offload needs --memory, too: what is to go to the host follows from what a rank may hold")
    return plan_offloaded(
        question.work,
        question.microbatches,
        memory,
        link,
        placements=question.tried,
        seconds=search.budget,
        seed=search.seed,
        evaluations=search.evaluations,
        progress=progress,
    )


def link_asked(question: Question, rates: Rates | None, work: WorkOptions) -> HostLink | None:
    """The link of each rank to its host, in the bytes that the costs count: of the options, or else of the plan that is made anew."""
    if rates is None:
        return None if question.problem is None else question.problem.host
    if isinstance(question.work, Workload):
        size = max(question.work.held_after_f)
    else:
        size = max(microbatch_bytes(next(iter(question.placements.values())), question.work))

    def bytes_a_second(given: Bytes) -> float:
        if not isinstance(question.work, Workload):
            return float(given.count)
        if work.microbatch_bytes is None:
            raise click.UsageError(
                "--offload in bytes a second needs bytes, and times tell none: give --microbatch-bytes, or the ms in which a rank copies "
                "what it keeps of a microbatch"
            )
        return given.count * size / work.microbatch_bytes

    return host_link(rates, size, bytes_a_second)


def tell(
    found: OffloadedPlan, without: dict[str, object], output: str | None, pictures: PictureFiles, form: str | None, as_json: bool
) -> None:
    """Print, save and draw the plan; `without` is the JSON form of the one without offload."""
    if output is not None:
        write_text(output, plan_text(found))
    schedule, costs = found.schedule, found.problem.costs
    problem = found.problem
    is_measured, limits = problem.workload is None, problem.limits.memory
    costed = Costed(schedule, costs, "what was planned for", is_measured, limits, found.offloads, problem.host)
    if pictures.html is not None:
        write_page(pictures.html, [evaluate(costed)])
    if pictures.svg is not None:
        unit = None if costed.in_bytes else costed.microbatch_bytes
        write_text(pictures.svg, timeline_svg(found.timeline, memory=bool(found.timeline.peak_bytes), microbatch_bytes=unit))
    if as_json:
        ranks = as_dicts(Offloaded(found.offloads, found.timeline, found.without or 0))
        click.echo(json.dumps(without | {"offload": found.to_dict() | {"ranks": ranks}}, indent=2))
    elif form is not None:
        print_schedule(schedule, form)
    else:
        ranks_told = [f"rank {rank}: {told_of_rank(costed, plan, rank)}" for rank, plan in enumerate(found.offloads)]
        paragraph = fill(found.bought, NOTE_WIDTH, break_on_hyphens=False)
        click.echo("\n\n".join(["Without offload:", str(found.plan), paragraph, "\n".join(ranks_told)]))
