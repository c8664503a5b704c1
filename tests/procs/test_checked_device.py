"""The runtime's accelerator code runs on a simulated device that checks the order of stream operations.

No wait is missing: every case runs without an error. No wait is redundant, and the device detects what it should: each wait of the
runtime is removed in turn, and a case then fails.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zerobubble as zb
from tests.device import cpu_only
from tests.procs import test_added_losses, test_divided_head, test_experts, test_fsdp, test_mesh, test_order_by, test_selective_recompute
from tests.procs.meshes import init_device_mesh
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.procs.test_offload_runs import everything, leave, leave_everything
from tests.pure.shapes import TRAINING
from tests.refusals import raises, states
from tests.thinned import every
from zerobubble.runtime.measure.clock import DeviceClock
from zerobubble.runtime.stage.copy_lane import DeviceLane
from zerobubble.runtime.transport.staged import _CopyStream, _Job, _send
from zerobubble.testing import CheckedDevice, OrderError, checked_device
from zerobubble.timeline import Copying

pytestmark = cpu_only("the CPU takes the part of an accelerator")
ROOT = Path(zb.__file__).parent
RANKS = 2


def train(group: Any, name: str, **options: Any) -> None:
    with zb.Pipeline(build, name, 4, loss_fn, group=group, **options) as pipe:
        for step in range(2):
            pipe.step(*batch(4, seed=step))
        pipe.timeline()


def offload(group: Any) -> None:
    schedule = zb.make("zb-h1", group.size(), 4)
    leave(group, schedule, 4, offload=everything(schedule))


def recompute(group: Any) -> None:
    train(group, zb.schedules.with_recompute(zb.make("1f1b", group.size(), 4)))


def post_validation(group: Any) -> None:
    """Steps that are undone."""
    with zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group) as pipe:
        optimizer = zb.PostValidation(torch.optim.AdamW(pipe.parameters()), pipe, max_norm=1e-3, undo="copy")
        for step in range(3):
            pipe.step(*batch(4, seed=step))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.settle()


def background_checkpoint(group: Any) -> None:
    folder = [TemporaryDirectory().name]
    dist.broadcast_object_list(folder, src=dist.get_global_rank(group, 0), group=group)
    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        for step in range(2):
            pipe.step(*batch(4, seed=step))
            optimizer.step()
            optimizer.zero_grad()
            zb.save(folder[0], pipe, optimizer, wait=False).wait()


def sums_over_replicas(group: Any) -> None:
    """Gradient buckets, reduced while the last passes run."""
    mesh = DeviceMesh("cpu", torch.arange(group.size()).view(-1, 1), mesh_dim_names=("dp", "pp"), _init_backend=False)
    with zb.Pipeline(build, "zb-v", 4, loss_fn, mesh=mesh) as pipe:
        for step in range(2):
            pipe.step(*batch(4, seed=step))
            pipe.clip_grad_norm_(1.0)


def profile(group: Any) -> None:
    with zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group) as pipe:
        pipe.profile(*batch(4))


def bubble_work(group: Any) -> None:
    work = zb.hooks.BubbleWork(lambda bubble: torch.ones(3).sum().item(), zb.Costs.uniform(group.size(), comm=0.5), least=0.0)
    train(group, "1f1b", hooks=[work])


def copies_of_a_failed_step(group: Any) -> None:
    """The copy lane of a step that ends before its passes have waited for their copies."""
    lane, device = DeviceLane(torch.device("cpu")), torch.ones(64)
    lane.copy(Copying.TO_HOST, [(lane.host_memory(device.nbytes), device.view(torch.uint8))])
    lane.discard()
    del device
    torch.ones(64)


def message_of_a_failed_step(group: Any) -> None:
    """A staged message whose tensor is dropped before it has left."""
    copy, tensor = _CopyStream(torch.device("cpu")), torch.ones(64)
    copy(tensor)
    del tensor
    torch.ones(64)


def message_that_has_left(group: Any) -> None:
    """A staged message, sent in this thread."""
    jobs: SimpleQueue[_Job | None] = SimpleQueue()
    future: Future[Any] = Future()
    jobs.put(_Job(future, Tensor.numpy, _CopyStream(torch.device("cpu"))(torch.ones(64))))
    jobs.put(None)
    _send(jobs, lambda error: None)
    assert future.result().sum() == 64


def times_after_a_step(group: Any) -> None:
    """An optimizer step that is recorded after the times of the passes were read."""
    clock = DeviceClock(torch.device("cpu"))
    clock.start()
    assert clock.read(clock.mark()) <= clock.read(clock.mark())


def everything_at_once(group: Any) -> None:
    schedule = zb.make("zb-v", group.size(), 4)
    leave_everything(group, schedule, offload=everything(schedule))


FAMILIES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v")


def schedules(group: Any) -> None:
    for name in FAMILIES:
        train(group, name)


def other_schedules(group: Any) -> None:
    for name in TRAINING:
        if name not in FAMILIES:
            train(group, name)


def selective_recompute(group: Any) -> None:
    """Attention is recomputed, under autocast."""
    assert test_selective_recompute.are_equal(group, "zb-v", 4, "names", "deferred", torch.bfloat16)


def divided_head(group: Any) -> None:
    for name, algorithm in (("zb-v", 1), ("1f1b", 2)):
        test_divided_head.train(group, zb.schedules.with_vocabulary(zb.make(name, group.size(), 4), algorithm), 2, torch.float64)


def fsdp2(group: Any) -> None:
    """Weights that are gathered several times per step."""
    played = test_fsdp.schedule_of("zb-v", 1, test_fsdp.largest_of(torch.float64))
    test_fsdp.trained(group, played, torch.float64, "enqueued")


def tensor_parallelism(group: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    with zb.Pipeline(test_mesh.divided(mesh), "zb-v", 4, loss_fn, mesh=mesh) as pipe:
        for step in range(2):
            pipe.step(*batch(4, seed=step))
            pipe.clip_grad_norm_(1.0)


def expert_parallelism(group: Any) -> None:
    test_experts.trained_with_experts(group, (2, 2), ("pp", "ep"), "zb-h1", "divided")


def compiled_stages(group: Any) -> None:
    def compiled(stage: int, num_stages: int) -> nn.Module:
        module = build(stage, num_stages)
        module.compile(backend="aot_eager")
        return module

    with zb.Pipeline(compiled, "1f1b", 4, loss_fn, group=group) as pipe:
        for step in range(2):
            pipe.step(*batch(4, seed=step))


def cuda_graphs(group: Any) -> None:
    """Captured and replayed passes give the losses and gradients of eager passes."""
    found: list[list[Tensor]] = []
    for replays in (False, True):
        with zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group, split="graph", cuda_graphs=replays) as pipe:
            losses = [pipe.step(*batch(4, seed=step)) for step in range(4)]
            found.append([*losses, *(parameter.grad for parameter in pipe.parameters() if parameter.grad is not None)])
    assert all(map(torch.equal, *found))


def whole_steps(group: Any, at_capture: Callable[[], None] = lambda: None) -> None:
    """Two steps as usual, one that is captured, and two replays, each with what uses its results; `at_capture` comes before the third."""
    folder = [TemporaryDirectory().name]
    dist.broadcast_object_list(folder, src=dist.get_global_rank(group, 0), group=group)
    with zb.Pipeline(build, "zb-v", 4, loss_fn, group=group, transport="gloo", cuda_graphs="step") as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        for step in range(5):
            if step == 2:
                at_capture()
            pipe.step(*batch(4, seed=step))
            pipe.clip_grad_norm_(1.0)
            with pipe.recording_optimizer():
                optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            pipe.eval_step(*batch(4, seed=step))
            zb.save(folder[0], pipe, optimizer, wait=False)
        pipe.profile(*batch(4), steps=1)
        pipe.step(*batch(4))


MESHES = {"FSDP2": fsdp2, "tensor parallelism": tensor_parallelism, "expert parallelism": expert_parallelism}
"""Cases on four ranks, two stages times two."""
OTHERS: dict[str, Callable[[Any], None]] = {
    "all other schedules with backward passes": other_schedules,
    "recompute of chosen modules, autocast": selective_recompute,
    "divided heads": divided_head,
    "`order_by`": lambda group: test_order_by.steps(group, "zb-h1", "tokens"),
    "losses that stages add": lambda group: test_added_losses.train(group, test_added_losses.Routed, "zb-h1", 4),
    "`torch.compile`": compiled_stages,
    "CUDA graphs": cuda_graphs,
    "CUDA graphs of whole steps": whole_steps,
    **MESHES,
}
"""Cases whose waits those of the first cases include, or that are torch's own."""
FIRST: dict[str, Callable[[Any], None]] = {
    "GPipe, 1F1B, interleaved 1F1B, ZB-H1, ZB-H2, ZB-V, DualPipe, DualPipe-V": schedules,
    "messages that streams wait for, as with NCCL": lambda group: train(group, "zb-h1", transport="gloo"),
    '`split="whole"`': lambda group: train(group, "1f1b", split="whole"),
    '`split="graph"`': lambda group: train(group, "zb-h1", split="graph"),
    "recompute": recompute,
    "sums over replicas": sums_over_replicas,
    "offload": offload,
    "offload with dropout, skips, tied weights and buffers": everything_at_once,
    "`PostValidation`": post_validation,
    "checkpoints in the background": background_checkpoint,
    "`Pipeline.profile`": profile,
    "`BubbleWork`": bubble_work,
    "copies of a failed step": copies_of_a_failed_step,
    "messages of a failed step": message_of_a_failed_step,
    "staged messages": message_that_has_left,
    "times of passes": times_after_a_step,
}
"""Cases in which waits are left out."""
CASES = FIRST | OTHERS


