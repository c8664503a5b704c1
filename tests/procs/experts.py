"""A hand-written mixture of experts with expert parallelism: tokens go to the ranks of their experts and come back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import zerobubble as zb

WIDTH = 6
EXPERTS = 4


class AllToAll(torch.autograd.Function):
    """Sends `sent[rank]` rows to each rank and receives `received[rank]` rows from it; gradients go the opposite way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = received, sent, group
        return exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return exchanged(gradient, *ctx.back), None, None, None


def exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    there = torch.empty(sum(received), *rows.shape[1:], dtype=rows.dtype, device="cpu")  # on the host, for which gloo is
    dist.all_to_all_single(there, rows.contiguous().cpu(), received, sent, group)
    return there.to(rows.device)


class ExpertModules(nn.Module):
    """One module per expert of this rank, under its number in the whole layer."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.first = numbers[0]
        self.experts = nn.ModuleDict({str(number): _Expert(number) for number in numbers})

    def forward(self, rows: Tensor, expert: Tensor) -> Tensor:
        found = torch.zeros_like(rows)
        for number, module in self.experts.items():
            here = (expert + self.first == int(number)).nonzero().flatten()
            if len(here):  # an expert without tokens has no gradient
                found = found.index_add(0, here, module(rows[here]))
        return found


class _Expert(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(900 + number)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(self.up(x).relu())
        return down


class StackedExperts(nn.Module):
    """The matrices of all experts in two parameters."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        made = [_Expert(number) for number in numbers]
        self.up = nn.Parameter(torch.stack([one.up.weight.detach().T for one in made]))
        self.down = nn.Parameter(torch.stack([one.down.weight.detach().T for one in made]))

    def forward(self, rows: Tensor, expert: Tensor) -> Tensor:
        up, down = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.up, self.down))
        found = torch.zeros_like(rows)
        for number in range(len(up)):
            here = (expert == number).nonzero().flatten()
            made = (rows[here] @ up[number]).relu() @ down[number]
            found = found.index_add(0, here, made.to(found.dtype))  # autocast lowers products
        return found


class Mixture(nn.Module):
    """A residual layer in which the router selects one expert per token. `form` says how the experts are stored."""

    def __init__(self, seed: int, mesh: DeviceMesh | None, form: str) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.size, self.rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
        self.group = None if mesh is None else mesh.get_group()
        mine = range(EXPERTS)[self.rank * EXPERTS // self.size :][: EXPERTS // self.size]
        self.experts = ExpertModules(mine) if form == "modules" else StackedExperts(mine)
        self.double()
        if mesh is not None and form == "divided":
            for name, weight in list(self.experts.named_parameters()):
                setattr(self.experts, name, nn.Parameter(DTensor.from_local(weight.detach(), mesh, [Shard(0)])))
        elif mesh is not None:
            zb.nn.mark_experts(self.experts, mesh, dim=None if form == "modules" else 0)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weight, expert = self.router(rows).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = expert.bincount(minlength=EXPERTS).view(self.size, -1)
        there = self._others(counts)
        sent, received = counts.sum(1).tolist(), there.sum(1).tolist()
        arrived = self._exchanged(rows[order], sent, received)
        local = torch.arange(there.shape[1]).repeat(self.size).repeat_interleave(there.flatten())
        back = self._exchanged(self.experts(arrived, local), received, sent)
        return x + (back[order.argsort()] * weight[:, None]).view_as(x)

    def _others(self, counts: Tensor) -> Tensor:
        if self.group is None:
            return counts
        ones = [1] * self.size
        return exchanged(counts, ones, ones, self.group)

    def _exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return rows if self.group is None else AllToAll.apply(rows, sent, received, self.group)


def build_mixture(stage: int, num_stages: int, mesh: DeviceMesh | None, form: str) -> nn.Module:
    """Tokens to vectors, a mixture of experts, and vectors to logits; one device has the stages without a mesh."""
    torch.manual_seed(40 + stage)
    parts: list[nn.Module] = [nn.Embedding(11, WIDTH)] if stage == 0 else []
    parts += [nn.Linear(WIDTH, WIDTH), Mixture(stage, mesh, form), nn.LayerNorm(WIDTH)]
    if stage == num_stages - 1:
        torch.manual_seed(60)  # making other experts drew other numbers
        parts.append(nn.Linear(WIDTH, 11))
    return nn.Sequential(*parts).double()
