"""The problem of a planning command: the work of ranks or stages, the number of microbatches, and the placements to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from zerobubble.arguments import wrong
from zerobubble.cli.inputs.files import COSTS, MOST_PLANNED, read_document, read_json, require_size
from zerobubble.cli.inputs.options import (
    SEARCH,
    WORK,
    Counts,
    EqualCosts,
    bytes_with_unit,
    lacking,
    misfit,
    option,
    option_group,
    refuse_together,
    seconds,
)
from zerobubble.costs import Costs, Limits
from zerobubble.errors import InputError, ParseError
from zerobubble.export.document import describe_document
from zerobubble.ir import Placement
from zerobubble.planning import Objective, Plan, Problem, Workload
from zerobubble.planning.placements import ANY, FAMILIES, family, placements_to_try
from zerobubble.planning.problem.from_work import has_ample_memory
from zerobubble.planning.problem.head import has_parts

_COLUMNS = ("forward", "backward", "weight")


@dataclass(frozen=True, kw_only=True)
class WorkOptions(EqualCosts, Counts):
    """The work of ranks: times of equal ranks, or a file."""

    per_rank: str | None = option("--per-rank", metavar="FILE", help="JSON with the times of each rank in ms.")
    costs_file: str | None = option("--costs", metavar="FILE", help="Costs of Pipeline.profile, or a plan to repeat.")
    microbatch_bytes: int | None = option(
        "--microbatch-bytes",
        callback=bytes_with_unit,
        metavar="BYTES",
        help="Activations of a microbatch on a rank, for --times with --memory in bytes.",
    )


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The settings of the search."""

    placement: str = option(
        "--placement", default=ANY, metavar="NAME,...", help=f"Placements of stages: {', '.join(FAMILIES)}, or {ANY} to try all."
    )
    objective: str | None = option(
        "--objective",
        type=click.Choice([aim.value for aim in Objective]),
        help="Time to minimize: the period (default), or the makespan if global operations separate steps, such as clipping by norm.",
    )
    budget: float = option(
        "--budget", callback=seconds, default="5", metavar="SECONDS", help="Search time, such as 20 or 2min; 0 for none."
    )
    evaluations: int | None = option(
        "--evaluations", type=click.IntRange(0), metavar="N", help="Schedules to try, instead of --budget. Reproducible."
    )
    seed: int = option("--seed", type=click.IntRange(0), default=0, metavar="N", help="Seed of the search.")
    num_layers: int | None = option(
        "--num-layers", type=click.IntRange(1), metavar="N", help="Layers of the model. Excludes placements with more stages."
    )

    def arguments(self, objective: str | None, progress: object) -> dict[str, Any]:
        """Returns the arguments of the planner. Raises `InputError` if both limits of the search are given."""
        refuse_together("evaluations", "budget")
        budget = {"seconds": self.budget} if self.evaluations is None else {"evaluations": self.evaluations}
        return {"objective": objective, "seed": self.seed, "progress": progress, **budget}


work_options = option_group(WorkOptions, "work", WORK)
search_options = option_group(SearchOptions, "search", SEARCH)


@dataclass(frozen=True)
class PlanQuestion:
    """A problem to plan: the work of ranks or the costs of stages, the number of microbatches, and the placements by name.

    `problem` is from the plan file, None without a file. `limits` are its memory limits, None if they never bind.
    """

    work: Workload | Costs
    microbatches: int
    placements: dict[str, Placement]
    problem: Problem | None = None
    limits: Limits | None = None

    @property
    def objective(self) -> str | None:
        """The objective of the plan file, None without one."""
        return None if self.problem is None else self.problem.objective.value

    @property
    def shares(self) -> tuple[float, ...]:
        """The costs of microbatches in the plan file, empty if they are equal."""
        return () if self.problem is None else self.problem.costs.shares

    @property
    def num_ranks(self) -> int:
        return next(iter(self.placements.values())).num_ranks

    @property
    def tried(self) -> list[str] | Placement:
        """The placements as the planner takes them: names for the work of ranks, the one placement for costs of stages."""
        return list(self.placements) if isinstance(self.work, Workload) else next(iter(self.placements.values()))


def read_question(command: str, work: WorkOptions, search: SearchOptions) -> PlanQuestion:
    """Returns the problem that the options describe. Raises `InputError` if something is missing or contradicts a file."""
    refuse_together("costs_file", "times", "comm", "held", "fused", "reduce", "buckets", "per_rank", "microbatch_bytes")
    if work.costs_file is None:
        ranks = None if work.per_rank is None else read_workload(work.per_rank, work)
        return _of_ranks(command, work, search, ranks, work.per_rank)
    document = read_document(work.costs_file, COSTS)
    if isinstance(document, Workload):
        return _of_ranks(command, work, search, document, work.costs_file)
    if isinstance(document, Costs):
        return _of_stages(command, work, search, document)
    if isinstance(document, Plan):
        return _of_plan(command, work, search, document.problem)
    raise InputError(
        "{costs_file} holds {got}, not costs of stages, the work of ranks or a plan",
        costs_file=work.costs_file,
        got=describe_document(document),
        remedy=COSTS.remedy,
    )


