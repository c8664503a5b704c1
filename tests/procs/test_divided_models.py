"""`zb.split` of models with tensor parallelism: they match one device, and tied parameters are refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.meshes import init_device_mesh
from tests.procs.ranks import Ranks
from tests.procs.test_mesh import relative, whole
from tests.refusals import states


class Tokens(nn.Module):
    """An embedding, a block and a head that predict the next token; the head's weight may be the embedding's."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 12, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        result: Tensor = self.head(x + self.down(self.up(x).tanh()))
        return result


class Causal(nn.Module):
    """A block that makes tensors of its own in its forward, and looks at a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        mixed = torch.softmax(x @ x.mT + mask, -1) @ x * torch.ones(8, dtype=x.dtype, device=x.device)
        hidden = self.up(mixed)
        result: Tensor = x + self.down((hidden * torch.ones(hidden.shape[-1], dtype=x.dtype, device=x.device)).tanh())
        return result


class Looking(Causal):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if torch.isfinite(x).all() else x.nan_to_num())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([Causal(), Looking()])
        self.head = nn.Linear(8, 12, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


def next_token(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def blocks_divided_and_cut(group: dist.ProcessGroup) -> float:
    """The worst relative error of a model whose divided blocks make tensors."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "tp"))
    ids = torch.arange(16).reshape(4, 4) % 12
    model = Blocks().double()
    plain = copy.deepcopy(model)
    divided = parallelize_module(model, mesh["tp"], {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})
    with zb.Pipeline(zb.split(divided, example=ids), "zb-h1", 2, next_token, mesh=mesh) as pipe:
        loss, expected = pipe.step(ids, ids), next_token(plain(ids), ids)
        expected.backward()
        named = [each for module in pipe.modules.values() for each in module.named_parameters()]
        found = [relative(whole(parameter.grad), whole(plain.get_parameter(name).grad)) for name, parameter in named]
        return max(*found, abs(loss / expected - 1).item())


@pytest.mark.long
def test_divided_parts_may_make_tensors_and_look_at_numbers(world: Ranks) -> None:
    assert max(world.run(blocks_divided_and_cut, ranks=4)) < 1e-12


def divided_and_cut(group: dist.ProcessGroup) -> tuple[float, str]:
    """Models that tensor parallelism has divided before `zb.split` cuts them: the worst relative error, and the error for tied parts."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "tp"))
    block = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    ends = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    ids, found = torch.arange(16).reshape(4, 4) % 12, []
    for is_tied, plan in ((True, block), (False, block | ends)):
        model = Tokens(is_tied=is_tied).double()
        plain = copy.deepcopy(model)
        split = zb.split(parallelize_module(model, mesh["tp"], plan), example=ids)
        with zb.Pipeline(split, "zb-h1", 2, next_token, mesh=mesh) as pipe:
            loss, expected = pipe.step(ids, ids), next_token(plain(ids), ids)
            expected.backward()
            named = [each for module in pipe.modules.values() for each in module.named_parameters()]
            found += [relative(whole(parameter.grad), whole(plain.get_parameter(name).grad)) for name, parameter in named]
            found.append(abs(loss / expected - 1).item())
    model = parallelize_module(Tokens(is_tied=False), mesh["tp"], block | ends)
    model.head.weight = model.embed.weight
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(zb.split(model, example=ids), "zb-h1", 2, next_token, mesh=mesh)
    return max(found), str(caught.value)


@pytest.mark.long
def test_models_that_are_divided_before_they_are_cut_train_as_one_device(world: Ranks) -> None:
    for rank, (worst, result) in enumerate(world.run(divided_and_cut, ranks=4)):
        assert worst < 1e-12
        states(result, "head.weight", f"rank {2 + rank % 2}", "DTensor")


def one_kernel_for_both(group: dist.ProcessGroup, way: str) -> tuple[str, bool, float]:
    """What an optimizer of one kernel raises over DTensors and plain tensors, whether they are as before, and how far two groups go."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "tp"))
    ids = torch.arange(16).reshape(4, 4) % 12
    divided = parallelize_module(Blocks(), mesh["tp"], {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})
    with zb.Pipeline(zb.split(divided, example=ids), "zb-h1", 2, next_token, mesh=mesh) as pipe:
        parameters = list(pipe.parameters())
        pipe.step(ids, ids)
        before = [whole(parameter).clone() for parameter in parameters]
        with pytest.raises(zb.InputError) as caught:
            torch.optim.AdamW(parameters, lr=0.1, **{way: True}).step()
        is_as_before = all(torch.equal(was, whole(parameter)) for was, parameter in zip(before, parameters, strict=True))
        groups = [{"params": [each for each in parameters if hasattr(each, "device_mesh") == which]} for which in (True, False)]
        torch.optim.AdamW(groups, lr=0.1, **{way: True}).step()
        moved = min((was - whole(parameter)).abs().max().item() for was, parameter in zip(before, parameters, strict=True))
        return str(caught.value), is_as_before, moved


@pytest.mark.parametrize("way", ["foreach", pytest.param("fused", marks=pytest.mark.long)])
def test_one_kernel_for_divided_and_plain_parameters_is_refused(world: Ranks, way: str) -> None:
    for text, is_as_before, moved in world.run(one_kernel_for_both, way, ranks=4):
        assert f"AdamW({way}=True)" in text
        states(text, "group")
        assert is_as_before
        assert moved > 0
