"""Untrusted files: a reader returns a usable value or raises a short `InputError` at once, whatever the file contains."""

from __future__ import annotations

import copy
import io
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zerobubble as zb
from tests.pure.test_cli import run
from tests.pure.test_forms import places
from tests.refusals import Stated, raises, states
from tests.thinned import every
from zerobubble.blocks import Block, known_block
from zerobubble.cli.inputs import files
from zerobubble.cost_model import GPU
from zerobubble.costs import MOST_BUCKETS
from zerobubble.io import dumps, from_torch_csv, load_document, load_plan, loads, save_plan, to_torch_comms_csv, to_torch_csv
from zerobubble.partition import Layer, layers_to_dict
from zerobubble.planning import weight_order
from zerobubble.simulation import simulate

WORK = zb.Workload.uniform(2, (10, 10, 8), 0.5)
FOUND = zb.plan(WORK, 4, 2.5, placements="vee", seconds=0)
SCHEDULE = FOUND.schedule
COSTS = zb.Costs.from_dict(WORK.costs(SCHEDULE.placement).to_dict() | {"placement": SCHEDULE.placement.to_dict()})
VALUES = {
    "plan": FOUND,
    "plan with a head": zb.plan(WORK, 4, 6, head=zb.planning.Head((9, 9, 9)), placements="vee", seconds=0),
    "plan with offload": zb.plan(WORK, 4, 1.5, host=zb.offload.HostLink(4e9, 4e9), placements="linear", seconds=0),
    "schedule": SCHEDULE,
    "costs": COSTS,
    "timeline": zb.simulate(SCHEDULE, COSTS),
    "program": zb.lower(SCHEDULE),
    "workload": WORK,
}
FORMS: dict[str, Any] = {name: json.loads(dumps(value)) for name, value in VALUES.items()}
FORMS["layers"] = layers_to_dict([Layer(10**6, 10**6, 10**6, 5, 5, 100, 3)] * 4)
FORMS["times"] = {"forward": [1, 2], "backward": [1, 2], "weight": [1, 2], "comm": [0.1, 0.1], "held": 0.5}
FORMS["rows"] = [[1, 1, 1], [2, 2, 2]]
TEXTS = {
    "text": SCHEDULE.to_text(),
    "program text": zb.lower(SCHEDULE).to_text(),
    "csv": to_torch_csv(SCHEDULE),
    "csv with messages": to_torch_comms_csv(SCHEDULE, "2.15"),
    "block": known_block("v-half", 2).to_text(),
}
SHOWN: dict[str, list[str]] = {
    "plan": ["show FILE", "check FILE", "plan --costs FILE --evaluations 0", "make FILE --format svg"],
    "plan with a head": ["show FILE", "compare FILE 1f1b", "plan --costs FILE --evaluations 0"],
    "plan with offload": ["show FILE", "compare FILE 1f1b", "plan --costs FILE --evaluations 0"],
    "schedule": ["show FILE", "check FILE"],
    "costs": ["show plan.json --costs FILE", "plan --costs FILE --microbatches 4 --evaluations 0"],
    "timeline": ["diff plan.json FILE"],
    "program": ["show FILE"],
    "workload": ["plan --costs FILE --microbatches 4 --evaluations 0"],
    "layers": ["plan --layers FILE --ranks 2 --microbatches 4 --placement linear --evaluations 0"],
    "times": ["plan --per-rank FILE --microbatches 4 --placement vee --evaluations 0"],
    "rows": ["plan --per-rank FILE --microbatches 4 --placement vee --evaluations 0"],
    "text": ["show FILE", "check FILE"],
    "program text": ["show FILE"],
    "csv": ["show FILE", "check FILE"],
    "csv with messages": ["check FILE"],
    "block": ["block FILE"],
}
PARTS = {
    **{text: text for text in ("1e308", "-1e308", "1e400", "NaN", "-Infinity", "-1", "true", "null", "0.5", "1000000000", "{}", "[]")},
    **{f"10**{digits}": "1" + "0" * digits for digits in (15, 18, 30, 400, 5000)},
    **{text: json.dumps(text) for text in ("", "\0", "a\nb", "\ud800", "\x1b[31m", "[/bold]", "999999999F999999999", "0Z0")},
    "a megabyte": json.dumps("x" * 2**20),
    "a megabyte of words": json.dumps("x " * 2**19),
    "deep": "[" * 3000 + "]" * 3000,
    "deeper": "[" * 200_000 + "]" * 200_000,
}
"""What stands in the place of one part of a JSON form."""
WHOLES: dict[str, Callable[[str], bytes]] = {
    "truncated": lambda text: text[: len(text) // 2].encode(),
    "byte order mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "UTF-16": lambda text: text.encode("utf-16"),
    "Latin-1": lambda text: text.encode() + b"\xff",
    "a zero byte": lambda text: text.encode() + b"\0",
    "empty": lambda _: b"",
    "a key twice": lambda text: text.replace("{", '{"name": 1, "name": 2, ', 1).encode(),
    "nested objects": lambda _: b'{"a":' * 100_000,
    "digits": lambda _: b"9" * 5000,
    "twice": lambda text: (text + text).encode(),
    "bytes": lambda _: bytes(range(256)),
    "large numbers": lambda text: "".join("999999999" if letter.isdigit() else letter for letter in text).encode(),
    "longer numbers": lambda text: "".join("9" * 5000 if letter.isdigit() else letter for letter in text[:200]).encode(),
    "foreign digits": lambda text: text.replace("0", "\u0663").encode(),
    "a long line": lambda text: text.encode() + b"x" * 2**20,
}
"""What becomes of a whole file."""
LONGEST_S = 30.0
"""Processor time that a file may take, mostly a fraction of a second; a virtual machine may count what others took."""
SAMPLES = 40
"""Parts of each form that are replaced."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(FOUND, "plan.json")


def holds(command: str) -> None:
    """The command line makes something of the file, or says in one sentence what is wrong with it."""
    began = time.process_time()
    result = run(*command.replace("FILE", "file.json").split())
    took = time.process_time() - began
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (0, 1, 2)
    assert took < LONGEST_S
    if result.exit_code == 2:
        assert result.stderr.count("\n") == 1
        assert len(result.stderr) < 10_000


def with_part(form: Any, path: tuple[Any, ...], text: str) -> str:
    """The JSON text of a form with `text` in one place."""
    changed = copy.deepcopy(form)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = "@@"
    return json.dumps(changed).replace('"@@"', text)


@pytest.mark.sweep
@pytest.mark.parametrize("name", FORMS)
def test_any_part_of_a_json_form_may_be_anything(name: str) -> None:
    dice = random.Random(name)
    for _ in range(SAMPLES):
        path, part, command = dice.choice(places(FORMS[name])), dice.choice(list(PARTS)), dice.choice(SHOWN[name])
        Path("file.json").write_text(with_part(FORMS[name], path, PARTS[part]))
        try:
            holds(command)
        except BaseException as error:
            error.add_note(f"{part} at {path} in {name}: {command}")
            raise


@pytest.mark.parametrize("name", every(3, [*FORMS, *TEXTS]))
def test_a_whole_file_may_be_anything(name: str) -> None:
    text = TEXTS[name] if name in TEXTS else json.dumps(FORMS[name])
    for what, change in WHOLES.items():
        Path("file.json").write_bytes(change(text))
        try:
            holds(SHOWN[name][0])
        except BaseException as error:
            error.add_note(f"{what}: {SHOWN[name][0]}")
            raise


READERS: list[Callable[[Any], object]] = [
    *(kind.from_dict for kind in (zb.planning.Plan, zb.Schedule, zb.Placement, zb.Costs, zb.Timeline, zb.Program, zb.Workload, GPU)),
    lambda data: loads(json.dumps(data)),
    lambda data: load_document(io.StringIO(json.dumps(data))),
    lambda data: Path("file.json").write_text(json.dumps(data)) and load_plan("file.json"),
]


@pytest.mark.parametrize("read", READERS, ids=range(len(READERS)))
@pytest.mark.parametrize("data", [[1, 2, 3], [], {}, 3, 1.5, "a", None, True], ids=json.dumps)
def test_a_form_is_an_object(read: Callable[[Any], object], data: Any) -> None:
    with pytest.raises(zb.InputError):
        read(data)


def in_plan(key: str, value: str) -> str:
    return with_part(FORMS["plan"], tuple(key.split(".")), value)


WRONG: list[tuple[Callable[[], object], Stated]] = [
    (lambda: loads(in_plan("seconds", "1e400")), ("inf", "seconds", "finite")),
    (lambda: loads(in_plan("seconds", "NaN")), ("nan", "seconds", "finite")),
    (lambda: loads(in_plan("bound.time", "1" + "0" * 400)), ("64 bits", "number")),
    (lambda: loads(in_plan("bound.reason", '"\\u001b[31m"')), ("'\\x1b[31m'", "printable")),
    (lambda: loads(in_plan("schedule.name", json.dumps("x" * 2**20))), ("name", "schedule", 1000)),
    (lambda: loads('{"format": "zerobubble costs 1", "comm": [], "comm": []}'), ("comm", "object")),
    (lambda: zb.Costs.from_dict(zb.Costs.uniform(2).to_dict() | {"further": 7}), ("costs", "JSON")),
    (lambda: loads(with_part(FORMS["costs"], ("forward", 0), str(10**16))), ("stage 0", "forward")),
    (lambda: loads(with_part(FORMS["workload"], ("comm", 1), str(10**16))), ("rank 1", "comm")),
    (lambda: loads(with_part(FORMS["costs"], ("placement", "ranks"), str(10**18))), (999999999999999978, "stage")),
    (lambda: zb.Costs.from_ms([1e308], [1], [1]), ("stage 0", "forward", "1e+308")),
    (lambda: zb.Costs.from_ms([10**5000], [1], [1]), ("stage 0", "forward", "int")),
    (lambda: zb.Costs.uniform(2, (1, 1e308, 1)), ("B", "cost", "1e+308")),
    (lambda: zb.Workload.from_ms([1, 10**400], [1, 1], [1, 1], [0, 0]), ("rank 1", "forward")),
    (lambda: Layer(10**400, 1, 1, 1, 1), ("forward", "layer")),
    (lambda: load_plan("a\0b"), ("read", "byte")),
    (lambda: save_plan(FOUND, "a\0b"), ("write", "byte")),
    (lambda: load_plan(""), ("read", "directory")),
    (lambda: zb.Schedule.from_text(""), ("line 1", "schedule")),
    (lambda: from_torch_csv(""), ("line 1", "pass")),
    (lambda: Block.from_text(TEXTS["block"].replace("@0", "@999999999", 1)), (999999999, "1,000,000")),
    (lambda: Block.from_text("zerobubble block 1\nplacement \n"), ("interval", "missing", "header")),
]


@pytest.mark.parametrize(("read", "stated"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_named(read: Callable[[], object], stated: Stated) -> None:
    with raises(zb.InputError, *stated) as caught:
        read()
    assert len(str(caught.value)) < 9000


@pytest.mark.parametrize("name", ["", " ", "\0", "x" * 5000, ".", "a\nb"])
def test_a_file_may_be_named_anything(name: str) -> None:
    shape = ["--ranks", "2", "--microbatches", "4"]
    for command in (["show", name], ["make", "1f1b", *shape, "-o", name], ["show", "1f1b", *shape, "--costs", name], ["block", name]):
        result = run(*command)
        assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
        assert result.exit_code in (0, 2)


@pytest.mark.long
def test_as_many_buckets_as_a_step_can_have_are_planned_in_few_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The orders of W are compared with few buckets: with all of them a plan of four ranks took a minute."""
    played = []
    monkeypatch.setattr(weight_order, "simulate", lambda schedule, costs: played.append(max(costs.buckets)) or simulate(schedule, costs))
    work = zb.Workload.uniform(2, (10, 10, 8), reduce=30, buckets=MOST_BUCKETS)
    found = zb.plan(work, 4, placements="vee", evaluations=0)
    assert max(played) == weight_order.MOST_BUCKETS
    assert max(found.problem.costs.buckets) > weight_order.MOST_BUCKETS


def test_more_buckets_than_a_step_can_have_are_refused_wherever_they_come_from(tmp_path: Path) -> None:
    per_rank = tmp_path / "rows.json"
    times = {name: [1, 1] for name in ("forward", "backward", "weight", "reduce")}
    per_rank.write_text(json.dumps(times | {"buckets": [MOST_BUCKETS + 1, 1]}))
    for words in (
        ["plan", "--per-rank", str(per_rank), "-m", "4", "--evaluations", "0"],
        ["show", "1f1b", "-p", "2", "-m", "4", "--reduce", "1", "--buckets", str(MOST_BUCKETS + 1)],
    ):
        assert run(*words).exit_code == 2
    for make in (
        lambda: zb.Costs.uniform(2, buckets=MOST_BUCKETS + 1),
        lambda: zb.Workload.uniform(2, (1, 1, 1), buckets=MOST_BUCKETS + 1),
    ):
        with raises(zb.InputError, MOST_BUCKETS, MOST_BUCKETS + 1):
            make()


def test_a_file_longer_than_the_limit_is_refused_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    (tmp_path / "long.json").write_bytes(b" " * 1001)
    refused = run("show", str(tmp_path / "long.json"))
    assert (refused.exit_code, "more than 1,000 bytes" in refused.stderr) == (2, True)
    assert run("show", "/dev/zero").exit_code == 2


@pytest.mark.parametrize("key", ["costs", "limits", "schedule", "bound"])
def test_a_plan_without_a_key_says_what_writes_one(key: str) -> None:
    data = zb.plan(zb.Workload.uniform(2, (10, 10, 8)), 4, placements="vee", seconds=0).to_dict()
    del data[key]
    with raises(zb.InputError, reason=f"'{key}'") as caught:
        zb.planning.Plan.from_dict(data)
    states(caught.value.fields["remedy"], "io.save_plan")
