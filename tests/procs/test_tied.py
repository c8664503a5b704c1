"""Tied parameters: values, summed gradients and norms match one device with one parameter.

Tied and copied parameters stay equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerobubble as zb
from tests.procs.endpoints import Lines, of_group
from tests.procs.models import Block, batch, loss_fn, one_device
from tests.procs.programs import programs_of
from tests.procs.ranks import Ranks
from tests.refusals import states
from tests.thinned import every
from zerobubble.rules import ValueKind
from zerobubble.runtime.hooks.shared_gradients import _GroupSum
from zerobubble.runtime.hooks.shared_parameters import ParameterName, parameter_infos, read_tied, shared_groups
from zerobubble.runtime.measure.memory_meter import addresses_of
from zerobubble.runtime.values.gradients import IN_GRAD
from zerobubble.transport import Line, Work

SCHEDULES = [("1f1b", 4), ("zb-h1", 4), ("interleaved-1f1b", 4), ("zb-v", 4), ("chimera", 4), ("dualpipe", 8), ("dualpipe-v", 8)]


class Stage(nn.Module):
    """A stage of a language model: tokens to vectors by `tok`, a block, vectors to logits by `head`, which has the shape of `tok`."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.tok = nn.Embedding(11, 6, dtype=torch.float64) if stage == 0 else None
        self.block = Block(6).double()
        self.head = nn.Linear(6, 11, bias=False, dtype=torch.float64) if stage == num_stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tok is not None:
            x = self.tok(x)
        x = self.block(x)
        return x if self.head is None else self.head(x)


def ends(num_stages: int) -> list[Any]:
    return [[(0, "tok.weight"), (num_stages - 1, "head.weight")]]


def blocks(num_stages: int) -> list[Any]:
    return [*ends(num_stages), [(stage, "block") for stage in range(num_stages)]]


def shared_model(groups: list[Any], num_stages: int, make_stage: Callable[[int, int], nn.Module] = Stage) -> list[nn.Module]:
    """All stages with one parameter in the places of each group: the one named first."""
    stages = [make_stage(stage, num_stages) for stage in range(num_stages)]
    for (stage, name), *others in groups:
        first = dict(stages[stage].named_parameters())
        for other, path in others:
            for key in [key for key in first if key == name or key.startswith(f"{name}.")]:
                *parents, leaf = (path + key.removeprefix(name)).split(".")
                setattr(stages[other].get_submodule(".".join(parents)), leaf, first[key])
    return stages


def num_stages_of(name: str, ranks: int, microbatches: int) -> int:
    return zb.make(name, ranks, microbatches).num_stages


def train(group: Any, name: str, microbatches: int, groups_of: Callable[[int], list[Any]], clip: float, steps: int) -> Any:
    """AdamW steps, compared with one device: (relative errors of loss, norm and parameters at most; this rank's parameters at the end)."""
    count = num_stages_of(name, group.size(), microbatches)
    worst = 0.0
    with zb.Pipeline(Stage, name, microbatches, loss_fn, group=group, tied=groups_of(count)) as pipe:
        pipe.metering = True
        model = nn.ModuleList(shared_model(groups_of(count), count))
        optimizers = [torch.optim.AdamW(parameters, lr=0.01, eps=1e-4) for parameters in (pipe.parameters(), model.parameters())]
        for step in range(steps):
            inputs, targets = batch(microbatches, seed=step)
            loss, expected = pipe.step(inputs, targets), one_device(list(model), microbatches, inputs, targets)
            norm, whole = pipe.clip_grad_norm_(clip), nn.utils.clip_grad_norm_(model.parameters(), clip)
            worst = max(worst, ((loss - expected) / expected).abs().item(), ((norm - whole) / whole).abs().item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for stage, module in pipe.modules.items():
            pairs = zip(module.parameters(), model[stage].parameters(), strict=True)
            worst = max(worst, *(((p - q).norm() / q.norm()).item() for p, q in pairs))
        assert any(held for held in pipe.timeline().memory)
        return worst, {(stage, key): p.detach() for stage, module in pipe.modules.items() for key, p in module.named_parameters()}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("groups_of", "name", "microbatches"), every(5, ((groups_of, *shape) for groups_of in (ends, blocks) for shape in SCHEDULES))
)
def test_tied_training_equals_one_device_and_stays_equal_to_the_bit(world: Ranks, groups_of: Any, name: str, microbatches: int) -> None:
    results = world.run(train, name, microbatches, groups_of, 0.5, 20, ranks=4)
    assert max(worst for worst, _ in results) <= 1e-10
    for group in groups_of(num_stages_of(name, 4, microbatches)):
        (stage, first), *_ = group
        for key in {key.removeprefix(first) for _, held in results for s, key in held if s == stage and key.startswith(first)}:
            same = [held[s, path + key] for _, held in results for s, path in group if (s, path + key) in held]
            assert len(same) >= len(group)
            assert all(torch.equal(one, same[0]) for one in same)


