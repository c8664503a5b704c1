"""Layers cut into stages: compared with every other cut of small models, and within memory.

A cut reported as proven is the fastest of all. No cut beats its bound. A cut fits exactly if the bytes of every rank do.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise
from time import thread_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zerobubble as zb
from tests.refusals import raises, states
from tests.thinned import every
from zerobubble import InputError, Limits, Placement
from zerobubble.errors import ParseError
from zerobubble.partition import (
    Layer,
    activation_limits,
    balance,
    balance_placement,
    cut_layers,
    join_blocks,
    layers_from_dict,
    layers_to_dict,
    parameter_bytes,
    stage_costs,
)
from zerobubble.partition.balancing import fitting_cut
from zerobubble.partition.capacity import Loads, capacities_of
from zerobubble.partition.layers import Cuts
from zerobubble.partition.local_search import Annealing
from zerobubble.units import read_bytes

LINES = [Placement.linear(1), Placement.linear(3), Placement.custom((2, 0, 1))]
EXACT = [*LINES, Placement.vee(1), Placement.vee(2), Placement.vee(3), Placement.looped(2, 2), Placement.looped(3, 2)]
SEARCHED = [Placement.wave(2, 3), Placement.custom((0, 1, 0)), Placement.looped(2, 3)]


UNNAMED = {"forward": 1, "backward": 1, "weight": 1, "held_after_f": 1, "held_after_b": 1, "name": 3}


def layer(time: int, held: int = 1, parameters: int = 0) -> Layer:
    """A layer of `time` ns in all, F and B of different lengths."""
    return Layer(time // 3, time - time // 3 - time // 5, time // 5, held, held, parameters, time % 4)


def random_layers(dice: random.Random, count: int) -> list[Layer]:
    return [layer(dice.randint(0, 20), dice.randint(1, 6), dice.randint(0, 9)) for _ in range(count)]


def figures(layers: list[Layer], placement: Placement, cuts: Cuts, in_flight: int) -> tuple[int, int, list[int]]:
    """The largest rank time, the sum of squared stage times, and the bytes on each rank."""
    busy, held, rough = [0] * placement.num_ranks, [0] * placement.num_ranks, 0
    for rank, (begin, end) in zip(placement.routes[0], pairwise((0, *cuts, len(layers))), strict=True):
        time = sum(each.forward + each.backward + each.weight for each in layers[begin:end])
        busy[rank] += time
        rough += time**2
        held[rank] += sum(each.parameters_bytes + in_flight * each.held_after_f for each in layers[begin:end])
    return max(busy), rough, held


def every_cut(layers: list[Layer], placement: Placement) -> list[Cuts]:
    return list(combinations(range(1, len(layers)), placement.num_stages - 1))


@pytest.mark.parametrize("placement", EXACT, ids=lambda placement: f"{placement.name}-{placement.num_ranks}")
def test_no_cuts_have_a_faster_slowest_rank_or_as_fast_a_one_and_smoother_stages(placement: Placement) -> None:
    dice = random.Random(placement.num_stages)
    for _ in range(30):
        layers = random_layers(dice, placement.num_stages + dice.randint(0, 5))
        best = min(figures(layers, placement, cuts, 1)[:2] for cuts in every_cut(layers, placement))
        assert figures(layers, placement, balance_placement(layers, placement), 1)[:2] == best


@pytest.mark.parametrize("placement", EXACT, ids=lambda placement: f"{placement.name}-{placement.num_ranks}")
def test_unequal_memory_is_kept_where_any_cuts_keep_it(placement: Placement) -> None:
    dice = random.Random(placement.num_stages)
    refused = 0
    for _ in range(30):
        layers = random_layers(dice, placement.num_stages + dice.randint(0, 4))
        limits = Limits(tuple(dice.randint(15, 60) for _ in range(placement.num_ranks)))
        split = [figures(layers, placement, cuts, 2) for cuts in every_cut(layers, placement)]
        fitting = [split[:2] for split in split if all(have <= cap for have, cap in zip(split[2], limits.memory, strict=True))]
        if fitting:
            *found, held = figures(layers, placement, balance_placement(layers, placement, limits, 2), 2)
            assert tuple(found) == min(fitting)
            assert all(have <= cap for have, cap in zip(held, limits.memory, strict=True))
        else:
            refused += 1
            with raises(InputError, "cuts", "memory"):
                balance_placement(layers, placement, limits, 2)
    assert 0 < refused < 30


@pytest.mark.parametrize("placement", SEARCHED, ids=lambda placement: f"{placement.name}-{placement.num_ranks}")
def test_the_search_stays_near_the_best_and_no_single_layer_moved_is_better(placement: Placement) -> None:
    dice = random.Random(7)
    ratios = []
    for _ in range(20):
        layers = random_layers(dice, placement.num_stages + dice.randint(0, 5))
        cuts = balance_placement(layers, placement)
        slowest = figures(layers, placement, cuts, 1)[0]
        for at in range(len(cuts)):
            for step in (-1, 1):
                moved = (*cuts[:at], cuts[at] + step, *cuts[at + 1 :])
                if moved in every_cut(layers, placement):
                    assert figures(layers, placement, moved, 1)[0] >= slowest
        best = min(figures(layers, placement, cuts, 1)[0] for cuts in every_cut(layers, placement))
        ratios.append(slowest / best)
    assert sum(ratios) / len(ratios) < 1.05
    assert ratios.count(1.0) >= 12


@pytest.mark.parametrize("placement", [*EXACT, *SEARCHED], ids=lambda placement: f"{placement.name}-{placement.num_ranks}")
def test_no_cut_is_faster_than_the_bound_and_a_cut_that_is_proven_is_the_fastest(placement: Placement) -> None:
    dice = random.Random(11)
    proven = 0
    for _ in range(20):
        layers = random_layers(dice, placement.num_stages + dice.randint(0, 4))
        found = cut_layers(layers, placement)
        best = min(figures(layers, placement, cuts, 1)[0] for cuts in every_cut(layers, placement))
        assert found.bound <= best <= found.slowest == figures(layers, placement, found.cuts, 1)[0]
        proven += found.bound == best
    assert proven == 20 if placement in EXACT else proven >= 5


SCHEDULES = [("1f1b", 3), ("zb-h2", 3), ("zb-v", 2), ("v-min", 2), ("interleaved-1f1b", 2)]


@pytest.mark.parametrize(("name", "ranks"), SCHEDULES, ids=lambda value: str(value))
def test_cuts_for_a_schedule_keep_the_memory_that_it_takes(name: str, ranks: int) -> None:
    schedule = zb.make(name, ranks, 2 * ranks)
    placement, dice, outcomes = schedule.placement, random.Random(5), set()
    for _ in range(12):
        dealt = [Layer(*(dice.randint(1, 9) for _ in range(6))) for _ in range(placement.num_stages + 2)]
        limits = Limits((dice.randint(25, 110),) * ranks)
        fitting = []
        for cuts in every_cut(dealt, placement):
            peaks = zb.simulation.peak_memory(schedule, stage_costs(dealt, cuts))
            kept = parameter_bytes(dealt, cuts, placement)
            if all(peak + bytes_ <= limit for peak, bytes_, limit in zip(peaks, kept, limits.memory, strict=True)):
                fitting.append(figures(dealt, placement, cuts, 1)[:2])
        outcomes.add(bool(fitting))
        if fitting:
            assert figures(dealt, placement, cut_layers(dealt, placement, limits, schedule).cuts, 1)[:2] == min(fitting)
        else:
            with raises(InputError, "cuts", "memory"):
                cut_layers(dealt, placement, limits, schedule)
    assert outcomes == {True, False}


def least_bottleneck(times: list[int], ranks: int) -> int:
    """The smallest largest stage by the textbook's recurrence over all last cuts."""
    before = [0]
    for time in times:
        before.append(before[-1] + time)
    best = before.copy()
    for _ in range(1, ranks):
        best = [min(max(best[cut], before[end] - before[cut]) for cut in range(end + 1)) for end in range(len(before))]
    return best[-1]


