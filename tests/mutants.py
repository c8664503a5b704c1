"""Make small faults in the code that judges and moves numbers, and see whether the nearest tests notice.

    python -m tests.mutants [--sample 16] [--seed N] [--record FILE] [--json FILE] [--again FILE] [verify.py runtime/hooks/clip.py ...]

A mutant has one comparison, constant, sign, and/or or min/max changed, in a copy of the repository. It is killed if a test near its area
fails or takes much longer than before. The tests of an area run once without a mutant, on marked sources (`tests/reached.py`): then a
mutant needs only those that reach its line, and the fastest run first. These run on the unchanged sources, too, and must pass there.
Survivors are printed with their line: each needs a test near it, or a line in `equivalent_mutants.txt` that says why it changes nothing.
Compiled kernels are left out, as each mutant would be compiled for a minute.
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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from hashlib import sha256
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
import torch

from tests.nearest import ROOT, nearest
from tests.reached import FOLDER, marked, place, place_name, read
from tests.warm import Forks, Trial, is_inside_a_function

AREAS: dict[str, str] = {
    "verify.py": "pure/verify pure/weight_order pure/ir pure/laws",
    "verify_program.py": "pure/other_suites pure/rollback pure/rerouting pure/lower pure/communicators",
    "graph.py": "pure/graph pure/rules pure/period pure/recompute pure/verify pure/vocabulary",
    "simulation.py": "pure/simulate pure/recompute pure/period pure/reductions pure/offload pure/explain pure/diff",
    "reductions.py": "pure/reductions pure/gathers pure/diff",
    "rules.py": "pure/rules pure/kinds pure/verify",
    "fit.py": "pure/fit pure/fit_comm pure/fused pure/recompute pure/unequal",
    "lowering": "pure/lower pure/rollback pure/rerouting pure/period pure/communicators",
    "bounds": "pure/bounds pure/bound_figures pure/overlap_bounds pure/recompute pure/plan_head pure/period pure/bound_windows"
    " pure/plan_recompute",
    "offload": "pure/offload pure/covering pure/axes pure/plan_offload",
    "runtime/split": "pure/weight_tail procs/special_tensors procs/graph_split procs/graph_guard procs/graph_values procs/graph_tensors"
    " procs/graph_share procs/autocast procs/experts procs/split_transformers procs/graph_none procs/compiled_sizes procs/traced"
    " procs/split_matrix procs/graph_lengths procs/describe procs/graph_checkpoint procs/cuda_graphs procs/split_graphs procs/own_layers"
    " procs/loss_modules procs/weight_parts",
    "runtime/stage": "procs/stage_parts procs/saved_tensors procs/divided_head procs/describe procs/layer_profile procs/other_ranks_models"
    " procs/offload_runs procs/selective_recompute procs/fsdp procs/shared_kinds procs/recompute_runs procs/own_layers procs/experts"
    " procs/devices",
    "runtime/hooks": "procs/hook_parts procs/hooks procs/clip procs/torch_calls procs/bubble_work procs/scaled_gradients procs/tied"
    " procs/auto procs/watch procs/mesh procs/post_validation",
}
"""What judges schedules and moves numbers, below src/zerobubble, and the tests near it, below tests: the nearest files first."""
PRELOADED = (torch,)
"""What most tests import, and processes that run them inherit."""
STATES = "killed", "equivalent", "survived"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
SLOWER, SECONDS = 4.0, 40.0
"""A mutant never ends, and so is killed, if its tests take so many times as long as without it, and so many seconds more."""
RECORD_SECONDS = 1800.0
"""A file of tests may take so long without a mutant."""
FIRST_FILES = 3
"""So many of the nearest test files run first, the others if all of these pass."""
MOST_SECONDS = 60.0
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


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: one of `STATES`, how many tests were chosen for that, and which killed it."""

    state: str
    tests: int
    by: str


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


def area_of(file: str) -> str:
    """The area of a source file; a file outside all is an area of its own."""
    name = file.removeprefix("src/zerobubble/")
    return next((area for area in AREAS if name == area or name.startswith(f"{area}/")), name)


