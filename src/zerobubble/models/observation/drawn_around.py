"""The generators of Python, NumPy and the model from which the code around the units draws: every stage runs that code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zerobubble.errors import InputError
from zerobubble.runtime.values.python_places import Content, GeneratorState
from zerobubble.runtime.values.python_state import GENERATORS, named_generators

REMEDY = "draw them with torch's functions, without a generator of your own, or pass the numbers as an argument of the model"


class DrawnAround:
    """Finds which of the `generators`, by path, the code around the units has moved in a forward, and which the units have.

    `of_torch` returns what differs after a draw from torch's default generators. `places` are the numbers of unit calls before such draws.
    """

    def __init__(self, generators: Mapping[str, GeneratorState], of_torch: Callable[[], Any] = lambda: None) -> None:
        self._of_torch, self._torch_now = of_torch, of_torch()
        self.places: set[int] = set()
        self._generators = generators
        self._states = _read(generators)
        self._by_code: dict[str, int] = {}
        self._by_units: dict[str, str] = {}

    def leave_code(self, num_calls: int) -> None:
        """Ends code around the units, behind this number of calls of units."""
        self._by_code |= dict.fromkeys(self._moved(), num_calls)
        if self._of_torch() != self._torch_now:
            self.places.add(num_calls)

    def leave_unit(self, unit: str) -> None:
        """Ends a call of a unit."""
        self._by_units |= dict.fromkeys(self._moved(), unit)
        self._torch_now = self._of_torch()

    @property
    def units_draw(self) -> bool:
        """Whether units have moved any generator."""
        return bool(self._by_units)

    def drawn(self) -> dict[str, int]:
        """Returns the generators that stages share, with the number of unit calls before the last draw; see `Dataflow.drawn`.

        If the code draws from any, it may by chance draw from Python's and NumPy's default generators, too. Raises `InputError` if units
        draw from one of the code.
        """
        for name in self._by_code.keys() & self._by_units.keys():
            raise drawn_by_both(name, self._by_units[name])
        by_chance = [name for name in GENERATORS if name in self._generators and name not in self._by_units] if self._by_code else []
        return dict.fromkeys(by_chance, 0) | self._by_code

    def _moved(self) -> list[str]:
        before, self._states = self._states, _read(self._generators)
        return [name for name, content in self._states.items() if content is not before[name]]


def _read(generators: Mapping[str, GeneratorState]) -> dict[str, Content]:
    return {name: generator.read() for name, generator in generators.items()}


def drawn_by_both(name: str, unit: str) -> InputError:
    """Returns the error for a generator that the code around the units shares, and that a unit draws from."""
    return InputError(
        "the model's code draws random numbers between its parts, which every stage repeats, and part {unit!r}, which one stage runs, "
        "draws from {generator}, too: stages would draw different numbers",
        unit=unit,
        generator=named_generators([name]),
        remedy=REMEDY,
    )
