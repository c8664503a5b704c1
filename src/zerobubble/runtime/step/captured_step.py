"""Captures the passes and messages of a rank's training step as one CUDA graph, which later steps replay in one launch.

Order. The first steps run as usual: shapes of messages become known, libraries allocate workspaces, kernels are tuned. The next one is
captured and replayed, later ones are replayed. All ranks count the same steps: NCCL requires both ends of a message to be captured, and to
be replayed together. The handshake comes before a replay and the losses after it, as in every step.

Memory. A graph reads and writes fixed addresses. So inputs are copied to where they were in the first step, and gradients are summed in
tensors that remain. Parameters must stay in place.

No Python code of stages runs in a replay. What depends on it is refused: options in `EXCLUDED`, the rest here, when the pipeline is made or
when a step begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.rules import recomputed
from zerobubble.runtime.device import interface
from zerobubble.runtime.executor.batch import Batch
from zerobubble.runtime.split.compiled.capture import copy_into
from zerobubble.runtime.split.layers.eligibility import is_watched
from zerobubble.runtime.stage.shards import shards_of
from zerobubble.runtime.step.batch import StepInputs
from zerobubble.runtime.step.stage_rng import SeedPass
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.payload import Structure, flatten_pytree, opaque_types_in, unflatten_pytree
from zerobubble.runtime.values.random_state import devices_with_generators, states_of

STEP = "step"
"""The value of `cuda_graphs` that captures whole steps."""
WITHOUT_STEP = "make the pipeline without cuda_graphs='step'"
"""The remedy of what a captured step refuses."""
_WARM_UP = 2


def refuse_in_graphs(schedule: Schedule, modules: Mapping[int, nn.Module], *, ties: bool) -> None:
    """Raises `InputError` with everything that this rank plays and a graph cannot contain."""
    faults = {
        "recompute stages, which restores random states": any(recomputed(row) for row in schedule.rows),
        "sum gradients of copied stages over ranks": len(schedule.placement.routes) > 1,
        "sum gradients of tied parameters over ranks": ties,
        "gather weights that FSDP2 shards": any(shards_of(module, stage) is not None for stage, module in modules.items()),
    }
    reasons = [what for what, is_so in faults.items() if is_so]
    if reasons:
        raise InputError("cuda_graphs='step' cannot capture steps that {what}", what=" and ".join(reasons), remedy=WITHOUT_STEP)


class CapturedStep:
    """The graph of this rank's training step, of a schedule with `num_microbatches`, and the tensors that it reads and writes.

    Call `inputs` for everything given in a step, then `play`.
    """

    def __init__(self, modules: nn.Module, gradients: Gradients, device: torch.device, num_microbatches: int) -> None:
        self.is_ready = False
        self._modules = modules
        self._gradients = gradients
        self._device = device
        self._num_microbatches = num_microbatches
        self._given: dict[str, tuple[Structure, list[Tensor]]] = {}
        self._num_steps = 0
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._held: list[tuple[int, bool]] = []
        self._modes: list[bool] = []
        self._replay: Callable[[], object] = lambda: None
        self._note_losses: Callable[[], None] = lambda: None

    def refuse(self, num_microbatches: int, step_inputs: StepInputs) -> None:
        """Raises `InputError` for a step that the graph cannot repeat."""
        if num_microbatches != self._num_microbatches:
            raise InputError(
                "a step has {got} microbatches, but the steps of this pipeline are captured with {expected}",
                got=num_microbatches,
                expected=self._num_microbatches,
                remedy=WITHOUT_STEP,
            )
        if step_inputs.scaler is not None and step_inputs.scaler.is_enabled():
            raise InputError("a captured step takes no {argument}, whose scale changes", argument="scaler", remedy=WITHOUT_STEP)
        hooked = next((name for name, parameter in self._modules.named_parameters() if is_watched(parameter)), None)
        if hooked is not None:
            raise InputError("a captured step calls no hook on a gradient, and {name!r} has one", name=hooked, remedy=WITHOUT_STEP)

    def inputs(self, what: str, value: Any) -> Any:
        """Copies the tensors of a pytree to where they were in the first step, and returns the pytree of these.

        Raises `InputError` if it differs in more than the values of tensors, and for a tensor that requires a gradient.
        """
        tensors, structure = flatten_pytree(value, opaque=True)
        objects = sorted({kind.__name__ for kind in opaque_types_in(structure)})
        if objects:
            raise InputError(
                "{argument} hold a {got}, whose changes a captured step does not see", argument=what, got=objects[0], remedy=WITHOUT_STEP
            )
        if any(tensor.requires_grad for tensor in tensors):
            raise InputError("{argument} require a gradient, which a captured step does not return", argument=what, remedy=WITHOUT_STEP)
        if what not in self._given:
            self._given[what] = structure, [tensor.detach().clone() for tensor in tensors]
        before, static = self._given[what]
        shapes, shapes_before = ([(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in group] for group in (tensors, static))
        if structure != before or shapes != shapes_before:
            raise InputError(
                "{argument} are {got}, but were {expected} in the first step, and all steps of this pipeline are captured as one",
                argument=what,
                got=_described(tensors),
                expected=_described(static),
                remedy=f"pad them to one shape, or {WITHOUT_STEP}",
            )
        for kept, tensor in zip(static, tensors, strict=True):
            copy_into(kept, tensor)
        return unflatten_pytree(structure, iter(static))

    def play(self, batch: Batch, run: Callable[[Batch], None], captured_losses: Callable[[], Callable[[], None]]) -> None:
        """Plays one of the first steps with `run`, or captures it and replays the graph.

        `captured_losses` returns a function that notes the losses of a replay. Raises `InputError` if the step cannot be captured.
        """
        if self._num_steps < _WARM_UP:
            self._num_steps += 1
            draws = _Draws(batch.seed_pass, self._modules)
            run(batch._replace(seed_pass=draws.seed_pass))
            draws.refuse()
            self._sums = {parameter: self._sum_like(name, parameter) for name, parameter in self._with_gradient()}
            return
        self._place_sums()
        torch.clear_autocast_cache()  # its copies of weights from before the capture will be freed
        try:
            _, self._replay, _ = interface(self._device).capture(lambda: run(batch._replace(seed_pass=_seed_nothing)), None)
        except RuntimeError as error:
            raise _refusal(str(error).strip().splitlines()[0]) from error
        torch.clear_autocast_cache()
        changed = [name for name, parameter in self._with_gradient() if self._gradients.get(parameter) is not self._sums.get(parameter)]
        if changed:
            raise _refusal(f"the gradient of {changed[0]} is in a tensor that other steps lack")
        self._note_losses = captured_losses()
        self._held, self._modes = self._tensors_in_place(), self._modes_of_modules()
        self.is_ready = True
        self.replay()

    def replay(self) -> None:
        """Replays the step. Raises `InputError` if the stages have other tensors or modes than at its capture."""
        if self._tensors_in_place() != self._held:
            raise InputError(
                "parameters or buffers of this rank were replaced, frozen or unfrozen after the step was captured",
                remedy=f"change their values in place, or {WITHOUT_STEP}",
            )
        if self._modes_of_modules() != self._modes:
            raise InputError("modules of this rank changed between train() and eval() after the step was captured", remedy=WITHOUT_STEP)
        self._place_sums()
        self._replay()
        self._note_losses()

    def _with_gradient(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self._modules.named_parameters() if self._gradients.get(parameter) is not None]

    def _sum_like(self, name: str, parameter: nn.Parameter) -> Tensor:
        gradient = self._gradients.dense(parameter)
        if gradient is None:
            raise _refusal(f"the gradient of {name} is sparse")
        return torch.zeros_like(gradient)

    def _place_sums(self) -> None:
        """Has the step add to the sums of earlier ones, in the tensors that the graph writes."""
        for parameter, static in self._sums.items():
            gradient = self._gradients.get(parameter)
            if gradient is None:
                static.zero_()
            elif gradient is not static:
                static.copy_(gradient)
            self._gradients.put(parameter, static)

    def _tensors_in_place(self) -> list[tuple[int, bool]]:
        held = (*self._modules.parameters(), *self._modules.buffers())
        return [(tensor.data_ptr(), tensor.requires_grad) for tensor in held]

    def _modes_of_modules(self) -> list[bool]:
        return [module.training for module in self._modules.modules()]


def _refusal(reason: str) -> InputError:
    return InputError("a step cannot be captured as a CUDA graph: {reason}", reason=reason, remedy=WITHOUT_STEP)


class _Draws:
    """Seeds passes, and refuses those that draw random numbers: a graph cannot seed its passes, and would repeat their numbers."""

    def __init__(self, seed_pass: SeedPass, modules: nn.Module) -> None:
        self._seed_pass = seed_pass
        self._devices = devices_with_generators(modules)
        self._seeded: list[bytes] = []
        self._stage = 0

    def seed_pass(self, stage: int, microbatch: int, is_backward: bool) -> None:
        """Seeds a pass. Raises `InputError` if the one before has drawn."""
        self.refuse()
        self._seed_pass(stage, microbatch, is_backward)
        self._seeded, self._stage = states_of(self._devices), stage

    def refuse(self) -> None:
        """Raises `InputError` if the last pass has drawn."""
        if self._seeded and states_of(self._devices) != self._seeded:
            raise _refusal(f"stage {self._stage} draws random numbers, such as those of dropout")


def _seed_nothing(stage: int, microbatch: int, is_backward: bool) -> None:
    """Seeds no pass of a captured step, since none draws."""


def _described(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}" for tensor in tensors)