def _of_ranks(command: str, work: WorkOptions, search: SearchOptions, ranks: Workload | None, file: str | None) -> PlanQuestion:
    """The work of ranks, from a file or from times of equal ranks, on the named placements."""
    count, microbatches = require_shape(command, ranks.num_ranks if work.ranks is None and ranks else work.ranks, work.microbatches)
    if ranks is not None and ranks.num_ranks != count:
        raise misfit("--ranks", count, f"{file}, which has times for {ranks.num_ranks}")
    work_of_ranks = ranks or Workload.uniform(count, work.times, work.comm, work.held, work.reduce, work.buckets, work.fused)
    return PlanQuestion(work_of_ranks, microbatches, named_placements(search, count, microbatches))


def _of_stages(command: str, work: WorkOptions, search: SearchOptions, costs: Costs) -> PlanQuestion:
    """The costs of stages on one placement, from the file or the options."""
    placement = _measured_placement(work, search, costs) if costs.placement is not None else _named_placement(work, search, costs)
    _, microbatches = require_shape(command, placement.num_ranks, work.microbatches)
    require_size("a plan", 3 * placement.num_stages * microbatches)
    _refuse_axes(command, f"{work.costs_file} has costs", {"a divided head": has_parts(costs), _UNEQUAL: bool(costs.shares)})
    name = search.placement if search.placement != ANY else placement.name
    _require_layers(name, placement, search.num_layers)
    return PlanQuestion(costs, microbatches, {name: placement})


def _measured_placement(work: WorkOptions, search: SearchOptions, costs: Costs) -> Placement:
    """The placement on which the costs were measured. Raises `InputError` if the options name another."""
    placement = costs.placement
    assert placement is not None
    measured = f"{work.costs_file}, which was measured on a {placement.name} placement over {placement.num_ranks} ranks"
    if work.ranks not in (None, placement.num_ranks):
        raise misfit("--ranks", work.ranks, measured)
    if search.placement == ANY:
        return placement
    named = family(search.placement, placement.num_ranks)
    if named.routes[0] != placement.routes[0]:
        raise misfit("--placement", search.placement, measured)
    return named


def _named_placement(work: WorkOptions, search: SearchOptions, costs: Costs) -> Placement:
    """The named placement, for costs without one. Raises `InputError` if its number of stages differs."""
    name, file = search.placement, work.costs_file
    if name == ANY or "," in name:
        raise InputError(
            "{file} has the costs of stages on one placement", file=str(file), remedy=f"name it, such as --placement {FAMILIES[0]}"
        )
    per_rank = family(name, 1).num_stages
    ranks, left = divmod(costs.num_stages, per_rank)
    if left or work.ranks not in (None, ranks):
        puts = f"{name} puts {per_rank} on each {'rank' if work.ranks is None else f'of {work.ranks} ranks'}"
        raise InputError(
            "{file} has costs of {num_stages} stages, but {puts}",
            file=str(file),
            num_stages=costs.num_stages,
            puts=puts,
            remedy="give the placement they were measured on",
        )
    return family(name, ranks)


_UNEQUAL = "microbatches of unequal cost"


def _refuse_axes(command: str, file: str, has: dict[str, bool]) -> None:
    """Raises `InputError` if a file has an axis that only `plan` can plan."""
    if command != "plan" and (what := [name for name, is_there in has.items() if is_there]):
        raise InputError(
            "{file} with {what}, which {command} does not support",
            file=file,
            what=" and ".join(what),
            command=command,
            remedy="give --times or --per-rank instead",
        )


def _of_plan(command: str, work: WorkOptions, search: SearchOptions, problem: Problem) -> PlanQuestion:
    """The problem of a plan, with the options replacing its parts. Limits that never bind are dropped."""
    _refuse_axes(
        command,
        f"{work.costs_file} is a plan",
        {"offload": problem.host is not None, "a head": problem.head is not None, _UNEQUAL: bool(problem.costs.shares)},
    )
    ranks = problem.placement.num_ranks
    if work.ranks not in (None, ranks):
        raise misfit("--ranks", work.ranks, f"{work.costs_file}, a plan for {ranks} ranks")
    _, microbatches = require_shape(command, ranks, problem.whole_microbatches if work.microbatches is None else work.microbatches)
    limits = None if has_ample_memory(problem) else problem.limits
    if problem.workload is not None:
        return PlanQuestion(problem.workload, microbatches, named_placements(search, ranks, microbatches), problem, limits)
    placement = problem.placement
    if search.placement != ANY and family(search.placement, ranks).routes != placement.routes:
        raise misfit("--placement", search.placement, f"{work.costs_file}, a plan for the stages of {placement.name}")
    return PlanQuestion(problem.costs, microbatches, {placement.name: placement}, problem, limits)