def one_microbatch(group: Any, groups_of: Callable[[int], list[Any]]) -> bool:
    """Whether the gradients of a step of one microbatch are those of one device to the bit, kept gradients of a step before among them."""
    count = group.size()
    with zb.Pipeline(Stage, "1f1b", 1, loss_fn, group=group, tied=groups_of(count)) as pipe:
        stages = shared_model(groups_of(count), count)
        for seed in range(2):
            inputs, targets = batch(1, seed=seed)
            pipe.step(inputs, targets)
            before = [p.grad for p in nn.ModuleList(stages).parameters()]
            for parameter in nn.ModuleList(stages).parameters():
                parameter.grad = None
            one_device(stages, 1, inputs, targets)
            for parameter, kept in zip(nn.ModuleList(stages).parameters(), before, strict=True):
                assert parameter.grad is not None
                parameter.grad = parameter.grad if kept is None else kept + parameter.grad
        pairs = [(p.grad, q.grad) for s, m in pipe.modules.items() for p, q in zip(m.parameters(), stages[s].parameters(), strict=True)]
        return all(p is not None and q is not None and torch.equal(p, q) for p, q in pairs)


@pytest.mark.parametrize("groups_of", [ends, blocks])
def test_one_microbatch_adds_up_as_autograd_does_to_the_bit(world: Ranks, groups_of: Any) -> None:
    assert all(world.run(one_microbatch, groups_of, ranks=4))


class OneObject:
    """The parts of a rank share one Parameter between the model's first and last stage where they lie on it."""

    def __init__(self) -> None:
        self.made: dict[int, nn.Module] = {}

    def __call__(self, stage: int, num_stages: int) -> nn.Module:
        self.made[stage] = module = Stage(stage, num_stages)
        if stage == num_stages - 1 and 0 in self.made:
            module.head.weight = self.made[0].tok.weight  # type: ignore[union-attr]
        return module


def vee(group: Any, as_one: bool, tied: bool) -> tuple[float, float]:
    """A V placement holds both ends on rank 0: the error of gradients, and the norm's, of one object or two."""
    with zb.Pipeline(OneObject() if as_one else Stage, "zb-v", 4, loss_fn, group=group, tied=ends(4) if tied else ()) as pipe:
        stages = shared_model(ends(4), 4)
        worst = 0.0
        for step in range(2):
            pipe.step(*batch(4, seed=step))
            one_device(stages, 4, *batch(4, seed=step))
        for stage, module in pipe.modules.items():
            for p, q in zip(module.parameters(), stages[stage].parameters(), strict=True):
                assert p.grad is not None
                assert q.grad is not None
                worst = max(worst, (p.grad - q.grad).abs().max().item())
        whole = nn.utils.clip_grad_norm_(nn.ModuleList(stages).parameters(), 1.0)
        return worst, abs(pipe.clip_grad_norm_(1.0) - whole).item()


