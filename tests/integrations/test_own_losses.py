"""Subclasses of Trainer with losses and methods of their own in a pipeline, against Trainer on one device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Seq2SeqTrainer, Trainer

from tests.integrations.ranks import cases_played, run_program
from tests.integrations.train_with_own_losses import CASES, DRAWN, METERED, RAISING, REFUSED, REFUSED_OF_REPLICAS
from tests.refusals import raises
from tests.thinned import long_if
from zerobubble import InputError
from zerobubble.integrations.transformers import PipelineMixin, PipelineTrainer

PROGRAM = Path(__file__).with_name("train_with_own_losses.py")
SHORT = ("mean", "mean, accumulated", "weighted", "logged", "masked", "generated", "methods", "two heads", "experts", "flags of one rank")
SHORT += ("fresh head", "a stream", "choices", "logits in place", "pairs in one call", "scaled by processes", "counted late")
REPLICATED = ("plain", "local counts", "mean", "mean over attention_mask", "weighted", "masked", "generated", "sequences, one microbatch")
REPLICATED += ("a stream", "gathered", "scaled by processes")
FLOAT32 = 1e-6
"""The largest relative difference where the model's own loss is in float32, as Llama's."""


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that Trainer on one device leaves."""
    folder = tmp_path_factory.mktemp("one")
    run_program(PROGRAM, folder, "--cases", *sorted(cases_played(request, "test_losses_train_as_on_one_device") | {*REPLICATED}))
    return folder


