"""A profile measures passes and messages, does not change the model, and can be used to plan the next schedule."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import zerobubble as zb
from tests.device import cpu_only
from tests.procs.measured import assert_least_within
from tests.procs.models import batch, build, loss_fn, one_device
from tests.procs.ranks import Ranks
from tests.thinned import every_of
from zerobubble.cli import main
from zerobubble.runtime.measure.profile import one_by_one

UNIT_S = 0.004


class _Doze(torch.autograd.Function):
    """Sleeps `units` in F and twice as long in B."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, units: float) -> Tensor:
        ctx.units = units
        time.sleep(units * UNIT_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.units * UNIT_S)
        return dy, None


class Doze(nn.Module):
    def __init__(self, units: float) -> None:
        super().__init__()
        self.units = units

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Doze.apply(x, self.units)
        return y


def heavy(stage: int, num_stages: int) -> nn.Module:
    """A stage that takes its time; the last but one takes three times as long."""
    return nn.Sequential(nn.Linear(16, 16), Doze(3.0 if stage == num_stages - 2 else 1.0))


def profile_heavy(group: Any, name: str) -> tuple[zb.Costs, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []
    with zb.Pipeline(heavy, name, 4, nn.functional.mse_loss, group=group) as pipe:
        x = torch.ones(8, 16)
        return pipe.profile(x, x, steps=2, progress=lambda done, total: seen.append((done, total))), seen


@pytest.mark.long
@pytest.mark.parametrize(("name", "stages"), [("1f1b", 4), ("zb-v", 8), ("chimera", 4)])
def test_a_stage_three_times_as_heavy_shows(world: Ranks, name: str, stages: int) -> None:
    placement = zb.make(name, 4, 4).placement

    def measure() -> list[int]:
        (costs, results), *others = world.run(profile_heavy, name, ranks=4)
        assert all(other == (costs, results) for other in others), "every rank has the same costs"
        assert results == [(1, 3), (2, 3), (3, 3)]
        assert costs.num_stages == stages
        assert costs.placement == placement
        return [*costs.forward, *costs.backward, *costs.weight, *costs.comm]

    unit = UNIT_S * 1e9
    factors = [3 if stage == stages - 2 else 1 for stage in range(stages)]
    forward = [(factor * unit, (factor + 1) * unit) for factor in factors]
    backward = [(2 * factor * unit, (2 * factor + 2) * unit) for factor in factors]
    weight = [(1.0, unit)] * stages  # a Linear's, apart from B though 1f1b runs them in one
    route = placement.routes[0]
    comm = [(1.0, unit) if here != there else (0.0, 1.0) for here, there in pairwise(route)]
    assert_least_within(measure, [*forward, *backward, *weight, *comm])


class Restless(nn.Module):
    """Writes into its buffers, which are the model's state or not, puts a new one in the place of another, and draws random numbers."""

    count: Tensor
    last: Tensor
    none: Tensor | None

    def __init__(self, *, is_state: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        for name, buffer in dict(self.norm.named_buffers()).items():
            self.norm.register_buffer(name, buffer, persistent=is_state)
        self.register_buffer("count", torch.zeros(()), persistent=is_state)
        self.register_buffer("last", torch.zeros(()), persistent=is_state)
        self.register_buffer("none", None, persistent=is_state)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = self.none = x.detach().mean()
        return nn.functional.dropout(self.norm(self.linear(x)), 0.3)


def state_of(pipe: zb.Pipeline) -> list[Any]:
    """Copies of everything that a profile must leave as it was."""
    modules = list(pipe.modules.values())
    parameters = [p for module in modules for p in module.parameters()]
    buffers = [dict(part._buffers) for module in modules for part in module.modules()]
    kept = [[None if b is None else b.clone() for b in named.values()] for named in buffers]
    return [
        [p.detach().clone() for p in parameters],
        [None if p.grad is None else p.grad.clone() for p in parameters],
        kept,
        torch.get_rng_state(),
    ]


def identities(pipe: zb.Pipeline) -> list[int]:
    """The tensors themselves, whatever is in them."""
    modules = list(pipe.modules.values())
    tensors = [tensor for module in modules for part in module.modules() for tensor in part._buffers.values()]
    return [*map(id, tensors), *(id(p.grad) for module in modules for p in module.parameters())]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return first is second if first is None or second is None else torch.equal(first, second)


def profile_restless(group: Any, name: str, stepped: bool) -> tuple[bool, bool, bool]:
    """Whether after a profile, before or after a step, state, tensors and the last step's timeline are those of before."""
    torch.manual_seed(group.rank())
    with zb.Pipeline(lambda s, n: Restless(is_state=name != "chimera"), name, 4, nn.functional.mse_loss, group=group) as pipe:
        x = torch.rand(8, 6)
        if stepped:
            pipe.step(x, x)
        before, tensors, rows = state_of(pipe), identities(pipe), pipe.timeline().rows if stepped else None
        pipe.profile(torch.rand(8, 6, generator=torch.Generator().manual_seed(1)), x, steps=1)
        return same(state_of(pipe), before), identities(pipe) == tensors, not stepped or pipe.timeline().rows == rows


@pytest.mark.parametrize(("name", "stepped"), every_of(3, ["1f1b", "chimera"], [False, True]))
def test_a_profile_leaves_no_trace(world: Ranks, name: str, stepped: bool) -> None:
    for state, tensors, rows in world.run(profile_restless, name, stepped, ranks=2):
        assert state, "parameters, gradients, buffers and random state, to the bit"
        assert tensors, "the gradients and buffers themselves"
        assert rows, "the timeline shows the last step"


def look_between_steps(group: Any) -> tuple[int, bool]:
    """How many losses `on_loss` got in a step, a profile and a description, and whether those of the step were kept."""
    heard: list[int] = []
    with zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group, on_loss=lambda microbatch, _: heard.append(microbatch)) as pipe:
        pipe.step(*batch(4))
        before = pipe.losses
        pipe.profile(*batch(4, seed=1), steps=1)
        pipe.describe(*batch(4, seed=2))
        assert before is not None
        return len(heard), pipe.losses is not None and torch.equal(pipe.losses, before)


def test_nobody_hears_of_losses_that_are_only_measured(world: Ranks) -> None:
    assert world.run(look_between_steps, ranks=2) == [(0, True), (4, True)]


def profile_then_train(group: Any) -> tuple[zb.Costs, str, float]:
    """The way of the first minutes: profile, plan, a pipeline of the same modules; its gradients against one device."""
    with zb.Pipeline(build, "1f1b", 6, loss_fn, group=group) as pipe:
        inputs, targets = batch(6)
        costs = pipe.profile(inputs, targets, steps=1)
        schedule = zb.plan(costs, 6, placements=pipe.schedule.placement, evaluations=50).schedule
    with zb.Pipeline(list(pipe.modules.values()), schedule, 6, loss_fn, group=group) as planned:
        stages = [build(s, planned.schedule.num_stages) for s in range(planned.schedule.num_stages)]
        planned.step(inputs, targets)
        one_device(stages, 6, inputs, targets)
        worst = 0.0
        for stage, module in planned.modules.items():
            for mine, theirs in zip(module.parameters(), stages[stage].parameters(), strict=True):
                assert mine.grad is not None
                assert theirs.grad is not None
                worst = max(worst, ((mine.grad - theirs.grad).norm() / theirs.grad.norm()).item())
    return costs, schedule.to_text(), worst


def test_a_profile_plans_the_next_schedule(world: Ranks, tmp_path: Path) -> None:
    results = world.run(profile_then_train, ranks=2)
    (costs, text, _), *others = results
    assert all((other, order) == (costs, text) for other, order, _ in others)
    assert all(worst <= 1e-12 for _, _, worst in results)
    assert zb.Schedule.from_text(text).split_stages == {0, 1}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(costs.to_dict()))
    options = ("--microbatches", "6", "--evaluations", "50", "--json")
    done = CliRunner().invoke(main, ["plan", "--costs", str(file), *options])
    assert done.exit_code == 0, done.output
    schedule = zb.plan(costs, 6, placements=zb.Placement.linear(2), evaluations=50).schedule
    assert json.loads(done.stdout)["bubble_span"] == zb.simulate(schedule, costs).bubble_span
    compared = CliRunner().invoke(main, ["compare", "1f1b", "--ranks", "2", "--microbatches", "6", "--costs", str(file), "--json"])
    assert compared.exit_code == 0, compared.output


