"""Ranks that are given different batches in any call are warned once, also on devices that the host does not wait for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import zerobubble as zb
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from zerobubble.runtime.step.batch_digests import BatchDigests
from zerobubble.testing import checked_device

FLOATS_OF_8_BITS = torch.zeros(4, dtype=torch.float8_e4m3fn)


@contextmanager
def counting(found: list[int]) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found.append(sum("batch" in str(each.message) for each in caught))


def calls(group: Any, schedule: str, other_in: int | None, evaluates: bool, is_accelerator: bool) -> list[int]:
    """Counts the warnings of each of four calls. In one of them, the last rank has another order of samples."""
    counts: list[int] = []
    with checked_device() if is_accelerator else nullcontext(), zb.Pipeline(build, schedule, 4, loss_fn, group=group) as pipe:
        for call in range(4):
            inputs, targets = batch(4, seed=call)
            if call == other_in and group.rank() == 1:
                inputs, targets = inputs.flip(0), targets.flip(0)
            with counting(counts):
                (pipe.eval_step if evaluates else pipe.step)(inputs, targets)
    return counts


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
@pytest.mark.parametrize(
    ("other_in", "evaluates", "is_accelerator", "expected"),
    [
        (None, False, False, [0, 0, 0, 0]),
        (None, True, False, [0, 0, 0, 0]),
        (0, False, False, [1, 0, 0, 0]),
        (2, False, False, [0, 0, 1, 0]),
        (2, True, False, [0, 0, 1, 0]),
        (None, False, True, [0, 0, 0, 0]),
        (0, False, True, [1, 0, 0, 0]),
        (1, False, True, [0, 0, 1, 0]),
    ],
)
def test_the_call_with_another_batch_is_warned_of(
    world: Ranks, schedule: str, other_in: int | None, evaluates: bool, is_accelerator: bool, expected: list[int]
) -> None:
    first, last = world.run(calls, schedule, other_in, evaluates, is_accelerator, ranks=2)
    assert first == [0, 0, 0, 0]
    assert last == expected


def digest(value: Any, call: int = 1, digests: BatchDigests | None = None) -> int:
    return (digests or BatchDigests(torch.device("cpu"))).of(call, value, waits=False)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(1000),
        torch.arange(1000) > 500,
        torch.arange(8, dtype=torch.bfloat16),
        torch.ones(8, dtype=torch.complex64),
        torch.tensor(3.0),
        [torch.zeros(2), {"labels": torch.ones(1, 3, dtype=torch.int32)}, "text"],
        [torch.full((2,), number) for number in range(100)],
    ],
)
def test_equal_values_have_equal_numbers(value: Any) -> None:
    assert digest(value) == digest(tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value))
    assert 0 < digest(value) < 2**48


@pytest.mark.parametrize("value", [None, (), "text", FLOATS_OF_8_BITS, torch.empty(0)])
def test_what_cannot_be_read_has_no_number(value: Any) -> None:
    assert digest(value) == 0


def test_a_device_that_the_host_does_not_wait_for_knows_the_batch_before() -> None:
    one, other = torch.arange(5.0), torch.arange(6.0)
    with checked_device():
        digests = BatchDigests(torch.device("cpu"))
        found = [digest(value, call, digests) for call, value in [(1, one), (2, other), (4, one), (5, other)]]
    assert found == [0, digest(one), 0, digest(one)]
