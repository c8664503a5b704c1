"""Default random generators: torch's of the CPU and of one device, which all code of stages draws from, and Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.runtime.device import accelerator_in_use, generators_restored, interface, seed_alike

_ONE_AT_A_TIME = RLock()
"""Serializes threads that draw from a seed: ranks that are threads of one process build their stages at once, with one generator."""
_64_BITS = 2**64 - 1


class RandomState(NamedTuple):
    """The states of the default generators of the CPU and of one device."""

    device: torch.device
    on_cpu: Tensor
    on_device: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """Returns the current states."""
        on_device = interface(device)
        return cls(device, torch.get_rng_state(), on_device.random_state() if on_device.has_generator else None)

    def set(self) -> None:
        """Restores these states."""
        torch.set_rng_state(self.on_cpu)
        if self.on_device is not None:
            interface(self.device).set_random_state(self.on_device)


class RandomStates(NamedTuple):
    """The states of all generators that user code draws from: torch, Python, and NumPy if it is imported."""

    of_torch: RandomState
    of_python: tuple[Any, ...]
    of_numpy: tuple[Any, ...] | None

    @classmethod
    def now(cls, device: torch.device) -> RandomStates:
        """Returns the current states."""
        numpy = sys.modules.get("numpy")
        return cls(RandomState.now(device), random.getstate(), None if numpy is None else numpy.random.get_state())

    def is_same_as(self, other: RandomStates) -> bool:
        """Returns whether all generators have the same states in both."""
        return self._comparable() == other._comparable()

    def _comparable(self) -> tuple[Any, ...]:
        tensors = [tensor.numpy().tobytes() for tensor in (self.of_torch.on_cpu, self.of_torch.on_device) if tensor is not None]
        return tensors, self.of_python, None if self.of_numpy is None else in_bytes(self.of_numpy)

    def set(self, now: RandomStates | None = None) -> None:
        """Restores these states. With the current states as argument, generators that already have their state are not written."""
        self.of_torch.set()
        if now is None or now.of_python != self.of_python:
            random.setstate(self.of_python)
        numpy = sys.modules.get("numpy")
        if numpy is None or self.of_numpy is None:
            return
        if now is None or now.of_numpy is None or in_bytes(now.of_numpy) != in_bytes(self.of_numpy):
            numpy.random.set_state(self.of_numpy)


def in_bytes(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns a state of NumPy in a form that can be compared."""
    kind, words, *rest = state
    return kind, words.tobytes(), *rest


@contextmanager
def states_restored(states: RandomStates | None, device: torch.device) -> Iterator[None]:
    """A context that begins with `states`, if given, and restores the previous states at its end."""
    before = RandomStates.now(device)
    if states is not None:
        states.set(before)
    try:
        yield
    finally:
        before.set()


def devices_with_generators(*values: Any) -> list[torch.device]:
    """Returns the devices with generators of their own of the tensors in `values`, which are modules or nests of tensors."""
    devices: set[torch.device] = set()
    for value in values:
        tensors = (*value.parameters(), *value.buffers()) if isinstance(value, nn.Module) else pytree.tree_leaves(value)
        devices.update(tensor.device for tensor in tensors if isinstance(tensor, Tensor) and not tensor.is_meta)
    return sorted((device for device in devices if interface(device).has_generator), key=str)


def states_of(devices: Sequence[torch.device]) -> list[bytes]:
    """Returns the states of the generators of the CPU and of `devices`, to compare with later states."""
    return [state.numpy().tobytes() for state in (torch.get_rng_state(), *(interface(device).random_state() for device in devices))]


@contextmanager
def forked(*values: Any) -> Iterator[None]:
    """Restores the generators of the CPU and of the devices of `values` on exit.

    `torch.random.fork_rng` by itself touches every GPU of the machine, which takes a context on each.
    """
    with generators_restored(devices_with_generators(*values)):
        yield


def generators_of(device: torch.device) -> tuple[torch.Generator, ...]:
    """Returns the default generators of the CPU and of `device`, to seed no others: `torch.manual_seed` seeds all devices."""
    on_device = interface(device)
    return (torch.default_generator, on_device.generator()) if on_device.has_generator else (torch.default_generator,)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds the generators of the CPU and of `device`."""
    for generator in generators_of(device):
        generator.manual_seed(seed)


def seed_all(seed: int, device: torch.device, seed_of_python: int) -> None:
    """Seeds all generators that user code draws from: torch's with `seed`, Python's and NumPy's with `seed_of_python`."""
    seed_generators(seed, device)
    random.seed(seed_of_python)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed_of_python % 2**32)


def mixed(seed: int, number: int) -> int:
    """Returns a seed for each `number` below 2**64, all different. Takes a tenth of the time of `seed_for`, since every pass calls it.

    The steps are those of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    x = (seed + number * 0x9E3779B97F4A7C15) & _64_BITS
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _64_BITS
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _64_BITS
    return x ^ x >> 31


def seed_for(*numbers: int) -> int:
    """Returns a seed for these numbers: the same on every machine, and different for other numbers. A CPU uses its lower 32 bits."""
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=8).digest(), "little")


def drawn_seed() -> Tensor:
    """Draws a seed, which advances the CPU's generator by one number, as a `DataLoader` does for its workers."""
    return torch.empty((), dtype=torch.int64, device="cpu").random_()


def next_seed() -> int:
    """Returns the seed that `drawn_seed` would draw next, and leaves the CPU's generator as it is."""
    with _ONE_AT_A_TIME, generators_restored([]):
        return int(drawn_seed())


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context in which all devices draw from `seed`; restores the generators, and resets generators of devices initialized inside."""
    used = accelerator_in_use()
    with _ONE_AT_A_TIME, generators_restored([] if used is None else [used]):
        torch.manual_seed(seed)
        yield
    if used is None and (first_used := accelerator_in_use()) is not None:
        seed_alike(first_used)


@contextmanager
def python_generator_restored() -> Iterator[None]:
    """A context after which Python's generator is as before, such as for the import of a module that draws from it."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)