def test_thirty_profiles_of_real_size_are_cut_at_the_optimum_at_once() -> None:
    dice = random.Random(30)
    began = thread_time()
    for _ in range(30):
        times = [dice.randint(800, 1200) for _ in range(dice.randint(32, 100))]
        profile = [layer(300), *map(layer, times), layer(dice.randint(1000, 4000))]
        ranks = dice.choice([4, 8, 16])
        found = cut_layers(profile, Placement.linear(ranks))
        assert found.slowest == found.bound == least_bottleneck([each.time for each in profile], ranks)
        assert cut_layers(profile, Placement.vee(ranks)).slowest <= found.slowest
    assert thread_time() - began < 60


def test_the_bound_names_the_head() -> None:
    layers = [layer(30)] * 14 + [replace(layer(120), name="lm_head")]
    found = cut_layers(layers, Placement.linear(8))
    assert (found.slowest, found.bound, found.reason) == (120, 120, "layer 14 (lm_head) alone takes 0.00012 ms")
    assert found.excess == 120 * 8 / 540
    states(str(found), 14, "lm_head", "0.00012 ms", "1.778")
    shared = cut_layers(layers, Placement.looped(4, 2))
    assert (shared.slowest, shared.bound) == (150, 150)
    states(shared.reason, 14, "lm_head", "0.00012 ms", 2)


