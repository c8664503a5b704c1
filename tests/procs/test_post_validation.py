"""Optimizer steps without a barrier match the synchronous loop bit for bit, whichever steps are clipped or skipped."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.exhaustive import EXHAUSTIVE
from tests.procs.models import InBackward, batch, loss_fn
from tests.procs.models import build as plain
from tests.procs.programs import programs_of, run_forked
from tests.procs.ranks import Ranks
from tests.pure.shapes import TRAINING
from tests.refusals import raises, states
from tests.thinned import every
from zerobubble.runtime.device import interface
from zerobubble.runtime.hooks.post_validation import SavedCopy
from zerobubble.runtime.hooks.undo_by_arithmetic import ByFormula, why_not

pytestmark = pytest.mark.spread

LIMIT = 8.0
"""Above the norms that come up by themselves."""
WORK = zb.Workload.uniform(2, (20, 21, 19))


class Spoiled(nn.Module):
    """Adds a bias whose gradient is multiplied by the step's `factor`, so that no other stage sees it."""

    factor = 1.0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + InBackward.apply(self.bias, lambda dy: dy * self.factor)  # type: ignore[no-any-return]


class Normed(nn.Module):
    """BatchNorm over the width of a sequence. Its statistics are no state of the model, so that copies of a stage may have others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        for name, buffer in dict(self.norm.named_buffers()).items():
            self.norm.register_buffer(name, buffer, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return y


def build(stage: int, num_stages: int, width: int = 6) -> nn.Module:
    """A stage with dropout and BatchNorm: its forwards use the random state and change buffers."""
    torch.manual_seed(100 + stage)
    parts: list[nn.Module] = [nn.Embedding(11, width)] if stage == 0 else []
    parts += [nn.Linear(width, width), Normed(width), Spoiled(width), nn.Tanh(), nn.Dropout(0.2)]
    if stage == num_stages - 1:
        parts.append(nn.Linear(width, 11))
    return nn.Sequential(*parts).double()


MAKERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "foreach nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


def spoil(pipe: zb.Pipeline, step: int, steps: int) -> None:
    """Some steps have a gradient that is large, infinite or not a number, in one stage; the first and the last among them."""
    kinds = {0: 1e4, 3: math.inf, 5: math.nan, 6: 1e6, 7: 1e6, steps - 1: 1e6}
    factor = kinds.get(step if step in (0, steps - 1) else step % 11, 1.0)
    culprit = (step + 1) % pipe.schedule.num_stages
    for stage, module in pipe.modules.items():
        for part in module.modules():
            if isinstance(part, Spoiled):
                part.factor = factor if stage == culprit else 1.0


def state_of(pipe: zb.Pipeline, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters, buffers and the optimizer's state."""
    tensors = [t.detach().clone() for module in pipe.modules.values() for t in (*module.parameters(), *module.buffers())]
    for entry in optimizer.state.values():
        tensors += [torch.as_tensor(value).clone() for value in entry.values() if value is not None]
    return tensors


class Run:
    """What a rank has after training: the losses, the norms in units of the limit, its state, and the forwards it ran in vain."""

    def __init__(self, losses: list[float], norms: list[float], state: list[Tensor], in_vain: int) -> None:
        self.losses, self.norms, self.state, self.in_vain = losses, norms, state, in_vain


class Case(NamedTuple):
    """What to train with: `way` undoes a step, and without one the loop is synchronous."""

    schedule: str
    kind: str
    microbatches: int = 8
    steps: int = 10
    way: str | None = "copy"
    accumulate: int = 1
    lanes: bool = False
    scale: float | None = None
    looks: bool = False


def train(group: Any, case: Case, seed: int = 0) -> Run:
    """Train with some steps clipped and some left out, on batches of two lengths, the second of which first comes in a step taken back."""
    schedule = zb.make(case.schedule, group.size(), case.microbatches)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=case.scale, growth_interval=2) if case.scale else None
    torch.manual_seed(7 + group.rank())
    transport = "gloo" if case.lanes else "shared-memory"
    with zb.Pipeline(build, schedule, case.microbatches, loss_fn, group=group, transport=transport) as pipe:
        return loop(pipe, case, scaler)


