"""Datasets, collators, samplers and labels of one's own under `PipelineTrainer`, against Trainer on one device."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from tests.integrations.ranks import cases_played, run_program
from tests.integrations.train_with_own_data import CASES, DIFFERENT, REFUSED, SEARCHED
from tests.refusals import raises
from tests.thinned import long_if
from zerobubble import InputError
from zerobubble.integrations.loss_rules import with_other_labels
from zerobubble.integrations.trainer_example import remedies_of_trainer
from zerobubble.integrations.trainer_options import wrong_options

PROGRAM = Path(__file__).with_name("train_with_own_data.py")
SHORT = ("closure", "own generators", "workers", "batch_rebalance", "tokens", "dropped batches")
REPLICATED = ("no training", "no training, means", "no training, one microbatch", "no training, a sequence", "dropped batches", "classes")
SHORT += ("segmentation", "labels of -1", "labels of other names", "no training")
NUMBERS = {"loss", "grad_norm", "eval_loss", "test_loss"}
FLOAT32 = 1e-6
"""The largest relative difference of losses, which Trainer adds up in float32."""


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that Trainer on one device leaves."""
    folder = tmp_path_factory.mktemp("one")
    run_program(PROGRAM, folder, "--cases", *sorted(cases_played(request, "test_data_train_as_on_one_device") | {*REPLICATED, *SEARCHED}))
    return folder


@pytest.fixture(scope="module")
def pipelined(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a pipeline of two ranks leaves."""
    folder = tmp_path_factory.mktemp("two")
    cases = cases_played(request, "test_data_train_as_on_one_device")
    refused = cases_played(request, "test_data_of_which_no_example_can_be_read_is_refused_on_all_ranks")
    refused |= cases_played(request, "test_other_batches_on_a_rank_are_refused_on_all_ranks")
    run_program(PROGRAM, folder, "--cases", *sorted(cases | refused), "detection", ranks=2)
    return folder


def result(folder: Path, case: str, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"{case}.{rank}.json").read_text())


def assert_same(folder: Path, reference: Path, case: str) -> None:
    found, expected = result(folder, case), result(reference, case)
    assert "error" not in expected, expected
    assert "error" not in found, found
    assert (found["shapes"], found["counts"]) == (expected["shapes"], expected["counts"])
    steps = [round(of["metrics"]["test_steps_per_second"] * of["metrics"]["test_runtime"]) for of in (found, expected)]
    assert steps[0] == steps[1] > 0
    assert len(found["rows"]) == len(expected["rows"])
    for row, other in zip([*found["rows"], found["metrics"]], [*expected["rows"], expected["metrics"]], strict=True):
        for name in NUMBERS & other.keys():
            assert row[name] == pytest.approx(other[name], rel=1e-9 if name == "grad_norm" else FLOAT32), (name, row, other)
    weights, others = (torch.load(path / f"{case}.pt") for path in (folder, reference))
    for name, tensor in others.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.feature("datasets and collators with a state")
@pytest.mark.parametrize("case", long_if([case for case in CASES if case not in SHORT], CASES))
def test_data_train_as_on_one_device(case: str, pipelined: Path, reference: Path) -> None:
    assert_same(pipelined, reference, case)


@pytest.mark.feature("hyperparameter_search")
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_search_ends_trials_early_as_on_one_device(replicas: int, reference: Path, tmp_path: Path) -> None:
    run_program(PROGRAM, tmp_path, "--replicas", str(replicas), "--cases", *SEARCHED, ranks=2 * replicas)
    expected = result(reference, "a search")
    assert len(expected["losses"]) == 5, "one of three trials ends after one evaluation of two"
    for rank in range(2 * replicas):
        found = result(tmp_path, "a search", rank)
        assert found["losses"] == pytest.approx(expected["losses"], rel=FLOAT32)
        assert found["best"] == (expected["best"] if rank == 0 else None)


@pytest.mark.feature("evaluations with replicas")
def test_two_replicas_evaluate_as_one_device(reference: Path, tmp_path: Path) -> None:
    run_program(PROGRAM, tmp_path, "--replicas", "2", "--cases", *REPLICATED, ranks=4)
    for case in REPLICATED:
        assert_same(tmp_path, reference, case)


@pytest.mark.refuses("datasets that read an iterator, without an example")
@pytest.mark.parametrize("case", [case for case in REFUSED if case != "detection"])
def test_data_of_which_no_example_can_be_read_is_refused_on_all_ranks(case: str, pipelined: Path) -> None:
    errors = [result(pipelined, case, rank) for rank in (0, 1)]
    assert [error["error"] for error in errors] == ["InputError", "InputError"], errors
    assert errors[0]["text"] == errors[1]["text"]
    assert "pipeline_options" in errors[0]["text"]


@pytest.mark.refuses("labels with a dict for each sample, such as boxes")
def test_labels_with_a_dict_for_each_sample_are_refused_on_all_ranks(pipelined: Path) -> None:
    errors = [result(pipelined, "detection", rank) for rank in (0, 1)]
    assert [(error["error"], error["fields"]["name"]) for error in errors] == [("InputError", "labels")] * 2, errors


def test_remedies_name_the_argument_of_the_trainer() -> None:
    with raises(InputError, 'pipeline_options={"cuts": [...]}'), remedies_of_trainer():
        raise InputError("a gradient is lost", remedy="cut the model by zb.split(model, cuts=[...])")


@pytest.mark.refuses("different batches on the ranks of a pipeline")
@pytest.mark.parametrize("case", DIFFERENT)
def test_other_batches_on_a_rank_are_refused_on_all_ranks(case: str, pipelined: Path) -> None:
    errors = [result(pipelined, case, rank) for rank in (0, 1)]
    assert [error["error"] for error in errors] == ["InputError", "InputError"], errors
    assert [error["fields"]["argument"] for error in errors] == ["batch", "batch"], errors


class Replicas(dict[str, Any]):
    """A mesh of two replicas."""

    mesh_dim_names = ("dp", "pp")


@pytest.mark.refuses("even_batches=False with replicas")
@pytest.mark.parametrize("mesh", [None, Replicas(dp=SimpleNamespace(size=lambda: 2))])
def test_batches_that_replicas_cannot_share_evenly_are_refused(mesh: Any, tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], accelerator_config={"even_batches": False})
    assert any("even_batches" in fault for fault in wrong_options(args, torch.nn.Identity(), mesh)) == (mesh is not None)


@pytest.mark.parametrize(
    ("labels", "num_classes", "legal"),
    [
        ([0, 2, 255], 3, {0, 2, 255}),
        ([0, 0, 1], 3, {0, 1, 2}),
        ([-100, -1, 0], 3, {-100, -1, 0, 1, 2}),
        ([5, 7, 9], 2, {5, 7, 9}),
        ([[0, 1, 0], [1, 1, 0]], 3, {0, 1}),
    ],
)
def test_other_labels_are_those_of_the_batch_or_of_classes_of_the_model(labels: Any, num_classes: int, legal: set[int]) -> None:
    batch = {"labels": torch.tensor(labels).repeat_interleave(20, 0)}
    changed = with_other_labels(batch, batch, ["labels"], num_classes)
    assert changed is not None
    assert set(changed["labels"].unique().tolist()) == legal


@pytest.mark.parametrize("labels", [torch.ones(2, 3), torch.full((2, 3), -100), [{"boxes": torch.ones(1, 4)}]])
def test_labels_that_are_no_classes_stay(labels: Any) -> None:
    assert with_other_labels({"labels": labels}, {"labels": labels}, ["labels"], 3) is None
