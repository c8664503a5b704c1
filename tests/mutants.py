"""Make small faults in the code that judges and moves numbers, and see whether the nearest tests notice.

    python -m tests.mutants [--sample 40] [--seed N] [src/zerobubble/verify.py ...]

A mutant has one comparison, constant, sign, and/or or min/max changed, in a copy of the repository. It is killed if a test nearest to its
module fails or takes much longer than before. Survivors are printed with their line: each needs a test near it, or a line in
`equivalent_mutants.txt` that says why it changes nothing. Compiled kernels are left out, as each mutant would be compiled for a minute.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.nearest import ROOT, nearest

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

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"

    @property
    def key(self) -> str:
        """What `equivalent_mutants.txt` calls it: without the line, which other changes move."""
        return f"{self.file}: {self.before} -> {self.after}"

    def applied(self, text: str) -> str:
        """The text of the file with the change in it."""
        lines = text.encode().splitlines(keepends=True)
        head, tail = lines[self.line - 1][: self.column], lines[self.end_line - 1][self.end_column :]
        lines[self.line - 1 : self.end_line] = [head + f"({self.after})".encode() + tail]
        return b"".join(lines).decode()


def mutants_of(file: str) -> Iterator[Mutant]:
    """Every mutant of a file."""
    text = (ROOT / file).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        for changed in _changed(node):
            assert isinstance(node, ast.expr)
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            place = node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
            yield Mutant(file, *place, ast.unparse(node), ast.unparse(changed))


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


def equivalent() -> set[str]:
    """The keys of mutants that were shown to change nothing."""
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines() if EQUIVALENT.exists() else []
    return {line.partition("  # ")[0] for line in lines if line and not line.startswith("#")}


class Copy:
    """A copy of the repository in which mutants are tried."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "repository"
        wanted = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
        for name in wanted:
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, self.root / name)
        self._whole: dict[str, tuple[float, list[str]]] = {}

    def tests_of(self, file: str) -> tuple[float, list[str]]:
        """The tests nearest to a file and the seconds that they take; they must pass without a mutant."""
        if file not in self._whole:
            tests = list(map(str, nearest(Path(file))))
            began = time.monotonic()
            assert not tests or self._passes(tests, 1800), f"the tests nearest to {file} fail without a mutant: {' '.join(tests)}"
            self._whole[file] = time.monotonic() - began, tests
        return self._whole[file]

    def notices(self, mutant: Mutant) -> bool:
        """Whether a test nearest to the mutant's file fails, or takes much longer."""
        seconds, tests = self.tests_of(mutant.file)
        if not tests:
            return False
        file = self.root / mutant.file
        text = file.read_text(encoding="utf-8")
        file.write_text(mutant.applied(text), encoding="utf-8")
        try:
            return not self._passes(tests, SLOWER * seconds + SECONDS)
        finally:
            file.write_text(text, encoding="utf-8")

    def _passes(self, tests: list[str], seconds: float) -> bool:
        environment = os.environ | {"PYTHONPATH": f"{self.root / 'src'}:{self.root}", "PYTHONDONTWRITEBYTECODE": "1"}
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--durations=0", "-m", "sweep or not long"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        process = subprocess.Popen(command, cwd=self.root, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return False


def main() -> int:
    """Try a sample of mutants; returns 1 if fewer than nine in ten are killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files or folders, by default all that judge and move numbers")
    parser.add_argument("--sample", type=int, default=40, help="how many mutants to try")
    parser.add_argument("--seed", type=int, default=None, help="of the sample; random by default, and printed")
    parser.add_argument("--json", dest="out", help="also write the outcome of each mutant to this file")
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    known = equivalent()
    every = [mutant for file in sources(options.files) for mutant in mutants_of(file) if mutant.key not in known]
    sample = sorted(random.Random(seed).sample(every, min(options.sample, len(every))), key=lambda each: (each.file, each.line))
    print(f"{len(sample)} of {len(every)} mutants, --seed {seed}", flush=True)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for number, mutant in enumerate(sample, 1):
            is_killed = copy.notices(mutant)
            outcomes.append(asdict(mutant) | {"killed": is_killed})
            print(f"{number}/{len(sample)} {'killed' if is_killed else 'SURVIVED'} {mutant}", flush=True)
    killed = sum(outcome["killed"] for outcome in outcomes)
    print(f"killed {killed} of {len(sample)}")
    if options.out:
        Path(options.out).write_text(json.dumps({"seed": seed, "mutants": outcomes}, indent=1) + "\n", encoding="utf-8")
    return 0 if killed >= 0.9 * len(sample) else 1


if __name__ == "__main__":
    sys.exit(main())
