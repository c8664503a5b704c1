"""`PipelineSFTTrainer` against SFTTrainer on one device: losses, norms, TRL's metrics and weights of 30 steps."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from trl import DPOTrainer, SFTConfig

import zerobubble as zb
from tests.integrations.ranks import run_program
from tests.integrations.train_with_trl import CASES, EVALUATED, tokenizer
from tests.refusals import raises
from zerobubble import InputError
from zerobubble.integrations.transformers import PipelineMixin
from zerobubble.integrations.trl import PipelineSFTTrainer

PROGRAM = Path(__file__).with_name("train_with_trl.py")
SAME = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens", "eval_loss", "eval_mean_token_accuracy")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What one device and what two ranks leave."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    run_program(PROGRAM, one)
    run_program(PROGRAM, two, ranks=2)
    return one, two


@pytest.mark.feature("losses of one device", "clipping", "learning rate schedulers", "evaluation with metrics", "packing", "LoRA")
@pytest.mark.feature("gradient accumulation", "custom losses")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_tune_as_one_device(case: str, folders: tuple[Path, Path]) -> None:
    expected, found = (json.loads((folder / case / "log.json").read_text()) for folder in folders)
    assert len(found) == len(expected)
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        for key in SAME:
            if key in other:
                assert row[key] == pytest.approx(other[key], rel=1e-5 if key == "grad_norm" else 2e-6, abs=1e-7), (key, row, other)
    weights, others = (load_file(next((folder / case / "final").glob("*.safetensors"))) for folder in reversed(folders))
    assert weights.keys() == others.keys()
    for name, tensor in others.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.feature("evaluation with metrics and replicas")
def test_metrics_of_two_replicas_do_not_count_samples_that_fill_the_last_batch(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run_program(PROGRAM, tmp_path, "--replicas", "2", "--cases", *EVALUATED, ranks=4)
    expected, found = (json.loads((folder / "evaluated" / "log.json").read_text())[0] for folder in (folders[0], tmp_path))
    assert "eval_entropy" in expected
    assert found.keys() == expected.keys()
    for key in ("eval_loss", "eval_mean_token_accuracy", "eval_entropy", "eval_num_tokens"):
        assert found[key] == pytest.approx(expected[key], rel=2e-6), key


@pytest.mark.refuses("padding-free batches")
def test_options_of_trl_that_a_pipeline_cannot_have_are_named_at_once(tmp_path: Path) -> None:
    settings = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[], packing=True, activation_checkpointing=False)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2))
    data = Dataset.from_list([{"text": "w1 w2 w3"}] * 8)
    with raises(InputError, "torchrun", "padding_free"):
        PipelineSFTTrainer(model=model, args=settings, train_dataset=data, processing_class=tokenizer())


@pytest.mark.refuses("other trainers of TRL")
def test_a_trainer_of_trl_with_steps_of_its_own_is_refused_without_a_remedy_that_its_user_cannot_follow() -> None:
    with raises(InputError, "DPOTrainer.training_step", "DPOTrainer.prediction_step", "compute_loss"):
        type("Hidden", (PipelineMixin, DPOTrainer), {})


@pytest.mark.refuses("bidirectional schedules")
def test_a_schedule_whose_losses_are_on_two_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PipelineMixin, "pipeline", SimpleNamespace(schedule=zb.make("dualpipe", 2, 4)))
    with raises(InputError, argument="schedule", got="dualpipe", expected="zb-v"):
        PipelineSFTTrainer.__new__(PipelineSFTTrainer).pipeline  # noqa: B018
