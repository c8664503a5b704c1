"""Numbers of Python, NumPy and a model's own generators that the code around its parts draws: those of one device, on all stages."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.ranks import Ranks
from tests.refusals import raises
from zerobubble.models.stages.shared_draws import LateDraws
from zerobubble.runtime.values.python_places import GeneratorState, generator_place
from zerobubble.runtime.values.python_state import PythonState
from zerobubble.schedules import with_recompute

WIDTH, MICROBATCHES, STEPS = 6, 4, 3
REMEDY = "draw them with torch's functions"


def part() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Drawing(nn.Module):
    """Four layers, and code that draws around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(part() for _ in range(4))
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Mixup(Drawing):
    """Mixes samples before a layer that is drawn, by a drawn share, and sometimes scales the output."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x
        place, share, order = random.randint(0, 3), np.random.beta(2.0, 2.0), np.random.permutation(len(x))
        for number, layer in enumerate(self.layers):
            if self.training and number == place:
                x = share * x + (1 - share) * x[order]
            x = layer(x)
        return x + share * kept


class Noise(Drawing):
    """Draws between layers and behind the last one, from each kind of generator; an early number is used late."""

    def forward(self, x: Tensor) -> Tensor:
        first = random.gauss(1.0, 0.1)
        for layer in self.layers:
            x = layer(x) * (0.5 + np.random.rand()) + 0.1 * torch.randn(WIDTH, generator=self.own, dtype=x.dtype)
        return x * first + random.random()


class Own(nn.Module):
    """A module without parameters, which keeps generators."""

    def __init__(self) -> None:
        super().__init__()
        self.of_numpy, self.of_python, self.of_torch = np.random.default_rng(5), random.Random(6), torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(WIDTH, generator=self.of_torch, dtype=x.dtype)
        return x * self.of_numpy.normal(1.0, 0.1) + self.of_python.random() + drawn


class InModules(Drawing):
    def __init__(self) -> None:
        super().__init__()
        self.noise = Own()

    def forward(self, x: Tensor) -> Tensor:
        kept = self.noise(x)
        for layer in self.layers:
            x = self.noise(layer(x))
        result: Tensor = x + kept
        return result


class Chosen(Drawing):
    """Draws from NumPy only where Python's number says so."""

    def forward(self, x: Tensor) -> Tensor:
        share = np.random.rand() if random.random() < 0.4 else 1.0
        for layer in self.layers:
            x = share * layer(x)
        return x / share


MODELS = [Mixup, Noise, InModules, Chosen]


def seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)


