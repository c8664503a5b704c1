"""The front door of the planner: one function for any work and all axes of a problem, which asks the search that plans for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from zerobubble.arguments import NUMBER, WHOLE, Wanted, as_tuple, each, either, instance, optional, takes
from zerobubble.costs import Costs, Level, Limits
from zerobubble.errors import InputError, shown
from zerobubble.ir import Placement
from zerobubble.offload import HostLink
from zerobubble.partition import Layer
from zerobubble.partition.speeds import EACH_LINK, EACH_RANK, Links, as_links, as_speeds, at_links
from zerobubble.planning.answer import Plan
from zerobubble.planning.attempt import ProgressCallback, Search
from zerobubble.planning.competition import MICROBATCHES, SECONDS, as_budget, compete, placements_for, problems_of
from zerobubble.planning.cut_plan import Beside, plan_cuts
from zerobubble.planning.gather_plan import plan_gathered
from zerobubble.planning.head_plan import PlacedHead, given_head, least_bound, plan_head
from zerobubble.planning.layer_plan import plan_layers, problems_of_layers
from zerobubble.planning.offload_plan import plan_offloaded
from zerobubble.planning.placements import ANY, Placements, placements_to_try
from zerobubble.planning.problem.axes import refuse_pairs
from zerobubble.planning.problem.forward_only import is_forward_only, without_held
from zerobubble.planning.problem.head import Head, has_parts
from zerobubble.planning.problem.problem import Objective
from zerobubble.planning.problem.recomputation import levels_for
from zerobubble.planning.problem.sharded import Sharded
from zerobubble.planning.problem.workload import Workload

LAYERS = Wanted("a list or tuple of Layer", lambda given: each(Layer).accepts(given) and len(given) > 0)


@takes(
    work=either(instance(Workload, Costs), LAYERS),
    num_microbatches=WHOLE,
    memory=optional(either(MICROBATCHES, Limits)),
    placements=optional(instance(str, Placement, Iterable)),
    objective=optional(str),
    seconds=NUMBER,
    seed=WHOLE,
    evaluations=optional(WHOLE),
    baseline=optional(str),
    sharded=optional(Sharded),
    shares=each(NUMBER),
    recompute=str,
    levels=optional(each(instance(Level))),
    head=optional(Head),
    host=optional(HostLink),
)
def plan(
    work: Workload | Costs | Sequence[Layer],
    num_microbatches: int,
    memory: float | Limits | None = None,
    *,
    placements: Placements | None = None,
    objective: str | None = None,
    seconds: float = SECONDS,
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
    progress: ProgressCallback | None = None,
) -> Plan:
    """The best schedule over `placements`: names of families, `any` for all, or placements; each answer with a bound and a reason.

    `work` is a `Workload`, planned on any placement, the `Costs` of stages, planned on the placement that they know or that is given, or
    `Layer`s, cut into stages with the schedule. Of plans that are equally short the one with the smaller makespan wins. The budget is for
    all placements together, for layers once more for the winner's cuts, and the rest is as in `solve`. `plan.savings` say what each axis
    saved. Raises `InputError` for a part that cannot be used, and with all pairs of arguments that are not planned together.

    Arguments:
        work: what whole ranks do (`Workload`), what stages cost (`Costs`), measured by `Pipeline.profile` for example, or what the layers
            of a model cost, a sequence of `zb.partition.Layer` such as `zb.split(model).layers()`.
        num_microbatches: slices of each batch.
        memory: memory of each rank for activations, in microbatches of all its stages, or in bytes as `Limits`; None for as much as it
            takes. For layers it is for their parameters, too: in microbatches that of an equal share of the layers.
        placements: where to look, such as "vee" or ["linear", "looped-2"], or placements by names of your own; "any", all families, by
            default for a `Workload` and layers. For layers, a placement, `Limits`, `speeds` or `links` say how many ranks there are.
        objective: "period", the time per step if nothing global comes between steps, as with plain optimizers and `PostValidation`, or
            "makespan", that if all ranks meet before each, as for `clip_grad_norm_`. By default the period, and with a host the makespan.
        seconds: how long to search, over all placements; 0 takes the best published schedule.
        evaluations: how many schedules to play instead, so that the answer is the same on every machine and rank.
        seed: another one makes other random choices.
        baseline: a planner of the papers to ask instead, such as "zb-heuristic". It orders the passes, and what it ignores, such as R
            or gathers, is applied to its order.
        sharded: weights that FSDP2 divides: the winner then gathers least of the schedules that are hardly longer, gathers included.
        shares: a factor for each microbatch on the times and bytes of its passes, where they are of unequal cost. The microbatches of the
            schedule are then in the places that make it short; see `planning.order_microbatches` for a schedule that stays.
        recompute: "full" computes every forward again, "auto" what pays within the memory, by stage and microbatch; "none" nothing.
        levels: how much may be computed again; if not given, the levels that were measured with the costs, where some were, and else
            `costs.SELECTIVE` and `costs.FULL`.
        head: a head that the work leaves out: whole on the last stage or divided over all ranks, whichever is quicker and fits. Costs with
            the parts of a divided head have it already; `Head.of_parts(costs, slowdown=1.2)` adds by how much parts take longer.
        host: the link of each rank to its host, over which what waits for its backward pass may go away where `memory` is short.
        speeds: how fast each rank runs the passes of layers, relative to their times: one of speed 0.5 takes twice as long, and gets
            fewer layers. Messages, gathers and copies take as long on any rank. All ranks have speed 1 if not given.
        links: how fast each link between ranks is, relative to the times of messages: between ranks 0 and 1 first, and between the last
            rank and rank 0 last. Messages over one of speed 0.5 take twice as long, such as between two hosts; collectives of a divided
            head keep their time. All links have speed 1 if not given.
        progress: called now and then with how far the search is.

    >>> import zerobubble as zb
    >>> work = zb.Workload.uniform(4, times=(10, 10, 8), comm=0.3)
    >>> found = zb.plan(work, 8, memory=4, placements=["linear", "vee"], seconds=0)
    >>> found
    <Plan of 2 placements, the best on vee over 4 ranks: zb-v-greedy, period 232.2 ms, bubble 3.53 % (bound 3.20 %), fea...>
    >>> found.schedule.placement.name
    'vee'
    """
    objective = (Objective.PERIOD if host is None else Objective.MAKESPAN) if objective is None else objective
    aim, budget = Objective.named(objective), as_budget(seconds, evaluations)
    if isinstance(work, Costs) and work.shares:
        shares, work = shares or work.shares, replace(work, shares=())
    measured = work.levels if isinstance(work, Costs) and recompute != "none" else ()
    offered = levels_for(recompute, measured or None if levels is None else levels)
    asked = {
        "layers": not isinstance(work, (Workload, Costs)) and "a cut of layers",
        "speeds": bool(speeds) and "speeds",
        "links": bool(links) and "links",
        "baseline": baseline is not None and "baseline",
        "sharded": sharded is not None and "sharded",
        "shares": bool(shares) and "shares",
        "recompute": bool(offered) and "recompute",
        "head": (head is not None and "head") or (isinstance(work, Costs) and has_parts(work) and "the head in the costs"),
        "host": host is not None and "host",
        "fused": _has_fused(work) and "fused",
        "period": aim is Objective.PERIOD and "objective='period'",
    }
    speeds, links = as_tuple("plan: speeds", speeds, EACH_RANK), as_tuple("plan: links", links, EACH_LINK)
    refuse_pairs({axis: name for axis, name in asked.items() if name})
    if host is not None and memory is None:
        raise InputError("host needs a memory: what goes to the host follows from what a rank may hold")
    if is_forward_only(work) and not asked["head"]:
        _refuse_with_forwards({axis: name for axis, name in asked.items() if name})
        work, memory = without_held(work), memory if isinstance(memory, Limits) else None
    placed = None if head is None else PlacedHead(head)
    others = bool(shares or offered or placed or host or baseline)
    if not isinstance(work, (Workload, Costs)):
        places = _placements_of_layers(placements, memory, speeds or links)
        num_ranks = next(iter(places.values())).num_ranks
        known, over = as_speeds(speeds, num_ranks), as_links(links, num_ranks)
        _require_messages(over, [layer.output_comm for layer in work], "output_comm of the layers")
        uncut = problems_of_layers(work, places, num_microbatches, memory, aim, known, over)
        if not others and sharded is None:
            return plan_layers(uncut, budget, seed, progress)
        beside = Beside(tuple(shares), sharded, offered, placed, host is not None)
        search = _search(placed, host, others and sharded is not None, offered, baseline, progress)
        return plan_cuts(uncut, budget, seed, beside=beside, search=search, progress=progress)
    if speeds:
        instead = "Workload.from_ms takes the times of each rank" if isinstance(work, Workload) else "costs have the times of each stage"
        raise InputError(f"speeds are for layers, got {shown(speeds)} with {type(work).__name__}: leave them out, as {instead}")
    tried = placements_for(work, placements)
    work = _over_links(work, links, next(iter(tried.values())))
    if asked["head"] and isinstance(work, Costs):
        placed, work = given_head(head, work, next(iter(tried.values())))
    problems = problems_of(work, num_microbatches, memory, tried, aim, sharded, shares)
    search = _search(placed, host, sharded is not None and (others or placed is not None), offered, baseline, progress)
    found = search(problems, budget, seed)
    if found.order is None and placed is not None:
        raise InputError(found.reason)
    return found


def _refuse_with_forwards(asked: Mapping[str, str]) -> None:
    """Raise `InputError` with all axes asked for that have no meaning without backward passes."""
    if wrong := [asked[axis] for axis in ("baseline", "sharded", "recompute", "host") if axis in asked]:
        raise InputError(f"work whose B and W take no time is planned as forwards alone, without {', '.join(wrong)}: leave that out")


def _over_links(work: Workload | Costs, links: Sequence[float], placement: Placement) -> Workload | Costs:
    """The work of ranks, or of stages on `placement`, with messages over links of these speeds."""
    over = as_links(links, placement.num_ranks)
    _require_messages(over, work.comm, "comm of the work")
    return work.at_links(over) if isinstance(work, Workload) else at_links(work, placement, over)


def _require_messages(links: Links, comm: Sequence[int], name: str) -> None:
    """Raise `InputError` for links whose messages take no time, whatever their speed."""
    if links and not any(comm):
        raise InputError(f"links are relative to the times of messages, and {name} are all 0: give these times, or leave links out")


def _has_fused(work: Workload | Costs | Sequence[Layer]) -> bool:
    """Whether a BW takes less than B and W somewhere."""
    return bool(work.fused) if isinstance(work, (Workload, Costs)) else any(layer.fused for layer in work)


def _search(
    placed: PlacedHead | None,
    host: HostLink | None,
    has_gathers: bool,
    offered: Sequence[Level],
    baseline: str | None,
    progress: ProgressCallback | None,
) -> Search:
    """The search for all axes asked for: a step for each, which has the search for the others inside.

    What goes to the host is chosen for orders with the head in its place, and gathers for schedules with all else.
    """
    search: Search = partial(compete, progress=progress, baseline=baseline, offered=offered)
    if placed is not None:
        search = partial(plan_head, placed=placed, search=search, offered=offered)
    if host is not None:
        least = partial(least_bound, placed=placed, offered=offered)
        search = partial(plan_offloaded, link=host, search=search, least=least, published=baseline is None, progress=progress)
    return partial(plan_gathered, search=search, published=baseline is None) if has_gathers else search


def _placements_of_layers(given: Placements | None, memory: float | Limits | None, per_rank: Sequence[float]) -> dict[str, Placement]:
    """The placements to try for layers, which do not say how many ranks there are; raises `InputError` if nothing else does."""
    wanted = [given] if isinstance(given, (str, Placement)) else [ANY] if given is None else given
    known = next((each for each in (wanted.values() if isinstance(wanted, dict) else wanted) if isinstance(each, Placement)), None)
    if known is not None:
        num_ranks = known.num_ranks
    elif isinstance(memory, Limits):
        num_ranks = len(memory.memory)
    elif per_rank:
        num_ranks = len(per_rank)
    else:
        raise InputError("layers do not say how many ranks there are: give placements such as zb.Placement.vee(8), or memory as Limits")
    return placements_to_try(ANY if given is None else given, num_ranks)
