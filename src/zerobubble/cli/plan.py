"""`zerobubble plan`: the best schedule for given times and memory over all placements, with a lower bound."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import click
from rich.progress import Progress

from zerobubble.cli.axes import gathers as gathering
from zerobubble.cli.axes import offload as offloading
from zerobubble.cli.axes.gathers import GatherOptions, gather_options
from zerobubble.cli.axes.head import HeadOptions, has_head, head_options
from zerobubble.cli.axes.offload import Offloaded, RateOptions, host_link, link_asked
from zerobubble.cli.cluster import ClusterOptions, cluster_options, plan_cluster, require_model
from zerobubble.cli.inputs.device_memory import DeviceMemory
from zerobubble.cli.inputs.layers import GivenLayers, layers_in_file, read_source
from zerobubble.cli.inputs.options import (
    LAYERS,
    RECOMPUTATION,
    SEARCH,
    SHARDED,
    SLICES,
    WORK,
    Bytes,
    NumberRange,
    PictureFiles,
    SectionedCommand,
    UnequalMicrobatches,
    given_flags,
    json_option,
    microbatches_or_bytes,
    numbers,
    option,
    option_group,
    output_file,
    picture_options,
    refuse_together,
    require_with,
    slice_counts,
)
from zerobubble.cli.inputs.problem import (
    PlanQuestion,
    SearchOptions,
    WorkOptions,
    in_microbatches,
    named_placements,
    read_question,
    require_shape,
    search_options,
    work_options,
)
from zerobubble.cli.outputs.plan import costed_plan, plan_to_dict, write_plan
from zerobubble.cli.outputs.terminal import progress
from zerobubble.costs import NONE, Limits
from zerobubble.errors import InputError
from zerobubble.export.document import dumps
from zerobubble.export.torch_csv import to_torch_csv
from zerobubble.partition import Layer, cut_layers, join_blocks
from zerobubble.planning import Objective, Plan, Workload, plan
from zerobubble.planning.attempt import PlanProgress, ProgressCallback
from zerobubble.planning.axes.host import OffloadSavings
from zerobubble.planning.axes.layers import CutSavings, equal_limits
from zerobubble.planning.problem.axes import refuse_pairs
from zerobubble.planning.problem.head import Head
from zerobubble.planning.problem.problem import microbatch_bytes
from zerobubble.planning.problem.recomputation import LEVELS, MODES, parse_levels, show_levels
from zerobubble.planning.problem.workload import limits_for
from zerobubble.planning.sensitivities import what_if, what_if_text
from zerobubble.slicing import attention_in
from zerobubble.units import counted, show_bytes, show_percent, show_range
from zerobubble.whole_files import write_text

_PERCENT = NumberRange(0, 100, min_open=True, max_open=True)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RateOptions, UnequalMicrobatches):
    """The memory of each rank, other axes, and what else to report of the winner."""

    memory: float | Bytes | None = option(
        "--memory",
        callback=microbatches_or_bytes,
        metavar="X",
        help="Memory of each rank: microbatches in all its stages, or bytes, such as 40GB. With --gpu, CUDA and NCCL take 2.15 GB of it.",
    )
    layers: str | None = option(
        "--layers",
        section=LAYERS,
        metavar="FILE",
        help="JSON with [F, B, W] in ms or all costs of each layer, such as from split -o. Plans the cut, too.",
    )
    source: str | None = option(
        "--from",
        section=LAYERS,
        metavar="SOURCE",
        help="Model and batch of titan:CONFIG (torchtitan) or trainer:FILE (arguments of Trainer), with times of --gpu.",
    )
    inside_blocks: bool = option(
        "--inside-blocks",
        section=LAYERS,
        is_flag=True,
        help="Also cut inside blocks, such as between attention and MLP.",
    )
    speeds: tuple[float, ...] = option(
        "--speeds",
        section=LAYERS,
        callback=numbers,
        metavar="X,X,...",
        help="Relative speed of each rank, such as 1,1,0.5,0.5.",
    )
    links: tuple[float, ...] = option(
        "--links",
        callback=numbers,
        metavar="X,X,...",
        help="Relative speed of the link after each rank, such as 1,0.2,1,0.2.",
    )
    baseline: str | None = option("--baseline", section=SEARCH, metavar="NAME", help="Planner of a paper, instead of ours.")
    what_if: float | None = option(
        "--what-if", section=SEARCH, type=_PERCENT, metavar="PERCENT", help="Report the winner's time if times are off by this."
    )
    within: float = option(
        "--within",
        section=SHARDED,
        type=NumberRange(0, 100),
        default=2.0,
        metavar="PERCENT",
        help="How much longer than the fastest plan the winner may take to gather less.",
    )
    recompute: str | None = option(
        "--recompute", section=RECOMPUTATION, type=click.Choice(MODES), help="Recompute all forwards, or those that pay off (auto)."
    )
    levels: str | None = option(
        "--levels",
        section=RECOMPUTATION,
        metavar="NAME:TIME:BYTES,...",
        help=f"Levels: time of R over F, and share of bytes kept; by default {show_levels(LEVELS)}.",
    )
    slices: tuple[int, ...] | str = option(
        "--slices",
        section=SLICES,
        callback=slice_counts,
        metavar="N,N,...|auto",
        help="Slices of each microbatch, for few long sequences: a number, or several to choose from; auto tries 1, 2, 4, 8 and 16.",
    )
    attention: tuple[float, ...] = option(
        "--attention",
        section=SLICES,
        callback=numbers,
        metavar="F,B",
        help="Shares of F and of B that attention between tokens takes, such as 0.2,0.3.",
    )

    @property
    def rank_bytes(self) -> int | None:
        """The memory of each rank, if given in bytes."""
        return self.memory.count if isinstance(self.memory, Bytes) else None

    def gpu_bytes(self, model: str) -> int | None:
        """Returns the memory of a GPU in bytes. Raises if it is given in microbatches, as for another problem than a `model`."""
        if self.rank_microbatches is not None:
            sentence, remedy = "{argument} {got:g} with {model} must have a unit of bytes", "give the memory of a GPU, such as 70GB"
            raise InputError(sentence, argument="--memory", got=self.rank_microbatches, model=model, remedy=remedy)
        return self.rank_bytes

    @property
    def rank_microbatches(self) -> float | None:
        """The memory of each rank, if given in microbatches."""
        return None if isinstance(self.memory, Bytes) else self.memory


@dataclass(frozen=True)
class PlanAnswer:
    """A plan with remarks: keys of the JSON output, and paragraphs."""

    plan: Plan
    data: dict[str, object]
    paragraphs: tuple[str, ...] = ()

    def with_remark(self, data: dict[str, object], paragraph: str) -> PlanAnswer:
        """Returns the same plan with another remark."""
        return replace(self, data=self.data | data, paragraphs=(*self.paragraphs, paragraph))


@click.command("plan", cls=SectionedCommand)
@click.argument("config", required=False)
@cluster_options
@work_options
@search_options
@option_group(PlanOptions, "options", WORK)
@gather_options
@head_options
@picture_options
@click.option("--format", "form", type=click.Choice(["text", "torch-csv"]), help="Print only the winner's schedule in this form.")
@click.option("-o", "--output", callback=output_file, metavar="FILE", help="Save the plan, for all commands and zb.io.load_plan.")
@json_option
def plan_command(
    config: str | None,
    work: WorkOptions,
    search: SearchOptions,
    options: PlanOptions,
    sharded: GatherOptions,
    head: HeadOptions,
    cluster: ClusterOptions,
    pictures: PictureFiles,
    form: str | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Find the schedule with the smallest bubble for times and memory, or the fastest ways to divide a model over GPUs.

    \b
    Examples:
      zerobubble plan config.json --gpu H100 --gpus 8 --pipeline-only
      zerobubble plan -p 8 -m 24 --times 18.522,18.086,9.337 --comm 0.601 --memory 8 -o plan.json
      zerobubble plan -m 24 --costs costs.json --memory 8GB
      zerobubble plan -p 8 -m 24 --layers layers.json --gpu RTX4090

    Tries all placements of stages. Prints the winner and the other placements, with the lower bound of each and the reason why it is no
    better. Ctrl-C ends the search and returns the best plan so far.

    With CONFIG, the config.json of a model of Transformers, and --gpu and --gpus, it says whether training the model fits, and how. These
    are estimates; nothing is measured.

    Times come from one of --times, --per-rank, --costs, --layers, --from and --model. --layers, --recompute, --offload, --weights and
    --head can be combined, and the savings of each are printed. docs/planner.md and docs/command-line.md in the repository explain the
    options and the output, with more examples.
    """
    if config is not None:
        refuse_together("model", "config")
        cluster = replace(cluster, model=config)
    if cluster.model is not None:
        plan_cluster(cluster, options.gpu_bytes(cluster.source), pictures, as_json)
        return
    require_model(cluster, but="gpu" if options.source is not None or options.layers is not None else None)
    if as_json and form is not None:
        raise InputError("{argument} and {other} contradict each other", argument="--json", other=f"--format {form}", remedy="give one")
    of_ranks = ("times", "fused", "reduce", "buckets", "microbatch_bytes", "per_rank", "num_layers")
    for exclusive in (("layers", *of_ranks), ("costs_file", "layers"), ("source", "layers", *of_ranks)):
        refuse_together(*exclusive)
    refuse_together("source", "costs_file")
    if options.layers is None:
        require_with("inside_blocks", "--layers", "")
    if options.layers is None and options.source is None:
        require_with("speeds", "--layers", "give the layers, or the times of each rank with --per-rank")
    answer = _answer(work, search, options, sharded, head, cluster.gpu)
    answer = _with_offloads(_with_gathers(_with_remarks(answer, search, options)))
    schedule = answer.plan.schedule
    if output is not None:
        write_text(output, dumps(answer.plan))
    write_plan(answer.plan, pictures, output)
    if as_json:
        click.echo(json.dumps(plan_to_dict(answer.plan) | answer.data, indent=2))
    elif form is not None:
        click.echo(schedule.to_text() if form == "text" else to_torch_csv(schedule), nl=False)
    else:
        click.echo("\n\n".join([str(answer.plan), *answer.paragraphs]))