def sources(names: Iterable[str]) -> list[str]:
    """The Python files of areas, files or folders, below src/zerobubble."""
    paths = [ROOT / "src/zerobubble" / name for name in names]
    found = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return [str(file.relative_to(ROOT)) for file in found]


def files_near(file: str) -> list[str]:
    """The test files of the area of a source file, or those nearest to a file outside all."""
    names = AREAS.get(area_of(file), "").split()
    return [f"tests/{folder}/test_{name}.py" for folder, _, name in (name.partition("/") for name in names)] or list(
        map(str, nearest(Path(file)))
    )


def sample(mutants: Iterable[Mutant], size: int, seed: int) -> list[Mutant]:
    """A random choice that depends on the text of each mutant alone, so that changes elsewhere leave most of it as it is."""
    seen: Counter[str] = Counter()
    drawn = []
    for mutant in mutants:
        seen[mutant.key] += 1
        drawn.append((sha256(f"{seed} {seen[mutant.key]} {mutant.key}".encode()).digest(), mutant))
    return sorted((mutant for _, mutant in sorted(drawn, key=itemgetter(0))[:size]), key=lambda each: (each.file, each.line, each.column))


def equivalent() -> set[str]:
    """The keys of mutants that were shown to change nothing."""
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines() if EQUIVALENT.exists() else []
    return {line.partition("  # ")[0] for line in lines if line and not line.startswith("#")}


