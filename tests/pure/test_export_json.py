"""JSON forms and the recognition of schedule files."""

import json

import pytest

from tests.pure.shapes import shape
from tests.refusals import Stated, raises
from zerobubble.costs import Costs
from zerobubble.errors import ParseError, ZeroBubbleError
from zerobubble.export.document import dumps, load_schedule, loads
from zerobubble.export.torch_comms import to_torch_comms_csv
from zerobubble.export.torch_csv import to_torch_csv
from zerobubble.lowering import lower
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
        assert load_schedule(text, name) == schedule


def test_a_csv_is_recognized() -> None:
    schedule = make("zb-v", 3, 5)
    for text in (
        to_torch_csv(schedule),
        ",," + to_torch_csv(schedule),
        to_torch_comms_csv(schedule, "2.13"),
        to_torch_comms_csv(schedule, "2.15", 3),
    ):
        assert load_schedule(text, "zb-v") == schedule


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
    with raises(ParseError, *stated):
        load_schedule(text)


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
