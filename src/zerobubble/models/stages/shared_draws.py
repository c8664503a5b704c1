"""Random numbers drawn by the model's code around its units and used by several stages, such as dropout of a residual sum.

Every stage runs that code and must draw the same numbers. So this code has its own state of torch's generators, seeded in each microbatch
by the first stage. Units draw from the generator of their rank, as if the code around them drew none.

Python, NumPy and the model's own generators give the numbers of one device. The first stage draws from the generators of its rank, and
sends their states before and after the whole forward. Other stages begin with these states. The generators of their rank advance with the
first stage's if they are alike, and stay unchanged otherwise. Units must not draw from these generators.
"""

from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from zerobubble.errors import InputError
from zerobubble.models.observation.drawn_around import REMEDY, drawn_by_both
from zerobubble.runtime.device import interface
from zerobubble.runtime.values.python_places import Content, GeneratorState, generator_place
from zerobubble.runtime.values.python_state import GENERATORS, TORCH, PythonState, named_generators
from zerobubble.runtime.values.random_state import RandomState, generators_of, seed_generators

States = dict[str, Content]
"""States of generators, by path."""
_BYTES = "base64"
_SECONDS_OF_WAITING = 0.05
DrawsMessage = tuple[Tensor | None, Tensor | None]
"""The seed of torch's random numbers, and the states of other generators as text; None without such numbers."""


class SharedDraws:
    """The random numbers of the code around the units in one forward of a stage, whose tensors are on `device`.

    Torch's begin with `seed`, those of the other `generators` with the states `begun`, and end with those `after` the whole forward; None
    if this stage runs all code that draws. A stage that runs the `is_whole` forward compares them. Call `finish` at the end of a forward
    without an error, and `close` at the end of any.
    """

    def __init__(
        self,
        seed: Tensor | None,
        device: torch.device,
        generators: CodeGenerators | None,
        begun: States,
        after: States | None,
        *,
        is_whole: bool,
    ) -> None:
        self.seed = seed
        self.begun, self.after = begun, after
        self._device = device
        self._generators = generators
        self._is_whole = is_whole
        self._of_rank = {} if generators is None else generators.read()
        self._of_units = None if seed is None else RandomState.now(device)
        self._of_code: RandomState | None = None
        if generators is not None:
            generators.write(begun)
        if seed is not None:
            seed_generators(int(seed.item()), device)

    def enter_unit(self) -> None:
        """Switches to the generator state of the rank, for a unit of this stage."""
        if self._generators is not None:
            self._in_unit = self._generators.read()
        if self._of_units is not None:
            self._of_code = RandomState.now(self._device)
            self._of_units.set()

    def leave_unit(self, unit: str, output: Any) -> Any:
        """Switches back after a unit; makes `output` contiguous as on other stages, since random masks are drawn in memory order.

        Raises `InputError` if the unit has drawn from the generators.
        """
        for path, content in {} if self._generators is None else self._generators.read().items():
            if content != self._in_unit[path]:
                raise drawn_by_both(path, unit)
        if self._of_units is None:
            return output
        assert self._of_code is not None
        self._of_units = RandomState.now(self._device)
        self._of_code.set()
        self._of_code = None
        return pytree.tree_map_only(Tensor, Tensor.contiguous, output)

    def finish(self) -> None:
        """Lets the generators of the rank that were alike advance with this forward.

        Raises `InputError` if the whole forward has drawn otherwise than the first stage has found.
        """
        if self._generators is None:
            return
        now = self._generators.read()
        self.after = now if self.after is None else self.after
        others = [path for path, content in now.items() if content != self.after[path]] if self._is_whole else []
        if others:
            raise InputError(
                "the model's code draws other random numbers between its parts, from {generators}, than in a forward without its parts",
                generators=named_generators(others),
                remedy=REMEDY,
            )
        self._of_rank |= {path: self.after[path] for path, content in self._of_rank.items() if content == self.begun[path]}

    def close(self) -> None:
        """Restores the generator states of the rank."""
        if self._generators is not None:
            self._generators.write(self._of_rank)
        if self._of_units is not None and self._of_code is None:  # otherwise a unit failed, and the state is already that of the rank
            self._of_units.set()


