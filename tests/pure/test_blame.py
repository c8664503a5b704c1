"""Which rank is to blame when messages do not arrive, found from what the ranks report.

A rank is reported as gone, or out of memory, only with evidence.
"""

from __future__ import annotations

from tests.refusals import states
from zerobubble.runtime.failure.blame import CLOSING, OUTSIDE, diagnose
from zerobubble.runtime.failure.report import RankStatus
from zerobubble.runtime.transport.contact import EVERYBODY, STARTING, TIMED_OUT


def test_the_rank_that_says_nothing_is_named_and_not_its_healthy_neighbor() -> None:
    words = {
        0: RankStatus("waiting for the loss", 3, TIMED_OUT),
        2: RankStatus("waiting for a message", 1, TIMED_OUT),
        3: RankStatus("waiting", 2),
    }
    note = diagnose(words, range(4), 0)
    assert (note.rank, note.absent) == (1, (1,))
    states(note.message, "rank 1", "rank 2")


def test_the_chain_of_those_who_wait_ends_at_the_culprit() -> None:
    words = {
        0: RankStatus("waiting", 1, TIMED_OUT),
        1: RankStatus("waiting", 2),
        2: RankStatus("waiting", 3),
        3: RankStatus("at 'run 3F1'", op="run 3F1"),
    }
    note = diagnose(words, range(4), 0)
    assert (note.rank, note.op) == (3, "run 3F1")
    assert "raise `timeout`" in note.message


def test_a_rank_that_stays_away_from_a_gather_is_named() -> None:
    words = {rank: RankStatus("gathering norms", EVERYBODY, TIMED_OUT) for rank in (0, 1, 3)} | {2: RankStatus("outside the pipeline")}
    assert diagnose(words, range(4), 1).rank == 2


def test_ranks_that_wait_for_each_other_should_make_the_same_calls() -> None:
    words = {0: RankStatus("waiting for the loss", 1, TIMED_OUT), 1: RankStatus("gathering norms", EVERYBODY)}
    note = diagnose(words, range(2), 0)
    assert note.rank == -1
    states(note.message, "rank 0", "rank 1")


def test_several_silent_ranks_are_all_named() -> None:
    note = diagnose({1: RankStatus("gathering norms", EVERYBODY, TIMED_OUT)}, range(3), 1)
    assert note.absent == (0, 2)
    states(note.message, 0, 2, "rank 1")


def test_a_rank_that_came_when_another_had_given_it_up_is_named() -> None:
    words = {0: RankStatus(STARTING, 1, "Connection closed by peer"), 1: RankStatus("waiting for the step to begin", 0, TIMED_OUT)}
    for caller in words:
        note = diagnose(words, range(2), caller)
        assert note.rank == 0
        found = "rank 0 kept the others waiting: it arrived after rank 1 had given up waiting for the step to begin (no answer"
        assert note.message.startswith(found)


def test_a_rank_that_came_late_because_another_did_is_not_named() -> None:
    """Rank 1 waits for rank 0, which came when rank 2 had given up rank 1."""
    words = {
        0: RankStatus(STARTING, 1, "Connection closed by peer", in_call=0.5),
        1: RankStatus(STARTING, 0, "Connection closed by peer", in_call=9.5),
        2: RankStatus("waiting for a message", 1, TIMED_OUT, in_call=10.0),
    }
    for caller in words:
        note = diagnose(words, range(3), caller)
        assert note.rank == 0
        states(note.message, "rank 0", "rank 2")


def test_one_who_gives_up_first_breaks_the_circle_of_those_who_wait_for_each_other() -> None:
    words = {0: RankStatus("waiting for the loss", 1, "Connection closed by peer"), 1: RankStatus("gathering norms", EVERYBODY, TIMED_OUT)}
    states(diagnose(words, range(2), 0).message, "ranks", "timeout")


def test_a_broken_connection_is_no_wait() -> None:
    words = {0: RankStatus("waiting for the loss", 1, "Connection reset by peer"), 1: RankStatus("waiting for the step to begin", 0)}
    note = diagnose(words, range(2), 0)
    assert note.rank == -1
    states(note.message, "rank 0", foreign="Connection reset by peer")


def test_only_known_facts_are_reported_of_a_rank_that_does_not_answer() -> None:
    words = {0: RankStatus("waiting for the loss", 2, TIMED_OUT), 2: RankStatus("waiting for a message", 1, "Connection closed by peer")}
    note = diagnose(words, range(4), 0)
    assert (note.rank, note.absent) == (1, (1, 3))
    assert "gone" not in note.message
    assert "memory" not in note.message
    states(note.message, "process", "network")
    assert note.message.endswith("; rank 3 does not answer either")


def test_of_several_that_do_not_answer_the_one_that_another_waits_for_is_named() -> None:
    """Rank 0 only has its threads held up by code that keeps Python's lock."""
    words = {1: RankStatus("waiting for a message", 2, "Connection closed by peer"), 3: RankStatus("waiting for a message", 2)}
    note = diagnose(words, range(4), 1)
    assert (note.rank, note.absent) == (2, (0, 2))
    states(note.message, "rank 2", "rank 1")


def test_a_rank_that_stood_still_is_named_where_all_wait_again() -> None:
    words = {rank: RankStatus("gathering norms", EVERYBODY, TIMED_OUT) for rank in (0, 2)}
    words[1] = RankStatus("gathering norms", EVERYBODY, stalled_s=4.6)
    note = diagnose(words, range(3), 0)
    assert note.rank == 1
    states(note.message, "rank 1", 5)
    assert note.message.endswith("meanwhile rank 0 gave up gathering norms (no answer within `timeout`)")


def test_a_rank_that_stood_still_is_named_before_one_that_computes_again() -> None:
    words = {
        0: RankStatus("waiting", 1, TIMED_OUT),
        1: RankStatus("waiting", 2, stalled_s=4.6),
        2: RankStatus("at 'run 2F1'", op="run 2F1"),
    }
    assert diagnose(words, range(3), 0).rank == 1


def test_a_short_standstill_is_no_excuse_for_a_rank_in_code_of_its_own() -> None:
    words = {0: RankStatus("waiting", 2, TIMED_OUT), 1: RankStatus("waiting", 0, stalled_s=1.5), 2: RankStatus("outside the pipeline")}
    assert diagnose(words, range(3), 0).rank == 2


def test_nobody_is_blamed_for_a_standstill_where_nobody_waited_too_long() -> None:
    words = {0: RankStatus("waiting", 1, "Connection closed by peer"), 1: RankStatus("waiting", 0, stalled_s=4.6)}
    assert diagnose(words, range(2), 0).rank == -1


def test_a_method_that_one_rank_calls_alone_is_named() -> None:
    for doing in ("refusing a call", "exchanging a message"):
        note = diagnose({0: RankStatus(doing, 1, "Connection closed by peer", call="describe"), 1: CLOSING}, range(2), 0)
        assert note.rank == 1
        states(note.message, "`describe`", "rank 0", "rank 1")


def test_a_rank_that_stays_out_of_a_call_until_the_timeout_is_asked_to_call_too() -> None:
    statuses = {0: RankStatus("waiting", 1, TIMED_OUT, call="step"), 1: OUTSIDE}
    note = diagnose(statuses, range(2), 0)
    assert note.rank == 1
    states(note.message, "`step`", "`timeout`", "rank 1")
