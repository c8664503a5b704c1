"""NCCL's rules as a model: the communicators of a program, whether their kernels can wait for each other forever, and what they hold.

The model has these rules of NCCL and of torch's ProcessGroupNCCL:

- A communicator runs its operations in the order of their launches, on a stream of its own at each end.
- A launch takes no time on the host. Its kernel starts after the work that was on the rank's compute stream at the launch.
- A send waits for its receive, whatever its size, and a sum for all its ranks (rendezvous). Operations pair up by their order alone.
- Operations of a group share a kernel. Each of them proceeds by itself, and the kernel ends with the last.
- The first launch on a communicator creates it, which blocks the host until its other ranks launch, too.
- A kernel that waits holds multiprocessors and a connection's buffers until its peer arrives. An abort ends the kernels of one rank only.
- Streams that share a hardware queue of the device start their work in the order of its launches: a kernel that cannot start yet, because
  an earlier one of its communicator runs, keeps all that was launched after it from starting. `queues_for` counts what rules this out.
- Returning memory to the device (`cudaFree`) blocks the host until all that was launched has ended.

Only the order of these events matters: an event that can happen stays possible until it happens. So one run without a deadlock proves that
no run has one, unless kernels that wait hold all multiprocessors. `channels_for` bounds what they hold.

`program_faults` proves the same by a simpler rule. If a program finishes under the rendezvous model, and both ends of each communicator
have one order, each message of the rendezvous run can end before the next one starts. That is a run of this model. Tests compare the two.

Sources: NCCL's user guide on group calls, point-to-point communication and several communicators; ProcessGroupNCCL.cpp of torch 2.13;
CUDA's programming guide on CUDA_DEVICE_MAX_CONNECTIONS and implicit synchronization; pytorch/pytorch#50925 on `cudaFree`.
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
    """The use of a communicator: messages of a program, values that ranks share outside the program's order, or sums."""

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


def communicators_of_sums(num_ranks: int, replicas: int) -> list[Communicator]:
    """Returns the communicators of sums over `replicas` replicas of a pipeline. Ranks are numbered one replica after another."""
    ranks = range(num_ranks * replicas)
    return [Communicator(tuple(ranks[rank::num_ranks]), Purpose.SUMS) for rank in range(num_ranks)] if replicas > 1 else []


CHANNELS = 32
"""The most channels between two GPUs, each a thread block of a kernel and a pair of buffers: those of H100s with NVLink."""
RECEIVE_BYTES, SEND_BYTES = 10 << 20, 2 << 20
"""The bytes of GPU memory that a channel holds at the receiver and at the sender, as NVIDIA/nccl#1685 lists them for 8 H100s."""
MOST_BLOCKS = 64
"""The most thread blocks of a rank's kernels that may wait for messages of stages. V100s, the smallest GPUs with NVLink, have 80
multiprocessors. Without NVLink, NCCL opens fewer channels."""
SHARED_CHANNELS = 4
"""The channels of a communicator for what ranks share outside the program."""
SUMS_CHANNELS = 8
"""The most channels of a communicator for sums: enough for the network between hosts, and few enough to leave multiprocessors to passes."""
USUAL_QUEUES, MOST_QUEUES = 8, 32
"""The hardware queues of a CUDA device by default, and the most that CUDA_DEVICE_MAX_CONNECTIONS allows."""
TREE = 4
"""The most neighbors of a rank in one of NCCL's trees: three below and one above. Rings have one on each side."""


class HeldResources(NamedTuple):
    """The most that communicators hold on a rank. `blocks` are thread blocks of waiting kernels, one kernel per communicator."""

    communicators: int
    blocks: int
    bytes: int


def held_by(rank: int, communicators: Sequence[Communicator]) -> HeldResources:
    """Return the resources that the `communicators` of all ranks hold on `rank`."""
    joined = [communicator for communicator in communicators if rank in communicator.members]
    channels = {Purpose.STAGES: channels_for(communicators), Purpose.SHARED: SHARED_CHANNELS, Purpose.SUMS: SUMS_CHANNELS}
    blocks = [channels[communicator.purpose] for communicator in joined]
    bytes_held = sum(count * _bytes_of_channel(rank, communicator) for count, communicator in zip(blocks, joined, strict=True))
    return HeldResources(len(joined), sum(blocks), bytes_held)


def _bytes_of_channel(rank: int, communicator: Communicator) -> int:
    """Return the bytes that a channel holds on a rank. Channels of sums connect a ring and, in both directions, a tree."""
    if communicator.purpose is Purpose.SUMS:
        return (1 + min(TREE, len(communicator.members) - 1)) * (SEND_BYTES + RECEIVE_BYTES)
    return SEND_BYTES if rank == communicator.members[0] else RECEIVE_BYTES


