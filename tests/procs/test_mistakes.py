"""Mistakes of a first program, made on two ranks: the last line of torchrun's report names the rank, the fault and the remedy.

Calls of `nn.Module` on a pipeline leave it open.
"""

from __future__ import annotations

import copy
import io
import json
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zerobubble as zb
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.refusals import Stated, states
from zerobubble.error_reports import error_file, uncaught
from zerobubble.errors import InputError

M = 4
Mistake = Callable[[zb.Pipeline], Any]

ON_ONE_PIPELINE: list[tuple[Mistake, Stated]] = [
    (lambda pipe: pipe(*batch(M)), ("pipe.step", "pipe.eval_step")),  # type: ignore[operator]
    (lambda pipe: pipe.forward(*batch(M)), ("forward", "pipe.step")),
    (lambda pipe: pipe.train(), ("train", "pipe.step", "pipe.modules.values")),
    (lambda pipe: pipe.eval(), ("eval", "pipe.eval_step")),
    (lambda pipe: pipe.to("cpu"), ("to", "zb.Pipeline", "device=")),
    (lambda pipe: pipe.cuda(), ("cuda", "zb.Pipeline", "device=")),
    (lambda pipe: pipe.half(), ("half", "zb.split", "torch.autocast")),
    (lambda pipe: pipe.zero_grad(), ("zero_grad", "optimizer.zero_grad")),
    (lambda pipe: pipe.backward(), ("backward", "pipe.step")),
    (lambda pipe: pipe.named_parameters(), ("named_parameters", "pipe.modules.values")),
    (lambda pipe: pipe.modules(), ("pipe.modules", "pipe.modules.values")),
    (lambda pipe: pipe.evalstep(), ("evalstep", "'eval_step'")),
    (lambda pipe: pipe.no_such_thing, ("no_such_thing", "help(zb.Pipeline)")),
    (lambda pipe: pipe.state_dict(), ("state_dict", "zb.save")),
    (lambda pipe: pipe.module, ("module", "zb.gathered")),
    (copy.deepcopy, ("Pipeline", "zb.split")),
    (lambda pipe: torch.save(pipe, io.BytesIO()), ("Pipeline", "zb.save")),
    (zb.gathered, ("Pipeline", "zb.split")),  # type: ignore[list-item]
    (lambda pipe: list(pipe), ("pipe.parameters", "pipe.modules")),  # type: ignore[call-overload]
    (lambda pipe: torch.optim.SGD(pipe, lr=0.1), ("pipe.parameters",)),  # type: ignore[arg-type]
    (lambda pipe: torch.optim.SGD(pipe.parameters, lr=0.1), ("pipe.parameters()",)),  # type: ignore[arg-type]
    (lambda pipe: nn.utils.clip_grad_norm_(pipe.parameters, 1.0), ("pipe.parameters()",)),  # type: ignore[arg-type]
    (lambda pipe: nn.parallel.DistributedDataParallel(pipe), ("zb.Pipeline", "mesh=")),  # type: ignore[arg-type]
    (lambda pipe: pipe.step(*batch(M)).backward(), ("pipe.step", ".grad")),
    (lambda pipe: (pipe.step(*batch(M)) / 2).backward(), ("pipe.step", ".grad")),
    (lambda pipe: torch.autograd.backward([pipe.step(*batch(M))]), ("pipe.step", ".grad")),
    (lambda pipe: nn.utils.clip_grad_norm_(pipe.parameters(), 1.0), ("pipe.clip_grad_norm_",)),
    (lambda pipe: setattr(pipe, "loss_fn", nn.functional.l1_loss), ("loss_fn",)),
    (lambda pipe: setattr(pipe, "num_microbatches", 2), ("num_microbatches", "pipe.step")),
    (lambda pipe: setattr(pipe, "schedule", "1f1b"), ("schedule",)),
    (lambda pipe: setattr(pipe, "modules", {}), ("modules",)),
    (lambda pipe: pipe.step(batch(M)[0], labels=batch(M)[1]), ("labels", "targets")),
    (lambda pipe: pipe.step(*(part[:3] for part in batch(M))), (3, M, "num_microbatches=3")),
]


def reported(group: Any, mistakes: list[Mistake], folder: Path, pipe: zb.Pipeline) -> list[tuple[str, str]]:
    """The kind of error of each mistake, and the last line of the report of this rank."""
    path = folder / f"error{pipe.rank}"
    found = []
    environment = {"RANK": str(pipe.rank), "TORCHELASTIC_ERROR_FILE": str(path)}
    with mock.patch.dict(os.environ, environment), mock.patch.object(sys, "stderr"):
        for mistake in mistakes:
            error_file.forget_error_file()
            try:
                mistake(pipe)
            except Exception as error:
                uncaught._show(type(error), error, error.__traceback__)
                report = json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"]
                kinds = [kind.__name__ for kind in (InputError, AttributeError) if isinstance(error, kind)]
                found.append((" ".join(kinds) or type(error).__name__, report.splitlines()[-1]))
            else:
                found.append(("", ""))
        error_file.forget_error_file()
    return found


