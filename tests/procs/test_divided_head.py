"""A head divided over ranks by vocabulary: losses and gradients match one device in any schedule; invalid heads raise one error.

Holds in any legal order. A checkpoint stores the head undivided: training resumes with other parts, an undivided head, or on one device.
Parts that cannot be joined are refused.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zerobubble as zb
from tests.device import DEVICE, cpu_only
from tests.procs.meshes import init_device_mesh
from tests.procs.models import Block, batch
from tests.procs.programs import programs_of, run_forked
from tests.procs.ranks import Ranks
from tests.pure.problems import reordered
from tests.refusals import Stated, raises
from tests.thinned import every
from zerobubble.planned_run import NOT_RUN
from zerobubble.planning import Head, Sharded
from zerobubble.runtime.stage.head_part import Correction, GivenToHead, HeadName, HeadPart, gradient_of_output
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.schedules import with_recompute, with_vocabulary

ROWS, WIDTH = 11, 6
"""A vocabulary that no number of ranks here divides."""


def body(stage: int, num_stages: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A stage of a model without its head."""
    torch.manual_seed(100 + stage)
    return nn.Sequential(*[nn.Embedding(ROWS, WIDTH)] * (stage == 0), Block(WIDTH)).to(dtype)


def linear(dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(WIDTH, ROWS).to(dtype)


def ignoring(num_microbatches: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets; one microbatch has fewer tokens that count than the others."""
    tokens, targets = batch(num_microbatches, seed=seed)
    targets = targets.clone()
    targets[0, :3] = -100
    return tokens, targets


class OneDevice:
    """The whole model: `step` leaves all gradients, and returns the losses of the microbatches and their mean."""

    def __init__(self, num_stages: int, dtype: torch.dtype = torch.float64, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing
        self.stages = [body(stage, num_stages, dtype) for stage in range(num_stages)]
        self.head = linear(dtype)
        self.model = nn.Sequential(*self.stages, self.head)

    def step(self, inputs: Tensor, targets: Tensor, num_microbatches: int) -> tuple[Tensor, Tensor]:
        losses = []
        for x, y in zip(inputs.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True):
            losses.append(functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten(), label_smoothing=self.label_smoothing))
            (losses[-1] / num_microbatches).backward()
        each = torch.stack(losses).detach()
        return each, each.mean()

    def worst(self, pipe: zb.Pipeline, of: Callable[[nn.Parameter], Tensor | None]) -> float:
        """The largest difference between what `of` says of this rank's parameters and of those here."""
        worst = 0.0
        for stage, module in pipe.modules.items():
            own = dict(self.stages[stage].named_parameters())
            for name, parameter in module.named_parameters():
                mine, theirs = of(parameter), self._like(name, own, of)
                assert mine is not None
                assert mine.shape == theirs.shape
                worst = max(worst, (mine - theirs).abs().max().item())
        return worst

    def _like(self, name: str, own: dict[str, nn.Parameter], of: Callable[[nn.Parameter], Tensor | None]) -> Tensor:
        if not name.startswith("head_rows_"):
            whole, rows = of(own[name]), slice(None)
        else:
            first, end = name.removeprefix("head_rows_").removesuffix("_bias").split("_to_")
            whole, rows = of(self.head.bias if name.endswith("_bias") else self.head.weight), slice(int(first), int(end))
        assert whole is not None
        return whole[rows]


def train(
    group: Any, schedule: zb.Schedule, steps: int, dtype: torch.dtype, label_smoothing: float = 0.0, **options: Any
) -> tuple[float, float]:
    """The largest errors of losses and gradients over steps with an optimizer, and of the parameters after them."""
    count = schedule.num_microbatches
    whole, worst = OneDevice(schedule.num_stages, dtype, label_smoothing), 0.0
    head = zb.nn.DividedHead(linear(dtype), label_smoothing=label_smoothing)
    there = torch.optim.SGD(whole.model.parameters(), lr=0.1, momentum=0.9)
    with zb.Pipeline(partial(body, dtype=dtype), schedule, count, head, group=group, **options) as pipe:
        assert sum(p.numel() for p in pipe.parameters()) == sum(p.numel() for m in pipe.modules.values() for p in m.parameters())
        here = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        for seed in range(steps):
            here.zero_grad()
            there.zero_grad()
            inputs, targets = ignoring(count, seed)
            loss = pipe.step(inputs if pipe.rank == schedule.placement.routes[0][0] else None, targets)
            each, mean = whole.step(inputs, targets, count)
            assert pipe.losses is not None
            worst = max(worst, (loss - mean).abs().item(), (pipe.losses - each).abs().max().item())
            worst = max(worst, whole.worst(pipe, lambda parameter: parameter.grad))
            here.step()
            there.step()
        return worst, whole.worst(pipe, lambda parameter: parameter.detach())


CASES = [("1f1b", 2, 5, 2), ("1f1b", 4, 4, 1), ("1f1b", 4, 6, 2), ("zb-h1", 3, 5, 2), ("zb-v", 4, 5, 1), ("v-half", 2, 4, 1)]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "ranks", "microbatches", "algorithm"), every(2, CASES))
def test_a_divided_head_trains_with_the_numbers_of_one_device(
    world: Ranks, name: str, ranks: int, microbatches: int, algorithm: int
) -> None:
    schedule = with_vocabulary(zb.make(name, ranks, microbatches), algorithm)
    for errors in world.run(train, schedule, 2, torch.float64, ranks=ranks):
        assert max(errors) <= 1e-12


