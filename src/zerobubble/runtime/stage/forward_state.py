"""Full recomputation: a forward runs first for its outputs, keeping only its inputs, and a second time to save tensors for backward.

In the first run, hooks on saved tensors drop every tensor that autograd saves, so its graph serves only to find out which outputs require
grad. The second run starts from the same inputs, random state, buffers and Python state, and its graph is the one that backward uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.measure.memory_meter import Held, Meter
from zerobubble.runtime.values.buffers import buffers_of, changing_parameters, put_buffers
from zerobubble.runtime.values.parameter_hooks import without_new_hooks
from zerobubble.runtime.values.payload import Tensors
from zerobubble.runtime.values.python_state import PythonState, Snapshot
from zerobubble.runtime.values.random_state import RandomState


class ForwardState:
    """A snapshot of torch's random generators, of the buffers of `module`, and of the Python state. Create it right before the first run.

    A second run inside `restored` sees the same random numbers, buffers and Python state, and leaves them unchanged for the code after it.
    """

    def __init__(self, module: nn.Module, python: PythonState) -> None:
        self._random = RandomState.now(_device_of(module))
        self._module = module
        parts = list(module.modules())
        self._versions = [(parameter, parameter._version) for parameter in changing_parameters(parts)]
        self._buffers: _Buffers | None = _Buffers(parts)
        self._python = python
        self._before: Snapshot | None = python.snapshot()

    def end_first_run(self, where: str, remedy: str) -> None:
        """Drops the copies of what the first run did not change.

        Raises `InputError` if it has changed a parameter: the second run would change it once more. `where` names the module.
        """
        for parameter, version in self._versions:
            if parameter._version != version:
                name = next(name for name, other in self._module.named_parameters() if other is parameter)
                message = "{where} changes its parameter {name!r} in its forward, which recomputing it would do twice: {remedy}"
                raise InputError(message, where=where, name=name, remedy=remedy)
        self._versions = []
        if self._buffers is not None and not self._buffers.have_changed:
            self._buffers = None
        if not self._python.update():
            self._before = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context of the second run."""
        now = RandomState.now(self._random.device)
        self._random.set()
        try:
            with ExitStack() as stack:
                if self._buffers is not None:
                    stack.enter_context(self._buffers.restored())
                if self._before is not None:
                    stack.enter_context(self._python.as_in(self._before))
                yield
        finally:
            now.set()


class _Buffers:
    """The buffers of the modules `parts` before a run, and copies of them.

    A forward may change a buffer in place or assign another tensor to its name.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self._found = [(part, buffers) for part in parts if (buffers := buffers_of(part))]
        tensors = [buffer for _, buffers in self._found for buffer in buffers.values() if buffer is not None]
        self._versions = {buffer: buffer._version for buffer in tensors}
        self._copies = {buffer: buffer.detach().clone() for buffer in self._versions}

    @property
    def have_changed(self) -> bool:
        """Whether any buffer was replaced or changed since the snapshot."""
        if any(buffer._version != version for buffer, version in self._versions.items()):
            return True
        return any(buffers_of(part).get(name) is not buffer for part, buffers in self._found for name, buffer in buffers.items())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Gives the module the copies, so that a run changes these, and restores its own buffers afterwards."""
        before = [(part, buffers_of(part)) for part, _ in self._found]
        for part, buffers in self._found:
            put_buffers(part, {name: None if buffer is None else self._copies[buffer] for name, buffer in buffers.items()})
        try:
            yield
        finally:
            for part, buffers in before:
                put_buffers(part, buffers)


def _device_of(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


Finish = Callable[[Any], Tensor] | None


class FirstRun:
    """The state that the second run of a forward of stage `index` needs: the inputs, and the state of the first run.

    Autocast needs no care: both runs are within one call of the user's. `meter` counts the inputs during the lifetime of this object.
    """

    def __init__(self, module: nn.Module, python: PythonState, index: int, inputs: Tensors, finish: Finish, meter: Meter | None) -> None:
        self.inputs = inputs
        self.finish = finish
        self.num_outputs_with_grad = 0
        self._index = index
        self._state = ForwardState(module, python)
        self._versions = [tensor._version for tensor in inputs]
        self._counted: list[Held] = [] if meter is None else [meter.hold(tensor) for tensor in inputs]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of the first run: autograd builds a graph, but saves nothing, and hooks on the inputs wait for the second run."""
        with torch.autograd.graph.saved_tensors_hooks(_drop, self._refuse_backward), without_new_hooks(self.inputs):
            try:
                yield
            except RuntimeError as error:
                if "saved tensor hooks" not in str(error):
                    raise
                self._refuse_backward(error)
        self._state.end_first_run(f"stage {self._index}", "leave the stage out of the schedule's R passes")

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context of the second run. Raises `InputError` if the first one changed its inputs."""
        for tensor, version in zip(self.inputs, self._versions, strict=True):
            if tensor._version != version:
                raise InputError(
                    "stage {index} changed its input in place, a {shape} {dtype}, so that its forward cannot be recomputed",
                    index=self._index,
                    shape=tuple(tensor.shape),
                    dtype=str(tensor.dtype),
                    remedy="let it work on x.clone(), or leave the stage out of the schedule's R passes",
                )
        with self._state.restored():
            yield

    def _refuse_backward(self, _: object) -> Tensor:
        message = "stage {index} computes gradients within its own forward, which has saved no tensors"
        raise InputError(message, index=self._index, remedy="leave the stage out of the schedule's R passes")


def _drop(_: Tensor) -> None:
    """Replaces a tensor that autograd saves by None."""