def test_parts_of_a_block_are_joined_and_cuts_inside_are_better() -> None:
    parts = [
        layer(10),
        *(replace(layer(time), name=name, block=f"block {n}") for n in range(8) for name, time in (("mlp", 14), ("attn", 6))),
    ]
    whole = join_blocks([*parts, layer(44)])
    assert [(each.time, each.name) for each in whole] == [(10, ""), *((20, f"block {n}") for n in range(8)), (44, "")]
    assert (whole[1].forward, whole[1].held_after_f, whole[1].output_comm) == (14 // 3 + 6 // 3, 2, 6 % 4)
    assert cut_layers([*parts, layer(44)], Placement.linear(3)).slowest < cut_layers(whole, Placement.linear(3)).slowest


def test_the_search_keeps_the_memory_or_says_that_it_found_no_way() -> None:
    placement = Placement.looped(2, 2)
    layers = [layer(3, parameters=10) for _ in range(8)]
    cuts = balance_placement(layers, placement, Limits((44, 44)))
    assert figures(layers, placement, cuts, 1)[2] == [44, 44]
    uneven = balance_placement(layers, placement, Limits((33, 55)))
    assert figures(layers, placement, uneven, 1)[2] == [33, 55]
    with raises(InputError, "cuts"):
        balance_placement(layers, placement, Limits((43, 43)))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(1, 9))
def test_balance_is_the_smallest_largest_stage(times: list[int], stages: int) -> None:
    layers = [layer(time) for time in times]
    if stages > len(times):
        with raises(InputError, len(times), stages, "stages", num_layers=len(times)):
            balance(layers, stages)
        return
    splits = [[sum(times[a:b]) for a, b in pairwise((0, *cuts, len(times)))] for cuts in combinations(range(1, len(times)), stages - 1)]
    cuts = balance(layers, stages)
    assert max(sum(times[a:b]) for a, b in pairwise((0, *cuts, len(times)))) == min(map(max, splits))


def test_a_heavy_head_shares_its_rank_with_one_equal_layer() -> None:
    layers = [layer(30)] * 14 + [layer(120)]
    costs = stage_costs(layers, balance(layers, 4))
    assert sorted(map(sum, zip(costs.forward, costs.backward, costs.weight, strict=True))) == [120, 120, 150, 150]
    cuts = balance_placement(layers, Placement.vee(4))
    assert figures(layers, Placement.vee(4), cuts, 1)[0] == 150
    assert cuts[-1] == 14


def test_stage_costs_are_sums_and_messages_those_of_the_last_layer() -> None:
    layers = [Layer(1, 2, 3, 10, 20, 5, 7), Layer(4, 5, 6, 30, 40, 6, 8), Layer(7, 8, 9, 50, 60, 7, 9)]
    costs = stage_costs(layers, (2,))
    assert (costs.forward, costs.backward, costs.weight, costs.comm) == ((5, 7), (7, 8), (9, 9), (8,))
    assert (costs.held_after_f, costs.held_after_b) == ((40, 50), (60, 60))


