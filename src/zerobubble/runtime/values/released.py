"""Releases tensors in place: their memory is freed, and every use of their values raises `InputError` until they are refilled.

A released tensor stays the same object, with its name, shape, dtype, device and `requires_grad`, so optimizers and modules that hold it
keep it. Its class becomes a subclass whose `__torch_function__` refuses everything but metadata. The few functions of torch that bypass
`__torch_function__`, such as `torch.tensor(parameter)`, read NaN.

Its gradient is on another rank. Optimizers and the loops of torch, such as `zero_grad`, skip parameters without gradients, so they read
None. All other code that reads it, such as a norm of the gradients of `model.parameters()`, would get a rank's share, and is refused.

A guarded tensor has its values. Each use of them first calls a function that may release the tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from zerobubble.errors import InputError
from zerobubble.runtime.values.buffers import making_tensors
from zerobubble.runtime.values.sparse import is_sparse
from zerobubble.runtime.values.stateful import is_wrapper

Explain = Callable[[str], InputError]
"""Returns the error that a use of a released tensor raises: of its "values" or its "gradient"."""


class _Release(NamedTuple):
    """How a tensor was released: the error of its uses, its class before, and its strides."""

    explain: Explain
    kind: type
    stride: tuple[int, ...]


class _Guard(NamedTuple):
    """What looks before each use of a guarded tensor, the class of the tensor before, and whether its values are old until overwritten.

    If `explain` is given, reading a missing gradient raises its error.
    """

    look: Callable[[], object]
    kind: type
    is_old: bool
    explain: Explain | None


_RELEASED = "_released"
"""The attribute of a released tensor that holds its `_Release`."""
_GUARDED = "_guarded"
"""The attribute of a guarded tensor that holds its `_Guard`."""


@making_tensors()  # data that is written in torch.inference_mode makes an inference tensor
def release(tensor: Tensor, explain: Explain) -> None:
    """Frees the memory of `tensor`, and makes every use of its values raise `explain("values")`.

    Memory of sparse tensors is not freed. The tensors inside of a wrapper are released on their own.
    """
    if _GUARDED in tensor.__dict__:
        _end_guard(tensor)
    before = _Release(explain, type(tensor), () if is_sparse(tensor) else tuple(tensor.stride()))
    if isinstance(tensor, DTensor):
        tensor._local_tensor = _empty_like(tensor._local_tensor)
    elif not is_wrapper(tensor) and not is_sparse(tensor):
        tensor.data = _empty_like(tensor)
    tensor.__dict__[_RELEASED] = before
    tensor.__class__ = _released_kind(before.kind)


@making_tensors()
def refill(tensor: Tensor, value: Tensor) -> None:
    """Makes a released `tensor` usable again, with the memory of `value`; for a DTensor, this is its local part.

    A wrapper has no memory of its own.
    """
    tensor.__class__ = tensor.__dict__.pop(_RELEASED).kind
    if isinstance(tensor, DTensor):
        tensor._local_tensor = value
    elif not is_wrapper(tensor):
        tensor.data = value


def guard(tensor: Tensor, look: Callable[[], object], *, is_old: bool = False, explain: Explain | None = None) -> None:
    """Makes every use of the values of `tensor` call `look` first. The functions that bypass a released tensor bypass it, too.

    With `is_old`, `look` raises an error until all values are overwritten. With `explain`, its gradient is on another rank: reading it
    raises `explain("gradient")`, as for a released tensor, unless this rank has computed a gradient.
    """
    if not is_released(tensor) and _GUARDED not in tensor.__dict__:
        tensor.__dict__[_GUARDED] = _Guard(look, type(tensor), is_old, explain)
        tensor.__class__ = _guarded_kind(type(tensor))


def unguard(tensor: Tensor) -> None:
    """Ends `guard`, unless the values are old."""
    if _GUARDED in tensor.__dict__ and not tensor.__dict__[_GUARDED].is_old:
        _end_guard(tensor)


def _end_guard(tensor: Tensor) -> None:
    tensor.__class__ = tensor.__dict__.pop(_GUARDED).kind


def is_released(tensor: Tensor) -> bool:
    """Returns whether the tensor is released."""
    return _RELEASED in tensor.__dict__


def is_old(tensor: Tensor) -> bool:
    """Returns whether the values of the tensor are old; see `guard`."""
    return _GUARDED in tensor.__dict__ and tensor.__dict__[_GUARDED].is_old


def values_of(tensor: Tensor) -> Tensor:
    """Returns a copy of the values of a tensor that is not released, be they old."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().clone()


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
        "grad_dtype",
        "output_nr",
        "retains_grad",
        "name",
        "names",
        "_version",
        "itemsize",
        "nbytes",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        *(name for name in dir(Tensor) if name.startswith("is_") and not callable(getattr(Tensor, name))),
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
        "data_ptr",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_conj",
        "is_neg",
        "is_inference",
        "is_pinned",
        "is_shared",
        "is_same_size",
        "__len__",
        "__dir__",
        "__hash__",
        "__format__",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
    ]
)
_FUNCTIONS = frozenset(["_has_compatible_shallow_copy_type", "numel", "is_floating_point", "is_complex", "empty_like", "zeros_like"])
_FUNCTIONS |= {"ones_like", "full_like", "rand_like", "randn_like", "result_type"}
_CONVERSIONS = (Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16)
_set_data: Any = getattr(Tensor.data, "__set__")  # noqa: B009 - stubs of torch have no descriptors
_get_gradient: Any = getattr(Tensor.grad, "__get__")  # noqa: B009
_set_gradient: Any = getattr(Tensor.grad, "__set__")  # noqa: B009
_delete_gradient: Any = getattr(Tensor.grad, "__delete__")  # noqa: B009
_set_requires_grad: Any = getattr(Tensor.requires_grad, "__set__")  # noqa: B009

