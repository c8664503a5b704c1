"""Products with parameters and parts of them: which gradients wait for W, what they add to, and that they are those of autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from benchmarks.split_matrix.kinds import Way
from benchmarks.split_matrix.ways import Ours, Plain, difference, train
from tests.device import cpu_only
from tests.procs.test_own_layers import KINDS as OWN_KINDS
from tests.refusals import raises
from zerobubble.runtime.split.layers import weight_work
from zerobubble.runtime.split.layers.parameter_parts import Gathered, Matrix, Slice, matrix_in, note_indexing
from zerobubble.runtime.split.layers.weight_work import StepContext, WeightWork
from zerobubble.runtime.stage.stage import make_stage

pytestmark = pytest.mark.in_process

functional = nn.functional
INDICES = torch.tensor([2, 0, 2])


def gradients(forward: Callable[[Any, Tensor], Tensor], size: tuple[int, ...], *, split: bool) -> tuple[list[Tensor | None], set[str]]:
    """The gradients of the input and the parameters, and the names of those that wait for W."""
    torch.manual_seed(0)
    double = {"dtype": torch.float64}
    module = Way(
        forward,
        w=nn.Parameter(torch.randn(4, 3, **double)),
        square=nn.Parameter(torch.randn(4, 4, **double)),
        stack=nn.Parameter(torch.randn(3, 4, 5, **double)),
        vector=nn.Parameter(torch.randn(4, **double)),
        b=nn.Parameter(torch.randn(3, **double)),
    )
    x = torch.randn(*size, requires_grad=True, **double)
    stage = make_stage("deferred" if split else "whole", module, 0)
    with stage.stepping():
        (y,) = stage.forward(0, (x,))
        (of_x,) = stage.backward(0, (torch.cos(torch.arange(y.numel(), **double)).view(y.shape),))
        before = {name for name, parameter in module.named_parameters() if parameter.grad is None}
        if split:
            stage.weight(0)
    waited = {name for name, parameter in module.named_parameters() if name in before and parameter.grad is not None}
    return [of_x, *(parameter.grad for parameter in module.parameters())], waited


WAIT: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...], set[str]]] = {
    "second": (lambda m, x: x @ m.w, (2, 4), {"w"}),
    "second, of a batch": (lambda m, x: x @ m.w, (2, 5, 4), {"w"}),
    "first": (lambda m, x: m.w @ x, (3, 2), {"w"}),
    "first, of a batch": (lambda m, x: m.w @ x, (2, 3, 5), {"w"}),
    "transposed": (lambda m, x: x @ m.w.t(), (2, 3), {"w"}),
    "transposed first": (lambda m, x: m.w.mT @ x, (4, 2), {"w"}),
    "square": (lambda m, x: x @ m.square.t(), (2, 4), {"square"}),
    "stack": (lambda m, x: x @ m.stack, (3, 2, 4), {"stack"}),
    "stack for all": (lambda m, x: x @ m.stack, (2, 4), {"stack"}),
    "stack first": (lambda m, x: m.stack @ x, (3, 5, 2), {"stack"}),
    "transposed stack": (lambda m, x: x @ m.stack.mT, (3, 2, 5), {"stack"}),
    "part": (lambda m, x: x @ m.stack[1], (2, 4), {"stack"}),
    "part of rows": (lambda m, x: x @ m.w[1:3], (2, 2), {"w"}),
    "part of columns": (lambda m, x: x @ m.w[:, 1:], (2, 4), {"w"}),
    "transposed part": (lambda m, x: x @ m.stack[2].t(), (2, 5), {"stack"}),
    "two parts": (lambda m, x: x @ m.stack[0] + x @ m.stack[2], (2, 4), {"stack"}),
    "view": (lambda m, x: x @ m.stack.view(12, 5), (2, 12), {"stack"}),
    "gathered": (lambda m, x: x @ m.stack[INDICES], (3, 2, 4), {"stack"}),
    "split": (lambda m, x: x @ m.stack.split(1)[1].squeeze(0), (2, 4), {"stack"}),
    "unbound": (lambda m, x: x @ m.stack.unbind()[1], (2, 4), {"stack"}),
    "addmm": (lambda m, x: torch.addmm(m.b, x, m.w), (2, 4), {"w"}),
    "addmm, first": (lambda m, x: torch.addmm(m.vector[:, None], m.w, x), (3, 2), {"w"}),
    "baddbmm": (lambda m, x: torch.baddbmm(torch.ones(3, 1, 5, dtype=x.dtype), x, m.stack), (3, 2, 4), {"stack"}),
    "linear": (lambda m, x: functional.linear(x, m.w, m.vector), (2, 3), {"w"}),
    "linear of a batch": (lambda m, x: functional.linear(x, m.w), (2, 5, 3), {"w"}),
    "linear of a part": (lambda m, x: functional.linear(x, m.stack[1], m.vector), (2, 5), {"stack"}),
    "linear, transposed": (lambda m, x: functional.linear(x, m.w.t(), m.b), (2, 4), {"w"}),
    "linear, transposed, of a batch": (lambda m, x: functional.linear(x, m.w.t(), m.b), (2, 5, 4), {"w"}),
    "einsum": (lambda m, x: torch.einsum("bi,io->bo", x, m.w), (2, 4), {"w"}),
    "einsum, weight first": (lambda m, x: torch.einsum("io, bsi -> bso", m.w, x), (2, 5, 4), {"w"}),
    "einsum, transposed": (lambda m, x: torch.einsum("bi,io->bo", x, m.w.t()), (2, 3), {"w"}),
    "einsum of a stack": (lambda m, x: torch.einsum("ebi,eio->ebo", x, m.stack), (3, 2, 4), {"stack"}),
    "einsum to a number": (lambda m, x: torch.einsum("io,io->", x, m.w)[None], (4, 3), {"w"}),
    "einsum, all pairs": (lambda m, x: torch.einsum("a,io->aio", x, m.w), (2,), {"w"}),
}
AT_ONCE: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...], set[str]]] = {
    "vector": (lambda m, x: x @ m.vector, (2, 4), set()),
    "vector of inputs": (lambda m, x: x @ m.w, (4,), set()),
    "computed": (lambda m, x: x @ (m.w * 2), (2, 4), set()),
    "other parameter": (lambda m, x: x @ (m.square @ m.w), (2, 4), set()),
    "indexed twice": (lambda m, x: x @ m.stack[INDICES, :, torch.tensor([1])], (2, 3), set()),
    "masked": (lambda m, x: x @ m.stack[torch.tensor([True, False, True])], (2, 2, 4), set()),
    "einsum, summed alone": (lambda m, x: torch.einsum("bi,jo->bo", x, m.w), (2, 4), set()),
    "einsum, diagonal": (lambda m, x: torch.einsum("bi,ii->bi", x, m.square), (2, 4), set()),
    "einsum of three": (lambda m, x: torch.einsum("bi,io,o->bo", x, m.w, m.b), (2, 4), set()),
    "einsum without a result": (lambda m, x: torch.einsum("bi,io", x, m.w), (2, 4), set()),
}


@pytest.mark.parametrize("name", [*WAIT, *AT_ONCE])
def test_gradients_of_products_wait_where_they_can_and_are_those_of_autograd(name: str) -> None:
    forward, size, waits = (WAIT | AT_ONCE)[name]
    mine, waited = gradients(forward, size, split=True)
    theirs, _ = gradients(forward, size, split=False)
    assert waited == waits
    assert [one is None for one in mine] == [one is None for one in theirs]
    for one, other in zip(mine, theirs, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def matrix(tensor: object) -> Matrix:
    found = matrix_in(tensor)
    assert found is not None
    return found


def test_views_of_a_parameter_are_parts_of_it() -> None:
    w = nn.Parameter(torch.arange(60.0).view(3, 4, 5))
    assert matrix(w) == Matrix(w)
    assert matrix(w.mT) == Matrix(w, None, True)
    assert matrix(w.view(3, 4, 5)) == Matrix(w)
    assert matrix(w[1]) == Matrix(w, Slice((4, 5), (5, 1), 20))
    assert matrix(w[2].t()) == Matrix(w, Slice((4, 5), (5, 1), 40), True)
    assert matrix(w[:, 1:3]) == Matrix(w, Slice((3, 2, 5), (20, 5, 1), 5))
    assert matrix(w[..., 2:]) == Matrix(w, Slice((3, 4, 3), (20, 5, 1), 2))
    assert matrix(w[0, 0]) == Matrix(w, Slice((5,), (1,), 0))
    for view in (w[1], w[2].t(), w[:, 1:3], w.view(12, 5), w.mT):
        found = matrix(view)
        assert torch.equal(found.used(found.stored_in(w)), view)
        assert torch.equal(found.transposed().used(found.stored_in(w)), view.mT)


def test_what_autograd_changes_on_the_way_is_no_part() -> None:
    w = nn.Parameter(torch.ones(3, 4))
    kept, hooked = w.t(), w[1:]
    kept.retain_grad()
    hooked.register_hook(lambda gradient: gradient)
    turned = nn.Parameter(torch.ones(4, 3).t())
    others = [w * 1, w.expand(2, 3, 4), w.detach(), w.detach()[1:], torch.ones(3, 4), kept, hooked, turned[1:], None, 3]
    assert [matrix_in(other) for other in others] == [None] * len(others)
    leaf = torch.ones(3, 4, requires_grad=True)
    assert matrix_in(leaf) is None
    assert matrix_in(leaf[1:]) is None
    with torch.no_grad():
        assert matrix_in(w[1:]) is None


def test_gathered_matrices_are_known_until_their_indices_change() -> None:
    w = nn.Parameter(torch.randn(3, 2, 2))
    indices = INDICES.clone()
    gathered = w[indices]
    assert matrix_in(gathered) is None, "nobody has noted the indices"
    note_indexing(gathered, w, indices)
    found = matrix(gathered)
    assert isinstance(found.part, Gathered)
    assert found.parameter is w
    assert torch.equal(found.stored_in(w), gathered)
    gradient = torch.stack([torch.full((2, 2), value) for value in (1.0, 2.0, 4.0)])
    whole = torch.zeros(3, 2, 2)
    found.part.add(whole, gradient)
    assert whole[:, 0, 0].tolist() == [2.0, 0.0, 5.0]
    found.part.add(whole, gradient.double())
    assert whole[:, 0, 0].tolist() == [4.0, 0.0, 10.0]
    indices[0] = 1
    assert matrix_in(gathered) is None
    assert torch.equal(found.part.select(w), gathered), "the part has indices of its own"
    for tensor, index in ((w * 1, INDICES), (w, [2, 0]), (w, INDICES.int())):
        other = w[INDICES]
        note_indexing(other, tensor, index)
        assert matrix_in(other) is None


def test_a_gradient_is_added_to_its_slice() -> None:
    place, whole = Slice((2, 2), (4, 1), 5), torch.zeros(3, 4)
    place.add(whole, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    place.add(whole, torch.ones(2, 2))
    assert whole.tolist() == [[0, 0, 0, 0], [0, 2, 3, 0], [0, 4, 5, 0]]
    later = torch.zeros(24)[12:].view(3, 4)
    place.add(later, torch.ones(2, 2))
    assert later[1:, 1:3].tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.fixture
def torch_without_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch before 2.13, which keeps no object in its thread-local state."""
    monkeypatch.setattr(weight_work, "TORCH_KEEPS_REFERENCES", False)
    monkeypatch.setattr(weight_work, "_set_current", partial(setattr, weight_work._thread, "work"))