def profile_paced(group: Any) -> zb.Costs:
    pace = zb.Costs.from_ms([6.0, 3.0], [8.0, 4.0], [4.0, 2.0])
    with zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group, pace=pace) as pipe:
        return pipe.profile(*batch(4), steps=2)


@cpu_only("pace is for rehearsals on CPUs")
def test_a_rehearsal_is_profiled_at_its_pace(world: Ranks) -> None:
    def measure() -> list[float]:
        costs, other = world.run(profile_paced, ranks=2)
        assert costs == other
        return [time / 1e6 for times in (costs.forward, costs.backward, costs.weight) for time in times]

    assert_least_within(measure, [(wanted, wanted + 2) for wanted in (6, 3, 8, 4, 4, 2)])


def profile_mixed(group: Any) -> zb.Costs:
    """Backwards in one piece, and the last one apart, at a pace at which a BW takes less."""
    pace = zb.Costs.from_ms([6.0, 3.0], [8.0, 4.0], [4.0, 2.0], fused=[9.0, 4.5])
    whole = zb.make("1f1b", 2, 4)
    rows = tuple((*row[:-1], *(row[-1]._replace(kind=kind) for kind in (zb.Kind.B, zb.Kind.W))) for row in whole.rows)
    with zb.Pipeline(build, replace(whole, name="mixed", rows=rows), 4, loss_fn, group=group, pace=pace) as pipe:
        return pipe.profile(*batch(4), steps=2)


