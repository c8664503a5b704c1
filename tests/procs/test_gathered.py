"""Weights of other ranks' stages are never stale: a use of them raises, and `zb.gathered` brings the trained values.

Before the first step of an optimizer, the model given to `zb.split` is whole. From then on, each rank has only what it trains.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.nn.utils import prune

import zerobubble as zb
from tests.device import cpu_only
from tests.procs.ranks import Ranks
from tests.refusals import raises
from zerobubble.runtime.values.released import is_released, refill, release

pytestmark = cpu_only("compares with one device")
WIDTH, MICROBATCHES = 6, 4
TOLERANCE = 1e-9


class Loss(nn.Module):
    """A loss with a trained parameter and constant buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.register_buffer("weights", torch.linspace(1, 2, WIDTH, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output * self.scale - target).square() * self.weights).mean()


class Net(nn.Module):
    """Blocks with buffers that change, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.first.weight
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 8, WIDTH, dtype=torch.float64, generator=generator).unbind()


class OneDevice:
    """The same training on one device."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.loss_fn = copy.deepcopy(model), Loss()
        self._optimizer = torch.optim.SGD([*self.model.parameters(), *self.loss_fn.parameters()], lr=0.1, momentum=0.9)

    def step(self, x: Tensor, y: Tensor, num_parts: int = MICROBATCHES) -> None:
        for part, target in zip(x.chunk(num_parts), y.chunk(num_parts), strict=True):
            (self.loss_fn(self.model(part), target) / num_parts).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def error_of(model: nn.Module, expected: nn.Module) -> float:
    pairs = zip(model.state_dict().values(), expected.state_dict().values(), strict=True)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def memory_of(model: nn.Module) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())}
        return sum(storage.nbytes() for storage in storages.values())


def refused(model: nn.Module, rank: int, uses: Mapping[str, Callable[[], object]]) -> list[str]:
    """The uses that do not raise the error of this rank."""
    names = dict(model.named_parameters()) | dict(model.named_buffers())
    errors = {name: _error_of(use) for name, use in uses.items()}
    return [name for name, error in errors.items() if error is None or error.fields["rank"] != rank or error.fields["name"] not in names]


def _error_of(use: Callable[[], object]) -> zb.InputError | None:
    try:
        use()
    except zb.InputError as error:
        return error
    return None


def uses_of(model: nn.Module, whole: Mapping[str, Tensor]) -> dict[str, Callable[[], object]]:
    """The ways to use the values of a model and of one of its released parameters."""
    tensor: Any = next(parameter for parameter in model.parameters() if is_released(parameter))
    buffer: Any = next(buffer for buffer in model.buffers() if is_released(buffer))
    return {
        "forward": lambda: model.eval()(batch(0)[0]),
        "state_dict": model.state_dict,
        "load_state_dict": lambda: model.load_state_dict(whole),
        "load_state_dict by assignment": lambda: model.load_state_dict(whole, assign=True),
        "load_state_dict of some": lambda: model.load_state_dict({}, strict=False),
        "deepcopy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.dumps(model),
        "torch.save": lambda: torch.save(dict(model.named_parameters()), io.BytesIO()),
        "to": lambda: model.to(torch.float32),
        "half": lambda: next(block for block in model.modules() if is_released(next(block.parameters(recurse=False), Tensor()))).half(),
        "numpy": lambda: tensor.detach().numpy(),
        "tolist": lambda: tensor.tolist(),
        "an item": lambda: tensor[0],
        "data": lambda: tensor.data,
        "assigned data": lambda: setattr(tensor, "data", torch.zeros(tensor.shape)),
        "gradient": lambda: tensor.grad,
        "norm of gradients": lambda: sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None),
        "assigned gradient": lambda: setattr(tensor, "grad", torch.zeros(tensor.shape)),
        "in place": lambda: tensor.add_(1),
        "of a list": lambda: torch._foreach_add(list(model.parameters()), 1),
        "operator": lambda: torch.ops.aten.add.Tensor(tensor, 1),
        "a vector": lambda: torch.nn.utils.parameters_to_vector(model.parameters()),
        "initialization": lambda: nn.init.zeros_(tensor),
        "a plain tensor": lambda: tensor.as_subclass(Tensor),
        "memory": lambda: tensor.untyped_storage(),
        "a gradient": lambda: torch.autograd.grad(torch.ones((), requires_grad=True), tensor, allow_unused=True),
        "an average": lambda: torch.optim.swa_utils.AveragedModel(net()).update_parameters(model),
        "buffer": lambda: buffer + 1,
    }


