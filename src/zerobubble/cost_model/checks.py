"""Checks of user-defined models and GPUs."""

from __future__ import annotations

from math import inf
from typing import Any

from zerobubble.arguments import NUMBER
from zerobubble.errors import InputError, shown


class SettingError(InputError):
    """Incompatible arguments of an estimate; `faults` has the argument and a sentence for each reason."""

    def __init__(self, *faults: tuple[str, str]) -> None:
        super().__init__("; ".join(sentence for _, sentence in faults))
        self.faults = faults


def require_amounts(what: str, amounts: dict[str, Any], *, or_zero: bool = False) -> None:
    """Raises `InputError` for all `amounts` of `what` that are not finite numbers above 0, or 0 itself with `or_zero`."""
    words = f"a finite number {'at least' if or_zero else 'above'} 0"
    wrong = [name for name, value in amounts.items() if not NUMBER.accepts(value) or not 0 <= value < inf or not (value or or_zero)]
    if wrong:
        faults = "; ".join(f"{name} of {what} must be {words}, got {shown(amounts[name])}" for name in wrong)
        raise InputError("{faults}", faults=faults)
