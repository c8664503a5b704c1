"""A `loss_fn` with its own parameters: they are trained, clipped, saved and reduced over replicas like those of the last stage."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.meshes import init_device_mesh
from tests.procs.models import batch, build, gradient_error
from tests.procs.ranks import Ranks
from tests.procs.test_mesh import whole
from tests.procs.versions import needs_fsdp2_on_cpu
from tests.refusals import raises, states
from zerobubble.runtime.split.stage_with_loss import StageWithLoss

COUNT = 4


class Criterion(nn.Module):
    """Cross entropy behind a trained temperature and a layer, with dropout and a running mean of the logits."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scale = nn.Parameter(torch.tensor([1.5], dtype=torch.float64))
        self.project = nn.Linear(11, 11, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        logits = self.project(self.dropout(logits)) * self.scale
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def stages_of(num_stages: int) -> list[nn.Module]:
    """Those of one device; the last has the parameters of the loss behind its own."""
    made = [build(stage, num_stages) for stage in range(num_stages)]
    return [*made[:-1], StageWithLoss(made[-1], Criterion())]


def one_device(stages: list[nn.Module], inputs: Tensor, targets: Tensor, count: int = COUNT) -> Tensor:
    last = stages[-1]
    assert isinstance(last, StageWithLoss)
    losses: list[Tensor] = []
    for x, y in zip(inputs.chunk(count), targets.chunk(count), strict=True):
        losses.append(last.loss(nn.Sequential(*stages)(x), y) / count)
        losses[-1].backward()
    return torch.stack(losses).sum().detach()


GIVEN: dict[str, Callable[[Criterion], Any]] = {
    "module": lambda criterion: criterion,
    "partial": partial,
    "method": lambda criterion: criterion.forward,
}


def train(group: Any, schedule: str, given: str, options: dict[str, Any]) -> tuple[float, list[str]]:
    """The error of gradients, the clipped norm and the loss of two steps, and the names of the last parameters of this rank."""
    loss_fn = GIVEN[given](Criterion())
    with zb.Pipeline(build, schedule, COUNT, loss_fn, group=group, **options) as pipe:
        stages = stages_of(pipe.schedule.num_stages)
        found = [abs(pipe.step(*batch(COUNT, seed=seed)) - one_device(stages, *batch(COUNT, seed=seed))).item() for seed in range(2)]
        found.append(gradient_error(pipe, stages))
        found.append(abs(pipe.clip_grad_norm_(0.1) - nn.utils.clip_grad_norm_(nn.ModuleList(stages).parameters(), 0.1)).item())
        found.append(gradient_error(pipe, stages))
        held = set(pipe.parameters())
        assert held == {parameter for module in pipe.modules.values() for parameter in module.parameters()}
        last = pipe.modules.get(len(stages) - 1)
        names = [] if last is None else [name for name, _ in last.named_parameters()][-3:]
        assert last is None or list(last.state_dict()) == list(stages[-1].state_dict())
        return max(found), names


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("schedule", "given", "options"),
    [
        ("zb-h1", "module", {}),
        ("zb-v", "partial", {}),
        ("1f1b", "method", {"split": "graph"}),
    ],
)
def test_parameters_of_the_loss_belong_to_the_last_stage(world: Ranks, schedule: str, given: str, options: dict[str, Any]) -> None:
    results = world.run(train, schedule, given, options, ranks=2)
    assert max(error for error, _ in results) < 1e-12
    assert ["loss_fn.scale", "loss_fn.project.weight", "loss_fn.project.bias"] in [names for _, names in results]