def batch(step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(100 + step)
    return tuple(torch.randn(16, WIDTH, generator=numbers, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def numbers_after(model: nn.Module) -> list[float]:
    """The next numbers of all generators."""
    noise = [module for module in model.modules() if isinstance(module, Own)]
    own = [module.own for module in model.modules() if isinstance(module, Drawing)] + [module.of_torch for module in noise]
    others = [(module.of_numpy.random(), module.of_python.random()) for module in noise]
    drawn = [float(torch.rand((), generator=generator)) for generator in own]
    return [
        random.random(),
        random.gauss(0.0, 1.0),
        np.random.rand(),
        np.random.normal(),
        *drawn,
        *(number for pair in others for number in pair),
    ]


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def on_one_device(kind: Callable[[], nn.Module], seed: int) -> tuple[list[float], list[float]]:
    """The losses of steps and evaluations with accumulated microbatches, and the numbers drawn after them."""
    model, found = made(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seeded(seed)
    for step in range(STEPS):
        pairs = list(zip(*(tensor.chunk(MICROBATCHES) for tensor in batch(step)), strict=True))
        losses = [nn.functional.mse_loss(model(x), y) / MICROBATCHES for x, y in pairs]
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        found.append(sum(loss.item() for loss in losses))
    model.eval()
    with torch.no_grad():
        found.append(sum(nn.functional.mse_loss(model(x), y).item() for x, y in pairs) / MICROBATCHES)
    return found, numbers_after(model)


def on_ranks(
    group: Any, kind: Callable[[], nn.Module], name: str, seeds: tuple[int, int], recomputes: bool
) -> tuple[list[float], list[float]]:
    model, found = made(kind), []
    schedule = zb.make(name, group.size(), MICROBATCHES)
    split = zb.split(model, example=batch(0)[0][:2])
    with zb.Pipeline(
        split, with_recompute(schedule) if recomputes else schedule, MICROBATCHES, nn.functional.mse_loss, group=group
    ) as pipe:
        seeded(seeds[pipe.rank])
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step in range(STEPS):
            found.append(pipe.step(*batch(step)).item())
            optimizer.step()
            optimizer.zero_grad()
        found.append(pipe.eval_step(*batch(STEPS - 1))[0].item())  # type: ignore[union-attr]
        return found, numbers_after(model)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_stages_draw_the_numbers_of_one_device(world: Ranks, kind: Callable[[], nn.Module], recomputes: bool, name: str) -> None:
    losses, after = on_one_device(kind, 2)
    for found, numbers in world.run(on_ranks, kind, name, (2, 2), recomputes, ranks=2):
        assert found == pytest.approx(losses, rel=0, abs=1e-9)
        assert numbers == after


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
@pytest.mark.parametrize("kind", [Mixup, Noise])
def test_all_stages_draw_the_numbers_of_the_first_ranks_seed(world: Ranks, kind: Callable[[], nn.Module], name: str) -> None:
    """A rank that was seeded otherwise keeps its own global generators as they are."""
    losses, after = on_one_device(kind, 2)
    (first, moved), (second, kept) = world.run(on_ranks, kind, name, (2, 9), False, ranks=2)
    assert first == second == pytest.approx(losses, rel=0, abs=1e-9)
    assert moved == after
    seeded(9)
    assert kept[:4] == numbers_after(made(kind))[:4]


class Scaled(nn.Module):
    """Linear layers, before which the code multiplies by a number of torch that it reads, and behind which it divides by it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rand(()).item() + 0.5
        x = x * scale
        for layer in self.layers:
            x = layer(x)
        return x / scale


def scaled(group: Any, name: str) -> list[float]:
    model = made(Scaled)
    with zb.Pipeline(zb.split(model, example=batch(0)[0][:2]), name, MICROBATCHES, nn.functional.mse_loss, group=group) as pipe:
        torch.manual_seed(pipe.rank)
        return [pipe.step(*batch(step)).item() for step in range(STEPS)]


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_number_that_the_code_reads_from_torch_is_one_for_all_stages(world: Ranks, name: str) -> None:
    model = made(Scaled)
    expected = [nn.functional.mse_loss(model(x), y).item() for x, y in map(batch, range(STEPS))]
    for found in world.run(scaled, name, ranks=2):
        assert found == pytest.approx(expected, rel=0, abs=1e-9)


class DrawingPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = part()

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.inner(x) * np.random.rand()
        return scaled


class InBoth(Drawing):
    """One part draws from the generator of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = DrawingPart()

    def forward(self, x: Tensor) -> Tensor:
        scale = np.random.rand()
        for layer in self.layers:
            x = layer(x)
        return x * scale


def test_numbers_of_one_generator_for_the_code_and_a_part_are_refused() -> None:
    with pytest.raises(zb.InputError) as caught:
        zb.split(made(InBoth), example=batch(0)[0][:2])
    assert caught.value.fields["unit"] == "layers.2"


def test_the_proof_compares_what_is_drawn_around_parts_in_training_mode() -> None:
    assert zb.split(made(Noise), example=batch(0)[0][:2]).describe(2).splitlines()[-1].startswith("Proved")


@pytest.mark.parametrize("schedule", [zb.make("dualpipe", 2, 4), zb.make("1f1b", 2, 4, slices=2)])
def test_schedules_that_would_draw_in_another_order_are_refused(schedule: zb.Schedule) -> None:
    split = zb.split(made(Mixup), example=batch(0)[0][:2]).for_schedule(schedule)
    with pytest.raises(zb.InputError):
        split(0, schedule.num_stages)


class DropsLater(Drawing):
    """Scales layers by numbers that it draws from the third step on."""

    def __init__(self, draw: Callable[[], float], *, counts: bool = True) -> None:
        super().__init__()
        self.draw, self.counts = draw, counts
        self.calls, self.rate = 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        rate = 0.5 * (self.calls > 2 * MICROBATCHES) if self.counts else self.rate
        for layer in self.layers:
            y = layer(x)
            x = x + (y * (self.draw() >= rate) if rate else y)
        return x


def first_draws(group: Any, name: str, draw: Callable[[], float]) -> tuple[list[float], str, bool]:
    """The losses of steps, the error of the one that draws first, and whether it leaves the weights as they are."""
    model, found = made(lambda: DropsLater(draw)), []
    with zb.Pipeline(zb.split(model, example=batch(0)[0][:2]), name, MICROBATCHES, nn.functional.mse_loss, group=group) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        try:
            for step in range(STEPS):
                before = [parameter.clone() for parameter in pipe.parameters()]
                found.append(pipe.step(*batch(step)).item())
                optimizer.step()
                optimizer.zero_grad()
        except zb.PipelineError as error:
            return found, str(error), all(map(torch.equal, before, pipe.parameters()))
    return found, "", False


def of_torch() -> float:
    return torch.rand(()).item()


def of_numpy() -> float:
    return np.random.rand()


def of_python() -> float:
    return random.random()


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
@pytest.mark.parametrize(("draw", "generator"), [(of_numpy, "NumPy"), (of_python, "Python"), (of_torch, "torch")])
def test_draws_that_begin_in_a_later_step_are_refused_in_that_step(
    world: Ranks, draw: Callable[[], float], generator: str, name: str
) -> None:
    expected, _ = on_one_device(lambda: DropsLater(draw), 2)
    for losses, error, are_same in world.run(first_draws, name, draw, ranks=2):
        assert losses == pytest.approx(expected[:2], rel=0, abs=1e-9)
        assert "InputError" in error
        assert generator in error
        assert are_same


def late_draws(draw: Callable[[], object], forwards: int, generators: dict[str, GeneratorState]) -> None:
    """Draws behind a part, once in each forward."""
    late = LateDraws(generators, torch.device("cpu"), None)
    for _ in range(forwards):
        late.begin()
        late.leave_unit("layers.0", 1)
        draw()
        late.leave_code(1)


def test_one_late_draw_from_a_generator_of_the_model_is_refused() -> None:
    own = random.Random(0)
    place = generator_place("own", own)
    assert place is not None
    with raises(zb.InputError, "own", "layers.0"):
        late_draws(own.random, 1, {"own": place})
    late_draws(random.random, 3, {"own": place})


def test_draws_of_a_thread_from_a_global_generator_are_not_those_of_the_model() -> None:
    found = PythonState(nn.Identity()).generators()["random"]
    late_draws(random.random, 1, {"random": found})
    with raises(zb.InputError, "Python", "layers.0"):
        late_draws(random.random, 2, {"random": found})
    ends = threading.Event()
    thread = threading.Thread(target=lambda: all(random.random() < 1 for _ in iter(lambda: ends.wait(0.001), True)))
    thread.start()
    try:
        late_draws(lambda: time.sleep(0.01), 20, {"random": found})
    finally:
        ends.set()
        thread.join()


def scheduled(model: DropsLater, step: Callable[..., Tensor], parameters: Iterable[nn.Parameter]) -> list[float]:
    """The losses of steps whose loop begins the draws."""
    optimizer, found = torch.optim.SGD(parameters, lr=0.1), []
    seeded(2)
    for number in range(STEPS):
        model.rate = 0.5 * (number > 0)
        found.append(step(*batch(number)).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def scheduled_on_ranks(group: Any, name: str, draw: Callable[[], float]) -> list[float]:
    model = made(lambda: DropsLater(draw, counts=False))
    assert isinstance(model, DropsLater)
    with zb.Pipeline(zb.split(model, example=batch(0)[0][:2]), name, MICROBATCHES, nn.functional.mse_loss, group=group) as pipe:
        return scheduled(model, pipe.step, pipe.parameters())


@pytest.mark.parametrize("draw", [of_numpy, of_python])
def test_draws_that_an_attribute_begins_are_those_of_one_device(world: Ranks, draw: Callable[[], float]) -> None:
    model = made(lambda: DropsLater(draw, counts=False))
    assert isinstance(model, DropsLater)

    def step(*given: Tensor) -> Tensor:
        losses = [nn.functional.mse_loss(model(x), y) / MICROBATCHES for x, y in zip(*(t.chunk(MICROBATCHES) for t in given), strict=True)]
        total = torch.stack(losses).sum()
        total.backward()
        return total

    expected = scheduled(model, step, model.parameters())
    for found in world.run(scheduled_on_ranks, "1f1b", draw, ranks=2):
        assert found == pytest.approx(expected, rel=0, abs=1e-9)


LOG: list[float] = []


class ReadsLength(Drawing):
    """Has every stage find the form of the first layer's output, which draws and is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = DrawingPart()
        self.layers[0].register_forward_hook(lambda _, __, output: LOG.append(float(output.detach().square().mean())))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        x = self.layers[1](first)[:, : first.size(1)]
        result: Tensor = self.layers[3](self.layers[2](x))
        return result


def test_the_code_and_the_hooks_of_a_part_take_effect_on_its_own_stage_alone() -> None:
    split = zb.split(made(ReadsLength), example=torch.ones(2, 3, WIDTH, dtype=torch.float64), cuts=["layers.2"])
    first, second = split(0, 2), split(1, 2)
    seeded(2)
    LOG.clear()
    for length in (3, 5, 7):
        sent = first(torch.randn(2, length, WIDTH, dtype=torch.float64))
        before, logged = np.random.get_state()[1:3], list(LOG)
        second(**sent)
        assert str(np.random.get_state()[1:3]) == str(before)
        assert logged == LOG
    assert len(LOG) == 3


def drawing_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target) * np.random.rand()


def losses_of(group: Any, kind: Callable[[], nn.Module], name: str, evaluates: bool) -> list[Any]:
    """What a step gives with a loss that draws; then the loss of one without draws."""
    model = made(kind)
    seeded(2)
    with zb.Pipeline(zb.split(model, example=batch(0)[0][:2]), name, MICROBATCHES, drawing_loss, group=group) as pipe:
        try:
            return [pipe.eval_step(*batch(0))[0].item() if evaluates else pipe.step(*batch(0)).item()]  # type: ignore[union-attr]
        except zb.InputError as error:
            return [str(error), *(parameter.grad for parameter in pipe.parameters() if parameter.grad is not None)]


class Plain(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_loss_draws_as_on_one_device_or_is_refused(world: Ranks, evaluates: bool) -> None:
    model = made(Plain)
    seeded(2)
    pairs = zip(*(tensor.chunk(MICROBATCHES) for tensor in batch(0)), strict=True)
    expected = sum(drawing_loss(model(x), y).item() / MICROBATCHES for x, y in pairs)
    for name in ("1f1b", "zb-v"):
        assert all(found == [pytest.approx(expected, rel=0, abs=1e-9)] for found in world.run(losses_of, Plain, name, evaluates, ranks=2))
    for kind, name in ((Mixup, "1f1b"), (Mixup, "zb-v"), (Plain, "dualpipe")):
        first, second = world.run(losses_of, kind, name, evaluates, ranks=2)
        assert first == second
        assert isinstance(first[0], str)
        assert "NumPy's global generator" in first[0]


def clipped(group: Any, validates: bool) -> tuple[list[float], list[float]]:
    """Losses of steps that are all clipped, so that a validation after the step runs forwards of the next one again."""
    model, found = made(Noise), []
    with zb.Pipeline(zb.split(model, example=batch(0)[0][:2]), "zb-v", MICROBATCHES, nn.functional.mse_loss, group=group) as pipe:
        seeded(2)
        inner = torch.optim.SGD(pipe.parameters(), lr=0.1)
        optimizer = zb.PostValidation(inner, pipe, 0.01) if validates else inner
        for step in range(STEPS):
            found.append(pipe.step(*batch(step)).item())
            if not validates:
                pipe.clip_grad_norm_(0.01)
            optimizer.step()
            optimizer.zero_grad()
        return found, numbers_after(model)


def test_forwards_that_run_again_draw_the_same_numbers(world: Ranks) -> None:
    for (losses, after), (expected, numbers) in zip(world.run(clipped, True, ranks=2), world.run(clipped, False, ranks=2), strict=True):
        assert losses == pytest.approx(expected, rel=0, abs=1e-9)
        assert after == numbers