@pytest.mark.long
@cpu_only("pace is for rehearsals on CPUs")
def test_backwards_in_one_piece_are_measured_where_a_schedule_has_both(world: Ranks) -> None:
    def measure() -> list[float]:
        costs, other = world.run(profile_mixed, ranks=2)
        assert costs == other
        return [time / 1e6 for times in (costs.backward, costs.weight, costs.fused) for time in times]

    assert_least_within(measure, [(wanted, wanted + 1.4) for wanted in (8, 4, 4, 2, 9, 4.5)])


def profile_bytes(group: Any) -> tuple[int, ...]:
    """Bytes held after F and after B, by stage, of two Linears with an activation that saves its output."""
    parts = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 16, bias=False))
    with zb.Pipeline(lambda *_: parts, "1f1b", 4, nn.functional.mse_loss, group=group) as pipe:
        x = torch.rand(40, 16)
        costs = pipe.profile(x, x, steps=1)
        return costs.held_after_f + costs.held_after_b


def test_bytes_are_those_of_one_microbatch(world: Ranks) -> None:
    column = 10 * 4  # bytes of a float32 column of a microbatch; the batch itself is there anyway
    first_f, last_f, first_b, last_b = world.run(profile_bytes, ranks=2)[0]
    assert first_f == 32 * column  # what tanh gives
    assert last_f == (16 + 32 + 16) * column  # the input, the output of tanh, and the input of the loss
    assert first_b == (32 + 32 + 16) * column  # for W: the inputs of both Linears but for the batch, and the gradients of their outputs
    assert last_b == (16 + 32 + 32 + 16) * column


def fail_profile(group: Any, culprit: int, at: str) -> tuple[float, str, int | None]:
    """A rank that fails in a stage or in its progress: (seconds until the error, its text, its rank)."""

    def boom(done: int, total: int) -> None:
        raise ValueError("boom")

    pipe = zb.Pipeline(heavy, "1f1b", 4, nn.functional.mse_loss, group=group, timeout=100.0)
    x = torch.ones(8, 16 if at == "progress" else 3)
    begin = time.monotonic()
    with pytest.raises(zb.PipelineError) as caught:
        pipe.profile(x, torch.ones(8, 16), progress=boom if pipe.rank == culprit else None)
    return time.monotonic() - begin, str(caught.value), caught.value.rank


@pytest.mark.parametrize(
    ("culprit", "at", "reason"),
    [
        pytest.param(2, "progress", "rank 2 failed while profiling: ValueError: boom", marks=pytest.mark.long),
        (
            0,
            "stage",
            r"rank 0 failed at 'run 0F0' \(F of stage 0, microbatch 0\): RuntimeError: (addmm: )?mat1 and mat2",
        ),  # torch 2.15 names the operation
    ],
)
def test_a_rank_that_fails_ends_all_with_its_cause(world: Ranks, culprit: int, at: str, reason: str) -> None:
    for took, text, rank in world.run(fail_profile, culprit, at, ranks=4):
        assert took < 50
        assert rank == culprit
        assert re.match(reason, text)


def profile_nothing(group: Any) -> str:
    with zb.Pipeline(heavy, "1f1b", 4, nn.functional.mse_loss, group=group) as pipe:
        try:
            pipe.profile(torch.ones(8, 16), torch.ones(8, 16), steps=0)
        except zb.InputError as error:
            return str(error)
    return "no error"


def test_no_steps_are_refused(world: Ranks) -> None:
    assert set(world.run(profile_nothing, ranks=2)) == {"a profile needs at least 1 step, got 0"}


PROFILING = """
import torch, zerobubble as zb
torch.distributed.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
with zb.Pipeline(torch.nn.Linear(4, 4), "zb-h1", 4, torch.nn.functional.mse_loss) as pipe:
    pipe.profile(torch.ones(8, 4), torch.ones(8, 4))
torch.distributed.destroy_process_group()
"""


@pytest.mark.long
def test_a_terminal_shows_a_bar_and_a_file_nothing(tmp_path: Path) -> None:
    terminal, errors = pty.openpty()
    seen = []
    for number, where in enumerate((errors, subprocess.PIPE)):
        command = [sys.executable, "-c", PROFILING.format(store=tmp_path / str(number))]
        seen.append(subprocess.run(command, stderr=where, env=os.environ | {"TERM": "xterm"}, timeout=300, check=True).stderr)
    os.close(errors)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert "profiling" in shown
    assert "4/4" in shown
    assert seen[1] == b""


@pytest.mark.parametrize("name", sorted(set(zb.schedules.SCHEDULES) - {"forward-only"}))
def test_one_by_one_is_legal_on_every_placement(name: str) -> None:
    schedule = one_by_one(zb.make(name, 4, 8))
    assert zb.schedule_faults(schedule) == ()
    assert zb.lowering.program_faults(zb.lower(schedule)) == ()
    assert max(zb.simulation.peak_memory(schedule, zb.Costs.uniform(schedule.num_stages))) <= schedule.placement.stages_per_rank * 1_000_000