class Copy:
    """A copy of the repository in which mutants are tried."""

    def __init__(self, folder: Path, record: Path | None, targets: Iterable[str]) -> None:
        self.root = folder / "repository"
        wanted = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
        for name in wanted:
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, self.root / name)
        self._targets = {file: (self.root / file).read_text(encoding="utf-8") for file in targets}
        self._source = b"".join(sha256(path.read_bytes()).digest() for path in sorted((self.root / "src").rglob("*.py")))
        self._kept = record
        self._records: dict[str, dict[str, Any]] = json.loads(record.read_text()) if record is not None and record.exists() else {}
        self._pass: set[str] = set()
        self._forks: dict[tuple[str, ...], tuple[Connection, Any]] = {}

    def outcome(self, mutant: Mutant) -> Outcome:
        """Run the tests near a mutant that reach it, until one fails."""
        files, number = files_near(mutant.file), 0
        for some in (files[:FIRST_FILES], files[FIRST_FILES:]):
            self._record(some)
            tests = self._tests_of(mutant, some)
            self._check_without_mutant(some, tests)
            number += len(tests)
            if tests and (killer := self._killer(mutant, some, tests)) is not None:
                return Outcome("killed", number, killer)
        return Outcome("survived", number, "")

    def _tests_of(self, mutant: Mutant, files: Iterable[str]) -> dict[str, float]:
        """The tests that reach a mutant, with their seconds: the fastest first, up to `MOST_SECONDS`, and at least one.

        Code that runs at import is reached only by the first test in a process. So for its mutants, all tests that reach the file count.
        """
        text = (self.root / mutant.file).read_text(encoding="utf-8")
        in_function = is_inside_a_function(text, mutant.line, mutant.end_line)
        found: dict[str, float] = {}
        for record in (self._records[file] for file in files):
            reached = record["reached"]
            places = [mutant.place] if in_function else [where for where in reached if where.startswith(f"{mutant.file}:")]
            names = {name for where in places for name in reached.get(where, [])} if mutant.is_marked else record["passed"]
            found.update({name: record["passed"][name] for name in names})
        chosen: dict[str, float] = {}
        for name, seconds in sorted(found.items(), key=itemgetter(1)):
            if chosen and sum(chosen.values()) + seconds > MOST_SECONDS:
                break
            chosen[name] = seconds
        return chosen

    def _check_without_mutant(self, files: Sequence[str], tests: Mapping[str, float]) -> None:
        """Run tests on the unchanged sources, each once: a test that fails there would kill every mutant."""
        new = {name: seconds for name, seconds in tests.items() if name not in self._pass}
        if new and (failing := self._warm(files, Trial("", None, list(new), self._limit(new)))) != "passed":
            raise SystemExit(f"{failing} fails without a mutant: no mutant can be judged by it")
        self._pass |= new.keys()

    def _killer(self, mutant: Mutant, files: Sequence[str], tests: Mapping[str, float]) -> str | None:
        """What fails with the mutant in place, in a fork or, if nothing does, in a process of its own."""
        text = (self.root / mutant.file).read_text(encoding="utf-8")
        changed = mutant.applied(text)
        self._collected(files)  # on the unchanged sources
        self._write(mutant.file, changed)
        try:
            if is_inside_a_function(text, mutant.line, mutant.end_line):
                found = self._warm(files, Trial(mutant.file, (text, changed), list(tests), self._limit(tests)))
                if found not in ("passed", "cold"):
                    return found
            return self._cold(tests)
        finally:
            self._write(mutant.file, text)

    def _limit(self, tests: Mapping[str, float]) -> float:
        return SLOWER * sum(tests.values()) + SECONDS

    def _warm(self, files: Sequence[str], trial: Trial) -> str:
        """What becomes of a trial in a fork of a process that has collected some files of tests, on unchanged sources."""
        pipe = self._collected(files)
        pipe.send(trial)
        answer: str = pipe.recv()
        assert not answer.startswith("error"), answer
        return answer

    def _collected(self, files: Sequence[str]) -> Connection:
        key = tuple(files)
        if key not in self._forks:
            if len(self._forks) == 2:  # those of another area
                self.close()
            ours, theirs = Pipe()
            process = self._started(list(files), [Forks(theirs, ours)])
            theirs.close()
            self._forks[key] = ours, process
            ours.recv()
        return self._forks[key][0]

    def close(self) -> None:
        """End the processes that have collected tests."""
        for pipe, process in self._forks.values():
            pipe.close()
            process.kill()
            process.join()
        self._forks.clear()

    def _cold(self, tests: Mapping[str, float]) -> str | None:
        """What fails first in a process that imports everything anew; None if all tests pass."""
        names, first = self.root.parent / "tests", FirstFailure(self.root.parent / "first")
        names.write_text("".join(f"{name}\n" for name in tests), encoding="utf-8")
        first.file.write_text("", encoding="utf-8")
        code = self._run(["-x", f"@{names}"], self._limit(tests), [first])
        if code is None:
            return f"no end in {self._limit(tests):.0f} s"
        return None if code == 0 else first.file.read_text(encoding="utf-8") or f"exit code {code}"

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
        self._run(["-p", "tests.reached", file], RECORD_SECONDS, variables={FOLDER: str(folder)})
        passed, failed, reached = read(folder)
        return {"passed": passed, "failed": failed, "reached": reached}

    def _run(
        self, arguments: list[str], seconds: float, plugins: Sequence[object] = (), variables: Mapping[str, str] = MappingProxyType({})
    ) -> int | None:
        """The exit code of pytest, or None if it takes longer than so many seconds."""
        process = self._started(arguments, plugins, variables)
        process.join(seconds)
        code: int | None = process.exitcode
        if code is None:
            os.killpg(process.pid, signal.SIGKILL)  # with its ranks
            process.join()
        return code

    def _started(self, arguments: list[str], plugins: Sequence[object], variables: Mapping[str, str] = MappingProxyType({})) -> Any:
        process = get_context("fork").Process(target=_pytest, args=(self.root, arguments, plugins, variables), daemon=False)
        process.start()
        return process

    def _write(self, file: str, text: str) -> None:
        """Write a source file and drop its bytecode, which Python knows by second and size only."""
        path = self.root / file
        path.write_text(text, encoding="utf-8")
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            stale.unlink()


class FirstFailure:
    """Writes the name of each test that fails to a file: with -x, of the first."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the name."""
        if report.failed:
            self.file.write_text(report.nodeid, encoding="utf-8")


