"""What a rank moves to host memory while it waits for its backward pass, and when: values, and whether they can be played.

Offloads stand beside a schedule, as gathers do: they are no passes, because they run on a lane of copies while the rank computes. What
they name are steps of the rank's row, so what a rank holds with them depends on the order alone, not on times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from zerobubble.arguments import WHOLE, as_tuple, each, optional, require, takes
from zerobubble.costs import OFFLOADABLE, Costs, Limits
from zerobubble.display import Displayed
from zerobubble.errors import Fault, InputError
from zerobubble.ir import Schedule, Step
from zerobubble.kinds import Stuff, kinds_making, kinds_using, traits_of
from zerobubble.rules import recomputed
from zerobubble.simulation import held_bytes
from zerobubble.units import counted, show_bytes


class Offload(NamedTuple):
    """What the forward of `stage` and `microbatch` saved goes to the host and comes back: steps count from 0 in the rank's row.

    It is saved in step `made`, behind which the copy to the host may begin. Step `gone` waits for the end of that copy, and from there on
    the memory of the device is free. Before step `back` it is taken again, and the copy from the host may begin; step `needed`, the
    backward pass, waits for its end.
    """

    stage: int
    microbatch: int
    made: int
    gone: int
    back: int
    needed: int


@dataclass(frozen=True, slots=True, repr=False)
class RankOffloads(Displayed):
    """What one rank moves to the host, in the order in which it is made.

    - `offloads`: each of them.
    - `bytes`: what they move to the host in a step of training; the same comes back.
    - `bound`: fewer bytes than these cannot go in this order of passes within the limit.
    - `peak_bytes`: the most that the device holds with them; `host_bytes`: the most that the host holds.

    Raises `InputError` for offloads that are none, and for steps, stages, microbatches and bytes that are no whole numbers.
    """

    offloads: tuple[Offload, ...]
    bytes: int
    bound: int
    peak_bytes: int
    host_bytes: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "offloads", as_tuple("offloads of a rank", self.offloads, "a list or tuple of Offload"))
        for one in self.offloads:
            require("each of the offloads of a rank", one, Offload)
            for name, value in zip(one._fields, one, strict=True):
                require(f"{name} of an offload", value, WHOLE)
        for name in ("bytes", "bound", "peak_bytes", "host_bytes"):
            require(f"{name} of the offloads of a rank", getattr(self, name), WHOLE)

    def _summary(self) -> str:
        moved = f"{counted(len(self.offloads), 'offload')}, {show_bytes(self.bytes)} of at least {show_bytes(self.bound)}"
        return f"{moved}, up to {show_bytes(self.peak_bytes)} on the device and {show_bytes(self.host_bytes)} on the host"

    def _details(self) -> Iterator[str]:
        for stage, microbatch, made, gone, back, needed in self.offloads:
            yield f"stage {stage}, microbatch {microbatch}: made in step {made}, gone from {gone}, back from {back}, needed in {needed}"


class Saved(NamedTuple):
    """What a forward left for its backward pass: made in step `made`, used in step `needed`; `bytes` of it can go to the host."""

    made: int
    needed: int
    bytes: int


SavedParts = Mapping[tuple[int, int], Saved]
"""By stage and microbatch."""


def saved_parts(steps: Sequence[Step], costs: Costs) -> dict[tuple[int, int], Saved]:
    """What can wait on the host in a row of these `steps`: what forwards save that are not computed again."""
    made, found = {}, {}
    recomputed_by = recomputed(op for step in steps for op in step)
    for number, step in enumerate(steps):
        for kind, stage, microbatch in step:
            where = stage, microbatch
            if kind in kinds_making(Stuff.SAVED) and traits_of(kind).forward is None and where not in recomputed_by:
                made[where] = number
            if kind in kinds_using(Stuff.SAVED) and where in made:
                found[where] = Saved(made[where], number, offloadable_bytes(costs, stage, microbatch))
    return found


def offloadable_bytes(costs: Costs, stage: int, microbatch: int) -> int:
    """The bytes of what a forward saves that can go to the host: all of them, or what the column `offloadable` says."""
    held = costs.held(Stuff.SAVED, stage, microbatch)
    if OFFLOADABLE not in dict(costs.further):
        return held
    size = costs.column(OFFLOADABLE)[stage]
    return min(held, round(size * costs.shares[microbatch]) if costs.shares else size)


def held_in_steps(steps: Sequence[Step], costs: Costs) -> list[int]:
    """The most that a rank holds in each of its steps, with all that waits on the device."""
    after = iter(held_bytes([op for step in steps for op in step], costs))
    before, most = 0, []
    for step in steps:
        held = [before, *(next(after) for _ in step)]
        most.append(max(held))
        before = held[-1]
    return most


def rank_offloads(offloads: Sequence[Offload], steps: Sequence[Step], costs: Costs, bound: int = 0) -> RankOffloads:
    """These offloads of the rank that plays `steps`, with what they move and what is held with them."""
    parts = saved_parts(steps, costs)
    device, host = held_in_steps(steps, costs), [0] * len(steps)
    moved = 0
    for stage, microbatch, made, gone, back, needed in offloads:
        size = parts[stage, microbatch].bytes
        moved += size
        for step in range(gone, back):
            device[step] -= size
        for step in range(made + 1, needed):
            host[step] += size
    ordered = tuple(sorted(offloads, key=lambda one: (one.made, one.stage, one.microbatch)))
    return RankOffloads(ordered, moved, bound, max(device, default=0), max(host, default=0))


@takes(schedule=Schedule, costs=Costs, plans=each(RankOffloads), limits=optional(Limits))
def offload_faults(schedule: Schedule, costs: Costs, plans: Sequence[RankOffloads], limits: Limits | None = None) -> tuple[Fault, ...]:
    """Every reason why `schedule` cannot be played with what `plans`, one for each rank, move to the host; none where it can.

    With `limits`, what a rank holds beyond its limit is one, too. Raises `InputError` for plans or limits of another number of ranks.

    >>> import zerobubble as zb
    >>> schedule, costs = zb.make("1f1b", 2, 4), zb.Costs.uniform(2)
    >>> early = zb.offload.Offload(stage=0, microbatch=1, made=1, gone=2, back=4, needed=5)
    >>> plans = [zb.offload.RankOffloads((early,), 10**6, 0, 2 * 10**6, 10**6), zb.offload.RankOffloads((), 0, 0, 10**6, 0)]
    >>> for fault in zb.offload.offload_faults(schedule, costs, plans):
    ...     print(fault)
    rank 0 offloads what 0F1 saves as if it were used in step 5, but 0BW1 is step 4: write needed=4
    """
    costs.require_schedule(schedule)
    for what, count in (("offloads", len(plans)), *([("limits", len(limits.memory))] if limits is not None else [])):
        if count != schedule.num_ranks:
            raise InputError(f"schedule {schedule.name!r} has {schedule.num_ranks} ranks, {what} are given for {count}")
    faults = []
    for rank, (steps, plan) in enumerate(zip(schedule.steps, plans, strict=True)):
        wrong = list(_faults_of(steps, plan.offloads, costs, rank))
        faults += wrong
        if limits is not None and not wrong:
            peak, limit = rank_offloads(plan.offloads, steps, costs).peak_bytes, limits.memory[rank]
            if peak > limit:
                message = f"rank {rank} holds up to {peak} bytes with its offloads, {peak - limit} more than its limit of {limit}"
                faults.append(Fault("memory", f"{message}: offload more, or earlier", rank))
    return tuple(faults)


def require_offloads(schedule: Schedule, costs: Costs, plans: Sequence[RankOffloads]) -> None:
    """Raise `InputError` with all that keeps `schedule` from being played with these offloads."""
    faults = offload_faults(schedule, costs, plans)
    if faults:
        raise InputError(f"schedule {schedule.name!r} cannot be played with these offloads: {'; '.join(map(str, faults))}")


def _faults_of(steps: Sequence[Step], offloads: Sequence[Offload], costs: Costs, rank: int) -> Iterator[Fault]:
    parts = saved_parts(steps, costs)
    recomputed_by = recomputed(op for step in steps for op in step)
    names = {(op.stage, op.microbatch, number): str(op) for number, step in enumerate(steps) for op in step}
    for (stage, microbatch), several in groupby(sorted(offloads), key=lambda one: one[:2]):
        one, *further = several
        what = f"stage {stage} and microbatch {microbatch}"
        if further:
            yield _fault(rank, one, f"rank {rank} offloads {what} {1 + len(further)} times: name it once")
        elif (stage, microbatch) in recomputed_by:
            message = f"rank {rank} offloads {what}, whose forward keeps its input alone because it is computed again"
            yield _fault(rank, one, f"{message}: do one of both")
        elif (stage, microbatch) not in parts:
            yield _fault(rank, one, f"rank {rank} offloads {what}, of which nothing waits there for a backward pass: leave it out")
        else:
            yield from _wrong_steps(one, parts[stage, microbatch], names, rank)


def _wrong_steps(one: Offload, saved: Saved, names: Mapping[tuple[int, int, int], str], rank: int) -> Iterator[Fault]:
    stage, microbatch, made, gone, back, needed = one
    maker, user = names[stage, microbatch, saved.made], names[stage, microbatch, saved.needed]
    what = f"rank {rank} offloads what {maker} saves"
    if made != saved.made:
        yield _fault(rank, one, f"{what} as if it were made in step {made}, but {maker} is step {saved.made}: write made={saved.made}")
    if needed != saved.needed:
        yield _fault(
            rank, one, f"{what} as if it were used in step {needed}, but {user} is step {saved.needed}: write needed={saved.needed}"
        )
    if not saved.made < gone < back <= saved.needed:
        order = f"it must be gone after step {saved.made}, back after that, and at the latest in step {saved.needed}"
        yield _fault(rank, one, f"{what} to be gone from step {gone} and back from step {back}: {order}")


def _fault(rank: int, one: Offload, message: str) -> Fault:
    return Fault("offload", message, rank, one.made)
