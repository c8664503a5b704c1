"""Notes the code of a forward that acts on gradients, such as hooks, which stages or a graph may run otherwise than one device."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from zerobubble.error_reports.text import text_of
from zerobubble.errors import InputError
from zerobubble.runtime.split.layers.weight_work import CAN_SEE_HOOKS

_SET_GRADIENT = vars(torch._C.TensorBase)["grad"].__set__
_OF_GRADIENT, _OF_NODE = (getattr(Tensor, name).__get__ for name in ("grad", "grad_fn"))
_OF_PARAMETERS = {
    Tensor.register_hook: "register_hook",
    Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
    _OF_GRADIENT: ".grad",
    _SET_GRADIENT: ".grad",
}
"""What code may do with the gradient of a parameter, by torch's functions."""
_TORCH = torch.__path__[0]
_DISPATCHES = {"__torch_function__", "handle_torch_function", "register_hook", "register_post_accumulate_grad_hook"}
"""Names of torch's functions between a call and a mode."""
_LIBRARIES = (_TORCH, str(Path(__file__).parents[2]), "<")


def parameter_code(func: Any, args: tuple[Any, ...]) -> str:
    """Returns what a call by the model's code does with the gradient of a parameter, and in which line; empty for other calls."""
    if func not in _OF_PARAMETERS or not isinstance(args[0], nn.Parameter) or _caller().startswith(_TORCH):
        return ""
    return f"{_OF_PARAMETERS[func]} in {line_of_call()}"


def uses_parameter_gradients(calls: Iterable[str]) -> InputError:
    """Returns the error for a forward with such `calls`."""
    return InputError(
        "a forward uses gradients of parameters by {calls}, but several microbatches are between their forward and backward",
        calls=", ".join(dict.fromkeys(calls)),
        remedy="register hooks on parameters once, before zb.split, and read gradients after pipe.step",
    )


class GradientCode(TorchFunctionMode):
    """Notes in `lines` what a forward does to gradients and where, each with the gradients that it gets in the backward pass.

    `of_parameters` are the calls that use gradients of parameters.
    Without `registers`, no hook is registered.
    """

    def __init__(self, *, registers: bool = True) -> None:
        super().__init__()
        self.lines: dict[str, list[Tensor]] = {}
        self.of_parameters: list[str] = []
        self._registers = registers

    @property
    def has_gradients(self) -> bool:
        """Whether code of the forward got gradients."""
        return any(self.lines.values())

    def __enter__(self) -> GradientCode:
        self._outer_hooks = _hooks_on_saved()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call := parameter_code(func, args):
            self.of_parameters.append(call)
        if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            tensor, hook = list(chain(args, (kwargs or {}).values()))
            return self.register(func.__name__, lambda noting: func(tensor, noting), hook)
        if func == Tensor.retain_grad and args[0].requires_grad:
            self.register("retain_grad", args[0].register_hook, _keep)
        elif func == _OF_NODE:
            return self._node(func(*args))
        elif func == _OF_GRADIENT and isinstance(args[0], nn.Parameter) and not _caller().startswith(_TORCH):
            self._note("a parameter's .grad")
        if _hooks_on_saved() not in (None, self._outer_hooks):
            self._note("saved_tensors_hooks")
        return func(*args, **(kwargs or {}))

    def register(self, what: str, register: Callable[[Any], Any], hook: Callable[..., Any]) -> Any:
        """Registers `hook`, and notes the gradients that it gets."""
        gradients = self._note(what)

        def noting(*got: Any) -> Any:
            values = got[-1] if isinstance(got[-1], tuple) else got
            gradients.extend(value.detach().clone() for value in values if isinstance(value, Tensor))
            return hook(*got)

        return register(noting) if self._registers else RemovableHandle(OrderedDict())

    def _note(self, what: str) -> list[Tensor]:
        return self.lines.setdefault(f"{what} in {line_of_call()}", [])

    def _node(self, node: Any) -> Any:
        """Returns what reading the node of a tensor returns: for the model's code, one that notes hooks."""
        if _caller().endswith("torch/utils/hooks.py"):
            self._note("a backward hook of a module")
        return node if node is None or _caller().startswith(_TORCH) else _Node(node, self.register)


class _Node:
    """A node of autograd's graph, with another way to register hooks."""

    def __init__(self, node: Any, register: Callable[..., Any]) -> None:
        self._node = node
        self._register = register

    def register_hook(self, hook: Any) -> Any:
        return self._register("grad_fn.register_hook", self._node.register_hook, hook)

    def register_prehook(self, hook: Any) -> Any:
        return self._register("grad_fn.register_prehook", self._node.register_prehook, hook)

    @property
    def next_functions(self) -> tuple[Any, ...]:
        return tuple((node if node is None else _Node(node, self._register), number) for node, number in self._node.next_functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def _keep(_: Any) -> None:
    """A hook that changes nothing."""


def _hooks_on_saved() -> Any:
    """Returns the innermost hooks on saved tensors, except those of checkpoints; None before torch 2.8, which does not show them."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) if CAN_SEE_HOOKS else None
    return None if hooks is None or hooks[0].__module__ == "torch.utils.checkpoint" else hooks


def _caller() -> str:
    """Returns the file of the innermost code outside of this one that the current call comes from."""
    frame = sys._getframe(2)
    while (frame.f_code.co_filename == __file__ or frame.f_code.co_name in _DISPATCHES) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename


def hooked_module() -> nn.Module | None:
    """Returns the innermost module with a forward hook or pre-hook that is running now, None outside of hooks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_back
        if caller is not None and caller.f_globals.get("__name__") == nn.Module.__module__ and "hook" in caller.f_locals:
            hook = caller.f_locals["hook"]
            while isinstance(hook, functools.partial):
                hook = hook.func
            if frame.f_code is getattr(hook, "__code__", getattr(type(hook).__call__, "__code__", None)):
                module: nn.Module = caller.f_locals["self"]
                return module
        frame = caller
    return None


def line_of_call() -> str:
    """Returns `file:line` of the innermost code outside of torch and this package that the current call comes from."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_LIBRARIES) and frame.f_back is not None:
        frame = frame.f_back
    return text_of(f"{frame.f_code.co_filename}:{frame.f_lineno}")
