"""Offload beside a schedule: what goes to host memory so that each rank keeps within its memory, when, and what that costs in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import click
from rich.text import Text

from zerobubble.cli.inputs.options import Bytes, microbatches_or_bytes, option_group
from zerobubble.cli.inputs.schedule_and_costs import Costed, Given
from zerobubble.cli.inputs.workload import Question
from zerobubble.costs import NS_PER_MS, Limits
from zerobubble.errors import InputError
from zerobubble.offload import HostLink, RankOffloads, plan_offloads
from zerobubble.offload.choice import with_other_costs
from zerobubble.planning import Workload
from zerobubble.planning.problem.problem import microbatch_bytes
from zerobubble.simulation import metrics
from zerobubble.timeline import Copy, Copying, Timeline
from zerobubble.units import NS_PER_S, counted, read_bytes, read_time, show_bytes, show_ms

Rates = tuple[float | Bytes, ...]
"""How quickly a rank copies, to the host and back or the same both ways: bytes a second, or the ms for what it keeps of a microbatch."""

MARKS = {Copying.TO_HOST: ">", Copying.FROM_HOST: "<"}


@dataclass(frozen=True)
class OffloadOptions:
    """How quickly a rank copies to the host and back, in bytes a second or ms for a microbatch, and what its device may hold."""

    offload: Rates | None
    memory: float | Bytes | None

    def added(self, costed: Costed, given: Given) -> Costed:
        """The schedule with offloads that keep each rank within its memory, where some are asked for, and else with those of its plan."""
        if self.offload is None and self.memory is None:
            return with_offloads_of_plan(costed, given)
        if self.offload is None or self.memory is None:
            missing, there = ("--memory", "--offload") if self.memory is None else ("--offload", "--memory")
            raise click.UsageError(
                f"{there} needs {missing}, too: what is to go to the host follows from the memory, and when from the rate"
            )
        link, limits = self.link(costed), self.limits(costed)
        plans = plan_offloads(costed.schedule, costed.costs, limits, link)
        return replace(costed, limits=limits.memory, offloads=plans, link=link)

    def limits(self, costed: Costed) -> Limits:
        """What the device of each rank may hold, in bytes."""
        memory = self.memory
        if isinstance(memory, Bytes):
            if not costed.in_bytes:
                raise click.UsageError("--memory in bytes needs costs in bytes, and times tell none: give --costs, or microbatches")
            return Limits((memory.count,) * costed.schedule.num_ranks)
        assert memory is not None
        return Limits(tuple(max(1, int(memory * size)) for size in costed.microbatch_bytes))

    def link(self, costed: Costed) -> HostLink:
        """The link of each rank to its host."""
        assert self.offload is not None

        def bytes_a_second(given: Bytes) -> float:
            if not costed.in_bytes:
                raise click.UsageError(
                    "--offload in bytes a second needs costs in bytes, and times tell none: give --costs, or the ms in which a rank copies "
                    "what it holds for a microbatch"
                )
            return float(given.count)

        return host_link(self.offload, max(costed.microbatch_bytes), bytes_a_second)


def with_offloads_of_plan(costed: Costed, given: Given) -> Costed:
    """The schedule with what the plan that it comes from moves to the host, with whatever costs it is timed.

    Where bytes are real the link is that of the plan. Where they stand for microbatches, ranks hold as many as in the plan, and one is
    copied in the time that it takes there. Raises `InputError` where only the plan or only the costs have real bytes, and where a rank
    does not keep within its memory with these costs.
    """
    problem, solved = given.problem, given.solved
    if solved is None or problem is None or problem.host is None:
        return costed
    if costed.costs == problem.costs:
        return replace(costed, offloads=solved.offloads, link=problem.host)
    remedy = "show the plan with its own costs, or plan anew with `zerobubble plan --costs ... --memory ... --offload ...`"
    if costed.in_bytes != (problem.workload is None):
        units = ("bytes", "microbatches") if costed.in_bytes else ("microbatches", "bytes")
        raise InputError(
            f"{given.name} says what goes to the host and over which link, and its memory counts in {units[1]} where {costed.source} "
            f"counts in {units[0]}: {remedy}"
        )
    link, memory = problem.host, problem.limits.memory
    if not costed.in_bytes:
        planned = microbatch_bytes(costed.schedule.placement, problem.costs)
        scale = max(costed.microbatch_bytes) / max(planned)
        link = replace(link, to_host=link.to_host * scale, from_host=link.from_host * scale)
        memory = tuple(-(-limit * now // then) for limit, now, then in zip(memory, costed.microbatch_bytes, planned, strict=True))
    try:
        offloads = with_other_costs(costed.schedule, costed.costs, Limits(memory), solved.offloads)
    except InputError as error:
        raise InputError(f"what {given.name} moves to the host does not do with {costed.source}: {error}; {remedy}") from error
    return replace(costed, limits=memory, offloads=offloads, link=link)


def host_link(rates: Rates, size: int, bytes_a_second: Callable[[Bytes], float]) -> HostLink:
    """The link of a rank that keeps `size` bytes for a microbatch; `bytes_a_second` reads the rates that are given so, and not in ms."""
    to_host, from_host = (
        bytes_a_second(given) if isinstance(given, Bytes) else size * NS_PER_S / (given * NS_PER_MS) for given in (rates * 2)[:2]
    )
    return HostLink(to_host, from_host)


def link_asked(question: Question, rates: Rates | None, microbatch: int | None) -> HostLink | None:
    """The link of each rank to its host, in the bytes that the costs count: of the options, or else of the plan that is made anew.

    `microbatch` are the bytes that a rank keeps of one, for rates in bytes beside times.
    """
    if rates is None:
        return None if question.problem is None else question.problem.host
    if isinstance(question.work, Workload):
        size = max(question.work.held_after_f)
    else:
        size = max(microbatch_bytes(next(iter(question.placements.values())), question.work))

    def bytes_a_second(bytes_given: Bytes) -> float:
        if not isinstance(question.work, Workload):
            return float(bytes_given.count)
        if microbatch is None:
            raise click.UsageError(
                "--offload in bytes a second needs bytes, and times tell none: give --microbatch-bytes, or the ms in which a rank copies "
                "what it keeps of a microbatch"
            )
        return bytes_given.count * size / microbatch

    return host_link(rates, size, bytes_a_second)


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
        said = "neither bytes a second with their unit, such as 25GB, nor the ms in which a rank copies what it holds for a microbatch"
        raise click.BadParameter(f"{value!r} is {said}", ctx, param)
    return float(number) if size is None else Bytes(size)


rates_option = click.option(
    "--offload",
    callback=_rates,
    metavar="RATE",
    help="Offload to the host: bytes a rank copies in a second, such as 25GB, or ms for its microbatch; two with a comma: to, from.",
)
"""The option that says how quickly a rank copies to the host and back; it makes the argument `offload` of a verb."""

offload_options = option_group(
    OffloadOptions,
    "offloading",
    rates_option,
    click.option(
        "--memory", callback=microbatches_or_bytes, metavar="M", help="With --offload: memory of a rank, in microbatches or bytes (40GB)."
    ),
)
"""The options of a verb that shows offloads; they make its argument `offloading`."""


@dataclass(frozen=True)
class Offloaded:
    """A schedule with what its ranks move to the host, played, and how long it takes, in ns, where memory is no matter."""

    plans: tuple[RankOffloads, ...]
    timeline: Timeline
    without: int


def offloaded(costed: Costed) -> Offloaded | None:
    """What the ranks of the schedule move to the host; None where it has no link to one."""
    if costed.link is None:
        return None
    return Offloaded(costed.offloads, costed.timeline, metrics(costed.schedule, costed.costs).makespan)


def as_dicts(found: Offloaded) -> list[dict[str, object]]:
    """A dictionary for each rank: what moves, the bytes, and when the copies run, in ns from the first pass on."""
    start = found.timeline.start
    lanes = found.timeline.copies or ((),) * len(found.plans)
    return [
        {
            "bytes": plan.bytes,
            "bound": plan.bound,
            "peak_bytes": plan.peak_bytes,
            "host_bytes": plan.host_bytes,
            "offloads": [one._asdict() for one in plan.offloads],
            "copies": [copy._asdict() | {"start": copy.start - start, "end": copy.end - start} for copy in lane],
        }
        for plan, lane in zip(found.plans, lanes, strict=True)
    ]


def picture(costed: Costed, found: Offloaded, width: int) -> Text:
    """A lane of copies for each rank that has some, in the scale of the timeline's picture above it, with what it moves."""
    label = len(f"rank {found.timeline.num_ranks - 1} ")
    columns = max(10, width - label)
    lines = []
    for rank, (plan, lane) in enumerate(zip(found.plans, found.timeline.copies or ((),) * len(found.plans), strict=True)):
        lines.append(f"rank {rank}: {told_of_rank(costed, plan, rank)}")
        if lane:
            lines.append(" " * label + "".join(_lane(found.timeline, lane, columns)))
    lines.append("copies: > to the host, < back")
    longer = found.timeline.makespan / found.without - 1 if found.without else 0.0
    lines.append(f"makespan {show_ms(found.timeline.makespan)}, {100 * longer:+.1f} % to {show_ms(found.without)} with memory for all")
    return Text("\n".join(lines), no_wrap=True)


