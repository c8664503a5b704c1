"""FSDP2 stages: weights are gathered as planned, gradients reduced once per step and equal to one device's, with W separate from B.

Reductions run next to other passes.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.meshes import init_device_mesh
from tests.procs.models import batch, build, loss_fn
from tests.procs.programs import programs_of
from tests.procs.ranks import Ranks
from tests.procs.test_mesh import (
    MICROBATCHES,
    ignoring,
    oracle,
    paired,
    relative,
    share,
    tokens,
    undivided,
    whole,
    whole_batch,
    worst_gradient,
    worst_of_a_step,
)
from tests.procs.test_mesh import divided as divided_by_tensor_parallelism
from tests.procs.versions import needs_fsdp2_on_cpu, needs_own_reductions
from tests.refusals import raises, states
from zerobubble.runtime.hooks.undo_by_arithmetic import ByFormula
from zerobubble.runtime.split.layers.eligibility import fsdp2_parts
from zerobubble.runtime.stage import reduction, shards
from zerobubble.schedules import with_recompute
from zerobubble.testing import checked_device


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts the collectives of FSDP2."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp2

    counts: Counter[str] = Counter()
    kept = fsdp2.foreach_all_gather, fsdp2.foreach_reduce

    def counted(name: str, call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return call(*args, **kwargs)

        return run

    fsdp2.foreach_all_gather, fsdp2.foreach_reduce = counted("gathers", kept[0]), counted("reductions", kept[1])
    try:
        yield counts
    finally:
        fsdp2.foreach_all_gather, fsdp2.foreach_reduce = kept


class OneAfterAnother:
    """Reduces and scatters for FSDP2; each message of a step but the last is over only when the next one has been started, too."""

    def __init__(self) -> None:
        self.started: list[threading.Event] = []

    def expect(self, num: int) -> None:
        """A step begins that sends so many messages."""
        self.started = [threading.Event() for _ in range(num)]

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        if not async_op:  # who calls it then goes on with the output, in the order of its stream
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group)
        number = sum(event.is_set() for event in self.started)
        work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op=True)
        if not self.started:  # `describe` plays a step, too
            return work
        self.started[number].set()
        return _After(work, self.started[number + 1 : number + 2])


class _After:
    def __init__(self, work: Any, events: list[threading.Event]) -> None:
        self.work, self.events = work, events

    def wait(self) -> None:
        assert all(event.wait(90) for event in self.events), "the next reduction does not start before this one is over"
        self.work.wait()


def divided(mesh: Any, dtype: torch.dtype, comm: OneAfterAnother | None) -> Any:
    """Makes stages that are divided; with `comm`, which then reduces and scatters, in two parts."""
    from torch.distributed.fsdp import fully_shard

    def make(stage: int, num_stages: int) -> nn.Module:
        if comm is None:
            return fully_shard(build(stage, num_stages).to(dtype), mesh=mesh["dp_shard"])
        module = undivided(stage, num_stages)
        parts = module.get_submodule("1.up" if stage == 0 else "0.up"), module
        for part in parts:
            fully_shard(part, mesh=mesh["dp_shard"]).set_custom_reduce_scatter(comm)
        return module

    return make


RECOMPUTED = ", recomputed"
WAYS = {"at once": lambda group, _: reduction._WaitedFor(group)}
"""How reductions run elsewhere than in threads: in a torch that waits for them."""


def schedule_of(name: str, largest: int, limit: int | None) -> dict[str, Any]:
    """What to play: a published schedule by its name, or a plan from its file, which keeps the room for weights."""
    if name.endswith(RECOMPUTED):
        return {"schedule": with_recompute(zb.make(name.removesuffix(RECOMPUTED), 2, MICROBATCHES)), "gathered_bytes": limit}
    if name != "planned":
        return {"schedule": name, "gathered_bytes": limit}
    work, sharded = zb.Workload.uniform(2, times=(10, 12, 8), comm=1), zb.planning.Sharded((largest,) * 4, limit, 1e9)
    found = zb.plan(work, MICROBATCHES, 1.5, placements="vee", evaluations=300, sharded=sharded)
    return {"schedule": zb.planning.Plan.from_dict(found.to_dict())}


class Found(NamedTuple):
    """Results of two accumulated steps on a rank.

    `worst` is the worst relative difference from one device, `counts` the gathers and reductions of each step, `planned` the gathers that
    were planned, `stages` those of the rank, `reports` the messages of `describe`, `reductions` their number in the last step, and
    `within` the number of stages of which a reduction began before the end of their last W.
    """

    worst: float
    counts: list[tuple[int, int]]
    planned: int
    stages: int
    reports: list[str]
    reductions: int
    within: int


def largest_of(dtype: torch.dtype) -> int:
    """The bytes of the weights of the largest stage."""
    return dtype.itemsize * max(sum(p.numel() for p in build(stage, 4).parameters()) for stage in range(4))


def trained(group: dist.ProcessGroup, played: dict[str, Any], dtype: torch.dtype, way: str) -> Found:
    """Two steps of stages whose gradients are reduced in this way; "on a device" means enqueued on its streams, which are checked."""
    if way == "on a device":
        with checked_device():
            return trained(group, played, dtype, "enqueued")
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "dp_shard"))
    replica = mesh.get_local_rank("dp_shard")
    comm = OneAfterAnother() if way == "in parts" else None
    kept = shards.start_reduction
    shards.start_reduction = WAYS.get(way, kept)  # type: ignore[attr-defined]
    try:
        stages = divided(mesh, dtype, comm)
        with zb.Pipeline(stages, **played, num_microbatches=MICROBATCHES, loss_fn=ignoring, loss_weight=tokens, mesh=mesh) as pipe:
            message = pipe.describe(*share(replica, 0, uneven=True))
            counts, losses = [], []
            for seed in range(2):
                if comm is not None:
                    comm.expect(2 * len(pipe.modules))
                with counting() as counted:
                    losses.append(pipe.step(*share(replica, seed, uneven=True)).item())
                counts.append((counted["gathers"], counted["reductions"]))
            timeline = pipe.timeline()
            norm = pipe.clip_grad_norm_(0.1).item()
            modules, expected, expected_norm = oracle(pipe.schedule.num_stages, 2, 0.1, uneven=True)
            found = [abs(loss / theirs - 1) for loss, theirs in zip(losses, expected, strict=True)]
            found += [abs(norm / expected_norm - 1), worst_gradient(pipe, modules)]
            pipe.eval_step(*share(replica, 0, uneven=True))
            assert all(hasattr(parameter, "full_tensor") for module in pipe.modules.values() for parameter in module.parameters())
            assert pipe.gathers.is_proven
            reductions = timeline.reductions_of(mesh.get_local_rank("pp"))
            ends = {span.op.stage: span.end for span in timeline.rows[mesh.get_local_rank("pp")] if span.op.kind is zb.Kind.W}
            within = {one.stage for one in reductions if one.start < ends.get(one.stage, 0)}
            reports = [str(report) for report in message]
            return Found(max(found), counts, len(pipe.gathers.gathers), len(pipe.modules), reports, len(reductions), len(within))
    finally:
        shards.start_reduction = kept  # type: ignore[attr-defined]


@pytest.mark.sweep
@needs_fsdp2_on_cpu
@pytest.mark.parametrize(
    ("name", "memory", "dtype", "way"),
    [
        ("1f1b", None, torch.float64, "in threads"),
        ("zb-h1", 1.0, torch.float64, "on a device"),
        ("zb-h1", None, torch.float32, "in threads"),
        pytest.param("zb-v", None, torch.float64, "in parts", marks=needs_own_reductions),
        ("zb-v", 1.0, torch.float64, "in threads"),
        ("interleaved-1f1b", 1.0, torch.float64, "at once"),
        ("planned", 1.0, torch.float64, "in threads"),
        ("zb-h1, recomputed", None, torch.float64, "in threads"),
        ("zb-v, recomputed", 1.0, torch.float64, "in threads"),
    ],
)
def test_weights_are_gathered_as_planned_and_gradients_reduced_once(
    world: Ranks, name: str, memory: float | None, dtype: torch.dtype, way: str
) -> None:
    """`memory` counts the largest stage's weights. What to play is planned once, not on every rank."""
    parts = 2 if way == "in parts" else 1
    largest = largest_of(dtype)
    played = schedule_of(name, largest, None if memory is None else int(memory * largest))
    for found in world.run(trained, played, dtype, way, ranks=4):
        planned, stages = found.planned, found.stages
        assert found.worst < (1e-12 if dtype == torch.float64 else 1e-4)
        assert found.counts == [(planned * parts, stages * parts)] * 2
        assert planned == stages if memory is None or stages == 1 else planned > stages
        assert found.reductions == stages * parts
        if name.startswith("zb") or name == "planned":
            assert all("W does 100.0%" in text or "W does over 99.9%" in text for text in found.reports), found.reports
        if parts > 1:  # the first part is complete before the last W is over
            assert found.within > 0