class Found(NamedTuple):
    """The call sites of a case's waits, the number of operations per stream, and the violations."""

    waits: set[str]
    operations: dict[str, int]
    errors: list[dict[str, Any]]
    replays: int


def ranks_of(case: str) -> int:
    return 4 if case in MESHES else RANKS


def run(group: Any, case: str, left_out: tuple[str, ...] = ()) -> Found:
    devices: list[CheckedDevice] = []
    try:
        with checked_device(left_out, continues=bool(left_out)) as device:
            devices.append(device)
            CASES[case](group)
    except zb.ZeroBubbleError:
        if not left_out:
            raise
    return Found(devices[0].waits.seen, devices[0].num_operations, [error.fields for error in devices[0].errors], devices[0].num_replays)


@pytest.mark.parametrize("case", every(3, list(CASES)))
def test_every_access_is_ordered(world: Ranks, case: str) -> None:
    for found in world.run(run, case, ranks=ranks_of(case)):
        assert found.errors == []
        assert found.waits
        assert bool(found.replays) == case.startswith("CUDA graphs")


def host_waits(group: Any, names: list[str], transport: str) -> dict[str, list[str]]:
    """The places where the host waits for the device in the third step of each schedule.

    Message shapes are known, and the values that backward passes read are compared in the steps 1, 2, 4 and so on.
    """
    found = {}
    for name in names:
        with checked_device() as device, zb.Pipeline(build, name, 4, loss_fn, group=group, transport=transport) as pipe:
            for seed in range(2):
                pipe.step(*batch(4, seed=seed))
            before = len(device.waits.by_host)
            pipe.step(*batch(4, seed=2))
            found[name] = device.waits.by_host[before:]
    return found


