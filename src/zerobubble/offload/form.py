"""The JSON form of offloads in plan files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerobubble.costs import Costs
from zerobubble.errors import InputError, ParseError, reading, whole
from zerobubble.ir import Schedule
from zerobubble.offload.copies import HostLink
from zerobubble.offload.offloads import Offload, RankOffloads, rank_offloads, require_offloads


def link_to_dict(link: HostLink) -> dict[str, Any]:
    """Return the JSON form of a link: bytes per second each way, and the latency in ns."""
    return {"to_host": link.to_host, "from_host": link.from_host, "latency": link.latency}


def link_from_dict(data: dict[str, Any]) -> HostLink:
    """Read the JSON form; raises `ParseError` for missing parts, and `InputError` for values outside their range."""
    with reading("link to the host", data):
        return HostLink(data["to_host"], data["from_host"], whole(data["latency"]))


def offloads_to_list(plans: Sequence[RankOffloads]) -> list[dict[str, Any]]:
    """Return the JSON form: for each rank its offloads, each as six numbers, and the bound. All other bytes follow from the costs."""
    return [{"offloads": [list(one) for one in plan.offloads], "bound": plan.bound} for plan in plans]


def offloads_from_list(data: Any, schedule: Schedule, costs: Costs) -> tuple[RankOffloads, ...]:
    """Read the JSON form of the offloads of `schedule`, with bytes from `costs`.

    Raises `ParseError` for missing or malformed parts, for offloads that the schedule does not allow, and for a bound above the bytes
    moved.
    """
    try:
        plans = [RankOffloads(tuple(Offload(*map(whole, one)) for one in rank["offloads"]), 0, whole(rank["bound"]), 0, 0) for rank in data]
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
