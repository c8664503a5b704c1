"""`zerobubble plan`: the best schedule for given times and memory, over all placements, with a bound on what is left to gain."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from zerobubble.cli.beside import offload as offloading
from zerobubble.cli.beside.gathers import GatherOptions, as_dicts, gather_options, planned, told_in_short
from zerobubble.cli.beside.head import HeadOptions, has_head, head_options
from zerobubble.cli.beside.offload import Offloaded, Rates, host_link, link_asked, rates_option, told_of_rank
from zerobubble.cli.cluster import ClusterOptions, cluster_options, plan_cluster, require_model
from zerobubble.cli.inputs.layers import excess_inside_blocks, read_layers
from zerobubble.cli.inputs.options import (
    Bytes,
    PictureFiles,
    given_flags,
    json_option,
    microbatch_costs_option,
    microbatches_or_bytes,
    number_of_bytes,
    numbers,
    option_group,
    picture_options,
    refuse_beside,
)
from zerobubble.cli.inputs.workload import (
    Question,
    SearchOptions,
    WorkOptions,
    in_microbatches,
    named_placements,
    read_question,
    require_shape,
    search_options,
    work_options,
)
from zerobubble.cli.outputs.forms import print_schedule
from zerobubble.cli.outputs.plan_form import plan_to_dict
from zerobubble.cli.outputs.plan_page import costed_plan, write_plan
from zerobubble.costs import NONE, Limits
from zerobubble.partition import Layer, join_blocks
from zerobubble.planning import Objective, Plan, Workload, plan
from zerobubble.planning.attempt import PlanProgress, ProgressCallback
from zerobubble.planning.layer_plan import CutSavings, equal_limits
from zerobubble.planning.noise.robust import robust_order_dict, robust_order_text, with_robust_winner
from zerobubble.planning.noise.sensitivity import what_if, what_if_text
from zerobubble.planning.offload_plan import OffloadSavings
from zerobubble.planning.pareto import limits_for_microbatches
from zerobubble.planning.plan_file import plan_text
from zerobubble.planning.problem.axes import refuse_pairs
from zerobubble.planning.problem.head import Head
from zerobubble.planning.problem.recomputation import LEVELS, MODES, parse_levels, show_levels
from zerobubble.planning.table import percent
from zerobubble.units import show_bytes, show_range
from zerobubble.whole_files import write_text


@dataclass(frozen=True)
class PlanOptions:
    """What `plan` takes beside the work and the search: the room on each rank, other planners, and what else to say of the winner."""

    memory: float | Bytes | None
    memory_bytes: int | None
    layers: str | None
    inside_blocks: bool
    speeds: tuple[float, ...]
    links: tuple[float, ...]
    baseline: str | None
    error: float | None
    noise: float | None
    within: float
    shares: tuple[float, ...]
    recompute: str | None
    levels: str | None

    @property
    def room_bytes(self) -> int | None:
        """The room on each rank, where it is given in bytes."""
        return self.memory.count if isinstance(self.memory, Bytes) else self.memory_bytes

    @property
    def cluster_room(self) -> int | None:
        """The room of a GPU, which only bytes can tell; raises for microbatches."""
        if self.room_microbatches is not None:
            raise click.UsageError(f"--memory {self.room_microbatches:g} beside --model is that of a GPU in bytes, such as --memory 70GB")
        return self.room_bytes

    @property
    def room_microbatches(self) -> float | None:
        """The room on each rank, where it is given in microbatches."""
        return None if isinstance(self.memory, Bytes) else self.memory


_SHARE = click.FloatRange(0, 100, True, True)
plan_options = option_group(
    PlanOptions,
    "options",
    click.option(
        "--memory",
        callback=microbatches_or_bytes,
        metavar="X",
        help="Room on each rank, in microbatches of all its stages, or in bytes with a unit, such as 40GB, for layers and costs of stages.",
    ),
    click.option(
        "--memory-bytes", callback=number_of_bytes, metavar="N", help="Room on each rank in bytes, for layers and costs of stages."
    ),
    click.option("--layers", metavar="FILE", help="JSON with the costs of each layer, to be cut into stages, instead of --times."),
    click.option("--inside-blocks", is_flag=True, help="Also cut between the parts of a block of --layers, such as attention and MLP."),
    click.option(
        "--speeds",
        callback=numbers,
        default="",
        metavar="X,X,...",
        help="With --layers: how fast each rank is, such as 1,1,0.5,0.5; at 0.5 passes take twice as long (1 if not given).",
    ),
    click.option(
        "--links",
        callback=numbers,
        default="",
        metavar="X,X,...",
        help="How fast the link after each rank is, such as 1,0.2,1,0.2; at 0.2 messages take five times as long (1 if not given).",
    ),
    click.option("--baseline", metavar="NAME", help="Ask this planner of the papers instead of ours."),
    click.option(
        "--what-if", "error", type=_SHARE, metavar="PERCENT", help="Also say what becomes of the winner if times are off by so much."
    ),
    click.option(
        "--noise",
        type=_SHARE,
        metavar="PERCENT",
        help="Search on, as long again, for an order that is as short and suffers least where each pass varies by so much.",
    ),
    click.option(
        "--within",
        type=click.FloatRange(0, 100),
        default=2.0,
        metavar="PERCENT",
        help="With --weights: how much longer than the quickest the winner may take to gather less (2 if not given).",
    ),
    microbatch_costs_option,
    click.option("--recompute", type=click.Choice(MODES), help="Compute forwards again: all in full, or what pays."),
    click.option(
        "--levels",
        metavar="NAME:TIME:BYTES,...",
        help=f"With --recompute: R's time as a share of F's, the share of its bytes that F keeps ({show_levels(LEVELS)} if not given).",
    ),
)


@dataclass(frozen=True)
class Answer:
    """A plan with what is said beside it: keys for the JSON form, and paragraphs."""

    plan: Plan
    data: dict[str, object]
    paragraphs: tuple[str, ...] = ()

    def with_remark(self, data: dict[str, object], paragraph: str) -> Answer:
        """The same plan with one more remark."""
        return replace(self, data=self.data | data, paragraphs=(*self.paragraphs, paragraph))


@click.command("plan", short_help="Find the best schedule for times and memory.")
@work_options
@search_options
@plan_options
@gather_options
@head_options
@cluster_options
@rates_option
@picture_options
@click.option("--format", "form", type=click.Choice(["text", "torch-csv"]), help="Print the winner's schedule so and nothing else.")
@click.option("-o", "--output", metavar="FILE", help="Also save the winner with all it was made from, for every verb and zb.io.load_plan.")
@json_option
def plan_verb(
    work: WorkOptions,
    search: SearchOptions,
    options: PlanOptions,
    sharded: GatherOptions,
    head: HeadOptions,
    cluster: ClusterOptions,
    offload: Rates | None,
    pictures: PictureFiles,
    form: str | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Find the schedule with the smallest bubble for these times and this memory, over all placements of stages.

    Prints the winner and the other placements with their bubbles, memory and messages, the bound of each, which no schedule can
    beat, and the reason. Ctrl-C ends the search with the best so far. --html writes winner, runner-up and 1F1B on one page, with the
    reasons and the lines that run the winner. --memory in bytes needs --microbatch-bytes beside --times.

    With --layers, a list of [F, B, W] in ms per layer or layers in their JSON form, the cut into stages is chosen together with the
    schedule: after the search on balanced cuts, one as long moves the winner's cuts (Ctrl-C ends the one that runs). --memory in bytes
    is then for parameters, gradients, optimizer state and activations; in microbatches it is the room for so many in an equal share of
    the layers, beside an equal share of their parameters. Layers may be parts of blocks, which --inside-blocks cuts apart. Where some
    ranks are slower, such as with two types of GPU, --speeds gives them fewer layers.

    --links says which messages take longer, whatever gives their times: --comm, layers, costs or a plan. It has a number for each rank,
    the speed of the link to the next one, and last that from the last rank to the first, relative to these times.

    With --costs and a costs file, as Pipeline.profile measures it, the order is planned for the stages of the placement that they were
    measured on, within --memory-bytes. With --costs and a plan it is planned anew for what the plan was made for: its times or costs,
    microbatches, memory, objective and weights in shards, unless they are given.

    With --weights the winner gathers least of the schedules that are hardly longer; a saved plan keeps the sizes and the room for them,
    which Pipeline takes from it.

    With --model, it is divided over GPUs: how many share a layer, a sequence, experts and the stages, how large a microbatch is, what is
    computed again and in which order, all by estimates from data sheets, with everything that they assume. --memory is then the room of a
    GPU, such as 70GB, and --html has the steps of the first ways.

    With --recompute auto, forwards are computed again where that makes room that is worth its time, at the --levels that there are: by
    stage, and left out for microbatches that the memory has room for. What it buys is told beside the winner.

    With --offload, what waits for its backward pass may go to the host: orders that need more than --memory are tried with copies that
    make them fit, for the least makespan. What that buys is told, and --format has the order that is quickest with it.

    With --head, which --times leave out, the head is planned whole on the last stage and divided over all ranks by its vocabulary, and the
    quickest that fits wins, with what the division buys. --format text prints its passes S and T, or SL and TX, too.
    Costs that Pipeline.profile measured with a head which ranks divide tell what it takes: --costs is then enough.

    \b
    Examples:
      zerobubble plan --ranks 8 --microbatches 24 --times 18.522,18.086,9.337 --comm 0.601 --memory 8
      zerobubble plan --ranks 8 --microbatches 24 --placement vee,wave-4 --memory 5 --budget 20 -o plan.json
      zerobubble plan -p 16 -m 64 --times 12,11,7 --memory 40GB --microbatch-bytes 4GB --html plan.html
      zerobubble plan --costs plan.json --microbatches 48 --budget 60
      zerobubble plan --microbatches 24 --per-rank times.json --memory 8 --format torch-csv
      zerobubble plan --ranks 8 --microbatches 24 --memory 8 --what-if 10
      zerobubble plan --ranks 8 --microbatches 24 --layers layers.json --memory 40GB
      zerobubble plan -p 4 -m 12 --layers layers.json --memory 40GB --speeds 1,1,0.5,0.5
      zerobubble plan --microbatches 24 --costs costs.json --memory-bytes 8000000000
      zerobubble plan --microbatches 24 --costs costs.json --links 1,0.2,1,0.2
      zerobubble plan --model llama3-405b --gpu H100 --gpus 16384
      zerobubble plan --ranks 4 --microbatches 8 --times 10,10,8 --microbatch-costs 1,4,1,1,1,2,1,1
      zerobubble plan --ranks 8 --microbatches 24 --times 29.8,29.4,19.5 --memory 2 --recompute auto --levels full:1:0.06
      zerobubble plan --ranks 4 --microbatches 8 --times 10,10,10 --memory 2 --offload 5
      zerobubble plan --ranks 8 --microbatches 24 --times 10,10,8 --head 15,15,15 --head-slowdown 1.2 --memory 10
    """
    if cluster.model is not None:
        plan_cluster(cluster, options.cluster_room, pictures, as_json)
        return
    require_model(cluster)
    if as_json and form is not None:
        raise click.UsageError(f"--json and --format {form} contradict each other: give one")
    of_ranks = ("times", "fused", "reduce", "buckets", "microbatch_bytes", "per_rank", "num_layers")
    for options_that_exclude in (("layers", *of_ranks), ("costs_file", "layers"), ("memory", "memory_bytes")):
        refuse_beside(*options_that_exclude)
    if options.inside_blocks and options.layers is None:
        raise click.UsageError("--inside-blocks is for --layers: give the layers that are to be cut")
    if options.speeds and options.layers is None:
        raise click.UsageError("--speeds is for --layers, which are cut by them: give the layers, or times by rank with --per-rank")
    answer = _answer(work, search, options, sharded, head, offload)
    answer = _with_offloads(_with_gathers(_with_remarks(answer, search, options)))
    schedule = answer.plan.schedule
    if output is not None:
        write_text(output, plan_text(answer.plan))
    write_plan(answer.plan, pictures, output)
    if as_json:
        click.echo(json.dumps(plan_to_dict(answer.plan) | answer.data, indent=2))
    elif form is not None:
        print_schedule(schedule, form)
    else:
        click.echo("\n\n".join([str(answer.plan), *answer.paragraphs]))


