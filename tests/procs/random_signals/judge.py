"""What a case should have come to, and what it did: a row with every fault, by whose seed the case can be played again."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from tests.procs.models import batch, build, one_device
from tests.procs.patience import STANDSTILL_S, TIMING
from tests.procs.random_signals import case as cases
from tests.procs.random_signals.case import Case
from tests.procs.random_signals.script import MAX_NORM
from tests.procs.random_signals.world import Evidence

REPORTED_S = 10.0 + TIMING.answer_s + TIMING.silence_s
"""How far beyond the timeout a rank may learn of a failure of another: it asks the others and the store."""
SILENCE_S = 1.0
"""How much longer still, if a rank must detect by itself that the store is silent, too."""
ENDING_S = 12.0
"""How long a process may take to end after its last entry: it stays until the others have its report."""
WORK_S = 0.5
"""About the processor time that a rank needs to get a report, publish one and close; where others want the processors, it takes longer."""

OF_TORCH = (cases.START, cases.MEET, cases.END)
"""Calls in which no pipeline is made: what torch says then, and when, is its own."""


class Report(NamedTuple):
    """The error that ended a rank: when and in which call it was raised, when that call began, its type, text and rank."""

    time: float
    call: int
    began: float
    kind: str
    text: str
    rank: int | None


@dataclass(frozen=True)
class Row:
    """How a case ended.

    `moment` is what the victim did when the deed was done, `blamed` the rank that most reports name, `seconds` the longest that one took to
    hear of it, `slowdown` what `Load` saw meanwhile. Where there are no `faults`, all is right. What is `outside` is wrong, too, but by the
    evidence the machine kept a rank from running for as long: such a case has to be played again.
    """

    case: Case
    moment: str
    blamed: int | None
    seconds: float
    slowdown: float
    faults: tuple[str, ...]
    outside: tuple[str, ...]
    texts: tuple[str, ...]

    def __str__(self) -> str:
        outside = [f"the machine's: {fault}" for fault in self.outside]
        verdict = "; ".join([*self.faults, *outside]) or "right"
        named = "nobody" if self.blamed is None else f"rank {self.blamed}"
        heard = f"{named} blamed in {self.seconds:.1f} s (load {self.slowdown:.1f})"
        return f"seed {self.case.seed}: {self.case} | {self.moment} | {heard} | {verdict}"


class Load:
    """How much longer than on a quiet machine work takes now: a thread that works a little, again and again, and looks at the clock."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            began, worked = time.monotonic(), time.thread_time()
            while time.thread_time() - worked < 0.004:
                pass
            self._seen.append((began, (time.monotonic() - began) / 0.004))

    def between(self, begin: float, end: float) -> float:
        """The mean between two times, 1 on a quiet machine."""
        seen = [slowdown for at, slowdown in self._seen if begin - 0.5 <= at <= end + 0.5]
        return max(1.0, sum(seen) / len(seen)) if seen else 1.0

    def close(self) -> None:
        """Stop watching."""
        self._over.set()


def judged(case: Case, evidence: Evidence, load: Load) -> Row:
    """The row of a case."""
    return _Judge(case, evidence, load).row()


def _did_not_call(message: Report) -> set[int | None]:
    """The ranks that are named where several did not call Pipeline(...): one that stands still may keep another in its own call."""
    named = re.match(r"ranks ([\d, ]+and \d+) did not call Pipeline", message.text) if message.rank is None else None
    return {int(rank) for rank in re.findall(r"\d+", named[1])} if named else set()


