"""The files of a run folder that are written whole: read, checked, and remembered until they change, with the error if they are damaged."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from zerobubble.costs import Costs
from zerobubble.errors import InputError, ParseError, ZeroBubbleError, line, parsed_json, reading, whole
from zerobubble.ir import Schedule
from zerobubble.run_folder import FORM, MOST_RANKS, count, seconds, text
from zerobubble.simulation import peak_memory, simulate
from zerobubble.timeline import Timeline
from zerobubble.whole_files import opened_regular, read_whole

MOST_BYTES = 1 << 24
"""The most bytes of a file, of a few hundred thousand passes."""
MOST_STAGES = 1 << 16
REMEDY = "restore it, or record again"

Content = TypeVar("Content")


class RunHeader(NamedTuple):
    """The schedule of a run and its costs, the step simulated with them, and the most bytes that each rank holds by them."""

    schedule: Schedule | None = None
    costs: Costs | None = None
    plan: Timeline | None = None
    forecast: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunHeader:
        """Reads the JSON form. Raises `ZeroBubbleError` for anything else."""
        if data.get("format") != FORM:
            message = "it has the form {got!v}, and this version of zerobubble reads {expected!v}"
            raise InputError(message, got=data.get("format"), expected=FORM, remedy="update zerobubble")
        with reading("run", data):
            schedule = Schedule.from_text(text(data["schedule"], MOST_BYTES))
            costs = None if data["costs"] is None else Costs.from_dict(data["costs"])
        count(schedule.num_ranks, MOST_RANKS)
        if costs is None:
            return cls(schedule)
        return cls(schedule, costs, simulate(schedule, costs), peak_memory(schedule, costs))


class Details(NamedTuple):
    """All passes of a step of one rank in the counter of its host, which was `counter` when the wall clock was `time` (both in ns).

    `seconds` is the time of the whole step on that rank; 0 in files of earlier versions, which do not have it.
    """

    step: int
    seconds: float
    host: str
    counter: int
    time: int
    timeline: Timeline

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Details:
        """Reads the JSON form. Raises `ParseError` for anything else."""
        with reading("run", data):
            clocks, columns = data["clocks"], ("rows", "memory", "marks", "reductions", "copies")
            timeline = Timeline.from_dict({"name": line(data["name"]), "source": "measured", **{name: [data[name]] for name in columns}})
            host, counter, time = text(clocks["host"]), whole(clocks["counter"]), whole(clocks["time"])
            _require_sizes(timeline)
            return cls(count(data["step"]), seconds(data.get("seconds", 0.0)), host, counter, time, timeline)


def _require_sizes(timeline: Timeline) -> None:
    for _, span in timeline.spans():
        if span.start > span.end:
            raise ParseError("pass {op} ends at {end}, before its start at {start}", op=str(span.op), start=span.start, end=span.end)
        count(span.op.stage, MOST_STAGES)
        count(span.op.microbatch, MOST_STAGES)


class Remembered(Generic[Content]):
    """What `read` makes of a file, read again once the file is another one.

    A file that is damaged is refused as long as it is, each time it is asked for.
    """

    def __init__(self, path: Path, read: Callable[[Mapping[str, Any]], Content]) -> None:
        self._path = path
        self._read = read
        self._stamp: tuple[int, ...] = ()
        self._content: Content | None = None
        self._fault: InputError | None = None

    def content(self) -> Content:
        """Returns the content of the file. Raises `InputError` with its name if it cannot be read."""
        with opened_regular(self._path) as file:
            state = os.fstat(file.fileno())
            stamp = (state.st_ino, state.st_size, state.st_mtime_ns)
            if stamp != self._stamp:
                self._content, self._fault = None, None
                try:
                    self._content = self._read(_object_in(read_whole(file, MOST_BYTES)))
                except (ZeroBubbleError, RecursionError) as error:
                    fields = error.fields if isinstance(error, InputError) else {}
                    named = {"got": fields.get("got"), "expected": fields.get("expected")}
                    self._fault = InputError("{file} is damaged: {cause}", file=str(self._path), cause=str(error), remedy=REMEDY, **named)
                self._stamp = stamp
        if self._fault is not None:
            raise self._fault
        assert self._content is not None
        return self._content


def _object_in(data: bytearray | None) -> Mapping[str, Any]:
    if data is None:
        raise ParseError("it has more than {most:,} bytes", most=MOST_BYTES)
    try:
        content = parsed_json(data.decode())
    except UnicodeDecodeError:
        raise ParseError("it is not UTF-8 text") from None
    if not isinstance(content, dict):
        raise ParseError("it has no object")
    return content


def timeline_of(details: Mapping[int, Details]) -> Timeline:
    """Returns the timeline of a step from what each rank recorded, in the clock of rank 0.

    Ranks of one host share a clock. Those of others are aligned by wall-clock time, and so only as exactly as the hosts' clocks agree.
    Raises `ParseError` without passes, and for clocks that are too far apart for times of 64 bits.
    """
    ranks = sorted(details)
    first = details[ranks[0]]
    shifts = [_shift(details[rank], first) for rank in ranks]
    starts = [span.start + shift for rank, shift in zip(ranks, shifts, strict=True) for _, span in details[rank].timeline.spans()]
    if not starts:
        raise ParseError("no rank has passes")
    origin = min(starts)
    forms = [details[rank].timeline.to_dict() for rank in ranks]
    columns = {"rows": (1, 2), "memory": (0,), "marks": (1, 2), "reductions": (1, 2), "copies": (3, 4)}
    parts = {
        name: [_moved(form[name][0] if form[name] else [], shift - origin, places) for form, shift in zip(forms, shifts, strict=True)]
        for name, places in columns.items()
    }
    kept = {name: rows for name, rows in parts.items() if name == "rows" or any(rows)}
    return Timeline.from_dict({"name": first.timeline.name, "source": "measured", **kept})


def _moved(entries: list[list[Any]], by: int, places: tuple[int, ...]) -> list[list[Any]]:
    return [[value + by if place in places else value for place, value in enumerate(entry)] for entry in entries]


def _shift(details: Details, first: Details) -> int:
    if details.host == first.host:
        return 0
    return (details.time - details.counter) - (first.time - first.counter)