def test_parameters_leave_the_rest_for_activations() -> None:
    layers = [layer(1, parameters=10), layer(1, parameters=20), layer(1, parameters=30), layer(1, parameters=40)]
    vee = Placement.vee(2)
    assert parameter_bytes(layers, (1, 2, 3), vee) == (50, 50)
    assert activation_limits(layers, (1, 2, 3), vee, Limits((60, 51))).memory == (10, 1)
    with raises(InputError, "rank 0", 5, "rank 1", 0):
        activation_limits(layers, (1, 2, 3), vee, Limits((45, 50)))


@pytest.mark.parametrize("cuts", [(0,), (3,), (2, 2), (2, 1)])
def test_cuts_that_leave_a_stage_without_a_layer_are_refused(cuts: Cuts) -> None:
    with raises(InputError, "cuts", "ascend", 1, 2):
        stage_costs([layer(1)] * 3, cuts)


def test_bad_input_is_named() -> None:
    with raises(InputError, "backward", "layer", got=-1):
        Layer(1, -1, 1, 1, 1)
    with raises(InputError, "bidirectional", 2):
        balance_placement([layer(1)] * 4, Placement.bidirectional(2))
    with raises(InputError, 2, 1, "placement", "ranks"):
        balance_placement([layer(1)] * 4, Placement.linear(2), Limits((1,)))


def test_layers_survive_json() -> None:
    layers = (Layer(1, 2, 3, 4, 5, 6, 7, "attention", "block 3"), Layer(0, 0, 0, 0, 0), Layer(1, 2, 3, 4, 5, fused=4))
    assert layers_from_dict(layers_to_dict(layers)) == layers
    assert ["fused" in each for each in layers_to_dict(layers)["layers"]] == [False, False, True]


def test_a_layer_without_a_time_of_bw_takes_b_and_w_for_it() -> None:
    """In stages and in blocks; where no layer has one, neither have they."""
    layers = (Layer(1, 2, 3, 4, 5, fused=4), Layer(1, 2, 3, 4, 5, block="b"), Layer(1, 7, 3, 4, 5, fused=9, block="b"))
    assert stage_costs(layers, (1,)).fused == (4, 14)
    assert [each.fused for each in join_blocks(layers)] == [4, 14]
    assert stage_costs([Layer(1, 2, 3, 4, 5)] * 2, (1,)).fused == ()


@pytest.mark.parametrize(
    "bad", [{}, {"layers": 3}, {"layers": [{"forward": 1}]}, {"layers": [{"forward": 0.5}]}, {"layers": [7]}, {"layers": [UNNAMED]}]
)
def test_malformed_json_is_a_parse_error(bad: dict[str, object]) -> None:
    with pytest.raises(ParseError):
        layers_from_dict(bad)


PROFILES = [
    Placement.linear(3),
    Placement.linear(4),
    Placement.vee(2),
    Placement.looped(2, 2),
    Placement.wave(2, 3),
    Placement.looped(2, 3),
]


