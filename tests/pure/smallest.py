"""Brute force for the shortest schedule of a small problem, with fused BW passes and overlapped pairs that save time.

It shares no code with the planner, the simulator or the bounds. It tries every way to append a step to a rank as early as possible. Of
two states with the same completed passes, it drops one that is dominated by the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zerobubble.planning import Problem


@dataclass(frozen=True)
class State:
    """By stage how many F, B and W have run, when those ended whose reader has not run, by rank its start, its end and its bytes."""

    done: tuple[tuple[int, int, int], ...]
    sent: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    start: tuple[int, ...]
    free: tuple[int, ...]
    held: tuple[int, ...]

    @property
    def key(self) -> object:
        return self.done, tuple(start < 0 for start in self.start)

    @property
    def times(self) -> tuple[int, ...]:
        """Less is better in each."""
        return (*self.free, *(-start for start in self.start), *(time for both in self.sent for each in both for time in each))


def optimum(problem: Problem) -> int:
    """The least objective in ns."""
    stages, ranks = problem.placement.num_stages, problem.placement.num_ranks
    beginning = State(((0, 0, 0),) * stages, (((), ()),) * stages, (-1,) * ranks, (0,) * ranks, (0,) * ranks)
    states = {beginning.key: [beginning]}
    everything = ((problem.num_microbatches,) * 3,) * stages
    best = None
    while states:
        following: dict[object, list[State]] = {}
        for state in (state for kept in states.values() for state in kept):
            if state.done == everything:
                length = _length(problem, state)
                best = length if best is None else min(best, length)
                continue
            for new in _followers(problem, state):
                _keep(following.setdefault(new.key, []), new)
        states = following
    assert best is not None, "one microbatch fits"
    return best


def _length(problem: Problem, state: State) -> int:
    begins = (0,) * len(state.start) if problem.objective.value == "makespan" else state.start
    return max(end - begin for end, begin in zip(state.free, begins, strict=True))


def _keep(kept: list[State], new: State) -> None:
    """Add `new` unless some state of the same passes has nothing later; those in which nothing is earlier go."""
    times = new.times
    if any(all(a <= b for a, b in zip(old.times, times, strict=True)) for old in kept):
        return
    kept[:] = [old for old in kept if not all(a <= b for a, b in zip(times, old.times, strict=True))]
    kept.append(new)


def _followers(problem: Problem, state: State) -> Iterator[State]:
    """The states after one more microscopic choice: a rank runs its next step. Passes are counted one by one, so that layers are alike."""
    for rank in range(problem.placement.num_ranks):
        own = [stage for stage, home in enumerate(problem.placement.routes[0]) if home == rank]
        for stage in own:
            for parts in ([("F", stage)], [("B", stage)], [("W", stage)], [("B", stage), ("W", stage)]):
                yield from _after(problem, state, rank, parts)
            if any(problem.costs.hidden):
                for other in own:
                    for backward in ([("B", other)], [("B", other), ("W", other)]):
                        yield from _after(problem, state, rank, [("F", stage), *backward])


def _after(problem: Problem, state: State, rank: int, parts: list[tuple[str, int]]) -> Iterator[State]:
    costs, home, m = problem.costs, problem.placement.routes[0], problem.num_microbatches
    done, sent, held = [list(each) for each in state.done], [[list(one) for one in both] for both in state.sent], state.held[rank]
    begin, times = state.free[rank], []
    whole = len(parts) > 1 and parts[-1][0] == "W"
    for letter, stage in parts:
        index = "FBW".index(letter)
        number = done[stage][index]
        if number == m:
            return
        if letter == "F" and stage:
            if not sent[stage - 1][0]:
                return
            begin = max(begin, sent[stage - 1][0].pop(0) + (costs.comm[stage - 1] if home[stage - 1] != rank else 0))
        if letter == "B":
            if state.done[stage][0] <= number:
                return
            if stage + 1 < len(home):
                if not sent[stage + 1][1]:
                    return
                begin = max(begin, sent[stage + 1][1].pop(0) + (costs.comm[stage] if home[stage + 1] != rank else 0))
        if letter == "W" and number >= done[stage][1]:
            return
        done[stage][index] += 1
        if letter == "F":
            held += costs.held_after_f[stage]
            times.append(costs.forward[stage])
        elif letter == "B":
            held -= costs.held_after_f[stage] - (0 if whole else costs.held_after_b[stage])
            times.append(
                min(costs.fused[stage], costs.backward[stage] + costs.weight[stage]) if whole and costs.fused else costs.backward[stage]
            )
        elif whole:
            times[-1] += 0 if costs.fused else costs.weight[stage]
        else:
            held -= costs.held_after_b[stage]
            times.append(costs.weight[stage])
        if held > problem.limits.memory[rank]:
            return
    takes = max(*times, sum(times) - costs.hidden[parts[0][1]]) if len(times) > 1 else times[0]
    for letter, stage in parts:
        if letter == "F" and stage + 1 < len(home):
            sent[stage][0].append(begin + takes)
        if letter == "B" and stage:
            sent[stage][1].append(begin + takes)
    starts = tuple(begin if r == rank and was < 0 else was for r, was in enumerate(state.start))
    ends = tuple(begin + takes if r == rank else was for r, was in enumerate(state.free))
    bytes_held = tuple(held if r == rank else was for r, was in enumerate(state.held))
    yield replace(
        state,
        done=tuple(tuple(each) for each in done),  # type: ignore[misc]
        sent=tuple((tuple(a), tuple(b)) for a, b in sent),
        start=starts,
        free=ends,
        held=bytes_held,
    )
