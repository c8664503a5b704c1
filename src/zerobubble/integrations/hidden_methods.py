"""Refuses subclasses in which methods of an integration would hide those of the user's class behind it."""

from __future__ import annotations

from zerobubble.errors import InputError


def refuse_hidden_methods(cls: type, mixin: type, base: type, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Raises `InputError` if `mixin` replaces a method of a class between it and the framework's `base`.

    Args:
        cls: The class that is made.
        mixin: The integration's class.
        base: The framework's class.
        names: The methods that the mixin replaces.
        known: The methods for which the integration accounts, such as "SFTTrainer.training_step".
    """
    order = list(cls.__mro__)
    if base not in order:
        return
    between = order[order.index(mixin) + 1 : order.index(base)]
    methods = [(f"{kind.__name__}.{name}", name in vars(kind)) for kind in between for name in names]
    if hidden := [method for method, is_hidden in methods if is_hidden and method not in known]:
        raise InputError(
            "{cls} would ignore {got}, since {mixin} comes first and replaces it",
            cls=cls.__name__,
            got=", ".join(hidden),
            mixin=mixin.__name__,
            remedy="derive the class that has it from PipelineTrainer, and let it call super()",
        )