class _Judge:
    """Goes through the evidence of one case."""

    def __init__(self, case: Case, evidence: Evidence, load: Load) -> None:
        self.case = case
        self.evidence = evidence
        self.load = load
        self.living = [rank for rank in range(case.ranks) if rank != case.victim or case.deed == cases.CUT]
        self.reports = {rank: self._report_of(rank) for rank in range(case.ranks)}
        self.faults: list[str] = []
        self.outside: list[str] = []
        self.seconds = 0.0

    def row(self) -> Row:
        for rank in self.living:
            self._judge_living(rank)
        self._judge_victim()
        self._judge_texts()
        self._judge_numbers()
        self._judge_going_on()
        self.faults += [f"left the file {name}" for name in self.evidence.files]
        self.faults += [f"left the process {name}" for name in self.evidence.processes]
        named = [message.rank for rank, message in self.reports.items() if message is not None and rank in self.living]
        heard = max((message.time for message in self.reports.values() if message), default=self.evidence.deed or 0.0)
        slowdown = self.load.between(self.evidence.deed or heard, heard)
        texts = tuple(f"rank {rank}: {message.kind}: {message.text}" for rank, message in self.reports.items() if message)
        blamed = max(set(named), key=named.count, default=None)
        return Row(self.case, self._moment(), blamed, self.seconds, slowdown, tuple(self.faults), tuple(self.outside), texts)

    def _add(self, fault: str, is_outside: bool) -> None:
        (self.outside if is_outside else self.faults).append(fault)

    def _waited(self, begin: float, end: float) -> float:
        """The longest that a thread of any rank waited for a processor between two times."""
        return max(self.evidence.delays.between(begin, end).values())

    def _blames_one_kept_waiting(self, message: Report) -> bool:
        """Whether the rank that is named, or the one that names it, was kept from the processors for as long as one that stands still."""
        waited = self.evidence.delays.between(min(self._deed(), message.began), message.time)
        named = [waited.get(message.rank, 0.0)] if message.rank is not None else []
        return max([*named, *(waited[rank] for rank, report in self.reports.items() if report is message)]) >= STANDSTILL_S

    def _report_of(self, rank: int) -> Report | None:
        began = 0.0
        for entry in self.evidence.diaries[rank]:
            if entry.what == "begin":
                began = entry.time
            if entry.what == "reported":
                kind, text, culprit = entry.said
                named = re.match(r"rank (\d+): ", text) if kind == "InputError" else None
                return Report(entry.time, entry.call, began, kind, text, int(named[1]) if named else culprit)
        return None

    def _moment(self) -> str:
        """The victim's action at the time of the fault."""
        if self.evidence.deed is None:
            return "the deed was never done"
        before = [entry for entry in self.evidence.diaries[self.case.victim] if entry.time <= self.evidence.deed]
        if not before:
            return "before its first call"
        last = next((entry for entry in reversed(before) if entry.what in ("begin", "end")), before[-1])
        return f"{'in' if last.what == 'begin' else 'after'} {self.case.calls[last.call]} (call {last.call})"

    def _is_harmless(self) -> bool:
        """Whether all should have gone on as if nothing had happened."""
        return self.evidence.deed is None or self.case.deed == cases.PAUSE

    def _last_call_together(self) -> int:
        return max(number for number, name in enumerate(self.case.calls) if name in cases.TOGETHER)

    def _victim_was_done(self) -> bool:
        """Whether the victim had at least begun the last call that the others needed it for."""
        begun = [entry.call for entry in self.evidence.diaries[self.case.victim] if entry.what == "begin" and entry.time <= self._deed()]
        return max(begin for begin in (*begun, -1)) >= self._last_call_together()

    def _woke_while_meeting(self) -> bool:
        """Whether the victim was woken while the others still waited in torch for it to come."""
        return self.case.deed == cases.WAKE and self._call_of_victim() in (cases.START, cases.MEET)

    def _call_of_victim(self) -> str:
        """The last call that the victim had begun when the deed was done."""
        begun = [entry.call for entry in self.evidence.diaries[self.case.victim] if entry.what == "begin" and entry.time <= self._deed()]
        return self.case.calls[begun[-1]] if begun else cases.START

    def _deed(self) -> float:
        return self.evidence.deed if self.evidence.deed is not None else float("inf")

    def _judge_living(self, rank: int) -> None:
        found, code = self.reports[rank], self.evidence.codes[rank]
        if self._waits_in_torch(rank):
            return
        doing = self._doing(rank)
        if code is None:
            self.faults.append(f"rank {rank} hangs in {doing}" if found is None else f"rank {rank} hangs after the report")
        elif found is None:
            if code:
                self.faults.append(f"rank {rank} ended with code {code} and said nothing")
            elif not self._is_harmless() and not self._need_not_hear():
                self.faults.append(f"rank {rank} heard of nothing")
        elif self._is_harmless() and self.case.calls[found.call] in OF_TORCH:
            pass  # on a busy machine torch's own waits may be too short
        elif self._is_harmless():
            fault = f"rank {rank} got a report although nothing had happened: {found.kind}: {found.text}"
            self._add(fault, self._blames_one_kept_waiting(found))
        else:
            self._judge_report(rank, found)
        self._judge_ending(rank)

    def _need_not_hear(self) -> bool:
        """Whether all that live may come to the end of their training, which they do with the right numbers."""
        return self.case.survives or self._victim_was_done() or self._woke_while_meeting()

    def _doing(self, rank: int) -> str:
        """The call that `rank` was in when it was last heard of."""
        entries = self.evidence.diaries[rank]
        return self.case.calls[entries[-1].call] if entries else cases.START

    def _waits_in_torch(self, rank: int) -> bool:
        """Whether `rank` still runs, in a call of torch's, which waits for as long as it likes."""
        return self.evidence.codes[rank] is None and self.reports[rank] is None and self._doing(rank) in OF_TORCH

    def _judge_report(self, rank: int, message: Report) -> None:
        call = self.case.calls[message.call]
        if call in OF_TORCH or self._is_torn(message):  # torch's own errors name no rank
            return
        took = message.time - max(self._deed(), message.began)
        self.seconds = max(self.seconds, took)
        silence = SILENCE_S * (self.case.deed == cases.CUT)
        allowed = self.case.timeout + REPORTED_S + silence + WORK_S * self.load.between(self._deed(), message.time)
        if took > allowed:
            is_outside = self._waited(max(self._deed(), message.began), message.time) >= took - allowed
            self._add(f"rank {rank} got the report after {took:.1f} s, more than {allowed:.1f}", is_outside)
        if message.kind not in ("PipelineError", "InputError"):
            self.faults.append(f"rank {rank} raised {message.kind}: {message.text}")
        elif not self.case.culprits(rank) & {message.rank, *_did_not_call(message)}:
            fault = f"rank {rank} blames {'nobody' if message.rank is None else f'rank {message.rank}'} in {call}: {message.text}"
            self._add(fault, self._blames_one_kept_waiting(message))

    def _is_torn(self, message: Report) -> bool:
        """Whether the victim was struck while it wrote to the file that is the store, or held its lock: torch waits for ever."""
        return bool(self.evidence.store) and "the torch.distributed store does not answer" in message.text

    def _judge_ending(self, rank: int) -> None:
        """After its last word a process ends soon."""
        entries = self.evidence.diaries[rank]
        if self.evidence.codes[rank] is None or not entries:
            return
        took = self.evidence.ended[rank] - entries[-1].time
        excess = took - ENDING_S - WORK_S * self.load.between(entries[-1].time, self.evidence.ended[rank])
        if excess > 0:
            self._add(f"rank {rank} took {took:.1f} s to end", self._waited(entries[-1].time, self.evidence.ended[rank]) >= excess)

    def _judge_victim(self) -> None:
        """A victim that goes on raises the same error as the others, and one that gets SIGTERM ends."""
        victim, deed = self.case.victim, self.case.deed
        found, code = self.reports[victim], self.evidence.codes[victim]
        if deed == cases.CUT:
            return
        if self._is_harmless():
            self._judge_living(victim)
        elif code is None and deed != cases.FREEZE and not self._waits_in_torch(victim):
            self.faults.append(f"the victim, rank {victim}, hangs")
        elif deed == cases.WAKE and found is not None and self.case.calls[found.call] not in OF_TORCH:
            alone = self.case.store == "rank 0"  # the store is gone with its process, which ended on its signal
            if found.rank != victim and not (alone and found.rank in (None, 0)):
                self._add(f"the woken rank {victim} blames {found.rank}: {found.kind}: {found.text}", self._blames_one_kept_waiting(found))
        elif deed == cases.RAISE and found is None:
            self.faults.append(f"the victim, rank {victim}, heard nothing of its own error")
        elif deed in (cases.LEAVE, cases.INTERRUPT) and found is not None:
            wanted = "SystemExit" if deed == cases.LEAVE else "KeyboardInterrupt"
            if found.kind != wanted:
                self.faults.append(f"the victim, rank {victim}, raised {found.kind} where it should have raised {wanted}: {found.text}")
        elif deed == cases.TERMINATE and code is not None and code >= 0 and not self._victim_was_done():
            self.faults.append(f"the victim, rank {victim}, ended with code {code} at SIGTERM")

    def _judge_texts(self) -> None:
        """All living ranks of one pipeline raise the same error."""
        if self._is_harmless():
            return
        victims = {cases.RAISE, cases.CUT, *({cases.WAKE} if self.case.store != "rank 0" else ())}
        heard = [rank for rank in self.living if rank != self.case.victim] + [self.case.victim] * (self.case.deed in victims)
        texts: dict[tuple[int, int], set[str]] = {}
        for rank in heard:
            found = self.reports[rank]
            if found is not None and found.kind in ("PipelineError", "InputError") and not self._is_excused(rank, found):
                side = self.case.hosts[rank] if self._are_hosts_cut_off() else 0
                texts.setdefault((self.case.calls[: found.call + 1].count(cases.MAKE), side), set()).add(found.text)
        for different in texts.values():
            if len(different) > 1:
                self.faults.append(f"unequal texts: {' / '.join(sorted(different))}")

    def _is_excused(self, rank: int, message: Report) -> bool:
        """Whether a rank names another than the culprit, and by the evidence the machine is to blame for that."""
        is_right = self.case.culprits(rank) & {message.rank, *_did_not_call(message)}
        return not is_right and self._blames_one_kept_waiting(message)

    def _are_hosts_cut_off(self) -> bool:
        """Whether hosts cannot reach each other: the cable is cut, or the process with the store is gone."""
        return bool(self.case.hosts) and (self.case.deed == cases.CUT or self.case.victim == 0)

    def _judge_numbers(self) -> None:
        for rank, entries in enumerate(self.evidence.diaries):
            for entry in entries:
                if entry.what == "loss":
                    num_stages, step, loss = entry.said
                    expected = expected_losses(num_stages, self.case.num_microbatches)[step]
                    if not abs(loss - expected) < 1e-9:
                        self.faults.append(f"rank {rank} has the loss {loss} in step {step} instead of {expected}")

    def _judge_going_on(self) -> None:
        for rank, entries in enumerate(self.evidence.diaries):
            for entry in entries:
                if entry.what == "reported again":
                    self.faults.append(f"rank {rank} cannot go on with a new pipeline: {json.dumps(entry.said)}")


def expected_losses(num_stages: int, num_microbatches: int) -> list[float]:
    """The loss of each step on one device."""
    with _ONE_AT_A_TIME:
        return _losses_on_one_device(num_stages, num_microbatches)


_ONE_AT_A_TIME = threading.Lock()
"""Models are made from torch's one random state."""


@cache
def _losses_on_one_device(num_stages: int, num_microbatches: int) -> list[float]:
    modules = [build(stage, num_stages) for stage in range(num_stages)]
    optimizer = torch.optim.SGD(nn.ModuleList(modules).parameters(), lr=0.1)
    losses = []
    for step in range(12):
        losses.append(one_device(modules, num_microbatches, *batch(num_microbatches, step)).item())
        nn.utils.clip_grad_norm_(nn.ModuleList(modules).parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses
