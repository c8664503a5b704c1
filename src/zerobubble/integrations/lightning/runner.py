"""Runs the steps of a LightningModule in a pipeline.

The network is the module that `training_step` calls. `zb.split` cuts it, and the stages use its parameters. The rest of `training_step`
is the user's own code, and runs once for each microbatch on the rank of the last stage, where the call of the network returns the output
that the pipeline has computed. Before that, every rank runs it up to the call of the network, to capture the arguments.

The first of these runs is for the whole batch. What it draws, the runs for microbatches get in parts (see `draws`), and they begin with
the random states before the batch. To know whether it draws, every rank reads the states twice in a step, which takes 0.5 ms. What
`training_step` draws after the call follows from a seed of the step.

If the run for the whole batch returns without a call of the network, `training_step` skips the batch: it runs once more, with all of its
effects. If it returns None after the call, the gradients of the step are dropped.

With manual optimization, `training_step` also steps the optimizer, so it cannot run once for each microbatch. It runs once on every rank,
and its call of the network trains the whole pipeline. The losses of microbatches come from further runs, which end at `manual_backward`.
If the run for the batch does not call it, the gradients are dropped.

Lightning clears gradients after `training_step`. Those of the pipeline are therefore set aside, and `backward` restores them.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

import zerobubble as zb
from zerobubble.errors import InputError, near
from zerobubble.integrations.batches import Dims, cut, num_samples, refuse_different_batches, with_new_containers
from zerobubble.integrations.lightning.argument_dims import ArgumentDims, Call, call_arguments
from zerobubble.integrations.lightning.captured_inputs import CapturedInputs
from zerobubble.integrations.lightning.comparison import Fault, are_near_inputs
from zerobubble.integrations.lightning.draws import Draw, Drawing
from zerobubble.integrations.lightning.extras import joined
from zerobubble.integrations.lightning.isolation import BackwardCalledError, isolated, nothing
from zerobubble.integrations.lightning.logs import REPEATED, Entry, Found, Parts, StepMessages, entries_of
from zerobubble.integrations.lightning.metrics import MetricCopies, counts_of, make_updates, metrics_copied
from zerobubble.integrations.lightning.network_numbers import NetworkNumbers
from zerobubble.integrations.lightning.settings import Settings
from zerobubble.integrations.lightning.step import Step
from zerobubble.integrations.lightning.watched_state import WatchedState
from zerobubble.integrations.lightning.whole_batch import WholeBatch, joined_in_views, loss_of, num_views
from zerobubble.integrations.lightning.world import end_world
from zerobubble.integrations.lone_calls import unchanged
from zerobubble.integrations.whole_model import (
    CalledError,
    calls_raised,
    copy_from,
    equal_arguments,
    from_last_stage,
    own_forward,
    refuse_set_for_call,
    replaced,
)
from zerobubble.integrations.whole_outputs import WholeOutputs
from zerobubble.runtime.frameworks import OUTPUTS, RandomStates, gathering, make_whole, mixed, seed_all, states_restored
from zerobubble.units import named

Arguments = tuple[Any, ...] | dict[str, Any]
SAME_RUNS = "draw random numbers from the default generators of torch, Python or NumPy, and change no state before the call"
SET_BEFORE = (
    "set it before the step, on all ranks, in on_train_batch_start, or compute in forward of the network what follows from it; for "
    'autocast, give Trainer(precision="bf16-mixed")'
)
"""What to do in place of a `training_step` that sets anything for its call of the network."""
PENALTIES = (
    "to log its value, read it in on_train_batch_end inside `with zb.gathered(self):`, which all ranks enter; for a penalty, let "
    "on_after_backward add its gradients to p.grad for p in self.trainer.strategy.pipeline.parameters()"
)
"""What to do in place of a `training_step` that reads parameters of other ranks."""
BY_HAND = (
    "call the network once; for other uses, enter `with zb.gathered(self):` on all ranks; networks that train against each other, as in a "
    "GAN, need a zb.Pipeline each, in your own loop"
)
"""What to do in place of a use of parameters of other ranks in a `training_step` with manual optimization."""
MIXES = (
    "{name} permutes the samples: each microbatch gets the order of its own samples, and mixes others than one device; to mix the whole "
    "batch, do it in on_after_batch_transfer"
)
DRAWS_LATE = (
    "{name} draws random numbers after the call of {network}: others than on one device, since only the rank of the last stage draws them, "
    "for each microbatch; for the numbers of one device, draw them before the call, or in on_after_batch_transfer"
)
TWO_DIRECTIONS = "{name!r}, whose losses are computed on several ranks: choose a schedule of one direction, such as 'zb-v'"


class StepRunner:
    """Runs the steps of `module` in one pipeline along "pp" of `mesh`, with replicas along "dp".

    `ranks_where(decision)`, a collective of all ranks, returns the ranks that call it with True.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        settings: Settings,
        mesh: DeviceMesh,
        device: torch.device,
        seed: int,
        ranks_where: Callable[[bool], list[int]],
    ) -> None:
        self._module = module
        self._settings = settings
        self._group = mesh.get_group("pp")
        self._mesh = mesh
        self._device = device
        self._seed = seed
        self._ranks_where = ranks_where
        self._network: nn.Module | None = None
        self._parameters: list[nn.Parameter] = []
        self._whole = WholeBatch(module, device, {}, NetworkNumbers(self._from_last_stage))
        self._evaluated = WholeOutputs(self._from_last_stage)
        self._dims = ArgumentDims(settings.batch_dims, self._from_last_stage)
        self._messages = StepMessages(module, self._group, device)
        self._is_first = True
        self._has_views = False
        self._inputs = CapturedInputs(module)
        self._step: Step | None = None
        self._given: list[Arguments] = []
        self._outputs: list[Any] | None = None
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] | None = None
        self._states_after_call: RandomStates | None = None
        self._keeps_outputs = False
        self._num_without_loss = 0
        self._has_warned = False
        self.pipe: zb.Pipeline | None = None
        self.is_whole = True  # whether this rank has the trained values of the whole module, the same on all ranks

    # Training

    def train(self, batch: Any, rest: tuple[Any, ...], share: float, *, clears: bool) -> Any:
        """Runs `training_step` with automatic optimization. Returns what it returns for the batch, on every rank; None to skip it.

        Args:
            batch: The batch of this replica.
            rest: The other arguments of `training_step`.
            share: The factor of every loss, as in `Step`.
            clears: Whether the gradients of earlier batches are dropped.
        """
        step = self._begun(batch, rest, share)
        if step is None:
            return self._skipped(batch, rest)
        arguments = self._arguments_of_all(step)
        loss, entries, extras = self._shared(step, arguments, clears=clears)
        while self._is_repeated(extras):
            step.is_repeated = True
            loss, entries, extras = self._shared(step, arguments, clears=clears)
        for entry in entries:
            if entry.name:
                self._module.log(entry.name, entry.value, **entry.options)
        if extras is None:
            return None
        loss = loss.detach().to(self._device) / share
        return {"loss": loss, **extras} if extras else loss

    def _shared(self, step: Step, arguments: list[Arguments], *, clears: bool) -> tuple[Tensor, list[Entry], Any]:
        """Runs the passes of a step, and returns its loss, and on every rank what the rank of the last stage has found."""
        loss = self._trained(step, arguments, clears=clears)
        entries, extras = self._messages.shared(self._found(step) if self._is_last else None, self._last_rank)
        if isinstance(extras, Fault):
            raise extras.error(self._training_step)
        return loss, entries, extras

    def _is_repeated(self, extras: Any) -> bool:
        """Returns whether all ranks repeat the passes of a step. Raises `InputError` on every rank if only some replicas skip the batch."""
        if self._mesh["dp"].size() == 1:
            return extras == REPEATED
        if not self._ranks_where(extras in (None, REPEATED)):
            return False
        if self._ranks_where(extras == REPEATED):
            return True
        self._all_skip(extras is None)
        return False

    def train_by_hand(self, batch: Any, rest: tuple[Any, ...]) -> Any:
        """Runs `training_step` with manual optimization on every rank. Its call of the model runs a step of the pipeline."""
        self.share_outside()
        step = self._begun(batch, rest, 1.0)
        if step is None:
            return self._skipped(batch, rest)
        arguments = self._arguments_of_all(step)
        calls = 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            self._refuse_second_call(calls)
            form = self._form(args, kwargs)
            views = num_views(arguments, step.sizes, form, equal_arguments) if self._is_first or self._has_views else 1
            if not views:
                raise Fault(self._name, kind="inputs").error(self._training_step)
            self._has_views = views > 1
            outputs: list[Any] = [None] * len(step.sizes)
            with own_forward(self.network), metrics_copied(self._module), draws.paused():
                self._trained(step, arguments, clears=False, outputs=outputs)
            parts = step.draws.parts if step.draws.follow_the_call else None
            found = None
            if self._is_last:
                marked = self._whole.numbers.marked(outputs, self._parts(step))
                found = joined_in_views(marked, step.sizes, views), parts, len(step.without_loss)
            output, parts, self._num_without_loss = self._from_last_stage(found)
            step.draws.parts = parts or step.draws.parts
            self._states_after_call = RandomStates.now(self._device)
            self._seed_rest(step, 0)
            stack.enter_context(self._advised(BY_HAND))
            return self._whole.numbers.placed(output, self._name, self._device)

        if step.states is not None:
            step.states.set()
        draws = step.draws.joined()
        with ExitStack() as stack, replaced(self.network, forward=forward), draws:
            returned = self._module.training_step(batch, *rest)
        self._gradients = None  # those of a batch for which it does not call manual_backward
        self._restore_states()
        return returned

    def put_gradients(self) -> None:
        """Adds the gradients of the last training step to those of this rank's parameters."""
        if self._gradients is None:
            raise InputError(
                "manual_backward has no gradients of a pipeline to put back",
                remedy="let training_step call the network, then manual_backward, once each",
            )
        if self._num_without_loss:
            raise InputError(
                "{name} calls manual_backward for a batch, and not for {got} of its microbatches",
                name=self._training_step,
                got=self._num_without_loss,
                remedy="call it for each, and let the loss of the whole batch decide whether an optimizer steps",
            )
        for parameter, gradient in self._gradients:
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad.add_(gradient)
        self._gradients = None
        self._restore_states()

    def _restore_states(self) -> None:
        """Sets the random states after the call of the network: the losses of microbatches end here, with the numbers that they draw."""
        if self._states_after_call is not None:
            self._states_after_call.set()
            self._states_after_call = None

    def _begun(self, batch: Any, rest: tuple[Any, ...], share: float) -> Step | None:
        """Returns the step of a batch; None, on all ranks, if `training_step` skips the batch."""
        before = RandomStates.now(self._device)
        draws: list[Draw] = []
        with unchanged(self._module, ()), metrics_copied(self._module), isolated(self._module, [], runs_again=True), Drawing(draws):
            arguments = self._captured("training_step", batch, *rest, compares=self._whole.steps.is_next_anyway)
        after = RandomStates.now(self._device)
        if self._all_skip(arguments is None):
            before.set()
            return None
        step = self._cut(batch, rest, share)
        step.arguments, step.draws.whole, step.states_after = arguments, draws, after
        if draws or not after.is_same_as(before):
            step.states = before
        if self._is_first and len(step.sizes) > 1 and any(draw.permutes for draw in draws):
            warnings.warn(MIXES.format(name=self._training_step), stacklevel=2)
        return step

    def _all_skip(self, skips: bool) -> bool:
        """Returns whether all ranks skip a batch. Raises `InputError` on every rank if only some do."""
        ranks, world = self._ranks_where(skips), dist.get_world_size()
        if 0 < len(ranks) < world:
            raise InputError(
                "{name} skips a batch on {got} of {expected} ranks, {ranks}, and a pipeline and its replicas train or skip together",
                name=self._training_step,
                ranks=named("rank", ranks),
                got=len(ranks),
                expected=world,
                remedy="decide from the batch alone, and with data_parallel_size from a value that self.all_gather has combined",
            )
        return bool(ranks)

    def _skipped(self, batch: Any, rest: tuple[Any, ...]) -> Any:
        """Runs `training_step` for a batch that it skips, with all of its effects, and returns what it returns.

        An earlier run has changed objects of the user, such as meters, and `unchanged` has undone only changes of attributes.
        """
        self._gradients = None
        try:
            with calls_raised(self._candidates()), WatchedState(self._module).kept_in_objects():
                returned = self._module.training_step(batch, *rest)
        except CalledError as error:
            raise InputError(
                "{name} runs twice for a batch that it skips, and calls {network} the second time",
                name=self._training_step,
                network=f"self.{self._name_of(error.module)}",
                remedy=SAME_RUNS,
            ) from None
        if returned is not None and self._module.automatic_optimization:
            raise self._not_called()
        return returned

    def _cut(self, batch: Any, rest: tuple[Any, ...], share: float) -> Step:
        dims, most = self._settings.batch_dims, self._settings.num_microbatches
        self._refuse_unknown_dims(dims, batch)
        samples = num_samples(batch, dims)
        if self.pipe is None and samples < most:
            raise InputError(
                "num_microbatches={got} is more than the {expected} samples of a batch: raise the batch size of the data loader, whose "
                "batches all ranks of a pipeline train together",
                argument="num_microbatches",
                got=most,
                expected=samples,
            )
        microbatches, sizes = cut(batch, min(samples, most), dims)
        return Step(with_new_containers(batch), microbatches, sizes, rest, share, counts_of(self._module))

    def _trained(self, step: Step, arguments: list[Arguments], *, clears: bool, outputs: list[Any] | None = None) -> Tensor:
        """Runs the passes of a step, puts the gradients aside, and returns the loss.

        Keeps the outputs of all microbatches where they are compared with one call, for manual optimization, and once `training_step` has
        returned None after the call. A step in which it does so for the first time, or gives a number for the first time, is repeated, to
        be compared.
        """
        pipe = self._pipeline(arguments[0])
        self.is_whole = False
        if self._module.automatic_optimization:  # otherwise, the rest of training_step runs on every rank
            pipe._steps.cut_model.release()
        step.is_compared = step.is_repeated or self._whole.steps.count(sum(step.sizes))
        if outputs is None and (step.is_compared or self._keeps_outputs):
            outputs = [None] * len(arguments)
        with self._gradients_aside(clears=clears), self._during(step, arguments, outputs):
            metrics = MetricCopies(self._module)
            loss = self._passed(pipe, step, arguments)
            self._judge(pipe, step, arguments, outputs, metrics)
        self._is_first = False
        return loss

    @contextmanager
    def _gradients_aside(self, *, clears: bool) -> Iterator[None]:
        """A context at whose end `self._gradients` has those of the step. Parameters keep their own, unless a step `clears` them."""
        before = [None if clears else parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        yield
        self._gradients = [(parameter, parameter.grad) for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, before, strict=True):
            parameter.grad = gradient

    @contextmanager
    def _during(self, step: Step, arguments: list[Arguments], outputs: list[Any] | None) -> Iterator[None]:
        """A context in which `_loss` finds the step, its arguments, and where it keeps outputs."""
        self._step, self._outputs, self._given = step, outputs, arguments
        yield
        self._step, self._outputs, self._given = None, None, []

    def _passed(self, pipe: zb.Pipeline, step: Step, arguments: list[Arguments]) -> Tensor:
        """Runs the passes of a step, and returns the loss."""
        step.without_loss.clear()
        targets = [torch.tensor([index], device="cpu") for index in range(len(arguments))]  # by which `_loss` finds its microbatch
        self._whole.numbers.begin()
        loss = pipe.step(arguments, targets, num_microbatches=len(arguments))
        if step.states_after is not None:
            step.states_after.set()  # only this rank has run the rest of `training_step`
        return loss

    def _judge(self, pipe: zb.Pipeline, step: Step, arguments: list[Arguments], outputs: list[Any] | None, metrics: MetricCopies) -> None:
        """Finds out whether the step is skipped. Raises `InputError` on every rank if it is compared, and differs from one call."""
        if step.draws_late and not self._has_warned:
            self._has_warned = True
            warnings.warn(DRAWS_LATE.format(name=self._training_step, network=self._name), stacklevel=2)
        if step.is_compared and outputs is not None:
            self._whole.numbers.learn(pipe, arguments, step.arguments, outputs, lambda: self._parts(step))
        lacks_outputs = bool(step.without_loss) and outputs is None
        self._keeps_outputs |= lacks_outputs
        step.runs_again = lacks_outputs or not (step.is_compared or step.without_loss or self._whole.has_compared(step))
        if step.runs_again:
            metrics.undo()
        elif step.without_loss and self._module.automatic_optimization:
            metrics.undo()  # the run for the whole batch says which ones are updated
            step.fault = None if outputs is None else self._fault(step, outputs)
        if step.is_compared and outputs is not None:
            self._compare(step, outputs)

    def _compare(self, step: Step, outputs: list[Any]) -> None:
        """Raises `InputError` on every rank if the step differs from one call of `training_step` for the batch."""
        fault = step.fault
        if self._is_last and not step.without_loss:
            fault = self._fault(step, outputs)
        fault = self._from_last_stage(None if fault is None else fault._asdict())
        if fault is not None:
            raise Fault(**fault).error(self._training_step)

    def _fault(self, step: Step, outputs: list[Any]) -> Fault | None:
        """Returns the difference between a step and one call of `training_step` for the batch, on the rank of the last stage."""

        def called(*args: Any, **kwargs: Any) -> int:
            self._seed_rest(step, 0)
            return num_views(self._given, step.sizes, self._form(args, kwargs), are_near_inputs)

        try:
            return self._whole.fault(self.network, step, outputs, self._parts(step), called)
        except InputError as error:
            return Fault(str(error), kind="raised")
        except Exception as error:  # noqa: BLE001 - other ranks wait for what this one has found
            return Fault(f"{type(error).__name__}: {error}", kind="failed")

    def _parts(self, step: Step) -> Parts:
        weights = [float(self._weight_of(step, index)) for index in range(len(step.sizes))]
        losses = [float(step.losses[index]) for index in range(len(step.sizes))]
        return Parts(step.logs, step.sizes, weights, losses, self._is_sum)

    def _found(self, step: Step) -> Found:
        """Returns what the step logs, and what `training_step` returns in addition to the loss, as `Found`."""
        if step.refused:
            return [], Fault(str(step.refused[0]), kind="raised")
        if step.runs_again:
            return [], REPEATED
        if step.fault is not None or step.skipped is not None:
            return step.skipped or [], step.fault
        parts = self._parts(step)
        updates = self._whole.updates(step, parts)
        if isinstance(updates, Fault):
            return [], updates
        try:
            make_updates(self._module, updates)
        except Exception as error:  # noqa: BLE001 - other ranks wait for what this one has found
            return [], Fault(f"{self._training_step} updates a Metric, which raises {type(error).__name__}: {error}", kind="raised")
        return entries_of(parts, self._module, self._whole.rules, step.counts), joined(step.extras, parts, self._whole.rules_of_extras)

    def _loss(self, output: Any, target: Tensor) -> Tensor:
        """Returns the loss of one microbatch, as `training_step` computes it from the output of the network."""
        step, index = self._step, int(target)
        assert step is not None
        calls = 0
        after: RandomStates | None = None

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls, after
            calls += 1
            self._refuse_second_call(calls)
            if self._is_first:
                self._refuse_other_arguments(index, self._form(args, kwargs))
            self._seed_rest(step, index)
            after = RandomStates.now(self._device) if step.is_compared else None
            return output

        if self._outputs is not None:
            self._outputs[index] = _detached(output)
        draws = step.draws.of_microbatch(index, in_loss=True)
        states = states_restored(step.states, self._device)  # also of Python and NumPy, which code of the network may share
        alone = isolated(self._module, step.logs[index], step.updates[index], runs_again=step.is_compared, faults=step.refused)
        with replaced(self.network, forward=forward), states, alone, draws, self._advised(PENALTIES):
            try:
                loss, extras = loss_of(self._module, step.microbatches[index], step.rest)
            except InputError:
                raise
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise Fault(what, float(step.sizes[index]), sum(step.sizes), kind="microbatch").error(self._training_step) from error
            step.draws_late |= after is not None and not after.is_same_as(RandomStates.now(self._device))
        if loss is None:
            loss = _zero(output)
            if self._weight_of(step, index):
                step.without_loss.append(index)
        step.losses[index] = loss.detach()
        step.extras[index] = _detached(extras) if extras else {}
        factor = step.share * (len(step.sizes) if self._is_sum else 1)
        return loss if factor == 1 else loss * factor

    def _advised(self, instead: str) -> AbstractContextManager[None]:
        """Returns a context in which errors for uses of other ranks' parameters say what to do instead."""
        assert self.pipe is not None
        return replaced(self.pipe._steps.cut_model, instead=instead)

    def _refuse_second_call(self, calls: int) -> None:
        if calls > 1:
            message = "training_step calls {name} more than once, and a pipeline runs it once for each microbatch"
            remedy = (
                "join the inputs of both calls, as torch.cat((a, b)); if the second needs the output of the first, as chunks of a "
                "sequence do, let the data loader give one chunk for each batch; networks that train against each other, as in a GAN, "
                "need a zb.Pipeline each"
            )
            raise InputError(message, name=self._name, remedy=remedy)

    def _refuse_other_arguments(self, index: int, arguments: Arguments) -> None:
        """Raises `InputError` if both runs of `training_step` call the network with different arguments."""
        if not equal_arguments(arguments, self._given[index]):
            raise InputError(
                "training_step runs twice for each microbatch, and calls {name} with other arguments the second time",
                name=self._name,
                remedy=SAME_RUNS,
            )

    # Arguments of the network

    def _refuse_unknown_dims(self, dims: Dims, batch: Any) -> None:
        """Raises `InputError` for names in `batch_dims` that neither the network, nor a batch that is a dict, nor the output has."""
        if not self._is_first or not dims:
            return
        with own_forward(self.network):
            parameters = inspect.signature(self.network.forward).parameters.values()
        known = {OUTPUTS, *(parameter.name for parameter in parameters), *(batch if isinstance(batch, Mapping) else ())}
        unknown = [name for name in dims if name not in known]
        if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            raise InputError(
                "batch_dims has {got}, which is no name of an argument of {network}, nor of an item of the batch",
                argument="batch_dims",
                got=", ".join(map(repr, unknown)),
                network=self._name,
                remedy=f"{near(unknown[0], sorted(known))}the names are {', '.join(sorted(known))}",
            )

    def _arguments_of_all(self, step: Step) -> list[Arguments]:
        """Returns the arguments with which `training_step` calls the network, for each microbatch."""
        arguments = []
        with metrics_copied(self._module):
            for index in range(len(step.sizes)):
                if step.states is not None:
                    step.states.set()
                with step.draws.of_microbatch(index):
                    arguments.append(self._arguments_of(step, index))
        self._inputs.refuse_unfit(arguments, step.sizes, self._name, self._outside())
        whole, part = (Call.of(self.network, each) for each in (step.arguments, arguments[0]))
        self._dims.learn(whole, part, sum(step.sizes), step.sizes[0])
        assert step.states_after is not None
        step.states_after.set()
        return arguments

    def _seed_rest(self, step: Step, index: int) -> None:
        """Seeds what `training_step` draws after the call. Numbers of Python and NumPy are the same for all microbatches."""
        seed = mixed(self._seed, self._module.trainer.fit_loop.epoch_loop.total_batch_idx)
        seed_all(mixed(seed, 1 + index), self._device, seed)

    def _arguments_of(self, step: Step, index: int) -> Arguments:
        try:
            with isolated(self._module, step.logs[index]):
                arguments = self._captured("training_step", step.microbatches[index], *step.rest)
        except InputError:
            raise
        except Exception as error:
            raise Fault(f"{type(error).__name__}: {error}", kind="part").error(self._training_step) from error
        if arguments is None:
            raise Fault("a microbatch", kind="skipped").error(self._training_step)
        return arguments

    def _captured(self, name: str, *args: Any, compares: bool = False) -> Arguments | None:
        """Returns the arguments with which the method `name` calls the network; None without a call. The first call finds the network.

        With `compares`, raises `InputError` if the method sets for its call what the pipeline would run without.
        """
        module = self._module
        try:
            with calls_raised(self._candidates(), compares=compares, left_out=(module.trainer, vars(module)["_trainer"])):
                getattr(self._module, name)(*map(with_new_containers, args))
        except CalledError as error:
            if self._is_first:
                self._refuse_untrained(name, error)
            undone = error.undone if module.automatic_optimization else ()  # by hand, the pipeline runs inside of the call
            refuse_set_for_call((*undone, *error.left), self._training_step, SET_BEFORE)
            if self._network is None:
                self._network = error.module
            return self._form(error.call_args, error.call_kwargs)
        except BackwardCalledError:
            raise self._not_called() from None
        return None

    def _refuse_untrained(self, name: str, call: CalledError) -> None:
        """Raises `InputError` for a network that the method `name` does not train, such as a teacher, if others may be meant."""
        is_trained = _is_trainable(call.module) and (call.has_gradients or name != "training_step")
        others = [child for child in self._module.children() if child is not call.module and _is_trainable(child)]
        if is_trained or not others or self._settings.network is not None:
            return
        raise InputError(
            "{name} calls self.{network} first, which is the network then, and does not train it",
            name=f"{type(self._module).__name__}.{name}",
            network=self._name_of(call.module),
            remedy=" or ".join(f"PipelineStrategy(network={self._name_of(each)!r})" for each in (*others, call.module)),
        )

    def _not_called(self) -> InputError:
        return InputError(
            "{name} returns a loss and does not call {names}",
            name=self._training_step,
            names=" or ".join(f"self.{self._name_of(module)}" for module in self._candidates()),
            remedy="call it, name another module as network=, or return None to skip the batch",
        )

    def _candidates(self) -> list[nn.Module]:
        """Returns the modules of which the first called is the network: the only child with parameters, else also the module itself."""
        if self._network is not None:
            return [self._network]
        if self._settings.network is not None:
            return [self._module.get_submodule(self._settings.network)]
        children = [child for child in self._module.children() if next(child.parameters(), None) is not None]
        return children if len(children) == 1 else [self._module, *children]

    @property
    def network(self) -> nn.Module:
        """The module that is cut."""
        assert self._network is not None
        return self._network

    @property
    def _training_step(self) -> str:
        return f"{type(self._module).__name__}.training_step"

    @property
    def _name(self) -> str:
        return self._whole.name_of(self.network)

    def _name_of(self, module: nn.Module) -> str:
        return next(name for name, found in self._module.named_modules() if found is module) or "forward"

    def _form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Returns arguments in the form of `Pipeline.step`: a tuple, or a dict if any has a name."""
        arguments = call_arguments(self.network, args, kwargs)
        return {name: value for name, value in arguments.items() if value is not None} if isinstance(arguments, dict) else arguments

    # Evaluation

    def evaluate(self, name: str, args: tuple[Any, ...]) -> Any:
        """Runs `validation_step`, `test_step` or `predict_step` on every rank. Its calls of the network run in the pipeline."""
        if self._network is None:
            with ExitStack() as stack:
                stack.enter_context(states_restored(None, self._device))
                stack.enter_context(unchanged(self._module, ()))
                stack.enter_context(metrics_copied(self._module))
                stack.enter_context(replaced(self._module, log=nothing))
                calls = self._captured(name, *args) is not None
            if not calls:
                return getattr(self._module, name)(*args)
        with replaced(self.network, forward=self._forward):
            return getattr(self._module, name)(*args)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward of a batch in the pipeline. Returns the output on every rank."""
        arguments = self._form(args, kwargs)
        with own_forward(self.network), torch.inference_mode(False):
            pipe = self._pipeline(arguments)
            with torch.no_grad():
                call = Call.of(self.network, arguments)
                return self._dims.evaluate(pipe, self._evaluated, call, self._settings.num_microbatches)

    # The pipeline

    def _pipeline(self, example: Arguments) -> zb.Pipeline:
        """Returns the pipeline, which is made with the first arguments of the network."""
        if self.pipe is None:
            network = self.network
            outputs = {name: dim for name, dim in self._settings.batch_dims.items() if name == OUTPUTS}
            was_training = network.training
            network.train()
            with torch.enable_grad(), states_restored(None, self._device):
                torch.manual_seed(self._seed)
                self.pipe = self._settings.pipeline_of(network, example, self._loss_function(), self._weight, self._mesh, outputs)
            network.train(was_training)
            self.pipe._steps.losses.comparison.is_on = False  # `WholeBatch` does
            model = self.pipe._steps.cut_model
            model.pipe, model.loss_name = "self.trainer.strategy.pipeline", "training_step"
            model.remedy = "call trainer.save_checkpoint on all ranks, or "
            self._parameters = list(self.pipe.parameters())
            if len(self.pipe.schedule.placement.routes) > 1:
                raise InputError(TWO_DIRECTIONS, name=self.pipe.schedule.name)
        return self.pipe

    def _loss_function(self) -> Callable[[Any, Tensor], Tensor]:
        """Returns the loss function of a microbatch; if there are parameters outside the network, a module that holds them."""
        outside = self._outside()
        return _Loss(self._loss, outside) if outside else self._loss

    def _outside(self) -> dict[str, nn.Parameter]:
        """Returns the parameters outside the network, which are trained on the rank of the last stage."""
        inside = {id(parameter) for parameter in self.network.parameters()}
        return {name: parameter for name, parameter in self._module.named_parameters() if id(parameter) not in inside}

    def _weight(self, target: Tensor) -> Any:
        assert self._step is not None
        return self._weight_of(self._step, int(target))

    def _weight_of(self, step: Step, index: int) -> Any:
        weight = self._settings.loss_weight
        if weight is None or isinstance(weight, str):
            return 1 if weight == "sum" else step.sizes[index]
        return weight(step.microbatches[index])

    @property
    def _is_sum(self) -> bool:
        return self._settings.loss_weight == "sum"

    @property
    def _last_rank(self) -> int:
        """The rank of the last stage, which has losses and outputs, counted in the pipeline."""
        assert self.pipe is not None
        return self.pipe.schedule.placement.routes[0][-1]

    @property
    def _is_last(self) -> bool:
        assert self.pipe is not None
        return self._last_rank == self.pipe.rank

    def _from_last_stage(self, found: Any) -> Any:
        assert self.pipe is not None
        return from_last_stage(self.pipe, found, self._group, self._device)

    def gathering(self) -> AbstractContextManager[None]:
        """Returns a context in which the module is whole on every rank. Every rank enters it."""
        if self.pipe is None:
            return nullcontext()
        self._share_outside_buffers()
        return gathering(self.pipe._steps, self._module, wanted=True)

    def make_whole(self) -> None:
        """Makes the module whole on every rank, until the next training step. Every rank calls it."""
        if self.pipe is not None:
            self._share_outside_buffers()
            make_whole(self.pipe, self._module)
            self.is_whole = True

    def share_outside(self) -> None:
        """Gives every rank the parameters and buffers outside the network, because evaluation uses them there. Every rank calls it."""
        if self.pipe is not None:
            self._share_outside_buffers()
            if trained := [parameter for parameter in self._outside().values() if parameter.requires_grad]:
                make_whole(self.pipe, nn.ParameterList(trained))

    def _share_outside_buffers(self) -> None:
        inside = {id(buffer) for buffer in self.network.buffers()}
        for buffer in self._module.buffers():
            if id(buffer) not in inside:
                copy_from(dist.get_global_rank(self._group, self._last_rank), buffer, self._device, self._group)

    def refuse_different_batches(self, batch: Any) -> None:
        """Raises `InputError` on every rank if the ranks of the pipeline have different batches, or draw different random numbers."""
        refuse_different_batches(batch, self._group)

    def close(self, error: BaseException | None = None) -> None:
        """Closes the pipeline, on every rank; after an `error`, at once, and with the process group.

        Other ranks may wait in a collective of Lightning: they wake when the process group ends, and then raise the report.
        """
        pipe = self.pipe
        if pipe is None:
            return
        guard = pipe._steps.guard
        if error is None:
            pipe.close()
        elif guard.closed is None:
            report = guard.report_error(error, "in a method of Trainer, outside the pipeline")
            end_world()
            guard.close_after(error, report.message, report)
        else:
            end_world()
        self.pipe = None


class _Loss(nn.Module):
    """The loss of a microbatch, with the parameters outside the network that `training_step` uses, under their names in the module."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for child in path:
                if child not in owner._modules:
                    owner._modules[child] = nn.Module()
                owner = owner.get_submodule(child)
            owner.register_parameter(last, parameter)
        self._call = call

    def forward(self, output: Any, target: Tensor) -> Tensor:
        return self._call(output, target)


def _is_trainable(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _zero(output: Any) -> Tensor:
    """Returns a loss of 0, whose gradients for `output` are 0 even where the output is not finite."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([tensor.flatten()[:0].sum() for tensor in tensors]).sum()


def _detached(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), value)
