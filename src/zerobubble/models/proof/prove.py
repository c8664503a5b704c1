"""Verifies a cut: runs the cut and the uncut model on an example in float64, and compares the outputs of every part, all gradients,
and the gradients that hooks of the model's code get.

`proved` verifies the model itself if it is small, else a tiny one of its class, and returns the result as a sentence.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.errors import InputError
from zerobubble.models.cutting.cut import ModelCut
from zerobubble.models.observation.copies import copy_of
from zerobubble.models.observation.dataflow import UnitCall
from zerobubble.models.observation.drawn_around import DrawnAround
from zerobubble.models.observation.example import Arguments
from zerobubble.models.observation.gradient_code import GradientCode, uses_parameter_gradients
from zerobubble.models.proof.own_functions import OwnFunctions
from zerobubble.models.proof.stages_alone import REMEDY, StagesAlone, backward
from zerobubble.models.proof.tiny import MOST_PROVED, NoTinyModelError, tiny_models
from zerobubble.runtime.device import generators_restored
from zerobubble.runtime.values.python_places import Place
from zerobubble.runtime.values.python_state import GENERATORS, PythonState, changed, put_back
from zerobubble.runtime.values.random_state import devices_with_generators, states_of
from zerobubble.runtime.values.released import is_released
from zerobubble.runtime.values.stateful import stateful_tensors

_EXACT = (torch.float64, torch.complex128)
_ROUNDING = 1e-14
"""Tolerance for gradients that are 0 up to rounding, relative to the largest gradient of the model. In lower precision, gradients may
differ by the square root of the machine epsilon, because stages sum them in another order.
"""
_TOLERANCE = 1e-9
"""Relative tolerance between cut and uncut: in float64, both run the same operations on the same values."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where torch keeps the hooks of a module."""

StagesOf = Callable[[nn.Module], Sequence[nn.Module]]
"""Returns the stages of a model, sharing its parameters."""


def prove(model: nn.Module, stages_of: StagesOf, cut: ModelCut, arguments: Arguments, *, in_float64: bool = True) -> str:
    """Runs one copy of `model` and the stages of another; raises `InputError` if they differ, naming the first stage that does.

    Both are in float64, or otherwise in the model's own dtypes. A model that draws random numbers, such as for dropout, is compared in
    evaluation mode, since stages draw other numbers than a whole model; in training mode, only the number of gradients that its hooks get
    is compared. Returns why the model could not be compared: it does not run, or draws random numbers even in evaluation mode. Returns an
    empty string after a comparison.
    """
    args, kwargs = pytree.tree_map_only(Tensor, _in_float64, arguments) if in_float64 else arguments
    names = type(model).__name__, "in float64" if in_float64 else "in its own types"
    reason = ""
    for evaluate in (False, True):
        whole, parts = (_copy(model, evaluate=evaluate, in_float64=in_float64) for _ in range(2))
        devices = devices_with_generators(whole, args, kwargs)
        uncut = _Uncut(whole, cut)
        with generators_restored(devices), torch.enable_grad(), uncut.python.restored():
            try:
                draws = _runs_with_draws(uncut, devices, args, kwargs)
            except Exception as error:  # noqa: BLE001 - not every model runs in float64, and an example need not suit the training mode
                reason = f"it does not run on its example {names[1]}: {str(error).partition(chr(10))[0][:200]}"
                continue
            if uncut.code.of_parameters:
                raise uses_parameter_gradients(uncut.code.of_parameters)
            if not draws or uncut.code.has_gradients or uncut.functions:
                with _adding_causes(uncut):
                    _compare(uncut, StagesAlone(stages_of(parts), uncut.python), args, kwargs, names, draws=draws)
            if not draws:
                return ""
            reason = "it draws random numbers even in evaluation mode"
    return reason


