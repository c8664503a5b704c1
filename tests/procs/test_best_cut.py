"""The best split, from a configuration to training: layers in a file, a plan within memory in bytes, and the model split by that plan.

A plan stores its cut by names, and every reader of the plan follows it.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import zerobubble as zb
from tests.device import cpu_only
from tests.families import next_token_loss, text, tiny_model
from tests.libraries import library
from tests.procs.ranks import Ranks
from tests.procs.test_models import differences, judge
from tests.refusals import raises, states
from tests.thinned import every
from zerobubble.cli import main
from zerobubble.cost_model.configuration import known_model, with_sequence
from zerobubble.cost_model.estimate import layers_of
from zerobubble.cost_model.machine import Machine, timed_on
from zerobubble.cost_model.setting import Setting
from zerobubble.partition import join_blocks

SIZES = {"vocab_size": 500, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2, "dtype": "float64"} | SIZES
HEAVY_HEAD = "lm_head"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library("transformers")
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path / "config.json"


def printed(*arguments: str) -> str:
    found = CliRunner().invoke(main, list(arguments))
    assert found.exit_code == 0, found.output
    return found.output


def refused(*arguments: str) -> str:
    found = CliRunner().invoke(main, list(arguments))
    assert found.exit_code == 2, found.output
    return found.output


def llama(config: str) -> nn.Module:
    transformers = library("transformers")
    torch.manual_seed(0)
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(Path(config).parent)).double()
    return made


def train_as_planned(group: Any, config: str, plan_file: str) -> list[tuple[dict[str, float], dict[int, list[str]]]]:
    """The model split by the plan, once with `cuts` and once by playing the plan: errors, and the parts of each stage."""
    plan = zb.io.load_plan(plan_file)
    ids = torch.randint(0, SIZES["vocab_size"], (8, 6), generator=torch.Generator().manual_seed(1))
    results = []
    for schedule, options in ((plan.schedule, {"cuts": plan}), (plan, {})):
        model = llama(config)
        worst = differences(group, model, schedule, {"input_ids": ids}, ids, next_token_loss, **options)
        split = zb.split(model, **options)
        bound = split.for_schedule(plan.schedule, plan.problem.first_layers)
        results.append((worst, {stage: summary.units for stage, summary in enumerate(bound.stages(plan.schedule.num_stages))}))
    return results


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "placement", "inside"), [(2, "vee", ["--inside-blocks"]), pytest.param(4, "linear", [], marks=pytest.mark.long)]
)
@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_a_plan_made_of_a_configuration_trains(world: Ranks, config: Path, ranks: int, placement: str, inside: list[str]) -> None:
    printed("split", "config.json", "--sequence", "6", "--batch", "2", *inside, "-o", "layers.json")
    shape = ("--ranks", str(ranks), "--microbatches", "4", "--placement", placement, "--evaluations", "100", *inside)
    printed("plan", "--layers", "layers.json", *shape, "--memory", "3MB", "-o", "plan.json")
    problem = zb.io.load_plan("plan.json").problem
    assert problem.layer_names[0] == "model.embed_tokens"
    is_within = [name.removeprefix("model.layers.").count(".") == 1 for name in problem.first_layers if "layers" in name]
    assert any(is_within) == bool(inside)
    results = world.run(train_as_planned, str(config), str(config.parent / "plan.json"), ranks=ranks)
    for way in range(2):
        judge([result[way][0] for result in results], llama(str(config)))
        stages = results[0][way][1]
        if not inside:  # a plan's layers in blocks are a norm and what follows it
            assert [len(units) for units in stages.values()] == list(problem.layers_per_stage)
        assert tuple(units[0] for units in stages.values())[1:] == problem.first_layers
    assert "stage 1" in printed("split", "config.json", "--schedule", "plan.json")


@pytest.mark.long
@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_the_cut_is_for_the_schedule_and_within_its_memory(config: Path) -> None:
    shape = ("--schedule", "zb-v", "--ranks", "2", "--microbatches", "4", "--sequence", "64")
    free = json.loads(printed("split", "config.json", *shape, "--json"))
    assert [stage["rank"] for stage in free["stages"]] == [0, 1, 1, 0]
    assert free["excess"] == free["least_excess"]
    states(free["heaviest"], 8, f"({HEAVY_HEAD})")
    message = refused("split", "config.json", *shape, "--memory", "500kB")
    states(message, "500 kB", "cuts", "memory")
    wanted = message.partition(" more on each rank (")[2].partition(")")[0]
    states(printed("split", "config.json", *shape, "--memory", wanted), "stage 3", "rank 0")


@pytest.mark.parametrize(("stated", "counted"), [({}, "float32"), ({"torch_dtype": "bfloat16"}, "bfloat16")])
@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_split_names_the_dtype_that_it_counts(config: Path, stated: dict[str, str], counted: str) -> None:
    config.write_text(json.dumps({name: value for name, value in CONFIG.items() if name != "dtype"} | stated), encoding="utf-8")
    states(printed("split", "config.json", "-o", "layers.json"), counted, "torch_dtype")
    assert json.loads(Path("layers.json").read_text())["dtype"] == {"name": counted, "in_config": bool(stated)}


@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_a_cut_in_words_has_a_bar_for_each_rank_and_the_bound_of_the_head(config: Path) -> None:
    words = printed("split", "config.json", "--stages", "4")
    assert "rank 3 |####################|" in words
    states(words, 8, "lm_head")
    states(words, "heaviest")


@pytest.mark.long
@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_counted_layers_take_the_times_of_the_cost_model(config: Path) -> None:
    """The errors are 3, 7 and 14 %. The head is apart: the cost model adds the loss, which the layers lack."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4}
    config.write_text(json.dumps(CONFIG | sizes | {"dtype": "bfloat16"}), encoding="utf-8")
    printed("split", "config.json", "--sequence", "2048", "-o", "layers.json")
    data, model = json.loads(Path("layers.json").read_text()), with_sequence(known_model("config.json"), 2048)
    for name, error in (("RTX4090", 0.06), ("H100", 0.12), ("A100", 0.20)):
        gpu = zb.cost_model.GPUS[name]
        counted = timed_on(zb.partition.layers_from_dict(data), Machine.from_dict(data["machine"]), gpu, 2)
        estimated = layers_of(Setting(model=model, gpu=gpu, pp=2))
        print(name, counted[1].time / estimated[1].time)
        assert counted[1].time == pytest.approx(estimated[1].time, rel=error)
        assert counted[1].output_comm == pytest.approx(estimated[1].output_comm, rel=1e-3)


