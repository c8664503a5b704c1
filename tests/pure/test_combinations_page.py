"""The page about options together is the one that its program writes, and its runs cover every pair that is allowed."""

from __future__ import annotations

from docs.combinations import AXES, PAGE, covering_rows, page, pairs, pairs_in


def test_the_page_is_what_its_program_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


def test_the_runs_have_every_allowed_pair_and_no_other() -> None:
    rows = covering_rows()
    covered = set().union(*map(pairs_in, rows))
    assert covered == set(pairs())
    assert all(row[axis] in values for row in rows for axis, values in AXES.items())