def _answer(
    work: WorkOptions, search: SearchOptions, options: PlanOptions, sharded: GatherOptions, head: HeadOptions, gpu: str | None
) -> PlanAnswer:
    """Plans for layers, stages or ranks, with all axes of the options or the plan file."""
    file = options.source if options.layers is None else options.layers
    if file is not None:
        _refuse_pairs({}, search, options, sharded, file)
        head.require_times()
        if options.source is not None:
            given_layers = read_source(options.source, gpu, work.ranks, work.microbatches)
        else:
            given_layers = layers_in_file(file, work, gpu, need_bytes=options.rank_bytes is not None)
        return _plan_layers(given_layers, search, options, sharded, head)
    question = read_question("plan", work, search)
    in_file = {"shares": bool(question.shares), "head": has_head(question), "fused": bool(question.work.fused)}
    if question.problem is not None:
        in_file["slices"] = question.problem.slices > 1
        recomputation = question.problem.recomputation if options.recompute is None else None
        others = {"sharded": question.problem.sharded, "host": question.problem.host, "recompute": recomputation}
        in_file |= {axis: value is not None for axis, value in others.items()}
    _refuse_pairs(in_file, search, options, sharded, work.costs_file or "")
    link, placed = link_asked(question, options.offload, work.microbatch_bytes), head.head_for(question)
    memory = _memory(question, work, options)
    if memory is None:
        require_with("offload", "--memory", "")
    extras: dict[str, Any] = {"baseline": options.baseline, "sharded": sharded.sharded(question.problem, options.within / 100)}
    extras |= {"shares": options.shares or question.shares, "links": options.links, "head": placed, "host": link}
    extras |= _slices(options, question)
    if extras["sharded"] is None:
        require_with("within", "--weights", "give their sizes")
    extras |= _recomputation(options, question)
    with search_progress(search) as watch:
        arguments = search.arguments(search.objective or (question.objective if link is None else None), watch)
        best = plan(question.work, question.microbatches, memory, placements=question.tried, **extras, **arguments)
    remarks = *_on_layers(best, question, search), *_on_slices(best, options), *_microbatches_in_bytes(options, _sizes(question, options))
    answer = PlanAnswer(best, {}, remarks)
    return _with_memory(answer, None if options.rank_bytes is None else DeviceMemory(options.rank_bytes))