def harmless_uses_of(model: nn.Module) -> dict[str, Callable[[], object]]:
    """The uses of a model and of one of its released parameters that read no values, and that one rank may make alone."""
    tensor: Any = next(parameter for parameter in model.parameters() if is_released(parameter))
    return {
        "hook": lambda: tensor.register_hook(lambda gradient: gradient * 2),
        "hook after accumulation": lambda: tensor.register_post_accumulate_grad_hook(lambda parameter: None),
        "retain_grad": tensor.retain_grad,
        "requires_grad_": lambda: tensor.requires_grad_(True),
        "gradient set to None": lambda: setattr(tensor, "grad", None),
        "deleted gradient": lambda: delattr(tensor, "grad"),
        "metadata": lambda: (tensor.shape, tensor.numel(), tensor.is_sparse, tensor.is_contiguous(), tensor.is_shared(), tensor.name),
        "address": tensor.data_ptr,
        "text": lambda: (repr(tensor), f"{tensor}", repr(model)),
        "key": lambda: (hash(tensor), {tensor: 1}[tensor], tensor in set(model.parameters()), id(tensor)),
        "type": lambda: (tensor.type(), torch.result_type(tensor, 1.0), tensor.is_same_size(tensor)),
    }


class Descent(torch.optim.Optimizer):
    """An optimizer outside of torch, which skips parameters without gradients as these do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in [parameter for parameter in group["params"] if parameter.grad is not None]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])


class Decaying(Descent):
    """An optimizer outside of torch, which changes parameters before it looks for their gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.9)


def decays(group: Any, takes_model: bool) -> float | str:
    """The largest error of weights after two steps, or the remedy."""
    model, expected, (x, y) = net(), net(), batch(0)
    with zb.Pipeline(zb.split(model, example=x), "1f1b", MICROBATCHES, Loss(), group=group) as pipe:
        optimizers = [Decaying(model.parameters() if takes_model else pipe.parameters()), Decaying(expected.parameters())]
        try:
            for _ in range(2):
                pipe.step(x, y)
                for optimizer in optimizers:
                    optimizer.step()
        except zb.InputError as error:
            return str(error)
        with zb.gathered(model):
            return max(float((p - q).abs().max()) for p, q in zip(model.parameters(), expected.parameters(), strict=True))


def test_an_optimizer_that_changes_all_parameters_is_refused_with_those_of_its_rank(world: Ranks) -> None:
    assert all("pipe.parameters()" in str(found) for found in world.run(decays, True, ranks=2))
    assert max(world.run(decays, False, ranks=2)) < TOLERANCE


def shares_an_encoder(group: Any, cuts: list[list[str]]) -> float | str:
    """Steps of two models with one encoder: the error of the second loss, or of the call."""
    torch.manual_seed(0)
    encoder = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    models = [nn.Sequential(*encoder, *(nn.Linear(WIDTH, WIDTH) for _ in range(count))).double() for count in (1, 5)]
    singles, (x, y) = copy.deepcopy(models), batch(0)
    mse, losses = nn.functional.mse_loss, []
    splits = [zb.split(model, example=x[:2], cuts=own) for model, own in zip(models, cuts, strict=True)]
    with zb.Pipeline(splits[0], "1f1b", 2, mse, group=group) as one, zb.Pipeline(splits[1], "1f1b", 2, mse, group=group) as other:
        parameters = dict.fromkeys(p for model in models for p in model.parameters())
        optimizers = [torch.optim.SGD(list(parameters), 0.1)]
        optimizers.append(torch.optim.SGD(list(dict.fromkeys(p for model in singles for p in model.parameters())), 0.1))
        for pipe, single in ((one, singles[0]), (other, singles[1])):
            try:
                loss = pipe.step(x, y)
            except (zb.PipelineError, zb.InputError) as error:
                return str(error)
            expected = mse(single(x), y)
            expected.backward()
            losses.append(float(loss - expected.detach()))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return max(map(abs, losses))


def test_an_encoder_of_two_pipelines_needs_one_rank(world: Ranks) -> None:
    assert any("cuts=" in str(found) for found in world.run(shares_an_encoder, [["1"], ["4"]], ranks=2))
    assert max(world.run(shares_an_encoder, [["2"], ["2"]], ranks=2)) < TOLERANCE


