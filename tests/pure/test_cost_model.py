"""Estimates before there is a cluster: against published steps and activations, against formulas, and what is refused.

One set of parameters reaches the published step times, activations and throughputs within the errors of docs/cost-model.md.
"""

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
from benchmarks.cost_model.published import A100, THROUGHPUTS, Run, Throughput
from benchmarks.cost_model.run import compare_memory, compare_steps, compare_throughput, rounded
from tests.refusals import Stated, raises
from zerobubble import InputError
from zerobubble.cli import main
from zerobubble.cost_model import GPU, GPUS, MODELS, Efficiency, Experts, Latent, Model, transformer
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
    aimed = {
        (row["model"], row["gpu"]): row["ours_tokens_per_s"] / row["published_tokens_per_s"] - 1
        for row in RESULTS["unfitted"]
        if row["aimed"]
    }
    assert set(aimed) == {("llama3-70b", "H100"), ("llama3-405b", "H100"), ("llama3-405b", "B200"), ("deepseek-v3", "GB300")}
    assert max(map(abs, aimed.values())) <= 0.1
    assert max(abs(row["error"]) for row in RESULTS["with_least_sustained_of_gb200"]) <= 0.1


@pytest.mark.parametrize("run", A100[:2], ids=lambda run: run.model)
def test_steps_are_the_committed_ones(run: Run) -> None:
    assert rounded(compare_steps(run)) == [row for row in RESULTS["steps"] if row["model"] == run.model]


@pytest.mark.parametrize("run", A100[:2], ids=lambda run: run.model)
def test_activations_are_the_committed_ones(run: Run) -> None:
    assert rounded(compare_memory(run)) == [row for row in RESULTS["activations"] if row["model"] == run.model]


@pytest.mark.parametrize("published", [THROUGHPUTS[2], THROUGHPUTS[5]], ids=lambda published: published.model)
def test_throughputs_are_the_committed_ones(published: Throughput) -> None:
    rows = [row for row in RESULTS["unfitted"] if (row["model"], row["gpu"]) == (published.model, published.gpu)]
    assert rounded(compare_throughput(published)) == rows[0]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "deepseek-v3"])
def test_names_show_the_number_of_parameters(name: str) -> None:
    number, unit = re.fullmatch(r".*-(\d+)(b|t)", name).groups()  # type: ignore[union-attr]
    assert MODELS[name].parameters == pytest.approx(int(number) * {"b": 1e9, "t": 1e12}[unit], rel=0.02)


def test_deepseek_v3_has_the_parameters_of_its_report() -> None:
    """arXiv 2412.19437: 671 B parameters, of which a token activates 37 B; the embedding of a token computes nothing."""
    model = MODELS["deepseek-v3"]
    assert model.parameters == pytest.approx(671e9, rel=0.002)
    scores = 3 * model.layers * model.sequence * model.heads * (model.key_width + model.value_width)
    activated = (model.flops_per_token - scores) / 6 + model.vocabulary * model.hidden
    assert activated == pytest.approx(37e9, rel=0.02)


@pytest.mark.parametrize("published", [row for row in THROUGHPUTS if row.tflops], ids=lambda row: f"{row.model}-{row.gpu}")
def test_flops_of_a_token_are_those_that_published_throughputs_count(published: Throughput) -> None:
    assert isinstance(published.model, str)
    assert published.tflops is not None
    theirs = published.tflops * 1e12 / published.tokens_per_s
    assert MODELS[published.model].flops_per_token == pytest.approx(theirs, rel=0.006)


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
    assert KERNELS.product(narrow, gradient_bytes=4) == KERNELS.stream(2 * 64 * 2 * 8192 + 8 * 8192**2) > KERNELS.product(narrow)


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


EXPERTS = Model(
    "small-experts", 4, 1024, 16, 16, 4096, 51200, 512, gated=True, dropout=False, fused_attention=True,
    latent=Latent(256, 128, 32, 16, 32), experts=Experts(16, 4, 512, shared=1, dense_layers=1, nodes=2),
)  # fmt: skip