def _slices(options: PlanOptions, question: PlanQuestion) -> dict[str, Any]:
    """Returns the slices and the attention of the options, else those of the plan file."""
    in_plan = () if question.problem is None else question.problem.costs.slices
    attention = attention_in(in_plan) if in_plan and not options.attention else options.attention
    return {"slices": options.slices or len(in_plan) or 1, "attention": attention}


_FULL, _MUCH_IDLE = 4, 0.2
"""Slices are suggested for fewer microbatches per rank than this, if at least this share of the best step must be idle."""

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
    "slices": "--slices",
    "period": "--objective period",
    "what_if": "--what-if",
}
"""The option of each axis of a problem."""
_WORDS = {
    "sharded": "the sharding of weights",
    "shares": "the cost of each microbatch",
    "recompute": "the recomputation",
    "head": "the head",
    "host": "the offload",
    "fused": "the time of BW",
    "slices": "the slices",
}
"""The part of a file for each axis."""


def _refuse_pairs(axes: dict[str, bool], search: SearchOptions, options: PlanOptions, sharded: GatherOptions, file: str) -> None:
    """Raises for pairs of axes that cannot be planned together, from the options or from `axes` of a file."""
    in_options = {
        "speeds": bool(options.speeds),
        "links": bool(options.links),
        "baseline": options.baseline is not None,
        "sharded": sharded.weights is not None,
        "shares": bool(options.shares),
        "recompute": options.recompute in ("full", "auto") or options.levels is not None,
        "slices": bool(options.slices),
        "period": search.objective == Objective.PERIOD,
        "what_if": options.what_if is not None,
    }
    in_options |= {axis: bool(given_flags({"host": "offload"}.get(axis, axis))) for axis in ("layers", "head", "host", "fused")}
    in_options["layers"] |= options.source is not None
    in_file = {axis: f"{words} in {file}" for axis, words in _WORDS.items() if axes.get(axis)}
    refuse_pairs(in_file | {axis: flag for axis, flag in _FLAGS.items() if in_options[axis]})