@pytest.mark.usefixtures("torch_without_references")
@pytest.mark.parametrize("in_caller", [True, False])
@pytest.mark.parametrize("name", ["in a stage", "in a checkpoint", "gradient within", "gradient within, in a checkpoint"])
@cpu_only("threads of the test take the part of the engine's")
def test_a_pass_is_known_in_the_engine_of_older_versions_of_torch(name: str, in_caller: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_work, "runs_backward_in_caller", lambda device: in_caller)
    kind = OWN_KINDS[name]
    mine, oracle = train(kind.build, kind.takes, Ours), train(kind.build, kind.takes, Plain)
    assert difference(mine, oracle) == 0
    assert "weight" in {waited.rpartition(".")[2] for waited in mine.waited if "last" not in waited}
    assert weight_work._in_engine == {}
    assert weight_work._thread.work is None


@pytest.mark.usefixtures("torch_without_references")
def test_a_thread_of_the_engine_finds_the_pass_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_work, "runs_backward_in_caller", lambda device: device.type == "meta")
    work, other = (WeightWork(StepContext(frozenset())) for _ in range(2))
    x = torch.ones(2, requires_grad=True)
    y, seen = x * 2, []

    def look(_: Tensor) -> None:
        seen.append(weight_work.pass_in_progress())
        with torch.enable_grad():
            z = torch.ones(1, requires_grad=True)
            (z * 2).register_hook(lambda _: seen.append(weight_work.pass_in_progress()))
            inner = z * 2
            inner.register_hook(lambda _: seen.append(weight_work.pass_in_progress()))
            inner.sum().backward()

    x.register_hook(look)
    edges = [torch.autograd.graph.get_gradient_edge(y)]
    work.may_recompute = False
    assert work.followed(edges, [y]) is weight_work._NO_CONTEXT
    work.may_recompute = True
    assert work.followed(edges, [torch.empty(2, device="meta"), None]) is weight_work._NO_CONTEXT
    assert work.followed(edges, [torch.empty(2, device="meta"), y]) is not weight_work._NO_CONTEXT
    weight_work._in_engine[-5] = other, -1
    with work.followed(edges, [None, y]):
        assert weight_work.pass_in_progress() is None
        y.sum().backward()
    assert weight_work._in_engine.pop(-5)[0] is other
    assert seen == [work, work]
    assert weight_work._in_engine == {}
    with work:
        assert weight_work.pass_in_progress() is work
        with other:
            assert weight_work.pass_in_progress() is other
        assert weight_work.pass_in_progress() is work
    assert weight_work.pass_in_progress() is None


