"""JSON forms and the recognition of schedule files."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pure.shapes import shape
from tests.refusals import Stated, raises
from zerobubble.costs import Costs
from zerobubble.errors import InputError, ParseError, ZeroBubbleError
from zerobubble.export.document import dumps, load_costs, load_document, load_plan, load_schedule, loads, save_document, save_plan
from zerobubble.export.torch_comms import to_torch_comms_csv
from zerobubble.export.torch_csv import to_torch_csv
from zerobubble.ir import Schedule
from zerobubble.lowering import lower
from zerobubble.planning import Workload, plan
from zerobubble.schedules import SCHEDULES, make
from zerobubble.simulation import simulate


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_value_survives_json(name: str) -> None:
    schedule = make(name, *shape(name, 3, 5))
    costs = Costs.uniform(schedule.num_stages, (3, 2, 1), 0.5)
    for value in (schedule, costs, simulate(schedule, costs), lower(schedule)):
        assert loads(dumps(value)) == value


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_file_is_recognized_in_each_form(name: str) -> None:
    schedule = make(name, *shape(name, 3, 5))
    for text in (schedule.to_text(), dumps(schedule), "\ufeff" + schedule.to_text()):
        assert loads(text, name) == schedule


def test_a_csv_is_recognized() -> None:
    schedule = make("zb-v", 3, 5)
    for text in (
        to_torch_csv(schedule),
        ",," + to_torch_csv(schedule),
        to_torch_comms_csv(schedule, "2.13"),
        to_torch_comms_csv(schedule, "2.15", 3),
    ):
        assert loads(text, "zb-v") == schedule


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("", ("form", "empty")),
        ("{", ("line 1", "JSON")),
        ("{}", ("JSON", "'format'")),
        ('{"format": "zerobubble schedule 9"}', ("'zerobubble schedule 9'",)),
        ('{"format": "zerobubble schedule 1"}', ("schedule", "key", "placement")),
        ("hello", ("'hello'", "'zerobubble schedule 1'")),
        (dumps(Costs.uniform(2)), ("file", "costs", "schedule", "plan")),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, stated: Stated) -> None:
    with raises(ParseError, "unnamed", *stated):
        load_schedule(io.StringIO(text))


SCHEDULE, COSTS = make("zb-v", 2, 4), Costs.uniform(4, (3, 2, 1))
PLAN = loads(dumps(plan(Workload.uniform(2, (3, 2, 1)), 4, placements="vee", seconds=0)))


@pytest.mark.parametrize("suffix", ["json", "txt", "csv"])
def test_every_load_takes_a_path_or_an_open_file(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"zb-v.{suffix}"
    file.write_text({"json": dumps, "txt": Schedule.to_text, "csv": to_torch_csv}[suffix](SCHEDULE))
    for load in (load_document, load_schedule):
        assert load(file) == load(str(file)) == SCHEDULE
        for mode in ("r", "rb"):
            with file.open(mode) as opened:
                assert load(opened) == SCHEDULE


def test_every_save_takes_a_path_or_an_open_file(tmp_path: Path) -> None:
    for save, value, load in (
        (save_document, COSTS, load_costs),
        (save_plan, PLAN, load_plan),
        (save_document, PLAN, load_document),
        (save_document, simulate(SCHEDULE, COSTS), load_document),
    ):
        for file in (io.StringIO(), io.BytesIO()):
            save(value, file)
            file.seek(0)
            assert load(file) == value
        for path in (tmp_path / "file.json", str(tmp_path / "file.json")):
            save(value, path)
            assert load(path) == value
    save_plan(PLAN, tmp_path / "plan.json")
    assert load_costs(tmp_path / "plan.json") == PLAN.problem.costs
    assert load_schedule(tmp_path / "plan.json") == PLAN.schedule


@pytest.mark.parametrize(
    ("call", "stated"),
    [
        (lambda: load_costs(io.StringIO(dumps(SCHEDULE))), ("unnamed", "schedule", "costs", "plan")),
        (lambda: load_costs(io.StringIO(dumps(Workload.uniform(2, (1, 1, 1))))), ("work", "workload.costs(placement)")),
        (lambda: load_plan(io.StringIO(dumps(COSTS))), ("unnamed", "costs", "plan")),
        (lambda: load_plan(io.BytesIO(b"\xff")), ("unnamed", "UTF-8")),
        (lambda: load_schedule(SCHEDULE.to_text()), ("file", "path", "zb.io.loads")),
        (lambda: load_document(dumps(COSTS)), ("file", "path", "zb.io.loads")),
        (lambda: loads("costs.json"), ("'costs.json'", "load_document")),
        (lambda: save_document(COSTS, "costs.csv"), ("csv", "costs.json")),
        (lambda: save_document("costs.json", COSTS), ("save_document", "value", "costs.json")),
        (lambda: load_schedule(open(os.devnull, "w")), ("read", os.devnull)),  # noqa: SIM115
        (lambda: save_plan(PLAN, open(os.devnull)), ("write", os.devnull)),  # noqa: SIM115
    ],
    ids=range(11),
)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_files_of_another_kind_are_refused(call: Callable[[], object], stated: Stated) -> None:
    with raises(InputError, *stated):
        call()


@pytest.mark.parametrize(
    "value", [make("zb-h1", 2, 2), Costs.uniform(2), simulate(make("1f1b", 2, 2), Costs.uniform(2)), lower(make("gpipe", 2, 2))]
)
def test_json_with_a_part_of_the_wrong_type_is_a_parse_error(value: object) -> None:
    good = json.loads(dumps(value))  # type: ignore[arg-type]
    for key in set(good) - {"format", "name", "source"}:
        for wrong in (None, 7, "x", [["x"]], {"a": 1}, [1.5], [None]):
            assert reads_or_refuses(json.dumps(good | {key: wrong})), (key, wrong)


def reads_or_refuses(text: str) -> bool:
    """Whether reading `text` gives a value or one of our own errors, and no other."""
    try:
        loads(text)
    except Exception as error:
        return isinstance(error, ZeroBubbleError)
    return True