@pytest.mark.parametrize("names", [TRAINING[::5], pytest.param(TRAINING, marks=pytest.mark.long)], ids=["some", "all"])
def test_the_host_does_not_wait_for_the_device_before_the_end_of_a_row(world: Ranks, names: list[str]) -> None:
    """Over NCCL, the host enqueues a step of any schedule without a wait, then reads the losses; staged messages make it wait."""
    at_the_end = {"step/loss.py StepLosses._send_result"}
    for found in world.run(host_waits, names, "gloo", ranks=RANKS):
        assert {name: waits for name, waits in found.items() if not set(map(function_of, waits)) <= at_the_end} == {}
        assert max(map(len, found.values())) <= 1
    staged = world.run(host_waits, ["1f1b"], "staged", ranks=RANKS)
    assert all(len(waits) > 1 for found in staged for waits in found.values())


WAITS = {"wait_stream", "wait_event", "synchronize", "keep_for", "wait_for"}
NO_ORDER = {
    "transport/sums.py _work": "streams order what follows; the thread waits so that the times of a sum are those of the device",
    "transport/staged.py _Sent.wait": "the transport holds the memory until the message has left; the wait reports a lost connection",
    "transport/control.py Sending.wait": "the same",
}
"""The waits that order nothing, and what they are for."""