def _on_layers(best: Plan, question: PlanQuestion, search: SearchOptions) -> tuple[str, ...]:
    """Says how many layers the winner needs, if the number of layers is unknown."""
    placement = best.problem.placement
    if search.num_layers is not None or placement.stages_per_rank == 1 or not isinstance(question.work, Workload):
        return ()
    return (f"The winner has {placement.num_stages} stages, each of at least one layer. Give --num-layers N if the model has fewer.",)


def _on_slices(best: Plan, options: PlanOptions) -> tuple[str, ...]:
    """Names slices where few whole microbatches leave ranks idle in every order."""
    problem = best.problem
    has_other_axes = any(
        (problem.sharded, problem.recomputation, problem.head, problem.host, options.shares, options.speeds, options.baseline)
    )
    is_short = problem.num_microbatches < _FULL * problem.placement.num_ranks and best.least_bubble >= _MUCH_IDLE
    if has_other_axes or not is_short or options.slices or problem.slices > 1 or options.what_if is not None:
        return ()
    few = counted(problem.num_microbatches, "microbatch")
    return (f"{few} cannot keep {counted(problem.placement.num_ranks, 'rank')} busy. If they are long sequences, try --slices auto.",)


def _recomputation(options: PlanOptions, question: PlanQuestion) -> dict[str, Any]:
    """Returns the arguments of recomputation, from the options or else from the plan to repeat."""
    levels = None if options.levels is None else parse_levels(options.levels)
    in_plan = None if question.problem is None else question.problem.recomputation
    if in_plan is None or options.recompute is not None:
        return {"recompute": options.recompute or "none", "levels": levels}
    offered = tuple(level for level in in_plan.offered if level != NONE)
    return {"recompute": "auto" if in_plan.is_optional else "full", "levels": levels or offered}


