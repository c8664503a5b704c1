"""Finds the tests nearest to a module: those that import it by name, its package, or else the modules that use it.

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
FEWEST_FILES, MOST_FILES = 3, 8
"""Test files for one module: the nearest come first, and more of them only take longer. With too few, those of its users are near, too."""


def module_of(file: Path) -> str:
    """The dotted name of a source or test file, relative to the root of the repository."""
    parts = file.with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "src" else parts).removesuffix(".__init__")


@cache
def imported_by(file: Path) -> frozenset[str]:
    """The modules and names that a file imports, by their dotted names, and those that it uses as `zb.simulate`."""
    found = set()
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and (dotted := ast.unparse(node)).startswith("zb."):
            found.add("zerobubble" + dotted.removeprefix("zb"))
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


@cache
def exported() -> dict[str, str]:
    """The names that packages of the library pass on, such as `zerobubble.simulate`, and the modules that they are from."""
    found = {}
    for path in (ROOT / "src/zerobubble").rglob("__init__.py"):
        package = module_of(path.relative_to(ROOT))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                found.update({f"{package}.{alias.asname or alias.name}": node.module for alias in node.names})
    return found


@cache
def test_files(folder: str) -> tuple[Path, ...]:
    """The files of tests below a folder."""
    return tuple(sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("test_*.py")))


@cache
def users() -> dict[str, frozenset[str]]:
    """The modules of the library that import each module or a name of it. The package itself, which imports nearly all, is left out."""
    modules = {module_of(path.relative_to(ROOT)): path.relative_to(ROOT) for path in (ROOT / "src/zerobubble").rglob("*.py")}
    found: dict[str, set[str]] = {}
    for user, file in modules.items():
        for name in imported_by(file) & modules.keys() if user != "zerobubble" else ():
            found.setdefault(name, set()).add(user)
    return {name: frozenset(whose) for name, whose in found.items()}


def _direct(module: str, folder: str) -> list[tuple[bool, bool, bool, int, Path]]:
    """The test files named after a module, its package or a name of either, or that import it or from its package; the nearest first."""
    package = module.rpartition(".")[0]
    public = {name for name, maker in exported().items() if maker == module}
    of_package = [] if package == "zerobubble" else [package, *(name for name, maker in exported().items() if maker == package)]
    names = {name.rpartition(".")[2] for name in (module, *public, *of_package)}
    ranked = []
    for file in test_files(folder):
        imports = imported_by(file)
        is_named = file.stem.removeprefix("test_") in names
        imports_it = any(name == module or name.startswith(f"{module}.") for name in imports) or not public.isdisjoint(imports)
        imports_package = package != "zerobubble" and any(name == package or name.startswith(f"{package}.") for name in imports)
        if is_named or imports_it or imports_package:
            ranked.append((not is_named, not imports_it, package == "zerobubble" or package not in imports, len(imports), file))
    return sorted(ranked)


def nearest(source: Path, folder: str = "tests", most: int = MOST_FILES) -> list[Path]:
    """The test files nearest to a module, at most `most`.

    Files named after the module, its package or a public name of either come first. Then come files that import it, those that import its
    package, and those that import other modules of its package. Of these, files that import little come first, because they are about
    little else. If they are fewer than `FEWEST_FILES`, the tests of the modules that import this one follow, then those of the modules
    that import these, and so on.
    """
    module = module_of(source)
    found: dict[Path, None] = {}
    seen = layer = {module}
    while layer and len(found) < min(FEWEST_FILES, most):
        found.update({file: None for *_, file in sorted(row for name in layer for row in _direct(name, folder))})
        layer = {user for name in layer for user in users().get(name, ())} - seen
        seen = seen | layer
    return list(found)[:most]


def nearest_to_all(files: Iterable[Path], folder: str = "tests") -> list[Path]:
    """The tests nearest to any of `files`; test files are their own nearest."""
    found: dict[Path, None] = {}
    for file in files:
        is_test = file.parts[0] == "tests" and file.stem.startswith("test_")
        found.update(dict.fromkeys([file] if is_test else nearest(file, folder) if file.parts[0] == "src" else []))
    return [file for file in found if file.is_relative_to(folder) and (ROOT / file).exists()]


if __name__ == "__main__":
    print(*nearest_to_all(map(Path, sys.argv[1:])), sep="\n")
