"""Runs one rank's row of a program: the only loop in the package that computes.

Order. The executor performs the actions of its row in order, and a pass waits only for its own inputs. It never decides what runs next.
Compilation proves that rows cannot deadlock, and that every value is made before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, TypeVar

from zerobubble.errors import InputError
from zerobubble.ir import Op, Step
from zerobubble.lowering.rollback import RollbackPoint
from zerobubble.program import Action, Compute, Program, Recv, Send
from zerobubble.rules import Value
from zerobubble.runtime.executor.batch import Batch
from zerobubble.runtime.executor.gradient_completion import GradientCompletion, RowListener
from zerobubble.runtime.executor.offloading import Offloading, Offloads
from zerobubble.runtime.executor.overrides import Overlap, Overlapped, Pace
from zerobubble.runtime.executor.row_calls import Call
from zerobubble.runtime.executor.row_passes import Pass, RowPasses
from zerobubble.runtime.executor.row_values import RowValues
from zerobubble.runtime.executor.weight_gathers import WeightGathers
from zerobubble.runtime.mailbox.handshake import StepHandshake
from zerobubble.runtime.mailbox.mailbox import Mailbox
from zerobubble.runtime.measure.clock import Instant
from zerobubble.runtime.measure.step_records import StepRecords
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.transport.peers import Peers
from zerobubble.timeline import Doing

Named = TypeVar("Named", Op, Value)


class Executor:
    """Plays `program.rows[peers.rank]` on `stages`, this rank's stages by index. Every action becomes a call when it is created.

    After `run`, `records` has the times of the passes. If `recording`, it also has the times of sends and waits. `place` names microbatches
    by the order of the step. While a step runs, `at` is the position of the current action, for error reports.

    Args:
        pace: Stretches passes in a rehearsal.
        overlap: Runs the two passes of an overlapped step, which are measured as one; by default one after the other.
        rollback: The point at which the row can start over; None if it cannot.
        listener: Is called before each step of the row, and when gradients are complete.
        gathered_bytes: The memory for gathered weights of sharded stages; None to gather each stage once.
    """

    def __init__(
        self,
        program: Program,
        stages: dict[int, Stage],
        peers: Peers,
        handshake: StepHandshake,
        pace: Pace | None,
        overlap: Overlap | None = None,
        rollback: RollbackPoint | None = None,
        listener: RowListener | None = None,
        gathered_bytes: int | None = None,
        offloads: Offloads | None = None,
    ) -> None:
        self.program = program
        self.handshake = handshake
        self.overlap = overlap
        self.row = program.rows[peers.rank]
        self.at = 0
        self.rollback = rollback
        self.records = StepRecords(peers.device, program.num_microbatches)
        self._stages = stages
        steps = [action.step for action in self.row if isinstance(action, Compute)]
        self.gathers = WeightGathers(steps, stages, gathered_bytes, f"rank {peers.members[peers.rank]}")
        mine, link = ((), None) if offloads is None else (offloads.ranks[peers.rank].offloads, offloads.link)
        self._offloading = Offloading(mine, link, stages, peers.device, self.records)
        self._listener = listener
        self._completion = GradientCompletion(self.row, stages, self.gathers, listener, self.records.note_reduction)
        self._pace = pace
        self._mailbox = Mailbox(program, peers)
        self._values = RowValues(program, peers.rank, self._mailbox, self.records)
        self._passes = RowPasses(program, stages, self._values)
        self._messages_carry_gradients = peers.capabilities.carries_whole_messages
        self.recording = True

    @property
    def recording(self) -> bool:
        """Whether messages are timed."""
        return self.records.times_messages

    @recording.setter
    def recording(self, value: bool) -> None:
        if value is not self.records.times_messages:
            self.records.times_messages = value
            self._calls = [self._compile(action) for action in self.row]
            computes = [position for position, action in enumerate(self.row) if isinstance(action, Compute)]
            for number, position in enumerate(computes):
                call = self._offloading.calls.wrap(number, self._calls[position])
                self._calls[position] = self.gathers.calls.wrap(number, self._with_notice(number, call))
            self._calls = [self._completion.calls.wrap(position, call) for position, call in enumerate(self._calls)]

    def run(self, batch: Batch, goes_on: Callable[[], bool] | None = None) -> None:
        """Plays the row once. Raises what a pass raises, and `LostContactError` if a message cannot be exchanged.

        `goes_on` needs a rollback point and is called there. If it returns False, which it must do on all ranks alike, the results of
        earlier passes are dropped and the row starts over.
        """
        self.gathers.begin(trains=not self.program.is_forward_only)
        self._completion.begin()
        self.records.begin()
        self._begin(batch)
        if goes_on is None:
            self._play(0, len(self.row))
        else:
            assert self.rollback is not None
            self._play(0, self.rollback.position)
            if not goes_on():  # messages of the forwards are in flight, and would be taken for those of the second try
                self._mailbox.drain(self.rollback.coming)
                self.gathers.discard()
                self._forget()
                self._begin(batch)
                self._play(0, self.rollback.position)
            self._play(self.rollback.position, len(self.row))
        self.at = len(self.row)
        self._completion.finish()
        self._passes.batch = None

    def _begin(self, batch: Batch) -> None:
        self._passes.batch = batch
        self.records.restart(batch.order)
        self._offloading.begin()
        self._mailbox.begin(batch.known, batch.announced)

    def _play(self, start: int, end: int) -> None:
        for position, call in enumerate(self._calls[start:end], start):
            self.at = position
            call()

    @property
    def trained(self) -> tuple[bool, ...]:
        """The parameters of this rank's stages that require a gradient; empty if messages themselves carry this information."""
        if self._messages_carry_gradients or self.program.is_forward_only:
            return ()
        return tuple([parameter.requires_grad for stage in self._stages.values() for parameter in stage.parameters])

    @property
    def place(self) -> tuple[str, str]:
        """A description of the executor's position in its row, and the current action."""
        if not 0 <= self.at < len(self.row):
            return "before its first pass" if self.at < 0 else "after its last pass", ""
        action = self.row[self.at]
        if isinstance(action, Compute):
            run = Compute(tuple(map(self._in_data_order, action.step)))
            return f"at '{run}' ({run.in_words})", str(run)
        action = action._replace(value=self._in_data_order(action.value))
        return f"at '{action}'", str(action)

    def _in_data_order(self, named: Named) -> Named:
        """Returns a pass or a value of the program with the number of the microbatch at its place."""
        return named._replace(microbatch=self.records.order[named.microbatch])

    @cached_property
    def ends(self) -> tuple[list[int], list[int]]:
        """For each microbatch, the rank where it enters the model and the rank that computes its loss."""
        routes = self.program.placement.routes
        taken = [routes[k] for k in self.program.microbatch_routes or (0,) * self.program.num_microbatches]
        return [route[0] for route in taken], [route[-1] for route in taken]

    def close(self) -> None:
        """Frees everything held for steps, even if it is in flight: there are no more steps. The last records stay."""
        self.handshake.clear()
        self._mailbox.close()
        self.gathers.close()
        self._forget()
        self._calls = []

    def _forget(self) -> None:
        """Drops the results of passes."""
        self._offloading.discard()
        self._passes.discard()

    def _with_notice(self, number: int, call: Call) -> Call:
        """Returns the call of step `number` of the row, with a call of the listener before it."""
        if self._listener is None:
            return call
        notify = self._listener.before_step_of_row

        def with_notice() -> None:
            notify(number)
            call()

        return with_notice

    def _compile(self, action: Action) -> Call:
        if isinstance(action, Compute):
            passes = [self._passes.compile(op) for op in action.step]
            return self._single_pass(passes[0]) if len(passes) == 1 else self._overlapped_passes(passes)
        if isinstance(action, Recv):
            return partial(self._mailbox.post, action.value, action.peer)
        if isinstance(action, Send):
            return self.records.timed(Doing.SEND, action.value, partial(self._values.send, action.value, action.peer))
        return partial(self._values.release, action.value)

    def _single_pass(self, single: Pass) -> Call:
        op, take, work = single
        step = (op,)
        records, mark = self.records, self.records.clock.mark
        is_paced = self._pace is not None

        def run() -> None:
            taken = take()
            begin = mark()
            work(taken)
            if is_paced or records.meter is not None:
                self._finish_step(step, begin)
            else:
                records.spans.append((op, begin, mark()))

        return run

    def _overlapped_passes(self, passes: list[Pass]) -> Call:
        step = tuple(single.op for single in passes)

        def run() -> None:
            taken = [single.take() for single in passes]
            begin = self.records.clock.mark()
            if self.overlap is None:
                for single, inputs in zip(passes, taken, strict=True):
                    self._run_overlapped(single, inputs)
            else:
                overlapped = [
                    Overlapped(s.op, self._stages[s.op.stage].module, partial(self._run_overlapped, s, i))
                    for s, i in zip(passes, taken, strict=True)
                ]
                self.overlap(*overlapped)
                left = [str(half.op) for half in overlapped if not half.is_done]
                if left:
                    raise InputError("the overlap function must run both passes of a step; it left {left}", left=" and ".join(left))
            self._finish_step(step, begin)

        return run

    def _run_overlapped(self, single: Pass, inputs: Any) -> None:
        """Runs one pass of an overlapped step. Both hold memory at the same time, so each is metered."""
        single.work(inputs)
        self.records.note_memory()

    def _finish_step(self, step: Step, begin: Instant) -> None:
        if self._pace is not None:
            self._pace.hold(tuple(map(self._in_data_order, step)), begin)
        end = self.records.clock.mark()
        self.records.spans += [(op, begin, end) for op in step]
        self.records.note_memory(end)
