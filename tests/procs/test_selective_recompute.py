"""Selective recompute: results match forwards that run once, bit for bit, within the predicted bytes.

That includes autocast, nested calls, skips and checkpoints. All ranks agree on which modules are recomputed.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.models import loss_fn
from tests.procs.programs import programs_of, run_forked
from tests.procs.ranks import Ranks
from tests.refusals import states
from zerobubble.costs import Level
from zerobubble.planning import Plan
from zerobubble.planning.problem.recomputation import Recomputation
from zerobubble.runtime.stage.levels import GivenLevels, RecomputeLevels
from zerobubble.schedules import with_recompute

WIDTH = 8
ATTENTION = {"selective": ["*.attn"]}


class Attention(nn.Module):
    """Attention with dropout and running statistics, called with a named argument; gives a tuple and adds to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = self.drop((q @ k.mT * scale).softmax(-1))
        y = self.out(weights @ v)
        zb.nn.add_loss("weights", weights.square().mean() * 0.01)
        return self.norm(y.flatten(0, 1)).view_as(y), weights.mean()


class Block(nn.Module):
    """Attention that is called twice, a checkpoint with dropout around another, and a perceptron that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.again = Attention()
        self.again.norm = nn.Identity()  # running statistics within a checkpoint are refused
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            y, mean = self.attn(x, scale=0.5)
            x = x + y + mean
        x = x + checkpoint(lambda x: self.again(x, scale=1.0)[0], x, use_reentrant=False)
        with torch.autocast(DEVICE.type, enabled=False):
            return x + self.mlp(x.to(self.mlp[0].weight.dtype))


class Stage(nn.Module):
    """A stage of one block, with a skip from the first stage to the last, and a tied weight at both ends."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.tok = nn.Embedding(11, WIDTH) if stage == 0 else None
        self.head = nn.Linear(WIDTH, 11, bias=False) if stage == num_stages - 1 else None
        self.blocks = nn.ModuleList([Block()])
        self.skip = Skip(stage, num_stages)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tok is None else self.tok(x)
        for block in self.blocks:
            x = block(x)
        x = self.skip(x)
        return x if self.head is None else self.head(x)


class Skip(nn.Module):
    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            zb.nn.stash("skip", x.tanh())
        return x.sigmoid() * zb.nn.pop("skip") if self.is_last else x.sigmoid()


def leave(group: Any, schedule: zb.Schedule, recompute: Any, split: str, dtype: torch.dtype | None) -> list[Tensor]:
    """All tensors that two steps leave on this rank, of which the second takes other microbatches; under autocast with a `dtype`."""
    tied = [[(0, "tok.weight"), (schedule.num_stages - 1, "head.weight")]]
    count = schedule.num_microbatches
    torch.manual_seed(7)

    def build(stage: int, num_stages: int) -> nn.Module:
        return Stage(stage, num_stages) if dtype else Stage(stage, num_stages).double()

    with zb.Pipeline(build, schedule, count, loss_fn, group=group, tied=tied, recompute=recompute, split=split) as pipe:
        losses = []
        for step in range(2):
            tokens = torch.randint(0, 11, (2 * count, 6), generator=torch.Generator().manual_seed(step))
            with torch.autocast(DEVICE.type, dtype or torch.bfloat16, enabled=dtype is not None):
                losses.append(pipe.step(tokens[:, :-1], tokens[:, 1:]).detach())
            pipe.metering = True
        parts = [part for module in pipe.modules.values() for part in (*(p.grad for p in module.parameters()), *module.buffers())]
        added = [value.clone() for value in pipe.added_losses.values()]
    return [*losses, *added, *(part.detach().clone() for part in parts if part is not None), torch.get_rng_state()]