def _runs_with_draws(uncut: _Uncut, devices: Sequence[torch.device], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Runs the uncut model, and returns whether it draws random numbers. The stages then begin with the same generators."""
    before = states_of(devices)
    with generators_restored(devices):
        uncut.run(args, kwargs)
        return states_of(devices) != before or uncut.draws


class _Uncut:
    """The `whole` model, with the outputs of its parts in each of its forwards, and its Python state."""

    def __init__(self, whole: nn.Module, cut: ModelCut) -> None:
        self.whole = whole
        self.cut = cut
        self.python = PythonState(whole)
        self.code = GradientCode()
        self.functions = OwnFunctions()
        self.forwards: list[tuple[Noted, Any]] = []
        self.changed: dict[str, Place] = {}
        self.draws = False
        """Whether parts draw from the generators of Python or NumPy. What code around them draws, all stages draw alike."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs a forward and a backward, and a second forward, which sees what the first one has left."""
        before = self.python.snapshot()
        with self.code:
            self._forward(args, kwargs)
        self.functions.watch(self.forwards[0][1])
        backward(_losses(self.forwards[0][1]))
        with torch.no_grad():
            self._forward(args, kwargs)
        self.changed = changed(before)
        put_back(before)

    def shared(self) -> list[str]:
        """Returns the names of what has changed and is used by several stages."""
        units = {unit: self.whole.get_submodule(unit) for unit in self.cut.stage_of}
        used: Counter[int] = Counter()
        for stage in range(self.cut.num_stages):
            others = [unit for name, unit in units.items() if self.cut.stage_of[name] != stage]
            used.update(PythonState(self.whole, left_out=others).owners())
        return [name for name, place in self.changed.items() if used[id(place.owner)] > 1]

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        draws = DrawnAround({name: place for name, place in self.python.generators().items() if name in GENERATORS})
        with _recording_outputs([self.whole], self.cut, draws) as noted:
            output = self.whole(*_copied(args), **_copied(kwargs))
        self.draws |= draws.units_draw
        self.forwards.append((noted, output))


def _compare(
    uncut: _Uncut, stages: StagesAlone, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, str], *, draws: bool
) -> None:
    """Runs the stages as the uncut model ran. If the model draws random numbers, compares only how often code gets gradients."""
    for number, expected in enumerate(uncut.forwards[:1] if draws else uncut.forwards):
        code = GradientCode()
        with _recording_outputs(stages.stages, uncut.cut) as noted, torch.set_grad_enabled(number == 0), code:
            output = stages.forward(_copied(args), _copied(kwargs))
        if not draws:
            _compare_outputs(names, uncut.cut, (noted, output), expected)
        if number == 0:
            functions = OwnFunctions()
            for sent in (*stages.sent, output):
                functions.watch(sent)
            stages.backward(_losses(output))
            _compare_code(uncut, code, functions, draws=draws)
        if number == 0 and not draws:
            _compare_gradients(uncut.whole, stages.stages, names[1])
    if not draws:
        _compare_hooks(uncut, stages.stages)


Noted = dict[UnitCall, list[Tensor]]
"""The floating-point outputs of the calls of units."""


