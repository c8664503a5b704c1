"""Whether a schedule can run, and every reason why not: root causes first, each a sentence with rank, pass and remedy."""

from __future__ import annotations

from itertools import combinations

from zerobubble.errors import Fault
from zerobubble.graph import Graph, cycles, resolve, walk
from zerobubble.ir import Kind, Op, Schedule
from zerobubble.rules import RULES, Stuff


def schedule_faults(schedule: Schedule) -> tuple[Fault, ...]:
    """Every fault of `schedule`; empty exactly when it is legal.

    Checked: each pass in range, on the rank that holds its stage and present once; each stage and microbatch with F and either
    BW or both B and W (or only F throughout, for inference); no pass before what it uses on its own rank; no circle of waiting
    between ranks.
    """
    placed = _placement_faults(schedule)
    if any(fault.code in ("stage-range", "microbatch-range") for fault in placed):
        return tuple(placed)
    graph = resolve(schedule)
    late = _order_faults(graph)
    faults = placed + _missing_faults(schedule) + [fault for _, fault in late]
    skip = frozenset(pair for pair, _ in late)
    order, heads = walk(graph, skip)
    if len(order) < len(graph.ops):
        faults += [_circle(graph, ring) for ring in cycles(graph, heads, skip)]
    return tuple(faults)


def _placement_faults(schedule: Schedule) -> list[Fault]:
    faults: list[Fault] = []
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    seen: dict[Op, tuple[int, int]] = {}
    single = schedule.placement.routes[0] if not schedule.microbatch_routes else None
    for rank, position, op in schedule.ops():
        if op.stage >= stages:
            message = f"rank {rank} runs {op} at position {position}, but there are only stages 0 to {stages - 1}"
            faults.append(Fault("stage-range", message, rank, position, str(op)))
            continue
        if op.microbatch >= microbatches:
            message = f"rank {rank} runs {op} at position {position}, but there are only microbatches 0 to {microbatches - 1}"
            faults.append(Fault("microbatch-range", message, rank, position, str(op)))
            continue
        home = single[op.stage] if single else schedule.rank_of(op.stage, op.microbatch)
        if home != rank:
            message = f"rank {rank} runs {op} at position {position}, but stage {op.stage} lives on rank {home}: move it there"
            faults.append(Fault("wrong-rank", message, rank, position, str(op)))
        if op in seen:
            where = f"rank {seen[op][0]} position {seen[op][1]}"
            message = f"rank {rank} runs {op} again at position {position}; it already ran at {where}: remove one"
            faults.append(Fault("duplicate", message, rank, position, str(op)))
        seen.setdefault(op, (rank, position))
    return faults


def _complete_sets() -> set[frozenset[Kind]]:
    """The sets of kinds that together process one microbatch on one stage: each value that stays has one maker and one user."""
    complete = set()
    for size in range(1, len(RULES) + 1):
        for kinds in combinations(RULES, size):
            stays = (Stuff.SAVED, Stuff.WORK)
            made = [[stuff for k in kinds for stuff in RULES[k].makes if stuff is kept] for kept in stays]
            used = [[stuff for k in kinds for stuff, _ in RULES[k].uses if stuff is kept] for kept in stays]
            if Kind.F in kinds and made == used and all(len(m) <= 1 for m in made):
                complete.add(frozenset(kinds))
    return complete


COMPLETE = _complete_sets()


def _missing_faults(schedule: Schedule) -> list[Fault]:
    wanted = {frozenset({Kind.F})} if schedule.is_forward_only else COMPLETE
    present: dict[tuple[int, int], set[Kind]] = {}
    for row in schedule.rows:
        for kind, stage, microbatch in row:
            present.setdefault((stage, microbatch), set()).add(kind)
    faults = []
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            kinds = present.get((stage, microbatch), set())
            if kinds not in wanted:
                rank = schedule.rank_of(stage, microbatch)
                faults.append(_incomplete(rank, stage, microbatch, kinds, wanted))
    return faults


def _incomplete(rank: int, stage: int, microbatch: int, kinds: set[Kind], wanted: set[frozenset[Kind]]) -> Fault:
    who = f"stage {stage}, microbatch {microbatch} on rank {rank}"
    if Kind.BW in kinds and kinds & {Kind.B, Kind.W}:
        parts = " and ".join(str(Op(k, stage, microbatch)) for k in (Kind.BW, Kind.B, Kind.W) if k in kinds)
        return Fault("conflict", f"{who} has {parts}: BW is B and W in one, keep either BW or the pair", rank, None, parts)
    closest = min(wanted, key=lambda full: (len(full - kinds), len(full)))
    lacking = [str(Op(kind, stage, microbatch)) for kind in Kind if kind in closest - kinds]
    reasons = {Kind.F: "nothing was computed", Kind.W: "its weight gradient would be lost"}
    missing = [kind for kind in Kind if kind in closest - kinds]
    reason = reasons.get(missing[0], "no gradient would flow back")
    return Fault("missing", f"{who} lacks {' and '.join(lacking)}: {reason}", rank, None, lacking[0])


def _order_faults(graph: Graph) -> list[tuple[tuple[int, int], Fault]]:
    """Passes that stand before a pass of their own rank whose result they use."""
    faults = []
    for number, needs in enumerate(graph.needs):
        for need in needs:
            if need > number and graph.rank[need] == graph.rank[number]:
                faults.append(((number, need), _late(graph, number, need)))
    return faults


def _late(graph: Graph, number: int, need: int) -> Fault:
    rank, op, maker = graph.rank[number], graph.ops[number], graph.ops[need]
    message = (
        f"rank {rank} runs {op} at position {graph.position(number)} before {maker} at position {graph.position(need)}, "
        f"whose result it uses: move {maker} earlier"
    )
    return Fault("order", message, rank, graph.position(number), str(op))


def _circle(graph: Graph, ring: list[tuple[int, int]]) -> Fault:
    first = min(range(len(ring)), key=lambda i: graph.rank[ring[i][0]])
    ring = ring[first:] + ring[:first]
    parts = [
        f"rank {graph.rank[stuck]} cannot start {graph.ops[stuck]} before rank {graph.rank[need]} has run {graph.ops[need]}"
        for stuck, need in ring
    ]
    number = ring[0][0]
    message = f"deadlock: {', '.join(parts)}; each of these stands behind the one its rank is stuck at"
    return Fault("deadlock", message, graph.rank[number], graph.position(number), str(graph.ops[number]))