@pytest.mark.usefixtures("torch_without_references")
def test_a_layer_in_a_checkpoint_may_be_recomputed() -> None:
    def noted(**options: Any) -> bool:
        work = WeightWork(StepContext(frozenset()))
        work.may_recompute = False

        def run(x: Tensor) -> Tensor:
            assert weight_work.pass_in_progress() is work
            return x * 2

        with work:
            if options:
                checkpoint(run, torch.ones(1, requires_grad=True), **options)
            else:
                run(torch.ones(1))
        return work.may_recompute

    assert [noted(), noted(use_reentrant=False), noted(use_reentrant=True)] == [False, True, True]


def test_work_that_waits_is_grouped_and_added_by_weight_and_part() -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 2))
    first, second = (Slice((2,), (1,), offset) for offset in (0, 2))
    work = WeightWork(StepContext(frozenset()))
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    work.defer(a, lambda x: x, x)
    work.defer(b, lambda x: 10 * x, x, part=first)
    work.defer(a, lambda x: 100 * x, x)
    work.defer(b, lambda x: 3 * x, x, part=second)
    work.defer(b, lambda x: x, x, part=second)
    assert work.weights() == {a, b}
    assert [len(group) for group in work.waiting()] == [2, 1, 2]
    assert [tensor.requires_grad for tensor in work.held] == [False] * 5
    work.run()
    assert a.grad is not None
    assert b.grad is not None
    assert (a.grad.tolist(), b.grad.tolist()) == ([101.0, 202.0], [[10.0, 20.0], [4.0, 8.0]])
    assert (work.held, len(work.waiting())) == ([], 0)
    assert torch.is_grad_enabled()
    work.run()
    assert a.grad.tolist() == [101.0, 202.0]


