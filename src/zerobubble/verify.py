"""Checks of a schedule: every fault, root causes first, each a sentence with rank, pass and remedy.

The checks build on each other. Passes that are out of range cannot be numbered, so those faults end the examination. Otherwise the graph
is resolved, and uses that come too early in their own row are reported and then removed from the needs. Without removing them, `walk` would
stop at each of them and report it a second time as a deadlock. Whatever still stops `walk` is a cycle of waiting between ranks.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from operator import itemgetter

from zerobubble.arguments import takes
from zerobubble.errors import Fault, ScheduleError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.graph import Graph, Needs, circles, joint_needs, resolve, walk
from zerobubble.ir import Op, Schedule
from zerobubble.kinds import KINDS, Kind, ValueKind, head_kinds, kinds_making, traits_of, when_kinds_change
from zerobubble.rules import complete_sets


@takes(schedule=Schedule)
def schedule_faults(schedule: Schedule) -> tuple[Fault, ...]:
    """Return every fault of `schedule`; empty exactly if it is legal.

    A legal schedule has enough passes for its microbatches. Each pass is in range, on the rank of its stage, and present once. Each stage
    and microbatch has F and either BW or both B and W (or only F throughout, for inference). A divided head has all parts for every
    microbatch, in passes of one algorithm. No pass comes before a pass of its own rank whose result it uses, nor overlaps with it. No
    ranks wait for each other in a cycle.

    >>> import zerobubble as zb
    >>> zb.schedule_faults(zb.make("zb-v", 4, 8))
    ()
    >>> order = "zerobubble schedule 1\\nplacement linear: 0\\nmicrobatches 1\\nrank 0: 0B0 0F0 0W0"
    >>> [fault] = zb.schedule_faults(zb.Schedule.from_text(order))
    >>> print(fault)
    rank 0 runs 0B0 at position 0 before 0F0 at position 1, whose result it uses: move 0F0 earlier
    """
    return _judge(schedule)[0]


def checked(schedule: Schedule) -> tuple[Graph, list[int]]:
    """Return the graph of a legal schedule, and its passes in an order that respects rows and needs; raises `ScheduleError` otherwise."""
    faults, graph, order = _judge(schedule)
    if faults:
        raise ScheduleError(faults, schedule.name)
    return graph, order


Judgment = tuple[tuple[Fault, ...], Graph, list[int]]
_last: tuple[weakref.ref[Schedule], Judgment] | None = None


def _judge(schedule: Schedule) -> Judgment:
    """Examine `schedule`. The last result is cached, because the same schedule is checked, simulated and lowered in turn.

    The cache compares identity, not equality, since comparing large schedules takes as long as examining them. It holds a weak reference,
    so it keeps no schedule alive, and it is cleared when the table of kinds changes.
    """
    global _last
    if _last is None or _last[0]() is not schedule:
        _last = weakref.ref(schedule, _forget), _examine(schedule)
    return _last[1]


def _forget(_: object = None) -> None:
    global _last
    _last = None


when_kinds_change(_forget)


@garbage_collection_paused()
def _examine(schedule: Schedule) -> Judgment:
    faults: list[Fault] = []
    if not _is_plain(schedule):
        faults = _count_faults(schedule) or _placement_faults(schedule)
        if any(fault.code in ("count", "stage-range", "microbatch-range") for fault in faults):
            return tuple(faults), Graph([], [], [], []), []
        faults += _missing_faults(schedule)
    if schedule.has_divided_head:
        faults += _head_faults(schedule)
    graph = resolve(schedule)
    late = _late_needs(graph)
    faults += [_late(graph, number, need) for number, need in late]
    faults += [fault for number in sorted(graph.pairs) for fault in _overlap_faults(graph, number)]
    needs = joint_needs(graph, _without(graph.needs, late))
    heads = graph.first[:-1]
    order = walk(graph, needs, heads)
    faults += [_circle(graph, ring) for ring in circles(graph, needs, heads)]
    return tuple(faults), graph, order


def _is_plain(schedule: Schedule) -> bool:
    """Whether each stage of a single route runs a complete set of kinds on its rank, each once for every microbatch.

    If so, no pass is missing or misplaced. This test takes a fraction of the time of examining every pass.
    """
    home, last = schedule.placement.routes[0], schedule.num_microbatches - 1
    kinds: dict[int, set[Kind]] = defaultdict(set)
    for rank, row in enumerate(schedule.rows):
        counts = Counter(map(itemgetter(0, 1), row))
        if {*counts.values()} != {last + 1} or len(set(row)) < len(row):
            return False
        if max(map(itemgetter(2), row)) > last:
            return False
        for kind, stage in counts:
            if stage >= len(home) or home[stage] != rank:
                return False
            kinds[stage].add(kind)
    wanted = _wanted(schedule)
    return len(schedule.placement.routes) == 1 and all(frozenset(kinds[stage]) in wanted for stage in range(len(home)))


def _wanted(schedule: Schedule) -> frozenset[frozenset[Kind]]:
    """Return the sets of kinds that may process one microbatch on one stage of `schedule`."""
    if schedule.is_forward_only:
        return frozenset(frozenset({kind}) for kind in kinds_making(ValueKind.ACTIVATION))
    return complete_sets()


def _count_faults(schedule: Schedule) -> list[Fault]:
    """Report a number of microbatches above the number of passes, or passes that are far too few for a fault per missing pass."""
    microbatches, passes = schedule.num_microbatches, sum(map(len, schedule.rows))
    if microbatches > passes:
        message = f"the number of microbatches is {microbatches}, but the rows have only {passes} passes: correct it or add the passes"
        return [Fault("count", message)]
    if lacks_most_passes(schedule):
        message = (
            f"{schedule.num_stages} stages and {microbatches} microbatches have only {passes} passes: add a pass of each stage for each"
        )
        return [Fault("count", message)]
    return []


MOST_MISSING = 10_000
"""The most stages of microbatches without a pass, if they are the most of all, for which tables of all are made."""


def lacks_most_passes(schedule: Schedule) -> bool:
    """Whether a few passes in files name so many stages and microbatches that tables of them would be far larger than the file."""
    pairs, passes = schedule.num_stages * schedule.num_microbatches, sum(map(len, schedule.rows))
    return pairs > 2 * passes and pairs - passes > MOST_MISSING


def _placement_faults(schedule: Schedule) -> list[Fault]:
    """Report passes out of range, on a rank without their stage, or present twice."""
    faults: list[Fault] = []
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    seen: dict[Op, tuple[int, int]] = {}
    for rank, position, op in schedule.ops():
        _, stage, microbatch = op
        if stage >= stages or microbatch >= microbatches:
            faults.append(_out_of_range(schedule, rank, position, op))
            continue
        home = schedule.rank_of(stage, microbatch)
        if home != rank:
            faults.append(_fault("wrong-rank", rank, position, op, f", but stage {stage} is on rank {home}: move it there"))
        if op in seen:
            there = "rank {} position {}".format(*seen[op])
            faults.append(_fault("duplicate", rank, position, op, f", but it already ran at {there}: remove one"))
        else:
            seen[op] = rank, position
    return faults


def _fault(code: str, rank: int, position: int, op: Op, rest: str) -> Fault:
    return Fault(code, f"rank {rank} runs {op} at position {position}{rest}", rank, position, str(op))


def _out_of_range(schedule: Schedule, rank: int, position: int, op: Op) -> Fault:
    if op.stage >= schedule.num_stages:
        rest = f", but the placement has only stages 0 to {schedule.num_stages - 1}: place stage {op.stage} or remove the pass"
        return _fault("stage-range", rank, position, op, rest)
    rest = f", but there are only microbatches 0 to {schedule.num_microbatches - 1}: declare more or remove the pass"
    return _fault("microbatch-range", rank, position, op, rest)


def _missing_faults(schedule: Schedule) -> list[Fault]:
    wanted = _wanted(schedule)
    bit = {kind: 1 << k for k, kind in enumerate(KINDS)}
    present = [[0] * schedule.num_microbatches for _ in range(schedule.num_stages)]
    for row in schedule.rows:
        for kind, stage, microbatch in row:
            present[stage][microbatch] |= bit[kind]
    kinds = {bits: frozenset(kind for kind in KINDS if bits & bit[kind]) for bits in range(1 << len(KINDS))}
    faults = []
    for stage, column in enumerate(present):
        for microbatch, bits in enumerate(column):
            if kinds[bits] not in wanted:
                faults.append(_incomplete(schedule.rank_of(stage, microbatch), stage, microbatch, kinds[bits], wanted))
    return faults


def _incomplete(rank: int, stage: int, microbatch: int, kinds: frozenset[Kind], wanted: frozenset[frozenset[Kind]]) -> Fault:
    who = f"stage {stage}, microbatch {microbatch} on rank {rank}"
    fuller = [full for full in wanted if kinds <= full]
    if not fuller:
        return _conflict(who, rank, stage, microbatch, kinds, wanted)
    nearest = min(fuller, key=lambda full: (len(full), sorted(full)))
    lacking = [kind for kind in KINDS if kind in nearest - kinds]
    ops = [str(Op(kind, stage, microbatch)) for kind in lacking]
    return Fault("missing", f"{who} lacks {' and '.join(ops)}, so {traits_of(lacking[0]).lost}: add it to the row", rank, None, ops[0])


def _conflict(who: str, rank: int, stage: int, microbatch: int, kinds: frozenset[Kind], wanted: frozenset[frozenset[Kind]]) -> Fault:
    """Report passes that no complete set contains together."""
    if kinds <= {Kind.F, Kind.B, Kind.W, Kind.BW}:
        parts = " and ".join(str(Op(kind, stage, microbatch)) for kind in (Kind.BW, Kind.B, Kind.W) if kind in kinds)
        return Fault("conflict", f"{who} has {parts}: BW is B and W in one, so keep either BW or the pair", rank, None, parts)
    parts = " and ".join(str(Op(kind, stage, microbatch)) for kind in KINDS if kind in kinds)
    sets = " or ".join(sorted(" ".join(kind for kind in KINDS if kind in full) for full in wanted))
    return Fault("conflict", f"{who} has {parts}, which cannot be combined: keep those of {sets}", rank, None, parts)


def _head_faults(schedule: Schedule) -> Iterator[Fault]:
    """Report microbatches without all parts of a divided head, and those whose head is divided by another algorithm than most."""
    kinds_of: dict[tuple[int, int], set[Kind]] = defaultdict(set)
    for _, _, (kind, stage, microbatch) in schedule.ops():
        if kind in head_kinds():
            kinds_of[stage, microbatch].add(kind)
    parts = sorted({stage for stage, _ in kinds_of})
    counts = Counter(frozenset(kinds) for kinds in kinds_of.values())
    usual = min(counts, key=lambda kinds: (-counts[kinds], sorted(kinds)))
    wanted = f"{' and '.join(sorted(usual))} of stages {', '.join(map(str, parts))}"
    for microbatch in range(schedule.num_microbatches):
        for stage in parts:
            here = kinds_of.get((stage, microbatch), set())
            if here != usual:
                rank = schedule.rank_of(stage, microbatch)
                has = " and ".join(str(Op(kind, stage, microbatch)) for kind in sorted(here)) or "no pass of the head"
                who = f"stage {stage}, microbatch {microbatch} on rank {rank} has {has}"
                message = f"{who}, but the head is divided into {wanted}: every microbatch needs all of these"
                yield Fault("head", message, rank)


def _late_needs(graph: Graph) -> list[tuple[int, int]]:
    """Return passes that come before a pass of their own rank whose result they use, as (pass, need)."""
    rank = graph.rank
    return [(number, need) for number, needs in enumerate(graph.needs) for need in needs if need >= number and rank[need] == rank[number]]


def _without(needs: Needs, pairs: list[tuple[int, int]]) -> Needs:
    if not pairs:
        return needs
    left = list(needs)
    for number, need in pairs:
        left[number] = tuple(n for n in left[number] if n != need)
    return left


def _late(graph: Graph, number: int, need: int) -> Fault:
    maker = graph.ops[need]
    rest = f" before {maker} at position {graph.position(need)}, whose result it uses: move {maker} earlier"
    return _fault("order", graph.rank[number], graph.position(number), graph.ops[number], rest)


def _overlap_faults(graph: Graph, number: int) -> Iterator[Fault]:
    """Report why pass `number` and the one after it cannot run as one step."""
    first, second = graph.ops[number : number + 2]
    reasons = []
    if number in graph.needs[number + 1]:
        reasons.append(f"which uses its result: run {second} after it")
    if traits_of(second.kind).fills_from_start and not traits_of(first.kind).fills_from_start:
        reasons.append(f"which takes memory first: write {second}&{first}")
    for reason in reasons:
        yield _fault("overlap", graph.rank[number], graph.position(number), first, f" overlapped with {second}, {reason}")


def _circle(graph: Graph, ring: list[tuple[int, int]]) -> Fault:
    first = min(range(len(ring)), key=lambda i: graph.rank[ring[i][0]])
    ring = ring[first:] + ring[:first]
    parts = [
        f"rank {graph.rank[stuck]} cannot start {graph.ops[stuck]} before rank {graph.rank[need]} has run {graph.ops[need]}"
        for stuck, need in ring
    ]
    number = ring[0][0]
    message = f"deadlock: {', '.join(parts)}; each of these comes after the pass at which its rank is stuck: move one forward"
    return Fault("deadlock", message, graph.rank[number], graph.position(number), str(graph.ops[number]))
