"""Fitting the speed of the link to the host from the copies in a timeline."""

from __future__ import annotations

from statistics import median

from zerobubble.arguments import takes
from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.offload.copies import HostLink
from zerobubble.offload.offloads import offloadable_bytes
from zerobubble.timeline import Copying, Timeline
from zerobubble.units import NS_PER_S


@takes(timeline=Timeline, costs=Costs)
def fit_link(timeline: Timeline, costs: Costs) -> HostLink:
    """Return the link that reproduces the time of the median copy of `timeline` in each direction; `costs` have the bytes of copies.

    The latency is 0, since the rates include it. Raises `InputError` if there is no copy in one direction, or none that took time.

    >>> import zerobubble as zb
    >>> schedule, costs = zb.make("1f1b", 3, 6), zb.Costs.uniform(3)
    >>> link = zb.offload.HostLink(to_host=1e9, from_host=2e9)
    >>> plans = zb.offload.plan_offloads(schedule, costs, zb.Limits((2_000_000,) * 3), link)
    >>> zb.offload.fit_link(zb.offload.play_offloads(schedule, costs, plans, link), costs)
    HostLink(to_host=1000000000.0, from_host=2000000000.0, latency=0)
    """
    rates = {}
    for copying in Copying:
        copies = [copy for row in timeline.copies for copy in row if copy.copying is copying]
        sizes = [offloadable_bytes(costs, copy.stage, copy.microbatch) for copy in copies]
        found = [size * NS_PER_S / copy.duration for size, copy in zip(sizes, copies, strict=True) if size and copy.duration]
        if not found:
            message = "timeline {timeline!r} has no copy {copying} that took time"
            raise InputError(message, timeline=timeline.name, copying=copying, remedy="pass the timeline of a step with offloads")
        rates[copying] = median(found)
    return HostLink(rates[Copying.TO_HOST], rates[Copying.FROM_HOST])