def _answer(
    work: WorkOptions, search: SearchOptions, options: PlanOptions, sharded: GatherOptions, head: HeadOptions, offload: Rates | None
) -> Answer:
    """The plan for layers, stages or ranks, whichever the options describe, with all that they or a plan file ask for."""
    if options.layers is not None:
        _refuse_pairs({}, search, options, sharded, options.layers)
        head.require_times()
        return _plan_layers(options.layers, work, search, options, _AxesOfLayers(options, sharded, head, offload))
    question = read_question("plan", work, search)
    known = {"shares": bool(question.shares), "head": has_head(question), "fused": bool(question.work.fused)}
    if question.problem is not None:
        again = question.problem.recomputation if options.recompute is None else None
        others = {"sharded": question.problem.sharded, "host": question.problem.host, "recompute": again}
        known |= {axis: value is not None for axis, value in others.items()}
    _refuse_pairs(known, search, options, sharded, work.costs_file or "")
    link, placed = link_asked(question, offload, work.microbatch_bytes), head.asked(question)
    memory = _room(question, work, options)
    if link is not None and memory is None:
        raise click.UsageError("--offload needs --memory, too: what is to go to the host follows from what a rank may hold")
    extras: dict[str, Any] = {"baseline": options.baseline, "sharded": sharded.sharded(question.problem, options.within / 100)}
    extras |= {"shares": options.shares or question.shares, "links": options.links, "head": placed, "host": link}
    extras |= _recomputation(options, question)
    with progress_bar(search) as progress:
        arguments = search.arguments(search.objective or (question.objective if link is None else None), progress)
        found = plan(question.work, question.microbatches, memory, placements=question.tried, **extras, **arguments)
    return Answer(found, {}, (*_on_layers(found, question, search), *_microbatches_in_bytes(options, memory)))


