"""Runs `compute_loss` of a Trainer for each microbatch of a batch, so that loss and gradients are those of one call for the whole batch.

Every rank runs it for each microbatch up to the call of the model, to capture the arguments of the call. The rank of the last stage runs it
once more, where the call returns the output that the pipeline has computed. Both runs draw the same random numbers.

What the function divides by is found out from a few samples of a batch (see `loss_rules`), before the first step, before steps 2, 4, 8 and
so on, and before a step in which the rules that have applied so far differ, or with a larger or smaller label than before. So a step costs
no further call.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import convert_to_fp32
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.integrations.batches import cut, num_samples, samples_of
from zerobubble.integrations.lone_calls import collectives_refused, numbers_of, unchanged
from zerobubble.integrations.loss_rules import (
    Rule,
    differ,
    extremes,
    fits,
    rules_of,
    telling_samples,
    with_other_labels,
    with_varied_scales,
)
from zerobubble.integrations.whole_model import CalledError, equal_arguments, raise_called, replaced
from zerobubble.runtime.step.batch import join_outputs
from zerobubble.runtime.values.random_state import RandomStates, drawn_seed, mixed, seed_generators, states_restored

HALVES = (torch.float16, torch.bfloat16)
SKIPPED = ("train_dataset", "eval_dataset")
LOSS, LOGGED, ATTRIBUTE = "the loss", "logged ", "self."


@dataclass
class Batch:
    """A batch in microbatches.

    Attributes:
        microbatches: The parts of the batch.
        trains: Whether it is a training step.
        items: What `compute_loss` gets as `num_items_in_batch`.
        arguments: The arguments with which it calls the model, for each microbatch.
        states: The random states before each call, if it draws random numbers.
        states_after: The random states after all captures.
        seed: What the random numbers after the call of the model follow from, if it draws any.
        start: The random states before each call of a probe.
        rules: How each number of the batch follows from those of microbatches.
        factor: The factor of the loss of the batch.
        returns_outputs: Whether `compute_loss` is asked for outputs, too.
        numbers, losses, logs, outputs: Of each microbatch, on the rank that computes the losses.
        varied: For microbatches of a probe whose outputs are scaled, so that samples differ more, the samples among those of the probe.
        draws: Whether `compute_loss` draws random numbers, of a probe.
        faults: What of `compute_loss` a pipeline cannot run, of a probe.
    """

    microbatches: list[Any]
    trains: bool
    items: Any
    factor: float = 1.0
    returns_outputs: bool = False
    arguments: list[dict[str, Any]] = field(default_factory=list)
    states: list[RandomStates] = field(default_factory=list)
    states_after: RandomStates | None = None
    seed: int | None = None
    start: RandomStates | None = None
    rules: dict[str, Rule] = field(default_factory=dict)
    shares: list[float] = field(default_factory=list)
    numbers: dict[int, dict[str, float]] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    logs: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    varied: dict[int, list[int]] = field(default_factory=dict)
    draws: bool = False
    faults: list[str] = field(default_factory=list)

    @property
    def targets(self) -> list[Tensor]:
        """The numbers of the microbatches, by which the pipeline's loss function finds them."""
        return [torch.tensor(index, device="cpu") for index in range(len(self.microbatches))]

    def joined_outputs(self) -> Any:
        """Returns the outputs that `compute_loss` returned for the microbatches, joined."""
        return join_outputs([self.outputs[index] for index in range(len(self.microbatches))])