def queues_for(communicators: Iterable[Communicator]) -> int:
    """Return the number of hardware queues with which no two streams of a rank share one: for passes, sums, and each communicator."""
    counts = Counter(rank for communicator in communicators if communicator.purpose is not Purpose.SUMS for rank in communicator.members)
    return 2 + max(counts.values(), default=0)


def channels_for(communicators: Iterable[Communicator]) -> int:
    """Return the number of channels of a communicator for stages, a power of two as in NCCL: `MOST_BLOCKS` suffice for every rank.

    Both ends of a communicator need the same number, so all communicators have one number.
    """
    counts = Counter(rank for communicator in communicators if communicator.purpose is Purpose.STAGES for rank in communicator.members)
    fitting = MOST_BLOCKS // max(counts.values(), default=1)
    return min(CHANNELS, 1 << max(fitting.bit_length() - 1, 0))


class NcclOperation(NamedTuple):
    """An operation among `ranks`: of a message `what` from the first to the second, or a sum over all of them."""

    ranks: tuple[int, ...]
    what: str


class Launch(NamedTuple):
    """Launch the operations of one group on a communicator."""

    communicator: Communicator
    exchanges: tuple[NcclOperation, ...]


class Wait(NamedTuple):
    """Wait on the compute stream, or also `on_host`, until the kernels of these exchanges have ended. A pass follows."""

    exchanges: tuple[NcclOperation, ...] = ()
    on_host: bool = False


class Synchronize(NamedTuple):
    """Wait on the host until the device has nothing left to do, as `cudaFree` does when the allocator gives memory back."""


Instruction = Launch | Wait | Synchronize


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
        arrived: set[NcclOperation] = set()
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
    first = [Launch(communicator, (NcclOperation(communicator.members, "first message"),)) for communicator in sorted(communicators)]
    return [[launch for launch in first if rank in launch.communicator.members] for rank in range(num_ranks)]


def _instructions(program: Program, rank: int) -> Iterator[tuple[Action, Instruction]]:
    """Yield each action of a rank with the instructions of its host."""
    row = program.rows[rank]
    source_of = {action.value: action.peer for action in row if isinstance(action, Recv)}
    sent: dict[Value, list[NcclOperation]] = defaultdict(list)
    for action in row:
        if isinstance(action, Recv):
            yield action, _message(action.peer, rank, action.value)
        elif isinstance(action, Send):
            launch = _message(rank, action.peer, action.value)
            sent[action.value] += launch.exchanges
            yield action, launch
        elif isinstance(action, Compute):
            used = [value for value in program.uses(action.step) if value in source_of]
            yield action, Wait(tuple(NcclOperation((source_of[value], rank), str(value)) for value in used))
        else:
            yield action, Wait(tuple(sent[action.value]))


