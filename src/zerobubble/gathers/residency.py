"""Plans for sharded weights: when each rank gathers the weights of its stages, and when it frees them.

A pass can run while the weights of its stage are resident, and resident weights take memory. A plan has the fewest gathers possible, to
minimize communication. Each gather begins as early as memory allows, to overlap with passes that do not need it.

In a simulation, gathers are communication in parallel with the passes of a rank. They run one after another. Each begins after the steps
before its step `begins`, which free its memory, and the step `needed` waits for its end. Sums of gradients over replicas or shards run in
parallel with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from zerobubble.arguments import WHOLE, each, either, optional, require_amount, takes
from zerobubble.costs import Costs
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.gathers.caching import cached
from zerobubble.graph import play
from zerobubble.ir import Schedule, Step
from zerobubble.kinds import traits_of
from zerobubble.lane import Lane, LaneWork, steps_of_ranks
from zerobubble.rules import recomputed
from zerobubble.simulation import Metrics, metrics_of, pass_times
from zerobubble.units import counted, show_bytes
from zerobubble.verify import checked


class Gather(NamedTuple):
    """One gather of the weights of `stage`. Steps count from 0 in the rank's row.

    The gather may start before step `begins`. Step `needed` is the first that uses the weights, and they are freed after step `ends`.
    """

    stage: int
    begins: int
    needed: int
    ends: int


@dataclass(frozen=True, slots=True, repr=False)
class RankGathers(Displayed):
    """The `gathers` of one rank, in the order in which they begin.

    No plan has fewer than `bound`; `peak_bytes` is the most resident bytes.
    """

    gathers: tuple[Gather, ...]
    bound: int
    peak_bytes: int

    @property
    def is_proven(self) -> bool:
        """Whether the number of gathers is proven to be minimal."""
        return len(self.gathers) == self.bound

    def _summary(self) -> str:
        return f"{counted(len(self.gathers), 'gather')}, at least {self.bound}, {show_bytes(self.peak_bytes)} at most"

    def _details(self) -> Iterator[str]:
        for stage, begins, needed, ends in self.gathers:
            yield f"stage {stage}: gathered from step {begins}, needed in {needed}, freed after {ends}"


@takes(
    schedule=Schedule,
    weights=each(WHOLE),
    memory=optional(either(WHOLE, each(WHOLE))),
    costs=optional(Costs),
)
def plan_gathers(
    schedule: Schedule, weights: Sequence[int], memory: int | Sequence[int] | None = None, costs: Costs | None = None
) -> tuple[RankGathers, ...]:
    """Return a plan for each rank with the fewest gathers that `schedule` needs.

    The number is proven optimal if the stages of a rank have one size or are at most nine; compare `RankGathers.bound`. Among plans with
    equally few gathers, one with the fewest bytes is chosen. F, B and BW use weights; W does not.

    Arguments:
        schedule: the order to run.
        weights: bytes of the gathered weights of each stage.
        memory: bytes for gathered weights on each rank, one number for all ranks or one for each; None if all weights may stay resident.
        costs: if given, `memory` also holds the activations, and weights get the rest in each step.

    Raises `InputError` if the weights of a step do not fit.

    >>> import zerobubble as zb
    >>> schedule = zb.make("zb-v", 2, 4)
    >>> [len(rank.gathers) for rank in zb.lowering.plan_gathers(schedule, [6] * 4)]
    [2, 2]
    >>> [len(rank.gathers) for rank in zb.lowering.plan_gathers(schedule, [6] * 4, memory=6)]
    [7, 11]
    """
    if len(weights) != schedule.num_stages:
        message = "schedule {schedule!r} has {schedule_stages} stages, but weights are given for {num_weights}"
        raise InputError(message, schedule=schedule.name, schedule_stages=schedule.num_stages, num_weights=len(weights))
    for stage, size in enumerate(weights):
        require_amount(f"the weights of stage {stage}", size)
    limits = [memory] * schedule.num_ranks if memory is None or isinstance(memory, int) else list(memory)
    if len(limits) != schedule.num_ranks:
        message = "schedule {schedule!r} has {schedule_ranks} ranks, but memory is given for {num_limits}"
        raise InputError(message, schedule=schedule.name, schedule_ranks=schedule.num_ranks, num_limits=len(limits))
    if costs is not None:
        costs.require_schedule(schedule)
    sizes = dict(enumerate(weights))
    return tuple(
        gathers_of(steps, sizes, _memory_for_weights(steps, limit, costs, sizes), f"rank {rank}")
        for rank, (steps, limit) in enumerate(zip(schedule.steps, limits, strict=True))
    )


def gathers_of(steps: Sequence[Step], weights: Mapping[int, int], memory: Sequence[int], where: str) -> RankGathers:
    """Return the gathers of a rank that runs `steps`. `weights` are the bytes of its stages, `memory` the bytes for them in each step.

    Raises `InputError`, which begins with `where`, if the weights of a step do not fit.
    """
    needs = [frozenset(op.stage for op in step if traits_of(op.kind).uses_weights and op.stage in weights) for step in steps]
    sizes = {stage: weights[stage] for stage in sorted(frozenset[int]().union(*needs))}
    for step, needed, available in zip(steps, needs, memory, strict=True):
        size = sum(sizes[stage] for stage in needed)
        if size > available:
            what = "&".join(map(str, step))
            raise InputError(
                "{where} has {available} bytes for gathered weights in {what}, whose weights take {size}",
                where=where,
                available=max(0, available),
                what=what,
                size=size,
                remedy="provide more memory, or cut the model into more stages",
            )
    resident, _, bound = cached(needs, sizes, memory)
    held = [0] * len(steps)
    stays = _stays(needs, resident)
    for stage, first, last in stays:
        for at in range(first, last + 1):
            held[at] += sizes[stage]
    gathers = sorted(_early(stays, sizes, held, memory), key=lambda gather: (gather.begins, gather.needed))
    return RankGathers(tuple(gathers), bound, max(held, default=0))


def _memory_for_weights(steps: Sequence[Step], limit: int | None, costs: Costs | None, sizes: Mapping[int, int]) -> list[int]:
    """Return the bytes available for weights in each step."""
    if limit is None:
        return [sum(sizes.values())] * len(steps)
    if costs is None:
        return [limit] * len(steps)
    recomputed_by = recomputed(op for step in steps for op in step)
    changes = (sum(costs.memory_change(*op[:2], recomputed_by.get(op[1:]), op.microbatch) for op in step) for step in steps)
    after = list(accumulate(changes))
    return [limit - max(before, now) for before, now in zip([0, *after], after, strict=False)]


def _stays(needs: Sequence[frozenset[int]], resident: Sequence[frozenset[int]]) -> list[tuple[int, int, int]]:
    """Return each stay of a stage's weights as (stage, first step that needs them, last step that needs them), in order of the first.

    Weights that stay resident after their last use in a stay are freed right after it.
    """
    open_stays: dict[int, tuple[int, int]] = {}
    stays = []
    for step, (needed, there) in enumerate(zip(needs, resident, strict=True)):
        for stage in open_stays.keys() - there:
            stays.append((stage, *open_stays.pop(stage)))
        for stage in needed:
            first, _ = open_stays.get(stage, (step, step))
            open_stays[stage] = first, step
    stays += [(stage, *stay) for stage, stay in open_stays.items()]
    return sorted(stays, key=lambda stay: stay[1:])


def _early(stays: Sequence[tuple[int, int, int]], sizes: Mapping[int, int], held: list[int], memory: Sequence[int]) -> Iterator[Gather]:
    """Yield the gathers of `stays`, each begun as early as memory allows. Those needed first choose first; `held` is updated.

    The order matters: a gather that is needed later must not take the memory that lets an earlier one overlap.
    """
    free_from: dict[int, int] = {}
    for stage, needed, ends in stays:
        begins = needed
        while begins > free_from.get(stage, 0) and held[begins - 1] + sizes[stage] <= memory[begins - 1]:
            begins -= 1
            held[begins] += sizes[stage]
        free_from[stage] = ends + 1
        yield Gather(stage, begins, needed, ends)


class GatherTimes(NamedTuple):
    """Duration of a schedule with its gathers, in ns, and the begin and end of each gather by rank, from the beginning of the step.

    The makespan begins with the step. The span of a rank includes the gathers of its first pass.
    """

    metrics: Metrics
    lanes: tuple[tuple[tuple[Gather, int, int], ...], ...]


def play_gathers(
    schedule: Schedule,
    costs: Costs,
    plans: Sequence[RankGathers],
    takes: Sequence[int],
    other_lanes: Sequence[Sequence[LaneWork]] = (),
) -> GatherTimes:
    """Simulate `schedule` under `costs` with the gathers of `plans`, each of which takes `takes[stage]` ns.

    `other_lanes` are operations of each rank on a second lane, such as copies to the host. Raises as `simulate` does.

    >>> import zerobubble as zb
    >>> schedule, costs = zb.make("1f1b", 2, 2), zb.Costs.uniform(2)  # passes of 1 ms
    >>> play_gathers(schedule, costs, zb.lowering.plan_gathers(schedule, [6, 6]), [500_000] * 2).metrics
    Metrics(span=9500000, makespan=9500000)
    """
    costs.require_schedule(schedule)
    graph, order = checked(schedule)
    lanes = [
        Lane([LaneWork(gather.begins, gather.needed, takes[gather.stage]) for gather in plan.gathers], steps)
        for plan, steps in zip(plans, steps_of_ranks(graph), strict=True)
    ]
    others = [Lane(works, steps) for works, steps in zip(other_lanes, steps_of_ranks(graph), strict=True)] if other_lanes else lanes

    def earliest(number: int, end: Sequence[int]) -> int:
        rank = graph.rank[number]
        return max(lanes[rank].ready(number, end), others[rank].ready(number, end))

    ended = play(graph, order, *pass_times(graph, costs), earliest=earliest)
    before = [sum(takes[gather.stage] for gather in plan.gathers if gather.needed == 0) for plan in plans]
    played = tuple(
        tuple((gather, *times) for gather, times in zip(plan.gathers, lane.played, strict=True))
        for plan, lane in zip(plans, lanes, strict=True)
    )
    return GatherTimes(metrics_of(graph, ended, costs, before), played)