class Plain(nn.Module):
    """A loss without buffers, which copies of a stage may not change."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1) * self.scale, targets.flatten())


def with_sums(group: Any, dimension: str) -> float:
    """The error of the gradients where copies of the last stage, or replicas, have other microbatches, and begin with other values."""
    from torch.distributed.fsdp import fully_shard

    loss_fn = Plain()
    with torch.no_grad():
        loss_fn.scale += group.rank()  # those of the first count
    mesh = None if dimension == "routes" else init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=(dimension, "pp"))
    replica = 0 if mesh is None else mesh.get_local_rank(dimension)

    def make(stage: int, num_stages: int) -> nn.Module:
        module = build(stage, num_stages)
        return fully_shard(module, mesh=mesh[dimension]) if mesh is not None and dimension == "dp_shard" else module

    schedule = "chimera" if mesh is None else "zb-h1"
    with zb.Pipeline(make, schedule, COUNT, loss_fn, **({"group": group} if mesh is None else {"mesh": mesh})) as pipe:
        shares = [batch(COUNT, seed=seed) for seed in range(1 if mesh is None else 2)]
        pipe.step(*shares[replica])
        stages = [build(0, 2), StageWithLoss(build(1, 2), Plain())]
        last = stages[-1]
        assert isinstance(last, StageWithLoss)
        with torch.no_grad():  # the last stage is on rank 1, and of a bidirectional schedule on rank 0, too
            last.loss.get_parameter("scale").add_(1)
        for share in shares:
            (last.loss(nn.Sequential(*stages)(share[0]), share[1]) / len(shares)).backward()
        found = []
        for index, module in pipe.modules.items():
            for ours, theirs in zip(module.parameters(), stages[index].parameters(), strict=True):
                assert theirs.grad is not None
                found.append((whole(ours.grad) - theirs.grad).abs().max().item())
        return max(found)


@pytest.mark.sweep
@pytest.mark.parametrize("dimension", ["routes", "dp", pytest.param("dp_shard", marks=needs_fsdp2_on_cpu)])
def test_gradients_of_the_loss_are_summed_like_those_of_the_stage(world: Ranks, dimension: str) -> None:
    assert max(world.run(with_sums, dimension, ranks=2 if dimension == "routes" else 4)) < 1e-12


def saved_and_loaded(group: Any, path: Path) -> tuple[float, float]:
    """What is off in a pipeline that has loaded a checkpoint, and in the model on one device, after validated steps."""
    with zb.Pipeline(build, "zb-h1", COUNT, Criterion(), group=group) as pipe:
        optimizer = zb.PostValidation(torch.optim.Adam(pipe.parameters(), lr=0.1), pipe, max_norm=0.1)
        pipe.step(*batch(COUNT))
        optimizer.step()
        zb.save(path, pipe, optimizer)
        expected = {stage: {name: value.clone() for name, value in module.state_dict().items()} for stage, module in pipe.modules.items()}
    other = Criterion()
    nn.init.zeros_(other.scale)
    with zb.Pipeline(build, "1f1b", COUNT, other, group=group) as pipe:
        zb.load(path, pipe, torch.optim.Adam(pipe.parameters()))
        found = [
            (value - expected[stage][name]).abs().max().item()
            for stage, module in pipe.modules.items()
            for name, value in module.state_dict().items()
        ]
        moved = 0.0 if pipe.rank == 0 else abs(other.scale.item() - 1.5)
    return max(found), moved


def test_a_checkpoint_has_the_loss_and_validated_steps_train_it(world: Ranks, tmp_path: Path) -> None:
    first, second = world.run(saved_and_loaded, tmp_path / "saved", ranks=2)
    assert first[0] == second[0] == 0
    assert second[1] > 0


def loaded_on_one_device(group: Any, path: Path) -> tuple[float, float]:
    """What the criterion of a cut model has learned, and what of that is off on one device, which has it as `model.loss_fn`."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(11, 6), nn.Tanh(), nn.Linear(6, 11)).double()

    criterion, model = Criterion(), made()
    with zb.Pipeline(zb.split(made(), example=batch(COUNT)[0]), "zb-h1", COUNT, criterion, group=group) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(*batch(COUNT))
        optimizer.step()
        zb.save(path, pipe, optimizer)
    model.add_module("loss_fn", Criterion())
    zb.load(path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    if pipe.rank == 0:  # does not train the criterion
        return 0.0, 0.0
    scale = model.get_parameter("loss_fn.scale")
    return abs(criterion.scale.item() - 1.5), (scale - criterion.scale).abs().item()


def test_one_device_loads_it_as_a_part_of_the_model(world: Ranks, tmp_path: Path) -> None:
    _, (learned, off) = world.run(loaded_on_one_device, tmp_path / "saved", ranks=2)
    assert learned > 0
    assert off == 0


class Tied(nn.Module):
    """A loss that reads the vectors of tokens, which are those of the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(11, 6, dtype=torch.float64)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        distance = (logits.softmax(-1) @ self.vectors.weight - self.vectors(targets)).square().mean()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + distance


def tied(group: Any) -> float:
    """The error of the gradients and the norm where the loss shares a parameter with the first stage."""
    groups = [[(0, "0.weight"), (1, "loss_fn.vectors.weight")]]
    with zb.Pipeline(build, "zb-h1", COUNT, Tied(), group=group, tied=groups) as pipe:
        loss = Tied()
        stages = [build(0, 2), StageWithLoss(build(1, 2), loss)]
        loss.vectors.weight = stages[0].get_parameter("0.weight")  # type: ignore[assignment]
        pipe.step(*batch(COUNT))
        one_device(stages, *batch(COUNT))
        error = gradient_error(pipe, stages)
        return max(error, abs(pipe.clip_grad_norm_(1.0) - nn.utils.clip_grad_norm_(nn.ModuleList(stages).parameters(), 1.0)).item())


def test_parameters_of_the_loss_may_be_tied(world: Ranks) -> None:
    assert max(world.run(tied, ranks=2)) < 1e-12


def evaluated(group: Any) -> tuple[float, bool]:
    """The difference between two evaluations of a loss with dropout, and whether it is in training mode afterwards."""
    criterion = Criterion(dropout=0.5)
    with zb.Pipeline(build, "zb-h1", COUNT, criterion, group=group) as pipe:
        first, second = (pipe.eval_step(*batch(COUNT))[0] for _ in range(2))
        assert first is not None
        assert second is not None
        return abs(first - second).item(), criterion.dropout.training and criterion.calls.item() == 0


def test_the_loss_follows_the_mode_of_the_stage(world: Ranks) -> None:
    assert world.run(evaluated, ranks=2) == [(0.0, True)] * 2


class Logging(nn.Module):
    """A loss that keeps its parts for a log, in attributes of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, Any] = {}
        self.history: list[float] = []
        self.last = torch.zeros(())
        self.calls = 0
        self.inner = nn.Identity()
        self.rank = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        square, absolute = nn.functional.mse_loss(output, target), nn.functional.l1_loss(output, target)
        self.logs = {"square": square.item(), "parts": {"absolute": absolute.detach()}}
        self.history.append(square.item())
        self.last = square.detach()
        self.calls += 1
        self.inner.seen = f"call {self.calls}"
        return square + absolute

    def kept(self) -> list[float]:
        seen = float(self.inner.seen.removeprefix("call "))
        return [self.logs["square"], float(self.logs["parts"]["absolute"]), *self.history, float(self.last), self.calls, seen]


