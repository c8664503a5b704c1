"""Two kinds of passes that the package does not know: a forward C that keeps its input alone, and A, which computes the stage again.

The package does this with F and R; here it stands for whatever a user may add.

Everything a kind is made of stands here, but for the functions that run them, which are in `tests/procs/test_added_kind.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zerobubble import Kind, Op, Schedule, kinds
from zerobubble.kinds import HELD, KINDS, Traits, ValueKind, add_kind, add_value_kind


@contextmanager
def kinds_restored() -> Iterator[None]:
    """Undoes all changes to the table of kinds on exit."""
    before, held = dict(KINDS), dict(HELD)
    try:
        yield
    finally:
        for letters in KINDS.keys() - before.keys():
            del kinds._KIND_OF[letters]
        for letter in HELD.keys() - held.keys():
            del kinds._VALUE_KIND_OF[letter]
        KINDS.clear()
        KINDS.update(before)
        HELD.clear()
        HELD.update(held)
        kinds._changed()


@contextmanager
def recomputing() -> Iterator[tuple[Kind, Kind]]:
    """Inside, the table of kinds has C and A."""
    with kinds_restored():
        inputs = add_value_kind("k", held="held_kept")
        lean = Traits(
            phrase="forward that keeps its input",
            uses=((ValueKind.ACTIVATION, -1),),
            makes=(ValueKind.ACTIVATION, inputs),
            times=("forward",),
            run="own lean forward",
            lost="nothing is computed",
            color="#7fa6e0",
            fills_from_start=True,
        )
        again = Traits(
            phrase="forward computed again",
            uses=((inputs, 0),),
            makes=(ValueKind.SAVED,),
            times=("again",),
            run="forward computed again",
            lost="B finds nothing saved",
            color="#4009ae",
            fills_from_start=True,
        )
        yield add_kind("C", lean), add_kind("A", again)


def with_recomputation(schedule: Schedule) -> Schedule:
    """`schedule` with C for F on all stages but the last, and A right before the backward that needs what F would have saved."""
    lean, again = Kind("C"), Kind("A")
    last = schedule.num_stages - 1

    def passes(op: Op) -> tuple[Op, ...]:
        if op.stage == last or op.kind is Kind.W:
            return (op,)
        return (op._replace(kind=lean),) if op.kind is Kind.F else (op._replace(kind=again), op)

    rows = tuple(tuple(new for op in row for new in passes(op)) for row in schedule.rows)
    return Schedule(f"{schedule.name}, recomputing", schedule.placement, schedule.num_microbatches, rows, schedule.microbatch_routes)
