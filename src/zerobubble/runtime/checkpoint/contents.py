"""The contents of a checkpoint: tensors by key, and everything else as one text.

Every rank writes what it has. What several ranks have, such as replicas, is equal on all of them and is written once.

| key | value |
|---|---|
| `model.NAME` | a parameter or buffer |
| `optimizer.NAME.PATH` | a tensor that the optimizer keeps for a parameter |
| `rank.N.random.DEVICE` | the random state of torch on rank N |
| `rank.N`, `rest` | JSON: what belongs to rank N alone, and to all |

`rest` has the form of each parameter's state, in which tensors stand by their paths, the options of its group, and the optimizer's class.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerobubble.errors import InputError, with_article
from zerobubble.runtime.checkpoint.names import Names
from zerobubble.runtime.checkpoint.nested import paths_in, tensors_in
from zerobubble.runtime.checkpoint.states import ParameterState, groups_of
from zerobubble.runtime.checkpoint.tensor_parts import Mark, Marks, joined, marks_in, part, whole
from zerobubble.runtime.stage.head_part import HeadRows
from zerobubble.runtime.step.optimizers import parameters_of
from zerobubble.runtime.values.sparse import is_sparse
from zerobubble.runtime.values.stateful import stateful_tensors
from zerobubble.units import first_of

FORM = 2
"""The version of this form."""

SavedStates = Mapping[str, Sequence[Any]]
"""By parameter: the form of its state, the options of its group, and the class of the optimizer."""


def parameters_by_name(modules: Mapping[int, nn.Module], names: Names) -> Iterator[tuple[str, nn.Parameter]]:
    """Returns the parameters of a rank, under each of their names in the checkpoint."""
    for stage, module in sorted(modules.items()):
        marks = marks_in(module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield _name(names, stage, name, marks.get(name)), parameter


def state_of(module: nn.Module) -> Mapping[str, Any]:
    """Returns the state of a stage by name, without frozen quantized weights, which come with the base model.

    A `state_dict` that the user has set on the model is for exports, and is not called.
    """
    state = dict(type(module).state_dict(module))
    for path, layer in module.named_modules():
        if any(not tensor.requires_grad for tensor in stateful_tensors(layer).values()):
            kept = {name for name, _ in (*layer.named_parameters(), *layer.named_buffers())} - stateful_tensors(layer).keys()
            prefix = f"{path}." if path else ""
            left_out = [name for name in state if name.startswith(prefix) and name.removeprefix(prefix) not in kept]
            for name in left_out:
                del state[name]
    return state


def model_tensors(modules: Mapping[int, nn.Module], names: Names) -> dict[str, Tensor]:
    """Returns parameters and buffers by key. Raises `InputError` for a state that is not a tensor."""
    tensors = {}
    for stage, module in sorted(modules.items()):
        marks = marks_in(module)
        for name, value in state_of(module).items():
            if not isinstance(value, Tensor):
                message = "{name!r} in the state of stage {stage} is {got}, but a checkpoint holds tensors only"
                raise InputError(message, name=name, stage=stage, got=with_article(type(value).__name__))
            if is_sparse(value):
                raise InputError(
                    "buffer {name!r} of stage {stage} is sparse ({layout}), and a checkpoint holds dense tensors only",
                    name=name,
                    stage=stage,
                    layout=str(value.layout),
                    remedy="register it with persistent=False, and make it again before zb.load, or register its indices and values",
                )
            tensors[f"model.{_name(names, stage, name, marks.get(name))}"] = joined(marks[name], value) if name in marks else value
    return tensors


def stages_of_buffers(modules: Mapping[int, nn.Module], names: Names) -> dict[str, int]:
    """Returns the last stage of this rank that has each buffer, by the keys of `model_tensors`."""
    return {
        f"model.{_name(names, stage, name, None)}": stage
        for stage, module in sorted(modules.items())
        for name, _ in module.named_buffers(remove_duplicate=False)
    }


def model_keys(modules: Mapping[int, nn.Module], names: Names) -> list[str]:
    """Returns the keys of `model_tensors`."""
    return [
        f"model.{_name(names, stage, name, marks.get(name))}"
        for stage, module in modules.items()
        for marks in [marks_in(module)]
        for name in state_of(module)
    ]


def _name(names: Names, stage: int, name: str, mark: Mark | None) -> str:
    """Returns the name in the checkpoint of `name` in a stage. Rows of a head have the name of the head, which belongs to no stage."""
    return mark.name if isinstance(mark, HeadRows) else f"{names.prefix(stage)}{name}"


def optimizer_tensors(named: Mapping[str, nn.Parameter], states: Mapping[nn.Parameter, ParameterState], marks: Marks) -> dict[str, Tensor]:
    """Returns the tensors that the optimizer keeps for each parameter, by key. Raises `InputError` for what cannot be joined."""
    return {
        f"optimizer.{name}.{path}": whole(parameter, name, path, tensor, marks)
        for name, parameter in named.items()
        if parameter in states
        for path, tensor in states[parameter].tensors.items()
    }


def saved_states(rest: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Returns the states of optimizers in a checkpoint. Raises `KeyError` if one of their `tensors` is missing."""
    states: dict[str, Sequence[Any]] = rest["optimizer"]
    for name, (form, *_) in states.items():
        for path in paths_in(form):
            tensors[f"optimizer.{name}.{path}"]
    return states


def refuse_what_is_not_plain(values: Mapping[str, Any]) -> None:
    """Raises `InputError` for values that are not made of numbers, text, lists and dicts."""
    for name, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            message = "{name} is not made of numbers, text, lists and dicts: {reason}"
            remedy = "give tensors and arrays as .item() or .tolist(), or make larger ones buffers of the model" if name == "extra" else ""
            raise InputError(message, name=name, reason=str(error), remedy=remedy) from None


