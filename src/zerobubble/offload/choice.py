"""Choice of offloads that keep a schedule within its memory limits with little delay.

How many bytes must be offloaded is a covering problem; see `covering`. When each part is copied determines the delay. With spare memory,
copies hide behind passes, so plans that offload more than necessary are tried too, and parts with a long wait are preferred, as in
PipeOffload (Wan et al., ICML 2025, arXiv 2503.01328). The best plan found is then improved by local search:
change a window, or add, remove or replace a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from zerobubble.arguments import WHOLE, takes, wrong
from zerobubble.costs import Costs, Limits
from zerobubble.errors import raise_faults
from zerobubble.ir import Schedule, Step
from zerobubble.offload.copies import OffloadPlayer
from zerobubble.offload.covering import (
    HEADSTARTS,
    Choice,
    RankRow,
    Window,
    add_window,
    candidates,
    fewest_bytes,
    offloads_of,
    with_headstart,
)
from zerobubble.offload.offloads import (
    HostLink,
    Offload,
    RankOffloads,
    SavedParts,
    held_in_steps,
    offload_faults,
    rank_offloads,
    saved_parts,
)
from zerobubble.timeline import Span
from zerobubble.verify import checked

EVALUATIONS = 400
"""Default number of changes that are evaluated."""
ROUNDS = 2
"""Default number of rounds in which each rank revises its choice while the choices of the others stay."""


@takes(schedule=Schedule, costs=Costs, limits=Limits, link=HostLink, evaluations=WHOLE, rounds=WHOLE, by_span=bool)
def plan_offloads(
    schedule: Schedule,
    costs: Costs,
    limits: Limits,
    link: HostLink,
    evaluations: int = EVALUATIONS,
    rounds: int = ROUNDS,
    *,
    by_span: bool = False,
) -> tuple[RankOffloads, ...]:
    """Return, for each rank, offloads that keep `schedule` within `limits`, with the least delay found.

    Ranks within their limits offload nothing. `RankOffloads.bound` is a proven lower bound of the bytes to offload. The delay is not proven
    optimal; the time of the schedule without limits is a lower bound.

    Arguments:
        schedule: the order to run.
        costs: times and bytes. The column `offloadable` limits how many of the bytes that F saves can be offloaded; by default all can.
        limits: device memory of each rank.
        link: speed of copies between a rank and its host.
        evaluations: number of changes to the first plan that are evaluated; fewer if no delay is left.
        rounds: number of rounds in which each rank revises its choice given the others'. With 0 rounds and 0 evaluations, the plan that
            moves the fewest bytes is returned as it is.
        by_span: measure the delay by the longest span of a rank instead of the makespan.

    Raises `InputError` if a rank exceeds its limit even with everything offloaded, and for negative `evaluations` or `rounds`.

    >>> import zerobubble as zb
    >>> schedule, costs = zb.make("1f1b", 4, 8), zb.Costs.uniform(4)
    >>> link = zb.offload.HostLink(to_host=2e9, from_host=2e9)  # 1 MB, what a stage keeps for a microbatch, takes 0.5 ms
    >>> print(zb.offload.plan_offloads(schedule, costs, zb.Limits((3_000_000,) * 4), link)[0])
    RankOffloads 3 offloads, 3 MB of at least 2 MB, up to 3 MB on the device and 2 MB on the host
    stage 0, microbatch 1: made in step 1, freed from 3, back from 5, needed in 6
    stage 0, microbatch 3: made in step 3, freed from 4, back from 9, needed in 10
    stage 0, microbatch 5: made in step 7, freed from 9, back from 13, needed in 13
    """
    costs.require_schedule(schedule)
    for name, value in (("evaluations", evaluations), ("rounds", rounds)):
        if value < 0:
            raise wrong(f"{name} of plan_offloads", value, "at least 0")
    limits.require_ranks(schedule.num_ranks, f"schedule {schedule.name!r}")
    graph, order = checked(schedule)
    player = OffloadPlayer(graph, order, schedule, costs, link, by_span=by_span)
    ranks = _ranks(schedule, costs, limits, player)
    bounds = [fewest_bytes(rank, where) for where, rank in enumerate(ranks)]
    chosen = _quickest(player, ranks, link, evaluations, rounds)
    return tuple(rank_offloads(row, rank.steps, costs, bound) for row, rank, bound in zip(chosen, ranks, bounds, strict=True))


def with_other_costs(schedule: Schedule, costs: Costs, limits: Limits, plans: Sequence[RankOffloads]) -> tuple[RankOffloads, ...]:
    """Return the same offloads with bytes, peaks and bound recomputed for these `costs` and `limits`.

    Raises `InputError` if the offloads are not valid or a rank exceeds its limit with them.
    """
    raise_faults(offload_faults(schedule, costs, plans, limits))
    updated = []
    for where, (steps, limit, plan) in enumerate(zip(schedule.steps, limits.memory, plans, strict=True)):
        rank = _row(steps, saved_parts(steps, costs), limit, costs)
        updated.append(rank_offloads(plan.offloads, steps, costs, fewest_bytes(rank, where)))
    return tuple(updated)


def _ranks(schedule: Schedule, costs: Costs, limits: Limits, player: OffloadPlayer) -> list[RankRow]:
    timeline = player.timeline([()] * schedule.num_ranks)
    rows = zip(schedule.steps, player.parts, limits.memory, timeline.rows, strict=True)
    return [_row(steps, parts, limit, costs, spans) for steps, parts, limit, spans in rows]


def _row(steps: Sequence[Step], parts: SavedParts, limit: int, costs: Costs, spans: Sequence[Span] = ()) -> RankRow:
    """Return the row of a rank; without `spans`, it lacks the times at which steps begin and end."""
    times = {span.op: (span.start, span.end) for span in spans}
    begins, ends = ([times[step[0]][which] for step in steps] if times else [] for which in (0, 1))
    usable = {where: part for where, part in parts.items() if part.bytes and part.needed - part.made > 1}
    return RankRow(steps, usable, held_in_steps(steps, costs), limit, begins, ends)


def _quickest(player: OffloadPlayer, ranks: Sequence[RankRow], link: HostLink, evaluations: int, rounds: int) -> list[list[Offload]]:
    """Choose one candidate for each rank, rank after rank, then improve the result part by part, to minimize the price."""

    def price_of(chosen: Sequence[Sequence[Offload]]) -> Price:
        moved = sum(rank.parts[offload[:2]].bytes for rank, row in zip(ranks, chosen, strict=True) for offload in row)
        return (*player.price(chosen), moved)

    chosen = [next(candidates(rank, link)) for rank in ranks]
    fastest, best = player.price([()] * len(ranks))[0], price_of(chosen)
    moving = [where for where, row in enumerate(chosen) if row] if best[0] > fastest else []
    options = {where: list(candidates(ranks[where], link)) for where in moving} if rounds else {}
    for _ in range(rounds):
        before = best
        for where in moving:
            for candidate in options[where] if best[0] > fastest else ():
                tried = [*chosen[:where], candidate, *chosen[where + 1 :]]
                price = price_of(tried)
                if price < best:
                    best, chosen = price, tried
        if best == before:
            break
    return improved(ranks, chosen, link, price_of, fastest, evaluations)


Price = tuple[int, int, int]
"""The price of a choice, compared lexicographically: the makespan, the sum of the end times of ranks, the bytes offloaded."""
PriceOf = Callable[[Sequence[Sequence[Offload]]], Price]


def improved(
    ranks: Sequence[RankRow], chosen: Sequence[Sequence[Offload]], link: HostLink, price_of: PriceOf, fastest: int, evaluations: int
) -> list[list[Offload]]:
    """Improve `chosen` by a first-improvement search of up to `evaluations` evaluations, which ends at a makespan of `fastest`."""
    choices: list[Choice] = [{offload[:2]: (offload.freed, offload.back) for offload in row} for row in chosen]
    rows = [offloads_of(rank, choice) for rank, choice in zip(ranks, choices, strict=True)]
    best = price_of(rows)
    has_changed = True
    while has_changed:
        has_changed = False
        for where, rank in enumerate(ranks):
            for changed in _changes(rank, choices[where], link):
                if evaluations <= 0 or best[0] == fastest:
                    return rows
                evaluations -= 1
                tried = [*rows[:where], offloads_of(rank, changed), *rows[where + 1 :]]
                price = price_of(tried)
                if price < best:
                    best, rows, has_changed = price, tried, True
                    choices[where] = changed
                    break
    return rows


def _changes(rank: RankRow, choice: Choice, link: HostLink) -> Iterator[Choice]:
    """Yield the choices within the limit that differ in one window, then those with one part more, one less, or one replaced."""
    headroom = rank.headroom(choice)
    for key in choice:
        others = {name: window for name, window in choice.items() if name != key}
        without = list(headroom)
        add_window(without, choice[key], -rank.parts[key].bytes)
        for window in _neighboring_windows(rank, key, choice[key]):
            if _fits(without, window, rank.parts[key].bytes):
                yield others | {key: window}
    there, further = set(choice), sorted(rank.parts.keys() - choice.keys())
    sets = [there | {key} for key in further] + [there - {key} for key in choice] + [there - {k} | {key} for k in choice for key in further]
    for parts in sets:
        longest = {key: rank.longest(key) for key in sorted(parts)}
        if min(rank.headroom(longest), default=0) >= 0:
            for headstart in HEADSTARTS:
                yield with_headstart(rank, longest, headstart, link)


def _neighboring_windows(rank: RankRow, key: tuple[int, int], window: Window) -> Iterator[Window]:
    """Yield the windows that begin or end a step earlier or later."""
    first, stop = window
    least, most = rank.longest(key)
    for then in ((first + 1, stop), (first, stop - 1), (first - 1, stop), (first, stop + 1), (first + 1, stop + 1), (first - 1, stop - 1)):
        if least <= then[0] < then[1] <= most:
            yield then


def _fits(headroom: Sequence[int], window: Window, size: int) -> bool:
    """Whether the limit holds in every step if `size` more bytes are away in the window."""
    first, stop = window
    return all(left + (size if first <= step < stop else 0) >= 0 for step, left in enumerate(headroom))
