"""The form of figures in the results of both benchmarks."""

from __future__ import annotations

from typing import Any


def rounded(value: Any) -> Any:
    """Floats with four digits after the point, in whatever they lie."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value
