"""The structural rules of ARCHITECTURE.md. Each has a test that fails if it is broken.

1. Imports go down only and never in a cycle. `import zerobubble` loads nothing else of the package, no torch, NumPy, click or rich.
2. A dependency is written once, in `kinds.py`. Nothing else steps from a stage to its neighbor.
3. A schedule is written once, in `schedules/`. Nothing else compares names of schedules.
4. Values are frozen.
5. Times and bytes are integers inside; milliseconds appear at entry points only.
6. A new schedule is one file and one line.
7. The top level has about twenty names. No public function hides a module. A star import works without torch.
8. Gloo only sends and receives: no collective of torch is called on it.
9. `runtime/device.py` alone names kinds of devices: nothing else uses torch's module of an accelerator or compares with such a name.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import zerobubble
from tests.pure.shapes import grid
from tests.recomputing import kinds_restored
from tests.refusals import raises, states
from zerobubble import Costs, Kind, Limits, Op, Placement, Schedule, lower, make, schedule_faults, simulate
from zerobubble.blocks import known_block, repeat
from zerobubble.errors import Fault
from zerobubble.kinds import KINDS, change_kind
from zerobubble.lowering import program_faults
from zerobubble.schedules import SCHEDULES

ROOT = Path(zerobubble.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
assert len(FILES) > 100


@cache
def trees() -> dict[Path, ast.Module]:
    """The code of every file of the package."""
    return {file: ast.parse(file.read_text()) for file in FILES}


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
    assert set(loaded) & {"torch", "numpy", "llvmlite", "click", "rich"} == set()


def test_importing_loads_nothing_else_of_the_package_and_few_modules_of_the_standard_library() -> None:
    """That keeps it within a twentieth of a second of processor time."""
    code = "import sys; before = {*sys.modules}; import zerobubble; print(*{*sys.modules} - before)"
    loaded = python(code).split()
    assert {name for name in loaded if name.startswith("zerobubble")} == {"zerobubble", "zerobubble.version"}
    assert len(loaded) < 60, loaded


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
            change_kind(kind, replace(traits, uses=tuple((value_kind, -hop) for value_kind, hop in traits.uses)))
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


def per_file(found: Callable[[ast.Module], list[str]]) -> dict[str, list[str]]:
    """What `found` gives for the code of each file of the package, where that is something."""
    return {str(file.relative_to(ROOT)): reported for file, tree in trees().items() if (reported := found(tree))}


def stage_hops(code: ast.AST) -> list[str]:
    """The expressions that step from a stage to its neighbor, such as `op.stage + 1`."""
    found = set()
    for node in ast.walk(code):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            sides = {ast.unparse(side).rpartition(".")[2] for side in (node.left, node.right)}
            if "1" in sides and sides & {"stage", "s"}:
                found.add(ast.unparse(node))
    return sorted(found)


def test_the_scan_sees_a_hop() -> None:
    code = ast.parse("before = Op(F, op.stage - 1, j)\nafter = 1 + stage\nlast = num_stages - 1")
    assert stage_hops(code) == ["1 + stage", "op.stage - 1"]


@pytest.mark.long
def test_nobody_else_steps_from_stage_to_stage() -> None:
    assert per_file(stage_hops) == {}


# 3. One encoding of each schedule: only the table knows their names.


def compared_schedules(code: ast.AST) -> list[str]:
    """The names of schedules that something is compared with."""
    compared = [node for node in ast.walk(code) if isinstance(node, (ast.Compare, ast.MatchValue))]
    leaves = {leaf.value for node in compared for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
    return sorted(leaves & set(SCHEDULES))


def test_the_scan_sees_a_name() -> None:
    assert compared_schedules(ast.parse('if schedule.name == "zb-v":\n    print("1f1b")')) == ["zb-v"]


def test_nobody_singles_out_a_schedule() -> None:
    assert {file: names for file, names in per_file(compared_schedules).items() if Path(file).parent.name != "schedules"} == {}


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
    files = {file.stem for file in (ROOT / "schedules").glob("*.py")} - {
        "__init__",
        "orders",
        "recipe",
        "recompute",
        "registry",
        "vocabulary",
    }
    assert files == {recipe.build.__module__.rpartition(".")[2] for recipe in SCHEDULES.values()}


# Gloo of torch sends and receives, and does nothing together: see `GlooEndpoint`. NCCL's collectives are its own, and `doctor --measure`
# measures what replicas call.

COLLECTIVES = {"all_gather", "allgather", "all_reduce", "allreduce", "alltoall", "barrier", "broadcast", "reduce_scatter", "scatter"}


def test_no_collective_of_gloo_is_called() -> None:
    files = [file for file in (ROOT / "runtime").rglob("*.py") if file.name not in ("nccl.py", "speeds.py")]
    nodes = [node for file in files for node in ast.walk(trees()[file])]
    calls = [node.func.attr for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    assert "gather_objects" in calls
    assert set(calls) & COLLECTIVES == set()


# 9. One module names kinds of devices.

MODULES = {"accelerator", "cuda", "hpu", "mps", "mtia", "npu", "xpu"}
KINDS_OF_DEVICES = MODULES | {"cpu", "meta"}


def _constants(code: ast.AST) -> Iterator[ast.Constant]:
    return (leaf for leaf in ast.walk(code) if isinstance(leaf, ast.Constant))


def devices_named(code: ast.AST) -> list[str]:
    """The uses of torch's modules of accelerators, and what tests a kind of device by its name."""
    found = set()
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute) and (node.attr in {"is_cuda", "get_device_module", "record_stream"} | MODULES):
            if node.attr in {"is_cuda", "record_stream"} or ast.unparse(node.value) == "torch":
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Compare) and KINDS_OF_DEVICES & {leaf.value for leaf in _constants(node)}:
            found |= {text for text in [ast.unparse(node)] if ".type" in text}
    return sorted(found)


