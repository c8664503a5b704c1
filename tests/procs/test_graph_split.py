"""Graph stages compared with autograd on the whole stage, in one process, and with deferred stages in a pipeline.

A graph stage gives the gradients of autograd, including None, or raises with the reason. It is compiled a bounded number of times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zerobubble as zb
from benchmarks.split.run import Block
from benchmarks.split_matrix.kinds import KINDS
from benchmarks.split_matrix.ways import Ours, Plain, Tensors, difference, train
from tests.device import DEVICE, cpu_only
from tests.procs.models import batch, build, loss_fn, one_device
from tests.procs.programs import programs_of, run_forked
from tests.procs.ranks import Ranks
from tests.procs.versions import needs_checkpoints_in_graphs
from tests.refusals import Stated, raises
from tests.thinned import every
from zerobubble.runtime.measure.memory_meter import Meter, addresses_of
from zerobubble.runtime.split.graph import PendingWeights
from zerobubble.runtime.split.graphs.fx_nodes import flops
from zerobubble.runtime.split.layers.weight_work import CAN_SEE_HOOKS
from zerobubble.runtime.stage.stage import Stage, make_stage
from zerobubble.runtime.values.gradients import Gradients

pytestmark = pytest.mark.in_process

ROOT = Path(__file__).parents[2]
REFUSED: dict[str, Stated] = {
    "experts, one of them empty": ("DynamicOutputShapeException",),
    "frozen for a while": ("requires_grad",),
    "checkpoint, reentrant": ("use_reentrant=True",),
    "matrix of the module, in a reentrant checkpoint": ("use_reentrant=True",),
    "matrix of the module before a compiled block": ("block", "compiled"),
    "matrix of the module, hooked": ("w", "hook"),
    "gradient within a reentrant checkpoint": ("use_reentrant=True",),
    "checkpoint, reentrant, with dropout": ("use_reentrant=True",),
    "offloaded": ("hooks", "saved"),
    "compiled": ("compiled",),
    "compiled in place": ("module 0", "compiled"),
    "compiled between linears": ("module 1", "compiled"),
    "tensor hooks": ("down.weight", "hook"),
    "hook after accumulation": ("linear.weight", "hook"),
    "hook on the accumulating node": ("linear.weight", "hook"),
    "module hook": ("linear", "hook"),
}
"""Kinds that no graph can hold, and what the reason states. All others give the same bits."""
if not CAN_SEE_HOOKS:
    REFUSED["offloaded"] = ("checkpoints", "offloading")
    REFUSED |= {name: ("checkpoints", "2.8") for name in KINDS.keys() - REFUSED if "checkpoint" in name}
REFUSED |= {name: REFUSED["experts, one of them empty"] for name in KINDS.keys() - REFUSED if name.startswith("experts in stacks")}
ROUNDED = {"autocast, a linear used twice": 2**-8, "addmm under autocast": 2**-8, "gru": 1e-14}
"""Eager mode sums the gradients of the one cast that autocast keeps, in bfloat16; a graph casts for each use, and sums in float32.

