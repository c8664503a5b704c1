"""What a function that makes a model computes for some of its parameters alone.

The law: numbers that nobody needs are never made. They begin in one of three places, their `Origin`: in a parameter, in a large new tensor,
or in a tensor that is read from a file. Where an origin is not needed, a tensor on the meta device is in its place, all that is computed
from it is on that device, too, and what is drawn for it is thrown away. Where such a tensor meets one with numbers, or its numbers are
looked at, its origins are needed after all. Code that asks is told that it is on the CPU, or it would do something else than on one device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from zerobubble.errors import InputError
from zerobubble.models.making.freed_memory import give_back
from zerobubble.models.making.random_draws import PIECE, DiscardedDraws, draws_numbers, fills
from zerobubble.models.observation.following import storage_of

_aten = torch.ops.aten
_NEW = frozenset({_aten.empty, _aten.empty_strided, _aten.zeros, _aten.ones, _aten.full, _aten.rand, _aten.randn})
_LARGE = PIECE
"""New tensors of so many numbers are origins."""
_META, _CPU = torch.device("meta"), torch.device("cpu")
_REJECTING = "_no_grad_trunc_normal_"
"""The function of `torch.nn.init` that draws until no number is beyond a bound."""


class Origin(NamedTuple):
    """Where numbers begin: the parameter, the large tensor, or the read of a file with this number, in the order of their making."""

    kind: str
    number: int


Origins = frozenset[Origin]


class NeededError(BaseException):
    """Raised where numbers of these `origins` are needed to go on."""

    def __init__(self, origins: Origins) -> None:
        super().__init__(origins)
        self.origins = origins


class Making(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, in the thread that entered it, only the origins that are `needed` have numbers; all have if it is None.

    Unless it `draws`, random numbers are not drawn for those that are not needed, which is faster, and others have other values.
    """

    def __init__(self, needed: Origins | None, *, draws: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._needed = needed
        self._thread = threading.get_ident()
        self._counts: dict[str, int] = {}
        self._origins: dict[int, Origins] = {}
        self._alive: list[Tensor] = []  # so that no number of a storage is used twice
        self._registered: Any = WeakTensorKeyDictionary()
        self._discarded = DiscardedDraws() if draws else None
        self.has_drawn = False
        """Whether random numbers were asked for that nobody needs here."""

    def is_here(self) -> bool:
        """Whether this is the thread in which the model is made."""
        return threading.get_ident() == self._thread

    def begin(self, kind: str) -> tuple[Origin, bool]:
        """The next origin of this kind, and whether its numbers are needed."""
        origin = Origin(kind, self._counts.get(kind, 0))
        self._counts[kind] = origin.number + 1
        return origin, self._needed is None or origin in self._needed

    def come_from(self, tensor: Tensor, origins: Origins) -> None:
        """`tensor`, which is on the meta device, has its numbers from these origins, too."""
        storage = storage_of(tensor)
        self._origins[storage] = self._origins.get(storage, frozenset()) | origins
        self._alive.append(tensor)

    def origins_in(self, leaves: Iterable[Any]) -> Origins:
        """Whence the tensors among these have numbers that were not made."""
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        return frozenset().union(*(self._origins.get(storage_of(tensor), frozenset()) for tensor in tensors))

    def _has_none(self, tensor: Tensor) -> bool:
        """Whether a tensor has no numbers."""
        return tensor.is_meta or storage_of(tensor) in self._origins

    def parameter(self, given: nn.Parameter, name: str) -> nn.Parameter:
        """What is registered in the place of parameter `given`: itself where its numbers are needed."""
        if given not in self._registered:
            origin, is_needed = self.begin("parameter")
            made = given if is_needed or self._has_none(given) else self._without_numbers(given, name)
            if given.numel() >= _LARGE:
                give_back()  # what it was computed from
            if storage_of(made) in self._origins or made is not given:
                self.come_from(made, frozenset({origin}))
            self._registered[given] = self._registered[made] = made
        found: nn.Parameter = self._registered[given]
        return found

    def _without_numbers(self, given: nn.Parameter, name: str) -> nn.Parameter:
        if given.device.type != "cpu":
            raise InputError(
                f"the function that makes the model makes parameter {name!r} on {given.device}, where its random numbers cannot be drawn "
                "in the order of one device; let it make the model on the CPU, and move it from there"
            )
        made = type(given)(torch.empty_like(given, device=_META), requires_grad=given.requires_grad)
        made.__dict__.update(given.__dict__)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        origins = self.origins_in(pytree.tree_leaves((args, given)))
        if not origins:
            return self._new(func, args, given) if func._overloadpacket in _NEW else func(*args, **given)
        written = list(_written(func, args))
        if not all(map(self._has_none, written)):
            raise NeededError(origins)
        if given.get("device") is not None:
            given["device"] = _META
        try:
            is_drawn_into = self._discarded is None and fills(func)
            output = args[0] if is_drawn_into else func(*args, **given)
        except (NotImplementedError, RuntimeError) as error:
            raise NeededError(origins) from error
        self.has_drawn = self.has_drawn or draws_numbers(func)
        if self._discarded is not None and draws_numbers(func):
            self._discarded.draw(func, args, given, output)
        for leaf in (*pytree.tree_leaves(output), *written):
            if isinstance(leaf, Tensor) and self._has_none(leaf):
                self.come_from(leaf, origins)
        return output

    def _new(self, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """A new tensor, which is an origin where it is large."""
        if given.get("device") not in (None, _CPU) or given.get("pin_memory"):
            return func(*args, **given)
        output = func(*args, **{**given, "device": _META})
        if output.numel() < _LARGE or not output.is_floating_point():
            return func(*args, **given)
        origin, is_needed = self.begin("tensor")
        if is_needed:
            return func(*args, **given)
        if self._discarded is not None and draws_numbers(func):
            self._discarded.draw(func, args, given, output)
        self.come_from(output, frozenset({origin}))
        return output

    def rejecting(self, draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The function `draw(tensor, ...)`, which draws until all numbers are as they should be.

        How often it draws is told by the numbers alone, so they are made, and thrown away where nobody needs them.
        """

        def function(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if storage_of(tensor) not in self._origins or not self.is_here():
                draw(tensor, *args, **kwargs)
            elif self._discarded is not None:
                with _disable_current_modes():
                    draw(torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype), *args, **kwargs)
            give_back()
            return tensor

        return function


_ANSWERS: dict[Any, Any] = {}
_ANSWERS[Tensor.is_meta.__get__] = False  # type: ignore[attr-defined]
_ANSWERS[Tensor.is_cpu.__get__] = True  # type: ignore[attr-defined]
_ANSWERS[Tensor.device.__get__] = _CPU


class AsOnOneDevice(TorchFunctionMode):
    """Inside, a tensor that has no numbers, as `making` knows, is on the CPU for those who ask."""

    def __init__(self, making: Making) -> None:
        super().__init__()
        self._making = making

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ANSWERS and self._making.origins_in(args):
            return _ANSWERS[func]
        return func(*args, **(kwargs or {}))


def _written(func: Any, args: tuple[Any, ...]) -> Iterator[Tensor]:
    for argument, schema in zip(args, func._schema.arguments, strict=False):
        if schema.alias_info is not None and schema.alias_info.is_write:
            yield from (leaf for leaf in pytree.tree_leaves(argument) if isinstance(leaf, Tensor))


@contextmanager
def making_by(making: Making) -> Iterator[None]:
    """Inside, in the thread of `making`, what modules register and what the functions of `torch.nn.init` draw goes by way of it."""
    register, rejecting = nn.Module.register_parameter, getattr(nn.init, _REJECTING, None)

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and making.is_here():
            self._parameters[name] = making.parameter(param, name)

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    if rejecting is not None:
        setattr(nn.init, _REJECTING, making.rejecting(rejecting))
    try:
        with AsOnOneDevice(making), making:
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        if rejecting is not None:
            setattr(nn.init, _REJECTING, rejecting)
