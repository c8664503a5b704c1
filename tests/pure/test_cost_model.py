"""The cost model, compared with published step times and activations and with formulas; errors for wrong input.

One set of parameters reaches the published step times, activations and throughputs within the error bars of docs/cost-model.md.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zerobubble as zb
from benchmarks.cost_model.published import (
    A100,
    HELD_OUT,
    LLAMA3_8B,
    NEMOTRON_340B,
    NOT_CHOSEN_FOR,
    THROUGHPUTS,
    Run,
    Throughput,
)
from benchmarks.cost_model.run import compare_memory, compare_steps, compare_throughput, rounded
from tests.refusals import Stated, raises
from zerobubble import InputError
from zerobubble.cli import main
from zerobubble.communicators import communicators_of, communicators_of_sums, held_by
from zerobubble.cost_model import GPU, GPUS, MODELS, Efficiency, Experts, Latent, Model, transformer
from zerobubble.cost_model.candidates import SCHEDULES, TriedSchedule
from zerobubble.cost_model.held import RUNTIME_BYTES
from zerobubble.cost_model.kernels import Kernels, Product
from zerobubble.cost_model.layer import Times, passing_times
from zerobubble.cost_model.setting import ERROR_BARS
from zerobubble.integrations import described_run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/cost-model.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
RESULTS = json.loads((ROOT / "benchmarks/cost_model/results.json").read_text(encoding="utf-8"))
KERNELS = Kernels(GPUS["A100"], Efficiency())
SMALL = Model("small", 4, 1024, 16, 16, 4096, 51200, 512)


def test_the_committed_figures_reach_the_goal() -> None:
    assert [row["published_s"] for row in RESULTS["steps"]] == [seconds for run in A100 for seconds in (run.full_s, run.present_s)]
    errors = [abs(row["ours_s"] / row["published_s"] - 1) for row in RESULTS["steps"]]
    assert sum(errors) / len(errors) <= 0.04
    assert max(abs(row["ours_gib"] / row["published_gib"] - 1) for row in RESULTS["activations"]) <= 0.05
    for name, goal in (("unfitted", 0.06), ("not_chosen_for", 0.06), ("held_out", 0.06)):
        errors = [abs(row["error"]) for row in RESULTS[name]]
        assert sum(errors) / len(errors) == pytest.approx(RESULTS["mean_errors"][name], abs=1e-4)
        assert RESULTS["mean_errors"][name] <= goal
    assert max(abs(row["error"]) for row in RESULTS["not_chosen_for"]) <= 0.12
    assert max(abs(row["error"]) for row in RESULTS["with_least_sustained_of_gb200"]) <= 0.1
    assert RESULTS["holds"]


def test_published_runs_are_within_the_error_bars_of_their_kind() -> None:
    rows = [row for name in ("unfitted", "not_chosen_for", "held_out") for row in RESULTS[name]]
    assert {row["kind"] for row in rows} == set(ERROR_BARS)
    assert all(row["error_bar"] == ERROR_BARS[row["kind"]] for row in rows)
    assert RESULTS["beyond_their_error_bar"] == [row["model"] for row in rows if abs(row["error"]) > row["error_bar"]] == []
    assert max(abs(row["error"]) for row in RESULTS["steps"]) <= ERROR_BARS["dense bf16"]
    assert all(f"| {kind} |" in PAGE and f"{100 * bar:.0f} %" in PAGE for kind, bar in ERROR_BARS.items())


def test_published_runs_fit_into_their_gpus() -> None:
    rows = [row for name in ("unfitted", "not_chosen_for", "held_out") for row in RESULTS[name]]
    assert RESULTS["beyond_their_memory"] == [row["model"] for row in rows if row["most_gb"] > row["memory_gb"]] == []


def test_sharded_gradients_are_held_in_parts_and_added_by_kernels_of_their_own() -> None:
    given = {"model": "llama3-70b", "gpu": "H100", "tp": 8, "pp": 4, "dp": 16}
    for gradients, size in (("fp32", 4), ("bf16", 2)):
        whole, sharded = (transformer(shard_gradients=shard, gradients=gradients, **given) for shard in (False, True))
        assert sharded.gradients == tuple(-(-held // 16) for held in whole.gradients)
        assert whole.weights == sharded.weights
        longer = [new - old for new, old in zip(sharded.costs.weight, whole.costs.weight, strict=True)]
        moved = [count * (2 + 2 * size) / (3.35e12 * 0.85) * 1e9 for count in whole.parameters]
        assert 0.9 * moved[1] <= longer[1] <= 1.01 * moved[1]
        saved = sharded.limits(zb.Placement.linear(4)).memory[1] - whole.limits(zb.Placement.linear(4)).memory[1]
        assert saved == whole.gradients[1] - sharded.gradients[1]


def test_gathered_keys_delay_attention_and_need_no_merging() -> None:
    given = {"model": "llama3-405b", "gpu": "H100", "tp": 8, "pp": 18, "cp": 4}
    exchanged, gathered = (transformer(gather_keys=gather, **given).costs for gather in (False, True))
    assert exchanged.weight == gathered.weight
    size = 4 * 2 * 8192 / 4 * 2 * 128  # one head of keys and values of a GPU, of all groups
    one = (3 / 4 * size / (50e9 * 0.78) + 10e-6) * 1e9
    free = transformer(efficiency=replace(Efficiency(), links=1e9, latency=0, contention=0), gather_keys=True, **given).costs
    assert gathered.forward[1] - free.forward[1] >= 7 * one
    with raises(InputError, "gather_keys", "cp", 1):
        transformer("llama3-70b", gpu="H100", gather_keys=True)


@pytest.mark.parametrize("run", A100[:2], ids=lambda run: run.model)
def test_steps_are_the_committed_ones(run: Run) -> None:
    assert rounded(compare_steps(run)) == [row for row in RESULTS["steps"] if row["model"] == run.model]


@pytest.mark.parametrize("run", A100[:2], ids=lambda run: run.model)
def test_activations_are_the_committed_ones(run: Run) -> None:
    assert rounded(compare_memory(run)) == [row for row in RESULTS["activations"] if row["model"] == run.model]


@pytest.mark.parametrize(
    ("group", "published", "place"),
    [("unfitted", THROUGHPUTS, 2), ("unfitted", THROUGHPUTS, 5), ("not_chosen_for", NOT_CHOSEN_FOR, 0), ("held_out", HELD_OUT, 3)],
)
def test_throughputs_are_the_committed_ones(group: str, published: tuple[Throughput, ...], place: int) -> None:
    assert rounded(compare_throughput(published[place])) == RESULTS[group][place]


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
    assert KERNELS.product(narrow, gradient_bytes=4) == KERNELS.memory_traffic(2 * 64 * 2 * 8192 + 8 * 8192**2) > KERNELS.product(narrow)


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


def test_replicas_that_keep_the_whole_optimizer_state_update_it_themselves() -> None:
    given = {"model": "llama3-70b", "gpu": "H100", "tp": 8, "pp": 4, "dp": 4}
    sharded, whole = (transformer(shard_optimizer=shard, **given) for shard in (True, False))
    assert whole.optimizer == tuple(12 * count for count in whole.parameters)
    assert sharded.optimizer == tuple(3 * count for count in whole.parameters)
    assert whole.costs.reduce == pytest.approx([2 * time for time in sharded.costs.reduce], abs=1)  # an all-reduce: both halves
    moved = max(whole.parameters) * (54 + 4)  # bytes of the update and of zeroed gradients; parameters are not gathered
    assert whole.step("1f1b", 8).update == pytest.approx(moved / (3.35e12 * 0.85), rel=1e-3)
    with raises(InputError, "shard_gradients", "shard_optimizer"):
        transformer(shard_optimizer=False, shard_gradients=True, **given)
    with raises(InputError, "shard_weights", "shard_optimizer"):
        transformer(shard_optimizer=False, shard_weights=True, **given)


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
    total = sum(one.parameters) + (one.setting.padded_vocabulary - EXPERTS.vocabulary) * EXPERTS.hidden
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
    alone, eight, inside = (kernels.gather(16e9, members, neighbors) for members, neighbors in ((16, 1), (16, 8), (8, 8)))
    assert alone == pytest.approx(15e9 / 50e9)
    assert eight == pytest.approx(15e9 / 400e9)
    assert inside == pytest.approx(14e9 / 450e9)


def test_products_next_to_exchanges_are_split_only_where_that_is_faster() -> None:
    """Eight products of 512 rows take longer than one of 4,096, so free communication leaves them whole."""
    quick, free = replace(GPUS["H100"], link_bandwidth=1e18), Efficiency(contention=0.0, latency=0.0)
    setting = {"tp": 8, "cp": 2, "pp": 8, "v": 8, "precision": "fp8"}
    whole, parts = (
        transformer("llama3-405b", gpu=quick, overlap_tp=overlap, efficiency=free, **setting).costs for overlap in (False, True)
    )
    assert parts.forward == pytest.approx(whole.forward, rel=1e-6)
    assert parts.backward == pytest.approx(whole.backward, rel=1e-6)
    slow = transformer("llama3-405b", gpu=replace(quick, link_bandwidth=50e9), overlap_tp=True, **setting)
    assert slow.costs.forward[1] < transformer("llama3-405b", gpu=slow.setting.gpu, **setting).costs.forward[1]
    assert any("8 parts" in sentence for sentence in slow.assumptions)


@pytest.mark.parametrize("gradients", ["fp32", "bf16"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("model", [MODELS["llama3-70b"], MODELS["llama3-405b"], NEMOTRON_340B], ids=lambda model: model.name)
def test_overlap_never_makes_a_step_slower(model: Model, precision: str, gradients: str) -> None:
    for tp, cp in ((2, 1), (4, 2), (8, 1), (8, 2)):
        given = {"gpu": "H100", "tp": tp, "cp": cp, "pp": 2, "precision": precision, "gradients": gradients}
        plain, hidden = (transformer(model, overlap_tp=overlap, **given) for overlap in (False, True))
        assert hidden.step("1f1b", 4).seconds <= plain.step("1f1b", 4).seconds
        assert hidden.costs.forward[0] < plain.costs.forward[0] or hidden.costs.forward == plain.costs.forward


def test_the_slowest_of_many_gpus_holds_up_the_others() -> None:
    efficiency = Efficiency(spread=0.01)
    assert efficiency.slowest_of(1) == 1
    assert efficiency.slowest_of(8) == pytest.approx(1 + 0.01 * 1.4236, rel=1e-3)  # Blom, table of expected order statistics
    few, many = (transformer(SMALL, gpu="A100", dp=dp, efficiency=efficiency).step("1f1b", 4).passes for dp in (1, 512))
    assert many / few > efficiency.slowest_of(512)  # and gradients are summed
    assert Efficiency(spread=0.0).slowest_of(16_384) == 1


def test_attention_over_short_sequences_reaches_fewer_flops() -> None:
    """cuDNN 9.19 on an H200, cudnn-frontend, benchmark/sdpa_benchmark_training/results: TFLOP/s in F and in B."""
    measured = replace(GPUS["H100"], attention=(644e12, 541e12))
    for tokens, forward, backward in ((2048, 484, 370), (4096, 591, 474), (8192, 644, 541), (16384, 673, 579)):
        found = measured.attention_flops(tokens)
        assert found == pytest.approx((forward * 1e12, backward * 1e12), rel=0.02)


def test_context_parallelism_merges_partial_results() -> None:
    """F reads two tensors of outputs and writes one for each group's keys, which half of the queries see on average."""
    kernels = Kernels(GPUS["H100"], Efficiency(latency=0.0, contention=0.0))
    setting = transformer(LLAMA3_8B, gpu="H100", cp=4).setting
    merging = passing_times(setting, kernels, Times(1.0, 1.0, 0.0))
    outputs, keys = 2048 * 4096, 2 * 2048 * 1024
    assert merging.forward == pytest.approx(kernels.memory_traffic(4 / 2 * 6 * outputs))
    assert merging.backward == pytest.approx(kernels.memory_traffic(4 / 2 * 6 * (outputs + keys)))
    assert passing_times(replace(setting, cp=1), kernels, Times(1.0, 1.0, 0.0)) == Times(0.0, 0.0, 0.0)


