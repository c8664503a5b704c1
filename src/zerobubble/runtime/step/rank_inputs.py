"""Cuts the inputs, targets and named arguments that a rank is given for a step into the microbatches and slices of a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from zerobubble.errors import InputError
from zerobubble.runtime.executor.executor import Executor
from zerobubble.runtime.step.batch import (
    GIVEN_AS_LIST,
    NO_BATCH,
    SplitBatch,
    StepInputs,
    as_arguments,
    refuse_other_size,
    sample_slices,
    split_batch,
)
from zerobubble.runtime.step.captured_step import CapturedStep
from zerobubble.runtime.step.input_gradients import InputGradients
from zerobubble.runtime.step.named_arguments import NamedArguments, positional_names, refuse_other_kwargs, split_kwargs
from zerobubble.runtime.step.sequence import cut_arguments, cut_sequences
from zerobubble.runtime.values.payload import Tensors


class RankInputs:
    """What rank `rank` of a pipeline, with the stages `modules`, is `given` for a step of `executor`.

    The inputs of a `captured` step are where its graph reads them. `gradients` collects those of inputs.

    Attributes:
        is_first: Whether microbatches begin on this rank.
        is_last: Whether microbatches end on this rank.
        batch: The inputs, `NO_BATCH` on other ranks than the first.
        targets: The targets, `NO_BATCH` on other ranks than the last.
        arguments: The arguments of the first stage for each microbatch.
        named: By stage of this rank, the named arguments of each microbatch; on other ranks than the first, empty until `know_size`.
    """

    def __init__(
        self,
        step_inputs: StepInputs,
        executor: Executor,
        rank: int,
        modules: Mapping[int, nn.Module],
        gradients: InputGradients,
        captured: CapturedStep | None,
    ) -> None:
        entries, exits = executor.ends
        self.is_first, self.is_last = rank in entries, rank in exits
        self._given = step_inputs
        self._modules = modules
        self._slices = executor.program.slices
        self._count = executor.program.num_microbatches // self._slices
        self._gradients = gradients
        self._captured = captured
        self.batch = self.targets = NO_BATCH
        self.arguments: list[Tensors] = []
        self.named: NamedArguments = {}

    def cut(self) -> None:
        """Cuts all that this rank can cut by itself. Raises `InputError` for what cannot be cut."""
        refuse_other_kwargs(self._given.kwargs)
        names = positional_names(self._modules, self._given.batch_dims)
        inputs = self._split(self._given.inputs, "inputs", names) if self.is_first else NO_BATCH
        targets = self._targets()
        if self.is_first:
            _refuse_views(inputs, targets)
            refuse_other_size("targets", targets.batch_size, inputs.batch_size)
            self.named = self._named(inputs.batch_size, inputs)
        self.batch, self.targets = self._placed("inputs", inputs), self._placed("targets", targets) if self.is_last else NO_BATCH
        self.arguments = [as_arguments(microbatch) for microbatch in self.batch.microbatches]

    def _targets(self) -> SplitBatch:
        """Cuts the targets. The first rank checks those that it is given: their rank would refuse them once others have begun the step."""
        if self._given.targets is None or not (self.is_first or self.is_last):
            return NO_BATCH
        gradients = self._gradients if self.is_last else InputGradients()
        return split_batch(self._given.targets, self._count, "targets", gradients, self._given.batch_dims)

    def know_size(self, size: int, of_rank: int) -> None:
        """Cuts the rest, now that the batch of the first rank, `of_rank`, is known to have this `size`; raises `InputError` for another."""
        refuse_other_size("those of this rank", self.batch.batch_size, size, of_rank)
        refuse_other_size("the targets of this rank", self.targets.batch_size, size, of_rank)
        if not self.is_first:
            self.named = self._named(size, NO_BATCH)
        if self._captured is not None:
            self.named = self._captured.inputs("kwargs", self.named)

    def sizes(self, size: int) -> list[int]:
        """Returns the number of samples of each microbatch, for a batch of this `size`, 0 if it is not known."""
        if size:
            return [rows.stop - rows.start for rows in sample_slices(size, self._count)]
        return self.targets.sizes or self.batch.sizes

    def _split(self, batch: Any, what: str, names: Any = ()) -> SplitBatch:
        return split_batch(batch, self._count, what, self._gradients, self._given.batch_dims, names)

    def _named(self, size: int, inputs: SplitBatch) -> NamedArguments:
        named = split_kwargs(self._given.kwargs, self._modules, self._count, size, self._gradients, self._given.batch_dims)
        return cut_arguments(named, self._slices, inputs, self._modules)

    def _placed(self, what: str, batch: SplitBatch) -> SplitBatch:
        """Returns the slices of a batch, where a captured step reads them."""
        batch = cut_sequences(batch, self._slices, what)
        return batch if self._captured is None else batch._replace(microbatches=self._captured.inputs(what, batch.microbatches))


def _refuse_views(inputs: SplitBatch, targets: SplitBatch) -> None:
    """Raises `InputError` for a list in which each item has all samples of the targets: views of one batch, and no microbatches."""
    count, size = len(inputs.sizes), targets.batch_size
    if inputs.batch_size == GIVEN_AS_LIST != size and count > 1 and set(inputs.sizes) == {size}:
        raise InputError(
            "inputs are a list of {count} items of {size} samples each, and a list has the microbatches, but the targets have {size} "
            "samples in all",
            count=count,
            size=size,
            remedy="give a model that takes a list a tuple with it, step((views,), targets), and targets of microbatches as a list, too",
        )
