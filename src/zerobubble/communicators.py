"""NCCL's rules as a model: the communicators of a program, whether their kernels can wait for each other forever, and what they hold.

The model has these rules of NCCL and of torch's ProcessGroupNCCL:

- A communicator runs its operations in the order of their launches, on a stream of its own at each end.
- A launch takes no time on the host. Its kernel starts after the work that was on the rank's compute stream at the launch.
- A send waits for its receive, whatever its size, and a sum for all its ranks (rendezvous). Operations pair up by their order alone.
- Operations of a group share a kernel. Each of them proceeds by itself, and the kernel ends with the last.
- The first launch on a communicator creates it, which blocks the host until its other ranks launch, too.
- A kernel that waits holds multiprocessors and a connection's buffers until its peer arrives. An abort ends the kernels of one rank only.

A run needs no more than the order of these events: an event that can happen stays possible until it does. So one run without a deadlock
proves that no run has one, unless kernels that wait hold all multiprocessors. `channels_for` bounds what they hold.

`program_faults` proves the same by a simpler rule. If a program finishes under the rendezvous model, and both ends of each communicator
have one order, each message of the rendezvous run can end before the next one starts. That is a run of this model. Tests compare the two.

Sources: NCCL's user guide on group calls, point-to-point communication and several communicators; ProcessGroupNCCL.cpp of torch 2.13.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from zerobubble.kinds import ValueKind
from zerobubble.program import Action, Channel, Compute, Program, Recv, Send
from zerobubble.rules import Value


class Purpose(StrEnum):
    """What a communicator carries: messages of a program, values that ranks share outside its order, or sums."""

    STAGES = "stages"
    SHARED = "shared"
    SUMS = "sums"


class Communicator(NamedTuple):
    """A communicator among `members`; for messages, the source and the destination."""

    members: tuple[int, ...]
    purpose: Purpose = Purpose.STAGES

    def __str__(self) -> str:
        if self.purpose is Purpose.SUMS:
            return f"the sums of ranks {', '.join(map(str, self.members))}"
        return f"the {self.purpose} communicator from rank {self.members[0]} to rank {self.members[1]}"


def communicator_of(channel: Channel) -> Communicator:
    """Return the communicator of a channel: one for each direction between two ranks.

    Tied and copied gradients have another, because ranks exchange them at times that the program does not order.
    """
    purpose = Purpose.SHARED if channel.value_kind is ValueKind.WEIGHT_WORK else Purpose.STAGES
    return Communicator((channel.source, channel.destination), purpose)


def communicators_of(channels: Iterable[Channel]) -> list[Communicator]:
    """Return the communicators of these channels, in the order in which every rank creates them."""
    return sorted(set(map(communicator_of, channels)))


CHANNELS = 32
"""The most channels between two GPUs, each a thread block of a kernel and a pair of buffers: those of H100s with NVLink."""
RECEIVE_BYTES, SEND_BYTES = 10 << 20, 2 << 20
"""The bytes of GPU memory that a channel holds at the receiver and at the sender, as NVIDIA/nccl#1685 lists them for 8 H100s."""
MOST_BLOCKS = 64
"""The most thread blocks of a rank's kernels that may wait for messages of stages. V100s, the smallest GPUs with NVLink, have 80
multiprocessors. Without NVLink, NCCL opens fewer channels."""
SHARED_CHANNELS = 4
"""The channels of a communicator for what ranks share outside the program."""


class Held(NamedTuple):
    """What the communicators for messages hold on a rank, at most: `blocks` are thread blocks of kernels that wait, one from each."""

    communicators: int
    blocks: int
    bytes: int


def held_by(rank: int, communicators: Sequence[Communicator]) -> Held:
    """Return what these communicators for messages, which are those of all ranks, hold on `rank`."""
    own = [each for each in communicators if rank in each.members]
    channels = {Purpose.STAGES: channels_for(communicators), Purpose.SHARED: SHARED_CHANNELS}
    size = [SEND_BYTES if rank == each.members[0] else RECEIVE_BYTES for each in own]
    blocks = [channels[each.purpose] for each in own]
    return Held(len(own), sum(blocks), sum(count * each for count, each in zip(blocks, size, strict=True)))