def test_inputs_of_linear_layers_are_kept_in_their_precision() -> None:
    half, short = (transformer("llama3-70b", gpu="H100", tp=4, pp=8, precision=precision) for precision in ("bf16", "fp8"))
    model, elements = MODELS["llama3-70b"], 10 * 8192 / 4  # layers of a stage, tokens of a GPU
    fewer = elements * (2 * model.hidden + model.inner - model.hidden)  # two inputs and that of the last product; a copy of outputs
    assert half.activations[1] - short.activations[1] == pytest.approx(fewer)


def test_heads_are_recomputed_from_latent_vectors() -> None:
    selective, latent = (transformer(EXPERTS, gpu="H100", pp=2, recompute=recompute) for recompute in ("selective", "latent"))
    heads = 2 * 2 * 512 * 16 * (48 + 48 + 32)  # two layers, bytes, tokens: queries, keys and values
    assert selective.activations[1] - latent.activations[1] == heads
    assert latent.costs.backward[1] > selective.costs.backward[1]
    assert latent.costs.forward == selective.costs.forward


def test_what_power_leaves_is_measured_or_that_of_an_a100() -> None:
    mine = GPU("mine", (("bf16", 1000e12),), 100, 80 * 10**9, 3e12, 450e9, 8, 50e9)
    assert mine.sustained_of("bf16") / 1000e12 == pytest.approx(GPUS["A100"].sustained_of("bf16") / 312e12)
    assert mine.attention_flops() == (730e12, 630e12)
    for gpu in GPUS.values():
        for precision, flops in gpu.flops:
            assert 0.5 * flops < gpu.sustained_of(precision) < 0.82 * flops
        assert max(gpu.attention_flops()) < dict(gpu.flops)["bf16"]