@pytest.mark.parametrize(("as_one", "tied"), [(False, True), (True, True), (True, False)])
def test_both_ends_on_one_rank_as_two_parameters_or_as_one(world: Ranks, as_one: bool, tied: bool) -> None:
    for worst, norm in world.run(vee, as_one, tied, ranks=2):
        assert worst <= 1e-14
        assert norm <= 1e-14


class Sometimes(nn.Module):
    """Uses its bias where the input is positive: in some steps a tied place has no gradient."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.bias = nn.Parameter(torch.randn(3))
        self.linear = nn.Linear(3, 3)
        self.stage, self.last = stage, num_stages - 1
        self.use = (stage == 0, stage == self.last, True, False)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y + self.bias if self.use[self.step] else y


def used_in_turns(group: Any) -> list[bool]:
    """For steps that use the tied bias in the first stage, in the last, in all and in none: are gradients those of one device?"""
    groups = [[(0, "bias"), (1, "bias")]]
    right = []
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    with zb.Pipeline(Sometimes, "zb-h1", 1, nn.functional.mse_loss, group=group, tied=groups) as pipe:
        stages = shared_model(groups, 2, Sometimes)
        for step in range(4):
            for module in [*stages, *pipe.modules.values()]:
                module.step = step  # type: ignore[assignment]
                module.zero_grad()
            pipe.step(x, x)
            nn.functional.mse_loss(nn.Sequential(*stages)(x), x).backward()
            (module,) = pipe.modules.values()
            mine, theirs = module.bias.grad, stages[0].bias.grad
            right.append(mine is theirs if mine is None or theirs is None else bool(torch.equal(mine, theirs)))  # type: ignore[arg-type]
    return right


def test_a_place_that_does_not_use_the_parameter_adds_nothing(world: Ranks) -> None:
    assert world.run(used_in_turns, ranks=2) == [[True] * 4] * 2


def frozen_stage(stage: int, num_stages: int) -> nn.Module:
    module = Stage(stage, num_stages)
    for key, parameter in module.named_parameters():
        parameter.requires_grad_(not key.endswith(("tok.weight", "head.weight")))
    return module


def frozen(group: Any) -> tuple[bool, Tensor, float]:
    """Frozen ends stay without gradients, a kept one apart: (whether, the tied values, the norm's error)."""
    with zb.Pipeline(frozen_stage, "zb-h1", 4, loss_fn, group=group, tied=ends(2)) as pipe:
        stages = shared_model(ends(2), 2, frozen_stage)
        (module,) = pipe.modules.values()
        weight = module.tok.weight if module.tok is not None else module.head.weight
        kept = weight.grad = torch.ones_like(weight)
        pipe.step(*batch(4))
        one_device(stages, 4, *batch(4))
        left = weight.grad is kept and bool((kept == 1).all())
        weight.grad = None
        whole = nn.utils.clip_grad_norm_(nn.ModuleList(stages).parameters(), 1.0)
        return left, weight.detach(), abs(pipe.clip_grad_norm_(1.0) - whole).item()


def test_tied_parameters_frozen_everywhere_are_left_alone(world: Ranks) -> None:
    for left, weight, norm in world.run(frozen, ranks=2):
        assert left
        assert torch.equal(weight, Stage(0, 2).tok.weight)  # type: ignore[union-attr]
        assert norm <= 1e-14


def noisy(stage: int, num_stages: int) -> nn.Module:
    """Other values on every rank."""
    module = Stage(stage, num_stages)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.distributed.get_rank()
    return module


def opened(group: Any, name: str) -> dict[tuple[int, str], Tensor]:
    count = num_stages_of(name, group.size(), 4)
    with zb.Pipeline(noisy, name, 4, loss_fn, group=group, tied=[[(count - 1, "head.weight"), (0, "tok.weight")]]) as pipe:
        return {(stage, key): p.detach() for stage, module in pipe.modules.items() for key, p in module.named_parameters()}


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera"])
def test_all_begin_as_the_first_named_of_the_first_route(world: Ranks, name: str) -> None:
    schedule = zb.make(name, 4, 4)
    last, route = schedule.num_stages - 1, schedule.placement.routes[0]
    expected = {place: p for stage in range(last + 1) for place, p in named(stage, last + 1, route[stage]).items()}
    for held in world.run(opened, name, ranks=4):
        for place, value in held.items():
            assert torch.equal(value, expected[(last, "head.weight") if place == (0, "tok.weight") else place])


def named(stage: int, num_stages: int, rank: int) -> dict[tuple[int, str], Tensor]:
    return {(stage, key): p.detach() + rank for key, p in Stage(stage, num_stages).named_parameters()}


def profile(group: Any) -> tuple[bool, bool]:
    """Whether a profile leaves gradients as they were, and whether the next step then adds to the tied one what it added before."""
    with zb.Pipeline(Stage, "zb-h1", 4, loss_fn, group=group, tied=ends(2)) as pipe:
        pipe.step(*batch(4))
        before = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
        pipe.profile(*batch(4, seed=1), steps=1)
        kept = all(torch.equal(p.grad, g) for p, g in zip(pipe.parameters(), before, strict=True) if p.grad is not None)
        pipe.step(*batch(4))
        (weight, once) = next((p.grad, g) for p, g in zip(pipe.parameters(), before, strict=True) if p.shape == (11, 6))
        return kept, torch.equal(weight, once + once)


def test_a_profile_leaves_tied_gradients(world: Ranks) -> None:
    assert world.run(profile, ranks=2) == [(True, True)] * 2


def refused(group: Any, tied: Any, make_stage: Any = Stage) -> str:
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(make_stage, "1f1b", 4, loss_fn, group=group, tied=tied)
    return str(caught.value)


def half_frozen(stage: int, num_stages: int) -> nn.Module:
    return Stage(stage, num_stages).requires_grad_(stage > 0)


FAULTS = {
    "form": (
        [[(0, "tok.weight")], "tok", [(0, "block"), (5, "block")], [(0, "block"), (0, "block")]],
        "tied takes groups of at least two (stage, name) pairs, got [(0, 'tok.weight')]; "
        "tied takes groups of at least two (stage, name) pairs, got 'tok'; "
        "tied names stage 5, but stages are 0 to 1; tied names (0, 'block') twice in a group",
    ),
    "names, shapes": (
        [[(0, "tok.wight"), (1, "head.weight")], [(0, "block.up"), (1, "block.down")], [(0, "tok.weight"), (1, "block.up.weight")]],
        "tied names (0, 'tok.wight'), but that stage has no such parameter or module; did you mean 'tok.weight'?; "
        "tied (0, 'block.up') and (1, 'block.down') must hold the same parameters, but only one of them has 'bias'; "
        "tied (0, 'block.up.weight') on rank 0 is (12, 6) float64, but (1, 'block.down.weight') on rank 1 is (6, 12) float64; "
        "give them one shape and dtype, or leave them apart; "
        "tied (0, 'tok.weight') on rank 0 is (11, 6) float64, but (1, 'block.up.weight') on rank 1 is (12, 6) float64; "
        "give them one shape and dtype, or leave them apart",
    ),
    "frozen": (
        ends(2),
        "of the tied (0, 'tok.weight') on rank 0 and (1, 'head.weight') on rank 1 only (1, 'head.weight') on rank 1 trains; "
        "freeze both or neither",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_reported_on_every_rank_all_at_once(world: Ranks, fault: str) -> None:
    tied, text = FAULTS[fault]
    for message in world.run(refused, tied, half_frozen if fault == "frozen" else Stage, ranks=2):
        assert message in (text, f"all ranks: {text}")


def disagree(group: Any) -> str:
    return refused(group, ends(2) if group.rank() == 0 else ())


def test_ranks_that_disagree_are_reported(world: Ranks) -> None:
    for message in world.run(disagree, ranks=2):
        states(message, "rank 0", "[(0, 'tok.weight'), (1, 'head.weight')]", "rank 1", "none")


def replaced(group: Any, name: str, stage: int, path: str, is_replicated: bool) -> str:
    """The error of a step after another parameter has taken the place of a shared one on one rank."""
    count, (owner, _, leaf) = num_stages_of(name, 2, 4), path.rpartition(".")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")) if is_replicated else None
    where = {"mesh": mesh} if is_replicated else {"group": group}
    with zb.Pipeline(Stage, name, 4, loss_fn, tied=() if is_replicated else blocks(count), **where) as pipe:
        before, module = pipe.step(*batch(4)), pipe.modules.get(stage)
        holder: Any = None if module is None else module.get_submodule(owner)
        parameter = getattr(holder, leaf, None)
        if parameter is not None:
            setattr(holder, leaf, nn.Parameter(parameter.detach() + 1))
        with pytest.raises(zb.InputError if stage == 0 else zb.PipelineError) as caught:
            pipe.step(*batch(4))
        if stage == 0:  # all ranks have refused the step
            if parameter is not None:
                setattr(holder, leaf, parameter)
            assert torch.equal(before, pipe.step(*batch(4)))
        return str(caught.value)


@pytest.mark.parametrize(
    ("name", "stage", "path", "is_replicated"),
    [
        ("1f1b", 1, "head.weight", False),
        ("1f1b", 0, "tok.weight", False),
        ("zb-v", 2, "block.down.weight", False),
        ("1f1b", 1, "block.down.weight", True),
    ],
)
def test_a_shared_parameter_may_not_be_replaced_on_any_rank(world: Ranks, name: str, stage: int, path: str, is_replicated: bool) -> None:
    """Only the rank of the stage sees it. Ranks before it have begun the step."""
    for message in world.run(replaced, name, stage, path, is_replicated, ranks=4 if is_replicated else 2):
        states(message, f"stage {stage}", path)


def test_groups_that_meet_are_one() -> None:
    """Three parameters in two groups with one in common, one of them shared within its rank."""
    modules = [{0: nn.Linear(2, 2), 3: nn.Linear(2, 2)}, {1: nn.Linear(2, 2), 2: nn.Linear(2, 2)}]
    modules[1][2].weight = modules[1][1].weight
    groups = read_tied([[(0, "weight"), (1, "weight")], [(2, "weight"), (3, "weight")]], 4)
    (shared_group,) = shared_groups(groups, [parameter_infos(held) for held in modules], {})
    assert shared_group.ranks == (0, 1)
    assert shared_group.stages == {0: {0, 3}, 1: {1, 2}}
    (shared,) = shared_group.parameters
    assert shared.names == {0: (ParameterName(3, "weight"), ParameterName(0, "weight")), 1: (ParameterName(1, "weight"),)}
    assert (shared.source.rank, shared.source.name, shared.counted_name) == (0, ParameterName(0, "weight"), ParameterName(0, "weight"))


def test_three_parameters_of_one_rank_get_the_sum_in_tensors_of_their_own() -> None:
    modules = {stage: nn.Linear(2, 2, bias=False) for stage in range(3)}
    (group,) = shared_groups(read_tied([[(stage, "weight") for stage in modules]], 3), [parameter_infos(modules)], {})
    parameters = {ParameterName(stage, "weight"): module.weight for stage, module in modules.items()}
    for number, parameter in enumerate(parameters.values()):
        parameter.grad = torch.full((2, 2), 10.0**number)
    group_sum = _GroupSum(group, parameters, SimpleNamespace(rank=0), IN_GRAD)  # type: ignore[arg-type]
    group_sum.send()
    group_sum.finish()
    gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
    assert [gradient.unique().tolist() for gradient in gradients] == [[111.0]] * 3
    assert len(addresses_of(gradients)) == 3


def run_page(group: Any) -> list[Any]:
    """What the page's programs give on this rank."""
    names: dict[str, Any] = {}
    for program in programs_of("docs/tied.md"):
        exec(program, names)
    return [names["train"](group), names["train_shared"](group)]


@pytest.mark.long
def test_the_page_runs(world: Ranks) -> None:
    results = world.run(run_page, ranks=4)
    for pages in zip(*results, strict=True):
        assert len({tuple(losses) for losses, _ in pages}) == 1, "the mean loss is on every rank"
        (losses, _), *_ = pages
        assert losses[-1] < losses[0]
        weights = [weight for _, weight in pages if weight is not None]
        assert len(weights) >= 2
        assert all(torch.equal(weight, weights[0]) for weight in weights)


class SharedGradientsSeen(Lines):  # type: ignore[misc]
    """Gloo that notes for each gradient of a shared parameter how many passes had run when it was sent, and the rank it went to."""

    sent: list[tuple[int, int]]
    step: zb.hooks.TrainingStep | None = None

    def sender(self, line: Line) -> Callable[[Tensor], Work]:
        start = super().sender(line)

        def noted(tensor: Tensor) -> Work:
            if line.carries is ValueKind.WEIGHT_WORK and self.step is not None:
                self.sent.append((len(self.step.records().spans), line.destination))
            return start(tensor)

        return noted


class StepKept(zb.hooks.StepHook):
    """Gives the step under way to an endpoint."""

    def __init__(self, endpoint: SharedGradientsSeen) -> None:
        self.endpoint = endpoint

    def on_step_begin(self, step: zb.hooks.TrainingStep) -> None:
        self.endpoint.step = step


def sent_when(group: Any, name: str, tied: list[Any]) -> list[tuple[int, int]]:
    """For each tied gradient that this rank sends in a step: (the passes of its row that had run, the rank it goes to)."""
    endpoint = of_group(SharedGradientsSeen, group)
    endpoint.sent = []
    with zb.Pipeline(Stage, name, 4, loss_fn, transport=endpoint, tied=tied, hooks=[StepKept(endpoint)]) as pipe:
        pipe.step(*batch(4))
        return endpoint.sent


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "stages"), [("1f1b", (0, 3)), ("zb-h1", (1, 3)), ("zb-v", (3, 6)), ("zb-v", (2, 7))])
def test_a_gradient_leaves_after_the_last_pass_that_adds_to_it_for_those_who_share_it(
    world: Ranks, name: str, stages: tuple[int, int]
) -> None:
    schedule = zb.make(name, 4, 4)
    ranks = [schedule.rank_of(stage, 0) for stage in stages]
    expected: list[list[tuple[int, int]]] = [[] for _ in range(4)]
    for stage, here, there in zip(stages, ranks, reversed(ranks), strict=True):
        last = max(done for done, op in enumerate(schedule.rows[here], 1) if op.stage == stage and op.kind is not zb.Kind.F)
        expected[here] = [(last, there)]
    tied = [[(stage, "block.up.weight") for stage in stages]]
    assert world.run(sent_when, name, tied, ranks=4) == expected


def one_way(group: Any) -> float:
    """A bidirectional placement where all microbatches take the first route: the copies of the other one have no pass of their own."""
    linear = zb.make("1f1b", group.size(), 4)
    schedule = zb.Schedule("one-way", zb.Placement.bidirectional(group.size()), 4, linear.rows, (0,) * 4)
    with zb.Pipeline(Stage, schedule, 4, loss_fn, group=group, tied=ends(2)) as pipe:
        stages = shared_model(ends(2), 2)
        pipe.step(*batch(4))
        one_device(stages, 4, *batch(4))
        grads = [(p.grad, q.grad) for s, m in pipe.modules.items() for p, q in zip(m.parameters(), stages[s].parameters(), strict=True)]
        assert all(p is not None and q is not None for p, q in grads)
        return max((p - q).abs().max().item() for p, q in grads)  # type: ignore[operator]


def test_copies_without_a_pass_get_the_sum_too(world: Ranks) -> None:
    assert max(world.run(one_way, ranks=2)) <= 1e-14
