"""Estimates before there is a cluster: against published steps and activations, against formulas, and what is refused."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zerobubble as zb
from benchmarks.cost_model.published import A100, H100, Run
from benchmarks.cost_model.run import compare_memory, compare_steps, compare_throughput, rounded
from zerobubble import InputError
from zerobubble.cli import main
from zerobubble.cost_model import GPU, GPUS, MODELS, Efficiency, Model, transformer
from zerobubble.cost_model.kernels import Kernels, Product

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/cost-model.md").read_text(encoding="utf-8")
RESULTS = json.loads((ROOT / "benchmarks/cost_model/results.json").read_text(encoding="utf-8"))
KERNELS = Kernels(GPUS["A100"], Efficiency())
SMALL = Model("small", 4, 1024, 16, 16, 4096, 51200, 512)


def test_the_committed_figures_reach_the_goal() -> None:
    assert [row["published_s"] for row in RESULTS["steps"]] == [seconds for run in A100 for seconds in (run.full_s, run.present_s)]
    errors = [abs(row["ours_s"] / row["published_s"] - 1) for row in RESULTS["steps"]]
    assert sum(errors) / len(errors) <= 0.04
    assert max(abs(row["ours_gib"] / row["published_gib"] - 1) for row in RESULTS["activations"]) <= 0.05


@pytest.mark.parametrize("run", A100[:2], ids=lambda run: run.model)
def test_steps_are_the_committed_ones(run: Run) -> None:
    assert rounded(compare_steps(run)) == [row for row in RESULTS["steps"] if row["model"] == run.model]


@pytest.mark.parametrize("run", A100[:2], ids=lambda run: run.model)
def test_activations_are_the_committed_ones(run: Run) -> None:
    assert rounded(compare_memory(run)) == [row for row in RESULTS["activations"] if row["model"] == run.model]


def test_throughputs_are_the_committed_ones() -> None:
    rows = [row for row in RESULTS["h100_not_fitted"] if row["model"] == "llama3-70b"]
    assert rounded(compare_throughput(H100[0])) == rows


@pytest.mark.parametrize("name", MODELS)
def test_names_tell_the_number_of_parameters(name: str) -> None:
    number, unit = re.fullmatch(r".*-(\d+)(b|t)", name).groups()  # type: ignore[union-attr]
    vocabulary = MODELS[name].vocabulary * MODELS[name].hidden * (1 if MODELS[name].tied else 2)
    total = MODELS[name].layers * MODELS[name].layer_parameters + vocabulary
    assert total == pytest.approx(int(number) * {"b": 1e9, "t": 1e12}[unit], rel=0.02)


def test_flops_are_those_of_the_formula() -> None:
    """arXiv 2205.05198, appendix A: 72 tokens L h^2 (1 + s / 6h + V / 12hL)."""
    model = MODELS["megatron-175b"]
    layers, hidden, length, words = model.layers, model.hidden, model.sequence, model.vocabulary
    formula = 72 * layers * hidden**2 * (1 + length / (6 * hidden) + words / (12 * hidden * layers))
    assert model.flops_per_token == pytest.approx(formula, rel=1e-12)


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "formula"),
    [
        ("none", False, lambda t, scores: 10 + 24 / t + 5 * scores / t),
        ("none", True, lambda t, scores: 34 / t + 5 * scores / t),
        ("selective", False, lambda t, scores: 10 + 24 / t),
        ("selective", True, lambda t, scores: 34 / t),
        ("full", False, lambda t, scores: 2),
    ],
)
@pytest.mark.parametrize("tp", [1, 8])
def test_activations_are_those_of_the_formulas(
    recompute: str, sequence_parallel: bool, formula: Callable[[int, float], float], tp: int
) -> None:
    """arXiv 2205.05198, table 2, in bytes per token and feature; an inner stage has layers alone."""
    found = transformer(SMALL, gpu="A100", tp=tp, pp=4, microbatch=3, recompute=recompute, sequence_parallel=sequence_parallel)
    numbers = 3 * SMALL.sequence * SMALL.hidden
    assert found.activations[1] == pytest.approx(numbers * formula(tp, SMALL.heads * SMALL.sequence / SMALL.hidden))
    if sequence_parallel:
        assert found.costs.held_after_b[1] == pytest.approx(32 * numbers / tp)


def test_the_last_wave_is_paid_in_full() -> None:
    waves = [KERNELS.product(Product(256 * height, 128 * width, 8192)) for height, width in ((1, 1), (9, 12), (9, 13), (12, 18))]
    assert waves[0] == waves[1]
    assert waves[2] == waves[3] == 2 * waves[1]


def test_a_narrow_product_is_bound_by_memory() -> None:
    narrow = Product(8192, 8192, 64)
    assert KERNELS.product(narrow, sums=True) == KERNELS.stream(2 * 64 * 2 * 8192 + 8 * 8192**2) > KERNELS.product(narrow)


def test_what_is_kept_is_not_computed_again() -> None:
    found = [transformer("megatron-22b", gpu="A100", tp=8, recompute=recompute) for recompute in ("none", "selective", "full")]
    backward, kept = [each.costs.backward[0] for each in found], [each.activations[0] for each in found]
    assert backward == sorted(backward)
    assert kept == sorted(kept, reverse=True)
    assert len(set(backward)) == len(set(kept)) == 3


def test_ways_to_divide_hold_less_each() -> None:
    plain = transformer("llama3-70b", gpu="H100", pp=4)
    assert plain.layers == (20, 20, 20, 20)
    for kept in ({"tp": 2}, {"cp": 2}):
        assert transformer("llama3-70b", gpu="H100", pp=4, **kept).activations[1] * 2 == plain.activations[1]
    replicas = transformer("llama3-70b", gpu="H100", pp=4, dp=4)
    assert replicas.optimizer[1] * 4 == plain.optimizer[1]
    assert min(replicas.costs.reduce) > 0 == max(plain.costs.reduce)
    assert transformer("llama3-405b", gpu="H100", tp=8, pp=16).layers == (7, *(8,) * 14, 7)


def test_hidden_exchanges_and_fp8_take_less_time() -> None:
    plain, hidden, short = (
        transformer("llama3-70b", gpu="H100", tp=4, pp=8, **kept).step("1f1b", 16).seconds
        for kept in ({}, {"overlap_tp": True}, {"overlap_tp": True, "precision": "fp8"})
    )
    assert plain > hidden > short > plain / 2


def test_costs_are_for_every_placement() -> None:
    found = transformer("megatron-175b", gpu="A100", tp=8, pp=8, v=2, recompute="selective")
    vee, looped = found.step("zb-v", 32), found.step(zb.make("interleaved-1f1b", 8, 32))
    assert vee.gpus == looped.gpus == 64
    assert vee.passes < looped.passes
    room = found.limits(zb.Placement.vee(8)).memory
    assert [left + held - moving for left, held, moving in zip(room, vee.rank_bytes, vee.rank_activations, strict=True)] == [80 * 10**9] * 8


def test_everything_assumed_is_told() -> None:
    small = transformer(SMALL, gpu="A100")
    whole = transformer("llama3-70b", gpu="H100", tp=4, cp=2, pp=8, dp=2, precision="fp8")
    for words in (
        "Attention is fused",
        "In fp8",
        "2 groups pass keys",
        "4 GPUs with the same",
        "gathers and reduce-scatters",
        "Messages between",
    ):
        assert any(words in sentence for sentence in whole.assumptions)
        assert not any(words in sentence for sentence in small.assumptions)
    shown = transformer(SMALL, gpu="A100", efficiency=Efficiency(products=0.61))
    assert any("0.61" in sentence for sentence in shown.assumptions)


def built(**given: Any) -> Any:
    return transformer(**{"model": "megatron-175b", "gpu": "A100", "tp": 8, "pp": 8, **given})


WRONG = [
    (lambda: built(model="megatron-176b"), "there is no model 'megatron-176b': did you mean 'megatron-175b'?"),
    (lambda: built(gpu="A10"), "there is no GPU 'A10': did you mean 'A100'? known are A100, H100; cost_model.GPU describes others"),
    (lambda: built(gpu=100), "transformer: gpu must be a str or a GPU, got 100"),
    (lambda: built(tp=0, v=-1), "tp must be at least 1, got 0; v must be at least 1, got -1"),
    (lambda: built(tp=7), "tp=7 does not divide the 96 heads"),
    (lambda: built(tp=16), "tp must be at most 8, the GPUs that NVLink joins"),
    (lambda: built(cp=3), "tp*cp=24 does not divide the 2048 tokens"),
    (lambda: built(recompute="some"), "recompute must be 'none', 'selective', 'full', got 'some'"),
    (lambda: built(model="llama3-70b", recompute="selective"), "llama3-70b has fused attention"),
    (lambda: built(precision="fp8"), "the A100 has no matrix products in 'fp8': take 'bf16'"),
    (lambda: built(pp=5), "the 96 layers of megatron-175b cannot be divided equally over pp*v=5 stages"),
    (lambda: built(pp=2, layers=[50, 47]), "layers must be 2 counts >= 0 that sum to 96, got 2 with the sum 97"),
    (lambda: built().step("1f1b"), "needs num_microbatches"),
    (lambda: built().step("zb-v", 16), "estimate with pp=8, v=2"),
    (lambda: built(pp=1).limits(zb.Placement.linear(1)), "need 393 GB of 80 GB on rank 0: divide them over more GPUs"),
    (lambda: Efficiency(products=0, links=-1), "products of an Efficiency must be a finite number above 0, got 0; links of"),
    (lambda: replace(SMALL, hidden=0), "hidden of model 'small' must be a finite number above 0, got 0"),
    (lambda: replace(SMALL, heads=3), "hidden=1024 of model 'small' must be a multiple of its 3 heads"),
    (lambda: GPU("mine", (("bf16", 0.0),), 1, 1, 1, 1, 1, 1), "bf16 flops of GPU 'mine' must be a finite number above 0"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_wrong_settings_are_told(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError) as error:
        call()
    assert message in str(error.value)


def test_the_page_prints_what_it_shows_and_its_command_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program, shown = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL).groups()  # type: ignore[union-attr]
    with redirect_stdout(io.StringIO()) as printed:
        exec(program, {})
    assert printed.getvalue() == shown
    command, division = re.findall(r"^\$ zerobubble (.*)$", PAGE, re.MULTILINE)
    done = CliRunner().invoke(main, division.split())
    (table,) = re.findall(r"top 5\n(.*?)```", PAGE, re.DOTALL)
    assert done.output.startswith(table), done.output
    done = CliRunner().invoke(main, command.split())
    assert done.exit_code == 0, done.output
    assert re.search(r"^vee +2.50 %", done.output, re.MULTILINE)
    assert zb.io.load_plan("plan.json").problem.costs.placement == zb.Placement.vee(8)


def test_the_page_has_the_committed_figures() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.splitlines()
        if re.match(r"\| (megatron|llama3|gpt3)-\w+ ", line)
    ]
    told = [float(cell) for row in rows for cell in row if re.fullmatch(r"[\d.]+", cell)]
    steps = [figure for row in RESULTS["steps"] for figure in (row["published_s"], round(row["ours_s"], 2))]
    pairs = zip(RESULTS["h100_not_fitted"][::2], RESULTS["h100_not_fitted"][1::2], strict=True)
    speeds = [
        [one["published_tokens_per_s_per_gpu"], *(round(each["ours_tokens_per_s_per_gpu"]) for each in (one, other))]
        for one, other in pairs
    ]
    assert told == [*steps, *(figure for row in speeds for figure in row)]