def test_a_divided_head_trains_in_single_precision(world: Ranks) -> None:
    for errors in world.run(train, with_vocabulary(zb.make("1f1b", 4, 4)), 2, torch.float32, ranks=4):
        assert max(errors) <= 2e-5


@pytest.mark.parametrize(("algorithm", "dtype", "most"), [(1, torch.float64, 1e-12), (2, torch.float64, 1e-12), (2, torch.float32, 2e-5)])
def test_a_divided_head_smoothes_labels_as_one_device(world: Ranks, algorithm: int, dtype: torch.dtype, most: float) -> None:
    schedule = with_vocabulary(zb.make("zb-h1", 2, 4), algorithm)
    for errors in world.run(train, schedule, 2, dtype, 0.2, ranks=2):
        assert max(errors) <= most


def test_gradients_of_a_divided_head_may_be_scaled_after_the_step(world: Ranks) -> None:
    schedule = with_vocabulary(zb.make("zb-h1", 2, 3))
    for errors in world.run(partial(train, scale="gradients"), schedule, 2, torch.float64, ranks=2):
        assert max(errors) <= 1e-12


@pytest.mark.parametrize("seed", every(4, range(8)))
def test_a_divided_head_trains_in_any_legal_order(world: Ranks, seed: int) -> None:
    ranks = 2 + seed % 3
    name = ("zb-v", "1f1b", "zb-h1", "interleaved-1f1b")[(seed + seed // 4) % 4]
    schedule = reordered(with_vocabulary(zb.make(name, ranks, 2 * ranks), 1 + (seed + seed // 4) % 2), seed)
    assert zb.schedule_faults(schedule) == ()
    for errors in world.run(train, schedule, 2, torch.float64, ranks=ranks):
        assert max(errors) <= 1e-12


def with_options(group: Any, which: str) -> tuple[float, float]:
    """As `train`, with the option `which`."""
    ranks = group.size()
    schedule = with_vocabulary(zb.make("zb-h1", ranks, 4))
    options: dict[str, Any] = {}
    if which == "recomputed":
        schedule = with_vocabulary(with_recompute(zb.make("zb-h1", ranks, 4)), 1)
    elif which == "split by its graph":
        options = {"split": "graph"}
    elif which in ("gloo", "shared-memory"):
        options = {"transport": which}
    return train(group, schedule, 2, torch.float64, **options)


@pytest.mark.parametrize(
    ("which", "ranks"), every(3, [("gloo", 2), ("recomputed", 2), ("split by its graph", 2), ("on one rank", 1), ("shared-memory", 2)])
)
def test_a_divided_head_trains_with_other_splits_and_transports(world: Ranks, which: str, ranks: int) -> None:
    for errors in world.run(with_options, which, ranks=ranks):
        assert max(errors) <= 1e-12


def evaluate_and_look(group: Any, count: int) -> tuple[float, float, float, float, list[str], set[str]]:
    """Errors of an evaluation and of the clipped norm, a loss without targets, what on_loss heard, and the kinds in the timeline."""
    schedule = with_vocabulary(zb.make("zb-v", group.size(), count))
    whole, heard = OneDevice(schedule.num_stages, label_smoothing=0.1), []
    inputs, targets = ignoring(count, 0)
    head = zb.nn.DividedHead(lambda first, end: rows_of(linear(), first, end), ROWS, label_smoothing=0.1)
    with zb.Pipeline(
        body, schedule, count, head, group=group, on_loss=lambda j, loss: heard.append(str(j)), main_grad=torch.float64
    ) as pipe:
        evaluated, outputs = pipe.eval_step(inputs, targets)
        without, _ = pipe.eval_step(inputs)
        pipe.step(inputs, targets)
        norm = pipe.clip_grad_norm_(1e9)
        timeline = pipe.timeline()
        described = str(pipe.describe(inputs, targets))
    each, mean = whole.step(inputs, targets, count)
    expected = torch.nn.utils.clip_grad_norm_(whole.model.parameters(), 1e9)
    outputs_error = 0.0 if outputs is None else (whole.head(outputs) - whole.model(inputs)).abs().max().item()
    assert evaluated is not None
    assert without is None
    assert "head_rows" not in described, "its gradients wait for no W"
    one_device = head(torch.nn.Sequential(*whole.stages)(inputs[:2]), targets[:2])
    assert (one_device - each[0]).abs() <= 1e-12
    return (
        (evaluated - mean).abs().item(),
        (norm - expected).abs().item(),
        outputs_error,
        len(heard),
        [str(op) for op in schedule.rows[pipe.rank]],
        {str(span.op) for span in timeline.rows[pipe.rank]},
    )


def rows_of(whole: nn.Linear, first: int, end: int) -> nn.Linear:
    rows = nn.Linear(whole.in_features, end - first).to(whole.weight.dtype)
    with torch.no_grad():
        rows.weight.copy_(whole.weight[first:end])
        rows.bias.copy_(whole.bias[first:end])
    return rows


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_head_part_trains_if_one_of_its_parameters_does(has_bias: bool) -> None:
    module = nn.Module()
    part = HeadPart(module, lambda first, end: nn.Linear(4, end - first, bias=has_bias), 2, 5, HeadName("head", 8), Gradients())
    assert part.trains
    part.weight.requires_grad_(False)
    assert part.trains == has_bias
    module.requires_grad_(False)
    assert not part.trains


def test_evaluation_norms_and_timelines_support_a_divided_head(world: Ranks) -> None:
    results = world.run(evaluate_and_look, 4, ranks=2)
    assert sum(heard for _, _, _, heard, _, _ in results) == 8
    for evaluated, norm, outputs, _, planned, ran in results:
        assert max(evaluated, norm, outputs) <= 1e-12
        assert set(planned) == ran


def planned(group: Any, way: str) -> tuple[float, float, set[str]]:
    """The worst error of gradients and that of the loss with a plan that divides the head, and the kinds of passes that it has."""
    head, given = zb.planning.Head((10, 10, 10)), {"placements": zb.Placement.linear(2), "evaluations": 0}
    if way == "ranks":
        plan = zb.plan(zb.Workload.uniform(2, times=(10, 10, 10)), 4, 4, head=head, **given)
    else:
        plan = zb.plan(zb.Costs.uniform(2, times=(10, 10, 10)), 4, head=head, **given)
    whole = OneDevice(plan.schedule.num_stages)
    with zb.Pipeline(body, plan, 4, zb.nn.DividedHead(linear()), group=group) as pipe:
        loss = pipe.step(*ignoring(4, 0))
        _, mean = whole.step(*ignoring(4, 0), 4)
        worst = whole.worst(pipe, lambda parameter: parameter.grad)
    return worst, (loss - mean).abs().item(), {str(op.kind) for row in plan.schedule.rows for op in row}


@pytest.mark.parametrize("way", ["ranks", "stages"])
def test_a_plan_with_a_divided_head_is_played(world: Ranks, way: str) -> None:
    for gradients, loss, kinds in world.run(planned, way, ranks=2):
        assert max(gradients, loss) <= 1e-12
        assert kinds & {"S", "SL"}


def scaled_in_half_precision(group: Any) -> tuple[float, float]:
    """The largest relative differences of the loss and of gradients, under autocast and with a scaler on both sides."""
    schedule, whole, count = with_vocabulary(zb.make("1f1b", 2, 4)), OneDevice(2, torch.float32), 4
    inputs, targets = ignoring(count, 0)
    with zb.Pipeline(partial(body, dtype=torch.float32), schedule, count, zb.nn.DividedHead(linear(torch.float32)), group=group) as pipe:
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = pipe.step(inputs, targets, scaler=scaler)
            _, mean = whole.step(inputs, targets, count)
        largest = max(p.grad.abs().max().item() for p in whole.model.parameters() if p.grad is not None)
        for parameter in pipe.parameters():
            assert parameter.grad is not None
            parameter.grad /= 1024.0
        return ((loss - mean) / mean).abs().item(), whole.worst(pipe, lambda parameter: parameter.grad) / largest


def test_a_divided_head_is_as_precise_as_one_device_under_autocast(world: Ranks) -> None:
    for loss, gradient in world.run(scaled_in_half_precision, ranks=2):
        assert max(loss, gradient) <= 2e-2, "bfloat16 has 8 bits"


def off_exact(passes: str, smoothing: float) -> tuple[float, float]:
    """By how much the gradient for the output is off float64's, of a divided and of a whole head, under autocast and for easy targets."""
    random = torch.Generator().manual_seed(0)
    weight, target = torch.randn(64, 16, generator=random) / 4, torch.randint(0, 64, (40,), generator=random)
    output = 8 * weight[target]

    def whole(dtype: torch.dtype) -> Tensor:
        x = output.to(dtype).requires_grad_()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=dtype is torch.float32):
            logits = nn.functional.linear(x, weight.to(dtype))
            nn.functional.cross_entropy(logits, target, label_smoothing=smoothing).backward()
        assert x.grad is not None
        return x.grad.double()

    def rows(first: int, end: int) -> nn.Linear:
        made = nn.Linear(16, end - first, bias=False)
        made.weight.data.copy_(weight[first:end])
        return made

    name, sums = HeadName("head", 64), Gradients(None)
    parts = [HeadPart(nn.Module(), rows, first, first + 32, name, sums, 1 - smoothing, smoothing / 64) for first in (0, 32)]
    given = GivenToHead(output, target, torch.full((40,), 1 / 40))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        found = [part.softmax(given, None) for part in parts]
    pairs = list(zip(parts, found, strict=True))
    seen = [part.gradient_to_correct(one) for part, one in pairs]
    if passes == "SL and TX":
        correction = Correction.from_sums([one.sums for one in found])
        for number, (part, one) in enumerate(pairs):
            part.correct(one, correction, number)
        seen = [part.gradient(one) for part, one in pairs]
    gradient, _ = gradient_of_output(seen, given.weight)
    exact = whole(torch.float64)
    off, off_whole = ((found.double() - exact).norm() / exact.norm() for found in (gradient, whole(torch.float32)))
    return off.item(), off_whole.item()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("passes", ["S and T", "SL and TX"])
def test_a_divided_head_rounds_as_a_whole_head_does_under_autocast(passes: str, smoothing: float) -> None:
    divided, whole = off_exact(passes, smoothing)
    assert whole > 1e-4, "bfloat16 has 8 bits"
    assert divided <= 1.4 * whole


def two_replicas(group: Any) -> float:
    """The worst difference of gradients and loss on 2 x 2 ranks, whose replicas have other numbers of tokens that count."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    shares = [ignoring(4, seed) for seed in range(2)]
    inputs, targets = shares[mesh.get_local_rank("dp")]

    def counting(target: Tensor) -> Tensor:
        return (target != -100).sum()

    with zb.Pipeline(
        body, with_vocabulary(zb.make("zb-h1", 2, 4)), 4, zb.nn.DividedHead(linear()), mesh=mesh, loss_weight=counting
    ) as pipe:
        loss = pipe.step(inputs, targets)
        whole = OneDevice(2)
        x, y = (torch.cat(parts) for parts in zip(*shares, strict=True))
        expected = functional.cross_entropy(whole.model(x).flatten(0, 1), y.flatten())
        expected.backward()
        return max((loss - expected).abs().item(), whole.worst(pipe, lambda parameter: parameter.grad))


def test_replicas_of_divided_heads_train_as_one_device(world: Ranks) -> None:
    assert max(world.run(two_replicas, ranks=4)) <= 1e-12


def post_validated(group: Any, *, waits: bool) -> tuple[list[float], list[Tensor]]:
    """Losses and parameters of steps of which some are clipped, with or without a wait for the norm."""
    with zb.Pipeline(body, with_vocabulary(zb.make("1f1b", 2, 4)), 4, zb.nn.DividedHead(linear()), group=group) as pipe:
        inner, losses = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9), []
        optimizer = None if waits else zb.PostValidation(inner, pipe, 1.0)
        for seed in range(4):
            losses.append(pipe.step(*batch(4, seed=seed)).item())
            if optimizer is None:
                pipe.clip_grad_norm_(1.0)
            (optimizer or inner).step()
            (optimizer or inner).zero_grad()
    return losses, [p.detach().clone() for module in pipe.modules.values() for p in module.parameters()]


def both_ways(group: Any) -> bool:
    (losses, there), (same, here) = (post_validated(group, waits=waits) for waits in (True, False))
    return losses == same and all(map(torch.equal, here, there))


@pytest.mark.long
def test_steps_are_validated_afterwards_to_the_bit(world: Ranks) -> None:
    assert all(world.run(both_ways, ranks=2))


LAYERS = 4


def named(stage: int, num_stages: int, has_head: bool = False) -> nn.Module:
    """A stage in which everything has the name that it has in the whole model."""
    torch.manual_seed(100)
    layers = [Block(WIDTH).double() for _ in range(LAYERS)]
    parts = {"embedding": nn.Embedding(ROWS, WIDTH).double()} if stage == 0 else {}
    parts |= {f"layer{each}": layers[each] for each in range(stage * LAYERS // num_stages, (stage + 1) * LAYERS // num_stages)}
    if has_head and stage == num_stages - 1:
        parts["lm_head"] = linear()
    return nn.Sequential(OrderedDict(parts))


def some_steps(pipe: zb.Pipeline, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        losses.append(pipe.step(*batch(4, seed=seed)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def go_on(group: Any, name: str, has_head: bool, load: str | None, save: str | None, seeds: range, kind: str = "Adam") -> list[float]:
    """Losses of steps in a schedule whose head is divided, or whole in the last stage, from a checkpoint and up to another."""
    plain = zb.make(name, group.size(), 4)
    schedule, head = (plain, loss) if has_head else (with_vocabulary(plain), zb.nn.DividedHead(linear(), name="lm_head"))
    with zb.Pipeline(partial(named, has_head=has_head), schedule, 4, head, group=group) as pipe:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(pipe.parameters(), lr=0.01)
        if load:
            assert zb.load(load, pipe, optimizer) == {"head": "any"}
        losses = some_steps(pipe, optimizer, seeds)
        if save:
            zb.save(save, pipe, optimizer, extra={"head": "any"})
    return losses


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.long
def test_a_checkpoint_has_the_head_whole_however_it_was_divided(world: Ranks, tmp_path: Path) -> None:
    """Two parts, then four, then whole in a pipeline, then three parts, then one device, and that of two again where it began."""
    first, second, third, fourth = (str(tmp_path / str(number)) for number in range(4))
    (began, *_) = world.run(go_on, "zb-h1", False, None, first, range(2), ranks=2)
    (straight, *_) = world.run(go_on, "zb-h1", False, first, None, range(2, 7), ranks=2)
    found = [
        *world.run(go_on, "1f1b", False, first, second, range(2, 4), ranks=4)[0],
        *world.run(go_on, "zb-v", True, second, third, range(4, 5), ranks=2)[0],
        *world.run(go_on, "gpipe", False, third, fourth, range(5, 6), ranks=3)[0],
    ]
    model = named(0, 1, has_head=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    zb.load(fourth, model, optimizer)
    inputs, targets = batch(4, seed=6)
    last = torch.stack([loss(model(x), y) for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True)]).mean()
    assert began
    assert straight == pytest.approx([*found, last.item()], abs=1e-12)


def cannot_be_joined(group: Any, path: str, which: str) -> str:
    """The errors if a checkpoint cannot hold the head undivided."""
    head = zb.nn.DividedHead(linear(), name="layer1.up" if which == "taken" else "lm_head")
    with zb.Pipeline(named, with_vocabulary(zb.make("1f1b", 2, 4)), 4, head, group=group) as pipe:
        optimizer = torch.optim.Adafactor(pipe.parameters(), lr=0.01) if which == "factors" else torch.optim.SGD(pipe.parameters(), lr=0.1)
        some_steps(pipe, optimizer, range(1))
        with pytest.raises(zb.InputError) as refused:
            zb.save(path, pipe, optimizer)
    return str(refused.value)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("taken", "also the name of a part of the divided head in checkpoints"),
        ("factors", "of which this rank has a part of shape"),
    ],
)
def test_parts_that_cannot_be_joined_are_refused_on_every_rank(world: Ranks, tmp_path: Path, which: str, message: str) -> None:
    for said in world.run(cannot_be_joined, str(tmp_path / "saved"), which, ranks=2):
        assert message in said
    assert not (tmp_path / "saved").exists()


def tied(stage: int, num_stages: int) -> nn.Module:
    return nn.Sequential(SHARED, Block(WIDTH).double())


SHARED = linear()


class Adding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        zb.nn.add_loss("size", x.square().mean())
        return x


def adding(stage: int, num_stages: int) -> nn.Module:
    return nn.Sequential(body(stage, num_stages), Adding())


def flat(stage: int, num_stages: int) -> nn.Module:
    return nn.Sequential(body(stage, num_stages), *[nn.Flatten()] * (stage == num_stages - 1))


def in_torchscript(stage: int, num_stages: int) -> nn.Module:
    script: nn.Module = torch.jit.script(body(stage, num_stages))
    return script


def of_other_width(first: int, end: int) -> nn.Linear:
    return nn.Linear(WIDTH, end)


DIVIDED = with_vocabulary(zb.make("1f1b", 2, 4))


ASKED: dict[str, dict[str, Any]] = {
    "planned in shards": {"memory": 4, "sharded": Sharded(6 * 10**9, None, 6 * 10**11)},
    "planned with offload": {"memory": 1.4, "host": zb.offload.HostLink(1e10, 1e10)},
}


def not_run(which: str) -> zb.planning.Plan:
    """A plan with a divided head of which `not_run` says that no pipeline runs it."""
    work, head = zb.Workload.uniform(2, (10, 10, 8)), Head((30, 30, 30), held=1e6)
    found = zb.plan(work, 4, placements="linear", evaluations=0, head=head, **ASKED[which])
    assert found.schedule.has_divided_head
    assert len(found.not_run) == 1
    return found


def refused(group: Any, which: str) -> tuple[str, str]:
    """The type and the text of the error that a pipeline raises, made or stepped in a way in which it cannot be."""
    build: Any = {"tied": tied, "an added loss": adding, "an output without tokens": flat, "a scripted stage": in_torchscript}.get(
        which, body
    )
    planned = which.removesuffix(" and no head")
    schedule: Any = not_run(planned) if planned in ASKED else {"no parts": "1f1b", "auto": "auto"}.get(which, DIVIDED)
    head: Any = zb.nn.DividedHead(linear())
    options: dict[str, Any] = {}
    inputs, targets = batch(4)
    if which.endswith("no head"):
        head = loss
    elif which == "tied":
        head = zb.nn.DividedHead(SHARED)
    elif which == "other rows":
        head = zb.nn.DividedHead(linear(), ignore_index=group.rank())
    elif which == "fewer rows than ranks":
        head = zb.nn.DividedHead(nn.Linear(WIDTH, 1).double())
    elif which == "rows of another size":
        head = zb.nn.DividedHead(of_other_width, ROWS)
    elif which == "excluded options":
        options = {"order_by": "tokens", "cuda_graphs": True}
    elif which == "a target of no row":
        targets = targets.clone()
        targets[3, 2] = ROWS
    elif which == "targets of another shape":
        targets = targets[:, 1:]
    try:
        with zb.Pipeline(build, schedule, 4, head, group=group, **options) as pipe:
            if which == "a failing part" and pipe.rank == 0:
                pipe.modules[0].register_parameter("head_rows_0_to_6", nn.Parameter(torch.ones(6, WIDTH + 1).double()))
            pipe.step(inputs, targets)
    except zb.ZeroBubbleError as error:
        return type(error).__name__, str(error)
    return "", ""


REFUSALS = [
    ("no head", "InputError", "passes of a divided head: give loss_fn=zb.nn.DividedHead"),
    ("no parts", "InputError", "schedule '1f1b' has no passes of a divided head: give zb.schedules.with_vocabulary(schedule)"),
    ("tied", "InputError", "the head's weight is '0.weight' of stage 0, too: a divided head is not tied to a stage"),
    ("other rows", "InputError", "divided head"),
    ("fewer rows than ranks", "InputError", "the head has 1 rows, fewer than the 2 parts"),
    ("a scripted stage", "InputError", "stage 0 is TorchScript, which cannot get more parameters, and has a part of a divided head"),
    ("rows of another size", "InputError", "head(6, 11) must return an nn.Linear with 5 outputs, got a weight of (11, 6)"),
    ("excluded options", "InputError", "order_by excludes a DividedHead"),
    ("excluded options", "InputError", "; a DividedHead excludes cuda_graphs: its collectives have not been tested in CUDA graphs"),
    ("auto", "InputError", "'auto' excludes a DividedHead"),
    pytest.param(
        "a target of no row",
        "PipelineError",
        "target 11 of microbatch 1 is not a row of the head, which has 11, or ignore_index=-100",
        marks=cpu_only("a GPU stops at it, and its process with it"),
    ),
    *[
        (f"{which}{head}", "InputError", f"{words}. Leave out one of the two")
        for head in ("", " and no head")
        for which, words in (
            ("planned in shards", f"a DividedHead excludes a plan for weights in shards: {NOT_RUN['sharded', 'head']}"),
            ("planned with offload", f"offload excludes a DividedHead: {NOT_RUN['head', 'host']}"),
        )
    ],
    ("targets of another shape", "PipelineError", "a divided head needs a target for each token, (2, 5), of microbatch 0, got (2, 4)"),
    (
        "an added loss",
        "PipelineError",
        "got tensors with 'size' added to the loss: give that alone",
    ),
    ("an output without tokens", "PipelineError", "a divided head needs a target for each token, (2,), of microbatch 0, got (2, 5)"),
    ("a failing part", "PipelineError", "at 'run 0S0'"),
]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("which", "kind", "words"), every(2, REFUSALS))
def test_what_cannot_be_is_one_error_on_every_rank(world: Ranks, which: str, kind: str, words: str) -> None:
    (first, text), *others = world.run(refused, which, ranks=2)
    assert (first, words in text) == (kind, True), text
    assert [(other, words in message) for other, message in others] == [(kind, True)], others


@pytest.mark.parametrize(
    ("arguments", "argument", "got"),
    [
        ((7,), "head", 7),
        ((nn.Sequential(),), "head", "a Sequential"),
        ((of_other_width,), "vocabulary", None),
        ((of_other_width, 0), "vocabulary", 0),
        ((linear(), 11), "vocabulary", 11),
    ],
)
def test_a_module_that_is_no_head_is_refused(arguments: Any, argument: str, got: Any) -> None:
    with pytest.raises(zb.InputError) as caught:
        zb.nn.DividedHead(*arguments)
    assert (caught.value.fields["argument"], caught.value.fields["got"]) == (argument, got)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_head_in_torchscript_is_refused() -> None:
    with raises(zb.InputError, "RecursiveScriptModule"):
        zb.nn.DividedHead(torch.jit.script(linear()))
    head = zb.nn.DividedHead(lambda first, end: torch.jit.script(nn.Linear(WIDTH, end - first)), ROWS)
    with raises(zb.InputError, "nn.Linear", 11, "RecursiveScriptModule"):
        head(*batch(1))


def with_a_hook() -> nn.Linear:
    found = linear()
    found.register_forward_hook(lambda module, inputs, logits: torch.tanh(logits))
    return found


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 8


def scaled_on_one_device() -> Tensor:
    return zb.nn.DividedHead(lambda first, end: Scaled(WIDTH, end - first), ROWS)(torch.ones(1, 2, WIDTH), torch.zeros(1, 2).long())


@pytest.mark.parametrize(
    ("make", "stated"),
    [
        (lambda: zb.nn.DividedHead(with_a_hook()), ("head", "hooks")),
        (
            lambda: zb.nn.DividedHead(nn.utils.weight_norm(linear())),
            ("weight_g", "weight_v"),
        ),
        (scaled_on_one_device, ("head(0, 11)", "Scaled")),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_a_head_that_does_more_than_a_linear_layer_is_refused(make: Callable[[], object], stated: Stated) -> None:
    with raises(zb.InputError, *stated):
        make()


@pytest.mark.parametrize("smoothing", [-0.1, 1.5, float("nan"), "0.1"])
def test_smoothing_beyond_0_to_1_is_refused(smoothing: Any) -> None:
    with pytest.raises(zb.InputError) as caught:
        zb.nn.DividedHead(linear(), label_smoothing=smoothing)
    assert (caught.value.fields["argument"], caught.value.fields["expected"]) == ("label_smoothing", "a number from 0 to 1")


@pytest.mark.parametrize("name", [3, "", ".", None])
def test_the_name_of_a_head_is_a_text(name: Any) -> None:
    with raises(zb.InputError, argument="name"):
        zb.nn.DividedHead(linear(), name=name)


@pytest.mark.long
def test_the_page_s_program_runs(tmp_path: Path) -> None:
    *_, program = programs_of("docs/vocabulary.md")
    lines = run_forked(program, tmp_path, 2).splitlines()
    losses = list(map(float, lines[-5:]))
    assert lines[0].startswith("The head ")
    assert losses[0] == pytest.approx(math.log(1001), rel=0.1)
