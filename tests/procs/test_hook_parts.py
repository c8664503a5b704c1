"""Parts of the hooks by themselves: arguments of clipping, scalers, reports, buckets of replicas, snapshots and shared parameters."""

from __future__ import annotations

import json
import logging
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.refusals import raises, states
from zerobubble.ir import Kind, Op
from zerobubble.kinds import ValueKind
from zerobubble.rules import Value
from zerobubble.run_folder import NUM_DETAILS, detail_name, log_name
from zerobubble.runtime.hooks import bubble_work, clip, gradient_scaling, post_validation, replicas, step_recorder, telemetry
from zerobubble.runtime.hooks.changed_copies import ChangedCopies, watched_copies
from zerobubble.runtime.hooks.shared_parameters import ParameterName, parameter_infos, read_tied, refuse_forgotten, shared_groups
from zerobubble.runtime.hooks.undo_by_arithmetic import ByFormula
from zerobubble.runtime.measure.trace import Records
from zerobubble.runtime.values.gradients import IN_GRAD, Gradients
from zerobubble.timeline import Doing

pytestmark = pytest.mark.in_process


def with_gradient(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    parameter.grad = torch.tensor(values, dtype=dtype)
    return parameter


def test_arguments_of_clipping_are_numbers() -> None:
    def parsed(max_norm: Any, norm_type: Any = 2.0, error_if_nonfinite: Any = False) -> clip.ClipArguments:
        return clip.ClipArguments.parse(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    assert parsed(1) == parsed(1.0) == parsed(torch.tensor(1.0)) == ("1.0", "2.0", "False", "")
    assert parsed(0, "inf", 1) == ("0.0", "inf", "True", "")
    for wrong in ((-1.0,), (math.nan,), (1.0, math.nan), ("much",), (torch.ones(2),), (1.0, None)):
        assert parsed(*wrong)[:3] == ("", "", "")
        assert parsed(*wrong).fault
    states(parsed("much").fault, "max_norm", "much")
    states(parsed(1.0, None).fault, "norm_type")
    good, other = parsed(1.0), parsed(2.0)
    clip.refuse_wrong_arguments([good, good], [4, 5])
    with raises(zb.InputError, "max_norm=1.0", "max_norm=2.0", 4, 5):
        clip.refuse_wrong_arguments([good, other], [4, 5])
    with raises(zb.InputError, "rank 5", "norm_type"):
        clip.refuse_wrong_arguments([good, parsed(1.0, None)], [4, 5])


def test_norms_of_stages_count_each_parameter_once() -> None:
    shared, own, other = with_gradient(3.0, 4.0), with_gradient(5.0, dtype=torch.float64), nn.Parameter(torch.zeros(1))
    first, second = nn.ParameterList([shared, other]), nn.ParameterList([own, shared])
    parts = clip.counted({4: second, 1: first}, [])
    assert list(parts) == [1, 4]
    assert [list(map(id, parts[stage])) for stage in (1, 4)] == [[id(shared), id(other)], [id(own)]]
    assert clip.counted({4: second}, [own]) == {4: [shared]}
    whole = SimpleNamespace(is_sharded=lambda parameter: False, whole_norms=lambda norms, order: {})
    norms = clip.norms_of(parts, 2.0, IN_GRAD, whole)  # type: ignore[arg-type]
    assert {stage: (found.values.tolist(), found.values.dtype) for stage, found in norms.items()} == {
        1: ([5.0], torch.float32),
        4: ([5.0], torch.float64),
    }
    assert clip.norms_of({1: [other]}, 2.0, IN_GRAD, whole) == {}  # type: ignore[arg-type]
    assert clip.total_norm({stage: found.values for stage, found in norms.items()}, 1.0).item() == 10.0
    assert clip.total_norm({}, 2.0).item() == 0.0
    assert clip.not_finite_in({1: first, 4: second}, norms) == {}
    broken = {1: clip.StageNorms([shared, other], torch.tensor([math.inf, 1.0])), 4: clip.StageNorms([own], torch.tensor([math.nan]))}
    assert clip.not_finite_in({1: first, 4: second}, broken) == {1: ["0"], 4: ["0"]}


def test_a_norm_that_is_not_finite_names_three_parameters_and_all_microbatches() -> None:
    clip.refuse(torch.tensor(1.0), 2.0, {0: ["a"]}, None)
    total = torch.tensor(math.inf)
    with raises(zb.InputError, "stage 2", "a, b, c", "1 more", "1, 3", order=2.0, norm=math.inf):
        clip.refuse(total, 2.0, {2: ["a", "b", "c", "d"]}, torch.tensor([1.0, math.nan, 1.0, math.inf]))
    with raises(zb.InputError, "a, b, c") as caught:
        clip.refuse(total, 2.0, {2: ["a", "b", "c"]}, torch.tensor([1.0]))
    assert "more" not in str(caught.value)
    assert "microbatch" not in str(caught.value)
    with raises(zb.InputError, norm=math.inf, where=""):
        clip.refuse(total, 2.0, {}, None)


def test_torch_scales_plain_gradients_and_sharded_ones_are_scaled_by_their_parts() -> None:
    plain, shard, none = with_gradient(2.0, 4.0), with_gradient(2.0, 4.0), nn.Parameter(torch.zeros(2))
    given: list[list[nn.Parameter]] = []
    with (
        mock.patch.object(clip, "local_part", lambda gradient: gradient[:1] if gradient is shard.grad else gradient),
        mock.patch.object(torch.nn.utils, "clip_grads_with_norm_", lambda parameters, *_: given.append(parameters)),
    ):
        clip.scale([plain, shard, none], 1.0, torch.tensor(2.0), IN_GRAD)
    ((first, second),) = given
    assert first is plain
    assert second is none
    assert plain.grad is not None
    assert shard.grad is not None
    assert plain.grad.tolist() == [2.0, 4.0]
    torch.testing.assert_close(shard.grad, torch.tensor([2.0 / (2.0 + 1e-6), 4.0]))


def test_scalers_of_all_ranks_are_alike() -> None:
    schedule = zb.make("dualpipe", 2, 4)
    last = {route[-1] for route in schedule.placement.routes}
    assert last == {0, 1}
    gradient_scaling._refuse_differences([4.0, 4.0], [True, True], schedule, [6, 7])
    with raises(zb.InputError, "rank 6", "rank 7", 4, 8):
        gradient_scaling._refuse_differences([4.0, 8.0], [True, True], schedule, [6, 7])
    with raises(zb.InputError, rank=7):
        gradient_scaling._refuse_differences([4.0, 4.0], [True, False], schedule, [6, 7])
    linear = zb.make("1f1b", 2, 4)
    gradient_scaling._refuse_differences([4.0, 4.0], [False, True], linear, [6, 7])
    with raises(zb.InputError, rank=7):
        gradient_scaling._refuse_differences([4.0, 4.0], [True, False], linear, [6, 7])


@pytest.mark.parametrize("main_grad", [None, torch.float32])
def test_gradients_of_a_rank_are_unscaled_once(main_grad: torch.dtype | None) -> None:
    given = [with_gradient(8.0, 16.0), with_gradient(24.0), nn.Parameter(torch.zeros(1))]
    gradients = IN_GRAD if main_grad is None else Gradients(main_grad)
    if main_grad is not None:
        for parameter in given[:2]:
            gradient, parameter.grad = parameter.grad, None
            gradients.put(parameter, gradient)
    optimizers = [torch.optim.SGD(given[:1]), torch.optim.SGD(given[1:])]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    unscaled: list[Any] = []
    pipeline: Any = SimpleNamespace(gradients=gradients, parameters=lambda: given, scaling=SimpleNamespace(unscale=unscaled.extend))
    assert not gradient_scaling.unscale_own(pipeline, scaler, optimizers)
    assert [found.tolist() for parameter in given if (found := gradients.get(parameter)) is not None] == [[1.0, 2.0], [3.0]]
    assert list(map(id, unscaled)) == list(map(id, given))
    gradient_scaling.set_found_inf(scaler, optimizers, torch.device("cpu"), is_found=True)
    assert [flag.item() for each in optimizers for flag in scaler._found_inf_per_device(each).values()] == [1.0, 1.0]
    assert len(scaler._per_optimizer_states) == 2
    fresh = torch.amp.GradScaler("cpu", init_scale=8.0)
    fresh.scale(torch.ones(()))
    found = gradients.get(given[1])
    assert found is not None
    found.fill_(math.inf)
    assert gradient_scaling.unscale_own(pipeline, fresh, optimizers)


def validated(*optimizers: torch.optim.Optimizer) -> Any:
    made = post_validation.PostValidation.__new__(post_validation.PostValidation)
    made.optimizers, made._back, made._sends = optimizers, None, []
    return made


def test_the_state_of_several_optimizers_is_a_list() -> None:
    parameters = [with_gradient(1.0), with_gradient(2.0)]
    both = [torch.optim.SGD([parameter], lr=0.5, momentum=0.9) for parameter in parameters]
    for optimizer in both:
        optimizer.step()
    (alone, pair), states_of = (validated(both[0]), validated(*both)), [optimizer.state_dict() for optimizer in both]
    assert alone.state_dict() == states_of[0]
    assert pair.state_dict() == {"optimizers": states_of}
    fresh = [torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in parameters]
    validated(*fresh).load_state_dict(pair.state_dict())
    assert [optimizer.state_dict() for optimizer in fresh] == states_of
    single = torch.optim.SGD(parameters[:1], lr=0.1, momentum=0.9)
    validated(single).load_state_dict(alone.state_dict())
    assert single.state_dict() == states_of[0]
    assert [group["lr"] for group in pair.param_groups] == [0.5, 0.5]
    pair.zero_grad()
    assert [parameter.grad for parameter in parameters] == [None, None]
    with raises(zb.InputError, "zero_grad", "set_to_none=False"):
        pair.zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    ("rank", "given", "own", "accepted"),
    [
        (0, None, None, True),
        (1, "a", "a", True),
        (0, None, "a", True),  # only the rank of the last stage is sure to be given the scaler
        (1, None, "a", False),
        (0, "a", None, False),
        (0, "b", "a", False),
        (1, "b", "a", False),
    ],
)
def test_the_scaler_of_the_step_is_that_of_the_optimizer(rank: int, given: str | None, own: str | None, accepted: bool) -> None:
    made = validated()
    made._pipeline = SimpleNamespace(rank=rank, scaling=SimpleNamespace(scaler=given), schedule=zb.make("1f1b", 2, 4))
    made._scaler = own
    with nullcontext() if accepted else raises(zb.InputError, given_here="none" if own is None else "one"):
        made._refuse_other_scaler()


def test_options_and_gradients_of_a_call_are_back_for_the_exact_step() -> None:
    parameter, other = with_gradient(1.0), with_gradient(5.0)
    made = validated(torch.optim.SGD([parameter], lr=0.5), torch.optim.SGD([other], lr=0.25))
    made._pipeline = SimpleNamespace(parameters=lambda: [parameter])
    made._keep()
    before = parameter.grad
    parameter.grad = torch.tensor([2.0])
    made.optimizers[0].param_groups[0]["lr"] = 0.1
    with made._as_it_was():
        assert parameter.grad is before
        assert [group["lr"] for group in made.param_groups] == [0.5, 0.25]
    assert parameter.grad.tolist() == [2.0]
    assert [group["lr"] for group in made.param_groups] == [0.1, 0.25]


def test_groups_of_a_call_are_back_for_the_exact_step() -> None:
    parameter, removed, added = (with_gradient(value) for value in (1.0, 5.0, 7.0))
    made = validated(torch.optim.SGD([parameter, removed], lr=0.5))
    made._pipeline = SimpleNamespace(parameters=lambda: [parameter, removed, added])
    made._keep()
    (optimizer,) = made.optimizers
    del optimizer.param_groups[0]["params"][1]
    optimizer.add_param_group({"params": [added]})
    with made._as_it_was():
        assert [group["params"] for group in optimizer.param_groups] == [[parameter, removed]]
    assert [group["params"] for group in optimizer.param_groups] == [[parameter], [added]]


def test_a_copy_fits_in_half_of_the_free_memory() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(10))])
    found = []
    for free in (240, 239):
        with mock.patch.object(post_validation, "interface", return_value=SimpleNamespace(free_bytes=lambda free=free: free)):
            found.append(post_validation._copy_fits([optimizer], torch.device("cpu")))
    assert found == [True, False]


