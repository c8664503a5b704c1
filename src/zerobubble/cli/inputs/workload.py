"""What the planning verbs plan for: the work of ranks, stages or layers, and where the stages may lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from zerobubble.cli.inputs.files import MOST_PLANNED, read_document, read_json, require_size
from zerobubble.cli.inputs.options import (
    Times,
    buckets_option,
    bytes_with_unit,
    comm_option,
    fused_option,
    held_option,
    microbatches_option,
    option_group,
    ranks_option,
    reduce_option,
    refuse_beside,
    seconds,
    times_option,
)
from zerobubble.costs import Costs, Limits
from zerobubble.errors import InputError, ParseError
from zerobubble.export.document import describe_document
from zerobubble.ir import Placement
from zerobubble.planning import Objective, Plan, Problem, Workload
from zerobubble.planning.competition import ample_limits
from zerobubble.planning.placements import ANY, FAMILIES, family, placements_to_try

_COLUMNS = ("forward", "backward", "weight")


@dataclass(frozen=True)
class WorkOptions:
    """What ranks do, as the command line says it: equal ranks by times in ms, or a file."""

    ranks: int | None
    microbatches: int | None
    times: Times
    comm: float
    held: float
    fused: float | None
    reduce: float
    buckets: int
    per_rank: str | None
    costs_file: str | None
    microbatch_bytes: int | None


work_options = option_group(
    WorkOptions,
    "work",
    ranks_option,
    microbatches_option,
    times_option,
    comm_option,
    held_option,
    fused_option,
    reduce_option,
    buckets_option,
    click.option("--per-rank", metavar="FILE", help="JSON with the times of each rank in ms, instead of --times."),
    click.option(
        "--costs", "costs_file", metavar="FILE", help="A costs file, or a plan to make anew from what it was made for, instead of --times."
    ),
    click.option(
        "--microbatch-bytes",
        callback=bytes_with_unit,
        metavar="BYTES",
        help="Activations of a microbatch on a rank, such as 4GB, for --memory in bytes beside times.",
    ),
)
"""The options of a planning verb that say what ranks do; they make its argument `work`."""


@dataclass(frozen=True)
class SearchOptions:
    """How to search, as the command line says it."""

    placement: str
    objective: str | None
    budget: float
    evaluations: int | None
    seed: int
    num_layers: int | None = None

    def arguments(self, objective: str | None, progress: object) -> dict[str, Any]:
        """The arguments of the planner."""
        budget = {"seconds": self.budget, "evaluations": self.evaluations}
        return {"objective": objective, "seed": self.seed, "progress": progress, **budget}


search_options = option_group(
    SearchOptions,
    "search",
    click.option("--placement", default=ANY, metavar="NAME,...", help=f"Where stages may lie: {', '.join(FAMILIES)}; {ANY} tries all."),
    click.option(
        "--objective",
        type=click.Choice([aim.value for aim in Objective]),
        help="What to make short: the time per step if nothing global comes between steps (if not given), or the makespan, which it is if "
        "all ranks meet before each step, as for a norm of all gradients.",
    ),
    click.option("--budget", callback=seconds, default="5", metavar="SECONDS", help="Time to search, such as 20 or 2min; 0: no search."),
    click.option(
        "--evaluations", type=click.IntRange(0), metavar="N", help="Schedules to try instead of --budget: always the same answer."
    ),
    click.option("--seed", type=click.IntRange(0), default=0, metavar="N", help="Seed of the search."),
    click.option(
        "--num-layers", type=click.IntRange(1), metavar="N", help="Layers of the model: placements with more stages are left out."
    ),
)
"""The options of a planning verb that say how to search; they make its argument `search`."""


@dataclass(frozen=True)
class Question:
    """What is to be planned: the work of ranks or the costs of stages, how many microbatches, and on which placements, by their names.

    `problem` is that of the plan file that asks, None without one; its limits are `limits`, unless they only left room for everything.
    """

    work: Workload | Costs
    microbatches: int
    placements: dict[str, Placement]
    problem: Problem | None = None
    limits: Limits | None = None

    @property
    def objective(self) -> str | None:
        """What the plan file makes short, None without one."""
        return None if self.problem is None else self.problem.objective.value

    @property
    def shares(self) -> tuple[float, ...]:
        """The shares of the microbatches of the plan file, empty without one and where they are alike."""
        return () if self.problem is None else self.problem.costs.shares

    @property
    def num_ranks(self) -> int:
        return next(iter(self.placements.values())).num_ranks

    @property
    def tried(self) -> list[str] | Placement:
        """The placements as the planner takes them: by name for the work of ranks, the only one for the costs of its stages."""
        return list(self.placements) if isinstance(self.work, Workload) else next(iter(self.placements.values()))


def read_question(verb: str, work: WorkOptions, search: SearchOptions) -> Question:
    """What the options ask for; raises `InputError` for what is missing or contradicts a file."""
    refuse_beside("costs_file", "times", "comm", "held", "fused", "reduce", "buckets", "per_rank", "microbatch_bytes")
    if work.costs_file is None:
        ranks = None if work.per_rank is None else read_workload(work.per_rank, work)
        return _of_ranks(verb, work, search, ranks, work.per_rank)
    document = read_document(work.costs_file)
    if isinstance(document, Workload):
        return _of_ranks(verb, work, search, document, work.costs_file)
    if isinstance(document, Costs):
        return _of_stages(verb, work, search, document)
    if isinstance(document, Plan):
        return _of_plan(verb, work, search, document.problem)
    raise InputError(f"{work.costs_file} holds {describe_document(document)}, not costs of stages, the work of ranks or a plan")


def _of_ranks(verb: str, work: WorkOptions, search: SearchOptions, ranks: Workload | None, file: str | None) -> Question:
    """The work of ranks, from a file or from the times of equal ranks, on the placements that are named."""
    count, microbatches = require_shape(verb, ranks.num_ranks if work.ranks is None and ranks else work.ranks, work.microbatches)
    if ranks is not None and ranks.num_ranks != count:
        raise InputError(f"--ranks {count} does not fit {file}, which has times for {ranks.num_ranks}: leave the option out")
    known = ranks or Workload.uniform(count, work.times, work.comm, work.held, work.reduce, work.buckets, work.fused)
    return Question(known, microbatches, named_placements(search, count, microbatches))


def _of_stages(verb: str, work: WorkOptions, search: SearchOptions, costs: Costs) -> Question:
    """The costs of the stages of one placement, which the file knows or the options name."""
    placement = _measured_placement(work, search, costs) if costs.placement is not None else _named_placement(work, search, costs)
    _, microbatches = require_shape(verb, placement.num_ranks, work.microbatches)
    require_size("a plan", 3 * placement.num_stages * microbatches)
    name = search.placement if search.placement != ANY else placement.name
    _require_layers(name, placement, search.num_layers)
    return Question(costs, microbatches, {name: placement})


def _measured_placement(work: WorkOptions, search: SearchOptions, costs: Costs) -> Placement:
    """The placement on which the costs were measured; raises `InputError` where the options say another."""
    placement = costs.placement
    assert placement is not None
    measured = f"{work.costs_file}, which was measured on a {placement.name} placement over {placement.num_ranks} ranks"
    if work.ranks not in (None, placement.num_ranks):
        raise InputError(f"--ranks {work.ranks} does not fit {measured}: leave the option out")
    if search.placement == ANY:
        return placement
    named = family(search.placement, placement.num_ranks)
    if named.routes[0] != placement.routes[0]:
        raise InputError(f"--placement {search.placement} does not fit {measured}: leave the option out")
    return named


def _named_placement(work: WorkOptions, search: SearchOptions, costs: Costs) -> Placement:
    """The placement that the options name for costs that do not know theirs; raises `InputError` where its stages are not as many."""
    name, file = search.placement, work.costs_file
    if name == ANY or "," in name:
        raise InputError(f"the costs in {file} are those of the stages of one placement: name it, such as --placement {FAMILIES[0]}")
    per_rank = family(name, 1).num_stages
    ranks, left = divmod(costs.num_stages, per_rank)
    if left or work.ranks not in (None, ranks):
        puts = f"{name} puts {per_rank} on each {'rank' if work.ranks is None else f'of {work.ranks} ranks'}"
        raise InputError(f"{file} has costs of {costs.num_stages} stages, but {puts}: give the placement they were measured on")
    return family(name, ranks)


def _of_plan(verb: str, work: WorkOptions, search: SearchOptions, problem: Problem) -> Question:
    """What a plan was made for, but for what the options say otherwise; its limits hold unless they only left room for everything."""
    if (problem.head is not None or problem.host is not None) and verb != "plan":
        what = "a head" if problem.host is None else "offload"
        raise InputError(f"{work.costs_file} is a plan with {what}, and {verb} plans without: give --times or --per-rank instead")
    ranks = problem.placement.num_ranks
    if work.ranks not in (None, ranks):
        raise InputError(f"--ranks {work.ranks} does not fit {work.costs_file}, a plan for {ranks} ranks: leave the option out")
    _, microbatches = require_shape(verb, ranks, problem.num_microbatches if work.microbatches is None else work.microbatches)
    everything = ample_limits(problem.placement, problem.costs, problem.num_microbatches)
    limits = None if problem.limits == everything else problem.limits
    if problem.workload is not None:
        return Question(problem.workload, microbatches, named_placements(search, ranks, microbatches), problem, limits)
    placement = problem.placement
    if search.placement != ANY and family(search.placement, ranks).routes != placement.routes:
        raise InputError(
            f"--placement {search.placement} does not fit {work.costs_file}, a plan for the stages of {placement.name}: leave it out"
        )
    return Question(problem.costs, microbatches, {placement.name: placement}, problem, limits)


def require_shape(verb: str, ranks: int | None, microbatches: int | None) -> tuple[int, int]:
    """The numbers of ranks and microbatches; raises `InputError` for one that is missing, below 1 or too large."""
    missing = [option for option, count in (("--ranks P", ranks), ("--microbatches M", microbatches)) if count is None]
    if ranks is None or microbatches is None:
        raise InputError(f"{verb} needs {' and '.join(missing)}")
    for option, count in (("--ranks", ranks), ("--microbatches", microbatches)):
        if count < 1:
            raise InputError(f"{option} must be at least 1, got {count}")
    require_size("a plan", 3 * ranks * microbatches)
    return ranks, microbatches


def named_placements(search: SearchOptions, num_ranks: int, microbatches: int) -> dict[str, Placement]:
    """The placements to try by their names; raises `InputError` for an unknown one, more stages than layers and too many passes."""
    named = placements_to_try([name.strip() for name in search.placement.split(",")], num_ranks)
    if search.placement == ANY and search.num_layers is not None:
        named = {name: made for name, made in named.items() if made.num_stages <= max(num_ranks, search.num_layers)}
    for name, made in named.items():
        _require_layers(name, made, search.num_layers)
    most = max(made.num_stages for made in named.values())
    require_size("a plan", 3 * most * microbatches, MOST_PLANNED)
    return named


def _require_layers(name: str, placement: Placement, num_layers: int | None) -> None:
    """Raise `InputError` for a placement with more stages than the model has layers."""
    if num_layers is not None and placement.num_stages > num_layers:
        raise InputError(f"{name} over {placement.num_ranks} ranks has {placement.num_stages} stages, more than --num-layers {num_layers}")


def in_microbatches(room: int, work: WorkOptions) -> float:
    """The bytes `room` in microbatches, where ranks are known by their times; raises where nothing says what a microbatch takes."""
    if work.microbatch_bytes is None:
        raise click.UsageError("times tell no bytes: give --microbatch-bytes, those of a microbatch on a rank, or --memory in microbatches")
    return room / work.microbatch_bytes


def read_workload(file: str, given: WorkOptions) -> Workload:
    """The work of each rank in `file`: a workload in its JSON form, or times in ms.

    Times are an object of lists `forward`, `backward` and `weight` with an entry per rank, and `comm`, `held`, and the lists `reduce` and
    `buckets`, where they differ from those given, or a list of [F, B, W] per rank. Raises `InputError` naming the file, and the rank of a
    wrong time.
    """
    return read_json(file, "the times of ranks", lambda data: _workload(data, given))


def _workload(data: Any, given: WorkOptions) -> Workload:
    if isinstance(data, list):
        return _workload(_columns(data), given)
    if not isinstance(data, dict):
        raise ParseError(f"expected an object or a list, got {type(data).__name__}")
    if "format" in data:
        return Workload.from_dict(data)
    unknown = [key for key in data if key not in (*_COLUMNS, *_OTHERS)]
    lacking = [key for key in _COLUMNS if not isinstance(data.get(key), list)]
    if unknown or lacking:
        raise ParseError(f"{f'{unknown[0]!r} is unknown' if unknown else f'the list {lacking[0]!r} is missing'}; {_FORM}")
    ranks = max(len(data[key]) for key in _COLUMNS)
    forward, backward, weight = (_whole_column(data[key], ranks) for key in _COLUMNS)
    links = data.get("comm", given.comm)
    links = links if isinstance(links, list) else [links] * ranks
    links = links + [given.comm] * (len(links) == ranks - 1)
    sums, buckets = data.get("reduce", [given.reduce] * ranks), data.get("buckets", [given.buckets] * ranks)
    in_one = data.get("fused", None if given.fused is None else [given.fused] * ranks)
    return Workload.from_ms(forward, backward, weight, links, data.get("held", given.held), sums, buckets, in_one)


_OTHERS = ("comm", "held", "fused", "reduce", "buckets")
_FORM = "give the lists forward, backward and weight in ms, an entry per rank, and comm, held, fused, reduce and buckets if need be"


def _columns(rows: Sequence[Any]) -> dict[str, list[Any]]:
    """The columns of a list of [F, B, W] per rank."""
    for rank, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(_COLUMNS):
            raise ParseError(f"rank {rank} needs three times in ms, [F, B, W], got {row!r:.60}")
    return {name: [row[k] for row in rows] for k, name in enumerate(_COLUMNS)}


def _whole_column(values: list[Any], ranks: int) -> list[Any]:
    """The column with None for what is missing at its end, which `Workload` refuses by its rank."""
    return values + [None] * (ranks - len(values))