def test_the_scan_sees_devices() -> None:
    code = ast.parse("torch.cuda.synchronize()\nif x.device.type != 'cpu' or kind in ('cuda', x.type): x.record_stream(s)\nbackends.cuda")
    assert devices_named(code) == ["kind in ('cuda', x.type)", "torch.cuda", "x.device.type != 'cpu'", "x.record_stream"]


def test_one_module_names_devices() -> None:
    assert set(per_file(devices_named)) == {"runtime/device.py"}


# Style that a linter does not check.


def undescribed(code: ast.Module) -> list[str]:
    """The public names of a file without a docstring, and the file itself."""
    defined = [node for node in code.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")]
    names = [node.name for node in defined if not ast.get_docstring(node)]
    return names if ast.get_docstring(code) else ["the file", *names]


def test_public_names_say_what_they_are() -> None:
    assert undescribed(ast.parse("def shown():\n    pass\n\ndef _own():\n    pass")) == ["the file", "shown"]
    assert per_file(undescribed) == {}


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; import zerobubble as zb; "
NAMESPACES = [name for name in dir(zerobubble) if isinstance(getattr(zerobubble, name), ModuleType)]


@pytest.mark.parametrize("module", ["zerobubble", *(f"zerobubble.{name}" for name in NAMESPACES)])
def test_public_names_exist(module: str) -> None:
    names = import_module(module).__all__
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(import_module(module), name)] == []


def test_the_top_holds_about_twenty_names_and_the_namespaces_the_rest() -> None:
    assert zerobubble.__all__[0] == "Pipeline"
    assert len(zerobubble.__all__) <= 28
    assert dir(zerobubble) == sorted([*zerobubble.__all__, *NAMESPACES, "__version__"])
    assert {"planning", "explain", "io", "nn", "hooks", "schedules", "blocks", "errors"} <= set(NAMESPACES)


@pytest.mark.long
def test_without_torch_a_star_import_leaves_out_what_needs_it() -> None:
    """`dir` still lists the name, and using it raises an error that says what to install."""
    assert python(WITHOUT_TORCH + "exec('from zerobubble import *'); print('Pipeline' in globals(), 'plan' in globals())") == "False True\n"
    assert python(WITHOUT_TORCH + "print('Pipeline' in dir(zb))") == "True\n"
    for name in ("Pipeline", "nn", "hooks"):
        code = f"try: zb.{name}\nexcept ImportError as error: print(error)"
        states(python(WITHOUT_TORCH.replace("; ", "\n") + code), f"zerobubble.{name}", "PyTorch", "zerobubble[torch]")


def test_no_public_function_hides_a_module() -> None:
    modules = {file.stem for file in ROOT.glob("*.py")} | {folder.name for folder in ROOT.iterdir() if folder.is_dir()}
    assert modules & set(zerobubble.__all__) == set()


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_a_name_of_a_namespace_is_found_from_the_package(namespace: str) -> None:
    module = import_module(f"zerobubble.{namespace}")
    for name in set(module.__all__) - set(dir(zerobubble)):
        with raises(AttributeError, name) as caught:
            getattr(zerobubble, name)
        found = str(caught.value).partition("zb.")[2].removesuffix("?").split(".")
        assert getattr(import_module(f"zerobubble.{found[0]}"), found[1]) is getattr(module, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with raises(AttributeError, "zerobubble", "nothing"):
        zerobubble.nothing  # noqa: B018


# Benchmarks run rarely, so an import of theirs breaks unnoticed.


@cache
def bound_names(module: str) -> set[str]:
    """The names that a module may bind, with its submodules, and its strings, among them the names that it loads on first use."""
    place = ROOT.parent.joinpath(*module.split("."))
    named = {file.stem for file in place.glob("*")}
    for node in ast.walk(trees()[place / "__init__.py" if place.is_dir() else place.with_suffix(".py")]):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            named.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            named.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            named |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named.add(node.value)
    return named


def test_benchmarks_import_names_that_exist() -> None:
    missing = []
    for file in (ROOT.parents[1] / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zerobubble"):
                unknown = {alias.name for alias in node.names} - bound_names(node.module or "")
                missing += [f"{file.name}: {node.module}.{name}" for name in unknown]
    assert not missing
