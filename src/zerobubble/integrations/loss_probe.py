"""Asks `compute_loss` for a few samples of a batch, alone and together, so that the rules of its numbers follow.

The pipeline runs forward of the samples alone and of all of them. Its rounding hides small terms of a loss. So the rank of the last stage
calls the function again with rows of *one* output of the model, and the numbers then agree to the rounding of the loss. These calls take
no forward, and are repeated for the middle and the end of training, since a loss may depend on the step or the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from zerobubble.errors import InputError
from zerobubble.integrations.batches import num_samples, samples_of
from zerobubble.integrations.lone_calls import CONTAINERS, name_of_change, unchanged
from zerobubble.integrations.loss_calls import PENALTIES, LossCalls, Microbatches
from zerobubble.integrations.loss_rules import Comparison, are_near, with_other_labels
from zerobubble.integrations.sample_outputs import JoinedOutput
from zerobubble.integrations.whole_model import replaced
from zerobubble.runtime.frameworks import GENERATORS, PythonState, RandomStates, changed, is_constant_code, put_back, states_restored

HALVES = (torch.float16, torch.bfloat16)
SKIPPED = ("train_dataset", "eval_dataset")
LOSS = "the loss"
EXACT = 3e-6
"""The relative difference between numbers from one output of the model that the rounding of a loss in float32 explains."""
NOISE = 4.0
"""The size of random numbers in the products of random weights with inputs of size 1."""
TRIES = 4
TIMES = (0.0, 0.5, 1.0)
"""The parts of the rest of training after which a loss is asked."""


@dataclass
class Probe(Microbatches):
    """The microbatches of a probe: for each group of samples, each alone, then all of them together.

    Attributes:
        width: The number of microbatches of a group.
        num_groups: The number of groups. Further microbatches are padding.
        rounding: The relative difference between numbers that the rounding of the model explains.
        start: The random states before each call.
        draws: Whether `compute_loss` draws random numbers.
        faults: What of `compute_loss` a pipeline cannot run.
        numbers: The numbers of the microbatches, on the rank of the last stage.
        outputs: The outputs of the model for the samples of a group, as `JoinedOutput` needs them.
        comparisons: What the calls gave, on the rank of the last stage at first.
    """

    width: int = 0
    num_groups: int = 0
    rounding: float = 0.0
    start: RandomStates | None = None
    draws: bool = False
    faults: list[str] = field(default_factory=list)
    numbers: list[dict[str, float]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)

    def items_of(self, index: int) -> Any:
        return self.items * (index + 1) if self.width == 1 and self.items is not None else self.items

    def samples_of(self, comparison: Comparison) -> list[Any]:
        """Returns the samples of a group, each a batch."""
        first = comparison.group * self.width
        return self.parts[first : first + self.width - 1]


class Prober:
    """Makes probes of a `trainer` by `calls` of its `compute_loss`. `dims` has the batch dimensions other than the first."""

    def __init__(self, trainer: Any, calls: LossCalls, dims: Mapping[str, int | None]) -> None:
        self._trainer = trainer
        self._calls = calls
        self._dims = dims
        halves = any(parameter.dtype in HALVES for parameter in trainer.model.parameters())
        self._rounding_of_weights = 3e-3 if halves else 2e-5
        self._rounding = self._rounding_of_weights if trainer.accelerator.mixed_precision == "no" else 3e-3  # of the model
        self._uses_models = False
        self._objects = PythonState()
        attention = getattr(getattr(trainer.model, "config", None), "_attn_implementation", None)
        self.num_tries = 0 if "flash" in str(attention) else TRIES  # it runs in autocast only
        """The number of other weights with which a loss may be asked."""

    def prepared(self, inputs: Any, rows: Sequence[int], items: Any, *, trains: bool) -> Probe:
        """Returns a probe of these samples of a batch, also with other labels if these are classes, with the arguments of the model."""
        names, device = self._trainer.label_names or (), self._trainer.args.device
        classes = getattr(getattr(self._trainer.model, "config", None), "num_labels", 1) or 1
        if self._trainer._num_microbatches == 1:
            rows, wholes = [], [inputs]  # what is not cut needs no rules, and may fail for single samples
            wholes *= 2 if items is not None and self._trainer._num_replicas > 1 else 1  # with items, and with twice as many
        else:
            whole = samples_of(inputs, rows, self._dims)
            wholes = [batch for batch in (whole, with_other_labels(whole, inputs, names, classes)) if batch is not None]
        parts = [part for batch in wholes for part in (*(samples_of(batch, [row], self._dims) for row in range(len(rows))), batch)]
        parts += [parts[0]] * (-len(parts) % self._trainer._num_microbatches)
        probe = Probe(parts, trains, items, not trains, is_compared=True, width=len(rows) + 1, num_groups=len(wholes))
        probe.start = RandomStates.now(device)
        self._objects = self._state_of_objects()
        with states_restored(None, device), unchanged(self._trainer, SKIPPED), self._objects_unchanged():
            for index in range(len(parts)):
                probe.start.set()
                self._calls.capture(probe, index, keeps=False)
                probe.draws |= not RandomStates.now(device).is_same_as(probe.start)
        return probe

    def play(self, probe: Probe, seed: int | None = None) -> None:
        """Runs forward of the microbatches, and gives the probe of every rank what `compute_loss` gave on the rank of the last stage.

        With a `seed`, the last stage has other weights, since a fresh model may give all samples the same loss, and there is no autocast.
        """
        trainer = self._trainer
        count = trainer._num_microbatches
        probe.numbers, probe.outputs, probe.comparisons = [], [], []
        probe.rounding = self._rounding if seed is None else self._rounding_of_weights
        with states_restored(None, trainer.args.device), unchanged(trainer, SKIPPED), torch.no_grad(), ExitStack() as stack:
            stack.enter_context(trainer._autocast() if seed is None else torch.autocast(trainer.args.device.type, enabled=False))
            if seed is not None and trainer._has_last_stage:
                stack.enter_context(_other_weights(trainer.pipeline.parameters(), seed))
            for first in range(0, len(probe.parts), count):
                trainer.pipeline.eval_step(probe.arguments[first : first + count], probe.targets[first : first + count])
        has_answers = probe.numbers or probe.faults
        probe.comparisons, probe.faults, draws = trainer._from_last_stage(
            (probe.comparisons, probe.faults, probe.draws) if has_answers else None
        )
        probe.draws |= draws

    def answer(self, probe: Probe, output: Any, index: int) -> Tensor:
        """Calls `compute_loss` with the output of a microbatch, and compares the numbers of a group after its last microbatch."""
        group, place = divmod(index, probe.width)
        if group < probe.num_groups and not probe.faults:
            try:
                probe.numbers.append(self._numbers(probe, index, output))
                probe.outputs.append(JoinedOutput.sample(output))
                if place == probe.width - 1:
                    numbers = probe.numbers[-probe.width :]
                    self._refuse_counts(probe, index, output, numbers[-1])
                    probe.comparisons += [Comparison(group, numbers, probe.rounding), *self._from_one_output(probe, group, output)]
            except Exception as error:  # noqa: BLE001 - the user's function may raise anything, and all ranks name it
                probe.faults.append(str(error) if isinstance(error, InputError) else self._raised(error, probe.parts[index]))
        return torch.zeros((), device=self._trainer.args.device)

    def _refused(self, parameter: str) -> InputError:
        """Returns the error for a term over a parameter of another rank, which would hide the rule, too."""
        return InputError(
            "{name} reads {parameter!r}, which is of another rank's stage, and the gradient of this term would be lost",
            name=self._calls.name,
            parameter=parameter,
            remedy=PENALTIES,
        )

    def _numbers(self, probe: Probe, index: int, output: Any) -> dict[str, float]:
        """Returns the numbers of a call of `compute_loss`, and notes what a pipeline cannot run."""
        assert probe.start is not None
        device = self._trainer.args.device
        with ExitStack() as stack:
            stack.enter_context(states_restored(probe.start, device))
            attributes = stack.enter_context(unchanged(self._trainer, SKIPPED))
            objects = stack.enter_context(self._objects_unchanged())
            stack.enter_context(self._models_noted())
            if probe.trains:
                stack.enter_context(self._trainer._pipe._steps.cut_model.refusing_reads(self._refused))
            output = stack.enter_context(_copied(output, records=probe.trains))
            called = self._calls.call(probe, index, output)
            probe.draws |= not RandomStates.now(device).is_same_as(probe.start)
        if names := [*(f"self.{name}" for name in attributes if name not in self._calls.covered), *objects]:
            place = f"{self._calls.name} changes {names[0]}"
            reason = "a pipeline runs it once for each microbatch, on one rank"
            probe.faults.append(f"{place}, and {reason}: change it in a callback, or log with self.log")
        return {LOSS: float(called.loss.detach()), **called.numbers}

    def _state_of_objects(self) -> PythonState:
        """Returns the state of what the trainer's attributes hold, such as a meter, and of variables that code of its class uses.

        Models are left out: what their forwards keep is a cache.
        """
        trainer = self._trainer
        held = {
            f"self.{name}": value
            for name, value in vars(trainer).items()
            if name not in (*SKIPPED, *self._calls.covered)
            and (isinstance(value, CONTAINERS) or _is_stateful(value) or not is_constant_code(type(value).__module__))
        }
        held |= {"compute_loss_func": trainer.compute_loss_func} if trainer.compute_loss_func is not None else {}
        return PythonState(held, type(trainer), left_out=(trainer, trainer.model, trainer.model_wrapped, trainer.args))

    @contextmanager
    def _objects_unchanged(self) -> Iterator[list[str]]:
        """A context that undoes changes of objects. At its end, the list has the names of what has changed."""
        before = self._objects.snapshot()
        names: list[str] = []
        try:
            yield names
        finally:
            names += [name_of_change(name, place) for name, place in changed(before).items() if place.path not in GENERATORS]
            for fault in put_back(before) if names else []:
                raise fault

    def _refuse_counts(self, probe: Probe, index: int, output: Any, numbers: dict[str, float]) -> None:
        """Raises `InputError` if numbers depend on the number of processes, unless it is a factor of the loss. Calls count one process."""
        if (replicas := self._trainer._num_replicas) == 1:
            return
        with replaced(self._calls, num_processes=replicas):
            others = self._numbers(probe, index, output)
        for name, number in numbers.items():
            expected = (number, replicas * number) if name == LOSS else (number,)
            if not any(are_near(others.get(name, 0.0), value, EXACT, [number]) for value in expected):
                raise InputError(
                    "{name} in {function} is {expected} for one process and {got} for {count}, the number of replicas",
                    name=name,
                    function=self._calls.name,
                    expected=number,
                    got=others.get(name),
                    count=replicas,
                    remedy="use the number of processes as a factor of the whole loss only, and gather(...).mean() for a mean of replicas",
                )

    def _from_one_output(self, probe: Probe, group: int, output: Any) -> Iterator[Comparison]:
        """Yields the comparisons of a group that take the rows of one output of the model, now and later in training."""
        first = group * probe.width
        *alone, together = probe.arguments[first : first + probe.width]
        joined = JoinedOutput(output, probe.outputs[-probe.width : -1], (together, alone))
        tolerance = probe.rounding if self._uses_models else EXACT
        for sums in (False, True) if joined.has_numbers else (None,):
            for state in self._later_states() if joined.is_cut and probe.width > 2 else []:
                try:
                    with replaced(self._trainer.state, **state):
                        rows = [self._numbers(probe, first + row, joined.of(row, sums=bool(sums))) for row in range(probe.width - 1)]
                        numbers = [*rows, self._numbers(probe, first + probe.width - 1, joined.whole())]
                except Exception:  # noqa: BLE001 - such as a loss of probabilities, of numbers that are none
                    continue
                if all(math.isfinite(of_one[LOSS]) for of_one in numbers):
                    yield Comparison(group, numbers, tolerance, sums)

    def _later_states(self) -> list[dict[str, Any]]:
        """Returns attributes of the trainer's state for now, and for later in training."""
        state = self._trainer.state
        left = max(state.max_steps - 1 - state.global_step, 0)
        epoch = state.epoch or 0
        epochs = max(state.num_train_epochs - epoch, 0)
        states = [{"global_step": state.global_step + int(part * left), "epoch": epoch + part * epochs} for part in TIMES]
        return states if left else states[:1]

    @contextmanager
    def _models_noted(self) -> Iterator[None]:
        """A context that notes calls of other models, such as a teacher: their outputs for samples are not those for the batch, exactly."""

        def note(module: nn.Module, args: Any) -> None:
            self._uses_models |= module is not self._trainer.model and any(True for _ in module.parameters())

        handle = register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def _raised(self, error: Exception, microbatch: Any) -> str:
        count, reason = num_samples(microbatch, self._dims), f"{type(error).__name__}: {error}"
        return f"{self._calls.name} fails for a microbatch of size {count}, and a pipeline calls it for each microbatch: {reason}"


def _is_stateful(value: Any) -> bool:
    """Returns whether an attribute is a module that only counts, such as a Metric, and no model."""
    return isinstance(value, nn.Module) and next(value.parameters(), None) is None


@contextmanager
def _other_weights(parameters: Iterable[nn.Parameter], seed: int) -> Iterator[None]:
    """A context in which random numbers are added to matrices, so large that the losses of samples differ."""
    generator = torch.Generator("cpu").manual_seed(seed)
    before = [(matrix, matrix.detach().clone()) for matrix in parameters if matrix.ndim > 1 and matrix.is_floating_point()]
    try:
        for matrix, _ in before:
            noise = torch.randn(matrix.shape, generator=generator, device="cpu").mul_(NOISE / matrix.shape[-1] ** 0.5)
            matrix.add_(noise.to(matrix))
        yield
    finally:
        for matrix, values in before:
            matrix.copy_(values)


@contextmanager
def _copied(output: Any, *, records: bool) -> Iterator[Any]:
    """A context with a copy of the output, which `compute_loss` may change in place, that records gradients as a training step does."""
    with torch.set_grad_enabled(records):
        yield pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().requires_grad_(records and leaf.is_floating_point()).clone(), output)