def refuses(group: Any) -> None:
    model, (x, y) = net(), batch(0)
    pipe = zb.Pipeline(zb.split(model, example=x), "1f1b", MICROBATCHES, Loss(), group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    whole, size = copy.deepcopy(model).state_dict(), memory_of(model)
    pipe.step(x, y)
    pipe.eval_step(x, y)
    copy.deepcopy(model).load_state_dict(model.state_dict())  # nothing is stale before the step of an optimizer
    model.eval()(x)
    optimizer.step()
    assert refused(model, group.rank(), uses_of(model, whole)) == []
    if group.rank() == 0:
        for use in harmless_uses_of(model).values():
            use()
    released = [tensor for tensor in (*model.parameters(), *model.buffers()) if is_released(tensor)]
    freed = sum(tensor.nbytes - tensor.element_size() for tensor in released)
    assert memory_of(model) == size - freed
    assert freed > size / 4
    for tensor in released:
        assert (tensor.shape, tensor.dtype, tensor.device.type) == (tensor.size(), tensor.dtype, "cpu")
        assert "released" in repr(tensor)
        assert torch.zeros_like(tensor).shape == tensor.shape
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(parameter.numel() for parameter in net().parameters())
    assert all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in model.parameters())
    optimizer.zero_grad(set_to_none=False)
    optimizer.load_state_dict(optimizer.state_dict())
    stage = pipe.modules[group.rank()]
    stage.load_state_dict(copy.deepcopy(stage.state_dict()))  # the weights of this rank
    torch.optim.Adagrad(model.parameters()).step()  # an optimizer of all parameters steps those of this rank
    Descent(model.parameters()).step()
    model.requires_grad_(True).train().zero_grad()
    model.cpu().to("cpu").double()  # changes nothing
    assert all(map(is_released, released))
    assert dict.fromkeys(model.parameters(), 1)
    pipe.close()
    with raises(zb.InputError, remedy="enter zb.gathered(model) before the pipeline closes, or load a checkpoint"):
        zb.gathered(model)


def test_every_use_of_other_ranks_weights_is_refused_and_their_memory_is_free(world: Ranks) -> None:
    world.run(refuses, ranks=2)