def compile_pipeline(group: Any, folder: Path) -> list[tuple[str, str]]:
    with zb.Pipeline(build, "zb-h1", M, loss_fn, group=group) as pipe:
        return reported(group, [torch.compile], folder, pipe)


@pytest.mark.long
def test_a_pipeline_is_not_compiled(world: Ranks, tmp_path: Path) -> None:
    for ((kind, last),) in world.run(compile_pipeline, tmp_path, ranks=2):
        assert kind == "InputError"
        states(last, "torch.compile", "zb.Pipeline", "split=")


def make_mistakes(group: Any, folder: Path) -> tuple[list[tuple[str, str]], bool, float]:
    with zb.Pipeline(build, "zb-h1", M, loss_fn, group=group) as pipe:
        found = reported(group, [mistake for mistake, _ in ON_ONE_PIPELINE], folder, pipe)
        return found, hasattr(pipe, "train"), pipe.step(*batch(M)).item()


def test_each_mistake_is_one_sentence_and_the_pipeline_goes_on(world: Ranks, tmp_path: Path) -> None:
    for rank, (found, seems_a_module, loss) in enumerate(world.run(make_mistakes, tmp_path, ranks=2)):
        assert not seems_a_module
        assert loss > 0
        for (kind, last), (_, stated) in zip(found, ON_ONE_PIPELINE, strict=True):
            assert kind.startswith("InputError"), (stated, last)
            assert last.startswith(f"rank {rank}: "), last
            assert last.endswith(")"), last
            assert f"({__file__}:" in last, last
            states(last, *stated)


def read_none(group: Any, folder: Path) -> list[tuple[str, str]]:
    with zb.Pipeline(build, "zb-h1", M, loss_fn, group=group) as pipe:
        uses: list[Mistake] = [lambda pipe: pipe.eval_step(batch(M)[0])[0].item(), lambda pipe: pipe.eval_step(batch(M)[0])[1].argmax(-1)]
        return reported(group, uses, folder, pipe)


def test_a_result_that_a_rank_does_not_have_says_who_has_it(world: Ranks, tmp_path: Path) -> None:
    first, last = world.run(read_none, tmp_path, ranks=2)
    for kind, line in (*first, last[0]):
        assert kind == "AttributeError"
        states(line, "NoneType", "eval_step")
    assert last[1] == ("", "")


