"""Tensors and lists that replace values which a rank does not have: every use raises an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zerobubble.errors import InputError

_RESETS = (Tensor.zero_, Tensor.fill_)


class Refusing(Tensor):
    """Replaces a value: raises the error of `refuse` in every use, except that code may reset the value if `may_reset`."""

    refuse: Callable[[], InputError]
    may_reset: bool

    @classmethod
    def made(cls, refuse: Callable[[], InputError], *, may_reset: bool = False) -> Refusing:
        """Returns a tensor with this error."""
        tensor = torch.empty(0, device="cpu").as_subclass(cls)
        tensor.__dict__.update(refuse=refuse, may_reset=may_reset)
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _RESETS and isinstance(args[0], cls) and args[0].__dict__["may_reset"]:
            return args[0]
        raise next(filter(None, map(_refusal_in, tree_leaves((args, kwargs)))))

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name in ("clear", "reset") and self.__dict__["may_reset"]:
            return _nothing
        raise self.__dict__["refuse"]()

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise self.__dict__["refuse"]()


class RefusingList(list[Tensor]):
    """Replaces a list: raises the error of the `Refusing` inside in every use. C code, such as `torch.stack`, reads that itself."""

    def _raise(self, *_: Any) -> Any:
        refusal = _refusal_in(self)
        assert refusal is not None
        raise refusal

    __iter__ = __len__ = __getitem__ = __contains__ = __reversed__ = __add__ = __mul__ = __eq__ = __repr__ = _raise
    append = extend = pop = clear = index = count = copy = reverse = insert = remove = _raise


def _nothing(*_: Any, **__: Any) -> None:
    """Resets nothing."""


def _refusal_in(leaf: Any) -> InputError | None:
    """Returns the error of a `Refusing` or a `RefusingList`, None for any other object."""
    tensor = list.__getitem__(leaf, 0) if isinstance(leaf, RefusingList) else leaf
    return tensor.__dict__["refuse"]() if isinstance(tensor, Refusing) else None
