"""Large tables of cases, of which `make test` plays every n-th and `make test-long` the others."""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def every(n: int, cases: Iterable[Any]) -> list[Any]:
    """Every n-th case as it is, the first among them, and the others as long tests.

    A case is a value, a plain tuple of values or a `pytest.param`.
    """

    def long(case: Any) -> Any:
        if isinstance(case, ParameterSet):
            return pytest.param(*case.values, marks=(*case.marks, pytest.mark.long), id=case.id)
        return pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.long)

    return [case if place % n == 0 else long(case) for place, case in enumerate(cases)]


def long_if(chosen: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases, those that are `chosen` as long tests; a case is a single value."""
    return [pytest.param(case, marks=pytest.mark.long) if case in chosen else case for case in cases]


def every_of(n: int, *sides: Iterable[Any]) -> list[Any]:
    """Every n-th combination of one value of each side, the others as long tests: each value comes up where `n` divides by no length."""
    return every(n, product(*sides))


def every_and_all(n: int) -> Any:
    """Parametrizes `nth` for a test that plays `shapes[::nth]`: every n-th shape in `make test`, all of them as a long test."""
    return pytest.mark.parametrize("nth", [n, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