def waits_in_the_source() -> set[str]:
    """The waits of a pipeline: all but those of the device's own module, and of the speeds that are measured without a pipeline."""
    found = set()
    for file in sorted((ROOT / "runtime").rglob("*.py")):
        if file.name not in ("device.py", "speeds.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in WAITS:
                    found.add(f"{file.parent.name}/{file.name}:{node.lineno}")
    return found


def function_of(site: str) -> str:
    """The file of a site and the function there, such as "stage/copy_lane.py DeviceLane.wait"."""
    path, _, line = site.partition(":")
    names = []
    for node in ast.walk(ast.parse((ROOT / "runtime" / path).read_text())):  # outer ones first
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.lineno <= int(line) <= (node.end_lineno or 0):
            names.append(node.name)
    return f"{path} {'.'.join(names)}"


@pytest.mark.long
def test_every_wait_is_needed_and_seen(world: Ranks) -> None:
    seen = {case: set.union(*(found.waits for found in world.run(run, case, ranks=RANKS))) for case in FIRST}
    sites = {site for each in seen.values() for site in each if (ROOT / "runtime" / site.partition(":")[0]).exists()}
    assert waits_in_the_source() - sites == set(), "no case runs these waits"

    def fails_without(site: str) -> bool:
        cases = [case for case in reversed(FIRST) if site in seen[case]]
        return any(found.errors for case in cases for found in world.run(run, case, (site,), ranks=RANKS))

    without_effect = [site for site in sorted(sites) if not fails_without(site)]
    assert {function_of(site) for site in without_effect} == set(NO_ORDER)
    states(section_of_the_page(), len(sites), len(sites) - len(without_effect))


OF_A_GRAPH = " of a graph"


def from_the_capture(group: Any, left_out: tuple[str, ...] = ()) -> tuple[Found, str]:
    """Capture and replay steps without these waits, which earlier steps have; returns the error that ends them."""
    with checked_device(continues=True) as device:

        def leave_out() -> None:
            device.waits.seen.clear()
            device.waits.left_out.update(left_out)

        refusal = ""
        try:
            whole_steps(group, leave_out)
        except zb.PipelineError as error:
            refusal = str(error)
    return Found(device.waits.seen, device.num_operations, [error.fields for error in device.errors], device.num_replays), refusal


REFUSED_IN_CAPTURES = {"transport/staged.py": "this transport", "stage/copy_lane.py": "offload", "transport/sums.py": "several pipelines"}
"""The files of the waits that no captured step makes, and what `cuda_graphs="step"` therefore refuses."""
NO_ORDER_IN_CAPTURES = {
    "transport/control.py Sending.wait": "as in other steps",
    "measure/clock.py DeviceClock.read": "a captured step has no timeline, so no time is read that is later than the clock's origin",
}


@pytest.mark.long
def test_every_wait_from_the_capture_of_a_step_on_is_needed_and_seen(world: Ranks) -> None:
    complete = [found for found, _ in world.run(from_the_capture, ranks=RANKS)]
    seen = set.union(*(found.waits for found in complete))
    in_graphs = [sum(OF_A_GRAPH in site for site in found.waits) for found in complete]
    sites = {site for site in seen if OF_A_GRAPH not in site and (ROOT / "runtime" / site.partition(":")[0]).exists()}
    assert {site.partition(":")[0] for site in waits_in_the_source() - sites} == set(REFUSED_IN_CAPTURES)
    without_effect = []
    for site in sorted(sites):
        results = world.run(from_the_capture, (site,), ranks=RANKS)
        if not any(found.errors or refusal for found, refusal in results):
            without_effect.append(site)
        if function_of(site) == "transport/contact.py Waiting.wait":
            assert any(refusal.count("the message of") in in_graphs for _, refusal in results), "the capture names each message"
    assert {function_of(site) for site in without_effect} == set(NO_ORDER_IN_CAPTURES)
    states(section_of_the_page(), len(sites), len(sites) - len(without_effect))


def replays_without(group: Any, name: str) -> dict[str, int]:
    """The number of violations in a replay without each wait of this rank's graph."""
    options: dict[str, Any] = {"transport": "gloo", "cuda_graphs": "step"}
    with checked_device(continues=True) as device, zb.Pipeline(build, name, 4, loss_fn, group=group, **options) as pipe:
        for step in range(4):
            pipe.step(*batch(4, seed=step))
        mine = [site for site in device.waits.seen if OF_A_GRAPH in site]
        counts = [0] * group.size()
        dist.all_gather_object(counts, len(mine), group=group)
        found = {}
        assert device.errors == []
        for number in range(max(counts)):
            device.waits.left_out.update(mine[number : number + 1])
            pipe.step(*batch(4, seed=number))
            device.waits.left_out.clear()
            found.update(dict.fromkeys(mine[number : number + 1], len(device.errors)))
            device.errors.clear()
            device.synchronize()
    return found


@pytest.mark.parametrize("name", every(6, ["zb-v", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2"]))
def test_replays_need_each_wait_for_a_receive(world: Ranks, name: str) -> None:
    """Those for sends order nothing in a replay, where each tensor has memory of its own; but without them a capture does not end."""
    for found in world.run(replays_without, name, ranks=RANKS):
        unseen = [site for site, errors in found.items() if not errors]
        received = [site for site in found if function_of(site.rpartition(" ")[2]).endswith("receiver")]
        assert {function_of(site.rpartition(" ")[2]) for site in unseen} == {"transport/gloo.py GlooEndpoint.sender"}
        assert len(unseen) + len(received) == len(found)
        if name == "zb-v":
            states(section_of_the_page(), len(found), len(received))


_BEFORE_A_FORWARD = (
    "FSDP2's streams for gathers wait for the optimizer, but stay empty: the weights are gathered before, on the current stream"
)
NOT_SEEN = {
    "split/deferred.py DeferredSplitter.forward.call": _BEFORE_A_FORWARD,
    "split/deferred.py DeferredSplitter._counted": _BEFORE_A_FORWARD,
    "stage/stage.py Stage._outputs_of": _BEFORE_A_FORWARD,
    "stage/shards.py Shards.gather": "a gather with async_op=True is copied and sent on the current stream, which waits for itself",
    "stage/shards.py Shards.end_reductions": "ShardReductions has waited for each reduction before",
}
"""The calls of the runtime in which FSDP2 waits without an effect, and why, from the code of torch 2.13 (`get_all_gather_streams`,
`_root_pre_forward` and `finalize_backward`)."""


@pytest.mark.long
def test_waits_for_collectives_are_seen(world: Ranks) -> None:
    """Covers FSDP2 and functional collectives, which torch and the tests call."""
    own = waits_in_the_source()
    left_out: dict[str, int] = {}
    for case in MESHES:
        for site in set.union(*(found.waits for found in world.run(run, case, ranks=4))) - own:
            if not site.startswith("transport/"):
                left_out[site] = sum(len(found.errors) for found in world.run(run, case, (site,), ranks=4))
    unseen = [site for site, errors in left_out.items() if not errors]
    assert set(map(function_of, unseen)) == set(NOT_SEEN)
    states(section_of_the_page(), len(left_out), len(left_out) - len(unseen))


def section_of_the_page() -> str:
    return (ROOT.parents[1] / "docs" / "gpu.md").read_text(encoding="utf-8").partition("## The order of streams")[2].partition("\n## ")[0]


def test_the_page_lists_the_cases() -> None:
    rows = [row.split("|")[1].strip() for row in section_of_the_page().splitlines() if row.startswith("| ")]
    assert rows[1:] == list(CASES)


def program_of_the_page(group: Any) -> None:
    program = section_of_the_page().partition("```python\n")[2].partition("```")[0]
    inputs, targets = batch(8)
    exec(program, {"zb": zb, "build": build, "loss_fn": loss_fn, "MyHook": zb.hooks.StepHook, "inputs": inputs, "targets": targets})


def test_the_program_of_the_page_checks_a_step(world: Ranks) -> None:
    world.run(program_of_the_page, ranks=4)


def test_the_host_waits_for_no_copy_of_the_lane() -> None:
    with checked_device() as device:
        lane, source = DeviceLane(torch.device("cpu")), torch.ones(64)
        host = lane.host_memory(source.nbytes)
        lane.wait(lane.copy(Copying.TO_HOST, [(host, source.view(torch.uint8))]))
        with raises(OrderError, operation="numpy", earlier_operation="copy_"):
            host.numpy()
        device.errors.clear()


# The device by itself.


@pytest.mark.parametrize("wait", ["item", "synchronize", "copy"])
def test_the_host_waits_for_nothing_while_a_graph_is_captured(wait: str) -> None:
    waits: dict[str, Callable[[CheckedDevice, Tensor], object]] = {
        "item": lambda _, numbers: numbers.sum().item(),
        "synchronize": lambda device, _: device.current_stream().synchronize(),
        "copy": lambda device, numbers: device.host_memory((4,), torch.float32).copy_(numbers),
    }
    with checked_device() as device:
        numbers = torch.ones(4)
        with pytest.raises(RuntimeError, match="test_checked_device"):
            device.capture(lambda: waits[wait](device, numbers), None)
        waits[wait](device, numbers)


def test_a_graph_reads_and_writes_the_same_memory_in_each_replay() -> None:
    with checked_device() as device:
        numbers, other = torch.ones(4), device.new_stream()
        _, replay, (doubled, same) = device.capture(lambda: (numbers * 2, numbers), None)
        assert doubled.isnan().all(), "a capture computes nothing"
        assert same is numbers
        numbers += 1
        replay()
        assert doubled.tolist() == [4.0] * 4
        with raises(OrderError, operation="mul"), device.on_stream(other):
            replay()
        device.errors.clear()
        device.synchronize()


def test_captures_and_replays_keep_the_rules_of_graphs() -> None:
    """A capture leaves memory as it was. Streams that take part are waited for, and what a replay reads is still there."""
    with checked_device() as device:
        numbers, other = torch.ones(4), device.new_stream()

        def forked(joins: bool) -> None:
            other.wait_stream(device.current_stream())
            with device.on_stream(other):
                numbers.add_(1)
            if joins:
                device.current_stream().wait_stream(other)

        with pytest.raises(RuntimeError, match="does not wait for"):
            device.capture(lambda: forked(False), None)
        device.synchronize()
        _, replay, _ = device.capture(lambda: forked(True), None)
        assert numbers.tolist() == [1.0] * 4
        replay()
        replay()
        assert numbers.tolist() == [3.0] * 4
        early = device.new_event()
        early.record()
        with pytest.raises(RuntimeError, match="not captured"):
            device.capture(lambda: device.current_stream().wait_event(early), None)
        outside = device.current_stream()

        def left() -> None:
            with device.on_stream(outside):
                numbers.add_(1)

        with pytest.raises(RuntimeError, match="take part"):
            device.capture(left, None)
        lent = [torch.ones(4)]
        _, replay, _ = device.capture(lambda: numbers.add_(lent[0]), None)
        replay()
        lent.clear()
        with pytest.raises(RuntimeError, match="freed"):
            replay()


def test_an_error_names_both_accesses() -> None:
    with raises(OrderError, operation="sum", earlier_operation="ones") as caught, checked_device() as device:
        numbers = torch.ones(4)
        with device.on_stream(device.new_stream()):
            numbers.sum()
    assert caught.value.fields["stream"] != caught.value.fields["earlier_stream"]
    assert {str(caught.value.fields[name]).partition(":")[0] for name in ("site", "earlier_site")} == {"procs/test_checked_device.py"}


@pytest.mark.parametrize("wait", ["stream", "event", "host"])
def test_a_wait_orders_what_follows(wait: str) -> None:
    with checked_device() as device:
        numbers, other = torch.ones(4), device.new_stream()
        if wait == "stream":
            other.wait_stream(device.current_stream())
        elif wait == "event":
            event = device.new_event()
            event.record()
            other.wait_event(event)
        else:
            device.current_stream().synchronize()
        with device.on_stream(other):
            total = numbers.sum()
        device.current_stream().wait_stream(other)
        assert total.item() == 4


def test_an_event_orders_only_what_it_recorded() -> None:
    with raises(OrderError, earlier_operation="add_"), checked_device() as device:
        numbers, other, event = torch.ones(4), device.new_stream(), device.new_event()
        event.record()
        numbers += 1
        other.wait_event(event)
        with device.on_stream(other):
            numbers.sum()


def test_a_write_comes_after_reads_of_the_same_bytes_only() -> None:
    with checked_device() as device:
        numbers, other = torch.ones(4), device.new_stream()
        other.wait_stream(device.current_stream())
        with device.on_stream(other):
            numbers[:2].sum()
        numbers[2:] += 1
        with raises(OrderError, operation="add_", earlier_operation="sum"):
            numbers[1:] += 1
        device.errors.clear()


@pytest.mark.parametrize("name", ["numpy", "tolist"])
def test_the_host_waits_for_a_copy_before_it_reads(name: str) -> None:
    with checked_device() as device:
        host = device.host_memory((4,), torch.float32)
        host.copy_(torch.ones(4), non_blocking=True)
        with raises(OrderError, operation=name, earlier_operation="copy_"):
            getattr(host, name)()
        device.errors.clear()
        device.synchronize()
        assert list(getattr(host, name)()) == [1.0] * 4


def test_a_blocking_copy_needs_no_wait() -> None:
    with checked_device() as device:
        assert device.host_memory((4,), torch.float32).copy_(torch.ones(4)).tolist() == [1.0] * 4


@pytest.mark.parametrize("kept", [False, True])
def test_freed_memory_is_reused_behind_an_order_or_kept_for_the_stream(kept: bool) -> None:
    def reuse(device: CheckedDevice) -> None:
        numbers, other = torch.ones(4), device.new_stream()
        other.wait_stream(device.current_stream())
        with device.on_stream(other):
            numbers.sum()
        if kept:
            device.keep_for(numbers, other)
        del numbers
        torch.ones(4)

    with checked_device() as device:
        if kept:
            reuse(device)
        else:
            with raises(OrderError, earlier_operation="sum"):
                reuse(device)
            device.errors.clear()


def test_a_time_is_read_after_its_event() -> None:
    with checked_device() as device:
        first, last = (device.new_event(timed=True) for _ in range(2))
        first.record()
        last.record()
        first.synchronize()
        with raises(OrderError, foreign="host"):
            first.elapsed_time(last)
        device.errors.clear()
        last.synchronize()
        assert first.elapsed_time(last) > 0
