"""Make small faults in the code that judges and moves numbers, and see whether the nearest tests notice.

    python -m tests.mutants [--sample 40] [--seed N] [--nearest 8] [--record FILE] [src/zerobubble/verify.py ...]

A mutant has one comparison, constant, sign, and/or or min/max changed, in a copy of the repository. It is killed if a test nearest to its
module fails or takes much longer than before. The nearest tests run once without a mutant, on marked sources (`tests/reached.py`): then a
mutant needs only those that reach its line, and the fastest run first. Survivors are printed with their line: each needs a test near it, or
a line in `equivalent_mutants.txt` that says why it changes nothing. Compiled kernels are left out, as each mutant would be compiled for a
minute.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from tests.nearest import MOST_FILES, ROOT, nearest
from tests.reached import FOLDER, marked, place, place_name, read

PRELOADED = (torch,)
"""What most tests import, and processes that run them inherit."""
TARGETS = (
    *(
        "verify.py",
        "verify_program.py",
        "graph.py",
        "simulation.py",
        "reductions.py",
        "rules.py",
        "fit.py",
        "lowering",
        "bounds",
        "offload",
    ),
    *("runtime/split", "runtime/stage", "runtime/hooks"),
)
"""What judges schedules and moves numbers, below src/zerobubble."""
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
SLOWER, SECONDS = 5.0, 60.0
"""A mutant is killed by time if its tests take so many times as long as without it, and so many seconds more."""
RECORD_SECONDS = 1800.0
"""A file of tests may take so long without a mutant."""
FIRST_FILES = 3
"""So many of the nearest test files run first, the others if all of these pass."""
MOST_SECONDS = 30.0
"""Tests of one mutant: the fastest of those that reach it, up to so many seconds."""
OTHER_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
}
OTHER_SIGNS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
OTHER_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One changed expression: its file, line and columns in bytes, before and after."""

    file: str
    line: int
    end_line: int
    column: int
    end_column: int
    before: str
    after: str
    text: str
    """Its line, or the first of them, without indentation."""
    is_marked: bool
    """Whether the record of what tests reach knows it: constants in patterns cannot be marked."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"

    @property
    def place(self) -> str:
        """The name of its place in the record of what tests reach."""
        return place_name(self.file, (self.line, self.column, self.end_line, self.end_column))

    @property
    def key(self) -> str:
        """What `equivalent_mutants.txt` calls it: with the text of the line, not its number, which other changes move."""
        return f"{self.file}: {self.before} -> {self.after} in: {self.text}"

    def applied(self, text: str) -> str:
        """The text of the file with the change in it."""
        lines = text.encode().splitlines(keepends=True)
        head, tail = lines[self.line - 1][: self.column], lines[self.end_line - 1][self.end_column :]
        lines[self.line - 1 : self.end_line] = [head + f"({self.after})".encode() + tail]
        return b"".join(lines).decode()


def mutants_of(file: str) -> Iterator[Mutant]:
    """Every mutant of a file, but for annotations and the parts of f-strings."""
    source = (ROOT / file).read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    in_patterns = {node for pattern in ast.walk(tree) if isinstance(pattern, ast.pattern) for node in ast.walk(pattern)}
    for node in _computed(tree):
        for changed in _changed(node):
            assert isinstance(node, ast.expr)
            line, column, end_line, end_column = place(node)
            where = file, line, end_line, column, end_column
            yield Mutant(*where, ast.unparse(node), ast.unparse(changed), lines[line - 1].strip(), node not in in_patterns)


def _computed(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.JoinedStr):
        return
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                yield from _computed(child)


def _changed(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(left, [op], comparators) if type(op) in OTHER_COMPARISONS:
            yield ast.Compare(left, [OTHER_COMPARISONS[type(op)]()], comparators)
        case ast.BinOp(left, op, right) if type(op) in OTHER_SIGNS and not isinstance(left, ast.JoinedStr):
            yield ast.BinOp(left, OTHER_SIGNS[type(op)](), right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.Call(ast.Name(name), args, keywords) if name in OTHER_FUNCTIONS:
            yield ast.Call(ast.Name(OTHER_FUNCTIONS[name], ast.Load()), args, keywords)
        case ast.Constant(int() as value) if not isinstance(value, bool):
            yield ast.Constant(value + 1)


def sources(names: list[str]) -> list[str]:
    """The Python files of the targets, or of the paths that were named."""
    paths = [ROOT / name for name in names] or [ROOT / "src/zerobubble" / name for name in TARGETS]
    found = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return [str(file.relative_to(ROOT)) for file in found]


def _near(file: str) -> list[str]:
    """The test files nearest to a source file. If enough of them start no processes, which take seconds a case, these are all."""
    found = list(map(str, nearest(Path(file))))
    pure = [each for each in found if each.startswith("tests/pure")]
    return pure if len(pure) >= FIRST_FILES else found


def equivalent() -> set[str]:
    """The keys of mutants that were shown to change nothing."""
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines() if EQUIVALENT.exists() else []
    return {line.partition("  # ")[0] for line in lines if line and not line.startswith("#")}


class Copy:
    """A copy of the repository in which mutants are tried."""

    def __init__(self, folder: Path, record: Path | None, targets: Iterable[str], most: int) -> None:
        self.root, self._most = folder / "repository", most
        wanted = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
        for name in wanted:
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, self.root / name)
        self._targets = {file: (self.root / file).read_text(encoding="utf-8") for file in targets}
        self._source = b"".join(sha256(path.read_bytes()).digest() for path in sorted((self.root / "src").rglob("*.py")))
        self._kept = record
        self._records: dict[str, dict[str, Any]] = json.loads(record.read_text()) if record is not None and record.exists() else {}

    def notices(self, mutant: Mutant) -> tuple[bool, int]:
        """Whether a test nearest to the mutant's file fails, or takes much longer; and how many that reach it were chosen for that."""
        files, number = _near(mutant.file)[: self._most], 0
        for some in (files[:FIRST_FILES], files[FIRST_FILES:]):
            self._record(some)
            tests = self._tests_of(mutant, some)
            number += len(tests)
            if tests and self._fails(mutant, tests):
                return True, number
        return False, number

    def _tests_of(self, mutant: Mutant, files: Iterable[str]) -> dict[str, float]:
        """The tests that reach a mutant, with their seconds: the fastest first, up to `MOST_SECONDS`, and at least one."""
        found: dict[str, float] = {}
        for record in (self._records[file] for file in files):
            names = record["reached"].get(mutant.place, []) if mutant.is_marked else record["passed"]
            found.update({name: record["passed"][name] for name in names})
        chosen: dict[str, float] = {}
        for name, seconds in sorted(found.items(), key=lambda each: each[1]):
            if chosen and sum(chosen.values()) + seconds > MOST_SECONDS:
                break
            chosen[name] = seconds
        return chosen

    def _fails(self, mutant: Mutant, tests: Mapping[str, float]) -> bool:
        names = self.root.parent / "tests"
        text = (self.root / mutant.file).read_text(encoding="utf-8")
        self._write(mutant.file, mutant.applied(text))
        names.write_text("".join(f"{name}\n" for name in tests), encoding="utf-8")
        try:
            return self._run(["-x", f"@{names}"], SLOWER * sum(tests.values()) + SECONDS) != 0
        finally:
            self._write(mutant.file, text)

    def _record(self, files: Iterable[str]) -> None:
        """Run test files without a mutant, on marked sources, and keep what their tests reach."""
        keys = {file: sha256(self._source + (self.root / file).read_bytes()).hexdigest() for file in files}
        missing = [file for file in keys if self._records.get(file, {}).get("key") != keys[file]]
        if not missing:
            return
        for file, text in self._targets.items():
            places = {(each.line, each.column, each.end_line, each.end_column) for each in mutants_of(file)}
            self._write(file, marked(text, file, places))
        for file in missing:
            self._records[file] = {"key": keys[file]} | self._reached_by(file)
            left_out = self._records[file]["failed"]
            print(f"recorded {file}" + f"; left out, as they fail or are skipped: {left_out}" * bool(left_out), flush=True)
            if self._kept is not None:
                self._kept.write_text(json.dumps(self._records), encoding="utf-8")
        for file, text in self._targets.items():
            self._write(file, text)

    def _reached_by(self, file: str) -> dict[str, Any]:
        folder = self.root.parent / "record"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._run(["-p", "tests.reached", file], RECORD_SECONDS, {FOLDER: str(folder)})
        passed, failed, reached = read(folder)
        return {"passed": passed, "failed": failed, "reached": reached}

    def _run(self, arguments: list[str], seconds: float, variables: Mapping[str, str] = MappingProxyType({})) -> int:
        process = get_context("fork").Process(target=_pytest, args=(self.root, arguments, variables))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)  # with its ranks
            process.join()
        assert process.exitcode is not None
        return process.exitcode

    def _write(self, file: str, text: str) -> None:
        """Write a source file and drop its bytecode, which Python knows by second and size only."""
        path = self.root / file
        path.write_text(text, encoding="utf-8")
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            stale.unlink()


