"""Refuses unequal optimizers for the copies of a parameter: tied places, copies of a stage on several routes, and replicas.

All copies get the same gradients, so they stay equal only under optimizers of the same class with the same options and state. In each step,
a rank exchanges a digest of these with the next and the previous rank that hold the same parameters. It compares digests when the step
ends, before any optimizer uses the gradients; if they differ, the two ranks exchange what they have, and raise.

Cost per step: two numbers to each of these ranks, and one line of text per parameter group. States are read in the first step only.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from zerobubble.errors import InputError
from zerobubble.runtime.stage.whole_model import digest
from zerobubble.runtime.step.hook import AttachedPipeline, StepHook, TrainingStep
from zerobubble.runtime.step.optimizers import live_optimizers
from zerobubble.runtime.transport.control import Expected, Sending, Topic
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.values.memory import local_part

_DOING = "comparing the optimizers of a parameter that several ranks hold"
_NO_EFFECT = frozenset({"foreach", "fused", "capturable", "differentiable", "params"})
"""Options that select kernels, whose results differ by rounding at most."""

Uses = list[list[Any]]
"""The class, options and state of each optimizer that holds a parameter."""


@dataclass(frozen=True, slots=True)
class OptimizerDigest:
    """A digest of the optimizers of the parameters that two ranks share, and the `length` of their description."""

    topic: ClassVar[Topic] = Topic.OPTIMIZERS

    digest: int
    length: int

    def numbers(self) -> tuple[int, ...]:
        return (self.digest, self.length)

    @classmethod
    def read(cls, numbers: Tensor) -> OptimizerDigest:
        return cls(*map(int, numbers.tolist()))


@dataclass(frozen=True, slots=True)
class OptimizerDescription:
    """The optimizers of the parameters that two ranks share, as JSON."""

    topic: ClassVar[Topic] = Topic.OPTIMIZERS

    text: bytes

    def numbers(self) -> tuple[int, ...]:
        return tuple(self.text)

    @classmethod
    def read(cls, numbers: Tensor) -> OptimizerDescription:
        return cls(bytes(map(int, numbers.tolist())))


class SharedWith(NamedTuple):
    """The parameters that this rank shares with the `peer`, in the same order on both; with itself if no other rank holds them.

    `held` and `here` have the tensors of each on this rank, and their names; `there` has a name of it on the peer.
    """

    peers: Peers
    peer: int
    held: Sequence[Sequence[nn.Parameter]]
    here: Sequence[Sequence[str]]
    there: Sequence[str]


def neighbors(ranks: Sequence[int], rank: int) -> list[int]:
    """Returns the ranks before and after `rank` in a ring of `ranks`, each once; of one rank itself. All are equal if all neighbors are."""
    place = ranks.index(rank)
    return list(dict.fromkeys((ranks[place - 1], ranks[(place + 1) % len(ranks)])))


class EqualOptimizers(StepHook):
    """Compares the optimizers of the parameters that this rank shares with others, and in the first step their states."""

    def __init__(self, shared: Iterable[SharedWith]) -> None:
        self._exchanges = list(map(_Exchange, shared))
        held = [parameter for exchange in self._exchanges for tensors in exchange.shared.held for parameter in tensors]
        self._uses = _OptimizerUses(frozenset(held))
        self._reads_state = True

    @property
    def is_needed(self) -> bool:
        """Whether this rank shares any parameter."""
        return bool(self._exchanges)

    def on_attach(self, pipeline: AttachedPipeline) -> None:
        """Keeps the optimizers that have stepped parameters of the pipeline."""
        self._uses.seen = pipeline.optimizers.seen

    def on_step_begin(self, step: TrainingStep) -> None:
        """Starts to exchange digests."""
        self._uses.update()
        for exchange in self._exchanges:
            exchange.begin([[self._uses.of(tensor, self._reads_state) for tensor in held] for held in exchange.shared.held])
        self._reads_state = False

    def on_step_end(self, step: TrainingStep) -> None:
        """Raises `InputError` if another rank has a copy under other optimizers."""
        differing = [exchange for exchange in self._exchanges if exchange.differs()]
        for exchange in differing:
            exchange.describe()
        for exchange in differing:
            exchange.refuse()

    def on_close(self) -> None:
        """Drops messages in flight: they would keep connections open."""
        for exchange in self._exchanges:
            exchange.clear()


class _Exchange:
    """The comparison with one other rank."""

    def __init__(self, shared: SharedWith) -> None:
        self.shared = shared
        self._uses: list[list[Uses]] = []
        self._mine = OptimizerDigest(0, 0)
        self._text = b""
        self._theirs: OptimizerDigest | None = None
        self._sends: list[Sending] = []
        self._expected: Expected[OptimizerDigest] | None = None

    def begin(self, uses: list[list[Uses]]) -> None:
        """Sends what this rank has: the optimizers of each parameter, by its tensors here."""
        if uses != self._uses:
            self._uses = uses
            self._text = json.dumps([of_tensors[0] for of_tensors in uses]).encode()
            self._mine = OptimizerDigest(int.from_bytes(hashlib.sha256(self._text).digest()[:6], "big"), len(self._text))
        peers, peer = self.shared.peers, self.shared.peer
        if peer == peers.rank:
            return
        self._sends = [peers.send_control(self._mine, peer)]
        self._expected = peers.expect_control(OptimizerDigest, 2, peer)

    def differs(self) -> bool:
        """Whether the other rank has something else. Raises `InputError` if two tensors of this rank differ."""
        for names, of_tensors in zip(self.shared.here, self._uses, strict=True):
            for name, uses in zip(names, of_tensors, strict=True):
                if uses != of_tensors[0]:
                    _refuse(names[0], of_tensors[0], name, uses)
        if self._expected is None:
            return False
        self._theirs = self._expected.wait(_DOING)
        self._wait_for_sends()
        return self._theirs != self._mine

    def describe(self) -> None:
        """Sends the description of what this rank has."""
        self._sends = [self.shared.peers.send_control(OptimizerDescription(self._text), self.shared.peer)]

    def refuse(self) -> None:
        """Raises `InputError` for the first parameter under other optimizers."""
        peers, peer, _, here, there = self.shared
        assert self._theirs is not None
        theirs = json.loads(peers.expect_control(OptimizerDescription, self._theirs.length, peer).wait(_DOING).text)
        self._wait_for_sends()
        copies = zip(here, json.loads(self._text), there, theirs, strict=True)
        (name, *_), mine, other_name, other = next(copy for copy in copies if copy[1] != copy[3])
        pairs = [(f"{name} on rank {peers.members[peers.rank]}", mine), (f"{other_name} on rank {peers.members[peer]}", other)]
        (first, uses), (second, others) = pairs if peers.rank < peer else pairs[::-1]
        _refuse(first, uses, second, others)

    def _wait_for_sends(self) -> None:
        for sending in self._sends:
            sending.wait(_DOING)
        self.clear()

    def clear(self) -> None:
        """Drops messages in flight."""
        self._sends, self._expected = [], None


class _OptimizerUses:
    """The optimizers of these `parameters`. `seen` are the optimizers that have stepped parameters of the pipeline."""

    def __init__(self, parameters: frozenset[Tensor]) -> None:
        self.seen: Iterable[Optimizer] = ()
        self._parameters = parameters
        self._live: list[weakref.ref[Optimizer]] | None = None
        self._groups: list[tuple[weakref.ref[Optimizer], list[Any]]] = []
        self._layout: list[list[int]] = []
        self._places: dict[Tensor, list[int]] = {}

    def update(self) -> None:
        """Reads the options of all groups, and which parameters they hold if that has changed."""
        live = [optimizer for reference in self._live or () if (optimizer := reference()) is not None]
        if self._live is None or len(live) < len(self._live) or not set(self.seen).issubset(live):
            live = sorted(live_optimizers(), key=lambda optimizer: type(optimizer).__name__)
            self._live = list(map(weakref.ref, live))
        groups = [(optimizer, group) for optimizer in _without_wrapped(live) for group in optimizer.param_groups]
        layout = [list(map(id, group["params"])) for _, group in groups]
        if layout != self._layout:
            self._layout, self._places = layout, {}
            for number, (_, group) in enumerate(groups):
                for parameter in self._parameters.intersection(group["params"]):
                    self._places.setdefault(parameter, []).append(number)
        self._groups = [(weakref.ref(optimizer), [type(optimizer).__name__, _options_of(optimizer, group)]) for optimizer, group in groups]

    def of(self, parameter: nn.Parameter, reads_state: bool) -> Uses:
        """Returns the optimizers of a parameter in an order that all ranks share, with its states if it `reads_state`."""
        if not parameter.requires_grad:
            return [["frozen", {}, ""]]
        groups = [self._groups[number] for number in self._places.get(parameter, ())]
        return sorted(([*options, _state_of(optimizer(), parameter) if reads_state else ""] for optimizer, options in groups), key=str)


def _without_wrapped(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Returns the optimizers that no other one of them holds as an attribute, as wrappers of frameworks do."""
    inner = {id(value) for optimizer in optimizers for value in vars(optimizer).values() if isinstance(value, Optimizer)}
    return [optimizer for optimizer in optimizers if id(optimizer) not in inner]


