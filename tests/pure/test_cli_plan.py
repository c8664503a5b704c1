"""`zerobubble plan` and `zerobubble pareto`: printed output, files, pictures, and errors for wrong input."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import zerobubble as zb
from tests.refusals import states
from zerobubble.cli import main
from zerobubble.cli import plan as command
from zerobubble.cli.inputs.layers import read_layers
from zerobubble.cli.inputs.problem import SearchOptions
from zerobubble.cli.outputs import terminal
from zerobubble.cost_model.held import RUNTIME_BYTES
from zerobubble.cost_model.machine import Machine
from zerobubble.export.document import loads
from zerobubble.partition import Layer, stage_costs
from zerobubble.planning.attempt import PlanProgress
from zerobubble.planning.axes.layers import equal_limits
from zerobubble.planning.placements import FAMILIES

SHAPE = ("--ranks", "8", "--microbatches", "24", "--times", "18.522,18.086,9.337", "--comm", "0.601", "--held", "0.941")
WORK_8 = zb.Workload.uniform(8, (18.522, 18.086, 9.337), 0.601, 0.941)


def run(command: str, *options: str) -> Result:
    return CliRunner().invoke(main, [command, *options])


def printed(command: str, *options: str) -> str:
    result = run(command, *options)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def refused(command: str, *options: str) -> str:
    result = run(command, *options)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    return result.stderr


def test_json_has_the_figures_and_a_csv_that_gives_them_again() -> None:
    data = json.loads(printed("plan", *SHAPE, "--memory", "8", "--placement", "vee", "--evaluations", "3000", "--json"))
    assert (data["placement"], data["seconds"] >= 0, [choice["placement"] for choice in data["choices"]]) == ("vee", True, ["vee"])
    schedule = loads(data["csv"])
    assert zb.schedule_faults(schedule) == ()
    assert schedule.placement == zb.Placement.vee(8)
    costs = WORK_8.costs(schedule.placement)
    timeline = zb.simulate(schedule, costs)
    assert (data["bubble_span"], data["bubble_makespan"]) == (timeline.bubble_span, timeline.bubble_makespan)
    assert data["peak_microbatches"] == max(zb.simulation.peak_memory(schedule, costs)) / WORK_8.held_after_f[0] <= 8
    assert data["lower_bound_span"] == pytest.approx(0.0703, abs=5e-5)
    assert data["bubble_span"] >= data["lower_bound_span"]
    assert (data["status"] == "optimal") == (data["gap"] == 0)
    assert data["gap"] == pytest.approx((1 - data["lower_bound_span"]) / (1 - data["bubble_span"]) - 1, abs=1e-9)


def test_a_budget_of_0_gives_the_best_seed_of_each_placement() -> None:
    lines = printed("plan", *SHAPE, "--memory", "8", "--budget", "0").splitlines()
    assert lines[0].split()[:3] == ["placement", "period", "bubble"]
    assert {line.split()[0] for line in lines[1:8]} == set(FAMILIES)
    assert lines[1].endswith("interleaved-zb")
    linear = next(line.split() for line in lines[1:8] if line.startswith("linear"))
    assert linear == ["linear", "1,310", "ms", "15.85", "%", "15.85", "%", "optimal", "8", "336", "zb-heuristic"]


def test_the_csv_alone_is_printed_where_asked() -> None:
    csv = printed("plan", *SHAPE, "--memory", "8", "--placement", "linear", "--budget", "0", "--format", "torch-csv")
    found = zb.plan(WORK_8, 24, 8, placements="linear", seconds=0)
    assert loads(csv).rows == found.schedule.rows


def test_a_saved_plan_is_loaded_and_read_by_every_verb(tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    printed("plan", *SHAPE, "--memory", "5", "--placement", "vee", "--budget", "0", "-o", file)
    solved = zb.io.load_plan(file)
    assert (solved.schedule.name, solved.problem.limits.memory) == ("v-half", (60_000_000,) * 8)
    assert "v-half" in printed("check", file)
    assert json.loads(printed("show", file, "--json"))["name"] == "v-half"


def test_makespan_is_an_objective_too() -> None:
    shape = ("--ranks", "4", "--microbatches", "8", "--memory", "8", "--placement", "linear", "--budget", "0", "--json")
    span, makespan = (json.loads(printed("plan", *shape, "--objective", aim)) for aim in ("period", "makespan"))
    assert span["bubble_span"] == 0 < span["bubble_makespan"]
    assert makespan["bubble_makespan"] <= span["bubble_makespan"]
    assert makespan["gap"] == pytest.approx((1 - makespan["lower_bound_makespan"]) / (1 - makespan["bubble_makespan"]) - 1, abs=1e-9)


def test_a_baseline_is_asked_instead() -> None:
    data = json.loads(printed("plan", *SHAPE, "--memory", "8", "--baseline", "zb-heuristic", "--json"))
    assert (data["placement"], data["name"], round(data["bubble_span"], 4)) == ("linear", "zb-heuristic", 0.1585)
    states(refused("plan", *SHAPE, "--baseline", "zb-heur"), "zb-heur", "zb-heuristic")


# Times of each rank.


def written(tmp_path: Path, data: Any) -> str:
    file = tmp_path / "ranks.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(file)


COLUMNS = {"forward": [1, 2, 1.5], "backward": [1, 2, 1], "weight": [1, 1, 1]}
WORK = zb.Workload.from_ms([1, 2, 1.5], [1, 2, 1], [1, 1, 1], [0.25] * 3, 0.5)


@pytest.mark.parametrize(
    "data",
    [
        COLUMNS,
        COLUMNS | {"comm": [0.25, 0.25], "held": 0.5},
        COLUMNS | {"comm": [0.25] * 3},
        [[1, 1, 1], [2, 2, 1], [1.5, 1, 1]],
        WORK.to_dict(),
    ],
    ids=["columns", "links", "ring", "rows", "workload"],
)
def test_times_of_each_rank_come_from_a_file(tmp_path: Path, data: Any) -> None:
    options = ("--per-rank", written(tmp_path, data), "--microbatches", "6", "--memory", "3", "--comm", "0.25", "--held", "0.5")
    output = json.loads(printed("plan", *options, "--placement", "linear", "--budget", "0", "--json"))
    timeline = zb.simulate(loads(output["csv"]), WORK.costs(zb.Placement.linear(3)))
    assert output["bubble_span"] == timeline.bubble_span


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([[1, 1, 1], [1, -2, 1]], "backward of rank 1 must be a finite number >= 0, got -2"),
        ('{"forward": [1, 1], "backward": [1, 1], "weight": [NaN, 1]}', "weight of rank 0 must be a finite number >= 0, got nan"),
        ({"forward": [1, 1], "backward": [1], "weight": [1, 1]}, "backward of rank 1 must be a finite number >= 0, got None"),
        ([[1, 1, 1], [1, 1]], "rank 1 needs three times in ms"),
        ({"forward": [1, 1], "backward": [1, 1]}, "the list 'weight' is missing"),
        (COLUMNS | {"wieght": [1]}, "'wieght' is unknown"),
        (COLUMNS | {"comm": [1]}, "comm in a workload must be 3, one per rank, got 1"),
        (COLUMNS | {"held": "x"}, "held of rank 0"),
        ([], "at least one rank"),
        ("{", "line 1: not JSON"),
        ("3", "expected an object or a list"),
    ],
)
def test_wrong_times_name_their_rank(tmp_path: Path, data: Any, reason: str) -> None:
    assert reason in refused("plan", "--per-rank", written(tmp_path, data), "--microbatches", "4")


def test_sums_of_a_rank_leave_in_the_buckets_that_are_reported(tmp_path: Path) -> None:
    """By an option or in the file of ranks; stages of a rank share its buckets."""
    asked = ("plan", "-m", "6", "--placement", "vee", "--budget", "0", "--objective", "makespan", "--json")
    equal = ("-p", "3", "--times", "2,2,2", "--reduce", "4")
    file = written(tmp_path, {name: [2, 2, 2] for name in COLUMNS} | {"reduce": [4, 4, 4], "buckets": [3, 3, 3]})
    one, other, whole = (
        json.loads(printed(*asked, *more))["makespan_ms"] for more in ((*equal, "--buckets", "3"), ("--per-rank", file), equal)
    )
    assert one == other < whole
    assert zb.Workload.uniform(3, (2, 2, 2), reduce=4, buckets=3).costs(zb.Placement.vee(3)).buckets == (2,) * 6
    shown = json.loads(printed("show", "zb-h1", "-p", "4", "-m", "8", "--times", "20,20,20", "--reduce", "20", "--buckets", "8", "--json"))
    assert shown["makespan_ms"] == zb.simulate(zb.make("zb-h1", 4, 8), zb.Costs.uniform(4, (20,) * 3, reduce=20, buckets=8)).makespan / 1e6


def test_the_file_and_the_options_must_agree(tmp_path: Path) -> None:
    states(refused("plan", "--per-rank", written(tmp_path, COLUMNS), "--ranks", "4", "--microbatches", "4"), "--ranks", 4)


# Layers.

MS = 1_000_000

HEADED = [[3, 3, 1.6]] * 22 + [[8, 9, 4]]
"""A heavy head: on 4 ranks of 6 layers the head's rank is not the slowest, and yet in everybody's way."""

ON_LAYERS = ("--ranks", "4", "--microbatches", "12", "--memory", "4", "--comm", "0.5", "--held", "0.5", "--evaluations", "400")


@pytest.mark.long
def test_layers_are_cut_together_with_the_plan(tmp_path: Path) -> None:
    file, saved = written(tmp_path, HEADED), tmp_path / "plan.json"
    data = json.loads(printed("plan", "--layers", file, *ON_LAYERS, "--placement", "linear", "--json", "-o", str(saved)))
    ordinary = json.loads(printed("plan", *SHAPE, "--memory", "8", "--budget", "0", "--json"))
    assert set(data) == {*ordinary, "layers", "excess_inside_blocks", "gpu", "machine", "dtype"}
    of_layers = data["layers"]
    layers = read_layers(file, 0.5, 0.5)
    timeline = zb.simulate(loads(data["csv"]), stage_costs(layers, tuple(of_layers["cuts"])))
    assert data["bubble_span"] == timeline.bubble_span
    assert of_layers["cuts"] != of_layers["balanced_cuts"]
    assert of_layers["gain"] > 0.01
    assert data["choices"][0]["bubble_span"] == data["bubble_span"]
    assert zb.io.load_plan(saved).problem.costs == stage_costs(layers, tuple(of_layers["cuts"]))


def test_the_text_shows_the_cuts_and_what_cannot_be_cut(tmp_path: Path) -> None:
    lines = printed("plan", "--layers", written(tmp_path, HEADED[-9:]), *ON_LAYERS, "--placement", "linear,looped-3").splitlines()
    (winner,) = [line for line in lines if re.match(r"The winner has stages of (\d )+layers: ", line)]
    assert sum(map(int, re.findall(r"\b\d\b", winner.split(" layers")[0]))) == 9
    why = "one of 4 ranks has 3 of the 9 layers that take 7.6 ms or more"
    slowest = "Its slowest rank takes 22.8 ms for a microbatch, 1.115 x an even share; no cut on this placement is below 1.115 x"
    assert f"{slowest}: {why}." in " ".join(lines)
    assert any(line.startswith("layer 8, the heaviest, takes 21 ms, 1.027 x an even share") for line in lines)
    states(lines[-1], "looped-3", 9, 12)


def test_both_forms_of_layers_are_the_same(tmp_path: Path) -> None:
    form = {"format": "zerobubble layers 1", "layers": [asdict(layer) for layer in read_layers(written(tmp_path, HEADED), 0.5, 0.5)]}
    assert read_layers(written(tmp_path, form), 0, 1) == read_layers(written(tmp_path, HEADED), 0.5, 0.5)
    assert read_layers(written(tmp_path, HEADED), 0.5, 0.5)[-1] == Layer(8_000_000, 9_000_000, 4_000_000, 12_000_000, 6_000_000, 0, 500_000)


GB = 10**9
BLOCKS: list[dict[str, Any]] = [
    {"forward": time * MS, "backward": time * MS, "weight": time * MS, "held_after_f": GB, "held_after_b": GB // 2, "name": name}
    | {"block": f"layers.{number}", "parameters_bytes": 2 * GB}
    for number in range(8)
    for name, time in (("attention", 3), ("mlp", 7))
]
HEAD = {"forward": 13 * MS, "backward": 13 * MS, "weight": 13 * MS, "held_after_f": GB, "held_after_b": GB, "parameters_bytes": 6 * GB}
OF_BLOCKS = {"format": "zerobubble layers 1", "layers": [*BLOCKS, HEAD | {"name": "lm_head"}]}


@pytest.mark.parametrize("room", [("--memory", "40GB"), ("--memory", f"{40 * GB}B"), ("--memory", "40000 MB")])
def test_memory_in_bytes_is_for_all_that_a_rank_holds(tmp_path: Path, room: tuple[str, ...]) -> None:
    file, saved = written(tmp_path, OF_BLOCKS), tmp_path / "plan.json"
    options = ("--ranks", "3", "--microbatches", "6", "--placement", "linear", "--evaluations", "50", *room)
    output = json.loads(printed("plan", "--layers", file, *options, "--json", "-o", str(saved)))
    assert all(parameters + activations <= 40 * GB for parameters, activations in output["layers"]["rank_bytes"])
    assert sum(parameters for parameters, _ in output["layers"]["rank_bytes"]) == 38 * GB
    states(output["layers"]["heaviest"], 8, "lm_head", "39 ms", "0.419")
    problem = zb.io.load_plan(saved).problem
    assert sum(problem.layers_per_stage) == 9
    assert [sum(problem.layers_per_stage[:stage]) for stage in (1, 2)] == output["layers"]["cuts"]
    printed("show", str(saved), "--html", str(tmp_path / "plan.html"))
    [data] = re.findall(r'id="data">(.*?)</script>', (tmp_path / "plan.html").read_text())
    [drawn] = json.loads(data)["timelines"]
    [(kept, sizes)] = drawn["layers"].items()
    assert (kept, sizes) == ("parameters, gradients and optimizer state", [parameters for parameters, _ in output["layers"]["rank_bytes"]])
    limits = [limit + size for limit, size in zip(drawn["limits"], sizes, strict=False)]
    assert limits in ([40 * GB] * 3, []), "limits of all memory, none where no order reaches them"


ON_GPU = ("--ranks", "3", "--microbatches", "6", "--placement", "linear", "--evaluations", "50", "--json")


def test_a_named_gpu_sets_the_times_of_counted_operations_and_the_memory(tmp_path: Path) -> None:
    """Blocks of 10 ms have 4e12 FLOPs at the rate of the assumed machine, and hold GB for a B, half of them for a W."""
    file = written(tmp_path, OF_BLOCKS | {"machine": Machine().to_dict()})
    assumed = json.loads(printed("plan", "--layers", file, *ON_GPU))
    assert (assumed["gpu"], Machine.from_dict(assumed["machine"])) == (None, Machine())
    states(printed("plan", "--layers", file, *ON_GPU[:-1]), "400 TFLOP/s", "50 GB/s", "--gpu")
    for name in ("RTX4090", "H100"):
        gpu, data = zb.cost_model.GPUS[name], json.loads(printed("plan", "--layers", file, "--gpu", name, *ON_GPU, "--memory", "60GB"))
        assert (data["gpu"], data["machine"], data["memory_bytes"], data["reserved_bytes"]) == (name, None, 60 * GB, RUNTIME_BYTES)
        assert all(sum(kept) <= 60 * GB - RUNTIME_BYTES for kept in data["layers"]["rank_bytes"])
        computed = 3 * 0.013 * 4e14 / gpu.sustained_of("bf16") + (2 + 2 + 2) * GB / (0.85 * gpu.memory_bandwidth)
        (head,) = re.findall(r"takes ([\d,.]+) ms", data["layers"]["heaviest"])
        assert float(head.replace(",", "")) == pytest.approx(1e3 * computed, rel=1e-3)


def test_all_memory_of_a_gpu_is_the_limit_but_what_cuda_and_nccl_take(tmp_path: Path) -> None:
    """The head alone takes all but 2 GB of an RTX 4090. Measured times stay as they are."""
    gpu = zb.cost_model.GPUS["RTX4090"]
    heavy = [HEAD | {"parameters_bytes": gpu.memory_bytes - RUNTIME_BYTES - 2 * GB, "name": "lm_head"}]
    file = written(tmp_path, OF_BLOCKS | {"layers": [*BLOCKS[:8], *heavy]})
    data = json.loads(printed("plan", "--layers", file, "--gpu", "RTX4090", *ON_GPU))
    assert (data["memory_bytes"], data["reserved_bytes"]) == (gpu.memory_bytes, RUNTIME_BYTES)
    states(data["layers"]["heaviest"], "lm_head", "39 ms")
    heavy[0]["parameters_bytes"] += 2 * GB
    file = written(tmp_path, OF_BLOCKS | {"layers": [*BLOCKS[:8], *heavy]})
    states(refused("plan", "--layers", file, "--gpu", "RTX4090", *ON_GPU), "23.6 GB")
    states(refused("plan", "--layers", file, "--gpu", "RTX4090", *ON_GPU, "--memory", "2GB"), "--memory", "2 GB", "2.15 GB")
    states(refused("plan", "--layers", written(tmp_path, HEADED), "--gpu", "RTX4090", *ON_GPU), "--gpu")


@pytest.mark.parametrize("machine", [{"flops_per_second": "fast", "bytes_per_second": 1}, {"flops_per_second": 1}, [1], 3])
def test_a_machine_that_cannot_be_read_is_refused(tmp_path: Path, machine: object) -> None:
    states(refused("plan", "--layers", written(tmp_path, OF_BLOCKS | {"machine": machine}), *ON_GPU), "machine", "flops_per_second")


def test_the_dtype_that_split_counted_is_repeated(tmp_path: Path) -> None:
    for in_config, stated in ((False, ("float32", "torch_dtype", "bfloat16")), (True, ("float32", "torch_dtype"))):
        dtype = {"name": "float32", "in_config": in_config}
        file = written(tmp_path, OF_BLOCKS | {"machine": Machine().to_dict(), "dtype": dtype})
        said = printed("plan", "--layers", file, *ON_GPU[:-1])
        states(said, *stated)
        assert ("bfloat16" in said) is not in_config
    assert json.loads(printed("plan", "--layers", file, *ON_GPU))["dtype"] == dtype
    states(refused("plan", "--layers", written(tmp_path, OF_BLOCKS | {"dtype": "float32"}), *ON_GPU), "dtype", "in_config")


def test_recomputation_is_advised_where_it_makes_layers_fit(tmp_path: Path) -> None:
    block = {"forward": 10, "backward": 15, "weight": 8, "held_after_f": 1000, "held_after_b": 500, "parameters_bytes": 700}
    file = written(tmp_path, OF_BLOCKS | {"layers": [block] * 16})
    shape = ("--layers", file, "--ranks", "2", "--microbatches", "4", "--placement", "looped-4", "--evaluations", "0")
    with_advice = refused("plan", *shape, "--memory", "10kB")
    states(with_advice, "--recompute auto", "10 kB")
    printed("plan", *shape, "--memory", "10kB", "--recompute", "auto")
    assert "--recompute" not in refused("plan", *shape, "--memory", "6kB")


def test_cuts_inside_blocks_are_offered_and_made(tmp_path: Path) -> None:
    shape = ("--ranks", "4", "--microbatches", "6", "--placement", "linear", "--evaluations", "50")
    options = ("--layers", written(tmp_path, OF_BLOCKS), *shape)
    whole, inside = (json.loads(printed("plan", *options, *more, "--json")) for more in ((), ("--inside-blocks",)))
    assert whole["layers"]["excess"] > inside["layers"]["excess"] >= whole["excess_inside_blocks"]
    assert inside["excess_inside_blocks"] is None
    states(printed("plan", *options), "rank", "slowest")


def test_pages_of_plans_for_layers_run_the_model_that_has_them(tmp_path: Path) -> None:
    shape = ("--ranks", "3", "--microbatches", "6", "--placement", "linear", "--budget", "0", "--html", str(tmp_path / "plan.html"))
    named = {
        "layers": [{"forward": 1, "backward": 1, "weight": 1, "held_after_f": 4, "held_after_b": 2, "name": f"l{n}"} for n in range(4)]
    }
    for layers, line in ((named, "zb.Pipeline(zb.split(model), "), (HEADED, "makes the layers of a stage; numbers of layers: ")):
        printed("plan", "--layers", written(tmp_path, layers), *shape)
        assert line in (tmp_path / "plan.html").read_text(encoding="utf-8")


def test_memory_without_a_unit_is_reported_as_microbatches_where_bytes_are_known(tmp_path: Path) -> None:
    shape = ("--ranks", "3", "--microbatches", "6", "--placement", "linear", "--budget", "0", "--memory")
    file = written(tmp_path, OF_BLOCKS)
    assert re.search(r"--memory 40 holds 40 microbatches, .* GB on each rank", printed("plan", "--layers", file, *shape, "40"))
    assert "--memory 40 holds" not in printed("plan", "--layers", file, *shape, "40GB")


def test_memory_too_small_for_all_placements_is_one_short_sentence(tmp_path: Path) -> None:
    shape = ("--ranks", "3", "--microbatches", "6", "--budget", "0", "--memory", "14GB")
    said = refused("plan", "--layers", written(tmp_path, OF_BLOCKS), *shape)
    assert said.count("cannot be cut either") == 1
    assert len(said) < 400


def test_memory_that_is_too_small_or_unknown_is_reported(tmp_path: Path) -> None:
    shape = ("--ranks", "3", "--microbatches", "6", "--placement", "linear", "--budget", "0")
    states(refused("plan", "--layers", written(tmp_path, OF_BLOCKS), *shape, "--memory", "14GB"), "cuts", "memory")
    states(refused("plan", "--layers", written(tmp_path, HEADED), *shape, "--memory", "40GB"), "bytes", "times")
    states(refused("plan", *SHAPE, "--memory", "40XB"), "40XB", "microbatches", "bytes")
    states(refused("plan", *SHAPE, "--memory", "40GB"), "--microbatch-bytes", "bytes")
    states(refused("plan", *SHAPE, "--memory", "40GB", "--microbatch-bytes", "50GB"), "0.8", 1)
    states(refused("plan", *SHAPE, "--memory", "8000000000"), "--memory", "8000000000B")
    states(refused("plan", *SHAPE, "--inside-blocks"), "--inside-blocks", "--layers")


def test_memory_is_an_equal_share_of_parameters_and_activations() -> None:
    layers = [Layer(1, 1, 1, held, 0, parameters) for held, parameters in ((10, 40), (20, 0), (30, 20))]
    assert equal_limits(layers, 3, 2.5).memory == (70, 70, 70)


GOOD = {"forward": 1, "backward": 1, "weight": 1, "held_after_f": 1, "held_after_b": 1}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([[1, 1, 1], [1, -2, 1]], "backward of layer 1 must be a finite number of ms >= 0, got -2"),
        ("[[1, 1, 1], [1, 1, NaN]]", "weight of layer 1 must be a finite number of ms >= 0, got nan"),
        ([[1, 1, 1], [1, 1]], "layer 1 needs three times in ms, [F, B, W], got [1, 1]"),
        ({"layers": [GOOD, GOOD | {"forward": 0.5}]}, "forward of layer 1 must be a whole number >= 0 of ns or bytes, got 0.5"),
        ({"layers": [GOOD, GOOD | {"held_after_b": -1}]}, "held_after_b of layer 1 must be a whole number >= 0 of ns or bytes, got -1"),
        ({"layers": [GOOD, {"forward": 1}]}, "layer 1 lacks 'backward'"),
        ({"layers": [GOOD | {"wieght": 1}]}, "layer 0 has 'wieght', which no layer has"),
        ({"layers": [GOOD | {"name": 3}]}, "name of layer 0 must be one line of printable text, got 3"),
        ({"layers": [3]}, "layer 0 must be an object, got 3"),
        ({"format": "zerobubble workload 1"}, "give a list with [F, B, W] in ms per layer, or the JSON form of layers"),
        ("{", "line 1: not JSON"),
        ([[1, 1, 1]], "linear: 1 layer cannot be cut into 2 stages"),
    ],
)
def test_wrong_layers_are_named(tmp_path: Path, data: Any, reason: str) -> None:
    found = refused("plan", "--layers", written(tmp_path, data), "--ranks", "2", "--microbatches", "4", "--placement", "linear")
    assert reason in found


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--per-rank", "x"), "--layers and --per-rank contradict each other"),
        (("--fused", "3"), "--layers and --fused contradict each other"),
        (("--times", "3,3,2"), "--layers and --times contradict each other"),
        (("--reduce", "3"), "--layers and --reduce contradict each other"),
        (("--microbatches", "4"), "plan needs --ranks P"),
    ],
)
def test_layers_need_ranks_and_stand_alone(tmp_path: Path, options: tuple[str, ...], reason: str) -> None:
    assert reason in refused("plan", "--layers", written(tmp_path, HEADED), *options)


# Wrong requests.


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--ranks", "4"), "plan needs --microbatches M"),
        (("--ranks", "0", "--microbatches", "4"), "--ranks must be at least 1, got 0"),
        ((*SHAPE, "--memory", "0.4"), "every rank has memory for 0.4 microbatches and needs memory for 1 to run one alone"),
        (
            (*SHAPE, "--memory", "1", "--microbatch-costs", "4" + ",1" * 23),
            "memory for 1 microbatch and needs memory for 4 to run the largest alone",
        ),
        ((*SHAPE, "--memory", "1", "--head", "1,1,1", "--head-held", "0.5"), "has memory for 1 microbatch and needs memory for 1.5 to run"),
        ((*SHAPE, "--memory", "-3"), "above 0, got -3"),
        ((*SHAPE, "--memory", "nan"), "above 0, got nan"),
        ((*SHAPE, "--placement", "vee,loped-3"), "no placement 'loped-3': did you mean 'looped-3'"),
        ((*SHAPE, "--budget", "-1"), "--budget"),
        ((*SHAPE, "--objective", "speed"), "--objective"),
        ((*SHAPE[:4], "--times", "1,nan,1"), "nan is not in 0 to"),
        ((*SHAPE[:4], "--times", "1,1"), "has 2 times"),
        ((*SHAPE, "--json", "--format", "torch-csv"), "contradict each other"),
        (("--ranks", "4000", "--microbatches", "4000"), "the command line takes at most"),
        (("--ranks", "400", "--microbatches", "1700", "--placement", "wave-4"), "the command line takes at most"),
        ((*SHAPE, "--placement", "linear", "--budget", "0", "-o", "no/such/folder/plan.json"), "cannot write"),
    ],
)
def test_wrong_requests_are_one_sentence(options: tuple[str, ...], reason: str) -> None:
    assert reason in refused("plan", *options)


@pytest.mark.sweep
@pytest.mark.parametrize("spelled", ["40GB", "40gb", "40G", "40 GB", "40g", "4e10B", "40000MB"])
def test_bytes_may_be_spelled_as_people_write_them(spelled: str) -> None:
    command = ["plan", *SHAPE, "--microbatch-bytes", "4GB", "--budget", "0", "--json", "--memory"]
    wanted, found = (CliRunner().invoke(main, [*command, memory]) for memory in ("10", spelled))
    figures = [[choice["span_ms"] for choice in json.loads(each.stdout)["choices"]] for each in (wanted, found)]
    assert figures[0] == figures[1]


def test_times_may_have_a_unit() -> None:
    output = [
        CliRunner()
        .invoke(main, ["plan", "--ranks", "4", "--microbatches", "8", "--budget", budget, "--times", times, "--comm", comm])
        .stdout
        for budget, times, comm in (("0", "18.5,18.1,9.3", "0.5"), ("0s", "18.5ms,18100us,0.0093s", "500us"))
    ]
    first, second = (re.sub(r" took \S+ s\. To search, give \S+ s", "", " ".join(text.split())) for text in output)
    assert first == second != ""
    states(refused("plan", *SHAPE, "--budget", "10 x"), "'10 x'", "neither", "number")
    states(refused("plan", *SHAPE, "--budget", "25h"), "25h", 0, 86400)


def test_a_plan_has_no_more_stages_than_the_model_has_layers() -> None:
    command = ("plan", "--ranks", "4", "--microbatches", "8", "--memory", "8", "--budget", "0", "--json")
    for layers, names in ((16, FAMILIES), (8, ("linear", "vee", "looped-2")), (4, ("linear",))):
        found = json.loads(CliRunner().invoke(main, [*command, "--num-layers", str(layers)]).stdout)
        assert {choice["placement"] for choice in found["choices"]} == set(names)
    states(refused(*command, "--num-layers", "3"), 4, "--num-layers", 3)
    states(refused(*command, "--placement", "vee", "--num-layers", "7"), 4, 8, "--num-layers", 7)


def test_a_plan_from_times_reports_how_many_layers_its_stages_need() -> None:
    command = ["plan", "--ranks", "4", "--microbatches", "8", "--memory", "8", "--budget", "0"]
    states(CliRunner().invoke(main, [*command, "--placement", "vee"]).stdout, 8, "stages", "layer")
    for more in (["--placement", "linear"], ["--placement", "vee", "--num-layers", "8"]):
        assert "The winner has" not in CliRunner().invoke(main, [*command, *more]).stdout


def test_slices_are_suggested_for_few_microbatches_alone() -> None:
    def printed(microbatches: int, *more: str) -> str:
        command = ["plan", "--ranks", "8", "--microbatches", str(microbatches), "--budget", "0", "--placement", "linear"]
        return CliRunner().invoke(main, [*command, *more]).stdout

    states(printed(4), "--slices auto", 4, 8)
    for microbatches, more in ((64, ()), (4, ("--slices", "2")), (4, ("--recompute", "full", "--memory", "8"))):
        assert "--slices auto" not in printed(microbatches, *more)


# The bar.


def test_the_bar_shows_bubble_and_gap_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr(terminal, "Console", lambda **_: Console(file=drawn, force_terminal=True, width=120))
    searching = SearchOptions(placement="any", budget=5.0, seed=0)
    with command.search_progress(searching) as watch:
        assert watch is not None
        watch(PlanProgress("wave-4", 0.0457, 0.012, "annealing"))
    states(" ".join(drawn.getvalue().split()), "wave-4", "4.57", "1.20")
    with command.search_progress(replace(searching, budget=0.0)) as watch:
        assert watch is None
    monkeypatch.setattr(terminal, "Console", lambda **_: Console(file=drawn, force_terminal=False))
    with command.search_progress(searching) as watch:
        assert watch is None


# The front.

FRONT = ("--ranks", "4", "--microbatches", "8", "--placement", "linear,vee", "--budget", "0")


def test_a_front_has_a_point_for_each_limit(tmp_path: Path) -> None:
    svg, html = tmp_path / "front.svg", tmp_path / "front.html"
    data = json.loads(printed("pareto", *FRONT, "--memory", "0.5:4:0.5", "--json", "--svg", str(svg), "--html", str(html)))
    assert [point["memory"] for point in data] == [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]
    assert data[0]["best"] is None
    found = [point["best"]["bubble_span"] for point in data[1:]]
    assert found == sorted(found, reverse=True)
    assert all(point["lower_bound"] <= point["best"]["bubble_span"] + 1e-12 for point in data[1:])
    circles = list(ElementTree.fromstring(svg.read_text()).iter("{http://www.w3.org/2000/svg}circle"))
    assert sum("best" in circle.get("class", "") for circle in circles) == 7
    heights = [float(circle.get("cy", "")) for circle in circles if "best" in circle.get("class", "")]
    assert heights == sorted(heights), "a smaller bubble is further down"
    page = html.read_text()
    assert page.count("<tr>") == 9
    assert "nothing fits" in page


def test_a_front_is_a_table_over_the_usual_limits() -> None:
    lines = printed("pareto", *FRONT).splitlines()
    assert [float(line.split()[0]) for line in lines[1:16]] == [1 + n / 2 for n in range(15)]
    ends = [line.split()[1:6] for line in (lines[7], lines[15])]
    assert ends == [["vee", "24", "ms", "0.00", "%"], ["linear", "24", "ms", "0.00", "%"]], "with memory enough, that with fewer messages"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((*FRONT, "--memory", "4"), "'4' is not LO:HI:STEP"),
        ((*FRONT, "--memory", "4:2:1"), "HI"),
        ((*FRONT, "--memory", "1:4:0"), "STEP"),
        ((*FRONT, "--memory", "1:4:1", "--evaluations", "10", "--budget", "3"), "--budget"),
        ((*FRONT, "--memory", "1:40:0.1"), "more than 100 limits"),
        ((*FRONT, "--memory", "0.1:0.5:0.1"), "no schedule fits at any of the limits: every rank"),
        (("--ranks", "4"), "pareto needs --microbatches M"),
    ],
)
def test_a_front_that_cannot_be_is_refused(options: tuple[str, ...], reason: str) -> None:
    assert reason in refused("pareto", *options)


# Costs of the stages of one placement.

UNEVEN = zb.Costs((3, 5, 4, 6), (6, 9, 8, 12), (3, 4, 4, 7), (1, 0, 1), (100, 200, 150, 120), (60, 100, 80, 50))


def costs_file(tmp_path: Path, costs: zb.Costs = UNEVEN) -> str:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(costs.to_dict()))
    return str(file)


@pytest.mark.parametrize(
    ("placement", "made"),
    [("linear", zb.Placement.linear(4)), ("vee", zb.Placement.vee(2)), ("looped-2", zb.Placement.looped(2, 2))],
)
def test_costs_of_stages_are_planned_on_their_placement(tmp_path: Path, placement: str, made: zb.Placement) -> None:
    options = ("--costs", costs_file(tmp_path), "--placement", placement, "--microbatches", "6", "--evaluations", "300")
    data = json.loads(printed("plan", *options, "--json"))
    found = zb.plan(UNEVEN, 6, placements=made, evaluations=300)
    assert loads(data["csv"]).rows == found.schedule.rows
    assert data["bubble_span"] == zb.simulate(found.schedule, UNEVEN).bubble_span
    assert printed("plan", *options, "--ranks", str(made.num_ranks), "--format", "torch-csv") == data["csv"]


def test_bytes_limit_a_plan_for_costs(tmp_path: Path) -> None:
    asked = ("plan", "--costs", costs_file(tmp_path), "--placement", "vee", "--microbatches", "6", "--evaluations", "300")
    file = str(tmp_path / "plan.json")
    roomy = json.loads(printed(*asked, "--json"))
    tight = json.loads(printed(*asked, "--memory", "700B", "--json", "-o", file))
    peak = max(zb.simulation.peak_memory(loads(tight["csv"]), UNEVEN))
    assert peak <= 700 < max(zb.simulation.peak_memory(loads(roomy["csv"]), UNEVEN))
    assert zb.io.load_plan(file).problem.limits == zb.Limits((700, 700))
    assert zb.io.load_plan(file).problem.costs == UNEVEN


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--microbatches", "6"), "has the costs of stages on one placement: name it, such as --placement linear"),
        (("--microbatches", "6", "--placement", "vee,linear"), "has the costs of stages on one placement"),
        (("--microbatches", "6", "--placement", "looped-3"), "has costs of 4 stages, but looped-3 puts 3 on each rank: give"),
        (("--microbatches", "6", "--placement", "vee", "--ranks", "4"), "has costs of 4 stages, but vee puts 2 on each of 4 ranks"),
        (("--microbatches", "6", "--placement", "veee"), "did you mean 'vee'"),
        (("--placement", "vee"), "plan needs --microbatches M"),
        (
            ("--microbatches", "6", "--placement", "vee", "--microbatch-bytes", "4GB"),
            "--costs and --microbatch-bytes contradict each other",
        ),
        (("--times", "1,1,1"), "--costs and --times contradict each other"),
        (("--layers", "x"), "--costs and --layers contradict each other"),
        (("--per-rank", "x"), "--costs and --per-rank contradict each other"),
        (("--microbatches", "6", "--placement", "linear", "--memory", "50B", "--budget", "0"), "no schedule fits: rank 0"),
    ],
)
def test_costs_that_cannot_be_used_are_refused(tmp_path: Path, options: tuple[str, ...], reason: str) -> None:
    assert reason in refused("plan", "--costs", costs_file(tmp_path), *options)


def test_bytes_without_costs_are_refused() -> None:
    states(refused("plan", *SHAPE, "--memory", "5B"), "bytes", "times")


def test_memory_in_bytes_with_times_is_counted_in_microbatches() -> None:
    in_bytes, counted = (
        json.loads(printed("plan", *SHAPE, "--placement", "vee", "--budget", "0", "--json", *room))
        for room in (("--memory", "20GB", "--microbatch-bytes", "4GB"), ("--memory", "5"))
    )
    assert in_bytes["csv"] == counted["csv"]
    front = json.loads(printed("pareto", *FRONT, "--memory", "8GB:16GB:4GB", "--microbatch-bytes", "4GB", "--json"))
    assert [point["memory"] for point in front] == [2, 3, 4]


def test_memory_in_microbatches_with_costs_counts_those_of_each_rank(tmp_path: Path) -> None:
    asked = (
        "plan",
        "--costs",
        costs_file(tmp_path),
        "--placement",
        "vee",
        "--microbatches",
        "6",
        "--evaluations",
        "300",
        "--memory",
        "2.5",
    )
    file = str(tmp_path / "plan.json")
    assert json.loads(printed(*asked, "--json", "-o", file))["peak_microbatches"] <= 2.5
    assert zb.io.load_plan(file).problem.limits == zb.Limits((550, 875))


def test_winner_runner_up_and_1f1b_stand_on_one_page(tmp_path: Path) -> None:
    page, svg, file = tmp_path / "plan.html", tmp_path / "plan.svg", tmp_path / "plan.json"
    printed("plan", *SHAPE, "--memory", "6", "--budget", "0", "--html", str(page), "--svg", str(svg), "-o", str(file))
    text = page.read_text()
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>', text)
    assert (rows[0].split(":")[0], rows[1].split(":")[0], rows[2]) == ("winner", "runner-up", "1f1b")
    states(text, "1f1b", "rank 0", 8)
    states(text, file, "--format", "torch-csv", "--replicas")
    states(printed("check", str(file), "--replicas", "2"), "5 communicators")
    assert "load_plan" in text
    assert "runner-up" in svg.read_text()


def test_a_plan_for_weights_in_shards_gathers_seldom() -> None:
    asked = ("plan", "-p", "2", "-m", "4", "--placement", "vee", "--budget", "0", "--weights", "12GB", "--gathered", "6GB")
    text = " ".join(printed(*asked, "--gather-rate", "6000GB").split())
    states(text, "rank 0", 3, "6 GB")
    states(text, 6, "schedule")
    data = json.loads(printed(*asked, "--gather-rate", "6000GB", "--json"))
    assert [rank["num_gathers"] for rank in data["weights"]] == [3, 3]
    assert data["gathers"]["winner"]["num_gathers"] == data["gathers"]["least_gathers_of_any_order"] == 6
    states(refused("plan", "-p", "2", "-m", "4", "--gathered", "6GB"), "--weights", "sizes")


def test_a_plan_file_keeps_weights_in_shards(tmp_path: Path) -> None:
    file, again = str(tmp_path / "plan.json"), str(tmp_path / "again.json")
    sizes = ("--weights", "12GB", "--gathered", "6GB", "--gather-rate", "6000GB", "--within", "5")
    printed("plan", "-p", "2", "-m", "4", "--placement", "vee", "--budget", "0", *sizes, "-o", file)
    sharded = zb.planning.Sharded(12 * 10**9, 6 * 10**9, 6e12, 0.05)
    assert zb.io.load_plan(file).problem.sharded == sharded
    shown = " ".join(printed("show", file).split())
    states(shown, "rank 0", 3, "6 GB")
    states(shown, "1 ms", "gathers", "passes")
    states(printed("show", file, "--weights", "12GB"), 2, "weights")
    anew = ("plan", "--costs", file, "--placement", "vee", "--budget", "0")
    states(printed(*anew, "--what-if", "10", "-o", again), "weights", "gathers")
    assert zb.io.load_plan(again).problem == zb.io.load_plan(file).problem
    solved = zb.planning.solve(zb.io.load_plan(file).problem, seconds=0)
    assert solved.schedule.rows == zb.io.load_plan(file).schedule.rows