@contextmanager
def _recording_outputs(modules: Sequence[nn.Module], cut: ModelCut, draws: DrawnAround | None = None) -> Iterator[Noted]:
    """Records the outputs of units, and their `draws`: of all units in the whole model, of their own units in stages.

    Outputs of a unit nested inside another unit belong to the outer one.
    """
    noted: Noted = {}
    counts: dict[str, int] = defaultdict(int)
    running: list[str] = []

    def note(unit: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            running.pop()
            if not running:
                if draws is not None:
                    draws.leave_unit(unit)
                noted[UnitCall(unit, counts[unit])] = [tensor.detach().clone() for tensor in _floating(output)]
                counts[unit] += 1

        return hook

    def begin(unit: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if draws is not None and not running:
                draws.leave_code(0)
            running.append(unit)

        return hook

    holder = (lambda stage: modules[stage]) if len(modules) > 1 else (lambda stage: modules[0])
    parts = {unit: holder(stage).get_submodule(unit) for unit, stage in cut.stage_of.items()}
    handles = [part.register_forward_hook(note(unit), prepend=True) for unit, part in parts.items()]
    handles += [part.register_forward_pre_hook(begin(unit)) for unit, part in parts.items()]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


def _copy(model: nn.Module, *, evaluate: bool, in_float64: bool) -> nn.Module:
    copied = copy_of(model).double() if in_float64 else copy_of(model)
    for parameter in copied.parameters():
        parameter.grad = None
    return copied.eval() if evaluate else copied


def _compare_outputs(names: tuple[str, str], cut: ModelCut, ours: tuple[Noted, Any], uncut: tuple[Noted, Any]) -> None:
    """Compares the outputs of the units, in the order of the uncut model, and then the output of the model."""
    (model, types), (tensors_cut, returned), (expected, output) = names, ours, uncut
    for call, tensors in expected.items():
        if _lists_differ(tensors_cut.get(call, []), tensors):
            raise InputError(
                "{model} gives other numbers when cut than uncut, on an example {types}: first stage {stage}, in {call}; {remedy}",
                model=model,
                types=types,
                stage=cut.stage_of[call.unit],
                call=str(call),
                remedy=REMEDY,
            )
    last = cut.num_stages - 1
    if isinstance(output, Mapping) and isinstance(returned, Mapping) and list(returned) != list(output):
        raise InputError(
            "{model} returns {got} from stage {last} when cut, and {expected} uncut; {remedy}",
            model=model,
            got=list(returned),
            last=last,
            expected=list(output),
            remedy=REMEDY,
        )
    if _lists_differ(_floating(returned), _floating(output)):
        raise InputError(
            "{model} gives other numbers when cut than uncut, on an example {types}: first stage {last}, in the output "
            "computed from its parts; {remedy}",
            model=model,
            types=types,
            last=last,
            remedy=REMEDY,
        )


def _losses(output: Any) -> list[Tensor]:
    return [tensor.square().sum() for tensor in _floating(output) if tensor.requires_grad]


def _compare_code(uncut: _Uncut, code: GradientCode, functions: OwnFunctions, *, draws: bool) -> None:
    """Compares the gradients that code of the model gets, or only their numbers if it `draws` random numbers."""
    sizes = [_size(gradient) for gradients in uncut.code.lines.values() for gradient in gradients]
    faults = functions.with_shares(uncut.functions)
    for line in {**uncut.code.lines, **code.lines}:
        expected, ours = (of.lines.get(line, []) for of in (uncut.code, code))
        if len(ours) != len(expected) or not (draws or _match(ours, expected, max(sizes, default=0.0))):
            faults[line] = (len(expected), len(ours))
    if faults:
        raise InputError(
            "stages give other gradients than one device to {code}: a stage has its share of the gradient of a tensor that several use, "
            "and no autograd node of a tensor that it receives",
            code=", ".join(f"{line} ({ours} in stages for {expected})" for line, (expected, ours) in faults.items()),
            remedy="create the tensor in a part, such as a layer, and call that in the forward of the part, which gets the whole gradient",
        )


def _compare_hooks(uncut: _Uncut, stages: Sequence[nn.Module]) -> None:
    """Compares how many hooks the forwards have left on the modules of parts."""
    for unit, stage in uncut.cut.stage_of.items():
        pairs = zip(uncut.whole.get_submodule(unit).named_modules(), stages[stage].get_submodule(unit).modules(), strict=False)
        for (name, module), ours in pairs:
            if _num_hooks(ours) > _num_hooks(module):
                raise InputError(
                    "the model registers a hook on part {part!r} and removes it after stage {stage} has left the forward",
                    part=f"{unit}.{name}".rstrip("."),
                    stage=stage,
                    remedy="remove it in a finally block, which stages run, too, or register it once, before zb.split",
                )


def _num_hooks(module: nn.Module) -> int:
    return sum(len(getattr(module, kind)) for kind in _HOOKS)


def _match(ours: Sequence[Tensor], expected: Sequence[Tensor], largest: float) -> bool:
    """Returns whether these are the same gradients, in any order."""
    left = list(ours)
    for gradient in expected:
        rounding = _rounding(gradient, largest)
        place = next((number for number, other in enumerate(left) if not _differ(other, gradient, rounding)), None)
        if place is None:
            return False
        left.pop(place)
    return True


def _rounding(gradient: Tensor, largest: float) -> float:
    """Returns the absolute tolerance of a gradient, given the size of the largest."""
    return largest * (_ROUNDING if gradient.dtype in _EXACT else torch.finfo(gradient.dtype).eps ** 0.5)


def _compare_gradients(whole: nn.Module, stages: Sequence[nn.Module], types: str) -> None:
    """Compares gradients from the last stage, where the backward pass begins, to the first.

    Stages in this process share a tied parameter, so each has its whole gradient. None counts as zeros. A gradient that is mathematically
    0, such as that of a bias added to all attention scores, consists of rounding error.
    """
    uncut = {name: _gradient(parameter) for name, parameter in whole.named_parameters(remove_duplicate=False)}
    largest = max((_size(gradient) for gradient in uncut.values() if gradient is not None), default=0.0)
    for number, stage in reversed(list(enumerate(stages))):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            ours, other = _gradient(parameter), uncut[name]
            if ours is None and other is None:
                continue
            zeros = torch.zeros_like(parameter)
            if _differ(zeros if ours is None else ours, zeros if other is None else other, _rounding(parameter, largest)):
                raise InputError(
                    "parameter {name!r} of stage {number} has a different gradient than uncut, {types}; {remedy}",
                    name=name,
                    number=number,
                    types=types,
                    remedy=REMEDY,
                )


def _gradient(parameter: Tensor) -> Tensor | None:
    """Returns the gradient of a parameter, converted to dense if an embedding with sparse=True created it."""
    gradient = parameter.grad
    return gradient.to_dense() if gradient is not None and gradient.layout is not torch.strided else gradient


def _size(tensor: Tensor) -> float:
    """Returns the norm of the finite values in `tensor`."""
    size = float(tensor.norm())
    return size if math.isfinite(size) else float(tensor[tensor.isfinite()].norm())


@contextmanager
def _adding_causes(uncut: _Uncut) -> Iterator[None]:
    """Adds to an `InputError` the Python objects by which parts bypass the boundaries of stages."""
    try:
        yield
    except InputError as error:
        shared = uncut.shared()
        if not shared:
            raise
        raise InputError(
            "{error}. A forward changes {shared}, which several stages use, and each rank has its own",
            error=str(error),
            shared=", ".join(shared),
            remedy="let a part return what others need, or pass it as an argument",
        ) from None


def _lists_differ(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(ours) != len(expected) or any(_differ(a, b) for a, b in zip(ours, expected, strict=True))


def _differ(ours: Tensor, expected: Tensor, rounding: float = 0.0) -> bool:
    if ours.shape != expected.shape:
        return True
    if torch.equal(ours, expected):
        return False
    ours, expected = ours.detach(), expected.detach()
    finite = expected.isfinite()
    if not torch.equal(finite, ours.isfinite()) or not torch.equal(ours[~finite].nan_to_num(), expected[~finite].nan_to_num()):
        return True
    difference, size = (ours - expected)[finite].norm(), expected[finite].norm()
    return not bool((difference <= _TOLERANCE * (1e-9 + size) + rounding).item())


def _floating(output: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _copied(arguments: Any) -> Any:
    """Copies the arguments, since some models change their arguments in place."""
    return pytree.tree_map_only(Tensor, Tensor.clone, arguments)


def _in_float64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def proved(
    model: nn.Module,
    whole: Callable[[], nn.Module],
    stages_of: Callable[[nn.Module], list[nn.Module]],
    cut: ModelCut,
    arguments: Arguments,
) -> str:
    """Compares `model` cut by `cut` with the uncut model on these arguments; returns a description of the comparison.

    `whole` creates the model with its weights, and `stages_of` the stages of such a model. Raises `InputError` if they differ.
    """
    is_quantized = any(map(stateful_tensors, model.modules()))
    reason = _why_not_copied(model)
    small = None if reason else whole()
    if small is not None:
        reason = prove(small, stages_of, cut, arguments, in_float64=not is_quantized)
    if not reason:
        types = "its own types, with its quantized weights" if is_quantized else "float64"
        return f"{_PROVED}the model has the same outputs and gradients in {types}."
    tiny, why = _proved_when_tiny(model, stages_of, cut, arguments)
    if tiny:
        return tiny
    if small is not None and not is_quantized and not prove(small, stages_of, cut, arguments, in_float64=False):
        return f"{_PROVED}the model has the same outputs and gradients in its own types, as it does not run in float64."
    return f"Not proved: {reason}, and {why}."


_PROVED = "Proved: cut and uncut, "


def _why_not_copied(model: nn.Module) -> str:
    """Returns why the model itself cannot be proved, empty if it can."""
    if any(map(is_released, model.parameters())):
        return "a pipeline has trained it, and other ranks have parts of its weights"
    size = sum(parameter.numel() for parameter in model.parameters())
    return f"its {size:,} parameters are too many to be copied" if size > MOST_PROVED else ""


def _proved_when_tiny(
    model: nn.Module, stages_of: Callable[[nn.Module], list[nn.Module]], cut: ModelCut, arguments: Arguments
) -> tuple[str, str]:
    """Compares tiny models of the same class; returns a description, empty without a proof, and then why there is none."""
    try:
        for tiny, fitting in tiny_models(model, arguments):
            if not prove(tiny, stages_of, cut, fitting):
                kind = f"a tiny {type(tiny).__name__} of {sum(parameter.numel() for parameter in tiny.parameters()):,} parameters"
                return f"{_PROVED}{kind} has the same outputs and gradients in float64.", ""
    except NoTinyModelError as error:
        return "", str(error)
    return "", "no tiny model of its class runs"