A graph computes the gates of a GRU apart, and vector instructions round some functions otherwise in a row's last places, on AMD's
processors for one.
"""
OF_EMBEDDINGS = {"embedding with padding", "embedding by frequency", "embedding of bounded norm", "embedding bag"}
NO_WEIGHT_WORK = {"layer norm", "all frozen", "output is the input", *OF_EMBEDDINGS}
"""Where nothing waits: what W would need takes more bytes than the gradients."""


class Graph(Ours):
    def __init__(self, module: nn.Module, inputs: list[Tensors]) -> None:
        super().__init__(module, inputs)
        self.stage = make_stage("graph", module, 1)


class Compiled(Ours):
    def __init__(self, module: nn.Module, inputs: list[Tensors]) -> None:
        super().__init__(module, inputs)
        self.stage = make_stage("compiled", module, 1)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:RNN module weights")
@pytest.mark.parametrize("name", every(4, KINDS))
def test_a_graph_leaves_what_autograd_leaves_or_says_why_not(name: str) -> None:
    kind = KINDS[name]
    if name == "lstm" and DEVICE.type != "cpu":
        pytest.skip("a graph cannot contain the recurrent layers of cuDNN")
    if name in REFUSED:
        with raises(zb.InputError, *REFUSED[name], 'split={1: "deferred"}'):
            train(kind.build, kind.takes, Graph)
        return
    mine = train(kind.build, kind.takes, Graph)
    assert difference(mine, train(kind.build, kind.takes, Plain)) <= ROUNDED.get(name, 0)
    assert bool(mine.waited) == (name not in NO_WEIGHT_WORK)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "gpt block",
        "conv2d and batch norm",
        "dropout",
        "embedding tied to its head",
        "output in chunks",
        pytest.param("checkpoint with dropout", marks=needs_checkpoints_in_graphs),
        pytest.param("checkpoint, selective", marks=needs_checkpoints_in_graphs),
    ],
)
def test_compiled_parts_match_autograd(name: str) -> None:
    kind = KINDS[name]
    mine, oracle = (train(kind.build, kind.takes, way).tensors for way in (Compiled, Plain))
    for what, tensor in oracle.items():  # the bias before a batch norm has a gradient of 0 but for rounding
        torch.testing.assert_close(mine[what], tensor, rtol=1e-11, atol=1e-12, msg=what)


def passed(stage: Stage, x: Tensor) -> Stage:
    """The stage after one F, B and W."""
    (y,) = stage.forward(0, (x,))
    stage.backward(0, (torch.ones_like(y),))
    stage.weight(0)
    return stage


def products(graph: fx.GraphModule) -> int:
    return sum(flops(node) > 0 and "attention" not in str(node.target) for node in graph.graph.nodes)


@pytest.mark.long
def test_half_of_a_transformers_products_wait() -> None:
    stage = passed(make_stage("graph", nn.Sequential(Block(64), Block(64)), 1), torch.randn(2, 8, 64, requires_grad=True))
    assert stage.splitter.traces.last is not None
    assert stage.splitter.traces.last.split is not None
    assert (products(stage.splitter.traces.last.split.b), products(stage.splitter.traces.last.split.w)) == (8, 8)
    report = stage.splitter.report()
    assert (report.stage, report.way, report.share) == (1, "graph", 1.0)
    assert report.in_b[0].parameter == "0.norms.0.weight"
    assert len(report.in_b) == 8


@pytest.mark.long
def test_a_first_stage_does_the_chain_in_b_all_the_same() -> None:
    stage = passed(make_stage("graph", nn.Sequential(nn.Embedding(9, 64), Block(64), Block(64)), 0), torch.randint(0, 9, (2, 8)))
    assert stage.splitter.traces.last is not None
    assert stage.splitter.traces.last.split is not None
    assert (products(stage.splitter.traces.last.split.b), products(stage.splitter.traces.last.split.w)) == (8, 8)


@pytest.mark.long
def test_between_b_and_w_only_inputs_and_gradients_of_linears_are_kept() -> None:
    module = nn.Sequential(Block(64), Block(64))
    x = torch.randn(2, 8, 64, requires_grad=True)
    stage = make_stage("graph", module, 1)
    stage.begin(Meter(module.parameters()))
    assert stage.meter is not None
    (y,) = stage.forward(0, (x,))
    stage.backward(0, (torch.ones_like(y),))
    linears = [part for part in module.modules() if isinstance(part, nn.Linear)]
    assert 0 < stage.meter.bytes <= 2 * 8 * 4 * sum(linear.in_features + linear.out_features for linear in linears)
    stage.weight(0)
    assert stage.meter.bytes == 0


def test_both_gradients_of_a_convolution_wait_and_are_those_of_autograd() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv1d(5, 5, 3), nn.Tanh(), nn.Conv1d(5, 5, 3))

    mine = train(build, "x", Graph)
    assert difference(mine, train(build, "x", Plain)) == 0
    assert {"0.weight", "0.bias", "2.weight", "2.bias"} <= set(mine.waited)


def test_a_first_gradient_is_no_memory_that_others_use() -> None:
    """W gives what it kept from B, one new tensor for two parameters, and another for a third. Another parameter has a gradient already."""
    before, of_kept, first, second, alone = (nn.Parameter(torch.zeros(2, 3)) for _ in range(5))
    before.grad = torch.ones(2, 3)
    kept, shared, new = torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)
    parameters = [before, of_kept, first, second, alone]
    PendingWeights(lambda kept: [new, *kept, shared, shared, new.clone()], parameters, [kept], None).run(Gradients())
    for parameter, expected in zip(parameters, (new + 1, kept, shared, shared, new), strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected)
    assert len(addresses_of([kept, new, *(p.grad for p in parameters if p.grad is not None)])) == 7
    assert first.grad is shared


@pytest.mark.long
def test_every_kind_of_input_has_its_trace() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    stage = make_stage("graph", module, 1)
    for rows, training in ((2, True), (3, True), (3, False), (2, True)):
        module.train(training)
        stage.begin(None)
        x = torch.randn(rows, 4, requires_grad=True)
        module.zero_grad()
        torch.manual_seed(rows)
        passed(stage, x)
        mine = [p.grad for p in module.parameters()]
        module.zero_grad()
        torch.manual_seed(rows)
        module(x).sum().backward()
        assert all(torch.equal(a, p.grad) for a, p in zip(mine, module.parameters(), strict=True) if a is not None and p.grad is not None)
    assert len(stage.splitter.traces) == 3


class NormOfTransposed(nn.Module):
    """On the CPU, the result of this batch norm has other strides than in tracing."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4).train(training)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x.mT).mT)
        return y


