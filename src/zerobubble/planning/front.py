"""The entry point of the planner: `plan` reads its arguments and builds the problems, over which the candidates of all axes compete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter

from zerobubble.arguments import COUNT, NUMBER, WHOLE, each, either, instance, optional, takes
from zerobubble.costs import Costs, Level, Limits
from zerobubble.errors import InputError, shown
from zerobubble.ir import Placement
from zerobubble.offload import HostLink
from zerobubble.partition import Layer
from zerobubble.partition.speeds import Links, as_links, as_speeds, at_links
from zerobubble.planning.answer import Plan
from zerobubble.planning.asked import AskedAxes
from zerobubble.planning.attempt import Budget, ProgressCallback, as_budget
from zerobubble.planning.axes.axis import ChoicesOfAxis
from zerobubble.planning.axes.head import HeadParts, given_head
from zerobubble.planning.axes.layers import LayersChoices, UncutLayers, limits_for_layers
from zerobubble.planning.axes.slices import SlicesAsked
from zerobubble.planning.competition import compete
from zerobubble.planning.placements import ANY, Placements, placements_to_try
from zerobubble.planning.problem.from_work import MEMORY, Memory, placements_for, problems_of
from zerobubble.planning.problem.head import Head
from zerobubble.planning.problem.problem import Objective, Problem, is_forward_only, without_held
from zerobubble.planning.problem.sharded import Sharded
from zerobubble.planning.problem.workload import Workload

FOR_CUTS = 0.15
"""Share of the seconds to search for balanced cuts."""

LAYERS = each(Layer)._replace(accepts=lambda given: each(Layer).accepts(given) and len(given) > 0)


@takes(
    work=either(instance(Workload, Costs), LAYERS),
    num_microbatches=COUNT,
    memory=optional(MEMORY),
    placements=optional(instance(str, Placement, Iterable)),
    objective=optional(str),
    seconds=optional(NUMBER),
    seed=WHOLE,
    evaluations=optional(WHOLE),
    baseline=optional(str),
    sharded=optional(Sharded),
    shares=each(NUMBER),
    recompute=str,
    levels=optional(each(instance(Level))),
    slices=either(COUNT, instance(str, Sequence)),
    attention=each(NUMBER),
    head=optional(Head),
    host=optional(HostLink),
)
def plan(
    work: Workload | Costs | Sequence[Layer],
    num_microbatches: int,
    memory: Memory | None = None,
    *,
    placements: Placements | None = None,
    objective: str | None = None,
    seconds: float | None = None,
    seed: int = 0,
    evaluations: int | None = None,
    baseline: str | None = None,
    sharded: Sharded | None = None,
    shares: Sequence[float] = (),
    recompute: str = "none",
    levels: Sequence[Level] | None = None,
    head: Head | None = None,
    host: HostLink | None = None,
    speeds: Sequence[float] = (),
    links: Sequence[float] = (),
    slices: int | str | Sequence[int] = 1,
    attention: Sequence[float] = (),
    progress: ProgressCallback | None = None,
) -> Plan:
    """Finds the shortest schedule over `placements`, with a proven lower bound and a reason for each of them.

    `work` is a `Workload`, planned on any placement; the `Costs` of stages, planned on the placement that they know or that is given; or
    `Layer`s, which are cut into stages along with the schedule. Among equally short plans the placement with fewer messages wins, then the
    one with fewer stages, then the smaller makespan. All
    placements and choices of axes share the budget. Everything else is as in `solve`. `plan.savings` has the
    savings of each axis. Raises `InputError` for an argument that cannot be used, and for all pairs of axes that cannot be planned
    together.

    Arguments:
        work: the work of ranks (`Workload`), the costs of stages (`Costs`), for example measured by `Pipeline.profile`, or the costs of a
            model's layers, a sequence of `zb.partition.Layer` such as `zb.split(model).layers()`.
        num_microbatches: parts of each batch along its samples.
        memory: memory of each rank for activations: a number of microbatches of all its stages, bytes with a unit, such as "40GB", or
            `Limits` with the bytes of each rank; None for as much as it takes. For layers it includes their parameters: in microbatches,
            those of an equal share of the layers.
        placements: names of families such as "vee" or ["linear", "looped-2"], placements, or placements by names of your own; "any", all
            families, by default for a `Workload` and layers. For layers, a placement, `Limits`, `speeds` or `links` determine the number of
            ranks.
        objective: "period", the time per step if nothing global runs between steps, as with plain optimizers and `PostValidation`, or
            "makespan", the time per step if all ranks meet before each, as for `clip_grad_norm_`. Default: the period; with a host, the
            makespan.
        seconds: search time over all placements, by default 5; 0 takes the best published schedule.
        evaluations: schedules to play instead of `seconds`, for the same answer on every machine and rank.
        seed: seed of the search's random choices.
        baseline: a planner of the papers to use instead, such as "zb-heuristic". It orders the passes, and what it ignores, such as R or
            gathers, is applied to its order.
        sharded: weights that FSDP2 shards: among the schedules that are nearly shortest, gathers included, the one with the fewest gathers
            wins.
        shares: a factor for each microbatch on the times and bytes of its passes, if microbatches are of unequal cost. The schedule then
            orders them, too; `planning.order_microbatches` keeps a schedule and orders only them.
        recompute: "full" recomputes every forward, "auto" those that pay within the memory, by stage and microbatch; "none" nothing.
        levels: recompute levels to choose from; by default those measured with the costs, if any, otherwise `costs.SELECTIVE` and
            `costs.FULL`.
        head: a head that is not in `work`: whole on the last stage or divided over all ranks, whichever is quicker and fits. Costs with the
            parts of a divided head contain it; `Head.from_parts(costs, slowdown=1.2)` adds how much longer parts take.
        host: link of each rank to its host, for offload of activations if `memory` is short.
        speeds: speed of each rank on the layers: a rank of speed 0.5 takes twice as long and gets fewer layers. Messages, gathers and
            copies take as long on any rank. Default: 1 for all.
        links: speed of each link between ranks for messages: between ranks 0 and 1 first, between the last rank and rank 0 last. At speed
            0.5 messages take twice as long, for example between two hosts; collectives of a divided head do not change. Default: 1 for all.
        slices: number of slices of equal length into which each microbatch is cut along its sequence, for few long sequences; several
            numbers to choose from, or "auto" for 1, 2, 4, 8 and 16. Models must be causal: see docs/long-sequences.md.
        attention: with slices, the shares of the times of F and of B that attention between tokens takes. Attention of later slices takes
            longer. Default: none.
        progress: called with the progress of the search.

    >>> import zerobubble as zb
    >>> work = zb.Workload.uniform(4, times=(10, 10, 8), comm=0.3)
    >>> found = zb.plan(work, 8, memory=4, placements=["linear", "vee"], seconds=0)
    >>> found
    <Plan period 232.2 ms, bubble 3.53 % of the period (bound 3.20 %), feasible: zb-v-greedy on vee over 4 ranks, best of 2 placements>
    >>> found.schedule.placement.name
    'vee'
    """
    default = Objective.PERIOD if host is None else Objective.MAKESPAN
    aim, budget = default if objective is None else Objective.named(objective), as_budget(seconds, evaluations)
    in_slices = SlicesAsked.read(slices, attention)
    asked = AskedAxes.read(work, shares, sharded, recompute, levels, head, host, speeds, links, baseline, in_slices)
    asked.refuse(work, memory, aim)
    if is_forward_only(work) and not asked.has_head(work):
        work, memory = without_held(work), memory if isinstance(memory, (str, Limits)) else None
    search = partial(_search, asked=asked, progress=progress)
    if isinstance(work, (Workload, Costs)):
        in_budget = partial(search, budget=budget, seed=seed)
        return _plan_stages(work, num_microbatches, memory, placements, aim, asked, in_budget)
    layers = _layers_choices(work, num_microbatches, memory, placements, aim, asked, budget)
    return search(None if head is None else HeadParts(head), layers.problems, budget, seed, outermost=(layers,))


def _search(
    head_parts: HeadParts | None,
    problems: Mapping[str, Problem],
    budget: Budget,
    seed: int,
    *,
    asked: AskedAxes,
    progress: ProgressCallback | None,
    outermost: Sequence[ChoicesOfAxis] = (),
) -> Plan:
    """The plan over `problems` (by name of placement) with all axes asked for."""
    axes = [*outermost, *asked.choices(problems, head_parts)]
    return compete(problems, budget, seed, axes=axes, baseline=asked.baseline, progress=progress)


def _plan_stages(
    work: Workload | Costs,
    num_microbatches: int,
    memory: Memory | None,
    placements: Placements | None,
    aim: Objective,
    asked: AskedAxes,
    search: Callable[[HeadParts | None, Mapping[str, Problem]], Plan],
) -> Plan:
    """The plan for the work of ranks or stages."""
    if asked.speeds:
        instead = "Workload.from_ms takes the times of each rank" if isinstance(work, Workload) else "costs have the times of each stage"
        raise InputError(
            "speeds are for layers, got {speeds} with {kind}",
            speeds=shown(asked.speeds),
            kind=type(work).__name__,
            remedy=f"leave them out, as {instead}",
        )
    tried, head_parts = placements_for(work, placements), None if asked.head is None else HeadParts(asked.head)
    first = next(iter(tried.values()))
    work = _over_links(work, asked.links, first)
    if isinstance(work, Costs) and asked.has_head(work):
        head_parts, work = given_head(asked.head, work, first)
    work = replace(work, shares=()) if isinstance(work, Costs) else work
    found = search(head_parts, problems_of(work, num_microbatches, memory, tried, aim, asked.sharded, asked.shares))
    if found.order is None and head_parts is not None:
        raise InputError(found.reason)
    return found


def _layers_choices(
    work: Sequence[Layer],
    num_microbatches: int,
    memory: Memory | None,
    placements: Placements | None,
    aim: Objective,
    asked: AskedAxes,
    budget: Budget,
) -> LayersChoices:
    """The cuts of the layers on each placement."""
    places = _placements_of_layers(placements, memory, asked.speeds or asked.links)
    num_ranks = next(iter(places.values())).num_ranks
    speeds, links = as_speeds(asked.speeds, num_ranks), as_links(asked.links, num_ranks)
    _require_messages(links, [layer.output_comm for layer in work], "output_comm of the layers")
    limits = limits_for_layers(work, num_ranks, memory)
    uncut = UncutLayers(tuple(work), num_microbatches, limits, aim, speeds, links, asked.shares, asked.sharded)
    return LayersChoices.on(
        places, uncut, asked.head, asked.offered, has_host=asked.host is not None, until=budget.part(FOR_CUTS).end(perf_counter())
    )


def _over_links(work: Workload | Costs, links: Sequence[float], placement: Placement) -> Workload | Costs:
    """The work of ranks, or of stages on `placement`, with messages over links of these speeds."""
    over = as_links(links, placement.num_ranks)
    _require_messages(over, work.comm, "comm of the work")
    return work.at_links(over) if isinstance(work, Workload) else at_links(work, placement, over)


def _require_messages(links: Links, comm: Sequence[int], name: str) -> None:
    """Raises `InputError` for links if no message takes time."""
    if links and not any(comm):
        raise InputError(
            "links scale the times of messages, but {name} are all 0", name=name, remedy="give these times, or leave links out"
        )


def _placements_of_layers(given: Placements | None, memory: Memory | None, per_rank: Sequence[float]) -> dict[str, Placement]:
    """The placements to try for layers. Raises `InputError` if nothing determines the number of ranks."""
    wanted = [given] if isinstance(given, (str, Placement)) else [ANY] if given is None else given
    known = next((each for each in (wanted.values() if isinstance(wanted, dict) else wanted) if isinstance(each, Placement)), None)
    if known is not None:
        num_ranks = known.num_ranks
    elif isinstance(memory, Limits):
        num_ranks = len(memory.memory)
    elif per_rank:
        num_ranks = len(per_rank)
    else:
        raise InputError("the number of ranks is unknown", remedy="give placements such as zb.Placement.vee(8), or memory as Limits")
    return placements_to_try(ANY if given is None else given, num_ranks)
