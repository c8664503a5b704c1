"""What a rank moves to host memory and back beside the steps of its row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from zerobubble.ir import Schedule
from zerobubble.offload import HostLink, Offload, RankOffloads
from zerobubble.offload.copies import LaneCopy, copies_of
from zerobubble.runtime.stage.copy_lane import Copied, lane_for
from zerobubble.runtime.stage.saved_tensors import SavedTensors
from zerobubble.runtime.stage.stage import Stage
from zerobubble.timeline import Copying

Call = Callable[[], object]


class Offloads(NamedTuple):
    """What each rank moves while it plays `schedule`; `link` paces the copies of a rehearsal."""

    schedule: Schedule
    ranks: Sequence[RankOffloads]
    link: HostLink | None


class Offloading:
    """The calls beside each step of a row with these `offloads`, on `stages`, whose tensors are on `device`.

    `records` are the copies of the last step of the pipeline. `note_memory` is called when what is held has changed between two steps.
    """

    def __init__(
        self, offloads: Sequence[Offload], link: HostLink | None, stages: Mapping[int, Stage], device: torch.device, note_memory: Call
    ) -> None:
        self.records: list[tuple[Copying, int, int, Copied]] = []
        self._offloads = offloads
        self._stages = stages
        self._device = device
        self._note_memory = note_memory
        self._saved: dict[tuple[int, int], SavedTensors] = {}
        self._before: dict[int, list[Call]] = defaultdict(list)
        self._after: dict[int, list[Call]] = defaultdict(list)
        if not offloads:
            return
        self._lane = lane_for(device, link)
        copies = copies_of(offloads)
        away = [copy for copy in copies if copy.copying is Copying.TO_HOST]
        back = [copy for copy in copies if copy.copying is Copying.FROM_HOST]
        # Before a step, copies begin in the order of the lane. Those to the host that the step itself waits for are the first of them, and
        # release their memory before copies back take it.
        for copy in away:
            self._after[copy.begins - 1].append(self._call(SavedTensors.choose, copy))
            if copy.needed == copy.begins:
                self._before[copy.begins].append(self._call(SavedTensors.begin_to_host, copy))
        for copy in away:
            self._before[copy.needed].append(self._call(SavedTensors.release, copy))
        for copy in copies:
            if copy.copying is Copying.FROM_HOST:
                self._before[copy.begins].append(self._call(SavedTensors.begin_back, copy))
            elif copy.needed > copy.begins:
                self._before[copy.begins].append(self._call(SavedTensors.begin_to_host, copy))
        for copy in back:
            self._before[copy.needed].append(self._call(SavedTensors.come_back, copy))

    def begin(self) -> None:
        """A step of the pipeline begins, or starts over."""
        self.records = []
        for one in self._offloads:
            saved = self._saved[one.stage, one.microbatch] = SavedTensors(self._device, self._lane)
            self._stages[one.stage].offloaded[one.microbatch] = saved

    def around(self, number: int, call: Call) -> Call:
        """The call of step `number`, with those before and after it."""
        before, after = self._before.get(number, []), self._after.get(number, [])
        if not before and not after:
            return call
        calls = (*before, *([self._note_memory] if before else []), call, *after)

        def run() -> None:
            for each in calls:
                each()

        return run

    def discard(self) -> None:
        """Hold nothing any longer, whatever is being copied."""
        if self._saved:
            self._lane.discard()
            self._saved.clear()

    def _call(self, method: Callable[[SavedTensors], Copied | None], copy: LaneCopy) -> Call:
        """The call of this method for what is copied, which is noted where it begins a copy."""
        _, copying, _, stage, microbatch = copy

        def call() -> None:
            copied = method(self._saved[stage, microbatch])
            if copied is not None:
                self.records.append((copying, stage, microbatch, copied))

        return call
