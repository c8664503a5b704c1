"""Calls `compute_loss` of a trainer for one microbatch: up to the call of the model, and with the output that the pipeline has computed.

Both calls draw the same random numbers. Logs go to a list, changes of numbers among the trainer's attributes are counted and undone, and
collectives are among replicas, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import convert_to_fp32
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.integrations.lone_calls import collectives_refused, numbers_of
from zerobubble.integrations.whole_model import CalledError, calls_raised, equal_arguments, refuse_set_for_call, replaced
from zerobubble.runtime.frameworks import RandomStates, mixed, seed_all, states_restored

PENALTIES = (
    "for a penalty on parameters, let training_step add its gradients to the gradients of self.pipeline.parameters(), after "
    "super().training_step(...); for trained weights of losses, let forward of the model return them"
)
"""What to do in place of a `compute_loss` that reads parameters of other ranks."""
SET_BEFORE = (
    "set it in training_step, around super().training_step(...), or compute in forward of the model what follows from it; for autocast, "
    "give TrainingArguments(bf16=True)"
)
"""What to do in place of a `compute_loss` that sets anything for its call of the model."""
LOGGED, ATTRIBUTE = "logged ", "self."


class Called(NamedTuple):
    """What a call of `compute_loss` gave.

    Attributes:
        loss: The loss.
        outputs: The outputs, in an evaluation.
        rows: What it logged.
        numbers: The changes of attributes and the logged values by name.
    """

    loss: Tensor
    outputs: Any
    rows: list[dict[str, Any]]
    numbers: dict[str, float]


@dataclass
class Microbatches:
    """The microbatches for which `compute_loss` is called.

    Attributes:
        parts: The microbatches.
        trains: Whether it is a training step.
        items: What `compute_loss` gets as `num_items_in_batch`.
        returns_outputs: Whether `compute_loss` is asked for outputs, too.
        arguments: The arguments with which it calls the model, for each microbatch.
        states: The random states before each call, if it draws random numbers.
        seed: What the random numbers after the call of the model follow from, if it draws any.
        is_compared: Whether the arguments of the second call must equal those of the first.
    """

    parts: list[Any]
    trains: bool
    items: Any
    returns_outputs: bool = False
    arguments: list[dict[str, Any]] = field(default_factory=list)
    states: list[RandomStates] = field(default_factory=list)
    seed: int | None = None
    is_compared: bool = False

    def items_of(self, index: int) -> Any:
        """Returns what `compute_loss` gets as `num_items_in_batch` for a microbatch."""
        return self.items

    @property
    def targets(self) -> list[Tensor]:
        """The numbers of the microbatches, by which the pipeline's loss function finds them."""
        return [torch.tensor(index, device="cpu") for index in range(len(self.parts))]