def require_shape(command: str, ranks: int | None, microbatches: int | None) -> tuple[int, int]:
    """Returns the numbers of ranks and microbatches. Raises `InputError` if one is missing, below 1 or too large."""
    if ranks is None or microbatches is None:
        raise lacking(command, Counts(ranks=ranks, microbatches=microbatches))
    for flag, count in (("--ranks", ranks), ("--microbatches", microbatches)):
        if count < 1:
            raise wrong(flag, count, "at least 1")
    require_size("a plan", 3 * ranks * microbatches)
    return ranks, microbatches


def named_placements(search: SearchOptions, num_ranks: int, microbatches: int) -> dict[str, Placement]:
    """Returns the placements to try by name. Raises `InputError` for unknown ones, more stages than layers, and too many passes."""
    named = placements_to_try([name.strip() for name in search.placement.split(",")], num_ranks)
    if search.placement == ANY and search.num_layers is not None:
        named = {name: placement for name, placement in named.items() if placement.num_stages <= max(num_ranks, search.num_layers)}
    for name, placement in named.items():
        _require_layers(name, placement, search.num_layers)
    most = max(placement.num_stages for placement in named.values())
    require_size("a plan", 3 * most * microbatches, MOST_PLANNED)
    return named


def _require_layers(name: str, placement: Placement, num_layers: int | None) -> None:
    """Raises `InputError` if the placement has more stages than the model has layers."""
    if num_layers is not None and placement.num_stages > num_layers:
        raise InputError(
            "{name} over {num_ranks} ranks has {num_stages} stages, more than --num-layers {num_layers}",
            name=name,
            num_ranks=placement.num_ranks,
            num_stages=placement.num_stages,
            num_layers=num_layers,
        )


def in_microbatches(memory: int, work: WorkOptions) -> float:
    """Converts bytes of memory to microbatches. Raises `InputError` if the bytes of a microbatch are unknown."""
    if work.microbatch_bytes is None:
        remedy = "give --microbatch-bytes, the bytes of a microbatch on a rank, or --memory in microbatches"
        raise InputError("{argument} in bytes needs the bytes of a microbatch, which times lack", argument="--memory", remedy=remedy)
    return memory / work.microbatch_bytes


def read_workload(file: str, options: WorkOptions) -> Workload:
    """Reads the work of each rank from `file`: a workload in JSON form, or times in ms.

    Times are a list of [F, B, W] per rank, or an object with lists `forward`, `backward` and `weight` with one entry per rank, and
    optional `comm`, `held`, `fused`, `reduce` and `buckets`, which replace those of the options. Raises `InputError` with the file, and
    the rank of a wrong time.
    """
    return read_json(file, "the times of ranks", lambda data: _workload(data, options))


def _workload(data: Any, options: WorkOptions) -> Workload:
    if isinstance(data, list):
        return _workload(_columns(data), options)
    if not isinstance(data, dict):
        raise ParseError("expected an object or a list, got {kind}", kind=type(data).__name__)
    if "format" in data:
        return Workload.from_dict(data)
    unknown = [key for key in data if key not in (*_COLUMNS, *_OTHERS)]
    lacking = [key for key in _COLUMNS if not isinstance(data.get(key), list)]
    if unknown or lacking:
        sentence = "{key!r} is unknown; {expected}" if unknown else "the list {key!r} is missing; {expected}"
        raise ParseError(sentence, key=(*unknown, *lacking)[0], expected=_FORM)
    ranks = max(len(data[key]) for key in _COLUMNS)
    # Missing times are None, which `Workload` refuses with the rank.
    forward, backward, weight = (data[key] + [None] * (ranks - len(data[key])) for key in _COLUMNS)
    links = data.get("comm", options.comm)
    links = links if isinstance(links, list) else [links] * ranks
    links = links + [options.comm] * (len(links) == ranks - 1)
    sums, buckets = data.get("reduce", [options.reduce] * ranks), data.get("buckets", [options.buckets] * ranks)
    fused = data.get("fused", None if options.fused is None else [options.fused] * ranks)
    return Workload.from_ms(forward, backward, weight, links, data.get("held", options.held), sums, buckets, fused)


_OTHERS = ("comm", "held", "fused", "reduce", "buckets")
_FORM = "give the lists forward, backward and weight in ms, an entry per rank, and comm, held, fused, reduce and buckets if need be"


def _columns(rows: Sequence[Any]) -> dict[str, list[Any]]:
    """The columns of a list of [F, B, W] per rank."""
    for rank, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(_COLUMNS):
            raise ParseError("rank {rank} needs three times in ms, [F, B, W], got {row!r:.60}", rank=rank, row=row)
    return {name: [row[k] for row in rows] for k, name in enumerate(_COLUMNS)}
