"""Stages replayed as CUDA graphs: the parts that need no device, with equally static memory.

Replayed passes give the results of autograd, for every kind of module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from benchmarks.split_matrix.kinds import KINDS
from benchmarks.split_matrix.ways import Ours, Plain, Tensors, difference, train
from tests.device import cpu_only
from tests.procs.models import batch, build, loss_fn, one_device
from tests.procs.ranks import Ranks
from tests.procs.test_graph_split import REFUSED, ROUNDED
from tests.refusals import raises, states
from tests.thinned import every
from zerobubble.runtime.split.compiled import capture
from zerobubble.runtime.stage import rank_stages
from zerobubble.runtime.stage.levels import RecomputeLevels
from zerobubble.runtime.stage.stage import make_stage
from zerobubble.runtime.values.gradients import IN_GRAD

pytestmark = pytest.mark.in_process

replays = 0


def record(part: capture.Part, inputs: Sequence[Any], pool: Any) -> tuple[Any, Callable[[], object], Sequence[Any]]:
    """Emulates a CUDA graph: it reads inputs and writes results at fixed addresses, and capturing leaves no values."""
    state = torch.get_rng_state()
    outputs = list(part(list(inputs)))
    torch.set_rng_state(state)
    lent = {tensor.untyped_storage().data_ptr() for tensor in inputs if isinstance(tensor, Tensor)}
    own = {i: t for i, t in enumerate(outputs) if isinstance(t, Tensor) and t.layout is torch.strided}
    own = {i: t for i, t in own.items() if t.untyped_storage().data_ptr() not in lent}
    for tensor in own.values():
        spoil(tensor)

    def replay() -> None:
        global replays
        replays += 1
        fresh = part(list(inputs))
        for i, tensor in own.items():
            with torch.autograd._unsafe_preserve_version_counter(tensor):
                capture.copy_into(tensor, fresh[i])

    return object(), replay, outputs


def spoil(tensor: Tensor) -> None:
    """Overwrites all values, hidden from autograd."""
    with torch.autograd._unsafe_preserve_version_counter(tensor):
        capture.copy_into(tensor, torch.full_like(tensor, float("nan") if tensor.is_floating_point() else 1))


def leave_nothing(slots: capture.CaptureSlots, microbatch: int) -> None:
    """No one may read a slot after its last pass."""
    with torch.no_grad():
        for recording in slots._of_microbatch[microbatch].recordings.values():
            for place in recording.copied_in:
                spoil(recording.inputs[place])
    leave(slots, microbatch)


leave = capture.CaptureSlots.leave


@contextmanager
def static_memory(warm_up: int) -> Iterator[None]:
    """CUDA graphs on a CPU."""
    with (
        mock.patch.object(capture, "record", record),
        mock.patch.object(capture, "_WARM_UP", warm_up),
        mock.patch.object(capture.CaptureSlots, "leave", leave_nothing),
    ):
        yield


class OfOneMicrobatch:
    """A part that is called once per microbatch, and how often it was captured."""

    def __init__(self, num_returned: int = 1) -> None:
        self.weight = torch.full((3,), 2.0)
        self.slots = capture.CaptureSlots()
        self.captured = 0
        self.part = capture.CapturedPart(self.run, self.slots, num_returned, lambda: [self.weight])

    def run(self, tensors: list[Any]) -> list[Any]:
        x, weight, number = tensors
        tensors.clear()
        return [x * weight + number, None, x - number]

    def __call__(self, x: Tensor, number: int = 1) -> Sequence[Any]:
        def counting(*args: Any) -> Any:
            self.captured += 1
            return record(*args)

        self.slots.enter(0)
        try:
            with mock.patch.object(capture, "record", counting):
                return self.part([x, self.weight, number])
        finally:
            self.slots.leave(0)


def test_a_part_is_captured_after_two_eager_calls_and_when_its_inputs_change() -> None:
    part = OfOneMicrobatch()
    captured = []
    plain, turned = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2).t()
    for x, number, is_replaced in [
        *((plain + step, 1, False) for step in range(4)),
        (plain, 2, False),
        (plain[:1], 2, False),
        (turned, 2, False),
        (turned, 2, False),
        (turned, 2, True),
    ]:
        if is_replaced:
            part.weight = torch.full((3,), 5.0)
        y, nothing, z = part(x, number)
        assert torch.equal(y, x * part.weight + number)
        assert nothing is None
        assert torch.equal(z, x - number)
        captured.append(part.captured)
    assert captured == [0, 0, 1, 1, 2, 3, 4, 4, 5]


def test_results_that_leave_a_stage_are_copies_and_others_stay_in_static_memory() -> None:
    part = OfOneMicrobatch()
    results = [part(torch.full((1, 3), float(step))) for step in range(4)]
    places = [[tensor.data_ptr() for tensor in (y, z)] for y, _, z in results]
    assert torch.equal(results[2][0], torch.full((1, 3), 5.0))
    assert places[2][0] != places[3][0]
    assert places[2][1] == places[3][1]
    slot = part.slots._free[0]
    assert slot.storages() >= {results[2][2].untyped_storage().data_ptr(), part.weight.untyped_storage().data_ptr()}
    assert results[2][0].untyped_storage().data_ptr() not in slot.storages()


def test_a_microbatch_that_ran_eagerly_is_not_replayed_halfway() -> None:
    part = OfOneMicrobatch()
    part.slots.enter(7)
    for _ in range(4):
        part.part([torch.ones(1, 3), part.weight, 1])
    assert not part.slots.now.is_complete
    given = [torch.ones(1, 3), part.weight, 1]
    assert part.part.in_static_memory(given) is given
    part.slots.clear()
    part.slots.enter(8)
    with mock.patch.object(capture, "record", record):
        moved = part.part.in_static_memory(given)
    assert moved[0] is not given[0]
    assert moved[1:] == given[1:]
    assert torch.equal(moved[0], given[0])


def test_expanded_dimensions_are_copied_once() -> None:
    static = torch.zeros(1, 2).expand(3, 2)
    capture.copy_into(static, torch.tensor([[1.0, 2.0]]).expand(3, 2))
    assert static.tolist() == [[1.0, 2.0]] * 3
    assert static.stride() == (0, 1)


def test_what_cannot_be_captured_is_refused() -> None:
    def capturing(run: Callable[[list[Any]], Any]) -> None:
        with mock.patch.object(capture, "_WARM_UP", 0), mock.patch.object(capture, "record", run):
            slots = capture.CaptureSlots()
            slots.enter(0)
            capture.CapturedPart(lambda tensors: tensors, slots, 1, tuple)([torch.ones(2)])

    def failing(*_: Any) -> Any:
        raise RuntimeError("cublas\nelsewhere")

    with raises(zb.InputError, "cublas", "captured"):
        capturing(failing)
    with raises(zb.InputError, "sparse", "captured"):
        capturing(lambda *_: (None, lambda: None, [torch.ones(2), torch.eye(2).to_sparse()]))


class Replayed(Ours):
    def __init__(self, module: nn.Module, inputs: list[Tensors]) -> None:
        super().__init__(module, inputs)
        self.stage = make_stage("graph", module, 1, cuda_graphs=True)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:RNN module weights")
@pytest.mark.parametrize("name", every(6, [name for name in KINDS if name not in REFUSED]))
def test_slots_keep_what_a_microbatch_needs(name: str) -> None:
    kind, before = KINDS[name], replays
    with static_memory(warm_up=0):
        if name == "sparse embedding":
            with raises(zb.InputError, "CUDA", "captured", "graph"):
                train(kind.build, kind.takes, Replayed)
            return
        mine = train(kind.build, kind.takes, Replayed)
    assert replays > before
    assert difference(mine, train(kind.build, kind.takes, Plain)) <= ROUNDED.get(name, 0)


def trained(group: Any, name: str, main_grad: torch.dtype | None) -> tuple[float, bool, int]:
    """The largest loss error in four steps whose batches change shape, whether gradients are equal, and the number of replays."""
    with static_memory(warm_up=2), mock.patch.object(rank_stages, "make_stage", lambda *given, **_: make_stage(*given, cuda_graphs=True)):
        pipe = zb.Pipeline(build, name, 6, loss_fn, group=group, split="graph", main_grad=main_grad)
        oracle = [build(stage, pipe.schedule.num_stages) for stage in range(pipe.schedule.num_stages)]
        error, before = 0.0, replays
        with pipe:
            for step in range(4):
                inputs, targets = batch(6, step, length=4 + step % 2)
                loss = pipe.step(inputs, targets)
                error = max(error, abs((loss - one_device(oracle, 6, inputs, targets)).item()))
                pipe.eval_step(inputs, targets)
        pairs = [(p, q) for s, module in pipe.modules.items() for p, q in zip(module.parameters(), oracle[s].parameters(), strict=True)]
    same = all(q.grad is not None and torch.equal(p.grad if main_grad is None else p.main_grad, q.grad) for p, q in pairs)
    return error, same, replays - before


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "main_grad"),
    [
        ("1f1b", None),
        ("zb-h1", torch.float64),
        ("zb-h2", None),
        ("zb-v", None),
    ],
)
def test_a_pipeline_replays_its_passes(world: Ranks, name: str, main_grad: torch.dtype | None) -> None:
    for error, same, count in world.run(trained, name, main_grad, ranks=2):
        assert error <= 1e-12
        assert same
        assert count > 20


def refusal(group: Any) -> str:
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group, split="graph", cuda_graphs=True)
    return str(caught.value)


@cpu_only("it refuses a CPU")
def test_on_a_cpu_it_is_refused(world: Ranks) -> None:
    for message in world.run(refusal, ranks=2):
        states(message, "cuda_graphs", "graphs", "cpu")


def test_stages_that_are_not_traced_are_refused() -> None:
    held = {0: nn.Linear(2, 2), 3: nn.Linear(2, 2)}
    with mock.patch.object(rank_stages, "_device", return_value=torch.device("cuda")), pytest.raises(zb.InputError) as caught:
        rank_stages.Stages(held, {3: "whole"}, IN_GRAD, RecomputeLevels(None), cuda_graphs=True)
    states(str(caught.value), "stage 0", "deferred", "stage 3", "whole", "graph", "compiled")


def test_a_recording_reads_copies_of_the_inputs_that_it_copies_in() -> None:
    own, given = [torch.zeros(2), torch.zeros(2), 3], [torch.ones(2), torch.ones(2), 3]
    recording = capture._Recording(own, lambda: None, (), (1,))
    read = recording.copy_in(given)
    assert read[0] is given[0]
    assert read[1] is own[1]
    assert read[2] == 3
    assert [each.tolist() for each in own[:2]] == [[0, 0], [1, 1]]  # type: ignore[attr-defined]
