"""NCCL's rules: every program completes under them, and the model finds deadlocks exactly where a simple simulator does.

Steps of all schedules finish, with known shapes and announced ones, with tied gradients and replicas, and with the communicators that the
runtime creates. One communicator serves each direction between two ranks. What `program_faults` accepts never fails over NCCL.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.problems import schedules
from tests.pure.shapes import EVERY, grid
from tests.thinned import every, every_and_all
from zerobubble import Program, Schedule, lower, make
from zerobubble.cli import main
from zerobubble.communicators import (
    CHANNELS,
    MOST_BLOCKS,
    SUMS_CHANNELS,
    USUAL_QUEUES,
    Communicator,
    Devices,
    Instruction,
    Launch,
    NcclOperation,
    Purpose,
    Synchronize,
    Wait,
    announced_launches,
    channels_for,
    communicators_of,
    held_by,
    launches,
    opening_launches,
    play,
    queues_for,
)
from zerobubble.lowering import program_faults
from zerobubble.lowering.rollback import with_rollback_points
from zerobubble.program import Compute, Free, Recv, Send
from zerobubble.schedules import with_vocabulary

Rows = Sequence[Sequence[Instruction]]
SIZES = [(2, 3), (3, 3), (4, 4), (4, 8), (5, 6)]
WITH_HEADS = ["1f1b", "zb-h1", "1f1b-v", "interleaved-1f1b"]


def messages(program: Program) -> list[Communicator]:
    """The communicators of a program."""
    return communicators_of(channel for _, _, channel, _ in program.channels())


def in_order(*parts: Rows) -> list[list[Instruction]]:
    """Rows that do one part after the other."""
    return [[each for row in rows for each in row] for rows in zip(*parts, strict=True)]


def failed(rows: Rows) -> tuple[Any, ...]:
    """What goes wrong; empty if everything ends."""
    devices = Devices(rows).run()
    return (*devices.mismatches, *devices.stuck)


def opened(*parts: Rows) -> list[list[Instruction]]:
    """The rows one after the other, after the first messages of their communicators but those of sums."""
    found = {each.communicator for rows in parts for row in rows for each in row if isinstance(each, Launch)}
    return in_order(opening_launches((each for each in found if each.purpose is not Purpose.SUMS), len(parts[0])), *parts)


def played(program: Program) -> tuple[Any, ...]:
    """What goes wrong when a pipeline runs the program with as many hardware queues as it needs; empty if everything ends."""
    devices = play(program, queues_for(messages(program)))
    return (*devices.mismatches, *devices.stuck)


@every_and_all(7)
@pytest.mark.parametrize(("name", "stages_per_rank"), EVERY)
def test_every_schedule_finishes(name: str, stages_per_rank: int, nth: int) -> None:
    for ranks, microbatches in grid(name, stages_per_rank, SIZES)[::nth]:
        schedule = make(name, ranks, microbatches, stages_per_rank=stages_per_rank)
        for one in (schedule, schedule.forward_only()):
            program = lower(one)
            assert played(program) == ()
            directions = [each.members for each in messages(program)]
            assert len(directions) == len(set(directions))


@pytest.mark.parametrize("name", WITH_HEADS)
def test_schedules_with_divided_heads_finish(name: str) -> None:
    program = lower(with_vocabulary(make(name, 4, 8)))
    assert played(program) == ()
    assert len(messages(program)) == 4 * 3


@every_and_all(7)
@pytest.mark.parametrize(("name", "stages_per_rank"), EVERY)
def test_streams_that_share_a_hardware_queue_stop_a_step(name: str, stages_per_rank: int, nth: int) -> None:
    """A receive that is posted ahead cannot start before the one before it has ended, and keeps the passes that this one needs back."""
    for ranks, microbatches in grid(name, stages_per_rank, SIZES)[::nth]:
        schedule = make(name, ranks, microbatches, stages_per_rank=stages_per_rank)
        if not schedule.is_forward_only:
            stuck = play(lower(schedule), 1).stuck
            assert [each.rank for each in stuck] == list(range(ranks))
            assert all(each.waits[-1] in each.waits[:-1] for each in stuck)


def test_divided_heads_need_more_hardware_queues_than_usual() -> None:
    program = lower(with_vocabulary(make("1f1b", 6, 12)))
    needed = queues_for(messages(program))
    assert needed == 2 * 5 + 2 > USUAL_QUEUES
    assert play(program, USUAL_QUEUES).stuck
    assert not play(program, needed).stuck
    assert [queues_for(messages(lower(make(name, 4, 8)))) for name in ("1f1b", "zb-v", "dualpipe")] == [6, 6, 6]


def synchronized(rows: Rows, rank: int, passes: Sequence[int]) -> list[list[Instruction]]:
    """Rows in which the host of a rank waits for its device before some of its passes; number -1 is after the last one."""
    found = [list(row) for row in rows]
    places = [at for at, each in enumerate(rows[rank]) if isinstance(each, Wait) and not each.on_host]
    for at in sorted((places[number] + (number == -1) for number in passes), reverse=True):
        found[rank].insert(at, Synchronize())
    return found


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "chimera", "dualpipe", "dualpipe-v"])
def test_memory_is_returned_to_the_device_between_steps_only(name: str) -> None:
    """Within a step a receive that was posted ahead may need a pass that the host has not launched."""
    schedule = make(name, 4, 8)
    rows, without_ahead = (opened(launches(lower(schedule, prefetch))) for prefetch in (1, 0))
    everywhere = range(sum(isinstance(each, Wait) for each in rows[0]))
    assert failed(synchronized(rows, 0, everywhere)) != ()
    assert failed(synchronized(without_ahead, 0, range(sum(isinstance(each, Wait) for each in without_ahead[0])))) == ()
    ended = rows
    for rank in range(4):
        ended = synchronized(ended, rank, [-1])
    assert failed(in_order(ended, launches(lower(schedule)))) == ()


@pytest.mark.long
@given(schedules(), st.integers(0, 3))
def test_random_schedules_finish(schedule: Schedule, prefetch: int) -> None:
    program = lower(schedule, prefetch)
    assert played(program) == ()
    if not schedule.is_forward_only:
        assert failed(opened(launches(with_rollback_points(program)[0]))) == ()


def with_sums(program: Program, rows: Rows, replicas: int, of: Sequence[Sequence[int]] = ()) -> list[list[Instruction]]:
    """Rows of several pipelines that sum the gradients of each stage over replicas once complete, and of tied stages `of` a pipeline.

    Each rank sends tied gradients when its last stage is complete, in one order, and receives those of others at the end of the step.
    """
    ranks, placement = program.num_ranks, program.placement
    found: list[list[Instruction]] = []
    for replica in range(replicas):
        for rank, row in enumerate(rows):
            waits = [at for at, each in enumerate(row) if isinstance(each, Wait) and not each.on_host]
            actions = [action for action in program.rows[rank] if isinstance(action, (Compute, Free))]
            passes = [(at, action) for at, action in zip(waits, actions, strict=True) if isinstance(action, Compute)]
            last = {op.stage: at for at, action in passes for op in action.step}
            after: dict[int, list[Instruction]] = defaultdict(list)
            end: list[Instruction] = []
            sent, earliest = [], 0
            for group in of:
                holders = sorted({route[stage] for stage in group for route in placement.routes})
                mine = [last[stage] for stage in group if stage in last]
                if not mine:
                    continue
                earliest = max(earliest, *mine)
                for other in (other for other in holders if other != rank):
                    sent.append(NcclOperation((rank, other), f"gradients of {group}"))
                    after[earliest].append(Launch(Communicator((rank, other), Purpose.SHARED), (sent[-1],)))
                    received = NcclOperation((other, rank), f"gradients of {group}")
                    end += [Launch(Communicator((other, rank), Purpose.SHARED), (received,)), Wait((received,))]
            end.append(Wait(tuple(sent)))
            members = tuple(range(rank, ranks * replicas, ranks))
            sums = [NcclOperation(members, f"gradients of {stage}") for stage in sorted(last, key=lambda stage: last[stage])]
            for exchange, at in zip(sums, sorted(last.values()), strict=True):
                after[at].append(Launch(Communicator(members, Purpose.SUMS), (exchange,)))
            whole = [each for at, own in enumerate(row) for each in (own, *after[at])] + end + [Wait(tuple(sums))]
            found.append([_moved(each, ranks * replica, ranks) for each in whole])
    return found


def _moved(instruction: Instruction, by: int, ranks: int) -> Instruction:
    """The instruction of a rank in another pipeline; sums have the ranks of all."""

    def moved(exchange: NcclOperation) -> NcclOperation:
        apart = len(exchange.ranks) == 2 and max(exchange.ranks) < ranks
        return replace_ranks(exchange, tuple(rank + by for rank in exchange.ranks)) if apart else exchange

    if isinstance(instruction, Wait):
        return Wait(tuple(map(moved, instruction.exchanges)), instruction.on_host)
    assert isinstance(instruction, Launch)
    communicator, exchanges = instruction
    if communicator.purpose is not Purpose.SUMS:
        communicator = communicator._replace(members=tuple(rank + by for rank in communicator.members))
    return Launch(communicator, tuple(map(moved, exchanges)))


def replace_ranks(exchange: NcclOperation, ranks: tuple[int, ...]) -> NcclOperation:
    return exchange._replace(ranks=ranks)


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zb-v", "interleaved-1f1b", "chimera", "dualpipe", "dualpipe-v"])
@pytest.mark.parametrize("rows_of", [launches, announced_launches])
def test_tied_gradients_and_replicas_finish(name: str, rows_of: Any) -> None:
    program = lower(make(name, 4, 8))
    routes = program.placement.routes
    copied = [(stage,) for stage in range(program.num_stages) if len({route[stage] for route in routes}) > 1]
    tied = [(0, program.num_stages - 1), (1, 2, program.num_stages - 2)]
    for of in (tied, copied, [*tied, *copied]):
        rows = with_sums(program, rows_of(program), 3, of)
        assert failed(opened(rows)) == ()
        used = {
            each.communicator for row in rows for each in row if isinstance(each, Launch) and each.communicator.purpose is not Purpose.SUMS
        }
        assert max(Counter(each.members for each in used).values()) <= 2


def test_creating_communicators_in_the_order_of_a_schedule_is_a_circle() -> None:
    program = lower(with_vocabulary(make("1f1b", 4, 8)))
    stuck = Devices(launches(program)).run().stuck
    assert [each.rank for each in stuck] == [0, 1, 2, 3]
    assert all(each.waits[-1] in each.waits[:-1] for each in stuck)
    assert {what for each in stuck for _, what in each.waits} <= set(map(str, messages(program)))


def on_one_communicator(program: Program, grouped: bool) -> list[list[Instruction]]:
    """The launches of a program with one communicator for both directions between two ranks, and groups for what is launched together."""
    found = []
    for row in launches(program):
        own: list[Instruction] = []
        for each in row:
            if isinstance(each, Launch):
                each = Launch(Communicator(tuple(sorted(each.communicator.members))), each.exchanges)
                before = own[-1] if own else None
                if grouped and isinstance(before, Launch) and before.communicator == each.communicator:
                    own[-1] = Launch(each.communicator, (*before.exchanges, *each.exchanges))
                    continue
            own.append(each)
        found.append(own)
    return found


def test_one_communicator_for_both_directions_needs_groups() -> None:
    """Two ranks that send to each other first deadlock on one communicator, unless each sends and receives in a group."""
    both = Communicator((0, 1))
    there, back = NcclOperation((0, 1), "there"), NcclOperation((1, 0), "back")
    apart = [[Launch(both, (there,)), Launch(both, (back,))], [Launch(both, (back,)), Launch(both, (there,))]]
    stuck = Devices(apart).run().stuck
    assert [each.rank for each in stuck] == [0, 1]
    assert all(each.waits[-1] in each.waits[:-1] for each in stuck)
    assert {what for each in stuck for _, what in each.waits} == {"there", "back"}
    assert failed([[Launch(both, (there, back))], [Launch(both, (back, there))]]) == ()
    assert failed([[Launch(both, (there, back))], [Launch(both, (there,)), Launch(both, (back,))]]) == ()


def test_a_v_schedule_cannot_share_one_communicator_for_both_directions() -> None:
    program = lower(make("zb-v", 3, 6))
    assert failed(opened(on_one_communicator(program, grouped=False))) != ()
    assert failed(opened(on_one_communicator(program, grouped=True))) != (), "receives are posted ahead, so groups do not match"


class Wild:
    """A second simulator, which takes any event that can happen next. Kernels take thread blocks, and a pass needs one."""

    def __init__(self, rows: Rows, blocks: int | None = None, channels: int = 1, queues: int | None = None) -> None:
        self.rows, self.blocks, self.channels, self.queues = rows, blocks, channels, queues
        self.ranks = range(len(rows))
        self.host, self.stream = [0 for _ in rows], [0 for _ in rows]
        self.begun: list[list[int]] = [[] for _ in rows]
        self.over: list[set[int]] = [set() for _ in rows]

    def exists(self, communicator: Communicator) -> bool:
        return all(
            any(isinstance(each, Launch) and each.communicator == communicator for each in self.rows[rank][: self.host[rank] + 1])
            for rank in communicator.members
        )

    def waits(self, rank: int, wait: Wait) -> bool:
        mine = [at for at, each in enumerate(self.rows[rank]) if isinstance(each, Launch) and set(each.exchanges) & set(wait.exchanges)]
        known = {exchange for at in mine for exchange in self.rows[rank][at].exchanges}
        return not set(wait.exchanges) <= known or any(at not in self.over[rank] for at in mine)

    def exchanges(self, rank: int, communicator: Communicator, ranks: tuple[int, ...]) -> list[int]:
        """The kernels that have begun at a rank, one for each exchange among these ranks, in order."""
        found = []
        for at in self.begun[rank]:
            launch = self.rows[rank][at]
            if isinstance(launch, Launch) and launch.communicator == communicator:
                found += [at for each in launch.exchanges if each.ranks == ranks]
        return found

    def queue(self, rank: int, launch: Launch) -> int | None:
        """The hardware queue of a kernel, None if it has one of its own; the compute stream has number 0."""
        streams = list(dict.fromkeys(each.communicator for each in self.rows[rank] if isinstance(each, Launch)))
        return None if self.queues is None else (streams.index(launch.communicator) + 1) % self.queues

    def is_first(self, rank: int, at: int, queue: int | None) -> bool:
        """Whether everything that was launched before in this queue has started."""
        before = [(k, each) for k, each in enumerate(self.rows[rank][:at]) if isinstance(each, Launch)]
        return queue is None or all(k in self.begun[rank] for k, each in before if self.queue(rank, each) == queue)

    def is_idle(self, rank: int) -> bool:
        """Whether a device has done everything that was launched."""
        launched = [at for at in range(self.host[rank]) if isinstance(self.rows[rank][at], Launch)]
        return self.stream[rank] == self.host[rank] and self.over[rank].issuperset(launched)

    def ends(self, rank: int, at: int) -> bool:
        launch = self.rows[rank][at]
        assert isinstance(launch, Launch)
        for ranks in {each.ranks for each in launch.exchanges}:
            last = max(k for k, kernel in enumerate(self.exchanges(rank, launch.communicator, ranks)) if kernel == at)
            if any(len(self.exchanges(other, launch.communicator, ranks)) <= last for other in ranks):
                return False
        return True

    def events(self) -> Iterable[tuple[str, int, int]]:
        for rank in self.ranks:
            row, host, stream = self.rows[rank], self.host[rank], self.stream[rank]
            running = [at for at in self.begun[rank] if at not in self.over[rank]]
            free = self.blocks is None or self.blocks - len(running) * self.channels
            if host < len(row):
                each = row[host]
                if isinstance(each, Wait):
                    goes_on = not (each.on_host and self.waits(rank, each))
                else:
                    goes_on = self.exists(each.communicator) if isinstance(each, Launch) else self.is_idle(rank)
                if goes_on:
                    yield "host", rank, host
            if stream < host and self.is_first(rank, stream, None if self.queues is None else 0):
                each = row[stream]
                if not isinstance(each, Wait) or (not self.waits(rank, each) and free):
                    yield "stream", rank, stream
            for at in range(stream):
                each = row[at]
                if isinstance(each, Launch) and at not in self.begun[rank] and self.is_first(rank, at, self.queue(rank, each)):
                    before = [k for k in range(at) if isinstance(row[k], Launch) and row[k].communicator == each.communicator]
                    if self.over[rank].issuperset(before) and (free is True or free >= self.channels):
                        yield "begin", rank, at
            for at in running:
                if self.ends(rank, at):
                    yield "end", rank, at

    def finishes(self, choose: random.Random) -> bool:
        while events := list(self.events()):
            what, rank, at = choose.choice(events)
            if what == "host":
                self.host[rank] += 1
            elif what == "stream":
                self.stream[rank] += 1
            elif what == "begin":
                self.begun[rank].append(at)
            else:
                self.over[rank].add(at)
        kernels = [sum(isinstance(each, Launch) for each in row) for row in self.rows]
        return self.stream == list(map(len, self.rows)) and kernels == list(map(len, self.over))


def random_rows(chance: random.Random) -> list[list[Instruction]]:
    """Exchanges among three ranks on a few communicators, of which some are launched in groups, out of order, or never."""
    ranks = 3
    kinds = [Communicator((a, b)) for a, b in ((0, 1), (1, 0), (1, 2), (2, 0))] + [Communicator((0, 1), Purpose.SHARED)]
    rows: list[list[Instruction]] = [[] for _ in range(ranks)]
    kinds = [*chance.sample(kinds, 3), Communicator((0, 1, 2), Purpose.SUMS)]
    for number in range(chance.randint(2, 5)):
        communicator = chance.choice(kinds)
        members = communicator.members
        among = members if len(members) > 2 or chance.random() < 0.6 else members[::-1]
        exchange = NcclOperation(among, f"x{number}")
        for rank in members:
            row = rows[rank]
            place = len(row) if chance.random() < 0.7 else chance.randint(0, len(row))
            before = row[place - 1] if place else None
            if isinstance(before, Launch) and before.communicator == communicator and chance.random() < 0.5:
                row[place - 1] = Launch(communicator, (*before.exchanges, exchange))
            else:
                row.insert(place, Launch(communicator, (exchange,)))
            if chance.random() < 0.5:
                row.append(Wait((exchange,), on_host=chance.random() < 0.3))
    if chance.random() < 0.3:
        row = chance.choice(rows)
        row.insert(chance.randint(0, len(row)), Synchronize())
    return rows


def test_the_model_and_a_simple_simulator_agree() -> None:
    outcomes = []
    for seed in range(400):
        rows = random_rows(random.Random(seed))
        finishes = not Devices(rows).run().stuck
        assert {Wild(rows).finishes(random.Random(order)) for order in range(3)} == {finishes}, rows
        outcomes.append(finishes)
    assert 80 < sum(outcomes) < 320


def crossing_rows(chance: random.Random) -> list[list[Instruction]]:
    """Messages of two ranks on three communicators, each in one order, though the ranks launch those of different ones in other orders."""
    kinds = [Communicator((0, 1)), Communicator((1, 0)), Communicator((0, 1), Purpose.SHARED)]
    exchanges = [[NcclOperation(each.members, f"{each.purpose} {number}") for number in range(chance.randint(1, 3))] for each in kinds]
    places = [place for place, own in enumerate(exchanges) for _ in own]
    rows: list[list[Instruction]] = [[], []]
    for row in rows:
        left = [iter(own) for own in exchanges]
        for place in chance.sample(places, len(places)):
            exchange = next(left[place])
            row.append(Launch(kinds[place], (exchange,)))
            row += [Wait((exchange,))] * (chance.random() < 0.2)
    return opened(rows)


def test_the_model_and_the_simulator_agree_on_hardware_queues() -> None:
    outcomes = Counter[tuple[bool, bool]]()
    for seed in range(200):
        rows = crossing_rows(random.Random(seed))
        queues = 1 + seed % 3
        finishes = not Devices(rows, queues).run().stuck
        assert {Wild(rows, queues=queues).finishes(random.Random(order)) for order in range(2)} == {finishes}, rows
        outcomes[not Devices(rows).run().stuck, finishes] += 1
    assert min(outcomes[True, True], outcomes[True, False], outcomes[False, False]) > 10
    assert not outcomes[False, True]


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_steps_finish_in_any_order_of_events(name: str) -> None:
    program = lower(make(name, 2, 4))
    blocks = channels_for(messages(program)) * max(held_by(rank, messages(program)).communicators for rank in range(2))
    for seed in range(3):
        assert Wild(opened(launches(program)), blocks + 1, channels_for(messages(program))).finishes(random.Random(seed))


def test_kernels_that_hold_all_multiprocessors_stop_a_device() -> None:
    program = lower(make("1f1b", 2, 3))
    rows = opened(launches(program))
    assert Wild(rows, blocks=3).finishes(random.Random(0))
    assert not any(Wild(rows, blocks=1).finishes(random.Random(seed)) for seed in range(3))


@pytest.mark.parametrize("name", every(2, ["zb-v", "interleaved-1f1b", "chimera", "dualpipe-v", "zb-h1"]))
def test_faults_are_found(name: str) -> None:
    """What fails over NCCL is no sound program: two sends or receives of a rank change places, or one is dropped."""
    program = lower(make(name, 4, 8))
    chance = random.Random(name)
    found = 0
    for _ in range(60):
        broken = _broken(program, chance)
        faults = program_faults(broken)
        fails = failed(opened(launches(broken)))
        assert not fails or faults
        found += bool(fails)
    assert found >= 30


def _broken(program: Program, chance: random.Random) -> Program:
    """The program with one fault in the messages of a rank."""
    rank = chance.randrange(program.num_ranks)
    row = list(program.rows[rank])
    kind = chance.choice([Send, Recv])
    places = [at for at, each in enumerate(row) if isinstance(each, kind)]
    one = chance.choice(places)
    peers = [at for at in places if at != one and row[at].peer == row[one].peer]
    if chance.random() < 0.2:
        del row[one]
    else:
        other = chance.choice(peers)
        row[one], row[other] = row[other], row[one]
    return replace(program, rows=(*program.rows[:rank], tuple(row), *program.rows[rank + 1 :]))


def test_messages_of_two_kinds_in_another_order_are_a_fault() -> None:
    """Both channels keep their order, so only a communicator that carries both sees it."""
    program = lower(make("zb-v", 2, 2))
    row = list(program.rows[0])
    at = next(
        at
        for at, (one, other) in enumerate(pairwise(row))
        if isinstance(one, Recv) and isinstance(other, Recv) and one.value.value_kind != other.value.value_kind
    )
    row[at : at + 2] = row[at : at + 2][::-1]
    broken = replace(program, rows=(tuple(row), program.rows[1]))
    assert [(fault.code, fault.rank) for fault in program_faults(broken)] == [("channel-order", 0)]
    assert Devices(opened(launches(broken))).run().mismatches


@pytest.mark.parametrize("failing", range(4))
def test_after_a_failure_every_rank_must_abort(failing: int) -> None:
    """The others wait on for a rank that stops, also after it has aborted its own communicators; each ends after its own abort."""
    program = lower(make("1f1b", 4, 8))
    rows = launches(program)
    first = next(at for at, each in enumerate(program.rows[failing]) if isinstance(each, Compute))
    rows[failing] = rows[failing][: first + 1]
    rows = in_order(opening_launches(messages(program), 4), rows)
    devices = Devices(rows).run()
    waiting = {each.rank for each in devices.stuck}
    assert waiting >= set(range(4)) - {failing}
    devices.abort(failing)
    assert {each.rank for each in devices.run().stuck} == set(range(4)) - {failing}
    for rank in range(4):
        devices.abort(rank)
    assert devices.run().stuck == []


def test_communicators_are_few_and_their_kernels_leave_multiprocessors() -> None:
    linear, vee = (messages(lower(make(name, 4, 8))) for name in ("zb-h1", "zb-v"))
    assert linear == vee, "a V schedule needs no more"
    assert [held_by(rank, linear).communicators for rank in range(4)] == [2, 4, 4, 2]
    assert channels_for(linear) == 16
    assert held_by(0, linear).bytes == 16 * (10 + 2) << 20
    heads = messages(lower(with_vocabulary(make("1f1b", 8, 8))))
    for each in (linear, heads, [Communicator((0, 1))]):
        blocks = [held_by(rank, each).blocks for rank in range(8)]
        assert 0 < max(blocks) <= MOST_BLOCKS
    assert channels_for([Communicator((0, 1))]) == CHANNELS
    assert channels_for([]) == CHANNELS
    sums = Communicator((0, 4), Purpose.SUMS)
    more, less = held_by(0, [*linear, sums]), held_by(0, linear)
    assert (more.blocks - less.blocks, more.bytes - less.bytes) == (SUMS_CHANNELS, SUMS_CHANNELS * 2 * (10 + 2) << 20)
    assert queues_for([*linear, sums]) == queues_for(linear)
    assert channels_for([Communicator((0, other)) for other in range(1, 200)]) == 1


def test_check_says_what_a_schedule_holds_over_nccl() -> None:
    result = CliRunner().invoke(main, ["check", "zb-v", "--ranks", "4", "--microbatches", "8", "--json"])
    assert json.loads(result.stdout)["nccl"] == {
        "finishes": True,
        "queues": 6,
        "communicators": 4,
        "blocks": 64,
        "bytes": 16 * 2 * (10 + 2) << 20,
    }
    plain = CliRunner().invoke(main, ["check", "zb-v", "--ranks", "4", "--microbatches", "8"]).stdout
    assert "4 communicators" in plain
    alone = CliRunner().invoke(main, ["check", "gpipe", "--ranks", "1", "--microbatches", "2", "--json"])
    assert json.loads(alone.stdout)["nccl"]["communicators"] == 0


def test_check_counts_the_sums_over_replicas() -> None:
    def held(replicas: int) -> tuple[int, int, int]:
        result = CliRunner().invoke(main, ["check", "zb-v", "--ranks", "4", "--microbatches", "8", "--replicas", str(replicas), "--json"])
        found = json.loads(result.stdout)["nccl"]
        assert found["queues"] == 6, "streams for passes and sums, and for each communicator of messages"
        return found["communicators"], found["blocks"], found["bytes"] >> 20

    assert [held(replicas) for replicas in (1, 2, 5, 64)] == [(4, 64, 384), (5, 72, 384 + 192), (5, 72, 384 + 480), (5, 72, 384 + 480)]
    assert CliRunner().invoke(main, ["check", "zb-v", "--ranks", "4", "--microbatches", "8", "--replicas", "0"]).exit_code == 2
