"""The shell command and the Python lines that repeat a search of the page, and the options for times, which other commands use too."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from zerobubble.costs import NS_PER_MS
from zerobubble.explorer.answer import Answer
from zerobubble.explorer.question import Question
from zerobubble.planning import Objective
from zerobubble.planning.answer import Plan


@dataclass(frozen=True)
class Times:
    """Times of a rank and microbatch in ms, and the share of memory kept from B to W, to be written as options or arguments."""

    times: tuple[float, ...]
    comm: float
    held: float

    def options(self) -> list[str]:
        """The options of a command."""
        words = ["--times", ",".join(map(_number, self.times))]
        words += ["--comm", _number(self.comm)] if self.comm else []
        return words + (["--held", _number(self.held)] if self.held != 1 else [])

    def arguments(self) -> list[str]:
        """The keyword arguments of a call."""
        held = [f"held={_number(self.held)}"] if self.held != 1 else []
        return [f"times=({', '.join(map(_number, self.times))})", f"comm={_number(self.comm)}", *held]


@dataclass(frozen=True)
class Found:
    """The search that found a plan, with the question that asked for it; `memory` is the limit in microbatches, None without one."""

    question: Question
    plan: Plan
    times: Times
    memory: float | None

    @property
    def writes_plan(self) -> bool:
        """Whether the command writes the plan file."""
        return not self.question.search_limits

    @property
    def _seconds(self) -> str:
        return _number(self.question.search_seconds or 0)

    @property
    def _minimizes_makespan(self) -> bool:
        return self.plan.problem.objective is Objective.MAKESPAN

    def command(self) -> str:
        """The command of the search."""
        problem, limits = self.plan.problem, self.question.search_limits
        words = ["zerobubble", "pareto" if limits else "plan", "--ranks", str(problem.placement.num_ranks)]
        words += ["--microbatches", str(problem.num_microbatches), *self.times.options()]
        if limits:
            words += ["--memory", shlex.quote(limits)]
        elif self.memory is not None:
            words += ["--memory", f"{self.memory:.6g}"]
        words += ["--objective", str(problem.objective)] if self._minimizes_makespan else []
        return " ".join([*words, "--budget", self._seconds, *([] if limits else ["-o", "plan.json"])])

    def python(self) -> list[str]:
        """The Python lines that compute `plan`, for the memory limit of the plan shown even if the search had several limits."""
        problem = self.plan.problem
        work = [str(problem.placement.num_ranks), *self.times.arguments()]
        words = ["work", str(problem.num_microbatches), *([] if self.memory is None else [f"memory={self.memory:.6g}"])]
        words += [f"objective={str(problem.objective)!r}"] if self._minimizes_makespan else []
        return [f"work = zb.Workload.uniform({', '.join(work)})", f"plan = zb.plan({', '.join([*words, f'seconds={self._seconds}'])})"]


def search_of(made: Answer) -> Found | None:
    """The search whose best plan is shown; None for other plans, for given costs or models, and if times differ between ranks."""
    question = made.question
    if question.search_seconds is None or made.plan is None or question.costs or question.model:
        return None
    work = made.plan.problem.workload
    if work is None or any(len(set(column)) > 1 for column in (work.forward, work.backward, work.weight, work.comm)):
        return None
    forward, backward, weight, comm = (column[0] / NS_PER_MS for column in (work.forward, work.backward, work.weight, work.comm))
    times = Times((forward, backward, weight), comm, round(work.held_after_b[0] / work.held_after_f[0], 4))
    memory = made.plan.problem.limits.memory[0] / made.microbatch_bytes[0]
    return Found(question, made.plan, times, None if memory >= made.plan.problem.num_microbatches else memory)


def _number(value: float) -> str:
    return f"{value:.12g}"
