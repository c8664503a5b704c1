"""Between machines a pass sends one message, however many tensors it returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.endpoints import CountingLines, of_group
from tests.procs.ranks import Ranks
from zerobubble.runtime.mailbox.mailbox import packed, unpacked

M = 4


def test_tensors_of_any_size_and_type_come_through_one_buffer() -> None:
    sent = [torch.randn(3), torch.tensor(7), torch.empty(0, 5, dtype=torch.float64), torch.randn(2, 3).bfloat16(), torch.tensor([True])]
    (message,) = packed(sent)
    (buffer,), received = unpacked([(tuple(t.shape), t.dtype) for t in sent], DEVICE)
    buffer.copy_(message)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(sent, received, strict=True))
    before = received[1]._version
    received[0].add_(1.0)
    assert received[1]._version == before, "what changes one tensor in place leaves the others as they are for autograd"


def test_a_single_tensor_is_sent_without_packing() -> None:
    alone = torch.randn(3)
    assert packed([alone])[0] is alone
    coming, tensors = unpacked([((3,), torch.float32)], DEVICE)
    assert coming[0] is tensors[0]


class Several(nn.Module):
    """Returns three tensors, two with a gradient."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.left, self.right = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()

    def forward(self, x: Tensor, y: Tensor | None = None, count: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        y, count = x if y is None else y, torch.zeros((), dtype=torch.int64) if count is None else count
        return self.left(x + count), self.right(x * y).tanh(), count + 1


def loss_fn(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    return ((output[0] * output[1] * output[2] - target) ** 2).mean()


def train_and_count(group: Any, name: str) -> tuple[int, int, bool]:
    """How often a channel was used in the second step, how often passes of this rank's row hand on, and whether gradients are right."""
    lines = of_group(CountingLines, group)
    with zb.Pipeline(lambda s, n: Several(s), name, M, loss_fn, group=group, transport=lines) as pipe:
        torch.manual_seed(0)
        x, y = torch.randn(M, 8, dtype=torch.float64), torch.randn(M, 8, dtype=torch.float64)
        pipe.step(x, y)
        for parameter in pipe.parameters():
            parameter.grad = None
        lines.used = 0
        pipe.step(x, y)
        in_second = lines.used
        messages = sum(rank == pipe.rank for rank, _, _, _ in zb.lower(pipe.schedule).channels())
        stages = [Several(s) for s in range(pipe.schedule.num_stages)]
        for part, aim in zip(x.chunk(M), y.chunk(M), strict=True):
            state: Any = (part,)
            for stage in stages:
                state = stage(*state)
            (loss_fn(state, aim) / M).backward()
        right = all(
            torch.allclose(mine.grad, theirs.grad, rtol=1e-12, atol=0)
            for index, module in pipe.modules.items()
            for mine, theirs in zip(module.parameters(), stages[index].parameters(), strict=True)
        )
    return in_second, messages, right


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_pass_sends_one_message(world: Ranks, name: str) -> None:
    for used, messages, right in world.run(train_and_count, name, ranks=2):
        assert right
        assert used == messages > 0
