"""Cuts that minimize the time of the slowest rank, with a lower bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import comb

from zerobubble.arguments import WHOLE, each, either, optional, takes
from zerobubble.costs import Costs, Limits
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.ir import Placement, Schedule
from zerobubble.partition.bound import cut_bound, heaviest_layer, layer_label
from zerobubble.partition.capacity import Capacity, Loads, capacities_of
from zerobubble.partition.exact import FromTheEnds, cuts_of_two_rounds, exact_cuts, faster
from zerobubble.partition.layers import Cuts, Layer, stage_costs
from zerobubble.partition.local_search import Annealing, descend, runs_within_moves, score
from zerobubble.partition.speeds import Links, Speeds, as_links, as_speeds, speed_of
from zerobubble.units import counted, show_bytes, show_ms

MOST_CUTS = 10_000
"""The most cuts to enumerate if no other exact method applies; they take some tenths of a second."""
_STEPS_OF_LIMIT = 200
"""Missing bytes are found to within the largest limit divided by this."""
_COVERED = "the search covered every cut"


@dataclass(frozen=True, repr=False)
class LayerCut(Displayed):
    """A cut of `layers` on `placement`, with a lower bound.

    `cuts` are the indices of the layers at which stages begin, except the first. `bound` is a lower bound, for all cuts, on the time of the
    slowest rank: the ns of its F, B and W per microbatch. `reason` explains it. `speeds` has the speeds of the ranks, as in `cut_layers`;
    an even share is then proportional to the speed. `links` has the speeds of links, as in `zb.plan`. Raises `InputError` for invalid
    speeds.

    >>> import zerobubble as zb
    >>> layers = [zb.partition.Layer(10**6, 10**6, 10**6, 0, 0)] * 7 + [zb.partition.Layer(2 * 10**6, 2 * 10**6, 2 * 10**6, 0, 0)]
    >>> zb.partition.cut_layers(layers, zb.Placement.linear(3))
    <LayerCut of 8 layers into 3 stages: 3 3 2; slowest rank 9 ms, 1.000 x an even share, proven the least>
    """

    layers: tuple[Layer, ...]
    placement: Placement
    cuts: Cuts
    bound: int
    reason: str
    speeds: Speeds = ()
    links: Links = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "links", as_links(self.links, self.placement.num_ranks))
        object.__setattr__(self, "speeds", as_speeds(self.speeds, self.placement.num_ranks))

    @property
    def costs(self) -> Costs:
        """Costs of the stages on their ranks."""
        return stage_costs(self.layers, self.cuts, self.placement, self.speeds, self.links)

    @property
    def stages(self) -> tuple[range, ...]:
        """The indices of the layers of each stage."""
        return tuple(range(first, end) for first, end in pairwise((0, *self.cuts, len(self.layers))))

    @property
    def rank_times(self) -> tuple[int, ...]:
        """The ns of F, B and W of a microbatch on each rank."""
        return self._by_rank(self._time_of)

    @property
    def rank_layers(self) -> tuple[int, ...]:
        """The number of layers of each rank."""
        return self._by_rank(lambda stage, _: len(stage))

    @property
    def rank_held(self) -> tuple[int, ...]:
        """The bytes that each rank saves per microbatch in F of all its stages."""
        return self._by_rank(lambda stage, _: sum(self.layers[number].held_after_f for number in stage))

    @property
    def slowest(self) -> int:
        """The ns of the slowest rank."""
        return max(self.rank_times)

    @property
    def excess(self) -> float:
        """The time of the slowest rank relative to an even share of the work; 1 is ideal."""
        return self._shares(self.slowest)

    @property
    def least_excess(self) -> float:
        """The bound relative to an even share of the work."""
        return self._shares(self.bound)

    @property
    def heaviest_text(self) -> str:
        """Describes the time of the heaviest layer, such as the head."""
        number = heaviest_layer(self.layers)
        layer, fastest = self.layers[number], max(self.speeds, default=1.0)
        time, where = layer.time_at(fastest), f" at speed {fastest:g}" if self.speeds else ""
        return f"{layer_label(number, layer)}, the heaviest, takes {show_ms(time)}{where}, {self._shares(time):.3f} x an even share"

    def _by_rank(self, amount: Callable[[range, int], int]) -> tuple[int, ...]:
        """Returns for each rank the sum of `amount(layers, rank)` over its stages."""
        sums = [0] * self.placement.num_ranks
        for rank, stage in zip(self.placement.routes[0], self.stages, strict=True):
            sums[rank] += amount(stage, rank)
        return tuple(sums)

    def _time_of(self, stage: range, rank: int) -> int:
        return sum(self.layers[number].time_at(speed_of(rank, self.speeds)) for number in stage)

    def _shares(self, time: int) -> float:
        total = sum(layer.time for layer in self.layers)
        return time * (sum(self.speeds) if self.speeds else self.placement.num_ranks) / total if total else 1.0

    def _summary(self) -> str:
        sizes = " ".join(str(len(stage)) for stage in self.stages)
        least = "proven the least" if self.slowest == self.bound else f"at least {self.least_excess:.3f} x"
        what = f"of {counted(len(self.layers), 'layer')} into {counted(len(self.stages), 'stage')}: {sizes}"
        return f"{what}; slowest rank {show_ms(self.slowest)}, {self.excess:.3f} x an even share, {least}"

    def _details(self) -> Iterator[str]:
        yield f"no cut has a slowest rank below {show_ms(self.bound)}: {self.reason}"
        yield self.heaviest_text
        for stage, (rank, numbers) in enumerate(zip(self.placement.routes[0], self.stages, strict=True)):
            where = f"rank {rank}" + (f" of speed {self.speeds[rank]:g}" if self.speeds else "")
            yield f"stage {stage} on {where}: layers {numbers[0]} to {numbers[-1]}, {show_ms(self._time_of(numbers, rank))}"


@takes(layers=each(Layer), num_stages=WHOLE)
def balance(layers: Sequence[Layer], num_stages: int) -> Cuts:
    """Returns the cuts of `layers` into `num_stages` stages that minimize the largest stage time (F + B + W), exactly.

    Among these, they minimize the sum of squared stage times.
    Raises `InputError` for fewer layers than stages.
    """
    return cut_layers(layers, Placement.linear(num_stages)).cuts


@takes(layers=each(Layer), placement=Placement, limits=optional(Limits), in_flight=WHOLE)
def balance_placement(layers: Sequence[Layer], placement: Placement, limits: Limits | None = None, in_flight: int = 1) -> Cuts:
    """Returns the cuts of `cut_layers(layers, placement, limits)`, with the activations of `in_flight` microbatches in each stage."""
    return cut_layers(layers, placement, limits, in_flight).cuts


@takes(layers=each(Layer), placement=Placement, limits=optional(Limits), held=either(WHOLE, Schedule))
def cut_layers(
    layers: Sequence[Layer], placement: Placement, limits: Limits | None = None, held: int | Schedule = 1, speeds: Sequence[float] = ()
) -> LayerCut:
    """Returns the cut that minimizes the largest rank time (F + B + W of its stages), then the sum of squared stage times.

    Exact for one stage per rank, for the vee, for loops of two rounds if layers times ranks is at most 600, and if there are few cuts.
    Otherwise a local search, whose optimality gap is at most the difference between `LayerCut.slowest` and `LayerCut.bound`.

    Arguments:
        layers: the costs of each layer. A stage is at least one consecutive layer.
        placement: the rank of each stage; one route only.
        limits: the bytes of parameters, gradients, optimizer state and activations that each rank may hold; None for no limit.
        held: the activations in memory: a schedule of as many stages, or the number of microbatches that each stage holds from F until B
            (at least 1).
        speeds: relative speed of each rank; passes take twice as long at 0.5. Messages are unaffected. All 1 if not given.

    Raises `InputError` if there are fewer layers than stages, if the placement has several routes, or if no cut fits the limits. `speeds`
    needs one number from 1e-6 to 1e6 per rank.

    >>> import zerobubble as zb
    >>> layers = [zb.partition.Layer(10**6, 10**6, 10**6, 0, 0)] * 10
    >>> zb.partition.cut_layers(layers, zb.Placement.linear(3), speeds=(1, 1, 0.5))
    <LayerCut of 10 layers into 3 stages: 4 4 2; slowest rank 12 ms, 1.000 x an even share, proven the least>
    """
    cut = fitting_cut(layers, placement, limits, held, speeds)
    if cut is None:
        loads = Loads.from_layers(layers)
        even = _cuts(bytes_as_time(loads), placement, [Capacity(None, ())] * placement.num_ranks, 0)
        assert even is not None, "without limits any cuts do"
        raise InputError(shortage_text(loads, placement.routes[0], capacities_of(placement, limits, held), even[0]))
    return cut


def quick_cuts(layers: Sequence[Layer], placement: Placement) -> Cuts:
    """Returns the cuts that descent reaches from even ones: in a fraction of the time of `cut_layers`, but not always as balanced.

    Raises `InputError` for fewer layers than stages, and for a placement of several routes.
    """
    _require_fit(layers, placement, None, 1)
    loads, home = Loads.from_layers(layers), placement.routes[0]
    anything = [Capacity(None, ())] * placement.num_ranks
    return min(descend(loads, home, anything, start) for start in _even_cuts(loads, [1.0] * len(home)))[1]


def fitting_cut(
    layers: Sequence[Layer],
    placement: Placement,
    limits: Limits | None,
    held: int | Schedule,
    speeds: Sequence[float] = (),
    relaxed: Cuts | None = None,
) -> LayerCut | None:
    """Returns the cut of `cut_layers`; None if no cuts fit the limits.

    `relaxed` are known cuts. If no exact method applies and they fit, they are returned without a search.
    """
    _require_fit(layers, placement, limits, held)
    speeds = as_speeds(speeds, placement.num_ranks)
    bound = cut_bound(layers, placement, speeds)
    cuts_and_proof = _cuts(
        Loads.from_layers(layers, speeds), placement, capacities_of(placement, limits, held, speeds), bound.time, relaxed
    )
    if cuts_and_proof is None:
        return None
    cuts, is_best = cuts_and_proof
    cut = LayerCut(tuple(layers), placement, cuts, *bound, speeds=speeds)
    return replace(cut, bound=cut.slowest, reason=_COVERED) if is_best and cut.slowest > bound.time else cut


def _cuts(
    loads: Loads, placement: Placement, of_ranks: Sequence[Capacity], bound: int, relaxed: Cuts | None = None
) -> tuple[Cuts, bool] | None:
    """Returns the cuts, and whether they are proven optimal; None if none fits. `bound` is a lower bound on the slowest rank in ns."""
    home, ranks = placement.routes[0], placement.num_ranks
    in_stage_order = [of_ranks[rank] for rank in home[:ranks]]
    if len(home) == ranks or (len(home) == 2 * ranks and home == home[::-1]):
        cuts = exact_cuts(FromTheEnds(loads, in_stage_order, len(home) > ranks))
        return None if cuts is None else (cuts, True)
    cuts = cuts_of_two_rounds(loads, in_stage_order, bound) if home == 2 * home[:ranks] else None
    return _by_search(loads, home, of_ranks, relaxed) if cuts is None else (cuts, True)


def _require_fit(layers: Sequence[Layer], placement: Placement, limits: Limits | None, held: int | Schedule) -> None:
    if len(placement.routes) > 1:
        message = "layers are cut for one route, but the placement {placement!r} has {placement_routes}"
        raise InputError(message, placement=placement.name, placement_routes=len(placement.routes))
    if len(layers) < placement.num_stages:
        message = "{layers} cannot be cut into {placement_stages} stages: a stage is at least one layer"
        most = len(layers) // placement.stages_per_rank
        raise InputError(
            message,
            layers=counted(len(layers), "layer"),
            num_layers=len(layers),
            placement_stages=placement.num_stages,
            remedy=f"use at most {counted(most, 'rank')}" if most else "use a placement with fewer stages on a rank",
        )
    if limits is not None:
        limits.require_ranks(placement.num_ranks, "the placement")
    if isinstance(held, Schedule) and held.placement.routes != placement.routes:
        raise InputError(
            "the schedule {held!r} has its stages on other ranks than the placement {placement!r}", held=held.name, placement=placement.name
        )


def _by_search(loads: Loads, home: Sequence[int], of_ranks: Sequence[Capacity], relaxed: Cuts | None = None) -> tuple[Cuts, bool] | None:
    """Returns the best cuts of several searches, from equal stage times and equal numbers of layers; None if all exceed the memory.

    Returns the cuts `relaxed` if they are known and fit.
    """
    num_layers = len(loads.time) - 1
    if comb(num_layers - 1, len(home) - 1) <= MOST_CUTS:
        (over, *_), cuts = min((score(loads, home, of_ranks, cuts), cuts) for cuts in combinations(range(1, num_layers), len(home) - 1))
        return None if over else (cuts, True)
    if relaxed is not None and score(loads, home, of_ranks, relaxed)[0] == 0:
        return relaxed, False
    starts = _even_cuts(loads, [of_ranks[rank].speed for rank in home])
    seeds = range(runs_within_moves(len(home), num_layers))
    starts += [Annealing(loads, home, of_ranks, start).run(seed) for start in starts for seed in seeds]
    (over, *_), cuts = min(descend(loads, home, of_ranks, start) for start in starts)
    return None if over else (cuts, False)


def _even_cuts(loads: Loads, speeds: Sequence[float]) -> list[Cuts]:
    """Returns cuts into equal numbers of layers, and into equal stage times at these speeds of the stages."""
    num_layers, stages = len(loads.time) - 1, len(speeds)
    equal_times = exact_cuts(FromTheEnds(loads, [Capacity(None, (), speed) for speed in speeds], False))
    return [tuple(num_layers * stage // stages for stage in range(1, stages)), *([] if equal_times is None else [equal_times])]


def shortage_text(loads: Loads, home: Sequence[int], capacities: Sequence[Capacity], even: Cuts) -> str:
    """Describes how much memory the ranks lack for any cuts, and how much would suffice.

    `capacities[r]` is the capacity of rank r. If ranks have several stages, the cuts with the smallest shortage are searched for near
    `even`, cuts that give ranks about the same bytes.
    """
    missing = (
        _missing_for_one_stage_each(loads, home, capacities)
        if len(home) == len(capacities)
        else min(_lacking(loads, home, capacities, cuts) for cuts in (even, descend(loads, home, capacities, even)[1]))
    )
    limits = [capacity.limit for capacity in capacities if capacity.limit is not None]
    ends = (min(limits), max(limits))
    allowed = " to ".join(dict.fromkeys(map(show_bytes, ends)))
    wanted = " to ".join(dict.fromkeys(show_bytes(_rounded_up(limit + missing)) for limit in ends))
    return (
        f"no cuts fit the memory limits of {allowed} on a rank; with {show_bytes(_rounded_up(missing))} more on each rank ({wanted}), some "
        "would: raise the limits, use more ranks, or keep fewer microbatches in flight"
    )


def _rounded_up(count: int) -> int:
    """Rounds a number of bytes up to three digits."""
    step: int = 10 ** max(0, len(str(count)) - 3)
    return -(-count // step) * step


def bytes_as_time(loads: Loads) -> Loads:
    """Returns the loads with the bytes of the layers in place of their times."""
    return replace(loads, time=[kept + saved for kept, saved in zip(loads.parameters, loads.saved, strict=True)])


def _missing_for_one_stage_each(loads: Loads, home: Sequence[int], capacities: Sequence[Capacity]) -> int:
    """Returns the bytes that each rank lacks, for one stage per rank, to a small fraction of its memory."""

    def fits(more: int) -> bool:
        chain = FromTheEnds(loads, [_larger(capacities[rank], more) for rank in home], False)
        return faster(chain, loads.time[-1]) is not None

    step = max(1, max(capacity.limit or 0 for capacity in capacities) // _STEPS_OF_LIMIT)
    least, most = 0, step
    while not fits(most):
        least, most = most, 2 * most
    while most - least > step:
        middle = (least + most) // 2
        least, most = (least, middle) if fits(middle) else (middle, most)
    return most


def _larger(capacity: Capacity, more: int) -> Capacity:
    return capacity if capacity.limit is None else replace(capacity, limit=capacity.limit + more)


def _lacking(loads: Loads, home: Sequence[int], capacities: Sequence[Capacity], cuts: Cuts) -> int:
    edges = (0, *cuts, len(loads.time) - 1)
    stages = list(zip(home, pairwise(edges), strict=True))
    return max(capacity.missing(loads, [piece for rank, piece in stages if rank == here]) for here, capacity in enumerate(capacities))
