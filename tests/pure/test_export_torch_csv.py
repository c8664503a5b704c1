"""PyTorch's schedule CSV: reading, writing, and errors for cells that cannot be read."""

import pytest

from tests.pure.shapes import IN_TORCH_CSV, grid
from tests.refusals import Stated, raises, states
from zerobubble.errors import InputError, ParseError
from zerobubble.export.torch_csv import from_torch_csv, to_torch_csv
from zerobubble.ir import Op, Placement, Schedule
from zerobubble.schedules import SCHEDULES, make
from zerobubble.verify import schedule_faults

GRID = [(1, 1), (2, 2), (3, 7), (4, 8), (8, 5)]
CASES = [(name, p, m) for name in IN_TORCH_CSV for p, m in grid(name, SCHEDULES[name].stages_per_rank, GRID)]


@pytest.mark.parametrize(("name", "ranks", "microbatches"), CASES)
def test_what_was_written_is_read_back(name: str, ranks: int, microbatches: int) -> None:
    schedule = make(name, ranks, microbatches)
    back = from_torch_csv(to_torch_csv(schedule), name)
    assert (back.steps, back.num_microbatches, back.placement.routes) == (
        schedule.steps,
        schedule.num_microbatches,
        schedule.placement.routes,
    )
    if ranks > 1 and schedule.placement.name != "wave":
        assert back == schedule


def test_an_overlapped_step_is_one_cell() -> None:
    text = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0I1,0W1,0B2\n"
    schedule = from_torch_csv(text)
    assert [str(op) for op in schedule.steps[0][2]] == ["0F2", "0BW0"]
    assert to_torch_csv(schedule) == text
    assert from_torch_csv(text.replace("(0F2;0B0)", "( 0F2 ; 0B0 )")) == schedule


def test_the_letters_are_pytorchs() -> None:
    rows = (("0F0", "0B0", "0W0"), ("1F0", "1BW0"))
    schedule = Schedule("mixed", Placement.linear(2), 1, tuple(tuple(map(Op.parse, row)) for row in rows))
    assert to_torch_csv(schedule) == "0F0,0I0,0W0\n1F0,1B0\n"


def test_three_loops_are_recognized() -> None:
    schedule = make("interleaved-1f1b", 2, 4, 3)
    assert from_torch_csv(to_torch_csv(schedule)).placement == Placement.looped(2, 3)


def test_two_waves_are_recognized() -> None:
    schedule = make("hanayo", 2, 4, 4)
    assert from_torch_csv(to_torch_csv(schedule), schedule.name) == schedule


def test_any_other_placement_is_custom() -> None:
    assert from_torch_csv("1F0,1B0\n0F0,0B0\n").placement == Placement.custom((1, 0))


def test_idle_cells_blank_ends_and_windows_line_ends_are_skipped() -> None:
    assert from_torch_csv("\ufeff0F0,,0B0\r\n, 1F0 ,1B0\r\n\r\n").rows == from_torch_csv("0F0,0B0\n1F0,1B0").rows


@pytest.mark.parametrize(
    ("text", "stated", "why"),
    [
        ("0F0,0B0\n1F0,1X0", ("line 2", "cell 2"), ("1X0",)),
        ("0F0x,0B0", ("line 1", "cell 1"), ("0F0x",)),
        ("0F0,x0B0", ("line 1", "cell 2"), ("x0B0",)),
        ("0F0,0B", ("line 1", "cell 2"), ("0B",)),
        ("0F0,0BW0", ("line 1", "cell 2"), ("0BW0",)),
        ("0F0,0F٣", ("line 1", "cell 2"), ("0F٣", "pass")),
        ("0F0,(0F1)OVERLAP_F_B", ("line 1", "cell 2"), (1, "overlapped", "overlaps")),
        ("0F0,(0F1;0B0;0W0)OVERLAP_F_B", ("line 1", "cell 2"), (3, "overlaps", "passes")),
        ("0F0,(0F1;0B0)", ("line 1", "cell 2"), ("0F8", "7B0", "OVERLAP_F_B")),
        ("0F0,(0F1;x)OVERLAP_F_B", ("line 1", "cell 2"), ("(0F1;x)OVERLAP_F_B",)),
        ("0F0,()OVERLAP_F_B", ("line 1", "cell 2"), ("()OVERLAP_F_B", "pass")),
        ("0F0,(0F1,0B0)OVERLAP_F_B", ("line 1", "cell 2"), ("(0F1",)),
        ("0F0,0SEND_F", ("line 1", "cell 2"), ("0SEND_F",)),
        ("0F0,0UNSHARD0", ("line 1", "cell 2"), ("0UNSHARD0",)),
        ("0SEND_F0\n1RECV_F0", ("line 1",), ("rank", "pass", "row")),
        ("0F0,0B0\n\n1F0,1B0", ("line 2",), ("rank", "pass", "row")),
        ("0F0,0F2", ("microbatch 1",), ("microbatch 2",)),
        ("0F0\n2F0", ("stage 1",), ("stage 2",)),
        ("0F0,0F1,0B0\n0B1", ("line 2",), ("rank 1", "stage")),
    ],
)
def test_a_malformed_csv_is_refused_with_its_place(text: str, stated: Stated, why: Stated) -> None:
    with raises(ParseError, *stated) as refusal:
        from_torch_csv(text)
    states(refusal.value, *why)


@pytest.mark.parametrize("junk", ["0F", "F0", "0f0", "0F0 0", "-1F0", "0F0;", "nan", "0FWD0", '"0F0'])
def test_a_spoilt_cell_is_named_wherever_it_stands(junk: str) -> None:
    cells = [line.split(",") for line in to_torch_csv(make("zb-v", 2, 2)).splitlines()]
    for rank, row in enumerate(cells):
        for place, cell in enumerate(row):
            row[place] = junk
            with raises(ParseError, f"line {rank + 1}", f"cell {place + 1}"):
                from_torch_csv("\n".join(map(",".join, cells)))
            row[place] = cell


def test_a_stray_pass_is_a_fault_and_not_a_parse_error() -> None:
    schedule = from_torch_csv("0F0,0F1,0B0,0B1,1B1\n1F0,1B0,1F1\n")
    states(schedule_faults(schedule)[0].message, "rank 0", "1BW1", "position 4", "stage 1", "rank 1")


def test_a_missing_row_is_named_as_the_likely_cause() -> None:
    rows = to_torch_csv(make("zb-v", 4, 8)).splitlines()
    with raises(ParseError, what="stage", missing=3, largest=7) as caught:
        from_torch_csv("\n".join(rows[:-1]))
    states(caught.value.fields["remedy"], "row")


def test_two_routes_cannot_be_written() -> None:
    placement = Placement.custom((0, 1), (1, 0))
    schedule = Schedule("both ways", placement, 1, ((Op.parse("0F0"),), (Op.parse("1F0"),)))
    with raises(InputError, "PyTorch's CSV", "2 routes"):
        to_torch_csv(schedule)