@pytest.mark.parametrize("training", [False, True])
def test_a_kernel_may_give_other_strides_than_in_tracing(training: bool) -> None:
    whole = NormOfTransposed(training).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    stage = make_stage("graph", deepcopy(whole), 1)
    (y,) = stage.forward(0, (x.detach().requires_grad_(),))
    (gradient,) = stage.backward(0, (torch.ones_like(y),))
    stage.weight(0)
    whole(x).sum().backward()
    torch.testing.assert_close(gradient, x.grad, rtol=1e-12, atol=1e-14)
    for mine, theirs in zip(stage.module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x) * self.calls
        return y


class Replacing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + x.detach().mean(0)
        y: Tensor = self.linear(x) - self.mean
        return y


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Remembering(nn.Module):
    """A Linear reads a buffer, which every microbatch changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("memory", torch.zeros(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.memory.add_(x.detach())
        y: Tensor = x * self.linear(self.memory)
        return y


class Recurrent(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.GRU(3, 3, 2, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)[0]
        return y


def test_w_reads_a_buffer_as_its_own_forward_left_it() -> None:
    module = Remembering()
    stage = make_stage("graph", module, 1)
    stage.forward(0, (torch.full((1, 3), 2.0, requires_grad=True),))
    stage.backward(0, (torch.ones(1, 3),))
    stage.forward(1, (torch.full((1, 3), 5.0, requires_grad=True),))
    assert torch.equal(module.memory, torch.full((1, 3), 7.0))
    stage.weight(0)
    assert torch.equal(module.linear.weight.grad, torch.full((3, 3), 4.0))


@pytest.mark.parametrize(
    ("module", "stated"),
    [
        (Counting(), ("forward", "calls")),
        (Replacing(), ("buffer", "mean")),
        (Recurrent(0.5), ("layers", "dropout")),
        (Branching(3, 3), ("branches", "parameters")),
    ],
)
def test_what_a_graph_cannot_repeat_is_refused(module: nn.Module, stated: Stated) -> None:
    with raises(zb.InputError, *stated):
        passed(make_stage("graph", module, 1), torch.ones(1, 3, requires_grad=True))


@pytest.mark.parametrize(
    ("hook", "stated"),
    [
        (lambda m: m.weight.register_hook(lambda gradient: 2 * gradient), ("parameter", "weight", "hook")),
        (lambda m: m.register_forward_pre_hook(lambda module, args: args), ("Linear", "hook")),
        (lambda m: m.register_forward_hook(lambda module, args, kwargs, y: y, with_kwargs=True), ("Linear", "hook")),
        (lambda m: m.register_full_backward_pre_hook(lambda module, gradients: None), ("Linear", "hook")),
        (lambda m: m.register_full_backward_hook(lambda module, gradients, outputs: None), ("Linear", "hook")),
        (lambda m: nn.modules.module.register_module_forward_hook(lambda module, args, y: y), ("hook", "global")),
    ],
)
def test_a_hook_set_between_steps_is_refused(hook: Callable[[nn.Linear], Any], stated: Stated) -> None:
    module = nn.Linear(3, 3)
    stage = passed(make_stage("graph", module, 1), torch.ones(1, 3, requires_grad=True))
    handle = hook(module)
    stage.begin(None)
    with raises(zb.InputError, *stated):
        passed(stage, torch.ones(1, 3, requires_grad=True))
    handle.remove()
    stage.begin(None)
    passed(stage, torch.ones(1, 3, requires_grad=True))


def hooked_between_calls(group: Any) -> None:
    """Hooks that the traced stages of one rank get between calls, and layers, which a graph does not call."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))).double(), torch.ones(4, 3, dtype=torch.float64)
    with zb.Pipeline(zb.split(model, example=x), "zb-h1", 4, nn.functional.mse_loss, group=group, split="graph") as pipe:
        loss = pipe.step(x, x)
        for add in (lambda: model[0].weight.register_hook(lambda gradient: 2 * gradient), lambda: model[1].register_forward_hook(print)):
            handle = add()
            for call in (pipe.step, pipe.profile_layers):
                with raises(zb.InputError, "stage 0"):
                    call(x, x)
            handle.remove()
        assert torch.equal(pipe.step(x, x), loss)