def channels_for(communicators: Iterable[Communicator]) -> int:
    """Return the number of channels of a communicator for stages, a power of two as in NCCL: `MOST_BLOCKS` suffice for every rank.

    Both ends of a communicator need the same number, so all communicators have one number.
    """
    counts = Counter(rank for each in communicators if each.purpose is Purpose.STAGES for rank in each.members)
    each = MOST_BLOCKS // max(counts.values(), default=1)
    return min(CHANNELS, 1 << max(each.bit_length() - 1, 0))


class Exchange(NamedTuple):
    """An operation among `ranks`: of a message `what` from the first to the second, or a sum over all of them."""

    ranks: tuple[int, ...]
    what: str


class Launch(NamedTuple):
    """Launch the operations of one group on a communicator."""

    communicator: Communicator
    exchanges: tuple[Exchange, ...]


class Wait(NamedTuple):
    """Wait on the compute stream, or also `on_host`, until the kernels of these exchanges have ended. A pass follows."""

    exchanges: tuple[Exchange, ...] = ()
    on_host: bool = False


Instruction = Launch | Wait


def launches(program: Program) -> list[list[Instruction]]:
    """Return what the host of each rank does in a step whose shapes are known: an instruction for each action, in order."""
    return [[instruction for _, instruction in _instructions(program, rank)] for rank in range(program.num_ranks)]


def announced_launches(program: Program) -> list[list[Instruction]]:
    """Return what hosts do in a step whose messages announce their shapes.

    A receive is launched when its message is needed, after all earlier messages of the communicator, and the host waits for each.
    """
    rows: list[list[Instruction]] = []
    for rank in range(program.num_ranks):
        unread: dict[int, deque[Launch]] = defaultdict(deque)
        row: list[Instruction] = []
        arrived: set[Exchange] = set()
        for action, instruction in _instructions(program, rank):
            if isinstance(action, Recv) and isinstance(instruction, Launch):
                unread[action.peer].append(instruction)
                continue
            if isinstance(action, Compute) and isinstance(instruction, Wait):
                for exchange in instruction.exchanges:
                    while exchange not in arrived:
                        following = unread[exchange.ranks[0]].popleft()
                        row += [following, Wait(following.exchanges, on_host=True)]
                        arrived.update(following.exchanges)
            row.append(instruction)
        rows.append(row)
    return rows


def opening_launches(communicators: Iterable[Communicator], num_ranks: int) -> list[list[Instruction]]:
    """Return the first messages, which create these communicators, on each rank. Every rank takes them in one order."""
    ordered = sorted(communicators)
    return [
        [Launch(each, (Exchange(each.members, "first message"),)) for each in ordered if rank in each.members] for rank in range(num_ranks)
    ]


def _instructions(program: Program, rank: int) -> Iterator[tuple[Action, Instruction]]:
    """Yield each action of a rank with what its host does for it."""
    row = program.rows[rank]
    source_of = {action.value: action.peer for action in row if isinstance(action, Recv)}
    sent: dict[Value, list[Exchange]] = defaultdict(list)
    for action in row:
        if isinstance(action, Recv):
            yield action, _message(action.peer, rank, action.value)
        elif isinstance(action, Send):
            launch = _message(rank, action.peer, action.value)
            sent[action.value] += launch.exchanges
            yield action, launch
        elif isinstance(action, Compute):
            used = [value for value in program.uses(action.step) if value in source_of]
            yield action, Wait(tuple(Exchange((source_of[value], rank), str(value)) for value in used))
        else:
            yield action, Wait(tuple(sent[action.value]))


def _message(source: int, destination: int, value: Value) -> Launch:
    communicator = communicator_of(Channel(source, destination, value.value_kind))
    return Launch(communicator, (Exchange((source, destination), str(value)),))


@dataclass(eq=False)
class _Kernel:
    """The operations of a launch at one rank. It is `ready` once the compute stream has reached it, and runs until none is `left`."""

    rank: int
    launch: Launch
    left: int
    ready: bool = False
    running: bool = False


