"""What a stage consists of, by itself: levels of recomputation, orders of buffers, edges, shared gradients and the forms of outputs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from benchmarks.split_matrix.kinds import Way
from tests.refusals import Stated, raises, states
from zerobubble.runtime.stage import chosen_calls, levels, reduction, sharded, stage
from zerobubble.runtime.stage.buffer_order import BufferOrder
from zerobubble.runtime.stage.forward_state import ForwardState
from zerobubble.runtime.stage.levels import LEVELS, RecomputedParts, RecomputeLevels
from zerobubble.runtime.stage.rank_stages import modules_of
from zerobubble.runtime.stage.stage import make_stage
from zerobubble.runtime.values.payload import Payload
from zerobubble.runtime.values.python_state import PythonState

pytestmark = pytest.mark.in_process


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.drop = nn.Linear(2, 6), nn.Dropout(0.5, inplace=True)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp, self.attn_norm = Attention(), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.LayerNorm(2)


def model() -> nn.Module:
    return nn.Sequential(Layer(), Layer())


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ("*.attn", ["0.attn", "1.attn"]),
        ("0.*", ["0.attn", "0.mlp", "0.attn_norm"]),
        ("0", ["0"]),
        ("", [""]),
        ("*.0", ["0", "1.mlp.0"]),
        (nn.Linear, ["0.attn.qkv", "0.mlp.0", "1.attn.qkv", "1.mlp.0"]),
        (["*.mlp", nn.Linear], ["0.attn.qkv", "0.mlp", "1.attn.qkv", "1.mlp"]),
        (lambda name, module: name.startswith("1") and isinstance(module, nn.LayerNorm), ["1.attn_norm"]),
        ("*.none", []),
    ],
)
def test_a_level_chooses_the_outermost_modules(chosen: Any, found: list[str]) -> None:
    module = model()
    parts = RecomputeLevels({"some": chosen}).parts_of("some", 0, module)
    assert parts.parts == {path: module.get_submodule(path) for path in found}
    assert parts.recomputes == bool(found)
    by_stage = RecomputeLevels({"some": {1: chosen}})
    assert by_stage.parts_of("some", 0, module) == RecomputedParts("some", None)
    assert by_stage.parts_of("some", 1, module) == parts
    assert RecomputeLevels(None).parts_of("full", 0, module).recomputes


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ({}, True),
        ({"a": "*.attn", "b": nn.Linear, "c": ["*.mlp", nn.Linear], "d": lambda name, module: True}, True),
        ({"a": {0: "*.attn", 1: [nn.Linear]}}, True),
        ({"a": int}, False),
        ({"a": []}, False),
        ({"a": ["*.attn", 1]}, False),
        ({"a": [["*.attn"]]}, False),
        ({"a": nn.Linear(1, 1)}, False),
        ({1: "*.attn"}, False),
        ({"a": {"0": "*.attn"}}, False),
        ({"a": {0: 1}}, False),
        ({"a": "*.attn", "b": 1}, False),
        ("*.attn", False),
    ],
)
def test_levels_are_patterns_classes_and_functions(given: Any, accepted: bool) -> None:
    assert LEVELS.accepts(given) is accepted


def test_a_schedule_s_stages_have_their_levels() -> None:
    one = RecomputeLevels({"some": "*.attn"})
    assert (one.name_of(3), one.measured) == ("some", ("some", "full"))
    assert (RecomputeLevels(None).name_of(0), RecomputeLevels(None).measured) == ("full", ())
    both = RecomputeLevels({"some": "*.attn", "more": {1: "*.mlp"}}, ["full", "more", "none", "other"])
    assert [both.name_of(stage) for stage in range(4)] == ["full", "more", "none", "other"]
    assert both.as_one([0, 1]) == {"as before": {1: "*.mlp"}}
    both.refuse_unknown([0, 1], 4)
    with raises(zb.InputError, "3 (other)"):
        both.refuse_unknown([0, 3], 4)
    with raises(zb.InputError, name="more", stage=1, last_stage=0):
        both.refuse_unknown([0], 1)
    with raises(zb.InputError, stage=-1):
        RecomputeLevels({"more": {-1: "*.mlp"}}).refuse_unknown([], 2)
    with raises(zb.InputError, given="some, more"):
        RecomputeLevels({"some": "*.attn", "more": "*.mlp"}).name_of(0)
    for reserved in ("full", "none"):
        with raises(zb.InputError, name=reserved):
            RecomputeLevels({reserved: "*.attn"})


def test_words_of_levels_are_the_same_on_all_ranks() -> None:
    given = RecomputeLevels({"some": {2: ["*.mlp", nn.Linear], 0: "*.attn"}, "more": lambda name, module: True})
    states(str(given), "some", "more", "stage 0: *.attn; stage 2: *.mlp, Linear")
    assert str(RecomputeLevels(None)) == str(RecomputeLevels({}))
    names = [f"{number}.attn" for number in range(8)]
    text = str(RecomputedParts("some", dict.fromkeys(names, nn.Identity())))
    assert "5.attn" in text
    assert "6.attn" not in text
    assert "2 more" in text
    six = str(RecomputedParts("some", dict.fromkeys(names[:6], nn.Identity())))
    assert "5.attn" in six
    assert "more" not in six


def compiled(module: nn.Module) -> nn.Module:
    module._compiled_call_impl = module.forward  # as `module.compile()` sets it
    return module


def test_a_module_inside_a_compiled_one_is_no_part() -> None:
    def refused(path: str, whole: nn.Module) -> str:
        given = RecomputeLevels({"some": lambda name, _: name == path})
        try:
            given.parts_of("some", 4, whole)
        except zb.InputError as error:
            states(error, path=path, stage=4)
            sentence, found = str(error), str(error.fields["compiled"])
            assert "{" not in sentence
            return found
        return "accepted"

    assert refused("0.mlp", model()) == "accepted"
    assert refused("", compiled(model())) == "the stage"
    outer = model()
    compiled(outer.get_submodule("0"))
    assert [refused(path, outer) for path in ("0", "0.mlp", "0.attn.qkv", "1", "1.mlp")] == ["0", "0", "0", "accepted", "accepted"]
    wrapped = nn.Sequential(torch.compile(Layer(), backend="eager"), Layer())
    assert [refused(path, wrapped) for path in ("0", "0._orig_mod.mlp", "1.mlp")] == ["accepted", "0", "accepted"]


@pytest.mark.parametrize(
    ("part", "accepted"),
    [
        (nn.ReLU(inplace=True), False),
        (nn.Dropout(0.5, inplace=True), False),
        (nn.Dropout(0.0, inplace=True), True),
        (nn.Sequential(nn.Sequential(nn.ReLU(inplace=True)), nn.Linear(2, 2)), False),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)), True),
        (nn.Sequential(), True),
        (nn.ReLU(), True),
        (Way(lambda m, x: x, inplace=True), True),
    ],
)
def test_a_module_that_overwrites_its_input_is_no_part(part: nn.Module, accepted: bool) -> None:
    with nullcontext() if accepted else raises(zb.InputError, path="part", stage=2):
        levels._refuse_in_place("part", part, 2)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("nothing", None)


def test_buffers_written_after_later_forwards_are_refused() -> None:
    module = Normed()
    mean = module.norm.running_mean
    assert mean is not None
    order = BufferOrder(module, 5)
    mean.add_(1)
    order.forward_ended(0)
    mean.add_(1)
    order.backward_ended(0)
    order.forward_ended(1)
    mean.add_(1)
    order.forward_ended(2)
    mean.add_(1)
    order.backward_ended(2)
    order.backward_ended(1)
    order.forward_ended(3)
    module.norm.running_mean = mean.clone()
    order.forward_ended(4)
    module.norm.running_mean = mean.clone()
    with raises(zb.InputError, index=5, name="running_mean", module="norm"):
        order.backward_ended(3)
    plain = nn.BatchNorm1d(2)
    order = BufferOrder(plain, 0)
    order.forward_ended(0)
    assert plain.running_var is not None
    plain.running_var.add_(1)
    order.forward_ended(1)
    plain.running_var.add_(1)
    with raises(zb.InputError, name="running_var", module="the stage"):
        order.backward_ended(0)


def test_buffers_of_inference_have_no_version() -> None:
    with torch.inference_mode():
        module = nn.BatchNorm1d(2)
    order = BufferOrder(module, 0)
    order.forward_ended(0)
    order.backward_ended(0)


def test_a_second_run_sees_the_buffers_of_the_first() -> None:
    module = Normed()
    mean = module.norm.running_mean
    assert mean is not None
    state = ForwardState(module, PythonState(module))
    mean.add_(1)
    module.norm.running_var = torch.full((2,), 7.0)
    state.end_first_run("stage 0", "")
    with state.restored():
        assert module.norm.running_mean is not None
        assert module.norm.running_mean.tolist() == [0.0, 0.0]
        assert module.norm.running_var.tolist() == [1.0, 1.0]
        module.norm.running_mean.add_(9)
    assert module.norm.running_mean is mean
    assert mean.tolist() == [1.0, 1.0]
    assert module.norm.running_var.tolist() == [7.0, 7.0]


@pytest.mark.parametrize("replaced", [False, True])
def test_buffers_that_are_replaced_have_changed(replaced: bool) -> None:
    from zerobubble.runtime.stage.forward_state import _Buffers

    module = Normed()
    buffers = _Buffers([module.norm])
    assert not buffers.have_changed
    mean = module.norm.running_mean
    assert mean is not None
    if replaced:
        module.norm.running_mean = mean.clone()
    else:
        mean.add_(1)
    assert buffers.have_changed


def test_gradients_that_share_memory_with_needed_tensors_are_copied() -> None:
    needed = torch.arange(4.0)
    shared, own, none, sparse = (nn.Parameter(torch.zeros(2, 2)) for _ in range(4))
    shared.grad, own.grad, sparse.grad = needed.view(2, 2), torch.ones(2, 2), torch.eye(2).to_sparse()
    before = own.grad, sparse.grad
    stage._copy_shared_gradients([shared, own, none, sparse], [None, needed])
    assert shared.grad.data_ptr() != needed.data_ptr()
    assert shared.grad.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert none.grad is None
    assert own.grad is before[0]
    assert sparse.grad is before[1]


def test_edges_without_a_gradient_are_left_out() -> None:
    one, two = torch.ones(1), torch.ones(2)
    assert stage._with_gradient(["a", "b", "c"], (one, None, two)) == (["a", "c"], (one, two))
    assert stage._with_gradient(["a"], (None,)) == ([], ())
    edges = ["a", "b"]
    assert stage._with_gradient(edges, (one, two))[0] is edges


def test_a_stage_trains_if_one_parameter_does() -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    assert make_stage("deferred", module, 0).flow.trains
    module.weight.requires_grad_(False)
    assert not make_stage("deferred", module, 0).flow.trains


@dataclass
class Pair:
    left: Tensor
    right: Tensor


def test_outputs_of_a_stage_are_tensors_and_their_structure() -> None:
    a, b = torch.ones(1), torch.ones(2)
    assert stage.as_tensors(a, 0) == (a,)
    for plain in ((a, b), [a, b]):
        found = stage.as_tensors(plain, 0)
        assert type(found) is tuple
        assert list(map(id, found)) == [id(a), id(b)]
    for nested in ({"left": a, "right": b}, Pair(a, b), [a, [b]], (a, b, 3)):
        found = stage.as_tensors(nested, 0)
        assert isinstance(found, Payload)
        assert list(map(id, found)) == [id(a), id(b)]
    for wrong in (3, None, "text"):
        with raises(TypeError, "stage 4", type(wrong).__name__):
            stage.as_tensors(wrong, 4)


def test_inputs_of_a_failed_stage_name_their_origin() -> None:
    x = (torch.ones(2, 3),)
    states(stage._describe_inputs(0, x, ""), "stage 0", "batch", "(2, 3)")
    later = stage._describe_inputs(2, x, "")
    states(later, "stage 2", "stage 1")
    assert "batch" not in later
    assert "clone" not in later
    assert "clone" in stage._describe_inputs(2, x, "a leaf Variable that requires grad is used in an in-place operation")


@pytest.mark.parametrize(
    ("given", "stated"),
    [
        (nn.Identity(), ("2 modules", 1)),
        ([nn.Identity()], (1,)),
        ([nn.Identity()] * 3, (3,)),
        ([nn.Identity(), 3], ("stage 3",)),
        (lambda stage, num_stages: stage, ("stage 0",)),
    ],
)
def test_a_rank_is_given_as_many_modules_as_stages(given: Any, stated: Stated) -> None:
    schedule = zb.make("zb-v", 2, 4)
    assert list(modules_of([nn.Identity(), nn.Identity()], schedule, 0, 0)) == [0, 3]
    with pytest.raises(zb.InputError) as caught:
        modules_of(given, schedule, 0, 0)
    states(caught.value, *[one for one in stated if one != "2 modules"])


def test_stages_are_built_with_seeds_of_their_own() -> None:
    def drawn(rank: int, seed: int) -> dict[int, list[float]]:
        schedule = zb.make("zb-v", 2, 4)
        built = modules_of(lambda stage, num_stages: nn.Linear(1, num_stages), schedule, rank, seed)
        return {stage: module.get_parameter("weight").flatten().tolist() for stage, module in built.items()}

    both = drawn(0, 0) | drawn(1, 0)
    assert sorted(both) == [0, 1, 2, 3]
    assert len({tuple(values) for values in both.values()}) == 4
    assert {len(values) for values in both.values()} == {4}
    assert drawn(0, 0) == drawn(0, 0) != drawn(0, 1)


def test_a_reduction_on_a_device_is_timed_and_over_with_its_event() -> None:
    happened: list[object] = []

    class Event:
        def __init__(self, timed: bool) -> None:
            assert timed

        def record(self) -> None:
            happened.append(self)

    over = reduction._Enqueued.__new__(reduction._Enqueued)
    over._device = SimpleNamespace(new_event=Event)  # type: ignore[assignment]
    over._send(lambda: happened.append("sent"))
    assert over.times is not None
    assert happened == [over.times[0], "sent", over.times[1]]
    found = []
    for event in (None, mock.Mock(query=lambda: False), mock.Mock(query=lambda: True)):
        over._event = event
        found.append(over.is_over)
    assert found == [True, False, True]


def test_calls_without_a_gradient_or_with_changed_inputs_are_not_recomputed() -> None:
    calls = chosen_calls.ChosenCalls(3, None)
    linear = nn.Linear(2, 2)

    def run(x: Tensor) -> Tensor:
        call = chosen_calls._Call("'0' of stage 3", ForwardState(linear, PythonState(linear)), linear.forward, (x,), {}, None)
        y: Tensor = calls.run(call)
        return y

    with calls.recording():
        first, second = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
        kept, dropped = run(first * 1), run(second * 1)
        with torch.no_grad():
            run(first)
    assert len(calls.inputs) == 2
    with raises(zb.InputError, "'0'", "stage 3"):
        kept.sum().backward()
    del dropped
    calls.recompute()
    assert calls.inputs == []
    kept.sum().backward()
    assert first.grad is not None
    assert torch.equal(first.grad, linear.weight.detach().sum(0).expand(2, 2))
    with calls.recording():
        x = first * 1
        y = run(x)
    x.add_(1)
    with raises(zb.InputError, "(2, 2)", "'0'", "stage 3"):
        calls.recompute()
    del y


def test_a_second_run_has_the_autocast_of_the_first() -> None:
    x = torch.ones(1, device="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        inside = chosen_calls._autocasts_of([x])
    outside = chosen_calls._autocasts_of([x])
    assert [(each.kind, each.enabled) for each in inside] == [("cpu", True)]
    assert [(each.kind, each.enabled) for each in outside] == [("cpu", False)]

    def now() -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    with chosen_calls._autocast_as(inside):
        assert now() == (True, torch.bfloat16)
        with chosen_calls._autocast_as(outside):
            assert not now()[0]
    with torch.autocast("cpu", torch.float16), chosen_calls._autocast_as(inside):
        assert now() == (True, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), mock.patch.object(torch, "autocast") as entered:
        with chosen_calls._autocast_as(inside):
            pass
        assert not entered.called


@pytest.mark.parametrize(("order", "norm"), [(0, 7.0), (1, 7.0), (2, 5.0), (float("inf"), 4.0)])
def test_norms_of_parts_are_joined(order: float, norm: float) -> None:
    assert sharded._joined([3.0, 4.0], order) == norm