def test_gradients_of_one_cast_are_summed_before_they_are_cast() -> None:
    """In bfloat16, 256 + 1 is 256; in float32 it is 257."""
    weight = nn.Parameter(torch.zeros(1))
    found = []
    for casts in (("same", "same"), ("one", "other")):
        work = WeightWork(StepContext(frozenset()))
        for cast, value in zip(casts, (256.0, 1.0), strict=True):
            work.defer(weight, lambda x: x, torch.tensor([value], dtype=torch.bfloat16), cast=cast)
        weight.grad = None
        work.run()
        assert weight.grad is not None
        found.append((weight.grad.item(), weight.grad.dtype))
    assert found == [(256.0, torch.float32), (257.0, torch.float32)]


def test_a_gradient_that_changes_a_part_of_a_sum_is_added_there_if_there_is_a_sum() -> None:
    weight, added = nn.Parameter(torch.zeros(3)), []

    def add_to(total: Tensor, x: Tensor) -> None:
        added.append(x.item())
        total[1] += x.item()

    def deferred(*values: float) -> Tensor:
        work = WeightWork(StepContext(frozenset()))
        for value in values:
            work.defer(weight, lambda x: torch.tensor([0.0, x.item(), 0.0]), torch.tensor(value), add_to=add_to)
        work.run()
        assert weight.grad is not None
        return weight.grad

    assert deferred(1.0).tolist() == [0.0, 1.0, 0.0]
    assert added == []
    assert deferred(2.0).tolist() == [0.0, 3.0, 0.0]
    assert added == [2.0]
    assert deferred(3.0, 4.0).tolist() == [0.0, 10.0, 0.0]
    assert added == [2.0]


