"""Mutants are small changes of one expression each, and marked sources record what a test reaches and compute the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tests.nearest
import tests.reached
from tests.mutants import AREAS, Mutant, Outcome, area_of, files_near, mutants_of, sample, table
from tests.nearest import nearest
from tests.reached import marked
from tests.warm import exchange, is_inside_a_function

SOURCE = '''"""A module."""
from __future__ import annotations

def f(x: int, y: int = 1) -> str:
    if x < y and not x == 3:
        return f"{x + 1}"
    return "most" if max(x, y) - 1 else "least"
'''


@pytest.fixture
def mutants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Mutant]:
    monkeypatch.setattr("tests.mutants.ROOT", tmp_path)
    (tmp_path / "module.py").write_text(SOURCE, encoding="utf-8")
    return list(mutants_of("module.py"))


def test_each_expression_that_computes_has_its_mutant(mutants: list[Mutant]) -> None:
    assert {mutant.before: mutant.after for mutant in mutants} == {
        "1": "2",  # the default of y, and what is subtracted; not the number in the text
        "x < y and (not x == 3)": "x < y or not x == 3",
        "x < y": "x <= y",
        "not x == 3": "x == 3",
        "x == 3": "x != 3",
        "3": "4",
        "max(x, y) - 1": "max(x, y) + 1",
        "max(x, y)": "min(x, y)",
    }
    assert len(mutants) == 9
    changed = {mutant.applied(SOURCE) for mutant in mutants}
    assert len(changed) == 9
    assert SOURCE not in changed
    assert all(ast.parse(text) for text in changed)


def test_marked_sources_compute_the_same_and_record_the_places_reached(mutants: list[Mutant], monkeypatch: pytest.MonkeyPatch) -> None:
    reached: set[str] = set()
    monkeypatch.setattr(tests.reached, "at", reached.add)
    places = {(each.line, each.column, each.end_line, each.end_column) for each in mutants}
    plain: dict[str, Any] = {}
    recording: dict[str, Any] = {}
    exec(SOURCE, plain)
    exec(marked(SOURCE, "module.py", places), recording)
    assert {mutant.line for mutant in mutants if mutant.place in reached} == {4}
    assert recording["f"](0, 5) == plain["f"](0, 5) == "1"
    assert {mutant.line for mutant in mutants if mutant.place in reached} == {4, 5}
    assert recording["f"](2, 1) == plain["f"](2, 1) == "most"
    assert {mutant.place for mutant in mutants} == reached


def test_a_sample_keeps_its_mutants_when_others_are_added(mutants: list[Mutant]) -> None:
    drawn = sample(mutants, 4, seed=3)
    assert len({(each.column, each.after, each.line) for each in drawn}) == 4
    assert set(sample(mutants, 9, seed=3)) == set(mutants)
    assert sample(drawn, 4, seed=3) == drawn
    assert {tuple(sample(mutants, 4, seed)) for seed in range(5)} != {tuple(drawn)}


def test_every_area_has_sources_and_tests() -> None:
    for area in AREAS:
        file = tests.mutants.sources([area])[0]
        assert area_of(file) == area
        assert all((tests.nearest.ROOT / each).exists() for each in files_near(file))


def test_the_table_counts_what_became_of_each_mutant(mutants: list[Mutant]) -> None:
    states = ["killed", "killed", "killed", "survived", "equivalent"]
    text = table([(mutant, Outcome(state, 1, "")) for mutant, state in zip(mutants, states, strict=False)], {"module.py": 9})
    assert [row.split(" | ")[1:] for row in text.splitlines()[2:]] == [["9", "5", "3", "1", "1", "75% |"]] * 2


@pytest.mark.long
def test_a_fork_exchanges_the_code_of_the_functions_that_a_mutant_changes(mutants: list[Mutant], tmp_path: Path) -> None:
    path, namespace = tmp_path / "module.py", dict[str, Any]()
    exec(compile(SOURCE, path, "exec", dont_inherit=True), namespace)
    function, default = namespace["f"], next(each for each in mutants if each.line == 4)
    for after, arguments, found in (("max(x, y) + 1", (-1, -1), "least"), ("x <= y", (2, 2), "3"), ("min(x, y)", (2, 1), "least")):
        mutant = next(each for each in mutants if each.after == after)
        assert is_inside_a_function(SOURCE, mutant.line, mutant.end_line)
        assert function(*arguments) != found
        assert exchange(str(path), SOURCE, mutant.applied(SOURCE))
        assert function(*arguments) == found
        assert exchange(str(path), mutant.applied(SOURCE), SOURCE)
    assert not is_inside_a_function(SOURCE, default.line, default.end_line)
    assert not exchange(str(path), SOURCE, default.applied(SOURCE))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small one, in which `judge` uses `inner.count`, which no test imports."""
    files = {
        "src/zerobubble/__init__.py": "from zerobubble.judge import verdict; from zerobubble.inner import tally",
        "src/zerobubble/judge.py": "from zerobubble.inner import count",
        "src/zerobubble/inner/__init__.py": "def tally(): pass",
        "src/zerobubble/inner/count.py": "",
        "src/zerobubble/inner/other.py": "",
        "tests/test_judge.py": "import zerobubble.judge, json, os, sys",
        "tests/test_judged.py": "import zerobubble.judge",
        "tests/test_other.py": "import zerobubble.inner.other",
        "tests/test_all.py": "import zerobubble as zb; zb.verdict(1)",
        "tests/test_tally.py": "import zerobubble as zb, a, b, c, d, e, f, g",
        "tests/test_verdict.py": "import zerobubble as zb, a, b, c, d, e, f, g",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    caches = [tests.nearest.imported_by, tests.nearest.test_files, tests.nearest.users, tests.nearest.exported]
    monkeypatch.setattr("tests.nearest.ROOT", tmp_path)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path
    for cached in caches:
        cached.cache_clear()


def names(files: list[Path]) -> list[str]:
    return [file.stem for file in files]


@pytest.mark.usefixtures("repository")
def test_tests_named_after_a_module_come_first_and_then_those_that_import_it() -> None:
    assert names(nearest(Path("src/zerobubble/judge.py"))) == ["test_judge", "test_verdict", "test_judged", "test_all"]
    assert names(nearest(Path("src/zerobubble/judge.py"), most=1)) == ["test_judge"]


@pytest.mark.usefixtures("repository")
def test_a_module_that_no_test_imports_has_the_tests_of_its_package_and_of_its_users() -> None:
    """The test named after a public name of the package comes first."""
    found = ["test_tally", "test_other", "test_judge", "test_verdict", "test_judged", "test_all"]
    assert names(nearest(Path("src/zerobubble/inner/count.py"))) == found
