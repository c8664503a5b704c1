"""The batch, the losses and the logs of one training step of a LightningModule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.integrations.lightning.comparison import Fault
from zerobubble.integrations.lightning.draws import BatchDraws
from zerobubble.integrations.lightning.logs import Entry
from zerobubble.integrations.lightning.metrics import Counts, Updates
from zerobubble.runtime.frameworks import RandomStates


@dataclass
class Step:
    """One training step.

    Attributes:
        batch: The batch.
        microbatches: The parts of the batch.
        sizes: Their numbers of samples.
        rest: The other arguments of `training_step`.
        share: The factor of every loss: one over the number of batches that accumulate gradients.
        counts: The numbers of updates of metrics before the step.
        arguments: Those of the network for the whole batch.
        losses: For each microbatch, its loss, without the factor.
        logs: For each microbatch, what `training_step` logged.
        updates: For each microbatch, the updates of metrics with its numbers, which are held back.
        extras: For each microbatch, what `training_step` returned in addition to the loss.
        draws: The random numbers that `training_step` draws.
        states: The random states at the beginning of `training_step`, if it draws random numbers before the call.
        states_after: The random states after all captures.
        without_loss: The microbatches, of weights other than 0, for which `training_step` returns None.
        skipped: What `training_step` logs for the whole batch, if it returns None for it; None if it returns a loss.
        is_repeated: Whether the passes run for the second time.
        runs_again: Whether the passes run a second time after these, to be compared: `training_step` returns None for a microbatch, or
            gives a number, for the first time.
        is_compared: Whether `training_step` also runs for the whole batch.
        refused: The errors of uses that are refused, from runs for microbatches, which one rank makes.
        draws_late: Whether a microbatch moves a random generator after the call of the network; known in steps that are compared.
        fault: What differs from one call of `training_step` for the batch, if it returns None for a microbatch.
    """

    batch: Any
    microbatches: list[Any]
    sizes: list[int]
    rest: tuple[Any, ...]
    share: float
    counts: Counts
    arguments: Any = None
    losses: dict[int, Tensor] = field(default_factory=dict)
    logs: list[list[Entry]] = field(init=False)
    updates: list[Updates] = field(init=False)
    extras: list[dict[str, Any]] = field(init=False)
    draws: BatchDraws = field(init=False)
    states: RandomStates | None = None
    states_after: RandomStates | None = None
    without_loss: list[int] = field(default_factory=list)
    skipped: list[Entry] | None = None
    is_repeated: bool = False
    runs_again: bool = False
    refused: list[InputError] = field(default_factory=list)
    draws_late: bool = False
    fault: Fault | None = None
    is_compared: bool = False

    def __post_init__(self) -> None:
        self.logs = [[] for _ in self.sizes]
        self.updates = [{} for _ in self.sizes]
        self.extras = [{} for _ in self.sizes]
        self.draws = BatchDraws(self.sizes)
