"""Every kind of tensor that a stage may return: it arrives as on one device, forward and backward, or an error names its kind.

Special tensors match one device or are refused, here and in every split (`test_special_tensors.py`, `test_graph_tensors.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.endpoints import BareLines, of_group
from tests.procs.models import OneDevice, batch, loss_fn
from tests.procs.ranks import Ranks
from tests.procs.test_boundaries import Part, compare, train
from tests.refusals import states
from tests.thinned import every, every_of

NAMES = ["1f1b", "zb-h1", "zb-v", "dualpipe"]


def turned(x: Tensor) -> Tensor:
    """A complex tensor with torch's lazy conjugate bit."""
    return torch.complex(x, x.sin()).conj()


def complex_sum(z: Tensor) -> Tensor:
    return z.real + 2 * z.imag


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[..., Tensor]]] = {
    "a lazy conjugate": (turned, complex_sum),
    "a lazy conjugate and another one": (lambda x: (x, turned(x), turned(x.cos())), lambda x, y, z: x + complex_sum(y * z)),
    "a lazy negative": (lambda x: torch._neg_view(x.sin()), lambda x: x * (x + 1)),
    "a lazy negative of every second number": (lambda x: turned(x).imag, lambda x: x * x),
    "a lazy negative of a conjugate": (lambda x: turned(x).conj().conj().imag, torch.exp),
    "a conjugate as gradient": (lambda x: torch.complex(x, x.sin()), lambda z: complex_sum(z.conj() * (1 + 2j)).sin()),
    "a negative as gradient": (lambda x: x.sin(), lambda x: torch.complex(x, 2 * x).conj().imag),
    "a complex number": (lambda x: (x, torch.complex(x.mean(), x.std())), lambda x, z: complex_sum(z * x)),
    "a complex64": (lambda x: (x, turned(x).to(torch.complex64)), lambda x, z: x + complex_sum(z)),
    "an expanded tensor": (lambda x: (x, x.mean(-1, keepdim=True).expand_as(x)), torch.mul),
    "overlapping windows": (lambda x: (x, x.unfold(-1, 3, 1)), lambda x, windows: x * windows.mean((-1, -2)).unsqueeze(-1)),
    "a transposed tensor": (lambda x: x.transpose(0, 1), lambda x: x.transpose(0, 1).sin()),
    "channels last": (
        lambda x: x[..., None].contiguous(memory_format=torch.channels_last),
        lambda x: nn.functional.avg_pool2d(x, 1).squeeze(-1),
    ),
    "every second": (lambda x: x.repeat_interleave(2, -1)[..., ::2], torch.sin),
    "nothing": (lambda x: (x[:0], x, x[..., :0]), lambda none, x, empty: x + none.sum() + empty.sum()),
    "numbers": (lambda x: (x.mean(), x, x.std()), lambda mean, x, std: (x - mean) / std),
    "one tensor twice": (lambda x: (x, x), lambda x, y: x * y),
    "other types": (
        lambda x: (x, x.to(torch.bfloat16), x.half(), (x > 0).to(torch.int16), x > 1, x.detach().to(torch.float8_e5m2)),
        lambda x, *others: x + sum(other.to(x.dtype) for other in others),
    ),
}


class Crossing(Part):
    """Applies the first function of a kind to its output; the next stage reads the result with the second function."""

    def __init__(self, kind: str, stage: int, num_stages: int) -> None:
        super().__init__(stage, num_stages)
        self.give, self.read = KINDS[kind]

    def forward(self, *given: Tensor) -> Any:
        x = self.embed(given[0]) if self.stage == 0 else self.read(*given)
        x = self.head(self.block(x))
        return x if self.is_last else self.give(x)


