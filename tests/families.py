"""Causal language models of Transformers, from the package's own registry: each cut against uncut, and what it needed."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.libraries import library
from tests.tiny import SPECIAL, VOCABULARY, made, model_class, shrunk
from zerobubble.models.cutting.cut import crossings
from zerobubble.models.model_split import ModelSplit

TOLERANCE = 1e-12
NUM_STAGES = 3
NUM_LAYERS = 6


class Outcome(NamedTuple):
    """How a family fares: the relative differences of loss and gradients, and how many parameters are tied; or why it is not cut.

    `needed` lists what its stages share or pass on in addition to the output of one part, and the settings it was given.
    """

    family: str
    loss: float = 0.0
    gradients: float = 0.0
    tied: int = 0
    needed: str = ""
    error: str | None = None


def families() -> list[str]:
    """The families that have a causal language model."""
    library("transformers")
    return list(library("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@contextmanager
def in_double_precision() -> Iterator[None]:
    """Inside, tensors are made in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def tiny_model(family: str, num_layers: int = NUM_LAYERS) -> nn.Module:
    """A model of the family with random weights, in float64."""
    with in_double_precision():
        kind = model_class(family)
        return made(kind, shrunk(kind.config_class, num_layers))


def text() -> tuple[dict[str, Any], Tensor]:
    """Tokens with a 2-D mask that leaves some out."""
    ids = torch.randint(3, VOCABULARY, (8, 10), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[::2, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask}, ids


def next_token_loss(output: Any, ids: Tensor) -> Tensor:
    """The usual loss of a language model."""
    logits = output.logits[:, :-1]
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def outcome_of(family: str) -> Outcome:
    """How the family fares in this process, stage after stage."""
    try:
        model = tiny_model(family)
        plain = copy.deepcopy(model)
        inputs, ids = text()
        with in_double_precision():
            expected = next_token_loss(plain(**inputs, use_cache=False), ids)
        expected.backward()
    except Exception as error:
        return Outcome(family, error=f"not tried: {_in_a_line(error)}")
    try:
        with in_double_precision():
            return _compared(family, model, plain, inputs, ids, expected)
    except zb.InputError as error:
        return Outcome(family, error=f"refused: {_in_a_line(error)}")
    except Exception as error:
        return Outcome(family, error=f"fails: {_in_a_line(error)}")


def _compared(family: str, model: nn.Module, plain: nn.Module, inputs: dict[str, Any], ids: Tensor, expected: Tensor) -> Outcome:
    cut = split_of(model, inputs)
    given: Any = inputs
    stages = [cut(stage, NUM_STAGES) for stage in range(NUM_STAGES)]
    for stage in stages:
        given = stage(**given)
    loss = next_token_loss(given, ids)
    loss.backward()
    held = {name: parameter for stage in stages for name, parameter in stage.named_parameters(remove_duplicate=False)}
    worst = max(
        difference(_gradient(held[name]), _gradient(parameter)) for name, parameter in plain.named_parameters(remove_duplicate=False)
    )
    found = difference(loss, expected)
    error = None if max(found, worst) <= TOLERANCE else f"differs: loss {found:.0e}, gradients {worst:.0e}"
    return Outcome(family, found, worst, len(cut.tied(NUM_STAGES)), "; ".join(_needed(model, cut)), error)


def _needed(model: nn.Module, cut: ModelSplit) -> Iterator[str]:
    """What the model's cut has that a chain of blocks has not, and with what settings it was made."""
    flow, found = cut._flow, cut.cut(NUM_STAGES)
    crossing = crossings(flow, found)
    last = {flow.calls[call].call for call in crossing.last_calls if call is not None}
    far = {call.unit for calls in crossing.arriving for call in calls if call not in last}
    yield from _listed("also passed on", far)
    numbers = {len(flow.calls[call].form.tensors) for calls in crossing.arriving for call in calls}
    if numbers - {1}:
        yield f"a part returns {max(numbers)} tensors"
    yield from _listed("parameters outside the parts", set().union(*found.parameters))
    yield from _listed("called several times", {call.unit for call in flow.calls if call.number})
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    yield from _listed("parts with several names", {names[unit][0] for unit in cut._units.units.values() if len(names[unit]) > 1})
    yield from _listed("changed in place after the part", {call.unit for call, called in flow.calls.items() if called.changed_later})
    if any(name.endswith(".experts") for name, _ in model.named_modules()):
        yield "experts in eager mode"
    kinds = {module.config.model_type for module in model.modules() if hasattr(module, "config")}
    for special in (SPECIAL[kind] for kind in sorted(kinds & SPECIAL.keys())):
        yield f"made with {special.why}"


def _listed(title: str, names: Set[str]) -> Iterator[str]:
    """A title with the `names` in code, of items of one list the first alone."""
    short = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in sorted(names)))
    if short:
        yield f"{title}: {', '.join(f'`{name}`' for name in short)}"


def split_of(model: nn.Module, inputs: dict[str, Any]) -> ModelSplit:
    """The split of a model, with `inputs` as the example where its own does not suit it."""
    try:
        return zb.split(model)
    except zb.InputError as error:
        if "reason" not in error.fields:  # of another error than of the example
            raise
        return zb.split(model, example=inputs)


def _gradient(parameter: Tensor) -> Tensor:
    """The gradient of a parameter, zeros where it has none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def difference(ours: Tensor, other: Tensor) -> float:
    """How far apart two tensors are, relative to the second; infinite where one is not a number."""
    found = ((ours - other).norm() / (other.norm() + 1e-30)).item()
    return found if found == found else float("inf")


def _in_a_line(error: BaseException) -> str:
    line = getattr(error, "fields", {}).get("line", "")  # of the machine
    text = " ".join(str(error).replace(f", in {line}", "").replace(f" in {line}", "").split()).replace("|", "\\|")
    return f"{type(error).__name__}: {text[:600]}"
