"""Checks of user-defined models and GPUs."""

from __future__ import annotations

from math import isfinite
from typing import Any

from zerobubble.errors import InputError, shown


class SettingError(InputError):
    """Incompatible arguments of an estimate; `faults` has the argument and a sentence for each reason."""

    def __init__(self, *faults: tuple[str, str]) -> None:
        super().__init__("; ".join(sentence for _, sentence in faults))
        self.faults = faults


def require_amounts(what: str, amounts: dict[str, Any], least: float = 0.0, inclusive: bool = False) -> None:
    """Raises `InputError` for all `amounts` of `what` that are not numbers above `least` (or equal to it, if `inclusive`)."""
    faults = [f"{name} of {what} must be {words}, got {shown(value)}" for name, value, words in _bad(amounts, least, inclusive)]
    if faults:
        raise InputError("{faults}", faults="; ".join(faults))


def _bad(amounts: dict[str, Any], least: float, inclusive: bool) -> list[tuple[str, Any, str]]:
    words = f"a finite number {'at least' if inclusive else 'above'} {least:g}"
    return [(name, value, words) for name, value in amounts.items() if not _is_within(value, least, inclusive)]


def _is_within(value: Any, least: float, inclusive: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        return False
    return value > least or (inclusive and value == least)
