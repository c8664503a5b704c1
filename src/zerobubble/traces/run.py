"""A run of a pipeline, read from its profiler traces: timelines, the schedule that ran, its costs, and why it took so long."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from statistics import median_low

from zerobubble.arguments import each, instance, takes
from zerobubble.costs import Costs
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.explain import Difference, Gap, diff, gaps
from zerobubble.export.torch_csv import inferred_placement
from zerobubble.fit import fit_costs, link_times
from zerobubble.ir import Op, Schedule
from zerobubble.recognition import Recognition, recognize
from zerobubble.timeline import Timeline, steps_of
from zerobubble.traces.assembly import assembled, in_order_of_ranks, timeline_of
from zerobubble.traces.clocks import ClockShift
from zerobubble.traces.file import read_rank
from zerobubble.traces.passes import run_of
from zerobubble.units import counted, show_ms
from zerobubble.verify import schedule_faults


@dataclass(frozen=True, repr=False)
class TracedRun(Displayed):
    """A run of PyTorch's pipeline schedules as `read_trace` found it.

    - `files`: the names of the traces, one per rank.
    - `timelines`: a measured timeline for each training step, in ns from its first pass.
    - `labels`: the profiler's number of each step, None where the trace has none.
    - `clock`: "kernels" where a GPU's passes are timed by what ran on it, "host" where by the host's ranges.
    - `clocks`: what was added to the clock of each rank, and what the messages leave open.
    - `notes`: what the traces do not show, in sentences.
    """

    files: tuple[str, ...]
    timelines: tuple[Timeline, ...]
    labels: tuple[int | None, ...]
    clock: str
    clocks: tuple[ClockShift, ...]
    notes: tuple[str, ...] = ()

    def _summary(self) -> str:
        first = self.timelines[self.typical]
        return f"of {counted(first.num_ranks, 'rank')}: {counted(len(self.timelines), 'step')}, typical is step {self.typical}: {first!r}"

    def _details(self) -> Iterator[str]:
        yield f"schedule: {self.recognition()}"
        for number, timeline in enumerate(self.timelines):
            yield f"step {number}: makespan {show_ms(timeline.makespan)}"
        yield from self.notes

    @property
    def typical(self) -> int:
        """The step of median makespan, among the steps that run the most common schedule."""
        counts = Counter(self._rows)
        numbers = self._alike(max(range(len(self.timelines)), key=lambda number: counts[self._rows[number]]))
        return sorted(numbers, key=lambda number: self.timelines[number].makespan)[(len(numbers) - 1) // 2]

    def timeline(self, step: int | None = None) -> Timeline:
        """The timeline of `step`, by default the typical one. Raises `InputError` for a step that the traces do not have."""
        return self.timelines[self._number(step)]

    def _number(self, step: int | None) -> int:
        if step is not None and not 0 <= step < len(self.timelines):
            raise InputError(
                "there is no step {step}: the traces have steps 0 to {last_step}", step=step, last_step=len(self.timelines) - 1
            )
        return self.typical if step is None else step

    def schedule(self, step: int | None = None) -> Schedule:
        """The order that ran in `step`, by default the typical one, named after the known schedule that it is."""
        return _schedule_of(self.timeline(step))

    def recognition(self, step: int | None = None) -> Recognition:
        """The known schedule that ran in `step`, by default the typical one, or the closest known schedule."""
        return recognize(self.schedule(step))

    def costs(self, step: int | None = None) -> Costs:
        """The times of passes and messages in `step`; by default, the medians over all steps that run the schedule of the typical step.

        The time of a link is 0 if no rank waited for its messages; `hidden_links` lists such links. Bytes are unknown. Raises
        `InputError` naming the file if the trace of the step lacks passes, or has them in an order that cannot have run.
        """
        self._require_whole(step)
        return self._costs[self._key(step)][0]

    def hidden_links(self, step: int | None = None) -> tuple[int, ...]:
        """The links, each named by its first stage, of unknown time, because no rank waited for their messages.

        `step` is the step, as in `costs`.
        """
        return self._costs[self._key(step)][1]

    def step_costs(self, step: int | None = None) -> Costs:
        """The medians of the passes of `step`, by default the typical one, and the times of messages as `costs` has them."""
        self._require_whole(step)
        number = self._number(step)
        usual = self.costs() if number in self._alike(self.typical) else self.costs(number)
        return replace(self.costs(number), comm=usual.comm)

    def _require_whole(self, step: int | None) -> None:
        """Raise if the traces have passes of a step that cannot have run so: a pass is missing, superfluous or out of order."""
        number = self._number(step)
        faults = schedule_faults(_schedule_of(self.timelines[number]))
        if faults:
            file = self.files[faults[0].rank] if faults[0].rank is not None else ", ".join(self.files)
            more = f", and {counted(len(faults) - 1, 'further fault')}" if len(faults) > 1 else ""
            fault = faults[0].message.split(": ")[0]
            message = "{file}: step {number} of the traces is damaged or incomplete: {fault}{more}; {remedy}"
            raise InputError(message, file=str(file), number=number, fault=fault, more=more, remedy="record a new trace")

    def _key(self, step: int | None) -> int | None:
        return None if step is None else self._number(step)

    @cached_property
    def _costs(self) -> _CostsOfSteps:
        return _CostsOfSteps(self)

    def steps_like(self, step: int | None) -> tuple[Timeline, ...]:
        """The timeline of `step`; for None, the timelines of all steps that run the schedule of the typical step."""
        numbers = self._alike(self.typical) if step is None else [self._number(step)]
        return tuple(self.timelines[number] for number in numbers)

    def _alike(self, step: int) -> list[int]:
        wanted = self._rows[step]
        return [number for number, rows in enumerate(self._rows) if rows == wanted]

    @cached_property
    def _rows(self) -> list[tuple[tuple[Op, ...], ...]]:
        return [_rows_of(timeline) for timeline in self.timelines]

    def difference(self, step: int | None = None, schedule: Schedule | None = None) -> Difference:
        """Compares `step`, by default the typical one, with its schedule simulated with `step_costs`: see `zb.diff`.

        Raises `InputError` if the step ran another schedule than `schedule`.
        """
        self._require_whole(step)
        ran = self.schedule(step)
        if schedule is not None:
            _require_same_order(schedule, ran, self.recognition(step))
        return diff(ran, self.step_costs(step), self.timeline(step))

    def gaps(self, step: int | None = None, timeline: Timeline | None = None) -> tuple[tuple[Gap, ...], ...]:
        """Per rank, every bubble of `step`, by default the typical one, with what the rank waited for.

        With `timeline`, another timeline of the same schedule, the bubbles are from this timeline.
        """
        return gaps(self.schedule(step), self.step_costs(step), timeline or self.timeline(step))


def _require_same_order(wanted: Schedule, ran: Schedule, recognition: Recognition) -> None:
    for rank, (row, other) in enumerate(zip_longest(wanted.rows, ran.rows, fillvalue=())):
        for place, (op, traced) in enumerate(zip_longest(row, other)):
            if op != traced:
                op_in_row, in_trace = op or "nothing more", traced or "nothing more"
                reason = f"rank {rank} of {wanted.name} has {op_in_row} at place {place}, the trace {in_trace}"
                raise InputError("{reason}; of the schedule in the trace: {recognition}", reason=str(reason), recognition=recognition)


class _CostsOfSteps(dict[int | None, tuple[Costs, tuple[int, ...]]]):
    """Costs by step, computed on first use."""

    def __init__(self, run: TracedRun) -> None:
        super().__init__()
        self._run = run

    def __missing__(self, step: int | None) -> tuple[Costs, tuple[int, ...]]:
        timelines = self._run.steps_like(step)
        fitted = self[step] = _costs_of(timelines, _schedule_of(timelines[0]))
        return fitted


def _costs_of(timelines: Sequence[Timeline], schedule: Schedule) -> tuple[Costs, tuple[int, ...]]:
    """The medians over the steps, column by column, and the links of unknown time."""
    fitted = [fit_costs(timeline) for timeline in timelines]
    columns = {
        name: tuple(map(median_low, zip(*(costs.column(name) for costs in fitted), strict=True)))
        for name in (*fitted[0].time_columns, "hidden", "reduce")
    }
    times = [[time for time in link if time is not None] for link in zip(*map(link_times, timelines), strict=True)]
    comm = tuple(median_low(measured) if measured else 0 for measured in times)
    costs = replace(fitted[0], comm=comm, placement=schedule.placement).with_columns(**columns)
    return costs, tuple(link for link, measured in enumerate(times) if not measured)


def _schedule_of(timeline: Timeline) -> Schedule:
    rows = [[tuple(span.op for span in spans) for spans in steps_of(row)] for row in timeline.rows]
    num_microbatches = 1 + max(op.microbatch for row in rows for step in row for op in step)
    return Schedule.of_steps(timeline.name, inferred_placement(rows), num_microbatches, rows)


def _named(timelines: Iterable[Timeline]) -> tuple[Timeline, ...]:
    """Returns the timelines, named after the known schedules that they ran."""
    names: dict[object, str] = {}
    named = []
    for timeline in timelines:
        rows = tuple(tuple(tuple(span.op for span in spans) for spans in steps_of(row)) for row in timeline.rows)
        if rows not in names:
            recognition = recognize(_schedule_of(timeline))
            names[rows] = recognition.name if recognition.exact else timeline.name
        named.append(replace(timeline, name=names[rows]))
    return tuple(named)


def _rows_of(timeline: Timeline) -> tuple[tuple[Op, ...], ...]:
    return tuple(tuple(span.op for span in row) for row in timeline.rows)


@takes(files=each(instance(str, os.PathLike)))
def read_trace(files: Sequence[str | os.PathLike[str]]) -> TracedRun:
    """Read the profiler traces of a run of torch.distributed.pipelining, such as torchtitan's: one file (JSON or .json.gz) a rank.

    Each pass is a range such as `PP:2F0`, which PyTorch's schedules record. On a GPU, a pass lasts from the first to the last kernel
    launched in its range. On the host, it lasts from the end of its wait for a message to the end of its range. If clocks of hosts differ
    so much that a message would be used before it was made, they are shifted: see `TracedRun.clocks`.

        run = zb.io.read_trace(["rank0.json", "rank1.json"])
        print(run.difference())

    Raises `InputError` for a broken file, naming the line or the event, for ranks that are missing, for traces that do not name passes
    (`name_passes` helps), and for steps that are not those of one run.

    Arguments:
        files: the traces, in any order, of all ranks of one pipeline.
    """
    if not files:
        raise InputError("read_trace needs at least one file", remedy="give that of every rank")
    runs = in_order_of_ranks([run_of(read_rank(file)) for file in files])
    clocks = {run.clock for run in runs}
    if len(clocks) > 1:
        raise InputError("some traces have kernels and some do not", remedy="record all ranks with the same activities of the profiler")
    whole = assembled(runs)
    timelines = _named(timeline_of(step, whole, "traced") for step in whole.steps)
    notes = tuple(note for run in runs for note in run.notes)
    return TracedRun(
        tuple(run.trace.file for run in runs), timelines, tuple(step[0].label for step in whole.steps), clocks.pop(), whole.clocks, notes
    )
