"""The order of microbatches of unequal cost, which the rank with the first stage chooses for each training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from statistics import fmean
from threading import Thread
from typing import Any

from torch import Tensor

from zerobubble.costs import FULL, Costs, Limits
from zerobubble.errors import InputError, shown
from zerobubble.ir import Schedule
from zerobubble.planning import order_microbatches
from zerobubble.runtime.mailbox.handshake import MicrobatchCosts
from zerobubble.runtime.values.payload import tensors_in
from zerobubble.simulation import peak_memory

CostOf = Callable[[Any], "float | Tensor"]
"""A function `(microbatch) -> cost`: what a microbatch costs, relative to the others of its step."""
TOKENS = "tokens"
"""What stands for `tokens_of`."""
PASSES_PLAYED = 400_000
"""How long an order is searched for, in passes of schedules that are played: some milliseconds. No clock is looked at, so that the same
microbatches are always in the same order."""
MOST_ORDERS_PLAYED = 1000
"""Enough for a schedule of few passes."""
MOST_KEPT = 64
"""Orders that are remembered; the one not met for longest is forgotten."""


def tokens_of(microbatch: Any) -> int:
    """The tokens of a microbatch, by its first tensor: as many as it has integers, or vectors along its last dimension."""
    first = tensors_in(microbatch)[0]
    if first.dim() > 1 and (first.is_floating_point() or first.is_complex()):
        return math.prod(first.shape[:-1])
    return first.numel()


class MicrobatchOrdering:
    """Chooses the order in which `schedule` takes the microbatches of a step, by what each costs.

    `order_by` is "tokens", for as many as a microbatch has, or the user's function. `costs` are those of the stages, None where nothing is
    known of them: then all are taken to be alike, and R to take as long as F. With `limits` no order holds more than these, or than the
    order of the data if that is more. Raises `InputError` for a schedule whose microbatches have no places that could be exchanged, and
    where llvmlite is missing.
    """

    def __init__(self, order_by: str | CostOf, schedule: Schedule, costs: Costs | None, limits: Limits | None) -> None:
        if find_spec("llvmlite") is None:
            raise InputError("order_by searches for orders with llvmlite: pip install 'zerobubble[plan]', or leave order_by out")
        self._cost_of: CostOf = tokens_of if isinstance(order_by, str) else order_by
        self._stages = Costs.uniform(schedule.num_stages).with_recompute(FULL) if costs is None else replace(costs, shares=())
        self._mean = fmean(costs.shares) if costs is not None and costs.shares else 1.0
        self._limits = limits
        self._orders: dict[tuple[float, ...], tuple[int, ...]] = {}
        self._ahead: Thread | None = None
        first = (2.0, *(1.0,) * (schedule.num_microbatches - 1))
        self._search(schedule, first, evaluations=1)  # which also compiles the search, now and not in the first step

    def of(self, schedule: Schedule, microbatches: Sequence[Any]) -> MicrobatchCosts:
        """What these microbatches cost, and how to choose their order; raises `InputError` for costs that are no numbers above 0."""
        told = [self._cost_of(microbatch) for microbatch in microbatches]
        costs = tuple(_number(cost) for cost in told)
        wrong = [f"{shown(told[j])} for microbatch {j}" for j, cost in enumerate(costs) if not (math.isfinite(cost) and cost > 0)]
        if wrong:
            raise InputError(f"order_by must give what a microbatch costs, a finite number above 0; it gives {', '.join(wrong)}")
        return MicrobatchCosts(costs, partial(self._chosen, schedule))

    def begin(self, schedule: Schedule, microbatches: Sequence[Any]) -> None:
        """Choose the order of these microbatches on a thread, for a step to come; raises as `of` does, and for another number of them."""
        if len(microbatches) != schedule.num_microbatches:
            raise InputError(f"order_ahead is given {len(microbatches)} microbatches, and a step takes {schedule.num_microbatches}")
        costs = self.of(schedule, microbatches).costs
        self.wait()
        self._ahead = Thread(target=self._order, args=(schedule, costs), name="zerobubble order of microbatches", daemon=True)
        self._ahead.start()

    def wait(self) -> None:
        """Wait for the order that is being chosen, if any is."""
        if self._ahead is not None:
            self._ahead.join()
            self._ahead = None

    def _chosen(self, schedule: Schedule, costs: tuple[float, ...]) -> tuple[int, ...]:
        self.wait()
        return self._order(schedule, costs)

    def _order(self, schedule: Schedule, costs: tuple[float, ...]) -> tuple[int, ...]:
        """The microbatch that takes each place of the schedule."""
        order = self._orders.pop(costs, None)
        if order is None:
            evaluations = min(MOST_ORDERS_PLAYED, 1 + PASSES_PLAYED // sum(map(len, schedule.rows)))
            order = self._search(schedule, costs, evaluations=evaluations)
        self._orders[costs] = order
        if len(self._orders) > MOST_KEPT:
            self._orders.pop(next(iter(self._orders)))
        return order

    def _search(self, schedule: Schedule, costs: tuple[float, ...], *, evaluations: int) -> tuple[int, ...]:
        if len(set(costs)) == 1:
            return tuple(range(len(costs)))
        mean = fmean(costs) / self._mean
        priced = replace(self._stages, shares=tuple(cost / mean for cost in costs))
        limits = self._limits
        if limits is not None:
            limits = Limits(tuple(map(max, limits.memory, peak_memory(schedule, priced))))
        ordered = order_microbatches(schedule, priced, limits=limits, evaluations=evaluations)
        first = schedule.placement.routes[0][0]
        taken = {place.microbatch: taker.microbatch for place, taker in zip(schedule.rows[first], ordered.rows[first], strict=True)}
        return tuple(taken[place] for place in range(schedule.num_microbatches))


def _number(cost: Any) -> float:
    """A cost as a number, NaN for what is none."""
    if isinstance(cost, Tensor) and cost.numel() == 1:
        return float(cost)
    return float(cost) if isinstance(cost, (int, float)) and not isinstance(cost, bool) else math.nan
