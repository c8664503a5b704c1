"""A model that counts in its code around the parts: a loop reads and resets the counts as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.ranks import Ranks
from zerobubble.errors import InputError

WIDTH, MICROBATCHES, TOLERANCE = 4, 2, 1e-9
PLACES = ("before the parts", "between the parts", "child", "around parts")
KINDS = ("attribute", "property", "dict", "list", "object", "tensor", "new tensor", "buffer", "new buffer")
NAMES = {"property": "attribute", "new tensor": "tensor", "buffer": "total", "new buffer": "total"}
"""Names of the attributes that count, where they differ from the kind."""


class Record:
    """An object of the user's."""

    def __init__(self) -> None:
        self.count = 0


class Counts(nn.Module):
    """Counts in one of several ways."""

    total: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.attribute = 0
        self.dict, self.list, self.object = {"count": 0}, [0], Record()
        self.tensor = torch.zeros((), dtype=torch.float64)
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    @property
    def managed(self) -> int:
        return self.attribute

    @managed.setter
    def managed(self, value: int) -> None:
        self.attribute = value

    @property
    def count(self) -> float:
        held: dict[str, Any] = {"dict": self.dict["count"], "list": self.list[0], "object": self.object.count}
        held |= dict.fromkeys(("tensor", "new tensor"), self.tensor) | dict.fromkeys(("buffer", "new buffer"), self.total)
        return float(held.get(self.kind, self.attribute))

    def add(self) -> None:
        match self.kind:
            case "attribute":
                self.attribute += 1
            case "property":
                self.managed += 1
            case "dict":
                self.dict["count"] += 1
            case "list":
                self.list[0] += 1
            case "object":
                self.object.count += 1
            case "tensor":
                self.tensor += 1
            case "new tensor":
                self.tensor = self.tensor + 1
            case "buffer":
                self.total += 1
            case "new buffer":
                self.total = self.total + 1

    def reset(self) -> None:
        """Sets the count to its first value."""
        self.managed = self.dict["count"] = self.list[0] = self.object.count = 0
        self.tensor.zero_()
        self.total.zero_()

    def scaled(self, x: Tensor) -> Tensor:
        self.add()
        scaled: Tensor = x / (1 + 0.5 * self.count)
        return scaled

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)