class NoShrinking:
    """Lets hypothesis stop at the first example that fails: a smaller one takes minutes and kills no more."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """Change the settings before tests are imported."""
        from hypothesis import Phase, settings  # here, as pytest rewrites its assertions at the first import

        phases = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)]
        settings.register_profile("mutants", settings.get_profile("steady"), phases=phases)
        settings.load_profile("mutants")


def _pytest(root: Path, arguments: list[str], plugins: Sequence[object], variables: Mapping[str, str]) -> None:
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
    sys.modules["__main__"] = ModuleType("__main__")  # or each process that a test starts would run this program, too
    sys.exit(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *arguments], [NoShrinking(), *plugins]))


def table(outcomes: Iterable[tuple[Mutant, Outcome]], number: Mapping[str, int]) -> str:
    """Of each area and in all: how many mutants there are, were tried and came to what, and the share of the not equivalent ones killed."""
    counts = {area: Counter[str]() for area in number}
    for mutant, outcome in outcomes:
        counts[area_of(mutant.file)][outcome.state] += 1
    rows = [(area, number[area], *(count[state] for state in STATES)) for area, count in counts.items()]
    rows.append(("all", *(sum(row[column] for row in rows) for column in range(1, 5))))  # type: ignore[misc]
    lines = ["area | mutants | tried | killed | equivalent | survived | killed of the others", "--- | " * 6 + "---"]
    for area, mutants, killed, same, survived in rows:
        share = f"{killed / (killed + survived):.0%}" if killed + survived else "-"
        lines.append(f"{area} | {mutants} | {killed + same + survived} | {killed} | {same} | {survived} | {share}")
    return "\n".join(f"| {line} |" for line in lines)


def main() -> int:
    """Try a sample of mutants of each area; returns 1 if fewer than nine in ten that change something are killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", help="areas, files or folders below src/zerobubble, by default all that judge and move numbers")
    parser.add_argument("--sample", type=int, default=16, help="how many mutants to try in each area")
    parser.add_argument("--seed", type=int, default=None, help="of the sample; random by default, and printed")
    parser.add_argument("--record", type=Path, help="keep in this file what each test reaches, for further samples of the same sources")
    parser.add_argument("--json", type=Path, help="also write the outcome of each mutant to this file")
    parser.add_argument("--again", type=Path, help="an earlier file of --json: mutants that were killed there are not tried again")
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    earlier = {each["place"]: each for each in json.loads(options.again.read_text())["mutants"]} if options.again else {}
    known = equivalent()
    of_area: dict[str, list[Mutant]] = {}
    for file in sources(options.areas or AREAS):
        of_area.setdefault(area_of(file), []).extend(mutants_of(file))
    chosen = [mutant for mutants in of_area.values() for mutant in sample(mutants, options.sample, seed)]
    print(f"{len(chosen)} mutants, --seed {seed}", flush=True)
    outcomes: list[tuple[Mutant, Outcome]] = []
    targets = {*sources(AREAS), *(mutant.file for mutant in chosen)}
    with tempfile.TemporaryDirectory() as folder, closing(Copy(Path(folder), options.record, targets)) as copy:
        for number, mutant in enumerate(chosen, 1):
            before = earlier.get(f"{mutant}", {"state": ""})
            if mutant.key in known:
                outcome = Outcome("equivalent", 0, "")
            elif before["state"] == "killed":
                outcome = Outcome("killed", before["tests"], before["by"])
            else:
                outcome = copy.outcome(mutant)
            outcomes.append((mutant, outcome))
            print(f"{number}/{len(chosen)} {outcome.state.upper()} {mutant} ({outcome.tests} tests) {outcome.by}", flush=True)
            if options.json:
                every = [{"place": str(mutant)} | asdict(mutant) | asdict(outcome) for mutant, outcome in outcomes]
                options.json.write_text(json.dumps({"seed": seed, "mutants": every}, indent=1) + "\n", encoding="utf-8")
    print(table(outcomes, {area: len(mutants) for area, mutants in of_area.items()}))
    states = Counter(outcome.state for _, outcome in outcomes)
    return 0 if states["killed"] >= 9 * states["survived"] else 1


if __name__ == "__main__":
    sys.exit(main())