def _memory(question: PlanQuestion, work: WorkOptions, options: PlanOptions) -> Limits | float | None:
    """Returns the memory of each rank, from the options or else from the plan to repeat."""
    if options.rank_bytes is not None and isinstance(question.work, Workload):
        return in_microbatches(options.rank_bytes, work)
    if options.rank_bytes is not None:
        return Limits((options.rank_bytes,) * question.num_ranks)
    return question.limits if options.rank_microbatches is None else options.rank_microbatches


def _sizes(question: PlanQuestion, options: PlanOptions) -> Limits | None:
    """Returns the bytes of --memory in microbatches, None if they are unknown."""
    if options.rank_microbatches is None or isinstance(question.work, Workload):
        return None
    return limits_for(options.rank_microbatches, microbatch_bytes(next(iter(question.placements.values())), question.work))


def _with_gathers(answer: PlanAnswer) -> PlanAnswer:
    """Adds the gathers of the winner, if weights are sharded."""
    gathers = gathering.planned(answer.plan.schedule, answer.plan.problem.sharded)
    if not gathers:
        return answer
    lines = [f"rank {rank}: {gathering.gather_text(plan)}" for rank, plan in enumerate(gathers)]
    return answer.with_remark({"weights": gathering.as_dicts(gathers)}, "\n".join(["Sharded weights of the winner:", *lines]))


def _with_offloads(answer: PlanAnswer) -> PlanAnswer:
    """Adds the offloads of each rank, if the problem has a link to the host."""
    best, savings = answer.plan, answer.plan.saving(OffloadSavings)
    if savings is None or best.timeline is None:
        return answer
    ranks = offloading.as_dicts(Offloaded(best.offloads, best.timeline, savings.without or 0))
    costed = costed_plan(best, "the costs of the plan")
    lines = [f"rank {rank}: {offloading.offload_text(costed, plan, rank)}" for rank, plan in enumerate(best.offloads)]
    return answer.with_remark({savings.axis: savings.to_dict() | {"ranks": ranks}}, "\n".join(lines))


def _plan_layers(source: GivenLayers, search: SearchOptions, options: PlanOptions, sharded: GatherOptions, head: HeadOptions) -> PlanAnswer:
    """Plans the cut of these layers together with the schedule."""
    parts, (ranks, microbatches) = source.parts, require_shape("plan", source.ranks, source.microbatches)
    placements = named_placements(search, ranks, microbatches)
    layers = parts if options.inside_blocks else join_blocks(parts)
    device = _device_memory(source, options)
    memory = options.rank_microbatches if device is None else Limits((device.usable,) * ranks)
    if memory is None:
        require_with("offload", "--memory", "")
    axes = _axes_of_layers(layers, ranks, options, head) | {"sharded": sharded.sharded(None, options.within / 100)}
    with search_progress(search) as watch:
        ask = partial(plan, layers, microbatches, memory, placements=placements)
        best = _planned(ask, axes, search.arguments(search.objective, watch))
    savings, inside = best.saving(CutSavings), None
    answer = _with_memory(PlanAnswer(best, {}, tuple(filter(None, [source.device_text(), str(source.dtype or "")]))), device)
    if savings is not None and len(parts) > len(savings.cut.layers):
        inside = cut_layers(parts, savings.cut.placement, savings.limits, speeds=savings.cut.speeds).excess
    if best.cut is not None and inside is not None and inside < best.cut.excess:
        text = f"Cuts inside blocks bring the slowest rank to {inside:.3f} x an even share: give --inside-blocks."
        answer = answer.with_remark({}, text)
    if options.rank_microbatches is not None and any(layer.parameters_bytes for layer in layers):
        limits = equal_limits(layers, ranks, options.rank_microbatches)
        answer = replace(answer, paragraphs=(*answer.paragraphs, *_microbatches_in_bytes(options, limits)))
    origin = {
        "gpu": source.gpu and source.gpu.name,
        "machine": source.machine and source.machine.to_dict(),
        "dtype": source.dtype and source.dtype._asdict(),
    }
    return replace(answer, data=answer.data | {"excess_inside_blocks": inside, **origin})


