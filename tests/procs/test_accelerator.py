"""Tests that need a GPU: `ZEROBUBBLE_TEST_DEVICE=cuda` runs them, several ranks per GPU. With `cpu`, the same code runs on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from benchmarks.gpu.float8 import Float8Linear, has_float8
from tests.device import DEVICE
from tests.procs.ranks import Ranks
from tests.pure.shapes import TRAINING
from tests.thinned import every
from zerobubble.schedules import SCHEDULES

ON_GPU = DEVICE.type == "cuda"
WIDTH, HEADS, LENGTH, M = (256, 4, 128, 8) if ON_GPU else (16, 2, 8, 8)
BF16_ROUNDING = 6e-2
"""The relative error of a gradient that bfloat16 leaves: microbatches are summed in another order than on one device."""


class Attention(nn.Module):
    """A transformer block with dropout, whose attention is flash attention in bfloat16 on GPUs that have it."""

    def __init__(self, dropout: float, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def block(
    stage: int, num_stages: int, dtype: torch.dtype = torch.float32, dropout: float = 0.0, linear: type[nn.Linear] = nn.Linear
) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(Attention(dropout, linear), Attention(dropout, linear)).to(DEVICE, dtype)


def data(dtype: torch.dtype, step: int = 0) -> Tensor:
    return torch.randn(2 * M, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step)).to(DEVICE, dtype)


def mse(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target.float())


def against_one_device(
    group: Any, schedule: str, dtype: torch.dtype, options: dict[str, Any], linear: type[nn.Linear] = nn.Linear
) -> tuple[str, float]:
    """The transport, and the largest relative error of a loss or gradient over steps with an optimizer."""
    worst = 0.0
    make = partial(block, dtype=dtype, linear=linear)
    with zb.Pipeline(make, schedule, M, mse, group=group, **options) as pipe:
        stages = [make(stage, pipe.schedule.num_stages) for stage in range(pipe.schedule.num_stages)]
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        theirs = torch.optim.SGD(nn.ModuleList(stages).parameters(), lr=0.1)
        for step in range(4):
            x = data(dtype, step)
            loss = pipe.step(x, x)
            expected = torch.zeros((), device=DEVICE)
            for part in x.chunk(M):
                share = mse(nn.Sequential(*stages)(part), part) / M
                share.backward()
                expected += share.detach()
            worst = max(worst, (loss - expected).abs().item() / expected.item())
            for stage, module in pipe.modules.items():
                for mine, other in zip(module.parameters(), stages[stage].parameters(), strict=True):
                    assert mine.grad is not None
                    assert other.grad is not None
                    least = 1e-3 * max(p.grad.norm().item() for p in stages[stage].parameters())  # type: ignore[union-attr]
                    worst = max(worst, ((mine.grad - other.grad).norm() / other.grad.norm().clamp_min(least)).item())
            for each in (optimizer, theirs):
                each.step()
                each.zero_grad()
        return pipe.transport.name, worst


FAMILIES = [name for name in TRAINING if SCHEDULES[name].allows(4, M)]


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", every(5, FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_four_ranks_train_as_one_device(world: Ranks, schedule: str, dtype: torch.dtype) -> None:
    for name, worst in world.run(against_one_device, schedule, dtype, {"transport": "auto" if ON_GPU else "staged"}, ranks=4):
        assert name == "staged"
        assert worst <= (1e-4 if dtype is torch.float32 else BF16_ROUNDING)


WAYS = [{"split": "deferred"}, {"split": "graph"}, {"split": "compiled"}, {"split": "graph", "cuda_graphs": True}]


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_to_split_trains_as_one_device(world: Ranks, way: dict[str, Any]) -> None:
    if not ON_GPU and len(way) > 1:
        pytest.skip("CUDA graphs need a GPU")
    for _, worst in world.run(against_one_device, "zb-h1", torch.float32, way, ranks=2):
        assert worst <= 1e-4


@pytest.mark.skipif(not has_float8(DEVICE), reason="the device multiplies no FP8")
@pytest.mark.parametrize("split", ["deferred", "graph"])
def test_products_in_float8_train_as_on_one_device(world: Ranks, split: str) -> None:
    for _, worst in world.run(against_one_device, "zb-h1", torch.bfloat16, {"split": split}, Float8Linear, ranks=2):
        assert worst <= BF16_ROUNDING


def left_by(group: Any, recomputes: bool, offloads: bool) -> list[Tensor]:
    """The gradients that two steps with dropout leave on this rank."""
    schedule = zb.make("gpipe", group.size(), M)
    if recomputes:
        schedule = zb.schedules.with_recompute(schedule)
    options: dict[str, Any] = {}
    if offloads:
        with zb.Pipeline(lambda s, n: block(s, n, dropout=0.1), schedule, M, mse, group=group) as pipe:
            costs = pipe.profile(data(torch.float32), data(torch.float32))
        held = zb.simulation.peak_memory(schedule, costs)
        link = zb.offload.HostLink(to_host=20e9, from_host=20e9)
        options["offload"] = zb.offload.plan_offloads(schedule, costs, zb.Limits(tuple(h // 2 for h in held)), link)
    torch.manual_seed(17)  # a pipeline's draws follow from the state in which it is made
    with zb.Pipeline(lambda s, n: block(s, n, dropout=0.1), schedule, M, mse, group=group, **options) as pipe:
        for step in range(2):
            pipe.step(data(torch.float32, step), data(torch.float32, step))
        return [parameter.grad.cpu() for parameter in pipe.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(("recomputes", "offloads"), every(2, [(True, False), (False, True)]))
def test_recomputed_and_offloaded_stages_draw_the_same_and_keep_their_bits(world: Ranks, recomputes: bool, offloads: bool) -> None:
    plain = world.run(left_by, False, False, ranks=2)
    other = world.run(left_by, recomputes, offloads, ranks=2)
    assert all(torch.equal(a, b) for mine, theirs in zip(plain, other, strict=True) for a, b in zip(mine, theirs, strict=True))


def timed(group: Any) -> list[tuple[str, int, int]]:
    with zb.Pipeline(block, "zb-h1", M, mse, group=group) as pipe:
        x = data(torch.float32)
        for _ in range(3):
            pipe.step(x, x)
        return [(str(span.op), span.start, span.end) for _, span in pipe.timeline().spans()]


def test_timelines_of_the_device_are_in_order(world: Ranks) -> None:
    for spans in world.run(timed, ranks=2):
        ends = {name: end for name, _, end in spans}
        begins = {name: start for name, start, _ in spans}
        assert len(spans) == 2 * 3 * M
        assert all(begins[name] <= ends[name] for name in ends)
        for microbatch in range(M):
            assert ends[f"0F{microbatch}"] <= begins[f"0B{microbatch}"]
            assert ends[f"0B{microbatch}"] <= begins[f"0W{microbatch}"]


def forecast(group: Any) -> tuple[int, int]:
    """The forecast peak of activation bytes on this rank, and the increase of allocated memory during a step."""
    with zb.Pipeline(block, "1f1b", M, mse, group=group) as pipe:
        x = data(torch.float32)
        costs = pipe.profile(x, x)
        pipe.step(x, x)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        pipe.step(x, x)
        return zb.simulation.peak_memory(pipe.schedule, costs)[group.rank()], torch.cuda.max_memory_allocated() - before


@pytest.mark.skipif(not ON_GPU, reason="the CPU's allocator does not count")
def test_the_memory_forecast_is_what_the_allocator_hands_out(world: Ranks) -> None:
    for predicted, allocated in world.run(forecast, ranks=2):
        assert 0.5 * allocated <= predicted <= 1.1 * allocated


def failing(group: Any) -> str:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("boom")

    pipe = zb.Pipeline(block, "zb-v", M, loss, group=group, timeout=60.0)
    x = data(torch.float32)
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(x, x)
    return str(caught.value)


def test_an_error_on_one_rank_is_reported_to_all(world: Ranks) -> None:
    assert {"ValueError: boom" in text for text in world.run(failing, ranks=4)} == {True}