WRONG: list[tuple[tuple[str, ...], str]] = [
    (("--stages", "400"), "a model of 9 parts cannot be cut into 400 stages"),
    (("--stages", "10"), "it has up to 15 stages"),
    (("--stages", "16", "--inside-blocks"), "a model of 15 parts cannot be cut into 16 stages"),
    (("--stages", "2", "--cuts", "model.layers.77"), "a stage cannot begin with 'model.layers.77'"),
    (("--stages", "2", "--schedule", "zb-v"), "--stages and --schedule contradict each other"),
    (("--schedule", "zb-v", "--ranks", "2"), "zb-v needs --microbatches M"),
    (("--stages", "2", "--memory", "4"), "--memory 4 has no unit"),
    ((), "give --stages S or --schedule NAME"),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=lambda value: str(value)[:30])
@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_a_wrong_call_is_refused_in_a_sentence(config: Path, arguments: tuple[str, ...], words: str) -> None:
    assert words in refused("split", "config.json", *arguments)


@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_too_many_stages_are_refused_before_anything_is_traced(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace of many layers takes minutes."""
    traces: list[Any] = []
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: traces.append(_))
    states(refused("split", "config.json", "--stages", "10"), 9, "model", "parts")
    assert not traces


@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_the_file_that_is_named_is_read(config: Path) -> None:
    """The folder's config.json is of another model."""
    Path("other.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 2}), encoding="utf-8")
    assert [len(json.loads(printed("split", name, "--json"))["layers"]) for name in ("other.json", "config.json", ".")] == [5, 9, 9]
    Path("other.json").write_text('{"model_type": "no such"}', encoding="utf-8")
    assert "other.json" in refused("split", "other.json", "--stages", "2")


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"model_type": "no such"}', "{}", '{"model_type": "llama", "num_attention_heads": "x"}'])
def test_a_file_that_is_no_configuration_is_refused(config: Path, text: str) -> None:
    config.write_text(text, encoding="utf-8")
    assert "config.json" in refused("split", "config.json", "--stages", "2")


class Wide(nn.Module):
    """Layers of unequal cost: the first are narrow inside, the last are wide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for width in (8, 8, 8, 8, 8, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_memory_limits_the_cut_in_python() -> None:
    split = zb.split(Wide(), example=torch.ones(4, 8))
    shares = [sum(stage.flops for stage in split.for_schedule(zb.make("zb-v", 2, 4)).stages(4) if stage.rank == rank) for rank in range(2)]
    assert max(shares) <= 1.1 * min(shares)
    with raises(zb.InputError, "10 kB", "cuts", "memory"):
        zb.split(Wide(), example=torch.ones(4, 8), memory="10 kB").cut(3)
    with raises(zb.InputError, "memory", "cuts", "chooses"):
        zb.split(Wide(), example=torch.ones(4, 8), memory="10 kB", cuts=[3, 4])
    with raises(zb.InputError, "B", "kB", "MB"):
        zb.split(Wide(), example=torch.ones(4, 8), memory="many")
    with raises(zb.InputError, "plan", "names", "parts"):
        zb.split(Wide(), example=torch.ones(4, 8), cuts=zb.plan(zb.Workload.uniform(2, (1, 1, 1)), 4, placements="vee", evaluations=0))


INSIDE: dict[str, list[str]] = {
    "llama": ["model.layers.1.mlp", "model.layers.2.post_attention_layernorm", "model.layers.4"],
    "gpt2": ["transformer.h.0.mlp", "transformer.h.1.ln_2", "transformer.h.2.attn"],
    "mixtral": ["model.layers.1.mlp", "model.layers.2.self_attn", "model.layers.2.mlp"],
}


def train_inside_blocks(group: Any, schedule: str, families: tuple[str, ...]) -> list[tuple[str, dict[str, float]]]:
    inputs, ids = text()
    found = []
    for family in families:
        cuts = INSIDE[family]
        model = tiny_model(family)
        found.append((family, differences(group, model, schedule, inputs, ids, next_token_loss, cuts=cuts)))
        model = tiny_model(family)
        found.append((family, differences(group, model, schedule, inputs, ids, next_token_loss, inside_blocks=True)))
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "ranks", "families"), every(3, [("zb-v", 2, ("llama",)), ("zb-v", 2, ("gpt2", "mixtral")), ("zb-h1", 4, ("gpt2",))])
)
def test_cuts_inside_of_blocks_train_as_one_device(world: Ranks, schedule: str, ranks: int, families: tuple[str, ...]) -> None:
    results = world.run(train_inside_blocks, schedule, families, ranks=ranks)
    for place, (family, _) in enumerate(results[0]):
        judge([of_rank[place][1] for of_rank in results], tiny_model(family))


@pytest.mark.long
def test_cuts_inside_blocks_are_chosen_where_they_balance_better() -> None:
    split = zb.split(tiny_model("llama"))
    inside = zb.split(tiny_model("llama"), inside_blocks=True)
    assert inside.layer_cut(4).excess < split.layer_cut(4).excess
    begins = [summary.units[0] for summary in inside.stages(4)]
    assert any(".layers." in name and name.count(".") > 2 for name in begins), begins
    parts = {layer.full_name for layer in inside.layers()}
    assert {f"model.layers.0.{name}" for name in ("input_layernorm", "post_attention_layernorm")} <= parts
    assert join_blocks(inside.layers())[1].time == split.layers()[1].time


class Dropping(nn.Module):
    """A block whose code applies dropout to some outputs of its parts, and uses the rest twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(8, 8)
        self.mlp = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + nn.functional.dropout(self.attention(x), 0.5, self.training)
        result: Tensor = x + self.mlp(x)
        return result


def test_blocks_that_draw_between_their_parts_are_cut_inside() -> None:
    split = zb.split(nn.Sequential(*(Dropping() for _ in range(3))), example=torch.ones(2, 8), inside_blocks=True)
    assert [layer.full_name for layer in split.layers()] == [f"{block}.{part}" for block in range(3) for part in ("attention", "mlp")]
    assert len(split.stages(4)) == 4


def test_a_checkpointed_block_is_not_cut() -> None:
    model = tiny_model("llama")
    for layer in cast(Any, model).model.layers:
        layer.gradient_checkpointing = True
    with raises(zb.InputError, "model.layers.1", "checkpointed", "block"):
        zb.split(model, cuts=["model.layers.1.mlp"])


PAGE = (Path(__file__).parents[2] / "docs/layers.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_the_commands_of_the_page_go_from_a_configuration_to_a_plan(config: Path) -> None:
    """docs/layers.md: what it shows in the shell runs, and the plan has the names of parts."""
    shown = re.search(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    commands = [shlex.split(line)[1:] for line in shown[1].splitlines()]
    assert len(commands) == 3
    for command in commands:
        output = printed(*command)
    assert "rank 1 |" in output
    problem = zb.io.load_plan("plan.json").problem
    assert len(problem.first_layers) == problem.placement.num_stages - 1
    assert set(problem.layer_names) >= {"model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "lm_head"}