def logged(group: Any, schedule: str) -> tuple[list[list[float]], list[list[float]], bool]:
    """What the loss keeps after each call of a pipeline and on one device, and whether an attribute of the rank's own stays."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6, dtype=torch.float64, device=DEVICE) for _ in range(4)]
    x = torch.rand(8, 6, dtype=torch.float64, device=DEVICE)
    whole, alone, loss, ours, theirs = nn.Sequential(*layers), Logging(), Logging(), [], []
    loss.rank = group.rank()
    with zb.Pipeline(zb.split(whole, example=x[:2]), schedule, COUNT, loss, group=group) as pipe:
        for call in (pipe.step, pipe.step, pipe.eval_step):
            call(x, x.cos())
            ours.append(loss.kept())
            loss.history.clear()
            for inputs in x.chunk(COUNT):
                alone(whole(inputs), inputs.cos())
            theirs.append(alone.kept())
            alone.history.clear()
    return ours, theirs, loss.rank == group.rank()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_every_rank_has_what_the_loss_keeps(world: Ranks, schedule: str) -> None:
    for ours, theirs, keeps_own in world.run(logged, schedule, ranks=2):
        assert [pytest.approx(kept, abs=1e-12) for kept in theirs] == ours
        assert keeps_own


class AverageMeter:
    """The meter of many training scripts."""

    def __init__(self) -> None:
        self.last = self.sum = 0.0
        self.count = 0

    def update(self, value: float) -> None:
        self.last = value
        self.sum += value
        self.count += 1


@dataclass(frozen=True)
class Record:
    value: float
    history: tuple[float, ...] = ()


class Metered(nn.Module):
    """A loss that keeps values as training scripts do, in containers and objects that it changes in place or replaces."""

    weights: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.meter, self.meters, self.by_name = AverageMeter(), [AverageMeter(), AverageMeter()], {"square": AverageMeter()}
        self.made: dict[str, AverageMeter] = defaultdict(AverageMeter)
        self.logs: dict[str, list[float]] = defaultdict(list)
        self.recent: deque[float] = deque(maxlen=3)
        self.counts: Counter[str] = Counter()
        self.ordered: OrderedDict[int, float] = OrderedDict()
        self.nested: dict[str, Any] = {"a": {"b": [0.0, {1}]}, "c": ()}
        self.space = SimpleNamespace(calls=0)
        self.record = Record(0.0)
        self.array = np.zeros(3)
        self.pair = torch.zeros(2, dtype=torch.float64), 0
        self.all: list[float] = [0.0] * 5000
        self.large = torch.zeros(5000)
        self.register_buffer("weights", torch.ones(6, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.inner = nn.Identity()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = (self.weights * (output - target).square()).mean()
        value = loss.item()
        for meter in (self.meter, self.meters[1], self.by_name["square"], self.made["new"]):
            meter.update(value)
        self.logs["loss"].append(value)
        self.recent.append(value)
        self.counts["calls"] += 1
        self.ordered[len(self.ordered)] = value
        self.nested["a"]["b"][0] += value
        self.nested["a"]["b"][1].add(self.counts["calls"])
        self.nested["c"] = (*self.nested["c"], value)
        self.space.calls += 1
        self.record = Record(value, (*self.record.history, value))
        self.array[1] += np.float64(value)
        self.pair[0].add_(value)
        self.pair = self.pair[0], self.pair[1] + 1
        self.all.append(value)
        self.large = self.large + 1
        self.weights = self.weights * 0.9
        self.calls += 1
        self.inner.latest = loss.detach()
        return loss

    def kept(self) -> list[Any]:
        meters = [vars(meter) for meter in (self.meter, *self.meters, *self.by_name.values(), *self.made.values())]
        values = [self.logs, self.recent, self.counts, self.ordered, self.nested, self.space, self.record, self.array, self.pair, self.all]
        return list(map(repr, (*meters, *values, self.weights, self.calls, self.inner.latest)))


class Trainer:
    """Keeps what its loss computes, and a module, in attributes."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.meter, self.criterion = model, AverageMeter(), nn.MSELoss()

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.criterion(output, target)
        self.meter.update(loss.item())
        return loss

    def compute_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self(output, target)

    def kept(self) -> list[Any]:
        return [repr(vars(self.meter))]


