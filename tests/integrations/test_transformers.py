"""`PipelineTrainer` against Trainer on one device: losses, norms, metrics and weights of 30 steps."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from click.testing import CliRunner
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    FalconConfig,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    OlmoConfig,
    PretrainedConfig,
    TrainingArguments,
)
from transformers.training_args import ParallelMode

import zerobubble as zb
from tests.integrations.ranks import cases_played, outcomes, run_program
from tests.integrations.train_with_transformers import CASES as CASES_OF_PROGRAM
from tests.integrations.train_with_transformers import SIZES, trainer_of
from tests.procs.programs import ROOT, programs_of, torchrun
from tests.refusals import raises, states
from tests.thinned import long_if
from zerobubble import InputError
from zerobubble.cli import main
from zerobubble.integrations.trainer_checkpoint import load_optimizer_of_one_device
from zerobubble.integrations.trainer_data import with_properties
from zerobubble.integrations.trainer_run import read_run
from zerobubble.integrations.transformers import FOLDER, PipelineTrainer

PROGRAM = Path(__file__).with_name("train_with_transformers.py")
CASES = ("float32", "plain", "tied", "accumulation", "label smoothing", "own loss", "adapters", "saved", "bf16")
LONG = ("plain", "tied", "label smoothing", "own loss")
"""Those that the long tests train."""
SAME = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "epoch")


def log(folder: Path, case: str) -> dict[str, Any]:
    return json.loads((folder / case / "log.json").read_text())


def assert_same_log(folder: Path, reference: Path, case: str, keys: tuple[str, ...] = SAME) -> None:
    rows, expected = log(folder, case)["rows"], log(reference, case)["rows"]
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        for key in keys:
            if key in other:
                tolerance = 1e-5 if key == "grad_norm" else 1e-6  # the loss of Llama is in float32
                tolerance = 1e-3 if case == "bf16" else tolerance  # autocast rounds products of microbatches apart from those of a batch
                assert row[key] == pytest.approx(other[key], rel=tolerance, abs=1e-9), (key, row, other)


def weights(folder: Path, case: str) -> dict[str, torch.Tensor]:
    (file,) = (folder / case / "final").glob("*.safetensors")
    return load_file(file)


def assert_same_weights(folder: Path, reference: Path, case: str) -> None:
    assert_equal(weights(folder, case), weights(reference, case), case)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], case: str) -> None:
    assert found.keys() == expected.keys()
    tolerance = {"float32": 1e-6, "bf16": 1e-5}.get(
        case, 2e-5
    )  # the others step with AdamW, which amplifies the rounding of the smallest gradients
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=tolerance)


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that Trainer on one device leaves."""
    folder = tmp_path_factory.mktemp("trainer")
    cases = cases_played(request, "test_two_ranks_train_as_trainer_on_one_device")
    cases |= cases_played(request, "test_weights_in_callbacks_and_after_training_are_those_of_one_device")
    run_program(PROGRAM, folder, "--cases", *sorted(cases | {"float32", "accumulation", "saved", "own optimizer"}))
    return folder