def test_hooks_of_traced_stages_are_refused_on_all_ranks_before_the_step(world: Ranks) -> None:
    world.run(hooked_between_calls, ranks=2)


@pytest.mark.long
def test_a_graph_of_autograd_in_a_cycle_of_garbage_is_no_hook() -> None:
    module = nn.Linear(3, 3)
    stage = passed(make_stage("graph", module, 1), torch.ones(1, 3, requires_grad=True))
    cycle: list[Any] = [module(torch.ones(1, 3))]
    cycle.append(cycle)
    stage.begin(None)
    with raises(zb.InputError, "parameter", "weight", "hook"):
        passed(stage, torch.ones(1, 3, requires_grad=True))
    del cycle
    stage.begin(None)
    passed(stage, torch.ones(1, 3, requires_grad=True))


@cpu_only("the compiler for CPUs is missing")
def test_without_a_compiler_compiled_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", missing)
    with pytest.raises(zb.InputError) as caught:
        make_stage("compiled", nn.Linear(3, 3), 1)
    assert caught.value.fields == {"stage": 1, "remedy": 'install g++, or give split={1: "graph"}'}


def test_a_device_without_a_code_generator_is_refused_before_a_stage_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.codegen.common.get_scheduling_for_device", lambda kind: None)
    with raises(zb.InputError, stage=1, device=str(nn.Linear(3, 3).weight.device)):
        make_stage("compiled", nn.Linear(3, 3), 1)
    make_stage("graph", nn.Linear(3, 3), 1)


@pytest.mark.sweep
@pytest.mark.parametrize(("dropout", "training"), [(0.0, True), (0.5, False)])
@cpu_only("a graph cannot contain the recurrent layers of cuDNN")
def test_recurrent_layers_that_drop_nothing_out_are_traced(dropout: float, training: bool) -> None:
    module = Recurrent(dropout).double().train(training)
    stage = passed(make_stage("graph", module, 1), torch.ones(2, 1, 3, dtype=torch.float64, requires_grad=True))
    mine = [p.grad for p in stage.module.parameters()]
    module.zero_grad()
    module(torch.ones(2, 1, 3, dtype=torch.float64)).sum().backward()
    assert all(a is not None and p.grad is not None and torch.equal(a, p.grad) for a, p in zip(mine, module.parameters(), strict=True))


def test_whole_leaves_nothing_for_w() -> None:
    module = nn.Linear(3, 3)
    stage = make_stage("whole", module, 2)
    stage.forward(0, (torch.ones(1, 3, requires_grad=True),))
    stage.backward(0, (torch.ones(1, 3),))
    assert module.weight.grad is not None
    before = module.weight.grad.clone()
    stage.weight(0)
    assert torch.equal(module.weight.grad, before)
    assert stage.splitter.report().share == 0


