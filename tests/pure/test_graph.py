"""The graph of a schedule: the inputs of each pass, when it runs, and which pass waits for which. All figures are worked out by hand."""

from __future__ import annotations

from zerobubble import Schedule
from zerobubble.graph import circles, joint_needs, play, resolve, walk


def schedule(*rows: str, microbatches: int = 2) -> Schedule:
    """One stage on each rank."""
    lines = [f"rank {rank}: {row}" for rank, row in enumerate(rows)]
    placement = " ".join(map(str, range(len(rows))))
    return Schedule.from_text(
        "\n".join(["zerobubble schedule 1", f"placement linear: {placement}", f"microbatches {microbatches}", *lines, ""])
    )


def test_two_overlapped_passes_are_one_step_with_the_needs_of_both() -> None:
    graph = resolve(schedule("0F0 0F1&0BW0 0BW1", "1F0 1BW0 1F1 1BW1"))
    assert graph.needs == [(), (), (0, 5), (1, 7), (0,), (4,), (1,), (6,)]
    assert graph.pairs == {1}
    assert list(graph.steps()) == [(0,), (1, 2), (3,), (4,), (5,), (6,), (7,)]
    assert [graph.position(number) for number in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert list(joint_needs(graph, graph.needs)) == [(), (0, 5), (0, 5), (1, 7), (0,), (4,), (1,), (6,)]


def test_passes_begin_when_their_rank_is_free_and_their_messages_are_there() -> None:
    graph = resolve(schedule("0F0 0F1&0BW0 0BW1", "1F0 1BW0 1F1 1BW1"))
    heads = graph.first[:-1]
    order = walk(graph, joint_needs(graph, graph.needs), heads)
    assert heads == graph.first[1:] == [4, 8]
    takes, delays = [3, 5, 0, 2, 1, 1, 1, 1], [10, 11, 12, 13, 14, 15, 16, 17]
    begin, end, after = play(graph, order, takes, delays)
    assert begin == [0, 30, 30, 65, 13, 14, 46, 47]
    assert end == [3, 35, 35, 67, 14, 15, 47, 48]
    assert after == [-1, 5, 5, 7, 0, 4, 1, 6]
    assert play(graph, order, takes, delays, lags=[2] * 8).begin == [2, 38, 38, 79, 17, 20, 56, 59]
    assert play(graph, order, takes, earliest=lambda number, _: 7 if number == 0 else 0).begin == [7, 12, 12, 19, 10, 11, 17, 18]


def test_a_value_that_no_pass_makes_is_no_need() -> None:
    assert resolve(schedule("0F0 0BW0", "1F0", microbatches=1)).needs == [(), (0,), (0,)]


def test_the_first_of_two_equal_passes_makes_the_value() -> None:
    assert resolve(schedule("0F0 0F0 0BW0", "1F0 1BW0", microbatches=1)).needs == [(), (), (0, 4), (0,), (3,)]


def test_ranks_that_wait_for_each_other_are_found_and_others_left_out() -> None:
    """Rank 0 finishes, and rank 3 waits for rank 2, which nobody in the circle needs."""
    graph = resolve(schedule("0F0 0F1", "1F0 1BW0 1F1 1BW1", "2F0 2F1 2BW0 2BW1", "3F0 3BW0 3F1 3BW1"))
    heads = graph.first[:-1]
    order = walk(graph, graph.needs, heads)
    assert sorted(order) == [0, 1, 2, 6, 10, 11]
    assert heads == [2, 3, 7, 12]
    assert circles(graph, graph.needs, heads) == [[(3, 8), (7, 4)]]
    assert order.index(0) < order.index(2) < order.index(6) < order.index(10)
