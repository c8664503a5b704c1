"""Random numbers of stages, such as dropout masks: every pass has its own stream, separate from the user's generators.

A stream is seeded by what the pass computes, not by when and where it runs: by the seed that all ranks share, the step, the stage, and the
index of the microbatch in the whole batch. So masks are the same under every schedule and on any number of ranks, and no two passes share
them. The user's generators, with which data loaders shuffle, do not advance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from zerobubble.runtime.values.random_state import RandomState, generators_of, mixed, seed_for

SeedPass = Callable[[int, int, bool], None]
"""A function `(stage, microbatch, is_backward)` that seeds the stream of a forward or backward on this rank."""
TRAINS = -1
"""Stands for the number of the evaluation in the streams of training steps, which are not part of one."""


class StageRng:
    """The streams of the passes on this rank, whose tensors are on `device`.

    `seed` is the same on all ranks. This pipeline is number `replica` of `num_replicas`, which share the batch.
    """

    def __init__(self, seed: int, replica: int, num_replicas: int, device: torch.device) -> None:
        self.seed = seed
        self._replica = replica
        self._num_replicas = num_replicas
        self._device = device

    def seed_pass_of(self, step: int, num_microbatches: int, evaluation: int = TRAINS) -> SeedPass:
        """Returns the function that seeds the streams of a training step, or of an evaluation after `step` training steps.

        The microbatches of replicas are numbered consecutively. Steps with another number of microbatches have other streams.
        """
        first, total = self._replica * num_microbatches, self._num_replicas * num_microbatches
        step_seed, generators = seed_for(self.seed, step, evaluation, total), generators_of(self._device)

        def seed_pass(stage: int, microbatch: int, is_backward: bool) -> None:
            seed = mixed(step_seed, (stage << 32) + 2 * (first + microbatch) + is_backward)
            for generator in generators:
                generator.manual_seed(seed)

        return seed_pass

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """A context for passes, after which the user's generators have their previous state."""
        users = RandomState.now(self._device)
        try:
            yield
        finally:
            users.set()
