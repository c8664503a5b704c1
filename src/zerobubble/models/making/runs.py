"""Runs a function that creates a model, and computes values only for some of its parameters.

Values that no kept parameter needs are never computed. Values start at origins of three kinds: a parameter, a large new tensor, or
a tensor read from a file. If an origin is not needed, a meta tensor replaces it. All results computed from it are meta tensors too, and
random numbers for it are drawn and discarded. If such a tensor is combined with one that has values, or its values are read, its origins
become needed, and the run starts over. Code that queries the device of such a tensor sees the CPU, so that it takes the same branches as on
one device.

The random numbers of tensors without values are drawn and discarded, so that later draws equal those on one device.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from zerobubble.errors import InputError
from zerobubble.models.observation.source_tracker import storage_of, written_tensors

_aten = torch.ops.aten
_IN_ORDER = frozenset({_aten.normal_, _aten.uniform_})
"""CPU operations that draw the same numbers for a whole tensor as for its consecutive pieces, if the pieces are long."""
_IN_PLACE = _IN_ORDER | {_aten.random_, _aten.bernoulli_, _aten.exponential_, _aten.cauchy_, _aten.log_normal_, _aten.geometric_}
_DRAWS = {_aten.randn: _aten.normal_, _aten.randn_like: _aten.normal_, _aten.rand: _aten.uniform_, _aten.rand_like: _aten.uniform_}
"""Operations that create a random tensor, with the in-place operation that draws the same numbers."""
PIECE = 1 << 18
"""Numbers drawn at once: large enough for torch's vectorized path for long tensors, and a multiple of its block of 16."""


class DiscardedDraws:
    """Draws into one reused buffer.

    Separate buffers would fragment the freed memory, which would then stay in the process.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        """Draws what `func` would draw on a CPU for its `output`, which is on the meta device."""
        operation = func._overloadpacket
        if operation in _IN_PLACE:
            self._draw(lambda tensor: func(tensor, *args[1:], **kwargs), operation in _IN_ORDER, output)
        elif operation in _DRAWS:
            generator = kwargs.get("generator")
            self._draw(lambda tensor: _DRAWS[operation](tensor, generator=generator), True, output)
        else:
            raise InputError(
                "the function that creates the model draws random numbers by {operation} for a parameter, which a rank without "
                "that parameter cannot repeat",
                operation=str(operation),
                remedy="give zb.split the created model",
            )

    def _draw(self, fill: Callable[[Tensor], Any], is_in_order: bool, like: Tensor) -> None:
        if not like.is_contiguous():
            fill(torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="cpu"))
            return
        rest = like.numel()
        while rest:
            count = PIECE if is_in_order and rest >= 2 * PIECE else rest
            fill(self._piece(count, like.dtype))
            rest -= count

    def _piece(self, count: int, dtype: torch.dtype) -> Tensor:
        size = count * dtype.itemsize
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._memory[:size].view(dtype)


def draws_numbers(func: Any) -> bool:
    """Returns whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def fills(func: Any) -> bool:
    """Returns whether an operation only draws random numbers into its first argument."""
    return func._overloadpacket in _IN_PLACE


_NEW = frozenset({_aten.empty, _aten.empty_strided, _aten.zeros, _aten.ones, _aten.full, _aten.rand, _aten.randn})
_LARGE = PIECE
"""Minimum number of elements for a new tensor to be an origin."""
_META, _CPU = torch.device("meta"), torch.device("cpu")
_REJECTING = "_no_grad_trunc_normal_"
"""The function of `torch.nn.init` that redraws until all numbers are within bounds."""


class ValueOrigin(NamedTuple):
    """An origin of values: the n-th parameter, large tensor, or file read, in order of creation."""

    kind: str
    number: int


Origins = frozenset[ValueOrigin]


class NeededError(BaseException):
    """Raised if the values of these `origins` are needed to continue."""

    def __init__(self, origins: Origins) -> None:
        super().__init__(origins)
        self.origins = origins


