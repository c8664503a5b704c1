"""Wrong arguments of `Pipeline` raise the same `InputError` on every rank; a plan can be passed as a schedule.

The error names the value and the remedy.
"""

from __future__ import annotations

import traceback
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerobubble as zb
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.refusals import raises, states
from zerobubble.partition import Layer

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"loss_fn": None}, "loss_fn must be a function (output, target) that gives the mean loss of a microbatch, got None"),
    ({"num_microbatches": "4"}, "num_microbatches must be a whole number of microbatches from 1 to 10000, got '4': write 4 without quotes"),
    ({"num_microbatches": 0}, "num_microbatches must be a whole number of microbatches from 1 to 10000, got 0"),
    ({"num_microbatches": 4.0}, "num_microbatches must be a whole number of microbatches from 1 to 10000, got 4.0"),
    ({"schedule": 7}, "schedule must be a name or a Schedule or a Plan or"),
    ({"schedule": "1f1"}, "there is no schedule '1f1': did you mean '1f1b'?"),
    ({"schedule": zb.make("1f1b", 3, 4)}, "schedule '1f1b' is for 3 ranks, but the pipeline has 2"),
    (
        {"build_or_modules": 7},
        "build_or_modules must be a function (stage_index, num_stages) -> nn.Module or the modules of this rank, got 7",
    ),
    ({"loss_weight": 0.5}, "loss_weight must be a function (target) that gives the weight of a microbatch, or None, got 0.5"),
    ({"on_loss": "print"}, "on_loss must be a function (microbatch, loss), or None, got 'print'"),
    ({"timeout": "30"}, "timeout must be a number of seconds from 0.1 to 1000000, got '30': write 30 without quotes"),
    ({"timeout": -1}, "timeout must be a number of seconds from 0.1 to 1000000, got -1"),
    ({"pace": (1, 1, 1)}, "pace must be Costs, or None, got (1, 1, 1): Costs.uniform(num_stages, times=(F, B, W))"),
    ({"split": True}, "split must be a str or a Mapping, got True"),
    ({"hooks": print}, "hooks must be a list or tuple of hooks, got a builtin_function_or_method"),
    ({"main_grad": "float32"}, "main_grad must be a dtype, or None, got 'float32'"),
    ({"overlap": True}, "overlap must be a function (first, second) that runs both passes, or None, got True"),
    ({"tied": 3}, "tied must be a list of groups such as [(0, 'tok.weight'), (3, 'head.weight')], got 3"),
    ({"cuda_graphs": "yes"}, "cuda_graphs must be a bool or 'step', got 'yes'"),
    ({"order_by": np.ones(4)}, "order_by must be 'tokens' or a function (microbatch)"),
    ({"batch_dims": {"mask": -1}}, "batch_dims must be dimensions by name such as {'position_ids': 1, 'mask': None}"),
    ({"loss_fn": nn.MSELoss}, "got the class MSELoss: give an instance, MSELoss()"),
    ({"loss_fn": lambda output: output}, "got a function: this one takes (output)"),
    ({"build_or_modules": lambda: nn.Linear(4, 4)}, "got a function: this one takes ()"),
    ({"build_or_modules": [nn.LazyLinear(4)]}, "'weight' of LazyLinear is not initialized"),
    ({"build_or_modules": nn.ReLU}, "got the class ReLU: this one takes (inplace)"),
    ({"on_loss": lambda loss: None}, "got a function: this one takes (loss)"),
    ({"loss_fn": None, "timeout": None}, "got None; timeout must be a number of seconds from 0.1 to 1000000, got None"),
]


def wrong(group: Any) -> list[str]:
    seen = []
    for changed, _ in WRONG:
        options = {"build_or_modules": build, "schedule": "1f1b", "num_microbatches": 4, "loss_fn": loss_fn} | changed
        with pytest.raises(zb.InputError) as caught:
            zb.Pipeline(**options, group=group)
        seen.append(str(caught.value))
    return seen


def test_each_wrong_argument_is_reported_with_its_value(world: Ranks) -> None:
    for result in world.run(wrong, ranks=2):
        for text, (_, message) in zip(result, WRONG, strict=True):
            assert message in text
            assert "\n" not in text
            assert text.startswith("all ranks: ")


def load_weights(stage: int) -> nn.Module:
    raise FileNotFoundError(f"weights-{stage}.pt")


def build_that_raises(group: Any) -> tuple[str, str, list[str]]:
    def build_or_raise(stage: int, num_stages: int) -> nn.Module:
        return load_weights(stage) if stage == 1 else build(stage, num_stages)

    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build_or_raise, "1f1b", 4, loss_fn, group=group)
    cause = caught.value.__cause__
    frames = [] if cause is None else [frame.name for frame in traceback.extract_tb(cause.__traceback__)]
    return str(caught.value), type(cause).__name__, frames