SCHEDULES = [("1f1b", True), ("zb-h1", False), ("zb-v", False), ("dualpipe", False)]
"""Schedules, and whether messages go as between machines."""


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "name", "lanes"), every(3, ((kind, *schedule) for kind in KINDS for schedule in SCHEDULES)))
def test_every_kind_of_tensor_crosses(world: Ranks, kind: str, name: str, lanes: bool) -> None:
    for worst in world.run(train, partial(Crossing, kind), name, lanes, ranks=2):
        assert worst <= (1e-2 if kind in ("other types", "a complex64") else 1e-12)


LAZY = [kind for kind in KINDS if "lazy" in kind or "as gradient" in kind]


def train_by_graph(group: Any, kind: str) -> float:
    """The largest error of gradients over two steps of stages that are traced."""
    make_stage = partial(Crossing, kind)
    with zb.Pipeline(make_stage, "zb-h1", 4, loss_fn, group=group, split="graph") as pipe:
        stages = [make_stage(stage, 2) for stage in range(2)]
        for seed in range(2):
            inputs, targets = batch(4, seed=seed)
            pipe.step(inputs, targets)
            for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
                (loss_fn(OneDevice(stages)(x), y) / 4).backward()
        return compare(pipe, stages)


@pytest.mark.long
@pytest.mark.parametrize("kind", LAZY)
def test_a_traced_stage_hands_on_and_takes_lazy_tensors(world: Ranks, kind: str) -> None:
    for worst in world.run(train_by_graph, kind, ranks=2):
        assert worst <= 1e-12


class Stashing(nn.Module):
    """The first stage stashes a lazy conjugate; the last pops it and returns another."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.stage, self.is_last = stage, stage == num_stages - 1
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.stage == 0:
            zb.nn.stash("turned", turned(x))
        x = self.linear(x)
        return turned(x * complex_sum(zb.nn.pop("turned"))) if self.is_last else x


def stash_and_give(group: Any, name: str) -> float:
    """The largest error of gradients, the evaluation's loss and its outputs."""

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        return (complex_sum(output) * target).mean()

    inputs, targets = torch.linspace(-1, 1, 48).double().view(8, 6), torch.linspace(0, 1, 48).double().view(8, 6)
    with zb.Pipeline(Stashing, name, 4, loss_of, group=group) as pipe:
        count = pipe.schedule.num_stages
        stages = nn.Sequential(*(Stashing(stage, count) for stage in range(count)))
        for _ in range(2):
            pipe.step(inputs, targets)
            loss_of(stages(inputs), targets).backward()
        loss, outputs = pipe.eval_step(inputs, targets)
        expected = stages(inputs).detach()
        assert loss is not None
        error = abs(loss - loss_of(expected, targets)).item()
        if outputs is not None:
            error = max(error, (outputs - expected).abs().max().item())
        return max(error, compare(pipe, list(stages)))


@pytest.mark.parametrize("name", NAMES)
def test_lazy_conjugates_are_stashed_and_given_by_evaluation(world: Ranks, name: str) -> None:
    for worst in world.run(stash_and_give, name, ranks=2):
        assert worst <= 1e-12