def metered(group: Any, kind: str, schedule: str) -> tuple[list[Any], list[Any], list[bool], str]:
    """What a loss keeps after each call and on one device, whether objects stay the same, and the error for a large tensor."""
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)))
    x = torch.rand(8, 6, dtype=torch.float64)
    loss, alone = (Metered(), Metered()) if kind == "module" else (Trainer(whole), Trainer(whole))
    loss_fn = loss.compute_loss if kind == "method" and isinstance(loss, Trainer) else loss
    meter, ours, theirs, latest = loss.meter, [], [], []
    with zb.Pipeline(zb.split(whole, example=x[:2]), schedule, COUNT, loss_fn, group=group) as pipe:
        for call in (pipe.step, pipe.step, pipe.eval_step):
            call(x, x.cos())
            for inputs in x.chunk(COUNT):
                alone(whole(inputs), inputs.cos())
            ours.append(loss.kept())
            theirs.append(alone.kept())
            latest += [loss.inner.latest] if isinstance(loss, Metered) else []
        are_same = [loss.meter is meter, len(set(map(id, latest))) == len(latest)]
        text = ""
        try:
            _ = loss.large.sum() if isinstance(loss, Metered) else None
        except zb.InputError as error:
            text = str(error)
    return ours, theirs, are_same, text


