"""One step of each runtime, ours and PyTorch's, behind the same call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from stages import sleep_until, tiny_stage
from torch import Tensor, nn

import zerobubble as zb
from zerobubble.export.torch_csv import to_torch_csv
from zerobubble.ir import Kind, Op
from zerobubble.program import Channel
from zerobubble.runtime.transport import shared_memory
from zerobubble.runtime.transport.ring import RingLane
from zerobubble.runtime.transport.shared_memory import SharedMemoryEndpoint
from zerobubble.runtime.values.shapes import TensorShape

Step = Callable[[Tensor, Tensor], None]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def pipeline(build: Callable[[], nn.Module], schedule: zb.Schedule, shared: bool = True) -> zb.Pipeline:
    """Ours. Without `shared`, messages go over gloo though the ranks share a machine."""
    transport = "auto" if shared else "gloo"
    return zb.Pipeline(lambda stage, num_stages: build(), schedule, schedule.num_microbatches, mean_square, transport=transport)


def ours(pipe: zb.Pipeline) -> tuple[Step, Callable[[], None]]:
    """zerobubble: (step, close)."""

    def step(inputs: Tensor, targets: Tensor) -> None:
        pipe.step(inputs, targets)

    return step, pipe.close


def delay_messages(seconds: Callable[[Channel], float]) -> None:
    """From here on, what comes through shared memory is there so many `seconds` later than it was sent; nobody else waits for it."""
    sender, receiver, room = RingLane.sender, RingLane.receiver, shared_memory.message_bytes
    made, channels = SharedMemoryEndpoint.message_lane, dict[int, Channel]()
    stamp = (TensorShape((1,), torch.float64, differentiable=False),)

    def making(endpoint: Any, channel: Channel, *given: Any) -> Any:
        lane = made(endpoint, channel, *given)
        channels[id(lane)] = channel
        return lane

    def stamping(lane: RingLane, shapes: Any) -> Any:
        put = sender(lane, shapes + stamp)
        return lambda tensors: put((*tensors, torch.tensor([time.perf_counter()], dtype=torch.float64)))

    def waiting(lane: RingLane, shapes: Any, *, differentiable: bool) -> Any:
        take, channel = receiver(lane, shapes + stamp, differentiable=differentiable), channels[id(lane)]

        def later() -> Any:
            *tensors, sent = take()
            sleep_until(sent.item() + seconds(channel))
            return tuple(tensors)

        return later

    SharedMemoryEndpoint.message_lane = making  # type: ignore[method-assign]
    RingLane.sender, RingLane.receiver = stamping, waiting  # type: ignore[method-assign]
    shared_memory.message_bytes = lambda shapes: room(shapes + stamp)  # type: ignore[assignment]


def pytorch(
    build: Callable[[], nn.Module], schedule: zb.Schedule, device: str = "cpu", loss_fn: Callable[[Tensor, Tensor], Tensor] = mean_square
) -> tuple[Step, Callable[[], None]]:
    """torch.distributed.pipelining running the same order, from its own class where it has one, else from our CSV."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    rank, microbatches = dist.get_rank(), schedule.num_microbatches
    stages = [PipelineStage(build(), s, schedule.num_stages, torch.device(device)) for _, s in schedule.placement.stages(rank)]
    engine: Any
    if schedule.name == "1f1b":
        engine = Schedule1F1B(stages[0], microbatches, loss_fn=loss_fn)
    else:
        engine = _PipelineScheduleRuntime(stages, microbatches, loss_fn=loss_fn)
        engine._prepare_schedule_with_comms(_actions(schedule))
    first, last = rank == schedule.placement.routes[0][0], rank == schedule.placement.routes[0][-1]

    def step(inputs: Tensor, targets: Tensor) -> None:
        losses: list[Tensor] | None = [] if last else None
        engine.step(*([inputs] if first else []), target=targets if last else None, losses=losses)

    return step, lambda: None


def _actions(schedule: zb.Schedule) -> dict[int, list[Any]]:
    from torch.distributed.pipelining.schedules import _Action

    rows = to_torch_csv(schedule).splitlines()
    return {rank: [_Action.from_str(cell) for cell in row.split(",")] for rank, row in enumerate(rows)}


def messages(schedule: zb.Schedule) -> tuple[Step, Callable[[], None]]:
    """The floor of messages: the same program with no passes at all."""
    payload = torch.zeros(1, 16)
    return _loop(schedule, lambda op, given, inputs, targets: payload)


