"""The competition of candidates: placements, each with every choice of the axes, share one budget, and the best plan gets the reasons.

`compete` lists the candidates, makes a first schedule for the most promising ones, drops those whose bound proves that they cannot win, and
divides the budget among the others by successive halving (`rounds`). Then each axis finishes the plan. `solve` searches on one placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from math import inf
from time import perf_counter

from zerobubble.arguments import NUMBER, WHOLE, optional, takes
from zerobubble.bounds import Bound
from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.ir import Schedule
from zerobubble.planning.answer import Plan
from zerobubble.planning.attempt import (
    Attempt,
    Budget,
    ProgressCallback,
    as_budget,
    bound_by_windows,
    left_out,
    start_attempt,
    with_bound,
    with_list_schedule,
    with_paired_schedule,
    with_serial_schedule,
    with_sharper_bound,
)
from zerobubble.planning.axes.axis import ChoicesOfAxis, Contest
from zerobubble.planning.axes.sharded import ShardedChoices
from zerobubble.planning.by_baseline import attempt_by_baseline
from zerobubble.planning.candidate import Candidate, Effort, Entry, promising
from zerobubble.planning.explanation import explained, simple_choice
from zerobubble.planning.forward_only import forward_attempts
from zerobubble.planning.in_steps import improve_in_steps
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.ranking import rank_key
from zerobubble.planning.rounds import CtrlC, compile_search, successive_halving, with_sharper_bounds
from zerobubble.planning.seeds import estimate_of_best_seed, ranked_seeds
from zerobubble.planning.weight_order import with_weights_ordered
from zerobubble.units import show_ms


@takes(problem=Problem, seconds=optional(NUMBER), seed=WHOLE, evaluations=optional(WHOLE), baseline=optional(str))
@garbage_collection_paused()
def solve(
    problem: Problem,
    *,
    seconds: float | None = None,
    seed: int = 0,
    evaluations: int | None = None,
    baseline: str | None = None,
    seeds: Sequence[Schedule] = (),
    progress: ProgressCallback | None = None,
) -> Plan:
    """Finds the shortest schedule for a problem. Ctrl-C returns the best so far. The answer is verified and played in plain Python.

    Args:
        problem: The problem.
        seconds: The time for seeds, search and the final check together, by default 5. Compilation does not count. With 0, the answer is
            the best of `seeds` and the published schedules.
        seed: The seed of the search's random choices.
        evaluations: How many schedules are played, instead of `seconds`, which is deterministic.
        baseline: A planner of the papers to use instead, such as "zb-heuristic".
        seeds: Schedules to begin with, besides published ones.
        progress: Called with the progress of the search.

    Raises `InputError` for a negative budget, for both `seconds` and `evaluations`, and for a
    divided head or a host, which `zb.plan` plans.

    >>> import zerobubble as zb
    >>> problem = zb.planning.Problem(zb.Placement.vee(2), 4, zb.Costs.uniform(4), zb.Limits((4_000_000,) * 2))
    >>> zb.planning.solve(problem, seconds=0).status.value
    'optimal'
    """
    if problem.has_divided_head:
        raise InputError("solve does not plan a divided head", remedy="use zb.plan(head=...)")
    if problem.host is not None:
        raise InputError("solve does not plan offload to a host", remedy="use zb.plan(host=...)")
    name, budget = problem.placement.name, as_budget(seconds, evaluations)
    if problem.is_forward_only and baseline is None:
        return forward_attempts({name: problem})[0].plan
    if baseline is not None:
        return attempt_by_baseline(name, baseline, problem, budget).plan
    if problem.sharded is not None:
        started_from = {name: chain(seeds, ranked_seeds(problem, budget.for_seeds))}
        shards = ShardedChoices(problem.sharded)
        return compete({name: problem}, budget, seed, axes=[shards], progress=progress, seeds=started_from)
    started = perf_counter()
    attempt = start_attempt(name, problem, budget, chain(seeds, ranked_seeds(problem, budget.for_seeds)))
    with suppress(KeyboardInterrupt):
        compiling = compile_search([problem] if attempt.can_improve else [], budget)
        attempt = with_sharper_bound(attempt, budget)
        spent = perf_counter() - started - compiling
        if not budget.is_empty:
            attempt = with_list_schedule(improve_in_steps(attempt, budget.share(1, spent=spent), seed, progress))
    attempt = with_serial_schedule(attempt)
    return with_paired_schedule(replace(attempt, plan=with_weights_ordered(attempt.plan))).plan


SHORT_LIST, MOST_ON_ONE = 32, 4
"""Candidates that get a first schedule, and how many of them may differ only in the choice of one axis."""

SEARCHED = 6
"""Candidates that get a search after a first schedule; without axes all."""

SEARCHED_FURTHER = (6, 2)
"""Candidates whose plans are improved by their axes, in each of two rounds with half of the budget for that."""

FOR_ORDERS, FOR_STARTS = 0.6, 0.3
"""Shares of the seconds for orders, at least, and for first schedules if there are axes."""

GROWN, MOST_NEAR, MOST_BOUNDED = 3, 3, 12
"""Entries that bring further ones with nearby choices after each round, how many, and how many nearby choices of one are bounded."""

NEAR_SHARE = 0.03
"""Share of the seconds to find choices near those of an entry."""

MOST_FURTHER = 0.75
"""Share of the budget for all that follows the search for orders, at most."""


def compete(
    problems: Mapping[str, Problem],
    budget: Budget,
    seed: int = 0,
    *,
    axes: Sequence[ChoicesOfAxis] = (),
    baseline: str | None = None,
    progress: ProgressCallback | None = None,
    seeds: Mapping[str, Iterable[Schedule]] | None = None,
) -> Plan:
    """The plan over `problems` (by name of placement) with the choices of all `axes`, the outermost first.

    Searches start from `seeds` or else from the published schedules. With a `baseline`, that planner orders the passes of each candidate.
    """
    return _Competition(budget, seed, axes, baseline, progress, seeds or {}).plan(problems)


class _Competition:
    """The state of one search: its candidates, those that were opened, and the bounds that are known."""

    def __init__(
        self,
        budget: Budget,
        seed: int,
        axes: Sequence[ChoicesOfAxis],
        baseline: str | None,
        progress: ProgressCallback | None,
        seeds: Mapping[str, Iterable[Schedule]],
    ) -> None:
        self.budget, self.seed, self.axes, self.baseline, self.progress, self.seeds = budget, seed, axes, baseline, progress, seeds
        self.started, self.compiling, self.interrupted = perf_counter(), 0.0, False
        self.candidates: list[Candidate] = []
        self.entries: list[Entry] = []
        self.bounds: dict[Problem, Bound] = {}
        self.refusals: list[InputError] = []
        self.replayed: set[tuple[Schedule | None, Costs]] = set()

    def plan(self, problems: Mapping[str, Problem]) -> Plan:
        """The best plan, finished by each axis."""
        self.candidates = self._listed(problems)
        self._search()
        self._complete()
        self._improve()
        found = self._composed()
        contest = self._contest()
        for axis in reversed(self.axes):
            found = axis.finish(found, contest)
        return replace(found, seconds=perf_counter() - self.started - self.compiling)

    def _listed(self, problems: Mapping[str, Problem]) -> list[Candidate]:
        """All candidates, without a schedule."""
        candidates = [Candidate(name, problem, problem) for name, problem in problems.items()]
        return _with_choices(candidates, self.axes)

    @property
    def _further(self) -> tuple[float, float]:
        """The shares of the budget for the improvement of plans by lifts, and of its seconds for the last decisions of axes."""
        lifts = max(sum(lift.share for lift in candidate.lifts) for candidate in self.candidates)
        finish = sum(axis.finish_share for axis in self.axes)
        most = min(1.0, MOST_FURTHER / (lifts + finish)) if lifts + finish else 0.0
        return most * lifts, most * finish

    @property
    def _for_orders(self) -> Budget:
        """The budget of the search for orders of passes."""
        lifts, finish = self._further
        seconds = max(FOR_ORDERS if self.axes else 0.0, 1 - lifts - finish) * self.budget.seconds
        return self.budget.part(1 - lifts)._replace(seconds=seconds)

    def _search(self) -> None:
        """Opens the most promising candidates, and searches for orders by successive halving."""
        budget = self._for_orders
        with CtrlC() as ctrl_c:
            self._compile([one for candidate in self.candidates for one in (candidate.problem, candidate.target)] if self.axes else [])
            for entry in self._opened(self._short_list(), budget):
                self.entries.append(entry)
            self._compile([] if self.axes else [entry.candidate.problem for entry in self.entries if entry.attempt.can_improve])
            self._halve(budget)
        self.interrupted = ctrl_c.came or any(entry.attempt.interrupted for entry in self.entries)
        if self.refusals and not any(entry.plans for entry in self.entries):
            raise self.refusals[0]
        if not self.entries:
            raise KeyboardInterrupt

    def _compile(self, problems: Sequence[Problem]) -> None:
        """Compiles the search for these problems, unless a baseline replaces it."""
        if self.baseline is None:
            self.compiling += compile_search([problem for problem in problems if not problem.is_forward_only], self._for_orders)

    def _halve(self, budget: Budget) -> None:
        """Searches from the opened candidates by successive halving, unless a baseline replaces the search."""
        if self.baseline is None:
            self.entries = with_sharper_bounds(self.entries, budget)
            if not budget.is_empty:
                left, most = budget.share(1, spent=self._spent), SEARCHED if self.axes else None
                grow = self._grown if any(axis.order_from for axis in self.axes) else None
                self.entries = successive_halving(self.entries, left, self.seed, self.progress, most, grow)
        self.entries += self._grown(self.entries)

    def _grown(self, entries: Sequence[Entry]) -> Iterator[Entry]:
        """The best entries with nearby choices of axes that suit their orders; none that are there already or cannot win."""
        if (self.budget.seconds <= 0 and self.budget.evaluations is None) or any(one.attempt.interrupted for one in entries):
            return
        able = sorted((one for one in entries if one.plans and not one.candidate.is_compared), key=lambda one: rank_key(one.best))
        new = [one for one in able if (one.best.order, one.best.costs) not in self.replayed]
        for entry in list({(one.best.order, one.best.costs): one for one in reversed(new)}.values())[: -GROWN - 1 : -1]:
            self.replayed.add((entry.best.order, entry.best.costs))
            for more in islice(self._near(entry, entries), MOST_NEAR):
                yield more
                entries = (*entries, more)

    def _near(self, entry: Entry, entries: Sequence[Entry]) -> Iterator[Entry]:
        """The entry with nearby choices of axes, of which those come first on which its best order is shortest."""
        plan, name, until = entry.best, entry.candidate.name, perf_counter() + NEAR_SHARE * self.budget.seconds
        until = min(until, self.budget.end(self.started + self.compiling)) if self.budget.evaluations is None else inf
        best = min((one.best for one in entries if not one.candidate.is_compared), key=rank_key)
        for place, axis in enumerate(self.axes):
            for near in islice(axis.near(name, plan, until), MOST_BOUNDED):
                for twin in _alike(near, self.axes[place + 1 :], entry.candidate):
                    bound = self._bound(twin.target)
                    if best.time is not None and bound.time >= best.time:
                        continue
                    grown = entry.on(twin, bound, self._bound(twin.problem), axis.order_from)
                    if not any(one.candidate.target == twin.target and rank_key(one.best) <= rank_key(grown.best) for one in entries):
                        axis.show([one.best for one in (*entries, grown) if not one.candidate.is_compared], self.progress)
                        yield grown
                    if perf_counter() > until:
                        return

    @property
    def _spent(self) -> float:
        """The seconds since the beginning, without compiling."""
        return perf_counter() - self.started - self.compiling

    def _short_list(self) -> list[Candidate]:
        """The candidates to open: the most promising, with at least one for each placement and for each choice that axes report."""
        if not self.axes or len(self.candidates) <= SHORT_LIST:
            return self.candidates
        ranked = self.candidates  # the most promising first
        kept: list[Candidate] = []
        covered: set[tuple[str, str]] = set()
        for candidate in ranked:
            parts = {("", candidate.name), *((axis, label) for axis, label in candidate.labels if label)}
            if not parts <= covered:
                covered |= parts
                kept.append(candidate)
        for candidate in ranked:
            alike = sum((one.name, one.labels[:-1]) == (candidate.name, candidate.labels[:-1]) for one in kept)
            if len(kept) < SHORT_LIST and alike < MOST_ON_ONE and not any(one is candidate for one in kept):
                kept.append(candidate)
        return kept

    def _bound(self, problem: Problem) -> Bound:
        """The lower bound of a problem for all recompute levels."""
        same = problem.at_first_level
        if same not in self.bounds and perf_counter() > self.budget.end(self.started + self.compiling):
            work = -(-problem.work // problem.placement.num_ranks)
            self.bounds[same] = Bound(work, f"ranks have {show_ms(work)} of work on average")
        if same not in self.bounds:
            passes = {candidate.name: candidate.problem.num_passes for candidate in self.candidates}
            self.bounds[same] = same.bound(is_quick=not self.budget.lasts_for_slack(sum(passes.values())))
        return self.bounds[same]

    def _opened(self, listed: Sequence[Candidate], budget: Budget) -> Iterator[Entry]:
        """Each candidate with a first schedule, and further ones until one fits.

        If the budget is too short for all, the most promising come first, and those for which no time is left are left out.
        """
        lasts = budget.lasts_for_seeds(sum(candidate.problem.num_passes for candidate in listed))
        whole = self.budget.share(min(len(listed), SEARCHED)) if self.axes else budget.share(len(listed))
        made, opened, started = set[str](), set[str](), perf_counter()
        for candidate in listed if lasts else self._first_to_open(listed, budget):
            is_needed = not (made if self.axes else opened)
            if is_needed or candidate.problem.shortage_reason or self._can_open(candidate, budget, started, lasts):
                for entry in self._open(candidate, whole):
                    opened.add(candidate.name)
                    made |= {candidate.name} if entry.plans else set()
                    yield entry
            elif candidate.name not in opened:
                opened.add(candidate.name)
                yield self._left_out(candidate, listed)
        yield from () if made else self._until_one_fits(listed, whole)

    def _until_one_fits(self, listed: Sequence[Candidate], budget: Budget) -> Iterator[Entry]:
        """The candidates that were not listed, each with a first schedule, until one fits."""
        for candidate in self.candidates:
            entries = [] if any(candidate is other for other in listed) else list(self._open(candidate, budget))
            yield from entries
            if any(entry.plans for entry in entries):
                return

    def _can_open(self, candidate: Candidate, budget: Budget, started: float, lasts: bool) -> bool:
        """Whether time is left for a first schedule, and as much again for what follows; `started` is when the first one began."""
        if self.axes and perf_counter() > self.budget.part(FOR_STARTS).end(self.started + self.compiling):
            return False
        left = budget._replace(seconds=budget.seconds - 2 * (perf_counter() - started))
        return lasts or (left.seconds > 0 and left.lasts_for_seeds(candidate.problem.num_passes))

    def _left_out(self, candidate: Candidate, listed: Sequence[Candidate]) -> Entry:
        """The entry of a candidate for which no time is left, with the seconds that are enough for all of `listed`."""
        bound = self._bound(candidate.target)
        enough = Budget.for_first_schedules(sum(other.problem.num_passes for other in listed))
        return Entry(candidate, left_out(candidate.name, candidate.problem, bound, enough.seconds), bound)

    def _first_to_open(self, listed: Sequence[Candidate], budget: Budget) -> Iterator[Candidate]:
        """The candidates, the most promising by bounds and closed forms first; before them the best whose schedule the budget lasts for.

        If it lasts for none, the smallest comes first. Bounds that take long follow the first schedule, which may take all of the time.
        """
        has_bounds = budget.lasts_for_bounds(sum(candidate.problem.placement.num_ranks for candidate in listed))
        bounds = {id(one): self._bound(one.target).time if has_bounds else 0 for one in listed}
        ordered = sorted(listed, key=lambda one: estimate_of_best_seed(one.problem, bounds[id(one)]))
        feasible = [candidate for candidate in ordered if not candidate.problem.shortage_reason]
        smallest = min(feasible, key=lambda one: one.problem.num_passes, default=ordered[0])
        first = next((candidate for candidate in feasible if budget.lasts_for_first(candidate.problem.num_passes)), smallest)
        yield first
        rest = [other for other in ordered if other is not first]
        yield from sorted(rest, key=lambda one: estimate_of_best_seed(one.problem, self._bound(one.target).time))

    def _open(self, candidate: Candidate, budget: Budget) -> Iterator[Entry]:
        """The candidate with a first schedule, by the baseline if there is one; none if that refuses it."""
        problem, bound = candidate.problem, self._bound(candidate.target)
        if self.baseline is None:
            attempt = self._attempt(candidate, budget)
        else:
            try:
                attempt = attempt_by_baseline(candidate.name, self.baseline, problem, self.budget)
            except InputError as error:
                self.refusals.append(error)
                return
        if self.axes and self.baseline is None:
            attempt = with_serial_schedule(attempt if budget.is_empty else with_list_schedule(attempt))
        yield Entry(candidate, attempt, bound).after(attempt, self.budget.part(FOR_STARTS).end(self.started + self.compiling))

    def _attempt(self, candidate: Candidate, budget: Budget) -> Attempt:
        if candidate.problem.is_forward_only:
            return forward_attempts({candidate.name: candidate.problem})[0]
        return start_attempt(candidate.name, candidate.problem, budget, self.seeds.get(candidate.name), self._bound(candidate.problem))

    def _complete(self) -> None:
        """Gives every candidate a schedule if one fits, with W in the best order."""
        for place, entry in enumerate(self.entries):
            attempt = entry.attempt
            if not attempt.is_left_out and self.baseline is None and not entry.candidate.problem.is_forward_only:
                attempt = with_serial_schedule(attempt)
                attempt = replace(attempt, plan=with_weights_ordered(attempt.plan))
                attempt = attempt if entry.candidate.lifts or entry.candidate.target.sharded else with_paired_schedule(attempt)
            entry = entry.after(attempt)
            if self.baseline is not None and entry.candidate.target.costs.shares and entry.best.order is not None:
                bound = bound_by_windows(entry.best.problem, entry.best.bound, self.budget)
                entry = replace(entry, plans=(with_bound(entry.best, bound), *entry.plans[1:]))
            self.entries[place] = entry

    def _improve(self) -> None:
        """Improves the best plans by the lifts of their candidates."""
        lifts, finish = self._further
        if self.budget.is_empty or self.baseline is not None or self.interrupted:
            return
        end = self.started + self.compiling + (1 - finish) * self.budget.seconds
        for turn, most in enumerate(SEARCHED_FURTHER):
            able = [place for place, entry in enumerate(self.entries) if entry.plans and not entry.candidate.is_compared]
            able = self._each_kind_first(sorted(able, key=lambda place: rank_key(self.entries[place].best)))[:most]
            for done, place in enumerate(able):
                parts = len(able) - done + len(able) * (len(SEARCHED_FURTHER) - turn - 1)
                part = self.budget.part(lifts).share(len(SEARCHED_FURTHER) * len(able))
                part = part._replace(seconds=max(0.0, end - perf_counter()) / parts)
                if part.is_empty:
                    return
                with CtrlC() as ctrl_c:
                    self.entries[place] = self.entries[place].improved(Effort(part, self.seed + turn))
                self.interrupted |= ctrl_c.came
            self.entries += self._grown(self.entries)

    def _each_kind_first(self, places: Sequence[int]) -> list[int]:
        """The places of ranked entries, before the others the best one with each choice of all axes but the innermost."""
        kinds = {place: (self.entries[place].candidate.name, self.entries[place].candidate.labels[:-1]) for place in places}
        first = [place for rank, place in enumerate(places) if kinds[place] not in [kinds[other] for other in places[:rank]]]
        return [*first, *(place for place in places if place not in first)]

    def _composed(self) -> Plan:
        """The best plan that leaves everything on the device, with the best on each placement as its choices."""
        names = dict.fromkeys(entry.candidate.name for entry in self.entries)
        ranked = sorted(map(self._best_on, names), key=lambda attempt: rank_key(attempt.plan))
        choices = explained(ranked)
        simple = None if self.interrupted or self.axes or self.is_short else simple_choice(ranked)
        best = replace(choices[0].plan, choices=choices, compiling=self.compiling, simple=simple, interrupted=self.interrupted)
        return replace(best, enough_seconds=self._enough_seconds)

    @property
    def _enough_seconds(self) -> int:
        """Seconds that suffice for first schedules and a search of each candidate; 0 if something was searched or nothing can be."""
        left = [entry for entry in self.entries if entry.attempt.can_improve or entry.attempt.is_left_out]
        if not left or self.interrupted or self.baseline is not None or any(entry.attempt.searched for entry in self.entries):
            return 0
        return self.budget.enough_for_search(self._spent, [entry.candidate.problem.num_passes for entry in left])

    @property
    def is_short(self) -> bool:
        return not self.budget.lasts_for_seeds(sum(candidate.problem.num_passes for candidate in self.candidates))

    def _best_on(self, name: str) -> Attempt:
        """The best attempt on a placement, without offload."""
        here = [entry for entry in self.entries if entry.candidate.name == name and not entry.candidate.is_compared]
        if not self.axes:
            return here[0].attempt
        plans = [plan for entry in here for plan in entry.plans if not plan.offloads]
        best = min(plans, key=rank_key) if plans else min(here, key=lambda entry: entry.candidate.target.host is not None).best
        if best.problem.host is not None:
            best = replace(best, problem=replace(best.problem, host=None))
            best = replace(best, bound=self._bound(best.problem))
        searched = any(entry.attempt.searched for entry in here)
        return Attempt(name, best, searched=searched, is_left_out=all(entry.attempt.is_left_out for entry in here))

    def _contest(self) -> Contest:
        for candidate in self.candidates:
            self._bound(candidate.target)
        for entry in self.entries:
            same = entry.candidate.target.at_first_level
            self.bounds[same] = max(self.bounds[same], entry.bound, key=lambda bound: bound.time)
        started = self.started + self.compiling
        return Contest(
            self.entries,
            lambda problem: self.bounds.get(problem.at_first_level) or problem.at_first_level.bound(),
            self._candidates_with,
            self.budget,
            started,
            self.seed,
            self.baseline is None,
            self.interrupted,
            self.progress,
        )

    def _candidates_with(self, plan: Plan) -> Sequence[Candidate]:
        """All candidates, or those with the choice of `plan` of an axis whose bounds hold for one choice."""
        name = next((one.name for one in self.candidates if one.target.placement == plan.placement), "")
        for place, axis in enumerate(self.axes):
            same = axis.on_choice_of(name, plan)
            if same is not None:
                return _with_choices([same], self.axes[place + 1 :])
        return self.candidates


def _with_choices(candidates: Sequence[Candidate], axes: Sequence[ChoicesOfAxis]) -> list[Candidate]:
    """The most promising candidates with the choices of more axes."""
    listed = list(candidates)
    for axis in axes:
        listed = promising([more for candidate in listed for more in axis.choices(candidate)])
    return listed


def _alike(candidate: Candidate, axes: Sequence[ChoicesOfAxis], other: Candidate) -> list[Candidate]:
    """The candidate with the choices of more axes that `other` has, of which the first may differ from its own."""
    listed, first = [candidate], len(candidate.labels)
    for axis in axes:
        listed = [more for one in listed for more in axis.choices(one) if more.labels[first:] == other.labels[first : len(more.labels)]]
    return [one for one in listed if one.problem.recomputation == other.problem.recomputation]