def loop(pipe: zb.Pipeline, case: Case, scaler: torch.amp.GradScaler | None) -> Run:
    losses, norms = [], []
    inner = MAKERS[case.kind](pipe.parameters())
    optimizer = zb.PostValidation(inner, pipe, LIMIT, scaler, case.way) if case.way else None
    calls = CountCalls(pipe)
    rate = torch.optim.lr_scheduler.StepLR(inner, 3, 0.95)
    for step in range(case.steps):
        for part in range(case.accumulate):
            spoil(pipe, step, case.steps)
            data = batch(case.microbatches, seed=step * case.accumulate + part, length=4 if step % 4 == 1 else 5)
            losses.append(pipe.step(*data, scaler=scaler).item())
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            norms.append(step_synchronously(pipe, inner, scaler) / LIMIT)
            inner.zero_grad()
        rate.step()
        if case.looks:
            losses.append(look(pipe, optimizer or inner, step))
    pipe.close()
    state = state_of(pipe, inner) + ([torch.tensor(scaler.get_scale())] if scaler else [])
    evaluations = case.steps // 2 if case.looks else 0
    return Run(losses, norms, state, calls.forwards - (case.steps * case.accumulate + evaluations) * calls.expected)


def look(pipe: zb.Pipeline, optimizer: Any, step: int) -> float:
    """Evaluate after every other step; after the others one rank reads its optimizer's state."""
    if step % 2:
        loss, _ = pipe.eval_step(*batch(pipe.schedule.num_microbatches, seed=99))
        assert loss is not None
        return loss.item()
    entries = optimizer.state_dict()["state"].values() if step // 2 % pipe.schedule.num_ranks == pipe.rank else ()
    return sum(value.sum().item() for entry in entries for value in entry.values())


def step_synchronously(pipe: zb.Pipeline, inner: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> float:
    """The loop to equal; every rank's scaler hears of all overflows."""
    if scaler is not None:
        pipe.unscale_(scaler, inner)
    total = pipe.clip_grad_norm_(LIMIT)
    if scaler is None:
        if total.isfinite():
            inner.step()
    else:
        scaler.step(inner)
        scaler.update()
    return total.item()


class CountCalls:
    """Counts the forwards of this rank's modules."""

    def __init__(self, pipe: zb.Pipeline) -> None:
        self.forwards = 0
        rows = pipe.schedule.rows
        self.expected = sum(op.kind is zb.Kind.F for op in rows[pipe.rank])
        for module in pipe.modules.values():
            module.register_forward_pre_hook(lambda *_: self.count())

    def count(self) -> None:
        self.forwards += 1


def train_both(group: Any, case: Case) -> tuple[Run, Run]:
    return train(group, case._replace(way=None)), train(group, case)


def check_equal(pairs: list[tuple[Run, Run]]) -> None:
    for expected, found in pairs:
        assert found.losses == expected.losses
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found.state, expected.state, strict=True))
        assert expected.in_vain == 0
    check_norms(pairs[0][0].norms)
    assert pairs[-1][1].in_vain == 0, "the last rank knows before it starts"


def check_norms(norms: list[float]) -> None:
    clipped = [1 < norm < math.inf for norm in norms]
    assert 0 < sum(clipped) < len(norms), norms
    assert clipped[0], norms
    assert clipped[-1], norms
    assert not all(map(math.isfinite, norms)), norms


FAMILIES = [
    ("gpipe", "adamw"),
    ("1f1b", "momentum"),
    ("interleaved-1f1b", "adam"),
    ("breadth-first", "sgd"),
    ("zb-h1", "foreach nesterov"),
    ("zb-h2", "adamw"),
    ("zb-v", "adamw"),
    ("v-half", "adagrad"),
    ("v-min", "nesterov"),
    ("hanayo", "adam"),
    ("chimera", "adamw"),
    ("dualpipe", "momentum"),
    ("dualpipe-v", "adamw"),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "kind"), every(5, FAMILIES))
def test_steps_equal_the_synchronous_loop_to_the_bit(world: Ranks, name: str, kind: str) -> None:
    pairs = world.run(train_both, Case(name, kind), ranks=4)
    check_equal(pairs)
    assert pairs[0][1].in_vain > 0


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.parametrize(("name", "ranks"), every(2, [("zb-h2", 4), ("zb-v", 3), ("gpipe", 2), ("dualpipe", 4)]))
def test_steps_start_over_without_shared_memory_too(world: Ranks, name: str, ranks: int) -> None:
    check_equal(world.run(train_both, Case(name, "adamw", lanes=True), ranks=ranks))


