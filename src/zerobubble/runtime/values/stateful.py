"""Stateful tensors: parameters and buffers to which further tensors belong, such as the quantized weights of other libraries.

A library keeps the tensors that belong to a quantized weight, such as its scales, in one of these places:

- inside the weight, which is only a wrapper (`__tensor_flatten__`), as torchao does;
- in attributes of the weight, as bitsandbytes does in 4 bits (`weight.quant_state.absmax`);
- in attributes of the weight's module, as bitsandbytes does in 8 bits (`module.state.SCB`).

This state goes where the weight goes: into shape-only copies, and, as far as it has the weight's numbers, out of memory and back.

A library may also keep another form of a weight from its first forward in evaluation mode on, as bitsandbytes does in 4 bits on processors
with AVX512-BF16. That form has no gradient and rounded scales, so `forms_kept` ends it with the evaluation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerobubble.errors import InputError
from zerobubble.runtime.values.refusing import Refusing

_OURS = __name__.partition(".")[0] + "."
_PLAIN = {Tensor, nn.Parameter, getattr(nn, "Buffer", Tensor)}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def own_type(tensor: Tensor) -> type[Tensor]:
    """Returns the class of `tensor`, or the class that it had before this package changed it, such as to release it."""
    return next(kind for kind in type(tensor).__mro__ if not kind.__module__.startswith(_OURS))


def is_stateful(tensor: Tensor) -> bool:
    """Returns whether further tensors may belong to `tensor`: it has a class of its own, or is a parameter of integers."""
    kind = own_type(tensor)
    if kind in _PLAIN:
        return isinstance(tensor, nn.Parameter) and not (tensor.is_floating_point() or tensor.is_complex())
    return not issubclass(kind, DTensor) and not is_lazy(tensor)


def is_wrapper(tensor: Tensor) -> bool:
    """Returns whether a stateful `tensor` has only the memory of the tensors inside."""
    return is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor)


def parts_of_wrapper(tensor: Tensor) -> dict[str, Tensor]:
    """Returns the tensors directly inside a wrapper, by the names of its attributes."""
    names = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names}


def tensors_inside(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in `value`, its attributes and nested containers, but not inside modules, with their paths from `name`."""
    seen: dict[int, Any] = {}  # keeps the objects alive, so that ids stay unique
    left = [(name, value)]
    while left:
        path, item = left.pop()
        if id(item) in seen or isinstance(item, (nn.Module, type)) or type(item) is Refusing:
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            yield path, item
        elif isinstance(item, Mapping):
            left += [(f"{path}.{key}", part) for key, part in item.items()]
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            left += [(f"{path}.{number}", part) for number, part in enumerate(item)]
        left += [(f"{path}.{key}", part) for key, part in getattr(item, "__dict__", {}).items()]


def state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that belong to the stateful tensors of `module` itself, by their names in it, and no wrappers."""
    stateful = stateful_tensors(module)
    attributes = {name: value for name, value in module.__dict__.items() if name not in _OF_EVERY_MODULE} if stateful else {}
    for name, tensor in (*stateful.items(), *chain.from_iterable(tensors_inside(value, name) for name, value in attributes.items())):
        if is_wrapper(tensor):
            inner: Iterator[tuple[str, Tensor]] = tensors_inside_wrapper(tensor, name)
        elif name in stateful:
            inner = tensors_inside(tensor.__dict__, name)
        else:
            inner = iter([(name, tensor)])
        yield from inner


def stateful_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns the stateful parameters and buffers of `module` itself, by name."""
    named = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    return {name: tensor for name, tensor in named if is_stateful(tensor)}


def tensors_inside_wrapper(tensor: Tensor, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors inside a wrapper that have memory, with their paths from `name`; none for another tensor."""
    for part, inner in parts_of_wrapper(tensor).items() if is_wrapper(tensor) else ():
        if is_wrapper(inner):
            yield from tensors_inside_wrapper(inner, f"{name}.{part}")
        else:
            yield f"{name}.{part}", inner


@contextmanager
def forms_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context after which the stateful tensors of `modules` consist of the same memory as before, with the same attributes."""
    tensors = [tensor for module in modules for tensor in stateful_tensors(module).values() if not is_wrapper(tensor)]
    before = [(tensor, tensor.data, [(vars(holder), dict(vars(holder))) for holder in _holders_of(tensor)]) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, data, holders in before:
            if (tensor.shape, tensor.data_ptr()) != (data.shape, data.data_ptr()):
                tensor.data = data
                for attributes, entries in holders:
                    attributes.clear()
                    attributes.update(entries)


def _holders_of(tensor: Tensor) -> list[Any]:
    """Returns a stateful tensor, and the objects in its attributes that have attributes of their own."""
    return [tensor, *(value for value in vars(tensor).values() if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)))]


def refuse_lazy(model: nn.Module) -> None:
    """Raises `InputError` for a parameter or buffer that gets its shape in the first forward."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise InputError(
                "{name!r} of {model} is not initialized: a lazy module creates it in its first forward, but a stage must know its shape",
                name=name,
                model=type(model).__name__,
                remedy="call the model or stage once on a batch before, or in the function that creates it",
            )