@pytest.fixture(scope="module")
def pipelined(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a pipeline of two ranks leaves."""
    folder = tmp_path_factory.mktemp("pipeline")
    cases = cases_played(request, "test_two_ranks_train_as_trainer_on_one_device")
    cases |= cases_played(request, "test_weights_in_callbacks_and_after_training_are_those_of_one_device")
    run_program(PROGRAM, folder, "--cases", *sorted(cases | {"saved"}), ranks=2)
    return folder


@pytest.mark.feature(
    "losses of one device", "clipping", "learning rate schedulers", "evaluation with metrics", "tied weights", "gradient accumulation"
)
@pytest.mark.feature("bf16", "label smoothing", "custom losses", "LoRA", "checkpoints and resuming", "load_best_model_at_end")
@pytest.mark.parametrize("case", long_if(LONG, CASES))
def test_two_ranks_train_as_trainer_on_one_device(case: str, pipelined: Path, reference: Path) -> None:
    assert_same_log(pipelined, reference, case)
    assert log(pipelined, case)["best"] == log(reference, case)["best"]
    assert_same_weights(pipelined, reference, case)


@pytest.mark.feature("weights in callbacks and after training")
@pytest.mark.parametrize("case", long_if(LONG, CASES))
def test_weights_in_callbacks_and_after_training_are_those_of_one_device(case: str, pipelined: Path, reference: Path) -> None:
    for name in ("step12.pt", "end.pt", "after.pt"):
        assert_equal(torch.load(pipelined / case / name), torch.load(reference / case / name), case)
    (ours, theirs) = (next((place / case / "by the model").glob("*.safetensors")) for place in (pipelined, reference))
    assert_equal(load_file(ours), load_file(theirs), case)
    assert log(pipelined, case)["tokens"] == log(reference, case)["tokens"]
    assert (log(pipelined, case)["refused"], log(reference, case)["refused"]) == (["generate", "state"], [])


@pytest.mark.feature("replicas")
def test_two_replicas_of_two_ranks_train_as_trainer_on_one_device(reference: Path, tmp_path: Path) -> None:
    run_program(PROGRAM, tmp_path, "--replicas", "2", "--cases", "float32", "accumulation", ranks=4)
    for case in ("float32", "accumulation"):
        assert_same_log(tmp_path, reference, case, ("loss", "grad_norm", "learning_rate", "epoch"))
        assert_same_weights(tmp_path, reference, case)


@pytest.mark.feature("resuming on other ranks")
def test_three_ranks_go_on_from_a_checkpoint_of_two(pipelined: Path, reference: Path, tmp_path: Path) -> None:
    run_program(PROGRAM, tmp_path, "--cases", "saved", "--resume", str(pipelined / "saved/checkpoint-10"), ranks=3)
    assert_same_log(tmp_path, reference, "saved")
    assert_same_weights(tmp_path, reference, "saved")


@pytest.mark.parametrize(("rank", "first", "ranks"), [(0, 0, 1), (1, 0, 2), (2, 0, 3), (2, 1, 3)])
def test_ranks_draw_as_the_first_of_their_pipeline_in_the_run_that_saved(rank: int, first: int, ranks: int, tmp_path: Path) -> None:
    saved = []
    for number in range(2):
        torch.manual_seed(number)
        saved.append(torch.get_rng_state())
        state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": saved[-1]}
        torch.save(state, tmp_path / f"rng_state_{number}.pth")
    mode = ParallelMode.DISTRIBUTED if ranks > 1 else ParallelMode.NOT_DISTRIBUTED

    class OnRank(PipelineTrainer):
        args = with_properties(TrainingArguments(str(tmp_path), use_cpu=True), process_index=rank, world_size=ranks, parallel_mode=mode)
        _ranks_of_pipeline = frozenset(range(first, ranks))

        def __init__(self) -> None: ...

    torch.manual_seed(9)
    OnRank()._load_rng_state(str(tmp_path))
    assert torch.equal(torch.get_rng_state(), saved[first])


@pytest.mark.feature("resuming from Trainer on one device")
@pytest.mark.parametrize("case", ["saved", "own optimizer"])
def test_a_pipeline_goes_on_from_a_checkpoint_of_one_device(case: str, reference: Path, tmp_path: Path) -> None:
    run_program(PROGRAM, tmp_path, "--cases", case, "--resume", str(reference / case / "checkpoint-10"), ranks=2)
    assert_same_log(tmp_path, reference, case)
    assert_same_weights(tmp_path, reference, case)


@pytest.mark.feature("resuming in Trainer on one device")
def test_one_device_goes_on_from_a_checkpoint_of_a_pipeline(pipelined: Path, reference: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(pipelined / "saved/checkpoint-10", tmp_path / "checkpoint-10")
    resume = (PROGRAM, tmp_path, "--cases", "saved", "--resume", str(checkpoint))
    ((code, printed),) = outcomes(*resume, ranks=0)
    assert code == 1
    assert "optimizer.pt" in printed[printed.rindex("FileNotFoundError") :]
    trainer = trainer_of(tmp_path, *CASES_OF_PROGRAM["saved"], 1)
    trainer.create_optimizer()
    zb.load(checkpoint / FOLDER, trainer.model, trainer.optimizer)
    torch.save(trainer.optimizer.state_dict(), checkpoint / "optimizer.pt")
    run_program(*resume)
    assert_same_log(tmp_path, reference, "saved")
    assert_same_weights(tmp_path, reference, "saved")


@pytest.mark.refuses("checkpoints with the optimizer of another engine")
def test_an_optimizer_that_a_pipeline_cannot_load_is_refused(tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.Adam(parameters[:1])
    load_optimizer_of_one_device(str(tmp_path), optimizer, [parameters])
    for file in ("global_step10", "scheduler.pt"):  # DeepSpeed has a scheduler of its own
        (tmp_path / file).touch()
        with raises(InputError, str(tmp_path), "resume_from_checkpoint"):
            load_optimizer_of_one_device(str(tmp_path), optimizer, [parameters])
        (tmp_path / file).unlink()
    torch.save(torch.optim.Adam(parameters[:2]).state_dict(), tmp_path / "optimizer.pt")
    with raises(InputError, str(tmp_path / "optimizer.pt"), [2], [3]):
        load_optimizer_of_one_device(str(tmp_path), optimizer, [parameters])


@pytest.mark.feature("a killed rank: one error, no hang")
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_run_with_one_error(killed: int, tmp_path: Path) -> None:
    ended = outcomes(PROGRAM, tmp_path, "--cases", "float32", "--kill", str(killed), ranks=2)
    code, error = ended[1 - killed]
    assert (code, ended[killed][0]) == (1, -signal.SIGKILL), error[-3000:]
    states(error[error.rindex("PipelineError") :], "PipelineError", f"rank {killed}")


@pytest.mark.refuses("auto_find_batch_size", "split_batches")
def test_options_that_a_pipeline_cannot_have_are_named_at_once(tmp_path: Path) -> None:
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], auto_find_batch_size=True, accelerator_config={"split_batches": True}
    )
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with raises(InputError, "torchrun", "auto_find_batch_size", "split_batches"):
        PipelineTrainer(model=model, args=arguments)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.refuses("dp_shard")
def test_a_mesh_that_shards_parameters_is_refused(tmp_path: Path, one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_shard", "pp"))
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with raises(InputError, "dp_shard", "dp_replicate"):
        PipelineTrainer(model=LlamaForCausalLM(LlamaConfig(**SIZES)), args=arguments, pipeline_options={"mesh": mesh})


@pytest.mark.refuses("device_map")
def test_a_model_that_is_spread_over_devices_is_refused(tmp_path: Path, one_rank: None) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.hf_device_map = {"model": "cpu", "lm_head": "disk"}  # as `from_pretrained` with a device_map leaves it
    with raises(InputError, "device_map"):
        PipelineTrainer(model=model, args=TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))


LLAMA_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8}
ARGUMENTS = {"max_length": 4096, "per_device_train_batch_size": 16, "bf16": True}


def planned_from(folder: Path, config: PretrainedConfig, *options: str, **arguments: Any) -> Any:
    """What `plan --from trainer:FILE` does for a model of this configuration."""
    config.save_pretrained(folder / "model")
    (folder / "train.json").write_text(json.dumps({"model_name_or_path": str(folder / "model")} | ARGUMENTS | arguments))
    command = ["plan", "--from", f"trainer:{folder / 'train.json'}", "--gpu", "H100", "--evaluations", "50", *options]
    return CliRunner().invoke(main, command)


@pytest.mark.feature("planning from the arguments")
def test_arguments_are_planned_and_the_model_is_cut_as_planned(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = planned_from(tmp_path, LlamaConfig(**LLAMA_8B), "-p", "4", "-o", str(file))
    assert done.exit_code == 0, done.output
    plan = zb.io.load_plan(file)
    assert (plan.schedule.num_ranks, plan.schedule.num_microbatches) == (4, 16)
    names = ["model.embed_tokens", *(f"model.layers.{number}" for number in range(32)), "model.norm"]
    assert list(plan.problem.layer_names) == names
    tiny = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=32, num_attention_heads=4)
    split = zb.split(tiny, example={"input_ids": torch.zeros(2, 4, dtype=torch.long)})
    stages = split.for_schedule(plan.schedule, plan.problem.first_layers).stages(plan.schedule.num_stages)
    assert [stage.units[0] for stage in stages][1:] == list(plan.problem.first_layers)


@pytest.mark.parametrize(
    ("config", "head", "positions"),
    [(OlmoConfig(), "lm_head", 0), (GPT2Config(), "transformer.ln_f", 1024 * 768), (FalconConfig(), "transformer.ln_f", 0)],
    ids=["norm without parameters", "learned positions", "one head of keys"],
)
def test_other_families_have_the_parameters_of_the_model(config: PretrainedConfig, head: str, positions: int, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    (tmp_path / "train.json").write_text(json.dumps({"model_name_or_path": str(tmp_path)} | ARGUMENTS))
    run = read_run(str(tmp_path / "train.json"), 4, None)
    assert (run.names[-1], run.positions) == (head, positions)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    assert run.model.parameters + run.positions == pytest.approx(parameters, rel=0.005)
    embedding, tokens = run.layers("H100")[0], replace(run, positions=0).layers("H100")[0]
    assert embedding.parameters_bytes / tokens.parameters_bytes == pytest.approx(1 + positions / (config.vocab_size * config.hidden_size))


@pytest.mark.refuses("planning models that the cost model does not cover")
def test_arguments_that_cannot_be_planned_are_named_at_once(tmp_path: Path) -> None:
    done = planned_from(tmp_path, LlamaConfig(**LLAMA_8B), per_device_train_batch_size=0, max_length=None, bf16=False)
    assert done.exit_code == 2
    states(done.output, "per_device_train_batch_size", "max_length", "bf16", "--ranks", 0)
    done = planned_from(tmp_path, LlamaConfig(**LLAMA_8B), "-p", "4", "-m", "32")
    assert done.exit_code == 2
    states(done.output, "--microbatches", 32, 16)


@pytest.mark.refuses("planning models that the cost model does not cover")
@pytest.mark.parametrize("config", [GPTNeoConfig(), MistralConfig(sliding_window=128), BertConfig()], ids=lambda config: config.model_type)
def test_models_that_the_cost_model_does_not_describe_are_refused(config: PretrainedConfig, tmp_path: Path) -> None:
    done = planned_from(tmp_path, config, "-p", "4")
    assert done.exit_code == 2
    states(done.output, config.model_type, "--costs")


@pytest.mark.feature("at most three changed lines")
def test_the_programs_of_the_page_train_and_its_arguments_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = torchrun("\n".join(programs_of("docs/transformers.md") + programs_of("docs/trainer-details.md")), tmp_path, 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall("'loss'", done.stdout)) == 4
    assert (tmp_path / "trained/final/model.safetensors").exists()
    (arguments,) = re.findall("```json\n(.*?)```", (ROOT / "docs/trainer-details.md").read_text(), re.DOTALL)
    (tmp_path / "train.json").write_text(arguments)
    monkeypatch.chdir(tmp_path)
    planned = CliRunner().invoke(main, ["plan", "--from", "trainer:train.json", "--gpu", "H100", "--ranks", "2", "--evaluations", "50"])
    assert planned.exit_code == 0, planned.output
