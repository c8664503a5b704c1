"""Models for the rank processes, built from a seed so that all ranks agree, and their one-device reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import zerobubble as zb


class Block(nn.Module):
    """A residual block with a norm, two Linears and an in-place activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def build(stage: int, num_stages: int, width: int = 6, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Stage `stage`: tokens to vectors first, blocks, vectors to logits last."""
    torch.manual_seed(100 + stage)
    parts: list[nn.Module] = [nn.Embedding(11, width)] if stage == 0 else []
    parts.append(Block(width))
    if stage == num_stages - 1:
        parts.append(nn.Linear(width, 11))
    return nn.Sequential(*parts).to(dtype)


def batch(num_microbatches: int, seed: int = 0, length: int = 5) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens, two sequences per microbatch."""
    tokens = torch.randint(0, 11, (2 * num_microbatches, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def one_device(modules: list[nn.Module], num_microbatches: int, inputs: Tensor, targets: Tensor) -> Tensor:
    """The reference: accumulates gradients in `.grad` over the microbatches and returns the mean loss."""
    total = torch.zeros(())
    for x, y in zip(inputs.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True):
        loss = loss_fn(nn.Sequential(*modules)(x), y) / num_microbatches
        loss.backward()
        total = total + loss.detach()
    return total


class InBackward(torch.autograd.Function):
    """Copies a tensor; its gradient is `act` applied to the gradient of the copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.act(dy), None


class OneDevice(nn.Module):
    """The reference: runs the stages in sequence, each on the output of the one before; `kwargs[s]` go to stage s."""

    def __init__(self, stages: list[nn.Module], kwargs: dict[int, dict[str, Any]] | None = None) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.kwargs = kwargs or {}

    def forward(self, x: Any) -> Any:
        for index, stage in enumerate(self.stages):
            named = self.kwargs.get(index, {})
            given = x if isinstance(x, (tuple, list, dict)) else (x,)
            x = stage(**given, **named) if isinstance(given, dict) else stage(*given, **named)
        return x


def gradient_error(pipe: zb.Pipeline, stages: Sequence[nn.Module]) -> float:
    """The largest difference between gradients of this rank and of the one-device `stages`; both must be None for the same parameters."""
    worst = 0.0
    for index, module in pipe.modules.items():
        for (name, mine), theirs in zip(module.named_parameters(), stages[index].parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), f"stage {index}, {name}: {mine.grad is None} {theirs.grad is None}"
            if mine.grad is not None and theirs.grad is not None:
                worst = max(worst, (mine.grad - theirs.grad).abs().max().item())
    return worst
