"""Offload to the host: its options, the copies of a schedule within a memory limit, and their picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import click
from rich.text import Text

from zerobubble.cli.inputs.options import OFFLOAD, Bytes, microbatches_or_bytes, option, option_group
from zerobubble.cli.inputs.problem import PlanQuestion
from zerobubble.cli.inputs.schedule_and_costs import Costed, NamedSchedule
from zerobubble.costs import NS_PER_MS, Limits
from zerobubble.errors import InputError
from zerobubble.offload import HostLink, RankOffloads, plan_offloads
from zerobubble.offload.choice import with_other_costs
from zerobubble.planning import Workload
from zerobubble.planning.problem.problem import microbatch_bytes
from zerobubble.simulation import metrics
from zerobubble.timeline import Copying, HostCopy, Timeline
from zerobubble.units import NS_PER_S, counted, read_bytes, read_time, show_ms

Rates = tuple[float | Bytes, ...]
"""One or two copy rates, to the host and back: bytes per second, or ms per microbatch."""

MARKS = {Copying.TO_HOST: ">", Copying.FROM_HOST: "<"}


def _rates(ctx: click.Context, param: click.Parameter, value: str | None) -> Rates | None:
    if value is None:
        return None
    parts = value.split(",")
    if len(parts) > 2:
        raise click.BadParameter(f"{value!r} has {len(parts)} rates; give one, or one to the host and one back", ctx, param)
    return tuple(_rate(ctx, param, part) for part in parts)


def _rate(ctx: click.Context, param: click.Parameter, value: str) -> float | Bytes:
    size = read_bytes(value)
    number = read_time(value, "ms") if size is None else size
    if number is None or not 1e-6 <= number <= 1e15:
        raise click.BadParameter(f"{value!r} is neither bytes per second with a unit, such as 25GB, nor ms per microbatch", ctx, param)
    return float(number) if size is None else Bytes(size)


@dataclass(frozen=True, kw_only=True)
class RateOptions:
    """The link of a rank to its host."""

    offload: Rates | None = option(
        "--offload",
        section=OFFLOAD,
        callback=_rates,
        metavar="RATE",
        help="Offload to the host, at bytes per second, such as 25GB, or ms per microbatch. Two rates: to the host, back.",
    )


@dataclass(frozen=True, kw_only=True)
class OffloadOptions(RateOptions):
    """The link of a rank to its host, and the memory of its device."""

    memory: float | Bytes | None = option(
        "--memory", callback=microbatches_or_bytes, metavar="M", help="With --offload: memory of a rank, in microbatches or bytes (40GB)."
    )

    def added(self, costed: Costed, named: NamedSchedule) -> Costed:
        """Adds offloads that keep each rank within its memory; without options of offload, adds those of the plan."""
        if self.offload is None and self.memory is None:
            return with_offloads_of_plan(costed, named)
        if self.offload is None or self.memory is None:
            missing, there = ("--memory", "--offload") if self.memory is None else ("--offload", "--memory")
            remedy = "give both; zerobubble plan --memory finds a schedule that fits without offload"
            raise InputError("{argument} needs {needed}", argument=there, needed=missing, remedy=remedy)
        link, limits = self.link(costed), self.limits(costed)
        plans = plan_offloads(costed.schedule, costed.costs, limits, link)
        return replace(costed, limits=limits.memory, offloads=plans, link=link)

    def limits(self, costed: Costed) -> Limits:
        """Returns the device memory of each rank in bytes."""
        memory = self.memory
        if isinstance(memory, Bytes):
            if not costed.in_bytes:
                raise _no_bytes("--memory in bytes", "give --costs, or --memory in microbatches")
            return Limits((memory.count,) * costed.schedule.num_ranks)
        assert memory is not None
        return Limits(tuple(max(1, int(memory * size)) for size in costed.microbatch_bytes))

    def link(self, costed: Costed) -> HostLink:
        """Returns the link of each rank to its host."""
        assert self.offload is not None

        def bytes_per_second(rate: Bytes) -> float:
            if not costed.in_bytes:
                raise _no_bytes("--offload in bytes per second", "give --costs, or --offload in ms per microbatch")
            return float(rate.count)

        return host_link(self.offload, max(costed.microbatch_bytes), bytes_per_second)


def _no_bytes(argument: str, remedy: str) -> InputError:
    return InputError("{argument} needs costs in bytes, which times lack", argument=argument, remedy=remedy)


def with_offloads_of_plan(costed: Costed, named: NamedSchedule) -> Costed:
    """Adds the offloads of the schedule's plan, timed with any costs.

    Real bytes are copied over the plan's link. If bytes stand for microbatches, ranks hold as many microbatches as in the plan, and copying
    a microbatch takes the same time. Raises `InputError` if only one of plan and costs has real bytes, and if a rank exceeds its memory
    with these costs.
    """
    problem, plan = named.problem, named.plan
    if plan is None or problem is None or problem.host is None:
        return costed
    if costed.costs == problem.costs:
        return replace(costed, offloads=plan.offloads, link=problem.host)
    remedy = "show the plan with its own costs, or replan with `zerobubble plan --costs ... --memory ... --offload ...`"
    if costed.in_bytes != (problem.workload is None):
        units = ("bytes", "microbatches") if costed.in_bytes else ("microbatches", "bytes")
        raise InputError(
            "{name} has offloads and memory in {expected}, but {source} are in {got}",
            name=named.name,
            expected=units[1],
            source=costed.source,
            got=units[0],
            remedy=remedy,
        )
    link, memory = problem.host, problem.limits.memory
    if not costed.in_bytes:
        planned = microbatch_bytes(costed.schedule.placement, problem.costs)
        scale = max(costed.microbatch_bytes) / max(planned)
        link = replace(link, to_host=link.to_host * scale, from_host=link.from_host * scale)
        memory = tuple(-(-limit * now // then) for limit, now, then in zip(memory, costed.microbatch_bytes, planned, strict=True))
    try:
        offloads = with_other_costs(costed.schedule, costed.costs, Limits(memory), plan.offloads)
    except InputError as error:
        raise InputError(
            "the offloads of {name} do not suffice with {source}: {reason}; {remedy}",
            name=named.name,
            source=costed.source,
            reason=str(error),
            remedy=remedy,
        ) from error
    return replace(costed, limits=memory, offloads=offloads, link=link)


def host_link(rates: Rates, size: int, bytes_per_second: Callable[[Bytes], float]) -> HostLink:
    """Returns the link of a rank that holds `size` bytes per microbatch; `bytes_per_second` converts rates given in bytes."""
    to_host, from_host = (
        bytes_per_second(rate) if isinstance(rate, Bytes) else size * NS_PER_S / (rate * NS_PER_MS) for rate in (rates * 2)[:2]
    )
    return HostLink(to_host, from_host)


def link_asked(question: PlanQuestion, rates: Rates | None, microbatch: int | None) -> HostLink | None:
    """Returns the link of each rank to its host, in the bytes of the costs, from the options or else from the plan to repeat.

    `microbatch` is the number of bytes of a microbatch on a rank. Rates in bytes need it along with times.
    """
    if rates is None:
        return None if question.problem is None else question.problem.host
    if isinstance(question.work, Workload):
        size = max(question.work.held_after_f)
    else:
        size = max(microbatch_bytes(next(iter(question.placements.values())), question.work))

    def bytes_per_second(bytes_given: Bytes) -> float:
        if not isinstance(question.work, Workload):
            return float(bytes_given.count)
        if microbatch is None:
            raise _no_bytes("--offload in bytes per second", "give --microbatch-bytes, or --offload in ms per microbatch")
        return bytes_given.count * size / microbatch

    return host_link(rates, size, bytes_per_second)


offload_options = option_group(OffloadOptions, "offloading", OFFLOAD)


@dataclass(frozen=True)
class Offloaded:
    """A simulated schedule with the offloads of its ranks, and its makespan in ns with unlimited memory."""

    plans: tuple[RankOffloads, ...]
    timeline: Timeline
    without: int


def offloaded(costed: Costed) -> Offloaded | None:
    """Returns the offloads of the schedule; None without a link to the host."""
    if costed.link is None:
        return None
    return Offloaded(costed.offloads, costed.timeline, metrics(costed.schedule, costed.costs).makespan)


def as_dicts(offloaded: Offloaded) -> list[dict[str, object]]:
    """Returns a dictionary for each rank: the offloads, their bytes, and the times of the copies in ns since the first pass."""
    start = offloaded.timeline.start
    lanes = offloaded.timeline.copies or ((),) * len(offloaded.plans)
    return [
        {
            "bytes": plan.bytes,
            "bound": plan.bound,
            "peak_bytes": plan.peak_bytes,
            "host_bytes": plan.host_bytes,
            "offloads": [offload._asdict() for offload in plan.offloads],
            "copies": [copy._asdict() | {"start": copy.start - start, "end": copy.end - start} for copy in lane],
        }
        for plan, lane in zip(offloaded.plans, lanes, strict=True)
    ]


def picture(costed: Costed, offloaded: Offloaded, width: int) -> Text:
    """Draws a line of copies for each rank that has some, in the scale of the timeline's picture, with their sizes."""
    label = len(f"rank {offloaded.timeline.num_ranks - 1} ")
    columns = max(10, width - label)
    lines = []
    for rank, (plan, lane) in enumerate(zip(offloaded.plans, offloaded.timeline.copies or ((),) * len(offloaded.plans), strict=True)):
        lines.append(f"rank {rank}: {offload_text(costed, plan, rank)}")
        if lane:
            lines.append(" " * label + "".join(_lane(offloaded.timeline, lane, columns)))
    lines.append("copies: > to the host, < back")
    longer = offloaded.timeline.makespan / offloaded.without - 1 if offloaded.without else 0.0
    unlimited = show_ms(offloaded.without)
    lines.append(f"makespan {show_ms(offloaded.timeline.makespan)}, {100 * longer:+.1f} % relative to {unlimited} with unlimited memory")
    return Text("\n".join(lines), no_wrap=True)


def offload_text(costed: Costed, plan: RankOffloads, rank: int) -> str:
    """Describes the offloads of a rank, and the peak memory of device and host."""
    device, moved, bound, host = (costed.show_memory(count, rank) for count in (plan.peak_bytes, plan.bytes, plan.bound, plan.host_bytes))
    if not plan.offloads:
        return f"no offload; up to {device} on the device"
    count = counted(len(plan.offloads), "offload")
    return f"{count} of {moved}, at least {bound}; up to {device} on the device, {host} on the host"


def _lane(timeline: Timeline, lane: Sequence[HostCopy], columns: int) -> Iterator[str]:
    """Draws the copies of a rank on one line, each at least one column wide where columns are left."""
    duration, at = max(1, timeline.makespan), 0
    for copy in lane:
        begin = max(at, round((copy.start - timeline.start) * columns / duration))
        end = max(begin + 1, round((copy.end - timeline.start) * columns / duration))
        if begin < columns:
            yield "·" * (begin - at) + MARKS[copy.copying] * (min(end, columns) - begin)
            at = min(end, columns)
    yield "·" * (columns - at)