class LossCalls:
    """Calls of `compute_loss` of a `trainer`, a `PipelineMixin`. `covered` has the attributes that its class merges itself.

    Attributes:
        filled: For each replica, the number of samples of the batch that count, if others fill it; otherwise empty.
        num_processes: What `compute_loss` reads as the number of processes: a call gives the loss of the batch of all replicas.
    """

    def __init__(self, trainer: Any, covered: tuple[str, ...]) -> None:
        self._trainer = trainer
        self.covered = covered
        self.filled: list[int] = []
        self.num_processes = 1

    @property
    def name(self) -> str:
        """The name of the function, for errors."""
        return f"{type(self._trainer).__name__}.compute_loss"

    def capture(self, batch: Microbatches, index: int, *, keeps: bool, compares: bool = False) -> None:
        """Adds the arguments with which `compute_loss` calls the model for a microbatch, and `keeps` the random states before.

        With `compares`, raises `InputError` if `compute_loss` sets for its call what the pipeline would run without.
        """
        trainer = self._trainer
        if keeps:
            batch.states.append(RandomStates.now(trainer.args.device))
        numbers = numbers_of(trainer)
        try:
            with self._alone(batch, []), calls_raised([trainer.model], compares=compares):
                self._returned(batch, index)
        except CalledError as error:
            refuse_set_for_call((*error.undone, *error.left), self.name, SET_BEFORE)
            batch.arguments.append(self._named(error.call_args, error.call_kwargs))
            return
        finally:
            vars(trainer).update(numbers)
        raise InputError("{name} does not call the model", name=self.name, remedy="call model(**inputs) in it, once")

    def call(self, batch: Microbatches, index: int, output: Any) -> Called:
        """Calls `compute_loss` for a microbatch, with the `output` of the model."""
        trainer, device = self._trainer, self._trainer.args.device
        rows: list[dict[str, Any]] = []
        before = dict(vars(trainer))
        with ExitStack() as stack:
            if trainer.accelerator.mixed_precision != "no":  # Trainer runs only the model in lower precision
                output = convert_to_fp32(output)
                stack.enter_context(torch.autocast(device.type, enabled=False))
            if batch.states:
                stack.enter_context(states_restored(batch.states[index], device))
            stack.enter_context(self._alone(batch, rows))
            stack.enter_context(replaced(trainer.model, forward=self._answering(batch, index, output)))
            returned = self._returned(batch, index)
        loss, outputs = returned if isinstance(returned, (tuple, list)) else (returned, None)
        if not isinstance(loss, Tensor):
            raise InputError("{name} must return a loss, a tensor, got {got}", name=self.name, got=type(loss).__name__)
        numbers = self._undone_changes(before) | _logged(rows)
        return Called(loss if batch.trains else loss.mean(), None if batch.trains else outputs, rows, numbers)

    def _answering(self, batch: Microbatches, index: int, output: Any) -> Any:
        """Returns a forward of the model that returns what the pipeline has computed, for one call with the captured arguments."""
        calls = 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1 and not self._trainer._may_repeat(kwargs):
                raise InputError(
                    "{name} calls the model more than once, and a pipeline runs it once for each microbatch",
                    name=self.name,
                    remedy="join the inputs of both calls, or call a copy of the model",
                )
            if calls == 1 and batch.is_compared and not equal_arguments(batch.arguments[index], self._named(args, kwargs)):
                raise InputError(
                    "{name} runs twice for each microbatch, and calls the model with other arguments the second time",
                    name=self.name,
                    remedy="draw random numbers from the default generators of torch, Python or NumPy, and change no state before the call",
                )
            if batch.seed is not None:
                seed = mixed(batch.seed, index)
                seed_all(seed, self._trainer.args.device, seed)
            return self._trainer._output_of_model(output, kwargs)

        return forward

    def _returned(self, batch: Microbatches, index: int) -> Any:
        options = {"return_outputs": True} if batch.returns_outputs else {}
        inputs = dict(batch.parts[index])
        return self._trainer.compute_loss(self._trainer.model, inputs, num_items_in_batch=batch.items_of(index), **options)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if args:
            raise InputError(
                "compute_loss calls the model with {unnamed} arguments without names; {remedy}", unnamed=len(args), remedy="name them"
            )
        return self._trainer._arguments_of_stages({name: value for name, value in kwargs.items() if value is not None})

    @contextmanager
    def _alone(self, batch: Microbatches, rows: list[dict[str, Any]]) -> Iterator[None]:
        """A context for one call: it logs to `rows`, counts one process, and its collectives are among replicas, or refused."""
        trainer = self._trainer
        accelerator, model = trainer.accelerator, trainer.model
        remedy = "gather with self.accelerator.gather, which joins the replicas"
        with ExitStack() as stack:
            if trainer._pipe is not None:
                stack.enter_context(replaced(trainer._pipe._steps.cut_model, instead=PENALTIES))
            stack.enter_context(replaced(model, training=batch.trains))
            stack.enter_context(replaced(trainer.args, average_tokens_across_devices=False))  # `TrainerLoss` does it, by what the loss is
            stack.enter_context(replaced(trainer, log=lambda logs, *args, **kwargs: rows.append(dict(logs))))
            stack.enter_context(trainer._counting_replicas(self.num_processes))
            stack.enter_context(replaced(PartialState(), num_processes=self.num_processes))
            collectives = {name: getattr(accelerator, name) for name in ("gather", "reduce")} | {"gather_for_metrics": accelerator.gather}
            if self.filled and not trainer._gathers_counted:
                collectives |= {name: self._refusing(name) for name in collectives if not batch.trains or name == "gather_for_metrics"}
            stack.enter_context(replaced(accelerator, **collectives))
            stack.enter_context(collectives_refused(self.name, trainer._ranks_of_pipeline, self.num_processes, remedy))
            yield

    def _refusing(self, collective: str) -> Callable[..., Any]:
        """Returns a collective that raises `InputError`, for a batch that replicas fill with samples that it would count."""

        def refuse(*args: Any, **options: Any) -> Any:
            raise InputError(
                "{name} calls accelerator.{collective} in the last batch, of which {got} samples count in the replicas, and others fill it",
                name=self.name,
                collective=collective,
                got=" and ".join(map(str, self.filled)),
                remedy="set dataloader_drop_last=True, make the number of samples a multiple of the batch of all replicas, or compute in "
                "compute_metrics or a callback what is gathered",
            )

        return refuse

    def _undone_changes(self, before: dict[str, Any]) -> dict[str, float]:
        """Returns the changes of numbers among the trainer's attributes by name, after undoing them."""
        trainer = self._trainer
        now, numbers = numbers_of(trainer), {name: value for name, value in before.items() if type(value) in (int, float)}
        changed = [name for name, value in now.items() if value != numbers.get(name) and name not in self.covered]
        for name in changed:
            del vars(trainer)[name]
        vars(trainer).update({name: before[name] for name in changed if name in before})
        return {ATTRIBUTE + name: now[name] - number_in(trainer, name) for name in changed}


def number_in(owner: Any, name: str) -> float:
    """Returns the number in an attribute of an object; 0 if it has none yet."""
    value = getattr(owner, name, 0)
    return value if isinstance(value, (int, float)) else 0


def _logged(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {
        f"{LOGGED}{place} {key}": float(value)
        for place, row in enumerate(rows)
        for key, value in row.items()
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    }