WHAT: dict[str, Any] = {
    "names": ATTENTION,
    "classes": {"mine": [Attention, Skip, nn.Sequential]},
    "a function": {"mine": lambda name, module: name.startswith("blocks.0.")},
    "inner ones": {"mine": ["*.qkv", "*.norm", "*.attn.*", "*.again.out"]},
    "by stage": {"mine": {1: Block}},
}


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits; on an accelerator nearly so, because its kernels add in no fixed order."""
    return torch.equal(one, other) if DEVICE.type == "cpu" else torch.allclose(one, other, rtol=1e-5)


def are_equal(group: Any, name: str, microbatches: int, what: str, split: str, dtype: torch.dtype | None) -> bool:
    plain = zb.make(name, group.size(), microbatches)
    before = leave(group, plain, None, split, dtype)
    after = leave(group, with_recompute(plain), WHAT[what], split, dtype)
    return all(map(same, before, after))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ranks", "case"),
    [
        ("zb-h1", 2, (3, "names", "deferred", None)),
        ("1f1b", 2, (2, "a function", "whole", torch.bfloat16)),
        ("zb-v", 2, (2, "by stage", "deferred", torch.bfloat16)),
        ("gpipe", 2, (2, "inner ones", "deferred", None)),
        ("1f1b", 3, (4, "classes", "deferred", None)),
        ("zb-v", 2, (4, "names", "whole", None)),
    ],
)
def test_chosen_modules_that_run_twice_leave_what_they_leave_when_they_run_once(world: Ranks, name: str, ranks: int, case: Any) -> None:
    assert all(world.run(are_equal, name, *case, ranks=ranks))


# What is held.


def blocks(stage: int, num_stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(*[Plain() for _ in range(3)])


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Unlike(nn.Module):
    """Stages that each keep a different share of their saved tensors."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.layers = nn.Sequential(*[Plain() for _ in range(2)])
        self.tail = nn.Sequential(*[nn.Tanh() for _ in range(4 * stage)])

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.layers(x))


def profiled(group: Any) -> zb.Costs:
    """The costs with the levels of the stages, and what a profile leaves behind."""
    x = torch.randn(12, 8, 32)
    plain = zb.make("gpipe", group.size(), 6)
    heard: list[tuple[int, int]] = []
    with zb.Pipeline(lambda s, n: Unlike(s), plain, 6, nn.functional.mse_loss, group=group, recompute=LEVELS) as pipe:
        costs = pipe.profile(x, x, steps=1, progress=lambda done, total: heard.append((done, total)))
        assert heard == [(done, 6) for done in range(1, 7)]
        assert all(parameter.grad is None for parameter in pipe.parameters())
    return costs


LEVELS = {"most": "*.mlp"}


def held_at(group: Any, names: list[str]) -> list[int]:
    """The most bytes that each rank holds in a step of a plan whose stages have these levels."""
    x = torch.randn(12, 8, 32)
    with zb.Pipeline(lambda s, n: Unlike(s), plan_at(names), 6, nn.functional.mse_loss, group=group, recompute=LEVELS) as pipe:
        pipe.metering = True
        pipe.step(x, x)
        return [figures.peak_bytes or 0 for figures in pipe.timeline().ranks]


def plan_at(names: list[str], costs: zb.Costs | None = None) -> Plan:
    """A plan whose stages have the levels with these names, of `costs` or of no matter which."""
    costs = costs or zb.Costs.uniform(len(names)).with_level("most", (0, 0), (0, 0)).with_level("full", (0, 0), (0, 0))
    known = {level.name: level for level in costs.levels}
    again = Recomputation(costs.levels, tuple(known[name] for name in names))
    costs = replace(costs.with_recompute(again.chosen), placement=None)
    problem = zb.planning.Problem(zb.Placement.linear(len(names)), 6, costs, zb.Limits((10**9,) * len(names)), recomputation=again)
    return Plan.from_schedule(problem, problem.bound(), with_recompute(zb.make("gpipe", len(names), 6)), 0.0, "made")


@pytest.mark.long
def test_a_profile_predicts_the_bytes_of_each_stage_at_each_level_and_plans_choose_among_them(world: Ranks) -> None:
    costs, again = world.run(profiled, ranks=2)
    assert costs == again
    for names in (["most", "most"], ["full", "most"], ["most", "full"]):
        predicted = plan_at(names, costs).peaks
        assert predicted is not None
        for rank, (held, result) in enumerate(zip(world.run(held_at, names, ranks=2)[0], predicted, strict=True)):
            assert abs(result / held - 1) <= 0.05, (rank, names, result, held)
    most, full = costs.levels
    assert (most.name, full.name) == ("most", "full")
    assert 0 < most.kept_in(0) < most.kept_in(1) < 1
    room = zb.Limits(tuple(3 * held for held in costs.held_after_f))
    found = zb.plan(zb.Costs.from_dict(costs.to_dict()), 6, room, recompute="auto", seconds=0)
    chosen = found.problem.recomputation
    assert chosen is not None
    assert chosen.offered == (zb.costs.NONE, most, full)
    assert Plan.from_dict(found.to_dict()).problem == found.problem