def test_one_rank_alone(world: Ranks) -> None:
    check_equal(world.run(train_both, Case("1f1b", "adamw"), ranks=1))


@pytest.mark.long
@pytest.mark.parametrize("name", every(2, ["zb-h2", "chimera"]))
def test_gradients_of_several_steps_of_the_pipeline(world: Ranks, name: str) -> None:
    check_equal(world.run(train_both, Case(name, "momentum", accumulate=2), ranks=4))


@pytest.mark.long
@pytest.mark.parametrize(("name", "ranks"), every(2, [("zb-v", 4), ("zb-h2", 3)]))
def test_a_scaler_skips_and_grows_alike_on_all_ranks(world: Ranks, name: str, ranks: int) -> None:
    pairs = world.run(train_both, Case(name, "adamw", scale=64.0), ranks=ranks)
    check_equal(pairs)
    scales = {found.state[-1].item() for _, found in pairs}
    assert len(scales) == 1
    assert scales != {64.0}


def scaled_and_on_one_device(group: Any, name: str) -> tuple[float, float, float]:
    """The largest difference of parameters from one device's after steps that are clipped, overflow and scale up; both scales."""
    schedule = zb.plan(WORK, 4, placements="vee", evaluations=200).schedule if name == "plan" else zb.make(name, 2, 4)
    factor = 1.0

    def loud(output: Tensor, target: Tensor) -> Tensor:
        return factor * loss_fn(output, target)

    whole = [plain(stage, schedule.num_stages) for stage in range(schedule.num_stages)]
    theirs = torch.optim.AdamW(nn.ModuleList(whole).parameters(), lr=0.01)
    scaler, other = (torch.amp.GradScaler(DEVICE.type, init_scale=64.0, growth_interval=2) for _ in range(2))
    with zb.Pipeline(plain, schedule, 4, loud, group=group) as pipe:
        optimizer = zb.PostValidation(torch.optim.AdamW(pipe.parameters(), lr=0.01), pipe, LIMIT, scaler)
        for step in range(8):
            factor = {0: 1e3, 3: math.inf, 4: 1e3, 7: 1e4}.get(step, 1.0)
            inputs, targets = batch(4, seed=step)
            pipe.step(inputs, targets, scaler=scaler)
            for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
                other.scale(loud(nn.Sequential(*whole)(x), y) / 4).backward()
            other.unscale_(theirs)
            nn.utils.clip_grad_norm_(nn.ModuleList(whole).parameters(), LIMIT)
            other.step(theirs)
            other.update()
            theirs.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.settle()
        pairs = [
            pair for stage, module in pipe.modules.items() for pair in zip(module.parameters(), whole[stage].parameters(), strict=True)
        ]
        return max((mine - its).abs().max().item() for mine, its in pairs), scaler.get_scale(), other.get_scale()


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["zb-v", "plan", "dualpipe-v", "zb-h1"])
def test_a_scale_that_changes_leaves_one_device_s_steps(world: Ranks, name: str) -> None:
    for error, scale, expected in world.run(scaled_and_on_one_device, name, ranks=2):
        assert error < 1e-12
        assert scale == expected != 64.0


def step_and_settle(optimizer: zb.PostValidation) -> None:
    """A step of this rank's, and the wait for its verdict: what fails on another rank may reach this one in either."""
    optimizer.step()
    optimizer.settle()


def scaler_elsewhere(group: Any, given: bool, had: bool, other: bool, on_last: bool = True) -> str:
    """The error on this rank where pipeline and optimizer have different scalers."""
    scalers = [torch.amp.GradScaler(DEVICE.type, init_scale=4.0) for _ in range(2)]
    with zb.Pipeline(plain, "zb-h1", 4, loss_fn, group=group) as pipe:
        optimizer = zb.PostValidation(torch.optim.SGD(pipe.parameters(), lr=0.1), pipe, scaler=scalers[0] if had else None)
        pipe.step(*batch(4), scaler=scalers[other and (on_last or pipe.rank == 0)] if given else None)
        with pytest.raises(zb.PipelineError) as caught:
            step_and_settle(optimizer)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "had", "other", "said"),
    [
        (True, False, False, "the last step was given a scaler, and PostValidation has none"),
        (False, True, False, "the last step was given no scaler, and PostValidation has one"),
        (True, True, True, "the last step was given another scaler, and PostValidation has one"),
    ],
)
def test_pipeline_and_optimizer_have_the_same_scaler(world: Ranks, given: bool, had: bool, other: bool, said: str) -> None:
    for text in world.run(scaler_elsewhere, given, had, other, ranks=2):
        assert said in text


