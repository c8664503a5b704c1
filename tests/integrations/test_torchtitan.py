"""torchtitan's real `Trainer` on CPU ranks, with our schedules: losses and norms are those of its own run on one device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import zerobubble as zb
from tests.integrations import titan_on_cpu
from tests.integrations.ranks import cases_played, outcomes, run_program
from tests.procs.programs import programs_of
from tests.refusals import raises, states
from tests.thinned import long_if
from zerobubble import InputError
from zerobubble.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")
PROGRAM = Path(__file__).with_name("train_with_torchtitan.py")
ON_TWO = (
    "zb-v",
    "zb-h1",
    "interleaved",
    "whole loss",
    "accumulation",
    "checkpointed",
    "compiled",
    "bf16",
    "validated",
    "saved",
    "qwen3",
    "deepseek_v3",
)
ON_REPLICAS = ("sharded", "experts", "experts of deepseek_v3")
DIVIDED = ("tensor parallel", "context parallel")
LONG = ("zb-h1", "interleaved", "checkpointed", "compiled", "bf16", "deepseek_v3", "experts of deepseek_v3")
"""Those that the long tests train."""
REFERENCES = {"zb-h1": "zb-v", "interleaved": "zb-v", "saved": "zb-v", "resumed": "zb-v"}
"""The case on one device with the same numbers, where it is not the one with the same name."""


def rows(folder: Path, case: str) -> dict[tuple[int, str], float]:
    """The losses and norms in the log of a case, by step and name."""
    found = json.loads((folder / f"{case}.json").read_text())
    return {(row["step"], name): value for row in found for name, value in row.items() if name != "step"}


def assert_same(folder: Path, reference: Path, case: str, first_step: int = 1) -> None:
    found, expected = rows(folder, case), rows(reference, REFERENCES.get(case, case))
    expected = {key: value for key, value in expected.items() if key[0] >= first_step}
    assert found.keys() == expected.keys()
    tolerance = dict.fromkeys(("bf16", "qwen3", "deepseek_v3", *ON_REPLICAS[1:]), 1e-3).get(case, 2e-5)  # routing amplifies rounding
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=tolerance), key


@pytest.fixture(scope="module")
def one_device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torchtitan's own trainer logs on one device."""
    folder = tmp_path_factory.mktemp("one")
    cases = {REFERENCES.get(case, case) for case in cases_played(request, "test_two_ranks_train_as_torchtitan_on_one_device")}
    run_program(PROGRAM, folder, "--cases", *sorted(cases | {"zb-v"}), "all layers", *DIVIDED, ranks=1)
    return folder


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two pipeline ranks log."""
    folder = tmp_path_factory.mktemp("two")
    cases = cases_played(request, "test_two_ranks_train_as_torchtitan_on_one_device")
    run_program(PROGRAM, folder, "--cases", *sorted(cases | {"whole loss", "saved"}), ranks=2)
    return folder


@pytest.mark.feature("losses of one device", "clipping", "learning rate schedulers", "gradient accumulation")
@pytest.mark.feature("evaluation with metrics", "bf16", "torch.compile")
@pytest.mark.parametrize("case", long_if(LONG, ON_TWO))
def test_two_ranks_train_as_torchtitan_on_one_device(case: str, two_ranks: Path, one_device: Path) -> None:
    assert_same(two_ranks, one_device, case)


@pytest.mark.feature("W computes weight gradients")
def test_w_computes_weight_gradients(two_ranks: Path) -> None:
    shares = json.loads((two_ranks / "whole loss split.json").read_text())
    assert len(shares) == 4
    assert all(share > 0.99 for share in shares if share is not None)
    assert any(share is not None for share in shares)


@pytest.mark.feature("four ranks")
def test_four_ranks_train_as_torchtitan_on_one_device(one_device: Path, tmp_path: Path) -> None:
    run_program(PROGRAM, tmp_path, "--cases", "all layers", ranks=4)
    assert_same(tmp_path, one_device, "all layers")


@pytest.mark.feature("tensor parallelism", "context parallelism")
def test_ranks_that_divide_stages_train_as_torchtitan_on_one_device(one_device: Path, tmp_path: Path) -> None:
    run_program(PROGRAM, tmp_path, "--cases", *DIVIDED, ranks=4)
    for case in DIVIDED:
        assert_same(tmp_path, one_device, case)


@pytest.fixture(scope="module")
def two_replicas(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """What two replicas log: of the whole model on two ranks, and of pipelines of two ranks each on four."""
    folders = {ranks: tmp_path_factory.mktemp("replicas") for ranks in (2, 4)}
    cases = cases_played(request, "test_two_replicas_train_as_torchtitan_without_a_pipeline")
    for ranks, folder in folders.items():
        run_program(PROGRAM, folder, "--cases", *sorted(cases | {"sharded"}), "--replicas", "2", ranks=ranks)
    return folders


@pytest.mark.feature("replicas", "expert parallelism")
@pytest.mark.parametrize("case", long_if(LONG, ON_REPLICAS))
def test_two_replicas_train_as_torchtitan_without_a_pipeline(case: str, two_replicas: dict[int, Path]) -> None:
    """Replicas read other texts than one device, so torchtitan's own run has two replicas, too."""
    assert_same(two_replicas[4], two_replicas[2], case)