@pytest.mark.parametrize(("kind", "schedule"), [("module", "1f1b"), ("module", "zb-v"), ("object", "1f1b"), ("method", "1f1b")])
def test_every_rank_has_the_meters_of_a_loss(world: Ranks, kind: str, schedule: str) -> None:
    last = 0 if schedule == "zb-v" else 1
    for rank, (ours, theirs, are_same, text) in enumerate(world.run(metered, kind, schedule, ranks=2)):
        assert [(a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True) if a != b] == []
        assert all(are_same)
        assert ("'large'" in text) == (kind == "module" and rank != last)


def on_two_routes(group: Any) -> tuple[str, bool]:
    """The error for a loss that counts on both ranks, and whether all gradients are None then."""
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)))
    x = torch.rand(8, 6, dtype=torch.float64)
    with zb.Pipeline(zb.split(whole, example=x[:2]), "dualpipe", COUNT, Trainer(whole), group=group) as pipe:
        with raises(zb.InputError, "meter") as caught:
            pipe.step(x, x.cos())
        are_none = all(parameter.grad is None for parameter in pipe.parameters())
        with raises(zb.InputError, "meter"):
            pipe.step(x, x.cos())
        return str(caught.value), are_none


def test_a_loss_that_counts_on_two_routes_is_refused(world: Ranks) -> None:
    (first, first_none), (second, second_none) = world.run(on_two_routes, ranks=2)
    assert first == second
    assert first_none
    assert second_none


def hidden(group: Any, is_used: bool) -> str:
    """What a step raises whose loss is a function around a criterion, or around something that trains nothing."""
    criterion: nn.Module = Criterion() if is_used else nn.CrossEntropyLoss(weight=torch.ones(11, dtype=torch.float64))

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = criterion(logits, targets) if is_used else criterion(logits.flatten(0, 1), targets.flatten())
        return loss

    with zb.Pipeline(build, "zb-h1", COUNT, loss_fn, group=group) as pipe:
        try:
            pipe.step(*batch(COUNT))
        except zb.InputError as error:
            pipe.eval_step(batch(COUNT)[0])
            return str(error)
    return ""


def test_parameters_that_a_function_hides_are_refused(world: Ranks) -> None:
    for text in world.run(hidden, True, ranks=2):
        states(text, "loss_fn", "parameter")
    assert world.run(hidden, False, ranks=2) == ["", ""]


def test_a_loss_that_the_stage_holds_is_not_held_twice() -> None:
    from zerobubble.runtime.split.stage_with_loss import with_loss

    stage = build(1, 2)
    criterion = Criterion()
    stage.add_module("criterion", criterion)
    assert with_loss(stage, criterion) is stage
    assert with_loss(stage, nn.MSELoss()) is stage
    both = with_loss(stage, Plain())
    assert isinstance(both, StageWithLoss)
    assert with_loss(both, None) is stage
    stage.add_module("loss_fn", Plain())
    with raises(zb.InputError, "loss_fn.scale"):
        with_loss(stage, Plain())


def test_the_state_of_both_is_loaded() -> None:
    both = stages_of(1)[0]
    other = StageWithLoss(build(0, 1), Criterion())
    nn.init.zeros_(other.loss.get_parameter("scale"))
    assert not other.load_state_dict(both.state_dict()).missing_keys
    assert other.loss.get_parameter("scale").item() == 1.5
