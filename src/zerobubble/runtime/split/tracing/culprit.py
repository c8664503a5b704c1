"""Finds the submodule that raised an error, for the error message."""

from __future__ import annotations

from torch import nn


def culprit(error: BaseException, module: nn.Module) -> str:
    """Returns the name of the innermost submodule of `module` in the traceback of `error`, empty for the module itself or none."""
    names = {part: name for name, part in module.named_modules()}
    found = ""
    traceback = error.__traceback__
    while traceback is not None:
        part = traceback.tb_frame.f_locals.get("self")
        if isinstance(part, nn.Module):
            found = names.get(part, found)
        traceback = traceback.tb_next
    return found
