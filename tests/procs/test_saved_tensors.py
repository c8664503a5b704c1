"""Saved tensors of one forward, moved to the host and back by hand: memory is freed, values stay, and reads wait for the copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.refusals import raises
from zerobubble.runtime.measure.memory_meter import Meter
from zerobubble.runtime.stage.copy_lane import Copied, Pairs
from zerobubble.runtime.stage.saved_tensors import SMALLEST_BYTES, MovableBytes, SavedTensors
from zerobubble.runtime.stage.stage import make_stage
from zerobubble.timeline import Copying

pytestmark = pytest.mark.in_process

HERE = torch.empty(0).device
"""The device on which the tests create tensors, with its index."""


class LateLane:
    """Copies only when waited for, and first fills the target with NaN, so that a read that is too early returns NaN."""

    def __init__(self) -> None:
        self.copies: list[tuple[Copying, list[int]]] = []
        self._waiting: list[Pairs] = []

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def copy(self, copying: Copying, pairs: Pairs) -> Copied:
        for target, _ in pairs:
            target.fill_(255)
        self.copies.append((copying, sorted(source.nbytes for _, source in pairs)))
        self._waiting.append(pairs)
        return Copied(len(self._waiting) - 1, 0)

    def wait(self, copied: Copied) -> None:
        for target, source in self._waiting[copied.begin]:
            target.copy_(source)
        self._waiting[copied.begin] = ()

    def discard(self) -> None:
        self._waiting.clear()


def move(saved: SavedTensors, between: Callable[[], object] = lambda: None) -> None:
    """To the host and back; `between` is called when it is there."""
    saved.choose()
    saved.begin_to_host()
    saved.release()
    between()
    saved.begin_back()
    saved.come_back()


def go_back(run: Callable[[], Tensor], *leaves: Tensor) -> tuple[bool, LateLane]:
    """Whether what `run` gives has the same gradients of `leaves` with what it saves on the host meanwhile."""
    plain = run()
    expected = torch.autograd.grad(plain.sum(), leaves)
    lane = LateLane()
    saved = SavedTensors(HERE, lane)
    with saved.saving(None):
        moved = run().sum()
    move(saved)
    found = torch.autograd.grad(moved, leaves)
    return all(torch.equal(one.to_dense(), other.to_dense()) for one, other in zip(expected, found, strict=True)), lane


def test_memory_is_let_go_and_comes_back_with_the_same_numbers() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    meter, lane, references = Meter([x]), LateLane(), []
    saved = SavedTensors(HERE, lane)
    with saved.saving(meter):
        hidden = x.tanh()
        references.append(StorageWeakRef(hidden.untyped_storage()))
        y = hidden.square().sum()
    del hidden
    held = meter.bytes
    assert held == 64 * 64 * 4
    saved.choose()
    saved.begin_to_host()
    assert not references[0].expired()
    saved.release()
    assert references[0].expired()
    assert meter.bytes == 0
    with raises(RuntimeError, "host", "memory"):
        torch.autograd.grad(y, x, retain_graph=True)
    saved.begin_back()
    assert meter.bytes == held
    saved.come_back()
    assert meter.bytes == held
    assert lane.copies == [(Copying.TO_HOST, [held]), (Copying.FROM_HOST, [held])]
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, x)[0])
    assert torch.equal(first, torch.autograd.grad(x.tanh().square().sum(), x)[0])
    del y
    assert meter.bytes == 0


def test_views_of_one_storage_are_one_copy() -> None:
    x = torch.randn(48, 48, requires_grad=True)

    def run() -> Tensor:
        whole = x * 2  # 48 x 48
        left, right = whole[:, ::2], whole.t()[24:]
        return (left.t() * right).sigmoid() * whole.view(-1)[:48].exp()

    same, lane = go_back(run, x)
    assert same
    assert lane.copies[0][1].count(48 * 48 * 4) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_numbers_of_any_type_go(dtype: torch.dtype) -> None:
    x = torch.randn(32, 32, dtype=torch.float32).to(dtype).requires_grad_()

    def run() -> Tensor:
        y = (x * 3) * (x * 2)
        return (y * y).real.float() if dtype.is_complex else y * y

    same, lane = go_back(run, x)
    assert same
    assert lane.copies[0][1]


def test_indices_and_masks_go_too() -> None:
    x = torch.randn(2048, requires_grad=True)

    def run() -> Tensor:
        return x.sort().values.clamp(min=0).masked_fill(x > 1, 0.0).index_select(0, torch.arange(1024, 2048)) * 2

    same, lane = go_back(run, x)
    assert same
    assert 2048 * 8 in lane.copies[0][1]  # where each number was


def test_what_others_hold_stays() -> None:
    layer = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    x = torch.randn(32, 64, requires_grad=True)
    saved = SavedTensors(HERE, LateLane())
    with saved.saving(None):
        y = layer(x)
    sizes = [whole.nbytes for whole, _ in saved.movable()]
    assert sizes == [32 * 64 * 4]  # what is between the first tanh and the second layer: weights, the input and the output stay
    del y


def test_what_two_microbatches_save_stays_and_is_there_once() -> None:
    x, lane = torch.randn(64, 64, requires_grad=True), LateLane()
    mask = x.detach() * 2  # as a module keeps one in an attribute
    held = StorageWeakRef(mask.untyped_storage())
    both = [SavedTensors(HERE, lane) for _ in range(2)]
    left = []
    for saved in both:
        with saved.saving(None):
            left.append((x * mask).tanh().square().sum())
    del mask  # from here on only the two forwards hold it
    for saved in both:
        saved.choose()
        saved.begin_to_host()
    own = 64 * 64 * 4
    assert lane.copies == [(Copying.TO_HOST, [own]), (Copying.TO_HOST, [own])]  # what tanh gave, and not the mask
    for saved in both:
        saved.release()
        saved.begin_back()
        saved.come_back()
    assert not held.expired()
    assert torch.equal(*[torch.autograd.grad(y, x)[0] for y in left])
    assert held.expired()


def saved_by_exp(x: Tensor) -> tuple[SavedTensors, Tensor, Tensor]:
    """What keeps the result of `exp`, that result, and what is made of it."""
    saved = SavedTensors(HERE, LateLane())
    with saved.saving(None):
        y = x.exp()
        return saved, y, y * 2


def test_what_somebody_holds_by_the_end_of_its_copy_stays() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    saved, y, z = saved_by_exp(x)
    storage = y.untyped_storage()
    del y, storage
    saved.choose()
    saved.begin_to_host()
    taken = saved._moving[0].on_device
    assert taken is not None
    taken = taken.view(-1)
    saved.release()
    assert not saved._moving
    assert torch.equal(torch.autograd.grad(z.sum(), x)[0], 2 * x.exp())


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("is_held", [False, True])
def test_what_is_changed_in_place_is_reported_as_torch_shows_it(when: str, is_held: bool) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    saved, y, z = saved_by_exp(x)
    alias = y.detach()  # shares how often it was changed, and its memory
    kept = [alias] if is_held else []
    if when == "before":
        alias.add_(1)
        del alias, y
        saved.choose()
        saved.begin_to_host()
    else:
        del alias, y
        saved.choose()
        saved.begin_to_host()
        changed = kept or [one.tensor for reference in saved._moving[0]._saved if (one := reference()) is not None]
        changed[0].add_(1)  # type: ignore[union-attr]
        del changed
    saved.release()
    saved.begin_back()
    saved.come_back()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* is at version 1; expected version 0"):
        torch.autograd.grad(z.sum(), x)


def test_a_compiled_module_saves_as_one_that_is_not() -> None:
    part = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    part.compile(backend="aot_eager")
    x = torch.randn(64, 64, requires_grad=True)
    for changed in (False, True):  # what a compiled hook would take for the version is that of the first tensor
        saved, hidden = SavedTensors(HERE, LateLane()), x * 1
        with saved.saving(meter := Meter([x, *part.parameters()])):
            y = part(hidden).sum()
        held = meter.bytes
        saved.choose()
        saved.begin_to_host()
        if changed:
            with torch.no_grad():
                hidden.mul_(2)
        saved.release()
        assert 0 < meter.bytes < held
        saved.begin_back()
        saved.come_back()
        with pytest.raises(RuntimeError, match="modified by an inplace operation") if changed else nullcontext():
            y.backward()


def test_what_is_no_plain_tensor_stays() -> None:
    x = torch.randn(64, 64, dtype=torch.complex64, requires_grad=True)
    weight = torch.randn(64, 64).to_sparse().requires_grad_()
    dense = torch.randn(64, 64, requires_grad=True)

    def run() -> Tensor:
        return (x.conj() * (2 * x).conj()).real.sum() + torch.sparse.mm(weight, dense).sum()

    same, lane = go_back(run, x, weight, dense)
    assert same
    assert lane.copies[0] == (Copying.TO_HOST, [])


def test_small_tensors_stay() -> None:
    x = torch.randn(SMALLEST_BYTES // 4 - 1, requires_grad=True)
    saved = MovableBytes(HERE)
    with saved.saving(None):
        y = (x * 2).exp() * 3
    assert saved.bytes == 0
    large = torch.randn(SMALLEST_BYTES // 4, requires_grad=True)
    with saved.saving(None):
        y = (large * 2).exp() * 3
    assert saved.bytes == SMALLEST_BYTES
    del y


def test_what_nobody_goes_back_by_any_more_does_not_come_back() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    lane = LateLane()
    saved = SavedTensors(HERE, lane)
    with saved.saving(None):
        y = (x * 2).exp().sum()

    def forget() -> None:
        nonlocal y
        del y

    move(saved, forget)
    assert lane.copies == [(Copying.TO_HOST, [64 * 64 * 4]), (Copying.FROM_HOST, [])]


def test_a_report_of_memory_counts_what_is_on_the_device_alone() -> None:
    """The report when memory runs out counts saved tensors on the device, and not those offloaded to the host."""
    stage = make_stage("whole", nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()), 0)
    saved = stage.offloaded[0] = SavedTensors(HERE, LateLane())
    x = torch.randn(32, 64)
    own = x.nbytes
    with stage.stepping():
        stage.forward(0, (x,))
        found = [stage.in_flight()]
        saved.choose()
        saved.begin_to_host()
        saved.release()
        found.append(stage.in_flight())
        saved.begin_back()
        saved.come_back()
        found.append(stage.in_flight())
    assert found[0] == found[2] == (1, 3 * own)  # the input, and what both functions gave
    assert found[1] == (1, own)
