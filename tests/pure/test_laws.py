"""The laws of ARCHITECTURE.md, each with a guard that fails when it is broken."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import zerobubble
from tests.pure.shapes import grid
from zerobubble import Costs, Kind, Limits, Op, Placement, Schedule, lower, make, schedule_faults, simulate
from zerobubble.blocks import known_block, repeat
from zerobubble.errors import Fault
from zerobubble.kinds import KINDS, change_kind, kinds_restored
from zerobubble.lowering import program_faults
from zerobubble.schedules import SCHEDULES

ROOT = Path(zerobubble.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LABELS = [str(file.relative_to(ROOT)) for file in FILES]


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


# 1. Imports only go down, and importing the package is light.


def test_imports_only_go_down() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_loads_the_standard_library_only() -> None:
    loaded = python("import sys, zerobubble; print(*{name.partition('.')[0] for name in sys.modules})").split()
    assert set(loaded) & {"torch", "numpy", "numba", "click", "rich"} == set()


def test_importing_takes_less_than_a_third_of_a_second() -> None:
    code = "from time import process_time as now; start = now(); import zerobubble; print(now() - start)"
    assert min(float(python(code)) for _ in range(5)) < 0.3


# 2. A dependency is written in kinds.py and nowhere else.


def mirrored(schedule: Schedule) -> Schedule:
    """The same schedule with the stages numbered from the loss to the batch."""
    last = schedule.num_stages - 1
    rows = [[tuple(Op(op.kind, last - op.stage, op.microbatch) for op in step) for step in row] for row in schedule.steps]
    placement = Placement.custom(*(route[::-1] for route in schedule.placement.routes))
    return Schedule.of_steps(schedule.name, placement, schedule.num_microbatches, rows, schedule.microbatch_routes)


@contextmanager
def mirrored_rules() -> Iterator[None]:
    """Activations flow from stage s+1 to s and gradients from s-1 to s, in the table alone."""
    with kinds_restored():
        for kind, traits in tuple(KINDS.items()):
            change_kind(kind, replace(traits, uses=tuple((stuff, -hop) for stuff, hop in traits.uses)))
        yield


@pytest.mark.parametrize("name", SCHEDULES)
def test_everything_follows_the_rules_table(name: str) -> None:
    """A reader with a dependency of its own would see a fault, stop, or find other times where the table alone is mirrored."""
    schedule = make(name, *grid(name, SCHEDULES[name].stages_per_rank, [(3, 6), (4, 8)])[0])
    costs = Costs.uniform(schedule.num_stages, comm=0.5)
    ends = [[span.end for span in row] for row in simulate(schedule, costs).rows]
    with mirrored_rules():
        assert schedule_faults(mirrored(schedule)) == ()
        assert program_faults(lower(mirrored(schedule))) == ()
        assert [[span.end for span in row] for row in simulate(mirrored(schedule), costs).rows] == ends


def stage_hops(source: str) -> set[str]:
    """The expressions that step from a stage to its neighbour, such as `op.stage + 1`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            sides = {ast.unparse(side).rpartition(".")[2] for side in (node.left, node.right)}
            if "1" in sides and sides & {"stage", "s"}:
                found.add(ast.unparse(node))
    return found


def test_the_scan_sees_a_hop() -> None:
    assert stage_hops("before = Op(F, op.stage - 1, j)\nafter = 1 + stage\nlast = num_stages - 1") == {"op.stage - 1", "1 + stage"}


@pytest.mark.parametrize("file", FILES, ids=LABELS)
def test_nobody_else_steps_from_stage_to_stage(file: Path) -> None:
    assert stage_hops(file.read_text()) == set()


# 3. One encoding of each schedule: only the table knows their names.


@pytest.mark.parametrize("file", [file for file in FILES if file.parent.name != "schedules"], ids=str)
def test_nobody_singles_out_a_schedule(file: Path) -> None:
    compared = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, (ast.Compare, ast.MatchValue))]
    strings = [leaf.value for node in compared for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)]
    assert not set(strings) & set(SCHEDULES)


# 4. Values are frozen. (That they survive text and JSON is in test_ir, test_lower and test_forms.)