@pytest.mark.parametrize("seed", every(3, range(30)))
def test_cuts_of_random_profiles_are_within_one_percent_of_the_best(seed: int) -> None:
    """Against every cut there is: layers of all sizes, half of them within memory for what the ranks keep of two microbatches."""
    dice = random.Random(1000 + seed)
    placement = PROFILES[seed % len(PROFILES)]
    count = placement.num_stages + dice.randint(3, 9)
    layers = [layer(round(10 ** dice.uniform(3, 5)), dice.randint(1, 600), dice.randint(1, 900)) for _ in range(count)]
    layers[-1] = layer(sum(each.time for each in layers) // dice.randint(3, 9), 100, 3000)
    every = [figures(layers, placement, cuts, 2) for cuts in every_cut(layers, placement)]
    fullest = sorted(max(held) for _, _, held in every)
    room = fullest[len(fullest) // 20] if seed % 2 else fullest[-1]
    best = min(slowest for slowest, _, held in every if max(held) <= room)
    found = cut_layers(layers, placement, Limits((room,) * placement.num_ranks), 2)
    assert found.slowest <= 1.01 * best
    assert max(figures(layers, placement, found.cuts, 2)[2]) <= room
    if placement in (*EXACT, Placement.linear(4)):
        assert found.slowest == best
        assert found.bound <= best


@pytest.mark.parametrize("placement", [Placement.linear(3), Placement.vee(2), Placement.looped(2, 2)], ids=lambda placement: placement.name)
def test_what_is_said_to_fit_fits_and_is_hardly_more_than_needed(placement: Placement) -> None:
    dice = random.Random(3)
    for _ in range(10):
        layers = [
            layer(dice.randint(1, 20), dice.randint(10**6, 10**7), dice.randint(10**6, 10**8)) for _ in range(placement.num_stages + 4)
        ]
        least = min(max(figures(layers, placement, cuts, 1)[2]) for cuts in every_cut(layers, placement))
        with raises(InputError, "10 MB", "cuts", "memory") as caught:
            cut_layers(layers, placement, Limits((10**7,) * placement.num_ranks))
        wanted = read_bytes(str(caught.value).partition(" more on each rank (")[2].partition(")")[0])
        assert wanted is not None
        assert least <= wanted <= 1.02 * least
        cut_layers(layers, placement, Limits((wanted,) * placement.num_ranks))


@pytest.mark.long
@pytest.mark.parametrize("placement", [Placement.wave(3, 3), Placement.looped(4, 3)], ids=lambda placement: placement.name)
def test_cuts_with_more_room_save_searches(placement: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut that fits with more held is the answer there; where it does not, the cut is searched for as without."""
    dice, runs = random.Random(placement.num_stages), []
    layers = [layer(dice.randint(1, 2000), dice.randint(10, 60), dice.randint(50, 90)) for _ in range(60)]
    relaxed = cut_layers(layers, placement)
    fullest = max(figures(layers, placement, relaxed.cuts, 4)[2])
    run = Annealing.run
    monkeypatch.setattr(Annealing, "run", lambda self, seed=0: runs.append(seed) or run(self, seed))
    assert fitting_cut(layers, placement, Limits((fullest,) * placement.num_ranks), 4, relaxed=relaxed.cuts) == relaxed
    assert runs == []
    even = sum(each.parameters_bytes + 4 * each.held_after_f for each in layers) // placement.num_ranks
    tight = Limits((max(even * 101 // 100, min(fullest - 1, even * 102 // 100)),) * placement.num_ranks)
    found = fitting_cut(layers, placement, tight, 4, relaxed=relaxed.cuts)
    assert found is not None
    assert len(runs) == 2
    assert found == cut_layers(layers, placement, tight, 4)
    assert max(figures(layers, placement, found.cuts, 4)[2]) <= tight.memory[0]


@pytest.mark.parametrize("held", [2, zb.make("interleaved-1f1b", 4, 8, 3)], ids=["microbatches", "schedule"])
def test_the_worth_of_ranks_while_cuts_move_is_that_of_their_room(held: int | zb.Schedule) -> None:
    placement, dice = Placement.looped(4, 3), random.Random(2)
    layers = random_layers(dice, 30)
    loads = Loads.from_layers(layers)
    fullest = max(figures(layers, placement, tuple(range(2, 24, 2)), 1)[2])
    of_ranks = capacities_of(placement, Limits((fullest,) * 4), held)
    moved = Annealing(loads, placement.routes[0], of_ranks, tuple(range(2, 24, 2)))
    moved.run()
    edges = moved._edges
    for rank, room in enumerate(of_ranks):
        pieces = [(edges[stage], edges[stage + 1]) for stage in range(rank, 12, 4)]
        over = room.missing(loads, pieces)
        worth = (room.work(loads, pieces) / (loads.time[-1] / 4)) ** 12 + (100 + 1e4 * over / fullest if over else 0)
        assert moved._costs[rank] == pytest.approx(worth)
    assert any(room.missing(loads, [(0, 10)] * 3) for room in of_ranks)
