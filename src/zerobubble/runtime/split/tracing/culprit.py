"""Which part of a module an error came from, so that a refusal can name it."""

from __future__ import annotations

from torch import nn


def culprit(error: BaseException, module: nn.Module) -> str:
    """The name of the submodule of `module` whose code ran last when `error` was raised: empty for the module itself, and for none."""
    names = {part: name for name, part in module.named_modules()}
    found = ""
    traceback = error.__traceback__
    while traceback is not None:
        part = traceback.tb_frame.f_locals.get("self")
        if isinstance(part, nn.Module):
            found = names.get(part, found)
        traceback = traceback.tb_next
    return found
