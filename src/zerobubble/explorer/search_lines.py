"""The command and the program that repeat a search of the page."""

from __future__ import annotations

import re
from dataclasses import dataclass

from zerobubble.costs import NS_PER_MS
from zerobubble.explorer.answer import Answer
from zerobubble.planning import Objective, Workload
from zerobubble.planning.answer import Plan

SEARCH = re.compile(r"([0-9.]{1,12}) (\S{1,40})(?: ([0-9.]{1,12}):([0-9.]{1,12}):([0-9.]{1,12}))?")
"""A search as the page writes it: seconds, placement of the plan and, for a front, the first limit, the last one and their distance."""


@dataclass(frozen=True)
class Found:
    """A plan and the search that found it: its seconds, the limits of its front, and the limit of the plan, None without one."""

    plan: Plan
    work: Workload
    seconds: str
    limits: tuple[str, ...]
    memory: float | None

    @property
    def writes_plan(self) -> bool:
        """Whether the command writes the plan file."""
        return not self.limits

    @property
    def _times(self) -> list[str]:
        return [f"{column[0] / NS_PER_MS:.12g}" for column in (self.work.forward, self.work.backward, self.work.weight)]

    @property
    def _comm(self) -> str:
        return f"{self.work.comm[0] / NS_PER_MS:.12g}"

    @property
    def _held(self) -> str:
        return f"{self.work.held_after_b[0] / self.work.held_after_f[0]:.4g}"

    @property
    def _has_barrier(self) -> bool:
        return self.plan.problem.objective is Objective.MAKESPAN

    def command(self) -> str:
        """The command of the search."""
        words = ["zerobubble", "pareto" if self.limits else "plan", "--ranks", str(self.work.num_ranks)]
        words += ["--microbatches", str(self.plan.problem.num_microbatches), "--times", ",".join(self._times), "--comm", self._comm]
        words += ["--held", self._held] if self._held != "1" else []
        if self.limits:
            words += ["--memory", ":".join(self.limits)]
        elif self.memory is not None:
            words += ["--memory", f"{self.memory:.6g}"]
        words += ["--objective", str(self.plan.problem.objective)] if self._has_barrier else []
        return " ".join([*words, "--budget", self.seconds, *([] if self.limits else ["-o", "plan.json"])])

    def python(self) -> list[str]:
        """The lines that make `plan`: that of the same memory limit."""
        held = [f"held={self._held}"] if self._held != "1" else []
        work = [str(self.work.num_ranks), f"times=({', '.join(self._times)})", f"comm={self._comm}", *held]
        words = ["work", str(self.plan.problem.num_microbatches), *([] if self.memory is None else [f"memory={self.memory:.6g}"])]
        words += [f"objective={str(self.plan.problem.objective)!r}"] if self._has_barrier else []
        return [f"work = zb.Workload.uniform({', '.join(work)})", f"plan = zb.plan({', '.join([*words, f'seconds={self.seconds}'])})"]


def search_of(made: Answer) -> Found | None:
    """The search that found the plan; None for other plans, and if its times belong to stages or differ between ranks."""
    given = SEARCH.fullmatch(made.question.search)
    if given is None or made.plan is None or made.question.costs or made.question.model:
        return None
    work = made.plan.problem.workload
    if work is None or any(len(set(column)) > 1 for column in (work.forward, work.backward, work.weight, work.comm)):
        return None
    memory = made.plan.problem.limits.memory[0] / made.microbatch_bytes[0]
    limit = None if memory >= made.plan.problem.num_microbatches else memory
    return Found(made.plan, work, given[1], given.groups()[2:] if given[3] else (), limit)
