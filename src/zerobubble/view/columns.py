"""A timeline as columns of numbers for the viewer, with one row for each pass, rank after rank. A pass takes a few bytes."""

from __future__ import annotations

import sys
import zlib
from array import array
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any

from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.explain import Gap, WaitsFor, critical_path
from zerobubble.export.svg import caption
from zerobubble.kinds import KINDS
from zerobubble.timeline import Copying, Doing, HostCopy, Span, Timeline

WAITS = tuple(WaitsFor)
"""The causes of idle time; a page stores the index in this tuple."""


COPYING = tuple(Copying)
"""The directions of copies; a page stores the index in this tuple."""


@dataclass(frozen=True, slots=True)
class Viewed:
    """A timeline with further data, which is shown if it is given.

    - `costs`: the costs with the times of its messages, so that messages in flight are drawn.
    - `gaps`: its idle time by what ranks waited for, as returned by `explain.gaps`; a simulated timeline needs none.
    - `limits`: the most bytes that each rank may hold.
    - `constant_bytes`: the bytes that each rank holds all the time, by their label.
    - `microbatch_bytes`: if memory is shown in `memory_unit` instead of bytes, the bytes of one unit on each rank.
    - `memory_unit`: the name of that unit.
    - `caption`: the text above the timeline in place of its makespan and bubble.
    - `unit`: the unit that one ms of the timeline stands for, such as a slot of a block.
    """

    timeline: Timeline
    costs: Costs | None = None
    gaps: Sequence[Sequence[Gap]] = ()
    limits: Sequence[int] = ()
    constant_bytes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    microbatch_bytes: Sequence[int] = ()
    memory_unit: str = "microbatches"
    caption: str = ""
    unit: str = "ms"

    def __post_init__(self) -> None:
        ranks = self.timeline.num_ranks
        parts = {"gaps": self.gaps, "limits": self.limits, "microbatch_bytes": self.microbatch_bytes, **self.constant_bytes}
        for name, values in parts.items():
            if values and len(values) != ranks:
                raise InputError(
                    "a view of {ranks} ranks needs {name} for each of them or for none, got {got}", ranks=ranks, name=name, got=len(values)
                )


def timeline_columns(viewed: Viewed) -> dict[str, Any]:
    """Returns the data of one timeline for the viewer, with times in ns from its first start."""
    timeline = viewed.timeline
    spans = list(chain.from_iterable(timeline.rows))
    text = viewed.caption or caption(timeline)
    return {
        "name": timeline.name,
        "source": timeline.source,
        "caption": text,
        "unit": viewed.unit,
        "makespan": timeline.makespan,
        "first": list(accumulate(map(len, timeline.rows), initial=0)),
        "columns": {name: packed(values) for name, values in _pass_columns(timeline, spans).items()},
        "last": _last(timeline, spans),
        "memory": _memory_columns(timeline),
        "gaps": _gaps(viewed),
        "marks": _marks(timeline),
        "sums": [[[event.stage, event.start - timeline.start, event.end - timeline.start] for event in row] for row in timeline.reductions],
        "copies": [[_copy(event, timeline.start) for event in row] for row in timeline.copies],
        "delays": _delays(viewed.costs),
        "limits": list(viewed.limits),
        "layers": {name: list(sizes) for name, sizes in viewed.constant_bytes.items()},
        "microbatchBytes": list(viewed.microbatch_bytes),
        "memoryUnit": viewed.memory_unit,
    }


def _copy(copy: HostCopy, start: int) -> list[int]:
    """Returns the direction of a copy, its stage, microbatch, start and end."""
    return [COPYING.index(copy.copying), copy.stage, copy.microbatch, copy.start - start, copy.end - start]


