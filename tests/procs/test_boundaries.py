"""Values that may cross a stage boundary, forward and backward: nested containers, constants, named arguments, ignored inputs.

A value that is None on one device is None here.
"""

from __future__ import annotations

import copy
import re
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import cpu_only
from tests.procs.endpoints import BareLines, of_group
from tests.procs.models import Block, OneDevice, batch, loss_fn
from tests.procs.ranks import Ranks
from tests.refusals import states
from tests.thinned import every_of

NAMES = ["1f1b", "zb-h1", "zb-v", "dualpipe"]


def compare(pipe: zb.Pipeline, stages: list[nn.Module]) -> float:
    """The largest relative difference of this rank's gradients from one device's; both must be None for the same parameters."""
    worst = 0.0
    for index, module in pipe.modules.items():
        for (name, mine), theirs in zip(module.named_parameters(), stages[index].parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), f"{index} {name}: {mine.grad is None} {theirs.grad is None}"
            if mine.grad is not None and theirs.grad is not None:
                worst = max(worst, ((mine.grad - theirs.grad).abs().max() / theirs.grad.abs().max().clamp(min=1)).item())
    return worst


def train(group: Any, make_stage: Any, name: str, lanes: bool = False) -> float:
    """The largest error over a step that announces shapes, two that do not, one of another length, and an evaluation."""
    transport = of_group(BareLines, group) if lanes else "auto"
    with zb.Pipeline(make_stage, name, 4, loss_fn, group=group, transport=transport) as pipe:
        stages = [make_stage(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        worst = 0.0
        for step, length in enumerate((5, 5, 5, 3)):
            inputs, targets = batch(4, seed=step, length=length)
            loss = pipe.step(inputs, targets)
            for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
                share = loss_fn(OneDevice(stages)(x), y) / 4
                share.backward()
                loss = loss - share.detach()
            worst = max(worst, abs(loss).item(), compare(pipe, stages))
        inputs, targets = batch(4, seed=9)
        evaluated, _ = pipe.eval_step(inputs, targets)
        assert evaluated is not None
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            evaluated = evaluated - loss_fn(OneDevice(stages)(x), y).detach() / 4
        return max(worst, abs(evaluated).item())


class Part(nn.Module):
    """A stage with an embedding if it is the first, and a head if it is the last."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.stage, self.is_last = stage, stage == num_stages - 1
        self.embed = nn.Embedding(11, 6).double() if stage == 0 else nn.Identity()
        self.block = Block(6).double()
        self.head = nn.Linear(6, 11).double() if self.is_last else nn.Identity()


class ByName(Part):
    """Returns a dict; the next stage takes its entries by name, in another order."""

    def forward(self, x: Any = None, mask: Any = None, hidden: Any = None, depth: int = 0) -> Any:
        tokens = x if hidden is None else mask
        hidden = self.embed(x) if hidden is None else hidden
        hidden = self.head(self.block(hidden) * (1 + 0.01 * (depth + tokens.unsqueeze(-1))))
        return hidden if self.is_last else {"mask": tokens, "depth": depth + 1, "hidden": hidden}


Pair = namedtuple("Pair", "cos sin")


class Nested(Part):
    """Returns tensors, including a bool mask and integers, nested in lists, dicts and a named tuple, with constants of every kind."""

    def forward(self, x: Any, rest: Any = None) -> Any:
        x = self.embed(x)
        if rest is None:
            rest = {
                "tables": Pair(x.sin(), x.detach().cos()),
                3: [x > 0, None, {"scale": 0.5, "kind": "rms", "on": True}, x.long()],
                "deep": [],
            }
        keep, nothing, options, whole = rest[3]
        assert (nothing, options["kind"], options["on"], rest["deep"]) == (None, "rms", True, [])
        assert (keep.dtype, whole.dtype, type(rest["tables"])) == (torch.bool, torch.int64, Pair)
        x = self.head(self.block(x + rest["tables"].sin * rest["tables"].cos * options["scale"] * keep + whole))
        return x if self.is_last else (x, {**rest, "tables": Pair(x.sin(), rest["tables"].cos)})


@dataclass(frozen=True)
class State:
    """The output of a stage: a tensor with a gradient, one without, a number, and an earlier state."""

    hidden: Tensor
    tokens: Tensor
    depth: int
    before: State | None = None
    doubled: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", 2 * self.hidden)


class Fields(Part):
    """Returns a dataclass, which the next stage takes as its only argument."""

    def forward(self, x: Any) -> Any:
        if not isinstance(x, State):
            x = State(self.embed(x), x, 0)
        assert x.depth == self.stage
        hidden = self.head(self.block(x.hidden + 0.1 * x.doubled) * (1 + 0.01 * (x.depth + x.tokens.unsqueeze(-1))))
        if x.before is not None:
            hidden = hidden + x.before.hidden.mean()
        return hidden if self.is_last else State(hidden, x.tokens, x.depth + 1, State(x.hidden, x.tokens, x.depth))


@pytest.mark.parametrize(("name", "lanes"), [("zb-v", False), ("dualpipe", True)])
def test_a_dataclass_crosses(world: Ranks, name: str, lanes: bool) -> None:
    for worst in world.run(train, Fields, name, lanes, ranks=2):
        assert worst <= 1e-12


def split_by_graph(group: Any) -> float:
    with zb.Pipeline(Fields, "zb-h1", 4, loss_fn, split="graph", group=group) as pipe:
        stages = [Fields(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        inputs, targets = batch(4)
        pipe.step(inputs, targets)
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            (loss_fn(OneDevice(stages)(x), y) / 4).backward()
        return compare(pipe, stages)


@pytest.mark.long
def test_a_dataclass_crosses_to_a_stage_that_is_split_by_its_graph(world: Ranks) -> None:
    assert max(world.run(split_by_graph, ranks=3)) <= 1e-12


@pytest.mark.sweep
@pytest.mark.parametrize(("make_stage", "name", "lanes"), every_of(3, [ByName, Nested], NAMES, [False, True]))
def test_nests_and_constants_cross(world: Ranks, make_stage: Any, name: str, lanes: bool) -> None:
    for worst in world.run(train, make_stage, name, lanes, ranks=2):
        assert worst <= 1e-12


class Wide(Part):
    """Returns a hundred tensors."""

    def forward(self, *parts: Tensor) -> Any:
        x = self.head(self.block(self.embed(parts[0]))) + sum(part.mean() for part in parts[1:])
        return x if self.is_last else (x, *(x[..., :1] * j for j in range(100)))


@pytest.mark.long
def test_a_boundary_may_be_wide(world: Ranks) -> None:
    for worst in world.run(train, Wide, "zb-h1", ranks=3):
        assert worst <= 1e-12


class Ignoring(Part):
    """Each stage returns two tensors; the tokens of the microbatch decide which one the next stage uses."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, num_stages)
        self.aside = nn.Linear(6, 6).double()

    def forward(self, x: Tensor, aside: Any = None, tokens: Any = None) -> Any:
        tokens = x if tokens is None else tokens
        x = self.embed(x)
        uses_aside = aside is not None and self.uses(tokens)
        y = self.head(self.block(x + aside if uses_aside else x))
        return y if self.is_last else (y, self.aside(x), tokens)

    def uses(self, tokens: Tensor) -> bool:
        return False


class IgnoringSome(Ignoring):
    def uses(self, tokens: Tensor) -> bool:
        return bool(tokens.sum() % 2)


class Restarting(Part):
    """The last stage starts from the tokens again, so that no gradient reaches any stage before it."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, num_stages)
        self.again = nn.Embedding(11, 6).double()

    def forward(self, x: Tensor, tokens: Any = None) -> Any:
        tokens = x if tokens is None else tokens
        y = self.head(self.block(self.again(tokens) if self.is_last else self.embed(x)))
        return y if self.is_last else (y, tokens)


@pytest.mark.parametrize(("make_stage", "name"), every_of(5, [Ignoring, IgnoringSome, Restarting], NAMES))
def test_ignored_inputs_get_no_gradient(world: Ranks, make_stage: Any, name: str) -> None:
    for worst in world.run(train, make_stage, name, ranks=2):
        assert worst <= 1e-12


@pytest.mark.sweep
@pytest.mark.parametrize(("make_stage", "name"), every_of(5, [Ignoring, IgnoringSome, Restarting], ["zb-h1", "zb-v"]))
def test_ignored_inputs_get_no_gradient_between_machines(world: Ranks, make_stage: Any, name: str) -> None:
    for worst in world.run(train, make_stage, name, True, ranks=3):
        assert worst <= 1e-12


class Fickle(Part):
    """The second stage uses its input, but not in the second step."""

    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        x = self.embed(x)
        return self.head(self.block(torch.ones_like(x) if self.is_last and self.calls > 4 else x))


def fickle(group: Any) -> tuple[str, int]:
    with zb.Pipeline(Fickle, "1f1b", 4, loss_fn, group=group, transport=of_group(BareLines, group)) as pipe:
        pipe.step(*batch(4))
        with pytest.raises(zb.PipelineError) as caught:
            pipe.step(*batch(4))
    return str(caught.value), sum(p.grad is None for p in pipe.parameters())


def test_a_gradient_that_stays_out_later_is_reported_where_messages_cannot(world: Ranks) -> None:
    for text, missing in world.run(fickle, ranks=2):
        states(text, "stage 1", 0, "microbatch 0")
        states(text, "y + 0 * x.sum()")
        assert missing == 0


class Sometimes(Ignoring):
    """Uses its second input throughout the first step, which announces; later only in some microbatches, and in the last step in none."""

    step = 0

    def uses(self, tokens: Tensor) -> bool:
        return self.step == 0 or (self.step < 4 and bool(tokens.sum() % 2))


def train_between_machines(group: Any, make_stage: Any, name: str) -> tuple[list[list[bool]], float]:
    """Five steps: the parameters with a gradient after each, and the largest error compared with one device."""
    with zb.Pipeline(make_stage, name, 4, loss_fn, group=group, transport="gloo") as pipe:
        stages = [make_stage(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        found, worst = [], 0.0
        for step in range(5):
            for parameter in (*pipe.parameters(), *(p for stage in stages for p in stage.parameters())):
                parameter.grad = None
            for stage in (*pipe.modules.values(), *stages):
                stage.step = step
            inputs, targets = batch(4, seed=step)
            pipe.step(inputs, targets)
            for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
                (loss_fn(OneDevice(stages)(x), y) / 4).backward()
            worst = max(worst, compare(pipe, stages))
            found.append([p.grad is None for p in pipe.parameters()])
    return found, worst


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
@cpu_only("an accelerator's messages cannot say that a gradient is missing")
def test_a_gradient_that_stays_out_later_stays_out_between_machines(world: Ranks, name: str) -> None:
    results = world.run(train_between_machines, Sometimes, name, ranks=2)
    for _, worst in results:
        assert worst <= 1e-12
    lacking = [[sum(missing) for missing in steps] for steps in zip(*(found for found, _ in results), strict=True)]
    assert sum(lacking[-1]) > sum(lacking[0]), "in the last step some parameters have no gradient"


class Counting(Part):
    """Sends the next stage a number that changes with the step."""

    calls = 0

    def forward(self, x: Tensor, options: Any = None) -> Any:
        self.calls += 1
        x = self.head(self.block(self.embed(x)))
        return x if self.is_last else (x, {"turn": (self.calls - 1) // 4})


class Restructuring(Part):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        x = self.head(self.block(self.embed(x)))
        return {"x": x} if self.calls > 4 and not self.is_last else x


def change(group: Any, make_stage: Any) -> str:
    with zb.Pipeline(make_stage, "zb-h1", 4, loss_fn, group=group) as pipe:
        pipe.step(*batch(4))
        with pytest.raises(zb.PipelineError) as caught:
            pipe.step(*batch(4))
    return str(caught.value)


@pytest.mark.parametrize(
    ("make_stage", "words"),
    [(Counting, "[1]['turn'] is 1, but was 0"), (Restructuring, "is dict of 'x', but was a tuple of tensors")],
)
def test_a_constant_that_changes_is_reported_by_its_place(world: Ranks, make_stage: Any, words: str) -> None:
    for text in world.run(change, make_stage, ranks=2):
        states(text, "rank 0", "failed")
        states(text, "stage 0", "microbatch 0")
        assert words in text
        states(text, "earlier", "tensors")


class Options(Part):
    """A first stage with arguments of every kind, which it passes on as constants."""

    def forward(self, tokens: Tensor, shift: Any = None, scale: float = 1.0, style: Any = None) -> Any:
        x = self.embed(tokens)
        x = self.head(self.block(x if shift is None else x + shift))
        return x * scale if self.is_last else {"tokens": x, "scale": scale, "style": str(style)}


class Style:
    """An object that cannot cross a boundary."""

    def __str__(self) -> str:
        return "plain"


def first_arguments(group: Any) -> float:
    """Inputs as a tuple and as a dict, with numbers and objects; a constant in the inputs may change from step to step."""
    with zb.Pipeline(Options, "zb-h1", 4, loss_fn, group=group) as pipe:
        stages = [Options(s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        tokens, targets = batch(4)
        shift = torch.randn(8, 1, 6, generator=torch.Generator().manual_seed(1)).double()
        worst = 0.0
        for scale in (1.0, 0.5, 0.5, 1.0):
            given: list[Any] = [(tokens, shift, scale, Style()), {"style": Style(), "tokens": tokens, "scale": scale, "shift": shift}]
            for inputs in given:
                loss = pipe.step(inputs, targets)
                for x, s, y in zip(tokens.chunk(4), shift.chunk(4), targets.chunk(4), strict=True):
                    share = loss_fn(OneDevice(stages)((x, s, scale, Style())), y) / 4
                    share.backward()
                    loss = loss - share.detach()
                worst = max(worst, abs(loss).item(), compare(pipe, stages))
        return worst


def test_inputs_are_positional_or_named_arguments(world: Ranks) -> None:
    assert max(world.run(first_arguments, ranks=2)) <= 1e-13


class Masked(Part):
    """Takes a mask as long as the batch, a table that is not, and a number, all by keyword."""

    def forward(self, x: Tensor, *, mask: Any = None, table: Any = None, factor: float = 1.0) -> Any:
        x = self.embed(x)
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        return self.head(self.block(x if table is None else x + table * factor))


class Unmasked(Part):
    def forward(self, x: Tensor) -> Any:
        return self.head(self.block(self.embed(x)))


def mixed(stage: int, num_stages: int) -> nn.Module:
    return (Unmasked if stage == 1 else Masked)(stage, num_stages)


def with_kwargs(group: Any, name: str, samples: int, listed: bool) -> float:
    """Named arguments for the stages of each rank, split with the batch or given per microbatch; none on ranks whose stages take none."""
    with zb.Pipeline(mixed, name, 4, loss_fn, group=group) as pipe:
        count = pipe.schedule.num_stages
        stages = [mixed(s, count) for s in range(count)]
        takes = any(s != 1 for s in pipe.modules)
        inputs, targets = (part[:samples] for part in batch(4))
        generator = torch.Generator().manual_seed(3)
        mask, table = torch.rand(samples, 5, generator=generator).double(), torch.rand(3, 1, 6, generator=generator).double()[:1]
        sizes = [len(part) for part in inputs.tensor_split(4)]
        each = [{"mask": part, "table": table, "factor": 0.5} for part in mask.split(sizes)]
        whole = {"mask": mask, "table": table, "factor": 0.5}
        for _ in range(2):
            if listed:
                loss = pipe.step(list(inputs.split(sizes)), list(targets.split(sizes)), kwargs=each if takes else None)
            else:
                loss = pipe.step(inputs, targets, kwargs=whole if takes else None)
            for x, y, named in zip(inputs.split(sizes), targets.split(sizes), each, strict=True):
                share = loss_fn(OneDevice(stages, {s: named for s in range(count) if s != 1})(x), y) * (len(x) / samples)
                share.backward()
                loss = loss - share.detach()
        evaluated, _ = pipe.eval_step(inputs, targets, kwargs=whole if takes else None)
        expected = loss_fn(OneDevice(stages, {s: whole for s in range(count) if s != 1})(inputs), targets)
        assert evaluated is not None
        return max(abs(loss).item(), compare(pipe, stages), abs(evaluated - expected).item())


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(("name", "samples"), [("zb-h1", 8), ("zb-v", 7)])
def test_stages_beyond_the_first_take_arguments_by_name(world: Ranks, name: str, samples: int, listed: bool) -> None:
    for worst in world.run(with_kwargs, name, samples, listed, ranks=2):
        assert worst <= 1e-12


def profiled(group: Any) -> tuple[bool, list[bool]]:
    """Whether a profile with named arguments measured times and memory of both stages, and left gradients alone."""
    with zb.Pipeline(mixed, "zb-h1", 4, loss_fn, group=group) as pipe:
        costs = pipe.profile(*batch(4), kwargs={"factor": 0.5} if group.rank() == 0 else None, steps=1)
        return min(*costs.forward, *costs.held_after_f) > 0, [p.grad is None for p in pipe.parameters()]


def test_a_profile_takes_arguments_by_name(world: Ranks) -> None:
    for found, untouched in world.run(profiled, ranks=2):
        assert found
        assert all(untouched)


NAMES = ("args", "kwargs", "crossed", "seed", "inputs", "targets", "scaler", "num_microbatches", "part", "stage", "positional", "named")
"""Words that stages and steps use for things of their own."""


class Scaled(nn.Module):
    """A layer with its own matrix that takes an argument by one of the names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6).double())

    def forward(self, x: Tensor, part: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight * part)


