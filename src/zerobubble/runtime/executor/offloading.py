"""Copies saved tensors to host memory and back around the steps of a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from zerobubble.ir import Schedule
from zerobubble.offload import HostLink, Offload, RankOffloads
from zerobubble.offload.copies import LaneCopy, copies_of
from zerobubble.runtime.executor.row_calls import Call, RowCalls
from zerobubble.runtime.measure.step_records import StepRecords
from zerobubble.runtime.stage.copy_lane import Copied, lane_for
from zerobubble.runtime.stage.saved_tensors import SavedTensors
from zerobubble.runtime.stage.stage import Stage
from zerobubble.timeline import Copying


class Offloads(NamedTuple):
    """The offloads of each rank for `schedule`. In a rehearsal on CPUs, copies are slowed down to the speed of `link`."""

    schedule: Schedule
    ranks: Sequence[RankOffloads]
    link: HostLink | None


class Offloading:
    """The calls around each step of a row with these `offloads`, on `stages`, whose tensors are on `device`.

    `records` gets the copies of each step, and the bytes held before each step at which a copy starts or ends, after these calls.
    """

    def __init__(
        self, offloads: Sequence[Offload], link: HostLink | None, stages: Mapping[int, Stage], device: torch.device, records: StepRecords
    ) -> None:
        self._records = records
        self._offloads = offloads
        self._stages = stages
        self._device = device
        self._saved: dict[tuple[int, int], SavedTensors] = {}
        self.calls = RowCalls()
        if not offloads:
            return
        self._lane = lane_for(device, link)
        copies = copies_of(offloads)
        away = [copy for copy in copies if copy.copying is Copying.TO_HOST]
        back = [copy for copy in copies if copy.copying is Copying.FROM_HOST]
        # Before a step, copies begin in the order of the lane. Those to the host that the step itself waits for are the first of them, and
        # release their memory before copies back allocate theirs.
        for copy in away:
            self.calls.after[copy.earliest - 1].append(self._call(SavedTensors.choose, copy))
            if copy.needed == copy.earliest:
                self.calls.before[copy.earliest].append(self._call(SavedTensors.begin_to_host, copy))
        for copy in away:
            self.calls.before[copy.needed].append(self._call(SavedTensors.release, copy))
        for copy in copies:
            if copy.copying is Copying.FROM_HOST:
                self.calls.before[copy.earliest].append(self._call(SavedTensors.begin_back, copy))
            elif copy.needed > copy.earliest:
                self.calls.before[copy.earliest].append(self._call(SavedTensors.begin_to_host, copy))
        for copy in back:
            self.calls.before[copy.needed].append(self._call(SavedTensors.come_back, copy))
        for calls in self.calls.before.values():
            calls.append(records.note_memory)

    def begin(self) -> None:
        """Begins or restarts a step of the pipeline."""
        for offload in self._offloads:
            saved = self._saved[offload.stage, offload.microbatch] = SavedTensors(self._device, self._lane)
            self._stages[offload.stage].offloaded[offload.microbatch] = saved

    def discard(self) -> None:
        """Drops all offloads, including copies in flight."""
        if self._saved:
            self._lane.discard()
            self._saved.clear()

    def _call(self, method: Callable[[SavedTensors], Copied | None], copy: LaneCopy) -> Call:
        """Returns a call of this method for one copy, which is recorded if the call starts it."""
        stage, microbatch, copying = copy.stage, copy.microbatch, copy.copying

        def call() -> None:
            copied = method(self._saved[stage, microbatch])
            if copied is not None:
                self._records.copies.append((copying, stage, microbatch, copied))

        return call
