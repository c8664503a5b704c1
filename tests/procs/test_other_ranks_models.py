"""Ranks with different models, and models that cannot be split, on real ranks: all raise the same error.

The error names the first parameter that differs.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import cpu_only
from tests.procs.ranks import Ranks
from tests.refusals import raises, states
from tests.thinned import every
from zerobubble.errors import InputError
from zerobubble.runtime.stage.uncut_model import RankStages, refuse_uncut_models, stage_digest
from zerobubble.runtime.stage.whole_model import ModelFacts, differences, digest, kinds

WIDTH = 6
PROMPT = 80.0
"""Seconds within which every rank must know of the failure, far below the timeout."""


def row(count: int = 4, seed: int = 0, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)))


def plain_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


X = torch.ones(2, WIDTH)


def with_one_changed(rank: int) -> nn.Module:
    model = row()
    if rank:
        nn.init.zeros_(model.get_parameter("2.0.bias"))
    return model


def with_one_frozen(rank: int) -> nn.Module:
    model = row()
    model.get_parameter("1.0.weight").requires_grad_(not rank)
    return model


def unseeded(rank: int) -> Callable[[], nn.Module]:
    torch.manual_seed(rank)
    return lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


APART: dict[str, tuple[Callable[[int], Any], str]] = {
    "seed": (
        lambda rank: zb.split(row(seed=rank), example=X),
        "parameter '0.0.weight' differs between rank 0 and rank 1",
    ),
    "weights": (lambda rank: zb.split(with_one_changed(rank), example=X), "parameter '2.0.bias' differs between rank 0 and"),
    "layers": (
        lambda rank: zb.split(row(4 + rank), example=X, cuts=["2"]),
        "ranks disagree on parameter '4.0.weight': rank 0 has none of this name, rank 1 has [6, 6] of torch.float32",
    ),
    "width": (
        lambda rank: zb.split(row(width=WIDTH + rank), example=torch.ones(2, WIDTH + rank)),
        "ranks disagree on parameter '0.0.weight': rank 0 has [6, 6] of torch.float32, rank 1 has [7, 7] of torch.float32",
    ),
    "type": (
        lambda rank: zb.split(row().double() if rank else row(), example=X.double() if rank else X),
        "rank 0 has [6, 6] of torch.float32, rank 1 has [6, 6] of torch.float64",
    ),
    "frozen": (lambda rank: zb.split(with_one_frozen(rank), example=X), "rank 1 has [6, 6] of torch.float32, frozen"),
    "cut": (
        lambda rank: zb.split(row(), example=X, cuts=[["2"], ["1"]][rank]),
        "ranks disagree on the cut of the model: rank 0 has stages from '0', '2', rank 1 has stages from '0', '1'",
    ),
    "function": (
        lambda rank: zb.split(unseeded(rank), example=X),
        "ranks disagree on the random numbers of which the model is made",
    ),
}


drawn_on_cpus = cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")


def apart(group: Any, case: str) -> tuple[float, str]:
    split = APART[case][0](group.rank())
    began = time.monotonic()
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(split, "1f1b", 4, plain_loss, group=group)
    return time.monotonic() - began, str(caught.value)


@pytest.mark.parametrize("case", every(2, [pytest.param(case, marks=drawn_on_cpus) if case == "function" else case for case in APART]))
def test_ranks_with_other_models_are_reported_the_first_parameter_that_differs(world: Ranks, case: str) -> None:
    results = world.run(apart, case, ranks=2)
    assert len({text for _, text in results}) == 1
    for took, text in results:
        assert APART[case][1] in text
        assert took < PROMPT


def again(group: Any) -> list[float]:
    """A model that was trained in parts is cut again, as its ranks have it; and a function that draws nothing asks for no seed."""
    model, x = row(), torch.randn(8, WIDTH)
    losses = []
    for _ in range(2):
        with zb.Pipeline(zb.split(model, example=X), "1f1b", 4, plain_loss, group=group) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            losses.append(pipe.step(x, torch.zeros(8, WIDTH)).item())
            optimizer.step()
    weights = row().state_dict()
    torch.manual_seed(group.rank())
    with zb.Pipeline(zb.split(lambda: loaded(weights), example=X), "1f1b", 4, plain_loss, group=group) as pipe:
        losses.append(pipe.step(x, torch.zeros(8, WIDTH)).item())
    return losses


def loaded(weights: dict[str, Tensor]) -> nn.Module:
    model = row(seed=3)
    model.load_state_dict(weights)
    return model


@pytest.mark.long
@drawn_on_cpus
def test_a_model_that_was_trained_in_parts_goes_on(world: Ranks) -> None:
    first, second, third = world.run(again, ranks=2)[0]
    assert second < first
    assert third == pytest.approx(first, rel=1e-6)


@pytest.mark.parametrize("place", [0, 31, 63, -1])
def test_a_digest_is_of_all_values_of_a_small_parameter(place: int) -> None:
    one = nn.Parameter(torch.zeros(64))
    other = nn.Parameter(torch.zeros(64).index_fill(0, torch.tensor(place), 1))
    assert digest(one) == digest(nn.Parameter(torch.zeros(64))) != digest(other)


def test_a_digest_of_a_large_parameter_is_of_its_first_and_last_value_too() -> None:
    values = torch.zeros(10_000)
    values[0] = 1
    found = {digest(nn.Parameter(each)) for each in (values, values.flip(0), values * 0)}
    assert len(found) == 3


def test_a_stage_is_identified_by_names_kinds_and_values() -> None:
    model = row(2)
    frozen, half = row(2), row(2)
    frozen.get_parameter("1.0.bias").requires_grad_(False)
    half[1].to("meta")
    assert len({stage_digest(module) for module in (model, row(2, seed=1), frozen, model[0])}) == 4
    assert stage_digest(model) == stage_digest(row(2))
    constant = nn.Sequential(nn.LayerNorm(3), nn.Tanh())
    assert [stage_digest(module) for module in (half, nn.Tanh(), constant, row(2).to("meta"))] == [""] * 4


def test_kinds_are_shapes_dtypes_and_what_trains() -> None:
    model = nn.Linear(2, 3).double()
    model.bias.requires_grad_(False)
    plain = nn.Linear(2, 3)
    assert len({*kinds(model).values(), *kinds(plain).values()}) == 4
    assert kinds(plain) == kinds(nn.Linear(2, 3))
    assert list(kinds(plain)) == ["weight", "bias"]


def test_a_digest_reads_the_first_and_the_last_number() -> None:
    numbers = torch.arange(1000.0)
    found = digest(numbers)
    assert found == digest(numbers.clone()) == digest(numbers.double())
    for place in (0, 999):
        changed = numbers.clone()
        changed[place] += 0.5
        assert digest(changed) != found
    assert digest(torch.complex(numbers, numbers)) != digest(torch.complex(numbers, 2 * numbers))
    unread = [numbers.to("meta"), torch.empty(0), torch.eye(2).to_sparse()]
    assert [digest(one) for one in unread] == [""] * 3


def test_the_first_difference_of_all_ranks_is_named() -> None:
    same = {"a": "f32", "b": "f32"}
    facts = ModelFacts({"seed": "1"}, same, {"a": "x", "b": "y"})
    assert differences({0: facts, 1: None, 2: facts}) == ""
    assert differences({0: None}) == ""
    states(differences({0: facts, 1: facts, 2: facts._replace(facts={"seed": "2"})}), "seed", "rank 2", 1, 2)
    states(differences({0: facts, 3: facts._replace(kinds={"a": "f32"})}), "'b'", "rank 3", "f32")
    states(differences({0: facts, 3: facts._replace(values={"a": "x", "b": "z"})}), "'b'", 0, 3)
    assert differences({0: facts, 3: facts._replace(values=None)}) == ""
    assert differences({0: facts._replace(facts={}), 1: facts._replace(facts={})}) == ""


ONE, OTHER = RankStages((0,), ("a",), True), RankStages((1,), ("a",), True)
BUILT = [stages._replace(are_modules=False) for stages in (ONE, OTHER)]
UNCUT: dict[str, tuple[list[RankStages], str]] = {
    "one module": ([ONE, OTHER], "refused"),
    "a list": ([RankStages((0, 3), ("a", "b"), True), RankStages((1, 2), ("a", "b"), True)], "refused"),
    "a function": (BUILT, "warned of"),
    "a function on one rank": ([ONE, BUILT[1]], "warned of"),
    "a list of equal modules": ([RankStages((0, 3), ("a", "a"), True), RankStages((1, 2), ("a", "a"), True)], "warned of"),
    "stages of one rank": ([RankStages((0, 1), ("a", "a"), True)], "warned of"),
    "one stage": ([ONE], ""),
    "copies of both stages": ([RankStages((0, 1), ("a", "b"), True)] * 2, ""),
    "other values": ([ONE, OTHER._replace(digests=("b",))], ""),
    "unknown values": ([ONE._replace(digests=("",)), OTHER._replace(digests=("",))], ""),
}


@pytest.mark.parametrize("case", UNCUT)
def test_only_the_same_module_for_other_stages_is_refused(case: str) -> None:
    gathered, outcome = UNCUT[case]
    ranks = range(len(gathered))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if outcome == "refused":
            with raises(InputError, "zb.split(model)", argument="build_or_modules"):
                refuse_uncut_models([ranks], gathered, warns=True)
        else:
            refuse_uncut_models([ranks], gathered, warns=True)
            refuse_uncut_models([ranks], [None, *gathered[1:]], warns=True)
            refuse_uncut_models([ranks], gathered, warns=False)
    assert len(caught) == (outcome == "warned of")
