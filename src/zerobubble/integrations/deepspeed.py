"""DeepSpeed's pipeline engine with a schedule of ours: `use_schedule(engine, "eager-1f1b")` after `deepspeed.initialize`.

The engine runs the instructions of a `PipeSchedule` one after another. Its sends and receives block until both ranks take part. It keeps
one loss, so the last stage must run each backward right after its forward. It keeps one received gradient, so a message is exchanged
directly before the pass that uses it. All messages of a batch have one order, which every rank follows: both ranks of the next message in
that order have nothing else to wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from zerobubble.errors import InputError
from zerobubble.integrations.versions import needed
from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.planning import Plan
from zerobubble.rules import uses
from zerobubble.runtime.frameworks import schedule_for
from zerobubble.verify import checked

with needed("deepspeed"):
    from deepspeed.runtime.pipe.schedule import (
        BackwardPass,
        ForwardPass,
        LoadMicroBatch,
        OptimizerStep,
        PipeInstruction,
        PipeSchedule,
        RecvActivation,
        RecvGrad,
        ReduceGrads,
        ReduceTiedGrads,
        SendActivation,
        SendGrad,
    )

PASSES = {Kind.F: ForwardPass, Kind.BW: BackwardPass}


class _Message(NamedTuple):
    """An activation that crosses the boundary between stages `boundary` and `boundary + 1`, or a gradient that crosses it back.

    Messages of one tick are exchanged in the order of the first three fields: at even boundaries first, so that pairs of ranks exchange at
    the same time, and gradients before activations, so that the buffer of a gradient is free for the activation.
    """

    is_odd: bool
    boundary: int
    is_activation: bool
    microbatch: int


class PlayedSchedule(PipeSchedule):
    """The instructions of one stage for a schedule with one stage per rank and passes F and BW.

    Step k has the pass in tick k of the schedule, if every pass takes one tick, after the messages that arrive for a pass in this tick. As
    in DeepSpeed's own schedules, all stages have the same number of steps, and could meet between any two of them.

    Args:
        schedule: The schedule.
        stage_id: The stage, which is also its rank in the pipeline.

    Raises:
        InputError: If the engine cannot run the schedule, with all reasons.
        ScheduleError: For a schedule that is not legal.
    """

    def __init__(self, schedule: Schedule, stage_id: int) -> None:
        _refuse(schedule)
        super().__init__(schedule.num_microbatches, schedule.num_stages, stage_id)
        self._ticks = _ticks(schedule)
        self._num_ticks = 1 + max(self._ticks.values())
        self._buffers = self._assigned()

    def num_pipe_buffers(self) -> int:
        """Returns the largest number of microbatches for which the stage holds tensors at a time."""
        return 1 + max(self._buffers.values())

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields the instructions of each step."""
        messages: list[list[_Message]] = [[] for _ in range(self._num_ticks)]
        passes: dict[int, Op] = {}
        for op, tick in self._ticks.items():
            message = _message_for(op, self.stages)
            if message is not None and self.stage_id in (message.boundary, message.boundary + 1):
                messages[tick].append(message)
            if op.stage == self.stage_id:
                passes[tick] = op
        for tick in range(self._num_ticks):
            step = [self._instruction(message) for message in sorted(messages[tick])]
            if tick in passes:
                step += self._pass(passes[tick])
            if tick == self._num_ticks - 1:
                step += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield step

    def _instruction(self, message: _Message) -> PipeInstruction:
        sends = message.is_activation == (message.boundary == self.stage_id)
        kinds = (SendActivation if sends else RecvActivation) if message.is_activation else (SendGrad if sends else RecvGrad)
        return kinds(self._buffers[message.microbatch])

    def _pass(self, op: Op) -> list[PipeInstruction]:
        buffer = self._buffers[op.microbatch]
        loads = op.kind is Kind.F and (self.is_first_stage or self.is_last_stage)
        return [*([LoadMicroBatch(buffer)] if loads else []), PASSES[op.kind](buffer)]

    def _assigned(self) -> dict[int, int]:
        """Returns the buffer of each microbatch: the first that is free when its forward begins."""
        begins = {m: self._ticks[Op(Kind.F, self.stage_id, m)] for m in range(self.micro_batches)}
        buffers: dict[int, int] = {}
        free_from: list[int] = []  # for each buffer, the tick from which it is free
        for microbatch in sorted(begins, key=begins.__getitem__):
            # Before the first stage, the gradient is sent in the tick of the backward that uses it.
            end = self._ticks[Op(Kind.BW, max(self.stage_id - 1, 0), microbatch)]
            buffer = next((place for place, tick in enumerate(free_from) if tick <= begins[microbatch]), len(free_from))
            free_from[buffer : buffer + 1] = [end]
            buffers[microbatch] = buffer
        return buffers


