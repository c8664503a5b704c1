"""Lazy, special and overlapping tensors as inputs or attributes of a traced stage: results match autograd, or an error says why not."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

import zerobubble as zb
from tests.device import cpu_only
from tests.refusals import Stated, raises, states
from tests.thinned import every_of
from zerobubble.runtime.split.tracing import grouped_products
from zerobubble.runtime.stage.stage import Stage, make_stage

pytestmark = pytest.mark.in_process


class Marked(Tensor):
    """A subclass that changes nothing."""


class Matrix(nn.Module):
    """A matrix of the module, real or complex, and a second input that scales."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, dtype=dtype))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        z = torch.tanh(x @ self.w)
        return z if y is None else z * y


class Changing(nn.Module):
    """Changes its second input in place, which the third may be as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        y.add_(1)
        out: Tensor = self.linear(x) * z
        return out


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def complex_(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.complex128)


def sharing() -> tuple[Tensor, Tensor]:
    both = real(4, 4)
    return both[:3], both[1:]


def twice() -> tuple[Tensor, Tensor]:
    x = real(3, 4)
    return x, x


EQUAL: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "plain": lambda: (real(3, 4),),
    "complex": lambda: (complex_(3, 4),),
    "a lazy conjugate": lambda: (complex_(3, 4).conj(),),
    "a lazy negative": lambda: (complex_(3, 4).conj().imag,),
    "no rows": lambda: (real(0, 4),),
    "expanded": lambda: (real(1, 4).expand(3, 4),),
    "overlapping itself": lambda: (real(8).as_strided((3, 4), (2, 1)),),
    "transposed": lambda: (real(4, 3).t(),),
    "a subclass": lambda: (real(3, 4).as_subclass(Marked),),
    "a parameter": lambda: (nn.Parameter(real(3, 4)),),
    "one tensor twice": twice,
    "views of each other": sharing,
    "no dimension": lambda: (real(3, 4), torch.tensor(2.0, dtype=torch.float64)),
    "integers": lambda: (real(3, 4), torch.arange(4)),
    "bools": lambda: (real(3, 4), torch.tensor([True, False, True, True])),
}
REFUSED: dict[str, tuple[Callable[[], Tensor], Stated]] = {
    "sparse": (lambda: real(3, 4).to_sparse(), ("Tensor", "torch.float64", "torch.sparse_coo")),
    "sparse in rows": (lambda: real(3, 4).to_sparse_csr(), ("Tensor", "torch.float64", "torch.sparse_csr")),
    "nested": (lambda: torch.nested.nested_tensor([real(2, 4), real(3, 4)]), ("nested", "Tensor")),
    "jagged": (lambda: torch.nested.nested_tensor([real(2, 4), real(3, 4)], layout=torch.jagged), ("nested", "NestedTensor")),
    "masked": (lambda: masked_tensor(real(3, 4), torch.ones(3, 4, dtype=torch.bool)), ("MaskedTensor", "torch.float64")),
    "oneDNN": (lambda: real(3, 4).float().to_mkldnn(), ("Tensor", "torch.float32", "torch._mkldnn")),
    "quantized": (lambda: torch.quantize_per_tensor(real(3, 4).float(), 0.1, 0, torch.quint8), ("Tensor", "torch.quint8")),
    "a wrapper": (lambda: TwoTensor(real(3, 4), real(3, 4)), ("TwoTensor", "torch.float64")),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def passes(stage: Stage, oracle: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """F, B and W match autograd, which runs first."""
    expected = oracle(*inputs)
    dy = torch.randn(expected.shape, dtype=expected.dtype)
    expected.backward(dy)
    leaves = [x for x in inputs if x.requires_grad]
    gradients = [x.grad for x in leaves]
    for x in leaves:
        x.grad = None
    stage.begin(None)
    (y,) = stage.forward(0, inputs)
    assert type(y) is type(expected)
    assert torch.equal(y, expected)
    for dx, before in zip(stage.backward(0, (dy,)), gradients, strict=True):
        assert same(dx, before)
    stage.weight(0)
    for p, q in zip(stage.module.parameters(), oracle.parameters(), strict=True):
        assert same(p.grad, q.grad)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    return torch.equal(a, b) if a is not None and b is not None else a is b


@pytest.mark.parametrize(("has_gradient", "name"), every_of(3, [False, True], EQUAL))
def test_special_tensors_give_the_numbers_of_autograd(name: str, has_gradient: bool) -> None:
    inputs = EQUAL[name]()
    module = Matrix(inputs[0].dtype)
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    for _ in range(2):
        inputs = EQUAL[name]()
        for x in inputs:
            if has_gradient and x.is_leaf and (x.is_floating_point() or x.is_complex()):
                x.requires_grad_()
        passes(stage, oracle, inputs)


def test_kinds_of_one_shape_follow_one_another() -> None:
    module = Matrix(torch.complex128)
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    for x in (complex_(3, 4), complex_(3, 4).conj(), complex_(3, 4).as_subclass(Marked), complex_(3, 4)):
        passes(stage, oracle, (x,))


def test_inputs_that_come_to_share_memory_are_not_taken_for_others() -> None:
    module = Changing().double()
    stage = make_stage("graph", module, 0)
    x, y, z = real(3, 4), real(3, 4), real(3, 4)
    stage.forward(0, (x, y.clone(), z))
    expected = module.linear(x) * (y + 1)
    (shared,) = stage.forward(1, (x, y, y))
    assert torch.equal(shared, expected)


def test_inputs_that_are_views_of_one_that_is_changed_are_refused() -> None:
    """AOTAutograd takes them together in front of the parameters, whose gradients would go to other parameters."""
    both = real(4, 4)
    with raises(zb.InputError, "tensor", "place", "memory"):
        make_stage("graph", Changing().double(), 0).forward(0, (real(3, 4), both[:3], both[1:]))


of_cpus = cpu_only("oneDNN is for CPUs")


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of", "ignore:Sparse CSR tensor support", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", [pytest.param(name, marks=of_cpus) if name == "oneDNN" else name for name in REFUSED])
def test_tensors_that_no_graph_takes_are_refused(name: str, has_gradient: bool) -> None:
    make, stated = REFUSED[name]
    x = make()
    if has_gradient and x.is_floating_point():
        x.requires_grad_()
    with pytest.raises(zb.InputError) as caught:
        make_stage("graph", Matrix(torch.float64), 1).forward(0, (x,))
    states(caught.value, "stage 1", *stated)
    states(str(caught.value), 'split={1: "deferred"}', "tensors")


def test_a_parameter_of_tensors_is_refused() -> None:
    module = Matrix(torch.float64)
    module.w = nn.Parameter(TwoTensor(real(4, 4), real(4, 4)))  # type: ignore[no-untyped-call]
    with raises(zb.InputError, "TwoTensor", "parameter", "buffer"):
        make_stage("graph", module, 1).forward(0, (real(3, 4),))


@pytest.mark.skipif(not grouped_products.HAS_GROUPED_PRODUCTS, reason="this torch has no grouped products")
@pytest.mark.parametrize(
    ("dtype", "is_stack", "replaced"), [(torch.float32, True, True), (torch.bfloat16, True, False), (torch.float32, False, False)]
)
def test_products_of_rows_and_a_stack_are_replaced_where_they_cannot_be_traced(
    dtype: torch.dtype, is_stack: bool, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, product = [], grouped_products.grouped_product
    monkeypatch.setattr(grouped_products, "grouped_product", lambda *args: calls.append(args) or product(*args))
    a, b = torch.randn(16, 16, dtype=dtype), torch.randn(*((2,) if is_stack else ()), 16, 16, dtype=dtype)
    with grouped_products.TraceableGroupedProducts():
        torch._grouped_mm(a, b, offs=torch.tensor([8, 16], dtype=torch.int32))
    assert bool(calls) == replaced
