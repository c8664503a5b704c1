"""The bounds of small problems, to the ns. A weaker bound is still valid, so comparisons with schedules do not detect it.

The problems cover every claim: a limit or none, several stages a rank, recomputation, a divided head, hidden time, `fused` and shares.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from zerobubble import Costs, Limits, Placement
from zerobubble.bounds import Bounds, bounds_with_divided_head, bounds_with_recompute, lower_bounds, rank_load
from zerobubble.bounds.rank_load import RankLoad
from zerobubble.costs import FULL, NONE, Level

PLACEMENTS = (Placement.linear(3), Placement.vee(2), Placement.looped(2, 2), Placement.linear(5), Placement.vee(3), Placement.looped(3, 2))
LEVELS = (NONE, Level("half", 0.5, 0.5), FULL)


def drawn(dice: random.Random) -> tuple[Placement, int, Costs, Limits]:
    """Costs in which every stage differs, and limits between one microbatch on each rank and all."""
    placement, microbatches = dice.choice(PLACEMENTS), dice.randint(1, 12)
    stages = placement.num_stages
    columns = [[dice.randint(10, 99) for _ in range(stages)] for _ in range(3)]
    comm, saved = [dice.randint(0, 30) for _ in range(stages - 1)], [dice.randint(1, 9) for _ in range(stages)]
    costs = Costs(*map(tuple, (*columns, comm, saved, [dice.randint(0, most) for most in saved])))
    one = [sum(saved[stage] for _, stage in placement.stages(rank)) for rank in range(placement.num_ranks)]
    return placement, microbatches, costs, Limits(tuple(size + dice.randint(0, size * microbatches) // 2 for size in one))


def bounds_of(axis: str, seed: int) -> Bounds:
    """The bounds of a problem with this axis."""
    dice = random.Random(f"{axis} {seed}")
    placement, microbatches, costs, limits = drawn(dice)
    if "shares" in axis:
        offered = [number / 4 for number in range(1, 13)] if "many" in axis else [0.5, 1.0, 2.0] * 4
        costs = replace(costs, shares=tuple(dice.sample(offered, microbatches)))
    if axis == "hidden":
        costs = replace(costs, hidden=tuple(dice.randint(0, 9) for _ in costs.forward))
    if axis == "fused":
        costs = costs.with_columns(fused=[b + w - dice.randint(0, 9) for b, w in zip(costs.backward, costs.weight, strict=True)])
    if "head" in axis:
        costs = costs.with_divided_head((4e-5, 1e-5, 6e-5), collective=dice.choice((0, 3e-5)))
    if axis == "head":
        microbatches = min(microbatches, 1 + seed % 3)  # few, so that the time of one microbatch counts
    levels = LEVELS if "recompute" in axis else ()
    if "head" in axis:
        return bounds_with_divided_head(placement, microbatches, costs, limits, levels)
    if levels:
        tight = Limits(tuple(max(1, round(limit * dice.choice((0.6, 0.8)))) for limit in limits.memory))
        return bounds_with_recompute(placement, microbatches, costs, tight, levels)
    return lower_bounds(placement, microbatches, costs, limits if dice.random() < 0.8 else None)


FIGURES = {
    "equal": (
        "2520/2726 2550/2550 932/932 820/820 2469/2469 625/625 1029/1073 378/378 3806/3901 4026/4068 3905/3905 3936/3964 "
        "1348/1348 1468/1490 1233/1275 4592/4592 918/918 3321/3321 418/418 1408/1408 2869/2947 1579/1579 4427/4427 3792/3792 "
        "2658/2693 1183/1247 4399/4399 1905/1905 1040/1040 1332/1332"
    ),
    "shares": (
        "4898/4959 856/901 2382/2423 3780/3780 2141/2146 1478/1478 1692/1692 1576/1576 5080/5080 5904/5904 2625/2625 3072/3164 "
        "619/619 4320/4320"
    ),
    "many shares": "3553/3553 2098/2098 4595/4623 5923/5940 4366/4366 6411/6451 544/544 6240/6257 1079/1079 1435/1435",
    "hidden": "1438/1478 3344/3344 2835/2835 3114/3114 2247/2306 1984/2023 1342/1342 3483/3483 1764/1764 3960/4054",
    "fused": "2376/2376 2350/2350 1570/1612 2401/2401 4491/4544 4377/4399 868/868 888/888 3243/3243 1287/1287",
    "head": (
        "750/750 648/648 1191/1211 531/531 819/819 1413/1413 871/871 697/697 2159/2159 770/770 1061/1061 456/456 885/885 "
        "1725/1725 1008/1034 889/889 818/881 1423/1423"
    ),
    "recompute": (
        "1245/1245 4667/4772 3687/3687 1880/1880 1481/1481 1314/1400 2720/2749 1648/1648 2208/2390 2990/2990 3504/3633 2664/2750 "
        "3320/3354 4260/4340"
    ),
    "recompute shares": "1618/1618 3872/3942 1137/1209 5208/5208 3612/3638 820/820 1333/1359 3860/3860",
    "recompute head": "2536/2542 546/627 2720/2720 3222/3248 956/956 4830/4830",
    "head shares": "1736/1787 2620/2620 2198/2198 4942/4981 3260/3322 3390/3399 2040/2040 6052/6052",
}
"""Span/makespan of the problems of each axis, in ns."""

FURTHER = {("equal", 31): "5013/5013", ("equal", 92): "1624/1641", ("head", 67): "1153/1153"}
"""Others, in which the time of a message counts between ranks, or the dynamic program of a rank at its largest size."""


@pytest.mark.parametrize("axis", FIGURES)
def test_bounds_stay_as_strong_as_they_are(axis: str) -> None:
    figures = FIGURES[axis].split()
    bounds = [bounds_of(axis, seed) for seed in range(len(figures))]
    assert [f"{span.time}/{makespan.time}" for span, makespan in bounds] == figures


@pytest.mark.parametrize(("axis", "seed"), FURTHER)
def test_further_bounds_stay_as_strong_as_they_are(axis: str, seed: int) -> None:
    span, makespan = bounds_of(axis, seed)
    assert f"{span.time}/{makespan.time}" == FURTHER[axis, seed]


@pytest.mark.parametrize("seed", [0, 1, 16, 18])
def test_a_bound_with_recomputation_does_not_depend_on_the_unit_of_time(seed: int) -> None:
    dice = random.Random(f"scaled {seed}")
    placement, microbatches, costs, limits = drawn(dice)
    tight = Limits(tuple(max(1, round(limit * dice.choice((0.6, 0.8)))) for limit in limits.memory))
    columns = {name: getattr(costs, name) for name in ("forward", "backward", "weight", "comm")}
    found = []
    for unit in (1, 1000):
        times = {name: tuple(unit * time for time in column) for name, column in columns.items()}
        span, makespan = bounds_with_recompute(placement, microbatches, replace(costs, **times), tight, LEVELS)
        found.append((span.time / unit, makespan.time / unit))
    assert found[0] == found[1]


def test_counted_stages_bound_the_work_exactly_where_w_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = (2,), (5,), (2,), (8,), (0,), 6, 36
    exact = tuple(RankLoad(*given).after)
    monkeypatch.setattr(rank_load, "MOST_EXACT", 0)
    assert tuple(RankLoad(*given).after) == exact == (32, 12)
