"""Orders microbatches of unequal cost, and plans passes for them, on the rank with the first stage, for each training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from statistics import fmean
from threading import Event, Lock, Thread
from typing import Any

from torch import Tensor

from zerobubble.costs import FULL, Costs, Limits
from zerobubble.errors import InputError, ZeroBubbleError, shown
from zerobubble.installing import install
from zerobubble.ir import Schedule
from zerobubble.microbatch_order import numbers_by_place, with_numbers
from zerobubble.runtime.mailbox.handshake import MicrobatchCosts, StepOrder, write_passes
from zerobubble.runtime.step.planner import planner
from zerobubble.runtime.values.payload import tensors_in
from zerobubble.simulation import peak_memory

CostOf = Callable[[Any], "float | Tensor"]
"""A function `(microbatch) -> cost`: the relative cost of a microbatch among those of its step."""
CompileAhead = Callable[[Schedule, tuple[int, ...]], None]
"""A function `(schedule, passes)` that compiles passes which a step will play instead of those of `schedule`."""
TOKENS = "tokens"
"""The name of `tokens_of`."""
PASSES_PLAYED = 400_000
"""The effort of a search for an order, in simulated passes: a few milliseconds.

It is not limited by a clock, so the same microbatches always get the same order.
"""
MOST_ORDERS_PLAYED = 1000
"""Suffices for schedules with few passes."""
MOST_KEPT = 64
"""Orders and plans that are kept. The least recently used one is dropped."""
THREAD = "zerobubble order of microbatches"
"""The name of the thread that orders and plans ahead."""
_STORE_LOCK = Lock()


def tokens_of(microbatch: Any) -> int:
    """Returns the tokens of a microbatch by its first tensor: the number of integers, or of vectors along the last dimension."""
    first = tensors_in(microbatch)[0]
    if first.dim() > 1 and (first.is_floating_point() or first.is_complex()):
        return math.prod(first.shape[:-1])
    return first.numel()


class MicrobatchOrdering:
    """Chooses the order in which `schedule` takes the microbatches of a step, by their costs.

    Args:
        order_by: "tokens", or the user's function.
        schedule: The schedule.
        costs: The costs of the stages. None if they are unknown: all stages are then equal, and R takes as long as F.
        limits: No order holds more memory than these, or than the order of the data if that holds more.
        plans_passes: Whether passes are planned for microbatches that are known ahead.

    Raises `InputError` if the microbatches of the schedule are not interchangeable, or if llvmlite is missing.
    """

    def __init__(
        self, order_by: str | CostOf, schedule: Schedule, costs: Costs | None, limits: Limits | None, *, plans_passes: bool = True
    ) -> None:
        if find_spec("llvmlite") is None:
            raise InputError("order_by needs llvmlite", argument="order_by", remedy=f"{install('plan')}, or leave order_by out")
        self._cost_of: CostOf = tokens_of if isinstance(order_by, str) else order_by
        self._stages = Costs.uniform(schedule.num_stages).with_recompute(FULL) if costs is None else replace(costs, shares=())
        self._mean = fmean(costs.shares) if costs is not None and costs.shares else 1.0
        self._limits = limits
        self._plans_passes = plans_passes
        self._orders: dict[tuple[float, ...], tuple[int, ...]] = {}
        self._planned: dict[tuple[float, ...], StepOrder] = {}
        self._ahead: Thread | None = None
        self._costs_ahead: tuple[float, ...] = ()
        self._ends_search = Event()
        first = (2.0, *(1.0,) * (schedule.num_microbatches - 1))
        self._search(schedule, first, evaluations=1)  # compiles the search now, so that the first step need not wait for it
        if plans_passes:
            planner().compile_search()

    def costs_of(self, schedule: Schedule, microbatches: Sequence[Any]) -> MicrobatchCosts:
        """Returns the costs of these microbatches, what was planned ahead for them, and a function that chooses their order.

        Ends the search for their passes if it is still running. Raises `InputError` for costs that are not numbers above 0.
        """
        costs = self._costs(microbatches)
        if costs == self._costs_ahead:
            self.wait()
        return MicrobatchCosts(costs, partial(self._order, schedule), self._planned.get(costs))

    def begin(self, schedule: Schedule, microbatches: Sequence[Any], compile_ahead: CompileAhead | None = None) -> None:
        """Starts a thread that chooses the order of these microbatches for a later step, plans its passes, and compiles them.

        Ends a search for other microbatches. Raises like `of`, and for another number of microbatches.
        """
        if len(microbatches) != schedule.num_microbatches:
            raise InputError(
                "order_ahead got {got} microbatches, but a step takes {expected}", got=len(microbatches), expected=schedule.num_microbatches
            )
        costs = self._costs(microbatches)
        if costs == self._costs_ahead:
            return
        self.wait()
        self._ends_search.clear()
        self._costs_ahead = costs
        preparing = partial(self._prepare, schedule, costs, compile_ahead)
        self._ahead = Thread(target=preparing, name=THREAD, daemon=True)
        self._ahead.start()

    def wait(self) -> None:
        """Waits for the thread, if any. The search for passes ends with what it has found so far."""
        if self._ahead is not None:
            self._ends_search.set()
            self._ahead.join()
            self._ahead, self._costs_ahead = None, ()

    def _costs(self, microbatches: Sequence[Any]) -> tuple[float, ...]:
        of_user = [self._cost_of(microbatch) for microbatch in microbatches]
        costs = tuple(_number(cost) for cost in of_user)
        wrong = [f"{shown(of_user[j])} for microbatch {j}" for j, cost in enumerate(costs) if not (math.isfinite(cost) and cost > 0)]
        if wrong:
            message = "order_by must return {expected}; it returns {got}"
            raise InputError(
                message, argument="order_by", expected="the cost of a microbatch, a finite number above 0", got=", ".join(wrong)
            )
        return costs

    def _prepare(self, schedule: Schedule, costs: tuple[float, ...], compile_ahead: CompileAhead | None) -> None:
        """Runs on the thread. Errors are left to the step with these microbatches, which raises them on every rank."""
        try:
            planned = self._passes(schedule, costs, self._order(schedule, costs))
            if planned is not None:
                if compile_ahead is not None:
                    compile_ahead(schedule, planned.passes)
                _store(self._planned, costs, planned)
        except ZeroBubbleError:
            return

    def _passes(self, schedule: Schedule, costs: tuple[float, ...], order: tuple[int, ...]) -> StepOrder | None:
        """Returns passes and their order that are faster than this order alone; None if none are found, or if they were found before."""
        if not self._plans_passes or len(set(costs)) == 1 or costs in self._planned:
            return None
        priced, limits = self._problem(schedule, costs)
        planned = planner().plan_passes(with_numbers(schedule, order), priced, limits, self._ends_search.is_set)
        return None if planned is None else StepOrder(tuple(numbers_by_place(planned)), write_passes(planned))

    def _order(self, schedule: Schedule, costs: tuple[float, ...]) -> tuple[int, ...]:
        """Returns the microbatch at each place of the schedule."""
        order = self._orders.get(costs)
        if order is None:
            evaluations = min(MOST_ORDERS_PLAYED, 1 + PASSES_PLAYED // sum(map(len, schedule.rows)))
            order = self._search(schedule, costs, evaluations=evaluations)
        _store(self._orders, costs, order)
        return order

    def _search(self, schedule: Schedule, costs: tuple[float, ...], *, evaluations: int) -> tuple[int, ...]:
        if len(set(costs)) == 1:
            return tuple(range(len(costs)))
        priced, limits = self._problem(schedule, costs)
        ordered = planner().order_microbatches(schedule, priced, limits, evaluations)
        first = schedule.placement.routes[0][0]
        pairs = zip(schedule.rows[first], ordered.rows[first], strict=True)
        order = {before.microbatch: after.microbatch for before, after in pairs}
        return tuple(order[place] for place in range(schedule.num_microbatches))

    def _problem(self, schedule: Schedule, costs: tuple[float, ...]) -> tuple[Costs, Limits | None]:
        """Returns the costs of the microbatches of a step, and the memory limits of ranks: no less than in the order of the data."""
        mean = fmean(costs) / self._mean
        priced = replace(self._stages, shares=tuple(cost / mean for cost in costs))
        if self._limits is None:
            return priced, None
        return priced, Limits(tuple(map(max, self._limits.memory, peak_memory(schedule, priced))))


def _store(store: dict[tuple[float, ...], Any], costs: tuple[float, ...], value: Any) -> None:
    """Stores `value` for these `costs`, and drops the least recently used entry if there are too many."""
    with _STORE_LOCK:  # the thread and a step may both store something
        store.pop(costs, None)
        store[costs] = value
        if len(store) > MOST_KEPT:
            store.pop(next(iter(store)))


def _number(cost: Any) -> float:
    """Returns a cost as a number; NaN if it is none."""
    if isinstance(cost, Tensor) and cost.numel() == 1:
        return float(cost)
    return float(cost) if isinstance(cost, (int, float)) and not isinstance(cost, bool) else math.nan