def _message(source: int, destination: int, value: Value) -> Launch:
    communicator = communicator_of(Channel(source, destination, value.value_kind))
    return Launch(communicator, (NcclOperation((source, destination), str(value)),))


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
    queues: int | None = None
    """The number of hardware queues of a device, which its streams share in turn; None if each stream has one of its own."""
    mismatches: list[str] = field(default_factory=list)
    """Exchanges that pair up at the two ends though they are different."""

    def __post_init__(self) -> None:
        count = len(self.rows)
        # By rank, the streams of communicators in the order of their first launches; the compute stream is number 0. By rank and hardware
        # queue, what has not started: kernels, and positions of the compute stream.
        self._streams: list[dict[Communicator, int]] = [{} for _ in range(count)]
        self._lines: dict[tuple[int, int], deque[_Kernel | int]] = defaultdict(deque)
        self._host, self._stream = [0] * count, [0] * count
        self._queues: dict[tuple[int, Communicator], deque[_Kernel]] = defaultdict(deque)
        # The kernel of the last launch of each exchange, and what the host has enqueued: a kernel, or the kernels to wait for.
        self._kernel_of: list[dict[NcclOperation, _Kernel]] = [{} for _ in range(count)]
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
        """End the kernels of `rank`, launched and future ones, as an abort of its communicators does. Other ranks are not notified."""
        self.rows = [() if at == rank else row for at, row in enumerate(self.rows)]
        self._host[rank] = self._stream[rank] = 0
        self._enqueued[rank] = []
        for (at, _), queue in self._queues.items():
            if at == rank:
                queue.clear()
        for (at, _), line in self._lines.items():
            if at == rank:
                line.clear()

    @property
    def stuck(self) -> list[Stuck]:
        """The ranks that have not ended, in order."""
        at = [host if stream == host else stream for host, stream in zip(self._host, self._stream, strict=True)]
        return [Stuck(rank, at[rank], self._waits(rank)) for rank in range(len(self.rows)) if not self._has_ended(rank)]

    def _has_ended(self, rank: int) -> bool:
        return self._stream[rank] == len(self.rows[rank]) and not any(queue for (at, _), queue in self._queues.items() if at == rank)

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
            elif isinstance(instruction, Synchronize):
                kernels = []
                if self._stream[rank] < self._host[rank] or self._unfinished(rank):
                    return
            else:
                kernels = self._waited(rank, instruction)
                if instruction.on_host and any(kernel.left for kernel in kernels):
                    return
            self._enqueued[rank].append(kernels)
            self._line(rank).append(self._host[rank])
            if isinstance(instruction, Launch):
                self._line(rank, instruction.communicator).append(kernels[0])
            self._host[rank] += 1

    def _line(self, rank: int, communicator: Communicator | None = None) -> deque[_Kernel | int]:
        """Return the hardware queue of a communicator's stream, or of the compute stream."""
        streams = self._streams[rank]
        number = 0 if communicator is None else streams.setdefault(communicator, len(streams) + 1)
        return self._lines[rank, number if self.queues is None else number % self.queues]

    def _leave(self, line: deque[_Kernel | int], rank: int) -> None:
        """Take what has started from the front of a hardware queue; what follows may start."""
        line.popleft()
        if line and isinstance(line[0], _Kernel):
            self._due.append((rank, line[0].launch.communicator))
        elif line:
            self._awake.append(rank)

    def _unfinished(self, rank: int) -> list[_Kernel]:
        return [kernel for (at, _), queue in self._queues.items() if at == rank for kernel in queue]

    def _waited(self, rank: int, wait: Wait) -> list[_Kernel]:
        """Return the kernels to wait for; for what was never launched, one that never ends."""
        kernel_of = self._kernel_of[rank]
        return [
            kernel_of.get(exchange) or _Kernel(rank, Launch(Communicator(exchange.ranks), (exchange,)), 1) for exchange in wait.exchanges
        ]

    def _advance_stream(self, rank: int) -> None:
        line = self._line(rank)
        while self._stream[rank] < self._host[rank] and line[0] == self._stream[rank]:
            instruction, kernels = self.rows[rank][self._stream[rank]], self._enqueued[rank][self._stream[rank]]
            if isinstance(instruction, Launch):
                kernels[0].ready = True
                self._due.append((rank, instruction.communicator))
            elif any(kernel.left for kernel in kernels):
                return
            self._stream[rank] += 1
            self._leave(line, rank)
            if self._stream[rank] == self._host[rank]:
                self._awake.append(rank)  # its host may wait for the device

    def _start_next(self, rank: int, communicator: Communicator) -> None:
        """Start the first kernel of this end if it is ready, and end every exchange whose ranks have all arrived."""
        queue = self._queues[rank, communicator]
        line = self._line(rank, communicator)
        if not queue or queue[0].running or not queue[0].ready or line[0] is not queue[0]:
            return
        kernel = queue[0]
        kernel.running = True
        self._leave(line, rank)
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
        if isinstance(instruction, Launch) and at == self._host[rank]:  # the host waits for the others to create the communicator
            missing = next(m for m in instruction.communicator.members if m not in self._arrived[instruction.communicator])
            return str(instruction.communicator), missing
        if at < self._host[rank]:
            waited = self._enqueued[rank][at]
        else:
            waited = self._waited(rank, instruction) if isinstance(instruction, Wait) else []
        unfinished = [kernel for kernel in waited if kernel.left] or self._unfinished(rank)
        return self._missing(self._front(unfinished[0]))

    def _front(self, kernel: _Kernel) -> _Kernel:
        """Return the kernel that keeps `kernel` from ending: itself if it runs, or one before it on its communicator or hardware queue."""
        queue = self._queues[kernel.rank, kernel.launch.communicator]
        if kernel.running or kernel not in queue:
            return kernel
        if queue[0] is not kernel:
            return self._front(queue[0])
        front = self._line(kernel.rank, kernel.launch.communicator)[0]
        if front is kernel:  # the compute stream has not reached its launch
            front = self._line(kernel.rank)[0]
        if isinstance(front, _Kernel):
            return self._front(front)
        return self._front(next(waiting for waiting in self._enqueued[kernel.rank][front] if waiting.left))

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


def play(program: Program, queues: int | None = None) -> Devices:
    """Run a pipeline on NCCL: create the communicators, then run a step with announced shapes, and a step with known shapes.

    Devices have `queues` hardware queues, by default enough.
    """
    communicators = communicators_of(channel for _, _, channel, _ in program.channels())
    parts = (opening_launches(communicators, program.num_ranks), announced_launches(program), launches(program))
    return Devices([[launch for row in rows for launch in row] for rows in zip(*parts, strict=True)], queues).run()
