"""Every special kind of torch tensor, as input, weight or gradient of a split layer: B and W match autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from benchmarks.split_matrix.kinds import D, Kind, Way, lin, parameter
from benchmarks.split_matrix.ways import Ours, Plain, difference, train
from zerobubble.runtime.split.layers.weight_work import CAN_SEE_HOOKS

pytestmark = pytest.mark.in_process


class Marked(Tensor):
    """A subclass without behavior of its own."""


def complex_parameter(*size: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*size, dtype=torch.complex128))


def as_complex(x: Tensor) -> Tensor:
    return torch.complex(x, x.flip(-1))


def of_complex(call: Callable[..., Tensor], **parts: Any) -> Kind:
    """`call` is given the module and its input made complex; what comes out goes on as real numbers."""
    return Kind(lambda: Way(lambda m, x: torch.view_as_real(call(m, as_complex(x))).flatten(-2), **_made(parts)))


def of_real(call: Callable[..., Tensor], takes: str = "x", *, waits: bool = True, **parts: Any) -> Kind:
    return Kind(lambda: Way(call, **_made(parts)), takes, waits)


def _made(parts: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    return {name: make() for name, make in parts.items()}


def sparse_and_dense(m: Any, tokens: Tensor) -> Tensor:
    """A table whose gradient is sparse, tied to a head whose gradient is dense."""
    x = functional.embedding(tokens, m.table, sparse=True)
    return functional.linear(m.linear(x), m.table)


def nested_rows(m: Any, x: Tensor) -> Tensor:
    ragged = torch.nested.nested_tensor([x[0, :2].detach(), x[1].detach()])
    return torch.nested.to_padded_tensor(m.linear(ragged), 0.0) + x


def jagged_rows(m: Any, x: Tensor) -> Tensor:
    ragged = torch.nested.nested_tensor([x[0, :2].detach(), x[1].detach()], layout=torch.jagged)
    return m.linear(ragged).values().sum() + x


def tangent(m: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        y = m.linear(forward_ad.make_dual(x, torch.ones_like(x)))
        value, slope = forward_ad.unpack_dual(torch.tanh(y))
    return value + slope


def marked_weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(D, D).as_subclass(Marked))


def marked_output(m: Any, x: Tensor) -> Tensor:
    return (x @ m.w).as_subclass(Tensor)


matrix: Callable[[], nn.Parameter] = partial(parameter, D, D)
complex_matrix: Callable[[], nn.Parameter] = partial(complex_parameter, D, D)

SPECIAL = {
    "complex, x @ w": of_complex(lambda m, z: z @ m.w, w=complex_matrix),
    "complex, w @ x": of_complex(lambda m, z: m.w @ z, w=partial(complex_parameter, 3, 5)),
    "complex, linear": of_complex(lambda m, z: functional.linear(z, m.w, m.b), w=complex_matrix, b=partial(complex_parameter, D)),
    "complex, einsum": of_complex(lambda m, z: torch.einsum("bri,rio->bro", z, m.w), w=partial(complex_parameter, 5, D, 4)),
    "complex, einsum with the weight first": of_complex(lambda m, z: torch.einsum("io,bri->bro", m.w, z), w=complex_matrix),
    "complex, bmm": of_complex(lambda m, z: torch.bmm(z, m.w), w=partial(complex_parameter, 2, D, 4)),
    "complex, baddbmm": of_complex(
        lambda m, z: torch.baddbmm(m.b, z, m.w), w=partial(complex_parameter, 2, D, 4), b=partial(complex_parameter, 2, 1, 4)
    ),
    "complex, Fourier operator": of_real(
        lambda m, x: torch.fft.irfft(torch.einsum("bri,io->bro", torch.fft.rfft(x), m.w), n=D), w=partial(complex_parameter, 4, 4)
    ),
    "complex, lazily conjugated input": of_complex(lambda m, z: z.conj() @ m.w, w=complex_matrix),
    "complex, lazily conjugated output": of_complex(lambda m, z: (z @ m.w).conj() * z, w=complex_matrix),
    "lazily negated input": of_real(lambda m, x: m.linear(as_complex(x).conj().imag) @ m.w, linear=lin, w=matrix),
    "lazily negated input of a convolution": of_real(lambda m, x: m.conv(as_complex(x).conj().imag), conv=partial(nn.Conv1d, 5, 5, 3)),
    "complex numbers kept as real ones": of_real(
        lambda m, x: (as_complex(x) @ torch.view_as_complex(m.w)).real + x @ m.v, w=partial(parameter, D, D, 2), v=matrix
    ),
    "sparse input": of_real(lambda m, x: torch.tanh(m.fixed @ m.w) + x, fixed=lambda: torch.eye(5, D).to_sparse(), w=matrix, waits=False),
    "sparse input of a linear": of_real(
        lambda m, x: m.linear(m.fixed) + x, fixed=lambda: torch.eye(5, D).to_sparse_csr(), linear=partial(lin, bias=False), waits=False
    ),
    "sparse weight": of_real(lambda m, x: torch.sparse.mm(m.w, x[0]) + x, w=lambda: nn.Parameter(torch.eye(5).to_sparse()), waits=False),
    "sparse and dense gradient": of_real(sparse_and_dense, "tokens", table=partial(parameter, 11, D), linear=lin),
    "nested input": of_real(nested_rows, linear=lin, waits=False),
    "jagged input": of_real(jagged_rows, linear=lin, waits=False),
    "subclass as input": of_real(lambda m, x: m.linear(x.as_subclass(Marked)).as_subclass(Tensor), linear=lin, waits=False),
    "subclass as weight": of_real(marked_output, w=marked_weight, waits=False),
    "no rows": of_real(lambda m, x: (m.linear(x[:0]) @ m.w).sum() + x, linear=lin, w=matrix),
    "no columns": of_real(lambda m, x: m.linear(x) @ m.w, linear=partial(lin, 0), w=partial(parameter, 0, 4)),
    "no columns, einsum": of_real(lambda m, x: torch.einsum("bri,io->bro", x, m.w).sum(-1), w=partial(parameter, D, 0)),
    "expanded input": of_real(lambda m, x: m.linear(x[:, :1].expand(2, 5, D)) @ m.w, linear=lin, w=matrix),
    "expanded weight": of_real(lambda m, x: x @ m.w, w=lambda: nn.Parameter(torch.randn(1, D).expand(D, D))),
    "overlapping input": of_real(lambda m, x: x.flatten(1).unfold(1, D, 2) @ m.w, w=matrix),
    "overlapping weight": of_real(lambda m, x: x @ m.w, w=lambda: nn.Parameter(torch.randn(11).as_strided((D, D), (1, 1)))),
    "transposed weight": of_real(lambda m, x: x @ m.w, w=lambda: nn.Parameter(torch.randn(4, D).t())),
    "quantized input": of_real(
        lambda m, x: m.linear(torch.quantize_per_tensor(x.detach().float(), 0.1, 0, torch.qint8).dequantize().double()) + x, linear=lin
    ),
    "forward mode": of_real(tangent, linear=lin, waits=False),
}


@pytest.mark.filterwarnings("ignore")  # of what torch calls beta, deprecated or without effect
@pytest.mark.parametrize("name", SPECIAL)
def test_a_special_tensor_has_the_gradients_of_autograd(name: str) -> None:
    kind = SPECIAL[name]
    mine, oracle = train(kind.build, kind.takes, Ours), train(kind.build, kind.takes, Plain)
    assert difference(mine, oracle) <= 1e-14
    has_layers = any(True for _ in kind.build().children())
    assert bool(mine.waited) == (kind.waits and (CAN_SEE_HOOKS or has_layers)), "a module's own matrices wait from torch 2.8 on"