@pytest.mark.long
def test_the_page_s_program_plans_with_what_it_measured_and_holds_what_was_planned(tmp_path: Path) -> None:
    *_, program = programs_of("docs/recompute.md")
    printed = run_forked(program, tmp_path, 2)
    states(printed, "recomputation")
    held, room, planned = (list(map(int, re.findall(r"\d+", part))) for part in re.split("of|planned", printed.splitlines()[-1]))
    assert len(held) == len(room) == len(planned) == 2
    for rank in range(2):
        assert abs(planned[rank] / held[rank] - 1) <= 0.05, (rank, printed)
        assert planned[rank] <= room[rank]


# Plans.


def partly(ranks: int) -> Plan:
    """A plan of which rank 0 computes its stage again in part, and the others compute theirs whole."""
    part, full = Level("selective", 0.1, 0.5), Level("full", 1.0, 0.1)
    costs = zb.Costs.uniform(ranks).with_recompute([part, *[full] * (ranks - 1)])
    again = Recomputation((part, full), (part, *[full] * (ranks - 1)))
    problem = zb.planning.Problem(zb.Placement.linear(ranks), 4, costs, zb.Limits((10**9,) * ranks), recomputation=again)
    return Plan.from_schedule(problem, problem.bound(), with_recompute(zb.make("gpipe", ranks, 4)), 0.0, "made")


def play_plan(group: Any, recompute: Any) -> str:
    """The description of the stages of a pipeline that plays a plan, or the error."""
    x = torch.randn(8, 8, 32)
    try:
        with zb.Pipeline(blocks, partly(group.size()), 4, nn.functional.mse_loss, group=group, recompute=recompute) as pipe:
            pipe.step(x, x)
            return str(pipe.describe(x, x))
    except zb.InputError as error:
        return str(error)


def test_a_plan_shows_the_level_of_each_stage(world: Ranks) -> None:
    for result in world.run(play_plan, {"selective": ["*.mlp"], "other": ["*.norm"]}, ranks=2):
        assert "level 'selective': R recomputes 0.mlp, 1.mlp, 2.mlp\n" in result
        assert result.endswith("level 'full': R recomputes the whole stage")


def test_those_that_go_on_without_a_rank_compute_again_what_they_did_before() -> None:
    given: GivenLevels = {"selective": "*.mlp", "by stage": {1: "*.norm"}}
    planned = RecomputeLevels(given, ["selective", "by stage", "by stage", "full"])
    after = RecomputeLevels(planned.as_one(range(4)))
    for stage in range(4):
        before, now = (levels.parts_of(levels.name_of(stage), stage, blocks(stage, 4)).parts for levels in (planned, after))
        assert (before is None, before and list(before)) == (now is None, now and list(now)) == WHOLE_OR_PARTS[stage]


WHOLE_OR_PARTS = [(False, ["0.mlp", "1.mlp", "2.mlp"]), (False, ["0.norm", "1.norm", "2.norm"]), (True, None), (True, None)]


# What is refused.


class ChangesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        y = self.part(x).tanh()
        x.mul_(2)
        return y


