"""Refuses subclasses in which methods of an integration would hide those of the user's class behind it."""

from __future__ import annotations

import sys
import sysconfig

from zerobubble.errors import InputError


def refuse_hidden_methods(cls: type, mixin: type, base: type, names: tuple[str, ...], accounted: tuple[str, ...]) -> None:
    """Raises `InputError` if `mixin` replaces a method of a class between it and the framework's `base`, or comes after `base`.

    Args:
        cls: The class that is made.
        mixin: The integration's class.
        base: The framework's class.
        names: The methods that the mixin replaces.
        accounted: The methods for which the integration accounts, such as "SFTTrainer.training_step".
    """
    order = list(cls.__mro__)
    if base not in order:
        return
    if order.index(base) < order.index(mixin):
        raise InputError(
            "{cls} would not train in a pipeline, since {base} comes before {mixin}",
            cls=cls.__name__,
            base=base.__name__,
            mixin=mixin.__name__,
            remedy=f"put {mixin.__name__} first",
        )
    between = order[order.index(mixin) + 1 : order.index(base)]
    methods = [(kind, f"{kind.__name__}.{name}") for kind in between for name in names if name in vars(kind)]
    hidden = [(kind, method) for kind, method in methods if method not in accounted]
    if not hidden:
        return
    kind, _ = hidden[0]
    bases = ", ".join(parent.__name__ for parent in (mixin, *kind.__bases__))
    remedy = f"write class {kind.__name__}({bases}), let its methods call super(), and train with it"
    if libraries := [kind for kind, _ in hidden if _is_of_library(kind)]:
        remedy = f"no pipeline trains with {libraries[0].__name__}; derive from PipelineTrainer, and compute its loss in compute_loss"
    raise InputError(
        "{cls} would ignore {got}, since {mixin} comes first and replaces it",
        cls=cls.__name__,
        got=", ".join(method for _, method in hidden),
        mixin=mixin.__name__,
        remedy=remedy,
    )


def _is_of_library(kind: type) -> bool:
    """Returns whether a class is of an installed package, which the user cannot derive from another class."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return file.startswith((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