def told_of_rank(costed: Costed, plan: RankOffloads, rank: int) -> str:
    """How much a rank moves to the host, and what is held on the device and on the host."""
    if not plan.offloads:
        return f"nothing goes to the host; up to {_size(costed, plan.peak_bytes, rank)} on the device"
    moved = (
        f"{counted(len(plan.offloads), 'offload')} of {_size(costed, plan.bytes, rank)}, of which {_size(costed, plan.bound, rank)} must"
    )
    return f"{moved}; up to {_size(costed, plan.peak_bytes, rank)} on the device, {_size(costed, plan.host_bytes, rank)} on the host"


def _size(costed: Costed, count: int, rank: int) -> str:
    return show_bytes(count) if costed.in_bytes else counted(count / costed.microbatch_bytes[rank], "microbatch")


def _lane(timeline: Timeline, lane: Sequence[Copy], columns: int) -> Iterator[str]:
    """One line: the copies of a rank where they run, a short one as one mark where there is room."""
    duration, at = max(1, timeline.makespan), 0
    for copy in lane:
        begin = max(at, round((copy.start - timeline.start) * columns / duration))
        end = max(begin + 1, round((copy.end - timeline.start) * columns / duration))
        if begin < columns:
            yield "·" * (begin - at) + MARKS[copy.copying] * (min(end, columns) - begin)
            at = min(end, columns)
    yield "·" * (columns - at)
