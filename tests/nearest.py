"""Finds the tests nearest to a module: those that import it by name, then those that import its package.

    python -m tests.nearest src/zerobubble/verify.py ...

prints them. `tests/quick.py` runs them after a change, `tests/mutants.py` against small faults.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_FILES = 8
"""Test files for one module: the nearest come first, and more of them only take longer."""


def module_of(file: Path) -> str:
    """The dotted name of a source or test file, relative to the root of the repository."""
    parts = file.with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "src" else parts).removesuffix(".__init__")


@cache
def imported_by(file: Path) -> frozenset[str]:
    """The modules and names that a file imports, by their dotted names."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


@cache
def test_files(folder: str) -> tuple[Path, ...]:
    """The files of tests below a folder."""
    return tuple(sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("test_*.py")))


def nearest(source: Path, folder: str = "tests", most: int = MOST_FILES) -> list[Path]:
    """The test files nearest to a module, at most `most`.

    A file named after the module comes first. Then come files that import it, and those that import its package; of these, files that
    import little come first, because they are about little else.
    """
    module = module_of(source)
    package = module.rpartition(".")[0]
    ranked = []
    for file in test_files(folder):
        imports = imported_by(file)
        is_named = file.stem.removeprefix("test_") == source.stem
        imports_it = any(name == module or name.startswith(f"{module}.") for name in imports)
        if is_named or imports_it or (package != "zerobubble" and package in imports):
            ranked.append((not is_named, not imports_it, len(imports), file))
    return [file for *_, file in sorted(ranked)[:most]]


def nearest_to_all(files: Iterable[Path], folder: str = "tests") -> list[Path]:
    """The tests nearest to any of `files`; test files are their own nearest."""
    found: dict[Path, None] = {}
    for file in files:
        is_test = file.parts[0] == "tests" and file.stem.startswith("test_")
        found.update(dict.fromkeys([file] if is_test else nearest(file, folder) if file.parts[0] == "src" else []))
    return [file for file in found if file.is_relative_to(folder) and (ROOT / file).exists()]


if __name__ == "__main__":
    print(*nearest_to_all(map(Path, sys.argv[1:])), sep="\n")
