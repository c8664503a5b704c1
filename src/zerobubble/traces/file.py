"""One rank's profiler trace: the events that belong to the pipeline, with their times in ns."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple

from zerobubble.errors import MOST_WHOLE, InputError, ParseError
from zerobubble.whole_files import read_whole, unusable

MOST_BYTES = 1_000_000_000
"""The most bytes of an unpacked trace: reading one takes about ten times as much memory."""
MOST_OBJECTS = 20_000_000
"""The most objects and lists of a trace: an empty one takes 20 times as much memory as text."""
HOW_TO_NAME = (
    "PyTorch names the passes of schedules with several stages per rank; for the others call zb.io.name_passes(stage) before training, "
    "and record a new trace"
)

_PASS = re.compile(r"PP:.+|(?:Forward|Backward) [0-9]{1,9}")
_STEP = re.compile(r"ProfilerStep#([0-9]{1,9})")
_COMMUNICATION = re.compile(r"[a-z]*ccl|gloo:|mpi:|c10d::", re.IGNORECASE)
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime")


class Event(NamedTuple):
    """A range in a trace from `start` to `end`, in ns since the epoch by the clock of its machine."""

    name: str
    start: int
    end: int


class GpuKernel(NamedTuple):
    """A kernel or copy on a stream of a GPU, and the time when the host launched it; None if the trace lacks it."""

    name: str
    start: int
    end: int
    stream: str
    launched: int | None

    @property
    def communicates(self) -> bool:
        """Whether it moves data between ranks instead of computing."""
        return _COMMUNICATION.search(self.name) is not None


@dataclass
class RankTrace:
    """The events of the pipeline in the trace `file` of one rank.

    On the host, `passes` are the ranges of the schedule's actions, `transfers` the ranges of communication, and `steps` the ranges of
    the profiler's steps. `kernels` ran on the GPU. `pipeline_size` is the number of ranks, None for a run with several process groups.
    """

    file: str
    rank: int | None
    pipeline_size: int | None
    host: str
    has_gpu: bool
    passes: list[Event] = field(default_factory=list)
    transfers: list[Event] = field(default_factory=list)
    steps: list[Event] = field(default_factory=list)
    kernels: list[GpuKernel] = field(default_factory=list)


def read_rank(file: str | os.PathLike[str]) -> RankTrace:
    """The trace in `file`, JSON or JSON packed with gzip. Raises `InputError` naming the file, and the line or event that is broken."""
    name = os.fspath(file)
    document = _parsed(name, _text(name))
    head, events = (document, document.get("traceEvents")) if isinstance(document, dict) else ({}, document)
    if not isinstance(events, list):
        raise ParseError("{file} is not a profiler trace: it has no list traceEvents; export it with prof.export_chrome_trace", file=name)
    trace = _empty(name, head)
    _collect(trace, events, _base(name, head))
    if not trace.passes:
        message = "{name} has {num_events} events but no range of a pipeline pass, such as PP:2F0: {remedy}"
        raise InputError(message, name=name, num_events=len(events), remedy=HOW_TO_NAME)
    for ranges in (trace.passes, trace.transfers, trace.steps):
        ranges.sort(key=lambda event: (event.start, -event.end))
    return trace


def _text(file: str) -> str:
    try:
        with open(file, "rb") as raw:
            is_packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(file, "rb") if is_packed else open(file, "rb") as opened:
            data = read_whole(opened, MOST_BYTES)
    except EOFError as error:
        raise InputError("{file} ends in the middle of its gzip data, as its writer was stopped: record a new trace", file=file) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError("cannot unpack {file}: {reason}", file=str(file), reason=str(error)) from error
    except OSError as error:
        raise unusable("read", file, error) from error
    remedy = "profile fewer steps, without with_stack and record_shapes"
    if data is None:
        unpacked = " once unpacked" if is_packed else ""
        raise InputError(
            "{file} has more than {limit:,} bytes{unpacked}", file=str(file), limit=MOST_BYTES, unpacked=unpacked, remedy=remedy
        )
    if data.count(b"{") + data.count(b"[") > MOST_OBJECTS:
        raise InputError("{file} has more than {limit:,} objects and lists", file=str(file), limit=MOST_OBJECTS, remedy=remedy)
    try:
        return data.decode("utf-8-sig")
    except ValueError as error:
        raise InputError("cannot read {file}: it is not UTF-8 text", file=file) from error


def _parsed(file: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if not text[error.pos :].strip():
            cut = "the program that wrote it was stopped, or the file was copied in part; record a new trace"
            raise ParseError("{file} ends in the middle, at line {line}: {cut}", file=str(file), line=error.lineno, cut=cut) from None
        message = "{file}, line {line}: not JSON: {fault} at column {column}"
        remedy = "give traces that torch.profiler exported, one per rank"
        raise ParseError(message, file=str(file), line=error.lineno, fault=error.msg, column=error.colno, remedy=remedy) from None
    except (RecursionError, ValueError) as error:
        raise ParseError("{file} is not JSON that can be read: {reason}", file=str(file), reason=str(error)) from None


def _empty(file: str, head: dict[str, Any]) -> RankTrace:
    """Returns a trace without events, from the fields before them."""
    distributed = head.get("distributedInfo")
    info = distributed if isinstance(distributed, dict) else {}
    rank, size = (info.get(key) if type(info.get(key)) is int else None for key in ("rank", "world_size"))
    return RankTrace(
        file, rank, size if info.get("pg_count") == 1 else None, str(head.get("host_name", "")), bool(head.get("deviceProperties"))
    )


def _base(file: str, head: dict[str, Any]) -> int:
    base = head.get("baseTimeNanoseconds", 0)
    if type(base) is not int or abs(base) > MOST_WHOLE:
        raise ParseError("{file}: baseTimeNanoseconds is {base!r:.60}, not a whole number of 64 bits", file=file, base=base)
    return base


def _collect(trace: RankTrace, events: list[Any], base: int) -> None:
    kernels: list[tuple[Event, str, Any]] = []
    launches: dict[Any, int] = {}
    for number, raw in enumerate(events):
        if not isinstance(raw, dict):
            raise ParseError(
                "{file}: event {event} is {got}, not an object",
                file=trace.file,
                event=number,
                got=type(raw).__name__,
                remedy="give a file that export_chrome_trace of torch.profiler wrote",
            )
        if raw.get("ph") != "X":
            continue
        name, category = str(raw.get("name", "")), raw.get("cat")
        if category in _LAUNCHES:
            launches[_argument(raw, "correlation")] = _event(trace.file, number, raw, base).start
        elif category in _KERNELS:
            kernels.append((_event(trace.file, number, raw, base), str(raw.get("tid")), _argument(raw, "correlation")))
        elif category == "gpu_user_annotation":
            continue  # it misses what autograd's thread launches, most of a backward pass: github.com/pytorch/kineto/issues/1022
        elif _PASS.fullmatch(name):
            trace.passes.append(_event(trace.file, number, raw, base))
        elif _STEP.fullmatch(name):
            trace.steps.append(_event(trace.file, number, raw, base))
        elif category in ("user_annotation", "cpu_op") and _COMMUNICATION.match(name):
            trace.transfers.append(_event(trace.file, number, raw, base))
    launches.pop(None, None)
    kernel_events = (GpuKernel(*event, stream, launches.get(correlation)) for event, stream, correlation in kernels)
    trace.kernels = sorted(kernel_events, key=lambda kernel: kernel.start)


def _argument(raw: dict[str, Any], key: str) -> Any:
    """The argument of an event that refers to another event, or None."""
    arguments = raw.get("args")
    value = arguments.get(key) if isinstance(arguments, dict) else None
    return value if isinstance(value, (int, str)) else None


def _event(file: str, number: int, raw: dict[str, Any], base: int) -> Event:
    name = str(raw.get("name"))
    times = []
    for key in ("ts", "dur"):
        value = raw.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or abs(value) > 1e17:
            message = "{file}: event {number} ({name!r}) has {value!r} as {key}, not a time in microseconds"
            raise ParseError(message, file=str(file), number=number, name=name, value=value, key=key)
        times.append(round(value * 1000))
    if times[1] < 0:
        message = "{file}: event {number} ({name!r}) has the negative duration {dur} microseconds"
        raise ParseError(message, file=str(file), number=number, name=name, dur=raw["dur"])
    return Event(name, base + times[0], base + times[0] + times[1])


def step_number(event: Event) -> int:
    """The number of a profiler's step."""
    match = _STEP.fullmatch(event.name)
    assert match is not None
    return int(match[1])