def _options_of(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options of a group that its optimizer uses, as text. Other entries are the user's, such as a name."""
    return {name: _text(group[name]) for name in sorted(optimizer.defaults) if name in group and name not in _NO_EFFECT}


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return repr(value.item()) if value.numel() == 1 else f"a tensor {digest(value)}"
    return repr(value) if isinstance(value, (bool, int, float, str, tuple, list, type(None))) else type(value).__name__


def _state_of(optimizer: Optimizer | None, parameter: Tensor) -> str:
    """Returns a short digest of the state of a parameter; empty without any."""
    assert optimizer is not None
    entries = optimizer.state.get(parameter, {}).items()
    held = {name: digest(local_part(value)) if isinstance(value, Tensor) else repr(value) for name, value in entries if value is not None}
    return hashlib.sha256(str(sorted(held.items())).encode()).hexdigest()[:8] if held else ""


def _refuse(first: str, uses: Uses, second: str, others: Uses) -> None:
    mine, theirs = _described(uses, others), _described(others, uses)
    raise InputError(
        "{first} is {uses}, and its copy {second} is {others}: copies stay equal only under equal optimizers; {remedy}",
        first=first,
        uses=mine,
        second=second,
        others=theirs,
        remedy="give all copies the same class, options and state, also where names decide on them",
    )


def _described(uses: Uses, others: Uses) -> str:
    """Describes what the optimizers of a copy are, by what `others` do not have."""
    if not uses:
        return "in no optimizer"
    if uses[0][0] == "frozen":
        return "frozen"
    options_of = [options for _, options, _ in others] if len(uses) == len(others) else []
    texts = []
    for number, (kind, options, state) in enumerate(uses):
        other = options_of[number] if options_of and others[number][0] == kind else {}
        shown = [f"{name}={value}" for name, value in options.items() if other.get(name) != value]
        same_options = not shown
        shown += [f"state {state}" if state else "no state"] * (same_options and bool(other))
        texts.append(f"{kind} with {', '.join(shown)}" if shown else kind)
    return f"in {' and '.join(texts)}"


def shared_with_replicas(peers: Peers, names: Mapping[nn.Parameter, str]) -> Iterator[SharedWith]:
    """Yields what this rank shares with its neighbors among `peers`, which hold the same parameters under these names."""
    listed = list(names.values())
    if peers.size == 1:
        return
    for peer in neighbors(range(peers.size), peers.rank):
        yield SharedWith(peers, peer, [[parameter] for parameter in names], [[name] for name in listed], listed)