def of_joined_modules(group: dist.ProcessGroup) -> tuple[float, list[bool]]:
    """The worst relative difference from one device if fully_shard gets a list of modules, and whether each is reduced afterwards."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "dp_shard"))

    def make(stage: int, num_stages: int) -> nn.Module:
        module = undivided(stage, num_stages)
        block = module.get_submodule("1" if stage == 0 else "0")
        fully_shard([block.get_submodule("up"), block.get_submodule("down")], mesh=mesh["dp_shard"])
        return fully_shard(module, mesh=mesh["dp_shard"])

    with zb.Pipeline(make, "zb-h1", MICROBATCHES, ignoring, loss_weight=tokens, mesh=mesh) as pipe:
        worst = worst_of_a_step(pipe, share(mesh.get_local_rank("dp_shard"), 0, uneven=True), whole_batch(0, uneven=True), ignoring)
        states = [fully_shard.state(part) for module in pipe.modules.values() for part in fsdp2_parts(module)]  # type: ignore[attr-defined]
        return worst, [group.reduce_grads for state in states for group in shards._groups(state)]


@needs_fsdp2_on_cpu
def test_modules_that_are_sharded_together_are_trained(world: Ranks) -> None:
    for worst, reduces in world.run(of_joined_modules, ranks=4):
        assert worst < 1e-12
        assert all(reduces)
        assert len(reduces) > 2


def whole_stages(mesh: Any) -> Any:
    """Stages divided along the dimension of `mesh` other than "pp"."""
    from torch.distributed.fsdp import fully_shard

    if "tp" in mesh.mesh_dim_names:
        return divided_by_tensor_parallelism(mesh)
    return lambda stage, num_stages: fully_shard(undivided(stage, num_stages), mesh=mesh["dp_shard"])


def taken_back(group: dist.ProcessGroup, dimension: str) -> tuple[float, int, tuple[int, ...], tuple[int, ...]]:
    """The worst relative difference of parameters after steps of which some are undone by arithmetic, and how many are.

    Then the bytes that a profile finds held after F in these stages, and in plain ones.
    """
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", dimension))
    replica = mesh.get_local_rank(dimension)
    kept, undone = ByFormula.undo, []
    ByFormula.undo = lambda self: (undone.append(1), kept(self))  # type: ignore[assignment, method-assign, misc, func-returns-value]
    try:
        with zb.Pipeline(whole_stages(mesh), "zb-h1", MICROBATCHES, loss_fn, mesh=mesh) as pipe:
            modules = [undivided(stage, 2) for stage in range(2)]
            one_device = torch.optim.AdamW(nn.ModuleList(modules).parameters(), lr=1e-2)
            optimizer = zb.PostValidation(
                torch.optim.AdamW(pipe.parameters(), lr=1e-2, foreach=False), pipe, max_norm=0.3, undo="arithmetic"
            )
            for seed in range(5):
                inputs, targets = whole_batch(seed, uneven=False)
                loss_fn(nn.Sequential(*modules)(inputs), targets).backward()
                nn.utils.clip_grad_norm_(nn.ModuleList(modules).parameters(), 0.3)
                one_device.step()
                one_device.zero_grad()
                given = share(replica, seed, uneven=False) if dimension == "dp_shard" else (inputs, targets)
                pipe.step(*given)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.settle()
            worst = max(relative(whole(ours), theirs) for ours, theirs in paired(pipe, modules))
            held = pipe.profile(*share(replica, 0, uneven=False), steps=1).held_after_f
        with zb.Pipeline(undivided, "zb-h1", MICROBATCHES, loss_fn, mesh=mesh) as plain:
            expected = plain.profile(*share(replica, 0, uneven=False), steps=1).held_after_f
    finally:
        ByFormula.undo = kept  # type: ignore[method-assign]
    return worst, len(undone), held, expected


@pytest.mark.sweep
@needs_fsdp2_on_cpu
@pytest.mark.parametrize("dimension", ["dp_shard", "tp"])
def test_steps_are_taken_back_and_profiles_are_right(world: Ranks, dimension: str) -> None:
    outcomes = world.run(taken_back, dimension, ranks=4)
    assert sum(undone for _, undone, _, _ in outcomes) > 0
    for worst, _, held, expected in outcomes:
        assert worst < 1e-9
        assert held == expected if dimension == "dp_shard" else all(0 < part <= whole for part, whole in zip(held, expected, strict=True))


def cut_and_divided(group: dist.ProcessGroup) -> float:
    """A model that `zb.split` cuts and whose stages FSDP2 then shards, as the error of `zb.split` for a sharded model advises."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "dp_shard"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))).double()
    plain = copy.deepcopy(model)
    x = torch.randn(8, 6, dtype=torch.float64)
    rows = x.chunk(2)[mesh.get_local_rank("dp_shard")]
    split = zb.split(model, example=x)

    def build(stage: int, num_stages: int) -> nn.Module:
        module = split(stage, num_stages)
        assert isinstance(module, nn.Sequential)
        for block in module:  # those of other stages, too
            fully_shard(block, mesh=mesh["dp_shard"])
        return fully_shard(module, mesh=mesh["dp_shard"])

    stages = zb.Pipeline(
        build,
        "zb-h1",
        MICROBATCHES,
        nn.functional.mse_loss,
        mesh=mesh,
    )
    with stages as pipe:
        loss, expected = pipe.step(rows, rows), nn.functional.mse_loss(plain(x), x)
        expected.backward()
        named = [each for module in pipe.modules.values() for each in module.named_parameters()]
        found = [relative(whole(parameter.grad), plain.get_parameter(name).grad) for name, parameter in named]
        return max(*found, abs(loss / expected - 1).item())