def test_tensors_that_w_needs_may_neither_change_nor_be_freed() -> None:
    weight, x = nn.Parameter(torch.zeros(2)), torch.ones(2)
    work = WeightWork(StepContext(frozenset()))
    work.defer(weight, lambda x: x, x)
    x.add_(1)
    with raises(zb.InputError, "(2,)"):
        work.run()
    freed, empty = torch.ones(3), torch.empty(0)
    for frees_weights in (False, True):
        work = WeightWork(StepContext(frozenset(), frees_weights=frees_weights))
        work.defer(weight, lambda *_: torch.ones(2), empty, x)
        work.run()
        work.defer(weight, lambda *_: torch.ones(2), freed)
        freed.untyped_storage().resize_(0)
        if frees_weights:
            with raises(zb.InputError, "(3,)"):
                work.hand_over()
        else:
            work.hand_over()
            freed.untyped_storage().resize_(12)


@pytest.mark.parametrize(("bytes_of_storages", "is_freed"), [((0,), True), ((8,), False), ((0, 8), False), ((0, 0), True)])
def test_a_tensor_is_freed_if_all_of_its_storages_are(bytes_of_storages: tuple[int, ...], is_freed: bool) -> None:
    work = WeightWork(StepContext(frozenset(), frees_weights=True))
    work.defer(nn.Parameter(torch.zeros(2)), lambda x: x, torch.ones(2))
    storages = [SimpleNamespace(nbytes=lambda size=size: size) for size in bytes_of_storages]
    with mock.patch.object(weight_work, "storages_of", return_value=storages), raises(zb.InputError, "(2,)") if is_freed else nullcontext():
        work.hand_over()