def test_experts_are_divided_over_ep_and_shared_by_the_others() -> None:
    one, four = (transformer(EXPERTS, gpu="H100", pp=2, dp=8, ep=ep) for ep in (1, 4))
    every = EXPERTS.experts.routed * EXPERTS.expert_parameters  # type: ignore[union-attr]
    assert one.expert_parameters == (every, 2 * every)
    assert four.expert_parameters == (every // 4, every // 2)
    assert [whole - some for whole, some in zip(one.parameters, one.expert_parameters, strict=True)] == [
        whole - some for whole, some in zip(four.parameters, four.expert_parameters, strict=True)
    ]
    total = sum(one.parameters) + (one.setting.words - EXPERTS.vocabulary) * EXPERTS.hidden
    assert total == EXPERTS.parameters + EXPERTS.vocabulary * EXPERTS.hidden  # of the tied embedding the last stage has a copy
    assert one.optimizer == four.optimizer  # 12 bytes of all experts over 8 GPUs, or of a quarter over 2


def test_layers_with_experts_follow_those_without() -> None:
    found = transformer(EXPERTS, gpu="H100", pp=4, dp=4, ep=4)
    assert found.layers == (1, 1, 1, 1)
    assert found.expert_parameters[0] == 0 < found.expert_parameters[1] == found.expert_parameters[2]
    assert found.costs.forward[1] == found.costs.forward[2]
    assert found.activations[1] == found.activations[2]


def test_the_activation_of_experts_is_computed_again() -> None:
    none, selective = (transformer(EXPERTS, gpu="H100", pp=2, recompute=recompute) for recompute in ("none", "selective"))
    assert none.activations[1] - selective.activations[1] == 2 * 2 * 512 * 4 * 512  # two layers, bytes, tokens for each chosen expert
    assert selective.costs.backward[1] > none.costs.backward[1]


def test_tokens_go_once_to_each_gpu_and_each_domain_of_their_experts() -> None:
    kernels, size = Kernels(GPUS["H100"], Efficiency(latency=0.0, links=1.0)), 1e9
    two = Experts(4, 2, 1)
    # Two of four experts on four GPUs are on two others as often as three times in four; the fourth is where the token is.
    assert kernels.to_experts(size, two, 4, 8) == pytest.approx(size * 2 * 3 / 4 / 450e9)
    # A half of the domains has both with 1 in 3: 5/3 domains are reached on average, a half of them over the network.
    assert kernels.to_experts(size, two, 4, 2) == pytest.approx(size * 5 / 3 / 2 / 50e9)
    assert kernels.to_experts(size, two._replace(nodes=1), 4, 2) == pytest.approx(size / 2 / 50e9)
    assert kernels.to_experts(size, two, 1, 8) == 0


def test_replicas_of_a_domain_sum_over_their_links_together() -> None:
    kernels = Kernels(GPUS["H100"], Efficiency(latency=0.0, links=1.0))
    alone, eight, inside = (kernels.share(16e9, members, neighbours) for members, neighbours in ((16, 1), (16, 8), (8, 8)))
    assert alone == pytest.approx(15e9 / 50e9)
    assert eight == pytest.approx(15e9 / 400e9)
    assert inside == pytest.approx(14e9 / 450e9)


def test_products_beside_exchanges_pay_waves_of_their_own() -> None:
    """Eight products of 512 rows take longer than one of 4,096 where exchanges cost nothing."""
    quick, free = replace(GPUS["H100"], link_bandwidth=1e18), Efficiency(contention=0.0, latency=0.0)
    setting = {"tp": 8, "cp": 2, "pp": 8, "v": 8, "precision": "fp8", "efficiency": free}
    whole, parts = (transformer("llama3-405b", gpu=quick, overlap_tp=overlap, **setting) for overlap in (False, True))
    assert parts.costs.forward[1] > 1.1 * whole.costs.forward[1]
    assert parts.costs.backward[1] > whole.costs.backward[1]
    assert parts.costs.weight == whole.costs.weight
    assert any("8 parts" in sentence for sentence in parts.assumptions)


def test_what_power_leaves_is_measured_or_that_of_an_a100() -> None:
    mine = GPU("mine", (("bf16", 1000e12),), 100, 80 * 10**9, 3e12, 450e9, 8, 50e9)
    assert mine.sustained_of("bf16") / 1000e12 == pytest.approx(GPUS["A100"].sustained_of("bf16") / 312e12)
    assert mine.attention_flops == (730e12, 630e12)
    for gpu in GPUS.values():
        for precision, flops in gpu.flops:
            assert 0.5 * flops < gpu.sustained_of(precision) < 0.82 * flops
        assert max(gpu.attention_flops) < dict(gpu.flops)["bf16"]


def test_the_page_names_every_gpu() -> None:
    page = (ROOT / "docs/cost-model.md").read_text(encoding="utf-8")
    assert [name for name in GPUS if name not in page] == []


def test_costs_are_for_every_placement() -> None:
    found = transformer("megatron-175b", gpu="A100", tp=8, pp=8, v=2, recompute="selective")
    vee, looped = found.step("zb-v", 32), found.step(zb.make("interleaved-1f1b", 8, 32))
    assert vee.gpus == looped.gpus == 64
    assert vee.passes < looped.passes
    room = found.limits(zb.Placement.vee(8)).memory
    assert [left + held - moving for left, held, moving in zip(room, vee.rank_bytes, vee.rank_activations, strict=True)] == [80 * 10**9] * 8


def test_gradients_in_half_precision_take_half_the_bytes_and_half_as_long_to_sum() -> None:
    shape = {"tp": 8, "pp": 8, "dp": 16}
    whole, half = (transformer("llama3-70b", gpu="H100", gradients=precision, **shape) for precision in ("fp32", "bf16"))
    assert [2 * size for size in half.gradients] == list(whole.gradients)
    latency = Efficiency().latency
    for short, long in zip(half.costs.reduce, whole.costs.reduce, strict=True):
        assert 2 * (short - 1e9 * latency) == pytest.approx(long - 1e9 * latency, abs=2)
    assert sum(half.costs.weight) <= sum(whole.costs.weight)
    assert max(half.step("1f1b", 16).rank_bytes) < max(whole.step("1f1b", 16).rank_bytes)


def test_assumptions_list_what_the_estimate_includes() -> None:
    small = transformer(SMALL, gpu="A100")
    whole = transformer("llama3-70b", gpu="H100", tp=4, cp=2, pp=8, dp=2, precision="fp8")
    for words in (
        "Attention is fused",
        "FP8",
        "2 context-parallel",
        "4 GPUs with the same",
        "reduce-scatters",
        "Messages between",
    ):
        assert any(words in sentence for sentence in whole.assumptions)
        assert not any(words in sentence for sentence in small.assumptions)
    routed = transformer(EXPERTS, gpu="H100", dp=16, ep=16, recompute="selective")
    for words in ("4 of 16 experts", "16 GPUs, 8 of them", "at most 2 of them", "activation of routed experts"):
        assert any(words in sentence for sentence in routed.assumptions)
    assert not any("the same experts" in sentence for sentence in routed.assumptions)
    assert any("4 GPUs have the same experts" in sentence for sentence in transformer(EXPERTS, gpu="H100", dp=16, ep=4).assumptions)
    shown = transformer(SMALL, gpu="A100", efficiency=Efficiency(products=0.61))
    assert any("0.61" in sentence for sentence in shown.assumptions)


def built(**given: Any) -> Any:
    return transformer(**{"model": "megatron-175b", "gpu": "A100", "tp": 8, "pp": 8, **given})


WRONG = [
    (lambda: built(model="megatron-176b"), ("megatron-176b", "megatron-175b")),
    (
        lambda: built(gpu="A10"),
        ("GPU", "A10", "A100", "cost_model.GPU"),
    ),
    (lambda: built(gpu=100), ("transformer", "gpu", 100)),
    (lambda: built(tp=0, v=-1), ("tp", 0, "v", -1)),
    (lambda: built(tp=7), ("tp=7", 96)),
    (lambda: built(tp=16), ("tp", 8, "NVLink")),
    (lambda: built(cp=3), ("tp*cp=24", 2048)),
    (lambda: built(recompute="some"), ("recompute", "some")),
    (lambda: built(model="llama3-70b", recompute="selective"), ("llama3-70b", "attention", "fused")),
    (lambda: built(precision="fp8"), ("A100", "fp8", "bf16")),
    (lambda: built(gradients="fp16"), ("gradients", "fp16")),
    (lambda: built(ep=2), ("megatron-175b", "ep=2", "GPUs", 1)),
    (lambda: transformer(EXPERTS, gpu="H100", ep=3), ("ep=3", 16, "small-experts")),
    (lambda: transformer(EXPERTS, gpu="H100", tp=2, sequence_parallel=False), ("small-experts", "GPU")),
    (lambda: replace(EXPERTS, experts=Experts(4, 5, 512)), ("small-experts", 5, 4)),
    (
        lambda: replace(EXPERTS, fused_attention=False),
        ("small-experts", "latent", "fused"),
    ),
    (lambda: built(pp=5), (96, "megatron-175b", "pp*v=5")),
    (lambda: built(pp=2, layers=[50, 47]), ("layers", 96, 97)),
    (lambda: built().step("1f1b"), ("1f1b", "num_microbatches")),
    (lambda: built().step("zb-v", 16), ("pp=8", "v=2")),
    (lambda: built(pp=1).limits(zb.Placement.linear(1)), ("393 GB", "80 GB", "rank 0", "GPUs")),
    (lambda: Efficiency(products=0, links=-1), ("Efficiency", "products", 0)),
    (lambda: replace(SMALL, hidden=0), ("small", "hidden", "model", 0)),
    (lambda: replace(SMALL, heads=3), ("hidden=1024", "small", 3)),
    (lambda: GPU("mine", (("bf16", 0.0),), 1, 1, 1, 1, 1, 1), ("bf16", "GPU", "mine", 0)),
]


@pytest.mark.parametrize(("call", "stated"), WRONG, ids=range(len(WRONG)))
def test_wrong_settings_are_refused(call: Callable[[], object], stated: Stated) -> None:
    with raises(InputError, *stated):
        call()


@pytest.mark.long
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
    assert re.search(r"^vee +13,150 ms +4.24 %", done.output, re.MULTILINE)
    assert zb.io.load_plan("plan.json").problem.costs.placement == zb.Placement.vee(8)


def test_the_page_has_the_committed_figures() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.splitlines()
        if re.match(r"\| (megatron|llama3|gpt3|deepseek)-\w+ ", line)
    ]
    seen = [float(cell) for row in rows for cell in row if re.fullmatch(r"[\d.]+", cell)]
    steps = [figure for row in RESULTS["steps"] for figure in (row["published_s"], round(row["ours_s"], 2))]
    speeds = [figure for row in RESULTS["unfitted"] for figure in (row["published_tokens_per_s"], round(row["ours_tokens_per_s"]))]
    assert seen == [*steps, *speeds]
    errors = [cell for row in rows for cell in row if re.fullmatch(r"[+-][\d.]+ %", cell)]
    found = [f"{100 * row['error']:+.1f} %" for row in [*RESULTS["steps"], *RESULTS["unfitted"]]]
    assert errors == found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sums_of_input_gradients_are_hidden_in_one_piece_alone(sequence_parallel: bool) -> None:
    alone, divided = (
        zb.cost_model.transformer("megatron-22b", gpu="A100", tp=tp, pp=4, sequence_parallel=sequence_parallel and tp > 1).costs
        for tp in (1, 8)
    )
    assert alone.fused == ()
    exposed = [b + w - whole for b, w, whole in zip(divided.backward, divided.weight, divided.fused, strict=True)]
    assert all(0 < time < b for time, b in zip(exposed, divided.backward, strict=True))