def _pass_columns(timeline: Timeline, spans: Sequence[Span]) -> dict[str, list[int]]:
    """Returns the columns of passes.

    They are the kind, the stage, the microbatch (as differences), the ns since the rank's previous pass ended, the duration, and the row
    number minus that of the pass it waited for. Differences take less space, because they recur where plain numbers grow.
    """
    code = {kind: place for place, kind in enumerate(KINDS)}
    waits = []
    for row in timeline.rows:
        ends = [timeline.start, *(span.end for span in row)]
        waits += [span.start - end for span, end in zip(row, ends, strict=False)]
    columns = {
        "kind": [code[span.op.kind] for span in spans],
        "stage": [span.op.stage for span in spans],
        "microbatch": _differences([span.op.microbatch for span in spans]),
        "wait": waits,
        "time": [span.end - span.start for span in spans],
    }
    if spans and all(span.why is not None for span in spans):
        columns["back"] = _back(spans)
    return columns


def _differences(values: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise((0, *values))]


def _back(spans: Sequence[Span]) -> list[int]:
    """Returns, for each span, its number minus the number of the span that it waited for; 0 if it waited for none."""
    number = {span.op: place for place, span in enumerate(spans)}
    return [place - number[span.why.op] if span.why and span.why.op in number else 0 for place, span in enumerate(spans)]


def _last(timeline: Timeline, spans: Sequence[Span]) -> int:
    """Returns the number of the pass at the end of the critical path; -1 if it is not known."""
    if not spans or any(span.why is None for span in spans):
        return -1
    op = critical_path(timeline)[-1].op
    return next(place for place, span in enumerate(spans) if span.op == op)


def _memory_columns(timeline: Timeline) -> dict[str, Any] | None:
    """Returns memory over time, rank after rank: at each change, the ns since the change before and the bytes added."""
    if not any(timeline.memory):
        return None
    times = [_differences([time - timeline.start for time, _ in row]) for row in timeline.memory]
    held = [_differences([size for _, size in row]) for row in timeline.memory]
    first = list(accumulate(map(len, timeline.memory), initial=0))
    return {"first": first, "wait": packed(list(chain(*times))), "added": packed(list(chain(*held)))}


def _gaps(viewed: Viewed) -> dict[str, Any] | None:
    """Returns idle time, rank after rank: start, length, and the index in `WAITS` of its reason."""
    if not viewed.gaps:
        return None
    gaps, origin = list(chain.from_iterable(viewed.gaps)), viewed.timeline.start
    return {
        "first": list(accumulate(map(len, viewed.gaps), initial=0)),
        "start": packed([gap.start - origin for gap in gaps]),
        "time": packed([gap.end - gap.start for gap in gaps]),
        "what": packed([WAITS.index(gap.waits_for) for gap in gaps]),
    }


def _marks(timeline: Timeline) -> dict[str, Any] | None:
    """Returns what measured ranks did outside their passes, rank after rank: start, length and activity, as its index in `Doing`."""
    marks = list(chain.from_iterable(timeline.marks))
    if not marks:
        return None
    places = {doing: place for place, doing in enumerate(Doing)}
    return {
        "first": list(accumulate(map(len, timeline.marks), initial=0)),
        "start": packed([mark.start - timeline.start for mark in marks]),
        "time": packed([mark.duration for mark in marks]),
        "what": packed([places[mark.doing] for mark in marks]),
    }


def _delays(costs: Costs | None) -> list[list[int]] | None:
    """Returns the ns that the message of a pass takes, by kind and stage."""
    if costs is None:
        return None
    return [[costs.message_time(kind, stage) for stage in range(costs.num_stages)] for kind in KINDS]


LEVEL = 6
"""The compression level of zlib."""


def packed(values: Sequence[int]) -> dict[str, str]:
    """Return a column as `{"type": ..., "data": ...}`: numbers of 4 bytes (`i4`) if all fit, else doubles (`f8`), deflated, in base64.

    `web/columns.js` reads it. A double represents integers up to 2**53 exactly, which is 104 days in ns.
    """
    column: array[int] | array[float]
    try:
        column, name = array("i", values), "i4"
    except OverflowError:
        column, name = array("d", values), "f8"
    if sys.byteorder == "big":
        column.byteswap()
    return {"type": name, "data": b64encode(zlib.compress(column.tobytes(), LEVEL)).decode("ascii")}