def scale_gradients(group: Any, folder: Path) -> list[tuple[str, str]]:
    """Scales the gradients of a whole model by hand, before the first step of an optimizer."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    x = torch.rand(2 * M, 3)
    with zb.Pipeline(zb.split(model, example=x[:2]), "1f1b", M, nn.functional.mse_loss, group=group) as pipe:
        pipe.step(x, x)
        uses: list[Mistake] = [
            lambda _: [parameter.grad.mul_(2) for parameter in model.parameters()],
            lambda _: [2 * parameter.grad for parameter in model.parameters()],
            lambda pipe: [parameter.grad.mul_(2) for parameter in pipe.parameters()],
        ]
        return reported(group, uses, folder, pipe)


def test_a_missing_gradient_says_whose_parameters_to_take(world: Ranks, tmp_path: Path) -> None:
    for *found, right in world.run(scale_gradients, tmp_path, ranks=2):
        for kind, line in found:
            assert kind == "InputError"
            states(line, ".weight", "pipe.parameters()")
        assert right == ("", "")


class Paired(nn.Module):
    """Returns its output in a tuple or a dict, as many models do."""

    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(5, 5), form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(self.linear(x))


def in_a_dict(output: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"logits": output}


def in_a_tuple(output: torch.Tensor) -> tuple[torch.Tensor, None]:
    return output, None


def last_in(form: Callable[[torch.Tensor], Any]) -> Callable[[int, int], nn.Module]:
    return lambda stage, num_stages: Paired(form) if stage == num_stages - 1 else nn.Linear(5, 5)


def one_stage(stage: int, num_stages: int) -> nn.Module:
    return [nn.Linear(5, 5)][stage]


def linear(stage: int, num_stages: int) -> nn.Module:
    return nn.Linear(5, 5)


def no_schedule(ranks: int, microbatches: int) -> zb.Schedule:
    return zb.make("1f1b", ranks, microbatches, stages_per_rank=microbatches.stages)  # type: ignore[attr-defined]


MSE = nn.functional.mse_loss
PROGRAMS: list[tuple[dict[str, Any], torch.dtype, Stated]] = [
    ({"loss_fn": nn.MSELoss(reduction="sum")}, torch.float32, ("loss_fn", "'sum'", "'mean'", "scale='none'")),
    ({"loss_fn": partial(MSE, reduction="sum")}, torch.float32, ("loss_fn", "'sum'", "'mean'")),
    ({"loss_fn": nn.MSELoss(reduction="none")}, torch.float32, ("loss_fn", "'none'", "'mean'")),
    ({"build_or_modules": one_stage}, torch.float32, ("rank 1", "IndexError", "build(1, 2)")),
    ({"schedule": no_schedule}, torch.float32, ("AttributeError", "no_schedule(2, 4)")),
    ({}, torch.float16, ("microbatch 0", "float16", "float32", "torch.autocast")),
    ({"build_or_modules": last_in(in_a_dict)}, torch.float32, ("rank 1", "microbatch 0", "output['logits']")),
    ({"build_or_modules": last_in(in_a_tuple)}, torch.float32, ("rank 1", "microbatch 0", "output[0]")),
]


def last_line_of_a_program(group: Any, folder: Path, number: int) -> str:
    wrong, dtype, _ = PROGRAMS[number]
    path = folder / f"error{group.rank()}"
    arguments = {"build_or_modules": linear, "schedule": "1f1b", "num_microbatches": M, "loss_fn": MSE, "group": group} | wrong
    environment = {"RANK": str(group.rank()), "TORCHELASTIC_ERROR_FILE": str(path)}
    with mock.patch.dict(os.environ, environment), mock.patch.object(sys, "stderr"):
        error_file.forget_error_file()
        with pytest.raises(zb.ZeroBubbleError) as caught, zb.Pipeline(**arguments) as pipe:
            pipe.step(torch.rand(8, 5, dtype=dtype), torch.rand(8, 5))
        uncaught._show(type(caught.value), caught.value, caught.value.__traceback__)
        return str(json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"].splitlines()[-1])


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_the_last_line_of_a_wrong_program_names_cause_and_remedy(world: Ranks, tmp_path: Path, number: int) -> None:
    for line in world.run(last_line_of_a_program, tmp_path, number, ranks=2):
        states(line, *PROGRAMS[number][2])


def test_a_sum_over_samples_is_right_with_its_scale(world: Ranks) -> None:
    assert all(world.run(step_of_sums, ranks=2))


def step_of_sums(group: Any) -> bool:
    inputs, targets = torch.ones(8, 5), torch.zeros(8, 5)
    losses = []
    for loss, scale in ((nn.MSELoss(reduction="sum"), "none"), (MSE, "loss")):
        with zb.Pipeline(linear, "1f1b", M, loss, scale=scale, group=group) as pipe:
            losses.append(pipe.step(inputs, targets).item())
    return losses[0] == pytest.approx(losses[1] * targets.numel())


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("Torch not compiled with CUDA enabled", ("device='cuda'", "pip")),
        ("Distributed package doesn't have NCCL built in", ("torch.distributed.init_process_group", "'gloo'")),
        ("Unknown backend type glo", ("torch.distributed.init_process_group", "'gloo'")),
    ],
)
def test_errors_of_torch_in_the_first_lines_of_a_program_get_a_remedy(tmp_path: Path, text: str, stated: Stated) -> None:
    path = tmp_path / "error"
    environment = {"RANK": "0", "TORCHELASTIC_ERROR_FILE": str(path)}
    with mock.patch.dict(os.environ, environment), mock.patch.object(uncaught, "_previous", [lambda *error: None]):
        error_file.forget_error_file()
        uncaught._show(RuntimeError, RuntimeError(text), None)
        last = json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"].splitlines()[-1]
        error_file.forget_error_file()
    states(last, "rank 0", *stated, foreign=text)


def warned_of_batches(group: Any, seed: int, last_rank_only: bool) -> list[str]:
    torch.manual_seed(seed * group.rank())
    inputs, targets = torch.rand(8, 5), torch.rand(8, 5)
    with zb.Pipeline(linear, "1f1b", M, MSE, group=group) as pipe, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            pipe.step(inputs, None if last_rank_only and pipe.rank == 0 else targets)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(("seed", "last_rank_only", "are_warned"), [(1, False, [0, 1]), (0, False, [0, 0]), (1, True, [0, 0])])
def test_batches_that_differ_between_ranks_are_noticed_once(world: Ranks, seed: int, last_rank_only: bool, are_warned: list[int]) -> None:
    """Inputs come from the rank of the first stage and targets from that of the last one, which a DistributedSampler gives others."""
    found = world.run(warned_of_batches, seed, last_rank_only, ranks=2)
    assert list(map(len, found)) == are_warned
    for message in found[1]:
        states(message, "rank 0", "rank 1", "DistributedSampler", "None")