class TrainerLoss:
    """The losses of a trainer's batches.

    Args:
        trainer: The trainer, a `PipelineMixin`.
        weight: What the user gave as `loss_weight`.
        dims: The batch dimensions of arguments that have another one than the first.
        covered: The attributes that `compute_loss` changes and the trainer's class merges itself.
    """

    def __init__(self, trainer: Any, weight: Any, dims: Mapping[str, int | None], covered: tuple[str, ...]) -> None:
        self._trainer = trainer
        self._weight = weight
        self._dims = dims
        self._covered = covered
        halves = any(parameter.dtype in HALVES for parameter in trainer.model.parameters())
        self._tolerance = 3e-3 if halves or trainer.accelerator.mixed_precision != "no" else 2e-5  # for the rounding of the model
        self._rules: dict[tuple[bool, tuple[str, ...]], dict[str, list[Rule]]] = {}
        self._num_steps = {True: 0, False: 0}
        self._extremes: dict[tuple[bool, str], tuple[int, int]] = {}
        self._draws = {True: False, False: False}
        self._batch: Batch | None = None

    # A batch

    def begin(self, inputs: Any, items: Any, factor: float, *, trains: bool, returns_outputs: bool = False) -> Batch:
        """Returns the microbatches of a batch with the arguments of the model for each, after finding out the rules if that is due."""
        count = min(num_samples(inputs, self._dims), self._trainer._num_microbatches)
        batch = Batch(cut(inputs, count, self._dims)[0], trains, items, factor, returns_outputs)
        key = trains, tuple(name for name, value in inputs.items() if value is not None)
        self._num_steps[trains] += 1
        rules = self._rules.get(key, {})
        if self._is_due(rules, batch, has_new_labels=self._has_new_labels(inputs, trains=trains)):
            rules = self._rules[key] = self._found_out(inputs, items, trains, rules)
        batch.rules = {name: left[0] for name, left in rules.items()}
        batch.shares = batch.rules[LOSS].shares(batch.microbatches)
        self._capture(batch)
        self._batch = batch
        return batch

    def _has_new_labels(self, inputs: Any, *, trains: bool) -> bool:
        """Returns whether a batch has a larger or smaller label than all batches before."""
        before = dict(self._extremes)
        for name, (low, high) in extremes(inputs, self._trainer.label_names or ()).items():
            lowest, highest = before.get((trains, name), (low, high))
            self._extremes[trains, name] = min(low, lowest), max(high, highest)
        return before != self._extremes

    def _is_due(self, rules: dict[str, list[Rule]], batch: Batch, *, has_new_labels: bool) -> bool:
        """Returns whether the rules must be found out before this batch, the same on all ranks."""
        step = self._num_steps[batch.trains]
        due = not rules or has_new_labels or step & (step - 1) == 0 or any(differ(left, batch.microbatches) for left in rules.values())
        if self._trainer._num_replicas > 1:
            flag = torch.tensor(int(due), device=self._trainer.args.device)
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._trainer._same_stages)
            due = bool(flag)
        return due

    def arguments_of(self, inputs: Any) -> dict[str, Any]:
        """Returns the arguments with which `compute_loss` calls the model for a batch, before there is a pipeline."""
        return self._captured(Batch([inputs], True, None), 0, keeps=False)

    def weight(self, index: Tensor) -> float:
        """Returns the weight of a microbatch in the pipeline's mean loss. Those of a batch sum up to 1."""
        assert self._batch is not None
        batch = self._batch
        return 1 / len(batch.shares) if batch.start is not None or batch.rules[LOSS].divisor is None else batch.shares[int(index)]

    def loss(self, output: Any, index: Tensor) -> Tensor:
        """Returns the loss of a microbatch for the pipeline's mean: that of `compute_loss`, times the number of microbatches if it sums."""
        batch = self._batch
        assert batch is not None
        if batch.start is not None:
            return self._probed(batch, output, int(index))
        loss = self._computed(batch, output, int(index))
        factor = batch.factor * (len(batch.shares) if batch.rules[LOSS].divisor is None else 1)
        return loss if factor == 1 else loss * factor

    def finish(self, batch: Batch) -> None:
        """Ends a batch on every rank: random states, numbers among the trainer's attributes, and logs are alike on all of them."""
        self._batch = None
        if batch.states_after is not None:
            batch.states_after.set()
        if len(batch.rules) > 1:
            found = self._merged(batch) if batch.numbers else None
            attributes, logs = self._trainer._from_last_stage(found)
            vars(self._trainer).update(attributes)
            for row in logs:
                self._trainer.log(row)

    def own_loss(self, batch: Batch) -> Tensor:
        """Returns the loss of this replica's batch, on the rank that computes the losses."""
        return torch.stack([batch.losses[index] * share for index, share in enumerate(batch.shares) if share]).sum()

    def _merged(self, batch: Batch) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Returns the new values of attributes, and the logs, of the whole batch."""
        numbers = [batch.numbers[index] for index in range(len(batch.microbatches))]
        merged = {}
        for name, rule in batch.rules.items():
            shares = rule.shares(batch.microbatches)
            merged[name] = sum(share * of_one.get(name, 0.0) for share, of_one in zip(shares, numbers, strict=True) if share)
        attributes = {}
        for name in (name for name in merged if name.startswith(ATTRIBUTE)):
            is_whole = all(isinstance(of_one.get(name, 0), int) for of_one in numbers)
            attribute = name.removeprefix(ATTRIBUTE)
            attributes[attribute] = getattr(self._trainer, attribute) + (round(merged[name]) if is_whole else merged[name])
        rows = [{key: merged.get(f"{LOGGED}{place} {key}", value) for key, value in row.items()} for place, row in enumerate(batch.logs[0])]
        return attributes, rows

    # compute_loss for one microbatch

    def _capture(self, batch: Batch) -> None:
        """Captures the arguments of the model for each microbatch, with the random states of each if random numbers are drawn."""
        before = RandomStates.now(self._trainer.args.device)
        draws = self._draws[batch.trains]
        batch.arguments = [self._captured(batch, index, keeps=draws) for index in range(len(batch.microbatches))]
        after = RandomStates.now(self._trainer.args.device)
        if not after.is_same_as(before) and not draws:
            self._draws[batch.trains] = draws = True
            before.set()
            batch.arguments = [self._captured(batch, index, keeps=True) for index in range(len(batch.microbatches))]
        if draws:
            batch.seed = int(drawn_seed())
        batch.states_after = RandomStates.now(self._trainer.args.device) if draws else after

    def _captured(self, batch: Batch, index: int, *, keeps: bool) -> dict[str, Any]:
        """Returns the arguments with which `compute_loss` calls the model."""
        trainer = self._trainer
        if keeps:
            batch.states.append(RandomStates.now(trainer.args.device))
        numbers = numbers_of(trainer)
        try:
            with self._alone(batch, []), replaced(trainer.model, forward=raise_called(trainer.model)):
                self._called(batch, index)
        except CalledError as error:
            return self._named(error.call_args, error.call_kwargs)
        finally:
            vars(trainer).update(numbers)
        raise InputError(
            "{cls}.compute_loss does not call the model", cls=type(trainer).__name__, remedy="call model(**inputs) in it, once"
        )

    def _called(self, batch: Batch, index: int) -> Any:
        options = {"return_outputs": True} if batch.returns_outputs else {}
        inputs = dict(batch.microbatches[index])
        return self._trainer.compute_loss(self._trainer.model, inputs, num_items_in_batch=batch.items, **options)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if args:
            raise InputError(
                "compute_loss calls the model with {unnamed} arguments without names; {remedy}", unnamed=len(args), remedy="name them"
            )
        return self._trainer._arguments_of_stages({name: value for name, value in kwargs.items() if value is not None})

    @contextmanager
    def _alone(self, batch: Batch, rows: list[dict[str, Any]]) -> Iterator[None]:
        """A context for one run of `compute_loss`: it logs to `rows`, and its collectives are among replicas, or refused."""
        trainer = self._trainer
        accelerator, model = trainer.accelerator, trainer.model
        name = f"{type(trainer).__name__}.compute_loss"
        remedy = "gather with self.accelerator.gather, which joins the replicas"
        with ExitStack() as stack:
            stack.enter_context(replaced(model, training=batch.trains))
            stack.enter_context(replaced(trainer, log=lambda logs, *args, **kwargs: rows.append(dict(logs))))
            stack.enter_context(replaced(accelerator, gather=trainer._gather_among_replicas, reduce=trainer._reduce_among_replicas))
            stack.enter_context(collectives_refused(name, trainer._ranks_of_pipeline, remedy))
            yield

    def _computed(self, batch: Batch, output: Any, index: int) -> Tensor:
        """Runs `compute_loss` with the output of the model for a microbatch. Returns the loss, and notes all numbers."""
        trainer, calls = self._trainer, 0
        device = trainer.args.device
        rows: list[dict[str, Any]] = []
        before = numbers_of(trainer)

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1 and not trainer._may_repeat(kwargs):
                raise InputError(
                    "{cls}.compute_loss calls the model more than once, and a pipeline runs it once for each microbatch",
                    cls=type(trainer).__name__,
                    remedy="join the inputs of both calls, or call a copy of the model",
                )
            if calls == 1 and (batch.states or batch.start is not None):
                self._refuse_other_arguments(batch.arguments[index], self._named(args, kwargs))
            if batch.seed is not None:
                _seed(mixed(batch.seed, index), device)
            return trainer._output_of_model(output, kwargs)

        if index in batch.varied:
            output = with_varied_scales(output, batch.varied[index])
        with ExitStack() as stack:
            if trainer.accelerator.mixed_precision != "no":  # Trainer runs only the model in lower precision
                output = convert_to_fp32(output)
                stack.enter_context(torch.autocast(device.type, enabled=False))
            if batch.states:
                stack.enter_context(states_restored(batch.states[index], device))
            stack.enter_context(self._alone(batch, rows))
            stack.enter_context(replaced(trainer.model, forward=forward))
            returned = self._called(batch, index)
        loss, outputs = returned if isinstance(returned, (tuple, list)) else (returned, None)
        if not isinstance(loss, Tensor):
            message = "{cls}.compute_loss must return a loss, a tensor, got {got}"
            raise InputError(message, cls=type(trainer).__name__, got=type(loss).__name__)
        loss = loss if batch.trains else loss.mean()
        before |= {name: getattr(type(trainer), name, 0) for name in numbers_of(trainer).keys() - before.keys()}
        changes = {name: value - before[name] for name, value in numbers_of(trainer).items() if value != before[name]}
        changes = {name: change for name, change in changes.items() if name not in self._covered}
        vars(trainer).update({name: before[name] for name in changes})
        batch.losses[index] = loss.detach()
        batch.logs[index] = rows
        batch.outputs[index] = None if batch.trains else outputs
        batch.numbers[index] = {ATTRIBUTE + name: change for name, change in changes.items()} | {
            f"{LOGGED}{place} {key}": float(value)
            for place, row in enumerate(rows)
            for key, value in row.items()
            if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
        }
        return loss

    def _refuse_other_arguments(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        if not equal_arguments(first, second):
            raise InputError(
                "{cls}.compute_loss runs twice for each microbatch, and calls the model with other arguments the second time",
                cls=type(self._trainer).__name__,
                remedy="draw random numbers from the default generators of torch, Python or NumPy, and change no state before the call",
            )

    # The rules

    def _found_out(self, inputs: Any, items: Any, trains: bool, before: dict[str, list[Rule]]) -> dict[str, list[Rule]]:
        """Returns, by name of a number, the rules that may apply. Raises `InputError` on every rank if there are no such rules."""
        trainer = self._trainer
        candidates = rules_of(inputs, lambda batch: num_samples(batch, self._dims), shifts=trainer._loss_shifts_labels)
        own = None if self._weight is None else Rule("a mean with the weights of loss_weight", self._weight)
        samples = [samples_of(inputs, [row], self._dims) for row in range(num_samples(inputs, self._dims))]
        labels = extremes(inputs, trainer.label_names or ())
        rows = telling_samples(samples, [*candidates, own] if own else candidates, labels)
        classes = getattr(getattr(trainer.model, "config", None), "num_labels", 1) or 1
        wholes = [samples_of(inputs, rows, self._dims)]
        wholes += [other] if (other := with_other_labels(wholes[0], trainer.label_names or (), classes)) else []
        groups = [[*(samples_of(whole, [row], self._dims) for row in range(len(rows))), whole] for whole in wholes]
        width = len(rows) + 1
        varied = {len(groups) * width + place: [place] for place in range(len(rows))} | {
            (len(groups) + 1) * width - 1: list(range(len(rows)))
        }
        groups.append(groups[0])
        batch = self._evaluated([part for group in groups for part in group], items, trains, varied)
        found = (batch.numbers, batch.faults, batch.draws) if batch.losses or batch.faults else None
        numbers, faults, draws = trainer._from_last_stage(found)
        if faults:
            raise InputError("{faults}", faults=faults[0])
        self._draws[trains] |= draws or batch.draws
        if not all(index in numbers and math.isfinite(numbers[index][LOSS]) for index in varied):  # such as a loss of probabilities
            del groups[-1]
        left: dict[str, list[Rule]] = {}
        for name in dict.fromkeys(name for of_one in numbers.values() for name in of_one):
            allowed = [own] if own is not None and name == LOSS else [*candidates, *([own] if own else [])]
            allowed = [rule for rule in allowed if name not in before or any(rule.name == other.name for other in before[name])]
            left[name] = [
                rule
                for rule in allowed
                if all(
                    fits(
                        rule,
                        group[:-1],
                        [numbers[place * width + index].get(name, 0.0) for index in range(width - 1)],
                        numbers[place * width + width - 1].get(name, 0.0),
                        self._tolerance,
                    )
                    for place, group in enumerate(groups)
                )
            ]
            if not left[name] and own is not None and name == LOSS and self._draws[trains]:
                left[name] = [own]
            if not left[name]:
                raise self._refused(name, numbers, width, draws=self._draws[trains], is_weighted=own is not None)
        return left

    def _refused(self, name: str, numbers: dict[int, dict[str, float]], width: int, *, draws: bool, is_weighted: bool) -> InputError:
        alone = ", ".join(f"{numbers[index].get(name, 0.0):.6g}" for index in range(width - 1))
        together = numbers[width - 1].get(name, 0.0)
        if name != LOSS:
            reason = ""
            remedy = "log it in a callback" if name.startswith(LOGGED) else "count it in a callback"
        elif is_weighted:
            reason, remedy = ": not a mean with the weights of loss_weight", "let it return what the loss divides by"
        else:
            reason = ", and random numbers that it draws for each sample hide the rule" if draws else ""
            remedy = (
                "give loss_weight, which returns what the mean of a microbatch divides by, such as lambda inputs: "
                'class_weights[inputs["labels"]].sum()'
            )
            remedy = f"draw them in the data collator, or {remedy}" if draws else remedy
        return InputError(
            "{name} in {cls}.compute_loss is neither a sum nor a mean over samples, labels or tokens: {got} for {count} samples alone, "
            "{expected} for all of them{reason}",
            name=name,
            cls=type(self._trainer).__name__,
            got=alone,
            count=width - 1,
            expected=f"{together:.6g}",
            reason=reason,
            remedy=remedy,
        )

    def _evaluated(self, parts: Sequence[Any], items: Any, trains: bool, varied: dict[int, list[int]]) -> Batch:
        """Runs forward of all these batches, each as a microbatch, in evaluation mode and with the same random states."""
        trainer = self._trainer
        count = trainer._num_microbatches
        padded = [*parts, *[parts[0]] * (-len(parts) % count)]
        batch = Batch(padded, trains, items, returns_outputs=not trains, varied=varied)
        batch.shares = [1.0] * len(padded)
        device = trainer.args.device
        batch.start = start = RandomStates.now(device)
        with states_restored(None, device), unchanged(trainer, SKIPPED), torch.no_grad(), trainer._autocast():
            for index in range(len(padded)):
                start.set()
                batch.arguments.append(self._captured(batch, index, keeps=False))
                batch.draws |= not RandomStates.now(device).is_same_as(start)
            self._batch = batch
            for first in range(0, len(padded), count):
                targets = [torch.tensor(index, device="cpu") for index in range(first, first + count)]
                trainer.pipeline.eval_step(batch.arguments[first : first + count], targets)
            self._batch = None
        return batch

    def _probed(self, batch: Batch, output: Any, index: int) -> Tensor:
        """Notes the numbers of `compute_loss`, what of it a pipeline cannot run, and whether it draws random numbers."""
        assert batch.start is not None
        device = self._trainer.args.device
        try:
            with states_restored(batch.start, device), unchanged(self._trainer, SKIPPED) as changed:
                loss = self._computed(batch, output, index)
                batch.draws |= not RandomStates.now(device).is_same_as(batch.start)
            if changed := [name for name in changed if name not in self._covered]:
                batch.faults.append(
                    f"{type(self._trainer).__name__}.compute_loss changes self.{changed[0]}, and a pipeline runs it once for each "
                    "microbatch, on one rank: change it in a callback, or log with self.log"
                )
            batch.numbers[index][LOSS] = float(loss)
            return loss.detach()
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything, and all ranks name it
            if index not in batch.varied:
                batch.faults.append(str(error) if isinstance(error, InputError) else self._raised(error, batch.microbatches[index]))
        return torch.zeros((), device=device)

    def _raised(self, error: Exception, microbatch: Any) -> str:
        name, count = type(self._trainer).__name__, num_samples(microbatch, self._dims)
        reason = f"{type(error).__name__}: {error}"
        return f"{name}.compute_loss fails for a microbatch of size {count}, and a pipeline calls it for each microbatch: {reason}"


def _seed(seed: int, device: torch.device) -> None:
    """Seeds all generators that user code draws from."""
    seed_generators(seed, device)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