_Call = Callable[..., Any]
_Rule = Callable[[_Call, tuple[Any, ...], dict[str, Any]], Any]
"""Returns the result of a function of torch with these arguments, without reading values of released tensors, or raises their error."""


def _run(func: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _refuse(func: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    leaves = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and is_released(leaf))
    raise _error_of(next(leaves))


def _error_of(tensor: Tensor, what: str = "values") -> InputError:
    release: _Release = tensor.__dict__[_RELEASED]
    return release.explain(what)


def _of_strides(func: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `func` on a tensor without memory, which has the shape and the strides of before."""
    tensor, *rest = args
    with torch._C.DisableTorchFunctionSubclass():
        like = torch.empty_strided(tensor.shape, tensor.__dict__[_RELEASED].stride, dtype=tensor.dtype, device="meta")
    return func(like, *rest, **kwargs)


def _if(is_harmless: Callable[..., bool]) -> _Rule:
    """Returns the rule that runs a function if its arguments are harmless."""

    def rule(func: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (_run if is_harmless(*args, **kwargs) else _refuse)(func, args, kwargs)

    return rule


def _read_gradient(func: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].requires_grad and not _skips_missing_gradients(sys._getframe(2)):
        raise _error_of(args[0], "gradient")
    return _run(func, args, kwargs)


def _move(func: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the released tensor, on the device to which it is converted, as by `model.cpu()`. Other dtypes are refused."""
    tensor, *rest = args
    if not is_released(tensor):
        _refuse(func, args, kwargs)
    probe = func(torch.empty([0] * tensor.dim(), dtype=tensor.dtype, device=tensor.device), *rest, **kwargs)
    if probe.dtype != tensor.dtype or (isinstance(tensor, DTensor) and probe.device != tensor.device):
        raise _error_of(tensor)
    if probe.device != tensor.device:
        with torch._C.DisableTorchFunctionSubclass(), making_tensors():
            tensor.data = _empty_like(tensor, probe.device)
    return tensor


@cache
def _rules() -> Mapping[Any, _Rule]:
    """Returns the rules of functions that do not read values, or not always. Hooks of a tensor run where its gradient is computed."""
    getters = [getattr(Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(Tensor, name)]
    methods = [getattr(Tensor, name) for name in _METHODS]
    functions = [getattr(torch, name) for name in _FUNCTIONS]
    return {
        **dict.fromkeys((*getters, *methods, *functions, _set_requires_grad, _delete_gradient), _run),
        **dict.fromkeys((Tensor.stride, Tensor.is_contiguous, Tensor.dim_order), _of_strides),
        **dict.fromkeys(_CONVERSIONS, _move),
        _get_gradient: _read_gradient,
        _set_gradient: _if(lambda tensor, gradient: gradient is None),
        _set_data: _if(lambda tensor, data: data is tensor),
        Tensor.type: _if(lambda tensor, *dtype, **options: not dtype and not options),
    }


def _refuse_values(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Runs `func` if it reads no values. Raises the error of the first released tensor otherwise."""
    return _rules().get(func, _refuse)(func, args, kwargs or {})


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


def _refuse_method(tensor: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
    raise _error_of(tensor)


def _repr(tensor: Tensor, *, tensor_contents: Any = None) -> str:
    return f"<released {tensor.__dict__[_RELEASED].kind.__name__}: {list(tensor.shape)} of {tensor.dtype} on {tensor.device}>"


_BYPASSING = ("as_subclass", "__reduce_ex__", "__deepcopy__", "to_local", "full_tensor", "redistribute")
"""Methods that read values without `__torch_function__`."""


@cache
def _released_kind(kind: type) -> type:
    """Returns the class of released tensors of this class."""
    refused = {name: _refuse_method for name in _BYPASSING if hasattr(kind, name)}
    return type(f"Released{kind.__name__}", (kind,), {**refused, "__torch_function__": classmethod(_refuse_values), "__repr__": _repr})


def _look_before(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Runs `func` with tensors of their classes before `guard`, after a look if it reads values."""
    kwargs = kwargs or {}
    guarded = _guarded_in((args, kwargs))
    overwrites = func in _OVERWRITING
    if not overwrites and _rules().get(func) not in (_run, _of_strides, _read_gradient):
        guarded[0].__dict__[_GUARDED].look()
    guards = [(tensor, tensor.__dict__[_GUARDED]) for tensor in guarded if not is_released(tensor)]
    for tensor, _ in guards:
        _end_guard(tensor)
    try:
        result = func(*args, **kwargs)
        if result is None and func == _get_gradient:
            _refuse_gradient(args[0], guards[0][1], sys._getframe(1))
        return result
    finally:
        for tensor, before in guards:
            if not (overwrites and before.is_old and tensor is args[0]):
                guard(tensor, before.look, is_old=before.is_old, explain=before.explain)


def _guarded_in(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor) and _GUARDED in leaf.__dict__]


def _refuse_gradient(tensor: Tensor, guarded: _Guard, frame: FrameType) -> None:
    """Raises the error for a missing gradient that another rank has, unless the function that reads it skips missing gradients."""
    if guarded.explain is not None and tensor.requires_grad and not _skips_missing_gradients(frame):
        raise guarded.explain("gradient")


_OVERWRITING = (Tensor.copy_, Tensor.zero_, Tensor.fill_, _set_data, _set_gradient)
"""Functions that read no values of the tensor that they change."""


def _looking(name: str) -> Callable[..., Any]:
    def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _look_before(type(tensor), lambda tensor: getattr(tensor, name)(*args, **kwargs), (), (tensor,))

    return method


@cache
def _guarded_kind(kind: type) -> type:
    """Returns the class of guarded tensors of this class."""
    looking = {name: _looking(name) for name in _BYPASSING if hasattr(kind, name)}
    return type(f"Guarded{kind.__name__}", (kind,), {**looking, "__torch_function__": classmethod(_look_before)})
