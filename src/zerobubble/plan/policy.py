"""Policies: a few numbers, independent of ranks and microbatches, that the list scheduler turns into a schedule.

A leg is one visit of a microbatch to each rank. A policy says how fast a microbatch should travel each leg, forth and back, and how
ranks behave when they could idle; the due dates of all passes follow from the real times, so unequal stages need nothing special.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True)
class Policy:
    """`pace` and `rest` hold a value per leg forth, then per leg back: time per pass as a multiple of its own, and the halt after the leg.

    Halts, `patience`, `strict` and `delay` count in mean pass times, `period` in the work of the busiest rank for one microbatch,
    `backlog` in microbatches. `allowance` is the share of the unavoidable idle time after which W fills every gap, `patch` the share of
    its own time that W must fit to be run in a gap.
    """

    pace: tuple[float, ...]
    rest: tuple[float, ...]
    period: float = 1.0
    patience: float = 0.0
    strict: float = float("inf")
    patch: float = 1.0
    allowance: float = float("inf")
    backlog: float = float("inf")
    delay: float = float("inf")

    @classmethod
    def plain(cls, legs: int, allowance: float = 1.0) -> Policy:
        """Every microbatch at full speed, one every period."""
        return cls((1.0,) * 2 * legs, (0.0,) * 2 * legs, allowance=allowance)


def drawn(dice: Random, legs: int) -> Policy:
    """A policy at random, with every habit left out as often as it helps to do without."""
    never = float("inf")
    apart = legs if dice.random() < 0.4 else 1
    pace = _each(legs, apart, lambda: 1.0 if dice.random() < 0.4 else 1 + 2.2 * dice.random())
    rest = _each(legs, apart, lambda: 0.0 if dice.random() < 0.4 else dice.gauss(0, 4))
    allowance = dice.random()
    return Policy(
        pace,
        rest,
        period=1.0 if dice.random() < 0.5 else dice.uniform(0.8, 1.4),
        patience=dice.choice((0.0, 0.3, 1.0, 1.2 * dice.random())),
        strict=never if dice.random() < 0.5 else 20 * dice.random() ** 2,
        patch=dice.choice((1.0, 1.0, 0.0, dice.random())),
        allowance=never if allowance < 0.4 else dice.uniform(0.85, 1.1) if allowance < 0.82 else dice.uniform(0, 1.1),
        backlog=never if dice.random() < 0.85 else 1 + 8 * dice.random(),
        delay=never if dice.random() < 0.85 else 30 * dice.random(),
    )


def _each(legs: int, apart: int, draw: Callable[[], float]) -> tuple[float, ...]:
    """A value per leg forth and back: every leg its own, or with `apart` 1 all legs forth alike and all legs back."""
    return tuple(value for _ in range(2) for value in [draw() for _ in range(apart)] * (legs // apart))


def nudged(dice: Random, policy: Policy) -> Policy:
    """`policy` with one to three of its numbers changed a little."""
    for _ in range(dice.randint(1, 3)):
        step = dice.choice((0.5, 0.15, 0.04))
        part = dice.random()
        if part < 0.25:
            policy = replace(policy, pace=_moved(dice, policy.pace, step, lowest=0.2))
        elif part < 0.5:
            policy = replace(policy, rest=_moved(dice, policy.rest, 6 * step))
        else:
            policy = _with_habit(dice, policy, dice.choice(list(_HABITS)), step)
    return policy


def _moved(dice: Random, values: tuple[float, ...], size: float, lowest: float = float("-inf")) -> tuple[float, ...]:
    at = dice.randrange(len(values))
    return (*values[:at], max(lowest, values[at] + dice.gauss(0, size)), *values[at + 1 :])


_HABITS = {"period": (1.0, 0.3), "patience": (0.0, 1.0), "strict": (8.0, 10.0), "patch": (1.0, 1.0), "allowance": (1.0, 0.3)}
"""Where each habit starts when it has been left out, and how far it moves."""


def _with_habit(dice: Random, policy: Policy, name: str, step: float) -> Policy:
    start, reach = _HABITS[name]
    value: float = getattr(policy, name)
    changed: dict[str, Any] = {name: start if value == float("inf") else max(0.0, value + dice.gauss(0, step * reach))}
    return replace(policy, **changed)