def use_schedule(engine: Any, schedule: str | Schedule | Plan) -> None:
    """Lets `engine.train_batch` play `schedule` instead of DeepSpeed's own 1F1B. Every rank calls it, after `deepspeed.initialize`.

    Args:
        engine: The `PipelineEngine` of a `PipelineModule`.
        schedule: The name of a schedule, which is made for the microbatches of each batch, or a schedule or plan for these.

    Raises:
        InputError: If the engine cannot run the schedule: it has one stage per rank and does not split the backward pass.
    """
    if not hasattr(engine, "_train_schedule"):
        raise InputError(
            "use_schedule takes the PipelineEngine of deepspeed 0.19 or newer, got {got}: give deepspeed.initialize a PipelineModule",
            argument="engine",
            got=type(engine).__name__,
        )

    @cache
    def playing(num_microbatches: int) -> PlayedSchedule:
        return PlayedSchedule(schedule_for(schedule, engine.num_stages, num_microbatches), engine.stage_id)

    playing(engine.micro_batches)  # to refuse a schedule here
    engine._train_schedule = lambda: playing(engine.micro_batches)


def _refuse(schedule: Schedule) -> None:
    """Raises `InputError` if the engine cannot run the schedule."""
    checked(schedule)
    unfit = []
    if schedule.placement.routes != Placement.linear(schedule.num_ranks).routes:
        unfit.append(f"{schedule.placement}: the engine has stage r on rank r")
    kinds = {op.kind for row in schedule.rows for op in row}
    if kinds != set(PASSES):
        unfit.append(f"the passes {', '.join(sorted(map(str, kinds)))}: the engine runs F and BW")
    first, last = ([op.microbatch for op in schedule.rows[rank] if op.kind is Kind.F] for rank in (0, -1))
    if first != last:
        unfit.append("microbatches in another order on the last stage than on the first: both load them in one order")
    kept = schedule.rows[-1]
    if any(forward.microbatch != backward.microbatch for forward, backward in zip(kept[::2], kept[1::2], strict=False)):
        unfit.append("a forward of the last stage without its backward next: the engine keeps one loss")
    if unfit:
        message = "DeepSpeed cannot run {schedule}, which has {found}. Use a schedule such as '1f1b'"
        raise InputError(message, schedule=schedule.name, found="; ".join(unfit))


def _ticks(schedule: Schedule) -> dict[Op, int]:
    """Returns the tick of each pass if every pass takes one tick and messages take no time."""
    graph, order = checked(schedule)
    ticks = [0] * len(graph.ops)
    for number in order:
        before = [*graph.needs[number], *([number - 1] if graph.position(number) else [])]
        ticks[number] = max((ticks[other] + 1 for other in before), default=0)
    return dict(zip(graph.ops, ticks, strict=True))


def _message_for(op: Op, num_stages: int) -> _Message | None:
    """Returns the message that a pass needs; None for the forward of the first stage and the backward of the last."""
    sources = [value.stage for value in uses(op, num_stages) if value.stage != op.stage]
    if not sources:
        return None
    boundary = min(op.stage, *sources)
    return _Message(boundary % 2 == 1, boundary, op.kind is Kind.F, op.microbatch)
