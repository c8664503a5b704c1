"""Training goes on without ranks that are gone, where replicas hold the same stages: no process starts again, and no step is lost.

Every call ends with a word of all ranks, so that none returns from a call that another has to make again. When a rank is gone, those that
are left meet again and tell each other which call they are in. One in which any of them still had work to do is made again by all of them:
as one pipeline, in which the microbatches of who is gone go through the other holders of its stages. Whoever had ended its part of a call
from which another has returned returns from it, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from time import perf_counter
from typing import TypeVar

from torch import Tensor, nn

from zerobubble.errors import InputError, PipelineError
from zerobubble.ir import Schedule
from zerobubble.planning.rerouting import rerouted, slowdown_of
from zerobubble.rules import recomputed
from zerobubble.runtime.options import PipelineOptions
from zerobubble.runtime.session import Session, connect
from zerobubble.runtime.step.inputs import StepInputs
from zerobubble.runtime.step.named_arguments import names_of_arguments
from zerobubble.runtime.survival.lending import Lending
from zerobubble.runtime.survival.step_times import StepTimes
from zerobubble.runtime.transport.mesh import Layout, one_pipeline
from zerobubble.schedules import with_recompute

_log = logging.getLogger("zerobubble")
R = TypeVar("R")


class Survival:
    """Who is left of a mesh, in which call this rank is, and what is played by those that are left.

    `session` is that of all ranks.
    """

    def __init__(self, session: Session) -> None:
        self.gone: frozenset[int] = frozenset()
        self.has_ended_its_part = False
        self._layout = session.layout
        self._processes = session.transport.group.processes
        self._store_host = session.transport.group.store_host
        self._placement = session.setup.schedule.placement
        self._parameters = list(nn.ModuleList(session.setup.stages.modules.values()).parameters())
        self._gradients = session.setup.gradients
        self._num_calls = 0
        self._schedule = session.setup.schedule
        self._step_times = StepTimes()
        self._earlier: dict[nn.Parameter, Tensor | None] = {}
        self._lending = Lending(session.setup.stages.modules, _names_that_stages_take(session))

    @property
    def left(self) -> list[int]:
        """The ranks that are left, as the mesh counts them: those of the pipeline that is played now, in its order."""
        return [rank for rank in range(len(self._layout.ranks)) if rank not in self.gone]

    def make(
        self, call: Callable[[], R], session: Callable[[], Session], go_on: Callable[[PipelineError], bool], *, adds_gradients: bool
    ) -> R:
        """What `call` gives, made again as often as ranks end in it.

        `session` is the one now; `go_on` makes another after an error, and tells whether the call is to be made again.
        """
        self._begin(keeps_gradients=adds_gradients)
        while True:
            try:
                begun = perf_counter()
                result = call()
                self._agree_that_it_is_over(session())
                if adds_gradients:
                    self._step_took(perf_counter() - begun, session())
                break
            except PipelineError as error:
                if not go_on(error):
                    break
                self._start_over()
        self._earlier = {}
        return result

    def _step_took(self, seconds: float, session: Session) -> None:
        """A training step is over; the first rank that is left tells how much longer they take, once that is known."""
        self._step_times.took(seconds)
        words = self._step_times.in_words()
        if words is not None and session.transport.rank == 0:
            _log.warning("%s", words)

    def _begin(self, *, keeps_gradients: bool) -> None:
        """A call begins. What gradients hold is kept where it adds to them."""
        self._num_calls += 1
        self.has_ended_its_part = False
        found = {parameter: self._gradients.of(parameter) for parameter in self._parameters if keeps_gradients}
        self._earlier = {parameter: None if gradient is None else gradient.clone() for parameter, gradient in found.items()}

    def _start_over(self) -> None:
        """The call is made again: gradients are what they were."""
        for parameter, gradient in self._earlier.items():
            self._gradients.put(parameter, None if gradient is None else gradient.clone())

    def _agree_that_it_is_over(self, session: Session) -> None:
        """Wait until all ranks have ended their part of the call."""
        self.has_ended_its_part = True
        with session.guard.during("while ending a call together"), session.transport.collective("ending a call together"):
            session.transport.gather_objects(self._num_calls)

    def go_on_after(self, error: PipelineError, before: Session, options: PipelineOptions) -> Session:
        """The session of those that are left when `error` has ended the one `before`, which had these `options`.

        Raises the error where it tells of no rank that is gone, or that this one is, which was silent for too long, or where too few are
        left. A further rank that does not come to meet the others in time is gone, too.
        """
        report = before.guard.report
        if report is None or report.rank not in report.absent or before.transport.rank in report.absent:
            raise error
        self._lose(report.absent, error)
        while True:
            try:
                return self._reconnect(options, before, error)
            except PipelineError as another:
                if another.rank is None:
                    raise
                self._lose([another.rank], another)

    def _lose(self, absent: Iterable[int], error: PipelineError) -> None:
        """Count the ranks that are `absent`, by their place among those left, as gone.

        If the others cannot go on without them, raises a `PipelineError` that adds the reasons to `error`.
        """
        left = self.left
        gone = self.gone | {left[rank] for rank in absent}
        why_not = self._why_not_without(gone)
        if why_not:
            ranks = ", ".join(map(str, sorted(gone)))
            lost = f"rank {ranks} is" if len(gone) == 1 else f"ranks {ranks} are"
            told = f"{error}; the others cannot go on now that {lost} gone, as the mesh counts: {'; '.join(why_not)}"
            raise PipelineError(told, rank=error.rank, op=error.op) from error
        self.gone = gone

    def _why_not_without(self, gone: frozenset[int]) -> list[str]:
        """Why nobody can go on without these ranks, each reason with what to do instead; empty if the others can."""
        reasons = []
        if self._store_host in gone:
            reasons.append(
                f"the process of rank {self._store_host} held the store of torch.distributed, in which the others would have to meet: "
                "start again from a checkpoint, and give the store a process of its own"
            )
        try:
            rerouted(self._placement, self._layout.pipelines, gone, 1)
        except InputError as too_many:
            reasons.append(str(too_many))
        lost = (", ".join(map(str, ranks)) for ranks in self._layout.pipelines if gone.issuperset(ranks))
        remedy = "start again from a checkpoint"
        return reasons + [f"nobody is left of the replica of ranks {ranks}, which had its share of the batch: {remedy}" for ranks in lost]

    def _reconnect(self, options: PipelineOptions, before: Session, error: PipelineError) -> Session:
        """The session of those that are left after `error`, whose session `before` had these `options`."""
        new = self._new_options(options, before)
        session = connect(new, self._new_layout())
        self._step_times.a_rank_is_gone()
        if session.transport.rank == 0:
            slowdown = slowdown_of(self._schedule, self.schedule(0, new.num_microbatches))
            _log.warning(
                "%s; the others go on without it, in steps that take %.2f times as long where all passes take equally long, "
                "%.2f times at least",
                error,
                *slowdown,
            )
        return replace(session, setup=replace(session.setup, is_cut_model=before.setup.is_cut_model))

    def _new_layout(self) -> Layout:
        """One pipeline of all that are left."""
        name = "-".join(["survivors", self._layout.name, *map(str, sorted(self.gone))])
        processes = [self._processes[rank] for rank in self.left] if self._processes else []
        return one_pipeline(name, [self._layout.ranks[rank] for rank in self.left], processes)

    def _new_options(self, options: PipelineOptions, session: Session) -> PipelineOptions:
        """The options of the pipeline of those that are left, who keep their modules."""
        modules = [module for _, module in sorted(session.setup.stages.modules.items())]
        count = options.num_microbatches * len(self._layout.pipelines)
        tied = session.setup.tied
        changed = replace(
            options, build_or_modules=modules, schedule=self.schedule, num_microbatches=count, tied=tied, mesh=None, survive=False
        )
        again, levels = self._stages_again(), session.setup.stages.levels
        return replace(changed, recompute=levels.as_one(sorted(again))) if again and levels.given else changed

    def schedule(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """What is played by those that are left."""
        schedule = rerouted(self._placement, self._layout.pipelines, self.gone, num_microbatches)
        again = self._stages_again()
        return with_recompute(schedule, again) if again else schedule

    def _stages_again(self) -> set[int]:
        """The stages of which forwards were computed again from the beginning."""
        return {stage for row in self._schedule.rows for stage, _ in recomputed(row)}

    def makes_it_again(self, session: Session) -> bool:
        """Whether this rank's call is to be made again, as those that are left have met again."""
        with session.guard.during("while going on without a rank"), session.transport.collective("going on without a rank"):
            told = session.transport.gather_objects((self._num_calls, self.has_ended_its_part))
        newest = max(call for call, _ in told)
        return not self.has_ended_its_part or (self._num_calls == newest and not all(ended for _, ended in told))

    def lend(self, given: StepInputs, num_microbatches: int, session: Session) -> tuple[StepInputs, int]:
        """What the ranks that are left play of what this one was given, and in how many microbatches."""
        if not self.gone:
            return self._lending.own(given), num_microbatches
        lenders = [self.left.index(next(rank for rank in replica if rank not in self.gone)) for replica in self._layout.pipelines]
        whole = self._lending.whole_batch(given, num_microbatches, lenders, session)
        return whole, num_microbatches * len(lenders)


def _names_that_stages_take(session: Session) -> list[str] | None:
    """The names of arguments that the stages of any rank take, None where one takes every name; all ranks call it."""
    mine = names_of_arguments(session.setup.stages.modules)
    with session.guard.during("while telling which arguments stages take"), session.transport.collective("telling arguments of stages"):
        told = session.transport.gather_objects(mine)
    return None if None in told else sorted({name for names in told for name in names})
