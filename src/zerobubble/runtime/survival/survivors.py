"""Continues training without ranks that are lost, if replicas hold the same stages. No process restarts, and no step is lost.

Every call ends with an agreement of all ranks that it is over. So no rank returns from a call that another has to repeat. After a loss, the
survivors reconnect and exchange which call they are in:

- A call in which any of them still had work is repeated by all. They play it as one pipeline: microbatches of the lost rank go through the
  other ranks that hold its stages (after ReCycle, arXiv 2405.14009).
- If one rank has already returned from the call, all others had finished their part: they return from it, too.

Gradients accumulate, so a repeated step must start from the values before it. They are copied when a step begins.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import TypeVar

from torch import Tensor, nn

from zerobubble.errors import InputError, PipelineError
from zerobubble.ir import Schedule
from zerobubble.rerouting import rerouted, slowdown_of
from zerobubble.rules import recomputed
from zerobubble.runtime.options import PipelineOptions
from zerobubble.runtime.session import Session, connect
from zerobubble.runtime.step.batch import StepInputs
from zerobubble.runtime.step.named_arguments import names_of_arguments
from zerobubble.runtime.survival.lending import Lending
from zerobubble.schedules import with_recompute
from zerobubble.units import named

_log = logging.getLogger("zerobubble")
R = TypeVar("R")


class Survival:
    """Knows the surviving ranks of a mesh, the call that this rank is in, and the schedule that the survivors play.

    `session` is that of all ranks.
    """

    def __init__(self, session: Session) -> None:
        self.lost: frozenset[int] = frozenset()
        self.has_finished_call = False
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
        """The surviving ranks, as the mesh counts them: those of the current pipeline, in its order."""
        return [rank for rank in self._layout.members if rank not in self.lost]

    def run(
        self, call: Callable[[], R], session: Callable[[], Session], recover: Callable[[PipelineError], bool], *, adds_gradients: bool
    ) -> R:
        """Runs `call` and returns what it does, repeated each time a rank ends in it.

        `session()` is the current session. `recover(error)` makes a new one and returns whether the call must be repeated.
        """
        self._begin(keeps_gradients=adds_gradients)
        while True:
            try:
                begun = perf_counter()
                result = call()
                self._agree_on_end(session())
                if adds_gradients:
                    self._add_step_time(perf_counter() - begun, session())
                break
            except PipelineError as error:
                if not recover(error):
                    break
                self._restore_gradients()
        self._earlier = {}
        return result

    def _add_step_time(self, seconds: float, session: Session) -> None:
        """Adds the time of a training step. The first survivor warns how much longer steps take, once that is known."""
        self._step_times.add(seconds)
        slowdown = self._step_times.slowdown()
        if slowdown is not None and session.transport.group.is_first:
            _log.warning("%s", slowdown)

    def _begin(self, *, keeps_gradients: bool) -> None:
        """Begins a call, and copies the gradients if the call adds to them."""
        self._num_calls += 1
        self.has_finished_call = False
        gradients = {parameter: self._gradients.get(parameter) for parameter in self._parameters if keeps_gradients}
        self._earlier = {parameter: None if gradient is None else gradient.clone() for parameter, gradient in gradients.items()}

    def _restore_gradients(self) -> None:
        """Restores the gradients from before the call, which is to be repeated."""
        for parameter, gradient in self._earlier.items():
            self._gradients.put(parameter, None if gradient is None else gradient.clone())

    def _agree_on_end(self, session: Session) -> None:
        """Waits until all ranks have finished their part of the call."""
        # Before the exchange: if a rank is lost during it, this one reports that it has nothing left to do.
        self.has_finished_call = True
        with session.guard.during("while ending a call together"), session.transport.collective("ending a call together"):
            session.transport.gather_objects(self._num_calls)

    def recover_from(self, error: PipelineError, before: Session, options: PipelineOptions) -> Session:
        """Returns the session of the survivors after `error` has ended the session `before`, which had these `options`.

        Raises the error if no rank is lost, if this rank itself counts as lost because it was silent for too long, and if too few ranks
        survive. A further rank that does not reach the rendezvous in time is lost, too.
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
        """Counts the `absent` ranks as lost.

        If the others cannot continue without them, raises a `PipelineError` that adds the reasons to `error`.
        """
        lost = self.lost.union(absent)
        why_not = self._why_not_without(lost)
        if why_not:
            they = f"{named('rank', sorted(lost))} {'is' if len(lost) == 1 else 'are'}"
            message = f"{error}; the others cannot continue now that {they} lost (ranks of the mesh): {'; '.join(why_not)}"
            raise PipelineError(message, rank=error.rank, op=error.op) from error
        self.lost = lost

    def _why_not_without(self, lost: frozenset[int]) -> list[str]:
        """Returns why the others cannot continue without these ranks, each reason with its remedy; empty if they can."""
        reasons = []
        if self._store_host in lost:
            reasons.append(
                f"the process of rank {self._store_host} hosted the torch.distributed store, which a new rendezvous needs: "
                "restart from a checkpoint, and run the store in a process of its own"
            )
        try:
            rerouted(self._placement, self._layout.pipelines, lost, 1)
        except InputError as too_many:
            reasons.append(str(too_many))
        replicas = (", ".join(map(str, ranks)) for ranks in self._layout.pipelines if lost.issuperset(ranks))
        remedy = "restart from a checkpoint"
        return reasons + [f"no rank survives of the replica of ranks {ranks}, with its share of the batch: {remedy}" for ranks in replicas]

    def _reconnect(self, options: PipelineOptions, before: Session, error: PipelineError) -> Session:
        """Returns the session of the survivors of `error`, whose session `before` had these `options`."""
        new = self._new_options(options, before)
        session = connect(new, self._layout.without(self.lost, self._processes))
        self._step_times.rank_lost()
        if session.transport.group.is_first:
            slowdown = slowdown_of(self._schedule, self.schedule(0, new.num_microbatches))
            _log.warning(
                "%s; the others continue without it: with equally long passes, steps take %.2f times as long (lower bound %.2f)",
                error,
                *slowdown,
            )
        return replace(session, setup=replace(session.setup, is_cut_model=before.setup.is_cut_model))

    def _new_options(self, options: PipelineOptions, session: Session) -> PipelineOptions:
        """Returns the options of the survivors' pipeline. They keep their modules."""
        modules = [module for _, module in sorted(session.setup.stages.modules.items())]
        count = options.num_microbatches * len(self._layout.pipelines)
        tied = session.setup.tied
        changed = replace(
            options, build_or_modules=modules, schedule=self.schedule, num_microbatches=count, tied=tied, mesh=None, survive=False
        )
        stages, levels = self._recomputed_stages(), session.setup.stages.levels
        return replace(changed, recompute=levels.as_one(sorted(stages))) if stages and levels.given else changed

    def schedule(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """Returns the schedule that the survivors play."""
        schedule = rerouted(self._placement, self._layout.pipelines, self.lost, num_microbatches)
        stages = self._recomputed_stages()
        return with_recompute(schedule, stages) if stages else schedule

    def _recomputed_stages(self) -> set[int]:
        """Returns the stages whose forwards the original schedule recomputes."""
        return {stage for row in self._schedule.rows for stage, _ in recomputed(row)}

    def must_repeat_call(self, session: Session) -> bool:
        """Returns whether this rank must repeat its call, now that the survivors have reconnected. All survivors call it."""
        with session.guard.during("while going on without a rank"), session.transport.collective("going on without a rank"):
            calls = session.transport.gather_objects((self._num_calls, self.has_finished_call))
        newest = max(number for number, _ in calls)
        # A rank in an older call than another has only missed the agreement on its end: the other has returned from it.
        return not self.has_finished_call or (self._num_calls == newest and not all(finished for _, finished in calls))

    def lend(self, step_inputs: StepInputs, num_microbatches: int, session: Session) -> tuple[StepInputs, int]:
        """Returns the batch that the survivors play together, from what this rank was given, and its number of microbatches."""
        if not self.lost:
            return self._lending.own(step_inputs), num_microbatches
        lenders = [next(rank for rank in replica if rank not in self.lost) for replica in self._layout.pipelines]
        whole = self._lending.whole_batch(step_inputs, num_microbatches, lenders, session)
        return whole, num_microbatches * len(lenders)


def _names_that_stages_take(session: Session) -> list[str] | None:
    """Returns the names of arguments that the stages of any rank take, None if one takes every name; all ranks call it."""
    mine = names_of_arguments(session.setup.stages.modules)
    with session.guard.during("while gathering the arguments of stages"), session.transport.collective("gathering arguments of stages"):
        gathered = session.transport.gather_objects(mine)
    return None if None in gathered else sorted({name for names in gathered for name in names})


STEPS_COMPARED = 5
"""The number of steps before and since the loss of a rank whose medians are compared."""


class StepTimes:
    """The seconds that training steps took before a rank was gone, and since."""

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=STEPS_COMPARED)
        self._since: list[float] | None = None

    def rank_lost(self) -> None:
        """Counts the next steps as steps without another rank."""
        self._since = []

    def add(self, seconds: float) -> None:
        """Adds the time of a step."""
        (self._before if self._since is None else self._since).append(seconds)

    def slowdown(self) -> str | None:
        """Describes how much longer steps take, after the one step that completes the measurement; otherwise returns None."""
        # The first step without the rank does not count: it includes making the programs.
        if self._since is None or len(self._since) != STEPS_COMPARED + 1 or not self._before:
            return None
        before, now = median(self._before), median(self._since[1:])
        return f"measured, steps take {now / before:.2f} times as long: {1000 * now:.3g} ms, and {1000 * before:.3g} ms before"
