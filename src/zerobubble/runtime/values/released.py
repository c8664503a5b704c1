"""Releases tensors in place: their memory is freed, and every use of their values raises `InputError` until they are refilled.

A released tensor stays the same object, with its name, shape, dtype, device and `requires_grad`, so optimizers and modules that hold it
keep it. Its class becomes a subclass whose `__torch_function__` refuses everything but metadata. The few functions of torch that bypass
`__torch_function__`, such as `torch.tensor(parameter)`, read NaN.

Its gradient is that of another rank. Optimizers and the loops of torch, such as `zero_grad`, skip parameters without gradients, so they
read None. All other code that reads it, such as a norm of the gradients of `model.parameters()`, would get a rank's share, and is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from zerobubble.errors import InputError

Explain = Callable[[str], InputError]
"""Returns the error that a use of a released tensor raises: of its "values" or its "gradient"."""


class _Release(NamedTuple):
    """How a tensor was released: the error of its uses, its class before, and its strides."""

    explain: Explain
    kind: type
    stride: tuple[int, ...]


_RELEASED = "_released"
"""The attribute of a released tensor that holds its `_Release`."""


def release(tensor: Tensor, explain: Explain) -> None:
    """Frees the memory of `tensor`, and makes every use of its values raise `explain("values")`.

    Memory of subclasses other than DTensor, such as quantized tensors, is not freed.
    """
    before = _Release(explain, type(tensor), tuple(tensor.stride()))
    if isinstance(tensor, DTensor):
        tensor._local_tensor = _empty_like(tensor._local_tensor)
    elif not hasattr(tensor, "__tensor_flatten__"):
        tensor.data = _empty_like(tensor)
    tensor.__dict__[_RELEASED] = before
    tensor.__class__ = _released_kind(before.kind)


def refill(tensor: Tensor, value: Tensor) -> None:
    """Makes a released `tensor` usable again, with the memory of `value`; for a DTensor, this is its local part."""
    tensor.__class__ = tensor.__dict__.pop(_RELEASED).kind
    if isinstance(tensor, DTensor):
        tensor._local_tensor = value
    else:
        tensor.data = value


def is_released(tensor: Tensor) -> bool:
    """Returns whether the tensor is released."""
    return _RELEASED in tensor.__dict__


def local_shape(tensor: Tensor) -> torch.Size:
    """Returns the shape of the memory of `tensor`, which may be released: for a DTensor, of its local part."""
    return tensor._local_tensor.shape if isinstance(tensor, DTensor) else tensor.shape


def _empty_like(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    number = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), number, dtype=tensor.dtype, device=tensor.device if device is None else device).expand(tensor.shape)


_ATTRIBUTES = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "requires_grad",
        "grad_fn",
        "is_leaf",
        "retains_grad",
        "names",
        "is_cpu",
        "is_cuda",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "itemsize",
        "nbytes",
        "_backward_hooks",
    ]
)
_METHODS = frozenset(
    [
        "size",
        "dim",
        "numel",
        "nelement",
        "element_size",
        "get_device",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "__len__",
        "__dir__",
        "__hash__",
        "requires_grad_",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
    ]
)
_FUNCTIONS = frozenset(["_has_compatible_shallow_copy_type", "numel", "is_floating_point", "is_complex", "empty_like", "zeros_like"])
_FUNCTIONS |= {"ones_like", "full_like", "rand_like", "randn_like"}
_CONVERSIONS = frozenset((Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16))
_set_data: Any = getattr(Tensor.data, "__set__")  # noqa: B009 - stubs of torch have no descriptors
_get_gradient: Any = getattr(Tensor.grad, "__get__")  # noqa: B009
_set_gradient: Any = getattr(Tensor.grad, "__set__")  # noqa: B009
_set_requires_grad: Any = getattr(Tensor.requires_grad, "__set__")  # noqa: B009


@cache
def _harmless() -> frozenset[Any]:
    """Returns the functions that read no values."""
    getters = [getattr(Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(Tensor, name)]
    methods = [getattr(Tensor, name) for name in _METHODS]
    return frozenset((*getters, _set_requires_grad, *methods, *(getattr(torch, name) for name in _FUNCTIONS)))


def _refuse_values(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Runs `func` if it reads no values. Raises the error of the first released tensor otherwise."""
    kwargs = kwargs or {}
    if func is Tensor.stride:
        strides = args[0].__dict__[_RELEASED].stride
        return strides[args[1]] if len(args) > 1 else strides
    if func in _CONVERSIONS and is_released(args[0]):
        return _moved(args[0], func, args[1:], kwargs)
    reads_gradient = func == _get_gradient
    if reads_gradient and args[0].requires_grad and not _skips_missing_gradients(sys._getframe(1)):
        raise args[0].__dict__[_RELEASED].explain("gradient")
    clears_gradient = func == _set_gradient and args[1] is None
    keeps_data = func == _set_data and args[1] is args[0]
    names_type = func is Tensor.type and len(args) == 1 and not kwargs
    if reads_gradient or clears_gradient or keeps_data or names_type or func in _harmless():
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    raise _first_released((args, kwargs)).explain("values")


_MOST_FRAMES = 4
"""The number of functions between an optimizer and a gradient that it reads, at most."""


def _skips_missing_gradients(frame: FrameType) -> bool:
    """Returns whether the function that reads a gradient is torch's, ours or an optimizer's."""
    if frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "zerobubble"):
        return True
    return any(isinstance(caller.f_locals.get("self"), torch.optim.Optimizer) for caller in islice(_callers(frame), _MOST_FRAMES))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _moved(tensor: Tensor, convert: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Returns the released `tensor`, on the device to which it is converted, as by `model.cpu()`. Other dtypes are refused."""
    probe = convert(torch.empty([0] * tensor.dim(), dtype=tensor.dtype, device=tensor.device), *args, **kwargs)
    if probe.dtype != tensor.dtype or (isinstance(tensor, DTensor) and probe.device != tensor.device):
        raise tensor.__dict__[_RELEASED].explain("values")
    if probe.device != tensor.device:
        with torch._C.DisableTorchFunctionSubclass():
            tensor.data = _empty_like(tensor, probe.device)
    return tensor


def _first_released(value: Any) -> _Release:
    leaves = tree_leaves(value)
    found: _Release = next(leaf.__dict__[_RELEASED] for leaf in leaves if isinstance(leaf, Tensor) and is_released(leaf))
    return found


def _refuse(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    raise tensor.__dict__[_RELEASED].explain("values")


def _repr(tensor: Tensor, *, tensor_contents: Any = None) -> str:
    return f"<released {tensor.__dict__[_RELEASED].kind.__name__}: {list(tensor.shape)} of {tensor.dtype} on {tensor.device}>"


@cache
def _released_kind(kind: type) -> type:
    """Returns the class of released tensors of this class."""
    bypassing = ("as_subclass", "__reduce_ex__", "__deepcopy__", "to_local", "full_tensor", "redistribute")
    refused = {name: _refuse for name in bypassing if hasattr(kind, name)}
    return type(f"Released{kind.__name__}", (kind,), {**refused, "__torch_function__": classmethod(_refuse_values), "__repr__": _repr})