def test_two_replicas_end_with_the_weights_of_torchtitan_without_a_pipeline(two_replicas: dict[int, Path]) -> None:
    """After 30 steps of AdamW with an `eps` of 1e-3: with 1e-8, it amplifies the rounding of the smallest gradients."""
    found, expected = (
        {key: value for file in folder.glob("sharded *.pt") for key, value in torch.load(file).items()} for folder in two_replicas.values()
    )
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.feature("checkpoints and resuming", "resuming on other ranks")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_two_ranks_is_resumed(ranks: int, two_ranks: Path, one_device: Path, tmp_path: Path) -> None:
    run_program(PROGRAM, tmp_path, "--cases", "resumed", "--dump", str(two_ranks), ranks=ranks)
    assert_same(tmp_path, one_device, "resumed", first_step=11)


@pytest.mark.feature("a killed rank: one error, no hang")
def test_a_killed_rank_ends_the_run_with_our_error(tmp_path: Path) -> None:
    (code, error), (killed, _) = outcomes(PROGRAM, tmp_path, "--cases", "killed", ranks=2)
    assert (code, killed) == (1, 3), error[-3000:]
    states(error[error.rindex("PipelineError") :], "PipelineError", "rank 1")


@pytest.fixture(scope="module")
def titan() -> Any:
    """The entry point for torchtitan, whose trainer can be imported from now on."""
    titan_on_cpu.prepare()
    from zerobubble.integrations import torchtitan

    return torchtitan


@pytest.mark.refuses("several ranks without a pipeline")
def test_several_ranks_without_a_pipeline_are_refused(titan: Any) -> None:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    spec = titan.pipelined(llama3_debugmodel()).model_spec
    with raises(InputError, argument="pipeline_parallel_degree", got=1, ranks=2):
        spec.parallelize_fn(None, parallel_dims=SimpleNamespace(world_size=2, pp=1, pp_enabled=False))


def parts_of(titan: Any, schedule: Any, changed: dict[str, Any] | None = None, **options: Any) -> Any:
    """What `pipelining_fn` returns on rank 0 of two for the debug model, without connecting to other ranks."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = "ZBVZeroBubble"
    for name, value in (changed or {}).items():
        setattr(config.parallelism, name, value)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    places = SimpleNamespace(
        pp=2,
        tp=1,
        dp_replicate=1,
        dp_shard=1,
        world_size=2,
        spmd_backend=config.parallelism.spmd_backend,
        get_mesh=lambda name: SimpleNamespace(get_local_rank=lambda: 0),
    )
    return titan.pipelining_fn(schedule, **options)(
        model,
        parallel_dims=places,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=None,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=config.model_spec.model,
        parallelize_fn=lambda part, **_: part,
        loss_fn=None,
    )


def names(part: Any) -> list[str]:
    """torchtitan's names of the modules of a part, in the order of the model."""
    children = dict(part.named_children())
    layers = [f"layers.{number}" for number in children["layers"]]
    before, after = ([name for name in some if name in children] for some in (["tok_embeddings"], ["norm", "lm_head"]))
    return [*before, *layers, *after]


@pytest.mark.refuses(
    "a schedule for other ranks",
    'spmd_backend="full_dtensor"',
    "a last stage whose loss is not logged",
    "bidirectional schedules",
    "context parallelism with a stage without layers",
)
def test_everything_that_a_pipeline_cannot_have_is_named_at_once(titan: Any) -> None:
    with raises(InputError, "pipeline_parallel_degree", 12, "full_dtensor"):
        parts_of(titan, zb.make("zb-v", 4, 12), {"spmd_backend": "full_dtensor"})
    with raises(InputError, "zb-h1", "Interleaved1F1B"):
        parts_of(titan, "zb-h1")
    with raises(InputError, "chimera"):
        parts_of(titan, "chimera")
    with raises(InputError, "nowhere.json"):
        parts_of(titan, "nowhere.json")
    with raises(InputError, "module_fqns_per_model_part"):
        parts_of(titan, "zb-v", {"module_fqns_per_model_part": [["tok_embeddings"]] * 6})
    bare = [["tok_embeddings"], ["layers.0"], ["layers.1"], ["layers.2", "norm", "lm_head"]]
    divided = {"context_parallel_degree": 2, "spmd_backend": "partial_dtensor"}
    with raises(InputError, "partial_dtensor", "module_fqns_per_model_part"):
        parts_of(titan, "zb-v", {"module_fqns_per_model_part": bare, **divided})


