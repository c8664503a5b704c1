"""Where to cut so that the slowest rank is as fast as it can be, and the proof of how fast that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import comb

from zerobubble.arguments import WHOLE, each, either, optional, takes
from zerobubble.costs import Costs, Limits
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.ir import Placement, Schedule
from zerobubble.partition.annealing import Annealing, runs_within_moves
from zerobubble.partition.bound import cut_bound, heaviest_layer, layer_label
from zerobubble.partition.descent import descend, score
from zerobubble.partition.exact import FromTheEnds, exact_cuts
from zerobubble.partition.layers import Cuts, Layer, stage_costs
from zerobubble.partition.room import Loads, Room, rooms
from zerobubble.partition.rounds import two_rounds
from zerobubble.partition.shortage import bytes_as_time, shortage_text
from zerobubble.partition.speeds import Links, Speeds, as_links, as_speeds, speed_of
from zerobubble.units import counted, show_ms

MOST_CUTS = 10_000
"""Up to how many cuts all are tried where nothing else is exact, which takes some tenths of a second."""
_COVERED = "the search covered every cut"


@dataclass(frozen=True, repr=False)
class LayerCut(Displayed):
    """Where `layers` are cut on `placement`, and how good that is.

    `bound` is what the slowest rank takes at least for a microbatch, F, B and W in ns, whatever the cut, and `reason` says why. `speeds`
    are those of the ranks, as in `cut_layers`; an even share of a rank is then one by its speed. `links` are the speeds of links, as in
    `zb.plan`. Raises `InputError` for bad speeds.

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
        """The costs of the stages on their ranks."""
        return stage_costs(self.layers, self.cuts, self.placement, self.speeds, self.links)

    @property
    def stages(self) -> tuple[range, ...]:
        """The numbers of the layers of each stage."""
        return tuple(range(first, end) for first, end in pairwise((0, *self.cuts, len(self.layers))))

    @property
    def rank_times(self) -> tuple[int, ...]:
        """The ns of F, B and W that each rank takes for a microbatch."""
        busy = [0] * self.placement.num_ranks
        for rank, stage in zip(self.placement.routes[0], self.stages, strict=True):
            busy[rank] += self._time_of(stage, rank)
        return tuple(busy)

    @property
    def rank_layers(self) -> tuple[int, ...]:
        """The number of layers of each rank."""
        counts = [0] * self.placement.num_ranks
        for rank, stage in zip(self.placement.routes[0], self.stages, strict=True):
            counts[rank] += len(stage)
        return tuple(counts)

    @property
    def rank_held(self) -> tuple[int, ...]:
        """The bytes that each rank saves of a microbatch in the F of all its stages."""
        held = [0] * self.placement.num_ranks
        for rank, stage in zip(self.placement.routes[0], self.stages, strict=True):
            held[rank] += sum(self.layers[number].held_after_f for number in stage)
        return tuple(held)

    @property
    def slowest(self) -> int:
        """The ns that the slowest rank takes."""
        return max(self.rank_times)

    @property
    def excess(self) -> float:
        """How many times an even share of the work the slowest rank takes; 1 is the ideal."""
        return self._shares(self.slowest)

    @property
    def least_excess(self) -> float:
        """How many times an even share the slowest rank takes at least, by the bound."""
        return self._shares(self.bound)

    @property
    def heaviest_text(self) -> str:
        """The bound that the heaviest layer sets, such as the head, in a sentence."""
        number = heaviest_layer(self.layers)
        layer, fastest = self.layers[number], max(self.speeds, default=1.0)
        time, where = layer.time_at(fastest), f" at speed {fastest:g}" if self.speeds else ""
        share = self._shares(time)
        least = f"however the others are cut, the slowest rank takes {max(1.0, share):.3f} x an even share at least"
        return f"{layer_label(number, layer)}, the heaviest, takes {show_ms(time)}{where}, {share:.3f} x an even share: {least}"

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
    """The cuts with the smallest largest stage time (F + B + W), exactly; among those, with the smallest sum of squared stage times.

    Raises `InputError` for fewer layers than stages.
    """
    return cut_layers(layers, Placement.linear(num_stages)).cuts


@takes(layers=each(Layer), placement=Placement, limits=optional(Limits), in_flight=WHOLE)
def balance_placement(layers: Sequence[Layer], placement: Placement, limits: Limits | None = None, in_flight: int = 1) -> Cuts:
    """The cuts of `cut_layers`, with the activations of `in_flight` microbatches in each stage."""
    return cut_layers(layers, placement, limits, in_flight).cuts