@pytest.mark.parametrize("tried", SCHEDULES, ids=lambda tried: tried.name)
def test_the_runtime_has_memory_for_communicators_and_sums_over_any_number_of_replicas(tried: TriedSchedule) -> None:
    context = 2**29  # bytes of the CUDA context, rounded up
    for ranks, replicas in product((2, 4, 8), (1, 2, 64)):
        options = {"stages_per_rank": 2} if tried.v is None else {}
        program = zb.lower(zb.make(tried.name, ranks, 2 * ranks, **options))
        used = communicators_of(channel for _, _, channel, _ in program.channels()) + communicators_of_sums(ranks, replicas)
        assert max(held_by(rank, used).bytes for rank in range(ranks)) < 2**30 <= RUNTIME_BYTES - context


def test_the_page_names_every_gpu() -> None:
    page = (ROOT / "docs/cost-model.md").read_text(encoding="utf-8")
    assert [name for name in GPUS if name not in page] == []


def test_costs_are_for_every_placement() -> None:
    found = transformer("megatron-175b", gpu="A100", tp=8, pp=8, v=2, recompute="selective")
    vee, looped = found.step("zb-v", 32), found.step(zb.make("interleaved-1f1b", 8, 32))
    assert vee.gpus == looped.gpus == 64
    assert vee.passes < looped.passes
    room = found.limits(zb.Placement.vee(8)).memory
    assert [left + held - moving for left, held, moving in zip(room, vee.rank_bytes, vee.rank_activations, strict=True)] == [
        81920 * 2**20
    ] * 8


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
        lambda: built(gpu="A1000"),
        ("GPU", "A1000", "A100", "cost_model.GPU"),
    ),
    (lambda: built(gpu=100), ("transformer", "gpu", 100)),
    (lambda: built(tp=0, v=-1), ("tp", 0, "v", -1)),
    (lambda: built(tp=7), ("tp=7", 96)),
    (lambda: built(tp=16), ("tp", 8, "NVLink")),
    (lambda: built(cp=3), ("tp*cp=24", 2048)),
    (lambda: built(recompute="some"), ("recompute", "some")),
    (lambda: built(model="llama3-70b", recompute="selective"), ("llama3-70b", "attention", "fused")),
    (lambda: built(recompute="latent"), ("megatron-175b", "latent")),
    (lambda: built(precision="fp8"), ("A100", "fp8", "bf16")),
    (lambda: built(gradients="fp16"), ("gradients", "fp16")),
    (lambda: built(ep=2), ("megatron-175b", "ep=2", "GPUs", 1)),
    (lambda: transformer(EXPERTS, gpu="H100", ep=3), ("ep=3", 16, "small-experts")),
    (lambda: transformer(EXPERTS, gpu="H100", tp=2, sequence_parallel=False), ("small-experts", "tp=2")),
    (lambda: replace(EXPERTS, experts=Experts(4, 5, 512)), ("small-experts", 5, 4)),
    (
        lambda: replace(EXPERTS, fused_attention=False),
        ("small-experts", "latent", "fused"),
    ),
    (lambda: built(pp=5), (96, "megatron-175b", "pp*v=5")),
    (lambda: built(pp=2, layers=[50, 47]), ("layers", 96, 97)),
    (lambda: built().step("1f1b"), ("1f1b", "num_microbatches")),
    (lambda: built().step("zb-v", 16), ("pp=8", "v=2")),
    (lambda: built(pp=1).limits(zb.Placement.linear(1)), ("395 GB", "85.9 GB", "rank 0", "GPUs")),
    (lambda: Efficiency(products=0, links=-1), ("Efficiency", "products", 0)),
    (lambda: replace(SMALL, hidden=0), ("hidden", "Model", 0)),
    (lambda: replace(SMALL, heads=3), ("hidden=1024", "small", 3)),
    (lambda: GPU("mine", (("bf16", 0.0),), 1, 1, 1, 1, 1, 1), ("bf16", "GPU", "flops", 0)),
]


