"""The last W's of a stage, run parameter by parameter in parts of about the same size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zerobubble.runtime.split.layers.weight_tail import WeightTail


class Work:
    """The weight gradients of a microbatch for these parameters, each of the same size."""

    def __init__(self, parameters: list[nn.Parameter], added: list[nn.Parameter]) -> None:
        self._waiting = [[SimpleNamespace(weight=each, held=[torch.empty(10)])] for each in parameters]
        self._added = added

    def waiting(self) -> list[Any]:
        return self._waiting

    def hand_over(self) -> None:
        """Nothing is held twice."""

    def add(self, entries: Any) -> None:
        self._added.append(entries[0].weight)


@pytest.mark.parametrize(("parameters", "works", "parts"), [(1, 4, [1, 1, 1, 1]), (2, 2, [2, 2]), (3, 2, [3, 3]), (3, 4, [3, 3, 3, 3])])
def test_parts_are_equal_and_parameters_complete_in_order(parameters: int, works: int, parts: list[int]) -> None:
    own = [nn.Parameter(torch.empty(1)) for _ in range(parameters)]
    added: list[nn.Parameter] = []
    complete: list[nn.Parameter] = []
    tail = WeightTail([Work(own, added) for _ in range(works)], own, complete.extend)  # type: ignore[misc]
    found = []
    while not tail.is_over:
        before = len(added)
        tail.run_part()
        found.append(len(added) - before)
    assert found == parts
    assert [id(each) for each in added] == [id(each) for each in own for _ in range(works)]
    assert [id(each) for each in complete] == [id(each) for each in own]
    assert tail.held == []