class ByAllNames(nn.Module):
    """A model that takes arguments by all of the names and uses each in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(4))

    def forward(
        self,
        x: Tensor,
        args: Tensor,
        kwargs: Tensor,
        crossed: Tensor,
        seed: Tensor,
        inputs: Tensor,
        targets: Tensor,
        scaler: Tensor,
        num_microbatches: Tensor,
        part: Tensor,
        stage: Tensor,
        positional: Tensor,
        named: Tensor,
    ) -> Tensor:
        factor = args + 2 * kwargs + 3 * crossed + 4 * seed + 5 * inputs + 6 * targets + 7 * scaler + 8 * num_microbatches
        factor = factor + 9 * stage + 10 * positional + 11 * named
        for layer in self.layers:
            x = layer(x, part=part) * factor
        return x


def by_all_names(group: Any, way: str, split: str, everywhere: bool) -> float:
    """The distance of loss, output and gradients from one device, with all these arguments given on one rank or on each."""
    torch.manual_seed(0)
    model = ByAllNames()
    plain = copy.deepcopy(model)
    x, y, *rest = torch.rand(2 + len(NAMES), 8, 6, generator=torch.Generator().manual_seed(1)).double() / 8
    arguments = dict(zip(NAMES, rest, strict=True))
    example = {"x": x[:2]} | {name: value[:2] for name, value in arguments.items()}
    if way == "pipe":
        from torch.distributed.pipelining import SplitPoint, pipeline

        pipe_of_torch = pipeline(model, mb_args=(), mb_kwargs=example, split_spec={"layers.2": SplitPoint.BEGINNING})
        stages: Any = zb.split(pipe_of_torch)
    else:
        stages = zb.split(model, example=example)
    given = arguments if everywhere or group.rank() == 0 else None
    with zb.Pipeline(stages, "zb-h1", 4, nn.functional.mse_loss, group=group, split=split) as pipe:
        loss = pipe.step({"x": x}, y, kwargs=given)
        expected = nn.functional.mse_loss(plain(x, **arguments), y)
        expected.backward()
        named = [each for module in pipe.modules.values() for each in module.named_parameters()]
        found = [(parameter.grad - plain.get_parameter(name).grad).abs().max().item() for name, parameter in named]
        evaluated, _ = pipe.eval_step({"x": x}, y, kwargs=given)
        assert evaluated is not None
        return max(*found, (loss - expected).abs().item(), (evaluated - expected).abs().item())


@pytest.mark.sweep
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(("way", "split"), [("model", "deferred"), ("model", "graph"), ("pipe", "deferred")])
def test_arguments_may_have_any_name(world: Ranks, way: str, split: str, everywhere: bool) -> None:
    assert max(world.run(by_all_names, way, split, everywhere, ranks=2)) < 1e-12


def wrong_kwargs(group: Any, kwargs: Any) -> str:
    with zb.Pipeline(mixed, "1f1b", 4, loss_fn, group=group) as pipe, pytest.raises((zb.InputError, zb.PipelineError)) as caught:
        pipe.step(*batch(4), kwargs=kwargs if group.rank() == 0 else None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"maks": 1}, "no stage of this rank takes 'maks': did you mean 'mask'? the forward of stage 0 takes factor, mask, table, x"),
        ([{}], "kwargs is a list of 1, but needs a dict for each of the 4 microbatches"),
        (3, "kwargs must be a dict, or a list with a dict for each microbatch, got 3"),
    ],
)
def test_kwargs_that_fit_no_stage_are_reported(world: Ranks, kwargs: Any, words: str) -> None:
    for text in world.run(wrong_kwargs, kwargs, ranks=2):
        assert words in text


def wrong_inputs(group: Any, inputs: Any) -> str:
    with zb.Pipeline(Options, "1f1b", 4, loss_fn, group=group) as pipe, pytest.raises(zb.InputError) as caught:
        pipe.step(inputs, batch(4)[1])
    return str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([torch.ones(2)] * 3, "inputs is a list of 3, but a list has one item for each of the 4 microbatches"),
        ([torch.ones(2)] * 3 + ["four"], "microbatch 3 of inputs must be a tensor, or a tuple or dict with tensors, got 'four'"),
        ((torch.ones(8), torch.ones(4)), "the tensors of inputs must share their batch size, got [4, 8]"),
        ((torch.ones(()), 3), "inputs must be a tensor, tuple or dict"),
        ("text", "inputs must be a tensor, tuple or dict"),
    ],
)
def test_inputs_that_cannot_be_cut_are_reported(world: Ranks, inputs: Any, words: str) -> None:
    for text in world.run(wrong_inputs, inputs, ranks=2):
        assert words in text


class Telling(Part):
    """The last stage returns more than logits."""

    def forward(self, x: Tensor) -> Any:
        y = self.head(self.block(self.embed(x)))
        return (
            {"logits": y, "norm": y.norm(), "parts": (y[:, 0], "rms"), "first": len(x), "lengths": y[: 1 + len(x) % 2, :1]}
            if self.is_last
            else y
        )


def gathered(group: Any, samples: int) -> Any:
    with zb.Pipeline(Telling, "zb-h1", 4, lambda output, target: loss_fn(output["logits"], target), group=group) as pipe:
        stages = [Telling(s, 2) for s in range(2)]
        inputs, targets = (part[:samples] for part in batch(4))
        pipe.step(inputs, targets)
        loss, outputs = pipe.eval_step(inputs, targets)
        assert loss is not None
        if outputs is None:
            return None
        each = [OneDevice(stages)(x) for x in inputs.tensor_split(4)]
        torch.testing.assert_close(outputs["logits"], torch.cat([part["logits"] for part in each]))
        torch.testing.assert_close(outputs["norm"], torch.stack([part["norm"] for part in each]))
        torch.testing.assert_close(outputs["parts"][0], torch.cat([part["parts"][0] for part in each]))
        torch.testing.assert_close(outputs["lengths"], [part["lengths"] for part in each])  # no dimension has the sizes of microbatches
        return outputs["parts"][1], outputs["first"]


def test_structured_outputs_are_gathered(world: Ranks) -> None:
    assert world.run(gathered, 8, ranks=2) == [None, ("rms", 2)]
    assert world.run(gathered, 7, ranks=2) == [None, ("rms", [2, 2, 2, 1])]


class Halved(Part):
    """A stage with a dtype of its own."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, num_stages)
        self.to(torch.bfloat16 if stage == 2 else torch.float32)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.block(self.embed(x)))


def other_type(group: Any) -> tuple[str, bool]:
    with zb.Pipeline(Halved, "zb-h1", 4, loss_fn, group=group) as pipe, pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(4))
    return str(caught.value), all(p.grad is None for p in pipe.parameters())


def test_another_dtype_between_stages_is_reported_before_anything_is_done(world: Ranks) -> None:
    (text, untouched) = world.run(other_type, ranks=4)[0]
    assert untouched
    assert re.search(
        r"rank 2 failed at 'run 2F0' \(F of stage 2, microbatch 0\): .*[Dd]?type.*; stage 2 was given \(2, 5, 6\) float32 .* bfloat16",
        text,
    ), text