_FLAGS = {
    "layers": "--layers",
    "speeds": "--speeds",
    "links": "--links",
    "baseline": "--baseline",
    "sharded": "--weights",
    "shares": "--microbatch-costs",
    "recompute": "--recompute",
    "head": "--head",
    "host": "--offload",
    "fused": "--fused",
    "period": "--objective period",
    "noise": "--noise",
    "what_if": "--what-if",
}
"""The options that ask for the axes of a problem."""
_WORDS = {
    "sharded": "the sharding of weights",
    "shares": "the cost of each microbatch",
    "recompute": "the recomputation",
    "head": "the head",
    "host": "the offload",
    "fused": "the time of BW",
}
"""What a file has that asks for an axis."""


def _refuse_pairs(known: dict[str, bool], search: SearchOptions, options: PlanOptions, sharded: GatherOptions, file: str) -> None:
    """Raise for pairs of axes that are not planned together: those asked for by options, and those `known` from a file besides."""
    given = {
        "speeds": bool(options.speeds),
        "links": bool(options.links),
        "baseline": options.baseline is not None,
        "sharded": sharded.weights is not None,
        "shares": bool(options.shares),
        "recompute": options.recompute in ("full", "auto") or options.levels is not None,
        "period": search.objective == Objective.PERIOD,
        "noise": options.noise is not None,
        "what_if": options.error is not None,
    }
    given |= {axis: bool(given_flags({"host": "offload"}.get(axis, axis))) for axis in ("layers", "head", "host", "fused")}
    in_file = {axis: f"{words} in {file}" for axis, words in _WORDS.items() if known.get(axis)}
    refuse_pairs(in_file | {axis: flag for axis, flag in _FLAGS.items() if given[axis]})