def sleeping(schedule: zb.Schedule, seconds: float, latency: float) -> tuple[Step, Callable[[], None]]:
    """The ceiling of efficiency on this machine: the same program, each pass nothing but a sleep, messages as late as ours."""
    payload = torch.zeros(1, 16)

    def work(op: Op, given: Tensor | None, inputs: list[Tensor], targets: list[Tensor]) -> Tensor:
        sleep_until(time.perf_counter() + (2 if op.kind is Kind.BW else 1) * seconds)
        return payload

    return _loop(schedule, work, latency)


def bare(schedule: zb.Schedule) -> tuple[Step, Callable[[], None]]:
    """The floor of a step: the same program, each pass of a Linear written out by hand, and no machinery around them.

    F calls the module, the last stage its loss, too; BW is autograd's backward; a split B and W are a matrix product each.
    """
    microbatches = schedule.num_microbatches
    linears = {stage: tiny_stage() for _, stage in schedule.placement.stages(dist.get_rank())}
    kept: dict[tuple[int, int], Any] = {}

    def work(op: Op, given: Tensor | None, inputs: list[Tensor], targets: list[Tensor]) -> Tensor | None:
        linear, place = linears[op.stage], (op.stage, op.microbatch)
        if op.kind is Kind.F:
            x = inputs[op.microbatch] if given is None else given.detach().requires_grad_()
            y = linear(x)
            if op.stage == schedule.num_stages - 1:
                y = mean_square(y, targets[op.microbatch]) / microbatches
            kept[place] = (x, y)
            return y.detach()
        if op.kind is Kind.W:
            x, dy = kept.pop(place)
            _add(linear.weight, dy.t().mm(x))
            return None
        x, y = kept.pop(place)
        if op.kind is Kind.BW:
            y.backward(given)
            return x.grad
        if op.stage == schedule.num_stages - 1:
            given = 2 * (linear(x) - targets[op.microbatch]) / (y.numel() * microbatches)
        assert given is not None
        kept[place] = (x, given)
        _add(linear.bias, given.sum(0))
        return given.mm(linear.weight) if op.stage else None

    return _loop(schedule, torch.no_grad()(work) if schedule.split_stages else work)


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def _loop(schedule: zb.Schedule, work: Callable[..., Any], latency: float = 0.0) -> tuple[Step, Callable[[], None]]:
    """The program of a schedule over plain gloo messages, its passes done by `work(op, what came, inputs, targets)`.

    With a `latency`, messages begin with the time when they were sent, and are there so many seconds later.
    """
    from zerobubble.program import Compute, Recv, Send
    from zerobubble.rules import SENT_BETWEEN_STAGES, makes, uses
    from zerobubble.runtime.transport.choice import transport_for
    from zerobubble.runtime.transport.mesh import layout_of_group
    from zerobubble.runtime.transport.peers import Peers

    program = zb.lower(schedule)
    transport = transport_for("gloo", layout_of_group(None), 60.0)
    transport.connect()
    transport.open(torch.device("cpu"), [])
    peers = Peers(transport)
    actions = []
    for action in program.rows[transport.rank]:
        if isinstance(action, (Recv, Send)):
            start = (peers.receiver if isinstance(action, Recv) else peers.sender)(action.value.value_kind, action.peer)
            actions.append((action, start, None))
        elif isinstance(action, Compute):
            (op,) = action.step
            taken = next((value for value in uses(op, program.num_stages) if value.value_kind in SENT_BETWEEN_STAGES), None)
            made = next((value for value in makes(op, program.num_stages, False) if value.value_kind in SENT_BETWEEN_STAGES), None)
            actions.append((action, taken, made))

    def step(inputs: Tensor, targets: Tensor) -> None:
        parts, aims = inputs.split(1), targets.split(1)
        arriving: dict[Any, Any] = {}
        values: dict[Any, Any] = {}
        leaving = []
        for action, first, second in actions:
            if isinstance(action, Recv):
                buffer = torch.empty(1, 16)
                arriving[action.value] = (first(buffer), buffer)
            elif isinstance(action, Send):
                message = values.pop(action.value)
                if latency:
                    message = message.clone()
                    message.view(torch.float64)[0, 0] = time.perf_counter()
                leaving.append(first(message))
            else:
                given = values.pop(first, None)
                if first in arriving:
                    coming, given = arriving.pop(first)
                    coming.wait()
                    if latency:
                        sleep_until(given.view(torch.float64)[0, 0].item() + latency)
                left = work(action.step[0], given, parts, aims)
                if second is not None:
                    values[second] = left
        for work_left in leaving:
            work_left.wait()

    return step, transport.close
