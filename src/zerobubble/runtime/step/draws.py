"""The random numbers that stages draw, such as dropout masks: every pass has a stream of its own, apart from the user's generators.

A stream is seeded by what the pass computes, not by when and where it runs: by the seed that all ranks agreed on, the step, the stage and
the microbatch of the whole batch. So masks are the same under every schedule and on any number of ranks, no two passes share them, and the
user's generators advance alike on all ranks, whose data loaders shuffle with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from zerobubble.runtime.values.random_state import RandomState, generators_of, mixed, seed_for

SeedPass = Callable[[int, int, bool], None]
"""A function `(stage, microbatch, goes_back)` that begins the stream of a forward, or of a backward, on this rank."""
TRAINS = -1
"""Stands for the number of an evaluation in the streams of training steps."""


class StageDraws:
    """The streams of the passes on this rank, whose tensors are on `device`.

    `seed` is the same on all ranks. This rank's pipeline is number `replica` of `num_replicas`, which are given shares of the batch.
    """

    def __init__(self, seed: int, replica: int, num_replicas: int, device: torch.device) -> None:
        self.seed = seed
        self._replica = replica
        self._num_replicas = num_replicas
        self._device = device

    def of_step(self, step: int, num_microbatches: int, evaluation: int = TRAINS) -> SeedPass:
        """What begins the streams of a training step, or of an evaluation after so many of them.

        Replicas count microbatches on. They may cut their shares into other numbers of them, which have other streams by their `total`.
        """
        first, total = self._replica * num_microbatches, self._num_replicas * num_microbatches
        of_step, generators = seed_for(self.seed, step, evaluation, total), generators_of(self._device)

        def seed_pass(stage: int, microbatch: int, goes_back: bool) -> None:
            seed = mixed(of_step, (stage << 32) + 2 * (first + microbatch) + goes_back)
            for generator in generators:
                generator.manual_seed(seed)

        return seed_pass

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Around passes: afterwards the user's generators are where they were."""
        users = RandomState.now(self._device)
        try:
            yield
        finally:
            users.set()
