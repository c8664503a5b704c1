"""A segment of a traced model: a part without its own parameters, which receives them as arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn


class Operations(nn.Module):
    """Consecutive operations, as a graph for training and one for evaluation. They belong to one stage, like a part with parameters.

    The first arguments are parameters of the model, `given_parameters`, stored here on the meta device.
    """

    def __init__(self, training: nn.Module, evaluation: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.in_training = training
        self.in_evaluation = evaluation
        on_meta = [torch.empty_like(parameter, device="meta") for parameter in parameters]
        self.given_parameters = tuple(map(nn.Parameter, on_meta, (parameter.requires_grad for parameter in parameters)))

    def forward(self, *args: Any) -> Any:
        run = self.in_training if self.training else self.in_evaluation
        return run(*args)


def parameters_of(unit: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters that `unit` holds or receives from the model."""
    yield from unit.parameters()
    if isinstance(unit, Operations):
        yield from unit.given_parameters
