"""Shared parameters and buffers of every kind match one device, or an error names their kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.models import OneDevice, batch, loss_fn, one_device
from tests.procs.ranks import Ranks
from tests.procs.test_boundaries import Part
from tests.refusals import states
from tests.thinned import every_of


class Turning(Part):
    """Has a complex weight whose gradient is a conjugate that torch has only noted down."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, num_stages)
        torch.manual_seed(77)
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.embed(x))
        turned = torch.complex(x, x.sin()) * (1 + 0.5j) + self.turn.conj()
        return self.head(turned.real + 2 * turned.imag)


class Looking(Part):
    """Looks its tokens up once more, with a sparse gradient; the tokens come along."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, num_stages)
        torch.manual_seed(78)
        self.again = nn.Embedding(11, 6, sparse=True).double()

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Any:
        tokens = x if tokens is None else tokens
        x = self.head(self.block(self.embed(x) + self.again(tokens)))
        return x if self.is_last else (x, tokens)


def shared(group: Any, make_stage: Any, name: str, parameter: str) -> float:
    """The largest error of the gradients of this rank where all stages hold one `parameter`, after two steps."""
    count = zb.make(name, group.size(), 4).num_stages
    tied = [[(stage, parameter) for stage in range(count)]]
    with zb.Pipeline(make_stage, name, 4, loss_fn, group=group, tied=tied) as pipe:
        stages = [make_stage(stage, count) for stage in range(count)]
        module, _, leaf = parameter.rpartition(".")
        for stage in stages[1:]:
            setattr(stage.get_submodule(module), leaf, stages[0].get_parameter(parameter))
        for seed in range(2):
            pipe.step(*batch(4, seed=seed))
            one_device([OneDevice(stages)], 4, *batch(4, seed=seed))
        worst = 0.0
        for stage, own in pipe.modules.items():
            for mine, theirs in zip(own.parameters(), stages[stage].parameters(), strict=True):
                assert mine.grad is not None
                assert theirs.grad is not None
                worst = max(worst, (mine.grad.to_dense() - theirs.grad.to_dense()).abs().max().item())
        return worst


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
@pytest.mark.parametrize(("make_stage", "parameter"), [(Turning, "turn"), (Looking, "again.weight")])
def test_special_gradients_of_what_is_tied_or_copied_add_up(world: Ranks, make_stage: Any, parameter: str, name: str) -> None:
    for worst in world.run(shared, make_stage, name, parameter, ranks=2):
        assert worst <= 1e-12


def tied_shards(group: Any) -> str:
    from torch.distributed.tensor import DTensor, Replicate

    from tests.procs.meshes import init_device_mesh

    mesh = init_device_mesh(DEVICE.type, (2, 1), mesh_dim_names=("pp", "tp"))

    def sharded(stage: int, num_stages: int) -> nn.Module:
        module = Turning(stage, num_stages)
        module.turn = nn.Parameter(DTensor.from_local(module.turn.detach(), mesh["tp"], [Replicate()]))
        return module

    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(sharded, "1f1b", 4, loss_fn, mesh=mesh, tied=[[(0, "turn"), (1, "turn")]])
    return str(caught.value)


def test_tied_distributed_parameters_are_refused() -> None:
    world = Ranks(2)
    try:
        for text in world.run(tied_shards, ranks=2):
            states(text, "(0, 'turn')", "rank 0", "DTensor")
            states(text, "(1, 'turn')", "rank 1", "DTensor")
            states(text, "tied")
    finally:
        world.kill()


class Normed(Part):
    """Has a batch norm."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, num_stages)
        self.norm = nn.BatchNorm1d(5).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.norm(self.embed(x))))


class Averaging(Part):
    """Keeps a mean of its own by a kernel that counts no version."""

    mean: Tensor
    spread: Tensor

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, num_stages)
        self.register_buffer("mean", torch.zeros(5).double())
        self.register_buffer("spread", torch.ones(5).double())

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.batch_norm(self.embed(x), self.mean, self.spread, training=self.training)
        return self.head(self.block(x))


class Remembering(Part):
    """Makes a table when it is first needed, which is no state of the model."""

    table: Tensor | None

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, num_stages)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[:, None]
        return self.head(self.block(x + self.table))


def still(stage: int, num_stages: int) -> nn.Module:
    """A batch norm that keeps its statistics."""
    module = Normed(stage, num_stages)
    module.norm.eval()
    return module


def with_buffers(group: Any, make_stage: Any, name: str) -> tuple[float, float] | str:
    """The largest error of gradients, and of buffers and the evaluation, after two steps; or why there are none."""
    try:
        with zb.Pipeline(make_stage, name, 4, loss_fn, group=group) as pipe:
            count = pipe.schedule.num_stages
            stages = [make_stage(stage, count) for stage in range(count)]
            for seed in range(2):
                pipe.step(*batch(4, seed=seed))
                one_device(stages, 4, *batch(4, seed=seed))
            evaluated, _ = pipe.eval_step(*batch(4, seed=2))
            for stage in stages:
                stage.eval()
            with torch.no_grad():
                parts = [loss_fn(OneDevice(stages)(x), y) / 4 for x, y in zip(*(part.chunk(4) for part in batch(4, seed=2)), strict=True)]
            assert evaluated is not None
            grads = states = 0.0
            for stage, own in pipe.modules.items():
                for mine, theirs in zip(own.parameters(), stages[stage].parameters(), strict=True):
                    if mine.grad is not None and theirs.grad is not None:
                        grads = max(grads, (mine.grad - theirs.grad).abs().max().item())
                for one, other in zip(own.buffers(), stages[stage].buffers(), strict=True):
                    states = max(states, (one - other).abs().max().item())
            return grads, max(states, abs(evaluated - sum(parts)).item())
    except zb.PipelineError as error:
        return str(error)


@pytest.mark.parametrize(
    ("make_stage", "name"), every_of(3, [Normed, Averaging, Remembering, still], ["zb-h1", "zb-v", "dualpipe", "chimera"])
)
def test_buffers_are_those_of_one_device_or_refused(world: Ranks, make_stage: Any, name: str) -> None:
    changes = make_stage in (Normed, Averaging) and name in ("dualpipe", "chimera")
    for result in world.run(with_buffers, make_stage, name, ranks=2):
        if changes:
            assert re_buffer(result, "norm." if make_stage is Normed else "mean")
            states(result, "evaluation", "module")
        else:
            assert max(result) <= 1e-12


def re_buffer(message: Any, name: str) -> bool:
    return isinstance(message, str) and f"buffer {name}" in message and "changes in a training forward" in message