class LateDraws:
    """Refuses draws of the code around the units where it drew none when it was observed, since each stage would draw its own numbers.

    `generators` are those that stages do not share, by path. Torch's of the CPU and of `device` may move at these `places` (see
    `Dataflow`), anywhere if these are None. A thread of the user may draw meanwhile from a global generator: it must move twice, within two
    forwards, and not while this thread waits.
    """

    def __init__(self, generators: Mapping[str, GeneratorState], device: torch.device, places: frozenset[int] | None) -> None:
        of_torch = () if places is None else generators_of(device)
        watched = [*generators.values(), *(place for generator in of_torch if (place := generator_place(TORCH, generator)) is not None)]
        self._paths = [place.path for place in watched]
        self._of_all = [place.mark for place in watched]
        self._device = device
        self._places = frozenset() if places is None else places
        self._forwards = 0
        self._moved: dict[str, int] = {}

    def begin(self) -> None:
        """Begins a forward."""
        self._forwards += 1
        self._marks = self._of_all if self._can_read() else []
        self.leave_unit("", 0)

    def _can_read(self) -> bool:
        """Returns whether the generators' states can be read: a traced forward draws nothing, and a captured forward forbids it."""
        return detect_fake_mode() is None and not interface(self._device).is_capturing()

    def leave_unit(self, unit: str, num_calls: int) -> None:
        """Begins code behind a unit, and behind this number of calls of units."""
        self._unit, self._num_calls = unit, num_calls
        self._before = [mark() for mark in self._marks]

    def leave_code(self, num_calls: int) -> None:
        """Ends code around the units, behind this number of calls of units. Raises `InputError` if that code has drawn."""
        now = [mark() for mark in self._marks]
        if now == self._before:
            return
        for path in [path for path, mark, before in zip(self._paths, now, self._before, strict=True) if mark != before]:
            if path == TORCH and not self._places.isdisjoint(range(self._num_calls, num_calls + 1)):
                continue
            last, self._moved[path] = self._moved.get(path, -1), self._forwards
            if path not in (TORCH, *GENERATORS) or (last >= self._forwards - 1 and not self._moves_meanwhile(path)):
                raise self._drawn(path)

    def _moves_meanwhile(self, path: str) -> bool:
        """Returns whether another thread draws from a generator, which then gives no numbers that one device could repeat, either."""
        mark = self._marks[self._paths.index(path)]
        before, end = mark(), time.monotonic() + _SECONDS_OF_WAITING
        while mark() == before and time.monotonic() < end:
            time.sleep(_SECONDS_OF_WAITING / 50)
        return bool(mark() != before)

    def _drawn(self, path: str) -> InputError:
        return InputError(
            "the model's code draws random numbers from {generator} {where}, where it drew none before: stages draw different numbers",
            generator=named_generators([path]),
            where=f"behind part {self._unit!r}" if self._unit else "before the first part of a stage",
            remedy="let it draw in every forward and ignore numbers at first, or let your loop set an attribute of the model that starts "
            "the draws; a thread that draws meanwhile needs a generator of its own",
        )


class CodeGenerators:
    """The generators of Python, NumPy and the stage `model` of these `paths`, from which the code around its units draws."""

    def __init__(self, model: nn.Module, paths: Collection[str]) -> None:
        generators = PythonState(model).generators()
        lacking = [path for path in paths if path not in generators]
        if lacking:
            raise InputError(
                "the model's code draws random numbers between its parts, from {generators}, which a stage does not have",
                generators=named_generators(lacking),
                remedy=REMEDY,
            )
        self._generators: Mapping[str, GeneratorState] = {path: generators[path] for path in sorted(paths)}

    def all(self) -> Collection[GeneratorState]:
        """Returns the generators."""
        return self._generators.values()

    def read(self) -> States:
        """Returns the states now."""
        return {path: generator.read() for path, generator in self._generators.items()}

    def write(self, states: States) -> None:
        """Sets the states that differ."""
        for path, generator in self._generators.items():
            if generator.read() != states[path]:
                generator.write(states[path])


class DrawsMessages:
    """Makes the messages from a stage to the next, whose tensors have one size in all microbatches."""

    def __init__(self) -> None:
        self._size = 0

    def packed(self, draws: SharedDraws, device: torch.device) -> DrawsMessage:
        """Returns the message that lets later stages draw the same numbers, with tensors on `device`."""
        states = None
        if draws.begun:
            text = json.dumps((draws.begun, draws.after), default=lambda value: {_BYTES: b64encode(value).decode()}).encode()
            if len(text) > self._size:
                self._size = len(text) * 5 // 4
            states = torch.frombuffer(bytearray(text.ljust(self._size)), dtype=torch.uint8).to(device)
        return None if draws.seed is None else draws.seed.to(device), states


def unpacked(message: DrawsMessage, device: torch.device, generators: CodeGenerators | None, *, is_whole: bool) -> SharedDraws:
    """Returns the random numbers that begin with a message."""
    seed, states = message
    begun, after = ({}, None) if states is None else _read(states)
    return SharedDraws(seed, device, generators, begun, after, is_whole=is_whole)


def _read(message: Tensor) -> tuple[States, States]:
    """Returns the states before and after a forward."""
    begun, after = json.loads(message.cpu().numpy().tobytes(), object_hook=_as_bytes)
    return _as_tuple(begun), _as_tuple(after)


def _as_bytes(entries: dict[str, Any]) -> Any:
    return b64decode(entries[_BYTES]) if _BYTES in entries else entries


def _as_tuple(value: Any) -> Any:
    """Returns a state as it was before JSON made its tuples lists."""
    if isinstance(value, dict):
        return {name: _as_tuple(entry) for name, entry in value.items()}
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