@pytest.mark.parametrize(("call", "stated"), WRONG, ids=range(len(WRONG)))
def test_wrong_settings_are_refused(call: Callable[[], object], stated: Stated) -> None:
    with raises(InputError, *stated):
        call()


@pytest.mark.long
def test_the_page_prints_what_it_shows_and_its_command_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    programs = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert len(programs) == 2
    for program, shown in programs:
        with redirect_stdout(io.StringIO()) as printed:
            exec(program, names)
        assert printed.getvalue() == shown
    _, command, *_, division = re.findall(r"^\$ zerobubble (.*)$", PAGE, re.MULTILINE)
    done = CliRunner().invoke(main, division.split())
    (table,) = re.findall(r"top 5\n(.*?)```", PAGE, re.DOTALL)
    assert done.output.startswith(table), done.output
    done = CliRunner().invoke(main, command.split())
    assert done.exit_code == 0, done.output
    assert re.search(r"^vee +12,930 ms +4.25 %", done.output, re.MULTILINE)
    assert zb.io.load_plan("plan.json").problem.costs.placement == zb.Placement.vee(8)


def test_the_page_of_benchmarks_has_the_committed_figures() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in BENCHMARKS.splitlines()
        if re.match(r"\| (megatron|llama\d|gpt3|deepseek|nemotron)-\w+ ?", line)
    ]
    seen = [float(cell.removesuffix(" TFLOP/s")) for row in rows for cell in row if re.fullmatch(r"[\d.]+( TFLOP/s)?", cell)]
    steps = [figure for row in RESULTS["steps"] for figure in (row["published_s"], round(row["ours_s"], 2))]
    throughputs = [row for name in ("unfitted", "not_chosen_for", "held_out") for row in RESULTS[name]]
    speeds = []
    for row in throughputs:
        figure = "tflops" if row["published_tokens_per_s"] is None else "tokens_per_s"
        speeds += [round(row[f"published_{figure}"]), round(row[f"ours_{figure}"])]
    assert seen == [*steps, *speeds]
    errors = [cell for row in rows for cell in row if re.fullmatch(r"[+-][\d.]+ %", cell)]
    found = [f"{100 * row['error']:+.1f} %" for row in [*RESULTS["steps"], *throughputs]]
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


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("megatron-175b", {"tp": 8, "recompute": "selective"}),
        ("llama3-70b", {"tp": 4, "cp": 2, "precision": "fp8"}),
        ("llama3-70b", {"tp": 8, "recompute": "full", "sequence_parallel": False}),
        ("deepseek-v3", {"ep": 8, "dp": 8, "recompute": "latent"}),
    ],
)
def test_halves_of_layers_have_the_costs_of_the_whole(model: str, settings: dict[str, Any]) -> None:
    found = transformer(model, gpu="H100", **settings)
    whole, joined = found.parts(), zb.partition.join_blocks(found.parts(inside_blocks=True))
    assert len(found.parts(inside_blocks=True)) == 2 * found.setting.model.layers + 2
    is_full = settings.get("recompute") == "full"
    for layer, halves in zip(whole, joined, strict=True):
        assert halves.parameters_bytes == pytest.approx(layer.parameters_bytes, abs=2)
        for name in ("forward", "backward", "weight", "held_after_b", "output_comm"):
            assert getattr(halves, name) == pytest.approx(getattr(layer, name), abs=2), name
        kept = layer.held_after_f * (2 if is_full and layer not in (whole[0], whole[-1]) else 1)
        assert halves.held_after_f == pytest.approx(kept, abs=2)


