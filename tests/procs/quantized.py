"""Layers with frozen weights in 8 bits, which keep the scales in each of the places that libraries use, and adapters on top.

The scales are in attributes of the weight, as in 4 bits of bitsandbytes; in attributes of the module, as in its 8 bits; inside a wrapper,
as with torchao; or in buffers, as with GPTQ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

WIDTH, LAYERS = 16, 4


class State:
    """The scales of a weight, and the weight itself, which is there twice. A forward notes how it ran."""

    is_training: bool | None = None
    is_packed = False

    def __init__(self, scale: Tensor, numbers: Tensor | None = None) -> None:
        self.scale = scale
        self.numbers = numbers


class Packed(nn.Parameter):
    """Numbers of 8 bits, with the scales in an attribute. Views of it have its class, and are parameters."""

    state: State | None

    def __new__(cls, data: Tensor, state: State | None = None) -> Packed:
        made = Tensor._make_subclass(cls, data, False)
        made.state = state
        return made

    def __deepcopy__(self, memo: Any) -> Packed:
        return Packed(self.data.clone(), None if self.state is None else State(self.state.scale.clone()))


class Wrapper(Tensor):
    """A weight in floating point for other code, which consists of numbers of 8 bits and their scales."""

    def __new__(cls, numbers: Tensor, scale: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype, device=scale.device)
        made.numbers, made.scale = numbers, scale
        return made

    numbers: Tensor
    scale: Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], _: Any, __: Any, ___: Any) -> Wrapper:
        return cls(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default):
            made = cls(func(args[0].numbers), func(args[0].scale))
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        raise NotImplementedError(f"{func} of a wrapper")


class Product(torch.autograd.Function):
    """A product with a frozen weight, which is computed from its numbers and scales in each call, and not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
        ctx.weight = numbers, scale
        return x @ (numbers.to(x.dtype) * scale).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        numbers, scale = ctx.weight
        return gradient @ (numbers.to(gradient.dtype) * scale), None, None


class Quantized(nn.Module):
    """A frozen linear layer with numbers of 8 bits, and the scales in this `place`."""

    def __init__(self, place: str) -> None:
        super().__init__()
        numbers = torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8)
        scale = torch.rand(WIDTH, 1, dtype=torch.float64) / 400
        self.place = place
        if place == "attribute":
            self.weight: Any = Packed(numbers, State(scale))
            self.state: State | None = self.weight.state
        elif place == "module":
            self.weight = nn.Parameter(numbers, requires_grad=False)
            self.state = State(scale, self.weight.data)
        elif place == "wrapper":
            self.weight = nn.Parameter(Wrapper(numbers, scale), requires_grad=False)
        else:
            self.register_buffer("numbers", numbers)
            self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        if self.place == "buffer":
            return Product.apply(x, self.numbers, self.scale)
        if self.place == "wrapper":
            return Product.apply(x, self.weight.numbers, self.weight.scale)
        if self.place == "attribute":
            state = self.weight.state
            if not (self.training or x.requires_grad or state.is_packed):  # as bitsandbytes does on some processors
                self.weight.data, state.scale, state.is_packed = self.weight.data.view(WIDTH // 2, -1).clone(), state.scale.float(), True
            return Product.apply(x, self.weight.view(WIDTH, WIDTH), state.scale.double())
        assert self.state is not None
        self.state.is_training = self.training
        return Product.apply(x, self.state.numbers, self.state.scale)


class Adapted(nn.Module):
    """A quantized layer with a trained adapter of low rank."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.base = Quantized(place)
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.down = nn.Linear(WIDTH, 4, bias=False, dtype=torch.float64)
        self.up = nn.Linear(4, WIDTH, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


PLACES = ("attribute", "module", "wrapper", "buffer")


def adapted(place: str) -> nn.Module:
    """A stack of adapted layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted(place) for _ in range(LAYERS)))