class Counts(nn.Module):
    """Saves less when it is computed again, which is its third call. What counts is of a library, so R does not put it back."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(32, 32)
        self.call = mock.Mock()

    def forward(self, x: Tensor) -> Tensor:
        self.call()
        return self.part(x).tanh().sin() if self.call.call_count <= 2 else self.part(x)


class AsksForGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x)
        (slope,) = torch.autograd.grad(y.square().sum(), y, create_graph=True)
        (slope,) = torch.autograd.grad(slope.sum(), self.part.weight)
        return y + slope.sum()


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        self.part.compile(backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class Many(nn.Sequential):
    """More modules than an error names."""

    def __init__(self) -> None:
        super().__init__(OrderedDict((f"m{number}", nn.Tanh()) for number in range(9)))


def refused(group: Any, stage_type: Any, recompute: Any, split: str) -> str:
    schedule = with_recompute(zb.make("gpipe", 2, 2))
    x = torch.randn(4, 8, 32)
    with (
        pytest.raises((zb.InputError, zb.PipelineError)) as caught,
        zb.Pipeline(
            lambda s, n: nn.Sequential(stage_type()), schedule, 2, nn.functional.mse_loss, group=group, recompute=recompute, split=split
        ) as pipe,
    ):
        pipe.step(x, x)
    return str(caught.value)


@pytest.mark.parametrize(
    ("stage_type", "recompute", "split", "message"),
    [
        (
            ChangesInput,
            {"a": "*.part"},
            "deferred",
            "(2, 8, 32) torch.float32, was changed in place, so that it cannot be recomputed",
        ),
        (Counts, {"a": Counts}, "whole", "tensors for its backward, and"),
        (
            AsksForGradients,
            {"a": "*.part"},
            "deferred",
            "the forward computes gradients through '0.part'",
        ),
        (
            Compiled,
            {"a": "*.part.0"},
            "deferred",
            "of stage 0 cannot be recomputed separately, because '0.part' is compiled as a unit",
        ),
        (
            Block,
            {"a": nn.ReLU},
            "deferred",
            "'0.mlp.1' of stage 0 is ReLU(inplace=True), which changes its input, so that it cannot be recomputed separately: set",
        ),
        (Plain, {"a": "*.mlp"}, "graph", "split='graph' traces stage 0, and traced stages cannot be recomputed"),
        (
            Plain,
            {"a": "*.attn"},
            "deferred",
            "of any stage; the levels are a (*.attn). Modules in stages are called norm, mlp: give patterns such as '*.norm'",
        ),
        (Many, {"a": "*.attn"}, "deferred", "called m0, m1, m2, m3, m4, m5, m6, m7: give patterns"),
        (Plain, {"a": "*.mlp", "b": "*.norm"}, "deferred", "without levels, and several levels are given: a, b"),
        (Plain, {"full": "*.mlp"}, "deferred", "the level 'full' is reserved for the whole stage"),
        (Plain, {"a": {2: "*.mlp"}}, "deferred", "level 'a' for stage 2, but the schedule has stages 0 to 1"),
        (Plain, ["*.mlp"], "deferred", "recompute must be what R recomputes by the name of the level"),
    ],
)
def test_what_cannot_be_computed_again_is_refused_on_every_rank(
    world: Ranks, stage_type: Any, recompute: Any, split: str, message: str
) -> None:
    for text in world.run(refused, stage_type, recompute, split, ranks=2):
        assert message in text


def compiled_on_one_rank(group: Any, *, raises: bool) -> str:
    """What a rank hears where a level cannot be found in the stage of rank 0, which the schedule does not compute again."""
    schedule = with_recompute(zb.make("gpipe", 2, 2), stages=[1])

    def choose(name: str, module: nn.Module) -> bool:
        if raises and isinstance(module, nn.Tanh):
            raise ValueError("no choice")
        return name.endswith("part.0")

    stage = Compiled if group.rank() == 0 else AsksForGradients
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(lambda s, n: nn.Sequential(stage()), schedule, 2, nn.functional.mse_loss, group=group, recompute={"a": choose})
    return str(caught.value)


@pytest.mark.parametrize(("raises", "message"), [(False, "'0.part' is compiled as a unit"), (True, "ValueError: no choice")])
def test_a_level_that_one_rank_cannot_have_is_one_error_on_all(world: Ranks, raises: bool, message: str) -> None:
    first, second = world.run(partial(compiled_on_one_rank, raises=raises), ranks=2)
    assert message in first
    assert first == second


def test_a_level_that_is_not_reported_is_refused_with_the_remedy(world: Ranks) -> None:
    for result in world.run(play_plan, {"other": "*.mlp"}, ranks=2):
        states(result, "0 (selective)")
