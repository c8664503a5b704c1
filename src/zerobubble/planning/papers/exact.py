"""The exact solver: a constraint program over the start of every pass, solved and proved by OR-Tools' CP-SAT."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from math import floor, gcd
from typing import Any, NamedTuple

from zerobubble.bounds import Bound
from zerobubble.errors import InputError
from zerobubble.installing import install
from zerobubble.ir import Kind, Op, Schedule
from zerobubble.planning.answer import Status
from zerobubble.planning.papers.partial_schedule import check_memory, pass_needs
from zerobubble.planning.papers.zb_heuristic import zb_heuristic
from zerobubble.planning.papers.zb_v_greedy import zb_v_greedy
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.planning.seeds import serial_schedule
from zerobubble.planning.transforms import split_in_memory
from zerobubble.simulation import memory_faults, simulate


class Exact(NamedTuple):
    """The shortest schedule found, a proven lower bound on the objective, and whether the two are equal."""

    schedule: Schedule
    bound: Bound
    status: Status


def exact(problem: Problem, seconds: float = 60.0, workers: int = 1, hint: Schedule | None = None) -> Exact:
    """Solves `problem` by CP-SAT in `seconds` of wall time on `workers` threads.

    The result is never longer than `hint`, and has a proven bound.

    For small problems: up to about 4 ranks and 8 microbatches a proof takes seconds. Raises `InputError` if the limits hold no microbatch,
    if overlapped passes hide time, if `hint` is for another problem, and if OR-Tools is missing.

    Source: the integer program of Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv 2401.10241, section 3.1, with starts
    instead of order bits.
    """
    if any(problem.costs.hidden):
        raise InputError("exact does not support overlapped passes", remedy="give costs with hidden=()")
    check_memory(problem)
    cp_model = _cp_model()
    best, bound = _start(problem, hint), problem.bound()
    if problem.measure(best) > bound.time:
        program = _Program(cp_model, problem, best, bound.time)
        found, proved = program.solve(seconds, workers)
        best = min([best, *found], key=problem.measure)
        if proved > bound.time:
            bound = Bound(proved, "no order of the passes takes less: all others are ruled out by exhaustive search")
    return Exact(best, bound, Status.OPTIMAL if problem.measure(best) == bound.time else Status.FEASIBLE)


def _cp_model() -> Any:
    try:
        return import_module("ortools.sat.python.cp_model")
    except ModuleNotFoundError as error:
        raise InputError("the exact planner needs OR-Tools", remedy=install("exact")) from error


def _start(problem: Problem, hint: Schedule | None) -> Schedule:
    """The schedule to begin with: `hint`, or the shortest of the heuristics and the serial schedule."""
    if hint is None:
        return min(_quick(problem), key=problem.measure)
    problem.require_schedule(hint, "hint", remedy="make one for the problem")
    for fault in memory_faults(hint, problem.costs, problem.limits):
        raise InputError("the hint {name!r} does not fit: {fault}", name=hint.name, fault=fault)
    split = split_in_memory(hint, problem)
    numbers = {op.microbatch: place for place, op in enumerate(op for row in split.rows for op in row if op[:2] == (Kind.F, 0))}
    return replace(split, rows=tuple(tuple(op._replace(microbatch=numbers[op.microbatch]) for op in row) for row in split.rows))


def _quick(problem: Problem) -> Iterator[Schedule]:
    for planner in (zb_heuristic, zb_v_greedy):
        with suppress(InputError):
            yield planner(problem)
    yield split_in_memory(serial_schedule(problem.placement, problem.num_microbatches), problem)


def _in_order(schedule: Schedule) -> Schedule:
    """Renumbers microbatches by their order at F and B of each stage, W as their B, which keeps all starts legal."""
    numbers: dict[tuple[bool, int], list[int]] = defaultdict(list)
    rows = tuple(tuple(_numbered(op, numbers) for op in row) for row in schedule.rows)
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, rows)


def _numbered(op: Op, numbers: dict[tuple[bool, int], list[int]]) -> Op:
    """The renumbered pass, given the old numbers of those before it by stage, forward (True) and backward."""
    known = numbers[op.kind is Kind.F, op.stage]
    if op.kind is not Kind.W:
        known.append(op.microbatch)
    return op._replace(microbatch=known.index(op.microbatch))


class _Program:
    """The constraint program of a problem whose objective lies between `least` ns and that of the schedule `known`.

    On each stage, microbatches are numbered in the order in which it runs them. They are equal, so this loses nothing. The first pass of a
    rank starts when some microbatch arrives, as in the simulator. This need not be the first one: a rank that begins later may idle less
    and have a shorter span. B and W may be fused if B leaves more bytes to W than F saved: then no more than F saved is held, the gradient
    leaves at the end, and the BW may precede W of other microbatches. Times are in ticks, `grain` ticks per `unit` of ns. Passes of
    no time take one tick, so that passes of a rank are ordered; `grain` is so large that all of these together do not add up to a unit.
    """

    def __init__(self, cp_model: Any, problem: Problem, known: Schedule, least: int) -> None:
        costs, stages = problem.costs, problem.placement.num_stages
        self.cp_model, self.model, self.problem = cp_model, cp_model.CpModel(), problem
        self.needs = pass_needs(stages)
        times = {one: costs.time(*one) for one in self.needs}
        self.unit = gcd(*times.values(), *costs.comm) or 1
        self.points = problem.num_microbatches * list(times.values()).count(0)
        self.grain = 2 * self.points + 1
        self.length = {one: max(1, self.ticks(time)) for one, time in times.items()}
        self.horizon = problem.num_microbatches * (sum(self.length.values()) + 2 * sum(map(self.ticks, costs.comm)))
        self.start = {Op(*one, j): self.variable() for one in self.needs for j in range(problem.num_microbatches)}
        self.end = {op: start + self.length[op.kind, op.stage] for op, start in self.start.items()}
        firsts = sorted({problem.placement.routes[0].index(rank) for rank in range(problem.placement.num_ranks)} - {0})
        self.begins = {stage: [self.model.new_bool_var("") for _ in range(problem.num_microbatches)] for stage in firsts}
        """For the first stage of each rank: the index, in the order of the previous stage, of the microbatch whose arrival starts the
        rank."""
        self.in_one = {op: self.model.new_bool_var("") for op in self.start if op.kind is Kind.B and self._grows(op.stage)}
        self._precedence()
        for rank in range(problem.placement.num_ranks):
            self._no_overlap(rank)
            self._limit_memory(rank)
        self._minimize(self.ticks(least) - self.points, self.ticks(problem.measure(known)) + self.points)
        for row, spans in zip(_in_order(known).rows, simulate(known, costs).rows, strict=True):
            for op, span in zip(row, spans, strict=True):
                self._add_hint(op, span.start)

    def _add_hint(self, op: Op, start: int) -> None:
        """Hints that a pass starts at this time, in ns."""
        if op.kind is Kind.BW:
            op = op._replace(kind=Kind.B)
            self.model.add_hint(self.start[op._replace(kind=Kind.W)], self.ticks(start + self.problem.costs.time(*op[:2])))
            self.model.add_hint(self.in_one[op], 1)
        self.model.add_hint(self.start[op], self.ticks(start))

    def _grows(self, stage: int) -> bool:
        """Whether B of a stage leaves more bytes to W than F saved."""
        return self.problem.costs.held_after_b[stage] > self.problem.costs.held_after_f[stage]

    def variable(self) -> Any:
        return self.model.new_int_var(0, self.horizon, "")

    def ticks(self, time: int) -> int:
        """A time in ns as ticks, rounded up to whole units, of which every time of a schedule is a multiple."""
        return -(-time // self.unit) * self.grain

    def _precedence(self) -> None:
        """Passes wait for their inputs and for the microbatch before."""
        microbatches, home = self.problem.num_microbatches, self.problem.placement.routes[0]
        self.model.add(self.start[Op(Kind.F, 0, 0)] == 0)
        for op, start in self.start.items():
            if op.microbatch + 1 < microbatches and not (op.kind is Kind.W and self._grows(op.stage)):
                self.model.add(self.end[op] <= self.start[op._replace(microbatch=op.microbatch + 1)])
            for kind, stage in self.needs[op.kind, op.stage]:
                link = self.ticks(self.problem.costs.comm[min(stage, op.stage)]) if home[stage] != home[op.stage] else 0
                arrival = self.end[Op(kind, stage, op.microbatch)] + link
                self.model.add(start >= arrival)
                if op.kind is Kind.F and op.stage in self.begins:
                    begins = self.begins[op.stage][op.microbatch]
                    self.model.add(self.start[op._replace(microbatch=0)] == arrival).only_enforce_if(begins)
                maker = Op(kind, stage, op.microbatch)
                if maker in self.in_one and op.kind is Kind.B:
                    self.model.add(start >= self.end[maker._replace(kind=Kind.W)] + link).only_enforce_if(self.in_one[maker])
        for begins_with in self.begins.values():
            self.model.add_bool_or(begins_with)
        for op, in_one in self.in_one.items():
            self.model.add(self.start[op._replace(kind=Kind.W)] == self.end[op]).only_enforce_if(in_one)

    def _no_overlap(self, rank: int) -> None:
        """A rank runs one pass at a time."""
        here = [op for op in self.start if self.problem.placement.routes[0][op.stage] == rank]
        intervals = [self.model.new_fixed_size_interval_var(self.start[op], self.length[op.kind, op.stage], "") for op in here]
        self.model.add_no_overlap(intervals)

    def _limit_memory(self, rank: int) -> None:
        """Activations of F are held until B ends, and those that B leaves until W ends.

        The common part is a single interval, which proves more.
        """
        held = [stretch for _, stage in self.problem.placement.stages(rank) for stretch in self._stretches(stage)]
        if held:
            scale = gcd(*(bytes_ for bytes_, _ in held))
            demands = [bytes_ // scale for bytes_, _ in held]
            self.model.add_cumulative([interval for _, interval in held], demands, self.problem.limits.memory[rank] // scale)

    def _stretches(self, stage: int) -> list[tuple[int, Any]]:
        """Bytes held by the microbatches of a stage, each with its interval."""
        saved, work = self.problem.costs.held_after_f[stage], self.problem.costs.held_after_b[stage]
        both = min(saved, work)
        stretches: list[tuple[int, Any]] = []
        for j in range(self.problem.num_microbatches):
            taken, turned, freed = self.start[Op(Kind.F, stage, j)], self.end[Op(Kind.B, stage, j)], self.end[Op(Kind.W, stage, j)]
            times = [(both, taken, freed), (saved - both, taken, turned)]
            stretches += [(bytes_, self.model.new_interval_var(begin, self.variable(), end, "")) for bytes_, begin, end in times if bytes_]
            if work > saved:
                apart = ~self.in_one[Op(Kind.B, stage, j)]
                interval = self.model.new_optional_interval_var(turned, self.variable(), freed, apart, "")
                stretches.append((work - saved, interval))
        return stretches

    def _minimize(self, least: int, most: int) -> None:
        """Minimizes the objective."""
        objective = self.model.new_int_var(max(0, least), most, "")
        microbatches = range(self.problem.num_microbatches)
        for rank in range(self.problem.placement.num_ranks):
            stages = [stage for _, stage in self.problem.placement.stages(rank)]
            begin = 0 if self.problem.objective is Objective.MAKESPAN else self.start[Op(Kind.F, stages[0], 0)]
            for stage in stages:
                for j in microbatches if self._grows(stage) else microbatches[-1:]:
                    self.model.add(objective >= self.end[Op(Kind.W, stage, j)] - begin)
        self.model.minimize(objective)

    def solve(self, seconds: float, workers: int) -> tuple[list[Schedule], int]:
        """The schedule found, if any, and the proven lower bound in ns."""
        solver = self.cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = workers
        solver.parameters.use_objective_lb_search = True
        status = solver.solve(self.model)
        least = self.unit * -((self.points - floor(solver.best_objective_bound)) // self.grain)
        if status not in (self.cp_model.OPTIMAL, self.cp_model.FEASIBLE):
            return [], least
        return [self._read(solver)], least

    def _taken(self, solver: Any) -> Iterator[list[int]]:
        """For each stage, the order of microbatches in F. B and W use the order of the last stage."""
        taken = list(range(self.problem.num_microbatches))
        for stage in range(self.problem.placement.num_stages):
            first = next((place for place, begins in enumerate(self.begins.get(stage, ())) if solver.value(begins)), 0)
            taken = [taken[first], *taken[:first], *taken[first + 1 :]]
            yield taken

    def _read(self, solver: Any) -> Schedule:
        home, order = self.problem.placement.routes[0], sorted(self.start, key=lambda op: solver.value(self.start[op]))
        whole = {op for op, in_one in self.in_one.items() if solver.value(in_one)}
        joined = {op._replace(kind=Kind.W) for op in whole}
        passes = [op._replace(kind=Kind.BW) if op in whole else op for op in order if op not in joined]
        taken = list(self._taken(solver))
        named = [op._replace(microbatch=taken[op.stage if op.kind is Kind.F else -1][op.microbatch]) for op in passes]
        rows = tuple(tuple(op for op in named if home[op.stage] == rank) for rank in range(self.problem.placement.num_ranks))
        schedule = Schedule("exact", self.problem.placement, self.problem.num_microbatches, rows)
        assert not memory_faults(schedule, self.problem.costs, self.problem.limits)
        return schedule