def trained(group: Any, name: str, splits: list[str | Mapping[int, str]]) -> tuple[float, bool]:
    """The error of the loss, and whether every gradient has the oracle's bits, after two steps."""
    schedule = zb.make(name, group.size(), 4)
    oracle = [build(stage, schedule.num_stages) for stage in range(schedule.num_stages)]
    error = 0.0
    with zb.Pipeline(build, schedule, 4, loss_fn, group=group, split=splits[group.rank()]) as pipe:
        for seed in (1, 2):
            inputs, targets = batch(4, seed)
            loss = pipe.step(inputs, targets)
            error = max(error, abs((loss - one_device(oracle, 4, inputs, targets)).item()))
        pipe.eval_step(inputs, targets)
        pairs = [(p, q) for s, module in pipe.modules.items() for p, q in zip(module.parameters(), oracle[s].parameters(), strict=True)]
    return error, all(p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad) for p, q in pairs)


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("zb-h1", ["graph", "deferred"]),
        ("zb-h1", ["whole", {1: "graph"}]),
        ("zb-v", ["graph", {2: "graph"}]),
        ("1f1b", ["graph", "whole"]),
    ],
)
def test_graph_stages_work_in_a_pipeline_with_other_stages(world: Ranks, name: str, splits: list[str | Mapping[int, str]]) -> None:
    for error, same in world.run(trained, name, splits, ranks=2):
        assert error <= 1e-12
        assert same


def refusal(group: Any, split: Any) -> str:
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group, split=split)
    return str(caught.value)


@pytest.mark.parametrize(
    ("split", "sentence"),
    [
        ("grap", "split of stage 0 must be one of deferred, graph, compiled, whole, did you mean 'graph'? got 'grap'"),
        ({5: "graph"}, "split names stage 5, this rank has 0; give each rank only its own stages"),
        (3, "split must be a str or a Mapping, got 3"),
    ],
)
def test_a_wrong_split_is_refused_on_every_rank(world: Ranks, split: Any, sentence: str) -> None:
    for message in world.run(refusal, split, ranks=2):
        assert sentence in message


@pytest.mark.long
def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    (program,) = programs_of("docs/graph-split.md")
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", run_forked(program, tmp_path, 2))]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


class Named(nn.Module):
    """Returns a dict with a constant; the next stage may use only some entries."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.side = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float = 1.0, unused: Tensor | None = None) -> dict[str, Any]:
        return {"x": torch.tanh(self.up(x)) * scale, "scale": 2.0, "unused": self.side(x)}


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.down = nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float, unused: Tensor) -> Tensor:
        y: Tensor = self.down(self.dropout(x) * scale)
        return y


def nested(stage: int, num_stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return (Named() if stage < num_stages - 1 else Last()).double()


def trained_by_name(group: Any, split: str, main_grad: torch.dtype | None) -> tuple[list[Tensor | None], str]:
    """This rank's gradients of two steps with dropout, and the description of its split."""
    torch.manual_seed(0)
    with zb.Pipeline(nested, "zb-h1", 4, nn.functional.mse_loss, group=group, split=split, main_grad=main_grad) as pipe:
        for seed in (1, 2):
            torch.manual_seed(seed)
            pipe.step(torch.randn(8, 8).double(), torch.randn(8, 8).double())
        described = str(pipe.describe(torch.zeros(8, 8).double(), torch.zeros(8, 8).double()))
        return [p.grad if main_grad is None else p.main_grad for p in pipe.parameters()], described


@pytest.mark.long
def test_dicts_and_constants_go_through_graph_stages_with_and_without_main_grad(world: Ranks) -> None:
    deferred = world.run(trained_by_name, "deferred", None, ranks=2)
    for main_grad in (None, torch.float64):
        graph = world.run(trained_by_name, "graph", main_grad, ranks=2)
        for (mine, described), (theirs, _) in zip(graph, deferred, strict=True):
            assert "stage 0: graph" in described
            for a, b in zip(mine, theirs, strict=True):
                assert (a is None) == (b is None)
                assert a is None or b is None or torch.equal(a, b)


@pytest.mark.long
def test_compiled_stages_train_in_a_pipeline_with_dropout(world: Ranks) -> None:
    deferred = world.run(trained_by_name, "deferred", None, ranks=2)
    for (mine, described), (theirs, _) in zip(world.run(trained_by_name, "compiled", None, ranks=2), deferred, strict=True):
        assert "stage 0: compiled" in described
        for a, b in zip(mine, theirs, strict=True):
            assert a is None or b is None or torch.allclose(a, b, rtol=1e-12, atol=1e-14)