@pytest.mark.refuses("pipeline options that the integration sets")
def test_options_that_are_set_here_are_refused(titan: Any) -> None:
    with raises(InputError, "scale", "no_such_option", "split"):
        titan.pipelining_fn("zb-v", scale="loss", no_such_option=1)


@pytest.mark.refuses('schedule="auto" without a GPU')
def test_auto_needs_a_gpu(titan: Any) -> None:
    with raises(InputError, "gpu"):
        parts_of(titan, "auto")


@pytest.mark.feature("plan files", "stages cut by a list of modules", 'schedule="auto"')
def test_parts_are_cut_by_torchtitan_by_name_or_by_a_plan(titan: Any, tmp_path: Path) -> None:
    _, own, has_first, has_last = parts_of(titan, "zb-v")
    assert [names(part) for part in own] == [["tok_embeddings", "layers.0"], ["layers.5", "norm", "lm_head"]]
    assert has_first
    assert has_last
    given = [["tok_embeddings"], ["layers.0"], ["layers.1"], [*(f"layers.{number}" for number in range(2, 6)), "norm", "lm_head"]]
    _, by_name, _, _ = parts_of(titan, "zb-v", {"module_fqns_per_model_part": given})
    assert [names(part) for part in by_name] == [given[0], given[3]]
    schedule, planned, _, has_last = parts_of(titan, "auto", gpu="H100")
    assert has_last
    zb.io.save_plan(schedule._schedule, tmp_path / "plan.json")
    _, from_file, _, _ = parts_of(titan, str(tmp_path / "plan.json"))
    assert [names(part) for part in from_file] == [names(part) for part in planned]
    assert names(planned[0])[0] == "tok_embeddings"
    assert names(planned[-1])[-1] == "lm_head"


@pytest.mark.feature("--module and --config", "at most three changed lines")
def test_torchtitan_finds_configurations_by_module_and_name(titan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.config import ConfigManager

    def parsed(*arguments: str) -> Any:
        return ConfigManager().parse_args([*arguments, "--hf-assets-path", str(tmp_path)])

    config = parsed("--module", "zerobubble.integrations.torchtitan", "--config", "llama3_debugmodel")
    assert config.model_spec.pipelining_fn.__module__.startswith("zerobubble.")
    assert config.parallelism.pipeline_parallel_schedule == "ZBVZeroBubble"
    assert config.training.disable_cuda_graphs
    (program,) = programs_of("docs/torchtitan.md")
    (tmp_path / "my_runs.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    config = parsed("--module", "my_runs", "--config", "my_run")
    assert config.model_spec.pipelining_fn.__module__.startswith("zerobubble.")
    with pytest.raises(ValueError, match="no_such_run"):
        parsed("--module", "zerobubble.integrations.torchtitan", "--config", "no_such_run")


@pytest.mark.feature("planning from the configuration")
def test_the_first_plan_needs_no_numbers(titan: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    arguments = ["plan", "--from", "titan:llama3_8b", "--gpu", "H100", "-p", "4", "-m", "8", "--evaluations", "50", "-o", str(file)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    plan = zb.io.load_plan(file)
    assert (plan.schedule.num_ranks, plan.schedule.num_microbatches) == (4, 8)
    assert set(plan.problem.first_layers) <= {"norm", *(f"layers.{number}" for number in range(32))}


def test_a_configuration_in_the_current_folder_is_planned(titan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs_to_plan.py").write_text(programs_of("docs/torchtitan.md")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])  # as that of an installed command
    arguments = ["plan", "--from", "titan:runs_to_plan:my_run", "--gpu", "H100", "-p", "2", "-m", "8", "--evaluations", "50"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output


@pytest.mark.refuses("planning models that the cost model does not cover")
@pytest.mark.parametrize(
    ("source", "stated"),
    [
        (["--from", "titan:llama3_8b"], "--gpu"),
        (["--from", "titan:no_such_run", "--gpu", "H100"], "no_such_run"),
        (["--from", "keras:model", "--gpu", "H100"], "keras:model"),
        (["--from", "titan:gpt_oss_debugmodel_flex", "--gpu", "H100"], "gpt_oss"),
        (["--from", "titan:llama3_8b", "--gpu", "H100", "--times", "1,1,1"], "--times"),
    ],
)
def test_sources_that_cannot_be_planned_are_refused(titan: Any, source: list[str], stated: str) -> None:
    done = CliRunner().invoke(main, ["plan", *source, "-p", "4", "-m", "8"])
    assert done.exit_code == 2
    states(done.output, stated)