def test_an_error_of_build_keeps_its_traceback_and_names_its_line_on_all_ranks(world: Ranks) -> None:
    first, second = world.run(build_that_raises, ranks=2)
    line = load_weights.__code__.co_firstlineno + 1
    for text, _, _ in (first, second):
        states(text, "rank 1", "FileNotFoundError", f"{__file__}:{line}", foreign="weights-1.pt")
    assert first[1:] == ("NoneType", [])
    assert second[1] == "FileNotFoundError"
    assert second[2] == ["build_or_raise", "load_weights"]


def whole_model(group: Any) -> str:
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "zb-v", 4, loss_fn, group=group)
    return str(caught.value)


def test_a_whole_model_in_place_of_stages_is_sent_to_split(world: Ranks) -> None:
    for text in world.run(whole_model, ranks=2):
        states(text, "rank 0", "rank 1", "zb-v", "1 module", "zb.split(model)")


def two(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def uncut_outcomes(group: Any) -> list[str | int]:
    """For each way to pass modules: the argument that the error names, or the number of warnings."""
    rank, outcomes = dist.get_rank(group), []
    shared, x = two(0), torch.rand(4, 4)
    ways = {
        "one model": (two(0), "1f1b"),
        "one layer": (two(0)[0], "1f1b"),
        "a list with it": ([two(0)], "1f1b"),
        "all layers on each rank": (list(two(0)), "zb-v"),
        "a function that returns it": (lambda *_: shared, "1f1b"),
        "stages of equal seeds": (lambda *_: two(0), "zb-v"),
        "other seeds": (two(rank), "1f1b"),
        "a function": (lambda stage, _: nn.Linear(4, 4), "1f1b"),
        "a norm": (nn.LayerNorm(4), "1f1b"),
        "copies": ([two(0), two(1)], "dualpipe"),
    }
    for modules, schedule in ways.values():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with zb.Pipeline(modules, schedule, 4, nn.functional.mse_loss, group=group) as pipe:
                    pipe.step(x, x)
                outcomes.append(sum(entry.filename == __file__ and "zb.split(model)" in str(entry.message) for entry in caught))
            except zb.InputError as error:
                states(error, "zb.split(model)")
                outcomes.append(error.fields["argument"])
    return outcomes


def test_a_whole_model_on_every_rank_is_refused_or_warned_of_once(world: Ranks) -> None:
    refused = ["build_or_modules"] * 4
    assert world.run(uncut_outcomes, ranks=2) == [[*refused, 1, 1, 0, 0, 0, 0], [*refused, 0, 0, 0, 0, 0, 0]]


def wrong_on_one_rank(group: Any) -> str:
    timeout = None if dist.get_rank(group) else 30
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, "1f1b", 4, loss_fn, group=group, timeout=timeout)
    return str(caught.value)


def test_an_error_on_one_rank_is_reported_on_all(world: Ranks) -> None:
    for text in world.run(wrong_on_one_rank, ranks=2):
        states(text, "rank 1", "0.1", 1000000, "None")


def test_without_a_process_group_the_remedy_is_reported() -> None:
    with raises(zb.InputError, "1f1c", "1f1b", "torch.distributed.init_process_group"):
        zb.Pipeline(build, "1f1c", 4, loss_fn)


def of_a_plan(group: Any) -> list[tuple[str, float]]:
    work = zb.Workload.uniform(2, (10, 10, 8))
    found = zb.plan(work, 4, memory=2, placements="vee", seconds=0)
    layers = zb.plan([Layer(3, 3, 2, 1, 1)] * 8, 4, placements=zb.Placement.vee(2), seconds=0)
    losses = []
    for given in (found, found.choices[0].plan, layers, found.schedule):
        torch.manual_seed(0)
        with zb.Pipeline(build, given, 4, loss_fn, group=group) as pipe:
            losses.append((pipe.schedule.placement.name, float(pipe.step(*batch(8)))))
    return losses


@pytest.mark.long
def test_a_plan_is_played_as_the_schedule_that_it_found(world: Ranks) -> None:
    for losses in world.run(of_a_plan, ranks=2):
        assert {name for name, _ in losses} == {"vee"}
        assert len({loss for _, loss in losses}) == 1


def of_an_empty_plan(group: Any) -> str:
    found = zb.plan(zb.Workload.uniform(2, (10, 10, 8)), 4, memory=0.1, seconds=0)
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, found, 4, loss_fn, group=group)
    return str(caught.value)


def test_a_plan_without_a_schedule_is_refused(world: Ranks) -> None:
    for text in world.run(of_an_empty_plan, ranks=2):
        states(text, "0.1", "schedule", "rank")