def model_faults(mine: Mapping[str, Tensor], held: Collection[str], saved: Mapping[str, Any]) -> list[str]:
    """Returns why the checkpoint with the tensors `saved` is not one of this model.

    `mine` are the tensors of this rank, `held` the keys of all ranks.
    """
    there = {key for key in saved if key.startswith("model.")}
    faults = []
    for words, keys in (("lacks", set(held) - there), ("has and the model lacks", there - set(held))):
        if keys:
            faults.append(f"it {words} {first_of(sorted(key.removeprefix('model.') for key in keys))}")
    for key, tensor in mine.items():
        if key in saved and saved[key].size != tensor.shape:
            faults.append(f"{key.removeprefix('model.')} is {tuple(saved[key].size)} there and {tuple(tensor.shape)} here")
        elif key in saved and saved[key].properties.dtype != tensor.dtype:
            faults.append(f"{key.removeprefix('model.')} is {saved[key].properties.dtype} there and {tensor.dtype} here")
    return [f"the checkpoint is of another model: {'; '.join(faults[:4])}"] if faults else []


def optimizer_faults(optimizers: Sequence[Optimizer], named: Mapping[str, nn.Parameter], saved: SavedStates) -> list[str]:
    """Returns why `optimizers` cannot load what was saved for parameters by name."""
    held = set(parameters_of(optimizers))
    in_optimizer = {name for name, parameter in named.items() if parameter in held}
    added = [name for name in named if name in in_optimizer - saved.keys()]
    removed = [name for name in named if name in saved.keys() - in_optimizer]
    faults = [f"the optimizer has {name}, which it did not have when it was saved" for name in added[:1]]
    faults += [f"the optimizer lacks {name}, which it had when it was saved" for name in removed[:1]]
    saved_of = {parameter: saved[name] for name, parameter in named.items() if name in saved}
    for number, (optimizer, group) in enumerate(groups_of(optimizers)):
        theirs = [saved_of[parameter] for parameter in group["params"] if parameter in saved_of]
        faults += _group_faults(number, type(optimizer).__name__, theirs)
    return faults


def _group_faults(number: int, optimizer: str, saved: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Yields why a group cannot load what was saved for its parameters: from other optimizers, or with different options."""
    kinds = set(chain.from_iterable(state[2:3] for state in saved))
    if kinds - {optimizer}:
        saved_from = ", ".join(sorted(kinds))
        yield f"group {number} belongs to {optimizer}, and its parameters were saved from {saved_from}: give these optimizers"
    if any(state[1] != saved[0][1] for state in saved):
        yield (
            f"group {number} of the optimizer has parameters that were saved with different options: "
            "create the groups that it had when it was saved"
        )


def optimizer_targets(
    optimizers: Sequence[Optimizer], named: Mapping[str, nn.Parameter], saved: SavedStates, tensors: Mapping[str, Any], marks: Marks
) -> dict[str, Tensor]:
    """Returns tensors to read the saved states of `optimizers` into: their current tensors if they fit, otherwise new ones."""
    state_of = {parameter: optimizer.state.get(parameter, {}) for optimizer in optimizers for parameter in parameters_of([optimizer])}
    targets_by_key = {}
    for name, parameter in named.items():
        if name not in saved or parameter not in state_of:
            continue
        now = dict(tensors_in(dict(state_of[parameter])))
        for path in paths_in(saved[name][0]):
            key = f"optimizer.{name}.{path}"
            there, tensor = now.get(path), tensors[key]
            there = None if there is None else whole(parameter, name, path, there, marks)
            fits = there is not None and there.shape == tensor.size and there.dtype == tensor.properties.dtype
            targets_by_key[key] = there if there is not None and fits else _new(parameter, tensor, marks)
    return targets_by_key


def _new(parameter: nn.Parameter, saved: Any, marks: Marks) -> Tensor:
    """Returns an empty tensor for what an optimizer keeps, sharded like the parameter if it has its shape."""
    dtype, mark = saved.properties.dtype, marks.get(parameter)
    like_parameter = torch.empty_like(parameter.detach(), dtype=dtype)
    like = like_parameter if mark is None else joined(mark, like_parameter)
    return like if saved.size == like.shape else torch.empty(saved.size, dtype=dtype, device="cpu")


def optimizer_states(
    named: Mapping[str, nn.Parameter], targets: Mapping[str, Tensor], saved: SavedStates, marks: Marks
) -> dict[nn.Parameter, ParameterState]:
    """Returns what was read for each parameter."""
    states = {}
    for name, parameter in named.items():
        if name in saved:
            keys = {path: f"optimizer.{name}.{path}" for path in paths_in(saved[name][0])}
            tensors = {path: part(targets[key]) if parameter in marks else targets[key] for path, key in keys.items()}
            states[parameter] = ParameterState(tensors, *saved[name])
    return states


def empty_like_saved(prefix: str, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns empty tensors for what was saved under the key `prefix` and keys that extend it."""
    keys = [key for key in saved if key == prefix or key.startswith(f"{prefix}.")]
    return {key: torch.empty(saved[key].size, dtype=saved[key].properties.dtype, device="cpu") for key in keys}


def as_tensor(value: Any) -> Tensor:
    """Returns a JSON value as a tensor of bytes."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def as_value(tensor: Tensor) -> Any:
    """Returns the JSON value that `as_tensor` was given."""
    return json.loads(bytes(tensor.tolist()))