class Making(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives values only to the `needed` origins, in the thread that entered it; to all if None.

    Without `draws`, no random numbers are drawn for other origins. This is faster, but later draws then differ from one device.
    """

    def __init__(self, needed: Origins | None, *, draws: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._needed = needed
        self._thread = threading.get_ident()
        self._counts: dict[str, int] = {}
        self._origins: dict[int, Origins] = {}
        self._alive: list[Tensor] = []  # kept alive, so that no storage key is reused
        self._registered: Any = WeakTensorKeyDictionary()
        self._discarded = DiscardedDraws() if draws else None
        self.has_drawn = False
        """Whether random numbers were requested for origins that are not needed."""

    def is_here(self) -> bool:
        """Whether this is the thread that creates the model."""
        return threading.get_ident() == self._thread

    def begin(self, kind: str) -> tuple[ValueOrigin, bool]:
        """Returns the next origin of this kind, and whether it is needed."""
        origin = ValueOrigin(kind, self._counts.get(kind, 0))
        self._counts[kind] = origin.number + 1
        return origin, self._needed is None or origin in self._needed

    def come_from(self, tensor: Tensor, origins: Origins) -> None:
        """Adds `origins` to the origins of `tensor`, which is on the meta device."""
        storage = storage_of(tensor)
        self._origins[storage] = self._origins.get(storage, frozenset()) | origins
        self._alive.append(tensor)

    def origins_in(self, leaves: Iterable[Any]) -> Origins:
        """Returns the missing origins of the tensors among `leaves`."""
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        return frozenset().union(*(self._origins.get(storage_of(tensor), frozenset()) for tensor in tensors))

    def _has_none(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has no values."""
        return tensor.is_meta or storage_of(tensor) in self._origins

    def parameter(self, parameter: nn.Parameter, name: str) -> nn.Parameter:
        """Returns the parameter to register instead of `parameter`: itself if it is needed."""
        if is_lazy(parameter):
            return parameter
        if parameter not in self._registered:
            origin, is_needed = self.begin("parameter")
            registered = parameter if is_needed or self._has_none(parameter) else self._without_values(parameter, name)
            if parameter.numel() >= _LARGE:
                trim_memory()  # frees the tensors it was computed from
            if storage_of(registered) in self._origins or registered is not parameter:
                self.come_from(registered, frozenset({origin}))
            self._registered[parameter] = self._registered[registered] = registered
        replacement: nn.Parameter = self._registered[parameter]
        return replacement

    def _without_values(self, parameter: nn.Parameter, name: str) -> nn.Parameter:
        if parameter.device != _CPU:
            raise InputError(
                "the function that creates the model creates parameter {name!r} on {device}, where its random numbers cannot be "
                "drawn in the order of one device",
                name=name,
                device=str(parameter.device),
                remedy="let it create the model on the CPU, and move it afterwards",
            )
        on_meta = type(parameter)(torch.empty_like(parameter, device=_META), requires_grad=parameter.requires_grad)
        on_meta.__dict__.update(parameter.__dict__)
        return on_meta

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        origins = self.origins_in(pytree.tree_leaves((args, named)))
        if not origins:
            return self._new(func, args, named) if func._overloadpacket in _NEW else func(*args, **named)
        written = list(written_tensors(func, args))
        if not all(map(self._has_none, written)):
            raise NeededError(origins)
        if named.get("device") is not None:
            named["device"] = _META
        try:
            is_drawn_into = self._discarded is None and fills(func)
            output = args[0] if is_drawn_into else func(*args, **named)
        except (NotImplementedError, RuntimeError) as error:
            raise NeededError(origins) from error
        self.has_drawn = self.has_drawn or draws_numbers(func)
        if self._discarded is not None and draws_numbers(func):
            self._discarded.draw(func, args, named, output)
        for leaf in (*pytree.tree_leaves(output), *written):
            if isinstance(leaf, Tensor) and self._has_none(leaf):
                self.come_from(leaf, origins)
        return output

    def _new(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Creates a new tensor, which is an origin if it is large."""
        if named.get("device") not in (None, _CPU) or named.get("pin_memory"):
            return func(*args, **named)
        output = func(*args, **{**named, "device": _META})
        if output.numel() < _LARGE or not output.is_floating_point():
            return func(*args, **named)
        origin, is_needed = self.begin("tensor")
        if is_needed:
            return func(*args, **named)
        if self._discarded is not None and draws_numbers(func):
            self._discarded.draw(func, args, named, output)
        self.come_from(output, frozenset({origin}))
        return output

    def rejecting(self, draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wraps the function `draw(tensor, ...)`, which redraws until all numbers are within bounds.

        The number of draws depends on the numbers, so they are always drawn, and discarded if not needed.
        """

        def function(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if storage_of(tensor) not in self._origins or not self.is_here():
                draw(tensor, *args, **kwargs)
            elif self._discarded is not None:
                with _disable_current_modes():
                    draw(torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"), *args, **kwargs)
            trim_memory()
            return tensor

        return function


_ANSWERS: dict[Any, Any] = {}
_ANSWERS[Tensor.is_meta.__get__] = False  # type: ignore[attr-defined]
_ANSWERS[Tensor.is_cpu.__get__] = True  # type: ignore[attr-defined]
_ANSWERS[Tensor.device.__get__] = _CPU


class AsOnOneDevice(TorchFunctionMode):
    """Makes tensors without values, as known to `making`, report the CPU as their device."""

    def __init__(self, making: Making) -> None:
        super().__init__()
        self._making = making

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ANSWERS and self._making.origins_in(args):
            return _ANSWERS[func]
        return func(*args, **(kwargs or {}))


@contextmanager
def making_by(making: Making) -> Iterator[None]:
    """Redirects parameter registration and the functions of `torch.nn.init` to `making`, in its thread."""
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


def trim_memory() -> None:
    """Returns freed pages to the operating system, if the C library supports it.

    glibc keeps free blocks of up to 32 MiB between used ones, and allocates from fresh memory if their alignment does not fit.
    """
    _malloc_trim()(0)


@cache
def _malloc_trim() -> Callable[[int], object]:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    function: Callable[[int], object] = getattr(library, "malloc_trim", bool)
    return function
