"""The schedule of a command, by name or from a file, and its costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

from zerobubble.cli.inputs.files import SCHEDULE, costs_of, is_file, parse_document, read_text, require_size
from zerobubble.cli.inputs.options import EQUAL_COSTS, CostOptions, Shape, given_flags, lacking, misfit, refuse_together, require_with
from zerobubble.costs import KEPT_WORDS, NONE, NS_PER_MS, UNIT_BYTES, Costs
from zerobubble.display import file_titles
from zerobubble.errors import InputError, near
from zerobubble.export.document import schedule_of
from zerobubble.ir import Schedule
from zerobubble.offload import HostLink, RankOffloads, play_offloads
from zerobubble.planning.answer import Plan
from zerobubble.planning.problem.head import Head
from zerobubble.planning.problem.problem import Problem, microbatch_bytes
from zerobubble.planning.problem.workload import Workload
from zerobubble.schedules import Recipe, known_schedules, make, registry
from zerobubble.simulation import period, simulate
from zerobubble.slicing import SliceShares, equal_slices
from zerobubble.timeline import Timeline
from zerobubble.units import counted, show_bytes, show_range

INPUT_HELP = "a known schedule, or a file: a schedule (text or JSON), a plan, or PyTorch's schedule CSV; - is stdin"


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule with the `plan` it comes from and the `text` of its file, which are None for a schedule made by name."""

    name: str
    schedule: Schedule
    plan: Plan | None = None
    text: str | None = None

    @property
    def problem(self) -> Problem | None:
        """The problem of the plan, None without one."""
        return None if self.plan is None else self.plan.problem


