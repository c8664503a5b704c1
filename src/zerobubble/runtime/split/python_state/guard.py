"""Tells a traced stage in which Python state its module is, so that no trace runs in another state than the one it was made in.

The Python state is what `python_state` reads: the numbers, flags, strings and functions that a forward can reach.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import nn

from zerobubble.runtime.split.python_state.state import Place, State, read_state

MOST_STATES = 8
"""States whose traces are kept: a flag that goes to and fro is not traced again, and a number that always changes does not fill memory."""


class Guard:
    """Gives each state of `module` a number: equal numbers, equal states.

    Reading a state takes long and looking whether it holds the same objects takes microseconds, so it is read anew only where a look finds
    another object. When there are more than `MOST_STATES`, the one that was met longest ago is given up: `forget` is called with its
    number, and the first time a warning that begins with `name` says what keeps changing.
    """

    def __init__(self, module: nn.Module, forget: Callable[[int], None], *, name: str) -> None:
        self._module = module
        self._forget = forget
        self._name = name
        self._state: State | None = None
        self._number = -1
        self._num_states_met = 0
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()
        """The number of each state that is kept, the one met longest ago first."""
        self._is_code_checked = False
        self._has_warned = False

    def begin(self) -> None:
        """A step begins: the next look includes classes, globals and long containers."""
        self._is_code_checked = False

    def number(self) -> int:
        """The number of the state in which the module is now. Raises `InputError` for a state that cannot be compared."""
        if not self._is_unchanged():
            self._read()
        self._is_code_checked = True
        return self._number

    @property
    def places(self) -> Sequence[Place]:
        """Where the module holds tensors beside its parameters and buffers, in the state that was met last."""
        return () if self._state is None else self._state.places

    def _is_unchanged(self) -> bool:
        if self._state is None or not self._state.watched.is_unchanged():
            return False
        return self._is_code_checked or self._state.watched_per_step.is_unchanged()

    def _read(self) -> None:
        before, self._state = self._state, None  # None stays if the state cannot be read
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
            warnings.warn(
                f"{self._name} is traced for the {self._num_states_met}th time, now since {before.changed_to(now)} changed, and tracing "
                "takes long; keep in a buffer (register_buffer) what changes from step to step: a trace reads buffers anew",
                stacklevel=2,
            )


def global_state() -> Hashable:
    """The settings of torch that decide which operations a forward calls, beside autocast."""
    return (
        torch.get_default_dtype(),
        torch._C._len_torch_function_stack() and str(torch.get_default_device()),  # a default device is set by such a mode
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
    )