def test_a_rank_without_the_loss_has_the_same_scaler_too(world: Ranks) -> None:
    for text in world.run(scaler_elsewhere, True, True, True, False, ranks=2):
        states(text, "rank 0", "scaler")


Muon = getattr(torch.optim, "Muon", torch.optim.SGD)  # from torch 2.9 on


def muon_and_adamw(pipe: zb.Pipeline) -> list[torch.optim.Optimizer]:
    """One for matrices and one for the rest."""
    matrices, rest = ([one for one in pipe.parameters() if (one.dim() == 2) is is_matrix] for is_matrix in (True, False))
    return [Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def train_with_two(group: Any, folder: Path, *, waits: bool) -> tuple[list[Tensor], list[bool]]:
    """The state after steps that are clipped, left out and plain, and whether a checkpoint gave another pipeline all of it."""
    scaler, factor = torch.amp.GradScaler(DEVICE.type, init_scale=4.0, growth_interval=2), 1.0

    def loud(output: Tensor, target: Tensor) -> Tensor:
        return factor * loss_fn(output, target)

    with zb.Pipeline(plain, "zb-v", 4, loud, group=group) as pipe:
        optimizers = muon_and_adamw(pipe)
        validated = None if waits else zb.PostValidation(optimizers, pipe, LIMIT, scaler, "copy")
        for step in range(6):
            factor = {1: 1e3, 2: math.inf, 4: 1e3}.get(step, 1.0)
            pipe.step(*batch(4, seed=step), scaler=scaler)
            if validated is None:
                pipe.unscale_(scaler, optimizers)
                pipe.clip_grad_norm_(LIMIT)
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
            else:
                validated.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        zb.save(folder, pipe, validated or optimizers, scaler=scaler)
        state = [tensor for optimizer in optimizers for tensor in state_of(pipe, optimizer)]
    with zb.Pipeline(plain, "zb-v", 4, loud, group=group) as pipe:
        optimizers = muon_and_adamw(pipe)
        zb.load(folder, pipe, optimizers, scaler=scaler)
        loaded = [tensor for optimizer in optimizers for tensor in state_of(pipe, optimizer)]
        return state, [torch.equal(one, other) for one, other in zip(state, loaded, strict=True)]


def train_with_two_both_ways(group: Any, folder: Path) -> tuple[bool, bool]:
    """Whether both ways leave the same state, and checkpoints all of it."""
    (expected, kept), (found, also_kept) = (train_with_two(group, folder / str(waits), waits=waits) for waits in (True, False))
    return all(torch.equal(one, other) for one, other in zip(expected, found, strict=True)), all(kept + also_kept)


@pytest.mark.long
def test_several_optimizers_step_as_one(world: Ranks, tmp_path: Path) -> None:
    assert world.run(train_with_two_both_ways, tmp_path, ranks=2) == [(True, True)] * 2


def refused_optimizers(group: Any, folder: Path) -> list[str]:
    """What is said where one of two optimizers is given, a third one steps, or gradients are still scaled."""
    scaler, said = torch.amp.GradScaler(DEVICE.type, init_scale=4.0), []

    def refused(use: Any) -> None:
        with pytest.raises(zb.InputError) as caught:
            use()
        said.append(str(caught.value))

    with zb.Pipeline(plain, "zb-h1", 4, loss_fn, group=group) as pipe:
        muon, adamw = muon_and_adamw(pipe)
        pipe.step(*batch(4), scaler=scaler)
        refused(adamw.step)
        refused(lambda: pipe.clip_grad_norm_(1.0))
        pipe.unscale_(scaler, adamw)
        adamw.step()
        refused(muon.step)
        pipe.unscale_(scaler, [muon])
        muon.step()
        refused(lambda: zb.save(folder, pipe, muon))
        refused(lambda: zb.PostValidation([adamw], pipe))
        refused(lambda: zb.PostValidation([adamw, adamw], pipe))
        zb.PostValidation([adamw, muon], pipe)
        refused(muon.step)
        refused(torch.optim.SGD(pipe.parameters(), lr=0.1).step)
        zb.save(folder, pipe, [muon, adamw])
        refused(lambda: zb.load(folder, pipe, adamw))
        refused(lambda: zb.load(folder, pipe, torch.optim.SGD(pipe.parameters(), lr=0.1)))
    return said


def test_optimizers_that_are_left_out_are_named(world: Ranks, tmp_path: Path) -> None:
    for said in world.run(refused_optimizers, tmp_path / "saved", ranks=2):
        kind = Muon.__name__
        parts = [
            "AdamW.step(): ",
            "gradients are still scaled by 4",
            f"{kind}.step(): ",
            "AdamW has stepped parameters of this pipeline that",
            f"{kind} has stepped parameters of this pipeline that AdamW does not hold",
            "a parameter is in two groups of the optimizers AdamW, AdamW",
            f"{kind}.step() bypasses the PostValidation",
            f"SGD steps parameters of a pipeline whose PostValidation has AdamW, {kind}",
            "the optimizer lacks",
            f"belongs to SGD, and its parameters were saved from AdamW, {kind}",
        ]
        assert [part for part, text in zip(parts, said, strict=True) if part not in text] == [], said


class Counting(zb.hooks.StepHook):
    """Counts how often gradients of a step were announced by the time an optimizer has stepped with them."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_step_begin(self, step: Any) -> None:
        self.found.append(0)

    def before_optimizer(self) -> None:
        self.found[-1] += 1

    def on_step_end(self, step: Any) -> None:
        self.found[-1] = 10 * self.found[-1]


def announced(group: Any) -> list[int]:
    counting = Counting()
    with zb.Pipeline(plain, "zb-h1", 4, loss_fn, group=group, hooks=[counting]) as pipe:
        optimizer = zb.PostValidation(torch.optim.SGD(pipe.parameters(), lr=0.1), pipe, 1e-3)
        for step in range(3):
            pipe.step(*batch(4, seed=step))
            optimizer.step()
            optimizer.zero_grad()
    return counting.found


def test_hooks_hear_of_gradients_when_they_are_complete_though_steps_are_taken_back(world: Ranks) -> None:
    assert world.run(announced, ranks=2) == [[1, 1, 1]] * 2


class Doubling(torch.optim.SGD):
    """Doubles the gradients in place before it steps."""

    def step(self, closure: Any = None) -> Any:
        torch._foreach_mul_([parameter.grad for group in self.param_groups for parameter in group["params"]], 2.0)
        return super().step(closure)


def step_twice(pipe: zb.Pipeline, optimizer: zb.PostValidation) -> None:
    for step in range(2):  # the last rank steps when it knows all norms, so it hears of another rank's step in the second
        pipe.step(*batch(4, seed=step))
        optimizer.step()


def doubled(group: Any) -> str:
    with zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group) as pipe:
        optimizer = zb.PostValidation(Doubling(pipe.parameters(), lr=0.1), pipe, max_norm=1e9)
        with pytest.raises(zb.ZeroBubbleError) as caught:
            step_twice(pipe, optimizer)
        return str(caught.value)


def test_an_optimizer_that_changes_gradients_is_refused_in_its_first_step(world: Ranks) -> None:
    for text in world.run(doubled, ranks=2):
        states(text, "Doubling", "pipe.clip_grad_norm_")


@pytest.mark.long
@pytest.mark.parametrize("kind", every(3, ["foreach nesterov", "nesterov", "sgd", "momentum", "adamw", "adam"]))
def test_undoing_by_arithmetic_is_right_but_for_rounding(world: Ranks, kind: str) -> None:
    for expected, found in world.run(train_both, Case("zb-h2", kind, way="arithmetic"), ranks=4):
        assert found.losses == pytest.approx(expected.losses, rel=1e-9)
        for mine, theirs in zip(found.state, expected.state, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-11)


@pytest.mark.long
@pytest.mark.parametrize("name", every(2, ["zb-h2", "zb-v"]))
def test_evaluation_and_state_see_the_exact_step(world: Ranks, name: str) -> None:
    check_equal(world.run(train_both, Case(name, "adamw", looks=True), ranks=4))


def linear(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Linear(3, 3, dtype=torch.float64)


def trained_with(group: Any, change: str, limit: float, undo: str | None) -> list[Tensor]:
    """The parameters after steps that are clipped, of which rank 0 makes some early; synchronous without `undo`.

    `change` is made between a step of the optimizer and the next one of the pipeline.
    """
    with zb.Pipeline(lambda stage, _: linear(stage), "1f1b", 2, nn.functional.mse_loss, group=group) as pipe:
        held = list(pipe.parameters())
        rate: Any = torch.tensor(0.1, dtype=torch.float64) if change == "rate in a tensor" else 0.1
        inner = torch.optim.SGD(held[:1] if change == "groups" else held, lr=rate, momentum=0.9, foreach=False)
        if change == "gradients by a hook":
            inner.register_step_pre_hook(lambda *_: [parameter.grad.mul_(0.5) for parameter in held] and None)
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
        optimizer = None if undo is None else zb.PostValidation(inner, pipe, limit, undo=undo)  # type: ignore[arg-type]
        for step in range(4):
            x = torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            pipe.step(x, x + 1)
            if optimizer is None:
                pipe.clip_grad_norm_(limit)
                inner.step()
            else:
                optimizer.step()
            if change == "gradients":
                torch._foreach_zero_([parameter.grad for parameter in held])
            else:
                for parameter in held:
                    parameter.grad = None
            if change == "groups" and step == 1:
                inner.add_param_group({"params": held[1:]})
            scheduler.step()
        if optimizer is not None:
            optimizer.settle()
        return [parameter.detach().clone() for parameter in held]


def changed_between(group: Any, change: str, undo: str) -> list[float | str]:
    """The largest error for each limit, or the error that is raised."""
    found: list[float | str] = []
    for limit in (0.3, 0.6, 0.9, 1.2):
        try:
            mine, exact = trained_with(group, change, limit, undo), trained_with(group, change, limit, None)
            found.append(max((one - other).abs().max().item() for one, other in zip(mine, exact, strict=True)))
        except zb.PipelineError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("undo", ["copy", "arithmetic"])
@pytest.mark.parametrize("change", ["rate in a tensor", "groups"])
def test_options_and_groups_may_change_before_the_next_step(world: Ranks, change: str, undo: str) -> None:
    for errors in world.run(changed_between, change, undo, ranks=2):
        assert all(isinstance(error, float) and error <= 1e-12 for error in errors), errors


@pytest.mark.parametrize("change", ["gradients", "gradients by a hook"])
def test_gradients_that_change_before_the_next_step_are_an_error(world: Ranks, change: str) -> None:
    for errors in world.run(changed_between, change, "copy", ranks=2):
        assert any(isinstance(error, str) and "gradients" in error for error in errors), errors
        assert all(isinstance(error, str) or error == 0 for error in errors), errors


def test_shared_parameters_are_not_undone_by_arithmetic(world: Ranks) -> None:
    for said in world.run(undo_of_shared, ranks=2):
        assert 'undo="copy"' in said


def undo_of_shared(group: Any) -> str:
    tied = [[(0, "weight"), (1, "weight")]]
    with zb.Pipeline(lambda stage, _: linear(stage), "1f1b", 2, nn.functional.mse_loss, group=group, tied=tied) as pipe:
        inner = torch.optim.SGD(pipe.parameters(), lr=0.1)
        with pytest.raises(zb.InputError) as caught:
            zb.PostValidation(inner, pipe, undo="arithmetic")
        zb.PostValidation(inner, pipe, undo="copy")
    return str(caught.value)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("undo", [SavedCopy, ByFormula])
def test_an_undone_step_restores_the_state(kind: str, undo: Any) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 4, dtype=torch.float64)), nn.Parameter(torch.randn(5, dtype=torch.float64))]
    optimizer = MAKERS[kind](parameters)
    if undo is ByFormula and why_not(optimizer):
        assert kind == "adagrad"
        return
    for step in range(3):
        for parameter in parameters[: 1 + step]:
            parameter.grad = torch.randn_like(parameter)
        before = [p.detach().clone() for p in parameters], deepcopy(optimizer.state_dict()["state"])
        way = undo(optimizer)
        way.save()
        gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
        optimizer.step()
        assert not torch.equal(parameters[0], before[0][0])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        way.undo()
        exact = {"rtol": 0, "atol": 0} if undo is SavedCopy else {"rtol": 1e-12, "atol": 1e-14}
        torch.testing.assert_close([p.detach() for p in parameters], before[0], **exact)
        found = optimizer.state_dict()["state"]
        assert found.keys() == before[1].keys()
        for key, entry in before[1].items():
            torch.testing.assert_close(found[key], entry, **exact)
        optimizer.step()


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (torch.optim.Adam([nn.Parameter(torch.ones(1))], amsgrad=True), "a step of Adam with amsgrad=True (group 0) cannot be undone"),
        (torch.optim.AdamW([nn.Parameter(torch.ones(1))], betas=(0.0, 0.9)), "a step of AdamW with betas=(0.0, 0.9) (group 0) cannot"),
        (
            torch.optim.RMSprop([nn.Parameter(torch.ones(1))]),
            "a step of RMSprop cannot be undone by arithmetic, which knows SGD, Adam, AdamW",
        ),
        (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), ""),
    ],
)
def test_optimizers_that_arithmetic_cannot_undo_are_reported(optimizer: torch.optim.Optimizer, reason: str) -> None:
    assert why_not(optimizer).startswith(reason)
    assert bool(why_not(optimizer)) == bool(reason)


def refusals(group: Any) -> list[str]:
    """What each wrong use says, on a pipeline that then goes on."""
    seen: list[str] = []

    def attempt(use: Any) -> None:
        with pytest.raises(zb.InputError) as caught:
            use()
        seen.append(str(caught.value))

    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group) as pipe:
        inner, adagrad = torch.optim.SGD(pipe.parameters(), lr=0.1), torch.optim.Adagrad(pipe.parameters())
        attempt(lambda: zb.PostValidation(inner, pipe, max_norm=-1.0 if pipe.rank else 1.0))
        attempt(lambda: zb.PostValidation(inner, pipe, max_norm=1.0 + pipe.rank))
        attempt(lambda: zb.PostValidation(inner, pipe, undo="log"))  # type: ignore[arg-type]
        attempt(lambda: zb.PostValidation(adagrad, pipe, undo="arithmetic"))
        attempt(lambda: zb.PostValidation("sgd", pipe))  # type: ignore[arg-type]
        with patch.object(type(interface(DEVICE)), "free_bytes", lambda _: 100):
            attempt(lambda: zb.PostValidation(adagrad, pipe))
        optimizer = zb.PostValidation(inner, pipe)
        attempt(lambda: zb.PostValidation(inner, pipe))
        attempt(lambda: optimizer.zero_grad(set_to_none=False))
        before = [parameter.detach().clone() for parameter in pipe.parameters()]
        pipe.step(*batch(4))
        optimizer.step()
        optimizer.settle()
        assert not any(torch.equal(mine, was) for mine, was in zip(pipe.parameters(), before, strict=True) if mine.dim() > 1)
    return seen


def test_wrong_uses_are_refused_on_every_rank(world: Ranks) -> None:
    expected = [
        "rank 1: max_norm must be a number above 0, or None to clip nothing, got -1.0",
        "ranks disagree on max_norm or scaler: rank 0 has 1.0 without a scaler, rank 1 has 2.0 without a scaler",
        "all ranks: undo must be 'copy', 'arithmetic' or None, got 'log'",
        'all ranks: a step of Adagrad cannot be undone by arithmetic, which knows SGD, Adam, AdamW; use undo="copy"',
        "all ranks: optimizer must be a torch.optim.Optimizer, or a list of them, got str",
        "all ranks: a copy of parameters and state would take more than half of the free memory, and a step of Adagrad cannot be undone",
        "all ranks: the pipeline has a PostValidation already; use that, or make a new Pipeline",
        "a step that may be taken back needs its gradients, which zero_grad(set_to_none=False) overwrites; drop them",
    ]
    for result in world.run(refusals, ranks=2):
        assert [text[: len(start)] for text, start in zip(result, expected, strict=True)] == expected


class Failing(torch.optim.SGD):
    """Raises at call number `at` of `step`, counted from 0."""

    def __init__(self, parameters: Any, at: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.left = at

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.left -= 1
        if self.left < 0:
            raise ValueError("boom")
        super().step()


class Slow(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(1.0)
        super().step(closure)


def close_at_once(group: Any) -> float:
    """One step, after which every rank closes its pipeline as soon as it may, while rank 1 is still stepping."""
    with zb.Pipeline(build, "zb-h2", 8, loss_fn, group=group, timeout=60) as pipe:
        kind = Slow if pipe.rank == 1 else torch.optim.SGD
        optimizer = zb.PostValidation(kind(pipe.parameters(), lr=0.1), pipe, 1e9)
        loss = pipe.step(*batch(8)).item()
        optimizer.step()
    return loss


@pytest.mark.long
def test_a_rank_may_close_while_another_still_steps(world: Ranks) -> None:
    assert len(set(world.run(close_at_once, ranks=3))) == 1


def train_on(pipe: zb.Pipeline, optimizer: zb.PostValidation, steps: int) -> None:
    for step in range(steps):
        optimizer.step()
        optimizer.zero_grad()
        pipe.step(*batch(8, seed=step))


def fail_in(group: Any, culprit: int, at: int, max_norm: float) -> tuple[str, int | None]:
    pipe = zb.Pipeline(build, "zb-h2", 8, loss_fn, group=group, timeout=60)
    optimizer = zb.PostValidation(Failing(pipe.parameters(), at if pipe.rank == culprit else 1000), pipe, max_norm)
    pipe.step(*batch(8))
    with pytest.raises(zb.PipelineError) as caught:
        train_on(pipe, optimizer, 4)
    with raises(zb.PipelineError, "new", "Pipeline"):
        optimizer.step()
    return str(caught.value), caught.value.rank


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("culprit", "at", "max_norm", "when"),
    [
        (0, 1, 1e9, "while stepping the optimizer"),
        (3, 1, 1e9, "while stepping the optimizer"),
        (1, 1, 1e-3, "while validating the optimizer's step"),
        (3, 0, 1e-3, "while stepping the optimizer"),
    ],
)
def test_a_rank_that_fails_in_the_optimizer_ends_all(world: Ranks, culprit: int, at: int, max_norm: float, when: str) -> None:
    for text, rank in world.run(fail_in, culprit, at, max_norm, ranks=4):
        assert rank == culprit
        assert text == f"rank {culprit} failed {when}: ValueError: boom"


def vanish(group: Any, culprit: int) -> str:
    """Rank `culprit` dies between `pipe.step` and the optimizer's; the others end within the timeout."""
    pipe = zb.Pipeline(build, "zb-h2", 8, loss_fn, group=group, timeout=200)
    optimizer = zb.PostValidation(torch.optim.SGD(pipe.parameters(), lr=0.1), pipe, 1.0)
    pipe.step(*batch(8))
    if pipe.rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(zb.PipelineError) as caught:
        train_on(pipe, optimizer, 1)
    return str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("culprit", [pytest.param(0, marks=pytest.mark.long), 1, pytest.param(2, marks=pytest.mark.long)])
def test_a_rank_that_is_gone_ends_the_others(culprit: int) -> None:
    doomed = Ranks(3)
    try:
        outcomes = doomed.outcomes(vanish, culprit, ranks=3, seconds=190)
    finally:
        doomed.kill()
    assert outcomes.pop(culprit) == ("gone", "SIGKILL")
    texts = {text for _, text in outcomes}
    assert len(texts) == 1, outcomes
    states(texts.pop(), f"rank {culprit}")


ORDERS = ("zb-h2", "zb-v", "interleaved-zb", "dualpipe")
"""One with a stage on each rank, one that turns back, one that goes round, and one with two copies of each stage."""
LONG = [(name, ("adamw", "momentum")[turn % 2]) for turn, name in enumerate(TRAINING) if zb.schedules.SCHEDULES[name].allows(4, 8)]


@pytest.mark.long
@pytest.mark.parametrize(("name", "kind"), LONG)
def test_many_steps_equal_the_synchronous_loop_to_the_bit(world: Ranks, name: str, kind: str) -> None:
    """Of every schedule 30 steps, of a few 100, with ZEROBUBBLE_EXHAUSTIVE=1 of all 200."""
    steps = 200 if EXHAUSTIVE else 100 if name in ORDERS else 30
    check_equal(world.run(train_both, Case(name, kind, steps=steps), ranks=4, seconds=550))


@pytest.mark.long
def test_the_program_of_the_page_runs_as_pasted(tmp_path: Path) -> None:
    program, _ = programs_of("docs/optimizer.md")
    printed = run_forked(program, tmp_path, 4)
    assert "Warning" not in (tmp_path / "stderr").read_text(), "a scheduler may step though a rank steps later"
    found = re.fullmatch(r"loss (0\.\d+), norm of the last gradients (0\.\d+)\n", printed)
    assert found is not None, printed
    assert float(found[1]) < 0.4
    assert float(found[2]) > 0
