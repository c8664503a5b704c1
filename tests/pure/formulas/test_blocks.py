"""The bubbles of the schedules made from building blocks, at unit times of a stage."""

from __future__ import annotations

from itertools import product

import pytest

from tests.pure.formulas.played import TIMES, UNIT, Times, makespan_bubble, played, span_bubble
from tests.thinned import every_of
from zerobubble import Costs, make, simulate
from zerobubble.costs import NS_PER_MS

ENOUGH = [(p, m) for p in range(2, 7) for m in range(p, 4 * p + 1)] + [(p, m) for p in (7, 8, 9, 10, 12, 16) for m in (p, 2 * p - 1, 3 * p)]
"""Shapes with at least as many microbatches as ranks."""


def bubble(name: str, p: int, m: int, v: int = 2) -> int:
    """The longest span beyond the work of a rank, in passes of a stage."""
    return round(span_bubble(played(name, p, m, UNIT, v=v), m, UNIT, v))


def test_v_min() -> None:
    for p, m in ENOUGH:
        if m >= 3:
            assert bubble("v-min", p, m) == (4 * p - 7 if p % 3 == 0 else 4 * p - 5), (p, m)


def test_v_half() -> None:
    for p, m in ENOUGH:
        if p >= 3:
            assert bubble("v-half", p, m) == (3 * p - 4 if p % 2 else 3 * p - 7), (p, m)


def test_v_zb() -> None:
    for p, m in ENOUGH:
        if m >= 2 * p - 1:
            assert bubble("v-zb", p, m) == 0, (p, m)


def test_v_zb_is_shorter_than_zb_v_with_few_microbatches() -> None:
    assert [bubble("v-zb", p, p) < bubble("zb-v", p, p) for p in range(2, 9)] == [True] * 7


def test_1f1b_v() -> None:
    for p, m in ENOUGH:
        if p % 3 == 1:
            assert bubble("1f1b-v", p, m) == 5 * (p - 1), (p, m)
        elif p >= 3:
            assert bubble("1f1b-v", p, m) <= 5 * p - 7, (p, m)


COMPUTED = {3: 8, 4: 15, 5: 18, 6: 22, 7: 30, 8: 33, 9: 36, 10: 45, 12: 52, 16: 75}
"""Bubbles of 1F1B-V for m = 3p, computed with its authors' code."""


@pytest.mark.parametrize(("p", "passes"), COMPUTED.items())
def test_1f1b_v_is_no_longer_than_its_authors_code_makes_it(p: int, passes: int) -> None:
    assert bubble("1f1b-v", p, 3 * p) <= passes


def test_two_thirds() -> None:
    for p, m in ENOUGH:
        odd = 2 * p - 4 if p % 3 == 0 else 2 * p - 2
        assert bubble("two-thirds", p, m, v=1) == (odd if m % 2 else 2 * p - 3), (p, m)


@pytest.mark.parametrize(("v", "times"), every_of(5, [1, 2, 3], TIMES))
def test_interleaved_lean_has_the_bubble_of_interleaved_1f1b(times: Times, v: int) -> None:
    for p, m in [(ranks, microbatches) for ranks in range(1, 8) for microbatches in range(1, 3 * ranks + 2)]:
        timeline = played("interleaved-lean", p, m, times, v=v)
        expected = (p - 1 + (v - 1) * max(p - m, 0)) * sum(times)
        assert makespan_bubble(timeline, m, times, v) == expected, (p, m)
        assert timeline.ranks[0].gaps == expected * NS_PER_MS, (p, m)


def reachable(p: int, v: int, m: int, most: int, bubble: int) -> bool:
    """Whether any looped schedule of F (one slot) and BW (two) ends in time with at most `most` stage activations on a rank.

    Tries every choice of every rank in every slot, microbatches in order. A state has the number of F and BW done by stage, and the
    stage whose BW each rank is in the middle of.
    """
    end, stages = 3 * v * m + bubble, range(p * v)
    states = {((0,) * (p * v), (0,) * (p * v), (None,) * p)}
    for slot in range(end):
        following = set()
        for forward, backward, middle in states:
            choices = []
            for rank in range(p):
                mine = range(rank, p * v, p)
                left = sum(3 * m - forward[s] - 2 * backward[s] for s in mine)
                some = [("wait", 0)] if left < end - slot else []
                if sum(forward[s] - backward[s] for s in mine) < most:
                    some += [("F", s) for s in mine if forward[s] < (m if s == 0 else forward[s - 1])]
                some += [("BW", s) for s in mine if backward[s] < (forward[s] if s == stages[-1] else backward[s + 1])]
                stuck = left > end - slot
                choices.append([("end", middle[rank])] if middle[rank] is not None else [] if stuck else some)
            for chosen in product(*choices):
                f, b, half = list(forward), list(backward), [None] * p
                for rank, (what, s) in enumerate(chosen):
                    f[s] += what == "F"
                    b[s] += what == "end"
                    half[rank] = s if what == "BW" else None
                following.add((tuple(f), tuple(b), tuple(half)))
        states = following
    return any(min(backward) == m for _, backward, _ in states)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (2, 2, 8), (2, 3, 4), (3, 2, 6), (3, 3, 3), (4, 2, 4)])
def test_no_interleaving_with_whole_backward_holds_less_at_this_bubble(p: int, v: int, m: int) -> None:
    assert reachable(p, v, m, v * p, 3 * (p - 1))
    assert not reachable(p, v, m, v * p - 1, 3 * (p - 1))


def test_v_half_tiles_without_new_bubbles_where_times_allow() -> None:
    """With 2 T_F <= T_W + 2 T_B and 2 T_B <= T_W + 2 T_F the bubble stops growing with m; the first times break it."""

    def growth(times: Times) -> float:
        def gaps(m: int) -> float:
            return simulate(make("v-half", 4, m), Costs.uniform(8, times)).span / NS_PER_MS - 2 * m * sum(times)

        return gaps(40) - gaps(20)

    assert growth((1, 3, 1)) > 0
    assert [growth(times) for times in ((2, 2, 1), (4, 5, 2), (5, 4, 2), (4, 4, 3))] == [0] * 4