@pytest.fixture(scope="module")
def pipelined(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a pipeline of two ranks leaves."""
    folder = tmp_path_factory.mktemp("two")
    cases = cases_played(request, "test_losses_train_as_on_one_device")
    run_program(PROGRAM, folder, "--cases", *sorted(cases), *REFUSED, *METERED, *DRAWN, *RAISING, ranks=2)
    return folder


def result(folder: Path, case: str, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"{case}.{rank}.json").read_text())


def assert_same(folder: Path, reference: Path, case: str, names: set[str]) -> None:
    found, expected = result(folder, case), result(reference, case)
    assert len(found["rows"]) == len(expected["rows"])
    for row, other in zip(found["rows"], expected["rows"], strict=True):
        for name in names & other.keys():
            assert row[name] == pytest.approx(other[name], rel=FLOAT32), (name, row, other)
    weights, others = (torch.load(path / f"{case}.pt") for path in (folder, reference))
    assert weights.keys() == others.keys()
    for name, tensor in others.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.feature("losses that are means", "class weights with loss_weight", "distillation", "gradient accumulation of means")
@pytest.mark.feature("self.log in compute_loss", "masked language models", "classifiers", "sequence-to-sequence models")
@pytest.mark.feature("predict_with_generate", "overridden methods of the trainer", "models that are plain modules", "Whisper")
@pytest.mark.feature("flags that a callback sets on one rank", "gradients clipped by value", "an optimizer of model.parameters()")
@pytest.mark.feature("contrastive losses with num_microbatches=1", "numbers of experts in predictions")
@pytest.mark.feature("evaluations of datasets without length", "multiple choice")
@pytest.mark.parametrize("case", long_if([case for case in CASES if case not in SHORT], CASES))
def test_losses_train_as_on_one_device(case: str, pipelined: Path, reference: Path) -> None:
    assert_same(pipelined, reference, case, {"loss", "grad_norm", "eval_loss", "ce", "calls", "total_flos"})
    found, expected = result(pipelined, case), result(reference, case)
    assert found["test_loss"] == pytest.approx(expected["test_loss"], rel=FLOAT32)
    assert (found["shapes"], found["drew"]) == (expected["shapes"], expected["drew"])
    assert found["totals"] == pytest.approx(expected["totals"], rel=FLOAT32 if case == "experts" else 1e-9)
    assert found["counted"] == pytest.approx(expected["counted"], rel=1e-9)
    assert result(pipelined, case, 1)["counted"] == found["counted"]


@pytest.mark.feature("losses that are means with replicas")
def test_losses_train_in_two_replicas_as_on_one_device(reference: Path, tmp_path: Path) -> None:
    run_program(PROGRAM, tmp_path, "--replicas", "2", "--cases", *REPLICATED, ranks=4)
    for case in REPLICATED:
        assert_same(tmp_path, reference, case, {"loss", "grad_norm", "eval_loss", "ce"})
        found, expected = result(tmp_path, case), result(reference, case)
        assert found["shapes"] == expected["shapes"]
        assert found["totals"] == pytest.approx(expected["totals"], rel=1e-9)
        assert found["counted"] == pytest.approx(expected["counted"], rel=1e-9)


@pytest.mark.refuses("samples gathered in compute_loss where samples fill a batch of replicas", "losses that one replica refuses")
@pytest.mark.refuses("sums over replicas that compute_loss divides by the number of processes")
def test_losses_that_replicas_cannot_compute_are_refused_on_all_ranks(tmp_path: Path) -> None:
    run_program(PROGRAM, tmp_path, "--replicas", "2", "--cases", *REFUSED_OF_REPLICAS, ranks=4)
    for case in REFUSED_OF_REPLICAS:
        errors = [result(tmp_path, case, rank) for rank in range(4)]
        assert [error["error"] for error in errors] == ["InputError"] * 4, errors
        assert len({error["text"] for error in errors}) == 1


@pytest.mark.refuses("losses that are neither sums nor means", "two calls of the model in compute_loss", "collectives in compute_loss")
@pytest.mark.refuses("losses of other samples while gradients are recorded", "router losses of mixtures of experts")
@pytest.mark.refuses("means over drawn positions", "other loss_weight than that of the loss", "training_step with a backward of its own")
@pytest.mark.refuses("what compute_loss sets for its call of the model only")
@pytest.mark.parametrize("case", REFUSED)
def test_losses_that_a_pipeline_cannot_compute_are_refused_on_all_ranks(case: str, pipelined: Path) -> None:
    errors = [result(pipelined, case, rank) for rank in (0, 1)]
    assert [error["error"] for error in errors] == ["InputError", "InputError"], errors
    assert errors[0]["text"] == errors[1]["text"]


@pytest.mark.refuses("metrics, meters, buffers and variables that compute_loss changes")
@pytest.mark.parametrize("case", METERED)
def test_state_that_a_loss_changes_for_each_microbatch_is_refused_by_its_name(case: str, pipelined: Path) -> None:
    for rank in (0, 1):
        error = result(pipelined, case, rank)
        assert error["error"] == "InputError", error
        assert case.removeprefix("changes ") in error["text"]


@pytest.mark.feature("an error of a callback on one rank: one error, no hang")
def test_an_error_of_a_callback_on_one_rank_ends_all_ranks(pipelined: Path) -> None:
    first, second = (result(pipelined, "raised on one rank", rank) for rank in (0, 1))
    assert (first["error"], first["text"]) == ("ValueError", "no space left")
    assert (second["error"], second["fields"]["rank"]) == ("PipelineError", "0"), second
    assert "no space left" in second["text"]


@pytest.mark.parametrize("case", ["penalty in compute_loss", "penalty on a mean over tokens"])
def test_a_loss_of_weights_of_other_ranks_ends_all_ranks_with_the_remedy(pipelined: Path, case: str) -> None:
    for rank in (0, 1):
        error = result(pipelined, case, rank)
        assert error["error"] == "InputError", error
        assert "self.pipeline.parameters()" in error["text"]


@pytest.mark.feature("random numbers in compute_loss")
def test_the_model_and_the_loss_see_the_same_random_numbers(pipelined: Path) -> None:
    found = result(pipelined, "drawn with weights")
    losses = [row["loss"] for row in found["rows"] if "loss" in row]
    assert len(losses) == 4
    assert max(losses) < 1e-5  # two draws give 0.1 and more
    assert found["drew"]


class Overriding(Trainer):
    """A trainer with a method that the mixin would hide."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


@pytest.mark.refuses("overridden methods behind PipelineMixin")
def test_a_class_whose_methods_would_be_hidden_is_refused_when_it_is_made() -> None:
    with raises(InputError, "Overriding.training_step", "class Overriding(PipelineMixin, Trainer)"):
        type("Hidden", (PipelineMixin, Overriding), {})
    type("First", (Overriding, PipelineTrainer), {})
    type("Sequences", (PipelineMixin, Seq2SeqTrainer), {})
    with raises(InputError, "PipelineMixin", "Trainer"):
        type("Late", (Seq2SeqTrainer, PipelineMixin), {})
