"""A model that a function makes, of which a rank has the numbers of its own stages alone.

The law: the function runs as on one device and takes the same random numbers, so that what a stage holds has the values of one device. But
a parameter that is not to be kept is put on the meta device when its module registers it, before anything is written into it, and what is
drawn for it is thrown away piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zerobubble.arguments import Wanted
from zerobubble.errors import InputError

_aten = torch.ops.aten
_DRAWS_IN_ORDER = frozenset({_aten.normal_, _aten.uniform_})
"""Operations that draw the same numbers for a tensor on a CPU and for its pieces one after the other, if pieces are long."""
_DRAWS = _DRAWS_IN_ORDER | {_aten.random_, _aten.bernoulli_, _aten.exponential_, _aten.cauchy_, _aten.log_normal_, _aten.geometric_}
_PIECE = 1 << 20

MAKES_A_MODEL = Wanted("a function () -> nn.Module", callable)


def make_model(function: Callable[[], nn.Module], keep: Collection[str] = (), random_state: Tensor | None = None) -> nn.Module:
    """What `function` makes, with the parameters named in `keep`, under any of their names, and the others on the meta device.

    It draws from `random_state`, by default the current one, and leaves the current one as it is. Raises `InputError` where it makes no
    module, and where it replaces parameters after it has made them.
    """
    with torch.random.fork_rng(devices=[]):
        model, numbers = _run(function, frozenset(), nullcontext())
    if not keep:
        return model
    named = dict(model.named_parameters(remove_duplicate=False))
    lost = [name for name in keep if id(named[name]) not in numbers]
    if lost:
        raise InputError(
            f"the function that makes the model replaces parameter {lost[0]!r} by another; give zb.split the model that it makes"
        )
    with torch.random.fork_rng(devices=[]):
        if random_state is not None:
            torch.random.set_rng_state(random_state)
        kept = frozenset(numbers[id(named[name])] for name in keep)
        return _run(function, kept, _Discarding())[0]  # type: ignore[no-untyped-call]


def _run(function: Callable[[], nn.Module], kept: frozenset[int], drawing: AbstractContextManager[Any]) -> tuple[nn.Module, dict[int, int]]:
    """What `function` makes, and the number of each of its parameters, by its id, in the order in which they were registered."""
    with _registering(kept) as numbers, drawing:
        model = function()
    if not isinstance(model, nn.Module):
        raise InputError(f"zb.split takes a module or a function that makes one, and the function gave a {type(model).__name__}")
    return model, numbers


@contextmanager
def _registering(kept: frozenset[int]) -> Iterator[dict[int, int]]:
    """Inside, parameters are numbered as they are registered, and those whose number is not `kept` are put on the meta device."""
    register = nn.Module.register_parameter
    numbers: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no id is used twice

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is None or id(param) in numbers:
            return
        number = len(alive)
        if number not in kept and param.device.type != "meta":
            made = type(param)(param.to("meta"), requires_grad=param.requires_grad)
            made.__dict__.update(param.__dict__)
            self._parameters[name] = param = made
        numbers[id(param)] = number
        alive.append(param)

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        yield numbers
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _Discarding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws the random numbers of tensors on the meta device, and throws them away."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._overloadpacket
        if packet in _DRAWS and args[0].device.type == "meta":
            rest = args[0].numel()
            while rest:
                count = _PIECE if packet in _DRAWS_IN_ORDER and rest >= 2 * _PIECE else rest
                func(torch.empty(count, dtype=args[0].dtype), *args[1:], **(kwargs or {}))
                rest -= count
        return func(*args, **(kwargs or {}))