def _on_layers(found: Plan, question: Question, search: SearchOptions) -> tuple[str, ...]:
    """What the winner asks of the model: a layer for each stage. Times of ranks do not say how many layers there are."""
    placement = found.problem.placement
    if search.num_layers is not None or placement.stages_per_rank == 1 or not isinstance(question.work, Workload):
        return ()
    return (f"The winner has {placement.num_stages} stages, each of at least one layer. Give --num-layers N for a model of fewer.",)


def _recomputation(options: PlanOptions, question: Question) -> dict[str, Any]:
    """What to compute again: what the options say, or else what the plan that is made anew might."""
    levels = None if options.levels is None else parse_levels(options.levels)
    known = None if question.problem is None else question.problem.recomputation
    if known is None or options.recompute is not None:
        return {"recompute": options.recompute or "none", "levels": levels}
    offered = tuple(level for level in known.offered if level != NONE)
    return {"recompute": "auto" if known.is_optional else "full", "levels": levels or offered}


def _room(question: Question, work: WorkOptions, options: PlanOptions) -> Limits | float | None:
    """The room on each rank: what the options say, in either unit, or else what the plan that is made anew had."""
    if options.room_bytes is not None and isinstance(question.work, Workload):
        return in_microbatches(options.room_bytes, work)
    if options.room_bytes is not None:
        return Limits((options.room_bytes,) * question.num_ranks)
    if options.room_microbatches is None:
        return question.limits
    if isinstance(question.work, Workload):
        return options.room_microbatches
    return limits_for_microbatches(question.work, options.room_microbatches, next(iter(question.placements.values())))