def test_stages_of_half_layers_cost_what_their_parts_do() -> None:
    usual = transformer("deepseek-v3", gpu="H100", ep=8, dp=8, pp=2, v=2, layers=[15, 15, 16, 15])
    found = transformer("deepseek-v3", gpu="H100", ep=8, dp=8, pp=2, v=2, layers=[2.5, 28, 0.5, 30])
    parts = found.parts(inside_blocks=True)
    costs = zb.partition.stage_costs(parts, (1 + 5, 1 + 5 + 56, 1 + 5 + 56 + 1))
    for name in ("forward", "backward", "weight", "held_after_f", "held_after_b"):
        assert getattr(found.costs, name) == pytest.approx(getattr(costs, name), abs=40), name
    assert found.costs.comm == costs.comm
    assert found.costs.comm[2] == usual.costs.comm[0] < found.costs.comm[0] == found.costs.comm[1]
    assert sum(found.parameters) == sum(usual.parameters)
    assert len(found.assumptions) == len(usual.assumptions) + 1
    with raises(InputError, "layers", 4, 0.5, 61):
        transformer("deepseek-v3", gpu="H100", ep=8, dp=8, pp=2, v=2, layers=[2.25, 28, 0.75, 30])


def test_a_configuration_of_a_framework_is_not_cut_inside_layers() -> None:
    done = CliRunner().invoke(main, ["plan", "--from", "trainer:train.json", "--gpu", "H100", "-p", "4", "--inside-blocks"])
    assert done.exit_code == 2
    assert "--inside-blocks" in done.output
    assert "--layers" in done.output