SAMPLE = make("zb-h1", 2, 2)
VALUES = [
    Op(Kind.F, 0, 0),
    SAMPLE.placement,
    SAMPLE,
    Costs.uniform(2),
    Limits((1, 1)),
    Fault("code", "message"),
    lower(SAMPLE),
    simulate(SAMPLE, Costs.uniform(2)),
    simulate(SAMPLE, Costs.uniform(2)).rows[0][0],
    lower(SAMPLE).rows[0][0],
    known_block("v-half", 2),
    repeat(known_block("v-half", 2), 2),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_frozen_through_and_through(value: object) -> None:
    names = getattr(value, "_fields", None) or value.__dataclass_fields__
    for name in names:
        with pytest.raises((FrozenInstanceError, AttributeError)):
            setattr(value, name, None)
    hash(value)


# 5. Times and bytes are exact inside.


def test_times_and_bytes_are_whole_numbers() -> None:
    timeline = simulate(make("zb-v", 3, 5), Costs.uniform(6, (1 / 3, 0.1, 0.7), 1e-7, held=1 / 3))
    numbers = [number for _, span in timeline.spans() for number in (span.start, span.end)]
    numbers += [number for steps in timeline.memory for step in steps for number in step]
    assert {type(number) for number in numbers} == {int}


# 6. A schedule is one file and one line in the table.


def test_every_schedule_file_is_in_the_table() -> None:
    files = {file.stem for file in (ROOT / "schedules").glob("*.py")} - {"__init__", "orders", "recipe", "registry"}
    assert files == {recipe.build.__module__.rpartition(".")[2] for recipe in SCHEDULES.values()}


# Backends of torch send and receive, and do nothing together: see `GlooEndpoint`.

COLLECTIVES = {"all_gather", "allgather", "all_reduce", "allreduce", "alltoall", "barrier", "broadcast", "reduce_scatter", "scatter"}


def test_no_collective_of_torch_is_called() -> None:
    nodes = [node for file in (ROOT / "runtime").rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    calls = [node.func.attr for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    assert "gather_objects" in calls
    assert set(calls) & COLLECTIVES == set()


# Style that a linter does not check.


@pytest.mark.parametrize("file", FILES, ids=LABELS)
def test_files_are_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 500


@pytest.mark.parametrize("file", FILES, ids=LABELS)
def test_public_names_say_what_they_are(file: Path) -> None:
    body = ast.parse(file.read_text())
    defined = [node for node in body.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")]
    assert ast.get_docstring(body)
    assert [node.name for node in defined if not ast.get_docstring(node)] == []


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; import zerobubble as zb; "
NAMESPACES = [name for name in dir(zerobubble) if isinstance(getattr(zerobubble, name), ModuleType)]


@pytest.mark.parametrize("module", ["zerobubble", *(f"zerobubble.{name}" for name in NAMESPACES)])
def test_public_names_exist(module: str) -> None:
    names = import_module(module).__all__
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(import_module(module), name)] == []


def test_the_top_holds_about_twenty_names_and_the_namespaces_the_rest() -> None:
    assert zerobubble.__all__[0] == "Pipeline"
    assert len(zerobubble.__all__) <= 24
    assert dir(zerobubble) == sorted([*zerobubble.__all__, *NAMESPACES])
    assert {"planning", "explain", "io", "nn", "hooks", "schedules", "blocks", "errors"} <= set(NAMESPACES)


def test_without_torch_a_star_import_leaves_out_what_needs_it() -> None:
    """`dir` still tells of it, and touching it says what to install."""
    assert python(WITHOUT_TORCH + "exec('from zerobubble import *'); print('Pipeline' in globals(), 'plan' in globals())") == "False True\n"
    assert python(WITHOUT_TORCH + "print('Pipeline' in dir(zb))") == "True\n"
    for name in ("Pipeline", "nn", "hooks"):
        code = f"try: zb.{name}\nexcept ImportError as error: print(error)"
        assert python(WITHOUT_TORCH.replace("; ", "\n") + code) == f"zerobubble.{name} needs PyTorch: pip install 'zerobubble[torch]'\n"


def test_no_public_function_hides_a_module() -> None:
    modules = {file.stem for file in ROOT.glob("*.py")} | {folder.name for folder in ROOT.iterdir() if folder.is_dir()}
    assert modules & set(zerobubble.__all__) == set()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'zerobubble' has no attribute 'nothing'"):
        zerobubble.nothing  # noqa: B018