def hooks_gradients(group: Any) -> None:
    """Hooks on all parameters of the model, which ranks add once other ranks' parameters are released."""
    calls: list[Tensor] = []

    def add_hooks(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            parameter.register_post_accumulate_grad_hook(calls.append)

    model = linear()
    reference, loss_fn = OneDevice(model), Loss().requires_grad_(False)
    pipe = zb.Pipeline(zb.split(model, example=batch(0)[0]), "zb-h1", MICROBATCHES, loss_fn, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference.loss_fn.requires_grad_(False)
    for seed in range(3):
        pipe.step(*batch(seed))
        optimizer.step()
        optimizer.zero_grad()
        reference.step(*batch(seed), num_parts=1)  # hooks see the gradient of the whole batch
        if seed == 0:
            add_hooks(model)
            add_hooks(reference.model)
    assert calls
    with zb.gathered(model):
        assert error_of(model, reference.model) < TOLERANCE
        pipe.close()


def test_hooks_of_other_ranks_parameters_run_on_these_ranks(world: Ranks) -> None:
    world.run(hooks_gradients, ranks=2)


def gathers(group: Any, schedule: str) -> None:
    model, loss_fn, rank = net(), Loss(), group.rank()
    reference = OneDevice(model)
    pipe = zb.Pipeline(zb.split(model, example=batch(0)[0]), schedule, MICROBATCHES, loss_fn, group=group)
    optimizer = torch.optim.SGD([*model.parameters(), *loss_fn.parameters()], lr=0.1, momentum=0.9)

    def train(seed: int) -> None:
        pipe.step(*batch(seed))
        optimizer.step()
        optimizer.zero_grad()
        reference.step(*batch(seed))

    for seed in range(3):
        train(seed)
    with zb.gathered(model):
        assert error_of(model, reference.model) < TOLERANCE
        expected = reference.model.eval()(batch(9)[0])
        assert torch.allclose(copy.deepcopy(model).eval()(batch(9)[0]), expected, rtol=0, atol=TOLERANCE)
        model.eval()(batch(9)[0])
        model.train(), reference.model.train()
    with raises(zb.InputError, rank=rank):
        model.state_dict()
    with zb.gathered(loss_fn):
        assert error_of(loss_fn, reference.loss_fn) < TOLERANCE
    with zb.gathered(model, rank=1):
        assert any(map(is_released, model.parameters())) is (rank == 0)
        assert rank == 0 or error_of(model, reference.model) < TOLERANCE
    train(3)
    with zb.gathered(model.blocks):
        assert error_of(model.blocks, reference.model.blocks) < TOLERANCE
        train(4)  # releases them
        assert any(map(is_released, model.blocks.parameters()))
    other = net()
    with zb.gathered(other, pipe):
        assert error_of(other, reference.model) < TOLERANCE
    with zb.gathered(model):
        pipe.close()
    train_alone = torch.optim.SGD(model.parameters(), lr=0.0)
    assert error_of(model, reference.model) < TOLERANCE
    Loss()(model(batch(0)[0]), batch(0)[1]).backward()
    train_alone.step()
    model.state_dict()
    with zb.gathered(model):
        model.state_dict()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", pytest.param("dualpipe-v", marks=pytest.mark.long)])
def test_gathered_weights_are_those_of_one_device(world: Ranks, schedule: str) -> None:
    world.run(gathers, schedule, ranks=2)


def is_wrong(group: Any) -> None:
    model, rank = net(), group.rank()
    pipe = zb.Pipeline(zb.split(model, example=batch(0)[0]), "1f1b", MICROBATCHES, Loss(), group=group)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
    pipe.step(*batch(0))
    optimizer.step()
    with raises(zb.InputError, argument="rank", got=2, expected=2):
        zb.gathered(model, rank=2)
    with raises(zb.InputError, got="Linear"):
        zb.gathered(nn.Linear(2, 2))
    with raises(zb.InputError, remedy="give the model that zb.split has cut"), zb.gathered(nn.Linear(2, 2), pipe):
        pass
    with raises(zb.InputError, rank=1), zb.gathered(model.blocks[rank]):
        pass
    with raises(zb.InputError, rank=0, holder=1, name="blocks.3.0.weight"), zb.gathered(model), torch.no_grad():
        if rank == 0:
            model.blocks[3][0].weight.mul_(2)
    with zb.gathered(model), torch.no_grad():  # by all ranks
        for parameter in model.parameters():
            parameter.mul_(2)
    with zb.gathered(model):
        ours = model.blocks[1][0].weight.detach().clone()
    if rank == 0:
        with pytest.raises(OSError, match="full"), zb.gathered(model, rank=0):
            raise OSError("the disk is full")
    else:
        with zb.gathered(model, rank=0):
            pass
    pipe.step(*batch(1))
    with zb.gathered(model):
        assert torch.equal(model.blocks[1][0].weight, ours)
    pipe.close()


def test_wrong_uses_of_gathered_are_refused_on_all_ranks_and_leave_the_pipeline_open(world: Ranks) -> None:
    world.run(is_wrong, ranks=2)


def before_training(group: Any) -> None:
    """Reads and changes the weights before the pipeline is made, before its first step, and after it is closed."""
    model, expected = net(), OneDevice(net())
    for whole in (model, expected.model):
        with zb.gathered(whole), torch.no_grad():
            whole.first.bias.add_(1)
    stages = zb.split(model, example=batch(0)[0])
    with zb.gathered(model.blocks, rank=0):
        assert error_of(model, expected.model) < TOLERANCE
    pipe = zb.Pipeline(stages, "1f1b", MICROBATCHES, Loss(), group=group)
    with zb.gathered(model):
        assert error_of(model, expected.model) < TOLERANCE
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    expected.step(*batch(0))
    pipe.step(*batch(0))
    optimizer.step()
    with zb.gathered(model), pipe:
        pass
    with zb.gathered(model), zb.gathered(nn.Linear(2, 2)):
        assert error_of(model, expected.model) < TOLERANCE


def between_first_steps(group: Any) -> None:
    """Changes gathered weights between a step of the pipeline and the first step of the optimizer."""
    model, expected = net(), OneDevice(net())
    with zb.Pipeline(zb.split(model, example=batch(0)[0]), "1f1b", MICROBATCHES, Loss(), group=group) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        pipe.step(*batch(0))
        for part in batch(0)[0].chunk(MICROBATCHES):
            expected.model(part)  # counts in buffers
        optimizer.zero_grad()
        for change in (0.01, -0.02):
            with zb.gathered(model), torch.no_grad():
                for parameter, theirs in zip(model.parameters(), expected.model.parameters(), strict=True):
                    parameter.add_(change)
                    theirs.add_(change)
        for seed in range(2):
            expected.step(*batch(seed))
            pipe.step(*batch(seed))
            optimizer.step()
            optimizer.zero_grad()
        with zb.gathered(model):
            assert error_of(model, expected.model) < TOLERANCE
        pipe.step(*batch(2))
        for parameter in pipe.parameters():  # outside of gathered, on each rank alone
            parameter.data.add_(1)
        foreign = next(p for p in model.parameters() if all(p is not own for own in pipe.parameters()))
        with raises(zb.InputError, "zb.gathered"):
            foreign.sum()


def test_gathered_weights_are_changed_before_the_first_step_of_an_optimizer(world: Ranks) -> None:
    world.run(between_first_steps, ranks=2)


def test_a_model_is_gathered_where_no_pipeline_is_open(world: Ranks) -> None:
    world.run(before_training, ranks=2)


def by_hand(group: Any, way: str) -> None:
    """Parameters that are changed without an optimizer of torch, or by one that a rank does not have."""
    model = net()
    if way == "frozen":
        for parameter in [*model.first.parameters(), *model.blocks[:3].parameters(), *model.head.parameters()]:
            parameter.requires_grad_(False)
    pipe = zb.Pipeline(zb.split(model, example=batch(0)[0]), "1f1b", MICROBATCHES, nn.functional.mse_loss, group=group)
    trained = [parameter for parameter in pipe.parameters() if parameter.requires_grad and parameter.numel()]
    if way == "loaded":
        pipe.step(*batch(0))
    for step in range(2 * (way != "loaded")):
        pipe.step(*batch(step))
        for parameter in trained:
            parameter.data -= 0.1 * parameter.grad
    assert any(map(is_released, model.parameters())) is (way != "loaded")
    pipe.close()


@pytest.mark.parametrize("way", ["trained", "frozen", "loaded"])
def test_weights_that_change_without_an_optimizer_are_released_in_the_next_step(world: Ranks, way: str) -> None:
    world.run(by_hand, way, ranks=2)


def by_hand_updated(parameters: list[Any], way: str) -> None:
    with torch.no_grad():
        for parameter in parameters:
            change = -0.1 * (torch.ones_like(parameter) if parameter.grad is None else parameter.grad)
            if way == "in place":
                parameter += change
            elif way == "data":
                parameter.data.add_(change)
            else:
                parameter.data = parameter.data + change
            parameter.grad = None


def is_read(group: Any) -> None:
    """Uses of the model before the next step of a loop without an optimizer."""
    rank, (x, y) = group.rank(), batch(0)
    for way in ("in place", "data", "other memory"):
        model, alone = linear(), linear()
        pipe = zb.Pipeline(zb.split(model, example=x), "1f1b", MICROBATCHES, nn.functional.mse_loss, group=group)
        for seed in range(2):
            pipe.step(*batch(seed))
            if not seed:
                assert torch.equal(copy.deepcopy(model)(x), alone(x))  # nothing is stale yet
                assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
                assert model.state_dict().keys() == alone.state_dict().keys()
            by_hand_updated(list(pipe.parameters()), way)
            nn.functional.mse_loss(alone(batch(seed)[0]), batch(seed)[1]).backward()
            by_hand_updated(list(alone.parameters()), way)
            uses = {
                "state_dict": model.state_dict,
                "forward": lambda model=model: model(x),
                "deepcopy": lambda model=model: copy.deepcopy(model),
                "average": lambda model=model: [p.lerp(p, 0.5) for p in model.parameters()],
            }
            assert refused(model, rank, dict([list(uses.items())[seed]])) == []
            assert refused(model, rank, uses) == []
            with zb.gathered(model):
                assert error_of(model, alone) < TOLERANCE
        pipe.step(x, y)
        by_hand_updated(list(pipe.parameters()), way)
        pipe.close()
        assert refused(model, rank, {"closed": model.state_dict}) == []


def is_taught(group: Any) -> None:
    """A mean teacher, whose pipeline only evaluates; `loaded` in the same way on all ranks."""
    rank, (x, y) = group.rank(), batch(0)
    student, teacher, alone = linear(), linear(), [linear(), linear()]
    trains, teaches = (
        zb.Pipeline(zb.split(model, example=x), "1f1b", MICROBATCHES, nn.functional.mse_loss, group=group) for model in (student, teacher)
    )
    optimizers = [torch.optim.SGD(parameters, lr=0.1) for parameters in (trains.parameters(), alone[0].parameters())]
    state = {name: value + 0.1 for name, value in teacher.state_dict().items()}
    teacher.load_state_dict(state), alone[1].load_state_dict(state)
    assert torch.equal(teacher(x), alone[1](x))
    for step in range(3):
        loss, _ = teaches.eval_step(x, y)
        assert abs(loss - nn.functional.mse_loss(alone[1](x), y)) < TOLERANCE
        trains.step(x, y)
        nn.functional.mse_loss(alone[0](x), y).backward()
        assert step > 0 or torch.equal(teacher(x), alone[1](x))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for mean, trained in ((teaches, trains), alone[::-1]):
                for ours, theirs in zip(mean.parameters(), trained.parameters(), strict=True):
                    ours.data.lerp_(theirs, 0.5)
        assert refused(teacher, rank, {"forward": lambda: teacher(x), "state_dict": teacher.state_dict}) == []
        with zb.gathered(teacher):
            assert error_of(teacher, alone[1]) < TOLERANCE
    trains.close(), teaches.close()
    assert refused(teacher, rank, {"closed": teacher.state_dict}) == []
    other = linear()
    with zb.Pipeline(zb.split(other, example=x), "1f1b", MICROBATCHES, nn.functional.mse_loss, group=group) as pipe:
        pipe.step(x, y)
    assert all(type(parameter) is nn.Parameter for parameter in other.parameters())


def test_weights_that_change_without_an_optimizer_are_never_stale(world: Ranks) -> None:
    world.run(is_read, ranks=2)
    world.run(is_taught, ranks=2)


def is_copied(group: Any) -> None:
    model, (x, y) = linear(), batch(0)
    parts = zb.split(model, example=x)
    pipe = zb.Pipeline(parts, "1f1b", MICROBATCHES, nn.functional.mse_loss, group=group)
    stage = pipe.modules[group.rank()]
    for call in (lambda: copy.deepcopy(stage), lambda: torch.optim.swa_utils.AveragedModel(stage), lambda: pickle.dumps(stage)):
        with raises(zb.InputError, got=type(stage).__name__):
            call()
    with raises(zb.InputError, got="ModelSplit"):
        copy.deepcopy(parts)
    with raises(zb.InputError, got="Pipeline"):
        copy.deepcopy(pipe)
    average = torch.optim.swa_utils.AveragedModel(model)  # all is whole
    assert torch.equal(average(x), linear()(x))
    pipe.step(x, y)
    pipe.close()


def test_copies_of_a_stage_are_refused(world: Ranks) -> None:
    world.run(is_copied, ranks=2)


def again(group: Any) -> None:
    """A second pipeline of the same model has other stages on the ranks."""
    model, rank = net(), group.rank()
    for place, schedule in enumerate(["1f1b", "1f1b", "zb-v"]):
        pipe = zb.Pipeline(zb.split(model, example=batch(0)[0]), schedule, MICROBATCHES, Loss(), group=group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        pipe.step(*batch(0))
        optimizer.step()
        if place != 1:
            pipe.close()
        else:
            with raises(zb.InputError, f"rank {rank}"):
                zb.Pipeline(zb.split(model, example=batch(0)[0]), "zb-v", MICROBATCHES, Loss(), group=group)
            with zb.gathered(model):
                pipe.close()


def test_a_second_pipeline_of_a_model_has_trained_weights_or_is_refused(world: Ranks) -> None:
    world.run(again, ranks=2)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()


def trained_alone(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def of_replicas(group: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model, x = linear(), batch(0)[0]
    pipe = zb.Pipeline(zb.split(model, example=x), "1f1b", MICROBATCHES, nn.functional.mse_loss, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(2):
        x, y = (part.chunk(2)[mesh.get_local_rank("dp")] for part in batch(seed))
        optimizer.zero_grad()
        pipe.step(x, y)
        optimizer.step()
    with zb.gathered(model), pipe:
        pass
    assert error_of(model, trained_alone(linear(), [batch(0), batch(1)])) < TOLERANCE


def test_each_replica_gathers_its_own_weights(world: Ranks) -> None:
    world.run(of_replicas, ranks=4)


def of_a_torch_pipe(group: Any) -> None:
    """PyTorch's tracer keeps the parameters of the model that it traces."""
    model, (x, y) = linear(), batch(0)
    traced = pipeline(model, (x.chunk(MICROBATCHES)[0],), split_spec={"2": SplitPoint.BEGINNING})
    pipe = zb.Pipeline(zb.split(traced), "1f1b", MICROBATCHES, nn.functional.mse_loss, group=group)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.step(x, y)
    optimizer.step()
    with raises(zb.InputError, rank=group.rank()):
        model.state_dict()
    with zb.gathered(model):
        assert error_of(model, trained_alone(linear(), [(x, y)])) < TOLERANCE
    pipe.close()


@pytest.mark.long
def test_a_model_that_torch_has_traced_is_gathered(world: Ranks) -> None:
    world.run(of_a_torch_pipe, ranks=2)


def of_a_checkpoint(group: Any, folder: str) -> None:
    """What is loaded into the pipeline is not in the other ranks' part of the model."""
    for is_saved in (False, True):
        model, (x, y) = linear(), batch(0)
        pipe = zb.Pipeline(zb.split(model, example=x), "1f1b", MICROBATCHES, nn.functional.mse_loss, group=group)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        if is_saved:
            zb.load(folder, pipe, optimizer)
            with raises(zb.InputError, rank=group.rank()):
                model(x)
            with zb.gathered(model):
                assert error_of(model, trained_alone(linear(), [(x, y)])) < TOLERANCE
        else:
            pipe.step(x, y)
            optimizer.step()
            zb.save(folder, pipe, optimizer)
        pipe.close()


def test_a_loaded_checkpoint_is_not_mixed_with_other_weights(world: Ranks, tmp_path: Path) -> None:
    world.run(of_a_checkpoint, str(tmp_path / "checkpoint"), ranks=2)


def test_a_released_parameter_is_the_same_object_when_it_is_refilled() -> None:
    layer = nn.Linear(3, 2)
    weight, optimizer = layer.weight, torch.optim.SGD(layer.parameters(), lr=0.1)
    release(weight, lambda what: zb.InputError("released"))
    assert (weight.stride(), weight.stride(0), weight.device.type) == ((3, 1), 3, "cpu")
    with pytest.raises(zb.InputError):
        layer(torch.ones(1, 3))
    assert Tensor(weight).isnan().all()  # one of the few functions that bypass the class
    refill(weight, torch.ones(2, 3))
    assert layer.weight is weight
    assert type(weight) is nn.Parameter
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(weight, torch.full((2, 3), 0.9))
    assert torch.equal(pickle.loads(pickle.dumps(layer)).weight, weight)


def layers_of(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def prune_globally(model: nn.Module, amount: float) -> None:
    prune.global_unstructured([(layer, "weight") for layer in layers_of(model)], prune.L1Unstructured, amount=amount)


def pruned(group: Any) -> float:
    """The largest difference from one device of a model that is pruned twice by the magnitude of all of its weights."""
    model: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))).double()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    one, loss_fn, error = OneDevice(model), Loss(), 0.0
    prune_globally(model, 0.1)
    prune_globally(one.model, 0.1)
    with zb.Pipeline(zb.split(model, example=batch(0)[0][:2]), "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            pipe.step(*batch(step))
            optimizer.step()
            optimizer.zero_grad()
            one.step(*batch(step))
            if step == 1:
                layer = next(layer for layer in layers_of(model) if is_released(layer.weight_orig))
                with raises(zb.InputError, rank=group.rank()):
                    layer.weight.count_nonzero()
                with zb.gathered(model):
                    prune_globally(model, 0.3)
                prune_globally(one.model, 0.3)
        with zb.gathered(model):
            error = error_of(model, one.model)
    return error


def test_weights_that_are_pruned_over_the_whole_model_are_those_of_one_device(world: Ranks) -> None:
    assert max(world.run(pruned, ranks=2)) < TOLERANCE


class Queue(nn.Module):
    """Blocks, and a queue of inputs that the model itself writes behind its last part, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("queue", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        inputs = x
        for block in self.blocks:
            x = block(x).tanh()
        x = x + self.queue.clone()
        self.queue.copy_(inputs.mean(0))
        return x


def queued(group: Any, folder: str, schedule: str) -> list[float]:
    """The differences from one device: of the gathered queue, of a loaded one, and of the loss after loading."""
    torch.manual_seed(0)
    one = OneDevice(Queue().double())
    model, again = copy.deepcopy(one.model), copy.deepcopy(one.model)
    with zb.Pipeline(zb.split(model, example=batch(0)[0][:2]), schedule, MICROBATCHES, Loss(), group=group) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        pipe.step(*batch(0))
        optimizer.step()
        optimizer.zero_grad()
        one.step(*batch(0))
        zb.save(folder, pipe, optimizer)
        with zb.gathered(model):
            errors = [error_of(model, one.model)]
        expected = pipe.step(*batch(1))
        optimizer.zero_grad()
    with zb.Pipeline(zb.split(again, example=batch(0)[0][:2]), schedule, MICROBATCHES, Loss(), group=group) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        zb.load(folder, pipe, optimizer)
        with zb.gathered(again):
            errors.append(error_of(again, one.model))
        errors.append(float((pipe.step(*batch(1)) - expected).abs()))
    return errors


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_buffer_that_the_model_writes_behind_its_parts_is_gathered_and_saved(world: Ranks, tmp_path: Path, schedule: str) -> None:
    for errors in world.run(queued, str(tmp_path / "checkpoint"), schedule, ranks=2):
        assert max(errors) < TOLERANCE


class Observed(nn.Module):
    """A layer with the least value of each channel, whose shape comes in the first forward, in place or in another tensor."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.layer, self.in_place = nn.Linear(WIDTH, WIDTH), in_place
        self.register_buffer("least", torch.tensor([]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).tanh()
        least = x.detach().amin(0) if self.least.numel() == 0 else torch.minimum(x.detach().amin(0), self.least)
        if self.in_place:
            self.least.resize_(least.shape).copy_(least)
        else:
            self.least = least
        return x


def observed(group: Any) -> list[float]:
    """The errors of two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Observed(in_place=number % 2 > 0) for number in range(4))).double()
    expected, (x, y), errors = OneDevice(model), batch(0), []
    expected.loss_fn = nn.MSELoss()  # type: ignore[assignment]
    pipe = zb.Pipeline(zb.split(model, example=x[:2]), "1f1b", MICROBATCHES, nn.MSELoss(), group=group)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        expected.step(x, y)
        pipe.step(x, y)
        optimizer.step()
        optimizer.zero_grad()
        with zb.gathered(model):
            errors.append(error_of(model, expected.model))
    pipe.close()
    return errors


def test_buffers_whose_shapes_come_in_the_first_forward_are_gathered(world: Ranks) -> None:
    assert max(error for errors in world.run(observed, ranks=2) for error in errors) < TOLERANCE


def gradients_before_an_optimizer(group: Any) -> tuple[list[str], bool, list[bool]]:
    """The parameters whose gradients are refused before an optimizer steps, and whether values and own gradients are readable."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4)))
    x = torch.rand(8, 4, dtype=torch.float64)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with zb.Pipeline(zb.split(model, example=x), "1f1b", 4, nn.functional.mse_loss, group=group) as pipe:
        assert [_error_of(lambda each=each: each.grad) for each in model.parameters()] == [None] * 8  # nothing has trained yet
        pipe.step(x, x)
        refused = [name for name, parameter in model.named_parameters() if _error_of(lambda each=parameter: each.grad) is not None]
        mine = {id(parameter) for parameter in pipe.parameters()}
        assert refused == [name for name, parameter in model.named_parameters() if id(parameter) not in mine]
        model.zero_grad()
        torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
        are_equal = all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
        nn.functional.mse_loss(model(x), x).backward()  # the whole model, on this rank
        are_given = [parameter.grad is not None for parameter in model.parameters()]
    return refused, are_equal, are_given


def test_gradients_of_other_ranks_are_refused_before_an_optimizer_steps(world: Ranks) -> None:
    results = world.run(gradients_before_an_optimizer, ranks=2)
    assert [len(refused) for refused, _, _ in results] == [4, 4]
    assert all(are_equal and all(are_given) for _, are_equal, are_given in results)