@pytest.mark.parametrize(
    ("sizes", "of_one"),
    [
        ({}, 16),
        ({"dp": 4}, 16),
        ({"dp": 4, "dp_shard": 4}, 6 + 16 / 4),
        ({"dp": 4, "dp_shard": 2}, 6 + 16 / 2),
        ({"dp": 2, "dp_shard": 2, "cp": 2}, 6 + 16 / 4),
    ],
    ids=str,
)
def test_a_run_of_a_framework_keeps_the_bytes_of_its_pipeline(sizes: dict[str, int], of_one: float) -> None:
    """Frameworks train weights in float32: 4 bytes for the weight, 4 for its gradient, 8 for Adam. FSDP2 shards them, and holds gathered
    weights in bfloat16 and whole gradients in float32 during a step."""
    model = replace(MODELS["llama3-70b"], layers=4)
    layers = described_run.DescribedRun(model, tuple("abcdef"), 2, 8, 1, "none", **sizes).layers("H100")
    vocabulary = 128_256 * 8192
    assert sum(layer.parameters_bytes for layer in layers) == pytest.approx(of_one * model.parameters, rel=1e-6)
    assert layers[0].parameters_bytes == layers[-1].parameters_bytes == of_one * vocabulary


WRONG = (float("nan"), float("inf"), -1, 10**400, "many", [1], {})
"""Values that no field of a model, a GPU or an efficiency can have."""
SHAPES = {"model": MODELS["llama3-70b"], "gpu": GPUS["H100"], "efficiency": Efficiency()}


@pytest.mark.parametrize(
    ("shape", "name"), [(shape, column.name) for shape, value in SHAPES.items() for column in fields(value) if column.name != "name"]
)
def test_every_wrong_number_of_a_shape_is_refused(shape: str, name: str) -> None:
    for value in WRONG:
        with raises(InputError, name):
            replace(SHAPES[shape], **{name: value})


@pytest.mark.parametrize("name", ["tp", "cp", "ep", "pp", "v", "dp", "microbatch"])
def test_every_wrong_number_of_a_setting_is_refused(name: str) -> None:
    for value in WRONG:
        with raises(InputError, name):
            transformer("llama3-70b", gpu="H100", **{name: value})


def test_all_wrong_numbers_are_named_at_once() -> None:
    with raises(InputError, "hidden", -1, "heads", "nan", "gated", "'yes'"):
        replace(SMALL, hidden=-1, heads=float("nan"), gated="yes")