class Densely(torch.autograd.Function):
    """Makes the gradient dense, as the operations on one device require."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to_dense()


class SparseGradient(Part):
    """The second stage uses its input as an embedding table with a sparse gradient."""

    def forward(self, x: Tensor) -> Any:
        if self.stage == 0:
            return Densely.apply(self.block(self.embed(x)).flatten(0, 1))
        rows = torch.arange(len(x)).flip(0).view(2, -1) // 2
        return self.head(self.block(nn.functional.embedding(rows, x, sparse=True)))


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_sparse_gradient_goes_back(world: Ranks, name: str, lanes: bool) -> None:
    for worst in world.run(train, SparseGradient, name, lanes, ranks=2):
        assert worst <= 1e-12


class Tagged(Tensor):
    """A tensor subclass."""


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a masked tensor": (lambda x: torch.masked.masked_tensor(x.detach(), x > 0), "is a MaskedTensor, whose numbers alone would arrive"),
    "a subclass": (lambda x: x.as_subclass(Tagged), "is a Tagged, whose numbers alone would arrive; pass plain tensors"),
    "a sparse tensor": (lambda x: x.to_sparse(), "is sparse (torch.sparse_coo); pass it .to_dense()"),
    "sparse rows": (lambda x: x[0].detach().to_sparse_csr(), "is sparse (torch.sparse_csr); pass it .to_dense()"),
    "a nested tensor": (lambda x: torch.nested.nested_tensor([x[0].detach(), x[1, :2].detach()]), "is a nested tensor; pass what"),
    "a jagged tensor": (
        lambda x: torch.nested.nested_tensor([x[0].detach(), x[1, :2].detach()], layout=torch.jagged),
        "is a nested tensor; pass what",
    ),
    "a quantized tensor": (
        lambda x: torch.quantize_per_tensor(x.detach().float(), 0.1, 0, torch.quint8),
        "is quantized (torch.quint8); pass it .dequantize()d",
    ),
    "a tensor elsewhere": (lambda x: x.detach().to("meta"), f"is on meta, and this rank computes on {DEVICE.type}"),
}


class Refused(Part):
    """Returns its output and, from the second step on (the first if `first`), a value that cannot cross a boundary."""

    calls = 0

    def __init__(self, kind: str, first: bool, stage: int, num_stages: int) -> None:
        super().__init__(stage, num_stages)
        self.give = REFUSED[kind][0]
        self.first = first

    def forward(self, x: Tensor, other: Any = None) -> Any:
        self.calls += 1
        x = self.head(self.block(self.embed(x)))
        return x if self.is_last else (x, self.give(x) if self.first or self.calls > 4 else x.detach())


def refused(group: Any, kind: str, first: bool, lanes: bool) -> str:
    transport = of_group(BareLines, group) if lanes else "auto"
    with zb.Pipeline(partial(Refused, kind, first), "zb-h1", 4, loss_fn, group=group, transport=transport) as pipe:
        if not first:
            pipe.step(*batch(4))
        with pytest.raises(zb.PipelineError) as caught:
            pipe.step(*batch(4))
    return str(caught.value)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("kind", "first", "lanes"),
    every(3, [(kind, *when) for kind in REFUSED for when in product((True, False), repeat=2) if when[0] or "elsewhere" not in kind]),
)
def test_special_tensors_are_refused_by_kind(world: Ranks, kind: str, first: bool, lanes: bool) -> None:
    for text in world.run(refused, kind, first, lanes, ranks=2):
        assert "tensor 1 of the activation of stage 0, microbatch 0 " + REFUSED[kind][1] in text


def distributed(group: Any) -> str:
    from torch.distributed.tensor import DTensor, Replicate

    from tests.procs.meshes import init_device_mesh

    mesh = init_device_mesh(DEVICE.type, (2,))

    class Meshed(Part):
        def forward(self, x: Tensor) -> Any:
            x = self.head(self.block(self.embed(x)))
            return x if self.is_last else DTensor.from_local(x, mesh, [Replicate()])

    with zb.Pipeline(Meshed, "1f1b", 4, loss_fn, group=group) as pipe, pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(4))
    return str(caught.value)


def test_a_distributed_tensor_is_refused_with_the_remedy() -> None:
    world = Ranks(2)
    try:
        for text in world.run(distributed, ranks=2):
            states(text, 0, "stage 0", "microbatch 0", "DTensor")
            states(text, "to_local", "full_tensor")
    finally:
        world.kill()


class WithTable(Part):
    """Returns two tensors; the second never has a gradient."""

    def forward(self, x: Tensor, table: Any = None) -> Any:
        x = self.head(self.block(self.embed(x)))
        return x if self.is_last else (x, x.detach().cos())


def thaw(group: Any, name: str, frozen: list[list[int]], lanes: bool) -> float:
    """The largest error over steps of one shape, before each of which some stages are frozen and all others are not."""
    transport = of_group(BareLines, group) if lanes else "auto"
    with zb.Pipeline(WithTable, name, 4, loss_fn, group=group, transport=transport) as pipe:
        count = pipe.schedule.num_stages
        stages: list[nn.Module] = [WithTable(stage, count) for stage in range(count)]
        worst = 0.0
        for step, still in enumerate(frozen):
            for stage, module in [*pipe.modules.items(), *enumerate(stages)]:
                for parameter in module.parameters():
                    parameter.requires_grad_(stage not in still or parameter is getattr(module.head, "bias", None))
                    parameter.grad = None
            inputs, targets = batch(4, seed=step)
            loss = pipe.step(inputs, targets)
            for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
                share = loss_fn(OneDevice(stages)(x), y) / 4
                share.backward()
                loss = loss - share.detach()
            worst = max(worst, abs(loss).item(), compare(pipe, stages))
    return worst


FROZEN = [[[0], [], [0, 1], [], [0]], [[0, 1], [0], [1], [0, 1], []], [[], [0], [0, 1, 2], [1], []]]


@pytest.mark.parametrize(("frozen", "name"), every_of(5, FROZEN, NAMES))
def test_stages_may_be_frozen_and_unfrozen_between_steps(world: Ranks, name: str, frozen: list[list[int]]) -> None:
    for worst in world.run(thaw, name, frozen, False, ranks=2):
        assert worst <= 1e-12


@pytest.mark.parametrize(("frozen", "shape"), every_of(5, FROZEN, [("1f1b", 3), ("zb-h1", 3), ("zb-v", 2), ("dualpipe", 2)]))
def test_stages_may_be_frozen_and_unfrozen_between_machines(world: Ranks, frozen: list[list[int]], shape: tuple[str, int]) -> None:
    name, ranks = shape
    for worst in world.run(thaw, name, frozen, True, ranks=ranks):
        assert worst <= 1e-12


def test_a_stage_may_be_frozen_where_no_rank_is_reported(world: Ranks) -> None:
    """The third of four stages is on the second rank; the first rank, which has the fourth, gets no report of it."""
    for worst in world.run(thaw, "zb-v", [[0, 1], [0, 1, 2]], True, ranks=2):
        assert worst <= 1e-12


def thaw_untold(group: Any) -> str:
    with pytest.raises(zb.PipelineError) as caught:
        thaw(group, "zb-v", [[0, 1, 2], [0, 1]], True)
    return str(caught.value)


def test_a_stage_unfrozen_where_no_rank_is_reported_is_an_error(world: Ranks) -> None:
    for text in world.run(thaw_untold, ranks=2):
        states(text, "stage 2", "microbatch 0")
        states(text, "Pipeline", "stages")


class Padded(nn.Module):
    """An encoder of torch, which makes nested tensors of padded sequences in evaluation, between its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
        self.encoder = nn.TransformerEncoder(layer, 4)

    def forward(self, x: Tensor, padding: Tensor) -> Any:
        return self.encoder(x, src_key_padding_mask=padding)


def of_padded(group: Any, *, is_nested: bool) -> tuple[str, float]:
    """The error of an evaluation, if any, and how far its output is from one device."""
    model, one_device = Padded(), Padded().eval()
    model.encoder.use_nested_tensor = one_device.encoder.use_nested_tensor = is_nested
    x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [5], [2]])
    with zb.Pipeline(zb.split(model, example=(x, padding)), "gpipe", 2, loss_fn, group=group) as pipe:
        try:
            _, output = pipe.eval_step((x, padding))
        except zb.PipelineError as error:
            return str(error), 0.0
    with torch.no_grad():
        return "", 0.0 if output is None else (output - one_device(x, padding)).abs().max().item()


def both_padded(group: Any) -> tuple[tuple[str, float], tuple[str, float]]:
    return of_padded(group, is_nested=False), of_padded(group, is_nested=True)


def test_nested_tensors_of_an_encoder_are_refused_with_a_remedy(world: Ranks) -> None:
    for padded, nested in world.run(both_padded, ranks=2):
        assert padded[0] == ""
        assert padded[1] <= 1e-12
        states(nested[0], "use_nested_tensor = False")
