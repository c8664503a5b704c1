"""Problems made of work, placements and memory, as a user gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zerobubble.arguments import BYTES, NUMBER, Wanted, either
from zerobubble.costs import UNIT_BYTES, Costs, Limits
from zerobubble.errors import InputError
from zerobubble.ir import Placement
from zerobubble.planning.placements import ANY, Placements, family, placements_to_try
from zerobubble.planning.problem.head import HEAD_BYTES, parts_on
from zerobubble.planning.problem.problem import Objective, Problem, microbatch_bytes
from zerobubble.planning.problem.sharded import Sharded
from zerobubble.planning.problem.workload import RANK_BYTES, Workload, limits_for

MICROBATCHES = NUMBER._replace(words="a number of microbatches")
MEMORY = either(
    MICROBATCHES, Wanted("bytes such as '40GB' or '37.5GiB'", lambda given: isinstance(given, str) and BYTES.accepts(given)), Limits
)
"""The memory limit of a rank: microbatches of all its stages, bytes as text, or the bytes of each rank."""
Memory = float | str | Limits


def placements_for(work: Workload | Costs, given: Placements | None) -> dict[str, Placement]:
    """The placements to try for `work`, by name: those `given`, or all for a workload, or the one that the costs know.

    Raises `InputError` for an unknown name, and for costs of stages without one placement.
    """
    if isinstance(work, Workload):
        return placements_to_try(ANY if given is None else given, work.num_ranks)
    known = work.placement if given is None else given
    if isinstance(known, str) and work.placement is not None and known != ANY:
        known = family(known, work.placement.num_ranks)
    if not isinstance(known, Placement):
        stages = work.num_stages
        even = f"Placement.vee({stages // 2}) or " if stages % 2 == 0 else ""
        remedy = f"give it, such as placements={even}Placement.linear({stages}), or plan a Workload"
        raise InputError("costs of {stages} stages need one placement", stages=stages, remedy=remedy)
    return placements_to_try(known, known.num_ranks)


def problems_of(
    work: Workload | Costs,
    num_microbatches: int,
    memory: Memory | None,
    placements: Mapping[str, Placement],
    objective: str,
    sharded: Sharded | None = None,
    shares: Sequence[float] = (),
) -> dict[str, Problem]:
    """The problem on each placement, by name. Raises `InputError` for arguments that cannot be used."""
    aim, problems = Objective.named(objective), {}
    for name, placement in placements.items():
        costs = work.costs(placement) if isinstance(work, Workload) else work
        costs.require_fit(placement, "the placement")
        costs = replace(costs, shares=tuple(shares) or costs.shares)
        limits = _limits(work, memory, placement) or ample_limits(placement, costs, num_microbatches)
        workload = work if isinstance(work, Workload) else None
        numbers = num_microbatches * (len(costs.slices) or 1)
        problems[name] = Problem(placement, numbers, costs, limits, aim, workload, sharded=sharded)
    return problems


def _limits(work: Workload | Costs, memory: Memory | None, placement: Placement) -> Limits | None:
    """The limits given by `memory`, None without one. Raises `InputError` for bytes if the bytes of a microbatch are unknown."""
    if memory is None or isinstance(memory, Limits):
        return memory
    if not isinstance(memory, str):
        return work.limits(memory) if isinstance(work, Workload) else limits_for(memory, microbatch_bytes(placement, work))
    if set(work.held_after_f) == {RANK_BYTES if isinstance(work, Workload) else UNIT_BYTES}:
        needed = f"the bytes of a microbatch, which {type(work).__name__} made of times lack"
        remedy = "give memory in microbatches, or work with bytes, such as from Pipeline.profile"
        raise InputError("{argument} {got!r} needs {needed}", argument="memory", got=memory, needed=needed, remedy=remedy)
    return Limits((memory,) * placement.num_ranks)


def ample_limits(placement: Placement, costs: Costs, num_microbatches: int) -> Limits:
    """Returns limits that never bind."""
    held = [1] * placement.num_ranks
    costs = costs.scaled(max(costs.shares)) if costs.shares else costs
    for rank, after_f, after_b in zip(placement.routes[0], costs.held_after_f, costs.held_after_b, strict=True):
        held[rank] += num_microbatches * max(after_f, after_b)
    if parts := dict(costs.further).get(HEAD_BYTES):
        held = [size + num_microbatches * parts[stage] for size, stage in zip(held, parts_on(placement), strict=True)]
    return Limits(tuple(held))


def has_ample_memory(problem: Problem) -> bool:
    """Whether the limits never bind, as if no limit was given."""
    return problem.limits == ample_limits(problem.placement, problem.costs, problem.whole_microbatches)