def _pytest(root: Path, arguments: list[str], variables: Mapping[str, str]) -> None:
    """Run pytest on the copy in a process forked from this one, which has imported torch. That takes most of the time of a short test."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.chdir(root)
    paths = [str(root / "src"), str(root)]
    sys.path[:] = [*paths, *(path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "src"))]
    os.environ.update({"PYTHONPATH": ":".join(paths)} | variables)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # the copy has its own
    sys.exit(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *arguments]))


def main() -> int:
    """Try a sample of mutants; returns 1 if fewer than nine in ten are killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files or folders, by default all that judge and move numbers")
    parser.add_argument("--sample", type=int, default=40, help="how many mutants to try")
    parser.add_argument("--seed", type=int, default=None, help="of the sample; random by default, and printed")
    parser.add_argument("--nearest", type=int, default=MOST_FILES, help="how many of the nearest test files to try, at most")
    parser.add_argument("--record", type=Path, help="keep in this file what each test reaches, for further samples of the same sources")
    parser.add_argument("--json", dest="out", help="also write the outcome of each mutant to this file")
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    known = equivalent()
    every = [mutant for file in sources(options.files) for mutant in mutants_of(file) if mutant.key not in known]
    sample = sorted(random.Random(seed).sample(every, min(options.sample, len(every))), key=lambda each: (each.file, each.line))
    print(f"{len(sample)} of {len(every)} mutants, --seed {seed}", flush=True)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), options.record, {*sources([]), *(mutant.file for mutant in sample)}, options.nearest)
        for number, mutant in enumerate(sample, 1):
            is_killed, tests = copy.notices(mutant)
            outcomes.append(asdict(mutant) | {"tests": tests, "killed": is_killed})
            print(f"{number}/{len(sample)} {'killed' if is_killed else 'SURVIVED'} {tests} tests: {mutant}", flush=True)
    killed = sum(outcome["killed"] for outcome in outcomes)
    print(f"killed {killed} of {len(sample)}")
    if options.out:
        Path(options.out).write_text(json.dumps({"seed": seed, "mutants": outcomes}, indent=1) + "\n", encoding="utf-8")
    return 0 if killed >= 0.9 * len(sample) else 1


if __name__ == "__main__":
    sys.exit(main())
