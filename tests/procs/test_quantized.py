"""Frozen quantized weights with further state, wherever a library keeps it: cut, trained, released and gathered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

import zerobubble as zb
from tests.procs.quantized import LAYERS, PLACES, WIDTH, Packed, State, adapted
from tests.procs.ranks import Ranks
from zerobubble.models.observation.copies import copy_of, other_tensors
from zerobubble.runtime.measure.memory_meter import storages_of
from zerobubble.runtime.values.stateful import state_of

BYTES = WIDTH * (WIDTH + 8)
"""A quantized weight, with its scales."""
ADAPTER = 2 * 4 * WIDTH + 2 * WIDTH
"""The trained elements of a layer."""


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(12, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))  # type: ignore[return-value]


def one_device(place: str, steps: int) -> nn.Module:
    model = adapted(place)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def error(model: nn.Module, oracle: nn.Module) -> float:
    """The largest relative difference of a trained weight."""
    trained = {name: parameter for name, parameter in oracle.named_parameters() if parameter.requires_grad}
    found = dict(model.named_parameters())
    return max(((found[name] - parameter).norm() / parameter.norm()).item() for name, parameter in trained.items())


def bytes_of(model: nn.Module) -> int:
    """The bytes of the storages of all tensors in a model."""
    with torch._C.DisableTorchFunctionSubclass():
        state = [tensor for part in model.modules() for _, tensor in state_of(part)]
        storages = [storage for tensor in (*model.parameters(), *model.buffers(), *state) for storage in storages_of(tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def train(group: Any, place: str, schedule: str) -> tuple[float, float, float]:
    """The errors of the gathered model: of its trained weights, and of its outputs. And the share of its bytes that a rank keeps."""
    model = adapted(place)
    whole = bytes_of(model)
    with zb.Pipeline(zb.split(model, example=batch()[0][:2]), schedule, 6, nn.functional.mse_loss, group=group) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            pipe.step(*batch(step))
            optimizer.step()
            pipe.eval_step(*batch(step))
            with zb.gathered(model, rank=0), torch.no_grad():
                if pipe.rank == 0:
                    model.eval()(batch()[0])
                    model.train()
        oracle, x, kept = one_device(place, 3), batch(9)[0], bytes_of(model)
        with zb.gathered(model):
            assert bytes_of(model) == whole
            return error(model, oracle), (model(x) - oracle(x)).abs().max().item(), kept / whole


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_adapters_on_quantized_weights_train_as_on_one_device(place: str, schedule: str, world: Ranks) -> None:
    for of_weights, of_outputs, kept in world.run(train, place, schedule, ranks=2):
        assert max(of_weights, of_outputs) <= 1e-9
        assert 0.5 <= kept <= 0.55, "what other ranks train is released, with what belongs to it"


def split_other_scales(group: Any, place: str) -> None:
    """Ranks whose quantized weights differ in a scale."""
    model = adapted(place)
    dict(state_of(model.get_submodule("2.base")))[NAMES[place]].mul_(1 + group.rank())
    zb.Pipeline(zb.split(model, example=batch()[0][:2]), "1f1b", 6, nn.functional.mse_loss, group=group).close()


NAMES = {"attribute": "weight.state.scale", "module": "state.scale", "wrapper": "weight.scale"}


@pytest.mark.parametrize("place", NAMES)
def test_ranks_with_other_scales_are_refused(place: str, world: Ranks) -> None:
    for how, text in world.outcomes(split_other_scales, place, ranks=2):
        assert how == "error"
        assert "'2.base.weight' differs" in text


@pytest.mark.parametrize("place", PLACES)
def test_bytes_are_those_of_the_packed_weights_and_their_scales(place: str) -> None:
    model = adapted(place)
    layers = zb.split(model, example=batch()[0][:2]).layers()
    assert [layer.parameters_bytes for layer in layers] == [ADAPTER * (8 + 8 + 8) + BYTES] * LAYERS


@pytest.mark.parametrize("place", PLACES)
def test_a_shape_only_copy_has_no_memory_and_no_tensor_of_the_original(place: str) -> None:
    model = adapted(place)
    shapes = copy_of(model, other_tensors(model, lambda tensor: torch.empty_like(tensor, device="meta")))
    output = shapes(torch.empty(2, WIDTH, dtype=torch.float64, device="meta"))
    assert output.is_meta
    assert output.shape == (2, WIDTH)


def test_the_proof_is_in_the_types_of_quantized_weights() -> None:
    split = zb.split(adapted("attribute"), example=batch()[0][:2])
    assert "in its own types" in split.describe(2)


def save_and_load(group: Any, place: str, folder: Path) -> float:
    """The error of a run that goes on from a checkpoint."""
    x = batch()[0][:2]
    with zb.Pipeline(zb.split(adapted(place), example=x), "1f1b", 6, nn.functional.mse_loss, group=group) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.5)
        pipe.step(*batch(0)), optimizer.step(), optimizer.zero_grad()
        zb.save(folder, pipe, optimizer)
        pipe.step(*batch(1)), optimizer.step()
        expected = {name: tensor.detach().clone() for stage in pipe.modules.values() for name, tensor in stage.named_parameters()}
    with zb.Pipeline(zb.split(adapted(place), example=x), "1f1b", 6, nn.functional.mse_loss, group=group) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.5)
        zb.load(folder, pipe, optimizer)
        pipe.step(*batch(1)), optimizer.step()
        found = {name: tensor for stage in pipe.modules.values() for name, tensor in stage.named_parameters() if tensor.requires_grad}
        return max((tensor - expected[name]).abs().max().item() for name, tensor in found.items())


@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_has_the_trained_weights_and_not_the_quantized_ones(place: str, world: Ranks, tmp_path: Path) -> None:
    assert world.run(save_and_load, place, tmp_path / "saved", ranks=2) == [0, 0]
    saved = {name.removeprefix("model.") for name in FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata}
    trained = {name for name, parameter in adapted(place).named_parameters() if parameter.requires_grad}
    assert trained <= saved
    assert place == "buffer" or not any(".base." in name for name in saved)


def test_each_weight_of_a_shape_only_copy_has_its_own_state() -> None:
    weights = (Packed(torch.zeros(size, dtype=torch.int8), State(torch.ones(size))) for size in range(1, 9))
    model = nn.ParameterList(weights)
    shapes = copy_of(model, other_tensors(model, lambda tensor: torch.empty_like(tensor, device="meta")))
    assert [weight.state.scale.shape for weight in shapes] == [(size,) for size in range(1, 9)]
