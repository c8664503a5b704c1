"""The kernel compiler: its code gives Python's results, is cached, and is rebuilt after any change."""

from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.refusals import raises
from zerobubble import Costs, Limits, Placement
from zerobubble.planning.kernels.list_scheduler import list_schedule, list_scratch
from zerobubble.planning.kernels.native import machine, random_numbers
from zerobubble.planning.kernels.native.calls import Kernel
from zerobubble.planning.kernels.native.values import NotCompiledError
from zerobubble.planning.kernels.policy import AS_1F1B, full_speed_policy
from zerobubble.planning.kernels.priorities import apply_policy, empty_priorities, legs_of
from zerobubble.planning.kernels.tables import tables_of
from zerobubble.planning.problem.problem import Problem

PLACE = np.dtype([("count", "i8"), ("weight", "f8")])
CHOICES = np.array([0.5, 0.25])


class Shelf(NamedTuple):
    places: Any
    grid: Any
    flags: Any
    size: int
    inner: Any


@pytest.fixture(autouse=True)
def _kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.FOLDER, str(tmp_path))


def arithmetic(a: int, b: int, x: float) -> tuple[int, int, float, float, bool, int]:
    small = min(a, b, 7)
    large = max(x, a, 2)
    mixed = a
    if b % 2 == 0:
        mixed = a * x
    chained = 0 < a <= 5 or not (b > 2 and x < 1.0)
    return a // b, a % b, large**2 / b, mixed + small, chained, -a if a > b else (a << 2) ^ (b | 5)


def walked(shelf: Shelf, start: int) -> tuple[int, float]:
    total, most = 0, -1.0
    for at in range(start, -1, -1):
        if at == 2:
            continue
        one = shelf.places[at]
        one.count, one.weight = one.count + at, 2 * one.weight
        total += one.count
        if total > 40:
            break
    for place in shelf.places[1:3]:
        most = max(most, place.weight)
    shelf.places[0] = shelf.places[shelf.size - 1]
    row = shelf.grid[1]
    row[0], row[-1] = row[-1], row[0]
    a, b = shelf.grid[0]
    shelf.flags[1] = 1
    while True:
        total += shelf.flags[1] + a * b
        if total > 100:
            return total, most * CHOICES[1] * (3.0, 4.0)[total % 2]


def for_python(given: Any) -> Any:
    """The same with records whose fields are attributes in Python, too."""
    if isinstance(given, tuple):
        return given._make(map(for_python, given)) if given else given
    return given.view(np.recarray) if isinstance(given, np.ndarray) and given.dtype.names else given


def test_it_does_what_python_does() -> None:
    compiled = Kernel(arithmetic)
    for a in range(-7, 8, 3):
        for b in (-3, -2, 2, 3):
            for x in (0.5, 3.25):
                assert compiled(a, b, x) == arithmetic(a, b, x)


def test_it_walks_records_rows_and_slices_as_python_does() -> None:
    def shelf() -> Shelf:
        places = np.zeros(5, PLACE)
        places["count"], places["weight"] = range(5), np.linspace(0, 1, 5)
        return Shelf(places, np.arange(1, 5).reshape(2, 2), np.zeros(3, np.uint8), 5, ())

    ours, pythons = shelf(), shelf()
    assert Kernel(walked)(ours, 4) == walked(for_python(pythons), 4)
    assert all(np.array_equal(*pair) for pair in zip(ours[:3], pythons[:3], strict=True))


def drawn(numbers: Any, seed: int) -> None:
    np.random.seed(seed)
    for at in range(0, len(numbers), 5):
        numbers[at] = np.random.random()
        numbers[at + 1] = np.random.randint(1 + at)
        numbers[at + 2] = np.random.randint(3, 11)
        numbers[at + 3] = np.random.normal(1, 3)
        numbers[at + 4] = np.random.uniform(2, 5)


def test_random_numbers_are_those_of_numpy_in_every_thread() -> None:
    expected, kernel = np.zeros(2000), Kernel(drawn)
    drawn(expected, 5)
    found = [np.zeros(2000) for _ in range(2)]
    threads = [Thread(target=kernel, args=(numbers, 5)) for numbers in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(numbers, expected) for numbers in found)
    assert random_numbers.random(random_numbers.new_state()) == np.random.RandomState(0).random()


def test_what_is_compiled_is_kept_whole_or_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(machine, "_compiled", lambda text, make=machine._compiled: made.append(1) or make(text))
    assert Kernel(arithmetic)(5, 2, 1.0) == Kernel(arithmetic)(5, 2, 1.0)
    assert len(made) == 1
    Kernel(arithmetic)(5, 2, 1)  # x is a float, whatever it is called with
    assert len(made) == 2
    for file in tmp_path.glob("*.o"):
        file.write_bytes(file.read_bytes()[:-1])
    assert Kernel(arithmetic)(5, 2, 1.0) == arithmetic(5, 2, 1.0)
    assert len(made) == 3


def test_what_it_does_not_know_is_named_with_its_line() -> None:
    def lists(count: int) -> int:
        return len([count])

    with raises(NotCompiledError, f"test_native.py:{lists.__code__.co_firstlineno + 1}", "List"):
        Kernel(lists)(3)


@pytest.mark.parametrize(("group", "spread"), [(0, 1), (1, 0.5)])
def test_the_list_scheduler_makes_the_rows_that_python_makes(group: float, spread: float) -> None:
    problem = Problem(Placement.vee(3), 5, Costs.uniform(6, (7, 8, 5), comm=1), Limits((3_000_000,) * 3))
    tables = tables_of(problem)
    priorities, policy = empty_priorities(tables), full_speed_policy(2, 1.0, AS_1F1B)
    policy[-2:] = group, spread
    apply_policy(tables, legs_of(tables), policy, 0, priorities)
    found = []
    for run in (list_schedule, lambda *given: list_schedule.python(*map(for_python, given))):
        scratch = list_scratch(tables)
        found.append((run(tables, *priorities, scratch), scratch.order.tolist()))
    assert found[0] == found[1]
