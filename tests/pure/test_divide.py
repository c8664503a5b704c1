"""Models divided over hypothetical GPUs: no pruned candidate is better, long steps are periodic, and wrong input is refused."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html import escape
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zerobubble as zb
from tests.refusals import Stated, raises, states
from zerobubble import InputError
from zerobubble.cli import main
from zerobubble.cost_model import Division, Divisions, Efficiency, Experts, Model, divide, transformer
from zerobubble.cost_model.candidates import SCHEDULES, candidates
from zerobubble.cost_model.configuration import known_model, with_sequence
from zerobubble.cost_model.estimate import shared_layers
from zerobubble.cost_model.held import RUNTIME_BYTES
from zerobubble.cost_model.setting import Setting
from zerobubble.cost_model.step import LongStep, Shapes
from zerobubble.units import show_bytes

SMALL = Model("small", 4, 2048, 16, 16, 8192, 51200, 1024)
EXPERTS = Model(
    "small-experts", 4, 1024, 8, 8, 4096, 32000, 1024, gated=True, dropout=False, fused_attention=True,
    experts=Experts(8, 2, 1024, shared=1, dense_layers=1),
)  # fmt: skip
ROOM = 3 * 10**9 + RUNTIME_BYTES


@pytest.fixture(scope="module")
def found() -> Divisions:
    return divide(SMALL, gpu="A100", gpus=4, batch=8, memory=ROOM, top=30)


def again(choice: Division) -> zb.cost_model.StepEstimate:
    """The step of a choice, from the front door and played in full."""
    names = ("tp", "cp", "ep", "pp", "v", "dp", "microbatch", "recompute")
    setting = {name: getattr(choice.setting, name) for name in names}
    layers = choice.estimate.layers
    return transformer(SMALL, gpu="A100", **setting, layers=layers).step(choice.step.schedule, choice.num_microbatches)


def test_choices_are_the_steps_of_their_settings(found: Divisions) -> None:
    assert len(found.choices) == 30
    for choice in found.choices:
        assert choice.setting.gpus == 4
        assert choice.setting.dp * choice.setting.microbatch * choice.num_microbatches == 8
        step = again(choice)
        assert step.rank_bytes == choice.step.rank_bytes
        assert max(step.rank_bytes) <= ROOM
        assert choice.step.seconds == pytest.approx(step.seconds, rel=0 if not choice.repeated else 1e-3)
        assert choice.least_seconds <= choice.step.seconds
    assert all(one.step.seconds <= other.step.seconds for one, other in pairwise(found.choices))


def test_nothing_that_was_left_out_is_better(found: Divisions) -> None:
    compare_with_all(found, SMALL, gpus=4, batch=8, room=ROOM)


@pytest.mark.long
def test_nothing_better_was_left_out_with_experts() -> None:
    found = divide(EXPERTS, gpu="H100", gpus=4, batch=4, memory=ROOM, top=20)
    assert {choice.setting.ep for choice in found.choices} >= {1, 2, 4}
    compare_with_all(found, EXPERTS, gpus=4, batch=4, room=ROOM)


def compare_with_all(found: Divisions, model: Model, gpus: int, batch: int, room: int) -> None:
    """Simulates every candidate in full."""
    gpu = found.best.setting.gpu
    base = Setting(
        model=model, gpu=gpu, tp=1, cp=1, ep=1, pp=1, v=1, dp=1, microbatch=1,
        recompute="none", sequence_parallel=True, overlap_tp=False, precision="bf16", gradients="fp32",
    )  # fmt: skip
    every = list(candidates(base, Efficiency(), gpus, batch))
    assert len(every) == found.ways
    quickest: dict[object, float] = {}
    for one in every:
        here = one.setting
        estimate = transformer(
            model, gpu=gpu, tp=here.tp, cp=here.cp, ep=here.ep, pp=here.pp, v=here.v, dp=here.dp, microbatch=here.microbatch,
            recompute=here.recompute, layers=one.layers,
        )  # fmt: skip
        step = estimate.step(one.tried.name, one.num_microbatches)
        assert one.seconds <= step.seconds
        assert one.rank_bytes <= max(step.rank_bytes) * (1 + 1e-9)
        if max(step.rank_bytes) <= room:
            way = here.tp, here.cp, here.ep, here.pp, here.dp, here.microbatch, here.recompute
            quickest[way] = min(step.seconds, quickest.get(way, step.seconds))
    known = [choice.step.seconds for choice in found.choices]
    assert sorted(quickest.values())[: len(known)] == pytest.approx(known, rel=1e-3)
    assert found.too_large + found.simulated < found.ways


@pytest.mark.parametrize(
    ("tried", "microbatches"),
    [(tried, count) for tried in SCHEDULES for count in (40, 43) if tried.v or count % 4 == 0],
    ids=lambda value: getattr(value, "name", value),
)
def test_long_steps_repeat_themselves(tried: Any, microbatches: int) -> None:
    ranks, v = 4, tried.v or 3
    costs = transformer("megatron-22b", gpu="A100", tp=8, pp=ranks, v=v).costs
    schedule = zb.make(tried.name, ranks, microbatches, None if tried.v else v)
    long = LongStep(Shapes(), tried.name, ranks, microbatches, None if tried.v else v)
    assert long.repeated
    assert long.makespan(costs) == pytest.approx(zb.simulation.metrics(schedule, costs).makespan, rel=2e-3)
    assert long.peak_memory(costs) == zb.simulation.peak_memory(schedule, costs)


@pytest.mark.parametrize(("total", "stages", "layers"), [(8, 4, (2, 2, 2, 2)), (6, 4, (1, 2, 2, 1)), (9, 4, (1, 3, 3, 2)), (5, 1, (5,))])
def test_layers_are_shared_with_embedding_and_head(total: int, stages: int, layers: tuple[int, ...]) -> None:
    assert shared_layers(total, stages) == layers


def test_layers_are_always_all_there() -> None:
    for total in range(1, 30):
        for stages in range(1, total + 1):
            counts = shared_layers(total, stages)
            assert len(counts) == stages
            assert sum(counts) == total
            assert max(counts) - min(counts) <= 2
            assert min(counts) >= 0


def test_progress_and_assumptions_cover_the_search() -> None:
    seen: list[tuple[int, int, Division | None]] = []
    found = divide(SMALL, gpu="A100", gpus=2, batch=4, top=1, progress=lambda *news: seen.append(news))
    assert seen[0] == (0, found.ways, None)
    assert seen[-1][2] == found.best or seen[-1][0] + 1 == found.simulated + found.too_large
    assert any("interleaved-1f1b" in sentence for sentence in found.assumptions)
    assert set(found.best.estimate.assumptions) < set(found.assumptions)


def test_the_command_line_prints_the_same() -> None:
    command = "plan --model megatron-22b --gpu A100 --gpus 16 --batch 16 --top 2 --memory 79GB"
    output = CliRunner().invoke(main, [*command.split(), "--json"])
    assert output.exit_code == 0, output.output
    found = divide("megatron-22b", gpu="A100", gpus=16, batch=16, top=2, memory=79 * 10**9)
    assert json.loads(output.output) == found.to_dict()
    shown, every = (" ".join(CliRunner().invoke(main, [*command.split(), *more]).output.split()) for more in ([], ["--verbose"]))
    for printed in (shown, every):
        assert printed.startswith(" ".join(f"{found.fit} {found.needs_own_code} {found}".split()))
    states(found.fit, "fits", "58.7 GB", "79 GB", "20.3 GB")
    assert (found.to_dict()["fits"], found.to_dict()["needed_bytes"]) == (True, max(found.best.step.rank_bytes))
    assert all(" ".join(sentence.split()) in every for sentence in found.assumptions)
    assert [sentence for sentence in found.assumptions if sentence in shown] == [*found.main_assumptions]


@pytest.mark.long
def test_the_page_has_all_choices_and_the_steps_of_the_first(tmp_path: Path) -> None:
    page, picture = tmp_path / "ways.html", tmp_path / "ways.svg"
    command = "plan --model megatron-22b --gpu A100 --gpus 64 --batch 1024 --top 4 --html"
    output = CliRunner().invoke(main, [*command.split(), str(page), "--svg", str(picture)])
    assert output.exit_code == 0, output.output
    found = divide("megatron-22b", gpu="A100", gpus=64, batch=1024, top=4)
    text = page.read_text(encoding="utf-8")
    rows = re.findall(r"<tr>(.*?)</tr>", text)
    for place, choice in enumerate(found.choices, start=1):
        row = re.sub(r"<[^>]+>", " ", rows[place]).split()
        assert row[:4] == ["way", str(place), f"{choice.step.seconds:.4g}", "s"]
        assert choice.step.schedule in row
    for sentence in found.assumptions:
        assert escape(sentence) in text
    drawn = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)[0])
    assert len(drawn["timelines"]) == 3
    for place, choice in enumerate(found.choices[:3], start=1):
        few = choice.schedule.num_microbatches
        said = f"Way {place} is drawn with {few:,} microbatches; the other {choice.num_microbatches - few:,} repeat its middle."
        assert (said in text) == (few < choice.num_microbatches) == bool(choice.repeated)
    assert any(choice.repeated for choice in found.choices[:3])
    assert f"way 1: {found.best.schedule.name}" in picture.read_text(encoding="utf-8")


def small(**given: Any) -> Divisions:
    return divide(**{"model": SMALL, "gpu": "A100", "gpus": 4, "batch": 8, **given})


WRONG = [
    (
        lambda: small(model="gpt", gpu="A1000", gpus=0, top=-1),
        ("gpus", 0, "top", -1, "model"),
    ),
    (lambda: small(model="gpt", gpu="A1000", gpus=0), ("GPU", "A1000", "A100")),
    (lambda: small(precision="fp8"), ("A100", "fp8", "bf16")),
    (lambda: small(gpus=1024, batch=3), (1024, "GPUs", 3)),
    (lambda: small(memory=10**9), ("A100", "1 GB")),
    (lambda: divide("llama3-70b", gpu="H100", gpus=64), ("llama3-70b", "published", 512)),
    (lambda: small(batch="32"), ("batch", "32")),
]


@pytest.mark.parametrize(("call", "stated"), WRONG, ids=range(len(WRONG)))
def test_wrong_questions_are_refused(call: Callable[[], object], stated: Stated) -> None:
    with raises(InputError, *stated):
        call()


def test_only_pipelines_and_their_replicas_are_tried() -> None:
    """Their first rank has the whole embedding, which tensor parallelism divides."""
    found = small(model=EXPERTS, gpus=4, pipeline_only=True, top=50)
    assert {(choice.setting.tp, choice.setting.cp, choice.setting.ep) for choice in found.choices} == {(1, 1, 1)}
    assert found.best.step.seconds >= small(model=EXPERTS, gpus=4).best.step.seconds
    with raises(InputError, "--pipeline-only"):
        small(memory="4.1GB", pipeline_only=True, gpus=4)


def test_replicas_of_a_pipeline_keep_the_whole_optimizer_state_unless_asked() -> None:
    """A parameter takes 2 + 2 + 12 bytes. FSDP2 divides all of them, and gathers weights and sums whole gradients during a step."""
    for shard in (False, True):
        found = small(pipeline_only=True, fsdp=shard, top=50)
        assert any(choice.setting.dp > 1 for choice in found.choices)
        for choice in found.choices:
            here, estimate = choice.setting, choice.estimate
            assert here.gradients == "bf16"
            of_one = 16 if not shard or here.dp == 1 else 4 + 16 / here.dp
            assert estimate.state_bytes == pytest.approx([of_one * count for count in estimate.parameters])
    with raises(InputError, "fsdp=True", "pipeline_only=True"):
        small(fsdp=True)
    with raises(InputError, "--fsdp"):
        small(pipeline_only=True, gpus=8, memory="4.7GB")


def test_little_memory_left_is_reported() -> None:
    """Temporary memory of passes is not counted, so a tenth must be left."""
    needed = small(top=1).needed_bytes
    for memory, is_tight in ((needed * 1.02, True), (needed * 1.2, False)):
        found = small(top=1, memory=round(memory))
        assert (found.needed_bytes, found.left_bytes, found.is_tight) == (needed, round(memory) - needed, is_tight)
        assert found.fit.startswith("fits") is not is_tight
        assert (found.to_dict()["is_tight"], found.to_dict()["left_bytes"]) == (is_tight, found.left_bytes)
        states(found.fit, show_bytes(found.left_bytes), show_bytes(needed))
        assert found.fitting == (None if is_tight else 1)
    several = small(top=50)
    less = min(choice.needed_bytes for choice in several.choices[1:])
    assert less < needed
    found = small(top=50, memory=round(max(less / 0.89, needed * 1.01)))
    assert found.fitting is not None
    fits = found.choices[found.fitting - 1]
    assert found.is_tight
    assert fits.needed_bytes <= 0.9 * found.memory_bytes
    assert found.fit.startswith("fits")
    states(found.fit, f"way {found.fitting}", show_bytes(fits.needed_bytes), show_bytes(found.needed_bytes))


def test_a_way_without_divided_layers_has_its_call() -> None:
    """The call makes the schedule of the way."""
    deep = replace(SMALL, layers=16)
    found = divide(deep, gpu="A100", gpus=4, batch=16, memory="79GB", pipeline_only=True, top=50)
    assert len({choice.setting.v for choice in found.choices}) > 1
    for choice in found.choices:
        made = re.search(r"zb\.make\(.*?\)", choice.call)
        assert made is not None
        schedule = eval(made[0], {"zb": zb})
        here = choice.setting
        assert (schedule.num_ranks, schedule.num_stages) == (here.pp, here.pp * here.v)
        assert (schedule.name, schedule.num_microbatches) == (choice.step.schedule, choice.num_microbatches)
        assert (f'("cuda", ({here.dp}, {here.pp}), mesh_dim_names=("dp", "pp"))' in choice.call) == (here.dp > 1)
    assert all(not choice.call for choice in small(top=50).choices if choice.setting.tp > 1)


def test_sequences_longer_than_the_configuration_are_reported() -> None:
    for positions, is_long in ((512, True), (4096, False)):
        model = replace(SMALL, positions=positions, position_table=False)
        found = divide(model, gpu="A100", gpus=2, batch=8, top=1)
        assert bool(found.too_long) == is_long == bool(found.to_dict()["too_long"])


def test_a_division_that_needs_code_of_the_model_says_so() -> None:
    found = divide("megatron-22b", gpu="A100", gpus=16, batch=16, top=1)
    assert found.best.setting.tp > 1
    states(found.needs_own_code, f"tp {found.best.setting.tp}", "zb.split", "--pipeline-only")
    assert found.needs_own_code == found.to_dict()["needs_own_code"]
    assert not small(pipeline_only=True).needs_own_code


SHAPE = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 8192}
BIG = {"num_hidden_layers": 1, "num_attention_heads": 7, "num_key_value_heads": 7, "hidden_size": 1792}
TOO_LARGE: list[tuple[dict[str, int], str, str]] = [
    ({}, "--gpu A10 --gpus 1 --batch 8 --memory 4.4GB", "--gpus --memory"),
    ({"num_hidden_layers": 276}, "--gpu H100 --gpus 1 --batch 1 --sequence 512", "--gpus --gradients"),
    ({}, "--gpu A10 --gpus 7 --batch 8 --memory 3.6GB --sequence 131072", "--gpus --sequence --memory"),
    ({"num_hidden_layers": 4}, "--gpu A10 --gpus 11 --batch 16", "--gpus --gpus --batch"),
    (BIG | {"vocab_size": 2**21}, "--gpu A10 --gpus 1 --batch 1 --sequence 512", "--gpu"),
    (BIG | {"vocab_size": 2**27}, "--gpu A10 --gpus 1 --batch 1", ""),
]


@pytest.mark.parametrize(("sizes", "options", "kinds"), TOO_LARGE)
def test_remedies_of_a_model_that_does_not_fit_work_as_typed(
    sizes: dict[str, int], options: str, kinds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(SHAPE | sizes))
    words = options.split()
    asked = dict(zip(words[::2], words[1::2], strict=True))
    model = with_sequence(known_model("config.json"), int(asked.get("--sequence", 4096)))
    with pytest.raises(InputError) as refused:
        divide(model, gpu=asked["--gpu"], gpus=int(asked["--gpus"]), batch=int(asked["--batch"]), memory=asked.get("--memory"))
    remedies = refused.value.fields["options"]
    assert [remedy.split()[1] for remedy in remedies] == kinds.split()
    assert CliRunner().invoke(main, ["plan", "config.json", *words]).exit_code == 2
    for remedy in remedies:
        how, *given = remedy.split()
        changed = asked | dict(zip(given[::2], given[1::2], strict=False))
        if how == "without":
            del changed[given[0]]
        done = CliRunner().invoke(main, ["plan", "config.json", *chain.from_iterable(changed.items()), "--json"])
        assert done.exit_code == 0, (remedy, done.output)
        answer = json.loads(done.output)
        smallest = min(max(choice["rank_bytes"]) for choice in answer["choices"])
        assert smallest <= answer["memory_bytes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model megatron-22b", "megatron-22b needs --gpu and --gpus, such as --gpu H100 --gpus 1024"),
        ("--model megatron-22b --gpus 8 -p 4 --times 1,1,1", "--ranks and --times cannot be used with --model: leave them out"),
        ("--model megatron-22b --gpus 8 --offload 5", "--offload cannot be used with --model: leave it out"),
        ("--gpu H100 --batch 8", "--gpu and --batch need --model"),
        ("--top 3", "--top needs --model"),
        ("--verbose", "--verbose needs --model"),
        ("--model megatron-22b --gpu A100 --gpus 8 --fsdp", "--fsdp needs --pipeline-only"),
        ("--model megatron-22b --gpu A100 --gpus 8 --batch 8 --memory 8", "--memory 8 with --model must have a unit"),
    ],
)
def test_options_that_do_not_go_together_are_reported(options: str, message: str) -> None:
    output = CliRunner().invoke(main, ["plan", *options.split()])
    assert output.exit_code == 2
    assert message in output.output


@pytest.mark.long
def test_the_picture_has_the_committed_figures_and_they_come_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parents[2] / "benchmarks/cost_model"
    monkeypatch.syspath_prepend(str(folder))
    scaling = importlib.import_module("scaling")
    results = json.loads((folder / "scaling.json").read_text(encoding="utf-8"))
    assert scaling.PICTURE.read_text(encoding="utf-8") == scaling.picture(results)
    assert [row["gpus"] for row in results["strong"]] == list(scaling.GPUS)
    last = results["strong"][-1]
    assert scaling.rounded(scaling.scaled("strong", last["gpus"], last["batch"])) == last
