"""Offloads: which saved values a rank moves to host memory, in which steps they are away, the link that copies them, and their JSON form.

Like gathers, offloads are separate from the schedule. They are not passes, because copies run on a lane while the rank computes. They refer
to steps of the rank's row, not to times, so the bytes that a rank holds depend on the order alone. A limit that holds in the plan therefore
holds in any run, however slow the copies are: a late copy delays passes, but never adds memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from zerobubble.arguments import NUMBER, WHOLE, as_tuple, each, optional, require, takes, wrong
from zerobubble.costs import OFFLOADABLE, Costs, Limits
from zerobubble.display import Displayed
from zerobubble.errors import Fault, InputError, ParseError, reading, whole
from zerobubble.ir import Schedule, Step
from zerobubble.kinds import ValueKind, kinds_making, kinds_using, traits_of
from zerobubble.rules import recomputed
from zerobubble.simulation import held_bytes
from zerobubble.timeline import Copying
from zerobubble.units import NS_PER_S, counted, show_bytes


@takes()
@dataclass(frozen=True, slots=True)
class HostLink:
    """Speed of the link between a rank and its host.

    Attributes:
        to_host: Bytes per second to the host.
        from_host: Bytes per second from the host.
        latency: The latency of each copy in ns.

    If ranks share a link, give the rate of each while all of them copy. The copies of a rank run one after another, in either direction.
    Raises `InputError` for rates and latencies outside their range.

    >>> import zerobubble as zb
    >>> zb.offload.HostLink(to_host=15e9, from_host=15e9).time(30_000_000)
    2000000
    """

    to_host: float
    from_host: float
    latency: int = 0

    def __post_init__(self) -> None:
        for what, rate in (("to the host", self.to_host), ("from the host", self.from_host)):
            require(f"the bytes per second {what}", rate, NUMBER)
            if not 0 < rate <= 1e15:
                raise wrong(f"the bytes per second {what}", rate, "above 0 and at most 1e+15")
        require("the latency of a copy, in ns,", self.latency, WHOLE)
        if not 0 <= self.latency <= NS_PER_S:
            raise wrong("the latency of a copy", self.latency, f"0 to {NS_PER_S} ns")

    def time(self, size: int, copying: Copying = Copying.TO_HOST) -> int:
        """Return the time to copy `size` bytes in the direction `copying`, by default to the host, in ns."""
        return self.latency + round(size * NS_PER_S / (self.to_host if copying is Copying.TO_HOST else self.from_host))


class Offload(NamedTuple):
    """An offload of the values saved by a forward. Steps count from 0 in the rank's row.

    Attributes:
        stage: The stage of the forward.
        microbatch: Its microbatch.
        made: The step of the forward, after which the copy to the host may begin.
        freed: The step that waits for the end of that copy; from then on, the device memory is free.
        back: The step before which the device memory is allocated again, and the copy from the host may begin.
        needed: The step of the backward, which waits for the end of that copy.
    """

    stage: int
    microbatch: int
    made: int
    freed: int
    back: int
    needed: int


@takes()
@dataclass(frozen=True, slots=True, repr=False)
class RankOffloads(Displayed):
    """The offloads of one rank, in the order of their forwards.

    Attributes:
        offloads: Each offload.
        bytes: The bytes copied to the host in a training step; the same number is copied back.
        bound: A lower bound of these bytes for this order of passes and the limit.
        peak_bytes: The peak memory on the device.
        host_bytes: The peak memory on the host.

    Raises `InputError` for entries that are not of type `Offload`, and for values that are not whole numbers.
    """

    offloads: tuple[Offload, ...]
    bytes: int
    bound: int
    peak_bytes: int
    host_bytes: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "offloads", as_tuple("offloads of a rank", self.offloads, "a list or tuple of Offload"))
        for offload in self.offloads:
            require("each of the offloads of a rank", offload, Offload)
            for name, value in zip(offload._fields, offload, strict=True):
                require(f"{name} of an offload", value, WHOLE)
        for name in ("bytes", "bound", "peak_bytes", "host_bytes"):
            require(f"{name} of the offloads of a rank", getattr(self, name), WHOLE)

    def _summary(self) -> str:
        moved = f"{counted(len(self.offloads), 'offload')}, {show_bytes(self.bytes)} of at least {show_bytes(self.bound)}"
        return f"{moved}, up to {show_bytes(self.peak_bytes)} on the device and {show_bytes(self.host_bytes)} on the host"

    def _details(self) -> Iterator[str]:
        for stage, microbatch, start, freed, back, needed in self.offloads:
            yield f"stage {stage}, microbatch {microbatch}: made in step {start}, freed from {freed}, back from {back}, needed in {needed}"


class SavedPart(NamedTuple):
    """Values that a forward saves in step `made` for its backward in step `needed`; `bytes` of them can be offloaded."""

    made: int
    needed: int
    bytes: int


SavedParts = Mapping[tuple[int, int], SavedPart]
"""Saved values by stage and microbatch."""


def saved_parts(steps: Sequence[Step], costs: Costs) -> dict[tuple[int, int], SavedPart]:
    """Return the values in a row of `steps` that can be offloaded: those saved by forwards that are not recomputed."""
    makers, parts = {}, {}
    recomputed_by = recomputed(op for step in steps for op in step)
    for number, step in enumerate(steps):
        for kind, stage, microbatch in step:
            where = stage, microbatch
            if kind in kinds_making(ValueKind.SAVED) and traits_of(kind).forward is None and where not in recomputed_by:
                makers[where] = number
            if kind in kinds_using(ValueKind.SAVED) and where in makers:
                parts[where] = SavedPart(makers[where], number, offloadable_bytes(costs, stage, microbatch))
    return parts


def offloadable_bytes(costs: Costs, stage: int, microbatch: int) -> int:
    """Return how many of the bytes that a forward saves can be offloaded: all, or the number in the column `offloadable`."""
    held = costs.held(ValueKind.SAVED, stage, microbatch)
    if OFFLOADABLE not in dict(costs.further):
        return held
    size = costs.column(OFFLOADABLE)[stage]
    return min(held, round(size * costs.shares[microbatch]) if costs.shares else size)


def held_in_steps(steps: Sequence[Step], costs: Costs) -> list[int]:
    """Return the peak bytes of a rank in each of its steps, without offloads."""
    after = iter(held_bytes([op for step in steps for op in step], costs))
    before, most = 0, []
    for step in steps:
        held = [before, *(next(after) for _ in step)]
        most.append(max(held))
        before = held[-1]
    return most


def rank_offloads(offloads: Sequence[Offload], steps: Sequence[Step], costs: Costs, bound: int = 0) -> RankOffloads:
    """Return the `RankOffloads` of a rank that runs `steps`, with its bytes and peaks."""
    parts = saved_parts(steps, costs)
    device, host = held_in_steps(steps, costs), [0] * len(steps)
    moved = 0
    for stage, microbatch, made_in, freed, back, needed in offloads:
        size = parts[stage, microbatch].bytes
        moved += size
        for step in range(freed, back):
            device[step] -= size
        for step in range(made_in + 1, needed):
            host[step] += size
    ordered = tuple(sorted(offloads, key=lambda offload: (offload.made, offload.stage, offload.microbatch)))
    return RankOffloads(ordered, moved, bound, max(device, default=0), max(host, default=0))


@takes(schedule=Schedule, costs=Costs, plans=each(RankOffloads), limits=optional(Limits))
def offload_faults(schedule: Schedule, costs: Costs, plans: Sequence[RankOffloads], limits: Limits | None = None) -> tuple[Fault, ...]:
    """Return every reason why `schedule` cannot run with the offloads `plans`, one for each rank; empty if it can.

    `costs` give the bytes that stages hold. With `limits`, exceeding a limit is a fault too. Raises `InputError` for plans or limits of
    another number of ranks.

    >>> import zerobubble as zb
    >>> schedule, costs = zb.make("1f1b", 2, 4), zb.Costs.uniform(2)
    >>> early = zb.offload.Offload(stage=0, microbatch=1, made=1, freed=2, back=4, needed=5)
    >>> plans = [zb.offload.RankOffloads((early,), 10**6, 0, 2 * 10**6, 10**6), zb.offload.RankOffloads((), 0, 0, 10**6, 0)]
    >>> for fault in zb.offload.offload_faults(schedule, costs, plans):
    ...     print(fault)
    rank 0 offloads the values of 0F1 with needed=5, but 0BW1 is step 4: write needed=4
    """
    costs.require_schedule(schedule)
    for what, count in (("offloads", len(plans)), *([("limits", len(limits.memory))] if limits is not None else [])):
        if count != schedule.num_ranks:
            sentence = "schedule {schedule!r} has {schedule_ranks} ranks, but {what} are given for {count}"
            raise InputError(sentence, schedule=schedule.name, schedule_ranks=schedule.num_ranks, what=what, count=count)
    faults = []
    for rank, (steps, plan) in enumerate(zip(schedule.steps, plans, strict=True)):
        of_rank = list(_faults_of(steps, plan.offloads, costs, rank))
        faults += of_rank
        if limits is not None and not of_rank:
            peak, limit = rank_offloads(plan.offloads, steps, costs).peak_bytes, limits.memory[rank]
            if peak > limit:
                message = f"rank {rank} holds up to {peak} bytes with its offloads, {peak - limit} more than its limit of {limit}"
                faults.append(Fault("memory", f"{message}: offload more, or earlier", rank))
    return tuple(faults)


@takes()
def require_offloads(schedule: Schedule, costs: Costs, plans: Sequence[RankOffloads]) -> None:
    """Raise `InputError` with every reason why `schedule` cannot run under `costs` with `plans`, the offloads of each rank."""
    faults = offload_faults(schedule, costs, plans)
    if faults:
        raise InputError(
            "schedule {schedule!r} cannot run with these offloads: {faults}", schedule=schedule.name, faults="; ".join(map(str, faults))
        )


def _faults_of(steps: Sequence[Step], offloads: Sequence[Offload], costs: Costs, rank: int) -> Iterator[Fault]:
    parts = saved_parts(steps, costs)
    recomputed_by = recomputed(op for step in steps for op in step)
    names = {(op.stage, op.microbatch, number): str(op) for number, step in enumerate(steps) for op in step}
    for (stage, microbatch), several in groupby(sorted(offloads), key=lambda offload: offload[:2]):
        first, *further = several
        what = f"stage {stage} and microbatch {microbatch}"
        if further:
            yield _fault(rank, first, f"rank {rank} offloads {what} {1 + len(further)} times: name it once")
        elif (stage, microbatch) in recomputed_by:
            message = f"rank {rank} offloads {what}, whose forward is recomputed and saves only its input"
            yield _fault(rank, first, f"{message}: either offload or recompute")
        elif (stage, microbatch) not in parts:
            yield _fault(rank, first, f"rank {rank} offloads {what}, but saves nothing for its backward on this rank: leave it out")
        else:
            yield from _wrong_steps(first, parts[stage, microbatch], names, rank)


def _wrong_steps(offload: Offload, saved: SavedPart, names: Mapping[tuple[int, int, int], str], rank: int) -> Iterator[Fault]:
    stage, microbatch, maker_step, freed, back, needed = offload
    maker, user = names[stage, microbatch, saved.made], names[stage, microbatch, saved.needed]
    what = f"rank {rank} offloads the values of {maker} with"
    if maker_step != saved.made:
        yield _fault(rank, offload, f"{what} made={maker_step}, but {maker} is step {saved.made}: write made={saved.made}")
    if needed != saved.needed:
        yield _fault(rank, offload, f"{what} needed={needed}, but {user} is step {saved.needed}: write needed={saved.needed}")
    if not saved.made < freed < back <= saved.needed:
        order = f"{saved.made} < freed < back <= {saved.needed}"
        yield _fault(rank, offload, f"{what} freed={freed} and back={back}: they must satisfy {order}")


def _fault(rank: int, offload: Offload, message: str) -> Fault:
    return Fault("offload", message, rank, offload.made)


def link_from_dict(data: dict[str, Any]) -> HostLink:
    """Read the fields of a link; raises `ParseError` for missing parts, and `InputError` for values outside their range."""
    with reading("link to the host", data):
        return HostLink(data["to_host"], data["from_host"], whole(data["latency"]))


def offloads_to_list(plans: Sequence[RankOffloads]) -> list[dict[str, Any]]:
    """Return the JSON form: for each rank its offloads, each as six numbers, and the bound. All other bytes follow from the costs."""
    return [{"offloads": [list(offload) for offload in plan.offloads], "bound": plan.bound} for plan in plans]


def offloads_from_list(data: Any, schedule: Schedule, costs: Costs) -> tuple[RankOffloads, ...]:
    """Read the JSON form of the offloads of `schedule`, with bytes from `costs`.

    Raises `ParseError` for missing or malformed parts, for offloads that the schedule does not allow, and for a bound above the bytes
    moved.
    """
    try:
        plans = [RankOffloads(tuple(Offload(*map(whole, row)) for row in rank["offloads"]), 0, whole(rank["bound"]), 0, 0) for rank in data]
    except (KeyError, TypeError) as error:
        raise ParseError("not a list of the offloads of each rank: {reason}", reason=str(error)) from error
    try:
        require_offloads(schedule, costs, plans)
    except InputError as error:
        raise ParseError(str(error)) from error
    moved = tuple(rank_offloads(plan.offloads, steps, costs, plan.bound) for plan, steps in zip(plans, schedule.steps, strict=True))
    for rank, plan in enumerate(moved):
        if not 0 <= plan.bound <= plan.bytes:
            message = "the bound of rank {rank} must be 0 to the {most} bytes that it offloads, got {got}"
            raise ParseError(message, rank=rank, most=plan.bytes, got=plan.bound)
    return moved