@dataclass(frozen=True)
class Costed:
    """A schedule with its costs, and a description of their `source`.

    Measured costs have real bytes. Costs made from times count the memory of a stage and microbatch as `UNIT_BYTES`, and memory is then
    shown in microbatches. `limits` are the bytes that each rank may hold, empty if the schedule is not from a plan. `offloads` are the
    activations that each rank copies over the `link` to its host. `head_bytes` are those of an undivided head in the last stage,
    which do not count as memory of a microbatch.
    """

    schedule: Schedule
    costs: Costs
    source: str
    is_measured: bool = False
    limits: tuple[int, ...] = ()
    offloads: tuple[RankOffloads, ...] = ()
    link: HostLink | None = None
    head_bytes: int = 0

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated timeline, including copies to the host and back; raises as `simulate` does."""
        if self.link is None:
            return simulate(self.schedule, self.costs)
        return play_offloads(self.schedule, self.costs, self.offloads, self.link)

    @cached_property
    def period(self) -> int:
        """The time per step in ns if nothing synchronizes the ranks between steps; with copies to the host, the longest span of a rank."""
        return period(self.schedule, self.costs) if self.link is None else self.timeline.span

    @property
    def in_bytes(self) -> bool:
        """Whether the bytes in the costs are real."""
        return self.is_measured and set(self.costs.held_after_f) != {UNIT_BYTES}

    @property
    def constant_bytes(self) -> dict[str, tuple[int, ...]]:
        """The bytes that each rank always holds, by their use; empty if unknown, or if memory is in microbatches."""
        kept = self.costs.kept_bytes(self.schedule.placement) if self.in_bytes else ()
        return {KEPT_WORDS: kept} if kept else {}

    @property
    def microbatch_bytes(self) -> tuple[int, ...]:
        """Per rank, the bytes of one microbatch in all its stages, without the head."""
        return microbatch_bytes(self.schedule.placement, self.costs, self.head_bytes)

    def show_memory(self, count: int, rank: int) -> str:
        """Formats bytes of a rank: as bytes if they are real, else as microbatches."""
        return show_bytes(count) if self.in_bytes else counted(count / self.microbatch_bytes[rank], "microbatch")

    def in_microbatches(self, peaks: Sequence[int]) -> list[float]:
        """Converts the bytes of each rank to microbatches."""
        return [peak / size for peak, size in zip(peaks, self.microbatch_bytes, strict=True)]


def find_schedule(name: str, shape: Shape, costing: CostOptions | None = None) -> NamedSchedule:
    """Makes the schedule `name` of this shape, or reads it from the file `name`. Raises `InputError` if the shape does not fit the file.

    A schedule made by name takes the ranks and microbatches that are not given from the file of the costs.
    """
    if not is_file(name):
        return NamedSchedule(name, make_schedule(name, _with_shape_of_costs(shape, costing)))
    named = read_schedule(name)
    if shape.options:
        raise misfit("--set", f"{next(iter(shape.options))}=...", f"the file {name}")
    schedule = named.schedule
    wanted = {"--ranks": shape.ranks, "--microbatches": shape.microbatches, "--stages-per-rank": shape.stages_per_rank}
    actual = (schedule.num_ranks, schedule.whole_microbatches, schedule.placement.stages_per_rank)
    for (option, value), has in zip(wanted.items(), actual, strict=True):
        if value not in (None, has):
            raise misfit(option, value, f"{name}, which has {has}")
    return named


def _with_shape_of_costs(shape: Shape, costing: CostOptions | None) -> Shape:
    """Returns the shape with the ranks of measured costs, or the ranks and microbatches of a plan, if they are not given."""
    document = None if costing is None else costing.document
    if isinstance(document, Plan):
        schedule = document.schedule
        return replace(shape, ranks=shape.ranks or schedule.num_ranks, microbatches=shape.microbatches or schedule.whole_microbatches)
    placement = document.placement if isinstance(document, Costs) else None
    return shape if placement is None else replace(shape, ranks=shape.ranks or placement.num_ranks)


def read_schedule(file: str) -> NamedSchedule:
    """Reads a schedule or the schedule of a plan. Raises `InputError` with the file name for anything else."""
    text = read_text(file)
    document = parse_document(file, text, SCHEDULE)
    try:
        schedule = schedule_of(document)
    except InputError as error:
        raise InputError("cannot read a schedule from {file}: {reason}", file=str(file), reason=str(error)) from error
    return NamedSchedule(file, schedule, document if isinstance(document, Plan) else None, text)


def make_schedule(name: str, shape: Shape) -> Schedule:
    """Makes the known schedule `name`. Raises `InputError` for a count that is missing or too large."""
    recipe = registry.find(name)
    if recipe is None:
        names = known_schedules()
        nearest = "separate schedules by spaces; " if "," in name else near(name, names)
        raise InputError(
            "there is no schedule and no file {name!r}: {nearest}known schedules are {known}",
            name=name,
            nearest=nearest,
            known=", ".join(names),
        )
    if shape.ranks is None or shape.microbatches is None:
        raise lacking(name, shape, recipe)
    stages = recipe.stages_per_rank if shape.stages_per_rank is None else shape.stages_per_rank
    require_size(name, 3 * shape.ranks * shape.microbatches * stages)
    return make(name, shape.ranks, shape.microbatches, shape.stages_per_rank, **(shape.options or {}))


def find_schedules(names: Sequence[str], shape: Shape, costing: CostOptions | None = None) -> list[NamedSchedule]:
    """Makes or reads the schedules `names`, all of one shape, which is given by the options, the first file, or the file of the costs.

    Stages per rank and options apply to the schedules that have them. Raises `InputError` if a schedule does not exist in this shape, or
    if the shapes differ.
    """
    files = {name: read_schedule(name) for name in dict.fromkeys(names) if is_file(name)}
    first = next((named.schedule for named in files.values()), None)
    ranks = first.num_ranks if shape.ranks is None and first else shape.ranks
    microbatches = first.whole_microbatches if shape.microbatches is None and first else shape.microbatches
    completed = _with_shape_of_costs(replace(shape, ranks=ranks, microbatches=microbatches), costing)
    ranks, microbatches = completed.ranks, completed.microbatches
    shapes = shapes_of_names([name for name in names if name not in files], replace(shape, ranks=ranks, microbatches=microbatches))
    inputs = [files[name] if name in files else NamedSchedule(name, make_schedule(name, shapes[name])) for name in names]
    for named in inputs:
        schedule = named.schedule
        if (schedule.num_ranks, schedule.whole_microbatches) != (ranks, microbatches):
            has = f"{schedule.num_ranks} ranks and {schedule.whole_microbatches} microbatches"
            raise InputError(
                "{name} has {has}, not {num_ranks} and {microbatches}: compared schedules must have one shape",
                name=named.name,
                has=has,
                num_ranks=ranks,
                microbatches=microbatches,
            )
    return inputs


def shapes_of_names(names: Sequence[str], shape: Shape) -> dict[str, Shape]:
    """Returns the shape for each known schedule, with the stages per rank and options that apply to it."""
    recipes = known_schedules()
    shapes = {name: _shape_for(recipes.get(name), shape) for name in names}
    if shape.stages_per_rank is not None and all(applied.stages_per_rank is None for applied in shapes.values()):
        raise InputError(
            "--stages-per-rank {stages_per_rank} has no effect: none of {names} leaves it open",
            stages_per_rank=shape.stages_per_rank,
            names=", ".join(names),
        )
    if unknown := [key for key in shape.options or {} if not any(key in (applied.options or {}) for applied in shapes.values())]:
        raise InputError(
            "--set {unknown}=... has no effect: none of {names} has such an option", unknown=unknown[0], names=", ".join(names)
        )
    return shapes


def _shape_for(recipe: Recipe | None, shape: Shape) -> Shape:
    options = {key: value for key, value in (shape.options or {}).items() if recipe is not None and key in recipe.options}
    is_open = recipe is not None and recipe.any_stages
    return replace(shape, stages_per_rank=shape.stages_per_rank if is_open else None, options=options)


def equal_costs(
    schedule: Schedule,
    times: tuple[float, float, float],
    comm: float,
    held: float = 1.0,
    overlap: float | None = None,
    reduce: float = 0.0,
    buckets: int = 0,
    fused: float | None = None,
) -> Costs:
    """Returns costs of equal stages. `times` are the ms of F, B and W of a microbatch on a rank, divided among its stages.

    `overlap` is the time of F overlapped with B and W on a rank, `fused` that of BW, and `reduce` that of summing its gradients over
    replicas in `buckets` parts, all in ms. The second copy of a stage in a bidirectional schedule serves other microbatches, so it does
    not count. R takes as long as F. A forward that R repeats keeps 6 % of its bytes.
    """
    per_rank = schedule.num_stages / schedule.num_ranks
    forward, backward, weight = (time / per_rank for time in times)
    overlap, fused = (None if time is None else time / per_rank for time in (overlap, fused))
    options: dict[str, Any] = {
        "held": held,
        "overlap": overlap,
        "fused": fused,
        "reduce": reduce / per_rank,
        "buckets": ceil(buckets / per_rank),
    }
    costs = Costs.uniform(schedule.num_stages, (forward, backward, weight), comm, **options)
    return replace(costs, slices=equal_slices(schedule.slices)).completed_for(schedule)


def with_costs(inputs: Sequence[NamedSchedule], costing: CostOptions) -> list[Costed]:
    """Returns the schedules with costs, from the options, else from the first plan among the schedules, else 1 ms per pass.

    All schedules do the same work on each rank, however many stages it has. Raises `InputError` if the costs do not fit the stages
    or microbatches of a schedule, and if two plans were made for different work.
    """
    costed = _with_costs_of_stages(inputs, costing)
    return [_with_shares(unshared, costing.shares) for unshared in costed] if costing.shares else costed


def _with_shares(costed: Costed, shares: tuple[float, ...]) -> Costed:
    """Returns the schedule with microbatches of unequal cost."""
    costs = replace(costed.costs, shares=shares)
    costs.require_schedule(costed.schedule)
    return replace(costed, costs=costs, source=f"{costed.source}, microbatch costs {show_range(shares, '{:g}'.format)}")


def _with_costs_of_stages(inputs: Sequence[NamedSchedule], costing: CostOptions) -> list[Costed]:
    refuse_together("costs_file", *EQUAL_COSTS)
    if costing.costs_file is not None:
        costs = costs_of(costing.document, costing.costs_file)
        return [_measured(named.schedule, costs, costing.costs_file) for named in inputs]
    plans = [named for named in inputs if named.problem is not None]
    if plans and not given_flags(*EQUAL_COSTS):
        return _as_planned(inputs, plans)
    if costing.buckets and not costing.reduce:
        require_with("buckets", "--reduce", "give the time of the sums")
    forward, backward, weight = costing.times
    source = f"F {forward:g} ms, B {backward:g} ms, W {weight:g} ms, messages {costing.comm:g} ms"
    source += f", BW {costing.fused:g} ms" if costing.fused is not None else ""
    source += f", sums over replicas {costing.reduce:g} ms" if costing.reduce else ""
    source += f" in {counted(costing.buckets, 'bucket')}" if costing.reduce and costing.buckets else ""
    arguments = costing.times, costing.comm, costing.held, costing.overlap, costing.reduce, costing.buckets, costing.fused
    return [Costed(named.schedule, equal_costs(named.schedule, *arguments), source) for named in inputs]


def _measured(schedule: Schedule, costs: Costs, file: str) -> Costed:
    try:
        costs.require_schedule(schedule)
    except InputError as error:
        work = [sum(column) / schedule.num_ranks / NS_PER_MS for column in (costs.forward, costs.backward, costs.weight)]
        times = ",".join(f"{time:.4g}" for time in work)
        remedy = f"call pipe.profile with {schedule.name}, or instead of {file} give its mean work per rank, --times {times}"
        raise InputError("{reason}; {remedy}", reason=str(error), remedy=remedy) from error
    return Costed(schedule, costs, _costs_of(file), is_measured=True)


def _costs_of(file: str) -> str:
    (title,) = file_titles([file])
    return f"costs of {title}"


def _as_planned(inputs: Sequence[NamedSchedule], plans: Sequence[NamedSchedule]) -> list[Costed]:
    """Returns the schedules with the costs of the plans, which must be for the same work."""
    first, *others = plans
    assert first.problem is not None
    for other in others:
        if other.problem is not None and not _same_work(first.problem, other.problem):
            raise InputError(
                "{name} and {other} were planned for different work",
                name=first.name,
                other=other.name,
                remedy="give --times or --costs for both",
            )
    return [_costed_as(first.problem, first.name, named) for named in inputs]


def _costed_as(planned: Problem, source: str, named: NamedSchedule) -> Costed:
    """Returns a schedule with the costs of the problem `planned`, which is from the file `source`."""
    if planned.workload is None:
        costed = _measured(named.schedule, (named.problem or planned).costs, source)
    else:
        costs = _with_head(_with_recompute(_shared(planned.workload, named, source), named), named.schedule, planned.head)
        costs = replace(costs, shares=planned.costs.shares, slices=_slices(named, planned))
        costed = Costed(named.schedule, costs, _costs_of(source))
    limits = () if named.problem is None else named.problem.limits.memory
    head = 0 if planned.head is None or named.schedule.has_divided_head else round(planned.head.held)
    return replace(costed, limits=limits, head_bytes=head)


def _slices(named: NamedSchedule, planned: Problem) -> tuple[SliceShares, ...]:
    """Returns the slices of a schedule: from its own plan, else from `planned` if there are as many, else equal slices."""
    slices = named.schedule.slices
    in_plan = (named.problem or planned).costs.slices
    return in_plan if slices == len(in_plan) else equal_slices(slices)


def _with_head(costs: Costs, schedule: Schedule, head: Head | None) -> Costs:
    """Adds the head of a plan to the costs: divided if the schedule divides it, else whole in the last stage."""
    if head is None:
        return costs
    return head.divided(costs, schedule.num_ranks) if schedule.has_divided_head else head.whole(costs)


def _with_recompute(costs: Costs, named: NamedSchedule) -> Costs:
    """Adds the costs of R, with the levels of the plan, or with full recomputation if there is no plan."""
    levels = None if named.problem is None else named.problem.recomputation
    return costs.completed_for(named.schedule) if levels is None else costs.with_recompute(levels.chosen)


def _same_work(first: Problem, second: Problem) -> bool:
    if first.workload is None:
        return _without_recompute(first) == _without_recompute(second)
    return (first.workload, first.costs.shares, first.head) == (second.workload, second.costs.shares, second.head)


def _without_recompute(problem: Problem) -> Costs:
    """The costs without recomputation."""
    nothing = [NONE] * problem.costs.num_stages
    return problem.costs if problem.recomputation is None else problem.costs.with_recompute(nothing)


def _shared(work: Workload, named: NamedSchedule, plan: str) -> Costs:
    """Divides the work of each rank, from the plan in the file `plan`, among the stages of a schedule."""
    schedule = named.schedule
    if len(schedule.placement.routes) > 1 and len({_work_of_rank(work, rank) for rank in range(work.num_ranks)}) > 1:
        remedy = "give --times for all schedules"
        raise InputError(
            "{name} has each stage on two ranks, but in {plan} the work of ranks differs: {remedy}",
            name=named.name,
            plan=plan,
            remedy=remedy,
        )
    return work.costs(schedule.placement)


def _work_of_rank(work: Workload, rank: int) -> tuple[int, ...]:
    parts = (work.forward, work.backward, work.weight, work.held_after_f, work.held_after_b, work.reduce, work.buckets)
    return tuple(part[rank] for part in (*parts, *filter(None, [work.fused])))


def equal_times(problem: Problem, name: str) -> tuple[tuple[float, float, float], float]:
    """Returns the times of F, B and W of a rank, and of a message, in ms. Raises `InputError` with the plan's `name` if ranks differ."""
    work = problem.workload
    if work is None or len({(_work_of_rank(work, rank), work.comm[rank]) for rank in range(work.num_ranks)}) > 1:
        raise InputError("closed forms need equal ranks, but those of {name} differ", name=name, remedy="give --times")
    forward, backward, weight, comm = (column[0] / NS_PER_MS for column in (work.forward, work.backward, work.weight, work.comm))
    return (forward, backward, weight), comm
