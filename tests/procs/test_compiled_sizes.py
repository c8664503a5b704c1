"""A compiled stage with inputs of many sizes is compiled for few of them, and matches autograd for all.

Except in the long tests, graphs for inductor run uncompiled, so that the tests see which graphs it gets, and how often.

Compiled code serves another size only if its general graph equals that size's graph, integer by integer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from benchmarks.split.run import Block
from tests.procs.versions import takes_an_hour
from tests.refusals import raises, states
from zerobubble.runtime.split.compiled.compiler import MOST_ROUNDS
from zerobubble.runtime.split.graphs.general_graph import General
from zerobubble.runtime.stage.stage import Stage, make_stage

pytestmark = pytest.mark.in_process

WIDTH = 16
PARTS = 3
"""F, B and W."""


class Compiled:
    """Replaces inductor. `general` has, for each compiled graph, whether it has symbolic sizes; with `refuses`, these are refused."""

    def __init__(self) -> None:
        self.general: list[bool] = []
        self.refuses = False

    def __call__(self, graph: fx.GraphModule, examples: list[Any], options: Any) -> Callable[..., Any]:
        self.general.append(any(isinstance(example, torch.SymInt) for example in examples))
        if self.refuses and self.general[-1]:
            raise RuntimeError("symbols are not taken\nhere")
        return graph


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    made = Compiled()
    monkeypatch.setattr("torch._inductor.compile", made)
    return made


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, WIDTH), Block(WIDTH), Block(WIDTH)).double()


def tokens(*shape: int) -> tuple[Tensor]:
    return (torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(sum(shape))),)


def compare(stage: Stage, oracle: nn.Module, inputs: tuple[Tensor, ...], tolerance: float = 0.0) -> None:
    """F, B and W give the output and the gradients of autograd, to this relative difference."""
    stage.begin(None)
    stage.module.zero_grad()
    oracle.zero_grad()
    (y,) = stage.forward(0, inputs)
    expected = oracle(*inputs)
    dy = torch.cos(torch.arange(expected.numel(), dtype=expected.dtype)).view(expected.shape)
    stage.backward(0, (dy,))
    stage.weight(0)
    expected.backward(dy)
    assert (y - expected).norm() <= tolerance * expected.norm()
    for (name, p), q in zip(stage.module.named_parameters(), oracle.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert (p.grad - q.grad).norm() <= tolerance * q.grad.norm(), name


@pytest.mark.long
def test_many_lengths_are_compiled_for_the_first_and_for_all_others(compiled: Compiled) -> None:
    module = language_model()
    oracle, stage = deepcopy(module), make_stage("compiled", module, 0)
    for length in (6, 12, 20, 31, 7, 64, 6):
        compare(stage, oracle, tokens(2, length))
    assert compiled.general == [False] * PARTS + [True] * PARTS
    assert stage.splitter.report().notes == ()


def test_compiled_code_serves_inputs_at_any_storage_offset(compiled: Compiled) -> None:
    """Received tensors are contiguous in one buffer, so their offsets change with their lengths."""
    module = nn.Sequential(Block(WIDTH)).double()
    oracle, stage = deepcopy(module), make_stage("compiled", module, 1)
    for length in (6, 12, 20):
        message = torch.randn(2 * length * (1 + WIDTH), dtype=torch.float64)
        compare(stage, oracle, (message[2 * length :].view(2, length, WIDTH),))
    assert compiled.general == [False] * PARTS + [True] * PARTS


@pytest.mark.long
def test_batches_and_lengths_that_change_apart_are_compiled_once_more(compiled: Compiled) -> None:
    """Both sizes have doubled at the second graph, and only the third shows that one is not a multiple of the other."""
    module = language_model()
    oracle, stage = deepcopy(module), make_stage("compiled", module, 0)
    for batch, length in ((2, 6), (4, 12), (3, 12), (5, 7), (2, 31), (4, 12), (7, 7)):
        compare(stage, oracle, tokens(batch, length))
    assert compiled.general == [False] * PARTS + [True] * 2 * PARTS


@pytest.mark.long
def test_a_length_of_one_has_code_of_its_own(compiled: Compiled) -> None:
    module = language_model()
    oracle, stage = deepcopy(module), make_stage("compiled", module, 0)
    for length in (1, 6, 12, 20, 1):
        compare(stage, oracle, tokens(2, length))
    assert compiled.general == [False] * 2 * PARTS + [True] * PARTS


def test_without_symbols_each_shape_is_compiled_up_to_a_limit(compiled: Compiled) -> None:
    module = nn.Linear(4, 4).double()
    oracle, stage = deepcopy(module), make_stage("compiled", module, 1)
    compiled.refuses = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in range(2, MOST_ROUNDS + 5):
            compare(stage, oracle, (torch.randn(length, 4, dtype=torch.float64),))
    assert compiled.general.count(False) == MOST_ROUNDS * PARTS
    message = [str(warning.message) for warning in caught if "stage 1" in str(warning.message) and warning.filename == __file__]
    assert len(message) == 1
    states(message[0], 6)
    assert "(8, 4)" in message[0]
    lines = str(stage.splitter.report()).splitlines()
    states("\n".join(lines), "(3, 4)", "symbols")
    states("\n".join(lines), 6, "(10, 4)")


class Scaled(nn.Module):
    """A float, and an integer that is not a size, depend on the length, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[0]
        middle = length // 2
        y = self.linear(x) * length**0.5
        return torch.cat([y[:middle].cumsum(0), y[middle:] + torch.arange(length - middle)[:, None]]).roll(length % 3, 0)


@pytest.mark.long
def test_numbers_that_follow_a_length_in_ways_of_their_own_are_those_of_each_length(compiled: Compiled) -> None:
    module = Scaled().double()
    oracle, stage = deepcopy(module), make_stage("compiled", module, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in (4, 16, 9, 6, 25, 7, 8):
            compare(stage, oracle, (torch.randn(length, 4, dtype=torch.float64),))


def test_sizes_are_formulas_of_the_smallest() -> None:
    general = General([(24, 12, 144, 13, 768, 12), (30, 15, 225, 16, 768, 15)])
    assert general.num_symbols == 1
    assert general.symbols_of((40, 20, 400, 21, 768, 20)) == [20]
    assert general.symbols_of((40, 20, 400, 22, 768, 20)) is None
    assert list(general.sizes([7])) == [14, 7, 49, 8, 768, 7]
    with raises(ValueError, "size", 1, "graphs"):
        General([(1, 4), (6, 4)])


@takes_an_hour
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch, if nobody imported inductor before
def test_inductor_compiles_a_block_twice_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_graph, num_compiled = torch._inductor.compile, []

    def counting(*args: Any, **kwargs: Any) -> Any:
        num_compiled.append(1)
        return compile_graph(*args, **kwargs)

    monkeypatch.setattr("torch._inductor.compile", counting)
    module = language_model()
    oracle, stage = deepcopy(module), make_stage("compiled", module, 0)
    for length in (6, 12, 20, 31, 7, 2):
        compare(stage, oracle, tokens(2, length), tolerance=1e-12)
    assert len(num_compiled) == 2 * PARTS