def _planned(ask: Callable[..., Plan], axes: dict[str, Any], arguments: dict[str, Any]) -> Plan:
    """Returns the plan. If layers fit with recomputation only, the error says so."""
    try:
        return ask(**axes, **arguments)
    except InputError as error:
        if axes["recompute"] != "none" or not _fits(ask, axes | {"recompute": "auto"}):
            raise
        raise InputError("{reason}; it fits with {option}", reason=str(error), option="--recompute auto") from error


def _fits(ask: Callable[..., Plan], axes: dict[str, Any]) -> bool:
    try:
        return ask(**axes, evaluations=0).order is not None
    except InputError:
        return False


def _device_memory(source: GivenLayers, options: PlanOptions) -> DeviceMemory | None:
    """Returns the memory of each rank in bytes: --memory, else all of a named GPU; None if --memory has microbatches or is not given."""
    total = options.rank_bytes
    if options.memory is None and source.gpu is not None:
        total = source.gpu.memory_bytes
    return None if total is None else DeviceMemory(total, source.gpu)


def _with_memory(answer: PlanAnswer, device: DeviceMemory | None) -> PlanAnswer:
    """Adds the memory of each rank, if it is known in bytes."""
    return answer if device is None else answer.with_remark(device.to_dict(), str(device))


def _axes_of_layers(layers: Sequence[Layer], ranks: int, options: PlanOptions, head: HeadOptions) -> dict[str, Any]:
    """Returns the arguments of `plan` for layers. A rank holds an equal share of them for each microbatch."""
    held = sum(layer.held_after_f for layer in layers) // ranks
    axes: dict[str, Any] = {name: getattr(options, name) for name in ("baseline", "shares", "speeds", "links")}
    axes["recompute"] = options.recompute or "none"
    axes["levels"] = None if options.levels is None else parse_levels(options.levels)
    if head.head is not None:
        axes["head"] = Head(head.head, head.head_held * held, head.collective, head.head_slowdown)
    if options.offload is not None:
        axes["host"] = host_link(options.offload, max(1, held), lambda rate: float(rate.count))
    return axes


def _microbatches_in_bytes(options: PlanOptions, limits: Limits | None) -> tuple[str, ...]:
    """Converts --memory from microbatches to bytes if the bytes of a microbatch are known: the user may have forgotten the unit."""
    if options.rank_microbatches is None or limits is None:
        return ()
    size = show_range(limits.memory, show_bytes)
    option = f"--memory {options.rank_microbatches:g}"
    return (f"{option} holds {options.rank_microbatches:g} microbatches, {size} on each rank. For bytes, give a unit: {option}GB.",)


def _with_remarks(answer: PlanAnswer, search: SearchOptions, options: PlanOptions) -> PlanAnswer:
    """Adds the winner's time with other times of passes, if asked for."""
    if options.what_if is not None:
        moved = what_if(answer.plan, options.what_if / 100, seed=search.seed)
        without = "" if answer.plan.problem.sharded is None else "\nWithout gathers of weights."
        answer = answer.with_remark({"what_if": moved.to_dict()}, what_if_text(moved) + without)
    return answer


@contextmanager
def search_progress(search: SearchOptions, searches: int = 1) -> Iterator[ProgressCallback | None]:
    """Yields a callback that shows the progress of the search in a terminal; None without a terminal or a search."""
    seconds = search.budget * searches if search.evaluations is None else None
    with progress() as bar:
        yield None if bar.disable or seconds == 0 else _shown(bar, seconds)


def _shown(bar: Progress, seconds: float | None) -> ProgressCallback:
    task = bar.add_task("preparing", total=seconds)

    def show(news: PlanProgress) -> None:
        description = f"{news.placement}: bubble {show_percent(news.bubble)}, {show_percent(news.gap)} above the bound, {news.how}"
        bar.update(task, completed=bar.tasks[0].elapsed or 0.0, description=description)

    return show