def _with_gathers(answer: Answer) -> Answer:
    """The answer with the gathers of weights in shards that the winner needs, where sizes are given."""
    gathers = planned(answer.plan.schedule, answer.plan.problem.sharded)
    if not gathers:
        return answer
    lines = [f"rank {rank}: {told_in_short(plan)}" for rank, plan in enumerate(gathers)]
    return answer.with_remark({"weights": as_dicts(gathers)}, "\n".join(["Weights in shards, in the winner:", *lines]))


def _with_offloads(answer: Answer) -> Answer:
    """The answer with what each rank moves to the host, where some may."""
    found, savings = answer.plan, answer.plan.saving(OffloadSavings)
    if savings is None or found.timeline is None:
        return answer
    ranks = offloading.as_dicts(Offloaded(found.offloads, found.timeline, savings.without or 0))
    costed = costed_plan(found, "what was planned for")
    lines = [f"rank {rank}: {told_of_rank(costed, plan, rank)}" for rank, plan in enumerate(found.offloads)]
    return answer.with_remark({savings.axis: savings.to_dict() | {"ranks": ranks}}, "\n".join(lines))


class _AxesOfLayers(NamedTuple):
    """What is planned with a cut of layers, as the options say it."""

    options: PlanOptions
    sharded: GatherOptions
    head: HeadOptions
    offload: Rates | None

    def arguments(self, layers: Sequence[Layer], ranks: int) -> dict[str, Any]:
        """The arguments of `plan` for these layers, of which a rank keeps an equal share for each microbatch."""
        options, kept = self.options, sum(layer.held_after_f for layer in layers) // ranks
        levels = None if options.levels is None else parse_levels(options.levels)
        found: dict[str, Any] = {
            "baseline": options.baseline,
            "shares": options.shares,
            "speeds": options.speeds,
            "links": options.links,
            "recompute": options.recompute or "none",
            "levels": levels,
        }
        if self.head.head is not None:
            found["head"] = Head(self.head.head, self.head.head_held * kept, self.head.collective, self.head.head_slowdown)
        if self.offload is not None:
            found["host"] = host_link(self.offload, max(1, kept), lambda given: float(given.count))
        return found | {"sharded": self.sharded.sharded(None, options.within / 100)}