def test_a_snapshot_restores_buffers_that_were_changed_and_replaced() -> None:
    module = nn.BatchNorm1d(2)
    mean, variance = module.running_mean, module.running_var
    assert mean is not None
    snapshot = post_validation.StageSnapshot([module])
    mean.add_(1)
    module.running_var = torch.zeros(2)
    snapshot.restore()
    assert module.running_mean is mean
    assert module.running_var is variance
    assert (mean.tolist(), variance.tolist()) == ([0.0, 0.0], [1.0, 1.0])  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [{"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}, {"momentum": 0.9, "nesterov": True}, {}])
@pytest.mark.parametrize("maximize", [False, True])
def test_sgd_is_undone_with_any_of_its_options(options: dict[str, Any], maximize: bool) -> None:
    parameter = with_gradient(1.0, -2.0, dtype=torch.float64)
    optimizer = torch.optim.SGD([parameter], lr=0.25, maximize=maximize, **options)
    for _ in range(3):
        parameter.grad = torch.randn(2, dtype=torch.float64)
        before = parameter.detach().clone()
        state = {name: value.clone() for name, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
        way = ByFormula(optimizer)
        way.save()
        gradient = parameter.grad.clone()
        optimizer.step()
        assert not torch.equal(parameter, before)
        parameter.grad = gradient
        way.undo()
        torch.testing.assert_close(parameter.detach(), before, rtol=1e-12, atol=1e-14)
        found = {name: value for name, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
        torch.testing.assert_close(found, state, rtol=1e-12, atol=1e-14)
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_maximizes_and_is_undone(kind: Any) -> None:
    parameter = with_gradient(1.0, -2.0, dtype=torch.float64)
    optimizer = kind([parameter], lr=0.1, weight_decay=0.2, maximize=True)
    for _ in range(3):
        before = parameter.detach().clone()
        way = ByFormula(optimizer)
        way.save()
        optimizer.step()
        way.undo()
        torch.testing.assert_close(parameter.detach(), before, rtol=1e-12, atol=1e-14)
        optimizer.step()


def test_a_report_has_the_times_of_passes_waits_and_the_peak() -> None:
    """In 100 ns, passes take 60, of which two overlap; each of three waits counts for the rank that sent the message."""
    schedule = zb.make("1f1b", 3, 4)
    spans = [(Op(Kind.F, 1, 0), 0, 10), (Op(Kind.F, 1, 1), 10, 30), (Op(Kind.F, 1, 2), 30, 50), (Op(Kind.B, 1, 0), 30, 50)]
    spans += [(Op(Kind.B, 1, 1), 90, 100)]
    kind = ValueKind.ACTIVATION
    waits = [(Doing.WAIT, Value(kind, 0, 0), 0, 3), (Doing.WAIT, Value(kind, 2, 1), 3, 7), (Doing.WAIT, Value(kind, 0, 1), 7, 8)]
    others = [(doing, Value(kind, 0, 2), 0, 50) for doing in Doing if doing is not Doing.WAIT]
    found = telemetry._report_of(3, 100e-9, 1.5, None, {"size": 2.0}, Records(spans, [(0, 5), (1, 9), (2, 4)], [*waits, *others]), schedule)
    assert (found.step, found.seconds, found.loss, found.mfu, found.added_losses) == (3, 100e-9, 1.5, None, {"size": 2.0})
    assert found.bubble == pytest.approx(0.4)
    assert found.passes == {"1F": 15e-9, "1B": 10e-9}
    assert {rank: round(seconds * 1e9) for rank, seconds in found.waits.items()} == {0: 4, 2: 4}
    assert found.peak_bytes == 9
    assert telemetry._report_of(0, 1.0, 0.0, 0.5, {}, Records([]), schedule).peak_bytes is None


def test_numbers_of_a_report_are_named() -> None:
    report = zb.hooks.StepReport(2, 0.5, 0.25, 1.5, None, {"size": 2.0}, {"0F": 0.001}, {3: 0.01}, 7)
    found = step_recorder.scalars_of(report)
    assert found == {
        **{"seconds": 0.5, "bubble": 0.25, "loss": 1.5, "peak_bytes": 7.0, "loss/size": 2.0},
        **{"pass_seconds/0F": 0.001, "waits_for_rank/3": 0.01},
    }
    written: list[tuple[str, float, int]] = []
    writer = SimpleNamespace(add_scalar=lambda *given: written.append(given))
    hook: Any = zb.hooks.write_scalars(writer)
    hook.report(report)
    assert written == [
        ("pipeline/seconds", 0.5, 2),
        ("pipeline/bubble", 0.25, 2),
        ("pipeline/loss", 1.5, 2),
        ("pipeline/loss/size", 2.0, 2),
    ]


def test_one_step_in_so_many_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("a log of steps")
    hook: Any = zb.hooks.log_steps(logger, every=3)
    hook.on_attach(mock.Mock(rank=2))
    with caplog.at_level(logging.INFO, logger.name):
        for step in range(7):
            hook.report(zb.hooks.StepReport(step, 0.5, 0.25, 1.5, 0.375 if step == 3 else None))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in lines] == ["rank 2, step 0", "rank 2, step 3", "rank 2, step 6"]
    assert ["MFU" in line for line in lines] == [False, True, False]
    states(lines[1], "1.5000", "500.0", "37.50")


def test_telemetry_names_what_takes_its_reports() -> None:
    assert repr(zb.hooks.Telemetry(print)) == "<Telemetry to on_step>"
    assert repr(zb.hooks.Telemetry(folder="runs")) == "<Telemetry to folder 'runs'>"
    assert repr(zb.hooks.Telemetry(print, folder="runs")) == "<Telemetry to on_step, folder 'runs'>"


def test_operations_are_counted_once_for_each_shape() -> None:
    plain, counting = (zb.hooks.Telemetry(print, peak_flops=peak) for peak in (None, 1e12))
    for hook, memo, expected in ((plain, {}, 0), (counting, {}, 1), (counting, {"flops": 5}, 0)):
        step: Any = mock.Mock(number=1, memo=memo, measures_memory=False)
        hook.on_step_begin(step)
        assert step.run_passes_in.call_count == expected


def test_a_line_that_was_cut_off_stays_by_itself(tmp_path: Path) -> None:
    schedule = zb.make("1f1b", 1, 2)
    found = []
    for before in (b"", b"{}\n", b'{}\n{"cut'):
        log = tmp_path / log_name(0)
        log.write_bytes(before)
        step_recorder.FolderKeeper(tmp_path, 0, 1, schedule, None).close(None)
        text = log.read_bytes()
        assert text.startswith(before)
        found.append(text[len(before) :].decode().split("\n"))
    assert [lines[0] == "" for lines in found] == [False, False, True]
    assert all(json.loads(lines[-2]) for lines in found)


def test_details_take_turns_in_so_many_files(tmp_path: Path) -> None:
    schedule = zb.make("1f1b", 1, 2)
    keeper = step_recorder.FolderKeeper(tmp_path, 0, 1, schedule, None)
    for step in range(NUM_DETAILS + 1):
        report = zb.hooks.StepReport(step, 1.0, 0.5, 1.0, None)
        keeper.keep([step_recorder.Recorded(report, schedule, Records([(Op(Kind.F, 0, 0), 1, 2)]), 0.0)], 0)
    keeper.close(None)
    numbers = [json.loads((tmp_path / detail_name(0, number)).read_text())["step"] for number in range(NUM_DETAILS)]
    assert numbers == [NUM_DETAILS, *range(1, NUM_DETAILS)]


def test_steps_beyond_the_most_that_wait_are_left_out() -> None:
    heard: list[tuple[int, int]] = []
    keeper: Any = SimpleNamespace(keep=lambda steps, left_out: heard.append((len(steps), left_out)), close=lambda failure: None)
    recorder = step_recorder.StepRecorder([keeper])
    recorder.close(None)
    with mock.patch.object(step_recorder, "MOST_WAITING", 3):
        for _ in range(5):
            recorder.put(lambda: None)  # type: ignore[arg-type,return-value]
    assert (len(recorder._waiting), recorder._num_refused) == (3, 2)
    recorder._write(recorder._num_refused)
    recorder._write(7)
    assert heard == [(3, 2)]


def test_replicas_name_a_parameter_by_its_stage_first() -> None:
    shared = nn.Linear(2, 2)
    hook = replicas.Replicas.__new__(replicas.Replicas)
    hook._modules = {0: nn.Sequential(shared), 3: nn.Sequential(nn.Tanh(), shared), 5: nn.Sequential(nn.Linear(2, 2))}
    states(hook._name_of(3, shared.weight), "'1.weight'", "stage 3")
    states(hook._name_of(0, shared.bias), "'0.bias'", "stage 0")
    states(hook._name_of(5, shared.bias), "'0.bias'", "stage 0")
    states(hook._name_of(3, hook._modules[5].get_parameter("0.weight")), "'0.weight'", "stage 5")


def test_buckets_are_of_one_type_and_a_sum_counts_who_has_a_gradient() -> None:
    sizes = [(1, torch.float32), (1, torch.float64), (9, torch.float32), (1, torch.float64), (1, torch.float32)]
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in sizes]
    found = replicas._buckets(parameters, None, most=16)
    assert [[id(parameters[i]) for i in bucket] for bucket in ([0], [1, 3], [2], [4])] == [list(map(id, bucket)) for bucket in found]
    assert [len(bucket) for bucket in replicas._buckets(parameters, torch.float64, most=16)] == [2, 1, 2]
    flat = replicas._flat(parameters[:1] + parameters[4:], [torch.tensor([3.0]), None], None)
    assert flat.tolist() == [3.0, 0.0, 1.0, 0.0]
    assert replicas._flat(parameters[:1], [torch.tensor([3.0])], torch.float64).dtype == torch.float64
    there, absent = with_gradient(1.0, 2.0), nn.Parameter(torch.zeros(2))
    hook = replicas.Replicas.__new__(replicas.Replicas)
    hook._gradients = IN_GRAD
    third = nn.Parameter(torch.zeros(1))
    hook._scatter([there, absent, third], torch.tensor([5.0, 6.0, 7.0, 8.0, 9.0, 2.0, 1.0, 0.0]))
    assert there.grad is not None
    assert absent.grad is not None
    assert (there.grad.tolist(), absent.grad.tolist(), third.grad) == ([5.0, 6.0], [7.0, 8.0], None)


def test_earlier_gradients_are_set_aside_and_added() -> None:
    module = nn.ParameterList(
        [with_gradient(1.0), with_gradient(2.0), nn.Parameter(torch.zeros(1)), with_gradient(4.0).requires_grad_(False)]
    )
    earlier = replicas.EarlierGradients(lambda: module[:3], IN_GRAD)
    earlier.on_step_begin(mock.Mock())
    assert [parameter.grad is None for parameter in module] == [True, True, True, False]
    module[1].grad, module[2].grad = torch.tensor([20.0]), torch.tensor([30.0])
    earlier.give_back()
    earlier.give_back()
    assert [parameter.grad.item() for parameter in module] == [1.0, 22.0, 30.0, 4.0]


def test_faults_of_tied_groups_are_named() -> None:
    names = [(0, "a"), [3, "b"]]
    assert read_tied([names], 4) == ((ParameterName(0, "a"), ParameterName(3, "b")),)
    for wrong in ([(0, "a")], [], "ab", [(0, "a"), (1, 2)], [(0, "a"), ("1", "b")], [(0, "a"), (1, "b"), (2,)], [(0, "a"), (1, "b", 2)]):
        with pytest.raises(zb.InputError):
            read_tied([wrong], 4)  # type: ignore[list-item]
    for stage in (4, -1):
        with raises(zb.InputError, stage, 3):
            read_tied([[(0, "a"), (stage, "b")]], 4)
    with raises(zb.InputError, "(0, 'a')"):
        read_tied([[(0, "a"), (0, "a")]], 4)


def test_a_model_that_ties_stages_of_other_ranks_has_to_say_so() -> None:
    module = nn.Linear(2, 2)
    refuse_forgotten({0: module, 1: nn.Linear(2, 2)})
    module.tied_in_the_model = [[(0, "weight"), (1, "weight")]]  # type: ignore[assignment]
    refuse_forgotten({0: module, 1: nn.Linear(2, 2)})
    with raises(zb.InputError, name="weight", stage=0, other="weight", other_stage=1):
        refuse_forgotten({0: module})


def test_copies_of_a_stage_share_all_parameters_and_begin_as_the_first_route() -> None:
    infos = [parameter_infos({0: nn.Linear(2, 3), 1: nn.Linear(3, 2)}), parameter_infos({1: nn.Linear(3, 2), 0: nn.Linear(2, 3)})]
    groups = shared_groups((), infos, {0: (1, 0), 1: (0, 1)})
    assert [group.stages for group in groups] == [{0: {1}, 1: {1}}, {1: {0}, 0: {0}}]
    assert [[shared.counted_name for shared in group.parameters] for group in groups] == [
        [ParameterName(1, "weight"), ParameterName(1, "bias")],
        [ParameterName(0, "weight"), ParameterName(0, "bias")],
    ]
    assert [[shared.source.rank for shared in group.parameters] for group in groups] == [[0, 0], [1, 1]]
    assert shared_groups((), infos, {}) == []
    only_first = shared_groups((), infos, {0: (0, 1)})
    assert [[shared.counted_name.stage for shared in group.parameters] for group in only_first] == [[0, 0]]


def test_tied_modules_are_tied_parameter_by_parameter() -> None:
    infos = [parameter_infos({0: nn.Sequential(nn.Linear(2, 2))}), parameter_infos({1: nn.Sequential(nn.Tanh(), nn.Linear(2, 2))})]
    (group,) = shared_groups(read_tied([[(0, "0"), (1, "1")]], 2), infos, {})
    assert group.ranks == (1, 0)
    assert [{rank: names[0].name for rank, names in shared.names.items()} for shared in group.parameters] == [
        {1: "1.weight", 0: "0.weight"},
        {1: "1.bias", 0: "0.bias"},
    ]
    for other, pair in ((nn.Linear(2, 3), [(0, "0"), (1, "1")]), (nn.Linear(2, 2, bias=False), [(0, "0"), (1, "1")])):
        with pytest.raises(zb.InputError):
            shared_groups(read_tied([pair], 2), [infos[0], parameter_infos({1: nn.Sequential(nn.Tanh(), other)})], {})
    with pytest.raises(zb.InputError):
        shared_groups(read_tied([[(0, "0"), (1, "none")]], 2), infos, {})


@pytest.mark.parametrize("change", ["none", "in place", "replaced", "without version", "later", "another"])
def test_buffers_of_copied_stages_may_not_change(change: str) -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    module.register_buffer("table", torch.zeros(2), persistent=False)
    module.register_buffer("nothing", None)
    norm = module[0]
    watch = ChangedCopies({3: module}, [3], {})
    watch.look("step")
    if change == "later":
        watch.refuse_changed()
        watch.look("step")
    if change in ("in place", "later"):
        norm.running_mean.add_(1)
    elif change == "replaced":
        norm.running_mean = norm.running_mean.clone()
    elif change == "without version":
        with torch.autograd._unsafe_preserve_version_counter(norm.running_mean):
            norm.running_mean.add_(1)
    elif change == "another":
        module.table.add_(1)
    if change in ("none", "another"):
        watch.refuse_changed()
    else:
        with raises(zb.InputError, "0.running_mean", "stage 3"):
            watch.refuse_changed()


@pytest.mark.parametrize("change", ["none", "in place", "data in place", "data", "later", "in an evaluation"])
def test_parameters_with_copies_may_not_change(change: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    weight, other = module[1].weight, module[0].weight
    watch = ChangedCopies({3: module}, [], {weight: "rank 5 holds a copy"})
    watch.look("step")
    if change == "later":
        watch.refuse_changed()
        watch.look("step")
    with torch.no_grad():
        other.add_(1)
        if change in ("in place", "later"):
            weight.add_(1)
    if change == "data in place":
        weight.data[0, 1] += 1
    elif change == "data":
        weight.data = weight.data + 1
    if change in ("none", "in an evaluation"):
        watch.refuse_changed()
        with watch.unchanged():
            pass
    if change != "none":
        with raises(zb.InputError, "'1.weight'", "stage 3", "rank 5"):
            if change != "in an evaluation":
                watch.refuse_changed()
            with watch.unchanged():
                weight.detach().mul_(2)


def test_parameters_of_two_stages_are_watched() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    replicas = cast(Any, SimpleNamespace(why_shared=lambda: {one.bias: "rank 5 is its replica"}))
    shared = cast(Any, SimpleNamespace(why_shared=dict, copied_stages=[]))
    watch = watched_copies({0: one, 3: other}, shared, replicas)
    for tensor in (one.weight, one.bias):
        watch.look("step")
        tensor.detach().add_(1)
        with raises(zb.InputError, "stage 0"):
            watch.refuse_changed()
    watch.look("step")
    other.bias.detach().add_(1)
    watch.refuse_changed()
    assert not watched_copies({0: nn.Linear(2, 2)}, shared, None).is_needed


def test_work_is_offered_a_share_of_the_least_idle_time_seen() -> None:
    offered: list[float] = []
    schedule, costs = zb.make("1f1b", 2, 4), zb.Costs.from_ms([10, 10], [10, 10], [10, 10])
    hook = bubble_work.BubbleWork(lambda bubble: offered.append(bubble.seconds), costs, share=0.5, least=0.002)
    pipeline: Any = SimpleNamespace(rank=1, device=torch.device("cpu"), schedule=schedule)
    hook.on_attach(pipeline)
    number = min(hook._windows)
    length = hook._windows[number].duration / 1e9
    hook.before_step_of_row(number)
    hook._idle[number].append(length / 2)
    hook.before_step_of_row(number)
    hook._idle[number].append(0.003)
    hook.before_step_of_row(number)
    hook.before_step_of_row(max(hook._windows) + 1)
    assert offered == [length / 2, length / 4]
    assert hook.offered == sum(offered)
