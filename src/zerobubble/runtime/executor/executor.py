"""Runs one rank's row of a program: the only loop in the package that computes.

Order. The executor performs the actions of its row in order, and a pass waits only for its own inputs. It never decides what runs next.
Compilation proves that rows cannot deadlock, and that every value is made before it is used.

Lifetime. A value is removed when its only user takes it, or by its last user or release if several passes use it or it is also sent. What
was sent belongs to the mailbox until the program releases it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

from zerobubble.errors import InputError
from zerobubble.ir import Kind, Op, Step
from zerobubble.kinds import SENT_BETWEEN_STAGES, Collective, ValueKind, traits_of
from zerobubble.lowering.rollback import RollbackPoint
from zerobubble.program import Action, Compute, Program, Recv, Send
from zerobubble.rules import Value
from zerobubble.runtime.executor.batch import Batch
from zerobubble.runtime.executor.gradient_completion import GradientCompletion, RowListener
from zerobubble.runtime.executor.offloading import Offloading, Offloads
from zerobubble.runtime.executor.overrides import Overlap, Overlapped, Pace
from zerobubble.runtime.executor.row_calls import Call
from zerobubble.runtime.executor.runs import Task, run_of
from zerobubble.runtime.executor.weight_gathers import WeightGathers
from zerobubble.runtime.mailbox.handshake import StepHandshake
from zerobubble.runtime.mailbox.mailbox import Mailbox
from zerobubble.runtime.measure.clock import Instant, clock_for
from zerobubble.runtime.measure.memory_meter import Meter
from zerobubble.runtime.measure.trace import RawRecords, Records
from zerobubble.runtime.stage.slice_proof import prove_slices
from zerobubble.runtime.stage.slices import StageSlices
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.values.payload import Cotangents, Payload, Tensors, with_keywords
from zerobubble.timeline import Doing

GATHERED = frozenset(collective.value_kind for collective in Collective)
Named = TypeVar("Named", Op, Value)


class _Pass(NamedTuple):
    """A pass that is ready to run: `take` waits for its inputs, `work` computes it."""

    op: Op
    take: Callable[[], Any]
    work: Callable[[Any], object]


class Executor:
    """Plays `program.rows[peers.rank]` on `stages`, this rank's stages by index. Every action becomes a call when it is created.

    After `run`, `records` has the times of the passes. If `recording`, it also has the times of sends and waits; with a `meter`, the bytes
    held. `records` and `place` name microbatches, which `order` maps from the places of the program. While a step runs, `at` is the
    position of the current action, for error reports.

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
        self.meter: Meter | None = None
        self._spans: list[tuple[Op, Instant, Instant]] = []
        self._held: list[tuple[Instant, int]] = []
        self._clock = clock_for(peers.device)
        self._stages = stages
        steps = [action.step for action in self.row if isinstance(action, Compute)]
        self.gathers = WeightGathers(steps, stages, gathered_bytes, f"rank {peers.members[peers.rank]}")
        mine, link = ((), None) if offloads is None else (offloads.ranks[peers.rank].offloads, offloads.link)
        self._offloading = Offloading(mine, link, stages, peers.device, self._note_memory)
        self._listener = listener
        self._completion = GradientCompletion(self.row, stages, self.gathers, listener, self.record_reduction)
        self._training = not program.is_forward_only
        self._slices = _slices_of(program, stages, self._training) if program.slices > 1 else {}
        for kind in program.kinds:  # of all rows: every rank refuses a missing kind, and none begins a step that another refuses
            run_of(kind)
        for recompute_kind in {*program.recomputed.values()}:
            run_of(Kind.F, recompute_kind)
        self._pace = pace
        self._mailbox = Mailbox(program, peers)
        self._messages_carry_gradients = peers.capabilities.carries_whole_messages
        self._received = {action.value for action in self.row if isinstance(action, Recv)}
        self._sent = {action.value for action in self.row if isinstance(action, Send)}
        self._last_users = {value: op for step in steps for op in step for value in program.uses((op,)) if value.value_kind in GATHERED}
        self._values: dict[Value, Any] = {}
        self._kept: dict[tuple[int, int], dict[ValueKind, Any]] = {}
        self._batch: Batch | None = None
        self.order: Sequence[int] = range(program.num_microbatches)
        self._messages: list[tuple[Doing, Value, Instant, Instant]] = []
        self._optimizer: list[tuple[Instant, Instant]] = []
        self._reductions: list[tuple[int, Instant, Instant]] = []
        self._recording = False
        self.recording = True

    @property
    def recording(self) -> bool:
        """Whether messages are timed."""
        return self._recording

    @recording.setter
    def recording(self, value: bool) -> None:
        if value is not self._recording:
            self._recording = value
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
        self._optimizer = []
        self.gathers.begin(trains=self._training)
        self._completion.begin()
        self._reductions = []
        self._clock.start()
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
        self._batch = None

    def _begin(self, batch: Batch) -> None:
        self._batch = batch
        self.order = batch.order
        self._spans = []
        self._held = []
        self._messages = []
        self._offloading.begin()
        self._mailbox.begin(batch.known, batch.announced)

    def _play(self, start: int, end: int) -> None:
        for position, call in enumerate(self._calls[start:end], start):
            self.at = position
            call()

    @property
    def trained(self) -> tuple[bool, ...]:
        """The parameters of this rank's stages that require a gradient; empty if messages themselves carry this information."""
        if self._messages_carry_gradients or not self._training:
            return ()
        return tuple([parameter.requires_grad for stage in self._stages.values() for parameter in stage.parameters])

    @property
    def has_run(self) -> bool:
        """Whether a pass of this rank has run."""
        return bool(self._spans)

    @property
    def records(self) -> Records:
        """The records of the last step, in host time."""
        return self.later_records()()

    def later_records(self) -> Callable[[], Records]:
        """Returns a function that returns `records` of the last step, even during later steps."""
        noted = self._messages, tuple(self._optimizer), tuple(self._reductions), self._offloading.records
        read = partial(RawRecords(self.order, self._spans, self._held, *noted).read, self._clock)
        if self._clock.instants_last:
            return read
        records = read()
        return lambda: records

    def settle(self) -> None:
        """Waits until the device has finished its work."""
        self._clock.settle()

    @contextmanager
    def recording_optimizer(self) -> Iterator[None]:
        """Records when the code inside began and ended."""
        self._clock.follow()
        begin = self._clock.mark()
        yield
        self._optimizer.append((begin, self._clock.mark()))

    def record_reduction(self, stage: int, began: Instant, ended: Instant) -> None:
        """Records when gradients of a stage were summed over replicas."""
        self._reductions.append((stage, began, ended))

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
        return named._replace(microbatch=self.order[named.microbatch])

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
        self._values.clear()
        for kept in self._kept.values():
            kept.clear()
        self._batch = None
        for stage in self._stages.values():
            stage.clear()
        for slices in self._slices.values():
            slices.clear()

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
            passes = [self._compile_pass(op) for op in action.step]
            return self._single_pass(passes[0]) if len(passes) == 1 else self._overlapped_passes(passes)
        if isinstance(action, Recv):
            return partial(self._mailbox.post, action.value, action.peer)
        if isinstance(action, Send):
            return self._timed(Doing.SEND, action.value, partial(self._send, action.value, action.peer))
        return partial(self._release, action.value)

    def _single_pass(self, single: _Pass) -> Call:
        op, take, work = single
        step = (op,)
        mark = self._clock.mark
        is_paced = self._pace is not None

        def run() -> None:
            taken = take()
            begin = mark()
            work(taken)
            if is_paced or self.meter is not None:
                self._finish_step(step, begin)
            else:
                self._spans.append((op, begin, mark()))

        return run

    def _overlapped_passes(self, passes: list[_Pass]) -> Call:
        step = tuple(single.op for single in passes)

        def run() -> None:
            taken = [single.take() for single in passes]
            begin = self._clock.mark()
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

    def _run_overlapped(self, single: _Pass, inputs: Any) -> None:
        """Runs one pass of an overlapped step. Both hold memory at the same time, so each is metered."""
        single.work(inputs)
        self._note_memory()

    def _compile_pass(self, op: Op) -> _Pass:
        compiled = self._compile_whole_pass(op)
        return compiled._replace(work=self._slices[op.stage].wrap(op, compiled.work)) if self._slices else compiled

    def _compile_whole_pass(self, op: Op) -> _Pass:
        traits = traits_of(op.kind)
        if traits.gathers:
            return self._compile_part(op)
        if ValueKind.ACTIVATION in traits.makes:
            return self._compile_forward(op)
        if any(value_kind is ValueKind.GRADIENT for value_kind, _ in traits.uses):
            return self._compile_backward(op)
        return self._compile_local(op)

    def _timed(self, doing: Doing, value: Value, call: Callable[[], Any]) -> Callable[[], Any]:
        """Returns `call`, with its beginning and end recorded if messages are timed."""
        if not self._recording:
            return call
        mark = self._clock.mark

        def timed() -> Any:
            begin = mark()
            result = call()
            self._messages.append((doing, value, begin, mark()))
            return result

        return timed

    def _take_call(self, source: Value, take: Callable[[Value], Any]) -> Callable[[], Any]:
        """Returns the call that takes `source`, timed if it is a message."""
        taking = partial(take, source)
        return self._timed(Doing.WAIT, source, taking) if source in self._received else taking

    def _compile_forward(self, op: Op) -> _Pass:
        stage, microbatch = self._stages[op.stage], op.microbatch
        task = Task(stage, microbatch, self._kept_for(op))
        source, target = self._ends(op)
        to_head = self._head_values(op)
        run = run_of(op.kind, self.program.recomputed.get(op[1:]))
        received = None if source is None else self._take_call(source, self._inputs)

        def take() -> Tensors:
            assert self._batch is not None
            inputs = self._batch.inputs[self.order[microbatch]] if received is None else received()
            named = self._batch.named_arguments
            return with_keywords(inputs, named[op.stage][self.order[microbatch]]) if op.stage in named else inputs

        def train(inputs: Tensors) -> None:
            assert self._batch is not None
            self._batch.seed_pass(op.stage, self.order[microbatch], False)
            task.inputs = inputs
            if target is None and not to_head:
                task.finish = partial(self._batch.finish, self.order[microbatch])
                self._batch.arrive(stage, inputs)
            try:
                outputs = run(task)
            finally:
                task.finish = None
                task.inputs = ()
            if target is not None:
                self._values[target] = outputs
            for value in to_head:
                assert self._batch.divided_loss is not None
                self._values[value] = self._batch.divided_loss.head_inputs(self.order[microbatch], outputs)

        def infer(inputs: Tensors) -> None:
            assert self._batch is not None
            self._batch.seed_pass(op.stage, self.order[microbatch], False)
            outputs = stage.infer(inputs, partial(self._batch.finish, self.order[microbatch]) if target is None else None)
            if target is not None:
                self._values[target] = outputs

        return _Pass(op, take, train if self._training else infer)

    def _compile_backward(self, op: Op) -> _Pass:
        task = Task(self._stages[op.stage], op.microbatch, self._kept_for(op))
        source, target = self._ends(op)
        run = run_of(op.kind)

        def seed() -> Cotangents:
            assert self._batch is not None
            return (self._batch.seed(self.order[op.microbatch]),)

        def work(gradients: Cotangents) -> None:
            assert self._batch is not None
            self._batch.seed_pass(op.stage, self.order[op.microbatch], True)
            task.inputs = gradients
            try:
                outputs = run(task)
            finally:
                task.inputs = ()
            if target is not None:
                self._values[target] = outputs

        def work_on_parts(parts: Sequence[Tensors]) -> None:
            assert self._batch is not None
            assert self._batch.divided_loss is not None
            work(self._batch.divided_loss.output_gradient(self.order[op.microbatch], parts))

        if any(value.value_kind in GATHERED for value in self.program.uses((op,))):
            return _Pass(op, self._collect_call(op), work_on_parts)
        return _Pass(op, seed if source is None else self._take_call(source, self._take), work)

    def _compile_part(self, op: Op) -> _Pass:
        """Compiles a pass of a divided head."""
        parts = self.program.head_parts
        task = Task(self._stages[op.stage], op.microbatch, self._kept_for(op), parts.index(op.stage))
        run, targets, take = run_of(op.kind), self._head_values(op), self._collect_call(op)

        def work(gathered: Sequence[Tensors]) -> None:
            task.inputs = gathered
            try:
                given = run(task)
            finally:
                task.inputs = ()
            for value in targets:
                self._values[value] = given[value.value_kind]

        return _Pass(op, take, work)

    def _compile_local(self, op: Op) -> _Pass:
        """Compiles a pass that waits for no other stage, such as W."""
        task = Task(self._stages[op.stage], op.microbatch, self._kept_for(op))
        run = run_of(op.kind)
        return _Pass(op, tuple, lambda _: run(task))

    def _kept_for(self, op: Op) -> dict[ValueKind, Any]:
        return self._kept.setdefault((op.stage, op.microbatch), {})

    def _ends(self, op: Op) -> tuple[Value | None, Value | None]:
        """Returns the value that a pass takes from its neighbor and the one it makes for the next; None at the ends of the model."""
        taken, left = self.program.uses((op,)), self.program.makes((op,))
        received = next((value for value in taken if value.value_kind in SENT_BETWEEN_STAGES), None)
        return received, next((value for value in left if value.value_kind in SENT_BETWEEN_STAGES), None)

    def _head_values(self, op: Op) -> list[Value]:
        """Returns the values that a pass makes for collectives of a divided head."""
        return [value for value in self.program.makes((op,)) if value.value_kind in GATHERED]

    def _collect_call(self, op: Op) -> Callable[[], list[Tensors]]:
        """Returns the call that collects all parts that a pass gathers, in their order."""
        takes = [
            self._take_call(value, partial(self._read_shared, op)) for value in self.program.uses((op,)) if value.value_kind in GATHERED
        ]
        return lambda: [take() for take in takes]

    def _read_shared(self, op: Op, value: Value) -> Tensors:
        """Returns a value that several passes of this rank may use and others may be sent; its last user removes it, or the release."""
        if value in self._received and value not in self._values:
            self._values[value] = self._mailbox.take(value)
        tensors: Tensors = self._values[value]
        if self._last_users[value] == op and value not in self._sent:
            del self._values[value]
        return tensors

    def _take(self, source: Value) -> Any:
        return self._mailbox.take(source) if source in self._received else self._values.pop(source)

    def _inputs(self, source: Value) -> Tensors:
        tensors: Tensors = self._take(source)
        if source in self._received:
            return tensors
        apart = tuple(t.detach().requires_grad_(t.requires_grad) for t in tensors)
        return tensors.with_tensors(apart) if isinstance(tensors, Payload) else apart

    def _finish_step(self, step: Step, begin: Instant) -> None:
        if self._pace is not None:
            self._pace.hold(tuple(map(self._in_data_order, step)), begin)
        end = self._clock.mark()
        for op in step:
            self._spans.append((op, begin, end))
        if self.meter is not None:
            self._held.append((end, self.meter.bytes))

    def _note_memory(self) -> None:
        """Records the bytes held between two passes, if they are metered."""
        if self.meter is not None:
            self._held.append((self._clock.mark(), self.meter.bytes))

    def _send(self, value: Value, peer: int) -> None:
        self._mailbox.send(value, peer, self._values[value] if value.value_kind in GATHERED else self._values.pop(value))

    def _release(self, value: Value) -> None:
        self._values.pop(value, None)
        self._mailbox.release(value)


def _slices_of(program: Program, stages: Mapping[int, Stage], trains: bool) -> dict[int, StageSlices]:
    """Returns what slices leave to later ones, by stage."""
    last = program.num_stages - 1
    return {
        index: StageSlices(index, program.slices, trains, partial(prove_slices, stage, index == last)) for index, stage in stages.items()
    }