@needs_fsdp2_on_cpu
def test_stages_of_a_cut_model_are_divided(world: Ranks) -> None:
    assert max(world.run(cut_and_divided, ranks=4)) < 1e-12


def composed(group: dist.ProcessGroup, sizes: tuple[int, ...], names: tuple[str, ...]) -> float:
    """One step with all wrappers, in the order of docs/fsdp.md; the worst relative difference from one device."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE.type, sizes, mesh_dim_names=names)

    def make(stage: int, num_stages: int) -> nn.Module:
        module = divided_by_tensor_parallelism(mesh)(stage, num_stages)
        assert isinstance(module, nn.Sequential)
        for place, part in enumerate(module):
            module[place] = checkpoint_wrapper(part)
            module[place].compile(backend="eager")
            fully_shard(module[place], mesh=mesh["dp_shard"])
        return fully_shard(module, mesh=mesh["dp_shard"])

    with zb.Pipeline(make, "zb-v", MICROBATCHES, ignoring, loss_weight=tokens, mesh=mesh) as pipe:
        return worst_of_a_step(pipe, share(mesh.get_local_rank("dp_shard"), 0, uneven=True), whole_batch(0, uneven=True), ignoring)


@needs_fsdp2_on_cpu
@pytest.mark.long
@pytest.mark.parametrize(("sizes", "names"), [((2, 2), ("pp", "dp_shard")), ((1, 2, 2), ("pp", "dp_shard", "tp"))])
def test_all_wrappers_together_have_the_numbers_of_one_device(world: Ranks, sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
    assert max(world.run(composed, sizes, names, ranks=4)) < 1e-12


def test_the_page_on_shards_counts_gathers(capsys: pytest.CaptureFixture[str]) -> None:
    *programs, _ = programs_of("docs/fsdp.md")  # the last needs a model and a mesh
    program = "\n".join(programs)
    exec(compile(program, "docs/fsdp.md", "exec"), {})
    one_each, one_at_a_time, *plan = capsys.readouterr().out.splitlines()
    states(plan[0], "12 GB", "6 GB")
    assert plan[-1].endswith("longer than the quickest.")
    states(one_each, "2 gathers")
    states(one_at_a_time, "23 gathers", "9 gathers")


def test_a_module_has_one_group_of_parameters_or_none_before_torch_2_12() -> None:
    group = object()
    assert shards._groups(SimpleNamespace(_fsdp_param_group=group)) == [group]
    assert shards._groups(SimpleNamespace(_fsdp_param_group=None)) == []
    assert shards._groups(SimpleNamespace(_fsdp_param_groups=(group, group))) == [group, group]


def test_private_attributes_that_fsdp2_lacks_are_named() -> None:
    group = SimpleNamespace(**dict.fromkeys(shards._GROUP_ATTRIBUTES))
    state = SimpleNamespace(**dict.fromkeys(shards._STATE_ATTRIBUTES))
    state._fsdp_param_groups = [group, group]
    assert shards._unknown(state) == []
    (lacking, *_) = shards._GROUP_ATTRIBUTES
    delattr(group, lacking)
    assert shards._unknown(state) == [f"FSDPParamGroup.{lacking}"] * 2
    (missing, *_) = shards._STATE_ATTRIBUTES
    delattr(state, missing)
    assert shards._unknown(state) == [f"FSDPState.{missing}"]


def test_a_torch_without_what_shards_need_is_refused() -> None:
    def refused(part: Any, **fields: Any) -> None:
        with mock.patch.object(shards, "fsdp2_parts", return_value=[part]), raises(zb.InputError, index=3, **fields):
            shards.Shards(nn.Linear(1, 1), 3)

    refused(mock.Mock(spec=shards._FSDP_METHODS[:1]), lacking=shards._FSDP_METHODS[1])
    with (
        mock.patch("torch.distributed.fsdp.fully_shard.state", create=True),
        mock.patch.object(shards, "_unknown", return_value=["first", "second"]),
    ):
        refused(mock.Mock(spec=shards._FSDP_METHODS), unknown="first")


def names_by_part(group: dist.ProcessGroup) -> list[set[str]]:
    """Names of the parameters of each part of a stage, one of which is the stage and has layers before and after the other."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "dp_shard"))["dp_shard"]
    module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))).to(DEVICE)
    fully_shard(module[1], mesh=mesh)
    found = shards.shards_of(fully_shard(module, mesh=mesh), 0)
    assert found is not None
    found.gather()
    found.wait()
    name_of = {parameter: name for name, parameter in module.named_parameters()}
    names = [{name_of[parameter] for parameter in part.parameters} for part in found.parts]
    found.release()
    return names