@takes(layers=each(Layer), placement=Placement, limits=optional(Limits), held=either(WHOLE, Schedule))
def cut_layers(
    layers: Sequence[Layer], placement: Placement, limits: Limits | None = None, held: int | Schedule = 1, speeds: Sequence[float] = ()
) -> LayerCut:
    """The cut with the smallest largest rank time (F + B + W of its stages), among those with the smoothest stage times, and its proof.

    Exact where each rank holds one stage, for the vee, for loops of two rounds of some 60 layers, and where there are few cuts; elsewhere
    a search, whose distance from the best cut is at most that of `LayerCut.slowest` from `LayerCut.bound`.

    Arguments:
        layers: what each layer takes and holds; a stage is some in a row, at least one.
        placement: which rank holds which stage, of one route.
        limits: the bytes that each rank may hold, parameters, gradients, optimizer state and activations together; None for no limit.
        held: what fills the memory in addition to parameters: a schedule of as many stages, whose moments of most activations are taken
            rank by rank, or how many microbatches each stage keeps from F until B (1 is the least with which anything runs).
        speeds: how fast each rank runs passes, relative to the times of the layers: one of speed 0.5 takes twice as long. Messages take
            as long on any rank. All ranks have speed 1 if not given.

    Raises `InputError` for fewer layers than stages, for a placement of several routes, where no cuts fit the limits, and for speeds that
    are not one number from a millionth to a million for each rank.

    >>> import zerobubble as zb
    >>> layers = [zb.partition.Layer(10**6, 10**6, 10**6, 0, 0)] * 10
    >>> zb.partition.cut_layers(layers, zb.Placement.linear(3), speeds=(1, 1, 0.5))
    <LayerCut of 10 layers into 3 stages: 4 4 2; slowest rank 12 ms, 1.000 x an even share, proven the least>
    """
    made = fitting_cut(layers, placement, limits, held, speeds)
    if made is None:
        loads = Loads.of(layers)
        even = _cuts(bytes_as_time(loads), placement, [Room(None, ())] * placement.num_ranks, 0)
        assert even is not None, "without limits any cuts do"
        raise InputError(shortage_text(loads, placement.routes[0], rooms(placement, limits, held), even[0]))
    return made


def fitting_cut(
    layers: Sequence[Layer],
    placement: Placement,
    limits: Limits | None,
    held: int | Schedule,
    speeds: Sequence[float] = (),
    roomiest: LayerCut | None = None,
) -> LayerCut | None:
    """What `cut_layers` gives; None where no cuts fit the limits, whatever it would take.

    `roomiest` is the cut found where less is held. If it fits, no search is needed.
    """
    _require_fit(layers, placement, limits, held)
    known = as_speeds(speeds, placement.num_ranks)
    bound = cut_bound(layers, placement, known)
    start = None if roomiest is None else roomiest.cuts
    found = _cuts(Loads.of(layers, known), placement, rooms(placement, limits, held, known), bound.time, start)
    if found is None:
        return None
    cuts, is_best = found
    made = LayerCut(tuple(layers), placement, cuts, *bound, speeds=known)
    return replace(made, bound=made.slowest, reason=_COVERED) if is_best and made.slowest > bound.time else made


def _cuts(
    loads: Loads, placement: Placement, of_ranks: Sequence[Room], enough: int, roomiest: Cuts | None = None
) -> tuple[Cuts, bool] | None:
    """The cuts, and whether all others are known to be no better; None where none fits. No slowest rank takes less than `enough` ns."""
    home, ranks = placement.routes[0], placement.num_ranks
    in_turn = [of_ranks[rank] for rank in home[:ranks]]
    if len(home) == ranks or (len(home) == 2 * ranks and home == home[::-1]):
        cuts = exact_cuts(FromTheEnds(loads, in_turn, len(home) > ranks))
        return None if cuts is None else (cuts, True)
    rounds = two_rounds(loads, in_turn, enough) if home == 2 * home[:ranks] else None
    return rounds or _by_search(loads, home, of_ranks, roomiest)


def _require_fit(layers: Sequence[Layer], placement: Placement, limits: Limits | None, held: int | Schedule) -> None:
    if len(placement.routes) > 1:
        raise InputError(f"layers are cut for one route, the placement {placement.name!r} has {len(placement.routes)}")
    if len(layers) < placement.num_stages:
        raise InputError(f"{len(layers)} layers cannot be cut into {placement.num_stages} stages: a stage is at least one layer")
    if limits is not None and len(limits.memory) != placement.num_ranks:
        raise InputError(f"the placement has {placement.num_ranks} ranks, the limits describe {len(limits.memory)}")
    if isinstance(held, Schedule) and held.placement.routes != placement.routes:
        raise InputError(f"the schedule {held.name!r} has its stages on other ranks than the placement {placement.name!r}")


def _by_search(loads: Loads, home: Sequence[int], of_ranks: Sequence[Room], roomiest: Cuts | None = None) -> tuple[Cuts, bool] | None:
    """The best end of several searches, from equal stage times and from equal numbers of layers; None where all are over the memory.

    Where the cuts with more room are known, they are the answer if they fit.
    """
    num_layers = len(loads.time) - 1
    if comb(num_layers - 1, len(home) - 1) <= MOST_CUTS:
        (over, *_), cuts = min((score(loads, home, of_ranks, cuts), cuts) for cuts in combinations(range(1, num_layers), len(home) - 1))
        return None if over else (cuts, True)
    if roomiest is not None and score(loads, home, of_ranks, roomiest)[0] == 0:
        return roomiest, False
    starts = _even_cuts(loads, [of_ranks[rank].speed for rank in home])
    seeds = range(runs_within_moves(len(home), num_layers))
    starts += [Annealing(loads, home, of_ranks, start).run(seed) for start in starts for seed in seeds]
    (over, *_), cuts = min(descend(loads, home, of_ranks, start) for start in starts)
    return None if over else (cuts, False)


def _even_cuts(loads: Loads, speeds: Sequence[float]) -> list[Cuts]:
    """Cuts into equal numbers of layers, and into stages of equal times on ranks of these speeds, one for each stage."""
    num_layers, stages = len(loads.time) - 1, len(speeds)
    equal_times = exact_cuts(FromTheEnds(loads, [Room(None, (), speed) for speed in speeds], False))
    return [tuple(num_layers * stage // stages for stage in range(1, stages)), *([] if equal_times is None else [equal_times])]
