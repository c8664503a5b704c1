"""The traces of a stage's module: one for each kind of input and each Python state of the module."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import NamedTuple

from torch import Tensor, nn

from zerobubble.error_reports.user_code import warn_user
from zerobubble.runtime.device import autocast_of
from zerobubble.runtime.split.compiled.part import PartMaker
from zerobubble.runtime.split.python_state.guard import MOST_STATES, Guard, global_state
from zerobubble.runtime.split.splitter import arguments_of
from zerobubble.runtime.split.tracing.backward_pass import DeferWork
from zerobubble.runtime.split.tracing.lengths import Lengths, MakeTrace
from zerobubble.runtime.split.tracing.module_tensors import TensorsOfModule
from zerobubble.runtime.split.tracing.symbols import Dim
from zerobubble.runtime.split.tracing.trace import Trace
from zerobubble.runtime.split.tracing.traceable import hooked_parameters, is_traceable, kind_of, layout_of, refuse_hooks, shared_memory
from zerobubble.runtime.values.payload import Tensors, flatten_pytree


class Traced(NamedTuple):
    """A trace and its input tensors for one microbatch."""

    trace: Trace
    inputs: list[Tensor]


class Traces:
    """Finds or creates the trace for inputs. `last` is the most recent one; `name` names the module in messages.

    All methods raise `InputError` with the reason if the module cannot be traced.
    """

    def __init__(self, module: nn.Module, make_part: PartMaker, defer_work: DeferWork, name: str) -> None:
        self.owned = TensorsOfModule(module)
        self.last: Trace | None = None
        self._module = module
        self._make_part = make_part
        self._defer_work = defer_work
        self._name = name
        self._has_warned = False
        self._guard = Guard(module, self._forget, name=name)
        self._by_key: dict[tuple[Hashable, ...], list[Trace]] = {}
        self._by_layout: dict[tuple[Hashable, ...], Lengths] = {}
        self._hooked = hooked_parameters(module)
        self._is_step_checked = True
        refuse_hooks(module, self._hooked)

    def __len__(self) -> int:
        """Returns the number of traces."""
        return len({id(trace) for same in self._by_key.values() for trace in same})

    @property
    def notes(self) -> list[str]:
        """A line for each reason why the module is retraced for other input sizes."""
        return [note for lengths in self._by_layout.values() for note in lengths.notes]

    def begin(self) -> None:
        """Begins a step, while no stage has a forward in flight."""
        self._hooked = hooked_parameters(self._module)
        self._is_step_checked = False
        self._guard.begin()

    def refuse_hooks(self) -> None:
        """Raises `InputError` for hooks, while no stage has a forward in flight."""
        refuse_hooks(self._module, hooked_parameters(self._module))

    def find(self, inputs: Tensors) -> Traced:
        """Returns the trace for the current state of the module and these inputs; creates it if it is new."""
        if not self._is_step_checked:
            self._check_step()
        state = self._guard.state_number()
        if self.owned.places is not self._guard.places:
            self.owned = TensorsOfModule(self._module, self._guard.places)
        tensors, structure = flatten_pytree(arguments_of(inputs), opaque=True)
        autocast = autocast_of(tensors[0].device.type if tensors else "cpu")
        kinds = tuple([kind_of(tensor) for tensor in tensors])
        rest = structure, shared_memory(tensors), autocast, global_state(), self.owned.kinds
        same = self._by_key.setdefault((state, kinds, *rest), [])
        trace = next((trace for trace in same if trace.holds_for_numbers(self.owned.tensors, tensors)), None)
        if trace is None:
            self._prepare(inputs)
            self._make_part.new_trace(tensors)

            def make(dims: Collection[Dim]) -> Trace:
                return Trace(self._module, self.owned, structure, tensors, autocast, self._make_part, self._defer_work, dims)

            layouts = tuple([layout_of(tensor) for tensor in tensors])
            trace = self._for_sizes(self._by_layout.setdefault((state, layouts, *rest), Lengths()), tensors, make)
            self._keep(trace, same)
        self.last = trace
        return Traced(trace, tensors)

    def _for_sizes(self, lengths: Lengths, tensors: list[Tensor], make: MakeTrace) -> Trace:
        """Returns a trace for inputs of new sizes or values."""
        if not self._make_part.takes_symbols or not all(map(is_traceable, tensors)):
            return make(())
        return lengths.find(self.owned.tensors, tensors) or lengths.make(tensors, make)

    def _prepare(self, inputs: Tensors) -> None:
        """Passes the real inputs to a module that needs them before it is traced with fake inputs, such as a stage of `zb.split`."""
        before_tracing = getattr(self._module, "_before_tracing", None)
        if before_tracing is not None:
            positional, named = arguments_of(inputs)
            before_tracing(*positional, **named)

    def _keep(self, trace: Trace, same: list[Trace]) -> None:
        """Adds a trace to those for inputs of the `same` kind; drops the oldest if there are more than `MOST_STATES`."""
        same.append(trace)
        if len(same) <= MOST_STATES:
            return
        del same[0]
        if not self._has_warned:
            self._has_warned = True
            warn_user(
                f"{self._name} is traced for the {MOST_STATES + 1}th time for inputs of one kind, because its forward branches on values "
                'that change, and tracing is slow; split="deferred" traces nothing'
            )

    def _check_step(self) -> None:
        """Checks, once per step, the properties that do not change within a step."""
        refuse_hooks(self._module, self._hooked)
        self.owned = TensorsOfModule(self._module, self._guard.places)
        self._is_step_checked = True

    def _forget(self, state: int) -> None:
        """Drops the traces of a Python state."""
        self._by_key = {key: traces for key, traces in self._by_key.items() if key[0] != state}
        self._by_layout = {key: lengths for key, lengths in self._by_layout.items() if key[0] != state}