@needs_fsdp2_on_cpu
def test_parts_are_reduced_in_the_order_of_their_last_parameters(world: Ranks) -> None:
    assert world.run(names_by_part, ranks=4) == [[{"1.weight"}, {"0.weight", "2.weight"}]] * 4


ALL_REDUCE_S = 0.02


def durations_of_reductions(group: dist.ProcessGroup, way: str) -> list[float]:
    """Seconds of each reduction of weights that are replicated and sharded, whose all-reduce takes at least `ALL_REDUCE_S`."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE.type, (1, 2, 2), mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    all_reduce = dist.all_reduce

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(ALL_REDUCE_S)
        return all_reduce(*args, **kwargs)

    def make(stage: int, num_stages: int) -> nn.Module:
        return fully_shard(build(stage, num_stages), mesh=mesh["dp_replicate", "dp_shard"])

    with (
        checked_device() if way == "on a device" else nullcontext(),
        zb.Pipeline(make, "zb-h1", MICROBATCHES, loss_fn, mesh=mesh) as pipe,
    ):
        inputs = batch(MICROBATCHES)
        pipe.step(*inputs)
        with mock.patch.object(dist, "all_reduce", slow):
            pipe.step(*inputs)
        return [(each.end - each.start) / 1e9 for each in pipe.timeline().reductions_of(0)]


@needs_fsdp2_on_cpu
@needs_own_reductions
@pytest.mark.parametrize("way", ["in threads", "on a device"])
def test_a_reduction_lasts_until_replicas_have_summed_it(world: Ranks, way: str) -> None:
    if way == "on a device" and DEVICE.type != "cpu":
        pytest.skip("the CPU takes the part of an accelerator")
    for durations in world.run(durations_of_reductions, way, ranks=4):
        assert len(durations) == 1
        assert durations[0] >= ALL_REDUCE_S