class Stuck(NamedTuple):
    """A `rank` that cannot go on at `position`, an index of its instructions, because `waits` goes in a circle or ends at another rank.

    `waits` are the ranks that wait, each with the exchange that it waits for, from this rank on.
    """

    rank: int
    position: int
    waits: tuple[tuple[int, str], ...]

    def __str__(self) -> str:
        return ", which waits as ".join(f"rank {rank} waits for {what}" for rank, what in self.waits)


@dataclass
class Devices:
    """The hosts and devices of all ranks, which run the instructions in `rows` as far as they can."""

    rows: Sequence[Sequence[Instruction]]
    mismatches: list[str] = field(default_factory=list)
    """Exchanges that pair up at the two ends though they are different."""

    def __post_init__(self) -> None:
        count = len(self.rows)
        self._host, self._stream = [0] * count, [0] * count
        self._queues: dict[tuple[int, Communicator], deque[_Kernel]] = defaultdict(deque)
        # The kernel of the last launch of each exchange, and what the host has enqueued: a kernel, or the kernels to wait for.
        self._kernel_of: list[dict[Exchange, _Kernel]] = [{} for _ in range(count)]
        self._enqueued: list[list[list[_Kernel]]] = [[] for _ in range(count)]
        self._arrived: dict[Communicator, set[int]] = defaultdict(set)
        # By communicator, ranks of an exchange and its number among these: the kernels that run it, and what each calls it.
        self._met: dict[tuple[Communicator, tuple[int, ...], int], dict[int, tuple[_Kernel, str]]] = defaultdict(dict)
        self._numbers: dict[tuple[int, Communicator, tuple[int, ...]], int] = defaultdict(int)
        # What may have become possible: a kernel to start at an end of a communicator, or a rank to go on.
        self._due: list[tuple[int, Communicator]] = []
        self._awake = list(range(count))

    def run(self) -> Devices:
        """Run until nothing can go on; return this object."""
        while self._due or self._awake:
            if self._due:
                self._start_next(*self._due.pop())
            else:
                rank = self._awake.pop()
                self._advance_host(rank)
                self._advance_stream(rank)
        return self

    def abort(self, rank: int) -> None:
        """End the kernels of `rank`, launched and future ones, as an abort of its communicators does. Others learn nothing of it."""
        self.rows = [() if at == rank else row for at, row in enumerate(self.rows)]
        self._host[rank] = self._stream[rank] = 0
        self._enqueued[rank] = []
        for (at, _), queue in self._queues.items():
            if at == rank:
                queue.clear()

    @property
    def stuck(self) -> list[Stuck]:
        """The ranks that have not ended, in order."""
        return [Stuck(rank, self._position(rank), self._waits(rank)) for rank in range(len(self.rows)) if not self._has_ended(rank)]

    def _has_ended(self, rank: int) -> bool:
        return self._stream[rank] == len(self.rows[rank]) and not any(queue for (at, _), queue in self._queues.items() if at == rank)

    def _position(self, rank: int) -> int:
        return self._host[rank] if self._stream[rank] == self._host[rank] else self._stream[rank]

    def _advance_host(self, rank: int) -> None:
        row = self.rows[rank]
        while self._host[rank] < len(row):
            instruction = row[self._host[rank]]
            if isinstance(instruction, Launch):
                arrived = self._arrived[instruction.communicator]
                if rank not in arrived:
                    arrived.add(rank)
                    self._awake += [member for member in instruction.communicator.members if member in arrived]
                if len(arrived) < len(instruction.communicator.members):
                    return
                kernels = [_Kernel(rank, instruction, len(instruction.exchanges))]
                self._queues[rank, instruction.communicator] += kernels
                self._kernel_of[rank].update(dict.fromkeys(instruction.exchanges, kernels[0]))
            else:
                kernels = self._waited(rank, instruction)
                if instruction.on_host and any(kernel.left for kernel in kernels):
                    return
            self._enqueued[rank].append(kernels)
            self._host[rank] += 1

    def _waited(self, rank: int, wait: Wait) -> list[_Kernel]:
        """Return the kernels to wait for; for what was never launched, one that never ends."""
        kernel_of = self._kernel_of[rank]
        return [kernel_of.get(each) or _Kernel(rank, Launch(Communicator(each.ranks), (each,)), 1) for each in wait.exchanges]

    def _advance_stream(self, rank: int) -> None:
        while self._stream[rank] < self._host[rank]:
            instruction, kernels = self.rows[rank][self._stream[rank]], self._enqueued[rank][self._stream[rank]]
            if isinstance(instruction, Launch):
                kernels[0].ready = True
                self._due.append((rank, instruction.communicator))
            elif any(kernel.left for kernel in kernels):
                return
            self._stream[rank] += 1

    def _start_next(self, rank: int, communicator: Communicator) -> None:
        """Start the first kernel of this end if it is ready, and end every exchange whose ranks have all arrived."""
        queue = self._queues[rank, communicator]
        if not queue or queue[0].running or not queue[0].ready:
            return
        kernel = queue[0]
        kernel.running = True
        for exchange in kernel.launch.exchanges:
            number = self._numbers[rank, communicator, exchange.ranks]
            self._numbers[rank, communicator, exchange.ranks] += 1
            met = self._met[communicator, exchange.ranks, number]
            met[rank] = kernel, exchange.what
            if len(met) == len(exchange.ranks):
                self._end(communicator, met)

    def _end(self, communicator: Communicator, met: Mapping[int, tuple[_Kernel, str]]) -> None:
        named = {rank: what for rank, (_, what) in met.items()}
        if len(set(named.values())) > 1:
            self.mismatches.append(f"{communicator}: " + ", ".join(f"{what} on rank {rank}" for rank, what in sorted(named.items())))
        for rank, (kernel, _) in met.items():
            kernel.left -= 1
            if not kernel.left:
                self._queues[rank, communicator].popleft()
                self._awake.append(rank)
                self._due.append((rank, communicator))

    def _waits(self, rank: int) -> tuple[tuple[int, str], ...]:
        """Return what `rank` waits for, what the rank that it waits for does, and so on."""
        waits: list[tuple[int, str]] = []
        while not self._has_ended(rank):
            what, other = self._blocker(rank)
            waits.append((rank, what))
            if (rank, what) in waits[:-1]:
                break
            rank = other
        return tuple(waits)

    def _blocker(self, rank: int) -> tuple[str, int]:
        """Return what `rank` waits for, and the rank that has not arrived there."""
        row, at = self.rows[rank], self._stream[rank]
        instruction = row[at] if at < len(row) else Wait()
        if isinstance(instruction, Launch):  # its host waits there for the others to create the communicator
            missing = next(m for m in instruction.communicator.members if m not in self._arrived[instruction.communicator])
            return str(instruction.communicator), missing
        waited = self._enqueued[rank][at] if at < self._host[rank] else self._waited(rank, instruction)
        unfinished = [kernel for kernel in waited if kernel.left]
        kernel = unfinished[0] if unfinished else next(queue[0] for (holder, _), queue in self._queues.items() if holder == rank and queue)
        queue = self._queues[rank, kernel.launch.communicator]
        return self._missing(queue[0] if kernel in queue else kernel)

    def _missing(self, kernel: _Kernel) -> tuple[str, int]:
        """Return an exchange of `kernel` that has not ended, and a rank that has not arrived at it."""
        rank, communicator = kernel.rank, kernel.launch.communicator
        for exchange in kernel.launch.exchanges:
            begun = [met for (at, ranks, _), met in self._met.items() if (at, ranks) == (communicator, exchange.ranks)]
            arrived = {*next((met for met in begun if met.get(rank) == (kernel, exchange.what)), ()), rank}
            missing = [other for other in exchange.ranks if other not in arrived]
            if missing:
                return exchange.what, missing[0]
        raise AssertionError("a kernel whose exchanges have ended has ended")


def play(program: Program) -> Devices:
    """Run what a pipeline does on NCCL: create the communicators, then a step with announced shapes, and one with known ones."""
    communicators = communicators_of(channel for _, _, channel, _ in program.channels())
    parts = (opening_launches(communicators, program.num_ranks), announced_launches(program), launches(program))
    return Devices([[each for row in rows for each in row] for rows in zip(*parts, strict=True)]).run()