def _plan_layers(file: str, work: WorkOptions, search: SearchOptions, options: PlanOptions, axes: _AxesOfLayers) -> Answer:
    """The plan for the layers in `file`, cut into stages together with the schedule."""
    ranks, microbatches = require_shape("plan", work.ranks, work.microbatches)
    placements = named_placements(search, ranks, microbatches)
    parts = read_layers(file, work.comm, work.held, need_bytes=options.room_bytes is not None)
    layers = parts if options.inside_blocks else join_blocks(parts)
    memory = options.room_microbatches if options.room_bytes is None else Limits((options.room_bytes,) * ranks)
    if axes.offload is not None and memory is None:
        raise click.UsageError("--offload needs --memory, too: what is to go to the host follows from what a rank may hold")
    others = axes.arguments(layers, ranks)
    is_alone = all(others.get(name) in (None, (), "none") for name in ("baseline", "shares", "recompute", "head", "host", "sharded"))
    with progress_bar(search, searches=2 if is_alone else 3) as progress:
        others |= search.arguments(search.objective, progress)
        found = plan(layers, microbatches, memory, placements=placements, **others)
    answer = Answer(found, {})
    savings = found.saving(CutSavings)
    inside = None if savings is None else excess_inside_blocks(savings, parts)
    if found.cut is not None and inside is not None and inside < found.cut.excess:
        text = f"Cuts inside blocks bring the slowest rank to {inside:.3f} x an even share: give --inside-blocks."
        answer = answer.with_remark({}, text)
    if options.room_microbatches is not None and any(layer.parameters_bytes for layer in layers):
        limits = equal_limits(layers, ranks, options.room_microbatches)
        answer = replace(answer, paragraphs=(*answer.paragraphs, *_microbatches_in_bytes(options, limits)))
    return replace(answer, data={"excess_inside_blocks": inside})


def _microbatches_in_bytes(options: PlanOptions, limits: Limits | float | None) -> tuple[str, ...]:
    """How many bytes a --memory in microbatches is where bytes are known: who leaves out the unit of bytes means something else."""
    if options.room_microbatches is None or not isinstance(limits, Limits):
        return ()
    size = show_range(limits.memory, show_bytes)
    given = f"--memory {options.room_microbatches:g}"
    return (f"{given} is room for {options.room_microbatches:g} microbatches, {size} on each rank. For bytes, give a unit: {given}GB.",)


def _with_remarks(answer: Answer, search: SearchOptions, options: PlanOptions) -> Answer:
    """The answer with a winner that stands noise, and what becomes of it where times are off, as far as they are asked for."""
    if options.noise is not None:
        share = options.noise / 100
        found, robust = with_robust_winner(answer.plan, share, seconds=search.budget, seed=search.seed, evaluations=search.evaluations)
        problem = found.problem
        answer = replace(answer, plan=found)
        answer = answer.with_remark({"noise": robust_order_dict(problem, robust)}, robust_order_text(problem, robust, share))
    if options.error is not None:
        moved = what_if(answer.plan, options.error / 100, seed=search.seed)
        without = "" if answer.plan.problem.sharded is None else "\nAll without gathers of weights."
        answer = answer.with_remark({"what_if": moved.to_dict()}, what_if_text(moved) + without)
    return answer


@contextmanager
def progress_bar(search: SearchOptions, searches: int = 1) -> Iterator[ProgressCallback | None]:
    """What to call with news of a search, to be shown as a bar on a terminal; None where there is none, or nothing to wait for."""
    console = Console(stderr=True)
    seconds = search.budget * searches if search.evaluations is None else None
    if not console.is_terminal or seconds == 0:
        yield None
        return
    with Progress(BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), console=console, transient=True) as bar:
        yield _shown(bar, seconds)


def _shown(bar: Progress, seconds: float | None) -> ProgressCallback:
    task = bar.add_task("getting ready", total=seconds)

    def show(news: PlanProgress) -> None:
        description = f"{news.placement}: bubble {percent(news.bubble)}, {percent(news.gap)} longer than the bound, {news.how}"
        bar.update(task, completed=bar.tasks[0].elapsed or 0.0, description=description)

    return show