class Body(Counts):
    def __init__(self, kind: str, place: str) -> None:
        super().__init__(kind)
        self.place = place
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.scaled(x) if self.place == "around parts" else x
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Net(Counts):
    def __init__(self, kind: str, place: str) -> None:
        super().__init__(kind)
        self.place = place
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.child = Counts(kind)
        self.body = Body(kind, place)

    @property
    def counted(self) -> Counts:
        return {"child": self.child, "around parts": self.body}.get(self.place, self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.scaled(x) if self.place == "before the parts" else self.child(x) if self.place == "child" else x
        x = self.body(self.embed(x))
        return self.scaled(x) if self.place == "between the parts" else x


class Trained(NamedTuple):
    """The losses of steps and evaluations, and the counts read after them."""

    losses: list[float]
    counts: list[float]


def batch() -> Tensor:
    return torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def trained(model: Net, step: Callable[[Tensor], float], evaluate: Callable[[Tensor], float]) -> Trained:
    """Resets the count before every call, every second one and never."""
    losses, counts = [], []
    for number in range(8):
        if number < 3 or number % 2:
            model.counted.reset()
        losses.append((evaluate if number == 2 else step)(batch()))
        counts.append(model.counted.count)
    return Trained(losses, counts)


def on_one_device(model: Net) -> Trained:
    def run(x: Tensor) -> float:
        return sum(nn.functional.mse_loss(model(part), part).item() / MICROBATCHES for part in x.chunk(MICROBATCHES))

    return trained(model, run, run)


def differences(group: Any, schedule: str) -> dict[tuple[str, str], tuple[float, list[float], list[float]]]:
    """For each cell, the largest error of a loss, the counts that this rank reads, and those of one device."""
    cells = {}
    for place in PLACES:
        for kind in KINDS:
            torch.manual_seed(0)
            model = Net(kind, place).double()
            expected = on_one_device(copy.deepcopy(model))
            with zb.Pipeline(zb.split(model, example=batch()[:2]), schedule, MICROBATCHES, nn.functional.mse_loss, group=group) as pipe:
                got = trained(
                    model,
                    lambda x, pipe=pipe: pipe.step(x, x).item(),  # type: ignore[misc]
                    lambda x, pipe=pipe: pipe.eval_step(x, x)[0].item(),  # type: ignore[misc]
                )
            error = max(abs(ours - theirs) for ours, theirs in zip(got.losses, expected.losses, strict=True))
            cells[place, kind] = error, got.counts, expected.counts
    return cells


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.sweep
def test_a_count_can_be_read_and_reset(world: Ranks, schedule: str) -> None:
    for cells in world.run(differences, schedule, ranks=2, seconds=240):
        wrong = {cell: found for cell, found in cells.items() if not found[0] <= TOLERANCE or found[1] != found[2]}
        assert not wrong


class Queue(nn.Module):
    """Keeps a large buffer behind its parts, and yields more values with `is_deep`."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("queue", torch.zeros(5000, dtype=torch.float64))
        self.is_deep = True

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs = []
        for layer in self.layers:
            x = layer(x).tanh()
            outputs += [x] if self.is_deep else []
        self.queue[0] += 1
        return (x / (1 + self.queue[0]), *outputs)


def sum_of_losses(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return torch.stack([nn.functional.mse_loss(output, target) for output in outputs]).sum()


def queues(group: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Queue().double()
    one = copy.deepcopy(model)
    x, errors = batch(), []
    reads: list[float | None] = []
    with zb.Pipeline(zb.split(model, example=x[:2]), "1f1b", MICROBATCHES, sum_of_losses, group=group) as pipe:
        for number in range(4):
            if number == 2:
                for each in (model, one):
                    each.is_deep = False  # fewer values cross the cut
                    each.queue.zero_()
            expected = sum(sum_of_losses(one(part), part).item() / MICROBATCHES for part in x.chunk(MICROBATCHES))
            errors.append(abs(pipe.step(x, x).item() - expected))
            try:
                reads.append(model.queue[0].item())
            except InputError:
                reads.append(None)
        with zb.gathered(model):
            gathered = model.queue[0].item()
    return {"error": max(errors), "reads": reads, "gathered": gathered}


def test_a_large_buffer_behind_the_parts_is_read_from_the_last_stage(world: Ranks) -> None:
    first, last = world.run(queues, ranks=2)
    assert max(first["error"], last["error"]) <= TOLERANCE
    assert first["reads"] == [None] * 4
    assert last["reads"] == [2, 4, 2, 4]
    assert first["gathered"] == last["gathered"] == 4


class Part(nn.Module):
    def __init__(self, record: Record) -> None:
        super().__init__()
        self.fc, self.record = nn.Linear(WIDTH, WIDTH), record

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.fc(x) / (1 + self.record.count)
        return scaled


class Shared(nn.Module):
    """Counts in an object that its parts read."""

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()
        self.layers = nn.ModuleList(Part(self.record) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        self.record.count += 1
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Overwriting(nn.Module):
    """Sets objects and tensors anew in each forward, which is no count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.cache: dict[str, Tensor] = {}
        self.hidden: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.hidden.clear()
        self.cache["mask"] = torch.ones_like(x)
        self.size = x.shape
        for layer in self.layers:
            x = layer(x).tanh()
            self.hidden.append(x.mean())
        self.last = x.detach().mean()
        return x


class Named(nn.Module):
    """A model that chooses the name of its loss in the first forward, in a configuration that its parts share."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(problem=None, scale=0.5)
        self.parts = nn.ModuleList(Scaled(self.config) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        if self.config.problem is None:
            self.config.problem = "regression"
        return x if self.config.problem == "regression" else x.sigmoid()


class Scaled(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config, self.linear = config, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.linear(x).tanh() * self.config.scale
        return scaled


def named(group: Any, schedule: str) -> tuple[float, str]:
    torch.manual_seed(0)
    model, x = Named().double(), torch.rand(4, 4, dtype=torch.float64)
    expected = nn.functional.mse_loss(copy.deepcopy(model)(x), x)
    with zb.Pipeline(zb.split(model, example=x[:1]), schedule, 2, nn.functional.mse_loss, group=group) as pipe:
        error = float(abs(pipe.step(x, x) - expected))
        pipe.step(x, x)
        return error, model.config.problem


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_name_that_the_first_forward_chooses_is_shared(world: Ranks, schedule: str) -> None:
    """Transformers' classifiers choose `config.problem_type`, and every stage of a rank chooses the same."""
    for error, problem in world.run(named, schedule, ranks=2):
        assert error < 1e-12
        assert problem == "regression"


def refusals(group: Any) -> list[str]:
    texts = []
    cells = [(Shared, "zb-v"), *((partial(Net, kind, "child"), "dualpipe") for kind in KINDS)]
    for make, schedule in cells:
        split = zb.split(make().double(), example=batch()[:2])
        with pytest.raises(InputError) as error:
            zb.Pipeline(split, schedule, 4, nn.functional.mse_loss, group=group)
        texts.append(str(error.value))
    torch.manual_seed(0)
    with zb.Pipeline(zb.split(Overwriting().double(), example=batch()[:2]), "dualpipe", 4, nn.functional.mse_loss, group=group) as pipe:
        pipe.step(batch(), batch())
    return texts


def test_stages_of_one_rank_that_would_count_twice_are_refused(world: Ranks) -> None:
    first, second = world.run(refusals, ranks=2)
    assert first == second
    assert "'record'" in first[0]
    for kind, text in zip(KINDS, first[1:], strict=True):
        assert f"'child.{NAMES.get(kind, kind)}'" in text


class Later(nn.Module):
    """Counts its calls before its parts, and behind them from the fifth microbatch on, or once `threshold` is above 2."""

    def __init__(self, *, early: bool) -> None:
        super().__init__()
        self.early, self.threshold, self.calls, self.late = early, 0, torch.zeros(()), 0
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1 if self.early else self.calls
        for layer in self.layers:
            x = layer(x).tanh()
        if (self.early and self.calls > 2 * MICROBATCHES) or self.threshold > 2:
            self.late += 1
        return x


def later_counts(group: Any, schedule: str, *, early: bool, changes_on: int | None) -> list[int]:
    """Returns the late count that this rank reads after each call; rank `changes_on` alone sets the threshold after the first one."""
    counts, x = [], batch()
    torch.manual_seed(0)
    model = Later(early=early).double()
    with zb.Pipeline(zb.split(model, example=x[:2]), schedule, MICROBATCHES, nn.functional.mse_loss, group=group) as pipe:
        for number in range(4):
            model.threshold = 3 if number and pipe.rank == changes_on else 0
            pipe.eval_step(x) if number == 3 else pipe.step(x, x)
            counts.append(model.late)
    return counts


@pytest.mark.parametrize(
    ("schedule", "last", "early", "changes_on"),
    [("1f1b", 1, True, None), ("zb-v", 0, True, None), ("1f1b", 1, False, 0), ("1f1b", 1, False, 1), ("zb-v", 0, False, 0)],
)
def test_the_last_stage_alone_decides_what_ranks_share(
    world: Ranks, schedule: str, last: int, *, early: bool, changes_on: int | None
) -> None:
    counts = world.run(partial(later_counts, early=early, changes_on=changes_on), schedule, ranks=2)
    expected = [0, 0, 2, 4] if early else [0, 2, 4, 6] if changes_on == last else [0] * 4
    assert counts == [expected] * 2


def late_refusals(group: Any) -> list[str]:
    x = batch()
    texts: list[str] = []
    torch.manual_seed(0)
    model = Later(early=False).double()
    with zb.Pipeline(zb.split(model, example=x[:2]), "dualpipe", 4, nn.functional.mse_loss, group=group) as pipe:
        pipe.step(x, x)
        pipe.step(x, x)
        model.threshold = 3
        for call in (lambda: pipe.step(x, x), lambda: pipe.eval_step(x)):
            with pytest.raises(InputError) as error:
                call()
            texts.append(error.value.fields["names"])
    return texts


def test_a_later_count_along_two_routes_is_refused(world: Ranks) -> None:
    assert world.run(late_refusals, ranks=2) == [["'late'"] * 2] * 2


class Latest(nn.Module):
    """Sets a tensor and a dict anew behind its parts, and adds to another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = torch.zeros((), dtype=torch.float64)
        self.total = torch.zeros((), dtype=torch.float64)
        self.logs: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        self.last = x.detach().mean()
        self.logs = {"last": 2 * self.last}
        self.total += 1
        return x


def kept_by_a_loop(group: Any) -> tuple[list[float], list[float], list[int]]:
    """What a loop keeps of a model in three steps, and the number of its objects."""
    torch.manual_seed(0)
    model, x = Latest().double(), batch()
    with zb.Pipeline(zb.split(model, example=x[:2]), "1f1b", MICROBATCHES, nn.functional.mse_loss, group=group) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        tensors, dicts, totals = [], [], []
        for _ in range(3):
            pipe.step(x, x)
            optimizer.step()
            tensors.append(model.last)
            dicts.append(model.logs)
            totals.append(model.total)
    numbers = [len(set(map(id, objects))) for objects in (tensors, dicts, totals)]
    return [tensor.item() for tensor in tensors], [logs["last"].item() for logs in dicts], numbers


def test_what_a_loop_keeps_stays_on_every_rank(world: Ranks) -> None:
    first, last = world.run(kept_by_a_loop, ranks=2)
    assert first == last
    assert first[2] == [3, 3, 1]
    assert len(set(first[0])) == 3
