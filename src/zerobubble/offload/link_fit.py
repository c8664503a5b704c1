"""How quickly ranks copy to the host and back, read off the copies of a timeline."""

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
    """The link over which the median copy of `timeline` took as long as it did, each way; `costs` tell the bytes of copies.

    What a copy takes beside its bytes is in the rates. Raises `InputError` where nothing was copied one way, or in no time.

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
            raise InputError(f"timeline {timeline.name!r} has no copy {copying} of any length: give that of a step with offloads")
        rates[copying] = median(found)
    return HostLink(rates[Copying.TO_HOST], rates[Copying.FROM_HOST])
