"""Identifies the Python state of a traced module, so that no trace runs in a state other than its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import nn

from zerobubble.error_reports.user_code import warn_user
from zerobubble.runtime.split.python_state.state import State, TensorPlace, read_state

MOST_STATES = 8
"""Number of states whose traces are kept: enough for flags that alternate, and a bound on memory for a number that always changes."""


class Guard:
    """Numbers the states of `module`: equal numbers mean equal states.

    Reading a state is slow, but comparing object identities takes microseconds. So a state is read only if an identity has changed. Beyond
    `MOST_STATES` states, the least recently used one is dropped: `forget` is called with its number. The first time, a warning that begins
    with `name` reports what keeps changing.
    """

    def __init__(self, module: nn.Module, forget: Callable[[int], None], *, name: str) -> None:
        self._module = module
        self._forget = forget
        self._name = name
        self._state: State | None = None
        self._number = -1
        self._num_states_met = 0
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()
        """The number of each kept state, least recently used first."""
        self._is_code_checked = False
        self._has_warned = False

    def begin(self) -> None:
        """Begins a step: the next check includes classes, globals and large containers."""
        self._is_code_checked = False

    def state_number(self) -> int:
        """Returns the number of the module's current state. Raises `InputError` for a state that cannot be compared."""
        if not self._is_unchanged():
            self._read()
        self._is_code_checked = True
        return self._number

    @property
    def places(self) -> Sequence[TensorPlace]:
        """The places that hold tensors other than parameters and buffers, in the last state."""
        return () if self._state is None else self._state.places

    def _is_unchanged(self) -> bool:
        if self._state is None or not self._state.watched.is_unchanged():
            return False
        return self._is_code_checked or self._state.watched_per_step.is_unchanged()

    def _read(self) -> None:
        before, self._state = self._state, None  # stays None if the state cannot be read
        now = read_state(self._module)
        self._state = now
        key = tuple(now.values.items())
        if key not in self._numbers:
            self._numbers[key] = self._num_states_met
            self._num_states_met += 1
        self._numbers.move_to_end(key)
        self._number = self._numbers[key]
        if len(self._numbers) > MOST_STATES:
            self._forget(self._numbers.popitem(last=False)[1])
            self._warn(before, now)

    def _warn(self, before: State | None, now: State) -> None:
        if not self._has_warned and before is not None:
            self._has_warned = True
            warn_user(
                f"{self._name} is traced for the {self._num_states_met}th time, now because {before.changed_to(now)} changed, and tracing "
                "is slow; keep in a buffer (register_buffer) what changes from step to step: a trace reads buffers each time"
            )


def global_state() -> Hashable:
    """Returns the settings of torch, other than autocast, that determine which operations a forward calls."""
    return (
        torch.get_default_dtype(),
        torch._C._len_torch_function_stack() and str(torch.get_default_device()),  # the default device is such a mode
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
    )
